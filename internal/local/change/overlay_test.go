package change

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

const overlayChild = "BERM_TEST_OVERLAY"

// A real overlay, changed at random through its merged view: what List reads off the upper
// directory is what Compare finds between the project and the view.
func TestOverlay(t *testing.T) {
	if os.Getenv(overlayChild) != "" {
		overlay(t)
		return
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestOverlay$", "-test.v")
	cmd.Env = append(os.Environ(), overlayChild+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	out, err := cmd.CombinedOutput()
	switch {
	case errors.Is(err, syscall.EPERM):
		t.Skip("needs user namespaces for ordinary users")
	case err != nil:
		t.Fatalf("%v\n%s", err, out)
	}
}

func overlay(t *testing.T) {
	must(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	for seed := range uint64(15) {
		r := rand.New(rand.NewPCG(seed, 1))
		dir := t.TempDir()
		project, upper, merged := filepath.Join(dir, "project"), filepath.Join(dir, "upper"), filepath.Join(dir, "merged")
		for _, d := range []string{project, upper, merged, filepath.Join(dir, "work")} {
			must(t, os.Mkdir(d, 0o755))
		}
		for range 40 {
			mutate(r, project)
		}
		must(t, unix.Mount("overlay", merged, "overlay", 0, fmt.Sprintf("userxattr,lowerdir=%s,upperdir=%s,workdir=%s/work", project, upper, dir)))
		for range 60 {
			mutate(r, merged)
		}
		want, err := Compare(t.Context(), root(t, project), root(t, merged), Limits{})
		must(t, err)
		got, err := List(t.Context(), root(t, upper), root(t, project), Limits{})
		must(t, err)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("seed %d: %s", seed, diff)
		}
		if len(got) == 0 {
			t.Errorf("seed %d: nothing changed", seed)
		}
		must(t, unix.Unmount(merged, unix.MNT_DETACH))
	}
}

// names of few, so that changes meet each other.
var names = []string{"a", "b", "c d", "é\x1b", "-e", "\xff\n"}

// mutate does one random thing in a tree; what is not possible is not done.
func mutate(r *rand.Rand, dir string) {
	pick := func() string {
		p := dir
		for range 1 + r.IntN(3) {
			p = filepath.Join(p, names[r.IntN(len(names))])
		}
		return p
	}
	at := pick()
	switch r.IntN(12) {
	case 0, 1, 2:
		os.MkdirAll(filepath.Dir(at), 0o755)
		os.WriteFile(at, text(r), 0o644)
	case 3:
		os.MkdirAll(at, 0o755)
	case 4:
		os.Remove(at)
	case 5:
		os.RemoveAll(at)
	case 6:
		os.Symlink(names[r.IntN(len(names))], at)
	case 7:
		// A link would be followed.
		if st, err := os.Lstat(at); err == nil && st.Mode()&os.ModeSymlink == 0 {
			mode := []os.FileMode{0o755, 0o644, 0o700, 0o775}[r.IntN(4)]
			if st.IsDir() {
				mode |= 0o100
			}
			os.Chmod(at, mode)
		}
	case 8:
		os.Rename(at, pick())
	case 9:
		os.Link(at, pick())
	case 10:
		if os.RemoveAll(at) == nil && os.Mkdir(at, 0o755) == nil {
			os.WriteFile(filepath.Join(at, names[r.IntN(len(names))]), text(r), 0o644)
		}
	case 11:
		if f, err := os.OpenFile(at, os.O_WRONLY|os.O_APPEND|unix.O_NOFOLLOW, 0); err == nil {
			f.Write(text(r))
			f.Close()
		}
	}
}

// text is a text of few different lines, with or without a newline at its end.
func text(r *rand.Rand) []byte {
	var out []byte
	for range r.IntN(12) {
		out = fmt.Appendf(out, "%s\n", []string{"", "one", "two\r", "+three", "--- four", "\\ No newline at end of file", "@@ -1 +1 @@", "\xe2\x80\xae", "\tü"}[r.IntN(9)])
	}
	if r.IntN(3) == 0 {
		out = append(out, "end"...)
	}
	return out
}
