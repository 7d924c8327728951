package trace

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

func open(t *testing.T, calls ...int) *Tracer {
	t.Helper()
	tr, err := New(calls...)
	if berm.KindOf(err) == berm.Unsupported && os.Geteuid() != 0 {
		t.Skip(err)
	}
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() { tr.Close() })
	return tr
}

// inside runs a script in a new pid namespace that is followed from its first command on, and
// returns the events until its end.
func inside(t *testing.T, tr *Tracer, script string) (all []Event) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", "echo; exec >&2; read x; "+script)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	// Start returns before the kernel tells of the execution, which is not one of the script's.
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d/ns/pid", cmd.Process.Pid), &st); err != nil {
		t.Fatal(err)
	}
	ns := uint32(st.Ino)
	if err := tr.Follow(ns); err != nil {
		t.Fatal(err)
	}
	defer tr.Forget(ns)
	done := make(chan error, 1)
	go func() {
		for {
			e, err := tr.Read()
			if err != nil {
				done <- err
				return
			}
			if e.Namespace != ns {
				continue
			}
			all = append(all, e)
			if e.Kind == Exit && e.PID == 1 {
				done <- nil
				return
			}
		}
	}()
	in.Write([]byte("\n"))
	in.Close()
	_ = cmd.Wait()
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the end did not come")
	}
	if lost := tr.Lost(ns); lost > 0 {
		t.Errorf("%d events are lost", lost)
	}
	return all
}

func TestEvents(t *testing.T) {
	tr := open(t)
	all := inside(t, tr, `/bin/true a "b c" ''; (exit 3); sh -c 'kill -9 $$'; exit 5`)
	var got []string
	for _, e := range all {
		switch e.Kind {
		case Exec:
			got = append(got, fmt.Sprintf("exec %d<%d %s %q", e.PID, e.Parent, e.File, strings.TrimSuffix(string(e.Args), "\x00")))
			if e.Inode == 0 || e.Size == 0 || e.Name == "" {
				t.Errorf("%+v", e)
			}
		case Fork:
			got = append(got, fmt.Sprintf("fork %d<%d", e.PID, e.Parent))
		case Exit:
			got = append(got, fmt.Sprintf("exit %d %d", e.PID, e.Status))
		}
		if e.Host == 0 || e.Host == e.PID || e.UID != uint32(os.Getuid()) || e.At == 0 {
			t.Errorf("%+v", e)
		}
	}
	want := `fork 2<1
exec 2<1 /bin/true "/bin/true\x00a\x00b c\x00"
exit 2 0
fork 3<1
exit 3 768
fork 4<1
exec 4<1 /usr/bin/sh "sh\x00-c\x00kill -9 $$"
exit 4 9
exit 1 1280`
	if text := strings.ReplaceAll(strings.Join(got, "\n"), "/usr/bin/true", "/bin/true"); text != want {
		t.Errorf("got\n%s\nwant\n%s", text, want)
	}
}

// The system calls that were asked for are told with their results, and no others.
func TestCalls(t *testing.T) {
	tr := open(t, unix.SYS_CHROOT, unix.SYS_SETHOSTNAME)
	all := inside(t, tr, `chroot /nowhere true; chroot / true; true`)
	var got []string
	for _, e := range all {
		if e.Kind == Call {
			got = append(got, fmt.Sprintf("%d of %d: %d", e.Number, e.PID, e.Result))
		}
	}
	if want := fmt.Sprintf("[%d of 2: -2 %[1]d of 3: 0]", unix.SYS_CHROOT); fmt.Sprint(got) != want {
		t.Errorf("got %v, want %s", got, want)
	}
}

// Threads are no processes, and an end of the last one is the end.
func TestThreads(t *testing.T) {
	tr := open(t)
	python, err := exec.LookPath("/usr/bin/python3")
	if err != nil {
		t.Skip("no python3 here")
	}
	all := inside(t, tr, python+` -c 'import threading,os
for i in range(20): threading.Thread(target=lambda: None).start()
threading.Thread(target=lambda: os.execv("/bin/sh",["sh","-c","exit 4"])).start()
import time; time.sleep(9)'; true`)
	count := map[Kind]int{}
	for _, e := range all {
		count[e.Kind]++
	}
	if count[Fork] != 1 || count[Exec] != 2 || count[Exit] != 2 {
		t.Errorf("%v: %+v", count, all)
	}
}

// A process whose threads all end at once ends once.
func TestThreadsEndAtOnce(t *testing.T) {
	tr := open(t)
	python, err := exec.LookPath("/usr/bin/python3")
	if err != nil {
		t.Skip("no python3 here")
	}
	const processes = 300
	all := inside(t, tr, fmt.Sprintf(python+` -c 'import threading,os,time
for i in range(%d):
  if os.fork()==0:
    for j in range(4): threading.Thread(target=time.sleep,args=(9,),daemon=True).start()
    os._exit(0)
  os.wait()'; true`, processes))
	ends := map[int]int{}
	for _, e := range all {
		if e.Kind == Exit {
			ends[e.PID]++
		}
	}
	for pid, n := range ends {
		if n != 1 {
			t.Errorf("process %d ended %d times", pid, n)
		}
	}
	if len(ends) != processes+2 {
		t.Errorf("%d ends", len(ends))
	}
}

func TestEndsOnce(t *testing.T) {
	var s ends
	check := func(want bool, e Event) {
		t.Helper()
		if got := s.first(e); got != want {
			t.Errorf("%+v: %v", e, got)
		}
	}
	check(true, Event{Kind: Exit, Namespace: 1, PID: 2})
	check(false, Event{Kind: Exit, Namespace: 1, PID: 2})
	check(true, Event{Kind: Exit, Namespace: 1, PID: 2, Host: 7}) // of the next namespace with that number
	check(true, Event{Kind: Exit, Namespace: 2, PID: 2})
	for i := range maxEnds {
		check(true, Event{Kind: Exit, Namespace: 3, PID: i})
	}
	check(false, Event{Kind: Exit, Namespace: 2, PID: 2})
	check(true, Event{Kind: Fork, Namespace: 2, PID: 2})
	check(true, Event{Kind: Exit, Namespace: 2, PID: 2})
	for i := range 3 * maxEnds {
		check(true, Event{Kind: Exit, Namespace: 4, PID: i})
	}
	if n := len(s.last) + len(s.before); n > 2*maxEnds {
		t.Errorf("%d are kept", n)
	}
}

// Others are not followed.
func TestOthers(t *testing.T) {
	tr := open(t)
	if err := exec.CommandContext(t.Context(), "/bin/true").Run(); err != nil {
		t.Fatal(err)
	}
	if err := tr.Flush(); err != nil {
		t.Fatal(err)
	}
	if e, err := tr.Read(); !errors.Is(err, ErrFlushed) {
		t.Errorf("%+v, %v", e, err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(make([]byte, smallSize))
	f.Add(append([]byte{1, 0, 0, 0}, make([]byte, execSize)...))
	f.Fuzz(func(t *testing.T, raw []byte) {
		if e, ok := parse(raw); ok && len(e.Args) > argsSize {
			t.Fatal(e)
		}
	})
}
