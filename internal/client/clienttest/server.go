// Package clienttest is a server for tests of clients: the REST API over a list of
// made-up sandboxes, and a guest agent that runs commands on this machine.
package clienttest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/proto/filesystem/filesystemconnect"
	"github.com/berm-sandbox/berm/internal/proto/process/processconnect"
)

// Key is the API key that the server takes, Token the one that its agent takes.
const (
	Key   = "e2b_0123456789012345678901234567890123456789"
	Token = "agent-token"
)

// pageSize is small, so that a test of few sandboxes has several pages.
const pageSize = 2

// Server is one server with its sandboxes. All sandboxes share one agent.
type Server struct {
	*httptest.Server
	Home string // where relative paths of the agent begin

	// Started is how many commands the agent was asked to start.
	Started atomic.Int64

	mu        sync.Mutex
	sandboxes []client.Sandbox
	requests  []string
	agent     agent

	// Answers, the same for every sandbox. Change them by Set.
	Policy      berm.Policy
	Logs        []client.LogEntry
	Metrics     []client.Metric
	Exits       map[berm.SandboxID]berm.Exit // of dead sandboxes
	Credentials client.Credentials
	Network     []json.RawMessage // the revisions of the network policy; none is no network
	Explained   string            // what it means, in JSON
	IsE2B       bool              // it tells nothing that E2B does not know
	Snapshots   []client.Snapshot // newest first

	// Refuse says with which status a request is refused; 0 is not at all.
	Refuse func(*http.Request) int
}

// Start starts a server for the time of a test.
func Start(t testing.TB) *Server {
	s := &Server{Home: t.TempDir()}
	s.agent = agent{server: s, processes: map[uint32]*running{}}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v2/sandboxes", s.create)
	mux.HandleFunc("GET /v2/sandboxes", s.list)
	mux.HandleFunc("GET /sandboxes/{id}", s.with(func(w http.ResponseWriter, _ *http.Request, b *client.Sandbox) { reply(w, 200, b) }))
	mux.HandleFunc("GET /berm/v1/sandboxes/{id}", s.inspect)
	mux.HandleFunc("DELETE /sandboxes/{id}", s.with(s.kill))
	mux.HandleFunc("POST /sandboxes/{id}/pause", s.with(s.pause))
	mux.HandleFunc("POST /v2/sandboxes/{id}/connect", s.with(s.connect))
	mux.HandleFunc("GET /sandboxes/{id}/metrics", s.with(s.metrics))
	mux.HandleFunc("GET /v2/sandboxes/{id}/logs", s.with(s.logs))
	mux.HandleFunc("GET /berm/v1/sandboxes/{id}/policy", s.with(func(w http.ResponseWriter, _ *http.Request, _ *client.Sandbox) { reply(w, 200, s.Policy) }))
	mux.HandleFunc("GET /berm/v1/sandboxes/{id}/credentials", s.with(func(w http.ResponseWriter, _ *http.Request, _ *client.Sandbox) { reply(w, 200, s.Credentials) }))
	mux.HandleFunc("GET /berm/v1/sandboxes/{id}/network", s.with(s.network))
	mux.HandleFunc("PUT /berm/v1/sandboxes/{id}/network", s.with(s.setNetwork))
	mux.HandleFunc("GET /berm/v1/sandboxes/{id}/network/explain", s.with(s.network))
	mux.HandleFunc("GET /berm/v1/sandboxes/{id}/network/log", s.with(func(w http.ResponseWriter, _ *http.Request, _ *client.Sandbox) {
		reply(w, 200, map[string]any{"events": []client.FlowEvent{}})
	}))
	mux.HandleFunc("POST /sandboxes/{id}/snapshots", s.with(s.snapshot))
	mux.HandleFunc("GET /snapshots", s.snapshots)
	mux.HandleFunc("DELETE /templates/{ref}", s.deleteSnapshot)
	mux.HandleFunc("POST /sandboxes/{id}/fork", s.with(s.fork))
	mux.HandleFunc("POST /berm/v1/sandboxes/{id}/rollback", s.with(func(w http.ResponseWriter, _ *http.Request, b *client.Sandbox) { reply(w, 200, b) }))
	mux.HandleFunc("POST /berm/v1/sandboxes/{id}/changes", s.with(func(w http.ResponseWriter, _ *http.Request, _ *client.Sandbox) {
		reply(w, 200, client.Looked{Outcome: audit.OK, Data: audit.Changes{At: "request", Changes: []audit.Change{{Path: "srv/f", Op: "add", Kind: "file"}}}})
	}))
	mux.HandleFunc("POST /berm/v1/sandboxes/{id}/erase", func(w http.ResponseWriter, r *http.Request) {
		var in struct {
			Reason string
			DryRun bool
		}
		_ = json.NewDecoder(r.Body).Decode(&in)
		done := trail.Erasure{Sandbox: berm.SandboxID(r.PathValue("id")), Reason: in.Reason, Records: 12, Contents: 3, Bytes: 4711, Named: 2}
		if !in.DryRun {
			done.By = 99
		}
		reply(w, 200, done)
	})
	mux.HandleFunc("GET /templates", func(w http.ResponseWriter, _ *http.Request) {
		reply(w, 200, []map[string]any{{"templateID": "t0", "aliases": []string{"base"}}, {"templateID": "t1", "aliases": []string{}}})
	})
	inside := http.NewServeMux()
	inside.Handle(processconnect.NewProcessHandler(&s.agent))
	inside.Handle(filesystemconnect.NewFilesystemHandler(&s.agent))
	inside.HandleFunc("/files", s.agent.files)
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.requests = append(s.requests, r.Method+" "+r.URL.RequestURI())
		refused := s.Refuse
		s.mu.Unlock()
		if refused != nil {
			if status := refused(r); status != 0 {
				refuse(w, status, "refused by the test")
				return
			}
		}
		if id := r.Header.Get("E2b-Sandbox-Id"); id != "" {
			s.toAgent(w, r, id, inside)
			return
		}
		if r.Header.Get("X-API-Key") != Key {
			refuse(w, 401, "Invalid API key")
			return
		}
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(func() {
		s.agent.killAll()
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

// Client is a client of the server.
func (s *Server) Client(t testing.TB) *client.Client {
	c, err := client.New(client.Config{URL: s.URL, Key: Key})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Add puts a sandbox in; fields that are not set get sensible values.
func (s *Server) Add(b client.Sandbox) client.Sandbox {
	if b.ID == "" {
		b.ID = berm.NewSandboxID()
	}
	if b.State == "" {
		b.State = berm.Running
	}
	if b.TemplateID == "" {
		b.TemplateID, b.Alias = "t0", "base"
	}
	if b.StartedAt.IsZero() {
		b.StartedAt = time.Now().Add(-time.Minute).Truncate(time.Millisecond)
		b.EndAt = b.StartedAt.Add(5 * time.Minute)
	}
	b.CPUCount, b.MemoryMB, b.AgentVersion, b.AgentToken = 2, 512, berm.AgentVersion, Token
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.IsE2B && b.Berm == nil {
		b.Berm = &client.Additions{Level: berm.Namespace, Network: "none"}
	}
	s.sandboxes = append([]client.Sandbox{b}, s.sandboxes...)
	return b
}

// Set changes the server's answers.
func (s *Server) Set(change func(*Server)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s)
}

// Edit changes a sandbox.
func (s *Server) Edit(id berm.SandboxID, change func(*client.Sandbox)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b := s.find(id); b != nil {
		change(b)
	}
}

// Remove takes a sandbox away and ends its streams.
func (s *Server) Remove(id berm.SandboxID) {
	s.mu.Lock()
	for i, b := range s.sandboxes {
		if b.ID == id {
			s.sandboxes = append(s.sandboxes[:i:i], s.sandboxes[i+1:]...)
			break
		}
	}
	s.mu.Unlock()
	s.CloseClientConnections()
}

// Requests returns what was asked for so far.
func (s *Server) Requests() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.requests...)
}

func (s *Server) find(id berm.SandboxID) *client.Sandbox {
	for i := range s.sandboxes {
		if s.sandboxes[i].ID == id {
			return &s.sandboxes[i]
		}
	}
	return nil
}

func (s *Server) toAgent(w http.ResponseWriter, r *http.Request, id string, agent http.Handler) {
	s.mu.Lock()
	b := s.find(berm.SandboxID(id))
	gone := b == nil || b.State != berm.Running
	s.mu.Unlock()
	switch {
	case gone:
		reply(w, 502, map[string]any{"sandboxId": id, "message": "The sandbox was not found", "code": 502})
	case r.Header.Get("X-Access-Token") != Token || r.Header.Get("X-API-Key") != "":
		refuse(w, 401, "unauthorized access, please provide a valid access token or method signing if supported")
	default:
		agent.ServeHTTP(w, r)
	}
}

// with finds the sandbox of a request. It holds the lock meanwhile.
func (s *Server) with(do func(http.ResponseWriter, *http.Request, *client.Sandbox)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		b := s.find(berm.SandboxID(r.PathValue("id")))
		if b == nil {
			refuse(w, 404, fmt.Sprintf("Sandbox %q not found", r.PathValue("id")))
			return
		}
		do(w, r, b)
	}
}

func (s *Server) network(w http.ResponseWriter, r *http.Request, _ *client.Sandbox) {
	if len(s.Network) == 0 {
		refuse(w, 404, "no network")
		return
	}
	w.Header().Set("ETag", strconv.Quote(strconv.Itoa(len(s.Network))))
	if strings.HasSuffix(r.URL.Path, "/explain") {
		reply(w, 200, json.RawMessage(s.Explained))
		return
	}
	reply(w, 200, s.Network[len(s.Network)-1])
}

func (s *Server) setNetwork(w http.ResponseWriter, r *http.Request, _ *client.Sandbox) {
	if match := r.Header.Get("If-Match"); match != "" && match != strconv.Quote(strconv.Itoa(len(s.Network))) {
		refuse(w, 412, "the network policy was changed meanwhile")
		return
	}
	var document json.RawMessage
	if err := json.NewDecoder(r.Body).Decode(&document); err != nil {
		refuse(w, 400, err.Error())
		return
	}
	s.Network = append(s.Network, document)
	reply(w, 200, map[string]any{"revision": len(s.Network), "warnings": []string{"a rule is never reached"}})
}

func (s *Server) create(w http.ResponseWriter, r *http.Request) {
	var body struct {
		TemplateID string
		Timeout    *int
		Metadata   map[string]string
		AutoPause  bool
		AutoResume struct{ Enabled bool }
		Berm       struct {
			Policy      json.RawMessage
			Checkpoints *client.Checkpoints
		}
	}
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		refuse(w, 400, "Error when parsing request: "+err.Error())
		return
	}
	if body.TemplateID != "base" {
		refuse(w, 404, "template '"+body.TemplateID+"' not found")
		return
	}
	if body.Berm.Policy != nil {
		s.mu.Lock()
		s.Network = append(s.Network, body.Berm.Policy)
		s.mu.Unlock()
	}
	life := &client.Lifecycle{OnTimeout: berm.KillAtDeadline, AutoResume: body.AutoResume.Enabled}
	if body.AutoPause {
		life.OnTimeout = berm.PauseAtDeadline
	}
	timeout := 300
	if body.Timeout != nil {
		timeout = *body.Timeout
	}
	now := time.Now()
	made := client.Sandbox{Metadata: body.Metadata, Lifecycle: life, StartedAt: now, EndAt: now.Add(time.Duration(timeout) * time.Second)}
	if c := body.Berm.Checkpoints; c != nil { // one was taken, two were missed
		_ = json.Unmarshal([]byte(`{"at":"2026-01-02T03:04:05Z","checkpoint":"exec","reason":"no room","count":2}`), &c.Missed)
		made.Berm = &client.Additions{Level: berm.Namespace, Checkpoints: c}
	}
	made = s.Add(made)
	if made.Berm != nil && made.Berm.Checkpoints != nil {
		snap := client.Snapshot{ID: "taken:default", Names: []string{}}
		snap.Berm.SandboxID, snap.Berm.CreatedAt, snap.Berm.Checkpoint = made.ID, now, "exec"
		s.mu.Lock()
		s.Snapshots = append(s.Snapshots, snap)
		s.mu.Unlock()
	}
	reply(w, 201, made)
}

func (s *Server) list(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	once, err := url.QueryUnescape(query.Get("metadata"))
	if err != nil {
		refuse(w, 400, err.Error())
		return
	}
	wanted, err := url.ParseQuery(once)
	if err != nil {
		refuse(w, 400, err.Error())
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	found := []client.Sandbox{}
next:
	for _, b := range s.sandboxes {
		if states := query.Get("state"); states != "" && !strings.Contains(","+states+",", ","+string(b.State)+",") {
			continue
		}
		for k := range wanted {
			if b.Metadata[k] != wanted.Get(k) {
				continue next
			}
		}
		found = append(found, b)
	}
	skip, _ := strconv.Atoi(query.Get("nextToken"))
	found = found[min(skip, len(found)):]
	if len(found) > pageSize {
		found = found[:pageSize]
		w.Header().Set("X-Next-Token", strconv.Itoa(skip+pageSize))
	}
	reply(w, 200, found)
}

func (s *Server) kill(w http.ResponseWriter, _ *http.Request, b *client.Sandbox) {
	for i := range s.sandboxes {
		if s.sandboxes[i].ID == b.ID {
			s.sandboxes = append(s.sandboxes[:i:i], s.sandboxes[i+1:]...)
			break
		}
	}
	w.WriteHeader(http.StatusNoContent)
}

// inspect knows the sandboxes of Exits too.
func (s *Server) inspect(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	exit, dead := s.Exits[berm.SandboxID(r.PathValue("id"))]
	s.mu.Unlock()
	if dead {
		reply(w, 200, client.Sandbox{ID: berm.SandboxID(r.PathValue("id")), State: berm.Killed, Exit: &exit})
		return
	}
	s.with(func(w http.ResponseWriter, _ *http.Request, b *client.Sandbox) { reply(w, 200, b) })(w, r)
}

func (s *Server) pause(w http.ResponseWriter, _ *http.Request, b *client.Sandbox) {
	if b.State != berm.Running {
		refuse(w, 409, "Sandbox is paused already")
		return
	}
	b.State = berm.Paused
	w.WriteHeader(http.StatusNoContent)
}

func (s *Server) connect(w http.ResponseWriter, _ *http.Request, b *client.Sandbox) {
	status := 200
	if b.State == berm.Paused {
		b.State, status = berm.Running, 201
	}
	reply(w, status, b)
}

func (s *Server) snapshot(w http.ResponseWriter, r *http.Request, b *client.Sandbox) {
	var body struct{ Name string }
	_ = json.NewDecoder(r.Body).Decode(&body)
	snap := client.Snapshot{ID: fmt.Sprintf("t%d:default", len(s.Snapshots)), Names: []string{}}
	if body.Name != "" {
		snap.ID, snap.Names = body.Name+":default", []string{body.Name + ":default"}
	}
	snap.Berm.SandboxID, snap.Berm.CreatedAt, snap.Berm.Keeps, snap.Berm.Size = b.ID, time.Now(), []string{"files"}, 1<<20
	s.Snapshots = append([]client.Snapshot{snap}, s.Snapshots...)
	reply(w, 201, snap)
}

// snapshots gives one snapshot on a page.
func (s *Server) snapshots(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	of := berm.SandboxID(r.URL.Query().Get("sandboxID"))
	skip, _ := strconv.Atoi(r.URL.Query().Get("nextToken"))
	found := []client.Snapshot{}
	for _, snap := range s.Snapshots {
		if of == "" || snap.Berm.SandboxID == of {
			found = append(found, snap)
		}
	}
	found = found[min(skip, len(found)):]
	if len(found) > 1 {
		found = found[:1]
		w.Header().Set("X-Next-Token", strconv.Itoa(skip+1))
	}
	reply(w, 200, found)
}

func (s *Server) deleteSnapshot(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, snap := range s.Snapshots {
		if snap.ID == r.PathValue("ref") {
			s.Snapshots = append(s.Snapshots[:i:i], s.Snapshots[i+1:]...)
			w.WriteHeader(http.StatusNoContent)
			return
		}
	}
	refuse(w, 404, "snapshot not found")
}

// fork makes children, of which every second fails.
func (s *Server) fork(w http.ResponseWriter, r *http.Request, b *client.Sandbox) {
	var body struct{ Count int }
	_ = json.NewDecoder(r.Body).Decode(&body)
	forks := []map[string]any{}
	for i := range body.Count {
		if i%2 == 1 {
			forks = append(forks, map[string]any{"error": map[string]any{"code": 429, "message": "no room"}})
			continue
		}
		child := *b
		child.ID, child.StartedAt, child.Berm = berm.NewSandboxID(), time.Now(), &client.Additions{Parent: b.ID}
		s.sandboxes = append(s.sandboxes, child)
		forks = append(forks, map[string]any{"sandbox": child})
	}
	reply(w, 201, forks)
}

func (s *Server) metrics(w http.ResponseWriter, r *http.Request, _ *client.Sandbox) {
	start, _ := strconv.ParseInt(r.URL.Query().Get("start"), 10, 64)
	found := []client.Metric{}
	for _, m := range s.Metrics {
		if m.Timestamp.Unix() >= start {
			found = append(found, m)
		}
	}
	reply(w, 200, found)
}

func (s *Server) logs(w http.ResponseWriter, r *http.Request, _ *client.Sandbox) {
	cursor, _ := strconv.ParseInt(r.URL.Query().Get("cursor"), 10, 64)
	limit, _ := strconv.Atoi(r.URL.Query().Get("limit"))
	found := []client.LogEntry{}
	for _, e := range s.Logs {
		if e.Timestamp.UnixMilli() >= cursor && len(found) < limit {
			found = append(found, e)
		}
	}
	reply(w, 200, map[string]any{"logs": found})
}

func reply(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

func refuse(w http.ResponseWriter, status int, message string) {
	reply(w, status, map[string]any{"code": status, "message": message})
}
