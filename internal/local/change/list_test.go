package change

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// tree makes files in dir: "name/" is a directory, "name=content" a file, "name@target" a
// link, "name!" a fifo, "name#" a socket, "-name" a whiteout; "%" after "name/" makes the
// directory opaque; ":mode" at the end sets the mode.
func tree(t testing.TB, dir string, specs ...string) {
	t.Helper()
	for _, spec := range specs {
		spec, mode, hasMode := strings.Cut(spec, ":")
		var name string
		var err error
		switch {
		case strings.HasPrefix(spec, "-"):
			name = filepath.Join(dir, spec[1:])
			must(t, os.MkdirAll(filepath.Dir(name), 0o755))
			err = unix.Mknod(name, unix.S_IFCHR, 0)
		case strings.HasSuffix(spec, "%"):
			name = filepath.Join(dir, strings.TrimSuffix(spec, "%"))
			must(t, os.MkdirAll(name, 0o755))
			err = unix.Setxattr(name, "user.overlay.opaque", []byte("y"), 0)
		case strings.HasSuffix(spec, "!"):
			name = filepath.Join(dir, strings.TrimSuffix(spec, "!"))
			err = unix.Mkfifo(name, 0o644)
		case strings.HasSuffix(spec, "#"):
			name = filepath.Join(dir, strings.TrimSuffix(spec, "#"))
			l, e := net.ListenUnix("unix", &net.UnixAddr{Name: name})
			must(t, e)
			l.SetUnlinkOnClose(false)
			l.Close()
		case strings.HasSuffix(spec, "/"):
			name = filepath.Join(dir, spec)
			err = os.MkdirAll(name, 0o755)
		case strings.Contains(spec, "@"):
			link, target, _ := strings.Cut(spec, "@")
			name = filepath.Join(dir, link)
			must(t, os.MkdirAll(filepath.Dir(name), 0o755))
			err = os.Symlink(target, name)
		default:
			file, content, _ := strings.Cut(spec, "=")
			name = filepath.Join(dir, file)
			must(t, os.MkdirAll(filepath.Dir(name), 0o755))
			err = os.WriteFile(name, []byte(content), 0o644)
		}
		must(t, err)
		if hasMode {
			var m uint32
			fmt.Sscanf(mode, "%o", &m)
			must(t, unix.Chmod(name, m))
		}
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func root(t testing.TB, dir string) *os.Root {
	t.Helper()
	r, err := os.OpenRoot(dir)
	must(t, err)
	t.Cleanup(func() { r.Close() })
	return r
}

// brief writes changes as "A path", with a slash after directories.
func brief(changes []Change) []string {
	out := []string{}
	for _, c := range changes {
		s := strings.ToUpper(string(c.Kind[:1])) + " " + c.Path
		if e := c.New; e.Mode.IsDir() || c.Kind == Deleted && c.Old.Mode.IsDir() {
			s += "/"
		}
		out = append(out, s)
	}
	return out
}

func TestList(t *testing.T) {
	for _, test := range []struct {
		name           string
		project, upper []string
		want           []string
	}{
		{"nothing", []string{"a=1"}, nil, nil},
		{"added", []string{"a=1"}, []string{"b=2", "d/e/f=3"}, []string{"A b", "A d/", "A d/e/", "A d/e/f"}},
		{"content", []string{"a=1", "s/b=22"}, []string{"a=2", "s/b=33"}, []string{"M a", "M s/b"}},
		{"copied up, not changed", []string{"d/a=1", "d/b=2", "l@a"}, []string{"d/a=1", "l@a"}, nil},
		{"mode of a file", []string{"a=1"}, []string{"a=1:755"}, []string{"M a"}},
		{"set-uid alone", []string{"a=1:755"}, []string{"a=1:4755"}, []string{"M a"}},
		{"mode of a directory", []string{"d/a=1"}, []string{"d/:700"}, []string{"M d/"}},
		{"deleted file", []string{"a=1", "d/b=2"}, []string{"-a", "-d/b"}, []string{"D a", "D d/b"}},
		{"deleted directory", []string{"d/e/f=1", "d/g=2", "h=3"}, []string{"-d"}, []string{"D d/", "D d/e/", "D d/e/f", "D d/g"}},
		{"whiteout of nothing", []string{"a=1"}, []string{"-b", "d/", "-d/c"}, []string{"A d/"}},
		{"opaque", []string{"d/a=1", "d/b=2", "d/s/c=3"}, []string{"d/%", "d/b=2", "d/n=4"}, []string{"D d/a", "A d/n", "D d/s/", "D d/s/c"}},
		{"opaque holds below", []string{"d/s/a=1", "d/s/b=1"}, []string{"d/%", "d/s/a=1"}, []string{"D d/s/b"}},
		{"merged below merged", []string{"d/s/a=1", "d/s/b=1"}, []string{"d/s/a=2"}, []string{"M d/s/a"}},
		{"directory to file", []string{"d/a=1", "d/s/b=1"}, []string{"d=x"}, []string{"M d", "D d/a", "D d/s/", "D d/s/b"}},
		{"directory to link", []string{"d/a=1"}, []string{"d@/etc"}, []string{"M d", "D d/a"}},
		{"file to directory", []string{"a=1"}, []string{"a/b=2"}, []string{"M a/", "A a/b"}},
		{"link to directory", []string{"a@b", "b/c=1"}, []string{"a/c=1"}, []string{"M a/", "A a/c"}},
		{"file to link of its size", []string{"a=x"}, []string{"a@x"}, []string{"M a"}},
		{"target", []string{"a@x"}, []string{"a@y"}, []string{"M a"}},
		{"special", []string{"f!", "g=1"}, []string{"f!", "g!", "s#", "h!"}, []string{"M g", "A h", "A s"}},
		{"sorted by components", []string{"z=1"}, []string{"a/b=1", "a.c=1", "a-d=1", "a\nb=2"},
			[]string{"A a/", "A a/b", "A a\nb", "A a-d", "A a.c"}},
		{"any name", nil, []string{"-x", "./-rf=1", "a\x1b[31m=1", "\xff\xfe=1", "...=1", " =1", "\\=1"},
			[]string{"A  ", "A -rf", "A ...", "A \\", "A a\x1b[31m", "A \xff\xfe"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			project, upper := t.TempDir(), t.TempDir()
			tree(t, project, test.project...)
			tree(t, upper, test.upper...)
			changes, err := List(t.Context(), root(t, upper), root(t, project), Limits{})
			must(t, err)
			if diff := cmp.Diff(append([]string{}, test.want...), brief(changes)); diff != "" {
				t.Error(diff)
			}
			for i := range changes[min(1, len(changes)):] {
				if order(changes[i].Path, changes[i+1].Path) >= 0 {
					t.Errorf("%q is not before %q", changes[i].Path, changes[i+1].Path)
				}
			}
		})
	}
}

func TestListEntries(t *testing.T) {
	project, upper := t.TempDir(), t.TempDir()
	tree(t, project, "a=12:600", "l@old", "d/")
	tree(t, upper, "a=345:4750", "l@/new", "-d", "f!", ".envrc=x")
	got, err := List(t.Context(), root(t, upper), root(t, project), Limits{})
	must(t, err)
	want := []Change{
		{Path: ".envrc", Kind: Added, New: Entry{Mode: 0o644, Size: 1}, Danger: Danger(".envrc", Entry{})},
		{Path: "a", Kind: Modified, Old: Entry{Mode: 0o600, Size: 2}, New: Entry{Mode: 0o750 | fs.ModeSetuid, Size: 3}, Danger: whySetid},
		{Path: "d", Kind: Deleted, Old: Entry{Mode: 0o755 | fs.ModeDir}},
		{Path: "f", Kind: Added, New: Entry{Mode: 0o644 | fs.ModeNamedPipe}},
		{Path: "l", Kind: Modified, Old: Entry{Mode: 0o777 | fs.ModeSymlink, Target: "old"}, New: Entry{Mode: 0o777 | fs.ModeSymlink, Target: "/new"}, Danger: whyLink},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// A bare repository is one whatever its name, and also when a session makes the last part of it.
func TestBareRepository(t *testing.T) {
	project, upper := t.TempDir(), t.TempDir()
	tree(t, project, "fix/HEAD=1", "fix/objects/", "fix/refs/", "fix/config=1", "half/HEAD=1", "plain/config=1")
	tree(t, upper, "fix/config=2", "fix/hooks/post-checkout=1", "fix/refs/heads/x=1", "half/objects/", "half/config=1", "plain/config=2", "plain/hooks/x=1")
	for dir, want := range map[string]string{
		"":     "fix/config fix/hooks/post-checkout half/config",
		"/fix": "config hooks/post-checkout",
	} {
		changes, err := List(t.Context(), root(t, upper+dir), root(t, project+dir), Limits{})
		must(t, err)
		var told []string
		for _, c := range changes {
			if c.Danger != "" {
				told = append(told, c.Path)
			}
		}
		if got := strings.Join(told, " "); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestCompareTakesWhiteoutForADevice(t *testing.T) {
	before, after := t.TempDir(), t.TempDir()
	tree(t, before, "a=1", "b=1", "d/c=1")
	tree(t, after, "-a", "d/%")
	got, err := Compare(t.Context(), root(t, before), root(t, after), Limits{})
	must(t, err)
	if diff := cmp.Diff([]string{"M a", "D b", "D d/c"}, brief(got)); diff != "" {
		t.Error(diff)
	}
}

// Large files that differ only at their end, or in length between two reads.
func TestContent(t *testing.T) {
	before, after := t.TempDir(), t.TempDir()
	big := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
	for name, edit := range map[string]func([]byte) []byte{
		"same":   func(b []byte) []byte { return b },
		"last":   func(b []byte) []byte { b[len(b)-1]++; return b },
		"first":  func(b []byte) []byte { b[0]++; return b },
		"length": func(b []byte) []byte { return b[:len(b)-1] },
	} {
		must(t, os.WriteFile(filepath.Join(before, name), big, 0o644))
		must(t, os.WriteFile(filepath.Join(after, name), edit(slices.Clone(big)), 0o644))
	}
	got, err := Compare(t.Context(), root(t, before), root(t, after), Limits{})
	must(t, err)
	if diff := cmp.Diff([]string{"M first", "M last", "M length"}, brief(got)); diff != "" {
		t.Error(diff)
	}
}

func TestLimits(t *testing.T) {
	empty, many, deep, far := t.TempDir(), t.TempDir(), t.TempDir(), t.TempDir()
	for i := range 300 {
		tree(t, many, fmt.Sprintf("f%d=", i))
	}
	tree(t, deep, strings.Repeat("d/", 20)+"x=1")
	// A path that is longer than the kernel takes at once, made from inside.
	fd, err := unix.Open(far, unix.O_DIRECTORY|unix.O_RDONLY, 0)
	must(t, err)
	name := strings.Repeat("n", 255)
	for range 20 {
		must(t, unix.Mkdirat(fd, name, 0o755))
		next, err := unix.Openat(fd, name, unix.O_DIRECTORY|unix.O_RDONLY, 0)
		must(t, err)
		unix.Close(fd)
		fd = next
	}
	unix.Close(fd)
	for _, test := range []struct {
		dir    string
		limits Limits
		names  string
	}{
		{many, Limits{Entries: 299}, "limit of entries"},
		{many, Limits{Bytes: 1000}, "limit of names"},
		{deep, Limits{Depth: 19}, "limit of depth"},
		{far, Limits{}, "limit of a path"},
	} {
		for _, run := range []func() ([]Change, error){
			func() ([]Change, error) {
				return List(t.Context(), root(t, test.dir), root(t, empty), test.limits)
			},
			func() ([]Change, error) {
				return Compare(t.Context(), root(t, test.dir), root(t, empty), test.limits)
			},
		} {
			_, err := run()
			if berm.KindOf(err) != berm.Exhausted || !strings.Contains(err.Error(), test.names) || berm.HintOf(err) == "" {
				t.Errorf("%+v: got %v, want %q", test.limits, err, test.names)
			}
		}
	}
	for dir, limits := range map[string]Limits{many: {Entries: 300}, deep: {Depth: 20}} {
		if _, err := List(t.Context(), root(t, dir), root(t, empty), limits); err != nil {
			t.Errorf("at the limit %+v: %v", limits, err)
		}
	}
}

func TestCancel(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	dir := t.TempDir()
	tree(t, dir, "a=1")
	if _, err := List(ctx, root(t, dir), root(t, t.TempDir()), Limits{}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// A directory or file that the session made unreadable does not hide the others.
func TestUnreadable(t *testing.T) {
	project, upper := t.TempDir(), t.TempDir()
	tree(t, project, "z=1\n", "f=1:0")
	tree(t, upper, "a=1\n", "closed/x=1", "listed/x=1", "z=2\n", "f=2:0")
	u, p := root(t, upper), root(t, project)
	must(t, os.Chmod(upper+"/closed", 0))
	must(t, os.Chmod(upper+"/listed", 0o600))
	defer tree(t, upper, "closed/:755", "listed/:755")
	defer dropOverride(t)()

	changes, err := List(t.Context(), u, p, Limits{})
	if berm.KindOf(err) != berm.Denied || !errors.Is(err, fs.ErrPermission) || berm.HintOf(err) == "" {
		t.Errorf("got %v", err)
	}
	if diff := cmp.Diff([]string{"A a", "A closed/", "M f", "A listed/", "M z"}, brief(changes)); diff != "" {
		t.Error(diff)
	}
	var out bytes.Buffer
	if err := Diff(&out, changes, u, p, Options{}); berm.KindOf(err) != berm.Denied {
		t.Errorf("got %v", err)
	}
	for _, want := range []string{"+1\n", "+2\n", "# berm: f: not shown: read f: permission denied\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in %s", want, out.String())
		}
	}
}

// dropOverride makes modes count for this test, even as root, until the function that it
// returns is called.
func dropOverride(t *testing.T) func() {
	runtime.LockOSThread() // capabilities are a thread's
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var had [2]unix.CapUserData
	must(t, unix.Capget(&header, &had[0]))
	lower := had
	lower[0].Effective &^= 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_DAC_READ_SEARCH
	must(t, unix.Capset(&header, &lower[0]))
	return func() {
		must(t, unix.Capset(&header, &had[0]))
		runtime.UnlockOSThread()
	}
}

// What is swapped for a fifo or a link under the walk neither blocks it nor leads it out.
func TestRace(t *testing.T) {
	project, upper, outside := t.TempDir(), t.TempDir(), t.TempDir()
	tree(t, outside, "secret/inner=2", "file=2")
	tree(t, project, "x=1", "d/inner=1")
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		r := rand.New(rand.NewPCG(1, 2))
		for {
			select {
			case <-stop:
				return
			default:
			}
			for _, name := range []string{"x", "d"} {
				at := filepath.Join(upper, name)
				os.RemoveAll(at)
				switch r.IntN(4) {
				case 0:
					os.WriteFile(at, []byte("1"), 0o644)
				case 1:
					unix.Mkfifo(at, 0o644)
				case 2:
					os.Symlink(outside+"/secret", at)
				case 3:
					os.Mkdir(at, 0o755)
				}
			}
		}
	}()
	upperRoot, projectRoot := root(t, upper), root(t, project)
	for end := time.Now().Add(time.Second); time.Now().Before(end); {
		changes, err := List(t.Context(), upperRoot, projectRoot, Limits{})
		must(t, err)
		for _, c := range changes {
			if strings.HasPrefix(c.Path, "d/") && c.Kind != Deleted {
				t.Fatalf("followed a link: %+v", c)
			}
		}
	}
	close(stop)
	<-done
}

func TestOpenRegular(t *testing.T) {
	dir := t.TempDir()
	tree(t, dir, "d/f=1", "fifo!", "sock#", "in@d/f", "l@d", "up@../x")
	r, err := os.Open(dir)
	must(t, err)
	defer r.Close()
	for _, name := range []string{"fifo", "sock", "in", "l/f", "up", "d", "..", "../" + filepath.Base(dir) + "/d/f", "/etc/passwd"} {
		if f, err := openRegular(int(r.Fd()), name); err == nil {
			f.Close()
			t.Errorf("%s was opened", name)
		}
	}
	f, err := openRegular(int(r.Fd()), "d/f")
	must(t, err)
	f.Close()

	// A lease would hold the open for /proc/sys/fs/lease-break-time, 45 seconds.
	leased, err := os.Open(dir + "/d/f")
	must(t, err)
	defer leased.Close()
	_, err = unix.FcntlInt(leased.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	must(t, err)
	started := time.Now()
	if f, err := openRegular(int(r.Fd()), "d/f"); err == nil || time.Since(started) > 5*time.Second {
		f.Close()
		t.Errorf("a leased file: %v after %v", err, time.Since(started))
	}
}

// A depth of directories takes no descriptors.
func TestDescriptors(t *testing.T) {
	dir := t.TempDir()
	tree(t, dir, strings.Repeat("d/", 400)+"x=1")
	var limit unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	low := limit
	low.Cur = 64
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &low))
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)
	changes, err := List(t.Context(), root(t, dir), root(t, t.TempDir()), Limits{})
	if err != nil || len(changes) != 401 {
		t.Errorf("%d changes, %v", len(changes), err)
	}
}

// An upper directory of few files over a project of many.
func BenchmarkList(b *testing.B) {
	project, upper := b.TempDir(), b.TempDir()
	for i := range 100 {
		for j := range 100 {
			tree(b, project, fmt.Sprintf("d%d/f%d=%d", i, j, i*j))
		}
	}
	tree(b, upper, "d1/f1=x", "d2/f2=4", "d3/new=1", "-d4/f4", "n/a=1", "n/b=2")
	b.Run("upper of 6 files", func(b *testing.B) {
		u, p := root(b, upper), root(b, project)
		for b.Loop() {
			if _, err := List(b.Context(), u, p, Limits{}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("whole trees", func(b *testing.B) {
		u, p := root(b, project), root(b, project)
		for b.Loop() {
			if _, err := Compare(b.Context(), p, u, Limits{}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("upper of 10000 files", func(b *testing.B) {
		u, p := root(b, project), root(b, b.TempDir())
		for b.Loop() {
			if _, err := List(b.Context(), u, p, Limits{}); err != nil {
				b.Fatal(err)
			}
		}
	})
}
