package probes

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// quick is how long berm may take for what a hostile project or session holds.
const quick = 30 * time.Second

// within fails a test when f takes longer than quick.
func within(t *testing.T, what string, f func()) {
	t.Helper()
	start := time.Now()
	f()
	if took := time.Since(start); took > quick {
		t.Errorf("%s took %v", what, took)
	}
}

// leaks fails a test when a text has a token of the host, or the host was called or has
// changed but for the named files.
func (j *judge) leaks(t *testing.T, v *local, before map[string]string, text string, but ...string) {
	t.Helper()
	if where := j.found(text); where != "" {
		t.Errorf("token in the output: %s\n%s", where, tail(text, 2000))
	}
	if hits := j.called(); len(hits) > 0 {
		t.Errorf("calls at listeners of the host: %q", hits)
	}
	after := map[string]string{}
	for _, a := range v.accounts {
		a.look(after, false)
	}
	for path, was := range before {
		if after[path] != was && !slices.Contains(but, strings.TrimPrefix(path, "file ")) {
			t.Errorf("%s was %s and is %s", path, was, after[path])
		}
	}
}

func (v *local) files() map[string]string {
	files := map[string]string{}
	for _, a := range v.accounts {
		a.look(files, false)
	}
	return files
}

// each runs a test for both accounts; a dear one as root with BERM_TEST_ALL only.
func (v *local) each(t *testing.T, dear bool, f func(t *testing.T, a *account)) {
	for _, name := range []string{"user", "root"} {
		t.Run(name, func(t *testing.T) {
			if dear && name == "root" && !all {
				t.Skip("slow: set BERM_TEST_ALL=1")
			}
			a := v.accounts[name]
			a.t = t
			f(t, a)
		})
	}
}

// A project that somebody prepared, in an earlier run or before it was cloned, does not
// choose what of the host is shown, written or covered.
func TestHostileProject(t *testing.T) {
	v, j := newLocal(t)
	v.each(t, false, func(t *testing.T, a *account) {
		secret := a.home + "/.ssh"
		link := func(name, target string) func() {
			return func() {
				if err := os.Symlink(target, filepath.Join(a.project, name)); err != nil {
					t.Fatal(err)
				}
				if err := os.Lchown(filepath.Join(a.project, name), a.uid, a.uid); err != nil {
					t.Fatal(err)
				}
			}
		}
		node := func(name string, mode uint32) func() {
			return func() {
				if err := unix.Mknod(filepath.Join(a.project, name), mode|0o666, int(unix.Mkdev(1, 5))); err != nil {
					t.Fatal(err)
				}
			}
		}
		yaml := func(content string) func() {
			return func() { a.write("work/project/berm.yaml", "version: 1\n"+content) }
		}
		const show = `cat sub/* .env build/* 2>/dev/null; ls -la /etc/passwd sub .env build 2>&1; echo ran; echo x >sub/planted; echo x >build/planted`
		for name, test := range map[string]struct {
			prepare func()
			flags   []string
			refused string // the words of the refusal; "" is none
		}{
			"hide a link":           {link(".env", "/etc/passwd"), []string{"--hide", ".env"}, "symbolic link"},
			"show a link":           {link("sub", secret), []string{"--ro", "sub"}, "symbolic link"},
			"write a link":          {link("sub", secret), []string{"--rw", "sub"}, "symbolic link"},
			"write in place a link": {link("sub", secret), []string{"--rw", ".", "--rw", "sub"}, "symbolic link"},
			"write below a link":    {link("build", a.home), []string{"--rw", "build/.ssh"}, "symbolic link"},
			"hide below a link":     {link("build", a.home), []string{"--hide", "build/.ssh"}, "symbolic link"},
			"a link, read-only":     {link("sub", secret), []string{"--ro", "."}, ""},
			"a link, in place":      {link("sub", secret), []string{"--rw", "."}, ""},
			"a link, copied":        {link("sub", secret), nil, ""},
			"a link as berm.yaml":   {link("berm.yaml", a.home+"/notes.txt"), nil, "symbolic link"},
			"a pipe as berm.yaml":   {node("berm.yaml", unix.S_IFIFO), nil, "not a regular file"},
			"a device as berm.yaml": {node("berm.yaml", unix.S_IFCHR), nil, "not a regular file"},
			"a huge berm.yaml":      {yaml(strings.Repeat("# x\n", 1<<20)), nil, "larger than"},
			"a deep berm.yaml":      {yaml("hide: " + strings.Repeat("[", 50_000)), nil, "berm.yaml"},
			"a bomb as berm.yaml":   {yaml(bomb()), nil, "berm.yaml"},
			"an asking berm.yaml":   {yaml("rw: ['~', '../other', /etc]\nro: ['~/.ssh', '~/.aws/credentials']\nenv: [AWS_*, 'DATABASE_URL']\nnetwork: host\n"), nil, ""},
			"a hiding berm.yaml":    {yaml("hide: ['~/../../../etc', /usr/lib, '../other', '/proc', '/dev/null']\n"), nil, ""},
			"escapes in berm.yaml":  {yaml(`rw: ["\e]0;owned\a", "\e[2J\n"]` + "\nenv: [\"X=\\e[31m\"]\n"), nil, ""},
		} {
			t.Run(name, func(t *testing.T) {
				defer func() {
					if err := a.reset(); err != nil {
						t.Error(err)
					}
				}()
				test.prepare()
				before := v.files()
				var output string
				within(t, "berm run", func() {
					var code int
					output, code = a.do(append(append([]string{"run"}, test.flags...), "--", "sh", "-c", show)...)
					if refused := code == 125 && !strings.Contains(output, "ran\n"); refused != (test.refused != "") {
						t.Errorf("exit code %d:\n%s", code, tail(output, 1000))
					}
				})
				if !strings.Contains(output, test.refused) {
					t.Errorf("it does not say %q:\n%s", test.refused, tail(output, 1000))
				}
				acts(t, output)
				j.leaks(t, v, before, output)
				a.do("discard", "--all")
			})
		}
	})
}

// bomb is a document whose aliases would be billions of entries.
func bomb() string {
	text := "a: &a [x, x, x, x, x, x, x, x, x]\n"
	for c := 'b'; c < 'k'; c++ {
		text += fmt.Sprintf("%c: &%[1]c [%s]\n", c, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*%c, ", c-1), 9), ", "))
	}
	return text + "hide: *j\n"
}

// own are the sequences that berm writes itself: colours.
var own = regexp.MustCompile("\x1b\\[[0-9;]*m")

// acts fails a test when a text would act on a terminal.
func acts(t *testing.T, text string) {
	t.Helper()
	for _, line := range strings.Split(own.ReplaceAllString(text, ""), "\n") {
		line = strings.TrimSuffix(line, "\r")
		if i := strings.IndexFunc(line, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f || r >= 0x80 && r < 0xa0 || r == 0x202e }); i >= 0 {
			t.Errorf("it would act on a terminal: %q", tail(line, 200))
			return
		}
	}
}

// what a session may hold; the links lead to secrets of the account, whose names are the
// arguments.
const hostile = `
exec 2>/dev/null
i=0
for secret in "$@"; do
	i=$((i+1))
	ln -s "$secret" soft$i
	ln -s "$(dirname "$secret")" dir$i
done
rm -rf src; ln -s "$(dirname "$1")" src          # a directory becomes a link out
rm README; ln -s "$1" README                      # and so does a file
mkfifo pipe
python3 - <<'PY'
import os, socket
socket.socket(socket.AF_UNIX).bind("socket")
for name in ("\x1b]0;owned\x07", "\x1b[2Jclear", "new\nline", "tab\tquote\"back\\slash", "\x9b31m", "bad\xff".encode("latin-1"), "-rf", "\u202etxt.exe", "a" * 255, " lead", ".git\n"):
    try:
        open(name, "w").write("text \x1b[2J\x1b]52;c;ZXZpbA==\x07 more\r\n")
    except OSError:
        pass
open("huge", "w").truncate(1 << 40)
os.makedirs("wide")
for n in range(1000):
    open(f"wide/{n}", "w").close()
os.makedirs("/".join(["d" * 200] * 15))
os.mkdir(".git"); os.mkdir(".git/hooks")
open(".git/hooks/pre-commit", "w").write("#!/bin/sh\ntouch /tmp/owned\n")
os.chmod(".git/hooks/pre-commit", 0o755)
open(".git/config", "w").write("[core]\n\tfsmonitor = touch /tmp/owned\n\tpager = touch /tmp/owned\n[diff]\n\texternal = touch /tmp/owned\n")
open(".gitattributes", "w").write("* diff=x merge=x filter=x\n")
os.mkdir("closed"); open("closed/file", "w").write("x"); os.chmod("closed", 0)
open("suid", "w").write("x"); os.chmod("suid", 0o6755)
for name in ("user.overlay.redirect", "user.overlay.metacopy", "user.overlay.opaque", "user.x"):
    try:
        os.setxattr("wide", name, b"y")
    except OSError:
        pass
PY
echo made
`

// A session whose command made what it could does not make berm look, write or run
// anything outside the project, nor act on the terminal.
func TestHostileSession(t *testing.T) {
	v, j := newLocal(t)
	v.each(t, true, func(t *testing.T, a *account) {
		before := v.files()
		secrets := strings.Split(a.probes["HOST_SECRETS"], ":")
		run := append([]string{"run", "--checkpoint", "--", "bash", "-c", hostile, "hostile\x1b]0;owned\x07"}, secrets...)
		if output, code := a.do(run...); code != 0 || !strings.Contains(output, "made\n") {
			t.Fatalf("exit code %d: %s", code, output)
		}
		for _, args := range [][]string{
			{"diff"}, {"diff", "--stat"}, {"diff", "--name-status"}, {"diff", "--binary", "README", "src"}, {"diff", "--json"},
			{"sessions"}, {"sessions", "--json"}, {"undo", "--list"}, {"apply", "--dry-run"},
		} {
			t.Run(strings.Join(args, " "), func(t *testing.T) {
				within(t, "berm", func() {
					piped, _ := a.do(args...)
					for at, output := range map[string]string{"a terminal": a.onTerminal(args...), "a pipe": piped} {
						// A patch that is piped has the text of files as it is.
						if at == "a terminal" || args[0] != "diff" || len(args) == 2 {
							acts(t, output)
						}
						if strings.Contains(output, "panic") {
							t.Error(tail(output, 2000))
						}
						j.leaks(t, v, before, output)
					}
				})
			})
		}
		t.Run("a second run", func(t *testing.T) {
			output, code := a.do("run", "--session", a.session(), "--checkpoint", "--", "sh", "-c", "ls wide | wc -l; cat soft1 README; rm -rf wide")
			if code == 125 || !strings.Contains(output, "1000") {
				t.Errorf("exit code %d: %s", code, output)
			}
			j.leaks(t, v, before, output)
		})
		t.Run("undo", func(t *testing.T) {
			output, code := a.do("undo")
			if again, _ := a.do("diff", "--name-status", "wide"); code != 0 || !strings.Contains(again, "wide/999") {
				t.Errorf("exit code %d: %s", code, output)
			}
			j.leaks(t, v, before, output)
		})
		t.Run("undo --git", func(t *testing.T) {
			output, _ := a.do("undo", "--git")
			j.leaks(t, v, before, output)
		})
		t.Run("apply", func(t *testing.T) {
			defer a.restore()
			delete(before, "file "+a.project)
			var output string
			within(t, "berm apply", func() { output, _ = a.do("apply") })
			for _, name := range []string{".git/hooks/pre-commit", ".git/config", "pipe", "socket"} {
				if _, err := os.Lstat(filepath.Join(a.project, name)); err == nil {
					t.Errorf("%s was applied", name)
				}
			}
			acts(t, output)
			j.leaks(t, v, before, output, a.project+"/README", a.project+"/src", a.project+"/src/main.c")
			if info, err := os.Lstat(a.project + "/suid"); err == nil && info.Mode()&(os.ModeSetuid|os.ModeSetgid) != 0 {
				t.Errorf("the project has a set-uid file: %v", info.Mode())
			}
		})
		t.Run("discard", func(t *testing.T) {
			within(t, "berm discard", func() {
				if output, code := a.do("discard", "--all"); code != 0 {
					t.Errorf("exit code %d: %s", code, output)
				}
				a.do("run", "-q", "--", "sleep", "1") // sweeps
			})
			if left, _ := filepath.Glob(a.home + "/.local/state/berm/sessions/*/upper/*"); len(left) > 0 {
				t.Errorf("left: %q", left)
			}
			if _, err := os.Lstat("/tmp/owned"); err == nil {
				t.Error("something that the session wrote was executed on the host")
			}
		})
	})
}

// A tree that is deeper than any path may be long is refused with the reason, and goes away
// with its session.
func TestDeepSession(t *testing.T) {
	v, j := newLocal(t)
	v.each(t, true, func(t *testing.T, a *account) {
		const dig = "import os\nfor n in range(1000):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)\nopen('bottom', 'w').close()\n"
		before := v.files()
		if output, code := a.do("run", "--", "python3", "-c", dig); code != 0 {
			t.Fatalf("exit code %d: %s", code, output)
		}
		within(t, "berm", func() {
			for _, args := range [][]string{{"diff"}, {"apply"}, {"run", "--session", a.session(), "--checkpoint", "--", "true"}} {
				output, code := a.do(args...)
				if !strings.Contains(output, "longer than 4095 bytes") || code == 0 {
					t.Errorf("berm %q: exit code %d: %s", args, code, tail(output, 500))
				}
				j.leaks(t, v, before, output)
			}
			if output, code := a.do("discard", "--all"); code != 0 {
				t.Errorf("exit code %d: %s", code, output)
			}
			a.do("run", "-q", "--", "sleep", "1") // sweeps
		})
		if left, _ := filepath.Glob(a.home + "/.local/state/berm/sessions/*/upper/*"); len(left) > 0 {
			t.Errorf("left: %d entries", len(left))
		}
	})
}

// session is the name of the account's only session.
func (a *account) session() string {
	a.t.Helper()
	dirs, _ := filepath.Glob(a.home + "/.local/state/berm/sessions/*/upper")
	if len(dirs) != 1 {
		a.t.Fatalf("the sessions are %q", dirs)
	}
	return filepath.Base(filepath.Dir(dirs[0]))
}

// restore makes the project as it was planted.
func (a *account) restore() {
	a.t.Helper()
	if err := os.RemoveAll(a.project); err != nil {
		a.t.Fatal(err)
	}
	a.write("work/project/README", "a project\n")
	a.write("work/project/src/main.c", "int main(void) { return 0; }\n")
}

// What is hidden in the workspace stays hidden, whatever the session makes of the way to
// it, and what is shown there is not put where a link of the session leads.
func TestHiddenInSession(t *testing.T) {
	const dig = `
exec 2>&1
cat .env sub/secret sub/../.env; cp -r . /tmp/copy; cat /tmp/copy/.env /tmp/copy/sub/secret
mv sub moved; cat moved/secret; mv .env env; cat env; ln .env hard; cat hard; umount .env; umount -l sub/secret; mount --bind . /mnt; cat /mnt/.env
rm -rf sub .env moved; ls -la; cat sub/secret .env
mkdir -p sub; mv sub/shown sub/elsewhere; mv sub away; rm -rf sub
ln -s $1 sub; ln -s $1/id_rsa .env; ls -la . sub/ ; cat sub/* .env
echo ended`
	v, j := newLocal(t)
	v.each(t, false, func(t *testing.T, a *account) {
		defer a.restore()
		a.write("work/project/.env", j.token("a hidden file"))
		a.write("work/project/sub/secret", j.token("a hidden file below"))
		a.write("work/project/sub/shown", "shown")
		before := v.files()
		run := []string{"--hide", ".env", "--hide", "sub/secret", "--ro", "sub/shown", "--", "bash", "-c", dig, "dig", a.home + "/.ssh"}
		name := ""
		for n := range 3 {
			args := []string{"run"}
			if name != "" {
				args = append(args, "--session", name)
			}
			output, code := a.do(append(args, run...)...)
			if n == 0 && (code != 0 || !strings.Contains(output, "ended\n")) {
				t.Fatalf("exit code %d: %s", code, output)
			}
			t.Logf("run %d: exit code %d: %s", n, code, tail(output, 300))
			j.leaks(t, v, before, output)
			name = a.session()
		}
		a.do("discard", "--all")
		// A session that made links of them while nothing was hidden.
		for _, target := range []string{a.home + "/.ssh", "../../../../../../../../../" + a.home + "/.ssh", "/etc"} {
			if output, code := a.do("run", "-q", "--", "sh", "-c", "rm -rf sub .env; ln -s $1 sub; ln -s $1/id_rsa .env", "sh", target); code != 0 {
				t.Fatal(output)
			}
			output, code := a.do(append([]string{"run", "-q", "--session", a.session()}, run...)...)
			t.Logf("%s: exit code %d: %s", target, code, tail(output, 300))
			j.leaks(t, v, before, output)
			a.do("discard", "--all")
		}
		// In place too, where the links are those of the project then.
		for range 2 {
			output, _ := a.do(append([]string{"run", "--rw", "."}, run...)...)
			if where := j.found(output); where != "" {
				t.Errorf("token in the output: %s\n%s", where, output)
			}
		}
		a.do("discard", "--all")
	})
}

// A project around the directories in which berm keeps its sessions and is configured does
// not let a command change what later runs do.
func TestOwnDirectoriesInProject(t *testing.T) {
	v, j := newLocal(t)
	v.each(t, false, func(t *testing.T, a *account) {
		defer a.restore()
		environ := a.environ
		defer func() { a.environ = environ }()
		a.environ = append(slices.Clone(environ), "XDG_CONFIG_HOME="+a.project+"/conf", "XDG_STATE_HOME="+a.project+"/state")
		const plant = `mkdir -p conf/berm; printf 'version: 1\npreset: x\npresets:\n  x:\n    ro: ["~/.ssh", "~/notes.txt"]\n' >conf/berm/config.yaml; ls state/berm/*`
		for _, flags := range [][]string{nil, {"--rw", "."}, {"--rw", ".", "--rw", "conf"}, {"--ro", ".", "--rw", "conf/berm"}} {
			if output, _ := a.do(append(append([]string{"run"}, flags...), "--", "sh", "-c", plant)...); strings.Contains(output, "session") && len(flags) > 0 && !strings.Contains(output, "cannot") {
				t.Errorf("berm run %q: %s", flags, output)
			}
			output, _ := a.do("run", "-q", "--", "sh", "-c", "cat ~/.ssh/id_rsa ~/notes.txt")
			if where := j.found(output); where != "" {
				t.Errorf("berm run %q: token in the output: %s", flags, where)
			}
			if _, err := os.Lstat(a.project + "/conf/berm/config.yaml"); err == nil {
				t.Errorf("berm run %q let the command configure berm", flags)
			}
			a.do("apply")
			if _, err := os.Lstat(a.project + "/conf/berm/config.yaml"); err == nil {
				t.Errorf("berm run %q, berm apply: the command configured berm", flags)
			}
			a.do("discard", "--all")
		}
	})
}
