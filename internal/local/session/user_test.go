package session

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// ordinaryVariable holds the directory of a test that runs again without root's rights.
const ordinaryVariable = "BERM_TEST_ORDINARY"

// asEverybody runs a test with a directory of its own: as the user who runs the tests and,
// when that is root, as an ordinary one too, in a process that has no rights from the start.
func asEverybody(t *testing.T, test func(t *testing.T, dir string)) {
	t.Helper()
	if dir := os.Getenv(ordinaryVariable); dir != "" {
		test(t, dir)
		return
	}
	if os.Geteuid() != 0 {
		test(t, t.TempDir())
		return
	}
	t.Run("root", func(t *testing.T) { test(t, t.TempDir()) })
	t.Run("ordinary", func(t *testing.T) {
		const id = 54321
		// Above t.TempDir lies a directory that only root may enter.
		top, err := os.MkdirTemp("", "berm-session-")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(top) })
		dir := filepath.Join(top, "dir")
		for _, err := range []error{os.Chmod(top, 0o755), os.Mkdir(dir, 0o700), os.Chown(dir, id, id)} {
			if err != nil {
				t.Fatal(err)
			}
		}
		name, _, _ := strings.Cut(t.Name(), "/")
		cmd := exec.Command("/proc/self/exe", "-test.run=^"+name+"$", "-test.v=false")
		cmd.Env = append(os.Environ(), ordinaryVariable+"="+dir, "HOME="+dir, "TMPDIR="+dir, "GORACE=atexit_sleep_ms=0")
		cmd.Dir = dir
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: id, Gid: id}}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	})
}
