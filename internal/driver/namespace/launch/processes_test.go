package launch

import (
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
)

// A tree of processes is counted as a whole: a shell's child that burns time and holds
// memory, and what was waited for.
func TestMeasure(t *testing.T) {
	cmd := exec.Command("sh", "-c", `x=xxxxxxxxxxxxxxxx; for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18; do x=$x$x; done
		sh -c 'i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done'; echo done; (sleep 60; :) & sleep 60; :`)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		children := tree(cmd.Process.Pid)
		_ = cmd.Process.Kill()
		for _, pid := range children {
			if p, err := os.FindProcess(pid); err == nil {
				_ = p.Kill()
			}
		}
		_ = cmd.Wait() // with the signal
	})
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	var u berm.Usage
	for end := time.Now().Add(30 * time.Second); u.PIDs != 4 && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		u = berm.Usage{}
		measure(cmd.Process.Pid, &u)
	}
	if u.PIDs != 4 || u.MemoryUsed < 4<<20 || u.MemoryUsed > 200<<20 || u.CPUTime < 20*time.Millisecond || u.CPUTime > time.Minute {
		t.Errorf("%+v", u)
	}
	counted := berm.Usage{MemoryUsed: 1, PIDs: 2, CPUTime: 3}
	same := counted
	if measure(cmd.Process.Pid, &same); same != counted {
		t.Errorf("what a control group counted was changed: %+v", same)
	}
	var none berm.Usage
	if measure(1<<30, &none); none != (berm.Usage{}) {
		t.Errorf("of nobody: %+v", none)
	}
}
