package drivertest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
)

var lifeCases = []testCase{
	{name: "CreateAnswersAndKillEnds", run: func(t *testing.T, h Harness) {
		s := create(t, h)
		if err := health(testContext(t), s); err != nil {
			t.Errorf("a new sandbox: %v", err)
		}
		status, err := s.Status(testContext(t))
		if err != nil || status.State != berm.Running || status.Agent != 1 || status.Exit != nil {
			t.Errorf("status %+v, %v", status, err)
		}
		if exit := kill(t, s); exit.Reason != berm.ReasonKilled || time.Since(exit.At) > time.Minute {
			t.Errorf("exit %+v", exit)
		}
		if exit := kill(t, s); exit.Reason != berm.ReasonKilled {
			t.Errorf("second kill: exit %+v", exit)
		}
		_, err = s.Status(testContext(t))
		want(t, err, berm.NotFound)
		_, err = s.Dial(testContext(t), berm.AgentPort)
		want(t, err, berm.NotFound)
		want(t, s.Pause(testContext(t)), berm.NotFound)
		want(t, s.SetDeadline(testContext(t), time.Now().Add(time.Hour)), berm.NotFound)
	}},
	{name: "ListOpenRemove", run: func(t *testing.T, h Harness) {
		s := create(t, h)
		listed := func() bool {
			ids, err := h.Driver.List(testContext(t))
			if err != nil {
				t.Fatal(err)
			}
			return slices.Contains(ids, s.ID())
		}
		if !listed() {
			t.Error("a living sandbox is not listed")
		}
		_, err := h.Driver.Remove(testContext(t), s.ID())
		want(t, err, berm.Conflict)
		again, err := h.Driver.Open(testContext(t), s.ID())
		if err != nil {
			t.Fatal(err)
		}
		if err := health(testContext(t), again); err != nil {
			t.Errorf("opened: %v", err)
		}
		_ = again.Close()
		kill(t, s)
		if listed() {
			t.Error("a dead sandbox is listed")
		}
		_, err = h.Driver.Open(testContext(t), s.ID())
		want(t, err, berm.NotFound)
		if exit, err := h.Driver.Remove(testContext(t), s.ID()); err != nil || exit.Reason != "" {
			t.Errorf("remove nothing: %+v, %v", exit, err)
		}
	}},
	{name: "LivesWithoutItsHandle", run: func(t *testing.T, h Harness) {
		s := create(t, h)
		_ = s.Close()
		again, err := h.Reopen(t).Open(testContext(t), s.ID())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = again.Close() }()
		if err := health(testContext(t), again); err != nil {
			t.Error(err)
		}
		if exit := kill(t, again); exit.Reason != berm.ReasonKilled {
			t.Errorf("exit %+v", exit)
		}
	}},
	{name: "SameIDTwice", run: func(t *testing.T, h Harness) {
		s := create(t, h)
		spec := h.Spec()
		spec.ID = s.ID()
		_, err := h.Driver.Create(testContext(t), spec)
		want(t, err, berm.AlreadyExists)
		if err := health(testContext(t), s); err != nil {
			t.Errorf("the first one: %v", err)
		}
	}},
	{name: "BadSpecs", run: badSpecs},
	{name: "CreateCancelled", run: func(t *testing.T, h Harness) {
		for i := range 12 {
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i*i)*250*time.Microsecond)
			s, err := h.Driver.Create(ctx, h.Spec())
			if err == nil {
				kill(t, s)
			} else if !errors.Is(err, context.DeadlineExceeded) && berm.KindOf(err) != berm.Unavailable {
				t.Errorf("after %s: %v", time.Duration(i*i)*250*time.Microsecond, err)
			}
			cancel()
		}
	}},
	{name: "Events", needs: []Feature{Freeze}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		events, err := s.Events(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		next := func(what berm.State) {
			t.Helper()
			for {
				select {
				case status, ok := <-events:
					if !ok {
						t.Fatalf("events ended before %s", what)
					}
					if status.State == what {
						return
					}
				case <-time.After(patience):
					t.Fatalf("no event %s", what)
				}
			}
		}
		if err := s.Pause(testContext(t)); err != nil {
			t.Fatal(err)
		}
		next(berm.Paused)
		if err := s.Resume(testContext(t), time.Time{}); err != nil {
			t.Fatal(err)
		}
		next(berm.Running)
		go func() { _, _ = s.Kill(testContext(t), berm.ReasonKilled) }()
		next(berm.Killed)
		if _, open := <-events; open {
			t.Error("events go on after death")
		}
	}},
	{name: "EventsEndWithTheirContext", run: func(t *testing.T, h Harness) {
		s := create(t, h)
		ctx, cancel := context.WithCancel(context.Background())
		events, err := s.Events(ctx)
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		select {
		case status, open := <-events:
			if open {
				t.Errorf("an event without a change: %+v", status)
			}
		case <-time.After(patience):
			t.Error("the channel is not closed")
		}
		if err := health(testContext(t), s); err != nil {
			t.Errorf("the sandbox: %v", err)
		}
	}},
	{name: "DeadlineKills", run: func(t *testing.T, h Harness) {
		deadline := soon(t, h)
		s := create(t, h, func(spec *berm.Spec) { spec.Deadline = deadline })
		id := s.ID()
		_ = s.Close() // nobody but the monitor is there to keep it
		d := h.Reopen(t)
		eventually(t, time.Until(deadline)+2*time.Second*slower, func() error {
			again, err := d.Open(testContext(t), id)
			if err == nil {
				_ = again.Close()
				return errors.New("it still answers")
			}
			return nil
		})
		if late := time.Since(deadline); late > time.Second || late < -50*time.Millisecond {
			t.Errorf("it ended %s after its deadline", late)
		}
		exit, err := d.Remove(testContext(t), id)
		if err != nil || exit.Reason != berm.ReasonTimeout {
			t.Errorf("exit %+v, %v", exit, err)
		}
	}},
	{name: "DeadlineMoves", run: func(t *testing.T, h Harness) {
		s := create(t, h, func(spec *berm.Spec) { spec.Deadline = soon(t, h) })
		first, err := s.Status(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		later := time.Now().Add(time.Hour).Round(time.Millisecond)
		if err := s.SetDeadline(testContext(t), later); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Until(first.Deadline) + 200*time.Millisecond)
		status, err := s.Status(testContext(t))
		if err != nil || !status.Deadline.Equal(later) {
			t.Fatalf("%+v, %v", status, err)
		}
		events, err := s.Events(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		if err := s.SetDeadline(testContext(t), time.Now().Add(50*time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		var last berm.Status
		for last = range events {
		}
		if last.Exit == nil || last.Exit.Reason != berm.ReasonTimeout {
			t.Errorf("last event %+v", last)
		}
		if exit := kill(t, s); exit.Reason != berm.ReasonTimeout {
			t.Errorf("an earlier death keeps its reason: %+v", exit)
		}
	}},
	{name: "DeadlinePauses", needs: []Feature{Freeze}, run: func(t *testing.T, h Harness) {
		s := create(t, h, func(spec *berm.Spec) {
			spec.Deadline = soon(t, h)
			spec.OnDeadline = berm.PauseAtDeadline
		})
		eventually(t, patience, func() error {
			status, err := s.Status(testContext(t))
			if err != nil || status.State != berm.Paused {
				return fmt.Errorf("%+v, %w", status, err)
			}
			if !status.Deadline.IsZero() {
				t.Error("a paused sandbox has a deadline")
			}
			return nil
		})
		if err := s.Resume(testContext(t), time.Now().Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
		if err := health(testContext(t), s); err != nil {
			t.Error(err)
		}
	}},
	{name: "PauseResume", needs: []Feature{Freeze}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		want(t, s.Resume(testContext(t), time.Time{}), berm.Conflict)
		if err := s.Pause(testContext(t)); err != nil {
			t.Fatal(err)
		}
		want(t, s.Pause(testContext(t)), berm.Conflict)
		_, err := s.Dial(testContext(t), berm.AgentPort)
		want(t, err, berm.Conflict)
		want(t, s.SetDeadline(testContext(t), time.Now().Add(time.Hour)), berm.Conflict)
		if _, err := s.Usage(testContext(t)); err != nil {
			t.Errorf("usage of a paused sandbox: %v", err)
		}
		deadline := time.Now().Add(time.Hour).Round(time.Millisecond)
		if err := s.Resume(testContext(t), deadline); err != nil {
			t.Fatal(err)
		}
		if status, err := s.Status(testContext(t)); err != nil || !status.Deadline.Equal(deadline) {
			t.Errorf("%+v, %v", status, err)
		}
		if err := health(testContext(t), s); err != nil {
			t.Error(err)
		}
		if err := s.Pause(testContext(t)); err != nil {
			t.Fatal(err)
		}
		kill(t, s)
	}},
	{name: "ConcurrentPauses", needs: []Feature{Freeze}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		var wg sync.WaitGroup
		errs := make([]error, 8)
		for i := range errs {
			wg.Go(func() { errs[i] = s.Pause(testContext(t)) })
		}
		wg.Wait()
		won := 0
		for _, err := range errs {
			if err == nil {
				won++
			} else {
				want(t, err, berm.Conflict)
			}
		}
		if won != 1 {
			t.Errorf("%d of 8 pauses won", won)
		}
	}},
	{name: "PauseKeepsProcesses", needs: []Feature{Freeze, Exec}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		begin(t, s, "echo $$ >/tmp/pid; i=0; while :; do i=$((i+1)); echo $i >/tmp/n.new; mv /tmp/n.new /tmp/n; sleep 0.05; done")
		eventually(t, patience, func() error {
			r, err := Shell(testContext(t), s, "cat /tmp/n")
			if err == nil && r.Code != 0 {
				return errors.New(r.Output)
			}
			return err
		})
		pid := sh(t, s, "cat /tmp/pid")
		if err := s.Pause(testContext(t)); err != nil {
			t.Fatal(err)
		}
		before, err := s.Usage(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(300 * time.Millisecond)
		// What carries it, as gVisor does, may look now and then whether there is something to do.
		after, err := s.Usage(testContext(t))
		if used := after.CPUTime - before.CPUTime; err != nil || used > after.At.Sub(before.At)/10 {
			t.Errorf("a paused sandbox used the processor for %v of %v, %v", used, after.At.Sub(before.At), err)
		}
		if err := s.Resume(testContext(t), time.Time{}); err != nil {
			t.Fatal(err)
		}
		n := sh(t, s, "cat /tmp/n")
		eventually(t, patience, func() error {
			if now := sh(t, s, "cat /tmp/n"); now == n {
				return fmt.Errorf("the loop stands at %s", now)
			}
			return nil
		})
		if now := sh(t, s, "cat /tmp/pid"); now != pid {
			t.Errorf("process %s became %s", pid, now)
		}
	}},
	{name: "DialPorts", needs: []Feature{Exec, Ports}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		_, err := s.Dial(testContext(t), 8080)
		want(t, err, berm.Unavailable)
		begin(t, s, "echo hello >/tmp/index.html; httpd -f -p 127.0.0.1:8080 -h /tmp")
		var conn io.ReadWriteCloser
		eventually(t, patience, func() (err error) {
			conn, err = s.Dial(testContext(t), 8080)
			return err
		})
		defer conn.Close()
		_, _ = fmt.Fprint(conn, "GET /index.html HTTP/1.0\r\n\r\n")
		text, err := io.ReadAll(conn)
		if err != nil || !strings.HasSuffix(string(text), "hello\n") {
			t.Errorf("got %q, %v", text, err)
		}
	}},
	{name: "Policy", run: func(t *testing.T, h Harness) {
		s := create(t, h)
		p, err := s.Policy(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		if p.Level != h.Driver.Level() || p.Network == "" || p.Limits != h.limits(s) {
			t.Errorf("%+v", p)
		}
	}},
}

// limits are those of the harness's specs.
func (h Harness) limits(berm.Sandbox) berm.Limits { return h.Spec().Limits }

func badSpecs(t *testing.T, h Harness) {
	for name, c := range map[string]struct {
		kind   berm.Kind
		change func(*berm.Spec)
	}{
		"no id":                {berm.Invalid, func(s *berm.Spec) { s.ID = "" }},
		"id with a path":       {berm.Invalid, func(s *berm.Spec) { s.ID = "../x" }},
		"id of the parent":     {berm.Invalid, func(s *berm.Spec) { s.ID = ".." }},
		"no layer":             {berm.Invalid, func(s *berm.Spec) { s.Layers = nil }},
		"relative layer":       {berm.Invalid, func(s *berm.Spec) { s.Layers = []berm.Layer{{Path: "etc"}} }},
		"absent layer":         {berm.NotFound, func(s *berm.Spec) { s.Layers = []berm.Layer{{Path: "/does/not/exist"}} }},
		"too many layers":      {berm.Invalid, func(s *berm.Spec) { s.Layers = slices.Repeat(s.Layers, 1000) }},
		"other level":          {berm.Unsupported, func(s *berm.Spec) { s.Level = "other" }},
		"negative memory":      {berm.Invalid, func(s *berm.Spec) { s.Limits.Memory = -1 }},
		"negative processes":   {berm.Invalid, func(s *berm.Spec) { s.Limits.PIDs = -1 }},
		"negative processors":  {berm.Invalid, func(s *berm.Spec) { s.Limits.CPU = -0.5 }},
		"tiny disk":            {berm.Invalid, func(s *berm.Spec) { s.Limits.Disk = 1 }},
		"host name with space": {berm.Invalid, func(s *berm.Spec) { s.Hostname = "a b" }},
		"host name of 2 lines": {berm.Invalid, func(s *berm.Spec) { s.Hostname = "a\n127.0.0.1 b" }},
		"unknown profile":      {berm.Invalid, func(s *berm.Spec) { s.Profile = "none" }},
		"past deadline":        {berm.Invalid, func(s *berm.Spec) { s.Deadline = time.Unix(1, 0) }},
		"unknown end":          {berm.Invalid, func(s *berm.Spec) { s.OnDeadline = "explode" }},
	} {
		spec := h.Spec()
		c.change(&spec)
		s, err := h.Driver.Create(testContext(t), spec)
		if err == nil {
			t.Errorf("%s: created", name)
			kill(t, s)
			continue
		}
		if berm.KindOf(err) != c.kind {
			t.Errorf("%s: %v is %q, want %q", name, err, berm.KindOf(err), c.kind)
		}
	}
}
