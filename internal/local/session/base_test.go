package session

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/local/apply"
)

var _ apply.Base = (*Base)(nil)

func git(t testing.TB, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", append([]string{"-c", "user.name=n", "-c", "user.email=e", "-c", "gc.auto=0", "-c", "maintenance.auto=false"}, args...)...)
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null"}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %v: %v\n%s", args, err, out)
	}
	return string(out)
}

func put(t testing.TB, dir string, files ...string) {
	t.Helper()
	for _, file := range files {
		name, content, _ := strings.Cut(file, "=")
		full := filepath.Join(dir, name)
		must(t, os.MkdirAll(filepath.Dir(full), 0o755))
		must(t, os.WriteFile(full, []byte(content), 0o644))
	}
}

// settle waits until the kernel's clock of files has moved on: what is written after it is
// younger than what was before, for git and for a base.
func settle() { time.Sleep(25 * time.Millisecond) }

func record(t testing.TB, s *Session) *Base {
	t.Helper()
	settle()
	must(t, s.Record(t.Context(), ended))
	b, err := s.Base()
	must(t, err)
	t.Cleanup(func() { b.Close() })
	return b
}

func expectTag(t *testing.T, b *Base, name string, want byte) {
	t.Helper()
	if got := b.entries[name].tag; got != want {
		t.Errorf("%q has the tag %d, want %d", name, got, want)
	}
}

func expectContent(t *testing.T, b *Base, name, want string) {
	t.Helper()
	got, err := b.Content(name, 1<<20)
	if err != nil || string(got) != want {
		t.Errorf("%q held %q, %v; want %q", name, got, err, want)
	}
}

func expectState(t *testing.T, b *Base, name string, want apply.State) {
	t.Helper()
	if _, got := b.Stat(name); got != want {
		t.Errorf("%q: state %d, want %d", name, got, want)
	}
}

func TestBaseOfRepositories(t *testing.T) {
	files := []string{"clean=1\n", "dir/clean=2\n", "dir/script=3\n", "dirty=4\n", "racy=5\n", "build/tracked=6\n", "binary=\x00\x01"}
	for name, prepare := range map[string]func(t *testing.T, dir string) (project string){
		"repository": func(t *testing.T, dir string) string {
			git(t, dir, "init", "-q")
			put(t, dir, files...)
			return dir
		},
		"version 4": func(t *testing.T, dir string) string {
			git(t, dir, "init", "-q")
			git(t, dir, "config", "index.version", "4")
			put(t, dir, files...)
			return dir
		},
		"version 3": func(t *testing.T, dir string) string {
			git(t, dir, "init", "-q")
			put(t, dir, files...)
			put(t, dir, "intended=7")
			git(t, dir, "add", "-N", "intended")
			return dir
		},
		"SHA-256": func(t *testing.T, dir string) string {
			git(t, dir, "init", "-q", "--object-format=sha256")
			put(t, dir, files...)
			return dir
		},
		"directory of a repository": func(t *testing.T, dir string) string {
			git(t, dir, "init", "-q")
			put(t, dir, "clean=of the top\n")
			project := filepath.Join(dir, "a", "b")
			put(t, project, files...)
			return project
		},
		"work tree": func(t *testing.T, dir string) string {
			main := filepath.Join(dir, "main")
			must(t, os.Mkdir(main, 0o755))
			git(t, main, "init", "-q")
			git(t, main, "commit", "-q", "--allow-empty", "-m", "m")
			git(t, main, "worktree", "add", "-q", "../tree")
			tree := filepath.Join(dir, "tree")
			put(t, tree, files...)
			return tree
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			top := filepath.Join(dir, "p")
			must(t, os.Mkdir(top, 0o755))
			project := prepare(t, top)
			settle()
			git(t, project, "add", "-A", ":!intended")
			git(t, project, "commit", "-q", "-m", "m", "--", ".", ":!intended")
			settle()
			put(t, project, "dirty=changed\n", "untracked=u\n", "node_modules/x/untracked=u\n", "build/tracked=changed\n")
			// A configuration that would run a program, and one that changes what git reads.
			git(t, project, "config", "core.fsmonitor", "touch "+dir+"/ran")
			git(t, project, "config", "core.worktree", "/")
			s := create(t, openStore(t, dir), project)
			b := record(t, s)
			for path, tag := range map[string]byte{
				"clean": tagObject, "dir/clean": tagObject, "dir/script": tagObject, "binary": tagObject,
				"dirty": tagContent, "untracked": tagContent, "build/tracked": tagContent,
				"node_modules/x/untracked": tagPlain, ".": tagPlain, "dir": tagPlain,
			} {
				expectTag(t, b, path, tag)
			}
			// What happens later does not matter.
			put(t, project, "clean=later\n", "dirty=later\n", "new=x")
			must(t, os.RemoveAll(filepath.Join(project, "dir")))
			expectContent(t, b, "clean", "1\n")
			expectContent(t, b, "dir/clean", "2\n")
			expectContent(t, b, "dirty", "changed\n")
			expectContent(t, b, "binary", "\x00\x01")
			expectContent(t, b, "untracked", "u\n")
			_, err := b.Content("clean", 1)
			expectKind(t, err, berm.Exhausted)
			for _, missing := range []string{"node_modules/x/untracked", "new", "dir"} {
				_, err := b.Content(missing, 1<<20)
				expectKind(t, err, berm.NotFound)
			}
			for path, state := range map[string]apply.State{
				"clean": apply.Present, "dir": apply.Present, "dir/script": apply.Present,
				"new": apply.Absent, "dir/new/newer": apply.Absent, "clean/below": apply.Absent,
			} {
				expectState(t, b, path, state)
			}
			if _, err := os.Stat(filepath.Join(dir, "ran")); err == nil {
				t.Error("git did what the project's configuration says")
			}
		})
	}
}

func TestBaseWithoutRepository(t *testing.T) {
	asEverybody(t, func(t *testing.T, dir string) {
		project := filepath.Join(dir, "p")
		s := create(t, openStore(t, dir), project)
		put(t, project, "text=t\n", "a/b/odd \xff\n=o", "binary=\x00", "large="+strings.Repeat("x", maxContent+1), "closed/file=x")
		must(t, os.Symlink("/etc/passwd", filepath.Join(project, "link")))
		must(t, unix.Mkfifo(filepath.Join(project, "fifo"), 0o600))
		must(t, os.Chmod(filepath.Join(project, "closed"), 0))
		if _, err := s.Base(); berm.KindOf(err) != berm.NotFound {
			t.Error(err)
		}
		b := record(t, s)
		must(t, os.Chmod(filepath.Join(project, "closed"), 0o700))
		var st unix.Stat_t
		must(t, unix.Lstat(filepath.Join(project, "link"), &st))
		if got, state := b.Stat("link"); state != apply.Present || got != apply.StampOf(&st) {
			t.Errorf("link: %+v, %v", got, state)
		}
		expectContent(t, b, "text", "t\n")
		expectContent(t, b, "a/b/odd \xff\n", "o")
		for _, name := range []string{"binary", "large", "link", "fifo"} {
			expectTag(t, b, name, tagPlain)
		}
		if os.Geteuid() != 0 {
			expectState(t, b, "closed/file", apply.Unknown)
			expectState(t, b, "closed/other", apply.Unknown)
		}
		expectState(t, b, "none", apply.Absent)
	})
}

func TestBaseOfGitDirectory(t *testing.T) {
	dir := t.TempDir()
	project := filepath.Join(dir, "p")
	put(t, project, "sub/file=x", "file=x")
	git(t, project, "init", "-q")
	git(t, project, "add", "file")
	git(t, project, "commit", "-q", "-m", "m")
	git(t, filepath.Join(project, "sub"), "init", "-q")
	b := record(t, create(t, openStore(t, dir), project))
	for path, state := range map[string]apply.State{
		".git/HEAD": apply.Present, ".git/refs/heads": apply.Present, ".git/packed-refs": apply.Absent,
		".git/objects/00/1": apply.Unknown, "sub/.git/HEAD": apply.Present, "sub/.git/objects/x": apply.Unknown,
	} {
		expectState(t, b, path, state)
	}
	if _, err := b.Content(".git/HEAD", 100); berm.KindOf(err) != berm.NotFound {
		t.Errorf("the content of git's files was kept: %v", err)
	}
}

// TestFilteredFiles has a file whose object holds something else.
func TestFilteredFiles(t *testing.T) {
	dir := t.TempDir()
	project := filepath.Join(dir, "p")
	put(t, project, ".gitattributes=*.txt text eol=crlf\n", "dos.txt=a\r\nb\r\n")
	git(t, project, "init", "-q")
	settle()
	git(t, project, "add", "-A")
	b := record(t, create(t, openStore(t, dir), project))
	expectTag(t, b, "dos.txt", tagObject)
	_, err := b.Content("dos.txt", 100)
	expectKind(t, err, berm.NotFound)
}

// TestRacyIndex changes a file without a change of what the index has of it.
func TestRacyIndex(t *testing.T) {
	dir := t.TempDir()
	project := filepath.Join(dir, "p")
	put(t, project, "file=old\n")
	git(t, project, "init", "-q")
	git(t, project, "add", "-A")
	var file, index unix.Stat_t
	must(t, unix.Stat(filepath.Join(project, "file"), &file))
	must(t, unix.Stat(filepath.Join(project, ".git/index"), &index))
	r := openRepository(project)
	r.written = file.Mtim.Nano() + 1
	if oid, known := r.clean("file", &file); oid == "" || !known {
		t.Error("a file that is older than the index is not known")
	}
	r.written = file.Mtim.Nano()
	if oid, known := r.clean("file", &file); oid != "" || !known {
		t.Error("a file that is as young as the index is believed to be clean")
	}
}

func TestRecordIsCancelled(t *testing.T) {
	dir := t.TempDir()
	project := filepath.Join(dir, "p")
	put(t, project, "file=x")
	s := create(t, openStore(t, dir), project)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Record(ctx, ended); err == nil {
		t.Error("recorded")
	}
	if _, err := s.Base(); berm.KindOf(err) != berm.NotFound {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(s.Dir(), baseFile+".new")); err == nil {
		t.Error("left a half-made record")
	}
}

// TestChangedWhileRecorded is what a person edits in the first moment of a run.
func TestChangedWhileRecorded(t *testing.T) {
	dir := t.TempDir()
	project := filepath.Join(dir, "p")
	put(t, project, "a/file=x", "a/other=x", "b/file=x")
	settle()
	r := &recorder{ctx: t.Context(), began: time.Now(), worked: time.Now()}
	settle()
	put(t, project, "a/file=later")
	must(t, os.Remove(filepath.Join(project, "b/file")))
	var err error
	r.project, err = unix.Open(project, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(r.project)
	var buf bytes.Buffer
	r.encoder = newEncoder(&buf, "")
	must(t, r.all())
	b := &Base{entries: map[string]entry{}}
	must(t, b.decode(&buf))
	expectState(t, b, "a/file", apply.Unknown)
	expectState(t, b, "a/other", apply.Present)
	expectState(t, b, "a/none", apply.Absent)
	expectState(t, b, "b/file", apply.Unknown)
}

// TestRecordAgain goes on with a session: what it changed keeps its record, the rest gets a
// new one.
func TestRecordAgain(t *testing.T) {
	dir := t.TempDir()
	project := filepath.Join(dir, "p")
	put(t, project, "mine=1", "yours=1", "deleted=1", "dir/mine=1", "dir/yours=1", "opaque/a=1", "gone/a=1")
	store := openStore(t, dir)
	s := create(t, store, project)
	must(t, s.Save())
	record(t, s)
	// The session changes …
	put(t, s.Upper(), "mine=2", "dir/mine=2", "opaque/b=2")
	must(t, unix.Mknod(filepath.Join(s.Upper(), "deleted"), unix.S_IFCHR, 0))
	must(t, unix.Mknod(filepath.Join(s.Upper(), "gone"), unix.S_IFCHR, 0))
	must(t, unix.Setxattr(filepath.Join(s.Upper(), "opaque"), "user.overlay.opaque", []byte("y"), 0))
	s.Unlock()
	// … and so does somebody else.
	put(t, project, "mine=3", "yours=3", "dir/mine=3", "dir/yours=3", "opaque/a=3", "opaque/b=3", "new=3")
	must(t, os.Remove(filepath.Join(project, "deleted")))
	must(t, os.RemoveAll(filepath.Join(project, "gone")))

	again, err := store.Get(s.Name)
	must(t, err)
	b := record(t, again)
	for name, want := range map[string]string{
		"mine": "1", "yours": "3", "deleted": "1", "dir/mine": "1", "dir/yours": "3", "opaque/a": "1", "gone/a": "1", "new": "3",
	} {
		expectContent(t, b, name, want)
	}
	expectState(t, b, "opaque/b", apply.Absent)

	// Without the older record nothing can be said of what the session changed.
	must(t, os.Remove(filepath.Join(s.Dir(), baseFile)))
	b = record(t, again)
	for _, name := range []string{"mine", "deleted", "dir/mine", "opaque/a", "opaque/b", "gone/a"} {
		expectState(t, b, name, apply.Unknown)
	}
	expectContent(t, b, "yours", "3")
}

// TestStoreInProject has a home directory as its project.
func TestStoreInProject(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "file=x")
	s := create(t, openStore(t, dir), dir)
	b := record(t, s)
	expectState(t, b, "file", apply.Present)
	expectState(t, b, "state/sessions/"+s.Name, apply.Unknown)
	expectTag(t, b, "state/sessions", tagPartial)
}

func TestDamagedBase(t *testing.T) {
	dir := t.TempDir()
	project := filepath.Join(dir, "p")
	put(t, project, "file=x", "dir/file=y")
	s := create(t, openStore(t, dir), project)
	record(t, s)
	name := filepath.Join(s.Dir(), baseFile)
	whole, err := os.ReadFile(name)
	must(t, err)
	for n := range len(whole) {
		must(t, os.WriteFile(name, whole[:n], 0o600))
		_, err := s.Base()
		expectKind(t, err, berm.Internal)
	}
}

// TestBaseThatIsCut has more paths than could be recorded.
func TestBaseThatIsCut(t *testing.T) {
	var buf bytes.Buffer
	e := newEncoder(&buf, "")
	e.add(".", tagPlain, apply.Stamp{Mode: unix.S_IFDIR | 0o755}, "", nil)
	e.add("a", tagPlain, apply.Stamp{Mode: unix.S_IFREG, Size: 3}, "", nil)
	must(t, e.end(tagCut))
	b := &Base{entries: map[string]entry{}}
	must(t, b.decode(&buf))
	expectState(t, b, "a", apply.Present)
	expectState(t, b, "b", apply.Unknown)
}

func FuzzBase(f *testing.F) {
	var buf bytes.Buffer
	e := newEncoder(&buf, "/objects")
	e.add(".", tagPartial, apply.Stamp{Mode: unix.S_IFDIR | 0o755}, "", nil)
	e.add("a", tagObject, apply.Stamp{Mode: unix.S_IFREG, Size: 3}, strings.Repeat("o", 20), nil)
	e.add("ab", tagContent, apply.Stamp{Mode: unix.S_IFREG, Size: 3}, "", []byte("abc"))
	if err := e.end(tagEnd); err != nil {
		f.Fatal(err)
	}
	f.Add(buf.Bytes())
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, data []byte) {
		b := &Base{entries: map[string]entry{}}
		if b.decode(bytes.NewReader(data)) != nil {
			return
		}
		for name, e := range b.entries {
			b.Stat(name)
			b.Stat(name + "/x")
			if e.tag == tagContent && (e.at < 0 || e.at+e.stamp.Size > int64(len(data))) {
				t.Errorf("the content of %q lies outside", name)
			}
		}
	})
}

func FuzzGitIndex(f *testing.F) {
	for _, version := range []string{"2", "3", "4"} {
		dir := f.TempDir()
		git(f, dir, "init", "-q")
		git(f, dir, "config", "index.version", version)
		put(f, dir, "a=1", "abc=2", "b/c=3", "intended=4")
		git(f, dir, "add", "a", "abc", "b")
		if version != "2" {
			git(f, dir, "add", "-N", "intended")
		}
		data, err := os.ReadFile(filepath.Join(dir, ".git", "index"))
		must(f, err)
		files, err := parseIndex(data, 20)
		if err != nil || len(files) != 3 {
			f.Fatalf("version %s: %v, %v", version, files, err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, hash := range []int{20, 32} {
			files, err := parseIndex(data, hash)
			if err != nil && files != nil {
				t.Error("files in spite of an error")
			}
			for name, file := range files {
				if name == "" || len(name) > maxPath || len(file.oid) != hash {
					t.Errorf("%q: %+v", name, file)
				}
			}
		}
	})
}

// BenchmarkRecord records a project of 10,000 files that git knows.
func BenchmarkRecord(b *testing.B) {
	dir := b.TempDir()
	project := filepath.Join(dir, "p")
	for i := range 10_000 {
		put(b, project, fmt.Sprintf("d%d/f%d=%d", i%100, i, i))
	}
	git(b, project, "init", "-q")
	git(b, project, "add", "-A")
	settle()
	git(b, project, "update-index", "--refresh")
	git(b, project, "commit", "-q", "-m", "m")
	s := create(b, openStore(b, dir), project)
	for b.Loop() {
		must(b, s.Record(b.Context(), ended))
	}
	base, err := s.Base()
	must(b, err)
	defer base.Close()
	info, err := os.Stat(filepath.Join(s.Dir(), baseFile))
	must(b, err)
	b.ReportMetric(float64(info.Size())/1024, "KiB")
	b.ReportMetric(float64(len(base.entries)), "entries")
}

// ended lets a record begin at once, and take the whole processor.
var ended = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()
