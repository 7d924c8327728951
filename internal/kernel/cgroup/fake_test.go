package cgroup

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// A fake is a machine of files: a proc directory and hierarchies whose groups get the
// files that the kernel would put there.
type fake struct {
	t    *testing.T
	root string
}

func newFake(t *testing.T, mountinfo, cgroup string) *fake {
	f := &fake{t, t.TempDir()}
	f.write("proc/self/mountinfo", strings.ReplaceAll(mountinfo, "ROOT", f.root))
	f.write("proc/self/cgroup", cgroup)
	return f
}

func (f *fake) write(name, text string) {
	f.t.Helper()
	path := filepath.Join(f.root, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		f.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		f.t.Fatal(err)
	}
}

// delegate marks a group as systemd does. Only root looks for the mark, and may set it.
func (f *fake) delegate(name string) {
	f.t.Helper()
	if os.Geteuid() != 0 {
		return
	}
	if err := unix.Setxattr(filepath.Join(f.root, name), "trusted.delegate", []byte("1"), 0); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fake) read(name string) string {
	b, _ := os.ReadFile(filepath.Join(f.root, name))
	return strings.TrimSpace(string(b))
}

// files are what the kernel puts into a new group.
var files = []string{"cgroup.procs", "tasks", "cgroup.subtree_control", "cgroup.freeze", "memory.limit_in_bytes", "memory.max",
	"memory.swap.max", "cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.max", "pids.max", "io.max", "blkio.throttle.read_bps_device"}

func (f *fake) manager(parent string) *Manager {
	f.t.Helper()
	m, err := New(Config{Parent: parent, Proc: filepath.Join(f.root, "proc")})
	if err != nil {
		f.t.Fatal(err)
	}
	m.mkdir = func(dir string) error {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		for _, name := range files {
			if err := os.WriteFile(filepath.Join(dir, name), nil, 0o644); err != nil {
				return err
			}
		}
		return nil
	}
	return m
}

const v1Mounts = `30 25 0:26 / ROOT/cg ro,nosuid - tmpfs tmpfs ro,mode=755
31 30 0:27 / ROOT/cg/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 / ROOT/cg/memory rw,nosuid - cgroup cgroup rw,memory
33 30 0:29 / ROOT/cg/pids rw,nosuid - cgroup cgroup rw,pids
34 30 0:30 / ROOT/cg/blkio rw,nosuid - cgroup cgroup rw,blkio
35 30 0:31 / ROOT/cg/freezer rw,nosuid - cgroup cgroup rw,freezer
36 30 0:32 / ROOT/cg/systemd rw,nosuid - cgroup cgroup rw,xattr,name=systemd
`

const v1Own = "6:freezer:/\n5:blkio:/\n4:pids:/user\n3:memory:/user/me\n2:cpu,cpuacct:/\n1:name=systemd:/x\n"

func v1Fake(t *testing.T, mounts, own string) *fake {
	f := newFake(t, mounts, own)
	for _, dir := range []string{"cpu,cpuacct", "memory/user/me", "pids/user", "blkio", "freezer"} {
		f.write("cg/"+dir+"/tasks", "")
	}
	return f
}

var limits = berm.Limits{Memory: 64 << 20, CPU: 1.5, PIDs: 100}

func TestFakeV1(t *testing.T) {
	f := v1Fake(t, v1Mounts, v1Own)
	m := f.manager("")
	if m.Layout() != V1 || m.String() != "v1: cpu freezer io memory pids" {
		t.Errorf("%s: %s, missing %v", m.Layout(), m, m.Missing())
	}
	limits := limits
	limits.ReadBytes = 1 << 20
	g, err := m.Create("box", limits, Disk{8, 0})
	if err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{
		"memory/user/me/berm/box/memory.limit_in_bytes": "67108864",
		"cpu,cpuacct/berm/box/cpu.cfs_quota_us":         "150000",
		"cpu,cpuacct/berm/box/cpu.cfs_period_us":        "100000",
		"pids/user/berm/box/pids.max":                   "100",
		"blkio/berm/box/blkio.throttle.read_bps_device": "8:0 1048576",
		"freezer/berm/box/cgroup.procs":                 "",
	} {
		if got := f.read("cg/" + file); got != want {
			t.Errorf("%s holds %q, want %q", file, got, want)
		}
	}
	if len(g.Dirs()) != 5 {
		t.Errorf("%v", g.Dirs())
	}
	if err := g.Add(77); err != nil {
		t.Fatal(err)
	}
	for _, dir := range g.Dirs() {
		if got, _ := read(dir, "cgroup.procs"); got != "77" {
			t.Errorf("%s holds %q", dir, got)
		}
	}
	if dir, err := g.File(); dir != nil || err != nil {
		t.Errorf("v2 directory %v, %v", dir, err)
	}
	// v1 cannot see buffered writes.
	if _, err := m.Create("writes", berm.Limits{WriteBytes: 1}, Disk{8, 0}); berm.KindOf(err) != berm.Unsupported {
		t.Errorf("limit of written bytes: %v", err)
	}
	if _, err := m.Create("nodisk", berm.Limits{ReadBytes: 1}); berm.KindOf(err) != berm.Unsupported {
		t.Errorf("limit of read bytes without a disk: %v", err)
	}
}

// Swap that is not counted would let a sandbox have more than its memory.
func TestFakeV1Swap(t *testing.T) {
	f := v1Fake(t, v1Mounts, v1Own)
	const header = "Filename Type Size Used Priority\n"
	f.write("proc/swaps", header+"/dev/sda2 partition 1 0 -2\n")
	m := f.manager("")
	if _, err := m.Create("box", limits); berm.KindOf(err) != berm.Unsupported {
		t.Errorf("with swap: %v", err)
	}
	f.write("proc/swaps", header)
	if _, err := m.Create("box", limits); err != nil {
		t.Errorf("without swap: %v", err)
	}
}

const v2Mounts = "30 25 0:26 / ROOT/cg rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"

func TestFakeV2(t *testing.T) {
	f := newFake(t, v2Mounts, "0::/system.slice/berm.service\n")
	const own = "cg/system.slice/berm.service/"
	f.write(own+"cgroup.controllers", "cpuset cpu io memory pids\n")
	f.write(own+"cgroup.subtree_control", "")
	f.delegate(own)
	m := f.manager("")
	if m.Layout() != V2 || m.String() != "v2: cpu freezer io memory pids" {
		t.Errorf("%s: %s", m.Layout(), m)
	}
	limits := limits
	limits.ReadBytes, limits.WriteBytes = 1<<20, 2<<20
	g, err := m.Create("box", limits, Disk{259, 3})
	if err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{
		"cgroup.subtree_control":      "+io", // a file keeps the last of the four writes
		"berm/cgroup.subtree_control": "+io",
		"berm/box/memory.max":         "67108864",
		"berm/box/memory.swap.max":    "0",
		"berm/box/cpu.max":            "150000 100000",
		"berm/box/pids.max":           "100",
		"berm/box/io.max":             "259:3 rbps=1048576 wbps=2097152",
	} {
		if got := f.read(own + file); got != want {
			t.Errorf("%s holds %q, want %q", file, got, want)
		}
	}
	if dirs := g.Dirs(); len(dirs) != 1 {
		t.Errorf("%v", dirs)
	}
	if again := f.manager(""); again.hierarchies[0].parent != m.hierarchies[0].parent {
		t.Errorf("parent %s", again.hierarchies[0].parent)
	}
	// A process that went out of the way finds the same parent, and so do its children.
	f.write("proc/self/cgroup", "0::/system.slice/berm.service/berm-host\n")
	f.write(own+"berm-host/cgroup.procs", "")
	if again := f.manager(""); again.hierarchies[0].parent != m.hierarchies[0].parent {
		t.Errorf("parent %s, from the leaf", again.hierarchies[0].parent)
	}
}

// The group of a login session belongs to the session: root makes its own at the top,
// where the next login finds them again, and others have none.
func TestFakeSession(t *testing.T) {
	f := newFake(t, v2Mounts, "0::/user.slice/session-3.scope\n")
	for _, dir := range []string{"cg/", "cg/user.slice/session-3.scope/"} {
		f.write(dir+"cgroup.controllers", "cpu io memory pids\n")
		f.write(dir+"cgroup.subtree_control", "cpu io memory pids\n")
	}
	want := f.root + "/cg/user.slice/session-3.scope/berm"
	if os.Geteuid() == 0 {
		want = f.root + "/cg/berm"
	}
	if got := f.manager("").hierarchies[0].parent; got != want {
		t.Errorf("parent %s, want %s", got, want)
	}
	f.write("proc/self/cgroup", "0::/user.slice/session-5.scope\n")
	f.write("cg/user.slice/session-5.scope/cgroup.controllers", "cpu io memory pids\n")
	if got := f.manager("").hierarchies[0].parent; os.Geteuid() == 0 && got != want {
		t.Errorf("parent %s after the next login, was %s", got, want)
	}
}

func TestFakeMissing(t *testing.T) {
	f := newFake(t, v2Mounts, "0::/me\n")
	f.write("cg/me/cgroup.controllers", "memory pids\n")
	f.write("cg/me/cgroup.subtree_control", "memory pids\n")
	f.delegate("cg/me")
	m := f.manager("")
	if got := m.Controllers(); !slices.Equal(got, []string{"freezer", "memory", "pids"}) {
		t.Errorf("controllers %v", got)
	}
	if _, err := m.Create("box", limits); berm.KindOf(err) != berm.Unsupported || !strings.Contains(err.Error(), "cpu") {
		t.Errorf("limit of cpu: %v", err)
	}
	if _, err := os.Stat(f.root + "/cg/me/berm/box"); err == nil {
		t.Error("the group was made all the same")
	}
}

// In a container the mount shows only a part of the tree, the own group as its top.
func TestFakeContainer(t *testing.T) {
	f := newFake(t, "30 25 0:26 /docker/abc ROOT/cg\\040x rw - cgroup2 cgroup2 rw\n", "0::/docker/abc\n")
	f.write("cg x/cgroup.controllers", "memory\n")
	f.write("cg x/cgroup.subtree_control", "")
	m := f.manager("")
	if got, want := m.hierarchies[0].parent, filepath.Join(f.root, "cg x/berm"); got != want {
		t.Errorf("parent %s, want %s", got, want)
	}
}

func TestFakeNone(t *testing.T) {
	f := newFake(t, "30 25 0:26 / /tmp rw - tmpfs tmpfs rw\nbroken line - cgroup\n\n", "0::/\n")
	m := f.manager("")
	if m.Layout() != None || len(m.Controllers()) != 0 {
		t.Errorf("%s: %s", m.Layout(), m)
	}
	g, err := m.Create("box", berm.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Freeze(t.Context()); berm.KindOf(err) != berm.Unsupported {
		t.Errorf("Freeze: %v", err)
	}
	if err := g.Kill(t.Context()); err != nil {
		t.Errorf("Kill: %v", err)
	}
	if u, err := g.Usage(); err != nil || u.MemoryTotal == 0 || u.CPUs == 0 {
		t.Errorf("Usage: %+v, %v", u, err)
	}
	if err := g.Remove(t.Context()); err != nil {
		t.Errorf("Remove: %v", err)
	}
	if _, err := m.Create("box", limits); berm.KindOf(err) != berm.Unsupported {
		t.Errorf("limits without groups: %v", err)
	}
}

func TestBadRequests(t *testing.T) {
	f := v1Fake(t, v1Mounts, v1Own)
	m := f.manager("")
	for _, id := range []string{"", ".", "..", "a/b", "../x", "A", "-a", strings.Repeat("a", 65), "a\n"} {
		if _, err := m.Create(id, berm.Limits{}); berm.KindOf(err) != berm.Invalid {
			t.Errorf("Create(%q): %v", id, err)
		}
		if _, err := m.Open(id); berm.KindOf(err) != berm.NotFound {
			t.Errorf("Open(%q): %v", id, err)
		}
	}
	for _, l := range []berm.Limits{{Memory: -1}, {CPU: -1}, {PIDs: -1}, {CPU: 0.001}, {ReadBytes: -5}} {
		if _, err := m.Create("box", l); berm.KindOf(err) != berm.Invalid {
			t.Errorf("Create with %+v: %v", l, err)
		}
	}
	for _, parent := range []string{"berm", "/", "/a/../b", "/a/"} {
		if _, err := New(Config{Parent: parent}); berm.KindOf(err) != berm.Invalid {
			t.Errorf("parent %q: %v", parent, err)
		}
	}
}

func TestReadOnly(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("root may write to directories that are not delegated")
	}
	f := newFake(t, v2Mounts, "0::/\n")
	f.write("cg/cgroup.controllers", "memory\n")
	if err := os.Chmod(f.root+"/cg", 0o555); err != nil {
		t.Fatal(err)
	}
	defer os.Chmod(f.root+"/cg", 0o755)
	m := f.manager("")
	if why := m.Missing()["memory"]; !strings.Contains(why, "not delegated") {
		t.Errorf("missing because %q", why)
	}
}

func TestDiskOf(t *testing.T) {
	d, err := DiskOf("/")
	if berm.KindOf(err) == berm.Unsupported {
		t.Skipf("the root file system is on no disk: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if unix.Access("/sys/block", unix.F_OK) == nil {
		blocks, _ := filepath.Glob("/sys/block/*/dev")
		for _, b := range blocks {
			if number, _ := read(filepath.Dir(b), "dev"); number == d.String() {
				return
			}
		}
		t.Errorf("%v is no whole disk", d)
	}
}

func FuzzParseMount(f *testing.F) {
	for line := range strings.Lines(v1Mounts + v2Mounts) {
		f.Add(line)
	}
	f.Fuzz(func(t *testing.T, line string) {
		h, _ := parseMount(line)
		if h != nil && !h.v2 && len(h.controllers) == 0 {
			t.Errorf("%q: a hierarchy without controllers", line)
		}
	})
}
