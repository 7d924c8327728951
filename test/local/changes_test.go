package local

import (
	"os"
	"strings"
	"testing"
	"time"
)

// repository makes the project a repository of git with one commit.
func (p *person) repository() {
	p.Helper()
	p.env = append(p.env, "GIT_AUTHOR_NAME=p", "GIT_AUTHOR_EMAIL=p@localhost", "GIT_COMMITTER_NAME=p", "GIT_COMMITTER_EMAIL=p@localhost")
	p.finish(p.program("sh", "-c", "git init -q && git add . && git commit -qm one")).exits(0)
	// A session takes what is younger than a tick of the kernel's for changed since its start.
	time.Sleep(20 * time.Millisecond)
}

// commit commits in a sandbox, whose home and environment are empty.
const commit = "git -c user.name=s -c user.email=s@localhost commit -q --allow-empty -am "

// A session that deleted everything takes the project nothing without being agreed to: the
// answer no leaves the repository whole.
func TestApplyOfRogue(t *testing.T) {
	each(t, func(p *person) {
		p.write("project/other", "two\n")
		p.repository()
		p.sh("rm -rf ./* .git").exits(0)
		screen := p.onTerminal(p.command("apply"))
		screen.expect("deleted this repository")
		screen.expect("[y/N]")
		screen.keys("n\r")
		screen.ends(1)
		if r := p.finish(p.program("git", "status", "--short")).exits(0); r.stdout != "" {
			p.Errorf("%v", r)
		}
		p.finish(p.program("git", "fsck", "--strict")).exits(0)
		if r := p.berm("apply", "--flagged").exits(0); !strings.Contains(r.stdout, "deleted     .git (") || strings.Contains(r.stdout, "applied") || strings.Contains(r.stdout, ".git/HEAD") {
			p.Errorf("%v", r)
		}
		if left, _ := os.ReadDir(p.project); len(left) > 0 {
			p.Errorf("left: %v", left)
		}
	})
}

// What the project has that git does not know is no deletion of a session that became a
// commit; nor does a commit that is not there leave anything.
func TestUndoToCommit(t *testing.T) {
	each(t, func(p *person) {
		p.repository()
		p.write("project/untracked", "mine\n")
		p.sh("echo two > file; touch new").exits(0)
		if r := p.berm("undo", "--git=nosuch").exits(1).says(`no commit "nosuch"`, "hint: "); strings.Contains(r.stderr, "fatal") {
			p.Errorf("%v", r)
		}
		p.berm("undo", "--list").exits(0).says("no checkpoints")
		p.berm("undo", "--git").exits(0)
		if r := p.berm("sessions").exits(0); !strings.Contains(r.stdout, "berm undo --git=HEAD") {
			p.Errorf("%v", r)
		}
		p.berm("diff", "file", "untracked").prints("")
		p.berm("apply").exits(0)
		if p.read("project/untracked") != "mine\n" || p.read("project/file") != "one\n" {
			p.Error("the project changed")
		}
	})
}

// Before its first command a session was the project, of which there need be no copy.
func TestUndoOfFirst(t *testing.T) {
	each(t, func(p *person) {
		p.sh("echo two > file", "--checkpoint").exits(0)
		p.berm("undo").exits(0)
		p.berm("diff").prints("")
		p.berm("undo").exits(0)
		if r := p.berm("diff"); !strings.Contains(r.stdout, "+two") {
			p.Errorf("%v", r)
		}
	})
}

// Both sides are told apart, with the ways on.
func TestChangedOnBothSides(t *testing.T) {
	each(t, func(p *person) {
		p.write("project/gone", "one\n")
		p.write("project/third", "one\n")
		p.repository()
		p.sh("echo session > file; rm gone; " + commit + "two").exits(0)
		p.write("project/file", "outside\n")
		p.write("project/gone", "outside\n")
		p.finish(p.program("git", "commit", "-qam", "outside")).exits(0)
		p.berm("diff").exits(0).says("changed outside", "\n  file\n", "\n  gone\n", "\n  .git\n")
		r := p.berm("apply").exits(1)
		for _, want := range []string{"the session deleted it, and it was changed outside", "same lines"} {
			if !strings.Contains(r.stdout, want) {
				p.Errorf("no %q: %v", want, r)
			}
		}
		if strings.Count(r.stdout, ".git") != 1 {
			p.Errorf("the repository is not told in one line: %v", r)
		}
		r.says("--overwrite PATH", "berm run -s project-1 -- git -C . bundle create session.bundle --all", "session project-1 of "+p.project)
		p.berm("apply", "--overwrite").exits(2)
		p.berm("apply", "--overwrite", "file", "gone").exits(0)
		if p.read("project/file") != "session\n" {
			p.Error(p.read("project/file"))
		}
		p.berm("run", "-s", "project-1", "--", "git", "-C", ".", "bundle", "create", "session.bundle", "--all").exits(0)
		p.berm("apply", "-s", "project-1", "session.bundle").exits(0)
		p.finish(p.program("git", "-C", ".", "fetch", "-q", "session.bundle")).exits(0)
		p.finish(p.program("git", "log", "-1", "--format=%s", "FETCH_HEAD")).prints("two")
		p.berm("discard").exits(0)
		// What is gone is not fetched.
		p.sh("rm -r .git").exits(0)
		p.finish(p.program("git", "commit", "-q", "--allow-empty", "-m", "more")).exits(0)
		if r := p.berm("apply").exits(1); strings.Contains(r.stderr, "bundle") {
			p.Errorf("%v", r)
		}
	})
}

// Files and directories move between directories: mv would copy, but git mv and package
// managers give up.
func TestMoves(t *testing.T) {
	each(t, func(p *person) {
		p.berm("run", "--", "python3", "-c", `
import os
for top in '.', '/tmp', os.environ['HOME']:
    os.chdir(top)
    os.mkdir('a')
    os.mkdir('b')
    os.mkdir('a/dir')
    open('new', 'w').close()
    os.rename('new', 'a/new')
    os.link('a/new', 'b/link')
    os.rename('a/dir', 'b/dir')
    if os.path.exists('file'):
        os.rename('file', 'b/file')
print('ok')`).prints("ok")
	})
}

// The session that is taken is named when there are several, or the project is elsewhere.
func TestChosenSession(t *testing.T) {
	p := user(t)
	p.sh("echo two > file").exits(0)
	if r := p.berm("diff").exits(0); r.stderr != "" {
		p.Errorf("%v", r)
	}
	p.sh("echo three > file").exits(0)
	p.berm("diff").exits(0).says("session project-2 of "+p.project, "newest of 2")
	p.berm("diff", "nosuch").exits(1).says(`"nosuch" is neither in the project nor in session project-2`)
	p.mkdir("project/sub")
	cmd := p.command("diff")
	cmd.Dir = p.path("project/sub")
	p.berm("discard").exits(0)
	p.finish(cmd).exits(0).says("session project-1 of " + p.project)
	p.sh("echo four > file").exits(0).says("session project-3")
}

// Piped, a diff is what git apply takes, whatever it has besides.
func TestDiffForGit(t *testing.T) {
	p := user(t)
	p.repository()
	p.sh(`printf 'a\0b' > bin; ` + commit + `two; git checkout -q -b x; mkfifo f`).exits(0)
	p.finish(p.program("sh", "-c", binary+" diff | git apply -")).exits(0)
	if p.read("project/bin") != "a\x00b" {
		p.Errorf("%q", p.read("project/bin"))
	}
	if r := p.berm("diff", ".git/HEAD").exits(0); !strings.Contains(r.stdout, "refs/heads/x") {
		p.Errorf("%v", r)
	}
}

// What never comes keeps nobody waiting, and what cannot be read nothing else.
func TestApplyLeavesOut(t *testing.T) {
	p := user(t)
	p.sh("mkfifo f; mkdir d; mkfifo d/f; echo x > ok").exits(0)
	p.berm("apply").exits(0).says("which is gone")
	if _, err := os.Lstat(p.path("project/d")); err == nil {
		p.Error("an empty directory was made")
	}
	p.sh("mkdir closed; echo x > closed/x; chmod 0 closed; echo x > first; echo x > second").exits(0)
	p.berm("apply", "first").exits(0)
	p.berm("apply").exits(1).says("closed")
	if p.read("project/second") != "x\n" {
		p.Error("not applied")
	}
	if _, err := os.Lstat(p.path("project/closed")); err == nil {
		p.Error("a directory came without what is in it")
	}
	p.berm("run", "-s", "project-2", "--", "chmod", "700", "closed").exits(0)
	p.berm("apply").exits(0)
	if p.read("project/closed/x") != "x\n" {
		p.Error("not applied")
	}
}
