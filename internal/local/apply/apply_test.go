package apply

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/local/change"
)

// fixture is a session beside a project, with canaries around both.
type fixture struct {
	t       testing.TB
	root    string
	session string
	upper   *os.Root
	project *os.Root
	base    memory
	started time.Time
}

func newFixture(t testing.TB) *fixture {
	t.Helper()
	f := openFixture(t, t.TempDir())
	return f
}

func openFixture(t testing.TB, root string) *fixture {
	t.Helper()
	f := &fixture{t: t, root: root, session: filepath.Join(root, "session")}
	for _, dir := range []string{"session", "session/upper", "project", "outside"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	var err error
	if f.upper, err = os.OpenRoot(filepath.Join(f.session, "upper")); err != nil {
		t.Fatal(err)
	}
	if f.project, err = os.OpenRoot(filepath.Join(root, "project")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		f.upper.Close()
		f.project.Close()
		// What an ordinary user may not enter he cannot remove.
		filepath.WalkDir(root, func(name string, d fs.DirEntry, _ error) error {
			if d != nil && d.IsDir() {
				os.Chmod(name, 0o755)
			}
			return nil
		})
	})
	return f
}

// write makes files below root/dir; a value that begins with "->" is a link, "" a
// directory.
func (f *fixture) write(dir string, files map[string]string) {
	f.t.Helper()
	for _, name := range slices.Sorted(maps.Keys(files)) {
		full := filepath.Join(f.root, dir, name)
		content := files[name]
		err := os.MkdirAll(filepath.Dir(full), 0o755)
		switch target, link := strings.CutPrefix(content, "->"); {
		case err != nil:
		case link:
			os.Remove(full)
			err = os.Symlink(target, full)
		case content == "":
			err = os.MkdirAll(full, 0o755)
		default:
			err = os.WriteFile(full, []byte(content), 0o644)
		}
		if err != nil {
			f.t.Fatal(err)
		}
	}
}

func (f *fixture) whiteout(names ...string) {
	f.t.Helper()
	for _, name := range names {
		full := filepath.Join(f.session, "upper", name)
		os.MkdirAll(filepath.Dir(full), 0o755)
		if err := unix.Mknod(full, unix.S_IFCHR, 0); err != nil {
			f.t.Fatal(err)
		}
	}
}

// begin records the project as it is now.
func (f *fixture) begin() {
	f.base = remember(f.t, filepath.Join(f.root, "project"))
	f.started = time.Now()
}

func (f *fixture) request(paths ...string) Request {
	f.t.Helper()
	changes, err := change.List(f.t.Context(), f.upper, f.project, change.Limits{})
	if err != nil {
		f.t.Fatal(err)
	}
	r := Request{Dir: f.session, Upper: f.upper, Project: f.project, Started: f.started, Changes: changes, Paths: paths}
	if f.base != nil {
		r.Base = f.base
	}
	return r
}

// apply plans and runs, and returns what became of each path.
func (f *fixture) apply(r Request) map[string]Result {
	f.t.Helper()
	p, err := New(f.t.Context(), r)
	if err != nil {
		f.t.Fatal(err)
	}
	defer p.Close()
	list, err := p.Run(f.t.Context())
	if err != nil {
		f.t.Fatal(err)
	}
	if _, err := os.Lstat(journalPath(f.session)); err == nil {
		f.t.Error("the journal is left")
	}
	return byPath(list)
}

func byPath(list []Result) map[string]Result {
	m := map[string]Result{}
	for _, r := range list {
		m[r.Path] = r
	}
	return m
}

func (f *fixture) expect(got map[string]Result, want map[string]Outcome) {
	f.t.Helper()
	for name, outcome := range want {
		if got[name].Outcome != outcome {
			f.t.Errorf("%q: %+v, want %s", name, got[name], outcome)
		}
	}
	for name, r := range got {
		if _, ok := want[name]; !ok {
			f.t.Errorf("%q: unexpected %+v", name, r)
		}
	}
}

// memory is a base that knows everything.
type memory map[string]remembered

type remembered struct {
	stamp   Stamp
	content string
}

func (m memory) Stat(name string) (Stamp, State) {
	r, ok := m[name]
	if !ok {
		return Stamp{}, Absent
	}
	return r.stamp, Present
}

func (m memory) Content(name string, limit int64) ([]byte, error) {
	r, ok := m[name]
	if !ok || int64(len(r.content)) > limit {
		return nil, berm.Errorf(berm.NotFound, "not known")
	}
	return []byte(r.content), nil
}

func remember(t testing.TB, dir string) memory {
	t.Helper()
	m := memory{}
	walk(t, dir, func(name string, st *unix.Stat_t, content string) {
		m[name] = remembered{StampOf(st), content}
	})
	return m
}

// walk visits all below dir; content is that of a file or the target of a link.
func walk(t testing.TB, dir string, visit func(name string, st *unix.Stat_t, content string)) {
	t.Helper()
	err := filepath.WalkDir(dir, func(full string, d fs.DirEntry, err error) error {
		if err != nil || full == dir {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(full, &st); err != nil {
			return err
		}
		content := ""
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			if st.Size > 16<<20 {
				content = fmt.Sprint("huge ", st.Size)
				break
			}
			if st.Size > 0 {
				b, err := os.ReadFile(full)
				if err != nil {
					return err
				}
				content = string(b)
			}
		case unix.S_IFLNK:
			if content, err = os.Readlink(full); err != nil {
				return err
			}
		}
		visit(strings.TrimPrefix(full, dir+"/"), &st, content)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// snapshot is what a person sees of a tree.
func snapshot(t testing.TB, dir string) map[string]string {
	t.Helper()
	m := map[string]string{}
	walk(t, dir, func(name string, st *unix.Stat_t, content string) {
		mode := st.Mode
		if mode&unix.S_IFMT == unix.S_IFLNK {
			mode = unix.S_IFLNK
		}
		m[name] = fmt.Sprintf("%o %x", mode, sha256.Sum256([]byte(content)))
	})
	return m
}

func compare(t testing.TB, what string, got, want map[string]string) {
	t.Helper()
	for name, w := range want {
		if got[name] != w {
			t.Errorf("%s: %q is %q, want %q", what, name, got[name], w)
		}
	}
	for name := range got {
		if _, ok := want[name]; !ok {
			t.Errorf("%s: unexpected %q", what, name)
		}
	}
}

func (f *fixture) content(name string) string {
	f.t.Helper()
	b, err := f.project.ReadFile(name)
	if err != nil {
		f.t.Error(err)
	}
	return string(b)
}

func TestApply(t *testing.T) {
	f := newFixture(t)
	f.write("project", map[string]string{
		"edit": "old", "gone": "x", "dir/one": "1", "dir/two": "2", "file": "f", "tree/a/b": "b", "link": "->edit", "script": "s", "nothing": "x", "stays": "s",
	})
	os.Truncate(filepath.Join(f.root, "project/nothing"), 0)
	os.Chmod(filepath.Join(f.root, "project/nothing"), 0)
	f.begin()
	f.write("session/upper", map[string]string{
		"edit": "new", "new/deep/file": "n", "empty": "", "file/now/dir": "d", "tree": "file", "link": "->new", "script": "s",
		"name\n\x1b[31m\xff": "odd",
	})
	os.Chmod(filepath.Join(f.session, "upper/script"), 0o755)
	os.Chmod(filepath.Join(f.session, "upper/new/deep"), 0o500)
	os.Link(filepath.Join(f.session, "upper/edit"), filepath.Join(f.session, "upper/hard"))
	f.whiteout("gone", "dir", "nothing")
	got := f.apply(f.request())
	f.expect(got, map[string]Outcome{
		"edit": Applied, "gone": Applied, "nothing": Applied, "dir": Applied, "dir/one": Applied, "dir/two": Applied, "file": Applied,
		"file/now": Applied, "file/now/dir": Applied, "tree": Applied, "tree/a": Applied, "tree/a/b": Applied, "link": Applied,
		"script": Applied, "new": Applied, "new/deep": Applied, "new/deep/file": Applied, "empty": Applied, "hard": Applied,
		"name\n\x1b[31m\xff": Applied,
	})
	reg := func(mode, content string) string {
		return "100" + mode + fmt.Sprintf(" %x", sha256.Sum256([]byte(content)))
	}
	dir := func(mode string) string { return "40" + mode + fmt.Sprintf(" %x", sha256.Sum256(nil)) }
	compare(t, "project", snapshot(t, filepath.Join(f.root, "project")), map[string]string{
		"edit": reg("644", "new"), "hard": reg("644", "new"), "new": dir("755"), "new/deep": dir("500"), "new/deep/file": reg("644", "n"),
		"empty": dir("755"), "file": dir("755"), "file/now": dir("755"), "file/now/dir": reg("644", "d"), "tree": reg("644", "file"),
		"link": fmt.Sprintf("120000 %x", sha256.Sum256([]byte("new"))), "script": reg("755", "s"), "stays": reg("644", "s"), "name\n\x1b[31m\xff": reg("644", "odd"),
	})
	compare(t, "upper", snapshot(t, filepath.Join(f.session, "upper")), nil)
	if a, b := remember(t, filepath.Join(f.root, "project"))["edit"].stamp.Inode, remember(t, filepath.Join(f.root, "project"))["hard"].stamp.Inode; a == b {
		t.Error("a hard link came over")
	}
}

func TestOutside(t *testing.T) {
	lines := "1\n2\n3\n4\n5\n6\n7\n8\n9\n"
	f := newFixture(t)
	f.write("project", map[string]string{
		"both": lines, "overlap": lines, "binary": "a\x00b", "same": lines, "deleted-there": lines, "deleted-here": lines, "mode": lines,
		"dir/a": "a", "dir/b": "b", "was/x": "x", "touched": lines, "untouched": lines,
	})
	f.begin()
	f.write("session/upper", map[string]string{
		"both": strings.Replace(lines, "8", "session", 1), "overlap": strings.Replace(lines, "2", "session", 1), "binary": "a\x00session",
		"same": strings.Replace(lines, "2", "same", 1), "deleted-there": "changed", "mode": strings.Replace(lines, "8", "session", 1),
		"new": "session", "agreed": "agreed", "was/y": "y", "touched": "touched", "untouched": "u",
	})
	f.whiteout("deleted-here", "dir")
	f.write("project", map[string]string{
		"both": strings.Replace(lines, "2", "project", 1), "overlap": strings.Replace(lines, "2", "project", 1), "binary": "a\x00project",
		"same": strings.Replace(lines, "2", "same", 1), "deleted-here": "changed", "new": "project", "agreed": "agreed", "dir/c": "c",
		"touched": lines,
	})
	os.Chmod(filepath.Join(f.root, "project/mode"), 0o755)
	os.Remove(filepath.Join(f.root, "project/deleted-there"))
	os.RemoveAll(filepath.Join(f.root, "project/was"))
	os.Symlink("../outside", filepath.Join(f.root, "project/was"))
	got := f.apply(f.request())
	f.expect(got, map[string]Outcome{
		"both": Merged, "overlap": Conflict, "binary": Conflict, "deleted-there": Conflict, "deleted-here": Conflict,
		"mode": Merged, "new": Conflict, "dir": Conflict, "dir/a": Applied, "dir/b": Applied, "dir/c": Conflict,
		"was": Conflict, "was/y": Conflict, "touched": Applied, "untouched": Applied,
	})
	if want := strings.Replace(strings.Replace(lines, "8", "session", 1), "2", "project", 1); f.content("both") != want {
		t.Errorf("merged: %q", f.content("both"))
	}
	if f.content("overlap") != strings.Replace(lines, "2", "project", 1) || !strings.Contains(got["overlap"].Reason, "line 2)") {
		t.Errorf("%+v", got["overlap"])
	}
	if st, _ := f.project.Stat("mode"); st.Mode() != 0o755 {
		t.Error(st.Mode())
	}
	// What was merged is no change any more, and what was applied is the new base.
	left := map[string]Outcome{}
	for _, c := range f.request().Changes {
		left[c.Path] = ""
	}
	if _, ok := left["both"]; ok {
		t.Error("still changed after the merge")
	}
	f.write("session/upper", map[string]string{"untouched": "again"})
	if got := f.apply(f.request("untouched")); got["untouched"].Outcome != Applied {
		t.Errorf("the second time: %+v", got["untouched"])
	}
	f.write("session/upper", map[string]string{"untouched": "once more"})
	f.write("project", map[string]string{"untouched": "outside"})
	if got := f.apply(f.request("untouched")); got["untouched"].Outcome != Conflict {
		t.Errorf("changed after the apply: %+v", got["untouched"])
	}
	// A later command sees what is there now, and so does its base.
	f.begin()
	if got := f.apply(f.request("untouched")); got["untouched"].Outcome != Applied {
		t.Errorf("in a later command: %+v", got["untouched"])
	}
}

// TestUnknown applies with no base: the session's start decides.
func TestUnknown(t *testing.T) {
	f := newFixture(t)
	f.write("project", map[string]string{"before": "b", "after": "a", "gone": "g"})
	time.Sleep(2 * coarse)
	f.started = time.Now()
	time.Sleep(2 * coarse)
	f.write("session/upper", map[string]string{"before": "bb", "after": "aa", "new": "n"})
	f.write("project", map[string]string{"after": "outside"})
	f.whiteout("gone")
	f.expect(f.apply(f.request()), map[string]Outcome{"before": Applied, "after": Conflict, "new": Applied, "gone": Applied})
	if f.content("after") != "outside" {
		t.Error("overwritten")
	}
}

func TestRefused(t *testing.T) {
	f := newFixture(t)
	f.write("project", map[string]string{"linked": "->../outside", "s": "s"})
	f.write("outside", map[string]string{"target": "untouched"})
	f.begin()
	upper := filepath.Join(f.session, "upper")
	f.write("session/upper", map[string]string{".envrc": "evil", ".git/hooks/post-checkout": "evil", "suid": "x", "s": "s", "dir/ok": "ok", ".git/index.lock": "x"})
	unix.Mkfifo(upper+"/fifo", 0o644)
	device := Skipped
	if err := unix.Mknod(upper+"/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil {
		device = "" // for root only, and nowhere in a sandbox
	}
	os.Chmod(upper+"/suid", 0o755|fs.ModeSetuid)
	os.Chmod(upper+"/s", 0o644|fs.ModeSetgid)
	r := f.request()
	// A list that is not what the upper has, and paths that lead out.
	r.Changes = append(r.Changes,
		change.Change{Path: "linked/target", Kind: change.Modified, New: change.Entry{Size: 4, Mode: 0o644}},
		change.Change{Path: "../outside/target", Kind: change.Deleted},
		change.Change{Path: "/etc/hostname", Kind: change.Deleted},
		change.Change{Path: "absent", Kind: change.Added, New: change.Entry{Size: 4, Mode: 0o644}},
		change.Change{Path: "dir/fifo", Kind: change.Added, New: change.Entry{Size: 4, Mode: 0o644}},
	)
	unix.Mkfifo(upper+"/dir/fifo", 0o644)
	var got map[string]Result
	for i, want := range []Outcome{Flagged, Applied} {
		r.Consent = i == 1
		if i == 1 {
			r.Changes = f.request().Changes
		}
		got = f.apply(r)
		for _, name := range []string{".envrc", ".git/hooks/post-checkout", "suid"} {
			if got[name].Outcome != want || want == Flagged && got[name].Reason == "" {
				t.Errorf("%s: %+v", name, got[name])
			}
		}
		if i == 1 {
			break
		}
		for name, want := range map[string]Outcome{
			"fifo": Skipped, "null": device, ".git/index.lock": Skipped, "s": Skipped, "linked/target": Conflict, "../outside/target": Skipped,
			"/etc/hostname": Skipped, "absent": Failed, "dir/fifo": Failed, "dir/ok": Applied,
		} {
			if got[name].Outcome != want || want != Applied && want != "" && got[name].Reason == "" {
				t.Errorf("%s: %+v, want %s", name, got[name], want)
			}
		}
	}
	if r := got["suid"]; !strings.Contains(r.Reason, "set-user-ID") {
		t.Errorf("%+v", r)
	}
	if st, _ := f.project.Stat("suid"); st.Mode() != 0o755 {
		t.Error(st.Mode())
	}
	compare(t, "outside", snapshot(t, filepath.Join(f.root, "outside")), map[string]string{"target": fmt.Sprintf("100644 %x", sha256.Sum256([]byte("untouched")))})
}

func TestPaths(t *testing.T) {
	f := newFixture(t)
	f.write("project", map[string]string{"file": "f", "a/x": "x"})
	f.begin()
	f.write("session/upper", map[string]string{"file/sub/one": "1", "file/two": "2", "a/x": "xx", "ab": "ab", "new/one": "1", "new/two": "2"})
	f.expect(f.apply(f.request("file/sub", "a/", "new/one")), map[string]Outcome{
		"file": Applied, "file/sub": Applied, "file/sub/one": Applied, "a/x": Applied, "new": Applied, "new/one": Applied,
	})
	if _, err := New(t.Context(), f.request("nothing")); berm.KindOf(err) != berm.NotFound {
		t.Error(err)
	}
	f.expect(f.apply(f.request()), map[string]Outcome{"file/two": Applied, "ab": Applied, "new/two": Applied})
}

// TestChangedMeanwhile changes both sides between the plan and the run.
func TestChangedMeanwhile(t *testing.T) {
	f := newFixture(t)
	f.write("project", map[string]string{"a": "a", "b": "b", "dir/x": "x", "parent/f": "f"})
	f.begin()
	f.write("session/upper", map[string]string{"a": "aa", "c": "c", "d": "d", "parent/f": "ff"})
	f.whiteout("b", "dir")
	p, err := New(t.Context(), f.request())
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	f.write("project", map[string]string{"a": "outside", "b": "outside", "c": "outside", "dir/y": "y"})
	f.write("session/upper", map[string]string{"d": "longer"})
	os.RemoveAll(filepath.Join(f.root, "project/parent"))
	f.write("outside", map[string]string{"f": "f"})
	os.Symlink("../outside", filepath.Join(f.root, "project/parent"))
	list, err := p.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	f.expect(byPath(list), map[string]Outcome{"a": Conflict, "b": Conflict, "c": Conflict, "d": Failed, "dir": Conflict, "dir/x": Applied, "parent/f": Failed})
	for name, want := range map[string]string{"a": "outside", "b": "outside", "c": "outside", "dir/y": "y"} {
		if f.content(name) != want {
			t.Errorf("%s: %q", name, f.content(name))
		}
	}
	noTemps(t, f.root)
}

func noTemps(t *testing.T, dir string) {
	t.Helper()
	walk(t, dir, func(name string, _ *unix.Stat_t, _ string) {
		if strings.HasPrefix(filepath.Base(name), ".berm-") {
			t.Errorf("%s is left", name)
		}
	})
}

func TestHardLinksOfProject(t *testing.T) {
	f := newFixture(t)
	f.write("project", map[string]string{"a": "x"})
	f.write("outside", map[string]string{"o": "o"})
	os.Link(filepath.Join(f.root, "project/a"), filepath.Join(f.root, "project/b"))
	os.Link(filepath.Join(f.root, "outside/o"), filepath.Join(f.root, "project/o"))
	f.begin()
	f.write("session/upper", map[string]string{"a": "aa", "b": "bb", "o": "oo"})
	f.expect(f.apply(f.request()), map[string]Outcome{"a": Applied, "b": Applied, "o": Applied})
	if b, _ := os.ReadFile(filepath.Join(f.root, "outside/o")); string(b) != "o" {
		t.Error("the link outside was written to")
	}
}

// TestFolded has a file system that takes two names for one, which the plan saw as such.
func TestFolded(t *testing.T) {
	f := newFixture(t)
	f.begin()
	f.write("session/upper", map[string]string{"Readme": "1", "README": "2"})
	p, err := New(t.Context(), f.request())
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	// What the second rename finds there is what the first one made.
	sawFirst := p.steps[1]
	sawFirst.Path = "README"
	p.steps[0].Path, p.steps[0].Outcome = "Readme", Applied
	f.write("project", map[string]string{"README": "1"})
	list, err := p.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if r := byPath(list)["README"]; r.Outcome != Conflict || !strings.Contains(r.Reason, `"Readme" for the same name`) {
		t.Errorf("%+v", r)
	}
}

func TestTwoApplies(t *testing.T) {
	f := newFixture(t)
	f.begin()
	f.write("session/upper", map[string]string{"a": "a"})
	p, err := New(t.Context(), f.request())
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	other, err := openTree(f.project)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	unlock, err := other.lock()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Run(t.Context()); berm.KindOf(err) != berm.Conflict {
		t.Error(err)
	}
	unlock()
	if _, err := p.Run(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestCancelled(t *testing.T) {
	f := newFixture(t)
	f.begin()
	f.write("session/upper", map[string]string{"a": "a", "b/c": "c"})
	p, err := New(t.Context(), f.request())
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	list, err := p.Run(ctx)
	if err == nil {
		t.Error("no error")
	}
	f.expect(byPath(list), map[string]Outcome{"a": NotApplied, "b": NotApplied, "b/c": NotApplied})
	compare(t, "project", snapshot(t, filepath.Join(f.root, "project")), nil)
	f.expect(f.apply(f.request()), map[string]Outcome{"a": Applied, "b": Applied, "b/c": Applied})
}

// TestSparse applies a file whose size is no measure of what it takes.
func TestSparse(t *testing.T) {
	f := newFixture(t)
	f.begin()
	file, err := os.Create(filepath.Join(f.session, "upper/huge"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	file.WriteAt([]byte("middle"), 1<<33)
	if err := file.Truncate(1 << 42); err != nil {
		t.Skipf("no sparse files of 4 TiB in %s: %v", f.root, err)
	}
	f.expect(f.apply(f.request()), map[string]Outcome{"huge": Applied})
	got, err := os.Open(filepath.Join(f.root, "project/huge"))
	if err != nil {
		t.Fatal(err)
	}
	defer got.Close()
	st, _ := got.Stat()
	b := make([]byte, 6)
	got.ReadAt(b, 1<<33)
	if blocks := st.Sys().(*syscall.Stat_t).Blocks; st.Size() != 1<<42 || string(b) != "middle" || blocks > 1<<12 {
		t.Errorf("%d bytes, %q, %d blocks", st.Size(), b, blocks)
	}
}

// BenchmarkApply applies 10,000 new files, against writing the same files plainly and
// with one sync at the end.
func BenchmarkApply(b *testing.B) {
	fill := func(root string) {
		for i := range 10_000 {
			dir := filepath.Join(root, fmt.Sprint("d", i/100))
			os.MkdirAll(dir, 0o755)
			os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), []byte(fmt.Sprintln("file", i)), 0o644)
		}
	}
	var apply, plain time.Duration
	for b.Loop() {
		f := newFixture(b)
		f.begin()
		fill(filepath.Join(f.session, "upper"))
		unix.Sync()
		start := time.Now()
		fill(filepath.Join(f.root, "plain"))
		unix.Sync()
		plain += time.Since(start)
		start = time.Now()
		f.apply(f.request())
		apply += time.Since(start)
	}
	b.ReportMetric(float64(apply.Milliseconds())/float64(b.N), "ms/apply")
	b.ReportMetric(float64(apply)/float64(plain), "x-plain")
}
