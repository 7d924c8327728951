package landlock

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	kernel "github.com/berm-sandbox/berm/internal/kernel/landlock"
)

// testUser is who runs commands when the tests run as root.
const testUser = 64733

// callerVariable makes the test binary a program of that user's which calls Run with the
// order in it and writes the answer to descriptor 3.
const callerVariable = "BERM_LANDLOCK_TEST_CALLER"

// noRaceSleep keeps the race detector from waiting a second at each exit of a process.
const noRaceSleep = "GORACE=atexit_sleep_ms=0"

// A call is what such a program is told. The fields are those of Order.
type call struct {
	Argv, Env, Read, Write []string
	Dir, TempDir, Profile  string
	Timeout, Cancel        time.Duration
	ABI                    int
	Hardened               bool // as in a container that takes everything away
}

type answer struct {
	Exit    berm.Exit
	Kind    string
	Message string
	Fatal   string
	out     string
}

func TestMain(m *testing.M) {
	text := os.Getenv(callerVariable)
	if text == "" {
		os.Exit(m.Run())
	}
	os.Unsetenv(callerVariable)
	if err := json.NewEncoder(os.NewFile(3, "answer")).Encode(callRun(text)); err != nil {
		panic(err)
	}
	os.Exit(0)
}

func callRun(text string) (a answer) {
	runtime.LockOSThread() // what harden takes away is of a thread, as are the programs it starts
	var c call
	err := json.Unmarshal([]byte(text), &c)
	if err == nil && c.Hardened {
		err = harden()
	}
	if err != nil {
		return answer{Fatal: err.Error()}
	}
	signal.Notify(make(chan os.Signal, 1), unix.SIGINT) // as berm does: keys are for the command
	ctx := context.Background()
	if c.Cancel != 0 {
		var cancel func()
		ctx, cancel = context.WithTimeout(ctx, c.Cancel)
		defer cancel()
	}
	a.Exit, err = Run(ctx, Order{
		Argv: c.Argv, Dir: c.Dir, Env: c.Env, Read: c.Read, Write: c.Write, TempDir: c.TempDir, Timeout: c.Timeout, Profile: c.Profile,
		abi: c.ABI, Files: [3]*os.File{os.Stdin, os.Stdout, os.Stderr},
	})
	if err != nil {
		a.Kind, a.Message = berm.KindOf(err).String(), err.Error()
	}
	return a
}

// harden makes this process, in a user namespace of its own, one of a hardened container:
// no more user namespaces, no capabilities, no_new_privs.
func harden() error {
	if err := os.WriteFile("/proc/sys/user/max_user_namespaces", []byte("0"), 0); err != nil {
		return err
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return err
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	// The next execution drops what is left; until then nothing is asked for.
	if out, err := exec.Command("unshare", "-Ur", "true").CombinedOutput(); err == nil {
		return fmt.Errorf("there are still user namespaces: %s", out)
	}
	if status, err := exec.Command("grep", "CapEff", "/proc/self/status").Output(); err != nil || !strings.Contains(string(status), "0000000000000000") {
		return fmt.Errorf("there are capabilities: %s %v", status, err)
	}
	return nil
}

// A world is a user's files and processes around a workspace.
type world struct {
	t                     *testing.T
	dir, home, work, temp string
	victim                *exec.Cmd // a process of the same user
	tcp                   net.Listener
	abstract              string
}

const secret = "canary-5ab1e"

func newWorld(t *testing.T) *world {
	t.Helper()
	if kernel.ABI() < minABI {
		t.Skipf("Landlock ABI %d: the first that can be used is %d (kernel 5.19)", kernel.ABI(), minABI)
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root to be two users")
	}
	dir, err := os.MkdirTemp("", "berm-landlock-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	w := &world{t: t, dir: dir, home: dir + "/home", work: dir + "/home/project", temp: dir + "/temp", abstract: "\x00berm-landlock-" + filepath.Base(dir)}
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{w.home, w.work, w.temp, w.home + "/.ssh", w.home + "/other"} {
		w.try(os.Mkdir(d, 0o755))
	}
	w.try(os.WriteFile(w.home+"/.ssh/id", []byte(secret), 0o600))
	w.try(os.WriteFile(w.home+"/other/code", []byte(secret), 0o644))
	w.try(os.Symlink(w.home+"/.ssh/id", w.work+"/link"))
	// A child of a test beside this one would hold the file open for writing until it executes
	// something, and "text file busy" would be the answer to executing it (go.dev/issue/22315).
	syscall.ForkLock.RLock()
	err = os.WriteFile(w.dir+"/landlock.test", self, 0o755)
	syscall.ForkLock.RUnlock()
	w.try(err)
	w.try(filepath.Walk(dir, func(path string, _ os.FileInfo, _ error) error { return os.Lchown(path, testUser, testUser) }))

	w.victim = w.command("sleep", "1000")
	w.victim.Env = []string{"TOKEN=" + secret}
	w.victim.Dir = w.home + "/.ssh"
	w.try(w.victim.Start())
	t.Cleanup(func() { w.victim.Process.Kill(); w.victim.Wait() })

	pathname, err := net.Listen("unix", w.home+"/docker.sock")
	w.try(err)
	w.try(os.Chmod(w.home+"/docker.sock", 0o777))
	abstract, err := net.Listen("unix", "@"+w.abstract[1:])
	w.try(err)
	w.tcp, err = net.Listen("tcp", "127.0.0.1:0")
	w.try(err)
	for _, l := range []net.Listener{pathname, abstract, w.tcp} {
		t.Cleanup(func() { l.Close() })
	}
	return w
}

func (w *world) port() int { return w.tcp.Addr().(*net.TCPAddr).Port }

// newTerminal makes a terminal of the user's and returns it and its name.
func newTerminal(t *testing.T) (*os.File, string) {
	t.Helper()
	master, slave, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close(); slave.Close() })
	if err := slave.Chown(testUser, testUser); err != nil {
		t.Fatal(err)
	}
	return slave, slave.Name()
}

func (w *world) try(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// command is one of the user's.
func (w *world) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: testUser, Gid: testUser}, Setsid: true}
	return cmd
}

var toolchain = []string{"/usr", "/bin", "/lib", "/lib64", "/etc"}

// caller is the program that calls Run.
func (w *world) caller(c call) (*exec.Cmd, *os.File) {
	w.t.Helper()
	if c.Dir == "" {
		c.Dir = w.work
	}
	if c.Read == nil {
		for _, path := range toolchain {
			if _, err := os.Stat(path); err == nil {
				c.Read = append(c.Read, path)
			}
		}
	}
	if c.Write == nil {
		c.Write = []string{w.work}
	}
	if c.TempDir == "" {
		c.TempDir = w.temp
	}
	c.Env = append(c.Env, "PATH=/usr/bin:/bin", "HOME="+w.work, "LANG=C.UTF-8", noRaceSleep)
	text, err := json.Marshal(c)
	w.try(err)
	cmd := w.command(w.dir + "/landlock.test")
	cmd.Env = []string{callerVariable + "=" + string(text), "PATH=/usr/bin:/bin", noRaceSleep}
	cmd.Dir = "/"
	if c.Hardened {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS
		id := []syscall.SysProcIDMap{{ContainerID: testUser, HostID: testUser, Size: 1}}
		cmd.SysProcAttr.UidMappings, cmd.SysProcAttr.GidMappings = id, id
		cmd.SysProcAttr.Credential.NoSetGroups = true
		cmd.SysProcAttr.AmbientCaps = []uintptr{unix.CAP_SYS_RESOURCE}
	}
	r, end, err := os.Pipe()
	w.try(err)
	w.t.Cleanup(func() { r.Close(); end.Close() })
	cmd.ExtraFiles = []*os.File{end}
	return cmd, r
}

// run runs a command and returns its output and how it ended.
func (w *world) run(c call) answer {
	w.t.Helper()
	return w.finish(w.caller(c))
}

// finish runs a caller and reads its answer.
func (w *world) finish(cmd *exec.Cmd, r *os.File) answer {
	w.t.Helper()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		w.t.Fatalf("%v: %s", err, out.String())
	}
	cmd.ExtraFiles[0].Close()
	a := answer{}
	if err := json.NewDecoder(r).Decode(&a); err != nil || a.Fatal != "" {
		w.t.Fatalf("%v %s: %s", err, a.Fatal, out.String())
	}
	a.out = out.String()
	return a
}

// unharmed checks that the user's own process lives and sleeps.
func (w *world) unharmed() {
	w.t.Helper()
	if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", w.victim.Process.Pid)); err != nil || !strings.Contains(string(stat), ") S ") {
		w.t.Errorf("the user's own process: %s %v", stat, err)
	}
}

// alive lists the processes whose arguments hold a mark.
func alive(t *testing.T, mark string) []int {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, e := range entries {
		line, _ := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if pid, err := strconv.Atoi(e.Name()); err == nil && pid != os.Getpid() && bytes.Contains(line, []byte(mark)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// eventually waits up to ten seconds.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for range 1000 {
		if f() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error(errors.New("not after ten seconds: " + what))
}
