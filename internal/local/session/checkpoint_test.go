package session

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
)

func numbers(t *testing.T, s *Session) (list []int) {
	t.Helper()
	all, err := s.Checkpoints()
	must(t, err)
	for _, c := range all {
		list = append(list, c.N)
	}
	return list
}

func TestUndoAndUndoOfIt(t *testing.T) {
	asEverybody(t, func(t *testing.T, dir string) {
		s := create(t, openStore(t, dir), filepath.Join(dir, "p"))
		layerTree(t, s.Upper())
		lockedTree(t, s.Upper())
		must(t, os.Chmod(s.Upper(), 0o555)) // chmod in the workspace does so
		first := snapshot(t, s.Upper())
		c, err := s.Checkpoint(t.Context(), "before a run", 20)
		must(t, err)
		if c.N != 1 || c.How != "cloned" && c.How != "copied" || c.Took <= 0 || c.Entries < 20 {
			t.Errorf("%+v", c)
		}
		must(t, os.Chmod(s.Upper(), 0o700))
		must(t, os.Remove(filepath.Join(s.Upper(), "whiteout")))
		must(t, os.WriteFile(filepath.Join(s.Upper(), "new"), []byte("x"), 0o600))
		second := snapshot(t, s.Upper())

		back, err := s.Restore(t.Context(), 1, 20)
		must(t, err)
		same(t, snapshot(t, s.Upper()), first)
		again, err := s.Restore(t.Context(), back.N, 20)
		must(t, err)
		same(t, snapshot(t, s.Upper()), second)
		if _, err := s.Restore(t.Context(), again.N, 20); err != nil {
			t.Fatal(err)
		}
		same(t, snapshot(t, s.Upper()), first)
		if got := numbers(t, s); !slices.Equal(got, []int{1, 2, 3, 4}) {
			t.Errorf("checkpoints %v", got)
		}
		_, err = s.Restore(t.Context(), 99, 20)
		expectKind(t, err, berm.NotFound)
		must(t, s.Remove(t.Context()))
	})
}

func TestRemoveCheckpoints(t *testing.T) {
	dir := t.TempDir()
	s := create(t, openStore(t, dir), filepath.Join(dir, "p"))
	for range 3 {
		_, err := s.Checkpoint(t.Context(), "", 20)
		must(t, err)
	}
	must(t, s.RemoveCheckpoints(t.Context(), 1, 3, 7))
	if got := numbers(t, s); !slices.Equal(got, []int{2}) {
		t.Errorf("checkpoints %v", got)
	}
}

func TestOldCheckpointsGo(t *testing.T) {
	dir := t.TempDir()
	s := create(t, openStore(t, dir), filepath.Join(dir, "p"))
	for i := range 7 {
		must(t, os.WriteFile(filepath.Join(s.Upper(), "file"), []byte(fmt.Sprint(i)), 0o600))
		_, err := s.Checkpoint(t.Context(), "", 3)
		must(t, err)
	}
	if got := numbers(t, s); !slices.Equal(got, []int{5, 6, 7}) {
		t.Errorf("checkpoints %v", got)
	}
	// The one that is restored does not count.
	if _, err := s.Restore(t.Context(), 5, 2); err != nil {
		t.Fatal(err)
	}
	if got := numbers(t, s); !slices.Equal(got, []int{5, 7, 8}) {
		t.Errorf("checkpoints %v", got)
	}
	if data, err := os.ReadFile(filepath.Join(s.Upper(), "file")); err != nil || string(data) != "4" {
		t.Errorf("restored %q, %v", data, err)
	}
}

func TestCheckpointsNameTheCommand(t *testing.T) {
	dir := t.TempDir()
	s := create(t, openStore(t, dir), filepath.Join(dir, "p"))
	if got := numbers(t, s); len(got) != 0 {
		t.Errorf("checkpoints %v", got)
	}
	for _, argv := range [][]string{{"one"}, nil, {"three"}} {
		_, err := s.Checkpoint(t.Context(), "before a run", 20)
		must(t, err)
		if argv != nil {
			s.Runs = append(s.Runs, Run{Argv: argv, Started: time.Now()})
		}
	}
	list, err := s.Checkpoints()
	must(t, err)
	for i, want := range [][]string{{"one"}, nil, {"three"}} {
		if !slices.Equal(list[i].Command, want) || list[i].Reason != "before a run" || list[i].Time.IsZero() {
			t.Errorf("%+v, want the command %v", list[i], want)
		}
	}
}

func TestFailedCheckpointLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	s := create(t, openStore(t, dir), filepath.Join(dir, "p"))
	hostile(t, s.Upper(), dir)
	_, err := s.Checkpoint(t.Context(), "", 20)
	expectKind(t, err, berm.Exhausted)
	if left, err := os.ReadDir(filepath.Join(s.Dir(), checkpoints)); err != nil || len(left) != 0 {
		t.Errorf("left %v, %v", left, err)
	}
}
