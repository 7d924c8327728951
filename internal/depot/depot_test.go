package depot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/kernel/mount"
)

// insideVariable tells a process that it has a mount namespace of its own, in which the tests run: a
// host's mount table never sees a depot of theirs.
const insideVariable = "BERM_TEST_INSIDE"

func TestMain(m *testing.M) {
	if os.Geteuid() == 0 && os.Getenv(insideVariable) == "" {
		cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
		cmd.Args[0] = os.Args[0]
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		cmd.Env = append(os.Environ(), insideVariable+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
		if err := cmd.Run(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Geteuid() == 0 {
		if err := mount.Private("/"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// data makes a data directory that cannot clone, on a file system of size bytes, 0 for that of
// temporary files. When the test ends nothing of a depot may be left but files.
func data(t *testing.T, size int64) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: mounts file systems")
	}
	dir := t.TempDir()
	// A directory that can clone would need no depot: the machine's own might.
	disk := filepath.Join(t.TempDir(), "disk")
	if size == 0 {
		size = 16 << 30
	}
	f, err := os.Create(disk)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(program("mkfs.ext4"), "-q", "-E", "lazy_itable_init=1,nodiscard", disk).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.ext4: %v: %s", err, out)
	}
	device, err := mount.Loop(f, false, false)
	if err != nil {
		t.Fatal(err)
	}
	fd, err := mount.New("ext4", device.Name(), 0)
	device.Close()
	if err == nil {
		err = errors.Join(mount.Attach(fd, unix.AT_FDCWD, dir), unix.Close(fd))
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, path := range []string{filepath.Join(dir, placeName), dir} {
			if err := unix.Unmount(path, 0); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
				t.Errorf("unmount %s: %v", path, err)
			}
		}
		left := ""
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			if left = attached(t, dir) + attached(t, disk); left == "" || time.Now().After(end) {
				break
			}
		}
		if left != "" {
			t.Errorf("loop devices are left:%s", left)
		}
	})
	if err := os.Mkdir(filepath.Join(dir, linksName), 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

// attached names the loop devices of files whose path begins with prefix.
func attached(t *testing.T, prefix string) (names string) {
	t.Helper()
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if backing, err := os.ReadFile(file); err == nil && strings.HasPrefix(string(backing), prefix) {
			names += " " + strings.Split(file, "/")[3] + "=" + strings.TrimSpace(string(backing))
		}
	}
	return names
}

// each runs a test with each kind of file system that this host can make.
func each(t *testing.T, test func(t *testing.T)) {
	all := kinds
	defer func() { kinds = all }()
	for _, k := range all {
		t.Run(k.name, func(t *testing.T) {
			kinds = []kind{k}
			if !mount.Known(k.name) {
				t.Skipf("the kernel has no %s", k.name)
			}
			if _, err := choose(); err != nil {
				t.Fatalf("%v: `make setup` installs it", err)
			}
			test(t)
		})
	}
}

func open(t *testing.T, data string, size int64) *Depot {
	t.Helper()
	d, err := Open(t.Context(), data, size)
	if err != nil {
		t.Fatalf("%v (%s)", err, berm.HintOf(err))
	}
	return d
}

// save puts what looks like a snapshot into a depot and returns its path.
func save(t *testing.T, d *Depot, data, name string) string {
	t.Helper()
	dir := filepath.Join(d.Snapshots(), name)
	err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, "disk"), []byte(name), 0o600),
		os.Symlink("../"+placeName+"/"+linksName+"/"+name, filepath.Join(data, linksName, name)))
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(data, linksName, name, "disk")
}

func holds(t *testing.T, path, want string) {
	t.Helper()
	if got, err := os.ReadFile(path); err != nil || string(got) != want {
		t.Errorf("%s holds %q, %v; want %q", filepath.Base(filepath.Dir(path)), got, err, want)
	}
}

func TestLife(t *testing.T) {
	each(t, func(t *testing.T) {
		data := data(t, 0)
		d := open(t, data, 1<<30)
		path := save(t, d, data, "one")
		in, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		out, err := os.Create(filepath.Join(d.Images(), "clone"))
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.IoctlFileClone(int(out.Fd()), int(in.Fd())); err != nil {
			t.Errorf("clone: %v", err)
		}
		in.Close()
		out.Close()

		// An order that is too small changes nothing, and one that is larger lets it grow.
		if _, err := Open(t.Context(), data, 1<<30-1<<20); berm.KindOf(err) != berm.Invalid {
			t.Errorf("smaller: %v", err)
		}
		var before, after unix.Statfs_t
		if err := unix.Statfs(d.Images(), &before); err != nil {
			t.Fatal(err)
		}
		open(t, data, 3<<30) // another server takes over what the one that died left mounted
		holds(t, path, "one")
		if err := unix.Statfs(d.Images(), &after); err != nil || after.Blocks*uint64(after.Bsize) < 5<<29 {
			t.Errorf("%d MiB have grown to %d MiB, %v", before.Blocks*uint64(before.Bsize)>>20, after.Blocks*uint64(after.Bsize)>>20, err)
		}
		if n := strings.Count(attached(t, data), "="); n != 1 {
			t.Errorf("%d devices", n)
		}

		// Somebody uses it: it stays. What is mounted next, after somebody took the place away, is
		// the same file system.
		used, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		holds(t, path, "one")
		if err := unix.Unmount(filepath.Join(data, placeName), unix.MNT_DETACH); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("still mounted: %v", err)
		}
		d = open(t, data, 0)
		if _, err := used.WriteAt([]byte("two"), 0); err != nil {
			t.Error(err)
		}
		holds(t, path, "two")
		used.Close()
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("mounted after Close: %v", err)
		}

		// Without a size it stays for what is saved in it, and goes with that.
		if d = open(t, data, 0); d == nil {
			t.Fatal("gone with what was saved in it")
		}
		holds(t, path, "two")
		if err := errors.Join(d.Close(), os.Remove(filepath.Dir(path))); err != nil {
			t.Error(err)
		}
		if d = open(t, data, 0); d != nil {
			t.Error("kept though nothing is saved in it")
		}
		if left, err := os.ReadDir(data); err != nil || slices.ContainsFunc(left, func(e os.DirEntry) bool { return strings.HasPrefix(e.Name(), "depot") }) {
			t.Errorf("left: %v, %v", left, err)
		}
	})
}

// A depot that goes while sandboxes have their disks in it is theirs until they end.
func TestRemovedInUse(t *testing.T) {
	data := data(t, 0)
	d := open(t, data, 1<<30)
	disk, err := os.Create(filepath.Join(d.Images(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	if d := open(t, data, 0); d != nil {
		t.Error("kept")
	}
	if _, err := disk.WriteString("still there"); err != nil {
		t.Error(err)
	}
	d = open(t, data, 1<<30) // another one
	if entries, err := os.ReadDir(d.Images()); err != nil || len(entries) != 0 {
		t.Errorf("%v, %v", entries, err)
	}
	if n := strings.Count(attached(t, data), "="); n != 2 {
		t.Errorf("%d devices", n)
	}
	disk.Close()
}

// What is deleted inside takes no room outside.
func TestGivesBack(t *testing.T) {
	each(t, func(t *testing.T) {
		if kinds[0].name == "btrfs" && os.Getenv("BERM_TEST_DISKS") == "" {
			t.Skip("slow, it discards after some time: make test-disks runs it")
		}
		data := data(t, 0)
		d := open(t, data, 1<<30)
		taken := func() int64 {
			var st unix.Stat_t
			if err := unix.Stat(filepath.Join(data, fileName), &st); err != nil {
				t.Fatal(err)
			}
			return st.Blocks * 512
		}
		sync := func() {
			dir, err := os.Open(d.Images())
			if err == nil {
				err = errors.Join(unix.Syncfs(int(dir.Fd())), dir.Close())
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		const size = 128 << 20
		before := taken()
		disk := filepath.Join(d.Images(), "disk")
		content := make([]byte, size)
		for i := range content {
			content[i] = byte(i >> 12)
		}
		if err := os.WriteFile(disk, content, 0o600); err != nil {
			t.Fatal(err)
		}
		sync()
		full := taken()
		if full-before < size*9/10 {
			t.Fatalf("%d MiB are written, %d MiB taken", size>>20, (full-before)>>20)
		}
		if err := os.Remove(disk); err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(2 * time.Minute); full-taken() < size*9/10; time.Sleep(50 * time.Millisecond) {
			sync()
			if time.Now().After(end) {
				t.Fatalf("%d MiB of %d MiB came back", (full-taken())>>20, size>>20)
			}
		}
	})
}

func TestRefused(t *testing.T) {
	dir := data(t, 0)
	if _, err := Open(t.Context(), dir, 1<<20); berm.KindOf(err) != berm.Invalid {
		t.Errorf("too small: %v", err)
	}
	if _, err := Open(t.Context(), dir, 1<<60); berm.KindOf(err) != berm.Invalid {
		t.Errorf("larger than a file can be: %v", err)
	}
	all := kinds
	defer func() { kinds = all }()
	kinds = []kind{{name: "xfs", mkfs: []string{"mkfs.none"}, packaged: "xfsprogs"}}
	if _, err := Open(t.Context(), dir, 1<<30); berm.KindOf(err) != berm.Unsupported || berm.HintOf(err) != "install xfsprogs" {
		t.Errorf("without a program: %v (%s)", err, berm.HintOf(err))
	}
	kinds = []kind{{name: "none"}}
	if _, err := Open(t.Context(), dir, 1<<30); berm.KindOf(err) != berm.Unsupported {
		t.Errorf("without a file system: %v", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 2 { // lost+found, snapshots
		t.Errorf("left: %v, %v", left, err)
	}
	kinds = all
	d := open(t, dir, 1<<30)
	if _, err := Open(t.Context(), d.Images(), 1<<30); berm.KindOf(err) != berm.Invalid {
		t.Errorf("where it can be cloned: %v", err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(filepath.Join(dir, fileName), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), dir, 0); berm.KindOf(err) != berm.Internal || !strings.Contains(err.Error(), "no file system") || berm.HintOf(err) == "" {
		t.Errorf("another file: %v", err)
	}
}

// TestOrphans: what no link leads to was never told to anybody.
func TestOrphans(t *testing.T) {
	data := data(t, 0)
	d := open(t, data, 1<<30)
	path := save(t, d, data, "kept")
	if err := os.Mkdir(filepath.Join(d.Snapshots(), "orphan"), 0o700); err != nil {
		t.Fatal(err)
	}
	open(t, data, 1<<30)
	holds(t, path, "kept")
	if left, err := os.ReadDir(d.Snapshots()); err != nil || len(left) != 1 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// TestPowerCut: what was synced is there after the file system ended in the middle of what it did.
func TestPowerCut(t *testing.T) {
	each(t, func(t *testing.T) {
		data := data(t, 0)
		d := open(t, data, 1<<30)
		path := save(t, d, data, "synced")
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err == nil {
			err = errors.Join(f.Sync(), f.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
		stop, stopped, writes := make(chan bool), make(chan bool), make(chan bool)
		go func() { // others go on writing
			defer close(stopped)
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
					name := filepath.Join(d.Images(), fmt.Sprint(i%100))
					_ = errors.Join(os.WriteFile(name, make([]byte, 1<<16), 0o600), os.Rename(name, name+"x"))
				}
				if i == 1000 {
					close(writes)
				}
			}
		}()
		<-writes
		const (
			shutdown = 0x8004587d // XFS_IOC_GOINGDOWN
			noFlush  = 2          // XFS_FSOP_GOING_FLAGS_NOLOGFLUSH
		)
		dir, err := os.Open(d.Images())
		if err != nil {
			t.Fatal(err)
		}
		ended := unix.IoctlSetPointerInt(int(dir.Fd()), shutdown, noFlush)
		dir.Close()
		close(stop)
		<-stopped
		if errors.Is(ended, unix.ENOTTY) {
			t.Skipf("%s cannot be ended in this kernel", kinds[0].name)
		}
		if ended != nil {
			t.Fatal(ended)
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		open(t, data, 1<<30)
		holds(t, path, "synced")
	})
}
