package namespace

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/drivertest"
	"github.com/berm-sandbox/berm/internal/driver/namespace/launch"
	"github.com/berm-sandbox/berm/internal/kernel/feature"
	"github.com/berm-sandbox/berm/internal/leak"
)

// dataVariable is, in the environment of a test's other process, the data directory of the test's.
const dataVariable = "BERM_TEST_DATA"

var leases atomic.Uint32

// ownIDs are ids that neither another test process nor a server on this machine uses.
func ownIDs() berm.IDRange {
	const each = 8 * berm.IDsPerSandbox
	return berm.IDRange{Base: 0x60000000 + uint32(os.Getpid()%256)*each, Count: each}
}

// lease takes some of them for a sandbox.
func lease() berm.IDRange {
	return berm.IDRange{Base: ownIDs().Base + leases.Add(1)%8*berm.IDsPerSandbox, Count: berm.IDsPerSandbox}
}

func newDriver(t testing.TB, config Config) *Driver {
	t.Helper()
	d, err := New(config)
	if err != nil {
		t.Fatalf("%v (%s)", err, berm.HintOf(err))
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// dataDir makes a data directory. As root it may not be below a directory of another
// user, and for the kernel's sake its path must be short.
func dataDir(t testing.TB) string {
	if data := os.Getenv(dataVariable); data != "" {
		return data
	}
	base := os.Getenv(drivertest.DirVariable)
	dir, err := os.MkdirTemp(base, "berm-driver-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func harness(t *testing.T, root string) drivertest.Harness {
	config := Config{Data: dataDir(t)}
	if os.Geteuid() == 0 {
		// Whatever is in a parent group of its own was left by the test.
		config.CgroupParent = "/berm-test-" + filepath.Base(config.Data)
	}
	d := newDriver(t, config)
	t.Cleanup(func() { d.groups.Close() })
	h := drivertest.Harness{
		Driver:  d,
		Reopen:  func(t *testing.T) berm.Driver { return newDriver(t, config) },
		Missing: map[drivertest.Feature]string{drivertest.Memory: "processes of the host's kernel are not saved"},
		Scope:   leak.Scope{Dirs: []string{filepath.Join(config.Data, "sandboxes")}},
		Monitor: drivertest.Monitor,
		Init: func(t *testing.T, id berm.SandboxID) int {
			pid := drivertest.Monitor(t, id)
			children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
			if err != nil {
				t.Fatal(err)
			}
			init, err := strconv.Atoi(strings.Fields(string(children) + " 0")[0])
			if err != nil || init == 0 {
				t.Fatalf("the monitor's children are %q", children)
			}
			return init
		},
	}
	limits := berm.Limits{Memory: 256 << 20, CPU: 2, PIDs: 256, Disk: 256 << 20}
	if os.Geteuid() == 0 {
		h.Scope.IDs = ownIDs()
		h.Scope.Cgroups = []string{filepath.Base(config.CgroupParent)}
	} else {
		h.Missing[drivertest.Snapshot] = "the disks of an ordinary user's sandboxes are no file systems of their own"
		if err := feature.TmpfsAttributes.Check(t.Context()); err != nil && feature.TmpfsAttributes.Excused(err) {
			h.Missing[drivertest.DiskLimit] = err.Error()
			limits.Disk = 0
		}
		missing := d.groups.Missing()
		for controller, f := range map[string]drivertest.Feature{"memory": drivertest.MemoryLimit, "pids": drivertest.PIDLimit, "cpu": drivertest.CPULimit, "freezer": drivertest.Freeze} {
			if why, gone := missing[controller]; gone {
				h.Missing[f] = "cgroup controller " + controller + ": " + why
			}
		}
		if h.Missing[drivertest.MemoryLimit] != "" {
			limits.Memory = 0
		}
		if h.Missing[drivertest.CPULimit] != "" {
			limits.CPU = 0
		}
		if h.Missing[drivertest.PIDLimit] != "" {
			limits.PIDs = 0
		}
		if err := feature.Link.Check(t.Context()); err != nil {
			h.Missing[drivertest.Link] = err.Error()
		}
		if limits.Disk > 0 {
			h.Missing[drivertest.Writable] = "what an ordinary user's sandbox writes within a limit is in memory that only it sees"
		}
		if d.host.kind == launch.Single {
			h.Missing[drivertest.Users] = d.host.degraded[0]
		}
	}
	h.Spec = func() berm.Spec {
		spec := berm.Spec{
			ID: berm.NewSandboxID(), Level: berm.Namespace, Hostname: "box", Limits: limits,
			Layers: []berm.Layer{{DiffID: "sha256:test", Path: root}},
		}
		if os.Geteuid() == 0 {
			spec.IDs = lease()
		}
		return spec
	}
	return h
}

func testRoot(t *testing.T) string {
	if root := os.Getenv(drivertest.RootVariable); root != "" {
		return root
	}
	return drivertest.Root(t, t.TempDir(), os.Geteuid())
}

// TestDriver runs the suite as whoever runs the tests.
func TestDriver(t *testing.T) {
	root := os.Getenv(drivertest.RootVariable)
	if root == "" {
		root = drivertest.Root(t, t.TempDir(), os.Geteuid())
	}
	drivertest.Run(t, func(t *testing.T) drivertest.Harness { return harness(t, root) })
}

// TestOrdinaryUser runs the suite again as a user without any rights: one who has no id
// but the own, and one who has subordinate ids.
func TestOrdinaryUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("TestDriver runs as an ordinary user already")
	}
	if os.Getenv("BERM_TEST_ALL") == "" {
		t.Skip("slow: BERM_TEST_ALL=1 runs it")
	}
	const tests = "^(TestDriver|TestSpares.*)$"
	t.Run("SingleID", func(t *testing.T) { drivertest.AsUser(t, drivertest.OrdinaryUser, tests) })
	t.Run("SubordinateIDs", func(t *testing.T) {
		drivertest.GrantIDs(t)
		drivertest.AsUser(t, drivertest.SubordinateIDs, tests)
	})
}

func TestProbe(t *testing.T) {
	p := newDriver(t, Config{Data: dataDir(t)}).Probe(t.Context())
	for _, f := range p.Features {
		t.Logf("%+v", f)
		if !f.Found && f.Fix == "" {
			t.Errorf("%s is missing, and nothing says what to do about it", f.Name)
		}
	}
	// The suite runs here, so it has to be usable.
	if !p.Usable {
		t.Errorf("%+v", p)
	}
}

// A data directory may lie deeper than the address of a Unix socket is long.
func TestDeepDataDirectory(t *testing.T) {
	config := Config{Data: filepath.Join(dataDir(t), strings.Repeat("deep/", 30))}
	d := newDriver(t, config)
	spec := harness(t, drivertest.Root(t, t.TempDir(), os.Geteuid())).Spec()
	s, err := d.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	again, err := d.Open(t.Context(), spec.ID)
	if err != nil {
		t.Error(err)
	} else {
		again.Close()
	}
	if _, err := s.Kill(t.Context(), berm.ReasonKilled); err != nil {
		t.Error(err)
	}
}

// A monitor that dies before it says anything is noticed at once.
func TestSilentDeathOfTheMonitor(t *testing.T) {
	h := harness(t, drivertest.Root(t, t.TempDir(), os.Geteuid()))
	leak.Check(t, h.Scope)
	h.Driver.(*Driver).monitor = "/bin/true"
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := h.Driver.Create(ctx, h.Spec()); berm.KindOf(err) != berm.Unavailable {
		t.Errorf("create: %v", err)
	}
	if err := ctx.Err(); err != nil {
		t.Error("the creation waited for a monitor that is dead")
	}
}

// What runs as init and agent cannot be changed by anybody.
func TestSealedExecutables(t *testing.T) {
	d := newDriver(t, Config{Data: dataDir(t)})
	for _, f := range []*os.File{d.init, d.guest} {
		if _, err := f.WriteAt([]byte("x"), 0); err == nil {
			t.Errorf("%s can be written", f.Name())
		}
		if err := f.Truncate(0); err == nil {
			t.Errorf("%s can be cut", f.Name())
		}
	}
}

// TestFullDisk: what is written inside when the host's disk is full is lost, so no
// sandbox is made shortly before.
func TestFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: mounts a small file system")
	}
	data := dataDir(t)
	if err := unix.Mount("none", data, "tmpfs", 0, "mode=0700,size=200m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(data, unix.MNT_DETACH) })
	d := newDriver(t, Config{Data: data})
	spec := berm.Spec{
		ID: berm.NewSandboxID(), Level: berm.Namespace, Hostname: "full", IDs: lease(),
		Layers: []berm.Layer{{Path: t.TempDir()}}, Limits: berm.Limits{Disk: 64 << 20},
	}
	_, err := d.Create(t.Context(), spec)
	if berm.KindOf(err) != berm.Unavailable || berm.HintOf(err) == "" {
		t.Errorf("Create on a full disk: %v; want Unavailable with a hint", err)
	}
	if left, _ := os.ReadDir(filepath.Join(data, "sandboxes")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
