package drivertest

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// killCases are what tries to outlive its sandbox.
var killCases = map[string]string{
	"daemon":        `(setsid sh -c 'trap "" TERM HUP INT; while :; do sleep 0.01; done' >/dev/null 2>&1 &)`,
	"stopped":       "sleep 999 & kill -STOP $!",
	"fork storm":    `f() { f | f & }; f`,
	"fork and exit": `s() { trap "" TERM; (s &) ; }; s; s; s`,
	"busy":          "for i in 1 2 3 4 5 6 7 8; do (while :; do :; done) & done",
}

// alive says whether a process runs: one that nobody has waited for yet does not.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, _ := strings.Cut(string(stat), ") ")
	return err == nil && !strings.HasPrefix(rest, "Z")
}

var faultCases = []testCase{
	{name: "KillBeatsEverything", needs: []Feature{Exec}, run: func(t *testing.T, h Harness) {
		for name, script := range killCases {
			s := create(t, h, func(spec *berm.Spec) {
				if _, missing := h.Missing[PIDLimit]; missing {
					return
				}
				spec.Limits.PIDs = 200
			})
			if _, missing := h.Missing[PIDLimit]; missing && strings.HasPrefix(name, "fork") {
				continue // nothing would save the host
			}
			begin(t, s, script)
			time.Sleep(100 * time.Millisecond)
			start := time.Now()
			exit := kill(t, s)
			t.Logf("%s: killed in %s: %+v", name, time.Since(start), exit)
			if exit.Reason != berm.ReasonKilled {
				t.Errorf("%s: %+v", name, exit)
			}
		}
	}},
	{name: "KillBeatsPause", needs: []Feature{Freeze}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		done := make(chan error, 1)
		go func() { done <- s.Pause(testContext(t)) }()
		kill(t, s)
		if err := <-done; err != nil && berm.KindOf(err) != berm.NotFound {
			t.Error(err)
		}
	}},
	{name: "AgentLost", needs: []Feature{Exec, Processes}, run: func(t *testing.T, h Harness) {
		s := create(t, h, func(spec *berm.Spec) { spec.Guest.Env = map[string]string{"KEPT": "yes"} })
		events, err := s.Events(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = Shell(testContext(t), s, "kill -9 $(pidof berm-guest)")
		select {
		case status := <-events:
			if status.Agent != 2 || status.State != berm.Running {
				t.Errorf("%+v", status)
			}
		case <-time.After(patience):
			t.Fatal("the loss of the agent was not told")
		}
		if out := sh(t, s, "echo $KEPT"); out != "yes" {
			t.Errorf("the new agent's environment has %q", out)
		}
	}},
	{name: "InitLost", needs: []Feature{Processes}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		events, err := s.Events(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Kill(h.Init(t, s.ID()), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		var last berm.Status
		for last = range events {
		}
		if last.Exit == nil || last.Exit.Reason != berm.ReasonCrash || last.Exit.Signal != "SIGKILL" {
			t.Errorf("%+v", last)
		}
		if exit := kill(t, s); exit.Reason != berm.ReasonCrash {
			t.Errorf("%+v", exit)
		}
	}},
	{name: "MonitorLost", needs: []Feature{Processes}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		events, err := s.Events(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		init := h.Init(t, s.ID())
		if err := unix.Kill(h.Monitor(t, s.ID()), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		for status := range events {
			if status.Exit != nil {
				t.Errorf("%+v", status)
			}
		}
		eventually(t, 2*time.Second*slower, func() error {
			if alive(init) {
				return errors.New("init lives without its monitor")
			}
			return nil
		})
		_, err = s.Status(testContext(t))
		want(t, err, berm.NotFound)
		_, err = h.Driver.Open(testContext(t), s.ID())
		want(t, err, berm.NotFound)
		exit, err := h.Driver.Remove(testContext(t), s.ID())
		if err != nil || exit.Reason != berm.ReasonCrash {
			t.Errorf("%+v, %v", exit, err)
		}
	}},
	{name: "MonitorHangs", needs: []Feature{Processes}, slow: true, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		if err := unix.Kill(h.Monitor(t, s.ID()), unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		if exit, err := s.Kill(testContext(t), berm.ReasonKilled); err != nil {
			t.Errorf("%+v, %v", exit, err)
		}
	}},
	{name: "FewDescriptors", needs: []Feature{Processes}, run: func(t *testing.T, h Harness) {
		create(t, h) // what is opened once
		before, err := descriptors()
		if err != nil {
			t.Fatal(err)
		}
		const n = 3
		for range n {
			s := create(t, h)
			if _, err := s.Events(testContext(t)); err != nil {
				t.Fatal(err)
			}
		}
		after, err := descriptors()
		if err != nil || after-before > 8*n {
			t.Errorf("%d descriptors for %d sandboxes, %v", after-before, n, err)
		}
		t.Logf("%.1f descriptors for each sandbox", float64(after-before)/n)
	}},
	{name: "ManyAtOnce", slow: true, run: func(t *testing.T, h Harness) {
		const n, at = 40, 8
		turn := make(chan struct{}, at)
		errs := make(chan error, n)
		for range n {
			turn <- struct{}{}
			go func() {
				defer func() { <-turn }()
				s, err := h.Driver.Create(testContext(t), h.Spec())
				if err == nil {
					if err = health(testContext(t), s); err != nil {
						err = fmt.Errorf("health: %w", err)
					}
					_, errKill := s.Kill(testContext(t), berm.ReasonKilled)
					err = errors.Join(err, errKill)
				}
				errs <- err
			}()
		}
		for range n {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
	}},
}
