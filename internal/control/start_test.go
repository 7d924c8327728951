package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/control/enginetest"
	pb "github.com/berm-sandbox/berm/internal/proto/process"
	"github.com/berm-sandbox/berm/internal/proto/process/processconnect"
)

// templates has a base with commands.
type templates struct {
	enginetest.Templates
	start, ready string
}

func (s templates) Resolve(ctx context.Context, team berm.Team, ref string) (berm.Template, error) {
	t, err := s.Templates.Resolve(ctx, team, ref)
	t.Start, t.Ready = s.start, s.ready
	return t, err
}

// shellAgent is a guest agent that notes what it is to run, and lets run decide how that ends; -1 never does.
type shellAgent struct {
	processconnect.UnimplementedProcessHandler
	run  func(tag string, times int) (code int32)
	open bool // it asks for no token

	mu  sync.Mutex
	ran []string
}

func (a *shellAgent) note(what string) (times int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, before := range a.ran {
		if before == what {
			times++
		}
	}
	a.ran = append(a.ran, what)
	return times
}

func (a *shellAgent) took() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	took := a.ran
	a.ran = nil
	return took
}

func (a *shellAgent) Start(ctx context.Context, r *connect.Request[pb.StartRequest], out *connect.ServerStream[pb.StartResponse]) error {
	args := r.Msg.GetProcess().GetArgs()
	what := r.Msg.GetTag() + ":" + args[len(args)-1]
	for name := range r.Msg.GetProcess().GetEnvs() {
		what = "with another " + name + ": " + what
	}
	if r.Header().Get("X-Access-Token") == "" && !a.open {
		return connect.NewError(connect.CodeUnauthenticated, errors.New("no token"))
	}
	if _, ok := ctx.Deadline(); ok != (r.Msg.GetTag() == "ready") {
		what = "with the deadline of another: " + what
	}
	times := a.note(what)
	send := func(e *pb.ProcessEvent) error { return out.Send(&pb.StartResponse{Event: e}) }
	if err := send(&pb.ProcessEvent{Event: &pb.ProcessEvent_Start{Start: &pb.ProcessEvent_StartEvent{Pid: 7}}}); err != nil {
		return err
	}
	code := int32(0) // of what only warms the agent up
	if r.Msg.GetTag() != "" {
		code = a.run(r.Msg.GetTag(), times)
	}
	if code < 0 {
		<-ctx.Done()
		return ctx.Err()
	}
	return send(&pb.ProcessEvent{Event: &pb.ProcessEvent_End{End: &pb.ProcessEvent_EndEvent{Exited: true, ExitCode: code, Status: fmt.Sprintf("exit status %d", code)}}})
}

func startWorld(t *testing.T, start, ready string, run func(string, int) int32, configure ...func(*Config)) (*world, *shellAgent) {
	agent := &shellAgent{run: run}
	return agent.world(t, start, ready, configure...), agent
}

// world has its sandboxes have this agent.
func (a *shellAgent) world(t *testing.T, start, ready string, configure ...func(*Config)) *world {
	path, handler := processconnect.NewProcessHandler(a)
	mux := http.NewServeMux()
	mux.Handle(path, handler)
	mux.HandleFunc("POST /init", func(w http.ResponseWriter, r *http.Request) {
		var told berm.GuestConfig
		if err := json.NewDecoder(r.Body).Decode(&told); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		if len(told.Env) > 0 {
			a.note("init:" + told.Env["A"])
		}
		w.WriteHeader(http.StatusNoContent)
	})
	first := func(c *Config) {
		c.Engine.(*enginetest.Engine).Ports = map[uint16]http.Handler{berm.AgentPort: mux}
		c.Templates = templates{start: start, ready: ready}
	}
	last := func(c *Config) { a.open = len(c.Pools) > 0 }
	return newWorld(t, slices.Concat([]func(*Config){first}, configure, []func(*Config){last})...)
}

// What a template starts begins in each sandbox, before anybody gets it and after its processes are
// followed, and begins again in one that is made anew from its files.
func TestStartCommand(t *testing.T) {
	ctx := t.Context()
	_, saved := saves(t)
	following := following{}
	w, agent := startWorld(t, "serve", "ask", func(tag string, times int) int32 {
		switch {
		case tag == "start":
			return -1
		case times < 2:
			return 7
		}
		return 0
	}, saved, func(c *Config) { c.Processes = &following })
	following.begin = func() { agent.note("followed") }
	want := []string{"followed", "start:serve", "ready:ask", "ready:ask", "ready:ask"}
	check := func(when string) {
		t.Helper()
		if ran := agent.took(); !slices.Equal(ran, want) {
			t.Errorf("%s: %q", when, ran)
		}
	}
	s := w.create(t)
	check("create")
	if err := w.Pause(ctx, s.ID, tester); err != nil {
		t.Fatal(err)
	}
	if _, _, err := w.Connect(ctx, s.ID, time.Minute, tester); err != nil {
		t.Fatal(err)
	}
	if ran := agent.took(); len(ran) != 0 {
		t.Errorf("with its memory: %q", ran)
	}
	if err := w.PauseToFiles(ctx, s.ID, tester); err != nil {
		t.Fatal(err)
	}
	if _, _, err := w.Connect(ctx, s.ID, time.Minute, tester); err != nil {
		t.Fatal(err)
	}
	check("from its files")
	if _, err := w.Snapshot(ctx, s.ID, SnapshotRequest{Name: "kept", Actor: tester}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Rollback(ctx, s.ID, "kept", tester); err != nil {
		t.Fatal(err)
	}
	check("rollback")
	w.create(t, func(r *CreateRequest) { r.Template = "kept" })
	check("from a snapshot")
}

func TestStartCommandFails(t *testing.T) {
	_, saved := saves(t)
	var failing sync.Map
	w, agent := startWorld(t, "serve", "ask", func(tag string, _ int) int32 {
		if code, ok := failing.Load(tag); ok {
			return code.(int32)
		}
		return map[string]int32{"start": -1, "ready": 0}[tag]
	}, saved)
	s := w.create(t)
	if err := w.PauseToFiles(t.Context(), s.ID, tester); err != nil {
		t.Fatal(err)
	}
	request := CreateRequest{Template: "base", Timeout: time.Minute, Secure: true, Actor: tester}
	for name, c := range map[string]struct {
		start, ready int32
		want         string
	}{
		"start command ends": {3, 1, `start command of template 'base' failed: "exit status 3"`},
		"never ready":        {-1, 1, `ready command of template 'base' did not succeed`},
		"ready hangs":        {0, -1, `ready command of template 'base' did not succeed`},
	} {
		failing.Store("start", c.start)
		failing.Store("ready", c.ready)
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		_, err := w.Create(ctx, request)
		cancel()
		wantKind(t, err, berm.Unavailable)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
		if left, _ := w.engine.List(t.Context()); len(left) != 0 {
			t.Errorf("%s: %v are left", name, left)
		}
	}
	// One that rests goes on resting.
	failing.Store("start", int32(3))
	failing.Store("ready", int32(1))
	_, _, err := w.Connect(t.Context(), s.ID, time.Minute, tester)
	wantKind(t, err, berm.Unavailable)
	if got, err := w.Get(t.Context(), s.ID); err != nil || got.State != berm.Paused {
		t.Errorf("%s, %v", got.State, err)
	}
	failing.Clear()
	agent.took()
	if _, _, err := w.Connect(t.Context(), s.ID, time.Minute, tester); err != nil {
		t.Error(err)
	}
	if ran := agent.took(); !slices.Equal(ran, []string{"start:serve", "ready:ask"}) {
		t.Errorf("%q", ran)
	}
}

// A start command alone is waited for until it runs; one that ends well is no failure.
func TestStartAlone(t *testing.T) {
	for _, code := range []int32{0, -1} {
		w, agent := startWorld(t, "serve", "", func(string, int) int32 { return code })
		w.create(t)
		if ran := agent.took(); !slices.Equal(ran, []string{"start:serve"}) {
			t.Errorf("%q", ran)
		}
	}
}

// Who kills a sandbox that is about to be ready need not wait for it.
func TestKillBeforeReady(t *testing.T) {
	_, saved := saves(t)
	hang := make(chan bool, 1)
	w, _ := startWorld(t, "", "ask", func(string, int) int32 {
		select {
		case <-hang:
			hang <- true
			return -1
		default:
			return 0
		}
	}, saved)
	s := w.create(t)
	if err := w.PauseToFiles(t.Context(), s.ID, tester); err != nil {
		t.Fatal(err)
	}
	hang <- true
	resumed := make(chan error, 1)
	go func() {
		_, _, err := w.Connect(t.Context(), s.ID, time.Minute, tester)
		resumed <- err
	}()
	eventually(t, "the resume", func() bool { left, _ := w.engine.List(t.Context()); return len(left) == 1 })
	if err := w.Kill(t.Context(), s.ID, tester); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-resumed:
		if err == nil {
			t.Error("a sandbox that was killed is resumed")
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the resume goes on")
	}
	if left, _ := w.engine.List(t.Context()); len(left) != 0 {
		t.Errorf("%v are left", left)
	}
}

// What goes on with its memory has begun already.
func TestStartCommandWithMemory(t *testing.T) {
	ctx := t.Context()
	_, saved := saves(t)
	w, agent := startWorld(t, "serve", "", func(string, int) int32 { return -1 }, saved, func(c *Config) { c.Engine.(*enginetest.Engine).Memory = true })
	s := w.create(t)
	begun(t, w, 1)
	if _, err := w.Snapshot(ctx, s.ID, SnapshotRequest{Name: "kept", Memory: true, Actor: tester}); err != nil {
		t.Fatal(err)
	}
	agent.took()
	w.create(t, func(r *CreateRequest) { r.Template = "kept" })
	if err := w.Pause(ctx, s.ID, tester); err != nil {
		t.Fatal(err)
	}
	eventually(t, "memory on disk", func() bool {
		got, err := w.Get(ctx, s.ID)
		return err == nil && got.SavedMemory
	})
	if _, _, err := w.Connect(ctx, s.ID, time.Minute, tester); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Rollback(ctx, s.ID, "kept", tester); err != nil {
		t.Fatal(err)
	}
	if ran := agent.took(); len(ran) != 0 {
		t.Errorf("%q", ran)
	}
}

// begun waits until there is what sandboxes can go on from, and those that there are are left.
func begun(t *testing.T, w *world, left int) {
	t.Helper()
	eventually(t, "what sandboxes begin with", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, saved := range w.beginnings {
			ids, err := w.engine.List(t.Context())
			return saved != "" && err == nil && len(ids) == left
		}
		return false
	})
}

// What a template starts begins once, where memory can be saved: sandboxes go on from there, if they
// are as the template is and the command has nothing of their own to see.
func TestStartCommandBeginsOnce(t *testing.T) {
	ctx := t.Context()
	_, saved := saves(t)
	var gone atomic.Bool
	w, agent := startWorld(t, "serve", "ask", func(tag string, _ int) int32 {
		if tag == "start" {
			return -1
		}
		return 0
	}, saved, func(c *Config) {
		c.Engine.(*enginetest.Engine).Memory = true
		c.Templates = vanishing{templates{start: "serve", ready: "ask"}, &gone}
	})
	runs := []string{"start:serve", "ready:ask"}
	if s := w.create(t); s.Begun {
		t.Error("the first one went on from nothing")
	}
	begun(t, w, 1)
	if ran := agent.took(); !slices.Equal(ran, append(runs, runs...)) {
		t.Errorf("first: %q", ran)
	}
	for range 3 {
		if s := w.create(t, func(r *CreateRequest) { r.Env = map[string]string{"A": "1"} }); !s.Begun || s.From != "" {
			t.Errorf("another: begun %t, from %q", s.Begun, s.From)
		}
	}
	if ran := agent.took(); len(ran) != 0 {
		t.Errorf("others: %q", ran)
	}
	if s := w.create(t, func(r *CreateRequest) { r.Limits.Memory = 64 << 20 }); s.Begun {
		t.Error("one with limits of its own went on")
	}
	if ran := agent.took(); !slices.Equal(ran, runs) {
		t.Errorf("with limits: %q", ran)
	}

	// What cannot be gone on from is run, and saved anew.
	var failed atomic.Bool
	w.engine.Fail(func(id berm.SandboxID, method string) error {
		if method == "Create" && failed.CompareAndSwap(false, true) {
			return berm.Errorf(berm.Unsupported, "the snapshot goes on with gVisor 1 alone, not with 2")
		}
		return nil
	})
	before := kept(t, w.SnapshotDir)
	if s := w.create(t); s.Begun {
		t.Error("it went on from what cannot be gone on from")
	}
	eventually(t, "another beginning", func() bool {
		now := kept(t, w.SnapshotDir)
		return len(now) == 1 && len(before) == 1 && now[0] != before[0]
	})
	begun(t, w, 6)
	// A template that is there no more takes it along, and one that is not there yet does not.
	gone.Store(true)
	w.PruneBegun(ctx)
	if left := kept(t, w.SnapshotDir); len(left) != 0 {
		t.Errorf("%v are left", left)
	}
	next, err := w.Templates.Resolve(ctx, "", "base")
	if err != nil {
		t.Fatal(err)
	}
	next.BuildID = berm.BuildID(berm.NewUUID())
	done, err := w.Begin(ctx, next, tester)
	if err != nil {
		t.Fatal(err)
	}
	w.PruneBegun(ctx)
	if left := kept(t, w.SnapshotDir); len(left) != 1 {
		t.Errorf("%v are there for the build", left)
	}
	done()
	w.PruneBegun(ctx)
	if left := kept(t, w.SnapshotDir); len(left) != 0 {
		t.Errorf("%v are left of a build that failed", left)
	}

	// It goes with the server.
	gone.Store(false)
	w.create(t)
	begun(t, w, 7)
	w.Close()
	if left := kept(t, w.SnapshotDir); len(left) != 0 {
		t.Errorf("%v are left of the server", left)
	}
}

// vanishing lists no template once it is gone.
type vanishing struct {
	templates
	gone *atomic.Bool
}

func (v vanishing) List(ctx context.Context) ([]berm.Template, error) {
	if v.gone.Load() {
		return nil, nil
	}
	return v.templates.List(ctx)
}

// warmed is the command without a tag that does nothing.
const warmed = "::"

// Those of a pool begin there too.
func TestPoolBegins(t *testing.T) {
	_, saved := saves(t)
	w, agent := startWorld(t, "serve", "ask", func(tag string, _ int) int32 { return map[string]int32{"start": -1}[tag] }, pooling(1), saved, func(c *Config) {
		c.Engine.(*enginetest.Engine).Memory = true
	})
	w.waiting(t, 1)
	if ran := agent.took(); !slices.Equal(ran, []string{"start:serve", "ready:ask", warmed, "ready:ask"}) {
		t.Errorf("%q", ran)
	}
	s := w.create(t, func(r *CreateRequest) { r.Env = map[string]string{"A": "1"} })
	if !s.Begun || !s.Warm {
		t.Errorf("begun %t, warm %t", s.Begun, s.Warm)
	}
	w.waiting(t, 1)
	ran := agent.took()
	slices.Sort(ran) // the next one may come first
	if !slices.Equal(ran, []string{warmed, "init:1", "ready:ask"}) {
		t.Errorf("%q", ran)
	}
	w.asks(t, 1, 0)
}

// What a template starts is ready in a sandbox before it counts as waiting, and is followed from its
// first process on; whoever gets the sandbox brings the rest before anything of theirs runs.
func TestPoolStarts(t *testing.T) {
	ready := make(chan bool)
	agent := &shellAgent{run: func(tag string, times int) int32 {
		switch {
		case tag == "start":
			return -1
		case times == 0:
			<-ready
			return 7
		}
		return 0
	}}
	following := following{begin: func() { agent.note("followed") }}
	w := agent.world(t, "serve", "ask", pooling(1), func(c *Config) { c.Processes = &following })
	eventually(t, "the ready command", func() bool {
		agent.mu.Lock()
		defer agent.mu.Unlock()
		return slices.Contains(agent.ran, "ready:ask")
	})
	if n := w.Pools()[0].Waiting; n != 0 {
		t.Errorf("%d count that are not ready", n)
	}
	close(ready)
	w.waiting(t, 1)
	if ran := agent.took(); !slices.Equal(ran, []string{warmed, "followed", "start:serve", "ready:ask", "ready:ask"}) {
		t.Errorf("%q", ran)
	}
	s := w.create(t, func(r *CreateRequest) { r.Env = map[string]string{"A": "1"} })
	if !s.Warm || s.Begun {
		t.Errorf("%+v", s)
	}
	if got := w.audit.types(s.ID); got != "sandbox.create:ok policy.set:ok sandbox.start:ok" {
		t.Error(got)
	}
	w.waiting(t, 1)
	ran := agent.took()
	slices.Sort(ran) // the next one may come first
	if !slices.Equal(ran, []string{warmed, "followed", "init:1", "ready:ask", "ready:ask", "start:serve"}) {
		t.Errorf("%q", ran)
	}
	w.asks(t, 1, 0)
	w.Close()
	if left, _ := w.engine.List(t.Context()); len(left) != 1 || left[0] != s.ID {
		t.Errorf("%v in the engine", left)
	}
}

// Where it cannot be ready in the pool, it begins when somebody takes the sandbox.
func TestPoolStartsLater(t *testing.T) {
	var failing sync.Map
	failing.Store("start", int32(3))
	failing.Store("ready", int32(7))
	w, agent := startWorld(t, "serve", "", func(tag string, _ int) int32 {
		if code, ok := failing.Load(tag); ok {
			return code.(int32)
		}
		return -1
	}, pooling(1), func(c *Config) { c.Templates = templates{start: "serve", ready: "ask"} })
	w.waiting(t, 1)
	if left, _ := w.engine.List(t.Context()); len(left) != 1 {
		t.Errorf("%v in the engine", left)
	}
	failing.Delete("start")
	failing.Store("ready", int32(0))
	agent.took()
	if s := w.create(t); !s.Warm {
		t.Errorf("%+v", s)
	}
	if ran := agent.took(); !slices.Contains(ran, "start:serve") || !slices.Contains(ran, "ready:ask") {
		t.Errorf("%q", ran)
	}
}

// A server that ends does not wait for one that is not ready, and leaves nothing of it.
func TestPoolEndsWhileStarting(t *testing.T) {
	w, agent := startWorld(t, "serve", "ask", func(string, int) int32 { return -1 }, pooling(1))
	eventually(t, "the ready command", func() bool {
		agent.mu.Lock()
		defer agent.mu.Unlock()
		return slices.Contains(agent.ran, "ready:ask")
	})
	w.Close()
	if left, _ := w.engine.List(t.Context()); len(left) != 0 {
		t.Errorf("%v in the engine", left)
	}
}

// rebuilt is a store of templates whose one template is built again.
type rebuilt struct {
	templates
	mu    sync.Mutex
	build berm.BuildID
}

func (r *rebuilt) Resolve(ctx context.Context, team berm.Team, ref string) (berm.Template, error) {
	t, err := r.templates.Resolve(ctx, team, ref)
	r.mu.Lock()
	defer r.mu.Unlock()
	t.BuildID = r.build
	return t, err
}

// What an earlier build of a template has begun is nobody's.
func TestPoolOfAnotherStart(t *testing.T) {
	store := &rebuilt{templates: templates{start: "serve"}, build: "one"}
	w, agent := startWorld(t, "", "", func(string, int) int32 { return -1 }, pooling(1), func(c *Config) { c.Templates = store })
	w.waiting(t, 1)
	agent.took()
	store.mu.Lock()
	store.build = "two"
	store.mu.Unlock()
	if s := w.create(t); s.Warm || !slices.Contains(agent.took(), "start:serve") {
		t.Errorf("%+v", s)
	}
}

// A start command sees the variables of its template, never those of a sandbox.
func TestStartCommandVariables(t *testing.T) {
	w, agent := startWorld(t, "serve", "", func(string, int) int32 { return -1 })
	w.create(t, func(r *CreateRequest) { r.Env = map[string]string{"LANG": "de", "B": "2", "A": "1"} })
	if ran := agent.took(); !slices.Equal(ran, []string{"with another LANG: start:B"}) {
		t.Errorf("%q", ran)
	}
	s := newSession(w.Manager)
	s.info = Sandbox{Base: &enginetest.Base, Env: map[string]string{"LANG": "de", "A": "1"}}
	s.online = newOnline()
	s.online.toldAgent.Placeholders = map[string]string{"KEY": "stands for it"}
	env, args := s.templateEnv()
	if !maps.Equal(env, map[string]string{"LANG": "C.UTF-8"}) || !slices.Equal(args, []string{"/usr/bin/env", "-u", "A", "-u", "KEY"}) {
		t.Errorf("%v, %q", env, args)
	}
}
