package drivertest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// OrdinaryUser is an id that no account of a host has. AsUser runs tests as it.
const OrdinaryUser = 1_987_654

// SubordinateIDs are those that GrantIDs lets it map.
const SubordinateIDs = 0x50000000

// What tests that AsUser runs have in their environment.
const (
	DirVariable  = "BERM_TEST_DIR"  // a directory of their own
	RootVariable = "BERM_TEST_ROOT" // a template, owned as it is to be
)

// GrantIDs lets OrdinaryUser map ids, as this thread and its children see it: the tables of the system are
// covered for them alone. The thread is the test's from now on, and ends with it.
func GrantIDs(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("newuidmap"); err != nil {
		t.Skip("newuidmap is not installed (package uidmap)")
	}
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	passwd, err := os.ReadFile("/etc/passwd")
	if err != nil {
		t.Fatal(err)
	}
	grant := fmt.Sprintf("berm-test:%d:%d\n", SubordinateIDs, berm.IDsPerSandbox)
	for path, content := range map[string]string{
		"/etc/passwd": fmt.Sprintf("%sberm-test:x:%d:%d::/:/bin/sh\n", passwd, OrdinaryUser, OrdinaryUser),
		"/etc/subuid": grant, "/etc/subgid": grant,
	} {
		file := filepath.Join(t.TempDir(), "table")
		if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount(file, path, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
	}
}

// AsUser runs tests of this program again as OrdinaryUser, with a template that belongs to owner, and
// copies of files in the directory of theirs.
func AsUser(t *testing.T, owner int, tests string, files ...string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "berm-user-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	root := Root(t, dir, owner)
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, filepath.Base(file)), content, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(dir, OrdinaryUser, OrdinaryUser); err != nil {
		t.Fatal(err)
	}
	// The test program lies where only root may look: it is executed by descriptor.
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	args := []string{"-test.run=" + tests, "-test.timeout=15m"}
	if testing.Verbose() {
		args = append(args, "-test.v")
	}
	cmd := exec.Command("/proc/self/fd/3", args...)
	cmd.ExtraFiles = []*os.File{self}
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), DirVariable+"="+dir, RootVariable+"="+root, "TMPDIR="+dir, "HOME="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: OrdinaryUser, Gid: OrdinaryUser}}
	out, err := cmd.CombinedOutput()
	t.Logf("as user %d:\n%s", OrdinaryUser, out)
	if err != nil {
		t.Fatal(err)
	}
}
