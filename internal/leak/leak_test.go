package leak

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// found says whether one of lines begins with prefix.
func found(lines []string, prefix string) bool {
	for _, line := range lines {
		if strings.HasPrefix(line, prefix) {
			return true
		}
	}
	return false
}

func TestFindsWhatIsLeft(t *testing.T) {
	scope := Scope{Dirs: []string{t.TempDir()}}
	before := Take(scope)
	if left := Take(scope).Since(before); len(left) != 0 {
		t.Fatalf("nothing happened: %v", left)
	}
	file, err := os.Create(filepath.Join(scope.Dirs[0], "file"))
	if err != nil {
		t.Fatal(err)
	}
	child := exec.Command("sleep", "60")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	// The child of a child, and one that only works in the directory.
	shell := exec.Command("sh", "-c", "(exec sleep 61) & echo; wait")
	shell.Dir = scope.Dirs[0]
	if err := shell.Start(); err != nil {
		t.Fatal(err)
	}
	var left []string
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		left = Take(scope).Since(before)
		if strings.Count(strings.Join(left, "\n"), "(sleep)") == 2 {
			break
		}
	}
	for _, prefix := range []string{"file " + file.Name(), "process ", "descriptor " + file.Name()} {
		if !found(left, prefix) {
			t.Errorf("no %q in %q", prefix, left)
		}
	}
	if strings.Count(strings.Join(left, "\n"), "(sleep)") != 2 {
		t.Errorf("%q", left)
	}
	file.Close()
	if err := os.Remove(file.Name()); err != nil {
		t.Error(err)
	}
	_ = child.Process.Kill()
	_ = child.Wait()
	for pid := range processesIn(t, scope.Dirs[0]) {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	_ = shell.Wait()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if left = Take(scope).Since(before); len(left) == 0 {
			return
		}
	}
	t.Errorf("all is gone, but %q", left)
}

// processesIn are those that work in a directory.
func processesIn(t *testing.T, dir string) map[int]bool {
	t.Helper()
	pids := map[int]bool{}
	for line := range Take(Scope{Dirs: []string{dir}}) {
		if fields := strings.Fields(line); fields[0] == "process" {
			var pid int
			for _, c := range fields[1] {
				pid = 10*pid + int(c-'0')
			}
			pids[pid] = true
		}
	}
	return pids
}
