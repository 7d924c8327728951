package landlock

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
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

// Work that a sandbox is for.
func TestPrograms(t *testing.T) {
	programs := map[string]string{
		"shell":       `echo a | tr a b | grep -q b; test "$(cat <(echo x))" = x; mktemp; mkfifo p; (sleep 0.1 & wait); exec 3>f; echo x >&3; (cat f >/dev/stdout) | grep -q x`,
		"files":       `mkdir -p a/b c; echo 1 >a/b/f; mv a/b c/b; ln c/b/f c/g; ln -s f c/b/s; cp -a c d; truncate -s 0 d/g; chmod 755 d/g; touch -d 2020-01-01 d/g; rm -r c; find . -name f`,
		"descriptors": `ls /proc/self/fd; cat /proc/self/status /proc/meminfo /proc/cpuinfo /dev/null; head -c 9 /dev/urandom; test "$TMPDIR"; test -z "$BERM_X"`,
		"python":      `/usr/bin/python3 -c "import subprocess,threading,tempfile,asyncio,ssl; subprocess.run(['true'],check=True); tempfile.TemporaryFile().write(b'x'); asyncio.run(asyncio.sleep(0))"`,
		"git":         `git init -q r; cd r; git config user.name a; git config user.email a@b; echo 1 >f; git add f; git commit -qm m; git gc -q; git clone -q . ../s; git status`,
		"cc":          `printf '#include <stdio.h>\nint main(){puts("hello");}' >h.c; gcc -o h h.c; ./h; printf 'h2: h.c\n\tgcc -o h2 h.c\n' >Makefile; make -j2 h2; ./h2`,
		"own signals": `sleep 100 & kill -TERM $!; wait $! || test $? = 143; timeout 0.1 sleep 10 || test $? = 124`,
		"tar":         `mkdir d; echo 1 >d/f; tar czf d.tar d; rm -r d; tar xzf d.tar; cat d/f`,
		"own tracing": `sleep 100 & cat /proc/$!/environ >/dev/null; readlink /proc/$!/cwd; kill $!`,
	}
	lowest, profiles := minABI, []string{"default", "strict"}
	if os.Getenv("BERM_TEST_ALL") == "" {
		lowest, profiles = kernel.ABI(), profiles[:1]
	}
	for name, script := range programs {
		for abi := lowest; abi <= kernel.ABI(); abi++ {
			t.Run(fmt.Sprintf("%s, ABI %d", name, abi), func(t *testing.T) {
				w := newWorld(t)
				for _, profile := range profiles {
					w.try(os.RemoveAll(w.work))
					w.try(os.Mkdir(w.work, 0o755))
					w.try(os.Chown(w.work, testUser, testUser))
					a := w.run(call{Argv: []string{"/bin/bash", "-ec", script}, ABI: abi, Profile: profile})
					if a.Kind != "" || a.Exit.Code != 0 || a.Exit.Reason != berm.ReasonExit {
						t.Errorf("%s: %+v", profile, a)
					}
				}
			})
		}
	}
}

// The end is told exactly.
func TestExit(t *testing.T) {
	w := newWorld(t)
	for script, want := range map[string]berm.Exit{
		"exit 0":           {Reason: berm.ReasonExit},
		"exit 137":         {Reason: berm.ReasonExit, Code: 137},
		"kill -KILL $$":    {Reason: berm.ReasonExit, Code: -1, Signal: "SIGKILL"},
		"kill -TERM $$":    {Reason: berm.ReasonExit, Code: -1, Signal: "SIGTERM"},
		"(sleep 1000) & :": {Reason: berm.ReasonExit},
	} {
		a := w.run(call{Argv: []string{"/bin/sh", "-c", script}})
		a.Exit.At = time.Time{}
		if a.Kind != "" || a.Exit != want {
			t.Errorf("%s: %+v", script, a)
		}
	}
}

// What cannot be started or enforced is refused with its kind.
func TestRefused(t *testing.T) {
	w := newWorld(t)
	w.try(os.WriteFile(w.work+"/text", []byte("x"), 0o644))
	w.try(os.WriteFile(w.home+"/program", []byte("#!/bin/sh\n"), 0o755))
	for name, c := range map[string]struct {
		call
		kind berm.Kind
	}{
		"no command":         {call{}, berm.Invalid},
		"no program":         {call{Argv: []string{"berm-none"}}, berm.NotFound},
		"no file":            {call{Argv: []string{"./none"}}, berm.NotFound},
		"not executable":     {call{Argv: []string{"./text"}}, berm.Denied},
		"program outside":    {call{Argv: []string{w.home + "/program"}}, berm.Denied},
		"no toolchain":       {call{Argv: []string{"true"}, Read: []string{"/etc"}}, berm.Denied},
		"no such path":       {call{Argv: []string{"true"}, Write: []string{w.work + "/none"}}, berm.NotFound},
		"relative path":      {call{Argv: []string{"true"}, Write: []string{"x"}}, berm.Invalid},
		"unknown profile":    {call{Argv: []string{"true"}, Profile: "none"}, berm.Invalid},
		"unreadable path":    {call{Argv: []string{"true"}, Read: []string{"/root/x"}}, berm.Denied},
		"no directory":       {call{Argv: []string{"true"}, Dir: w.work + "/none"}, berm.NotFound},
		"no such directory":  {call{Argv: []string{"true"}, Dir: w.work + "/text"}, berm.Invalid},
		"NUL":                {call{Argv: []string{"true", "a\x00b"}}, berm.Invalid},
		"directory as input": {call{Argv: []string{"true"}}, berm.Invalid},
	} {
		cmd, r := w.caller(c.call)
		if name == "directory as input" {
			dir, err := os.Open(w.home)
			w.try(err)
			defer dir.Close()
			cmd.Stdin = dir
		}
		if a := w.finish(cmd, r); a.Kind != c.kind.String() {
			t.Errorf("%s: %+v", name, a)
		}
	}
	for _, limits := range []berm.Limits{{Memory: 1}, {CPU: 1}, {PIDs: 1}, {Disk: 1}, {ReadBytes: 1}, {WriteBytes: 1}} {
		if _, err := Run(t.Context(), Order{Argv: []string{"true"}, Dir: "/", Limits: limits}); berm.KindOf(err) != berm.Unsupported || berm.HintOf(err) == "" {
			t.Errorf("%+v: %v", limits, err)
		}
	}
}

// A socket that can be sent elsewhere is no standard stream; a connected pair is.
func TestSocketStreams(t *testing.T) {
	w := newWorld(t)
	for kind, refused := range map[int]bool{unix.SOCK_STREAM: false, unix.SOCK_DGRAM: true} {
		fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
		w.try(err)
		ours, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
		cmd, r := w.caller(call{Argv: []string{"cat"}})
		cmd.Stdin = theirs
		_, _ = ours.WriteString("hello")
		_ = unix.Shutdown(fds[0], unix.SHUT_WR)
		a := w.finish(cmd, r)
		if refused && a.Kind != berm.Invalid.String() || !refused && a.out != "hello" {
			t.Errorf("kind %d: %+v", kind, a)
		}
		ours.Close()
		theirs.Close()
	}
	unconnected, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	w.try(err)
	cmd, r := w.caller(call{Argv: []string{"cat"}})
	cmd.Stdin = os.NewFile(uintptr(unconnected), "socket")
	if a := w.finish(cmd, r); a.Kind != berm.Invalid.String() {
		t.Errorf("a TCP socket: %+v", a)
	}
}

// Descriptors that the caller inherited without knowing do not get inside.
func TestOtherDescriptors(t *testing.T) {
	w := newWorld(t)
	cmd, r := w.caller(call{Argv: []string{"/bin/sh", "-c", "ls /proc/self/fd"}})
	dir, err := os.Open(w.home)
	w.try(err)
	defer dir.Close()
	cmd.ExtraFiles = append(cmd.ExtraFiles, dir, dir)
	a := w.finish(cmd, r)
	if got := strings.Fields(a.out); strings.Join(got, " ") != "0 1 2 3" { // 3 is ls's own
		t.Errorf("descriptors %v: %+v", got, a)
	}
}

// A file as standard output can be opened again for what it is open for, and not for more.
func TestStreamOpenedAgain(t *testing.T) {
	w := newWorld(t)
	f, err := os.OpenFile(w.home+"/log", os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	w.try(err)
	defer f.Close()
	w.try(f.Chown(testUser, testUser))
	cmd, r := w.caller(call{Argv: []string{"/bin/sh", "-c", "echo one >>/dev/stdout; if cat /proc/self/fd/1; then exit 1; fi"}})
	w.try(cmd.Err)
	cmd.Stdout = f
	w.try(cmd.Run())
	cmd.ExtraFiles[0].Close()
	var a answer
	w.try(json.NewDecoder(r).Decode(&a))
	if text, _ := os.ReadFile(w.home + "/log"); a.Exit.Code != 0 || string(text) != "one\n" {
		t.Errorf("%q, %+v", text, a)
	}
}

// daemons detach in the ways there are, and write that they live.
const daemons = `
trap '' TERM HUP INT
setsid sleep 7654321.%[1]s &
(setsid sh -c '(sleep 7654322.%[1]s &) &' &)
python3 - <<'EOF' &
import os, time, ctypes
os.setsid()
if os.fork(): os._exit(0)
ctypes.CDLL(None).prctl(36, 1)  # a reaper of its own
for i in range(3):
    if not os.fork(): os.setpgid(0, 0); os.execvp('sleep', ['sleep', '7654323.%[1]s'])
time.sleep(1000)
EOF
while [ $(grep -l 7654323.%[1]s /proc/[0-9]*/cmdline 2>/dev/null | wc -l) -lt 4 ]; do sleep 0.02; done
echo ready
%[2]s
`

// However the command ends, nothing that it started goes on.
func TestNothingIsLeft(t *testing.T) {
	for name, c := range map[string]struct {
		call
		last   string
		reason berm.Reason
	}{
		"exit":    {call{}, "exit 3", berm.ReasonExit},
		"timeout": {call{Timeout: 2 * time.Second}, "sleep 1000", berm.ReasonTimeout},
		"cancel":  {call{Cancel: 2 * time.Second}, "sleep 1000", berm.ReasonKilled},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			mark := strconv.Itoa(os.Getpid()) + strconv.Itoa(len(name))
			c.Argv = []string{"/bin/bash", "-c", fmt.Sprintf(daemons, mark, c.last)}
			a := w.run(c.call)
			if a.Exit.Reason != c.reason || !strings.Contains(a.out, "ready") {
				t.Errorf("%+v", a)
			}
			if left := alive(t, "."+mark); len(left) > 0 {
				t.Errorf("processes %v are left", left)
			}
			w.unharmed()
		})
	}
}

// Processes that fork without end are ended as well.
func TestForkStorm(t *testing.T) {
	w := newWorld(t)
	mark := "storm-" + strconv.Itoa(os.Getpid())
	script := `
import os, time
for i in range(8):
    if not os.fork():
        while True:  # a chain: each is another process, and its parent has gone
            try:
                if os.fork(): os._exit(0)
            except OSError: time.sleep(0.001)
time.sleep(1000)`
	a := w.run(call{Argv: []string{"python3", "-c", script, mark}, Timeout: time.Second})
	if a.Exit.Reason != berm.ReasonTimeout {
		t.Errorf("%+v", a)
	}
	if left := alive(t, mark); len(left) > 0 {
		t.Errorf("processes %v are left", left)
	}
}

// When the caller is killed, so is all that it started; when the keeper is, the command.
func TestDeath(t *testing.T) {
	w := newWorld(t)
	for _, who := range []string{"caller", "keeper"} {
		mark := who + strconv.Itoa(os.Getpid())
		script := fmt.Sprintf("setsid sleep 7654325.%[1]d & exec sleep 7654326.%[1]d", os.Getpid())
		cmd, r := w.caller(call{Argv: []string{"/bin/bash", "-c", script, mark}})
		w.try(cmd.Start())
		number := fmt.Sprintf(".%d", os.Getpid())
		command := "7654326" + number
		eventually(t, "the command runs", func() bool { return len(asleep(t, command)) == 1 && len(asleep(t, "7654325"+number)) == 1 })
		victim := cmd.Process.Pid
		if who == "keeper" {
			victim = parentOf(asleep(t, command)[0])
		}
		w.try(unix.Kill(victim, unix.SIGKILL))
		eventually(t, "the command ends with its "+who, func() bool { return len(asleep(t, command)) == 0 })
		if who == "caller" {
			eventually(t, "what it started ends", func() bool { return len(asleep(t, "7654325"+number)) == 0 })
		} else {
			cmd.ExtraFiles[0].Close()
			var a answer
			w.try(json.NewDecoder(r).Decode(&a))
			if a.Exit.Reason != berm.ReasonCrash {
				t.Errorf("%+v", a)
			}
			for _, pid := range asleep(t, "7654325"+number) { // as Weaker says
				w.try(unix.Kill(pid, unix.SIGKILL))
			}
		}
		cmd.Wait()
	}
}

// asleep lists the processes that are "sleep TIME".
func asleep(t *testing.T, time string) []int {
	t.Helper()
	var pids []int
	for _, pid := range alive(t, time) {
		if line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); string(line) == "sleep\x00"+time+"\x00" {
			pids = append(pids, pid)
		}
	}
	return pids
}

// Keys of the terminal are for the command: the keeper, in the same foreground group,
// lives to tell how it ended.
func TestTerminalKeys(t *testing.T) {
	w := newWorld(t)
	for script, want := range map[string]berm.Exit{
		"echo ready; exec sleep 1000":                                                 {Reason: berm.ReasonExit, Code: -1, Signal: "SIGINT"},
		"trap 'exit 5' INT; echo ready; while :; do sleep 0.02; done":                 {Reason: berm.ReasonExit, Code: 5},
		"trap '' INT; test \"$(stty size)\" = '24 80' && tty >/dev/tty && echo ready": {Reason: berm.ReasonExit},
	} {
		master, slave, err := pty.Open()
		w.try(err)
		w.try(slave.Chown(testUser, testUser))
		w.try(pty.Setsize(master, &pty.Winsize{Rows: 24, Cols: 80}))
		cmd, r := w.caller(call{Argv: []string{"/bin/bash", "-c", script}})
		cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
		cmd.SysProcAttr.Setctty = true
		w.try(cmd.Start())
		var out []byte
		for part := make([]byte, 100); !strings.Contains(string(out), "ready"); {
			n, err := master.Read(part)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, part[:n]...)
		}
		_, _ = master.Write([]byte{3}) // Ctrl-C
		w.try(cmd.Wait())
		cmd.ExtraFiles[0].Close()
		var a answer
		w.try(json.NewDecoder(r).Decode(&a))
		a.Exit.At = time.Time{}
		if a.Exit != want {
			t.Errorf("%s: %+v", script, a)
		}
		master.Close()
		slave.Close()
	}
}

// Root's commands have no capabilities, and what root owns outside is closed all the same.
func TestRoot(t *testing.T) {
	w := newWorld(t)
	w.try(os.WriteFile(w.work+"/program", []byte("#!/bin/sh\ncat /proc/self/status\n"), 0o6755))
	r, out, err := os.Pipe()
	w.try(err)
	defer r.Close()
	exit, err := Run(t.Context(), Order{
		Argv: []string{"/bin/sh", "-c", "./program; if cat " + w.home + "/.ssh/id || chown 1 . || kill -0 " + strconv.Itoa(w.victim.Process.Pid) + "; then exit 1; fi"},
		Dir:  w.work, Env: []string{"PATH=/usr/bin:/bin"}, Read: []string{"/usr", "/bin", "/lib", "/etc"}, Write: []string{w.work}, Files: [3]*os.File{nil, out, nil},
	})
	out.Close()
	text, _ := io.ReadAll(r)
	if err != nil || exit.Code != 0 {
		t.Errorf("%+v %v: %s", exit, err, text)
	}
	for _, field := range []string{"CapInh", "CapPrm", "CapEff", "CapAmb"} {
		if !strings.Contains(string(text), field+":\t0000000000000000\n") {
			t.Errorf("%s: %s", field, text)
		}
	}
	if !strings.Contains(string(text), "NoNewPrivs:\t1\n") {
		t.Errorf("%s", text)
	}
}

// A command that asks its parent to trace it has not ended when it stops.
func TestTraceMe(t *testing.T) {
	w := newWorld(t)
	script := "import ctypes,os,time; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), 10); time.sleep(1000)"
	if a := w.run(call{Argv: []string{"python3", "-c", script}, Timeout: time.Second}); a.Exit.Reason != berm.ReasonTimeout {
		t.Errorf("%+v", a)
	}
}

// Signals reach the command and it alone.
func TestSignals(t *testing.T) {
	if Available() != nil {
		t.Skip(Available())
	}
	signals := make(chan os.Signal, 1)
	r, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	go func() {
		_, _ = r.Read(make([]byte, 1))
		signals <- syscall.SIGUSR1
	}()
	exit, err := Run(t.Context(), Order{
		Argv: []string{"/bin/sh", "-c", "trap 'exit 7' USR1; echo; while :; do sleep 0.02; done"}, Dir: "/", Env: []string{"PATH=/usr/bin:/bin"},
		Read: []string{"/usr", "/bin", "/lib", "/etc"}, Files: [3]*os.File{nil, out, os.Stderr}, Signals: signals,
	})
	if err != nil || exit.Code != 7 || exit.Reason != berm.ReasonExit {
		t.Errorf("%+v %v", exit, err)
	}
}

func TestWeaker(t *testing.T) {
	for abi := minABI; abi < 9; abi++ {
		text := strings.Join(Weaker(abi), "\n")
		if strings.Contains(text, "send signals") != (abi < 6) {
			t.Errorf("ABI %d: %s", abi, text)
		}
	}
}

func TestArgs(t *testing.T) {
	o := Order{Argv: []string{"a", "", "\xff"}, Read: []string{"/r\n"}, Write: []string{"/w"}, TempDir: "/t", Timeout: time.Minute, Profile: "strict", abi: 1}
	got, err := parse(o.args())
	if want := "{[a  \xff]  [] [<nil> <nil> <nil>] [/r\n] [/w /t]"; err != nil || !strings.HasPrefix(fmt.Sprint(got), want) || got.Timeout != time.Minute || got.Profile != "strict" || got.abi != min(1, kernel.ABI()) {
		t.Errorf("%v %v", got, err)
	}
	for _, args := range [][]string{nil, {"", "1", "", "0s", "1", "1", "/r", "/w"}, {"", "1", "", "0s", "-1", "1", "/w", "c"}, {"", "x", "", "0s", "0", "0", "c"}} {
		if _, err := parse(args); err == nil {
			t.Errorf("%q was taken", args)
		}
	}
}

func BenchmarkRun(b *testing.B) {
	if Available() != nil {
		b.Skip(Available())
	}
	for b.Loop() {
		exit, err := Run(b.Context(), Order{Argv: []string{"/bin/true"}, Dir: "/", Read: []string{"/usr", "/bin", "/lib", "/lib64"}})
		if err != nil || exit.Code != 0 {
			b.Fatal(exit, err)
		}
	}
}

func BenchmarkBare(b *testing.B) {
	for b.Loop() {
		if err := exec.Command("/bin/true").Run(); err != nil {
			b.Fatal(err)
		}
	}
}
