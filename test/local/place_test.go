package local

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// in is the person with another project, which is made.
func (p *person) in(name string) *person {
	p.Helper()
	other := *p
	other.project = p.path(name)
	other.mkdir(other.project)
	other.write(filepath.Join(other.project, "file"), "one\n")
	return &other
}

// cycle runs a command, looks at what it changed and takes it over.
func (p *person) cycle() {
	p.Helper()
	p.sh(`test "$(pwd -P)" = "$PWD" && cat file && echo two > file && mkdir -p sub/sub && echo new > sub/sub/new`).prints("one")
	r := p.berm("diff").exits(0)
	if !strings.Contains(r.stdout, "\n-one\n+two\n") || !strings.Contains(r.stdout, "sub/sub/new") {
		p.Errorf("%v", r)
	}
	p.berm("apply").exits(0)
	if got := p.read(filepath.Join(p.project, "file")); got != "two\n" {
		p.Errorf("applied %q", got)
	}
	if got := p.read(filepath.Join(p.project, "sub/sub/new")); got != "new\n" {
		p.Errorf("applied %q", got)
	}
	p.sh("cat file; echo three > file", "--rw", ".").prints("two")
	if got := p.read(filepath.Join(p.project, "file")); got != "three\n" {
		p.Errorf("written %q", got)
	}
	p.sh("cat file; ! touch new 2>/dev/null", "--ro", ".").prints("three")
}

func TestNames(t *testing.T) {
	names := []string{"-a b\nc:d,e\\f\\,\"'é€😀\xff\xfe\x1b[31mupperdir=x ", strings.Repeat("x", 200)}
	if all {
		names = append(names, "a b", "new\nline", "colon:comma,", `back\slash\,\:`, `q"uo'te`, "é€😀", "not\xff\xfeutf8", "-dash", "\x1b[31mred",
			"$(id)", "%s%n", "`id`", "upperdir=x,lowerdir=y", " lead", "trail ", "#", "*", "~", `\`, "\t", "\x01\x7f", "\u202eright-to-left")
	}
	each(t, func(p *person) {
		for _, name := range names {
			p.in(name).cycle()
		}
	})
}

// Paths are as long as the kernel takes them, and refused beyond.
func TestLongPaths(t *testing.T) {
	each(t, func(p *person) {
		deep := p.in("deep")
		const most = 4080 // room for a name in it
		for i := 0; len(deep.project) < most; i++ {
			part := strings.Repeat("y", max(1, min(200, most-1-len(deep.project))))
			deep = deep.in(filepath.Join(deep.project, part))
			if i < 18 && i%6 != 0 {
				continue
			}
			r := deep.sh("cat file; echo two > file")
			if r.code != 0 || r.stdout != "one\n" {
				r.refuses()
			}
			if r.code == 0 && len(deep.project) < 4000 {
				deep.berm("apply").exits(0)
				if got := deep.read(filepath.Join(deep.project, "file")); got != "two\n" {
					p.Errorf("%d bytes: %q", len(deep.project), got)
				}
			}
		}
		p.berm("discard", "--all").exits(0)
	})
}

// A project that is reached over a link is the one that the link leads to.
func TestLinkedProject(t *testing.T) {
	each(t, func(p *person) {
		p.link("link", "project")
		cmd := p.command("run", "--", "sh", "-c", "pwd; cat file; echo two > file")
		cmd.Dir = p.path("link")
		cmd.Env = append(cmd.Env, "PWD="+p.path("link"))
		p.finish(cmd).prints(p.project + "\none")
		p.berm("run", "-C", p.path("link"), "--", "cat", "file").prints("one")
		cmd = p.command("apply")
		cmd.Dir = p.path("link")
		p.finish(cmd).exits(0)
		if got := p.read("project/file"); got != "two\n" {
			p.Errorf("applied %q", got)
		}
	})
}

// What is no project is refused: everything would be seen.
func TestNoProject(t *testing.T) {
	each(t, func(p *person) {
		for _, dir := range []string{p.home, filepath.Dir(p.home), "/", "/tmp", "/etc", "/usr", "/proc", "/sys", "/dev", "/var", "/home", "/proc/self", "/run"} {
			if _, err := os.Stat(dir); err != nil {
				continue
			}
			for _, flags := range [][]string{nil, {"--rw", "."}, {"--ro", "."}} {
				cmd := p.command(append(append([]string{"run"}, flags...), "--", "true")...)
				cmd.Dir = dir
				p.finish(cmd).refuses("workspace")
			}
			p.berm("run", "-C", dir, "--", "true").refuses("workspace")
		}
		p.berm("run", "-C", "nosuch", "--", "true").exits(125).says("nosuch")
		p.berm("run", "-C", "file", "--", "true").exits(125).says("not a directory")
		p.mkdir("gone")
		cmd := p.program("sh", "-c", `cd "$1" && rmdir "$1" && exec "$0" run -- true`, binary, p.path("gone"))
		p.finish(cmd).exits(125)
	})
}

// A project below a directory of programs is one like every other.
func TestProjectAmongPrograms(t *testing.T) {
	root(t)
	each(t, func(p *person) {
		script := `mkdir /tmp/berm-usr-$$ && mount -t tmpfs none /tmp/berm-usr-$$ && cd /tmp/berm-usr-$$ && mkdir upper work && mount -t overlay -o lowerdir=/usr,upperdir=$PWD/upper,workdir=$PWD/work none /usr && rmdir /nosuch 2>/dev/null || true
			mount -t tmpfs none /usr/src && mkdir /usr/src/x && echo one > /usr/src/x/file && chown -R ` + fmt.Sprintf("%d:%[1]d", p.uid) + ` /usr/src/x
			cd /; umount -l /tmp/berm-usr-$$; rmdir /tmp/berm-usr-$$; cd /usr/src/x; exec ` + p.asUser() + `"$@"`
		other := p.byRoot().within(script)
		other.sh("pwd; cat file; echo two > file; cat file; ls /usr/bin/env").prints("/usr/src/x\none\ntwo\n/usr/bin/env")
	})
}

func TestHomes(t *testing.T) {
	each(t, func(p *person) {
		with := func(home string) *person {
			other := *p
			other.env = append([]string{"HOME=" + home}, p.env...)
			other.env = append(other.env[:0:0], "PATH="+os.Getenv("PATH"), "TMPDIR="+p.temp, "XDG_STATE_HOME="+p.path("state"))
			if home != "" {
				other.env = append(other.env, "HOME="+home)
			}
			return &other
		}
		p.mkdir("state")
		p.write(".netrc", "secret")
		p.link("homelink", ".")
		look := "cat $HOME/.netrc 2>/dev/null; cat " + p.path(".netrc") + " 2>/dev/null; touch $HOME/x && echo $HOME"
		with(p.home).sh(look).prints(p.home)
		with(p.path("homelink")).sh(look).prints(p.home)
		// One that is not there is empty inside, like every other.
		with(p.path("nosuch")).sh("touch $HOME/x && echo $HOME").prints(p.path("nosuch"))
		with("").sh("true").refuses("HOME")
		with("relative").sh("true")
		with("/").sh("touch $HOME/x && echo ok").prints("ok")
	})
}

// What cannot be written is told.
func TestReadOnlyHome(t *testing.T) {
	root(t)
	each(t, func(p *person) {
		other := p.byRoot().within("mount --bind " + p.home + " " + p.home + "; mount -o remount,bind,ro " + p.home + "; cd " + p.project + "; exec " + p.asUser() + `"$@"`)
		other.sh("true").refuses("XDG_STATE_HOME")
		other.sh("cat file; touch new 2>/dev/null || echo no", "--rw", ".").prints("one\nno")
		other.sh("cat file", "--ro", ".").prints("one")
		other.env = append(other.env, "XDG_STATE_HOME="+p.temp)
		other.sh("cat file; echo two > file; cat file").prints("one\ntwo")
		r := other.berm("apply")
		if r.code == 0 {
			p.Errorf("%v", r)
		}
		p.must(os.RemoveAll(filepath.Join(p.temp, "berm")))
	})
}

// mounted is the person with a project, and another directory, on a file system that a
// script mounts at $M.
func (p *person) mounted(mount string) *person {
	p.Helper()
	p.mkdir("m")
	script := "M=" + p.path("m") + "; T=" + p.temp + "; " + mount + "\n" +
		`if [ ! -e "$M/project" ] && mkdir "$M/project" 2>/dev/null; then echo one >"$M/project/file"; mkdir "$M/state"; chown -R ` + fmt.Sprintf("%d:%[1]d", p.uid) + ` "$M/project" "$M/state"; fi
		cd "$M/project"; exec ` + p.asUser() + `"$@"`
	return p.byRoot().within(script)
}

// script runs steps with $B as berm in one environment.
func (p *person) script(steps string) result {
	p.Helper()
	return p.finish(p.program("sh", "-c", "B="+binary+"\n"+steps))
}

const steps = `
cat file || exit 101
$B run -- sh -c 'cat file; echo two > file; mkdir -p d/e; echo new > d/e/n; rm -rf d; mkdir d; echo new > d/n; mv file File; mv File file' || exit 102
test "$(cat file)" = one || exit 103
$B diff --stat || exit 104
$B apply || exit 105
test "$(cat file d/n)" = "$(printf 'two\nnew')" || exit 106
$B run --rw . -- sh -c 'rm -r d; echo three > file' || exit 107
test ! -e d && test "$(cat file)" = three || exit 108
$B run --ro . -- sh -c 'cat file; ! touch x 2>/dev/null' || exit 109
$B run -- sh -c 'echo four > file' || exit 110
$B discard || exit 111
test "$(cat file)" = three || exit 112
`

func TestTmpfs(t *testing.T) {
	root(t)
	each(t, func(p *person) {
		p.mounted("mount -t tmpfs none $M").script(steps).exits(0)
	})
}

// On the root file system of a container an ordinary user can work; root's ids cannot be
// mapped there.
func TestOverlay(t *testing.T) {
	root(t)
	each(t, func(p *person) {
		c := p.mounted("mount -t tmpfs none $T; mkdir $T/l $T/u $T/w; mount -t overlay -o lowerdir=$T/l,upperdir=$T/u,workdir=$T/w none $M")
		if p.uid == 0 {
			c.sh("true").refuses("overlayfs", "ordinary user")
			c.sh("true", "--rw", ".").refuses("overlayfs")
		} else {
			c.script(steps).exits(0)
		}
		c.script("XDG_STATE_HOME=$PWD/../state exec $B run -- true").refuses("overlayfs", "XDG_STATE_HOME")
	})
}

// Without extended attributes nothing can be kept.
func TestNoAttributes(t *testing.T) {
	root(t)
	each(t, func(p *person) {
		c := p.mounted("mount -t ramfs none $M")
		c.script("XDG_STATE_HOME=$PWD/../state exec $B run -- true").refuses("extended attributes", "XDG_STATE_HOME")
		if p.uid == 0 {
			c.sh("true").refuses("ordinary user")
		} else {
			c.script(steps).exits(0)
		}
	})
}

// image is a mount command for a file system of a kind, which it makes.
func image(t *testing.T, kind, program string, args ...string) string {
	t.Helper()
	known, _ := os.ReadFile("/proc/filesystems")
	if !strings.Contains(string(known), "\t"+kind+"\n") {
		t.Skipf("the kernel has no %s", kind)
	}
	if _, err := exec.LookPath(program); err != nil {
		t.Skipf("%s is not installed", program)
	}
	file := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(file, 320<<20); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(program, append(args, file)...).CombinedOutput(); err != nil {
		t.Skipf("%s %v: %v %s", program, args, err, out)
	}
	return "mount -o loop " + file + " $M"
}

func TestOtherFileSystems(t *testing.T) {
	slow(t)
	for name, how := range map[string][]string{
		"ext4": {"ext4", "mkfs.ext4", "-q"}, "casefold": {"ext4", "mkfs.ext4", "-q", "-O", "casefold"}, "xfs": {"xfs", "mkfs.xfs", "-q"},
		"xfs-ci": {"xfs", "mkfs.xfs", "-q", "-n", "version=ci"}, "btrfs": {"btrfs", "mkfs.btrfs", "-q"}, "vfat": {"vfat", "mkfs.vfat"},
	} {
		t.Run(name, func(t *testing.T) {
			root(t)
			each(t, func(p *person) {
				mount := image(p.T, how[0], how[1], how[2:]...)
				if out, err := exec.Command("unshare", "--mount", "sh", "-c", strings.ReplaceAll(mount, "$M", "/mnt")).CombinedOutput(); err != nil {
					p.Skipf("the kernel cannot mount it: %s", out)
				}
				c := p.mounted(mount)
				r := c.sh("cat file; echo two > file")
				if r.code == 125 { // vfat and case-insensitive directories are no lower layers
					r.refuses("--rw .")
					c.sh("cat file; echo two > file; cat file", "--rw", ".").prints("one\ntwo")
					return
				}
				p.berm("discard", "--all")
				if r := c.script(steps); r.code != 0 {
					p.Errorf("%v", r)
				}
				c.script("export XDG_STATE_HOME=$M/state\n" + steps)
			})
		})
	}
}

// A project that cannot be written can be worked on beside.
func TestReadOnlyProject(t *testing.T) {
	root(t)
	each(t, func(p *person) {
		c := p.mounted("mount -t tmpfs none $M; mkdir $M/project; echo one >$M/project/file; chown -R " + fmt.Sprintf("%d:%[1]d", p.uid) + " $M/project; mount -o remount,ro $M")
		c.sh("cat file; echo two > file; cat file").prints("one\ntwo")
		c.sh("cat file; echo two > file", "--rw", ".").exits(2)
		r := c.script("$B run -q -- sh -c 'echo > x'; $B apply")
		if r.code == 0 || !strings.Contains(r.stdout+r.stderr, "read-only") {
			p.Errorf("%v", r)
		}
	})
}

// A file system on which nothing may be executed does not come to be one on which it may.
func TestNoExec(t *testing.T) {
	root(t)
	each(t, func(p *person) {
		c := p.mounted("mount -t tmpfs -o noexec none $M")
		for _, flags := range [][]string{{"--rw", "."}, {"--ro", "."}} {
			c.script("cp /bin/true prog; chmod 755 prog; exec $B run " + strings.Join(flags, " ") + " -- ./prog").exits(126)
		}
	})
}

// Berm's own directory cannot be seen, wherever it is, nor be worked in.
func TestStateDirectory(t *testing.T) {
	each(t, func(p *person) {
		inside := *p
		inside.env = append(inside.env, "XDG_STATE_HOME="+filepath.Join(p.project, ".state"))
		for _, flags := range [][]string{nil, {"--rw", "."}, {"--ro", "."}} {
			r := inside.sh("ls -A .state/berm; echo evil > .state/berm/evil; rm -rf .state/berm; true", flags...).exits(0)
			if r.stdout != "" {
				p.Errorf("%v: %v", flags, r)
			}
		}
		if _, err := os.Stat(p.path("project/.state/berm/audit/log.jsonl")); err != nil {
			p.Error(err)
		}
		inside.sh("echo two > file").exits(0)
		inside.berm("apply").exits(0)
		if got := p.read("project/file"); got != "two\n" {
			p.Errorf("applied %q", got)
		}
		p.sh("touch x").exits(0)
		for _, flags := range [][]string{{"--rw", "~/.local"}, {"--rw", "~/.local/state"}, {"--rw", "~/.local/state/berm"}, {"--ro", "~/.local/state/berm/sessions"}} {
			r := p.sh("cd ~/.local/state/berm/ && find . -mindepth 1; echo evil > ~/.local/state/berm/evil; true", flags...)
			if r.code == 0 && r.stdout != "" {
				p.Errorf("%v: %v", flags, r)
			}
		}
		if _, err := os.Stat(p.path(".local/state/berm/evil")); err == nil {
			p.Error("the sandbox wrote to Berm's directory")
		}
		for _, dir := range []string{".local/state/berm", ".local/state/berm/sessions", ".local/state/berm/sessions/project-1/upper"} {
			for _, flags := range [][]string{nil, {"--rw", "."}} {
				cmd := p.command(append(append([]string{"run"}, flags...), "--", "true")...)
				cmd.Dir = p.path(dir)
				p.finish(cmd).refuses("Berm's own")
			}
		}
	})
}

// Files of other owners in the project keep them.
func TestOtherOwners(t *testing.T) {
	root(t)
	each(t, func(p *person) {
		p.write("project/theirs", "theirs\n")
		p.must(os.Chown(p.path("project/theirs"), 12321, 12321))
		p.write("project/private", "private\n")
		p.must(os.Chown(p.path("project/private"), 12321, 12321))
		p.must(os.Chmod(p.path("project/private"), 0o600))
		r := p.sh("cat theirs; cat private; echo more >> theirs; echo two > file; true").exits(0)
		if p.uid == 0 {
			if r.stdout != "theirs\nprivate\n" {
				p.Errorf("%v", r)
			}
		} else if r.stdout != "theirs\n" {
			p.Errorf("%v", r)
		}
		p.berm("apply").exits(0)
		info, err := os.Stat(p.path("project/theirs"))
		p.must(err)
		if p.uid == 0 != (p.read("project/theirs") == "theirs\nmore\n") || !strings.Contains(fmt.Sprintf("%+v", info.Sys()), "Uid:12321") {
			p.Errorf("%q %+v", p.read("project/theirs"), info.Sys())
		}
	})
}

// A project of another's: an ordinary user can look and write beside as without a sandbox.
func TestForeignProject(t *testing.T) {
	p := root(t)
	other := newPerson(t, ordinary)
	p.must(os.Chmod(p.home, 0o755))
	other.project = p.project
	r := other.sh("cat file; echo mine > new; cat new").exits(0)
	if r.stdout != "one\nmine\n" {
		t.Errorf("%v", r)
	}
	if r := other.berm("apply"); r.code == 0 {
		t.Errorf("%v", r)
	}
	other.sh("echo > file", "--rw", ".").exits(2)
	other.berm("discard", "--all").exits(0)
	p.must(os.Chmod(p.project, 0o700))
	cmd := other.command("run", "-C", p.project, "--", "true")
	cmd.Dir = other.home
	other.finish(cmd).exits(125)

	// Root works on a user's project and leaves its files the user's. Ids beyond those that
	// a sandbox has cannot be mapped.
	const account = 12345
	mine := newPerson(t, account)
	worker := newPerson(t, 0)
	worker.project = mine.project
	worker.sh("cat file; echo two > file; echo new > new").prints("one")
	worker.berm("apply").exits(0)
	for _, name := range []string{"file", "new"} {
		info, err := os.Stat(mine.path("project/" + name))
		p.must(err)
		if !strings.Contains(fmt.Sprintf("%+v", info.Sys()), fmt.Sprintf("Uid:%d", account)) {
			t.Errorf("%s: %+v", name, info.Sys())
		}
	}
}

// Whoever cannot write to a project for the ids of its files is told before.
func TestUnmappedOwners(t *testing.T) {
	p := root(t)
	other := newPerson(t, ordinary)
	p.must(os.Chown(other.project, ordinary, 12321))
	other.sh("cat file").prints("one").says("group 12321", "newgrp")
	other.sh("cat file; echo two > file", "--rw", ".").prints("one")
	if r := other.sh("cat file", "--ro", "."); r.stderr != "" {
		t.Errorf("%v", r)
	}
	p.must(os.Chown(p.project, ordinary, ordinary))
	p.sh("cat file").prints("one").says(fmt.Sprintf("user %d", ordinary), "below 65536")
	p.must(os.Chown(p.project, 12345, 12345))
	if r := p.sh("cat file"); r.stderr != "" {
		t.Errorf("%v", r)
	}
}

func TestGitWorktree(t *testing.T) {
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("git is not installed")
	}
	each(t, func(p *person) {
		p.env = append(p.env, "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@b", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@b")
		p.finish(p.program("sh", "-ec", "git init -q .; git add file; git commit -qm first; git worktree add -q ../tree")).exits(0)
		tree := *p
		tree.project = p.path("tree")
		p.sh("git status --short; echo two > file; git status --short; git -c user.name=a -c user.email=a@b commit -qam second && git log --oneline | wc -l").prints("M file\n2")
		if r := p.berm("diff").exits(0); !strings.Contains(r.stdout, "+two") {
			p.Errorf("%v", r)
		}
		// The repository of a worktree lies elsewhere: what a person does not show is not seen.
		r := tree.sh("git status --short")
		if r.code == 0 {
			p.Errorf("%v", r)
		}
		tree.sh("git status --short; git log --oneline | wc -l", "--ro", p.project).prints("1")
	})
}
