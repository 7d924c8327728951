package namespace

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/drivertest"
	"github.com/berm-sandbox/berm/internal/driver/namespace/launch"
	"github.com/berm-sandbox/berm/internal/leak"
)

// sparing returns a harness whose driver keeps count spares, and watches all of its data
// directory: spares do not work in the directories of sandboxes.
func sparing(t *testing.T, count int) (drivertest.Harness, *Driver) {
	t.Helper()
	h := harness(t, testRoot(t))
	d := h.Driver.(*Driver)
	images := filepath.Join(d.config.Data, "images")
	h.Scope.Dirs = append(h.Scope.Dirs, images)
	// Images are made once and stay.
	for _, size := range []int64{h.Spec().Limits.Disk, 64 << 20} {
		if d.upper(berm.Spec{Limits: berm.Limits{Disk: size}}) == upperImage {
			if _, err := d.image(size); err != nil {
				t.Fatal(err)
			}
		}
	}
	leak.Check(t, h.Scope)
	d.spares.start(count, d.spare)
	t.Cleanup(d.spares.close) // before the check
	return h, d
}

// full waits until the spares that were used last are complete, and returns them.
func full(t *testing.T, s *spares) []*keeper {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		s.mu.Lock()
		waiting := append([]*keeper(nil), s.shelves[0].waiting...)
		s.mu.Unlock()
		if len(waiting) == s.count {
			return waiting
		}
	}
	t.Fatal("no spares")
	return nil
}

// live makes a sandbox, looks whether it works, and ends it. It returns the id of its
// monitor's process.
func live(t *testing.T, h drivertest.Harness, spec berm.Spec) int {
	t.Helper()
	s, err := h.Driver.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	pid := drivertest.Monitor(t, spec.ID)
	if usage, err := s.Usage(t.Context()); err != nil {
		t.Error(err)
	} else if disk := spec.Limits.Disk; h.Driver.(*Driver).upper(spec) == upperImage && (usage.DiskTotal > disk || usage.DiskTotal < disk*8/10) {
		t.Errorf("a disk of %d bytes has %d", disk, usage.DiskTotal)
	}
	if _, err := s.Kill(t.Context(), berm.ReasonKilled); err != nil {
		t.Error(err)
	}
	return pid
}

func TestSparesAreUsed(t *testing.T) {
	h, d := sparing(t, 2)
	live(t, h, h.Spec())
	if len(d.spares.shelves[0].waiting) != 0 {
		t.Error("spares of a size that was used once")
	}
	live(t, h, h.Spec())
	waiting := full(t, &d.spares)
	if pid := live(t, h, h.Spec()); pid != waiting[0].pid {
		t.Error("the spare was not used")
	}
	waiting = full(t, &d.spares)
	other := h.Spec()
	if other.Limits.Disk == 0 {
		return // there are no sizes here
	}
	other.Limits.Disk = 64 << 20
	pid := live(t, h, other)
	for _, k := range waiting {
		if k.pid == pid && d.upper(other) == upperImage {
			t.Error("a spare of another size was used")
		}
	}
}

// A sandbox gets the disk that its order names, whatever its monitor has made before.
func TestSpareOfAnotherDisk(t *testing.T) {
	h, d := sparing(t, 1)
	spec := h.Spec()
	if d.upper(spec) != upperImage {
		t.Skip("needs root: an ordinary user has no disk images")
	}
	live(t, h, spec)
	live(t, h, spec)
	full(t, &d.spares)
	small := spec
	small.ID, small.Limits.Disk = berm.NewSandboxID(), 64<<20
	order, err := d.order(small, d.wall)
	if err != nil {
		t.Fatal(err)
	}
	d.spares.shelves[0].upper = order.Upper
	pid := d.spares.shelves[0].waiting[0].pid
	if used := live(t, h, small); used != pid {
		t.Error("the spare was not used")
	}
}

// Spares may die at any time.
func TestSparesDie(t *testing.T) {
	h, d := sparing(t, 2)
	live(t, h, h.Spec())
	live(t, h, h.Spec())
	for range 3 {
		for _, k := range full(t, &d.spares) {
			if err := unix.Kill(k.pid, unix.SIGKILL); err != nil {
				t.Error(err)
			}
			<-k.ended
		}
		live(t, h, h.Spec())
	}
}

// Only the sizes that were asked for last have spares.
func TestShelves(t *testing.T) {
	h, d := sparing(t, 1)
	live(t, h, h.Spec())
	live(t, h, h.Spec())
	k := full(t, &d.spares)[0]
	for _, image := range []string{"a", "b", "c", "d"} {
		if d.spares.take(launch.Upper{Image: image}) != nil {
			t.Error("a spare of nothing")
		}
	}
	select {
	case <-k.ended:
	case <-time.After(5 * time.Second):
		t.Error("a spare that nobody wants any more is kept")
	}
	if n := len(d.spares.shelves); n != maxShelves {
		t.Errorf("%d shelves", n)
	}
}

// Whatever a crash left half made is removed at the start.
func TestSweep(t *testing.T) {
	data := dataDir(t)
	images := filepath.Join(data, "images")
	for _, dir := range []string{"content-1", "ext4-1"} {
		if err := os.MkdirAll(filepath.Join(images, dir, "upper"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"ext4-2.new", "upper-1.new", "ext4-2"} {
		if err := os.WriteFile(filepath.Join(images, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	newDriver(t, Config{Data: data})
	left, err := filepath.Glob(images + "/*")
	if err != nil || len(left) != 2 || left[0] != images+"/ext4-1" || left[1] != images+"/ext4-2" {
		t.Errorf("%v, %v", left, err)
	}
}

// Spares do not outlive a server that is killed, nor do their loop devices.
func TestSparesEndWithServer(t *testing.T) {
	const server = "BERM_TEST_SPARES"
	if os.Getenv(server) != "" {
		h, d := sparing(t, 2)
		live(t, h, h.Spec())
		live(t, h, h.Spec())
		full(t, &d.spares)
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	}
	h, d := sparing(t, 0)
	// An ordinary user's run may not execute this program by its name.
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestSparesEndWithServer$")
	cmd.Env = append(os.Environ(), server+"=1", dataVariable+"="+d.config.Data, drivertest.RootVariable+"="+h.Spec().Layers[0].Path)
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Fatalf("%v: %s", err, out)
	}
}
