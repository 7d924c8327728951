package faults

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

// crash is a server that dies at a point, in the middle of what is asked of it.
type crash struct {
	point string
	// then asks for it; the answer never comes.
	method, path string // %s is the sandbox
	body         any
	paused       bool // before it, without memory
	// files says what the sandbox may have afterwards: what it wrote last, or the snapshot's.
	files []string
}

// failing builds a server with failpoints and has the tests use it.
func failing(t *testing.T) {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "berm-platform")
	build := exec.Command("go", "build", "-tags", "failpoint", "-o", binary, "../../cmd/berm-platform")
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // as what its services may do expects
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Setenv("BERM_BINARY", binary)
}

// A server that is killed between any two steps of a snapshot, a fork, a pause to files, a rollback
// or a resume loses nothing of what a sandbox was told is written, leaves nothing behind and nothing
// stuck.
func TestCrashesAmongSnapshots(t *testing.T) {
	harness.Slow(t)
	failing(t)
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	s := harness.Serve(t)
	last, old := []string{"two"}, []string{"one"}
	var all []crash
	add := func(c crash, points ...string) {
		for _, c.point = range points {
			all = append(all, c)
		}
	}
	saving := []string{"control.directory", "driver.saved"}
	making := []string{"engine.leased", "driver.directory", "driver.spawn", "driver.create", "driver.health"}
	add(crash{method: "POST", path: "/sandboxes/%s/snapshots", body: map[string]any{"name": "again"}, files: last}, append(saving, "control.saved")...)
	add(crash{method: "POST", path: "/sandboxes/%s/fork", body: map[string]any{"count": 2, "timeout": 60}, files: last}, append(saving, append(making, "control.created")...)...)
	add(crash{method: "POST", path: "/sandboxes/%s/pause", body: map[string]any{"memory": false}, files: last}, append(saving, "control.resting", "control.rested")...)
	add(crash{method: "POST", path: "/berm/v1/sandboxes/%s/rollback", body: map[string]any{"snapshot": "before"}, files: old},
		append(making, "control.rolled", "control.woken", "control.awake")...)
	add(crash{method: "POST", path: "/berm/v1/sandboxes/%s/rollback", body: map[string]any{"snapshot": "before"}, files: last}, saving...)
	add(crash{method: "POST", path: "/sandboxes/%s/connect", body: map[string]any{"timeout": 60}, paused: true, files: last},
		append(making, "control.woken", "control.awake")...)
	add(crash{method: "POST", path: "/berm/v1/sandboxes/%s/rollback", body: map[string]any{"snapshot": "before"}, paused: true, files: old},
		"control.rolled", "control.woken", "control.awake")
	add(crash{method: "DELETE", path: "/templates/before", files: last}, "control.forgotten")
	for _, c := range all {
		name := c.point + strings.ReplaceAll(c.path, "%s", "")
		if c.paused {
			name += "/paused"
		}
		t.Run(strings.ReplaceAll(name, "/", "-"), func(t *testing.T) { c.run(t, ctx, s) })
	}
}

// The same in a depot, where what is saved has a second place.
func TestCrashesAmongSnapshotsInADepot(t *testing.T) {
	if harness.Slow(t); os.Getenv("BERM_TEST_DISKS") != "all" {
		t.Skip("most of a minute: make test-disks runs it")
	}
	failing(t)
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	s := harness.Serve(t, "--depot", "2GiB")
	last, old := []string{"two"}, []string{"one"}
	snapshot := crash{method: "POST", path: "/sandboxes/%s/snapshots", body: map[string]any{"name": "again"}, files: last}
	pause := crash{method: "POST", path: "/sandboxes/%s/pause", body: map[string]any{"memory": false}, files: last}
	back := crash{method: "POST", path: "/berm/v1/sandboxes/%s/rollback", body: map[string]any{"snapshot": "before"}, files: old}
	removal := crash{method: "DELETE", path: "/templates/before", files: last}
	for _, c := range []struct {
		crash
		points []string
	}{
		{snapshot, []string{"control.depot", "control.linked", "control.directory", "driver.saved", "control.saved"}},
		{pause, []string{"control.linked", "control.rested"}},
		{back, []string{"control.rolled"}},
		{removal, []string{"control.forgotten", "control.emptied"}},
	} {
		for _, c.point = range c.points {
			t.Run(c.point+strings.ReplaceAll(strings.ReplaceAll(c.path, "%s", ""), "/", "-"), func(t *testing.T) {
				c.run(t, ctx, s)
				if left, err := os.ReadDir(filepath.Join(s.Data, "depot", "snapshots")); err != nil || len(left) > 0 {
					t.Errorf("in the depot: %v, %v", left, err)
				}
			})
		}
	}
}

func (c crash) run(t *testing.T, ctx context.Context, s *harness.Server) {
	sandbox := create(t, ctx, s, 2*time.Minute)
	call := func(method, path string, body any) {
		t.Helper()
		if err := s.Call(ctx, method, path, body, nil); err != nil {
			t.Fatalf("%s %s: %v\n%s", method, path, err, s.Log())
		}
	}
	run(t, ctx, sandbox, "user", "echo one >state; head -c 300000 /dev/urandom >data; sha256sum data >sum")
	call("POST", "/sandboxes/"+sandbox.ID+"/snapshots", map[string]any{"name": "before"})
	run(t, ctx, sandbox, "user", "echo two >state; echo more >>data; sha256sum data >sum")
	if c.paused {
		call("POST", "/sandboxes/"+sandbox.ID+"/pause", map[string]any{"memory": false})
	}
	again := func(failpoints string) {
		t.Helper()
		if err := os.Setenv("BERM_FAILPOINTS", failpoints); err != nil {
			t.Fatal(err)
		}
		defer os.Unsetenv("BERM_FAILPOINTS")
		if err := s.Restart(ctx); err != nil {
			t.Fatal(err)
		}
	}
	s.Crash()
	again(c.point + "=crash")
	path := c.path
	if strings.Contains(path, "%s") {
		path = fmt.Sprintf(path, sandbox.ID)
	}
	if err := s.Call(ctx, c.method, path, c.body, nil); err == nil {
		t.Errorf("%s was not reached", c.point)
	}
	for end := time.Now().Add(30 * time.Second); s.Alive() && time.Now().Before(end); {
		time.Sleep(5 * time.Millisecond)
	}
	s.Crash()
	again("")

	// Nothing but this sandbox is there, and nothing is stuck.
	var listed []struct{ SandboxID string }
	if err := s.Call(ctx, http.MethodGet, "/v2/sandboxes?limit=100&state=running,paused", nil, &listed); err != nil || len(listed) != 1 || listed[0].SandboxID != sandbox.ID {
		t.Errorf("%+v, %v", listed, err)
	}
	call("POST", "/sandboxes/"+sandbox.ID+"/connect", map[string]any{"timeout": 60})
	if ids := held(t, s); len(ids) != 1 || ids[0] != sandbox.ID {
		t.Errorf("in the data directory: %v", ids)
	}
	known := len(snapshots(ctx, t, s, ""))
	if kept, err := os.ReadDir(filepath.Join(s.Data, "snapshots")); err != nil || len(kept) != known {
		t.Errorf("%d snapshots, on disk %v, %v", known, kept, err)
	}
	got := run(t, ctx, sandbox, "user", "cat state; sha256sum -c --status sum && echo whole")
	if got.Stdout != strings.Join(c.files, "")+"\nwhole\n" {
		t.Errorf("its files: %q", got.Stdout)
	}
	// What was asked for can be asked for again.
	if c.method == http.MethodPost {
		if c.paused {
			call("POST", "/sandboxes/"+sandbox.ID+"/pause", map[string]any{"memory": false})
		}
		call(c.method, path, c.body)
	}
	if err := s.KillAll(ctx); err != nil {
		t.Error(err)
	}
	for _, snap := range snapshots(ctx, t, s, "") {
		call("DELETE", "/templates/"+snap.ID, nil)
	}
	if kept, err := os.ReadDir(filepath.Join(s.Data, "snapshots")); err != nil || len(kept) != 0 {
		t.Errorf("at the end on disk: %v, %v", kept, err)
	}
}
