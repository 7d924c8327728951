package monitor

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
)

// wall is a sandbox without anything in it.
type wall struct {
	m      *Machine
	freeze func() error
	thaw   error
	kill   func() // before it dies
	once   sync.Once
}

func (w *wall) Freeze() error {
	if w.freeze != nil {
		return w.freeze()
	}
	return nil
}
func (w *wall) Version() (string, error)            { return "1", nil }
func (w *wall) Settle(string) error                 { return nil }
func (w *wall) Snapshot(string) (berm.Saved, error) { return berm.Saved{Size: 1}, nil }
func (w *wall) Checkpoint(string) (berm.Saved, error) {
	return berm.Saved{Size: 1, Memory: true}, nil
}

func (w *wall) Thaw() error                { return w.thaw }
func (w *wall) Usage() (berm.Usage, error) { return berm.Usage{PIDs: 7}, nil }
func (w *wall) Policy() json.RawMessage    { return json.RawMessage(`{"network":"none"}`) }
func (w *wall) Kill() {
	if w.kill != nil {
		w.kill()
	}
	w.once.Do(func() { go func() { w.m.Died(berm.Exit{Reason: w.m.Reason()}) }() })
}

func machine(w *wall, deadline time.Time, onDeadline berm.OnDeadline) *Machine {
	w.m = NewMachine(w, onDeadline)
	w.m.SetDeadline(deadline)
	return w.m
}

func TestDeadlineThatCannotPauseKills(t *testing.T) {
	m := machine(&wall{freeze: func() error { return berm.Errorf(berm.Unsupported, "no freezer") }}, time.Now().Add(10*time.Millisecond), berm.PauseAtDeadline)
	m.Wait()
	if s := m.Status(); s.Exit.Reason != berm.ReasonTimeout {
		t.Errorf("%+v", s)
	}
}

// What cannot freeze cannot thaw either: that is no reason to end what was never stopped.
func TestSnapshotThatCannotFreezeIsRefused(t *testing.T) {
	unsupported := berm.Errorf(berm.Unsupported, "no freezer")
	m := machine(&wall{freeze: func() error { return unsupported }, thaw: unsupported}, time.Time{}, berm.KillAtDeadline)
	if _, err := m.Snapshot(t.TempDir(), false); berm.KindOf(err) != berm.Unsupported {
		t.Errorf("snapshot: %v", err)
	}
	if s := m.Status(); s.State != berm.Running || m.Reason() != "" {
		t.Errorf("%+v, %q", s, m.Reason())
	}
}

func TestFailedPauseKeepsDeadline(t *testing.T) {
	var m *Machine
	entered := make(chan bool)
	w := &wall{freeze: func() error {
		entered <- true
		time.Sleep(30 * time.Millisecond) // the deadline passes meanwhile
		return errors.New("stuck")
	}}
	m = machine(w, time.Now().Add(20*time.Millisecond), berm.KillAtDeadline)
	go m.Pause()
	<-entered
	if s := m.Status(); s.State != berm.Pausing {
		t.Errorf("%+v", s)
	}
	if err := m.Resume(time.Time{}); berm.KindOf(err) != berm.Conflict {
		t.Error(err)
	}
	m.Wait()
	if s := m.Status(); s.Exit.Reason != berm.ReasonTimeout {
		t.Errorf("%+v", s)
	}
}

// Who is dying gets no time any more: its owner would take it for granted.
func TestDeadlineOfTheDying(t *testing.T) {
	for _, end := range []time.Time{{}, time.Now().Add(10 * time.Millisecond)} {
		w := &wall{}
		w.kill = func() {
			if err := w.m.SetDeadline(time.Now().Add(time.Hour)); berm.KindOf(err) != berm.NotFound {
				t.Errorf("it gets an hour: %v", err)
			}
		}
		m := machine(w, end, berm.KillAtDeadline)
		if end.IsZero() {
			m.Kill(berm.ReasonKilled)
		}
		m.Wait()
	}
}

func TestFirstReasonStays(t *testing.T) {
	m := machine(&wall{}, time.Time{}, "")
	m.Kill(berm.ReasonOOM)
	m.Kill(berm.ReasonKilled)
	m.Wait()
	if r := m.Status().Exit.Reason; r != berm.ReasonOOM {
		t.Error(r)
	}
}

func TestWatcherGetsTheLast(t *testing.T) {
	m := machine(&wall{}, time.Time{}, "")
	changes, stop := m.Watch() // nobody reads until the end
	defer stop()
	for range 20 {
		m.AgentStarted()
	}
	m.Kill(berm.ReasonKilled)
	m.Wait()
	last := <-changes
	if _, open := <-changes; open || last.Exit == nil || last.Agent != 21 {
		t.Errorf("%+v", last)
	}
	late, _ := m.Watch()
	if last = <-late; last.Exit == nil {
		t.Errorf("a watcher of the dead: %+v", last)
	}
}

// connect returns a client of a server over m, and the other end of its connection.
func connect(t *testing.T, m *Machine) *Client {
	t.Helper()
	ours, theirs := net.Pipe()
	server := NewServer("i0test", m)
	go func() {
		if c, err := Accept(theirs, "i0test"); err == nil {
			server.Serve(c)
		}
		theirs.Close()
	}()
	client, err := NewClient(t.Context(), ours)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

func TestClientAndServer(t *testing.T) {
	m := machine(&wall{}, time.Time{}, "")
	c := connect(t, m)
	if c.ID() != "i0test" {
		t.Error(c.ID())
	}
	events, err := c.Events(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if u, err := c.Usage(t.Context()); err != nil || u.PIDs != 7 {
		t.Errorf("%+v, %v", u, err)
	}
	if p, err := c.Policy(t.Context()); err != nil || p.Network != "none" {
		t.Errorf("%+v, %v", p, err)
	}
	if err := c.Resume(t.Context(), time.Time{}); berm.KindOf(err) != berm.Conflict {
		t.Errorf("the kind of an error is lost: %v", err)
	}
	if err := c.Pause(t.Context()); err != nil {
		t.Error(err)
	}
	if s := <-events; s.State != berm.Pausing && s.State != berm.Paused {
		t.Errorf("%+v", s)
	}
	exit, err := c.Kill(t.Context(), berm.ReasonKilled)
	if err != nil || exit.Reason != berm.ReasonKilled {
		t.Errorf("%+v, %v", exit, err)
	}
	var last berm.Status
	for last = range events {
	}
	if last.Exit == nil {
		t.Errorf("%+v", last)
	}
}

// A reader of events that does not read must not stop the answers to others.
func TestSlowReader(t *testing.T) {
	m := machine(&wall{}, time.Time{}, "")
	c := connect(t, m)
	if _, err := c.Events(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 100 {
		m.AgentStarted()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		if _, err := c.Status(ctx); err != nil {
			t.Fatal(err)
		}
		cancel()
	}
}

func TestLostMonitor(t *testing.T) {
	ours, theirs := net.Pipe()
	go func() {
		Accept(theirs, "i0test")
		io.ReadFull(theirs, make([]byte, 10))
		theirs.Close()
	}()
	c, err := NewClient(t.Context(), ours)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := c.Status(t.Context()); berm.KindOf(err) != berm.NotFound {
			t.Error(err)
		}
	}
}

func TestHello(t *testing.T) {
	for _, c := range []struct {
		ours, theirs Hello
		agree        bool
	}{
		{Hello{Protocol: 3, Oldest: 2}, Hello{Protocol: 2, Oldest: 1}, true},
		{Hello{Protocol: 2, Oldest: 1}, Hello{Protocol: 3, Oldest: 2}, true},
		{Hello{Protocol: 3, Oldest: 2}, Hello{Protocol: 1, Oldest: 1}, false},
		{Hello{Protocol: 1, Oldest: 1}, Hello{Protocol: 3, Oldest: 2}, false},
		{Hello{Protocol: 1, Oldest: 1}, Hello{}, false},
	} {
		if got := c.ours.agrees(c.theirs); got != c.agree {
			t.Errorf("%+v and %+v: %v", c.ours, c.theirs, got)
		}
	}
}

// FuzzServe feeds bytes to a monitor: it must neither crash nor hang.
func FuzzServe(f *testing.F) {
	f.Add([]byte(`{"protocol":1,"oldest":1}` + "\n" + `{"n":1,"op":"status"}` + "\n"))
	f.Add([]byte(`{"protocol":1,"oldest":1}` + "\n" + `{"n":1,"op":"resume","deadline":"x"}` + "\n\n{}\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		m := machine(&wall{}, time.Time{}, "")
		server := NewServer("i0test", m)
		ours, theirs := net.Pipe()
		go func() {
			ours.Write(b)
			ours.Close()
		}()
		go io.Copy(io.Discard, ours)
		if c, err := Accept(theirs, "i0test"); err == nil {
			server.Serve(c)
		}
		theirs.Close()
		m.Kill(berm.ReasonKilled)
		server.Drain(time.Second)
	})
}

func TestErrorsKeepHints(t *testing.T) {
	raw, err := json.Marshal(reply{Error: failed(berm.Errorf(berm.Exhausted, "full").WithHint("wait"))})
	if err != nil {
		t.Fatal(err)
	}
	var r reply
	if err := json.Unmarshal(raw, &r); err != nil {
		t.Fatal(err)
	}
	if err := r.Error.err(); berm.KindOf(err) != berm.Exhausted || berm.HintOf(err) != "wait" || err.Error() != "full" {
		t.Error(err)
	}
}

// A monitor may be told to prepare before it is told what to create; each answer goes to
// its own question.
func TestPrepare(t *testing.T) {
	for _, fails := range []bool{false, true} {
		ours, theirs := net.Pipe()
		served := make(chan error, 1)
		go func() {
			served <- func() error {
				c, err := Accept(theirs, "")
				if err != nil {
					return err
				}
				prepared, order := "", ""
				prepare := func(raw json.RawMessage) error {
					if fails {
						return berm.Errorf(berm.Exhausted, "no disk")
					}
					return json.Unmarshal(raw, &prepared)
				}
				if err := c.Create(prepare, &order); err != nil {
					return err
				}
				if order != "box" || !fails && prepared != "disk" {
					t.Errorf("told %q and %q", prepared, order)
				}
				return c.Created(berm.Errorf(berm.Denied, "not today"))
			}()
		}()
		client, err := NewClient(t.Context(), ours)
		if err != nil {
			t.Fatal(err)
		}
		err = client.Prepare(t.Context(), "disk")
		if fails && berm.KindOf(err) != berm.Exhausted || !fails && err != nil {
			t.Errorf("prepare: %v", err)
		}
		if err := client.Create(t.Context(), "box"); berm.KindOf(err) != berm.Denied {
			t.Errorf("create: %v", err)
		}
		if err := <-served; err != nil {
			t.Error(err)
		}
		_ = client.Close()
	}
}
