package container

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/capture"
)

// Port is where an interpreter listens inside, as E2B's does.
const Port = 49999

// DefaultTimeout is how long an execution may take when it does not say, as with E2B's clients.
const DefaultTimeout = 60 * time.Second

const (
	maxAnswer = 1 << 20 // bytes of an interpreter's answer other than events
	maxReason = 4 << 10 // bytes of an error in its words that are read
	maxReply  = 30 * time.Second
)

// Execution is code that is to run.
type Execution struct {
	Code string
	// Language is the interpreter's word for it; "" is python, or that of the Context.
	Language string
	// Context is the id of a context of the container; "" is the default one of the language.
	Context string
	Env     map[string]string // variables for this execution alone
	Timeout time.Duration     // 0 is DefaultTimeout
}

// Status says how an execution ended.
type Status string

// How an execution ends.
const (
	Completed Status = "completed"
	Failed    Status = "failed"    // the code had an exception
	TimedOut  Status = "timed_out" // it was interrupted at its timeout
)

// errTimeout is the cause of an execution's context that its timeout ended.
var errTimeout = errors.New("the timeout of the execution is over")

// Execute runs code in a container and calls each for what it shows, as it comes; each may take
// its time, which holds the code up. When ctx ends, each fails or the timeout is over the code is
// interrupted. The container is in use meanwhile. Kinds: NotFound (the container, the context),
// Invalid, Exhausted (one result is too large), Unavailable (the interpreter died or is no longer
// what it was).
func (m *Manager) Execute(ctx context.Context, id berm.SandboxID, e Execution, actor audit.Actor, each func(Event) error) (Status, error) {
	switch limit := m.Sessions.MaxTimeout; {
	case e.Context != "" && e.Language != "":
		return "", berm.Errorf(berm.Invalid, "context_id and language exclude each other: a context has a language")
	case e.Timeout < 0 || limit > 0 && e.Timeout > limit:
		return "", berm.Errorf(berm.Invalid, "timeout must be from 0 to %g seconds", limit.Seconds())
	}
	c, err := m.use(ctx, id, actor)
	if err != nil {
		return "", err
	}
	release := m.hold(ctx, c, actor)
	defer release()
	record, err := m.begin(c, e, actor)
	if err != nil {
		return "", err
	}
	begin := time.Now()
	run, cancel := context.WithTimeoutCause(ctx, cmp.Or(e.Timeout, DefaultTimeout), errTimeout)
	defer cancel()
	status, err := Completed, m.execute(run, c, e, actor, each, record)
	switch {
	case errors.Is(context.Cause(run), errTimeout):
		status, err = TimedOut, nil
	case record.failed:
		status = Failed
	}
	m.end(c, record, time.Since(begin), status, err, actor)
	if err != nil {
		return "", m.ended(ctx, id, err)
	}
	return status, nil
}

func (m *Manager) execute(ctx context.Context, c Container, e Execution, actor audit.Actor, each func(Event) error, record *execution) error {
	body, err := m.ask(ctx, c, actor, http.MethodPost, "/execute", struct {
		Code     string            `json:"code"`
		Context  string            `json:"context_id,omitempty"`
		Language string            `json:"language,omitempty"`
		Env      map[string]string `json:"env_vars,omitempty"`
	}{e.Code, e.Context, e.Language, e.Env})
	if err != nil {
		return err
	}
	defer body.Close()
	return read(body, func(event Event) error {
		record.show(event)
		return each(event)
	})
}

// execution is what its records have in common.
type execution struct {
	data   audit.Command
	trace  string
	shown  *capture.Output
	failed bool // an event told so
}

// show takes what an execution shows, as a person would read it.
func (x *execution) show(event Event) {
	switch e := event.(type) {
	case *Output:
		stream := audit.Stdout
		if e.Type == "stderr" {
			stream = audit.Stderr
		}
		x.shown.Add(stream, []byte(e.Text))
	case *Result:
		x.shown.Add(audit.Stdout, e.plain())
	case *Failure:
		x.failed = true
		x.shown.Add(audit.Stderr, []byte(cmp.Or(e.Traceback, e.Name+": "+e.Value)+"\n"))
	}
}

// begin records that code is to run: it is told as the command that it stands for.
func (m *Manager) begin(c Container, e Execution, actor audit.Actor) (*execution, error) {
	const codeSize, envSize = 12 << 10, 4 << 10
	x := &execution{trace: strings.ToLower(rand.Text()), shown: m.Capture.Output()}
	what := audit.Shorten(cmp.Or(e.Language, "python"), 128)
	if e.Context != "" {
		what = "context " + audit.Shorten(e.Context, 128)
	}
	var cut bool
	x.data.Argv, x.data.Cut = audit.Fit([]string{what, e.Code}, codeSize)
	x.data.Env, cut = audit.Fit(slices.Sorted(maps.Keys(e.Env)), envSize)
	x.data.Cut = x.data.Cut || cut
	return x, m.Audit.Emit(x.record(c, audit.ExecStart, audit.OK, "", actor))
}

func (x *execution) record(c Container, what audit.Type, outcome audit.Outcome, reason string, actor audit.Actor) audit.Record {
	return audit.Record{
		Sandbox: c.ID, Actor: actor, Type: what, Src: "interpreter", Trust: audit.TrustHost,
		Outcome: outcome, Reason: reason, Data: x.data, TraceID: x.trace,
	}
}

// end records how it went. It has happened and cannot be refused any more.
func (m *Manager) end(c Container, x *execution, took time.Duration, status Status, failure error, actor audit.Actor) {
	var blobs []audit.Blob
	var lost error
	x.data.Output, blobs, lost = x.shown.End()
	x.data.Millis = took.Milliseconds()
	outcome, reason, code := audit.OK, "", 0
	switch {
	case failure != nil:
		outcome, reason = audit.Failed, "it did not end as it should: "+audit.Shorten(failure.Error(), 512)
	case status == TimedOut:
		outcome, reason, x.data.Signal = audit.Failed, "its time was over", "SIGINT"
	case status == Failed:
		code, outcome = 1, audit.Failed
		x.data.Code = &code
	default:
		x.data.Code = &code
	}
	if lost != nil {
		reason = strings.TrimPrefix(reason+"; its output is not kept: "+lost.Error(), "; ")
	}
	record := x.record(c, audit.ExecExit, outcome, reason, actor)
	record.Blobs = blobs
	if err := m.Audit.Emit(record); err != nil {
		m.Sessions.Log.Error("audit record lost", "sandbox", c.ID, "type", audit.ExecExit, "error", err)
	}
}

// Context is what executions of one language share: variables, imports, the working directory.
type Context struct {
	ID       string `json:"id"`
	Language string `json:"language"`
	Cwd      string `json:"cwd"`
}

// maxContexts bounds a list of contexts that is believed.
const maxContexts = 1000

// Contexts returns the contexts of a container, oldest first.
func (m *Manager) Contexts(ctx context.Context, id berm.SandboxID, actor audit.Actor) (all []Context, err error) {
	if err := m.call(ctx, id, actor, http.MethodGet, "/contexts", nil, &all); err != nil {
		return nil, err
	}
	return all[:min(len(all), maxContexts)], nil
}

// CreateContext makes a context. An empty language is python, an empty cwd the container's
// working directory.
func (m *Manager) CreateContext(ctx context.Context, id berm.SandboxID, language, cwd string, actor audit.Actor) (c Context, err error) {
	err = m.call(ctx, id, actor, http.MethodPost, "/contexts", struct {
		Language string `json:"language,omitempty"`
		Cwd      string `json:"cwd,omitempty"`
	}{language, cwd}, &c)
	return c, err
}

// RestartContext starts a context anew, without its variables.
func (m *Manager) RestartContext(ctx context.Context, id berm.SandboxID, name string, actor audit.Actor) error {
	path, err := contextPath(name)
	if err != nil {
		return err
	}
	return m.call(ctx, id, actor, http.MethodPost, path+"/restart", nil, nil)
}

// DeleteContext ends a context.
func (m *Manager) DeleteContext(ctx context.Context, id berm.SandboxID, name string, actor audit.Actor) error {
	path, err := contextPath(name)
	if err != nil {
		return err
	}
	return m.call(ctx, id, actor, http.MethodDelete, path, nil, nil)
}

func contextPath(name string) (string, error) {
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"
	if name == "" || len(name) > 128 || strings.Trim(name, letters) != "" {
		return "", berm.Errorf(berm.NotFound, "context %.128q was not found", name)
	}
	return "/contexts/" + name, nil
}

// call asks the interpreter for something that it answers at once. out is what it answers, nil
// for nothing.
func (m *Manager) call(ctx context.Context, id berm.SandboxID, actor audit.Actor, method, path string, in, out any) error {
	c, err := m.use(ctx, id, actor)
	if err != nil {
		return err
	}
	release := m.hold(ctx, c, actor)
	defer release()
	ctx, cancel := context.WithTimeout(ctx, maxReply)
	defer cancel()
	body, err := m.ask(ctx, c, actor, method, path, in)
	if err != nil {
		return m.ended(ctx, id, err)
	}
	defer body.Close()
	text, err := io.ReadAll(io.LimitReader(body, maxAnswer+1))
	if err == nil && len(text) > maxAnswer {
		err = errors.New("it is too long")
	}
	if err == nil && out != nil {
		err = json.Unmarshal(text, out)
	}
	if err != nil {
		return m.ended(ctx, id, berm.Errorf(berm.Unavailable, "what the container's interpreter answers cannot be read: %w", err))
	}
	return nil
}

// ask sends a request to the interpreter, and returns the body of an answer that is no error.
func (m *Manager) ask(ctx context.Context, c Container, actor audit.Actor, method, path string, in any) (io.ReadCloser, error) {
	var send io.Reader
	if in != nil {
		text, err := json.Marshal(in)
		if err != nil {
			return nil, berm.Errorf(berm.Internal, "request: %w", err)
		}
		send = bytes.NewReader(text)
	}
	r, err := http.NewRequestWithContext(ctx, method, path, send)
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "request: %w", err)
	}
	r.Header.Set("Content-Type", "application/json")
	answer, err := m.Inside.Do(r, c.ID, Port, actor)
	if err != nil {
		if berm.KindOf(err) == berm.Unavailable {
			err = berm.Errorf(berm.Unavailable, "the container's interpreter does not answer: %w", err).
				WithHint("it is started again within seconds when it ended; if this happens again, make another container")
		}
		return nil, err
	}
	if answer.StatusCode < 300 {
		return answer.Body, nil
	}
	defer answer.Body.Close()
	reason, _ := io.ReadAll(io.LimitReader(answer.Body, maxReason)) // what came of it
	kind := berm.Unavailable
	switch answer.StatusCode {
	case http.StatusNotFound:
		kind = berm.NotFound
	case http.StatusBadRequest, http.StatusUnprocessableEntity:
		kind = berm.Invalid
	case http.StatusTooManyRequests:
		kind = berm.Exhausted
	}
	return nil, &insideError{berm.Errorf(kind, "the container's interpreter answers %d: %.300q", answer.StatusCode, reason)}
}

// insideError is about something inside a container, which itself is there.
type insideError struct{ err *berm.Error }

func (e *insideError) Error() string { return e.err.Error() }
func (e *insideError) Unwrap() error { return e.err }
