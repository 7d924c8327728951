package ask

import (
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/address"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/policy"
)

// asking is a verdict that asks about a port.
func asking(t *testing.T, port uint16) policy.Verdict {
	t.Helper()
	table, err := address.NewTable(address.Config{})
	if err != nil {
		t.Fatal(err)
	}
	p, err := policy.DecodeYAML("p", []byte("version: 1\nrules: [{id: rest, to: [public], ports: [any], action: ask}]"))
	if err != nil {
		t.Fatal(err)
	}
	e, err := policy.NewEvaluator(p, nil, table)
	if err != nil {
		t.Fatal(err)
	}
	host, err := policy.ParseHost("www.example.com")
	if err != nil {
		t.Fatal(err)
	}
	v := e.Decide(policy.Flow{Host: host, Port: port, Proto: policy.TCP, Time: time.Now()})
	if v.Action != policy.Ask {
		t.Fatal(v.Explain())
	}
	return v
}

func (a *Answers) applied(t *testing.T, v policy.Verdict) policy.Action {
	t.Helper()
	v, _ = a.Apply(v)
	return v.Action
}

func TestEqualQuestionsAreOne(t *testing.T) {
	a := New(func() { t.Error("something is over") })
	defer a.Close()
	v := asking(t, 443)
	var wg sync.WaitGroup
	firsts, allowed := 0, 0
	var mu sync.Mutex
	for range 20 {
		o, first := a.Ask(v)
		if first {
			firsts++
		}
		wg.Go(func() {
			<-o.Done
			if a.Leave(o, v).Action == policy.Allow {
				mu.Lock()
				allowed++
				mu.Unlock()
			}
		})
	}
	if err := a.Give(egress.Reply{Question: Of(v), Allow: true, Scope: egress.ScopeOnce}, false); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	if firsts != 1 || allowed != 20 || a.waiting != 0 {
		t.Errorf("%d questions, %d allowed, %d wait", firsts, allowed, a.waiting)
	}
	if got := a.applied(t, v); got != policy.Ask { // once is over
		t.Error(got)
	}
}

func TestScopes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var over atomic.Int32
		a := New(func() { over.Add(1) })
		defer a.Close()
		give := func(port uint16, allow bool, scope egress.Scope, d time.Duration, lend bool) policy.Verdict {
			v := asking(t, port)
			if err := a.Give(egress.Reply{Question: Of(v), Allow: allow, Scope: scope, Until: time.Now().Add(d)}, lend); err != nil {
				t.Fatal(err)
			}
			return v
		}
		always, never := give(1, true, egress.ScopeSandbox, 0, false), give(2, false, egress.ScopeSandbox, 0, false)
		hour, lent := give(3, true, egress.ScopeUntil, time.Hour, false), give(4, true, egress.ScopeOnce, 0, true)
		if v, once := a.Apply(lent); v.Action != policy.Allow || !once {
			t.Error(v, once)
		}
		if a.applied(t, always) != policy.Allow || a.applied(t, never) != policy.Deny || a.applied(t, hour) != policy.Allow {
			t.Error("answers are not kept")
		}
		if a.applied(t, asking(t, 5)) != policy.Ask {
			t.Error("an answer holds for another port")
		}
		time.Sleep(lentTime)
		synctest.Wait()
		if a.applied(t, lent) != policy.Ask || over.Load() != 0 {
			t.Error("once holds for long")
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if a.applied(t, hour) != policy.Ask || over.Load() != 1 || a.applied(t, always) != policy.Allow || a.applied(t, never) != policy.Deny {
			t.Errorf("after an hour: %d", over.Load())
		}
		for _, wrong := range []egress.Reply{{Scope: "ever"}, {Scope: egress.ScopeUntil}, {Allow: true}} {
			if err := a.Give(wrong, false); berm.KindOf(err) != berm.Invalid {
				t.Errorf("%+v: %v", wrong, err)
			}
		}
	})
}

func TestNoAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New(func() { t.Error("something is over") })
		v := asking(t, 443)
		o, _ := a.Ask(v)
		time.Sleep(Patience - time.Second)
		late, first := a.Ask(v)
		if first {
			t.Error("it is asked a second time")
		}
		<-o.Done
		<-late.Done
		if got := a.Leave(o, v); got.Action != policy.Deny || got.Reason != policy.ReasonAsk {
			t.Error(got.Explain())
		}
		a.Leave(late, v)
		if a.applied(t, v) != policy.Deny {
			t.Error("it is asked again at once")
		}
		time.Sleep(rest)
		synctest.Wait()
		if a.applied(t, v) != policy.Ask {
			t.Error("it is never asked again")
		}
		// That nobody answers is known at once.
		o, _ = a.Ask(v)
		if err := a.Give(egress.Reply{Question: Of(v)}, false); err != nil {
			t.Error(err)
		}
		<-o.Done
		if got := a.Leave(o, v); got.Action != policy.Deny || got.Detail != "nobody answered" {
			t.Error(got.Explain())
		}
		time.Sleep(rest)
		synctest.Wait()
		// The end of the sandbox.
		o, _ = a.Ask(v)
		a.Close()
		<-o.Done
		if a.Leave(o, v).Action != policy.Deny {
			t.Error("the end is a yes")
		}
		if o, _ := a.Ask(v); o != nil {
			t.Error("a question after the end")
		}
	})
}

func TestBounds(t *testing.T) {
	a := New(func() {})
	defer a.Close()
	for port := range uint16(maxOpen) {
		if o, first := a.Ask(asking(t, port+1)); o == nil || !first {
			t.Fatalf("question %d", port)
		}
	}
	if o, _ := a.Ask(asking(t, maxOpen+1)); o != nil {
		t.Error("too many questions")
	}
	v := asking(t, 1)
	for a.waiting < maxWaiting {
		if o, first := a.Ask(v); o == nil || first {
			t.Fatal("an equal question")
		}
	}
	if o, _ := a.Ask(v); o != nil {
		t.Error("too many wait")
	}
}
