package mount

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// Attaching mounts happens in a mount namespace of its own: the test binary starts
// itself again there.
const roleVariable = "BERM_MOUNT_TEST_DIR"

func TestMain(m *testing.M) {
	dir := os.Getenv(roleVariable)
	if dir == "" {
		os.Exit(m.Run())
	}
	if err := build(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes mounts outside of a user namespace")
	}
}

// file is the path of a file below the directory that fd is open on.
func file(fd int, name string) string { return fmt.Sprintf("/proc/self/fd/%d/%s", fd, name) }

func tmpfs(t testing.TB, options ...Option) int {
	t.Helper()
	fd, err := New("tmpfs", "test", NoDev|NoSuid, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

func TestNew(t *testing.T) {
	needRoot(t)
	before, _ := os.ReadFile("/proc/self/mountinfo")
	fd := tmpfs(t, Value("size", "1m"), Value("mode", "0750"))
	if err := os.WriteFile(file(fd, "small"), make([]byte, 4096), 0o600); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(file(fd, "large"), make([]byte, 2<<20), 0o600); err == nil {
		t.Error("2 MiB fit into a tmpfs of 1 MiB")
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&0o7777 != 0o750 {
		t.Errorf("mode %o, %v", st.Mode, err)
	}
	if after, _ := os.ReadFile("/proc/self/mountinfo"); string(after) != string(before) {
		t.Error("a detached mount is in the mount table")
	}
}

func TestNewFails(t *testing.T) {
	needRoot(t)
	if _, err := New("no-such-fs", "x", 0); berm.KindOf(err) != berm.Unsupported {
		t.Errorf("unknown file system: %v", err)
	}
	_, err := New("tmpfs", "x", 0, Value("size", "many"))
	if berm.KindOf(err) != berm.Unsupported || !strings.Contains(err.Error(), "size") {
		t.Errorf("bad option: %v", err)
	}
	if _, err := New("tmpfs", "x", 0, Flag("no-such-option")); berm.KindOf(err) != berm.Unsupported {
		t.Errorf("unknown option: %v", err)
	}
	if _, err := New("ext4", "/no/such/device", 0); berm.KindOf(err) != berm.NotFound {
		t.Errorf("missing device: %v", err)
	}
}

func TestSetAttr(t *testing.T) {
	needRoot(t)
	fd := tmpfs(t)
	if err := SetAttr(fd, ReadOnly, 0, false); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(file(fd, "d"), 0o700); err == nil || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("write to a read-only mount: %v", err)
	}
	if err := SetAttr(fd, 0, ReadOnly, false); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(file(fd, "d"), 0o700); err != nil {
		t.Error(err)
	}
}

// userns returns a user namespace that maps ids from 0 up to base.
func userns(t testing.TB, base int) int {
	t.Helper()
	cmd := exec.Command("sleep", "99")
	mapping := []syscall.SysProcIDMap{{ContainerID: 0, HostID: base, Size: 65536}}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: mapping, GidMappings: mapping, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Skipf("no user namespace: %v", err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

func TestIDMap(t *testing.T) {
	needRoot(t)
	ns := userns(t, 700_000)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(filepath.Join(dir, "f"), 5, 6); err != nil {
		t.Fatal(err)
	}
	fd, err := Clone(unix.AT_FDCWD, dir, false)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := IDMap(fd, ns); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Fstatat(fd, "f", &st, 0); err != nil || st.Uid != 700_005 || st.Gid != 700_006 {
		t.Errorf("owner %d:%d, %v", st.Uid, st.Gid, err)
	}
	overlay, err := New("overlay", "test", 0, Value("lowerdir", dir+":"+t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(overlay)
	if err := IDMap(overlay, ns); berm.KindOf(err) != berm.Unsupported {
		t.Errorf("overlay: %v", err)
	}
}

func TestAttach(t *testing.T) {
	needRoot(t)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleVariable+"="+t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// build attaches a tmpfs to a directory, and devices to a file and to a symbolic link.
func build(dir string) error {
	if err := Private("/"); err != nil {
		return err
	}
	fd, err := New("tmpfs", "root", 0)
	if err != nil {
		return err
	}
	if err := Attach(fd, unix.AT_FDCWD, dir); err != nil {
		return err
	}
	if err := os.WriteFile(dir+"/null", nil, 0o600); err != nil {
		return err
	}
	if err := os.Symlink("null", dir+"/link"); err != nil {
		return err
	}
	for from, to := range map[string]string{"/dev/null": "null", "/dev/zero": "link"} {
		device, err := Clone(unix.AT_FDCWD, from, false)
		if err != nil {
			return err
		}
		if err := Attach(device, fd, to); err != nil {
			return err
		}
	}
	// The link itself was covered, not what it points to.
	for name, device := range map[string]uint64{"/null": unix.Mkdev(1, 3), "/link": unix.Mkdev(1, 5)} {
		var st unix.Stat_t
		if err := unix.Lstat(dir+name, &st); err != nil || st.Rdev != device {
			return fmt.Errorf("%s is device %#x, %w", name, st.Rdev, err)
		}
	}
	return nil
}

// image makes a sparse ext4 image.
func image(t testing.TB) *os.File {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 64<<20); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.ext4", "-q", "-O", "^has_journal", path).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.ext4: %v: %s", err, out)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func loop(t testing.TB, backing *os.File) *os.File {
	t.Helper()
	device, err := Loop(backing, false, false)
	if berm.KindOf(err) == berm.Unsupported || os.IsNotExist(err) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return device
}

// attached says whether a loop device has a file.
func attached(device string) bool {
	_, err := os.Stat("/sys/block/" + filepath.Base(device) + "/loop/backing_file")
	return err == nil
}

func TestLoop(t *testing.T) {
	needRoot(t)
	backing := image(t)
	device := loop(t, backing)
	fd, err := New("ext4", device.Name(), NoDev)
	device.Close()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file(fd, "f"), []byte("x"), 0o600); err != nil {
		t.Error(err)
	}
	if !attached(device.Name()) {
		t.Error("the device let go while mounted")
	}
	unix.Close(fd)
	for range 100 {
		if !attached(device.Name()) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error("the device is still attached after the last close")
}

func TestLoopRace(t *testing.T) {
	needRoot(t)
	backing := image(t)
	loop(t, backing).Close()
	var wait sync.WaitGroup
	devices := make([]*os.File, 8)
	for i := range devices {
		wait.Go(func() {
			var err error
			if devices[i], err = Loop(backing, true, false); err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
	names := map[string]bool{}
	for _, d := range devices {
		if d != nil {
			names[d.Name()] = true
			d.Close()
		}
	}
	if len(names) != len(devices) {
		t.Errorf("%d attachers share %d devices", len(devices), len(names))
	}
}

func BenchmarkLoopExt4(b *testing.B) {
	needRoot(b)
	backing := image(b)
	for b.Loop() {
		device, err := Loop(backing, false, false)
		if err != nil {
			b.Fatal(err)
		}
		fd, err := New("ext4", device.Name(), NoDev)
		if err != nil {
			b.Fatal(err)
		}
		device.Close()
		unix.Close(fd)
	}
}

func BenchmarkCloneIDMap(b *testing.B) {
	needRoot(b)
	ns, dir := userns(b, 700_000), b.TempDir()
	for b.Loop() {
		fd, err := Clone(unix.AT_FDCWD, dir, false)
		if err != nil {
			b.Fatal(err)
		}
		if err := IDMap(fd, ns); err != nil {
			b.Fatal(err)
		}
		unix.Close(fd)
	}
}
