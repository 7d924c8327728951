package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/client"
)

func TestExec(t *testing.T) {
	s := newSetup(t)
	id := string(s.server.Add(client.Sandbox{}).ID)
	s.env = append(s.env, "FROM_HERE=local")
	for name, test := range map[string]struct {
		stdin string
		args  []string
		want  result
	}{
		"output apart":           {"", []string{id, "--", "sh", "-c", "echo out; echo err >&2"}, result{"out\n", "err\n", 0}},
		"exit code":              {"", []string{id, "--", "sh", "-c", "exit 42"}, result{"", "", 42}},
		"signal":                 {"", []string{id, "--", "sh", "-c", "kill -9 $$"}, result{"", "", 137}},
		"no such command":        {"", []string{id, "--", "/no/such"}, result{"", "", 127}},
		"without dashes":         {"", []string{id, "echo", "-n", "--timeout", "x"}, result{"--timeout x", "", 0}},
		"flags in front":         {"", []string{"-e", "A=1", id, "sh", "-c", "echo $A"}, result{"1\n", "", 0}},
		"flags behind":           {"", []string{id, "-e", "A=1", "-e", "FROM_HERE", "--", "sh", "-c", "echo $A $FROM_HERE"}, result{"1 local\n", "", 0}},
		"both":                   {"", []string{"-e", "A=1", id, "-e", "B=2", "--", "sh", "-c", "echo $A $B"}, result{"1 2\n", "", 0}},
		"directory":              {"", []string{id, "-w", "/", "pwd"}, result{"/\n", "", 0}},
		"stdin is not given":     {"input", []string{id, "cat"}, result{"", "", 0}},
		"stdin":                  {"input", []string{id, "-i", "cat"}, result{"input", "", 0}},
		"empty stdin":            {"", []string{id, "-i", "cat"}, result{"", "", 0}},
		"stdin that nobody read": {strings.Repeat("x", 1<<20), []string{id, "-i", "true"}, result{"", "", 0}},
		"every byte":             {"", []string{id, "printf", `\033[31m\000\377\r\n`}, result{"\x1b[31m\x00\xff\r\n", "", 0}},
		"own code as ours":       {"", []string{id, "sh", "-c", "exit 2"}, result{"", "", 2}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := s.runWith(test.stdin, append([]string{"exec"}, test.args...)...); got != test.want {
				t.Errorf("%+v, want %+v", got, test.want)
			}
		})
	}
}

func TestExecTimeout(t *testing.T) {
	s := newSetup(t)
	id := string(s.server.Add(client.Sandbox{}).ID)
	r := s.run("exec", id, "--timeout", "300ms", "--", "sh", "-c", "echo begun; exec sleep 60")
	if r.code != 124 || r.stdout != "begun\n" || !strings.Contains(r.stderr, "ran out of time") {
		t.Errorf("%+v", r)
	}
	// The agent has killed it: nothing is run in the sandbox to do so again.
	if n := s.server.Started.Load(); n != 1 {
		t.Errorf("%d commands were started", n)
	}
}

func TestExecIntoAPipeThatCloses(t *testing.T) {
	s := newSetup(t)
	id := string(s.server.Add(client.Sandbox{}).ID)
	cmd := s.command("exec", id, "--", "sh", "-c", "echo $$; exec yes")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Fscan(out, &pid); err != nil {
		t.Fatal(err)
	}
	out.Close()
	cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 141 {
		t.Errorf("code %d", code)
	}
	gone(t, pid)
}

// gone waits for the end of a process.
func gone(t *testing.T, pid int) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); syscall.Kill(pid, 0) == nil; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("process %d is alive", pid)
		}
	}
}

// screen is what appears on a terminal.
type screen struct {
	t    *testing.T
	ptmx *os.File
	cmd  *exec.Cmd
	mu   sync.Mutex
	text []byte
	done chan struct{}
}

func (s *setup) screen(args ...string) *screen {
	s.t.Helper()
	cmd := s.command(args...)
	cmd.Env = append(cmd.Env, "TERM=xterm", "NO_COLOR=1")
	ptmx, err := pty.StartWithSize(cmd, &pty.Winsize{Cols: 91, Rows: 31})
	if err != nil {
		s.t.Fatal(err)
	}
	sc := &screen{t: s.t, ptmx: ptmx, cmd: cmd, done: make(chan struct{})}
	go func() {
		defer close(sc.done)
		buf := make([]byte, 4096)
		for {
			n, err := ptmx.Read(buf)
			sc.mu.Lock()
			sc.text = append(sc.text, buf[:n]...)
			sc.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	s.t.Cleanup(func() { cmd.Process.Kill(); ptmx.Close() })
	return sc
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return string(s.text)
}

func (s *screen) waitFor(text string) {
	s.t.Helper()
	s.waitForNth(text, 1)
}

func (s *screen) waitForNth(text string, n int) {
	s.t.Helper()
	for deadline := time.Now().Add(15 * time.Second); strings.Count(s.String(), text) < n; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			s.t.Fatalf("no %q on the screen: %q", text, s.String())
		}
	}
}

func (s *screen) key(text string) {
	s.t.Helper()
	if _, err := io.WriteString(s.ptmx, text); err != nil {
		s.t.Fatal(err)
	}
}

func (s *screen) exitCode() int {
	s.t.Helper()
	exited := make(chan struct{})
	go func() { s.cmd.Wait(); close(exited) }()
	select {
	case <-exited:
		<-s.done
		return s.cmd.ProcessState.ExitCode()
	case <-time.After(15 * time.Second):
		s.t.Fatalf("it does not end: %q", s.String())
		return 0
	}
}

func TestExecOnATerminalIsEscaped(t *testing.T) {
	s := newSetup(t)
	id := string(s.server.Add(client.Sandbox{}).ID)
	mustWrite(t, filepath.Join(s.server.Home, "hostile"), hostile, 0o644)
	sc := s.screen("exec", id, "--", "sh", "-c", "cat hostile; cat hostile >&2; exit 3")
	if code := sc.exitCode(); code != 3 {
		t.Errorf("code %d", code)
	}
	inert(t, strings.ReplaceAll(sc.String(), "\r\n", "\n"))
	if strings.Count(sc.String(), "END") != 2 {
		t.Errorf("%q", sc.String())
	}
}

func TestExecCtrlC(t *testing.T) {
	s := newSetup(t)
	id := string(s.server.Add(client.Sandbox{}).ID)
	sc := s.screen("exec", id, "--", "sh", "-c", "trap 'echo caught; exit 7' INT; echo ready; while :; do sleep 0.05; done")
	sc.waitFor("ready")
	sc.key("\x03")
	if code := sc.exitCode(); code != 7 || !strings.Contains(sc.String(), "caught") {
		t.Errorf("code %d, %q", code, sc.String())
	}
}

func TestExecSecondCtrlCKills(t *testing.T) {
	s := newSetup(t)
	id := string(s.server.Add(client.Sandbox{}).ID)
	sc := s.screen("exec", id, "--", "sh", "-c", "trap 'echo ignored' INT; echo ready; while :; do sleep 0.05; done")
	sc.waitFor("ready")
	sc.key("\x03")
	sc.waitFor("ignored")
	sc.key("\x03")
	if code := sc.exitCode(); code != 137 {
		t.Errorf("code %d, %q", code, sc.String())
	}
}

func TestExecTerminal(t *testing.T) {
	s := newSetup(t)
	id := string(s.server.Add(client.Sandbox{}).ID)
	sc := s.screen("exec", id, "-t", "--", "sh", "-c", `stty size; echo $TERM; printf '\033[31mred\n'; read x; stty size; echo "got $x"; read y; echo never`)
	sc.waitFor("31 91")
	sc.waitFor("xterm\r\n\x1b[31mred") // an attach is raw
	if err := pty.Setsize(sc.ptmx, &pty.Winsize{Cols: 101, Rows: 41}); err != nil {
		t.Fatal(err)
	}
	time.Sleep(300 * time.Millisecond)
	sc.key("word\r")
	sc.waitFor("41 101")
	sc.waitFor("got word")
	sc.key("\x03") // by the terminal inside
	if code := sc.exitCode(); code != 130 || strings.Contains(sc.String(), "never") {
		t.Errorf("code %d, %q", code, sc.String())
	}
}

func TestExecTerminalFromAScript(t *testing.T) {
	s := newSetup(t)
	id := string(s.server.Add(client.Sandbox{}).ID)
	if r := s.runWith("a line\n", "exec", "-t", id, "--", "sh", "-c", "cat; exit 5"); r.code != 5 || !strings.Contains(r.stdout, "a line\r\n") {
		t.Errorf("%+v", r)
	}
}

func TestConnect(t *testing.T) {
	s := newSetup(t)
	id := s.server.Add(client.Sandbox{}).ID
	sc := s.screen("connect", string(id))
	sc.key("X=kept; echo $((40+2))\r")
	sc.waitFor("42\r\n")

	s.server.CloseClientConnections() // a router that is restarted, a laptop that slept
	sc.waitFor("connected again")
	sc.key("echo $X-$((1+1))\r")
	sc.waitFor("kept-2\r\n")

	s.server.Edit(id, func(b *client.Sandbox) { b.State = berm.Paused })
	s.server.CloseClientConnections()
	sc.waitFor("the sandbox is paused")
	s.server.Edit(id, func(b *client.Sandbox) { b.State = berm.Running })
	sc.waitForNth("connected again", 2)
	sc.key("echo $X-$((2+2)); exit 9\r")
	sc.waitFor("kept-4\r\n")
	if code := sc.exitCode(); code != 9 {
		t.Errorf("code %d", code)
	}
}

func TestConnectLeave(t *testing.T) {
	for name, leave := range map[string]func(*setup, berm.SandboxID, *screen){
		"by keys": func(_ *setup, _ berm.SandboxID, sc *screen) { sc.key("\r~.") },
		"by Ctrl-C while paused": func(s *setup, id berm.SandboxID, sc *screen) {
			s.server.Edit(id, func(b *client.Sandbox) { b.State = berm.Paused })
			s.server.CloseClientConnections()
			sc.waitFor("is paused")
			sc.key("\x03")
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSetup(t)
			id := s.server.Add(client.Sandbox{}).ID
			sc := s.screen("connect", string(id))
			sc.key("echo $((40+2))\r")
			sc.waitFor("42\r\n")
			leave(s, id, sc)
			if code := sc.exitCode(); code != 129 || !strings.Contains(sc.String(), "may still run") {
				t.Errorf("code %d, %q", code, sc.String())
			}
		})
	}
}

func TestConnectToASandboxThatDies(t *testing.T) {
	s := newSetup(t)
	id := s.server.Add(client.Sandbox{}).ID
	sc := s.screen("connect", string(id))
	sc.key("echo $((40+2))\r")
	sc.waitFor("42\r\n")
	s.server.Remove(id)
	if code := sc.exitCode(); code != 1 || !strings.Contains(sc.String(), string(id)+" was killed") {
		t.Errorf("code %d, %q", code, sc.String())
	}
}

func TestCopyFile(t *testing.T) {
	s := newSetup(t)
	id := string(s.server.Add(client.Sandbox{}).ID)
	dir, home := t.TempDir(), s.server.Home
	random := make([]byte, 3<<20+1)
	rand.NewChaCha8([32]byte{2}).Read(random)
	mustWrite(t, filepath.Join(dir, "data"), string(random), 0o644)
	mustWrite(t, filepath.Join(dir, "run.sh"), "#!/bin/sh\necho ran\n", 0o755)
	mustWrite(t, filepath.Join(dir, "empty"), "", 0o600)

	s.ok("cp", filepath.Join(dir, "data"), id+":")
	s.ok("cp", filepath.Join(dir, "data"), id+":new/dir/name")
	s.ok("cp", filepath.Join(dir, "run.sh"), id+":"+home)
	s.ok("cp", filepath.Join(dir, "empty"), id+":new/")
	for _, name := range []string{"data", "new/dir/name"} {
		if got, err := os.ReadFile(filepath.Join(home, name)); err != nil || sha256.Sum256(got) != sha256.Sum256(random) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
	if got := s.ok("exec", id, "--", "./run.sh"); got != "ran\n" {
		t.Errorf("executable: %q", got)
	}
	if info, err := os.Stat(filepath.Join(home, "new/empty")); err != nil || info.Size() != 0 {
		t.Errorf("empty file: %v", err)
	}

	back := t.TempDir()
	s.ok("cp", id+":data", back)
	s.ok("cp", id+":run.sh", filepath.Join(back, "other"))
	if got, err := os.ReadFile(filepath.Join(back, "data")); err != nil || !bytes.Equal(got, random) {
		t.Errorf("back: %d bytes, %v", len(got), err)
	}
	if info, err := os.Stat(filepath.Join(back, "other")); err != nil || info.Mode().Perm()&0o100 == 0 {
		t.Errorf("mode back: %v, %v", info, err)
	}
	if got := s.ok("cp", id+":run.sh", "/dev/stdout"); got != "#!/bin/sh\necho ran\n" {
		t.Errorf("into a pipe: %q", got)
	}
	if r := s.run("cp", id+":nosuch", filepath.Join(back, "data")); r.code != 1 {
		t.Errorf("missing: %+v", r)
	}
	if got, err := os.ReadFile(filepath.Join(back, "data")); err != nil || !bytes.Equal(got, random) {
		t.Errorf("a copy that failed changed its destination: %d bytes, %v", len(got), err)
	}
	if left, err := filepath.Glob(filepath.Join(back, ".berm*")); err != nil || len(left) != 0 {
		t.Errorf("left over: %v, %v", left, err)
	}
}

func TestCopyDirectory(t *testing.T) {
	s := newSetup(t)
	id := string(s.server.Add(client.Sandbox{}).ID)
	dir := t.TempDir()
	tree := filepath.Join(dir, "tree")
	mustWrite(t, filepath.Join(tree, "a/b/file"), "text", 0o644)
	mustWrite(t, filepath.Join(tree, "name with\nnewline"), strings.Repeat("long", 1<<18), 0o600)
	mustWrite(t, filepath.Join(tree, "run"), "#!", 0o755)
	if err := os.Symlink("b/file", filepath.Join(tree, "a/link")); err != nil {
		t.Fatal(err)
	}
	same := func(a, b string) {
		t.Helper()
		if out, err := exec.Command("diff", "-r", "--no-dereference", a, b).CombinedOutput(); err != nil {
			t.Errorf("%s", out)
		}
	}
	s.ok("cp", tree, id+":")              // into the home
	s.ok("cp", tree, id+":under/new")     // by a new name
	s.ok("cp", tree, id+":under/new")     // into what is there now
	s.ok("cp", tree+"/.", id+":contents") // without its name
	for _, name := range []string{"tree", "under/new/tree", "contents"} {
		same(tree, filepath.Join(s.server.Home, name))
	}
	back := t.TempDir()
	s.ok("cp", id+":tree", back)
	s.ok("cp", id+":tree", filepath.Join(back, "new"))
	s.ok("cp", id+":tree/.", back)
	same(tree, filepath.Join(back, "tree"))
	same(tree, filepath.Join(back, "new"))
	same(filepath.Join(tree, "a"), filepath.Join(back, "a"))

	if err := os.Symlink("/etc/passwd", filepath.Join(s.server.Home, "tree/\x1b[2Jout")); err != nil {
		t.Fatal(err)
	}
	r := s.run("cp", id+":tree", filepath.Join(back, "third"))
	inert(t, r.stderr)
	if r.code != 0 || !strings.Contains(r.stderr, `left out ./\x1b[2Jout: a link to /etc/passwd`) {
		t.Errorf("a link to outside: %+v", r)
	}
	if r := s.run("cp", id+":tree/missing", back); r.code != 1 {
		t.Errorf("missing: %+v", r)
	}
	if r := s.run("cp", tree, id+":tree/run"); r.code != 1 {
		t.Errorf("a directory over a file: %+v", r)
	}
}
