package drivertest

import (
	"fmt"
	"io"
	"os"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
)

// lookCases look at what a sandbox wrote.
var lookCases = []testCase{
	{name: "Writable", needs: []Feature{Writable, Exec}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		w, err := s.Writable(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = w.Close() }()
		sh(t, s, "mkdir /d && echo one >/d/f && ln -s /etc /d/l")
		now, err := w.Now(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		if got := content(t, now, "d/f"); got != "one\n" || len(now.Layers) != 1 {
			t.Errorf("%q in %d layers", got, len(now.Layers))
		}
		now.Close()
		sh(t, s, "echo two >>/d/f")
		killed := make(chan error, 1)
		go func() {
			_, err := s.Kill(testContext(t), berm.ReasonKilled)
			killed <- err
		}()
		last, err := w.Last(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		if got := content(t, last, "d/f"); got != "one\ntwo\n" {
			t.Errorf("at the end: %q", got)
		}
		last.Close()
		_ = w.Close()
		if err := <-killed; err != nil {
			t.Error(err)
		}
		if _, err := s.Writable(testContext(t)); berm.KindOf(err) != berm.NotFound {
			t.Errorf("of a dead sandbox: %v", err)
		}
	}},
	{name: "WritableOfOneThatHangs", needs: []Feature{Writable, Exec}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		w, err := s.Writable(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		sh(t, s, "echo one >/f")
		// Nobody takes what comes at the end, nor closes.
		begin := time.Now()
		if _, err := s.Kill(testContext(t), berm.ReasonKilled); err != nil {
			t.Error(err)
		}
		if took := time.Since(begin); took > 2*time.Second {
			t.Errorf("the end took %v", took)
		}
		_ = w.Close()
	}},
}

// content reads a file that a sandbox wrote.
func content(t *testing.T, w *berm.Written, path string) string {
	t.Helper()
	root, err := os.OpenRoot("/proc/self/fd/" + fmt.Sprint(w.Upper.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	f, err := root.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	text, err := io.ReadAll(f)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
