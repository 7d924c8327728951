//go:build failpoint

package namespace

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

var monitorPoints = []string{"launch.enter", "launch.cgroup", "launch.spawn", "launch.mounts", "launch.ready", "monitor.listen"}
var driverPoints = []string{"driver.directory", "driver.spawn", "driver.create", "driver.health"}

// creatorVariable makes this program create one sandbox and die at its failpoint.
const creatorVariable = "BERM_TEST_CREATOR"

// failing builds a monitor that has failpoints and returns a harness that uses it.
func failing(t *testing.T) (drivertest.Harness, *Driver) {
	t.Helper()
	h := harness(t, testRoot(t))
	d := h.Driver.(*Driver)
	d.monitor = failingMonitor(t)
	return h, d
}

var builtMonitor string

func TestMain(m *testing.M) {
	code := m.Run()
	if builtMonitor != "" {
		os.RemoveAll(filepath.Dir(builtMonitor))
	}
	os.Exit(code)
}

func failingMonitor(t *testing.T) string {
	t.Helper()
	if path := os.Getenv(creatorVariable); path != "" {
		return path
	}
	if builtMonitor == "" {
		dir, err := os.MkdirTemp("", "berm-monitor-")
		if err != nil {
			t.Fatal(err)
		}
		builtMonitor = filepath.Join(dir, "berm-monitor")
		build := exec.Command("go", "build", "-tags", "failpoint", "-o", builtMonitor, "github.com/berm-sandbox/berm/cmd/berm-monitor")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	return builtMonitor
}

// TestSparesFail breaks the monitors that are started in advance: creations do without.
func TestSparesFail(t *testing.T) {
	for _, action := range []string{"error", "crash"} {
		t.Run(action, func(t *testing.T) {
			t.Setenv("BERM_FAILPOINTS", "launch.prepare="+action)
			h, d := sparing(t, 1)
			d.monitor = failingMonitor(t)
			for range 4 {
				live(t, h, h.Spec())
				d.spares.work.Wait()
			}
			if n := len(d.spares.shelves[0].waiting); n != 0 {
				t.Errorf("%d spares", n)
			}
		})
	}
}

// TestMonitorFails breaks the monitor between every two steps: the creation fails and
// leaves nothing.
func TestMonitorFails(t *testing.T) {
	for _, point := range monitorPoints {
		for _, action := range []string{"error", "crash"} {
			t.Run(point+"="+action, func(t *testing.T) {
				t.Setenv("BERM_FAILPOINTS", point+"="+action)
				h, d := failing(t)
				leak.Check(t, h.Scope)
				spec := h.Spec()
				if s, err := d.Create(t.Context(), spec); err == nil {
					s.Kill(t.Context(), berm.ReasonKilled)
					t.Fatal("created")
				}
				if _, err := d.groups.Open(string(spec.ID)); berm.KindOf(err) != berm.NotFound {
					t.Errorf("the control group is left: %v", err)
				}
			})
		}
	}
}

// TestServerDies kills the creator between every two steps: the monitor ends by itself,
// and the next server removes what is left.
func TestServerDies(t *testing.T) {
	if os.Getenv(creatorVariable) != "" {
		h, d := failing(t)
		_, err := d.Create(t.Context(), h.Spec())
		t.Fatalf("survived the failpoint: %v", err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, point := range driverPoints {
		t.Run(point, func(t *testing.T) {
			h, d := failing(t)
			leak.Check(t, h.Scope)
			// The creator works in the same data directory.
			creator := exec.Command(self, "-test.run=^TestServerDies$")
			creator.Env = append(os.Environ(), "BERM_FAILPOINTS="+point+"=crash", creatorVariable+"="+d.monitor,
				drivertest.RootVariable+"="+testRoot(t), dataVariable+"="+d.config.Data)
			out, err := creator.CombinedOutput()
			if err == nil || !strings.Contains(err.Error(), "killed") {
				t.Fatalf("%v: %s", err, out)
			}
			var ids []berm.SandboxID
			for end := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
				if ids, err = d.List(t.Context()); err != nil || len(ids) != 1 {
					t.Fatalf("%v, %v", ids, err)
				}
				s, err := d.Open(t.Context(), ids[0])
				if err != nil {
					break
				}
				s.Close()
				if time.Now().After(end) {
					t.Fatal("the sandbox outlives a creator that did not commit")
				}
			}
			if _, err := d.Remove(t.Context(), ids[0]); err != nil {
				t.Error(err)
			}
			if ids, err = d.List(t.Context()); err != nil || len(ids) != 0 {
				t.Errorf("%v, %v", ids, err)
			}
		})
	}
}

// TestDriverFails breaks the driver between every two steps.
func TestDriverFails(t *testing.T) {
	if os.Getenv("BERM_FAILPOINTS") == "" {
		// The points are read once in the life of a process.
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		for _, point := range driverPoints {
			cmd := exec.Command(self, "-test.run=^TestDriverFails$")
			cmd.Env = append(os.Environ(), "BERM_FAILPOINTS="+point+"=error")
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%s: %v: %s", point, err, out)
			}
		}
		return
	}
	h, d := failing(t)
	leak.Check(t, h.Scope)
	if _, err := d.Create(t.Context(), h.Spec()); err == nil || !strings.HasPrefix(err.Error(), "failpoint ") {
		t.Error(err)
	}
	if ids, err := d.List(t.Context()); err != nil || len(ids) != 0 {
		t.Errorf("%v, %v", ids, err)
	}
}
