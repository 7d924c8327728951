// Package drivertest is the conformance suite of drivers: an isolation level counts
// as supported when it passes.
package drivertest

import (
	"context"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/leak"
)

// Feature is something that a case needs and not every driver, host or user has.
type Feature string

// The features.
const (
	Exec        Feature = "exec"         // the guest agent runs programs of the template
	Ports       Feature = "ports"        // programs inside can listen
	Freeze      Feature = "freeze"       // pause and resume
	MemoryLimit Feature = "memory limit" //
	SurvivesOOM Feature = "survives oom" // out of memory ends processes inside, not the sandbox
	PIDLimit    Feature = "pid limit"    //
	CPULimit    Feature = "cpu limit"    //
	DiskLimit   Feature = "disk limit"   //
	Processes   Feature = "processes"    // monitor, init and agent are processes that a test can kill
	Users       Feature = "users"        // more than one user id inside
	Kernel      Feature = "kernel"       // programs inside call the host's kernel
	Link        Feature = "link"         // a link to a network service outside
	Writable    Feature = "writable"     // a look at what was written
	Snapshot    Feature = "snapshot"     // snapshots of files
	Memory      Feature = "memory"       // snapshots of memory beside them
)

// Harness is one driver under test.
type Harness struct {
	Driver berm.Driver
	// Reopen returns another driver over the same data, as a server that was started
	// again has it.
	Reopen func(t *testing.T) berm.Driver
	// Spec returns a spec that must work, with an id and limits of its own. The template
	// has /bin/sh, the usual small tools as busybox has them, and the users root and,
	// with Users, user (1000).
	Spec func() berm.Spec
	// Missing tells for each feature that is absent here why.
	Missing map[Feature]string
	// Scope is what a case must leave as it was.
	Scope leak.Scope
	// Monitor returns the process id of a sandbox's monitor, and Init that of its init;
	// with Processes.
	Monitor, Init func(t *testing.T, id berm.SandboxID) int
}

// a testCase is one promise of the contract.
type testCase struct {
	name  string
	needs []Feature
	slow  bool
	run   func(t *testing.T, h Harness)
}

// Run runs every case over a fresh harness.
func Run(t *testing.T, fresh func(t *testing.T) Harness) {
	for _, group := range [][]testCase{lifeCases, limitCases, wallCases, linkCases, lookCases, snapshotCases, faultCases} {
		for _, c := range group {
			t.Run(c.name, func(t *testing.T) {
				if c.slow && os.Getenv("BERM_TEST_ALL") == "" {
					t.Skip("slow: BERM_TEST_ALL=1 runs it")
				}
				h := fresh(t)
				for _, f := range c.needs {
					if why, missing := h.Missing[f]; missing {
						t.Skipf("no %s: %s", f, why)
					}
				}
				leak.Check(t, h.Scope)
				c.run(t, h)
			})
		}
	}
}

// slower tells how many times slower than a real machine this one is: an emulated one
// cannot keep the times that the contract gives.
var slower = func() time.Duration {
	n, _ := strconv.Atoi(os.Getenv("BERM_TEST_SLOWER"))
	return time.Duration(max(n, 1))
}()

// patience bounds every call of a test: the machine may be busy.
var patience = 20 * time.Second * slower

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// create makes a sandbox that the end of the test kills.
func create(t *testing.T, h Harness, change ...func(*berm.Spec)) berm.Sandbox {
	t.Helper()
	spec := h.Spec()
	for _, f := range change {
		f(&spec)
	}
	s, err := h.Driver.Create(testContext(t), spec)
	if err != nil {
		t.Fatalf("create: %v (%s)", err, berm.HintOf(err))
	}
	t.Cleanup(func() {
		if _, err := s.Kill(testContext(t), berm.ReasonKilled); err != nil {
			t.Errorf("kill: %v", err)
		}
		_ = s.Close()
	})
	return s
}

// soon is a deadline that a sandbox made now lives to see, on this machine as it is:
// an emulated one takes seconds for a creation.
func soon(t *testing.T, h Harness) time.Time {
	t.Helper()
	start := time.Now()
	kill(t, create(t, h))
	return time.Now().Add(time.Second + 2*time.Since(start))
}

// kill ends a sandbox within the time that the contract gives.
func kill(t *testing.T, s berm.Sandbox) berm.Exit {
	t.Helper()
	start := time.Now()
	exit, err := s.Kill(testContext(t), berm.ReasonKilled)
	if err != nil {
		t.Fatalf("kill: %v", err)
	}
	if took := time.Since(start); took > 2*time.Second*slower {
		t.Errorf("kill took %s", took)
	}
	return exit
}

// want fails the test unless err is of a kind.
func want(t *testing.T, err error, kind berm.Kind) {
	t.Helper()
	if err == nil || berm.KindOf(err) != kind {
		t.Errorf("got error %v of kind %q, want %q", err, berm.KindOf(err), kind)
	}
}

// eventually waits until check is content.
func eventually(t *testing.T, limit time.Duration, check func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if err = check(); err == nil {
			return
		}
	}
	t.Fatalf("not within %s: %v", limit, err)
}
