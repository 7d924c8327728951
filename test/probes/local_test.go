package probes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/test/harness"
)

// all is set when slow tests are wanted.
var all = os.Getenv("BERM_TEST_ALL") != ""

// TestLocal runs the probes in `berm run`, as an ordinary user and as root, in a workspace
// that is a copy. With BERM_TEST_ALL they run in one that is written in place too, with those
// that use up what they can; without it, root runs those that are for local mode alone.
func TestLocal(t *testing.T) {
	v, j := newLocal(t)
	j.test(t, v)
	probes, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	probes = slices.DeleteFunc(probes, func(p Probe) bool {
		return !slices.Contains(p.Where, "local") || len(p.Needs) > 0 || p.Abuse && !all
	})
	t.Run("copy", func(t *testing.T) {
		// A user without a control group has no limit of memory.
		j.each(t, v, slices.DeleteFunc(slices.Clone(probes), func(p Probe) bool { return p.Limit == "memory" }), "user")
		j.each(t, v, slices.DeleteFunc(slices.Clone(probes), func(p Probe) bool { return !all && len(p.Where) > 1 }), "root")
	})
	t.Run("place", func(t *testing.T) {
		if !all {
			t.Skip("slow: set BERM_TEST_ALL=1")
		}
		v.flags, v.place = []string{"--rw", "."}, true
		j.each(t, v, slices.DeleteFunc(probes, func(p Probe) bool { return p.Abuse }), "user", "root")
	})
}

// userID is an ordinary user's; no account has it.
const userID = 1_987_654

// local is a venue: `berm run` of two users of the host.
type local struct {
	accounts map[string]*account
	flags    []string // of every run
	place    bool     // that writes into the project
}

// account is a user of the host who has secrets, a project and another one.
type account struct {
	t       *testing.T
	uid     int
	dir     string // what there is of the user
	home    string
	project string
	berm    string // the program, which is the user's own
	environ []string
	probes  map[string]string // what probes are told of this account
}

// newLocal plants what an ordinary user and root have.
func newLocal(t *testing.T) (*local, *judge) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: namespaces around the test, and a second user")
	}
	j := newJudge(t)
	v := &local{accounts: map[string]*account{"user": newAccount(t, j, userID), "root": newAccount(t, j, 0)}}
	return v, j
}

func newAccount(t *testing.T, j *judge, uid int) *account {
	t.Helper()
	dir := publicDir(t)
	a := &account{t: t, uid: uid, dir: dir, home: dir + "/home", project: dir + "/work/project", berm: dir + "/bin/berm"}
	a.write("work/project/README", "a project\n")
	a.write("work/project/src/main.c", "int main(void) { return 0; }\n")
	a.write("bin/.keep", "")
	binary, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(binary)
	if err == nil {
		err = os.WriteFile(a.berm, program, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	a.own("bin/berm")

	secrets := []string{"work/other/secret.c"}
	for _, name := range []string{".ssh/id_rsa", ".aws/credentials", ".netrc", ".config/gh/hosts.yml", ".bash_history", "notes.txt"} {
		secrets = append(secrets, "home/"+name)
	}
	for i, name := range secrets {
		a.write(name, j.token(name)+"\n")
		secrets[i] = filepath.Join(dir, name)
	}
	variable := func(name string) string { return name + "=" + j.token("variable "+name) }
	a.environ = []string{
		"HOME=" + a.home, "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "TERM=xterm-256color", "LANG=C.UTF-8",
		"SSH_AUTH_SOCK=" + a.home + "/agent.sock", "DBUS_SESSION_BUS_ADDRESS=unix:path=" + a.home + "/bus",
		variable("AWS_SECRET_ACCESS_KEY"), variable("GITHUB_TOKEN"), variable("ANTHROPIC_API_KEY"), variable("DATABASE_URL"),
	}
	// Sockets of services: of the session, and of the machine in /run.
	run, err := os.MkdirTemp("/run", "berm-canary-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(run) })
	sockets := []string{a.home + "/agent.sock", a.home + "/bus", a.home + "/docker.sock", run + "/docker.sock"}
	for _, path := range sockets {
		j.listen(t, "unix", path)
	}
	for _, path := range append(sockets, run) {
		if err := errors.Join(os.Chmod(path, 0o755), os.Chown(path, uid, uid)); err != nil {
			t.Fatal(err)
		}
	}
	a.probes = map[string]string{
		"HOST_SECRETS": strings.Join(secrets, ":"), "HOST_SOCKETS": strings.Join(sockets, ":"),
		"HOST_PID": fmt.Sprint(j.decoy(t, uid).Pid), "HOST_BERM": a.berm,
	}
	return a
}

// write makes a file of the account, and the directories that lead to it.
func (a *account) write(name, content string) {
	a.t.Helper()
	path := filepath.Join(a.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		a.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		a.t.Fatal(err)
	}
	a.own(name)
}

// own gives the account a file and the directories that lead to it.
func (a *account) own(name string) {
	a.t.Helper()
	for path := name; ; path = filepath.Dir(path) {
		if err := os.Lchown(filepath.Join(a.dir, path), a.uid, a.uid); err != nil {
			a.t.Fatal(err)
		}
		if path == "." {
			return
		}
	}
}

// as starts a process as a user without other groups.
func as(uid int) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
}

// command is berm with arguments, in the account's project.
func (a *account) command(args ...string) *exec.Cmd {
	cmd := exec.Command(a.berm, args...)
	cmd.Dir, cmd.Env, cmd.SysProcAttr = a.project, a.environ, as(a.uid)
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// do runs berm and returns what it printed, and its exit code.
func (a *account) do(args ...string) (output string, code int) {
	a.t.Helper()
	text, err := a.command(args...).CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		a.t.Fatalf("berm %q: %v", args, err)
	}
	if exit != nil {
		code = exit.ExitCode()
	}
	return string(text), code
}

// onTerminal runs berm at a terminal and returns what that got.
func (a *account) onTerminal(args ...string) string {
	a.t.Helper()
	cmd := a.command(args...)
	screen, err := pty.StartWithAttrs(cmd, nil, &syscall.SysProcAttr{
		Credential: cmd.SysProcAttr.Credential, Setsid: true, Setctty: true,
	})
	if err != nil {
		a.t.Fatal(err)
	}
	defer screen.Close()
	text, _ := io.ReadAll(screen) // ends with EIO
	_ = cmd.Wait()
	return string(text)
}

// look sees the files of the accounts too, but for the workspace when that is written in
// place, and the state that berm keeps.
func (v *local) look() harness.Host {
	host := harness.Look(nil)
	// A berm that is killed leaves its control group, empty, to later runs.
	maps.DeleteFunc(host, func(key, _ string) bool {
		return strings.HasPrefix(key, "cgroup ") && strings.Contains(key, "/berm/run-")
	})
	for _, a := range v.accounts {
		a.look(host, v.place)
		// Nothing may be left of a session but what the next run sweeps away, and the number
		// that no other gets.
		entries, _ := os.ReadDir(a.home + "/.local/state/berm/sessions")
		for _, entry := range entries {
			if !strings.HasPrefix(entry.Name(), ".trash-") && !strings.HasPrefix(entry.Name(), ".retired-") {
				host["session "+entry.Name()] = ""
			}
		}
	}
	return host
}

func (a *account) look(host harness.Host, written bool) {
	_ = filepath.WalkDir(a.dir, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // a command may be at work
		}
		if err != nil {
			return err
		}
		if path == a.home+"/.local" || path == a.project && written {
			return fs.SkipDir
		}
		var st unix.Stat_t
		if unix.Lstat(path, &st) != nil {
			return nil
		}
		if path == a.home {
			st.Ctim = unix.Timespec{} // .local is made there
		}
		// Whatever is done to a file changes this time, which nobody can set.
		host["file "+path] = fmt.Sprintf("%o %d %d %d", st.Mode, st.Uid, st.Gid, st.Ctim.Nano())
		return nil
	})
}

func (v *local) watch(context.Context, bool) (harm func() string) {
	return func() string { return "" }
}

func (v *local) open(_ context.Context, user string, _ time.Duration) (box, error) {
	return &localBox{account: v.accounts[user], flags: v.flags, place: v.place}, nil
}

// localBox is a box: one `berm run`.
type localBox struct {
	*account
	flags []string
	place bool
	held  func() // called when a script is at its end and waits, if it does
	cmd   *exec.Cmd
	done  chan error
}

func (b *localBox) run(ctx context.Context, kind, script string, env map[string]string) (output, status string, err error) {
	args := append([]string{"run", "--quiet", "--pids", "512"}, b.flags...)
	if b.uid == 0 {
		args = append(args, "--memory", "512MiB", "--cpus", "1")
	}
	for _, variables := range []map[string]string{env, b.probes} {
		for name, value := range variables {
			args = append(args, "--env", name+"="+value)
		}
	}
	if b.held != nil {
		script += hold[kind]
	}
	interpreter := "bash"
	if kind == "py" {
		interpreter = "python3"
	}
	b.cmd = b.command(append(args, "--", interpreter, "-c", script)...)
	// A terminal as standard input, as in most runs: it can be pushed input into.
	screen, terminal, err := pty.Open()
	if err != nil {
		return "", "", err
	}
	defer screen.Close()
	go io.Copy(io.Discard, screen)
	b.cmd.Stdin = terminal
	b.cmd.SysProcAttr.Setsid, b.cmd.SysProcAttr.Setctty = true, true
	out := &limited{}
	b.cmd.Stdout, b.cmd.Stderr = out, out
	err = b.cmd.Start()
	terminal.Close()
	if err != nil {
		return "", "", err
	}
	b.done = make(chan error, 1)
	go func() { b.done <- b.cmd.Wait() }()
	if b.held != nil {
		go func() {
			for !strings.Contains(out.String(), atEnd) {
				select {
				case <-ctx.Done():
					return
				case <-time.After(10 * time.Millisecond):
				}
			}
			b.held()
			_, _ = screen.WriteString("\n")
		}()
	}
	select {
	case <-ctx.Done():
		return out.String(), "", ctx.Err()
	case err := <-b.done:
		b.done <- err // for kill
	}
	state := b.cmd.ProcessState
	if state.ExitCode() == 125 {
		return out.String(), "", errors.New("berm made no sandbox")
	}
	return out.String(), state.String(), nil
}

// atEnd is what a script that is held says at its end.
const atEnd = "AT-THE-END"

// hold lets scripts wait at their end for a line.
var hold = map[string]string{
	"sh": "\necho " + atEnd + "; read -r _\n",
	"py": "\nprint('" + atEnd + "', flush=True)\nimport sys\nsys.stdin.readline()\n",
}

// kill ends the run as nobody else can: without a chance for berm to clean up. A next run
// and berm discard do.
func (b *localBox) kill(context.Context) error {
	_ = b.cmd.Process.Kill()
	<-b.done
	if b.place {
		return b.reset()
	}
	if _, code := b.do("discard", "--all"); code != 0 {
		return fmt.Errorf("berm discard: exit code %d", code)
	}
	return nil
}

// reset makes the project what it was.
func (a *account) reset() error {
	entries, err := os.ReadDir(a.project)
	for _, entry := range entries {
		if entry.Name() != "README" && entry.Name() != "src" {
			err = errors.Join(err, os.RemoveAll(filepath.Join(a.project, entry.Name())))
		}
	}
	return err
}

// limited keeps the first mebibyte that is written to it.
type limited struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *limited) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if room := 1<<20 - l.buf.Len(); room > 0 {
		l.buf.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}

func (l *limited) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}
