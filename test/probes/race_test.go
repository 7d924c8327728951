package probes

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// start runs berm in the background, until the test ends, and returns when its command has
// printed something.
func (a *account) start(args ...string) {
	a.t.Helper()
	cmd := a.command(args...)
	ready, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_, _ = io.Copy(io.Discard, ready) // until the last process is gone
		_ = cmd.Wait()
	})
	if n, err := ready.Read(make([]byte, 1)); n == 0 {
		a.t.Fatalf("berm %q: %v", args, err)
	}
}

// swap exchanges a directory of the workspace for a link to another, and back, as fast as
// it can: the name is never free.
const swap = `import ctypes, os, sys
name, target = sys.argv[1:]
os.makedirs(name, exist_ok=True)
open(name + "/file", "w").write("x")
os.symlink(target, "spare")
print("ready", flush=True)
exchange = ctypes.CDLL(None).renameat2
while True:
    exchange(-100, name.encode(), -100, b"spare", 2)  # RENAME_EXCHANGE
`

// race repeats f for a while, or until it fails.
func race(t *testing.T, f func()) {
	limit := time.Second
	if all {
		limit = 20 * time.Second
	}
	for end := time.Now().Add(limit); time.Now().Before(end) && !t.Failed(); {
		f()
	}
}

// While the command of a session runs, berm diff looks at what changes under its hands,
// and nothing takes the session away from it.
func TestDiffWhileRunning(t *testing.T) {
	v, j := newLocal(t)
	v.each(t, false, func(t *testing.T, a *account) {
		before := v.files()
		a.start("run", "-q", "--", "python3", "-c", swap, "race", a.home+"/.ssh")
		name := a.session()
		race(t, func() {
			output, code := a.do("diff", "-s", name)
			if code != 0 && !strings.Contains(output, "berm:") {
				t.Errorf("exit code %d: %s", code, output)
			}
			j.leaks(t, v, before, output)
			for _, args := range [][]string{{"apply", "-s", name}, {"discard", name}, {"undo", "-s", name}, {"run", "-s", name, "--", "true"}} {
				if output, code := a.do(args...); code == 0 {
					t.Errorf("berm %q of a running session succeeded: %s", args, output)
				}
			}
		})
	})
}

// A command that writes the project in place does not choose where berm apply writes, nor
// what another run shows.
func TestRaceWithCommandInPlace(t *testing.T) {
	v, j := newLocal(t)
	v.each(t, false, func(t *testing.T, a *account) {
		a.write("home/victim/file", "untouched")
		a.write("home/victim/token", j.token("a directory that a link leads to"))
		a.write("work/project/race/file", "x")
		before := v.files()
		changing := []string{a.project, a.project + "/race", a.project + "/race/file", a.project + "/README"}
		a.start("run", "-q", "--rw", ".", "--", "python3", "-c", swap, "race", a.home+"/victim")
		race(t, func() {
			a.do("run", "-q", "--", "sh", "-c", "mkdir -p race; echo hostile >race/file; echo hostile >race/new; echo hostile >>README")
			output, _ := a.do("apply")
			j.leaks(t, v, before, output, changing...)
			a.do("discard", "--all")
			for _, args := range [][]string{
				{"--ro", "race", "--", "sh", "-c", "cat race/*"},
				{"--rw", "race", "--", "sh", "-c", "cat race/*; echo hostile >race/new; rm -f race/new; echo hostile >>race/file"},
				{"--hide", "race/file", "--", "sh", "-c", "cat race/*"},
			} {
				output, _ := a.do(append([]string{"run", "-q"}, args...)...)
				j.leaks(t, v, before, output, changing...)
			}
			a.do("discard", "--all")
		})
	})
}

// The project of a session that became a link, by a command that wrote the directory
// around it, is not what the session is of.
func TestProjectBecomesLink(t *testing.T) {
	v, _ := newLocal(t)
	v.each(t, false, func(t *testing.T, a *account) {
		a.write("home/victim/file", "untouched")
		if output, code := a.do("run", "-q", "--", "sh", "-c", "echo hostile >file; echo hostile >new; rm README"); code != 0 {
			t.Fatal(output)
		}
		name := a.session()
		around := func(args ...string) (string, error) {
			cmd := a.command(args...)
			cmd.Dir = filepath.Dir(a.project)
			output, err := cmd.CombinedOutput()
			return string(output), err
		}
		if output, err := around("run", "-q", "--rw", ".", "--", "sh", "-c", "mv project aside && ln -s "+a.home+"/victim project"); err != nil {
			t.Fatalf("%v: %s", err, output)
		}
		for _, args := range [][]string{{"diff", "-s", name}, {"apply", "-s", name}, {"apply", "-s", name, "--flagged"}, {"undo", "--git", "-s", name}, {"run", "-s", name, "--", "true"}} {
			output, err := around(args...)
			if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) {
				t.Errorf("berm %q: %v: %s", args, err, output)
			}
			for _, path := range []string{"/victim/file", "/victim/new"} {
				if content, _ := os.ReadFile(a.home + path); strings.Contains(string(content), "hostile") {
					t.Fatalf("berm %q wrote to %s", args, path)
				}
			}
		}
	})
}
