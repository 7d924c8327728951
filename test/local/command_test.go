package local

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/test/harness"
)

func TestExitCodes(t *testing.T) {
	p := user(t)
	codes := []int{0, 1, 2, 3, 124, 125, 126, 127, 128, 130, 137, 200, 254, 255}
	if all {
		codes = nil
		for code := range 256 {
			codes = append(codes, code)
		}
	}
	for _, code := range codes {
		p.sh("exit " + strconv.Itoa(code)).exits(code)
	}
	root(t).sh("exit 41").exits(41)
}

// Berm dies by the signal by which the command died.
func TestDeathBySignal(t *testing.T) {
	p := user(t)
	signals := []syscall.Signal{unix.SIGHUP, unix.SIGINT, unix.SIGABRT, unix.SIGKILL, unix.SIGUSR1, unix.SIGSEGV, unix.SIGPIPE, unix.SIGTERM, unix.SIGSYS, 34, 64}
	if all {
		signals = nil
		for s := syscall.Signal(1); s <= 64; s++ {
			switch s {
			case unix.SIGCHLD, unix.SIGCONT, unix.SIGURG, unix.SIGWINCH, // ignored by default
				unix.SIGSTOP, unix.SIGTSTP, unix.SIGTTIN, unix.SIGTTOU, // that stop
				32, 33: // the C library's own
			default:
				signals = append(signals, s)
			}
		}
	}
	for _, s := range signals {
		r := p.sh(fmt.Sprintf("kill -%d $$; sleep 9", s))
		if r.signal != s || r.stdout+r.stderr != "" {
			t.Errorf("signal %d: %v", s, r)
		}
	}
}

// What cannot be executed is told as shells tell it.
func TestCannotExecute(t *testing.T) {
	each(t, func(p *person) {
		p.write("project/plain", "echo script\n")
		p.write("project/script", "echo script $1\n")
		p.must(os.Chmod(p.path("project/script"), 0o755))
		p.write("project/nointerpreter", "#!/no/such\n")
		p.must(os.Chmod(p.path("project/nointerpreter"), 0o755))
		p.berm("run", "--", "./script", "x").prints("script x")
		p.berm("run", "--", "nosuchcommand").exits(127).says("not found")
		p.berm("run", "--", "./nosuchcommand").exits(127).says("no such file")
		p.berm("run", "--", "/nosuchcommand").exits(127)
		p.berm("run", "--", "./nointerpreter").exits(127).says("interpreter")
		p.berm("run", "--", "./plain").exits(126).says("permission denied")
		p.berm("run", "--", "./").exits(126).says("is a directory")
		p.berm("run", "--", "./file/x").exits(127)
		p.berm("run", "--", "").exits(125)
	})
}

// Wrong command lines are told apart from what a command answers.
func TestUsage(t *testing.T) {
	p := user(t)
	for _, args := range [][]string{{"run"}, {"run", "--nosuch", "true"}, {"run", "--memory", "x", "true"}, {"run", "--network", "all", "true"}, {"run", "--cpus", "-1", "true"}} {
		if r := p.berm(args...); r.code == 0 || r.stderr == "" || r.stdout != "" {
			t.Errorf("%v", r)
		}
	}
	p.berm("run", "sh", "-c", "exit $#", "sh", "-x", "--rw").exits(2)

	// What is wrong is named.
	p.berm("run").exits(2).says("COMMAND is missing")
	p.berm("undo", "--git", "HEAD").exits(2).says(`"HEAD"`, "--git=HEAD")
	p.sh("true", "--allow", "https://me:secret@example.com/x").exits(2).says("not a URL: example.com\n")
	p.sh("true", "--open", "192.0.2.x").exits(2).says("--open", "address")
	for _, pids := range []string{"-1", "0", "3"} {
		p.sh("true", "--pids", pids).exits(2).says("--pids "+pids, "8 at least")
	}
	p.sh("true", "--pids", "8").exits(0)
	p.sh("true", "--memory", "64").exits(2).says("--memory 64 bytes", "8MiB at least", "512MiB")
	p.write("project/berm.yaml", "version: 1\npids: 3\n")
	p.sh("true").exits(125).says("3 processes")
}

// Values of flags are completed.
func TestCompletion(t *testing.T) {
	p := user(t)
	p.write("config", "version: 1\npresets:\n  mine: {extends: build}\n")
	p.mkdir(".config")
	p.mkdir(".config/berm")
	p.must(os.Rename(p.path("config"), p.path(".config/berm/config.yaml")))
	for flag, words := range map[string][]string{"--preset": {"claude-code\n", "mine\n"}, "--allow": {"pypi\n"}, "--network": {"host\n"}, "--profile": {"strict\n"}, "--template": {":4\n"}} {
		r := p.berm("__complete", "run", flag, "").exits(0)
		for _, word := range words {
			if !strings.Contains(r.stdout, word) {
				t.Errorf("%s: no %q in %v", flag, word, r)
			}
		}
	}
}

// Without a network names do not exist, which programs tell at once: what no server answers
// they try again.
func TestNoNetwork(t *testing.T) {
	if _, err := os.Stat("/etc/nsswitch.conf"); err != nil {
		t.Skip("the C library here has no nsswitch.conf")
	}
	each(t, func(p *person) {
		p.berm("run", "--", "python3", "-c", `
import socket
for name in "example.com", "localhost", "berm":
    try:
        print(name, len(socket.getaddrinfo(name, 80)) > 0)
    except socket.gaierror as e:
        print(name, e.errno == socket.EAI_NONAME)
`).prints("example.com True\nlocalhost True\nberm True")
		p.sh("echo $npm_config_fetch_retries $PIP_RETRIES", "-e", "PIP_RETRIES=1").prints("0 1")
		p.sh("echo $npm_config_fetch_retries", "--network", "host").prints("")
	})
}

// Files of /etc that are links, as systemd-resolved and NixOS have them, are a run's own too.
func TestLinkedSettings(t *testing.T) {
	root(t)
	each(t, func(p *person) {
		p.mkdir("etc")
		c := p.byRoot().within("M=" + p.path("etc") + `
			mount -t tmpfs none $M && cp -a /etc/. $M && cd $M && rm -f resolv.conf hosts nsswitch.conf || exit 101
			ln -s ../run/systemd/resolve/stub-resolv.conf resolv.conf && ln -s /nosuch hosts && echo "hosts: dns" >nsswitch.real && ln -s nsswitch.real nsswitch.conf || exit 102
			mount --bind . /etc && cd ` + p.project + " && exec " + p.asUser() + `"$@"`)
		c.sh("grep nameserver /etc/resolv.conf; grep localhost /etc/hosts | head -1; cat /etc/nsswitch.conf; cat /etc/nsswitch.real").prints("nameserver 127.0.0.1\n127.0.0.1\tlocalhost\n\nhosts: files\nhosts: dns")
	})
}

// A sandbox in a sandbox is refused by its name.
func TestNested(t *testing.T) {
	each(t, func(p *person) {
		p.sh(binary+" run -- true", "--ro", filepath.Dir(binary)).exits(125).says("inside a sandbox")
		p.sh(binary+" run --allow-weaker --ro . -- true", "--ro", filepath.Dir(binary)).exits(125).says("inside a sandbox")
	})
}

// A project in a repository is not the repository.
func TestSubdirectory(t *testing.T) {
	p := user(t)
	p.mkdir("project/.git")
	p.in("project/sub").sh("true").exits(0).says("not the git repository around it", "-C "+p.project)
	p.env = append(p.env, "PATH="+filepath.Dir(binary)+":/usr/bin:/bin") // which is no reason for a notice either
	for _, flags := range [][]string{nil, {"-C", "sub"}} {
		if r := p.sh("true", flags...).exits(0); r.stderr != "" {
			t.Errorf("%v", r)
		}
	}
}

func TestStreams(t *testing.T) {
	each(t, func(p *person) {
		r := p.sh("echo out; echo err >&2")
		if r.stdout != "out\n" || r.stderr != "err\n" {
			p.Errorf("%v", r)
		}
		input := func(script, stdin string) result {
			p.Helper()
			cmd := p.command("run", "--", "sh", "-c", script)
			cmd.Stdin = strings.NewReader(stdin)
			return p.finish(cmd)
		}
		input("cat", "a\nb").prints("a\nb")
		input("read x; read y; echo $y-$x", "1\n2\n3\n").prints("2-1")
		input("cat <<EOF\n$(cat)\nEOF", "here").prints("here")
		input("cat", "").prints("")
		input("head -c 5", strings.Repeat("x", 1<<20)).prints("xxxxx") // and the writer does not block
		text := strings.Repeat("0123456789abcdef", 1<<16)
		if r := input("cat", text); r.stdout != text {
			p.Errorf("1 MiB through cat: %d bytes, %v", len(r.stdout), r.code)
		}
		p.finish(p.program("sh", "-c", "printf ab | $0 run -- cat | $0 run -- tr a-b b-c", binary)).prints("bc")
		p.finish(p.program("sh", "-c", "$0 run -- cat < file; $0 run -- sh -c 'echo more' >> file; cat file", binary)).prints("one\none\nmore")
		p.finish(p.program("bash", "-c", "$0 run -- sh -c 'echo $((1+1))' 2>/dev/full; $0 run -- echo x >/dev/full; echo $?", binary)).prints("2\n1")
		// A reader that stops ends the writer, as without a sandbox.
		p.finish(p.program("bash", "-c", "$0 run -- yes | head -n 1; echo ${PIPESTATUS[0]}", binary)).prints("y\n141")
	})
}

// Directories are refused, since one leads out of the sandbox. Closed streams are empty ones.
func TestStreamsRefused(t *testing.T) {
	each(t, func(p *person) {
		p.finish(p.program("sh", "-c", "exec $0 run -- cat <&-", binary)).prints("")
		p.finish(p.program("sh", "-c", "exec $0 run -- cat < /", binary)).refuses("directory")
		p.finish(p.program("sh", "-c", "exec $0 run -- cat 0</ 2>&1", binary)).exits(125)
	})
}

func TestMuchOutput(t *testing.T) {
	slow(t)
	p := user(t)
	cmd := p.command("run", "--", "head", "-c", "50000000", "/dev/zero")
	pipe, err := cmd.StdoutPipe()
	p.must(err)
	p.must(cmd.Start())
	total := 0
	for buffer := make([]byte, 1<<16); ; {
		n, err := pipe.Read(buffer)
		if total += n; err != nil {
			break
		}
		if total < 2<<20 {
			time.Sleep(20 * time.Millisecond)
		}
	}
	if err := cmd.Wait(); err != nil || total != 50_000_000 {
		t.Errorf("%d bytes, %v", total, err)
	}
}

// Descriptors that were open by accident are not open inside.
func TestDescriptors(t *testing.T) {
	each(t, func(p *person) {
		p.write("secret", "secret")
		cmd := p.program("bash", "-c", "exec 7<"+p.home+" 8<"+p.path("secret")+" 9<>/dev/null; exec $0 run -- python3 -c 'import os\nfor f in sorted(os.listdir(\"/proc/self/fd\")):\n try: print(f, os.readlink(\"/proc/self/fd/\"+f))\n except OSError: pass'", binary)
		cmd.Stdin = strings.NewReader("")
		r := p.finish(cmd).exits(0)
		for line := range strings.Lines(r.stdout) {
			if n, _, _ := strings.Cut(line, " "); n != "0" && n != "1" && n != "2" {
				p.Errorf("descriptor %s", line)
			}
		}
	})
}

// started runs a script that prints "ready", and returns when it did.
func (p *person) started(cmd *exec.Cmd) (output func() string) {
	p.Helper()
	r, w, err := os.Pipe()
	p.must(err)
	cmd.Stdout, cmd.Stderr = w, w
	p.must(cmd.Start())
	w.Close()
	p.Cleanup(func() { r.Close() })
	first := make([]byte, 6)
	_ = r.SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := io.ReadFull(r, first); err != nil || string(first) != "ready\n" {
		_ = cmd.Process.Kill()
		rest, _ := io.ReadAll(r)
		p.Fatalf("not ready: %v %q%q", err, first, rest)
	}
	return func() string {
		rest, _ := io.ReadAll(r)
		return string(rest)
	}
}

// What is sent to berm arrives at the command.
func TestSignalsArrive(t *testing.T) {
	each(t, func(p *person) {
		for _, name := range []string{"TERM", "HUP", "INT", "QUIT", "USR1", "USR2"} {
			cmd := p.command("run", "--", "bash", "-c", `trap 'echo caught; exit 9' `+name+`; echo ready; while :; do sleep 0.01; done`)
			output := p.started(cmd)
			p.must(cmd.Process.Signal(unix.SignalNum("SIG" + name)))
			if got := output(); got != "caught\n" {
				p.Errorf("%s: %q", name, got)
			}
			if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 9 {
				p.Errorf("%s: %v", name, err)
			}
		}
		// Without a trap the command dies, and berm with it in the same way.
		cmd := p.command("run", "--", "sh", "-c", "echo ready; exec sleep 60")
		output := p.started(cmd)
		p.must(cmd.Process.Signal(unix.SIGTERM))
		_ = output()
		if _ = cmd.Wait(); cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() != unix.SIGTERM {
			p.Errorf("%v", cmd.ProcessState)
		}
		// nohup: what the caller ignores stays ignored.
		cmd = p.program("sh", "-c", `trap '' HUP; exec "$@"`, "sh", binary, "run", "--", "sh", "-c", "echo ready; sleep 0.3; echo done")
		output = p.started(cmd)
		p.must(cmd.Process.Signal(unix.SIGHUP))
		got, err := output(), cmd.Wait()
		if got != "done\n" || err != nil {
			p.Errorf("nohup: %q, %v", got, err)
		}
	})
}

// alive are the processes of the machine with a mark in their arguments.
func alive(mark string) (pids []int) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if line, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline")); bytes.Contains(line, []byte(mark)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// gone waits until no process with the mark lives.
func gone(t *testing.T, mark string) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); len(alive(mark)) > 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Errorf("%v live", alive(mark))
			return
		}
	}
}

// Nothing outlives the command, nor berm itself, however it ends.
func TestNothingOutlives(t *testing.T) {
	each(t, func(p *person) {
		mark := fmt.Sprintf("mark-%d-%d", os.Getpid(), time.Now().UnixNano())
		spin := fmt.Sprintf("exec -a %s sleep 61", mark)
		p.berm("run", "--", "bash", "-c", "(setsid nohup bash -c '"+spin+"' >/dev/null 2>&1 </dev/null &) ; ("+spin+") >/dev/null 2>&1 & sleep 0.2; echo end").prints("end")
		gone(p.T, mark)

		cmd := p.command("run", "--", "bash", "-c", "echo change > file; (setsid bash -c '"+spin+"' >/dev/null 2>&1 &); sleep 0.1; echo ready; "+spin)
		output := p.started(cmd)
		if len(alive(mark)) < 2 {
			p.Errorf("only %v", alive(mark))
		}
		p.must(cmd.Process.Kill())
		_ = output()
		_ = cmd.Wait()
		gone(p.T, mark)
		// The session is whole.
		r := p.berm("diff").exits(0)
		if !strings.Contains(r.stdout, "+change") {
			p.Errorf("%v", r)
		}
		p.sh("cat file; echo more >> file", "-s", "project-1").prints("change")
		p.berm("apply").exits(0)
		if got := p.read("project/file"); got != "change\nmore\n" {
			p.Errorf("applied %q", got)
		}
	})
}

// Killed at any moment, berm leaves no process, and no session that cannot be used.
func TestKilledAnyTime(t *testing.T) {
	slow(t)
	each(t, func(p *person) {
		// How long the machine takes now to get to where there is nothing more to do.
		start := time.Now()
		p.berm("run", "--", "true").exits(0)
		took := time.Since(start)
		const kills = 40
		for i := range kills {
			mark := fmt.Sprintf("mark-%d-%d", os.Getpid(), time.Now().UnixNano())
			cmd := p.command("run", "--", "bash", "-c", "echo x > new; exec -a "+mark+" sleep 61")
			p.must(cmd.Start())
			time.Sleep(2 * took * time.Duration(i) / kills)
			p.must(cmd.Process.Kill())
			_ = cmd.Wait()
			gone(p.T, mark)
		}
		p.sh("sleep 0.5").exits(0) // time to sweep
		r := p.berm("sessions").exits(0)
		whole := 0
		for line := range strings.Lines(r.stdout) {
			if name, _, _ := strings.Cut(line, " "); strings.HasPrefix(name, "project-") {
				whole++
				p.berm("diff", "-s", name).exits(0)
				p.sh("cat new", "-s", name).exits(0) // empty, when it was killed before it wrote
			}
		}
		if whole == 0 {
			p.Errorf("no session: %v", r)
		}
		p.sh("sleep 0.5").exits(0)
		if names, _ := filepath.Glob(p.path(".local/state/berm/sessions/.*")); len(names) > 1 { // its own
			p.Errorf("waste: %v", names)
		}
	})
}

// groups calls f for the control groups of this test's sandboxes: it is isolated.
func groups(f func(path string)) {
	for _, own := range harness.Cgroups() {
		entries, _ := os.ReadDir(filepath.Join(own, "berm"))
		for _, e := range entries {
			if e.IsDir() && strings.Contains(own, "berm-test-") {
				f(filepath.Join(own, "berm", e.Name()))
			}
		}
	}
}

// Control groups go with the command, however it ends. Those of a berm that was killed are
// removed by a later one, when they are old enough to be told from new ones.
func TestControlGroups(t *testing.T) {
	slow(t)
	p := root(t)
	before := map[string]bool{} // of tests that killed berm
	groups(func(path string) { before[path] = true })
	p.sh("exit 3").exits(3)
	p.sh("(sleep 60 &) ; exit 4", "--memory", "100MiB", "--cpus", "1").exits(4)
	p.berm("run", "--", "nosuchcommand").exits(127)
	p.berm("run", "--timeout", "100ms", "--", "sleep", "60").exits(124)
	p.sh("kill -9 $$")
	groups(func(path string) {
		if !before[path] {
			t.Errorf("left: %s", path)
		}
	})

	made := 0
	for _, own := range harness.Cgroups() {
		if parent := filepath.Join(own, "berm"); strings.Contains(own, "berm-test-") {
			if os.Mkdir(filepath.Join(parent, "run-1000000000-old"), 0o755) == nil {
				made++
				p.must(os.Mkdir(filepath.Join(parent, fmt.Sprintf("run-%d-new", time.Now().Unix())), 0o755))
			}
		}
	}
	if made == 0 {
		t.Fatalf("no groups in %v", harness.Cgroups())
	}
	p.sh("sleep 0.2").exits(0)
	left := 0
	groups(func(path string) {
		if before[path] {
			return
		}
		if left++; !strings.HasSuffix(path, "-new") {
			t.Errorf("not swept: %s", path)
		}
		p.must(os.Remove(path))
	})
	if left != made {
		t.Errorf("%d of %d young ones are left", left, made)
	}
}

func TestTimeout(t *testing.T) {
	each(t, func(p *person) {
		began := time.Now()
		p.berm("run", "--timeout", "300ms", "--", "sh", "-c", "trap '' TERM; sleep 30; sleep 30").exits(124).says("300ms")
		if d := time.Since(began); d < 300*time.Millisecond || d > 10*time.Second {
			p.Errorf("took %v", d)
		}
		p.sh("exit 3", "--timeout", "1m").exits(3)
	})
}

// Many sandboxes at once, on one project.
func TestManyAtOnce(t *testing.T) {
	each(t, func(p *person) {
		var wg sync.WaitGroup
		results := make([]result, 20)
		for i := range results {
			wg.Go(func() {
				var stdout, stderr bytes.Buffer
				cmd := p.command("run", "--", "sh", "-c", fmt.Sprintf("echo %d > file; cat file; exit %d", i, i))
				cmd.SysProcAttr.Pdeathsig = 0 // which comes with the end of the thread, of which there are many here
				cmd.Stdout, cmd.Stderr = &stdout, &stderr
				_ = cmd.Run()
				results[i] = result{person: p, args: cmd.Args, stdout: stdout.String(), stderr: stderr.String(), code: cmd.ProcessState.ExitCode()}
			})
		}
		wg.Wait()
		for i, r := range results {
			if r.code != i || r.stdout != fmt.Sprintln(i) {
				p.Errorf("%d: %v", i, r)
			}
		}
		if got := p.read("project/file"); got != "one\n" {
			p.Errorf("the project changed: %q", got)
		}
		r := p.berm("sessions").exits(0)
		if n := strings.Count(r.stdout, "project-"); n < 20 {
			p.Errorf("%d sessions: %v", n, r)
		}
		p.berm("discard", "--all").exits(0)
	})
}

// A session runs one command at a time.
func TestSessionInUse(t *testing.T) {
	each(t, func(p *person) {
		p.sh("echo 1 > a").exits(0)
		cmd := p.command("run", "-s", "project-1", "--", "sh", "-c", "echo ready; read x; echo 2 > b")
		stdin, err := cmd.StdinPipe()
		p.must(err)
		output := p.started(cmd)
		p.sh("true", "-s", "project-1").refuses("project-1")
		p.berm("apply", "-s", "project-1").says("project-1")
		if r := p.berm("discard", "-s", "project-1"); r.code == 0 {
			p.Errorf("discarded while it runs: %v", r)
		}
		stdin.Close()
		_ = output()
		if err := cmd.Wait(); err != nil {
			p.Error(err)
		}
		p.sh("cat a b", "-s", "project-1").prints("1\n2")
		p.sh("true", "-s", "nosuch").refuses("nosuch")
	})
}

// A signal to "my own process group" stays in the sandbox, though the caller and its other
// children are in that group too.
func TestGroupOutside(t *testing.T) {
	each(t, func(p *person) {
		for _, profile := range []string{"default", "strict"} {
			inside := "trap 'echo got it' USR1; kill -USR1 0; renice -n 1 -g 0 >/dev/null 2>&1; ionice -c 3 -P 0 2>/dev/null; kill -KILL 0"
			script := `have() { echo "nice $(nice), $(ionice -p $$)"; }
				before=$(have)
				"$@" run --profile ` + profile + ` -- sh -c "` + inside + `"; echo "$? and alive"
				test "$before" = "$(have)" || have`
			other := *p
			other.outer = append(slices.Clone(p.outer), "setsid", "sh", "-c", script, "sh")
			other.berm().exits(0).prints("got it\n137 and alive")
		}
	})
}
