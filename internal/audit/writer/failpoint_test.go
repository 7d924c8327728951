//go:build failpoint

package writer_test

import (
	"fmt"
	"sync"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/trail"
)

// A crash of the writer at any step loses no record and writes none twice, and nobody notices.
func TestCrashBetweenSteps(t *testing.T) {
	for _, point := range []string{"audit/batch", "audit/answer", "audit/sign"} {
		t.Run(point, func(t *testing.T) {
			dir := t.TempDir()
			closeLog(t, open(t, dir)) // its first checkpoint
			t.Setenv("BERM_FAILPOINTS", point+"=crash")
			l := open(t, dir)
			t.Setenv("BERM_FAILPOINTS", "") // the next writer goes on
			pid := l.PID()
			var mu sync.Mutex
			acknowledged := map[string]bool{}
			for round := 0; l.PID() == pid || round < 3; round++ {
				var group sync.WaitGroup
				for i := range 10 {
					group.Go(func() {
						text := fmt.Sprint(round, " ", i)
						if err := l.Emit(record(text)); err != nil {
							t.Errorf("%s: %v", text, err)
						}
						mu.Lock()
						acknowledged[text] = true
						mu.Unlock()
					})
				}
				group.Wait()
			}
			closeLog(t, l)
			once(t, dir, acknowledged)
			gaps := 0
			for _, line := range lines(t, dir) {
				if line.Type == audit.Gap {
					gaps++
				}
			}
			if gaps != 1 {
				t.Errorf("%d gap records tell of one death", gaps)
			}
		})
	}
}

// A writer that dies while it erases several sandboxes is followed by one that finishes it.
func TestCrashWhileSeveralAreErased(t *testing.T) {
	for _, point := range []string{"audit/erase", "audit/erase-written", "audit/erase-file"} {
		t.Run(point, func(t *testing.T) {
			dir := t.TempDir()
			t.Setenv("BERM_FAILPOINTS", point+"=crash")
			l := open(t, dir)
			t.Setenv("BERM_FAILPOINTS", "")
			var all []trail.Erasure
			for _, id := range []berm.SandboxID{"one", "two", "three"} {
				r := record(string(id))
				r.Sandbox = id
				if err := l.Emit(r); err != nil {
					t.Fatal(err)
				}
				all = append(all, trail.Erasure{Sandbox: id, Team: "blue", Reason: "old"})
			}
			want := 2
			if _, err := l.EraseAll(all[:want]); err == nil {
				t.Fatal("there was no crash")
			}
			if point == "audit/erase" {
				want = 0 // it was not on record
			}
			if err := l.Emit(record("after")); err != nil {
				t.Fatal(err)
			}
			closeLog(t, l)
			erased, left := 0, 0
			for _, line := range lines(t, dir) {
				switch {
				case line.Type == audit.Erase:
					erased++
				case line.Sandbox != "":
					left++
				}
			}
			if erased != want || left != 3-want {
				t.Errorf("%d are erased and %d left", erased, left)
			}
		})
	}
}

// One that fails at a batch without dying is taken for one that died.
func TestFailsAtBatch(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("BERM_FAILPOINTS", "audit/answer=error")
	l := open(t, dir)
	t.Setenv("BERM_FAILPOINTS", "")
	if err := l.Emit(record("a")); err != nil {
		t.Fatal(err)
	}
	closeLog(t, l)
	once(t, dir, map[string]bool{"a": true})
}
