//go:build failpoint

package template

import (
	"bytes"
	"context"
	"net/http/httptest"
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
			if _, err := s.Resolve(t.Context(), "", "new"); err == nil || berm.KindOf(err) != berm.NotFound {
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

// An image that arrives lazily is, when a process of its died between any two steps, there as one
// that is on its way, or is gone; and nothing half-made is taken for whole.
func TestCrashOfArrival(t *testing.T) {
	if dir := os.Getenv("BERM_TEST_CRASH_STORE"); dir != "" {
		s, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		made, err := s.Import(t.Context(), os.Getenv("BERM_TEST_CRASH_IMAGE"), ImportOptions{Lazy: Always}, nil)
		if err != nil {
			os.Exit(3) // the keeper's death
		}
		_, _ = s.Whole(t.Context(), made, nil)
		return
	}
	needsLazy(t)
	r := newRegistry(t, httptest.NewServer)
	r.push(t, "app", imageOf(t, lazyLayer(t, archive(t, file644("f", "1"))), lazyLayer(t, archive(t, file644("g", "2")))))
	for _, point := range []string{
		"template.arrival.ordered", "template.arrival.named", "template.arrival.mounted", "template.arrival.served",
		"template.arrival.started", "template.put", "template.arrival.arrived", "template.layer.unpacked",
		"template.arrival.unpacked", "template.arrival.switched", "template.arrival.recorded",
	} {
		t.Run(point, func(t *testing.T) {
			s := newStore(t)
			closeArrivals(t, s)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			cmd := exec.CommandContext(ctx, "/proc/self/exe", "-test.run=^TestCrashOfArrival$")
			cmd.Env = append(os.Environ(), "BERM_TEST_CRASH_STORE="+s.dir, "BERM_TEST_CRASH_IMAGE="+r.host+"/app", "BERM_FAILPOINTS="+point+"=crash")
			ended := make(chan error, 1)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			go func() { ended <- cmd.Wait() }()
			// It dies, or the keeper does, or it waits for a keeper that has died.
			eventually(t, "a death", func() bool {
				if len(ended) > 0 {
					return true
				}
				list, err := s.List(t.Context())
				return err == nil && len(list) == 1 && list[0].Arriving != nil && !s.kept(list[0])
			})
			cancel()
			<-ended
			cancel()
			list, err := s.List(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Arrive(t.Context()); err != nil {
				t.Error(err)
			}
			if len(list) == 1 {
				// The child may have started a keeper that dies in its turn.
				made, err := s.Whole(t.Context(), list[0], nil)
				if err != nil {
					t.Fatal(err)
				}
				for i, want := range []string{"f", "g"} {
					if got, err := os.ReadFile(filepath.Join(made.Layers[i].Path, want)); err != nil || len(got) != 1 {
						t.Errorf("layer %d: %q, %v", i, got, err)
					}
				}
			}
			eventually(t, "the store to be clean", func() bool {
				if err := s.Collect(t.Context()); err != nil {
					t.Fatal(err)
				}
				tmp, err := os.ReadDir(filepath.Join(s.dir, "tmp"))
				arriving, err2 := os.ReadDir(filepath.Join(s.dir, "arriving"))
				return err == nil && err2 == nil && len(tmp)+len(arriving) == 0
			})
			if got := layerNames(t, s); len(got) != 2*len(list) {
				t.Errorf("layers %q", got)
			}
		})
	}
}

// kept says whether a process serves the arrival of a template.
func (s *Store) kept(t berm.Template) bool {
	unlock, err := s.tryLock(filepath.Join("arriving", t.Arriving.ID, "lock"), unix.LOCK_SH)
	if err == nil {
		unlock()
	}
	return err != nil
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
