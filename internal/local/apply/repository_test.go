package apply

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func (f *fixture) git(args ...string) string {
	f.t.Helper()
	cmd := exec.Command("git", append([]string{"-C", filepath.Join(f.root, "project")}, args...)...)
	cmd.Env = append(os.Environ(), gitEnv...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		f.t.Fatalf("git %v: %v: %s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

func newRepository(t *testing.T) *fixture {
	t.Helper()
	f := newFixture(t)
	f.write("project", map[string]string{"file": "1\n", "other": "1\n"})
	f.git("init", "-q", "-b", "main")
	f.git("add", ".")
	f.git("commit", "-qm", "first")
	f.begin()
	return f
}

// TestCommit applies a commit, a branch and a hook of the session.
func TestCommit(t *testing.T) {
	f := newRepository(t)
	want := f.do(`echo 2 >file; git commit -qam second; git branch topic/x; git pack-refs --all; git gc -q; echo 3 >new; git add new; git commit -qm third; echo evil >.git/hooks/pre-commit; git config alias.x '!evil'`)
	got := f.apply(f.request(".git/refs/heads/main"))
	for name, r := range got {
		// The hook and the configuration hold the whole repository back, and are told by themselves.
		own := name == ".git/hooks/pre-commit" || name == ".git/config"
		if r.Outcome != Flagged || own != (r.Unit == "") || !own && r.Unit != ".git" {
			t.Errorf("%q: %+v", name, r)
		}
	}
	if out := f.git("log", "--format=%s"); out != "first" {
		t.Error(out)
	}
	f.git("fsck", "--strict")
	consent := f.request("file", "new", ".git/refs/heads/main")
	consent.Consent = true
	for name, r := range f.apply(consent) {
		if r.Outcome != Applied {
			t.Errorf("%q: %+v", name, r)
		}
	}
	if out := f.git("log", "--format=%s"); out != "third\nsecond\nfirst" {
		t.Error(out)
	}
	if out := f.git("status", "--short"); out != "" {
		t.Error(out)
	}
	f.git("fsck", "--strict")
	if out := f.git("rev-parse", "topic/x"); out != f.git("rev-parse", "main~1") {
		t.Error(out)
	}
	seen := f.look(0)
	// "git status" refreshed the times in it.
	delete(seen, ".git/index")
	delete(want, ".git/index")
	compare(t, "the view", seen, want)

	// The next commit of the same session comes over too, though the base is the old one.
	f.do(`echo 4 >file; git commit -qam fourth`)
	for name, r := range f.apply(f.request()) {
		if r.Outcome != Applied && r.Outcome != Flagged {
			t.Errorf("%q: %+v", name, r)
		}
	}
	if out := f.git("log", "-1", "--format=%s"); out != "fourth" {
		t.Error(out)
	}
	f.git("fsck", "--strict")
}

// TestCommitOnBothSides refuses all of a repository that moved outside, and its hint works.
func TestCommitOnBothSides(t *testing.T) {
	for what, outside := range map[string]func(f *fixture){
		"commit": func(f *fixture) {
			f.write("project", map[string]string{"other": "outside\n"})
			f.git("commit", "-qam", "outside")
		},
		"branch": func(f *fixture) { f.git("branch", "outside") },
		"staged": func(f *fixture) {
			f.write("project", map[string]string{"other": "outside\n"})
			f.git("add", "other")
		},
		"unstaged": func(f *fixture) { f.git("update-index", "--assume-unchanged", "other") },
		"packed":   func(f *fixture) { f.git("pack-refs", "--all") },
		"locked":   func(f *fixture) { f.write("project", map[string]string{".git/index.lock": "x"}) },
	} {
		t.Run(what, func(t *testing.T) {
			f := newRepository(t)
			f.do(`echo 2 >file; git commit -qam second`)
			outside(f)
			before := remember(t, filepath.Join(f.root, "project/.git"))
			for name, r := range f.apply(f.request()) {
				in := inRepository(name)
				if in && (r.Outcome != Conflict || r.Unit != ".git") || !in && r.Outcome != Applied {
					t.Errorf("%q: %+v", name, r)
				}
			}
			for name, was := range remember(t, filepath.Join(f.root, "project/.git")) {
				if was.content != before[name].content {
					t.Errorf("%s was written", name)
				}
			}
			f.do(`git bundle create -q session.bundle --all`)
			if r := f.apply(f.request("session.bundle"))["session.bundle"]; r.Outcome != Applied {
				t.Fatalf("%+v", r)
			}
			if what != "locked" {
				f.git("fetch", "-q", "session.bundle", "main:session")
				if out := f.git("log", "-1", "--format=%s", "session"); out != "second" {
					t.Error(out)
				}
			}
		})
	}
}

// TestNewRepository: one that the session made comes whole or not at all.
func TestNewRepository(t *testing.T) {
	f := newFixture(t)
	f.write("project", map[string]string{"sub/file": "1\n"})
	f.begin()
	f.do(`cd sub; git init -q; git add .; git commit -qm first`)
	for name, r := range f.apply(f.request()) {
		if r.Outcome != Flagged {
			t.Errorf("%q: %+v", name, r)
		}
	}
	if _, err := f.project.Lstat("sub/.git"); !os.IsNotExist(err) {
		t.Error(err)
	}
	consent := f.request()
	consent.Consent = true
	for name, r := range f.apply(consent) {
		if r.Outcome != Applied {
			t.Errorf("%q: %+v", name, r)
		}
	}
	if out := f.git("-C", "sub", "log", "--format=%s"); out != "first" {
		t.Error(out)
	}
}

func TestRank(t *testing.T) {
	for name, want := range map[string]int{
		"HEAD": 0, ".git/objects/ab/cdef": 1, "sub/.git/modules/x/objects/pack/pack-1.pack": 1, ".git/refs/heads/main": 2, ".git/logs/HEAD": 2,
		".git/packed-refs": 2, ".git/HEAD": 3, ".git/index": 3, ".git/worktrees/x/HEAD": 3,
	} {
		if got := rank(&step{Path: raw(name)}); got != want {
			t.Errorf("%s: %d, want %d", name, got, want)
		}
	}
	for name, want := range map[string]string{
		".git/HEAD": ".git", ".git/refs/heads/a": ".git", ".git/modules/a/b/refs/heads/x": ".git/modules/a/b", ".git/worktrees/x/HEAD": ".git/worktrees/x", ".git/config": ".git",
		".git/refs": ".git",
	} {
		if got := gitDirectory(".git", name); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}

// TestRefreshed: an index that only has other times is no change.
func TestRefreshed(t *testing.T) {
	f := newRepository(t)
	f.do(`echo 2 >file; git commit -qam second`)
	hour := time.Now().Add(-time.Hour)
	os.Chtimes(filepath.Join(f.root, "project/other"), hour, hour)
	before, _ := f.project.ReadFile(".git/index")
	f.git("status")
	if after, _ := f.project.ReadFile(".git/index"); string(before) == string(after) {
		t.Fatal("git refreshed nothing")
	}
	for name, r := range f.apply(f.request()) {
		if r.Outcome != Applied {
			t.Errorf("%q: %+v", name, r)
		}
	}
	f.git("fsck", "--strict")
}

func FuzzIndex(f *testing.F) {
	t := newFixture(f)
	t.write("project", map[string]string{"file": "1\n", "file2": "2\n", "dir/other": "1\n"})
	t.git("init", "-q")
	t.git("add", "file", "dir")
	t.git("add", "-N", "file2")
	for _, version := range []string{"2", "3", "4"} {
		t.git("update-index", "--index-version", version)
		b, err := t.project.ReadFile(".git/index")
		if err != nil {
			f.Fatal(err)
		}
		if indexSum(b) == nil {
			f.Errorf("version %s is not understood", version)
		}
		if indexSum(b[:len(b)/2]) != nil {
			f.Errorf("half of version %s is one too", version)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		sum := indexSum(b)
		if sum == nil {
			return
		}
		if len(b) > 16 { // the time of the first entry
			c := []byte(string(b))
			if c[12]++; string(indexSum(c)) != string(sum) && len(b) > 12+62+20 {
				t.Error("a time counts")
			}
		}
	})
}
