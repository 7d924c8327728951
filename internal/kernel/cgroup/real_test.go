package cgroup

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
)

// config is where tests make groups: root below a parent of the test's own, others below
// their own group.
func config() Config {
	if os.Geteuid() != 0 {
		return Config{}
	}
	return Config{Parent: fmt.Sprintf("/berm-test-%d", os.Getpid())}
}

// newReal returns a manager of the host's real groups.
func newReal(t testing.TB) *Manager {
	t.Helper()
	m, err := New(config())
	if err != nil {
		t.Fatal(err)
	}
	if len(m.hierarchies) == 0 {
		t.Skipf("no control groups: %v", m.Missing())
	}
	before, _ := os.ReadFile("/proc/self/cgroup")
	t.Cleanup(func() {
		if ids, err := m.List(); err != nil || len(ids) > 0 {
			t.Errorf("groups left: %v, %v", ids, err)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		for _, h := range m.hierarchies {
			if _, err := os.Stat(h.parent); err == nil {
				t.Errorf("%s is left", h.parent)
			}
		}
		if after, _ := os.ReadFile("/proc/self/cgroup"); string(after) != string(before) {
			t.Errorf("the test is in\n%swas in\n%s", after, before)
		}
	})
	return m
}

// need skips a test that the host lacks a controller for, with the reason.
func need(t testing.TB, m *Manager, controllers ...string) {
	t.Helper()
	for _, c := range controllers {
		if !slices.Contains(m.Controllers(), c) {
			t.Skipf("no cgroup controller %s: %s", c, m.Missing()[c])
		}
	}
}

func create(t testing.TB, m *Manager, id string, l berm.Limits) *Group {
	t.Helper()
	g, err := m.Create(id, l)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := g.Kill(ctx); err != nil {
			t.Error(err)
		}
		if err := g.Remove(ctx); err != nil {
			t.Error(err)
		}
	})
	return g
}

// start runs a shell script in the group. The script begins only when it is in.
func start(t testing.TB, g *Group, script string) (*exec.Cmd, *strings.Builder) {
	t.Helper()
	out := &strings.Builder{}
	cmd := exec.Command("sh", "-c", "read go; "+script)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	gate, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill() })
	if err := g.Add(cmd.Process.Pid); err != nil {
		t.Fatal(err)
	}
	gate.Write([]byte("\n"))
	return cmd, out
}

func TestMemoryLimit(t *testing.T) {
	m := newReal(t)
	need(t, m, "memory")
	g := create(t, m, "mem", berm.Limits{Memory: 32 << 20})
	// tail keeps a line without an end in memory.
	cmd, out := start(t, g, "head -c 200M /dev/zero | tail -n 1 | wc -c")
	_ = cmd.Wait() // the kernel may choose the shell as well
	u, err := g.Usage()
	if err != nil {
		t.Fatal(err)
	}
	if u.OOMKills == 0 {
		t.Errorf("200 MB fit into a limit of 32 MiB: %s", out)
	}
	if u.MemoryTotal != 32<<20 {
		t.Errorf("MemoryTotal = %d", u.MemoryTotal)
	}
}

func TestPIDsLimit(t *testing.T) {
	m := newReal(t)
	need(t, m, "pids")
	g := create(t, m, "pids", berm.Limits{PIDs: 5})
	cmd, out := start(t, g, "for i in 1 2 3 4 5 6 7 8; do sleep 0.2 & done; wait")
	if err := cmd.Wait(); err == nil || !strings.Contains(out.String(), "fork") {
		t.Errorf("8 processes fit into a limit of 5: %v %s", err, out)
	}
}

func TestCPULimit(t *testing.T) {
	m := newReal(t)
	need(t, m, "cpu")
	g := create(t, m, "cpu", berm.Limits{CPU: 0.2})
	begin := time.Now()
	start(t, g, "while :; do :; done")
	time.Sleep(600 * time.Millisecond)
	u, err := g.Usage()
	if err != nil {
		t.Fatal(err)
	}
	if most := time.Since(begin)/4 + 50*time.Millisecond; u.CPUTime == 0 || u.CPUTime > most {
		t.Errorf("%v of CPU in %v with 0.2 cores", u.CPUTime, time.Since(begin))
	}
	if u.CPUs != 0.2 {
		t.Errorf("CPUs = %v", u.CPUs)
	}
}

func TestDiskLimit(t *testing.T) {
	m := newReal(t)
	need(t, m, "io")
	file := filepath.Join(t.TempDir(), "file")
	disk, err := DiskOf(filepath.Dir(file))
	if err != nil {
		t.Skipf("no disk to throttle: %v", err)
	}
	g, err := m.Create("disk", berm.Limits{ReadBytes: 2 << 20}, disk)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Remove(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if err := os.WriteFile(file, make([]byte, 2<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	cmd, out := start(t, g, "dd if="+file+" of=/dev/null bs=128k iflag=direct")
	if err := cmd.Wait(); err != nil {
		if strings.Contains(out.String(), "Invalid argument") {
			t.Skipf("the file system has no direct reads: %s", out)
		}
		t.Fatal(err, out)
	}
	if took := time.Since(begin); took < 700*time.Millisecond {
		t.Errorf("2 MiB took %v with 2 MiB a second", took)
	}
}

func TestFreeze(t *testing.T) {
	m := newReal(t)
	need(t, m, "freezer")
	ctx := context.Background()
	file := filepath.Join(t.TempDir(), "beats")
	g := create(t, m, "freeze", berm.Limits{})
	start(t, g, "while :; do echo x >>"+file+"; sleep 0.01; done")
	beats := func() int { b, _ := os.ReadFile(file); return len(b) }
	wait := func(from int) bool {
		for range 200 {
			if beats() > from {
				return true
			}
			time.Sleep(10 * time.Millisecond)
		}
		return false
	}
	if !wait(0) {
		t.Fatal("the process does not run")
	}
	for range 3 {
		if err := g.Freeze(ctx); err != nil {
			t.Fatal(err)
		}
		if frozen, err := g.Frozen(); !frozen || err != nil {
			t.Errorf("Frozen = %v, %v", frozen, err)
		}
		before := beats()
		time.Sleep(60 * time.Millisecond)
		if after := beats(); after != before {
			t.Errorf("%d beats while frozen", after-before)
		}
		if err := g.Thaw(ctx); err != nil {
			t.Fatal(err)
		}
		if frozen, err := g.Frozen(); frozen || err != nil {
			t.Errorf("Frozen = %v, %v", frozen, err)
		}
		if !wait(before) {
			t.Error("the process does not go on")
		}
	}
}

// Every way to kill ends a fork storm, stopped and frozen processes, without v2 by
// v1's freezer too.
func TestKill(t *testing.T) {
	m := newReal(t)
	for name, script := range map[string]string{
		"storm":   `trap "" TERM; f() { while :; do (sleep 0.01; :) & done; }; f & f; wait`,
		"stopped": `sleep 99 & kill -STOP $!; kill -STOP $$`,
		"daemon":  `setsid setsid sleep 99 & exit 0`,
	} {
		for _, way := range []string{"best", "v1", "frozen"} {
			t.Run(name+"/"+way, func(t *testing.T) {
				m := m
				if way == "v1" {
					m = newReal(t)
					m.hierarchies = slices.DeleteFunc(m.hierarchies, func(h *hierarchy) bool { return h.v2 })
					if m.with("freezer") == nil {
						t.Skip("no cgroup v1 hierarchy with the freezer")
					}
				}
				limits := berm.Limits{}
				if slices.Contains(m.Controllers(), "pids") {
					limits.PIDs = 64
				}
				g := create(t, m, "kill", limits)
				cmd, _ := start(t, g, script)
				go cmd.Wait()
				time.Sleep(50 * time.Millisecond)
				ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
				defer cancel()
				if way == "frozen" {
					need(t, m, "freezer")
					if err := g.Freeze(ctx); err != nil {
						t.Fatal(err)
					}
				}
				begin := time.Now()
				if err := g.Kill(ctx); err != nil {
					t.Fatal(err)
				}
				if took := time.Since(begin); took > 10*time.Second {
					t.Errorf("took %v", took)
				}
				if pids, err := g.Processes(); len(pids) > 0 || err != nil {
					t.Errorf("left: %v, %v", pids, err)
				}
			})
		}
	}
}

func TestReopen(t *testing.T) {
	m := newReal(t)
	g := create(t, m, "again", berm.Limits{})
	if _, err := m.Create("again", berm.Limits{}); berm.KindOf(err) != berm.AlreadyExists {
		t.Errorf("Create twice: %v", err)
	}
	other, err := New(config())
	if err != nil {
		t.Fatal(err)
	}
	if ids, err := other.List(); !slices.Equal(ids, []string{"again"}) || err != nil {
		t.Errorf("List = %v, %v", ids, err)
	}
	o, err := other.Open("again")
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(o.Dirs(), g.Dirs()) {
		t.Errorf("%v, made as %v", o.Dirs(), g.Dirs())
	}
	if _, err := other.Open("none"); berm.KindOf(err) != berm.NotFound {
		t.Errorf("Open of none: %v", err)
	}
	if err := o.Remove(context.Background()); err != nil {
		t.Error(err)
	}
	if _, err := other.Open("again"); berm.KindOf(err) != berm.NotFound {
		t.Errorf("Open after Remove: %v", err)
	}
	if _, err := o.Usage(); berm.KindOf(err) != berm.NotFound {
		t.Errorf("Usage after Remove: %v", err)
	}
}

// startIn starts a process born into the group.
func startIn(t testing.TB, g *Group, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	if err := g.Start(func(v2 *os.File) error {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
		if v2 != nil {
			cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(v2.Fd())
		}
		return cmd.Start()
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill() })
	return cmd
}

func TestStart(t *testing.T) {
	m := newReal(t)
	limits := berm.Limits{}
	if slices.Contains(m.Controllers(), "cpu") {
		limits.CPU = 1
	}
	g := create(t, m, "born", limits)
	// Locked: the thread that started the process must come back to where it was.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before, err := os.ReadFile("/proc/thread-self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	cmd := startIn(t, g, "sleep", "99")
	go cmd.Wait()
	if after, _ := os.ReadFile("/proc/thread-self/cgroup"); string(after) != string(before) {
		t.Errorf("the starting thread is in\n%swas in\n%s", after, before)
	}
	for _, dir := range g.Dirs() {
		if procs, err := read(dir, "cgroup.procs"); procs != fmt.Sprint(cmd.Process.Pid) || err != nil {
			t.Errorf("%s holds %q, %v, want %d", dir, procs, err, cmd.Process.Pid)
		}
	}
	failure := errors.New("no")
	if err := g.Start(func(*os.File) error { return failure }); !errors.Is(err, failure) {
		t.Errorf("a start that fails: %v", err)
	}
	if after, _ := os.ReadFile("/proc/thread-self/cgroup"); string(after) != string(before) {
		t.Errorf("the starting thread is in\n%swas in\n%s", after, before)
	}
}

// BenchmarkLife measures, on a machine where no process has changed its group lately,
// making a group with limits, a process born or moved into it, and taking it away.
func BenchmarkLife(b *testing.B) {
	m := newReal(b)
	limits := berm.Limits{}
	for _, c := range m.Controllers() {
		switch c {
		case "memory":
			limits.Memory = 512 << 20
		case "cpu":
			limits.CPU = 1
		case "pids":
			limits.PIDs = 512
		}
	}
	for _, way := range []string{"born", "moved"} {
		b.Run(way, func(b *testing.B) {
			var making, entering, removing time.Duration
			for b.Loop() {
				time.Sleep(30 * time.Millisecond)
				begin := time.Now()
				g, err := m.Create("bench", limits)
				if err != nil {
					b.Fatal(err)
				}
				making += time.Since(begin)
				var cmd *exec.Cmd
				if way == "born" {
					begin = time.Now()
					cmd = startIn(b, g, "sleep", "99")
					entering += time.Since(begin)
				} else {
					cmd = exec.Command("sleep", "99")
					begin = time.Now()
					if err := cmd.Start(); err != nil {
						b.Fatal(err)
					}
					if err := g.Add(cmd.Process.Pid); err != nil {
						b.Fatal(err)
					}
					entering += time.Since(begin)
				}
				cmd.Process.Kill()
				cmd.Wait()
				begin = time.Now()
				if err := g.Remove(context.Background()); err != nil {
					b.Fatal(err)
				}
				removing += time.Since(begin)
			}
			b.ReportMetric(float64(making.Microseconds())/float64(b.N), "µs/make")
			b.ReportMetric(float64(entering.Microseconds())/float64(b.N), "µs/start")
			b.ReportMetric(float64(removing.Microseconds())/float64(b.N), "µs/remove")
		})
	}
}
