package session

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const overlayVariable = "BERM_TEST_OVERLAY"

// TestOverlay has overlayfs itself write the layer, in a user namespace as a sandbox does,
// and compares what the workspace shows: a checkpoint must bring it back.
func TestOverlay(t *testing.T) {
	if dir := os.Getenv(overlayVariable); dir != "" {
		onOverlay(t, dir)
		return
	}
	asEverybody(t, func(t *testing.T, dir string) {
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestOverlay$")
		cmd.Env = append(os.Environ(), overlayVariable+"="+dir, "GORACE=atexit_sleep_ms=0")
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: os.Geteuid(), HostID: os.Geteuid(), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: os.Getegid(), HostID: os.Getegid(), Size: 1}},
			AmbientCaps: []uintptr{unix.CAP_SYS_ADMIN, unix.CAP_DAC_OVERRIDE},
		}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		// Outside, without the rights that the namespace gave.
		store := openStore(t, dir)
		s, err := store.Get("p-1")
		must(t, err)
		if _, err := s.Checkpoint(t.Context(), "", 20); err != nil {
			t.Error(err)
		}
		must(t, store.Remove(t.Context(), s.Name))
		if left, err := store.entries(); err != nil || len(left) != 0 {
			t.Errorf("left %v, %v", left, err)
		}
	})
}

func onOverlay(t *testing.T, dir string) {
	project := filepath.Join(dir, "p")
	put(t, project, "a/one=1", "a/two=2", "b/c/three=3", "run=x")
	must(t, os.Symlink("run", filepath.Join(project, "link")))
	s := create(t, openStore(t, dir), project)
	must(t, s.Save())
	merged := filepath.Join(dir, "merged")
	must(t, os.Mkdir(merged, 0o700))
	inside := func(script string) map[string]string {
		t.Helper()
		must(t, unix.Mount("overlay", merged, "overlay", 0, "userxattr,lowerdir="+project+",upperdir="+s.Upper()+",workdir="+s.Work()))
		cmd := exec.Command("sh", "-ec", script)
		cmd.Dir = merged
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		shown := snapshot(t, merged)
		must(t, unix.Unmount(merged, 0))
		return shown
	}
	inside("rm -r b; mkdir b; echo new >b/new; rm a/one; echo 22 >a/two; chmod 4755 run; ln a/two a/hard; mkfifo fifo; rm link; ln -s /etc link; echo secret >closed; chmod 0 closed")
	first := inside("true") // inode numbers of hard links are settled by the next mount only
	if changed, err := s.Changed(); err != nil || !changed {
		t.Errorf("changed: %v, %v", changed, err)
	}
	c, err := s.Checkpoint(t.Context(), "", 20)
	must(t, err)
	inside("rm -r a; echo one >a; rm -f b/new fifo; chmod 700 closed; mkdir d; chmod 0 d")
	second := inside("true")
	back, err := s.Restore(t.Context(), c.N, 20)
	must(t, err)
	same(t, withoutAttributes(inside("true")), withoutAttributes(first))
	if _, err := s.Restore(t.Context(), back.N, 20); err != nil {
		t.Fatal(err)
	}
	same(t, withoutAttributes(inside("true")), withoutAttributes(second))
}

// withoutAttributes leaves out what overlayfs keeps for itself, in so far as it shows that.
func withoutAttributes(tree map[string]string) map[string]string {
	for name, line := range tree {
		var kept []string
		for field := range strings.FieldsSeq(line) {
			if !strings.HasPrefix(field, "user.overlay.") {
				kept = append(kept, field)
			}
		}
		tree[name] = strings.Join(kept, " ")
	}
	return tree
}
