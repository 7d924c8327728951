package process

import (
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/process/ledger"
)

// kept keeps records.
type kept struct {
	mu  sync.Mutex
	all []audit.Record
}

func (k *kept) Emit(r audit.Record) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.all = append(k.all, r)
	return nil
}

// executions are the sandboxes of which executions with one argument are recorded, by that argument.
func (k *kept) executions() map[string]berm.SandboxID {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := map[string]berm.SandboxID{}
	for _, r := range k.all {
		if p, ok := r.Data.(audit.Process); ok && len(p.Argv) == 2 && r.Type == audit.ProcExec {
			all[p.Argv[1]] = r.Sandbox
		}
	}
	return all
}

// run runs a script in a pid namespace whose processes are recorded.
func run(t testing.TB, c *Collector, id berm.SandboxID, script string) {
	t.Helper()
	follow(t, c, id, script)
	c.Forget(id)
}

// follow is run of a sandbox that is followed on. It returns the number of its pid namespace.
func follow(t testing.TB, c *Collector, id berm.SandboxID, script string) uint32 {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", "read x; "+script)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d/ns/pid", cmd.Process.Pid), &st); err != nil {
		t.Fatal(err)
	}
	if err := c.Follow(id, &berm.First{PID: cmd.Process.Pid, Namespace: uint32(st.Ino)}, false); err != nil {
		t.Fatal(err)
	}
	if _, err := in.Write([]byte("\n")); err != nil {
		t.Fatal(err)
	}
	in.Close()
	_ = cmd.Wait()
	return uint32(st.Ino)
}

func collect(t testing.TB, emitter audit.Emitter, calls ...string) *Collector {
	t.Helper()
	c, err := New(emitter, slog.New(slog.DiscardHandler), calls...)
	if berm.KindOf(err) == berm.Unsupported && os.Geteuid() != 0 {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// Until a sandbox is forgotten no other has the number of its pid namespace, by which events are told
// apart: else what one does is recorded of the other.
func TestNumberIsNotGivenToAnother(t *testing.T) {
	k := &kept{}
	c := collect(t, k)
	seen := map[uint32]string{}
	var ids []berm.SandboxID
	for i := range 8 {
		id := berm.SandboxID(fmt.Sprint("i", i))
		number := follow(t, c, id, "/bin/true "+string(id))
		if other, is := seen[number]; is {
			t.Errorf("%s has the number of %s", id, other)
		}
		seen[number] = string(id)
		time.Sleep(30 * time.Millisecond) // the kernel takes namespaces away a little later
		ids = append(ids, id)
	}
	for _, id := range ids {
		c.Forget(id)
	}
	if len(c.boxes) > 0 {
		t.Errorf("%d are still followed", len(c.boxes))
	}
	told := k.executions()
	for _, id := range ids {
		if told[string(id)] != id {
			t.Errorf("what %s did is recorded of %q", id, told[string(id)])
		}
	}
}

// What nobody has read yet when a sandbox is forgotten is still its own, whoever comes after.
func TestForgottenBeforeItIsRead(t *testing.T) {
	k := &kept{}
	c := collect(t, k)
	c.queueing.Lock() // the reader stops at the first event
	first := follow(t, c, "i1", "/bin/true i1")
	c.Forget("i1")
	time.Sleep(30 * time.Millisecond)
	if second := follow(t, c, "i2", "/bin/true i2"); second == first {
		t.Error("the next one has its number")
	}
	c.queueing.Unlock()
	c.Forget("i2")
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		c.mu.Lock()
		left := len(c.boxes)
		c.mu.Unlock()
		if left == 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%d are still followed", left)
		}
	}
	told := k.executions()
	if told["i1"] != "i1" || told["i2"] != "i2" {
		t.Errorf("%v", told)
	}
}

// A process that has the number of a sandbox's first one is not followed in its place.
func TestFirstProcessIsAnother(t *testing.T) {
	c := collect(t, audit.Discard)
	before := openFiles(t)
	if err := c.Follow("i1", &berm.First{PID: os.Getpid(), Namespace: 1}, false); berm.KindOf(err) != berm.NotFound {
		t.Errorf("%v", err)
	}
	if after := openFiles(t); after != before {
		t.Errorf("%d files are open, %d before", after, before)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// What is remembered of a program is not told of another one in its place.
func TestProgramIsReplaced(t *testing.T) {
	k := &kept{}
	c := collect(t, k)
	dir := t.TempDir()
	run(t, c, "i1", "cp /bin/true "+dir+"/p; "+dir+"/p one; "+dir+"/p two; sleep 0.2; cat /bin/false >"+dir+"/p; "+dir+"/p three")
	sums := map[string]string{}
	for _, r := range k.all {
		if p, ok := r.Data.(audit.Process); ok && len(p.Argv) == 2 && r.Type == audit.ProcExec {
			sums[p.Argv[1]] = p.SHA256
		}
	}
	if sums["one"] == "" || sums["one"] != sums["two"] || sums["three"] == "" || sums["three"] == sums["one"] {
		t.Errorf("%v", sums)
	}
}

// System calls that were asked for are recorded with what came of them, and a flood is counted.
func TestCalls(t *testing.T) {
	if _, err := New(audit.Discard, slog.New(slog.DiscardHandler), "no_such_call"); berm.KindOf(err) != berm.Invalid {
		t.Errorf("a call that is not there: %v", err)
	}
	k := &kept{}
	c := collect(t, k, "chroot", "sethostname", "getppid")
	run(t, c, "i1", `chroot /nowhere true; chroot / true; perl -e 'syscall(`+fmt.Sprint(unix.SYS_GETPPID)+`) for 1..8000'`)
	var got []string
	getppid := 0
	for _, r := range k.all {
		switch p := r.Data.(type) {
		case audit.Process:
			if r.Type == audit.ProcCall && p.Call != "getppid" {
				got = append(got, fmt.Sprintf("%d %s %s %s", p.PID, p.Call, p.Error, r.Outcome))
			} else if r.Type == audit.ProcCall {
				getppid++
			}
		case audit.ProcessSum:
			if p.Call == "getppid" && p.Type == audit.ProcCall {
				getppid += p.Count
			}
		case map[string]any:
			if n, ok := p["count"].(uint64); ok && r.Type == audit.Gap {
				getppid += int(n)
			}
		}
	}
	if fmt.Sprint(got) != "[2 chroot ENOENT failed 3 chroot  ok]" {
		t.Errorf("%q", got)
	}
	if getppid < 8000 {
		t.Errorf("of 8000 calls %d are told", getppid)
	}
}

// How long ago something was is counted from its record, which may wait for the hash of a program, and
// then for others: else what happened first is told last.
func TestTimesAreCountedFromTheRecord(t *testing.T) {
	const wait = 20 * time.Millisecond
	k := &kept{}
	c := &Collector{audit: k, log: slog.New(slog.DiscardHandler)}
	book := ledger.New(c.later("i1"))
	book.Take(audit.ProcFork, audit.Process{PID: 2}, nil)
	book.Take(audit.ProcExec, audit.Process{PID: 2}, func(*audit.Process) { time.Sleep(wait) })
	time.Sleep(wait)
	c.emit()
	if len(k.all) != 2 {
		t.Fatalf("%+v", k.all)
	}
	for _, r := range k.all {
		if ago := time.Duration(r.Data.(audit.Process).Ago) * time.Microsecond; ago < 2*wait {
			t.Errorf("%s is told as %s ago", r.Type, ago)
		}
	}
}

func BenchmarkProcesses(b *testing.B) {
	c := collect(b, audit.Discard)
	run(b, c, "i1", fmt.Sprintf("i=0; while [ $i -lt %d ]; do /bin/true; i=$((i+1)); done", b.N))
}
