package harness

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

func TestDiffSeesProcess(t *testing.T) {
	before := Look(nil)
	sleep := exec.Command("sleep", "60")
	if err := sleep.Start(); err != nil {
		t.Fatal(err)
	}
	found := false
	for _, line := range before.Diff(Look(nil)) {
		found = found || strings.HasPrefix(line, "+ process") && strings.Contains(line, "(sleep)")
	}
	sleep.Process.Kill()
	sleep.Wait()
	if !found {
		t.Error("a new process is not in the difference")
	}
}

func TestRSS(t *testing.T) {
	if RSS(os.Getpid()) < 1<<20 || PeakRSS(os.Getpid()) < RSS(os.Getpid())/2 {
		t.Errorf("RSS %d, peak %d", RSS(os.Getpid()), PeakRSS(os.Getpid()))
	}
}
