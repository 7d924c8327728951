//go:build failpoint

package session

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

const crasherVariable = "BERM_TEST_CRASHER"

// crash runs a test in another process, which is killed at a point.
func crash(t *testing.T, dir, test, point string) {
	t.Helper()
	self, err := os.Executable()
	must(t, err)
	cmd := exec.Command(self, "-test.run=^"+test+"$")
	cmd.Env = append(os.Environ(), crasherVariable+"="+dir, "BERM_FAILPOINTS="+point+"=crash")
	if out, err := cmd.CombinedOutput(); err == nil || cmd.ProcessState.ExitCode() != -1 {
		t.Fatalf("%s was not reached: %v\n%s", point, err, out)
	}
}

// TestCrashes kills what makes a checkpoint and what goes back to one between every two
// steps: the changes are those before or those after, each checkpoint holds what it says,
// and the next one works and clears up.
func TestCrashes(t *testing.T) {
	if dir := os.Getenv(crasherVariable); dir != "" {
		s, err := openStore(t, dir).Get("p-1")
		must(t, err)
		must(t, s.Lock())
		list, err := s.Checkpoints()
		must(t, err)
		if len(list) < 3 {
			_, err = s.Checkpoint(t.Context(), "", 2)
		} else {
			_, err = s.Restore(t.Context(), 3, 3)
		}
		t.Fatalf("survived: %v", err)
	}
	states := func(t *testing.T, s *Session) map[string]int {
		t.Helper()
		held := map[string]int{}
		list, err := s.Checkpoints()
		must(t, err)
		for _, c := range list {
			data, err := os.ReadFile(filepath.Join(s.Dir(), checkpoints, string(rune('0'+c.N)), upperDir, "file"))
			must(t, err)
			held[string(data)]++
		}
		data, err := os.ReadFile(filepath.Join(s.Upper(), "file"))
		must(t, err)
		held["now "+string(data)]++
		return held
	}
	write := func(t *testing.T, s *Session, content string) {
		t.Helper()
		must(t, os.WriteFile(filepath.Join(s.Upper(), "file"), []byte(content), 0o600))
	}
	prepare := func(t *testing.T, n int) (dir string, s *Session) {
		dir = t.TempDir()
		s = create(t, openStore(t, dir), filepath.Join(dir, "p"))
		must(t, s.Save())
		for i := range n {
			write(t, s, string(rune('1'+i)))
			_, err := s.Checkpoint(t.Context(), "", 20)
			must(t, err)
		}
		write(t, s, "now")
		s.Unlock()
		return dir, s
	}
	// after goes on with the session, and looks whether something is left.
	after := func(t *testing.T, s *Session) {
		t.Helper()
		must(t, s.Lock())
		defer s.Unlock()
		c, err := s.Checkpoint(t.Context(), "", 20)
		must(t, err)
		if _, err := s.Restore(t.Context(), c.N, 20); err != nil {
			t.Error(err)
		}
		entries, err := os.ReadDir(filepath.Join(s.Dir(), checkpoints))
		must(t, err)
		list, err := s.Checkpoints()
		must(t, err)
		if len(entries) != len(list) {
			t.Errorf("%d entries, %d checkpoints", len(entries), len(list))
		}
	}
	for _, point := range []string{"session.checkpoint.copied", "session.checkpoint.described", "session.checkpoint.named", "session.trim.renamed"} {
		t.Run(point, func(t *testing.T) {
			dir, s := prepare(t, 2)
			crash(t, dir, "TestCrashes", point)
			held := states(t, s)
			if held["2"] != 1 || held["now now"] != 1 || held["now"] > 1 || held["1"]+held["now"] == 0 {
				t.Errorf("held %v", held)
			}
			after(t, s)
		})
	}
	for point, undone := range map[string]bool{
		"session.checkpoint.copied": false, "session.checkpoint.described": false, "session.checkpoint.named": false,
		"session.restore.copied": false, "session.restore.exchanged": true, "session.trim.renamed": true,
	} {
		t.Run("restore, "+point, func(t *testing.T) {
			dir, s := prepare(t, 4)
			crash(t, dir, "TestCrashes", point)
			held := states(t, s)
			switch {
			case held["3"] == 0 || held["2"] != 1 || held["4"] != 1:
				t.Errorf("lost a checkpoint: %v", held)
			case undone && (held["now 3"] != 1 || held["now"] != 1):
				t.Errorf("not undone, or not to be undone: %v", held)
			case !undone && held["now now"] != 1:
				t.Errorf("half undone: %v", held)
			}
			after(t, s)
		})
	}
}

// TestStoreCrashes kills a removal once the session is out of sight.
func TestStoreCrashes(t *testing.T) {
	if dir := os.Getenv(crasherVariable); dir != "" {
		t.Fatalf("survived: %v", openStore(t, dir).Remove(t.Context(), "p-1"))
	}
	dir := t.TempDir()
	store := openStore(t, dir)
	s := create(t, store, filepath.Join(dir, "p"))
	must(t, s.Save())
	must(t, os.WriteFile(filepath.Join(s.Upper(), "file"), nil, 0o600))
	s.Unlock()
	crash(t, dir, "TestStoreCrashes", "session.thrown")
	if list, err := store.List(); err != nil || len(list) != 0 {
		t.Errorf("still listed: %v, %v", list, err)
	}
	must(t, store.Sweep(t.Context()))
	if left, err := store.entries(); err != nil || len(left) != 0 {
		t.Errorf("left %v, %v", left, err)
	}
}
