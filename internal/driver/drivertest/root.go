package drivertest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
)

// Root makes the smallest template that the suite runs in, owned by uid: busybox and
// two users. It needs a static busybox on the host.
func Root(t testing.TB, dir string, uid int) string {
	t.Helper()
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal("the tests need busybox-static: install it, or run `make setup`")
	}
	list, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(dir, "root")
	program, err := os.ReadFile(busybox)
	for _, d := range []string{"bin", "etc", "tmp", "root", "proc", "dev", "sys", "run", "home/user"} {
		if err == nil {
			err = os.MkdirAll(filepath.Join(root, d), 0o755)
		}
	}
	write := func(name, content string, mode os.FileMode) {
		if err == nil {
			err = os.WriteFile(filepath.Join(root, name), []byte(content), mode)
		}
	}
	write("bin/busybox", string(program), 0o755)
	write("etc/passwd", "root::0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n", 0o644)
	write("etc/group", "root:x:0:\nuser:x:1000:\n", 0o644)
	if err == nil {
		err = os.Chmod(filepath.Join(root, "tmp"), os.ModeSticky|0o777)
	}
	for applet := range strings.FieldsSeq(string(list)) {
		if err == nil && applet != "busybox" {
			err = os.Symlink("busybox", filepath.Join(root, "bin", applet))
		}
	}
	if err == nil && uid != os.Geteuid() {
		err = filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
			if err != nil {
				return err
			}
			return os.Lchown(path, uid, uid)
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// descriptors counts those of this process.
func descriptors() (int, error) {
	dir, err := os.Open("/proc/self/fd")
	if err != nil {
		return 0, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	return len(names) - 1, err
}

// Monitor finds a sandbox's monitor by its working directory, as drivers on this machine have
// one. It is a Harness.Monitor.
func Monitor(t *testing.T, id berm.SandboxID) int {
	t.Helper()
	dirs, err := filepath.Glob("/proc/[0-9]*/cwd")
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range dirs {
		if cwd, err := os.Readlink(dir); err == nil && filepath.Base(cwd) == string(id) {
			pid, err := strconv.Atoi(strings.Split(dir, "/")[2])
			if err != nil {
				t.Fatal(err)
			}
			return pid
		}
	}
	t.Fatalf("no monitor of %s", id)
	return 0
}
