package apply

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestLostProject: a session that deleted everything takes nothing without consent, the
// repository least of all.
func TestLostProject(t *testing.T) {
	f := newRepository(t)
	f.write("project", map[string]string{"untracked": "u"})
	f.begin()
	f.whiteout(".git", "file", "other", "untracked")
	before := snapshot(t, filepath.Join(f.root, "project"))
	for name, r := range f.apply(f.request()) {
		unit := "."
		if inRepository(name) {
			unit = ".git"
		}
		if r.Outcome != Flagged || r.Unit != unit || !r.Deleted || !strings.Contains(r.Reason, "deleted") {
			t.Errorf("%q: %+v", name, r)
		}
	}
	compare(t, "project", snapshot(t, filepath.Join(f.root, "project")), before)
	consent := f.request()
	consent.Consent = true
	for name, r := range f.apply(consent) {
		if r.Outcome != Applied || !r.Deleted {
			t.Errorf("%q: %+v", name, r)
		}
	}
	compare(t, "project", snapshot(t, filepath.Join(f.root, "project")), nil)
}

// TestLostHistory: no part of a repository goes by itself.
func TestLostHistory(t *testing.T) {
	for name, c := range map[string]struct {
		do   string
		want Outcome
	}{
		"objects":       {`rm -rf .git/objects/??`, Flagged},
		"head":          {`rm .git/HEAD`, Flagged},
		"configuration": {`git branch x; rm .git/config`, Flagged},
		"packed":        {`git gc -q`, Applied},
		"bare":          {`rm -r bare/objects/??`, Flagged},
		"all of bare":   {`rm -r bare`, Flagged},
	} {
		t.Run(name, func(t *testing.T) {
			f := newRepository(t)
			f.git("clone", "-q", "--bare", "--no-hardlinks", ".", "bare")
			f.begin()
			before := snapshot(t, filepath.Join(f.root, "project"))
			f.do(c.do)
			got := f.apply(f.request())
			if len(got) == 0 {
				t.Fatal("no changes")
			}
			for name, r := range got {
				if r.Outcome != c.want {
					t.Errorf("%q: %+v", name, r)
				}
			}
			if c.want == Flagged {
				compare(t, "project", snapshot(t, filepath.Join(f.root, "project")), before)
			}
		})
	}
}

// TestLostAndMoved: a repository that was deleted here and goes on outside stays, all of it.
func TestLostAndMoved(t *testing.T) {
	f := newRepository(t)
	f.whiteout(".git")
	f.git("commit", "-q", "--allow-empty", "-m", "outside")
	consent := f.request()
	consent.Consent = true
	for name, r := range f.apply(consent) {
		if r.Outcome != Conflict || r.Unit != ".git" {
			t.Errorf("%q: %+v", name, r)
		}
	}
	if out := f.git("log", "-1", "--format=%s"); out != "outside" {
		t.Error(out)
	}
	f.git("fsck", "--strict")
}

// TestMostDeleted asks before most of a project goes, whatever else lies there.
func TestMostDeleted(t *testing.T) {
	f := newFixture(t)
	files := map[string]string{"one": "1", "dir/two": "2", "dir/three": "3", "four": "4"}
	f.write("project", files)
	f.begin()
	f.write("session/upper", map[string]string{"new": "n"})
	f.whiteout("one", "dir")
	f.expect(f.apply(f.request()), map[string]Outcome{"new": Applied, "one": Flagged, "dir": Flagged, "dir/two": Flagged, "dir/three": Flagged})
	// Fewer than half of them are one's own to choose.
	f.expect(f.apply(f.request("one")), map[string]Outcome{"one": Applied})

	// What tools made beside what git has of the project does not outweigh it.
	r := newRepository(t)
	for i := range 10 {
		r.write("project", map[string]string{fmt.Sprint("made/", i): "m"})
	}
	r.begin()
	r.whiteout("file", "other")
	r.expect(r.apply(r.request()), map[string]Outcome{"file": Flagged, "other": Flagged})
}

// TestMoved: files that the session gave other names are not deleted, however many they are.
func TestMoved(t *testing.T) {
	f := newFixture(t)
	f.write("project", map[string]string{"one": "first", "dir/two": "second", "dir/three": "third", "four": "fourth"})
	f.begin()
	f.write("session/upper", map[string]string{"src/one": "first", "src/two": "second", "src/three": "third"})
	f.whiteout("one", "dir")
	f.expect(f.apply(f.request()), map[string]Outcome{
		"src": Applied, "src/one": Applied, "src/two": Applied, "src/three": Applied,
		"one": Applied, "dir": Applied, "dir/two": Applied, "dir/three": Applied,
	})

	// One copy stands for one file, and another content of the same size for none.
	f = newFixture(t)
	f.write("project", map[string]string{"a": "same", "b": "same", "c": "same", "d": "like"})
	f.begin()
	f.write("session/upper", map[string]string{"new": "same", "other": "none"})
	f.whiteout("a", "b", "c", "d")
	got := f.apply(f.request())
	f.expect(got, map[string]Outcome{"new": Applied, "other": Applied, "a": Applied, "b": Flagged, "c": Flagged, "d": Flagged})
	if r := got["b"].Reason; !strings.HasSuffix(r, "files of the project: b, c, d") {
		t.Error(r)
	}
}

// TestMovedWithoutEnd: a file that costs a sandbox nothing is not read to its end.
func TestMovedWithoutEnd(t *testing.T) {
	f := newFixture(t)
	f.write("project", map[string]string{"one": "1", "two": "2"})
	f.write("session/upper", map[string]string{"new": "n"})
	for _, name := range []string{"project/one", "session/upper/new"} {
		if err := os.Truncate(filepath.Join(f.root, name), renameTotal+1); err != nil {
			t.Skipf("no sparse files of 1 GiB in %s: %v", f.root, err)
		}
	}
	f.begin()
	f.whiteout("one", "two")
	p, err := New(t.Context(), f.request())
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	f.expect(byPath(p.Results()), map[string]Outcome{"new": Apply, "one": Flagged, "two": Flagged})
}

// TestReplacedDirectory keeps what lies in a directory when the link that was to replace it is held back.
func TestReplacedDirectory(t *testing.T) {
	f := newFixture(t)
	f.write("project", map[string]string{"dir/one": "1", "dir/sub/two": "2", "a": "a", "b": "b", "c": "c", "d": "d"})
	f.begin()
	if err := os.Symlink("/etc", filepath.Join(f.session, "upper/dir")); err != nil {
		t.Fatal(err)
	}
	got := f.apply(f.request())
	f.expect(got, map[string]Outcome{"dir": Flagged, "dir/one": Flagged, "dir/sub": Flagged, "dir/sub/two": Flagged})
	for _, name := range []string{"dir/one", "dir/sub/two"} {
		if _, err := f.project.Lstat(name); err != nil || got[name].Unit != "dir" {
			t.Errorf("%s: %v, %+v", name, err, got[name])
		}
	}
	consent := f.request()
	consent.Consent = true
	f.expect(f.apply(consent), map[string]Outcome{"dir": Applied, "dir/one": Applied, "dir/sub": Applied, "dir/sub/two": Applied})
	if target, err := f.project.Readlink("dir"); err != nil || target != "/etc" {
		t.Errorf("%q, %v", target, err)
	}
}

// TestEmptyDirectories: a directory of which nothing comes is not made.
func TestEmptyDirectories(t *testing.T) {
	f := newFixture(t)
	f.begin()
	f.write("session/upper", map[string]string{"a/.vscode/settings.json": "{}", "b/.envrc": "x", "b/ok": "ok", "empty": ""})
	if err := os.Mkdir(filepath.Join(f.session, "upper/f"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(f.session, "upper/f/fifo"), 0o644); err != nil {
		t.Fatal(err)
	}
	got := f.apply(f.request())
	f.expect(got, map[string]Outcome{
		"a": Flagged, "a/.vscode": Flagged, "a/.vscode/settings.json": Flagged, "b": Applied, "b/.envrc": Flagged, "b/ok": Applied,
		"empty": Applied, "f": Skipped, "f/fifo": Skipped,
	})
	if got["a"].Unit != "a/.vscode/settings.json" {
		t.Errorf("%+v", got["a"])
	}
	for _, name := range []string{"a", "f"} {
		if _, err := f.project.Lstat(name); !os.IsNotExist(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestDeletedAndChanged names what happened on both sides.
func TestDeletedAndChanged(t *testing.T) {
	f := newFixture(t)
	f.write("project", map[string]string{"file": "f", "other": "o", "third": "3"})
	f.begin()
	f.write("session/upper", map[string]string{"other": "session"})
	f.whiteout("file")
	f.write("project", map[string]string{"file": "outside", "other": "outside"})
	got := f.apply(f.request())
	if r := got["file"]; r.Outcome != Conflict || !strings.HasPrefix(r.Reason, "the session deleted it, and it was changed outside") {
		t.Errorf("%+v", r)
	}
	overwrite := f.request("file", "other")
	overwrite.Overwrite = true
	f.expect(f.apply(overwrite), map[string]Outcome{"file": Applied, "other": Applied})
	if f.content("other") != "session" {
		t.Error(f.content("other"))
	}
}

// TestUnreadable leaves out only what the session's owner may not read.
func TestUnreadable(t *testing.T) {
	root, inside := asUser(t)
	if !inside {
		return
	}
	f := openFixture(t, root)
	f.write("project", map[string]string{"was/x": "x"})
	f.begin()
	f.write("session/upper", map[string]string{"closed/a": "a", "unlisted/a": "a", "was/y": "y", "ok": "ok"})
	upper := filepath.Join(f.session, "upper")
	request := f.request()
	os.Chmod(upper+"/closed", 0)
	os.Chmod(upper+"/unlisted", 0o300)
	os.Chmod(upper+"/was", 0o600)
	got := f.apply(request)
	f.expect(got, map[string]Outcome{"closed": Failed, "closed/a": Failed, "unlisted": Failed, "unlisted/a": Failed, "was/y": got["was/y"].Outcome, "ok": Applied})
	if got["was/y"].Outcome == Applied {
		t.Errorf("%+v", got["was/y"])
	}
	if _, err := f.project.Lstat("closed"); !os.IsNotExist(err) {
		t.Error(err)
	}
}

// TestOutsidePaths names what a diff against the project would take back.
func TestOutsidePaths(t *testing.T) {
	f := newRepository(t)
	f.write("project", map[string]string{"third": "3", "gone": "g", "here": "h"})
	time.Sleep(2 * coarse)
	f.begin()
	f.write("session/upper", map[string]string{"file": "2", "dir/new": "n"})
	if list, err := Outside(f.request(), func() Base { t.Error("the base is loaded for nothing"); return nil }); err != nil || len(list) > 0 {
		t.Errorf("%v, %v", list, err)
	}
	f.do(`echo 2 >file; echo 2 >other; git commit -qam second; echo 4 >third; echo x >gone; rm here; echo n >new`)
	f.write("project", map[string]string{"third": "outside", "here": "outside", "unrelated": "u"})
	os.Remove(filepath.Join(f.root, "project/gone"))
	f.git("branch", "outside")
	f.git("commit", "-q", "--allow-empty", "-m", "outside")
	list, err := Outside(f.request(), func() Base { return f.base })
	if got := strings.Join(list, " "); err != nil || got != ".git gone here third" {
		t.Errorf("%s, %v", got, err)
	}
}
