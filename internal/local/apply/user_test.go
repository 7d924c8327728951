package apply

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// asUser runs a test in a process of an ordinary user who owns root, and says whether
// this is that process. It runs in a directory that everybody may enter.
func asUser(t *testing.T) (root string, inside bool) {
	t.Helper()
	const variable = "BERM_TEST_USER_ROOT"
	if root := os.Getenv(variable); root != "" {
		return root, true
	}
	if os.Geteuid() != 0 {
		return t.TempDir(), true
	}
	const nobody = 65534
	root = t.TempDir()
	if err := errors.Join(os.Chown(root, nobody, nobody), os.Chmod(filepath.Dir(root), 0o711)); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), variable+"="+root, "TMPDIR="+root, "HOME="+root, "GORACE=atexit_sleep_ms=0")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS") {
		t.Errorf("%v: %s", err, out)
	}
	return root, false
}

// TestUser applies with the rights of an ordinary user.
func TestUser(t *testing.T) {
	root, inside := asUser(t)
	if !inside {
		return
	}
	f := openFixture(t, root)
	project, upper := filepath.Join(root, "project"), filepath.Join(f.session, "upper")
	f.write("project", map[string]string{"closed/a": "a", "opened/a": "a", "closing/a": "a", "old/x": "x", "old/y": "y"})
	os.Chmod(project+"/closed", 0o555)
	os.Chmod(project+"/opened", 0o555)
	f.begin()
	f.write("session/upper", map[string]string{
		"closed/a": "aa", "opened/a": "aa", "closing/a": "aa", "fresh/deep/a": "a", "secret": "s", "old/z": "z",
	})
	unix.Setxattr(upper+"/fresh", opaqueAttribute, []byte("y"), 0)
	unix.Setxattr(upper+"/old", opaqueAttribute, []byte("y"), 0)
	os.Chmod(upper+"/closed", 0o555)
	os.Chmod(upper+"/closing", 0o500)
	os.Chmod(upper+"/fresh/deep", 0o500)
	os.Chmod(upper+"/fresh", 0o500)
	os.Chmod(upper+"/secret", 0)
	os.Chmod(upper, 0o500) // by a command that took the rights to the workspace away
	got := f.apply(f.request("closed", "opened", "closing", "fresh", "secret", "old/z"))
	f.expect(got, map[string]Outcome{
		"closed/a": Failed, "opened": Applied, "opened/a": Applied, "closing": Applied, "closing/a": Applied,
		"fresh": Applied, "fresh/deep": Applied, "fresh/deep/a": Applied, "secret": Failed, "old/z": Applied,
	})
	if !strings.Contains(got["closed/a"].Reason, "chmod u+wx") || !strings.Contains(got["secret"].Reason, "session's file") {
		t.Errorf("%+v\n%+v", got["closed/a"], got["secret"])
	}
	for name, want := range map[string]fs.FileMode{"opened": 0o755, "closing": 0o500, "fresh": 0o500, "fresh/deep": 0o500} {
		if st, err := os.Stat(project + "/" + name); err != nil || st.Mode().Perm() != want {
			t.Errorf("%s: %v, %v", name, st, err)
		}
	}
	// What the opaque directory hid is still hidden.
	left := map[string]bool{}
	for _, c := range f.request().Changes {
		left[c.Path] = true
	}
	if want := []string{"closed/a", "old/x", "old/y", "secret"}; len(left) != len(want) || !left[want[0]] || !left[want[1]] || !left[want[2]] || !left[want[3]] {
		t.Errorf("left: %v", left)
	}
	if _, err := os.Lstat(upper + "/fresh"); !os.IsNotExist(err) {
		t.Errorf("fresh is left in the upper: %v", err)
	}
	if st, err := os.Stat(upper); err != nil || st.Mode().Perm() != 0o500 {
		t.Errorf("the upper: %v, %v", st, err)
	}
	os.Chmod(upper, 0o700)
	os.Chmod(upper+"/secret", 0o600)
	noTemps(t, root)
}

// mountable runs a test in a process that may mount, and says whether this is that one.
func mountable(t *testing.T) bool {
	t.Helper()
	const variable = "BERM_TEST_MOUNTABLE"
	if os.Getenv(variable) != "" {
		return true
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), variable+"=1", "GORACE=atexit_sleep_ms=0")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWNS | syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: 1}},
	}
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS") {
		t.Errorf("%v: %s", err, out)
	}
	return false
}

// TestFullDisk applies more than there is room for: nothing is changed.
func TestFullDisk(t *testing.T) {
	if !mountable(t) {
		return
	}
	root := t.TempDir()
	if err := os.Mkdir(root+"/project", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", root+"/project", "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(root+"/project", unix.MNT_DETACH)
	f := openFixture(t, root)
	defer f.project.Close()
	f.write("project", map[string]string{"a": "a"})
	f.begin()
	f.write("session/upper", map[string]string{"a": "aa", "b": strings.Repeat("b", 900<<10), "c": strings.Repeat("c", 900<<10)})
	p, err := New(t.Context(), f.request())
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	list, err := p.Run(t.Context())
	if berm.KindOf(err) != berm.Exhausted {
		t.Error(err)
	}
	f.expect(byPath(list), map[string]Outcome{"a": NotApplied, "b": NotApplied, "c": NotApplied})
	if left := snapshot(t, root+"/project"); len(left) != 1 || f.content("a") != "a" {
		t.Errorf("left: %v", left)
	}
	f.expect(f.apply(f.request("b", "a")), map[string]Outcome{"a": Applied, "b": Applied})
}

// TestMounted does not enter a file system that is mounted in the project.
func TestMounted(t *testing.T) {
	if !mountable(t) {
		return
	}
	f := newFixture(t)
	f.write("project", map[string]string{"mounted": ""})
	f.write("session/upper", map[string]string{"mounted/a": "a"})
	f.begin()
	r := f.request()
	if err := unix.Mount("tmpfs", f.root+"/project/mounted", "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(f.root+"/project/mounted", unix.MNT_DETACH)
	f.expect(f.apply(r), map[string]Outcome{"mounted/a": Conflict})
}
