package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/control/enginetest"
	"github.com/berm-sandbox/berm/internal/store"
)

var tester = audit.Actor{Type: "key", ID: "test"}

// records is an audit log in memory that can be told to fail.
type records struct {
	mu       sync.Mutex
	all      []audit.Record
	together int // records that came with others
	fail     error
	before   func(audit.Record) // is called before one is kept; nil for nothing
}

func (r *records) EmitAll(all []audit.Record) (err error) {
	for _, rec := range all {
		err = cmp.Or(err, r.Emit(rec))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(all) > 1 {
		r.together += len(all)
	}
	return err
}

func (r *records) Emit(rec audit.Record) error {
	if r.before != nil {
		r.before(rec)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fail == nil {
		r.all = append(r.all, rec)
	}
	return r.fail
}

func (r *records) setFail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fail = err
}

func (r *records) types(id berm.SandboxID) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var s []string
	for _, rec := range r.all {
		if rec.Sandbox == id {
			s = append(s, string(rec.Type)+":"+string(rec.Outcome))
		}
	}
	return strings.Join(s, " ")
}

type world struct {
	*Manager
	engine *enginetest.Engine
	audit  *records
	db     *store.DB
}

func newWorld(t testing.TB, configure ...func(*Config)) *world {
	t.Helper()
	db, err := store.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	w := &world{engine: &enginetest.Engine{}, audit: &records{}, db: db}
	w.start(t, configure...)
	return w
}

// start makes a manager on the engine and store of the world, as a new server does.
func (w *world) start(t testing.TB, configure ...func(*Config)) {
	t.Helper()
	c := Config{
		Engine: w.engine, Templates: enginetest.Templates{}, Store: w.db, Audit: w.audit,
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Seed: make([]byte, 32), Level: berm.Auto,
		MaxTimeout: 24 * time.Hour, MaxLimits: berm.Limits{CPU: 8, Memory: 8 << 30}, SampleEvery: 20 * time.Millisecond,
	}
	for _, f := range configure {
		f(&c)
	}
	w.Manager = New(c)
	if err := w.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
}

func (w *world) create(t testing.TB, change ...func(*CreateRequest)) Sandbox {
	t.Helper()
	r := CreateRequest{Template: "base", Timeout: time.Minute, Secure: true, Actor: tester}
	for _, f := range change {
		f(&r)
	}
	s, err := w.Create(context.Background(), r)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// eventually waits for a condition that another goroutine brings about.
func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if holds() {
			return
		}
	}
	t.Fatal("not in time: " + what)
}

func wantKind(t testing.TB, err error, kind berm.Kind) {
	t.Helper()
	if err == nil || berm.KindOf(err) != kind {
		t.Errorf("error %v, want kind %v", err, kind)
	}
}

func TestLifecycle(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t)
	s := w.create(t, func(r *CreateRequest) { r.Env = map[string]string{"A": "b"} })
	if s.State != berm.Running || s.Level != berm.Namespace || s.Alias != "base" || s.AccessToken == "" || s.TrafficToken != "" {
		t.Errorf("created: %+v", s)
	}
	spec := w.engine.Specs[0]
	if spec.Guest.AccessToken != s.AccessToken || spec.Guest.Env["A"] != "b" || spec.Guest.Env["LANG"] != "C.UTF-8" || !spec.Setuid {
		t.Errorf("spec: %+v", spec)
	}
	if err := w.Pause(ctx, s.ID, tester); err != nil {
		t.Fatal(err)
	}
	wantKind(t, w.Pause(ctx, s.ID, tester), berm.Conflict)
	wantKind(t, w.SetTimeout(ctx, s.ID, time.Minute, tester), berm.Conflict)
	paused, err := w.Get(ctx, s.ID)
	if err != nil || paused.State != berm.Paused || paused.AccessToken != s.AccessToken {
		t.Errorf("paused: %+v, %v", paused, err)
	}
	again, resumed, err := w.Connect(ctx, s.ID, 2*time.Minute, tester)
	if err != nil || !resumed || !again.StartedAt.After(s.StartedAt) || again.AccessToken != s.AccessToken {
		t.Errorf("connected: %+v, %v, %v", again, resumed, err)
	}
	_, err = w.Resume(ctx, s.ID, time.Minute, tester)
	wantKind(t, err, berm.Conflict)
	if err := w.Kill(ctx, s.ID, tester); err != nil {
		t.Fatal(err)
	}
	wantKind(t, w.Kill(ctx, s.ID, tester), berm.NotFound)
	_, _, err = w.Connect(ctx, s.ID, time.Minute, tester)
	wantKind(t, err, berm.NotFound)
	dead, err := w.Inspect(ctx, s.ID)
	if err != nil || dead.State != berm.Killed || dead.Exit == nil || dead.Exit.Reason != berm.ReasonKilled {
		t.Errorf("dead: %+v, %v", dead, err)
	}
	const told = "sandbox.create:ok policy.set:ok sandbox.start:ok sandbox.pause:ok sandbox.resume:ok sandbox.exit:ok"
	if got := w.audit.types(s.ID); got != told {
		t.Errorf("records %s", got)
	}
	// The first line is written beside the answer to the create.
	eventually(t, "four log lines", func() bool {
		lines, err := w.Logs(ctx, s.ID, time.Time{}, false, 100)
		return err == nil && len(lines) == 4
	})
}

func TestConnectOnlyExtends(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t)
	s := w.create(t)
	same, resumed, err := w.Connect(ctx, s.ID, time.Second, tester)
	if err != nil || resumed || same.EndAt != s.EndAt {
		t.Errorf("shorter: %v, want %v bit by bit (%v)", same.EndAt, s.EndAt, err)
	}
	longer, _, err := w.Connect(ctx, s.ID, time.Hour, tester)
	if err != nil || longer.EndAt.Sub(s.EndAt) < 58*time.Minute {
		t.Errorf("longer: %v after %v (%v)", longer.EndAt, s.EndAt, err)
	}
	if err := w.Refresh(ctx, s.ID, time.Minute, tester); err != nil {
		t.Fatal(err)
	}
	if got, _ := w.Get(ctx, s.ID); got.EndAt != longer.EndAt {
		t.Error("a refresh made the time shorter")
	}
	if err := w.SetTimeout(ctx, s.ID, time.Minute, tester); err != nil {
		t.Fatal(err)
	}
	if got, _ := w.Get(ctx, s.ID); !got.EndAt.Before(longer.EndAt) {
		t.Error("a timeout did not make the time shorter")
	}
	for _, id := range []berm.SandboxID{s.ID, "unknown"} {
		_, _, err := w.Connect(ctx, id, 25*time.Hour, tester)
		wantKind(t, err, berm.Invalid)
	}
}

func TestDeadlineKills(t *testing.T) {
	w := newWorld(t)
	s := w.create(t, func(r *CreateRequest) { r.Timeout = 30 * time.Millisecond })
	var dead Sandbox
	var err error
	eventually(t, "death", func() bool { dead, err = w.Inspect(t.Context(), s.ID); return err != nil || dead.Exit != nil })
	if _, getErr := w.Get(t.Context(), s.ID); err != nil || berm.KindOf(getErr) != berm.NotFound || dead.Exit.Reason != berm.ReasonTimeout {
		t.Errorf("%+v, %v", dead.Exit, err)
	}
}

func TestDeadlinePausesAndTrafficWakes(t *testing.T) {
	w := newWorld(t)
	s := w.create(t, func(r *CreateRequest) {
		r.Timeout, r.OnDeadline, r.AutoResume = 30*time.Millisecond, berm.PauseAtDeadline, true
	})
	eventually(t, "pause", func() bool { got, err := w.Get(t.Context(), s.ID); return err == nil && got.State == berm.Paused })
	route, err := w.Route(s.ID)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if life, err := route.Enter(t.Context()); err != nil || life.Err() != nil {
				t.Errorf("enter: %v", err)
			}
		})
	}
	wg.Wait()
	if n := strings.Count(w.audit.types(s.ID), "sandbox.resume:ok"); n != 1 {
		t.Errorf("%d resumes for 50 requests", n)
	}
	got, _ := w.Get(t.Context(), s.ID)
	if left := time.Until(got.EndAt); left < minWakeTimeout-time.Second || left > minWakeTimeout {
		t.Errorf("woken for %v", left)
	}
	if got.OnDeadline != berm.PauseAtDeadline {
		t.Error("the resume lost what happens at the deadline")
	}
}

func TestPausedSandboxStaysClosed(t *testing.T) {
	w := newWorld(t)
	s := w.create(t)
	route, _ := w.Route(s.ID)
	life, err := route.Enter(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Pause(t.Context(), s.ID, tester); err != nil {
		t.Fatal(err)
	}
	if life.Err() == nil {
		t.Error("streams were not cut at pause")
	}
	_, err = route.Enter(t.Context())
	wantKind(t, err, berm.NotFound)
	if _, _, err := w.Connect(t.Context(), s.ID, time.Minute, tester); err != nil {
		t.Fatal(err)
	}
	next, err := route.Enter(t.Context())
	if err != nil || next.Err() != nil || next == life {
		t.Errorf("after the resume: %v", err)
	}
	w.Kill(t.Context(), s.ID, tester)
	if next.Err() == nil {
		t.Error("streams were not cut at death")
	}
}

func TestOneOfManyPausesWins(t *testing.T) {
	w := newWorld(t)
	s := w.create(t)
	held := make(chan struct{})
	w.engine.Fail(func(_ berm.SandboxID, method string) error {
		if method == "Pause" {
			<-held
		}
		return nil
	})
	var won, conflicts atomic.Int32
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			switch err := w.Pause(t.Context(), s.ID, tester); {
			case err == nil:
				won.Add(1)
			case berm.KindOf(err) == berm.Conflict:
				conflicts.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	eventually(t, "conflicts", func() bool { return conflicts.Load() == 9 })
	// A connect waits for the pause and then resumes.
	connected := make(chan bool)
	go func() {
		_, resumed, err := w.Connect(t.Context(), s.ID, time.Minute, tester)
		connected <- resumed && err == nil
	}()
	// Get waits too.
	got := make(chan berm.State)
	go func() { info, _ := w.Get(t.Context(), s.ID); got <- info.State }()
	time.Sleep(20 * time.Millisecond)
	close(held)
	wg.Wait()
	if won.Load() != 1 {
		t.Errorf("%d pauses won", won.Load())
	}
	if !<-connected {
		t.Error("connect during the pause did not resume")
	}
	if state := <-got; state != berm.Paused && state != berm.Running {
		t.Errorf("get during the pause: %s", state)
	}
}

func TestKillWins(t *testing.T) {
	w := newWorld(t)
	s := w.create(t)
	inPause, held := make(chan struct{}), make(chan struct{})
	w.engine.Fail(func(_ berm.SandboxID, method string) error {
		if method == "Pause" {
			close(inPause)
			<-held
		}
		return nil
	})
	paused := make(chan error)
	go func() { paused <- w.Pause(t.Context(), s.ID, tester) }()
	<-inPause
	if err := w.Kill(t.Context(), s.ID, tester); err != nil {
		t.Fatal(err)
	}
	close(held)
	wantKind(t, <-paused, berm.NotFound)
}

func TestFailedTransitionsFallBack(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t)
	s := w.create(t)
	broken := berm.Errorf(berm.Internal, "broken")
	var failing atomic.Value
	failing.Store("Pause")
	w.engine.Fail(func(_ berm.SandboxID, method string) error {
		if method == failing.Load() {
			return broken
		}
		return nil
	})
	wantKind(t, w.Pause(ctx, s.ID, tester), berm.Internal)
	if got, _ := w.Get(ctx, s.ID); got.State != berm.Running {
		t.Errorf("after a failed pause: %s", got.State)
	}
	failing.Store("Resume")
	if err := w.Pause(ctx, s.ID, tester); err != nil {
		t.Fatal(err)
	}
	_, _, err := w.Connect(ctx, s.ID, time.Minute, tester)
	wantKind(t, err, berm.Internal)
	if got, _ := w.Get(ctx, s.ID); got.State != berm.Paused {
		t.Errorf("after a failed resume: %s", got.State)
	}
	failing.Store("Kill")
	wantKind(t, w.Kill(ctx, s.ID, tester), berm.Internal)
	failing.Store("")
	eventually(t, "removal in the end", func() bool { info, err := w.Inspect(ctx, s.ID); return err == nil && info.Exit != nil })
}

func TestQuotaHoldsUnderConcurrency(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.MaxSandboxes = 5 })
	var made, refused atomic.Int32
	var wg sync.WaitGroup
	for range 40 {
		wg.Go(func() {
			_, err := w.Create(t.Context(), CreateRequest{Template: "base", Timeout: time.Minute, Actor: tester})
			switch {
			case err == nil:
				made.Add(1)
			case berm.KindOf(err) == berm.Exhausted:
				refused.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if made.Load() != 5 || refused.Load() != 35 {
		t.Errorf("%d made, %d refused", made.Load(), refused.Load())
	}
	w.Kill(t.Context(), w.List(Filter{})[0].ID, tester)
	w.create(t)
}

func TestFailingAuditRefuses(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t)
	s := w.create(t)
	w.audit.setFail(berm.Errorf(berm.Unavailable, "disk full"))
	_, err := w.Create(ctx, CreateRequest{Template: "base", Timeout: time.Minute})
	wantKind(t, err, berm.Unavailable)
	if len(w.engine.Specs) != 1 {
		t.Error("a sandbox was made without a record")
	}
	wantKind(t, w.Pause(ctx, s.ID, tester), berm.Unavailable)
	wantKind(t, w.SetTimeout(ctx, s.ID, time.Hour, tester), berm.Unavailable)
	if got, _ := w.Get(ctx, s.ID); got.State != berm.Running || got.EndAt != s.EndAt {
		t.Errorf("refused actions changed the sandbox: %+v", got)
	}
	if err := w.Kill(ctx, s.ID, tester); err != nil {
		t.Errorf("harm could not be stopped: %v", err)
	}
}

func TestRestartFindsSandboxes(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t)
	running, paused, dying, lost := w.create(t), w.create(t), w.create(t), w.create(t)
	if err := w.Pause(ctx, paused.ID, tester); err != nil {
		t.Fatal(err)
	}
	w.Close()
	w.engine.End(dying.ID, berm.ReasonOOM)
	w.engine.End(lost.ID, "")
	w.engine.Remove(ctx, lost.ID)
	orphan := berm.Spec{ID: berm.NewSandboxID()}
	w.engine.Create(ctx, orphan)

	w.start(t)
	if got, err := w.Get(ctx, running.ID); err != nil || got.State != berm.Running || got.EndAt != running.EndAt || got.AccessToken != running.AccessToken {
		t.Errorf("running: %+v, %v", got, err)
	}
	if got, err := w.Get(ctx, paused.ID); err != nil || got.State != berm.Paused {
		t.Errorf("paused: %+v, %v", got, err)
	}
	if _, resumed, err := w.Connect(ctx, paused.ID, time.Minute, tester); err != nil || !resumed {
		t.Errorf("resume after the restart: %v", err)
	}
	for id, reason := range map[berm.SandboxID]berm.Reason{dying.ID: berm.ReasonOOM, lost.ID: berm.ReasonCrash} {
		eventually(t, "record of death", func() bool {
			info, err := w.Inspect(ctx, id)
			return err == nil && info.Exit != nil && info.Exit.Reason == reason
		})
	}
	left, _ := w.engine.List(ctx)
	if len(left) != 2 {
		t.Errorf("left in the engine: %v", left)
	}
	// What happens after the restart is still seen.
	w.engine.End(running.ID, berm.ReasonExit)
	eventually(t, "death", func() bool { _, err := w.Get(ctx, running.ID); return err != nil })
}

func TestLostMonitor(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t)
	kept, dead := w.create(t), w.create(t)
	for _, s := range []Sandbox{kept, dead} {
		eventually(t, "a sample", func() bool { m, _ := w.Metrics(s.ID, time.Time{}, time.Time{}); return len(m) > 0 })
	}
	time.Sleep(20 * time.Millisecond) // until events are followed
	w.engine.LoseMonitor(kept.ID)
	time.Sleep(200 * time.Millisecond)
	if _, err := w.Get(ctx, kept.ID); err != nil {
		t.Errorf("a lost connection ended the sandbox: %v", err)
	}
	w.engine.RestartAgent(kept.ID)
	eventually(t, "agent.lost", func() bool { return strings.Contains(w.audit.types(kept.ID), "agent.lost") })
	// Also when nobody could hear of it.
	w.engine.LoseMonitor(kept.ID)
	w.engine.RestartAgent(kept.ID)
	eventually(t, "agent.lost again", func() bool { return strings.Count(w.audit.types(kept.ID), "agent.lost") == 2 })
	w.engine.Fail(func(id berm.SandboxID, method string) error {
		if id == dead.ID && method == "Open" {
			return berm.Errorf(berm.NotFound, "no monitor")
		}
		return nil
	})
	w.engine.LoseMonitor(dead.ID)
	eventually(t, "death", func() bool { _, err := w.Get(ctx, dead.ID); return err != nil })
}

func TestRaces(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	for range 20 {
		s := w.create(t, func(r *CreateRequest) { r.AutoResume = true })
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() { w.Pause(ctx, s.ID, tester) })
			wg.Go(func() { w.Connect(ctx, s.ID, time.Minute, tester) })
			wg.Go(func() { w.SetTimeout(ctx, s.ID, time.Hour, tester) })
			wg.Go(func() { w.List(Filter{}); w.Match(func(string) bool { return false }) })
			wg.Go(func() {
				if route, err := w.Route(s.ID); err == nil {
					route.Enter(ctx)
				}
			})
			wg.Go(func() { w.Get(ctx, s.ID) })
		}
		var killed atomic.Int32
		for range 2 {
			wg.Go(func() {
				if w.Kill(ctx, s.ID, tester) == nil {
					killed.Add(1)
				}
			})
		}
		wg.Wait()
		if killed.Load() != 1 {
			t.Fatalf("%d kills succeeded", killed.Load())
		}
	}
	if left, _ := w.engine.List(ctx); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// A sandbox that dies while it is made is not a template that does not exist.
func TestDeathDuringCreate(t *testing.T) {
	w := newWorld(t)
	w.engine.Fail(func(_ berm.SandboxID, method string) error {
		if method == "Create" {
			return berm.Errorf(berm.NotFound, "the sandbox's monitor is gone")
		}
		return nil
	})
	if _, err := w.Create(t.Context(), CreateRequest{Template: "base", Timeout: time.Minute}); berm.KindOf(err) != berm.Unavailable {
		t.Errorf("%v", err)
	}
}

func TestCreateRefusesBadRequests(t *testing.T) {
	w := newWorld(t)
	many := map[string]string{}
	for i := range maxPairs + 1 {
		many[fmt.Sprint(i)] = ""
	}
	for name, change := range map[string]func(*CreateRequest){
		"no template":         func(r *CreateRequest) { r.Template = "" },
		"negative timeout":    func(r *CreateRequest) { r.Timeout = -1 },
		"endless timeout":     func(r *CreateRequest) { r.Timeout = 1 << 62 },
		"private, not secure": func(r *CreateRequest) { r.Secure, r.Network.Private = false, true },
		"mask with spaces":    func(r *CreateRequest) { r.Network.MaskHost = "a b" },
		"mask with a header":  func(r *CreateRequest) { r.Network.MaskHost = "a\r\nX: y" },
		"agent over https":    func(r *CreateRequest) { r.Network.HTTPSPorts = []uint16{berm.AgentPort} },
		"NUL in metadata":     func(r *CreateRequest) { r.Metadata = map[string]string{"a": "\x00"} },
		"too many pairs":      func(r *CreateRequest) { r.Metadata = many },
		"too large mcp":       func(r *CreateRequest) { r.MCP = []byte(`"` + strings.Repeat("x", maxPairSize) + `"`) },
		"too many rules":      func(r *CreateRequest) { r.Network.DenyOut = make([]string, maxPairs+1) },
		"too many ports":      func(r *CreateRequest) { r.Network.HTTPSPorts = slices.Repeat([]uint16{443}, maxPairs+1) },
		"too large a value":   func(r *CreateRequest) { r.Env = map[string]string{"A": strings.Repeat("x", maxPairSize)} },
		"name of two lines":   func(r *CreateRequest) { r.Env = map[string]string{"A\nB": ""} },
		"name with =":         func(r *CreateRequest) { r.Env = map[string]string{"A=B": ""} },
		"empty name":          func(r *CreateRequest) { r.Env = map[string]string{"": ""} },
		"negative memory":     func(r *CreateRequest) { r.Limits.Memory = -1 },
		"huge cpu":            func(r *CreateRequest) { r.Limits.CPU = 1e9 },
		"tiny disk":           func(r *CreateRequest) { r.Limits.Disk = 1 },
	} {
		r := CreateRequest{Template: "base", Timeout: time.Minute, Secure: true}
		change(&r)
		if _, err := w.Create(t.Context(), r); err == nil || berm.KindOf(err) != berm.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, err := w.Create(t.Context(), CreateRequest{Template: "nope", Timeout: time.Minute})
	wantKind(t, err, berm.NotFound)
	if len(w.engine.Specs) > 0 {
		t.Error("a bad request reached the engine")
	}
}

func TestCancelledCreateLeavesNothing(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	w.engine.Fail(func(_ berm.SandboxID, method string) error {
		if method == "Create" {
			cancel()
		}
		return nil
	})
	if _, err := w.Create(ctx, CreateRequest{Template: "base", Timeout: time.Minute}); err == nil {
		t.Fatal("created")
	}
	if running, all := w.Running(); running+all+len(w.creating) != 0 {
		t.Error("the quota still counts it")
	}
	late, cancel := context.WithCancel(t.Context())
	w.engine.Fail(nil)
	w.engine.Created = cancel
	if _, err := w.Create(late, CreateRequest{Template: "base", Timeout: time.Minute}); err == nil {
		t.Error("created for nobody")
	}
	if left, _ := w.engine.List(t.Context()); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	w.engine.Fail(func(_ berm.SandboxID, method string) error {
		if method == "Create" {
			return errors.New("broken")
		}
		return nil
	})
	for range 3 {
		w.Create(t.Context(), CreateRequest{Template: "base", Timeout: time.Minute})
	}
	if len(w.creating) != 0 {
		t.Errorf("%d creates still count", len(w.creating))
	}
}

func TestSamples(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.SampleEvery = time.Millisecond })
	s := w.create(t)
	eventually(t, "the ring to fill", func() bool { m, _ := w.Metrics(s.ID, time.Time{}, time.Time{}); return len(m) == maxSamples })
	m, _ := w.Metrics(s.ID, time.Time{}, time.Time{})
	for i := 1; i < len(m); i++ {
		if m[i].At.Before(m[i-1].At) {
			t.Fatal("samples out of order")
		}
	}
	if m, _ := w.Metrics(s.ID, time.Time{}, s.CreatedAt.Add(-time.Hour)); len(m) > 0 {
		t.Error("samples from before the sandbox")
	}
	if latest := w.LatestMetrics([]berm.SandboxID{s.ID, "unknown"}); len(latest) != 1 {
		t.Errorf("latest: %v", latest)
	}
}

func TestTokensDiffer(t *testing.T) {
	w := newWorld(t)
	a := w.create(t, func(r *CreateRequest) { r.Network.Private = true })
	b := w.create(t)
	open := w.create(t, func(r *CreateRequest) { r.Secure = false })
	if a.AccessToken == b.AccessToken || a.AccessToken == a.TrafficToken || a.TrafficToken == "" || open.AccessToken != "" {
		t.Error("tokens are not apart")
	}
	for token, id := range map[string]berm.SandboxID{a.AccessToken: a.ID, b.AccessToken: b.ID, "": ""} {
		if got, found := w.Match(func(of string) bool { return of == token }); got != id || found != (id != "") {
			t.Errorf("token of %q matches %q", id, got)
		}
	}
}

func BenchmarkCreate(b *testing.B) {
	w := newWorld(b)
	log, err := audit.Open(b.TempDir()+"/log", nil)
	if err != nil {
		b.Fatal(err)
	}
	defer log.Close()
	w.Audit = log
	for b.Loop() {
		s, err := w.Create(context.Background(), CreateRequest{Template: "base", Timeout: time.Minute, Secure: true})
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		w.Kill(context.Background(), s.ID, tester)
		b.StartTimer()
	}
}
