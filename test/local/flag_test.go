package local

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestPaths(t *testing.T) {
	each(t, func(p *person) {
		p.mkdir("other")
		p.write("other/file", "other\n")
		p.write("other/private", "private\n")
		p.must(os.Chmod(p.path("other/private"), 0o600))
		p.mkdir("other/in")
		p.mkdir("other/in/deep")
		p.write("other/in/deep/file", "deep\n")
		p.link("link", "other")
		p.mkdir("project/sub")
		p.write("project/sub/file", "sub\n")
		p.write("project/.env", "secret\n")
		p.mkdir("project/keys")
		p.write("project/keys/key", "secret\n")
		other := p.path("other")

		p.sh("ls -A ~").prints("project")
		p.sh("cat ~/other/file ~/other/private; ! touch ~/other/new 2>/dev/null", "--ro", other).prints("other\nprivate")
		p.sh("cat ../other/file; ls -A ../other", "--ro", "../other/file").prints("other\nfile")
		p.sh("cat ~/other/file", "--ro", "~/other").prints("other")
		p.sh("cat ~/link/file; readlink ~/link", "--ro", p.path("link")).prints("other\n" + other)
		p.sh("echo new > ~/other/new; cat ~/other/private", "--rw", other).prints("private")
		if got := p.read("other/new"); got != "new\n" {
			p.Errorf("%q", got)
		}
		if info, err := os.Stat(p.path("other/new")); err != nil || !strings.Contains(fmt.Sprintf("%+v", info.Sys()), fmt.Sprintf("Uid:%d ", p.uid)) {
			p.Errorf("%+v, %v", info, err)
		}
		p.must(os.Remove(p.path("other/new")))
		p.sh("echo two > ~/other/file; ls -A ~/other", "--rw", "~/other/file").prints("file")
		if got := p.read("other/file"); got != "two\n" {
			p.Errorf("%q", got)
		}

		// Read-only below writable below read-only, and hidden below that.
		in, deep := p.path("other/in"), p.path("other/in/deep")
		p.sh("! touch ~/other/x 2>/dev/null && touch ~/other/in/x && rm ~/other/in/x && ! touch ~/other/in/deep/x 2>/dev/null && cat ~/other/in/deep/file",
			"--ro", other, "--rw", in, "--ro", deep).prints("deep")
		p.sh("touch ~/other/in/x && rm ~/other/in/x && ls -A ~/other/in/deep", "--rw", other, "--hide", deep).prints("")
		p.sh("! cat ~/other/file 2>/dev/null && ls -A ~/other | sort | tr '\\n' ' '", "--ro", other, "--hide", p.path("other/file")).prints("file in private")

		// In the workspace.
		for _, workspace := range [][]string{nil, {"--rw", "."}, {"--ro", "."}} {
			flags := slices.Concat(workspace, []string{"--hide", ".env", "--hide", "keys"})
			p.sh("cat .env keys/key 2>/dev/null; ls -A keys; cat file", flags...).prints("one")
		}
		p.sh("echo new > file; echo x > sub/file", "--ro", "sub").exits(2)
		p.sh("echo new > sub/file; cat sub/file", "--rw", "sub").prints("new")
		if got := p.read("project/sub/file"); got != "new\n" {
			p.Errorf("%q", got)
		}
		p.sh("echo newer > sub/file && ! touch x 2>/dev/null", "--ro", ".", "--rw", "sub").prints("")
		p.berm("discard", "--all").exits(0)

		// What may be written around them does not move them away, for this run or the next.
		for _, outside := range []string{"other", "project"} {
			p.mkdir(outside + "/a")
			p.mkdir(outside + "/a/b")
			for _, name := range []string{"hidden", "shown"} {
				p.mkdir(outside + "/a/b/" + name)
				p.write(outside+"/a/b/"+name+"/file", "kept\n")
			}
			dir := p.path(outside)
			flags := []string{"--rw", dir, "--hide", dir + "/a/b/hidden", "--ro", dir + "/a/b/shown"}
			if outside == "project" {
				flags[1] = "."
			}
			rename := `
import os
for a, b in ('a', 'x'), ('a/b', 'x'), ('a/b/hidden', 'x'), ('a/b/shown', 'x'):
    try:
        os.rename(a, b)
        print('moved', a)
    except OSError:
        pass
os.mkdir('a/b/new')
os.rename('a/b/new', 'a/b/newer')
os.rmdir('a/b/newer')
print(open('a/b/shown/file').read(), os.listdir('a/b/hidden'))`
			p.finish(p.command(append(append([]string{"run"}, flags...), "--", "sh", "-c", `cd "$1" && python3 -c "$2"`, "sh", dir, rename)...)).prints("kept\n []")
			p.must(os.RemoveAll(dir + "/a"))
		}

		// What is not there, and what would be something else.
		p.sh("true", "--ro", "nosuch").exits(125).says("nosuch")
		p.sh("true", "--rw", "/nosuch/x").exits(125).says("nosuch")
		p.sh("true", "--hide", ".evn").exits(125).says("--hide .evn", "there is no")
		p.sh("true", "--rw", ".", "--ro", ".").exits(125).says("--ro .", "--rw .", "contradict")
		p.sh("true", "--cow", "--rw", p.project).exits(125).says("--cow", "--rw "+p.project)
		p.sh("true", "--hide", "sub", "--ro", "./sub/").exits(125).says("--ro ./sub/", "--hide sub")
		p.sh("true", "--ro", "sub", "--ro", "./sub/").exits(0)
		p.sh("true", "--hide", ".").exits(125)
		p.sh("true", "--ro", "").exits(2)
		p.link("project/out", other)
		p.sh("true", "--rw", "out").refuses("symbolic link")
		p.sh("true", "--hide", "out/file").refuses("symbolic link")
	})
}

func TestEnvironment(t *testing.T) {
	each(t, func(p *person) {
		p.env = append(p.env, "SECRET_TOKEN=hunter2", "AWS_SECRET_ACCESS_KEY=hunter2", "PASSED=yes", "MANY_A=1", "MANY_B=2", "LD_PRELOAD=/nosuch.so", "SSH_AUTH_SOCK=/tmp/agent", "BERM_API_KEY=hunter2")
		r := p.berm("run", "--", "env").exits(0)
		if strings.Contains(r.stdout, "hunter2") || strings.Contains(r.stdout, "LD_PRELOAD") || strings.Contains(r.stdout, "SSH_AUTH_SOCK") || strings.Contains(r.stdout, "PASSED") || strings.Contains(r.stdout, "GOMAXPROCS") || strings.Contains(r.stdout, "GOGC") {
			p.Errorf("%v", r)
		}
		for _, line := range []string{"HOME=" + p.home, "BERM_SANDBOX=1", "TERM=xterm", "LANG=C.UTF-8"} {
			if !slices.Contains(strings.Split(r.stdout, "\n"), line) {
				p.Errorf("no %s: %v", line, r)
			}
		}
		p.sh("echo $PASSED-$SET-$EMPTY-$MANY_A$MANY_B-${TERM:-none}-$SECRET_TOKEN", "-e", "PASSED", "--env", "SET=a b=c", "-e", "EMPTY=", "-e", "MANY_*", "-e", "-TERM").prints("yes-a b=c--12-none-")
		p.sh("echo ${NOSUCH-unset}", "-e", "NOSUCH").prints("unset")
		for _, wrong := range []string{"", "=x", "-", "A*B"} {
			if r := p.sh("true", "-e", wrong); r.code == 0 {
				p.Errorf("%q: %v", wrong, r)
			}
		}
		p.sh(`printf '%s' "$NL"`, "-e", "NL=a\nb").prints("a\nb")
	})
}

// outcome is what --json prints.
type outcome struct {
	ExitCode                                                  int
	Signal, Reason, Level, Preset, Workspace, Session, Detail string
	DurationMS                                                *int64
	Started                                                   bool
	Notices                                                   []string
}

// json takes the standard error as one object.
func (r result) json() (o outcome) {
	r.Helper()
	decoder := json.NewDecoder(strings.NewReader(r.stderr))
	if err := decoder.Decode(&o); err != nil || decoder.More() || strings.Count(r.stderr, "\n") != 1 {
		r.Fatalf("no object: %v, %v", err, r)
	}
	if o.DurationMS == nil || o.Workspace != r.project {
		r.Errorf("%+v", o)
	}
	return o
}

func TestJSON(t *testing.T) {
	each(t, func(p *person) {
		o := p.sh("exit 3", "--json").exits(3).json()
		if o.ExitCode != 3 || o.Reason != "exit" || o.Level != "namespace" || !o.Started || o.Session != "" || o.Preset != "default" || o.Signal != "" {
			p.Errorf("%+v", o)
		}
		if o = p.sh("touch new", "--json", "--preset", "build").exits(0).json(); o.Session != "project-1" || o.Preset != "build" {
			p.Errorf("%+v", o)
		}
		if o = p.sh("kill -9 $$", "--json").json(); o.Signal != "SIGKILL" || o.ExitCode != 137 {
			p.Errorf("%+v", o)
		}
		if o = p.sh("sleep 9", "--json", "--timeout", "200ms").exits(124).json(); o.ExitCode != 124 || o.Reason != "timeout" {
			p.Errorf("%+v", o)
		}
		if o = p.berm("run", "--json", "--", "nosuchcommand").exits(127).json(); o.ExitCode != 127 || o.Started || o.Detail == "" {
			p.Errorf("%+v", o)
		}
	})
}

// What is printed is what holds.
func TestPolicyIsTrue(t *testing.T) {
	each(t, func(p *person) {
		p.mkdir("other")
		p.write("project/.env", "secret")
		flags := []string{"run", "--print-policy", "--rw", "../other", "--ro", "../project2", "--hide", ".env", "-e", "SECRET=hunter2", "--timeout", "1m"}
		p.mkdir("project2")
		r := p.berm(append(flags, "--", "touch", "ran")...).exits(0)
		for _, text := range []string{"namespace", p.path("other"), p.project, ".env", "seccomp", "1m", "SECRET", "no network", "copy on write", "threads: 8192", "open files", "/proc/kcore"} {
			if !strings.Contains(strings.ToLower(r.stdout), strings.ToLower(text)) && text != "seccomp" && text != "no network" {
				p.Errorf("no %q in %s", text, r.stdout)
			}
		}
		if strings.Contains(r.stdout, "hunter2") {
			p.Errorf("a value of the environment: %v", r)
		}
		if _, err := os.Stat(p.path("project/ran")); err == nil {
			p.Error("the command ran")
		}
		r = p.berm(slices.Concat(flags, []string{"--json", "--", "true"})...).exits(0)
		var printed struct {
			WorkspaceAccess string
			Policy          struct {
				Capabilities []string
				Mounts       []string
				Masked       []string
				Namespaces   []string
			}
		}
		if err := json.Unmarshal([]byte(r.stdout), &printed); err != nil || printed.WorkspaceAccess != "cow" || len(printed.Policy.Namespaces) != 7 {
			p.Fatalf("%v: %v", err, r)
		}
		// Each mount is there with its flags, and there are no others below / but those.
		r = p.berm("run", "--rw", "../other", "--ro", "../project2", "--hide", ".env", "--", "cat", "/proc/self/mountinfo").exits(0)
		real := map[string]string{}
		for line := range strings.Lines(r.stdout) {
			fields := strings.Fields(line)
			real[fields[4]] = fields[5]
		}
		for _, m := range printed.Policy.Mounts {
			path, rest, _ := strings.Cut(m, " ")
			kind, rest, _ := strings.Cut(rest, " ")
			if kind == "link" {
				continue
			}
			options, ok := real[path]
			if !ok {
				p.Errorf("%s is printed and not mounted", m)
			}
			for flag := range strings.SplitSeq(strings.Fields(rest + " -")[0], ",") {
				if slices.Contains([]string{"ro", "nosuid", "nodev", "noexec"}, flag) && !strings.Contains(","+options+",", ","+flag+",") {
					p.Errorf("%s is mounted as %s", m, options)
				}
			}
		}
		// Capabilities are those printed.
		r = p.sh("grep CapEff /proc/self/status").exits(0)
		if empty := strings.Contains(r.stdout, "0000000000000000"); empty != (len(printed.Policy.Capabilities) == 0) {
			p.Errorf("%v against %v", r.stdout, printed.Policy.Capabilities)
		}
	})
}

// Limits hold, or the run is refused.
func TestLimits(t *testing.T) {
	hog := "import os\nx=[]\nfor i in range(600):\n x.append(b'x'*(1<<20))\nprint('done')"
	each(t, func(p *person) {
		r := p.berm("run", "--memory", "64MiB", "--", "python3", "-c", hog)
		switch {
		case r.code == 125 && p.uid != 0:
			r.refuses("memory")
			p.write("project/berm.yaml", "version: 1\nmemory: 1GiB\n")
			p.sh("true").refuses("memory", "project/berm.yaml")
			p.must(os.Remove(p.path("project/berm.yaml")))
		case strings.Contains(r.stdout, "done") || r.signal != unix.SIGKILL && r.code != 137:
			p.Errorf("%v", r)
		default:
			r.says("memory")
			// A process of the command dies, and the command goes on.
			r = p.berm("run", "--memory", "64MiB", "--", "sh", "-c", "python3 -c \"$1\"; echo $?; exit 5", "sh", hog).exits(5).says("memory")
			if r.stdout != "137\n" {
				p.Errorf("%v", r)
			}
			if o := p.berm("run", "--json", "--memory", "64MiB", "--", "python3", "-c", hog).json(); o.Reason != "oom" || o.Detail == "" {
				p.Errorf("%+v", o)
			}
			// Files in memory count.
			p.sh("head -c 300000000 /dev/zero > /tmp/x; ls -l /tmp/x | grep -c 300000000", "--memory", "64MiB")
		}
		r = p.sh("true", "--memory", "64MiB", "--allow-weaker", "--rw", ".")
		if r.code != 0 && r.code != 125 {
			p.Errorf("%v", r)
		}

		burn := "import time,resource\nend=time.time()+1\nwhile time.time()<end: pass\nu=resource.getrusage(resource.RUSAGE_SELF)\nprint(u.ru_utime+u.ru_stime < 0.5)"
		if r = p.berm("run", "--cpus", "0.2", "--", "python3", "-c", burn); r.code == 125 && p.uid != 0 {
			r.refuses("cpu")
		} else {
			r.prints("True")
		}

		// A bomb of forks ends by itself, and hurts nobody.
		bomb := "import os,time\nn=0\nwhile True:\n try:\n  if os.fork()==0: time.sleep(30); os._exit(0)\n  n+=1\n except OSError as e: print(n < 50, e.errno, flush=True); os._exit(0)"
		p.berm("run", "--pids", "50", "--", "python3", "-c", bomb).prints("True 11")
		for _, wrong := range []string{"0.0.1", "x", "-1"} {
			if r := p.sh("true", "--cpus", wrong); r.code == 0 {
				p.Errorf("%v", r)
			}
		}
	})
}

// Without any flag too, a bomb of forks ends.
func TestForkBomb(t *testing.T) {
	slow(t)
	each(t, func(p *person) {
		began := time.Now()
		p.berm("run", "--timeout", "20s", "--", "bash", "-c", ":(){ :|:& };:; sleep 3; exit 0")
		if d := time.Since(began); d > 40*time.Second {
			p.Errorf("took %v", d)
		}
		p.sh("echo fine").prints("fine")
	})
}

func TestCheckpoints(t *testing.T) {
	each(t, func(p *person) {
		p.sh("echo 1 > file; echo a > a", "--checkpoint").exits(0)
		s := []string{"--checkpoint", "-s", "project-1"}
		p.sh("echo 2 > file; rm a", s...).exits(0)
		p.sh("echo 3 > file; mkdir d; echo x > d/x", s...).exits(0)
		p.berm("undo").exits(0)
		p.sh("cat file; ls", "-s", "project-1").prints("2\nfile")
		p.berm("undo").exits(0).says("hint: berm undo --to ") // the undo
		p.sh("cat file", "-s", "project-1").prints("3")
		p.berm("undo", "--to", "1").exits(0)
		p.sh("cat file a; ls", "-s", "project-1").prints("1\na\na\nfile")
		p.sh("true", "--checkpoint", "--rw", ".").refuses("copy-on-write")
		if got := p.read("project/file"); got != "one\n" {
			p.Errorf("the project changed: %q", got)
		}
		p.berm("discard", "--all").exits(0)
		if r := p.berm("undo"); r.code == 0 {
			p.Errorf("%v", r)
		}
	})
}

// A session goes back to what git knows.
func TestUndoGit(t *testing.T) {
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("git is not installed")
	}
	each(t, func(p *person) {
		p.env = append(p.env, "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@b", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@b")
		p.finish(p.program("sh", "-ec", "git init -q .; git add file; git commit -qm first")).exits(0)
		p.write("project/file", "uncommitted\n")
		p.sh("echo changed > file; echo new > new").exits(0)
		p.berm("undo", "--git").exits(0)
		p.sh("cat file; ls", "-s", "project-1").prints("one\nfile")
		if got := p.read("project/file"); got != "uncommitted\n" {
			p.Errorf("the project changed: %q", got)
		}
	})
}

// With the host's network its servers are reached, and its abstract sockets are not.
func TestHostNetwork(t *testing.T) {
	each(t, func(p *person) {
		tcp, err := net.Listen("tcp", "127.0.0.1:0")
		p.must(err)
		defer tcp.Close()
		name := fmt.Sprintf("berm-local-%d-%d", os.Getpid(), time.Now().UnixNano())
		abstract, err := net.Listen("unix", "@"+name)
		p.must(err)
		defer abstract.Close()
		for _, l := range []net.Listener{tcp, abstract} {
			go func() {
				for {
					conn, err := l.Accept()
					if err != nil {
						return
					}
					fmt.Fprint(conn, "host")
					conn.Close()
				}
			}()
		}
		script := fmt.Sprintf(`
import socket
def get(family, address):
    s = socket.socket(family)
    s.settimeout(3)
    try:
        s.connect(address)
        return s.recv(9).decode()
    except OSError as e:
        return 'no'
print(get(socket.AF_INET, ('127.0.0.1', %d)), get(socket.AF_UNIX, '\0%s'))
`, tcp.Addr().(*net.TCPAddr).Port, name)
		p.berm("run", "--", "python3", "-c", script).prints("no no")
		p.berm("run", "--network", "none", "--", "python3", "-c", script).prints("no no")
		p.berm("run", "--network", "host", "--", "python3", "-c", script).prints("host no").says("network")
	})
}

// needsBase skips a test on a machine whose root has no template base.
func needsBase(t *testing.T) {
	t.Helper()
	if all, _ := filepath.Glob("/var/cache/berm/templates/*.json"); len(all) == 0 {
		t.Skip("there is no template base: `berm template build base`")
	}
}

// The programs of a template trust what looks into their requests.
func TestTemplateInspected(t *testing.T) {
	slow(t)
	needsBase(t)
	online(t, func(p *person) {
		if p.uid != 0 {
			return // whose templates are not root's
		}
		p.env = append(p.env, "REAL_TOKEN="+secret)
		p.write("policy.yaml", "version: 1\nrules:\n  - {to: [api.example, www.example], http: {methods: [GET]}}\n")
		r := p.sh(`curl -sS https://www.example/a; echo
curl -sS -X POST https://www.example/a; echo
python3 -c 'import urllib.request; print(urllib.request.urlopen("https://www.example/p").read().decode())'
tail -n 3 /etc/ssl/certs/ca-certificates.crt | head -n 1 >/dev/null && grep -c "BEGIN CERT" /etc/ssl/certs/ca-certificates.crt`,
			"--template", "base", "--policy", p.path("policy.yaml"), "--open", opened)
		for _, want := range []string{"GET www.example /a", `"method"`, "GET www.example /p"} {
			if !strings.Contains(r.stdout, want) {
				t.Errorf("no %q in %v", want, r)
			}
		}
		r = p.sh("curl -sS https://api.example/hash", "--template", "base", "--policy", p.path("policy.yaml"), "--open", opened, "--cred", bound)
		if !strings.Contains(r.stdout, authorised("Bearer "+secret)) {
			t.Errorf("a credential: %v", r)
		}
	})
}

// The programs of a template stand in for the host's.
func TestTemplate(t *testing.T) {
	slow(t)
	p := root(t)
	needsBase(t)
	p.sh("cat file; echo two > file; cat file; test -e /etc/os-release && id -u", "--template", "base").prints("one\ntwo\n0")
	p.sh("true", "--template", "nosuchtemplate").exits(125).says("nosuchtemplate")
}

// What a session holds is seen by each command of it, and by no other.
func TestSessions(t *testing.T) {
	each(t, func(p *person) {
		p.sh("echo a > a").exits(0)
		p.sh("echo b > b; ls").prints("b\nfile")
		p.sh("ls; rm file", "-s", "project-1").prints("a\nfile")
		if r := p.berm("sessions").exits(0); !strings.Contains(r.stdout, "project-1") || !strings.Contains(r.stdout, "project-2") {
			p.Errorf("%v", r)
		}
		p.berm("apply", "-s", "project-1").exits(0)
		if _, err := os.Stat(p.path("project/file")); err == nil {
			p.Error("file is not deleted")
		}
		p.berm("discard", "-s", "project-2").exits(0)
		p.sh("true", "-s", "project-2").refuses("project-2")
		p.sh("true", "-s", "../x").exits(125)
		other := p.in("other")
		p.sh("echo c > c").exits(0)
		other.sh("true", "-s", "project-1").refuses("project-1")
		p.berm("discard", "--all").exits(0)
		// Nothing is left but the log and an empty store, which knows what names it gave.
		var left []string
		_ = filepath.WalkDir(p.path(".local"), func(path string, d os.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				left = append(left, strings.TrimPrefix(path, p.home))
			}
			return nil
		})
		if !slices.Equal(left, []string{"/.local/state/berm/audit/log.jsonl", "/.local/state/berm/sessions/.retired-project"}) {
			p.Errorf("left: %v", left)
		}
	})
}

// Nothing outside the state directory is written.
func TestNothingElseWritten(t *testing.T) {
	each(t, func(p *person) {
		list := func() (paths []string) {
			_ = filepath.WalkDir(filepath.Dir(p.home), func(path string, d os.DirEntry, err error) error {
				if path == p.path(".local/state/berm") {
					return filepath.SkipDir
				}
				p.must(err)
				info, err := d.Info()
				p.must(err)
				paths = append(paths, fmt.Sprint(path, info.ModTime(), info.Mode()))
				return nil
			})
			return paths
		}
		p.sh("true").exits(0)
		before := list()
		p.sh("echo x > file; echo x > ~/x; echo x > /tmp/x; mkdir d").exits(0)
		p.berm("diff").exits(0)
		p.berm("sessions").exits(0)
		p.berm("run", "--print-policy", "--", "true").exits(0)
		p.berm("discard").exits(0)
		p.sh("! touch x 2>/dev/null", "--ro", ".").exits(0)
		if after := list(); !slices.Equal(before, after) {
			p.Errorf("before %q\nafter %q", before, after)
		}
	})
}
