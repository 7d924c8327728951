package trail

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/internal/audit"
)

// writer is what the process that TestKilledWriterLosesNothing kills does: it tells the number
// of each record that was taken.
func writer(dir string) {
	l, err := Open(dir, Options{})
	if err != nil {
		fmt.Println("open:", err)
		os.Exit(1)
	}
	for i := 0; ; i++ {
		if err := l.Emit(audit.Record{Type: audit.APICall, Reason: fmt.Sprint(i)}); err != nil {
			fmt.Println("emit:", err)
			os.Exit(1)
		}
		fmt.Println(l.Seq())
		if i%40 == 39 {
			if err := l.Checkpoint(); err != nil {
				fmt.Println("sign:", err)
				os.Exit(1)
			}
		}
		if i%150 == 149 {
			if err := l.RotateKey(); err != nil {
				fmt.Println("key:", err)
				os.Exit(1)
			}
		}
		if i%100 == 99 {
			if err := l.rotate(); err != nil {
				fmt.Println("rotate:", err)
				os.Exit(1)
			}
		}
	}
}

// removing keeps records for so long that none is old by itself in a test.
var removing = Options{Keep: 10 * time.Hour}

// remover writes three files and removes two of them.
func remover(dir string) {
	l, err := Open(dir, removing)
	for i := 0; err == nil && i < 30; i++ {
		err = l.Emit(audit.Record{Type: audit.APICall, Reason: fmt.Sprint(i)})
		if i%10 == 9 && err == nil {
			err = l.rotate()
		}
	}
	if err == nil {
		err = l.retain(time.Now().Add(2 * removing.Keep))
	}
	fmt.Println(err)
}

func TestMain(m *testing.M) {
	if dir := os.Getenv("TRAIL_REMOVER"); dir != "" {
		remover(dir)
		os.Exit(0)
	}
	if dir := os.Getenv("TRAIL_ERASER"); dir != "" {
		eraser(dir)
		os.Exit(0)
	}
	if dir := os.Getenv("TRAIL_WRITER"); dir != "" {
		writer(dir)
	}
	os.Exit(m.Run())
}

func TestKilledWriterLosesNothing(t *testing.T) {
	dir := t.TempDir()
	last := uint64(0)
	for round := range 12 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "TRAIL_WRITER="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		after := time.Duration(7+round*13) * time.Millisecond
		lines := bufio.NewScanner(out)
		var killed bool
		for lines.Scan() {
			var seq uint64
			if _, err := fmt.Sscan(lines.Text(), &seq); err != nil {
				t.Fatal(lines.Text())
			}
			last = max(last, seq)
			if !killed {
				killed = true
				time.AfterFunc(after, func() { _ = cmd.Process.Kill() })
			}
		}
		_ = cmd.Wait() // killed
		l := open(t, dir)
		if l.Seq() < last {
			t.Fatalf("record %d was taken and is not there: the last is %d", last, l.Seq())
		}
		closeLog(t, l)
		if r := verify(t, dir, Trust{}); len(r.Problems) > 0 {
			t.Fatalf("after kill %d: %v", round, r.Problems)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".new") {
			t.Errorf("%s is left", e.Name())
		}
	}
}
