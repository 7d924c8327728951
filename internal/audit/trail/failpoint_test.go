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

// A crash in the middle of an erasure, of one sandbox or several, leaves a log that verifies; the next opening
// finishes what is on record, and what is not is not done.
func TestCrashWhileRecordsAreErased(t *testing.T) {
	for _, point := range []string{"audit/erase", "audit/sign", "audit/erase-written", "audit/erase-file", "audit/erase-content"} {
		for _, also := range []string{"", "sbx2"} {
			t.Run(point+also, func(t *testing.T) {
				dir := t.TempDir()
				makeLog(t, dir)
				cmd := exec.Command(os.Args[0])
				cmd.Env = append(os.Environ(), "TRAIL_ERASER="+dir, "TRAIL_ALSO="+also, "BERM_FAILPOINTS="+point+"=crash")
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
				gone, want := []string{"content 4"}, 1
				if also != "" {
					gone, want = append(gone, "content 14"), 2
				}
				for _, content := range gone {
					if strings.Contains(text, content) != (point == "audit/erase") {
						t.Errorf("%s: %v", content, point != "audit/erase")
					}
				}
				if point == "audit/erase" {
					want = 0 // it was not on record
				}
				if len(r.Erasures) != want {
					t.Errorf("%+v", r)
				}
				for _, e := range r.Erasures {
					if e.Left != 0 {
						t.Errorf("%+v", e)
					}
				}
				left, err := filepath.Glob(filepath.Join(dir, "*.new"))
				if _, stat := os.Stat(filepath.Join(dir, eraseFile)); err != nil || len(left) > 0 || stat == nil {
					t.Errorf("left are %v, %v", left, stat)
				}
			})
		}
	}
}
