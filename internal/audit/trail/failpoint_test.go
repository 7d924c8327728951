//go:build failpoint

package trail

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A crash between the steps of signing, and of beginning a file, leaves a log that goes on.
func TestCrashLeavesAWholeLog(t *testing.T) {
	for _, point := range []string{"audit/sign", "audit/rotate", "audit/pack", "audit/key"} {
		t.Run(point, func(t *testing.T) {
			dir := t.TempDir()
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), "TRAIL_WRITER="+dir, "BERM_FAILPOINTS="+point+"=crash")
			if err := cmd.Run(); err == nil {
				t.Fatal("there was no crash")
			}
			l := open(t, dir)
			emit(t, l, 3)
			closeLog(t, l)
			whole(t, dir, l.signed)
		})
	}
}

// A crash between the record of a removal and the removal, or in the middle of it, leaves a log that
// verifies, and the next look removes the rest.
func TestCrashWhileRecordsAreRemoved(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "TRAIL_REMOVER="+dir, "BERM_FAILPOINTS=audit/remove=crash")
	if err := cmd.Run(); err == nil {
		t.Fatal("there was no crash")
	}
	l, err := Open(dir, removing)
	if err != nil {
		t.Fatal(err)
	}
	if r := verify(t, dir, Trust{}); len(r.Problems) > 0 || r.First != 1 {
		t.Errorf("after the crash: %+v", r)
	}
	if err := l.retain(time.Now().Add(2 * removing.Keep)); err != nil {
		t.Fatal(err)
	}
	closeLog(t, l)
	if r := verify(t, dir, Trust{}); len(r.Problems) > 0 || r.First == 1 {
		t.Errorf("after the next look: %+v", r)
	}
}

// A crash in the middle of an erasure leaves a log that verifies; the next opening finishes what is on
// record, and what is not is not done.
func TestCrashWhileRecordsAreErased(t *testing.T) {
	for _, point := range []string{"audit/erase", "audit/sign", "audit/erase-written", "audit/erase-file", "audit/erase-content"} {
		t.Run(point, func(t *testing.T) {
			dir := t.TempDir()
			makeLog(t, dir)
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), "TRAIL_ERASER="+dir, "BERM_FAILPOINTS="+point+"=crash")
			if err := cmd.Run(); err == nil {
				t.Fatal("there was no crash")
			}
			if r := verify(t, dir, Trust{}); len(r.Problems) > 0 {
				t.Errorf("after the crash: %v", r.Problems)
			}
			l := open(t, dir)
			emit(t, l, 1) // of sbx0
			closeLog(t, l)
			r := verify(t, dir, Trust{})
			if len(r.Problems) > 0 {
				t.Errorf("after the next opening: %v", r.Problems)
			}
			text := everything(t, dir)
			if point == "audit/erase" {
				if len(r.Erasures) != 0 || !strings.Contains(text, "content 4") {
					t.Errorf("it was not on record: %+v", r)
				}
			} else if len(r.Erasures) != 1 || r.Erasures[0].Left != 0 || strings.Contains(text, "content 4") {
				t.Errorf("%+v", r)
			}
			left, err := filepath.Glob(filepath.Join(dir, "*.new"))
			if _, stat := os.Stat(filepath.Join(dir, eraseFile)); err != nil || len(left) > 0 || stat == nil {
				t.Errorf("left are %v, %v", left, stat)
			}
		})
	}
}
