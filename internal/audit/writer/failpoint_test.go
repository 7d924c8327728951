//go:build failpoint

package writer_test

import (
	"fmt"
	"sync"
	"testing"

	"github.com/berm-sandbox/berm/internal/audit"
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
