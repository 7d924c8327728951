package control

import (
	"context"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/control/enginetest"
)

func pooling(size int) func(*Config) {
	return func(c *Config) { c.Pools = []Pool{{Template: "base", Size: size}} }
}

// waiting waits until a pool has as many sandboxes.
func (w *world) waiting(t testing.TB, n int) {
	t.Helper()
	eventually(t, "the pool is as full as it should be", func() bool { return w.Pools()[0].Waiting == n })
}

// asks is the state of the one pool.
func (w *world) asks(t testing.TB, hits, misses int64) {
	t.Helper()
	if p := w.Pools()[0]; p.Hits != hits || p.Misses != misses {
		t.Errorf("%d hits and %d misses, want %d and %d", p.Hits, p.Misses, hits, misses)
	}
}

func TestPool(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t, pooling(2))
	w.waiting(t, 2)
	if all := w.List(Filter{}); len(all) != 0 {
		t.Errorf("what waits is listed: %+v", all)
	}
	if running, all := w.Running(); running != 0 || all != 0 {
		t.Errorf("what waits is counted: %d, %d", running, all)
	}
	made := len(w.engine.Specs)
	before := time.Now()
	s := w.create(t, func(r *CreateRequest) { r.Env, r.Timeout = map[string]string{"A": "b"}, time.Hour })
	if !s.Warm || s.ID != w.engine.Specs[0].ID || s.AccessToken == "" || s.CreatedAt.Before(before.Add(-time.Second)) {
		t.Errorf("%+v", s)
	}
	told := w.engine.Told(s.ID)
	if len(told) != 1 || told[0].Env["A"] != "b" || told[0].Env["LANG"] != "C.UTF-8" || told[0].AccessToken != s.AccessToken ||
		told[0].SandboxID != s.ID || told[0].Timestamp.Before(w.engine.Specs[0].Guest.Timestamp) {
		t.Errorf("%+v", told)
	}
	if spec := w.engine.Specs[0]; spec.Guest.AccessToken != "" || spec.Guest.Env["A"] != "" {
		t.Errorf("it was made for somebody: %+v", spec)
	}
	if status, err := w.session(s.ID); err != nil {
		t.Error(err)
	} else if at, err := status.handle.Status(ctx); err != nil || at.Deadline.Sub(s.EndAt).Abs() > time.Millisecond {
		t.Errorf("%+v, %v", at, err)
	}
	if got := w.audit.types(s.ID); got != "sandbox.create:ok policy.set:ok sandbox.start:ok" {
		t.Error(got)
	}
	w.waiting(t, 2)
	if len(w.engine.Specs) != made+1 {
		t.Errorf("%d were made for one that was taken", len(w.engine.Specs)-made)
	}
	open := w.create(t, func(r *CreateRequest) { r.Secure = false })
	if told := w.engine.Told(open.ID); !open.Warm || told[0].AccessToken != "" {
		t.Errorf("%+v, %+v", open, told)
	}
	w.asks(t, 2, 0)
	// It lives as others do.
	if err := w.Pause(ctx, s.ID, tester); err != nil {
		t.Error(err)
	}
	if _, _, err := w.Connect(ctx, s.ID, time.Minute, tester); err != nil {
		t.Error(err)
	}
	if err := w.Kill(ctx, s.ID, tester); err != nil {
		t.Error(err)
	}
	// Nothing that waits is left when the server stops.
	w.waiting(t, 2)
	w.Close()
	if left, _ := w.engine.List(ctx); len(left) != 1 || left[0] != open.ID {
		t.Errorf("%v in the engine", left)
	}
}

// What cannot be given later is made as always.
func TestPoolOfOthers(t *testing.T) {
	_, configure := saves(t)
	w := newWorld(t, pooling(1), configure)
	w.waiting(t, 1)
	for _, change := range []func(*CreateRequest){
		func(r *CreateRequest) { r.Limits.Memory = 1 << 28 },
		func(r *CreateRequest) { r.OnDeadline = berm.PauseAtDeadline },
	} {
		if s := w.create(t, change); s.Warm || len(w.engine.Told(s.ID)) != 0 {
			t.Errorf("%+v", s)
		}
	}
	w.asks(t, 0, 2)
	s := w.create(t)
	snap, err := w.Snapshot(t.Context(), s.ID, SnapshotRequest{Actor: tester})
	if err != nil {
		t.Fatal(err)
	}
	w.waiting(t, 1)
	if child := w.create(t, func(r *CreateRequest) { r.Template = snap.ID() }); child.Warm {
		t.Errorf("%+v", child)
	}
	w.asks(t, 1, 2)
}

// Each sandbox has one owner, however many come at once.
func TestPoolRace(t *testing.T) {
	w := newWorld(t, pooling(3))
	w.waiting(t, 3)
	var mu sync.Mutex
	seen := map[berm.SandboxID]bool{}
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			s := w.create(t)
			mu.Lock()
			defer mu.Unlock()
			if seen[s.ID] {
				t.Errorf("%s twice", s.ID)
			}
			seen[s.ID] = true
		})
	}
	wg.Wait()
	if p := w.Pools()[0]; p.Hits < 3 || p.Hits+p.Misses != 20 {
		t.Errorf("%+v", p)
	}
	w.waiting(t, 3)
}

// Who takes a sandbox while the pool's are given time keeps the end that was asked for.
func TestPoolDeadlines(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t, pooling(2))
	w.waiting(t, 2)
	first := w.Manager.pools[0].members[0]
	var begun atomic.Bool
	var second Sandbox
	var group sync.WaitGroup
	w.engine.Fail(func(_ berm.SandboxID, method string) error {
		if method == "SetDeadline" && begun.CompareAndSwap(false, true) { // by the look at the first
			group.Go(func() { w.create(t) })
			eventually(t, "the first is taken", func() bool {
				w.mu.Lock()
				defer w.mu.Unlock()
				return !slices.Contains(w.Manager.pools[0].members, first)
			})
			second = w.create(t)
		}
		return nil
	})
	w.checkMembers()
	group.Wait()
	if !second.Warm || second.ID != w.engine.Specs[1].ID {
		t.Fatalf("%+v", second)
	}
	for _, s := range w.List(Filter{}) {
		owned, err := w.session(s.ID)
		if err != nil {
			t.Fatal(err)
		}
		if at, err := owned.handle.Status(ctx); err != nil || at.Deadline.Sub(s.EndAt).Abs() > time.Millisecond {
			t.Errorf("%s ends at %s, its owner is told %s, %v", s.ID, at.Deadline, s.EndAt, err)
		}
	}
}

// One that died, or does not answer, is nobody's.
func TestPoolOfTheDead(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t, pooling(2))
	w.waiting(t, 2)
	first, second := w.engine.Specs[0].ID, w.engine.Specs[1].ID
	w.engine.End(first, berm.ReasonOOM)
	if s := w.create(t); !s.Warm || s.ID != second {
		t.Errorf("%+v", s)
	}
	w.waiting(t, 2)
	w.engine.End(w.engine.Specs[2].ID, berm.ReasonOOM)
	w.checkMembers()
	w.tendPools()
	w.waiting(t, 2)
	for range 2 {
		if s := w.create(t); !s.Warm {
			t.Errorf("%+v", s)
		}
	}
	w.asks(t, 3, 0)
	// A refused record refuses the sandbox, which is then nobody's either.
	w.waiting(t, 2)
	w.audit.setFail(berm.Errorf(berm.Unavailable, "the disk is full"))
	_, err := w.Create(ctx, CreateRequest{Template: "base", Timeout: time.Minute, Actor: tester})
	wantKind(t, err, berm.Unavailable)
	w.audit.setFail(nil)
	w.waiting(t, 2)
	if left, _ := w.engine.List(ctx); len(left) != 3+2 {
		t.Errorf("%v in the engine", left)
	}
}

// What waits is memory: it counts, and gives way.
func TestPoolQuota(t *testing.T) {
	w := newWorld(t, pooling(5), func(c *Config) { c.MaxSandboxes = 3 })
	w.waiting(t, 3)
	cold := func(r *CreateRequest) { r.Limits.Memory = 1 << 28 }
	for range 2 {
		w.create(t, cold)
	}
	eventually(t, "room", func() bool { left, _ := w.engine.List(context.Background()); return len(left) == 3 })
	if s := w.create(t); !s.Warm {
		t.Errorf("%+v", s)
	}
	_, err := w.Create(t.Context(), CreateRequest{Template: "base", Timeout: time.Minute, Actor: tester})
	wantKind(t, err, berm.Exhausted)
	if n := w.Pools()[0].Waiting; n != 0 {
		t.Errorf("%d wait", n)
	}
}

// changing is a store of templates whose one template changes.
type changing struct {
	enginetest.Templates
	mu    sync.Mutex
	layer string
	fail  error
}

func (c *changing) Resolve(ctx context.Context, team berm.Team, ref string) (berm.Template, error) {
	t, err := c.Templates.Resolve(ctx, team, ref)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fail != nil {
		return t, c.fail
	}
	t.Layers = []berm.Layer{{DiffID: c.layer, Path: "/" + c.layer}}
	return t, err
}

func TestPoolOfChangedTemplate(t *testing.T) {
	templates := &changing{layer: "one"}
	w := newWorld(t, pooling(2), func(c *Config) { c.Templates = templates })
	w.waiting(t, 2)
	old, _ := w.engine.List(t.Context())
	templates.mu.Lock()
	templates.layer = "two"
	templates.mu.Unlock()
	if s := w.create(t); s.Warm || s.Base.Layers[0].DiffID != "two" {
		t.Errorf("%+v", s)
	}
	eventually(t, "new ones", func() bool {
		left, _ := w.engine.List(context.Background())
		return len(left) == 3 && !slices.Contains(left, old[0]) && !slices.Contains(left, old[1]) && w.Pools()[0].Waiting == 2
	})
	if s := w.create(t); !s.Warm {
		t.Errorf("%+v", s)
	}
	templates.mu.Lock()
	templates.fail = berm.Errorf(berm.NotFound, "it was removed")
	templates.mu.Unlock()
	w.tendPools()
	w.waiting(t, 0)
}

// What waited under a server that died is nobody's.
func TestPoolAfterCrash(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t, pooling(2))
	w.waiting(t, 2)
	s := w.create(t)
	w.waiting(t, 2)
	crashed := w.Manager
	w.start(t)
	if left, _ := w.engine.List(ctx); len(left) != 1 || left[0] != s.ID {
		t.Errorf("%v in the engine", left)
	}
	if _, err := w.Get(ctx, s.ID); err != nil {
		t.Error(err)
	}
	crashed.Close()
}

// What is done in advance is there for the owner's first request, and gone with who was not taken.
func TestPoolInAdvance(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t, pooling(2))
	w.waiting(t, 2)
	lines := map[berm.SandboxID]net.Conn{}
	for _, waiting := range w.pools[0].members {
		if waiting.line == nil {
			t.Fatal("no connection to the agent waits")
		}
		lines[waiting.spec.ID] = waiting.line
	}
	s := w.create(t)
	route, err := w.Route(s.ID)
	if err != nil {
		t.Fatal(err)
	}
	first, err := route.Dial(ctx, berm.AgentPort)
	if err != nil || first != lines[s.ID] {
		t.Fatalf("%v, %v, want %v", first, err, lines[s.ID])
	}
	second, err := route.Dial(ctx, berm.AgentPort)
	if err != nil || second == first {
		t.Fatalf("%v twice, %v", second, err)
	}
	// It is as good as a new one.
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://agent/init", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	if a, _, err := askAgent(ctx, first, request); err != nil || a.status != http.StatusNoContent {
		t.Errorf("%+v, %v", a, err)
	}
	// One that was not used is cut with the others.
	paused := w.create(t)
	if err := w.Pause(ctx, paused.ID, tester); err != nil {
		t.Fatal(err)
	}
	of, err := w.session(paused.ID)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the connection is closed", func() bool {
		of.mu.Lock()
		defer of.mu.Unlock()
		return of.line == nil
	})
	w.waiting(t, 2)
	var out *member
	w.mu.Lock()
	out = w.pools[0].members[0]
	w.mu.Unlock()
	w.withdraw(func(_ *pool, m *member) bool { return m == out })
	eventually(t, "the connection is closed", func() bool {
		out.mu.Lock()
		defer out.mu.Unlock()
		return out.line == nil
	})
}

// A connection that the agent closed is not given to anybody, and what the agent says is bounded.
func TestLine(t *testing.T) {
	s := newSession(New(Config{}))
	pair := func() (ours, theirs *net.UnixConn) {
		t.Helper()
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		ours, err = net.DialUnix("unix", nil, l.Addr().(*net.UnixAddr))
		if err != nil {
			t.Fatal(err)
		}
		if theirs, err = l.AcceptUnix(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ours.Close(); theirs.Close() })
		return ours, theirs
	}
	ours, theirs := pair()
	s.keepLine(ours)
	if got := s.takeLine(); got != ours {
		t.Errorf("%v", got)
	}
	if got := s.takeLine(); got != nil {
		t.Errorf("%v twice", got)
	}
	s.keepLine(ours)
	theirs.Close()
	if got := s.takeLine(); got != nil {
		t.Errorf("%v, which is closed", got)
	}
	ours, theirs = pair()
	s.keepLine(ours)
	if _, err := theirs.Write([]byte("HTTP/1.1 200 OK\r\n")); err != nil {
		t.Fatal(err)
	}
	if got := s.takeLine(); got != nil {
		t.Errorf("%v, on which something came unasked", got)
	}
	for name, text := range map[string]string{
		"header": "HTTP/1.1 200 OK\r\nA: " + strings.Repeat("a", 2*maxAgentAnswer),
		"body":   "HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + strings.Repeat("a", 2*maxAgentAnswer),
		"end":    "HTTP/1.1 200 OK\r\nContent-Le",
	} {
		ours, theirs := pair()
		go func() {
			_, _ = io.WriteString(theirs, text)
			theirs.Close()
		}()
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://agent/init", nil)
		if err != nil {
			t.Fatal(err)
		}
		if a, again, err := askAgent(t.Context(), ours, request); err == nil || again {
			t.Errorf("%s: %+v, %v", name, a, again)
		}
	}
}
