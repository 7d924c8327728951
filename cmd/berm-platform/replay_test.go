package main

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/audittest"
	replayscreen "github.com/berm-sandbox/berm/internal/audit/replay/screen"
)

const (
	told = berm.SandboxID("i0aaaaaaaaaaaaaaaaaaa")
	evil = berm.SandboxID("i0ccccccccccccccccccc")
)

// logged is a log in a directory, with an ordinary session and a hostile one.
func logged(t *testing.T) *audittest.Log {
	t.Helper()
	l := audittest.New(t, t.TempDir())
	l.Session(told)
	l.Hostile(evil)
	return l
}

// output runs berm and wants an exit code.
func (s *setup) output(code int, args ...string) (stdout, stderr string) {
	s.t.Helper()
	cmd := s.command(args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if _ = cmd.Run(); cmd.ProcessState.ExitCode() != code {
		s.t.Fatalf("berm %s: exit code %d\n%s%s", strings.Join(args, " "), cmd.ProcessState.ExitCode(), out.String(), errs.String())
	}
	inert(s.t, out.String())
	inert(s.t, errs.String())
	return out.String(), errs.String()
}

// offline leaves nothing of a server in the environment.
func (s *setup) offline() *setup {
	var env []string
	for _, v := range s.env {
		if !strings.HasPrefix(v, "BERM_URL=") && !strings.HasPrefix(v, "BERM_API_KEY=") {
			env = append(env, v)
		}
	}
	s.env = env
	return s
}

// glob reads all files in a directory.
func glob(t *testing.T, dir string) (contents []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		content, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		contents = append(contents, string(content))
	}
	return contents
}

func TestReplayInWords(t *testing.T) {
	s, l := newSetup(t), logged(t)
	out, _ := s.output(0, "replay", "--log", l.Dir, string(told))
	for _, want := range []string{"What was run", "What changed", "What was contacted", "What was denied, and why", "In order"} {
		if !strings.Contains(out, want) {
			t.Errorf("the account lacks %q", want)
		}
	}
	s.output(0, "replay", "--log", l.Dir, string(evil))
	out, _ = s.output(0, "replay", "--log", l.Dir, "--json", "--only", "net", "--from", "1s", string(told))
	for line := range strings.Lines(out) {
		var e struct {
			At   float64
			Lane string
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil || e.Lane != "net" || e.At < 1 {
			t.Errorf("%s: %v", line, err)
		}
	}
	for _, from := range []string{"10h", "2100-01-01"} {
		if _, errs := s.output(1, "replay", "--log", l.Dir, "--from", from, string(told)); !strings.Contains(errs, "--from "+from+" is after the last record, which is at 00:0") {
			t.Errorf("--from %s: %s", from, errs)
		}
	}
	casts := filepath.Join(t.TempDir(), "casts")
	s.output(0, "replay", "--log", l.Dir, "--cast", casts, string(told))
	for _, name := range []string{"1.cast", "2.cast", "3.cast", "4.cast"} {
		content, err := os.ReadFile(filepath.Join(casts, name))
		if err != nil || !bytes.HasPrefix(content, []byte(`{"version":2,"width":`)) {
			t.Errorf("%s: %.80s, %v", name, content, err)
		}
	}
	s.output(2, "replay", "--log", l.Dir, "--cast", casts, "--json", string(told))
	s.output(0, "replay", "--log", l.Dir, "--cast", casts, string(evil))
	for _, content := range glob(t, casts) {
		inert(t, content)
	}
	page := filepath.Join(t.TempDir(), "page.html")
	s.output(0, "replay", "--log", l.Dir, "--html", page, string(told))
	if content, err := os.ReadFile(page); err != nil || !bytes.HasPrefix(content, []byte("<!doctype html>")) {
		t.Errorf("the page: %v", err)
	}
	for _, wrong := range [][]string{{"--only", "x"}, {"--speed", "0"}, {"--from", "x"}, {"--json", "--html", "x"}, {"--local"}} {
		s.output(2, append([]string{"replay", "--log", l.Dir, string(told)}, wrong...)...)
	}
	_, errs := s.output(1, "replay", "--log", l.Dir, "i0ddddddddddddddddddd")
	if !strings.Contains(errs, "no record of sandbox") {
		t.Errorf("got %s", errs)
	}
}

// Without a server the log is that of berm run.
func TestReplayOfARun(t *testing.T) {
	s := newSetup(t).offline()
	_, errs := s.output(1, "audit")
	if !strings.Contains(errs, "no log of berm run") {
		t.Errorf("got %s", errs)
	}
	state := t.TempDir()
	s.env = append(s.env, "XDG_STATE_HOME="+state, "XDG_CACHE_HOME="+t.TempDir())
	dir := filepath.Join(state, "berm", "audit")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	l := audittest.New(t, dir)
	l.Add(audit.Record{Sandbox: told, Trust: audit.TrustUser, Src: "local", Type: audit.SandboxCreate, Data: map[string]any{"argv": []string{"make"}, "workspace": "/w"}})
	for range 2 { // the index is made, and used
		if out, _ := s.output(0, "audit"); !strings.Contains(out, "make in /w") {
			t.Errorf("got %s", out)
		}
	}
	if _, errs := s.output(1, "replay"); !strings.Contains(errs, "berm audit --local") { // /w is elsewhere
		t.Errorf("got %s", errs)
	}
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	l.Add(audit.Record{Sandbox: evil, Trust: audit.TrustUser, Src: "local", Type: audit.SandboxCreate, Data: map[string]any{"argv": []string{"ls"}, "workspace": here}})
	if out, _ := s.output(0, "replay"); !strings.Contains(out, string(evil)) || !strings.Contains(out, "of berm run") {
		t.Errorf("got %s", out)
	}
	s.output(2, "replay", "--log", l.Dir)
	if out, _ := s.output(0, "replay", string(told)); !strings.Contains(out, "of berm run") {
		t.Errorf("got %s", out)
	}
	if _, errs := s.output(1, "rerun", string(told)); !strings.Contains(errs, "berm run -- make") {
		t.Errorf("got %s", errs)
	}
}

func TestAuditFinds(t *testing.T) {
	s, l := newSetup(t), logged(t)
	count := func(want int, args ...string) {
		t.Helper()
		out, _ := s.output(0, append([]string{"audit", "--log", l.Dir}, args...)...)
		if n := strings.Count(out, "\n"); n != want {
			t.Errorf("%v: %d lines, want %d:\n%s", args, n, want, out)
		}
	}
	count(3, "--verdict", "deny", "--type", "net", "--sandbox", string(told))
	count(3, "--verdict", "deny", "--type", "net", string(told))
	count(2, "--host", "git.test", "--json")
	count(5, "--type", "exec.start", "--actor", "k1")
	count(0, "--since", "1h") // it was years ago
	count(0, "--until", "2026-01-01")
	count(3, "--path", "/workspace/main.go", "--until", "2026-12-31 23:59")
	if _, errs := s.output(2, "audit", "--log", l.Dir, "--since", "foo"); !strings.Contains(errs, "lists the flags") {
		t.Errorf("got %s", errs)
	}
	for _, wrong := range [][]string{{"--verdict", "x"}, {"--since", "x"}, {"--path", "x"}, {"--sandbox", "A/"}, {"word"}, {"--sandbox", string(told), string(told)}, {string(told), string(told)}, {strings.ToUpper(string(told))}} {
		s.output(2, append([]string{"audit", "--log", l.Dir}, wrong...)...)
	}
}

// What comes to the log is printed while berm audit follows it.
func TestAuditFollows(t *testing.T) {
	s, l := newSetup(t), logged(t)
	cmd := s.command("audit", "--log", l.Dir, "--follow", "--type", "limit", "--json")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	defer func() { _ = cmd.Process.Signal(os.Interrupt) }()
	decoder := json.NewDecoder(out)
	for _, want := range []string{"memory", "pids"} {
		var r struct{ Data struct{ Limit string } }
		if err := decoder.Decode(&r); err != nil || r.Data.Limit != want {
			t.Fatalf("got %+v, %v, want %s", r, err, want)
		}
		l.Add(audit.Record{Sandbox: told, Type: audit.LimitHit, Src: "control", Data: map[string]any{"limit": "pids"}})
	}
}

// On a terminal the view is shown; nothing of a hostile session acts on it.
func TestReplayOnATerminal(t *testing.T) {
	s, l := newSetup(t), logged(t)
	s.env = append(s.env, "TERM=xterm-256color", "LANG=C.UTF-8")
	cmd := s.command("replay", "--log", l.Dir, string(evil))
	master, err := pty.StartWithSize(cmd, &pty.Winsize{Cols: 140, Rows: 40})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = master.Close() }()
	shown := make(chan string)
	go func() {
		var all bytes.Buffer
		screen := replayscreen.New(140, 40, false)
		buffer := make([]byte, 4096)
		asked := false
		for {
			n, err := master.Read(buffer)
			all.Write(buffer[:n])
			_, _ = screen.Write(buffer[:n])
			for row := range 40 {
				if !asked && strings.Contains(screen.Text(row), "end of it") { // the last output
					asked = true
					_, _ = io.WriteString(master, "q")
				}
			}
			if err != nil {
				shown <- all.String()
				return
			}
		}
	}()
	select {
	case got := <-shown:
		_ = cmd.Wait()
		for _, bad := range []string{"\x1b]52;c;cHduCg", "\x1b]0;owned", "\x1b]2;owned", "evil.test\a", "\x1bP$q", "\u009b", "\u202e", "\x1b[6n"} {
			if strings.Contains(got, bad) {
				t.Errorf("%q reaches the terminal", bad)
			}
		}
	case <-time.After(time.Minute):
		_ = cmd.Process.Kill()
		t.Fatal("the view does not end")
	}
}
