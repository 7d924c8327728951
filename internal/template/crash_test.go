//go:build failpoint

package template

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// A process that dies between any two steps leaves a store that works, from which
// the next one removes what was half-made.
func TestCrash(t *testing.T) {
	if dir := os.Getenv("BERM_TEST_CRASH_STORE"); dir != "" {
		s, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		addTemplate(t, s, "new", "1", "2")
		if err := s.Remove(t.Context(), "new"); err != nil {
			t.Fatal(err)
		}
		return
	}
	for _, point := range []string{
		"template.layer.unpacked", "template.layer.described", "template.put",
		"template.remove", // the name goes before the layers
	} {
		t.Run(point, func(t *testing.T) {
			s := newStore(t)
			kept := addTemplate(t, s, "kept", "1")
			cmd := exec.Command("/proc/self/exe", "-test.run=^TestCrash$")
			cmd.Env = append(os.Environ(), "BERM_TEST_CRASH_STORE="+s.dir, "BERM_FAILPOINTS="+point+"=crash")
			out, err := cmd.CombinedOutput()
			if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
				t.Fatalf("it did not die there: %v\n%s", err, out)
			}
			if _, err := s.Resolve(t.Context(), "new"); err == nil || berm.KindOf(err) != berm.NotFound {
				t.Errorf("the new template: %v", err)
			}
			if err := s.Collect(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := find(t, filepath.Join(s.dir, "tmp")); len(got) > 0 {
				t.Errorf("left %q", got)
			}
			if got := layerNames(t, s); len(got) != 1 || got[0] != filepath.Base(kept.Layers[0].Path) {
				t.Errorf("layers %q", got)
			}
			made := addTemplate(t, s, "new", "1", "2")
			for _, l := range made.Layers {
				if _, err := os.Stat(filepath.Join(l.Path, "f")); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// An error at a step, instead of death, undoes what was done by itself.
func TestFailure(t *testing.T) {
	s := newStore(t)
	unlock, err := s.lock(t.Context(), "lock", unix.LOCK_SH)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	if !strings.Contains(os.Getenv("BERM_FAILPOINTS"), "template.layer.unpacked=error") {
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestFailure$")
		cmd.Env = append(os.Environ(), "BERM_FAILPOINTS=template.layer.unpacked=error")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	budget := DefaultBudget
	if _, _, err := s.addLayer(t.Context(), nil, "", bytes.NewReader(archive(t, file644("f", "x"))), &budget); err == nil {
		t.Fatal("no error")
	}
	for _, dir := range []string{"tmp", "layers"} {
		if got := find(t, filepath.Join(s.dir, dir)); len(got) > 0 {
			t.Errorf("%s holds %q", dir, got)
		}
	}
}
