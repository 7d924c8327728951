package drivertest

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
)

const mebi = 1 << 20

var limitCases = []testCase{
	{name: "MemoryIsLimited", needs: []Feature{Exec, MemoryLimit, SurvivesOOM}, run: func(t *testing.T, h Harness) {
		s := create(t, h, func(spec *berm.Spec) { spec.Limits.Memory = 64 * mebi })
		// /dev/shm counts as memory; the shell's own variable grows for ever.
		r, err := Shell(testContext(t), s, "x=xxxxxxxxxxxxxxxx; while :; do x=$x$x; done")
		if err != nil {
			t.Fatal(err)
		}
		if r.Code == 0 {
			t.Errorf("%+v", r)
		}
		u, err := s.Usage(testContext(t))
		if err != nil || u.OOMKills == 0 || u.MemoryTotal != 64*mebi {
			t.Errorf("usage %+v, %v", u, err)
		}
		if err := health(testContext(t), s); err != nil {
			t.Errorf("the sandbox did not survive: %v", err)
		}
	}},
	{name: "OutOfMemoryIsTold", needs: []Feature{Exec, MemoryLimit}, run: func(t *testing.T, h Harness) {
		s := create(t, h, func(spec *berm.Spec) { spec.Limits.Memory = 96 * mebi })
		events, err := s.Events(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		r, err := Shell(testContext(t), s, "x=xxxxxxxxxxxxxxxx; while :; do x=$x$x; done")
		if err == nil { // a process ended for all
			if u, err := s.Usage(testContext(t)); r.Code == 0 || err != nil || u.OOMKills == 0 {
				t.Errorf("%+v, usage %+v, %v", r, u, err)
			}
			if err := health(testContext(t), s); err != nil {
				t.Errorf("the sandbox did not survive: %v", err)
			}
			return
		}
		var last berm.Status
		for last = range events {
		}
		if last.Exit == nil || last.Exit.Reason != berm.ReasonOOM || last.Exit.Detail == "" {
			t.Errorf("after %v: %+v", err, last)
		}
		if exit := kill(t, s); exit.Reason != berm.ReasonOOM {
			t.Errorf("an earlier death keeps its reason: %+v", exit)
		}
	}},
	{name: "ProcessesAreLimited", needs: []Feature{Exec, PIDLimit}, run: func(t *testing.T, h Harness) {
		s := create(t, h, func(spec *berm.Spec) { spec.Limits.PIDs = 40 })
		r, err := Shell(testContext(t), s, "for i in $(seq 100); do sleep 100 & done; echo all")
		if err != nil {
			t.Fatal(err)
		}
		if r.Code == 0 {
			t.Errorf("%+v", r)
		}
		if u, err := s.Usage(testContext(t)); err != nil || u.PIDs > 40 {
			t.Errorf("usage %+v, %v", u, err)
		}
		kill(t, s)
	}},
	{name: "ProcessorIsLimited", needs: []Feature{Exec, CPULimit}, slow: true, run: func(t *testing.T, h Harness) {
		s := create(t, h, func(spec *berm.Spec) { spec.Limits.CPU = 0.2 })
		begin(t, s, "while :; do :; done")
		begin(t, s, "while :; do :; done")
		time.Sleep(500 * time.Millisecond)
		before, err := s.Usage(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Second)
		after, err := s.Usage(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		share := float64(after.CPUTime-before.CPUTime) / float64(after.At.Sub(before.At))
		if share > 0.3 || after.CPUs != 0.2 {
			t.Errorf("it used %.2f cores, reported %.2f", share, after.CPUs)
		}
	}},
	{name: "DiskIsLimited", needs: []Feature{Exec, DiskLimit}, run: func(t *testing.T, h Harness) {
		s := create(t, h, func(spec *berm.Spec) { spec.Limits.Disk = 32 * mebi })
		r, err := Shell(testContext(t), s, "dd if=/dev/zero of=/tmp/big bs=1M count=64 2>&1")
		if err != nil {
			t.Fatal(err)
		}
		if r.Code == 0 || !strings.Contains(r.Output, "No space left") {
			t.Errorf("%+v", r)
		}
		u, err := s.Usage(testContext(t))
		if err == nil && u.DiskTotal > 0 && (u.DiskTotal > 32*mebi || u.DiskUsed < 20*mebi) {
			t.Errorf("usage %+v", u)
		}
		sh(t, s, "rm /tmp/big && echo x >/tmp/small && cat /tmp/small")
	}},
	{name: "OnlyWhatCanBeEnforced", run: func(t *testing.T, h Harness) {
		probe := h.Driver.Probe(testContext(t))
		held := h.Spec() // to all that can be enforced
		for name, limit := range map[string]func(*berm.Spec){
			"memory":     func(spec *berm.Spec) { spec.Limits.Memory = 128 * mebi },
			"cpu":        func(spec *berm.Spec) { spec.Limits.CPU = 1 },
			"pids":       func(spec *berm.Spec) { spec.Limits.PIDs = 100 },
			"disk":       func(spec *berm.Spec) { spec.Limits.Disk = 32 * mebi },
			"readBytes":  func(spec *berm.Spec) { spec.Limits.ReadBytes = 100 * mebi },
			"writeBytes": func(spec *berm.Spec) { spec.Limits.WriteBytes = 100 * mebi },
			"freezer": func(spec *berm.Spec) {
				spec.Deadline, spec.OnDeadline = time.Now().Add(time.Hour), berm.PauseAtDeadline
			},
		} {
			why, missing := probe.Unlimited[name]
			if name == "freezer" {
				why, missing = h.Missing[Freeze]
			}
			if !missing {
				limit(&held)
				continue
			}
			spec := h.Spec()
			limit(&spec)
			s, err := h.Driver.Create(testContext(t), spec)
			if berm.KindOf(err) != berm.Unsupported || why == "" {
				t.Errorf("%s (%q): %v", name, why, err)
			}
			if err == nil {
				kill(t, s)
			}
		}
		s, err := h.Driver.Create(testContext(t), held)
		if err != nil {
			t.Fatal(err)
		}
		kill(t, s)
	}},
	{name: "WhatIsLeftOutIsTold", run: func(t *testing.T, h Harness) {
		s := create(t, h, func(spec *berm.Spec) { spec.Degraded = []string{"no moon"} })
		policy, err := s.Policy(testContext(t))
		if err != nil || !slices.Contains(policy.Degraded, "no moon") {
			t.Errorf("%q, %v", policy.Degraded, err)
		}
		for _, d := range h.Driver.Probe(testContext(t)).Degraded {
			if !slices.Contains(policy.Degraded, d) {
				t.Errorf("%q is missing in %q", d, policy.Degraded)
			}
		}
	}},
	{name: "UnlimitedDisk", needs: []Feature{Exec}, run: func(t *testing.T, h Harness) {
		s := create(t, h, func(spec *berm.Spec) { spec.Limits.Disk = 0 })
		sh(t, s, "mkdir -p /tmp/a/b && echo x >/tmp/a/b/c && chmod 0 /tmp/a && ln -s / /tmp/root")
	}},
}
