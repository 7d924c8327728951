package notify

import (
	"bufio"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// This program is what it tests too: with the variable it takes the filter, passes its listener on
// and becomes a shell.
const childVariable = "NOTIFY_SCRIPT"

func TestMain(m *testing.M) {
	if script, ok := os.LookupEnv(childVariable); ok {
		runtime.LockOSThread()
		if err := child(); err != nil {
			panic(err)
		}
		panic(syscall.Exec("/bin/sh", []string{"sh", "-c", script}, []string{"PATH=/usr/bin:/bin"}))
	}
	os.Exit(m.Run())
}

func child() error {
	if os.Getenv("NOTIFY_NOT") != "" {
		return nil
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	code := []byte(Filter())
	program := unix.SockFprog{Len: uint16(len(code) / 8), Filter: (*unix.SockFilter)(unsafe.Pointer(&code[0]))}
	fd, _, errno := syscall.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, Flags, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return errno
	}
	if err := unix.Sendmsg(3, []byte{1}, unix.UnixRights(int(fd)), nil, 0); err != nil {
		return err
	}
	return unix.CloseRange(3, 1<<31-1, 0)
}

// begin runs a script whose executions wait for the listener that is returned.
func begin(t testing.TB, cmd *exec.Cmd, script string) *os.File {
	t.Helper()
	if err := Check(); berm.KindOf(err) == berm.Unsupported {
		t.Skip(err)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "ours"), os.NewFile(uintptr(pair[1]), "theirs")
	defer theirs.Close()
	defer ours.Close()
	cmd.Env = append(cmd.Env, childVariable+"="+script)
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	c, err := net.FileConn(ours)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	rights := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := c.(*net.UnixConn).ReadMsgUnix(make([]byte, 1), rights)
	if err != nil {
		t.Fatal(err)
	}
	parts, err := unix.ParseSocketControlMessage(rights[:n])
	if err != nil || len(parts) != 1 {
		t.Fatal(err, len(parts))
	}
	fds, err := unix.ParseUnixRights(&parts[0])
	if err != nil {
		t.Fatal(err)
	}
	unix.CloseOnExec(fds[0])
	return os.NewFile(uintptr(fds[0]), "listener")
}

// listen runs a script to its end and returns what was told of it.
func listen(t testing.TB, script string) (events []Event) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Dir = t.TempDir()
	l := Listen(begin(t, cmd, script), func(e Event) {
		if e.File != nil {
			e.File.Close()
		}
		events = append(events, e)
	})
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	wait(t, l)
	if l.Lost() > 0 {
		t.Errorf("%d are lost", l.Lost())
	}
	return events
}

func wait(t testing.TB, l *Listener) {
	t.Helper()
	select {
	case <-l.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("the listener did not end with the last process")
	}
}

func TestListen(t *testing.T) {
	events := listen(t, `sleep 0.3 & cp /bin/echo ./own; ./own "a b" c >/dev/null; nosuchprogram 2>/dev/null
		printf '#!/bin/sh\nsleep 0.1; exit 3\n' >script; chmod +x script; ./script; wait; exec sleep 0.2`)
	find := func(name string) *Event {
		for i, e := range events {
			if !e.Exit && slices.Contains(e.Argv, name) {
				return &events[i]
			}
		}
		t.Errorf("%s was not told: %+v", name, events)
		return &Event{}
	}
	own := find("a b")
	if !slices.Equal(own.Argv, []string{"./own", "a b", "c"}) || own.Cut || own.Exe != own.Cwd+"/own" || own.Host == 0 || own.PID == 0 || own.UID != os.Getuid() {
		t.Errorf("%+v", own)
	}
	// What lives is looked at again.
	if e := find("0.2"); e.Asked || e.Host != find("-c").Host {
		t.Errorf("%+v", e)
	}
	if e := find("./script"); e.Asked || e.Exe == e.Cwd+"/script" || e.Parent != find("-c").PID {
		t.Errorf("the interpreter of a script is not told: %+v", e)
	}
	begun, ended := map[int]bool{}, map[int]int{}
	for _, e := range events {
		if !e.Exit {
			begun[e.Host] = true
			if ended[e.Host] > 0 {
				t.Errorf("after its end: %+v", e)
			}
			continue
		}
		ended[e.Host]++
		if TellsExits() != e.Known {
			t.Errorf("%+v", e)
		}
		if e.Host == find("./script").Host && e.Known && e.Status.ExitStatus() != 3 {
			t.Errorf("%+v", e)
		}
	}
	for host := range begun {
		if ended[host] != 1 {
			t.Errorf("process %d ended %d times: %+v", host, ended[host], events)
		}
	}
}

// What a library tries on its way through a PATH is no execution; all that is one is told, however
// many there are.
func TestEach(t *testing.T) {
	before := descriptors(t)
	events := listen(t, `PATH=/nowhere:/else:$PATH; i=0; while [ $i -lt 200 ]; do env true a$i; i=$((i+1)); done`)
	told := map[string]int{}
	for _, e := range events {
		if !e.Exit && len(e.Argv) == 2 && e.Exe != "" && e.Argv[0] == "true" {
			told[e.Argv[1]]++
		}
	}
	if len(told) != 200 {
		t.Errorf("%d of 200", len(told))
	}
	for name, n := range told {
		if n != 1 {
			t.Errorf("%s: %d", name, n)
		}
	}
	for end := time.Now().Add(30 * time.Second); descriptors(t) > before; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d descriptors, %d before", descriptors(t), before)
		}
	}
}

func descriptors(t testing.TB) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

func TestLongArguments(t *testing.T) {
	events := listen(t, `/bin/true $(seq 20000); /bin/true "$(seq 20000)"; /bin/true ''`)
	n := 0
	for _, e := range events {
		if e.Exit || e.Exe == "" || len(e.Argv) == 0 || e.Argv[0] != "/bin/true" {
			continue
		}
		size := 0
		for _, a := range e.Argv {
			size += len(a) + 1
		}
		if long := e.Argv[1] != ""; size > maxArgs+1 || len(e.Argv) > maxArgv || e.Cut != long {
			t.Errorf("%d bytes, %d arguments, cut: %v", size, len(e.Argv), e.Cut)
		}
		n++
	}
	if n != 3 {
		t.Errorf("%d of 3", n)
	}
}

// Whoever is told holds nobody up.
func TestToldHangs(t *testing.T) {
	cmd := exec.Command("/proc/self/exe")
	var mu sync.Mutex
	mu.Lock()
	l := Listen(begin(t, cmd, `i=0; while [ $i -lt 100 ]; do /bin/true; i=$((i+1)); done`), func(e Event) {
		if e.File != nil {
			e.File.Close()
		}
		mu.Lock()
		defer mu.Unlock()
	})
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	mu.Unlock()
	wait(t, l)
}

// BenchmarkExecution has a shell run programs with the listener and without, in turn, and tells how
// many times as long it takes.
func BenchmarkExecution(b *testing.B) {
	const each = 20
	script := `while read x; do i=0; while [ $i -lt 20 ]; do /bin/true a b c; i=$((i+1)); done; echo; done`
	shell := func(cmd *exec.Cmd) func() time.Duration {
		in, err := cmd.StdinPipe()
		if err != nil {
			b.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			b.Fatal(err)
		}
		if cmd.Env == nil {
			cmd.Env = []string{"NOTIFY_NOT=1", childVariable + "=" + script}
			if err := cmd.Start(); err != nil {
				b.Fatal(err)
			}
		} else {
			l := Listen(begin(b, cmd, script), func(e Event) {
				if e.File != nil {
					e.File.Close()
				}
			})
			b.Cleanup(func() { wait(b, l) })
		}
		b.Cleanup(func() { in.Close(); _ = cmd.Wait() })
		lines := bufio.NewReader(out)
		return func() time.Duration {
			began := time.Now()
			if _, err := in.Write([]byte("\n")); err != nil {
				b.Fatal(err)
			}
			if _, err := lines.ReadString('\n'); err != nil {
				b.Fatal(err)
			}
			return time.Since(began) / each
		}
	}
	with, without := exec.Command("/proc/self/exe"), exec.Command("/proc/self/exe")
	with.Env = []string{}
	runs := []func() time.Duration{shell(with), shell(without)}
	var times [2][]time.Duration
	for b.Loop() {
		for i, run := range runs {
			times[i] = append(times[i], run())
		}
	}
	for i := range times {
		slices.Sort(times[i])
	}
	for _, q := range []int{10, 25, 50} {
		at := func(i int) float64 { return float64(times[i][len(times[i])*q/100]) }
		b.ReportMetric(at(0)/at(1), "times/p"+string(rune('0'+q/10))+string(rune('0'+q%10)))
	}
	b.ReportMetric(float64(times[1][len(times[1])/2]), "ns/execution")
}
