package builds

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// who runs commands.
type who struct {
	t   *testing.T
	id  int // of user and group; -1 is the one who runs the test
	dir string
	env []string // the whole environment
}

// self is the one who runs the test.
func self(t *testing.T) who { return who{t: t, id: -1, env: os.Environ()} }

// result is how a command ended.
type result struct {
	code int
	text string // standard output and error
	took time.Duration
}

func (w who) run(script string) result {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-c", script)
	cmd.Dir, cmd.Env = w.dir, w.env
	if w.id >= 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(w.id), Gid: uint32(w.id)}}
	}
	start := time.Now()
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		w.t.Fatal(err)
	}
	return result{code: cmd.ProcessState.ExitCode(), text: string(out), took: time.Since(start)}
}

// sh runs a command that must succeed.
func sh(t *testing.T, w who, script string) string {
	t.Helper()
	w.t = t
	r := w.run(script)
	if r.code != 0 {
		t.Fatalf("%s: exit code %d\n%s", script, r.code, r.text)
	}
	return r.text
}

// programs is a PATH with these programs and those of the system.
func programs(names ...string) string {
	path := "/usr/local/bin:/usr/bin:/bin"
	for _, name := range names {
		if found, err := exec.LookPath(name); err == nil && !slices.Contains(strings.Split(path, ":"), filepath.Dir(found)) {
			path = filepath.Dir(found) + ":" + path
		}
	}
	return path
}

// remove removes a tree, also the directories that Go's module cache and overlayfs make
// read-only.
func remove(t *testing.T, dir string) {
	t.Helper()
	_ = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() {
			return os.Chmod(path, 0o700) // before it is read
		}
		return nil
	})
	if err := os.RemoveAll(dir); err != nil {
		t.Error(err)
	}
}

// file is what a tree is compared by.
type file struct {
	what string // type, mode, owner, target of a link
	when time.Time
	hash [sha256.Size]byte
}

// tree lists what is in a directory, by its path there.
func tree(t *testing.T, dir string) map[string]file {
	t.Helper()
	files := map[string]file{}
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		f := file{what: fmt.Sprintf("%v %d:%d", info.Mode(), st.Uid, st.Gid), when: info.ModTime()}
		switch {
		case info.Mode()&fs.ModeSymlink != 0:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			f.what += " -> " + target
		case info.Mode().IsRegular():
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			f.hash = sha256.Sum256(content)
		}
		name, err := filepath.Rel(dir, path)
		files[name] = f
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// compare holds a tree against the one it should be: in names, types, modes and owners;
// in bytes too for the paths of same, and in everything if all is set.
func compare(t *testing.T, what string, got, want map[string]file, all bool, same []string) {
	t.Helper()
	var wrong bytes.Buffer
	for _, path := range slices.Sorted(maps.Keys(want)) {
		g, ok := got[path]
		switch w := want[path]; {
		case !ok:
			fmt.Fprintf(&wrong, "  lacks %s\n", path)
		case g.what != w.what:
			fmt.Fprintf(&wrong, "  %s: %s instead of %s\n", path, g.what, w.what)
		case (all || slices.Contains(same, path)) && g.hash != w.hash:
			fmt.Fprintf(&wrong, "  %s: other bytes\n", path)
		case all && !g.when.Equal(w.when):
			fmt.Fprintf(&wrong, "  %s: changed at %v\n", path, g.when)
		}
	}
	for _, path := range slices.Sorted(maps.Keys(got)) {
		if _, ok := want[path]; !ok {
			fmt.Fprintf(&wrong, "  has %s\n", path)
		}
	}
	for _, path := range same {
		if _, ok := want[path]; !ok {
			fmt.Fprintf(&wrong, "  nothing should have made %s\n", path)
		}
	}
	if wrong.Len() > 0 {
		t.Errorf("%s:\n%s", what, wrong.String())
	}
}
