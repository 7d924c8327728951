package sandbox_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/sandbox"
)

func TestMain(m *testing.M) {
	state, err := os.MkdirTemp("", "sandbox-state-")
	if err != nil {
		panic(err)
	}
	os.Setenv("XDG_STATE_HOME", state)
	code := m.Run()
	os.RemoveAll(state)
	os.Exit(code)
}

func Example() {
	dir, _ := os.MkdirTemp("", "project-")
	defer os.RemoveAll(dir)
	os.WriteFile(filepath.Join(dir, "notes.txt"), []byte("one\n"), 0o644)

	cmd := sandbox.Command("sh", "-c", "echo two >> notes.txt; ls ~/.ssh 2>/dev/null | wc -l")
	cmd.Dir, cmd.Stdout = dir, os.Stdout
	result, err := cmd.Run(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	changes, err := result.Session.Changes(context.Background())
	fmt.Println(result.ExitCode, changes[0].Kind, changes[0].Path, err)
	fmt.Println(result.Session.Discard(context.Background()))
	// Output:
	// 0
	// 0 modified notes.txt <nil>
	// <nil>
}

// project makes a directory of a project outside of places that sandboxes cover.
func project(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a"), []byte("old\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

func run(t *testing.T, c *sandbox.Cmd) *sandbox.Result {
	t.Helper()
	r, err := c.Run(t.Context())
	if err != nil {
		t.Fatal(err, berm.HintOf(err))
	}
	return r
}

func TestStreamsAreCopied(t *testing.T) {
	c := sandbox.Command("sh", "-c", "cat; echo wrong >&2; exit 3")
	var out, stderr bytes.Buffer
	c.Dir, c.Workspace, c.Stdin, c.Stdout, c.Stderr = project(t), sandbox.ReadOnly, strings.NewReader("in\n"), &out, &stderr
	r := run(t, c)
	if r.ExitCode != 3 || out.String() != "in\n" || stderr.String() != "wrong\n" || r.Session != nil {
		t.Errorf("%+v, %q, %q", r, &out, &stderr)
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("full") }

// A writer that fails does not hold the command up, and is told.
func TestWriterFails(t *testing.T) {
	c := sandbox.Command("sh", "-c", "head -c 1000000 /dev/zero")
	c.Dir, c.Workspace, c.Stdout = project(t), sandbox.ReadOnly, full{}
	r, err := c.Run(t.Context())
	if err == nil || r == nil || r.ExitCode != 0 {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestApplyAndDiff(t *testing.T) {
	c := sandbox.Command("sh", "-c", "echo new > a; mkdir -p .git/hooks; echo bad > .git/hooks/pre-commit")
	c.Dir = project(t)
	r := run(t, c)
	if r.Session == nil {
		t.Fatal("no session")
	}
	var diff bytes.Buffer
	if err := r.Session.Diff(t.Context(), &diff); err != nil || !strings.Contains(diff.String(), "-old\n+new\n") {
		t.Errorf("%v: %s", err, &diff)
	}
	outcomes, err := r.Session.Apply(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range outcomes {
		if strings.HasPrefix(o.Path, ".git") == (o.Outcome == "applied") {
			t.Errorf("%+v", o)
		}
	}
	if content, _ := os.ReadFile(filepath.Join(c.Dir, "a")); string(content) != "new\n" {
		t.Errorf("a is %q", content)
	}
	if _, err := os.Lstat(filepath.Join(c.Dir, ".git/hooks/pre-commit")); err == nil {
		t.Error("a hook was applied")
	}
	if err := r.Session.Discard(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := r.Session.Changes(t.Context()); berm.KindOf(err) != berm.NotFound {
		t.Error(err)
	}
}

func TestTimeoutAndCancel(t *testing.T) {
	c := sandbox.Command("sleep", "60")
	c.Dir, c.Workspace, c.Timeout = project(t), sandbox.ReadOnly, 100*time.Millisecond
	if r := run(t, c); r.Reason != berm.ReasonTimeout || r.ExitCode != 124 {
		t.Errorf("%+v", r)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	c.Timeout = 0
	if r, err := c.Run(ctx); err != nil || r.Reason != berm.ReasonKilled {
		t.Errorf("%+v, %v", r, err)
	}
}

// The zero value shows nothing of the caller's environment.
func TestEnvironmentIsClean(t *testing.T) {
	t.Setenv("SOME_SECRET", "value")
	t.Setenv("NAMED", "passed")
	c := sandbox.Command("env")
	var out bytes.Buffer
	c.Dir, c.Workspace, c.Stdout, c.Env = project(t), sandbox.ReadOnly, &out, []string{"NAMED", "SET=1"}
	run(t, c)
	text := "\n" + out.String()
	if strings.Contains(text, "SOME_SECRET") || !strings.Contains(text, "\nNAMED=passed\n") || !strings.Contains(text, "\nSET=1\n") ||
		strings.Contains(text, "\nGOGC=off\n") {
		t.Error(text)
	}
}

// A file with set-user-ID bits in a workspace of the host would be a way to become whoever
// it belongs to, for everybody on the machine.
func TestNoSetUserID(t *testing.T) {
	c := sandbox.Command("python3", "-c", `
import os, errno
def refused(what, call):
    try:
        call()
    except OSError as e:
        assert e.errno in (errno.EPERM, errno.ENOSYS), (what, e)
        return
    raise SystemExit(what + " was not refused")
open("f", "w").close()
for mode in (0o4755, 0o2755, 0o6711):
    refused("chmod", lambda: os.chmod("f", mode))
    refused("fchmod", lambda: os.fchmod(os.open("f", os.O_RDONLY), mode))
    refused("open", lambda: os.open("g%o" % mode, os.O_CREAT | os.O_WRONLY, mode))
    refused("tmpfile", lambda: os.open(".", os.O_TMPFILE | os.O_WRONLY, mode))
    refused("mknod", lambda: os.mknod("n%o" % mode, mode))
os.chmod("f", 0o1755)
os.open("h", os.O_CREAT | os.O_WRONLY, 0o755)
`)
	var stderr bytes.Buffer
	c.Dir, c.Workspace, c.Stderr = project(t), sandbox.InPlace, &stderr
	if r := run(t, c); r.ExitCode != 0 {
		t.Errorf("exit code %d: %s", r.ExitCode, &stderr)
	}
	entries, err := os.ReadDir(c.Dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if info, err := e.Info(); err != nil || info.Mode()&(os.ModeSetuid|os.ModeSetgid) != 0 {
			t.Errorf("%s has mode %s, %v", e.Name(), info.Mode(), err)
		}
	}
}

func TestBadOrders(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*sandbox.Cmd)
		kind   berm.Kind
	}{
		"no command":  {func(c *sandbox.Cmd) { c.Args = nil }, berm.Invalid},
		"home":        {func(c *sandbox.Cmd) { c.Dir = os.Getenv("HOME") }, berm.Denied},
		"no such dir": {func(c *sandbox.Cmd) { c.Dir = "/nonexistent" }, berm.Invalid},
		"profile":     {func(c *sandbox.Cmd) { c.Profile = "lax" }, berm.Invalid},
		"variable":    {func(c *sandbox.Cmd) { c.Env = []string{"A B=1"} }, berm.Invalid},
		"path":        {func(c *sandbox.Cmd) { c.Show = []string{"/nonexistent"} }, berm.NotFound},
		"session":     {func(c *sandbox.Cmd) { c.Workspace, c.Session = "", "nosuch-1" }, berm.NotFound},
	} {
		t.Run(name, func(t *testing.T) {
			c := sandbox.Command("true")
			c.Dir, c.Workspace = project(t), sandbox.ReadOnly
			test.change(c)
			if _, err := c.Run(t.Context()); berm.KindOf(err) != test.kind || err == nil {
				t.Errorf("got %v, want %s", err, test.kind)
			}
		})
	}
}
