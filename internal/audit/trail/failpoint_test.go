//go:build failpoint

package trail

import (
	"os"
	"os/exec"
	"testing"
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
