// Package enginetest is an engine in memory whose sandboxes can be told to fail, for
// the tests of what is built on engines.
package enginetest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/berm-sandbox/berm"
)

// Engine is an engine in memory.
type Engine struct {
	// Ports are the servers inside each sandbox, beside an agent that remembers what it was told
	// (Told). It is set before the first sandbox.
	Ports map[uint16]http.Handler
	// Created is called when a sandbox was made; it may be nil.
	Created func()
	// Memory has snapshots keep memory, of which there is none.
	Memory bool
	// Unlimited and Degraded are what Probe tells.
	Unlimited map[string]string
	Degraded  []string

	mu        sync.Mutex
	failing   func(id berm.SandboxID, method string) error
	sandboxes map[berm.SandboxID]*state
	Removed   []berm.SandboxID // what Remove was called for
	Specs     []berm.Spec      // what Create was called with
}

// Fail sets what is asked before each call, by the method's name. A non-nil error is
// the call's result.
func (e *Engine) Fail(failing func(id berm.SandboxID, method string) error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.failing = failing
}

func (e *Engine) fail(id berm.SandboxID, method string) error {
	e.mu.Lock()
	failing := e.failing
	e.mu.Unlock()
	if failing == nil {
		return nil
	}
	return failing(id, method)
}

// Create makes a sandbox at once.
func (e *Engine) Create(ctx context.Context, spec berm.Spec) (berm.Sandbox, error) {
	if err := e.fail(spec.ID, "Create"); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, berm.Errorf(berm.Unavailable, "create: %w", err)
	}
	if spec.From != "" {
		if _, err := os.Stat(filepath.Join(spec.From, "saved")); err != nil {
			return nil, berm.Errorf(berm.NotFound, "the snapshot is not there: %w", err)
		}
	}
	if spec.Memory {
		if _, err := os.Stat(filepath.Join(spec.From, "memory")); err != nil {
			return nil, berm.Errorf(berm.NotFound, "the memory is not there: %w", err)
		}
	}
	s := &state{engine: e, id: spec.ID, spec: spec, status: berm.Status{State: berm.Running, OnDeadline: spec.OnDeadline, Agent: 1}}
	s.setDeadline(spec.Deadline)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.sandboxes == nil {
		e.sandboxes = map[berm.SandboxID]*state{}
	}
	e.sandboxes[spec.ID] = s
	e.Specs = append(e.Specs, spec)
	if e.Created != nil {
		e.Created()
	}
	return &handle{s}, nil
}

func (e *Engine) find(id berm.SandboxID) *state {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.sandboxes[id]
}

// Open finds a sandbox again.
func (e *Engine) Open(_ context.Context, id berm.SandboxID) (berm.Sandbox, error) {
	if err := e.fail(id, "Open"); err != nil {
		return nil, err
	}
	if s := e.find(id); s != nil && s.alive() {
		return &handle{s}, nil
	}
	return nil, berm.Errorf(berm.NotFound, "sandbox %s was not found", id)
}

// List names the sandboxes, dead ones that were not removed too.
func (e *Engine) List(context.Context) ([]berm.SandboxID, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Sorted(maps.Keys(e.sandboxes)), nil
}

// Remove forgets a sandbox and tells how it ended.
func (e *Engine) Remove(_ context.Context, id berm.SandboxID) (berm.Exit, error) {
	if err := e.fail(id, "Remove"); err != nil {
		return berm.Exit{}, err
	}
	s := e.find(id)
	if s != nil && s.alive() {
		return berm.Exit{}, berm.Errorf(berm.Conflict, "sandbox %s lives", id)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.sandboxes, id)
	e.Removed = append(e.Removed, id)
	if s == nil {
		return berm.Exit{}, nil
	}
	return s.die(berm.ReasonCrash), nil
}

// Probe finds the namespace level.
func (e *Engine) Probe(context.Context) []berm.Probe {
	return []berm.Probe{{Level: berm.Namespace, Usable: true, Unlimited: e.Unlimited, Degraded: e.Degraded, Memory: e.Memory}}
}

// End makes a sandbox die by itself.
func (e *Engine) End(id berm.SandboxID, reason berm.Reason) {
	if s := e.find(id); s != nil {
		s.die(reason)
	}
}

// LoseMonitor closes the event streams of a sandbox without a word.
func (e *Engine) LoseMonitor(id berm.SandboxID) {
	s := e.find(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropWatchers()
}

// RestartAgent makes the sandbox report another generation of its agent.
func (e *Engine) RestartAgent(id berm.SandboxID) {
	s := e.find(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status.Agent++
	s.report()
}

// state is one sandbox. Handles on it come and go.
type state struct {
	kept   *os.File // by Keep
	told   []berm.GuestConfig
	engine *Engine
	id     berm.SandboxID
	spec   berm.Spec

	mu       sync.Mutex
	written  int // how often something was
	status   berm.Status
	timer    *time.Timer
	watchers []chan berm.Status
	conns    []net.Conn
}

func (s *state) alive() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status.State != berm.Killed
}

// report tells the watchers. The caller holds s.mu.
func (s *state) report() {
	for _, w := range s.watchers {
		w <- s.status // has room: see Events
	}
}

func (s *state) dropWatchers() {
	for _, w := range s.watchers {
		close(w)
	}
	s.watchers = nil
}

func (s *state) setDeadline(deadline time.Time) {
	if s.timer != nil {
		s.timer.Stop()
	}
	s.status.Deadline = deadline
	if !deadline.IsZero() {
		s.timer = time.AfterFunc(time.Until(deadline), s.deadlinePassed)
	}
}

func (s *state) deadlinePassed() {
	s.mu.Lock()
	if s.status.State != berm.Running || time.Now().Before(s.status.Deadline) {
		s.mu.Unlock()
		return
	}
	if s.status.OnDeadline == berm.PauseAtDeadline {
		s.status.State = berm.Paused
		s.report()
		s.mu.Unlock()
		return
	}
	s.mu.Unlock()
	s.die(berm.ReasonTimeout)
}

func (s *state) die(reason berm.Reason) berm.Exit {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status.State == berm.Killed {
		return *s.status.Exit
	}
	if s.timer != nil {
		s.timer.Stop()
	}
	s.status.State = berm.Killed
	s.status.Exit = &berm.Exit{Reason: reason, Code: -1, Signal: "SIGKILL", At: time.Now()}
	s.report()
	s.dropWatchers()
	for _, c := range s.conns {
		c.Close()
	}
	return *s.status.Exit
}

// handle is a berm.Sandbox on a state.
type handle struct{ *state }

func (h *handle) ID() berm.SandboxID { return h.id }
func (h *handle) Close() error       { return nil }

// in runs do under the lock, unless the call is to fail or the sandbox is dead.
func (h *handle) in(method string, do func() error) error {
	if err := h.engine.fail(h.id, method); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.status.State == berm.Killed {
		return berm.Errorf(berm.NotFound, "sandbox %s is dead", h.id)
	}
	return do()
}

func (h *handle) Dial(_ context.Context, port uint16) (conn net.Conn, err error) {
	err = h.in("Dial", func() error {
		if h.status.State == berm.Paused {
			return berm.Errorf(berm.Conflict, "sandbox %s is paused", h.id)
		}
		handler := h.engine.Ports[port]
		if handler == nil && port == berm.AgentPort {
			handler = http.HandlerFunc(h.listen)
		}
		if handler == nil {
			return berm.Errorf(berm.Unavailable, "nothing listens on port %d", port)
		}
		client, server := net.Pipe()
		h.conns = append(h.conns, client, server)
		go serve(server, handler)
		conn = client
		return nil
	})
	return conn, err
}

// listen is the agent.
func (h *handle) listen(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/init" {
		http.NotFound(w, r)
		return
	}
	var told berm.GuestConfig
	if err := json.NewDecoder(r.Body).Decode(&told); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.told = append(h.told, told)
	w.WriteHeader(http.StatusNoContent)
}

// Told is what the agent of a sandbox was told, in order.
func (e *Engine) Told(id berm.SandboxID) []berm.GuestConfig {
	e.mu.Lock()
	s := e.sandboxes[id]
	e.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.told)
}

// serve speaks HTTP on one connection, also HTTP/2 with prior knowledge.
func serve(conn net.Conn, handler http.Handler) {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	once := make(chan net.Conn, 1)
	once <- conn
	close(once)
	server := &http.Server{Handler: handler, Protocols: &protocols}
	_ = server.Serve(listener(once)) // ends with EOF after the one
}

type listener chan net.Conn

func (l listener) Accept() (net.Conn, error) {
	if c, ok := <-l; ok {
		return c, nil
	}
	return nil, io.EOF
}
func (l listener) Close() error   { return nil }
func (l listener) Addr() net.Addr { return &net.UnixAddr{} }

func (h *handle) Pause(context.Context) error {
	return h.in("Pause", func() error {
		if h.status.State == berm.Paused {
			return berm.Errorf(berm.Conflict, "sandbox %s is paused", h.id)
		}
		h.status.State = berm.Paused
		h.report()
		return nil
	})
}

func (h *handle) Resume(_ context.Context, deadline time.Time) error {
	return h.in("Resume", func() error {
		if h.status.State != berm.Paused {
			return berm.Errorf(berm.Conflict, "sandbox %s runs", h.id)
		}
		h.status.State = berm.Running
		h.setDeadline(deadline)
		h.report()
		return nil
	})
}

func (h *handle) SetDeadline(_ context.Context, deadline time.Time) error {
	return h.in("SetDeadline", func() error {
		if h.status.State != berm.Running {
			return berm.Errorf(berm.Conflict, "sandbox %s is paused", h.id)
		}
		h.setDeadline(deadline)
		h.report()
		return nil
	})
}

func (h *handle) Status(context.Context) (status berm.Status, err error) {
	err = h.in("Status", func() error { status = h.status; return nil })
	return status, err
}

func (h *handle) Usage(context.Context) (usage berm.Usage, err error) {
	err = h.in("Usage", func() error {
		usage = berm.Usage{At: time.Now(), CPUs: 2, MemoryUsed: 1 << 20, MemoryTotal: 1 << 30, DiskTotal: 1 << 31}
		return nil
	})
	return usage, err
}

func (h *handle) Policy(context.Context) (policy berm.Policy, err error) {
	err = h.in("Policy", func() error {
		policy = berm.Policy{
			Level: berm.Namespace, Namespaces: []string{"user"}, Capabilities: []string{}, Mounts: []string{},
			Limits: h.spec.Limits, Network: "none", Degraded: slices.Concat(h.engine.Degraded, h.spec.Degraded),
		}
		return nil
	})
	return policy, err
}

// Link returns a file that stands for the link of a sandbox that was made with one.
func (h *handle) Link(context.Context) (link *os.File, err error) {
	err = h.in("Link", func() error {
		if !h.spec.Link {
			return berm.Errorf(berm.Unsupported, "sandbox %s was made without a link", h.id)
		}
		link, err = os.Open(os.DevNull)
		return err
	})
	return link, err
}

// Keep keeps a descriptor in this process.
func (h *handle) Keep(_ context.Context, file *os.File) error {
	return h.in("Keep", func() error {
		fd, err := syscall.Dup(int(file.Fd()))
		if err == nil {
			h.kept = os.NewFile(uintptr(fd), "kept")
		}
		return err
	})
}

// Kept returns it.
func (h *handle) Kept(context.Context) (file *os.File, err error) {
	err = h.in("Kept", func() error {
		if h.kept == nil {
			return nil
		}
		fd, err := syscall.Dup(int(h.kept.Fd()))
		if err == nil {
			file = os.NewFile(uintptr(fd), "kept")
		}
		return err
	})
	return file, err
}

// Writable fails: nothing is written anywhere.
func (h *handle) Writable(context.Context) (berm.Writable, error) {
	return nil, berm.Errorf(berm.Unsupported, "a sandbox in memory writes nothing")
}

// Snapshot saves the id of the sandbox: nothing is written anywhere.
func (h *handle) Snapshot(_ context.Context, dir string, memory bool) (saved berm.Saved, err error) {
	err = h.in("Snapshot", func() error {
		if memory && !h.engine.Memory {
			return berm.Errorf(berm.Unsupported, "a sandbox in memory has none to save")
		}
		saved.Size, saved.Memory = 4096, memory
		if memory {
			if err := os.WriteFile(filepath.Join(dir, "memory"), nil, 0o600); err != nil {
				return err
			}
		}
		return os.WriteFile(filepath.Join(dir, "saved"), []byte(h.id), 0o600)
	})
	return saved, err
}

// Version counts what Write wrote.
func (h *handle) Version(context.Context) (version string, err error) {
	err = h.in("Version", func() error { version = fmt.Sprintf("%p-%d", h.state, h.written); return nil })
	return version, err
}

// Write stands for something that a sandbox writes to its disk.
func (e *Engine) Write(id berm.SandboxID) {
	s := e.find(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.written++
}

func (h *handle) Events(ctx context.Context) (<-chan berm.Status, error) {
	// Room for more than any test reports, so that report never waits.
	events := make(chan berm.Status, 10000)
	err := h.in("Events", func() error { h.watchers = append(h.watchers, events); return nil })
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if i := slices.Index(h.watchers, events); i >= 0 {
			h.watchers = slices.Delete(h.watchers, i, i+1)
			close(events)
		}
	})
	return events, nil
}

func (h *handle) Kill(_ context.Context, reason berm.Reason) (berm.Exit, error) {
	if err := h.engine.fail(h.id, "Kill"); err != nil {
		return berm.Exit{}, err
	}
	exit := h.die(reason)
	h.engine.mu.Lock()
	delete(h.engine.sandboxes, h.id)
	h.engine.mu.Unlock()
	return exit, nil
}

// Templates is a template store that holds "base" only.
type Templates struct{}

// Base is the template that Templates holds.
var Base = berm.Template{
	ID: "basetemplate00000000", BuildID: "00000000-0000-4000-8000-000000000000", Names: []string{"base"},
	Limits: berm.Limits{Memory: 1 << 30, CPU: 2, PIDs: 1024, Disk: 2 << 30},
	User:   "user", Workdir: "/home/user", Env: map[string]string{"LANG": "C.UTF-8"}, Setuid: true, Public: true,
	CreatedAt: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Size: 1 << 28,
}

// Resolve finds Base by its id or name.
func (Templates) Resolve(_ context.Context, _ berm.Team, ref string) (berm.Template, error) {
	if ref == string(Base.ID) || ref == "base" || ref == "base:default" {
		return Base, nil
	}
	return berm.Template{}, berm.Errorf(berm.NotFound, "template '%s' not found", ref)
}

// List returns Base.
func (Templates) List(context.Context) ([]berm.Template, error) { return []berm.Template{Base}, nil }

// Log is an io.Writer for logs that keeps them, for tests that read them.
type Log struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}
