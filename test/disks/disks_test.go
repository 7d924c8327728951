// Package disks tests snapshots where disks can be cloned: with the data directory on XFS and on
// btrfs, and in a depot.
package disks

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/kernel/mount"
	"github.com/berm-sandbox/berm/test/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

// on has data directories made on a new file system of size bytes for the rest of the test.
func on(t *testing.T, kind string, size int64) {
	t.Helper()
	if !mount.Known(kind) {
		t.Skipf("the kernel has no %s", kind)
	}
	disk := filepath.Join(t.TempDir(), "disk")
	f, err := os.Create(disk)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	mkfs := exec.Command("mkfs."+kind, "-q", disk)
	mkfs.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	if mkfs.Path, err = exec.LookPath("mkfs." + kind); err != nil {
		mkfs.Path, mkfs.Err = "/sbin/mkfs."+kind, nil
	}
	if out, err := mkfs.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s; make setup installs it", err, out)
	}
	device, err := mount.Loop(f, false, true)
	if err != nil {
		t.Fatal(err)
	}
	fd, err := mount.New(kind, device.Name(), 0)
	device.Close()
	place := t.TempDir()
	if err == nil {
		err = errors.Join(mount.Attach(fd, unix.AT_FDCWD, place), unix.Close(fd))
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(place, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	t.Setenv("TMPDIR", place)
}

// api calls the server.
func api(t *testing.T, s *harness.Server, method, path string, in, out any) {
	t.Helper()
	if err := s.Call(t.Context(), method, path, in, out); err != nil {
		t.Fatalf("%s %s: %v\n%s", method, path, err, s.Log())
	}
}

func create(t *testing.T, s *harness.Server, from, level string) *harness.Sandbox {
	t.Helper()
	sandbox, err := s.Create(t.Context(), 5*time.Minute, map[string]any{"templateID": from, "berm": map[string]any{"level": level}})
	if err != nil {
		t.Fatalf("%v\n%s", err, s.Log())
	}
	return sandbox
}

// run runs a command as root and returns what it printed.
func run(t *testing.T, sandbox *harness.Sandbox, text string) string {
	t.Helper()
	result, err := sandbox.Run(t.Context(), harness.Shell("root", text))
	if err != nil || result.Code != 0 {
		t.Fatalf("%s: exit %d, %v: %s%s", text, result.Code, err, result.Stdout, result.Stderr)
	}
	return result.Stdout
}

type taken struct {
	SnapshotID string
	Berm       struct {
		Shared bool
		Size   int64
	}
}

// save takes a snapshot, which shares its bytes with the disk or not.
func save(t *testing.T, s *harness.Server, sandbox *harness.Sandbox, name string, shared bool) string {
	t.Helper()
	var snap taken
	api(t, s, "POST", "/sandboxes/"+sandbox.ID+"/snapshots", map[string]any{"name": name}, &snap)
	if snap.Berm.Shared != shared {
		t.Errorf("the snapshot %s shares its bytes: %v", snap.SnapshotID, snap.Berm.Shared)
	}
	return snap.SnapshotID
}

// all says whether what takes minutes is tried too: make test-disks.
var all = os.Getenv("BERM_TEST_DISKS") == "all"

// levels are the isolation levels.
func levels() []string {
	if all {
		return []string{"namespace", "gvisor"}
	}
	return []string{"namespace"}
}

// state is of a sandbox what snapshots have to keep.
const (
	write = "echo %s >/root/state; head -c 5000000 /dev/urandom >/root/data; cd /root && sha256sum data >sum; rm -rf /etc/skel; sync"
	check = "cat /root/state; cd /root && sha256sum -c --status sum && echo whole; test -e /etc/skel || echo deleted"
)

func is(t *testing.T, sandbox *harness.Sandbox, state string) {
	t.Helper()
	if got, want := run(t, sandbox, check), state+"\nwhole\ndeleted\n"; got != want {
		t.Errorf("%s: %q, want %q", sandbox.ID, got, want)
	}
}

// branch takes a sandbox through snapshot, create, fork, rollback and pause.
func branch(t *testing.T, s *harness.Server, level string) {
	sandbox := create(t, s, "base", level)
	run(t, sandbox, fmt.Sprintf(write, "one"))
	first := save(t, s, sandbox, "first", true)
	is(t, create(t, s, first, level), "one")
	run(t, sandbox, fmt.Sprintf(write, "two"))
	forked, err := s.Fork(t.Context(), sandbox, 5*time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	is(t, forked, "two")
	run(t, forked, fmt.Sprintf(write, "three"))
	second := save(t, s, forked, "second", true) // a clone of a clone
	api(t, s, "POST", "/sandboxes/"+sandbox.ID+"/pause", map[string]any{"memory": false}, nil)
	api(t, s, "POST", "/sandboxes/"+sandbox.ID+"/connect", map[string]any{"timeout": 300}, nil)
	is(t, sandbox, "two")
	api(t, s, "POST", "/berm/v1/sandboxes/"+sandbox.ID+"/rollback", map[string]any{"snapshot": "first"}, nil)
	is(t, sandbox, "one")
	is(t, forked, "three")
	api(t, s, "DELETE", "/templates/"+first, nil, nil)
	is(t, sandbox, "one") // its bytes are its own
	is(t, create(t, s, second, level), "three")
	api(t, s, "DELETE", "/templates/"+second, nil, nil)
	if err := s.KillAll(t.Context()); err != nil {
		t.Error(err)
	}
	if kept, err := os.ReadDir(filepath.Join(s.Data, "snapshots")); err != nil || len(kept) > 0 {
		t.Errorf("left: %v, %v", kept, err)
	}
}

func TestStores(t *testing.T) {
	harness.Slow(t)
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			on(t, kind, 4<<30)
			s := harness.Serve(t)
			for _, level := range levels() {
				t.Run(level, func(t *testing.T) { branch(t, s, level) })
			}
		})
	}
}

// TestDepot: the same in a depot, which outlives its server in every way.
func TestDepot(t *testing.T) {
	harness.Slow(t)
	on(t, "ext4", 8<<30)
	depot := []string{"--depot", "2GiB", "--spares", "2"}
	s := harness.Serve(t, depot...)
	for _, level := range levels() {
		t.Run(level, func(t *testing.T) { branch(t, s, level) })
	}
	if kept, err := os.ReadDir(filepath.Join(s.Data, "depot", "snapshots")); err != nil || len(kept) > 0 {
		t.Errorf("left in the depot: %v, %v", kept, err)
	}

	// A server dies; the next one takes the depot over, with the disks of what lives.
	sandbox := create(t, s, "base", "namespace")
	run(t, sandbox, fmt.Sprintf(write, "one"))
	first := save(t, s, sandbox, "first", true)
	restart(t, s, depot...)
	is(t, create(t, s, first, "namespace"), "one")
	save(t, s, sandbox, "second", true)

	// One that knows no depot serves what is in it, and makes nothing there.
	restart(t, s)
	here := create(t, s, first, "namespace")
	is(t, here, "one")
	save(t, s, here, "here", false)
	if kept, err := os.ReadDir(filepath.Join(s.Data, "depot", "snapshots")); err != nil || len(kept) != 2 {
		t.Errorf("in the depot: %v, %v", kept, err)
	}
	for _, name := range []string{first, "second"} {
		api(t, s, "DELETE", "/templates/"+name, nil, nil)
	}
	// Nothing is saved there any more: it goes, and what a sandbox has in it stays that one's.
	restart(t, s)
	if _, err := os.Stat(filepath.Join(s.Data, "depot.img")); !os.IsNotExist(err) {
		t.Errorf("the depot is left: %v", err)
	}
	is(t, sandbox, "one")
	run(t, sandbox, fmt.Sprintf(write, "four"))
	save(t, s, sandbox, "fourth", false)

	// And again with one: what was saved beside it is there as ever.
	restart(t, s, depot...)
	for name, want := range map[string]string{"here": "one", "fourth": "four"} {
		is(t, create(t, s, name, "namespace"), want)
	}
}

// restart lets the server die and starts it with other flags.
func restart(t *testing.T, s *harness.Server, flags ...string) {
	t.Helper()
	s.Crash()
	if err := s.RestartWith(t.Context(), flags...); err != nil {
		t.Fatal(err)
	}
}

// TestDrivers runs the drivers' suites where disks can be cloned.
func TestDrivers(t *testing.T) {
	if harness.Slow(t); !all {
		t.Skip("minutes: make test-disks runs it")
	}
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			cache, err := exec.Command("go", "env", "GOCACHE").Output()
			if err != nil {
				t.Fatal(err)
			}
			t.Setenv("GOTMPDIR", t.TempDir())
			t.Setenv("GOCACHE", strings.TrimSpace(string(cache)))
			on(t, kind, 8<<30)
			suites := exec.Command("go", "test", "-count=1", "-timeout", "20m", "-run", "^TestDriver$", "./internal/driver/namespace", "./internal/driver/gvisor")
			suites.Dir = "../.."
			if out, err := suites.CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}

// fills writes into a sandbox until something gives way.
const fills = "for i in $(seq 40); do head -c 50000000 /dev/zero | tr '\\0' x >/root/fill$i && sync || break; done; true"

// A depot that is full, and a data directory that is full below a depot that is not, harm those who
// filled them: others work on, the server says what is the matter, and room comes back.
func TestFull(t *testing.T) {
	if harness.Slow(t); !all {
		t.Skip("a minute: make test-disks runs it")
	}
	for name, c := range map[string]struct {
		disk  int64
		depot string
	}{"depot": {8 << 30, "1GiB"}, "below": {1<<30 + 100<<20, "100GiB"}} {
		t.Run(name, func(t *testing.T) {
			on(t, "ext4", c.disk)
			s := harness.Serve(t, "--depot", c.depot)
			other := create(t, s, "base", "namespace")
			run(t, other, fmt.Sprintf(write, "one"))
			kept := save(t, s, other, "kept", true)
			filler := create(t, s, "base", "namespace")
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
			defer cancel()
			if _, err := filler.Run(ctx, harness.Shell("root", fills)); err != nil {
				t.Logf("the one that fills: %v", err)
			}
			var status *harness.StatusError
			if _, err := s.Create(t.Context(), time.Minute, nil); !errors.As(err, &status) || status.Status != 503 || !strings.Contains(status.Body, "make room") {
				t.Errorf("create: %v", err)
			}
			if err := s.Call(t.Context(), "POST", "/sandboxes/"+other.ID+"/snapshots", map[string]any{}, nil); !errors.As(err, &status) || status.Status != 503 {
				t.Errorf("snapshot: %v", err)
			}
			is(t, other, "one")
			if err := filler.Kill(t.Context()); err != nil {
				t.Fatal(err)
			}
			var again *harness.Sandbox
			for end := time.Now().Add(time.Minute); again == nil; time.Sleep(100 * time.Millisecond) {
				var err error
				if again, err = s.Create(t.Context(), 5*time.Minute, map[string]any{"templateID": kept}); err != nil && time.Now().After(end) {
					t.Fatalf("no room came back: %v", err)
				}
			}
			is(t, again, "one")
			run(t, again, fmt.Sprintf(write, "two"))
			save(t, s, again, "after", true)
		})
	}
}
