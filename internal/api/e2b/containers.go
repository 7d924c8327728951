package e2b

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"mime"
	"mime/multipart"
	"net/http"
	"net/netip"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/container"
	"github.com/berm-sandbox/berm/internal/control"
	"github.com/berm-sandbox/berm/internal/network/policy"
)

// Containers have the fields, words and lists of the hosted API that they are modelled on
// (https://platform.openai.com/docs/api-reference/containers), so that its clients can be pointed at
// /berm/v1. thread_id, berm, contexts and executions are Berm's own.

type newContainer struct {
	Name          string          `json:"name,omitempty"`
	Thread        string          `json:"thread_id,omitempty"`
	ExpiresAfter  *expiresAfter   `json:"expires_after,omitempty"`
	MemoryLimit   string          `json:"memory_limit,omitempty"`
	NetworkPolicy *allowlist      `json:"network_policy,omitempty"`
	FileIDs       []string        `json:"file_ids,omitempty"`
	Skills        json.RawMessage `json:"skills,omitempty"`
	Berm          *beyond         `json:"berm,omitempty"`
}

type expiresAfter struct {
	Anchor  string `json:"anchor"`
	Minutes int64  `json:"minutes"`
}

// allowlist is what a container may reach.
type allowlist struct {
	Type    string         `json:"type"`
	Domains []string       `json:"allowed_domains,omitempty"`
	Secrets []domainSecret `json:"domain_secrets,omitempty"`
}

// domainSecret has requests to a domain get a stored secret where they have what the variable Name
// holds in its place.
type domainSecret struct {
	Domain string `json:"domain"`
	Name   string `json:"name"`
	Value  string `json:"value"` // secret:NAME
}

// beyond is what the creator of a container may say beyond the hosted API.
type beyond struct {
	Level       berm.Level           `json:"level,omitempty"`
	Limits      berm.Limits          `json:"limits,omitzero"`
	Policy      json.RawMessage      `json:"policy,omitempty"`
	Credentials []control.Credential `json:"credentials,omitempty"`
}

// tiers are the sizes of containers, by their memory in bytes.
var tiers = map[string]int64{"1g": 1 << 30, "4g": 4 << 30, "16g": 16 << 30, "64g": 64 << 30}

// request makes the order of a container.
func (in *newContainer) request() (r container.Request, err error) {
	r.Name, r.Thread = in.Name, in.Thread
	if e := in.ExpiresAfter; e != nil {
		if e.Anchor != "last_active_at" || e.Minutes < 1 || e.Minutes > math.MaxInt32 {
			return r, invalid("expires_after must have the anchor last_active_at and 1 minute at least")
		}
		r.Idle = time.Duration(e.Minutes) * time.Minute
	}
	switch {
	case len(in.FileIDs) > 0:
		return r, berm.Errorf(berm.Unsupported, "file_ids cannot be honoured: this server keeps no files outside of containers").
			WithHint("send the content to POST /berm/v1/containers/ID/files")
	case len(in.Skills) > 0 && string(in.Skills) != "null" && string(in.Skills) != "[]":
		return r, berm.Errorf(berm.Unsupported, "skills cannot be honoured: this server has none")
	}
	s := &r.Sandbox
	if b := in.Berm; b != nil {
		s.Level, s.Limits, s.Credentials = b.Level, b.Limits, b.Credentials
		if len(b.Policy) > 0 {
			if in.NetworkPolicy != nil {
				return r, invalid("network_policy and berm.policy exclude each other")
			}
			if s.Policy, err = policy.DecodeJSON("berm.policy", b.Policy); err != nil {
				return r, err
			}
		}
	}
	if in.MemoryLimit != "" {
		tier, ok := tiers[in.MemoryLimit]
		switch {
		case !ok:
			return r, invalid("memory_limit must be 1g, 4g, 16g or 64g")
		case s.Limits.Memory != 0:
			return r, invalid("memory_limit and berm.limits.memory exclude each other")
		}
		s.Limits.Memory = tier
	}
	if s.Policy == nil {
		nothing := false
		s.Internet = &nothing
		if err := in.NetworkPolicy.apply(s); err != nil {
			return r, err
		}
	}
	return r, nil
}

func (p *allowlist) apply(s *control.CreateRequest) error {
	switch {
	case p == nil:
		return nil
	case p.Type == "disabled" && len(p.Domains)+len(p.Secrets) == 0:
		return nil
	case p.Type != "allowlist" || len(p.Domains) == 0:
		return invalid("network_policy must be of type disabled, or of type allowlist with allowed_domains")
	}
	for _, domain := range p.Domains {
		// Addresses and ranges are what a policy names, not a list of domains.
		if _, err := netip.ParseAddr(domain); err == nil || domain == "*" || strings.Contains(domain, "/") {
			return invalid("network_policy.allowed_domains: %.253q is no domain, such as example.com or *.example.com", domain)
		}
	}
	s.Network.AllowOut = p.Domains
	for _, secret := range p.Secrets {
		if !slices.Contains(p.Domains, secret.Domain) {
			return invalid("network_policy.domain_secrets: %.253q is not among allowed_domains", secret.Domain)
		}
		s.Credentials = append(s.Credentials, control.Credential{
			Name:   strings.ToLower(strings.ReplaceAll(secret.Name, "_", "-")),
			Secret: secret.Value, Hosts: []string{secret.Domain}, Env: secret.Name, Swap: true,
		})
	}
	return nil
}

type toldContainer struct {
	ID            berm.SandboxID `json:"id"`
	Object        string         `json:"object"`
	CreatedAt     int64          `json:"created_at"`
	Status        berm.State     `json:"status"`
	LastActiveAt  int64          `json:"last_active_at"`
	ExpiresAfter  expiresAfter   `json:"expires_after"`
	ExpiresAt     int64          `json:"expires_at"`
	MemoryLimit   string         `json:"memory_limit,omitempty"`
	NetworkPolicy toldAllowlist  `json:"network_policy"`
	Name          string         `json:"name"`
	Thread        string         `json:"thread_id,omitempty"`
	Berm          additions      `json:"berm"`
}

type toldAllowlist struct {
	Type    string   `json:"type"`
	Domains []string `json:"allowed_domains,omitempty"`
}

func (a *API) toContainer(c container.Container) toldContainer {
	told := toldContainer{
		ID: c.ID, Object: "container", CreatedAt: c.CreatedAt.Unix(), Status: c.State, LastActiveAt: c.LastActive().Unix(),
		ExpiresAfter: expiresAfter{"last_active_at", int64(c.Idle() / time.Minute)}, ExpiresAt: c.EndAt.Unix(),
		MemoryLimit: size(c.Limits.Memory), NetworkPolicy: toldAllowlist{Type: "disabled"},
		Name: c.Name(), Thread: c.Thread(), Berm: a.additions(c.Sandbox),
	}
	if reach := c.Reach(); reach != control.ReachNone && reach != control.ReachNothing {
		told.NetworkPolicy = toldAllowlist{"allowlist", c.Network.AllowOut}
	}
	return told
}

// size is a number of bytes as memory_limit has it; "" for none.
func size(n int64) string {
	switch {
	case n == 0:
		return ""
	case n%(1<<30) == 0:
		return fmt.Sprintf("%dg", n>>30)
	}
	return fmt.Sprintf("%dm", n>>20)
}

// containing makes the handler of a route of containers.
func containing(handle func(*API, http.ResponseWriter, *http.Request) error) func(*API, http.ResponseWriter, *http.Request) error {
	return func(a *API, w http.ResponseWriter, r *http.Request) error {
		// Code and files take their time. The time that a body may take is for who reads it.
		if r.Method == http.MethodGet || r.Method == http.MethodDelete {
			_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
		}
		return handle(a, w, r)
	}
}

// ofContainer makes the handler of a route that names a container.
func ofContainer(handle func(*API, http.ResponseWriter, *http.Request, berm.SandboxID) error) func(*API, http.ResponseWriter, *http.Request) error {
	return containing(func(a *API, w http.ResponseWriter, r *http.Request) error {
		id, err := berm.ParseSandboxID(r.PathValue("containerID"))
		if err != nil {
			return berm.Errorf(berm.NotFound, "container %.64q was not found", r.PathValue("containerID"))
		}
		switch err := a.reach(r, id); {
		case err == nil:
		case berm.KindOf(err) == berm.NotFound:
			return container.Unknown(id)
		default:
			return err
		}
		return handle(a, w, r, id)
	})
}

// decodeOwn reads a JSON body of a route that is Berm's own: fields that it does not know are wrong.
func decodeOwn(w http.ResponseWriter, r *http.Request, v any) ([]byte, error) {
	body, err := readBody(w, r)
	if err == nil {
		err = parse(body, v)
	}
	if err == nil && len(body) > 0 {
		err = checkKeys(body, "", v)
	}
	return body, err
}

// knownQuery refuses parameters of the query that a route does not know, as decodeOwn does fields.
func knownQuery(r *http.Request, known ...string) error {
	for _, name := range slices.Sorted(maps.Keys(r.URL.Query())) {
		if !slices.Contains(known, name) {
			if len(known) == 0 {
				return invalid("%.200q is not a parameter: there is none here", name)
			}
			return invalid("%.200q is not a parameter; known here: %s", name, strings.Join(known, ", "))
		}
	}
	return nil
}

func (a *API) createContainer(w http.ResponseWriter, r *http.Request) error {
	var in newContainer
	body, err := decodeOwn(w, r, &in)
	if err != nil {
		return err
	}
	order, err := in.request()
	if err != nil {
		return err
	}
	order.Sandbox.Actor, order.Sandbox.Team = actor(r), keyOf(r).Team
	if order.Thread == "" {
		if order.Sandbox.Request, err = idempotency(r, body); err != nil {
			return err
		}
	} else {
		asked := in
		if asked.Thread = ""; !emptyJSON(asked) {
			order.Settings = settings(asked)
		}
	}
	c, made, err := a.Containers.Create(r.Context(), order)
	if errors.Is(err, control.ErrRequestDiffers) {
		return &httpError{http.StatusUnprocessableEntity, "idempotency_request_mismatch", err.Error()}
	}
	if err != nil {
		return err
	}
	code := http.StatusOK
	if made {
		code = http.StatusCreated
	}
	return answer(w, code, a.toContainer(c))
}

func emptyJSON(in newContainer) bool {
	text, err := json.Marshal(in)
	return err == nil && string(text) == "{}"
}

// settings stands for what was asked for.
func settings(in newContainer) string {
	text, _ := json.Marshal(in) // it was parsed
	return hash("container", string(text))[:32]
}

func (a *API) container(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	c, err := a.Containers.Get(r.Context(), id, actor(r))
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, a.toContainer(c))
}

// deleted tells that something is not there any more.
type deleted struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Deleted bool   `json:"deleted"`
}

func (a *API) deleteContainer(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	if err := a.Containers.Delete(r.Context(), id, actor(r)); err != nil {
		return err
	}
	return answer(w, http.StatusOK, deleted{string(id), "container.deleted", true})
}

// toldList is one page of a list, as the hosted API has it.
type toldList[T any] struct {
	Object string `json:"object"`
	Data   []T    `json:"data"`
	First  string `json:"first_id"`
	Last   string `json:"last_id"`
	More   bool   `json:"has_more"`
}

// listPage cuts a page out of a list that begins where it is to begin.
func listPage[T any](r *http.Request, all []T, id func(T) string) (toldList[T], error) {
	limit, err := queryInt(r, "limit", 20, 1, maxPage)
	if err != nil {
		return toldList[T]{}, err
	}
	p := toldList[T]{Object: "list", Data: all[:min(int64(len(all)), limit)], More: int64(len(all)) > limit}
	if n := len(p.Data); n > 0 {
		p.First, p.Last = id(p.Data[0]), id(p.Data[n-1])
	}
	return p, nil
}

// ascending reads the order of a list.
func ascending(r *http.Request) (bool, error) {
	switch r.URL.Query().Get("order") {
	case "", "desc":
		return false, nil
	case "asc":
		return true, nil
	}
	return false, invalid("order must be asc or desc")
}

func (a *API) containers(w http.ResponseWriter, r *http.Request) error {
	if err := knownQuery(r, "limit", "order", "after", "name", "thread_id"); err != nil {
		return err
	}
	query := r.URL.Query()
	f := container.Filter{Team: keyOf(r).Team, Name: query.Get("name"), Thread: query.Get("thread_id"), Owner: actor(r)}
	var err error
	if f.Ascending, err = ascending(r); err != nil {
		return err
	}
	if after := query.Get("after"); after != "" {
		if f.After, err = berm.ParseSandboxID(after); err != nil {
			return invalid("after is no id of a container")
		}
	}
	all, err := a.Containers.List(r.Context(), f)
	if err != nil {
		return err
	}
	p, err := listPage(r, mapped(all, a.toContainer), func(c toldContainer) string { return string(c.ID) })
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, p)
}

type toldFile struct {
	ID        string         `json:"id"`
	Object    string         `json:"object"`
	CreatedAt int64          `json:"created_at"`
	Bytes     int64          `json:"bytes"`
	Container berm.SandboxID `json:"container_id"`
	Path      string         `json:"path"`
	Source    string         `json:"source"`
}

func toFile(id berm.SandboxID) func(container.File) toldFile {
	return func(f container.File) toldFile {
		told := toldFile{f.ID, "container.file", f.Modified.Unix(), f.Bytes, id, f.Path, "assistant"}
		if f.Uploaded {
			told.Source = "user"
		}
		return told
	}
}

// putFile writes a file: the part "file" of a form, or a body as it is with ?path=.
func (a *API) putFile(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	control := http.NewResponseController(w)
	body := &patient{body: r.Body, control: control} // as long as bytes come
	defer func() { _ = control.SetReadDeadline(time.Time{}) }()
	name, err := r.URL.Query().Get("path"), knownQuery(r, "path")
	if err != nil {
		return err
	}
	kind, params, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
	var content io.Reader = body
	size := r.ContentLength // -1 is unknown
	switch kind {
	case "multipart/form-data":
		part, err := filePart(multipart.NewReader(body, params["boundary"]))
		if err != nil {
			return err
		}
		content, size = part, -1
		if name == "" {
			name = part.FileName()
		}
	case "application/octet-stream":
		if name == "" {
			return invalid("path is required with a body that is the file itself")
		}
	case "application/json":
		return berm.Errorf(berm.Unsupported, "file_id cannot be honoured: this server keeps no files outside of containers").
			WithHint("send the content, as multipart/form-data or application/octet-stream")
	default:
		return invalid("Content-Type must be multipart/form-data or application/octet-stream")
	}
	f, err := a.Containers.Upload(r.Context(), id, name, content, size, actor(r))
	if errors.Is(err, container.ErrNoSpace) {
		return &httpError{http.StatusRequestEntityTooLarge, "", err.Error()}
	}
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, toFile(id)(f))
}

// filePart finds the file of a form. What comes before it is dropped, what comes behind it is not
// read.
func filePart(form *multipart.Reader) (*multipart.Part, error) {
	for {
		part, err := form.NextPart()
		if err == io.EOF {
			return nil, invalid(`the form has no part "file"`)
		}
		if err != nil {
			return nil, invalid("the form cannot be read: %s", err)
		}
		if part.FormName() == "file" {
			if path.Base(part.FileName()) != part.FileName() || part.FileName() == "" {
				return nil, invalid(`the part "file" has no filename`)
			}
			return part, nil
		}
	}
}

func (a *API) containerFiles(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	if err := knownQuery(r, "limit", "order", "after", "path"); err != nil {
		return err
	}
	query := r.URL.Query()
	up, err := ascending(r)
	if err != nil {
		return err
	}
	all, err := a.Containers.Files(r.Context(), id, query.Get("path"), actor(r))
	if err != nil {
		return err
	}
	slices.SortStableFunc(all, func(x, y container.File) int { return x.Modified.Compare(y.Modified) })
	if !up {
		slices.Reverse(all)
	}
	if after := query.Get("after"); after != "" {
		i := slices.IndexFunc(all, func(f container.File) bool { return f.ID == after })
		if i < 0 {
			return berm.Errorf(berm.Invalid, "after: there is no file %.64q", after).WithHint("begin the list anew")
		}
		all = all[i+1:]
	}
	p, err := listPage(r, mapped(all, toFile(id)), func(f toldFile) string { return f.ID })
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, p)
}

func (a *API) containerFile(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	f, err := a.Containers.File(r.Context(), id, r.PathValue("fileID"), actor(r))
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, toFile(id)(f))
}

func (a *API) deleteFile(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	file := r.PathValue("fileID")
	if err := a.Containers.DeleteFile(r.Context(), id, file, actor(r)); err != nil {
		return err
	}
	return answer(w, http.StatusOK, deleted{file, "container.file.deleted", true})
}

// content sends a file. Of what is inside nothing but the bytes and their number is passed on: a
// browser must not take it for a page of this server.
func (a *API) content(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	file, err := a.Containers.Open(r.Context(), id, r.PathValue("fileID"), r.Header.Get("Range"), actor(r))
	if err != nil {
		return err
	}
	defer file.Body.Close()
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Disposition", "attachment")
	h.Set("Accept-Ranges", "bytes")
	for _, name := range []string{"Content-Length", "Content-Range"} {
		if value := file.Header.Get(name); value != "" {
			h.Set(name, value)
		}
	}
	code := http.StatusOK
	if file.StatusCode == http.StatusPartialContent {
		code = http.StatusPartialContent
	}
	w.WriteHeader(code)
	if _, err := io.Copy(w, file.Body); err != nil {
		panic(http.ErrAbortHandler) // a clean end would pass for the whole file
	}
	return nil
}

type toldContext struct {
	container.Context
	Object    string         `json:"object"`
	Container berm.SandboxID `json:"container_id"`
}

func toContext(id berm.SandboxID) func(container.Context) toldContext {
	return func(c container.Context) toldContext { return toldContext{c, "container.context", id} }
}

func (a *API) contexts(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	if err := knownQuery(r); err != nil { // there are few: a list has all of them
		return err
	}
	all, err := a.Containers.Contexts(r.Context(), id, actor(r))
	if err != nil {
		return err
	}
	told := toldList[toldContext]{Object: "list", Data: mapped(all, toContext(id))}
	if n := len(told.Data); n > 0 {
		told.First, told.Last = told.Data[0].ID, told.Data[n-1].ID
	}
	return answer(w, http.StatusOK, told)
}

func (a *API) createContext(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	var in struct {
		Language string `json:"language"`
		Cwd      string `json:"cwd"`
	}
	if _, err := decodeOwn(w, r, &in); err != nil {
		return err
	}
	c, err := a.Containers.CreateContext(r.Context(), id, in.Language, in.Cwd, actor(r))
	if err != nil {
		return err
	}
	return answer(w, http.StatusCreated, toContext(id)(c))
}

func (a *API) restartContext(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	if _, err := readBody(w, r); err != nil {
		return err
	}
	if err := a.Containers.RestartContext(r.Context(), id, r.PathValue("contextID"), actor(r)); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *API) deleteContext(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	name := r.PathValue("contextID")
	if err := a.Containers.DeleteContext(r.Context(), id, name, actor(r)); err != nil {
		return err
	}
	return answer(w, http.StatusOK, deleted{name, "container.context.deleted", true})
}

type newExecution struct {
	Code     *string           `json:"code"`
	Language string            `json:"language"`
	Context  string            `json:"context_id"`
	Env      map[string]string `json:"env_vars"`
	Timeout  float64           `json:"timeout"` // seconds
	Stream   bool              `json:"stream"`
}

// execute runs code and answers with all that came of it, or with each part as it comes.
func (a *API) execute(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	var in newExecution
	if _, err := decodeOwn(w, r, &in); err != nil {
		return err
	}
	if in.Code == nil {
		return invalid("code is required")
	}
	if in.Timeout < 0 || in.Timeout > math.MaxInt32 {
		return invalid("timeout must be a number of seconds")
	}
	order := container.Execution{
		Code: *in.Code, Language: in.Language, Context: in.Context, Env: in.Env, Timeout: time.Duration(in.Timeout * float64(time.Second)),
	}
	if in.Stream {
		return a.stream(w, r, id, order)
	}
	whole := &outcome{Object: "container.execution", Container: id, Results: []*container.Result{}}
	status, err := a.Containers.Execute(r.Context(), id, order, actor(r), whole.add)
	if err != nil {
		return err
	}
	whole.Status, whole.Stdout, whole.Stderr = status, whole.stdout.String(), whole.stderr.String()
	return answer(w, http.StatusOK, whole)
}

// maxOutcome bounds what an execution may show when it is answered as a whole, in bytes.
const maxOutcome = 32 << 20

// outcome is all that came of an execution.
type outcome struct {
	Object    string              `json:"object"`
	Container berm.SandboxID      `json:"container_id"`
	Status    container.Status    `json:"status"`
	Stdout    string              `json:"stdout"`
	Stderr    string              `json:"stderr"`
	Results   []*container.Result `json:"results"`
	Error     *container.Failure  `json:"error"`
	Count     int64               `json:"execution_count"`

	stdout, stderr strings.Builder
	bytes          int
}

func (o *outcome) add(e container.Event) error {
	switch e := e.(type) {
	case *container.Output:
		o.bytes += len(e.Text)
		if e.Type == "stdout" {
			o.stdout.WriteString(e.Text)
		} else {
			o.stderr.WriteString(e.Text)
		}
	case *container.Result:
		text, err := marshal(e)
		if err != nil {
			return err
		}
		o.bytes += len(text)
		o.Results = append(o.Results, e)
	case *container.Failure:
		o.bytes += len(e.Name) + len(e.Value) + len(e.Traceback)
		o.Error = e
	case *container.Count:
		o.Count = e.Count
	}
	if o.bytes > maxOutcome {
		return berm.Errorf(berm.Exhausted, "the code showed more than %d MiB", maxOutcome>>20).
			WithHint(`ask for the parts as they come, with "stream": true, or write to a file in the container and fetch that`)
	}
	return nil
}

// marshal makes one line of JSON.
func marshal(v any) ([]byte, error) {
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, berm.Errorf(berm.Internal, "answer: %w", err)
	}
	return bytes.TrimSuffix(text.Bytes(), []byte("\n")), nil
}

// writeTime bounds how long a client may leave a part of a stream unread: the code waits meanwhile.
const writeTime = time.Minute

// stream answers with server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)
// that have the type of what they tell, as it is in their data. The last is end_of_execution, or
// aborted with an error.
func (a *API) stream(w http.ResponseWriter, r *http.Request, id berm.SandboxID, order container.Execution) error {
	control := http.NewResponseController(w)
	begun := false
	send := func(kind string, v any) error {
		data, err := marshal(v)
		if err != nil {
			return err
		}
		if !begun { // until then an error is an answer of its own
			h := w.Header()
			h.Set("Content-Type", "text/event-stream")
			h.Set("Cache-Control", "no-store")
			h.Set("X-Accel-Buffering", "no")
			begun = true
		}
		_ = control.SetWriteDeadline(time.Now().Add(writeTime))
		if _, err = fmt.Fprintf(w, "event: %s\ndata: %s\n\n", kind, data); err == nil {
			err = control.Flush()
		}
		if err != nil {
			return berm.Errorf(berm.Unavailable, "the client is gone: %w", err)
		}
		return nil
	}
	status, err := a.Containers.Execute(r.Context(), id, order, actor(r), func(e container.Event) error { return send(e.Kind(), e) })
	switch {
	case err != nil && !begun:
		return err
	case err != nil:
		_, body := a.explain(r, err, w.Header().Get("X-E2B-Trace-ID"))
		_ = send("aborted", struct {
			Type string `json:"type"`
			errorBody
		}{"aborted", body})
	default:
		_ = send("end_of_execution", struct {
			Type   string           `json:"type"`
			Status container.Status `json:"status"`
		}{"end_of_execution", status})
	}
	_ = control.SetWriteDeadline(time.Time{})
	return nil
}
