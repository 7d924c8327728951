//go:build failpoint

package gvisor

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/drivertest"
	"github.com/berm-sandbox/berm/internal/leak"
)

// Between which steps a monitor is broken.
var (
	createPoints   = []string{"launch.enter", "launch.cgroup", "launch.mounts", "launch.stage", "launch.spawn", "launch.ready", "monitor.listen"}
	restorePoints  = []string{"launch.stage", "launch.renew", "launch.ready"}
	snapshotPoints = []string{"launch.released", "launch.unanswered", "launch.stopped", "launch.memory", "launch.synced", "launch.saved"}
)

// variable has the failpoints of a monitor, which it reads when it starts.
const variable = "BERM_FAILPOINTS"

// failing builds a monitor that has failpoints and returns a harness whose driver starts it.
func failing(t *testing.T, root, runsc, monitor string) drivertest.Harness {
	t.Helper()
	h := harness(t, root, runsc)
	found, err := filepath.Glob(filepath.Join(filepath.Dir(h.Scope.Dirs[0]), "bin", "*", "berm-monitor"))
	if err != nil || len(found) != 1 {
		t.Fatalf("monitors %q, %v", found, err)
	}
	if err := os.Remove(found[0]); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(monitor, found[0]); err != nil {
		t.Fatal(err)
	}
	return h
}

func create(t *testing.T, h drivertest.Harness, points, from string) (berm.Sandbox, error) {
	t.Helper()
	t.Setenv(variable, points)
	spec := h.Spec()
	spec.From, spec.Memory = from, from != ""
	s, err := h.Driver.Create(t.Context(), spec)
	t.Setenv(variable, "")
	return s, err
}

func mustCreate(t *testing.T, h drivertest.Harness, points, from string) berm.Sandbox {
	t.Helper()
	s, err := create(t, h, points, from)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func kill(t *testing.T, s berm.Sandbox) {
	t.Helper()
	if _, err := s.Kill(t.Context(), berm.ReasonKilled); err != nil {
		t.Error(err)
	}
}

// count is what a program inside counts up to, for as long as it goes on.
func count(t *testing.T, s berm.Sandbox) string {
	t.Helper()
	r, err := drivertest.Shell(t.Context(), s, "cat /count")
	if err != nil || r.Code != 0 {
		t.Fatalf("%v %+v", err, r)
	}
	return strings.TrimSpace(r.Output)
}

const counting = `n=0; while :; do n=$((n+1)); echo $n >/count.new; mv /count.new /count; sleep 0.01; done >/dev/null 2>&1 </dev/null & until test -e /count; do sleep 0.01; done`

func begin(t *testing.T, s berm.Sandbox) {
	t.Helper()
	if r, err := drivertest.Shell(t.Context(), s, counting); err != nil || r.Code != 0 {
		t.Fatalf("%v %+v", err, r)
	}
}

// goesOn waits until the program inside has counted on.
func goesOn(t *testing.T, s berm.Sandbox) {
	t.Helper()
	was := count(t, s)
	for deadline := time.Now().Add(time.Minute); count(t, s) == was; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("still %s: nothing runs inside", was)
		}
	}
}

// dies waits until a sandbox is seen to be dead.
func dies(t *testing.T, h drivertest.Harness, id berm.SandboxID) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		s, err := h.Driver.Open(t.Context(), id)
		if err != nil {
			break
		}
		s.Close()
		if time.Now().After(deadline) {
			t.Fatal("the sandbox outlives its monitor")
		}
	}
	if _, err := h.Driver.Remove(t.Context(), id); err != nil {
		t.Error(err)
	}
}

// TestMonitorFails breaks the monitor between any two steps of a creation, a snapshot, what begins
// with one, a pause and a resume. An error leaves the sandbox as it was, a death ends it; nothing is
// left, and a snapshot that was whole still is.
func TestMonitorFails(t *testing.T) {
	path := runsc(t)
	root := drivertest.Root(t, t.TempDir(), 0)
	monitor := filepath.Join(t.TempDir(), "berm-monitor")
	build := exec.Command("go", "build", "-tags", "failpoint", "-o", monitor, "github.com/berm-sandbox/berm/cmd/berm-monitor")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	each := func(name string, points []string, run func(t *testing.T, h drivertest.Harness, point string, crash bool)) {
		for _, point := range points {
			for _, action := range []string{"error", "crash"} {
				t.Run(name+"/"+point+"="+action, func(t *testing.T) {
					h := failing(t, root, path, monitor)
					leak.Check(t, h.Scope)
					run(t, h, point+"="+action, action == "crash")
				})
			}
		}
	}
	each("create", createPoints, func(t *testing.T, h drivertest.Harness, point string, _ bool) {
		if os.Getenv("BERM_TEST_ALL") == "" && point != "launch.stage=crash" { // most are tried at level namespace
			t.Skip("slow: BERM_TEST_ALL=1 runs it")
		}
		if s, err := create(t, h, point, ""); err == nil {
			kill(t, s)
			t.Fatal("created")
		}
	})
	each("snapshot", snapshotPoints, func(t *testing.T, h drivertest.Harness, point string, crash bool) {
		s := mustCreate(t, h, point, "")
		begin(t, s)
		dir := t.TempDir()
		if _, err := s.Snapshot(t.Context(), dir, true); err == nil {
			t.Error("saved")
		}
		if crash {
			dies(t, h, s.ID())
		} else {
			goesOn(t, s)
			kill(t, s)
		}
		// What is there of it is whole, or is refused.
		child, err := create(t, h, "", dir)
		if err == nil {
			goesOn(t, child)
			kill(t, child)
		}
		if whole := strings.HasPrefix(point, "launch.saved="); (err == nil) != whole {
			t.Errorf("what begins with it: %v", err)
		}
	})
	each("restore", restorePoints, func(t *testing.T, h drivertest.Harness, point string, crash bool) {
		if os.Getenv("BERM_TEST_ALL") == "" && !crash {
			t.Skip("slow: BERM_TEST_ALL=1 runs it")
		}
		s := mustCreate(t, h, "", "")
		defer kill(t, s)
		begin(t, s)
		dir := t.TempDir()
		if _, err := s.Snapshot(t.Context(), dir, true); err != nil {
			t.Fatal(err)
		}
		if child, err := create(t, h, point, dir); err == nil {
			kill(t, child)
			t.Error("created")
		}
		goesOn(t, s) // as the source of forks does, of which one fails
		child := mustCreate(t, h, "", dir)
		goesOn(t, child)
		kill(t, child)
	})
	each("pause", []string{"launch.unanswered", "launch.paused"}, func(t *testing.T, h drivertest.Harness, point string, crash bool) {
		s := mustCreate(t, h, point, "")
		begin(t, s)
		if err := s.Pause(t.Context()); err == nil {
			t.Error("paused")
		}
		if crash {
			dies(t, h, s.ID())
			return
		}
		if status, err := s.Status(t.Context()); err != nil || status.State != berm.Running {
			t.Errorf("%+v, %v", status, err)
		}
		goesOn(t, s)
		kill(t, s)
	})
	each("resume", []string{"launch.resume"}, func(t *testing.T, h drivertest.Harness, point string, crash bool) {
		s := mustCreate(t, h, point, "")
		begin(t, s)
		if err := s.Pause(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := s.Resume(t.Context(), time.Now().Add(time.Hour)); err == nil {
			t.Error("resumed")
		}
		if crash {
			dies(t, h, s.ID())
			return
		}
		if status, err := s.Status(t.Context()); err != nil || status.State != berm.Paused {
			t.Errorf("%+v, %v", status, err)
		}
		kill(t, s)
	})
}
