package quota

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/internal/network/policy"
)

func set(t *testing.T, q *Quota, document string) {
	t.Helper()
	p, err := policy.DecodeYAML("p", []byte("version: 1\n"+document))
	if err != nil {
		t.Fatal(err)
	}
	q.Set(p)
}

func open(t *testing.T, q *Quota, rule string) *Use {
	t.Helper()
	u, err := q.Open(rule)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// by checks whose limit was exceeded, and which.
func by(t *testing.T, err error, rule, limit string) {
	t.Helper()
	var e *Exceeded
	if !errors.As(err, &e) || e.Rule != rule || e.Limit != limit {
		t.Errorf("%#v, want %q of %q", err, limit, rule)
	}
}

const rule = "rules:\n  - {id: a, to: [a.example.com], limits: "

func TestFlows(t *testing.T) {
	q := New()
	open(t, q, "a").Close()
	first := open(t, q, "a") // before there is a limit
	set(t, q, "limits: {flows: 3}\n"+rule+"{flows: 2}}\n")
	open(t, q, "a")
	_, err := q.Open("a")
	by(t, err, "a", "2 flows at a time")
	other := open(t, q, "b")
	_, err = q.Open("c")
	by(t, err, "", "3 flows at a time")
	other.Move("a")
	other.Close()
	first.Close()
	open(t, q, "a")
	_, err = q.Open("a")
	by(t, err, "a", "2 flows at a time")
	set(t, q, "")
	for range 10 {
		open(t, q, "a")
	}
}

func TestRatesOfEvents(t *testing.T) {
	q := New()
	set(t, q, "limits: {new_flows: 2, queries: 1}\nrules:\n  - {id: a, to: [a.example.com], http: {}, limits: {requests: 1}}\n")
	open(t, q, "x")
	open(t, q, "y")
	_, err := q.Open("x")
	by(t, err, "", "2 new flows a second")
	if q.Query() != nil || q.Request("a") != nil || q.Request("b") != nil {
		t.Error("the first is too many")
	}
	by(t, q.Query(), "", "1 queries a second")
	by(t, q.Request("a"), "a", "1 requests a second")
}

func TestBytes(t *testing.T) {
	q, ctx := New(), t.Context()
	set(t, q, "limits: {total: 100}\n"+rule+"{up: 60/h}}\n")
	a, b := open(t, q, "a"), open(t, q, "b")
	if err := errors.Join(a.Pass(ctx, true, 60), a.Pass(ctx, false, 20)); err != nil {
		t.Fatal(err)
	}
	by(t, a.Pass(ctx, true, 1), "a", "60/h sent")
	_, err := q.Open("a")
	by(t, err, "a", "60/h sent")
	by(t, b.Pass(ctx, false, 21), "", "100 sent and received")
	by(t, b.Pass(ctx, true, 1), "", "100 sent and received") // the limit is used up for good
	_, err = q.Open("b")
	by(t, err, "", "100 sent and received")
	// What was used stays used.
	set(t, q, "limits: {total: 101}\n"+rule+"{up: 61/h}}\n")
	by(t, a.Pass(ctx, true, 2), "", "101 sent and received")
	set(t, q, rule+"{up: 61/h}}\n")
	by(t, a.Pass(ctx, true, 2), "a", "61/h sent")
	// The next period begins.
	q.mu.Lock()
	q.rules["a"].up.since = time.Now().Add(-time.Hour)
	q.mu.Unlock()
	if err := a.Pass(ctx, true, 61); err != nil {
		t.Fatal(err)
	}
	by(t, a.Pass(ctx, true, 1), "a", "61/h sent")
	a.Move("b")
	if err := a.Pass(ctx, true, 1000); err != nil {
		t.Fatal(err)
	}
}

func TestPace(t *testing.T) {
	q := New()
	set(t, q, "limits: {up: 1000/s}\n")
	u := open(t, q, "a")
	ctx, cancel := context.WithCancel(t.Context())
	begin := time.Now()
	if err := u.Pass(ctx, true, 300); err != nil { // a tenth of a second's at once
		t.Fatal(err)
	}
	if took := time.Since(begin); took < 150*time.Millisecond {
		t.Errorf("300 bytes in %v at 1000 a second", took)
	}
	if err := u.Pass(ctx, false, 1<<30); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := u.Pass(ctx, true, 300); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end of the flow: %v", err)
	}
	// The pace is not used up.
	if _, err := q.Open("a"); err != nil {
		t.Error(err)
	}
}

func TestDuration(t *testing.T) {
	q := New()
	set(t, q, "limits: {duration: 1h}\n"+rule+"{duration: 1m}}\n")
	if d, limit := open(t, q, "a").Duration(); d != time.Minute || limit.Rule != "a" || limit.Limit != "1m0s for one flow" {
		t.Error(d, limit)
	}
	if d, limit := open(t, q, "b").Duration(); d != time.Hour || limit.Rule != "" {
		t.Error(d, limit)
	}
}

// However many flows there are, together they never pass more than the limit.
func TestTogether(t *testing.T) {
	q := New()
	const most = 100_000
	set(t, q, "limits: {total: 100000}\n")
	var passed atomic.Int64
	var wg sync.WaitGroup
	uses := make([]*Use, 16)
	for i := range uses {
		uses[i] = open(t, q, "a")
	}
	for i, u := range uses {
		wg.Go(func() {
			defer u.Close()
			for u.Pass(t.Context(), i%2 == 0, 77) == nil {
				passed.Add(77)
			}
		})
	}
	wg.Wait()
	if n := passed.Load(); n > most || n < most-77 {
		t.Errorf("%d bytes passed", n)
	}
	if len(q.flows) != 0 || q.total != 0 {
		t.Errorf("%d flows are left", q.total)
	}
}

func BenchmarkPass(b *testing.B) {
	for name, document := range map[string]string{"none": "version: 1\n", "limited": "version: 1\nlimits: {total: 1000000TiB}\n"} {
		b.Run(name, func(b *testing.B) {
			p, err := policy.DecodeYAML("p", []byte(document))
			if err != nil {
				b.Fatal(err)
			}
			q := New()
			q.Set(p)
			u, _ := q.Open("a")
			for b.Loop() {
				_ = u.Pass(b.Context(), true, 1)
			}
		})
	}
}
