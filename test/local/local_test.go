// Package local uses `berm run` as people do: the built program, as an ordinary user and
// as root, on the file systems and in the containers that they have.
package local

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/internal/leak"
	"github.com/berm-sandbox/berm/test/harness"
)

// ordinary is the id of a user without an account.
const ordinary = 1_987_656

// binary is a copy of berm that every user may execute.
var binary string

func TestMain(m *testing.M) {
	actor()
	flag.Parse()
	if all && os.Geteuid() == 0 {
		if _, err := harness.Isolate(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	built, err := harness.Binary()
	if err == nil {
		binary, err = executable(built)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(filepath.Dir(binary))
	if signal.Ignored(os.Interrupt) { // by what isolates the test: programs would ignore it too
		signal.Notify(make(chan os.Signal, 1), os.Interrupt)
	}
	return m.Run()
}

// executable copies a program to where every user may execute it.
func executable(program string) (string, error) {
	content, err := os.ReadFile(program)
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("", "berm-local-")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, filepath.Base(program))
	if err := os.WriteFile(path, content, 0o755); err != nil {
		return "", err
	}
	return path, os.Chmod(dir, 0o755)
}

var all = os.Getenv("BERM_TEST_ALL") != ""

func slow(t *testing.T) {
	t.Helper()
	if !all {
		t.Skip("slow: BERM_TEST_ALL=1 runs it")
	}
}

// person is a user with a home and a project.
type person struct {
	*testing.T
	uid           int
	home, project string
	temp          string // for temporary files: nothing is to be left in it
	env           []string
	outer         []string // a command that runs what follows it in another environment
	rootOutside   bool     // outer is root's, and becomes this user by itself
}

// each runs a test as an ordinary user and, when the caller may, as root.
func each(t *testing.T, test func(p *person)) {
	t.Helper()
	if os.Geteuid() != 0 {
		test(newPerson(t, os.Geteuid()))
		return
	}
	for name, uid := range map[string]int{"user": ordinary, "root": 0} {
		t.Run(name, func(t *testing.T) { test(newPerson(t, uid)) })
	}
}

// user runs a test as an ordinary user.
func user(t *testing.T) *person {
	if uid := os.Geteuid(); uid != 0 {
		return newPerson(t, uid)
	}
	return newPerson(t, ordinary)
}

// root needs root.
func root(t *testing.T) *person {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	return newPerson(t, 0)
}

// newPerson makes a user's home. When the test ends, nothing of the user's is left.
func newPerson(t *testing.T, uid int) *person {
	t.Helper()
	base, err := os.MkdirTemp("", "berm-local-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(base) })
	p := &person{T: t, uid: uid, home: filepath.Join(base, "home"), temp: filepath.Join(base, "tmp")}
	p.project = filepath.Join(p.home, "project")
	leak.Check(t, leak.Scope{Dirs: []string{p.home, p.temp}})
	t.Cleanup(func() {
		if left, _ := os.ReadDir(p.temp); len(left) > 0 {
			t.Errorf("left in TMPDIR: %v", left)
		}
		for _, dir := range []string{p.home, p.temp} {
			_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
				if err == nil && d.IsDir() && strings.Contains(path, "/work") { // overlayfs gives nobody a right to its own
					_ = os.Chmod(path, 0o700)
				}
				return nil
			})
			if err := os.RemoveAll(dir); err != nil {
				t.Error(err)
			}
		}
	})
	p.must(os.Chmod(base, 0o755))
	p.mkdir(p.home)
	p.mkdir(p.temp)
	p.mkdir(p.project)
	p.write("project/file", "one\n")
	p.env = []string{"PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME=" + p.home, "TMPDIR=" + p.temp, "TERM=xterm", "LANG=C.UTF-8"}
	return p
}

func (p *person) must(err error) {
	p.Helper()
	if err != nil {
		p.Fatal(err)
	}
}

// path is that of a name in the home.
func (p *person) path(name string) string {
	if filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(p.home, name)
}

func (p *person) mkdir(name string) {
	p.Helper()
	p.must(os.Mkdir(p.path(name), 0o755))
	p.must(os.Lchown(p.path(name), p.uid, p.uid))
}

func (p *person) write(name, content string) {
	p.Helper()
	p.must(os.WriteFile(p.path(name), []byte(content), 0o644))
	p.must(os.Lchown(p.path(name), p.uid, p.uid))
}

func (p *person) link(name, target string) {
	p.Helper()
	p.must(os.Symlink(target, p.path(name)))
	p.must(os.Lchown(p.path(name), p.uid, p.uid))
}

func (p *person) read(name string) string {
	p.Helper()
	content, err := os.ReadFile(p.path(name))
	p.must(err)
	return string(content)
}

// command is berm, to be started by the test.
func (p *person) command(args ...string) *exec.Cmd {
	return p.program(append([]string{binary}, args...)...)
}

// program is any program as this user.
func (p *person) program(argv ...string) *exec.Cmd {
	argv = append(slices.Clone(p.outer), argv...)
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir, cmd.Env = p.project, p.env
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if p.uid != os.Geteuid() && !p.rootOutside {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(p.uid), Gid: uint32(p.uid)}
	}
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// result is how a program ended.
type result struct {
	*person
	args           []string
	stdout, stderr string
	code           int // -1 after a signal
	signal         syscall.Signal
}

// finish runs a program to its end.
func (p *person) finish(cmd *exec.Cmd) result {
	p.Helper()
	var stdout, stderr bytes.Buffer
	if cmd.Stdout == nil {
		cmd.Stdout = &stdout
	}
	if cmd.Stderr == nil {
		cmd.Stderr = &stderr
	}
	p.must(cmd.Start())
	patience := time.AfterFunc(2*time.Minute, func() { _ = cmd.Process.Kill() })
	defer patience.Stop()
	_ = cmd.Wait()
	r := result{person: p, args: cmd.Args, stdout: stdout.String(), stderr: stderr.String(), code: cmd.ProcessState.ExitCode()}
	if status := cmd.ProcessState.Sys().(syscall.WaitStatus); status.Signaled() {
		r.signal = status.Signal()
	}
	return r
}

// berm runs berm with these arguments.
func (p *person) berm(args ...string) result {
	p.Helper()
	return p.finish(p.command(args...))
}

// sh runs a script in a sandbox, after flags of berm run.
func (p *person) sh(script string, flags ...string) result {
	p.Helper()
	return p.berm(slices.Concat([]string{"run"}, flags, []string{"--", "sh", "-c", script})...)
}

func (r result) String() string {
	return fmt.Sprintf("%q: code %d, signal %d\nstdout %q\nstderr %q", r.args, r.code, r.signal, clip(r.stdout), clip(r.stderr))
}

func clip(s string) string {
	if len(s) > 2000 {
		return s[:2000] + "…"
	}
	return s
}

// exits fails the test when the exit code is another.
func (r result) exits(code int) result {
	r.Helper()
	if r.code != code || r.signal != 0 {
		r.Fatalf("not %d: %v", code, r)
	}
	return r
}

// prints fails the test unless the command succeeded and printed just this.
func (r result) prints(stdout string) result {
	r.Helper()
	if r.exits(0); strings.TrimSpace(r.stdout) != stdout {
		r.Fatalf("not %q: %v", stdout, r)
	}
	return r
}

// refuses fails the test unless berm said why it ran nothing and what to do. Each of
// words is in what it said.
func (r result) refuses(words ...string) result {
	r.Helper()
	r.exits(125)
	if !strings.HasPrefix(r.stderr, "berm: ") && !strings.Contains(r.stderr, "\nberm: ") {
		r.Fatalf("no reason: %v", r)
	}
	if !strings.Contains(r.stderr, "hint: ") {
		r.Errorf("no hint: %v", r)
	}
	for _, word := range words {
		if !strings.Contains(r.stderr, word) {
			r.Errorf("no %q: %v", word, r)
		}
	}
	return r
}

// says fails the test unless words are on the standard error.
func (r result) says(words ...string) result {
	r.Helper()
	for _, word := range words {
		if !strings.Contains(r.stderr, word) {
			r.Errorf("no %q: %v", word, r)
		}
	}
	return r
}
