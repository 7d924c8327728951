package session

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func openStore(t testing.TB, dir string) *Store {
	t.Helper()
	store, err := Open(filepath.Join(dir, "state"))
	must(t, err)
	t.Cleanup(func() { store.Close() })
	return store
}

func create(t testing.TB, store *Store, project string) *Session {
	t.Helper()
	must(t, os.MkdirAll(project, 0o755))
	s, err := store.Create(project, "")
	must(t, err)
	t.Cleanup(s.Unlock)
	return s
}

func expectKind(t *testing.T, err error, kind berm.Kind) {
	t.Helper()
	if err == nil || berm.KindOf(err) != kind {
		t.Errorf("got %v (%v), want one that is %v", err, berm.KindOf(err), kind)
	}
}

func TestSlug(t *testing.T) {
	for project, want := range map[string]string{
		"/home/a/Berm":                       "berm",
		"/p/my project (2)":                  "my-project-2",
		"/p/---":                             "project",
		"/":                                  "project",
		"/p/\xff\n":                          "project",
		"/p/é1":                              "1",
		"/p/abcdefghijklmnopqrstuvwxyz":      "abcdefghijklmnopqrstuvwx",
		"/p/abcdefghijklmnopqrstuvw-xyz":     "abcdefghijklmnopqrstuvw",
		"/p/.config":                         "config",
		"/p/" + strings.Repeat("\u212a", 30): strings.Repeat("k", 24), // lower case of the Kelvin sign
	} {
		got := slug(project)
		if got != want || !isName(got+"-1") {
			t.Errorf("%q: %q, want %q", project, got, want)
		}
	}
}

func TestSessionComesBack(t *testing.T) {
	asEverybody(t, func(t *testing.T, dir string) {
		store := openStore(t, dir)
		project := filepath.Join(dir, "My \xffproject\n")
		s := create(t, store, project)
		if s.Name != "my-project-1" {
			t.Errorf("name %q", s.Name)
		}
		must(t, os.Chmod(project, 0o750))
		if other := create(t, store, project); other.Name != "my-project-2" {
			t.Errorf("second name %q", other.Name)
		} else if info, err := os.Stat(other.Upper()); err != nil || info.Mode().Perm() != 0o750 {
			t.Errorf("upper directory: %v, %v", info.Mode(), err)
		}
		if _, err := store.Get(s.Name); berm.KindOf(err) != berm.NotFound {
			t.Errorf("unsaved session: %v", err)
		}
		put(t, s.Upper(), "file=x") // a command is quicker than Save
		if list, err := store.List(); err != nil || len(list) != 0 {
			t.Errorf("listed before it is saved: %v, %v", list, err)
		}
		started := time.Now().Round(0)
		s.Preset = "build"
		s.Runs = []Run{{Argv: []string{"make", strings.Repeat("x", 10000), "y"}, Started: started, ExitCode: 3, Reason: "exited"}}
		must(t, s.Save())
		got, err := store.Get(s.Name)
		must(t, err)
		if got.Project != project || !got.Created.Equal(s.Created) || got.Preset != "build" || len(got.Runs) != 1 {
			t.Fatalf("got %+v", got)
		}
		run := got.Runs[0]
		if len(run.Argv) != 2 || len(run.Argv[1]) > maxArgv || !run.Started.Equal(started) || run.ExitCode != 3 || run.Reason != "exited" {
			t.Errorf("run %+v", run)
		}
		for range 3 * maxRuns {
			s.Runs = append(s.Runs, Run{Argv: []string{"true"}, Started: started})
		}
		must(t, s.Save())
		if got, err = store.Get(s.Name); err != nil || len(got.Runs) != maxRuns {
			t.Errorf("%d runs, %v", len(got.Runs), err)
		}
		if info, err := os.Stat(s.Dir()); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("session's directory: %v, %v", info.Mode(), err)
		}
	})
}

func TestUpperHasTheProjectsOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, who alone sets owners")
	}
	dir := t.TempDir()
	project := filepath.Join(dir, "p")
	must(t, os.Mkdir(project, 0o755))
	must(t, os.Chown(project, 1234, 5678))
	s := create(t, openStore(t, dir), project)
	var st unix.Stat_t
	must(t, unix.Stat(s.Upper(), &st))
	if st.Uid != 1234 || st.Gid != 5678 || st.Mode&0o777 != 0o755 {
		t.Errorf("%d:%d %o", st.Uid, st.Gid, st.Mode)
	}
}

func TestCreateRefuses(t *testing.T) {
	dir := t.TempDir()
	store := openStore(t, dir)
	file := filepath.Join(dir, "file")
	must(t, os.WriteFile(file, nil, 0o600))
	for _, project := range []string{"relative", filepath.Join(dir, "missing"), file} {
		_, err := store.Create(project, "")
		expectKind(t, err, berm.Invalid)
	}
	if names, err := store.entries(); err != nil || len(names) != 0 {
		t.Errorf("left %v, %v", names, err)
	}
}

func TestGetAndRemoveRefuseOtherNames(t *testing.T) {
	store := openStore(t, t.TempDir())
	for _, name := range []string{"", ".", "..", "a/b", "../x", ".trash-X", "A", "none-1"} {
		_, err := store.Get(name)
		expectKind(t, err, berm.NotFound)
		expectKind(t, store.Remove(t.Context(), name), berm.NotFound)
	}
}

func TestNamesAreGivenOnce(t *testing.T) {
	dir := t.TempDir()
	project := filepath.Join(dir, "p")
	must(t, os.Mkdir(project, 0o755))
	var mu sync.Mutex
	names := map[string]bool{}
	var work sync.WaitGroup
	ctx, stop := context.WithCancel(t.Context())
	sweeper := make(chan error)
	go func() { // takes what looks unused, as another process would
		store := openStore(t, dir)
		var err error
		for ctx.Err() == nil && err == nil {
			err = store.Sweep(context.Background())
		}
		sweeper <- err
	}()
	for range 8 {
		store := openStore(t, dir)
		work.Go(func() {
			for range 20 {
				s, err := store.Create(project, "")
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := os.Stat(s.Upper()); err != nil {
					t.Error(err)
				}
				mu.Lock()
				if names[s.Name] {
					t.Errorf("%s twice", s.Name)
				}
				names[s.Name] = true
				mu.Unlock()
				t.Cleanup(s.Unlock)
			}
		})
	}
	work.Wait()
	stop()
	must(t, <-sweeper)
	if len(names) != 160 {
		t.Errorf("%d sessions", len(names))
	}
}

const holderVariable = "BERM_TEST_HOLDER"

func TestLock(t *testing.T) {
	if dir := os.Getenv(holderVariable); dir != "" {
		s, err := openStore(t, dir).Get("p-1")
		must(t, err)
		must(t, s.Lock())
		fmt.Println("locked")
		os.Stdin.Read(make([]byte, 1))
		return
	}
	dir := t.TempDir()
	store := openStore(t, dir)
	s := create(t, store, filepath.Join(dir, "p"))
	if !s.Running() {
		t.Error("not running for its holder")
	}
	must(t, s.Save())
	s.Unlock()
	if s.Running() {
		t.Error("running")
	}
	self, err := os.Executable()
	must(t, err)
	cmd := exec.Command(self, "-test.run=^TestLock$")
	cmd.Env = append(os.Environ(), holderVariable+"="+dir, "GORACE=atexit_sleep_ms=0")
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	if n, err := out.Read(make([]byte, 7)); n != 7 || err != nil {
		t.Fatal(n, err)
	}
	if !s.Running() {
		t.Error("not running")
	}
	err = s.Lock()
	expectKind(t, err, berm.Conflict)
	if !strings.HasSuffix(err.Error(), fmt.Sprintf("running: pid %d", cmd.Process.Pid)) {
		t.Errorf("%v, want pid %d", err, cmd.Process.Pid)
	}
	expectKind(t, store.Remove(t.Context(), s.Name), berm.Conflict)
	in.Close()
	must(t, cmd.Wait())
	must(t, s.Lock())
	must(t, s.Lock()) // its own already
	must(t, s.Remove(t.Context()))
	s.Unlock()
	expectKind(t, s.Lock(), berm.NotFound)
}

func TestLookingDoesNotKeepFromLocking(t *testing.T) {
	dir := t.TempDir()
	store := openStore(t, dir)
	s := create(t, store, filepath.Join(dir, "p"))
	must(t, s.Save())
	s.Unlock()
	other, err := store.Get(s.Name)
	must(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range 100 {
			other.Running()
			time.Sleep(100 * time.Microsecond)
		}
	}()
	for range 200 {
		must(t, s.Lock())
		s.Unlock()
	}
	<-done
}

func TestBrokenSessions(t *testing.T) {
	dir := t.TempDir()
	store := openStore(t, dir)
	for name, c := range map[string]struct {
		text string
		kind berm.Kind
	}{
		"torn":    {`{"version":1,"na`, berm.Internal},
		"empty":   {``, berm.Internal},
		"newer":   {`{"version":2,"name":"newer","project":{"some":"thing"}}`, berm.Unsupported},
		"other":   {`{"version":1,"name":"x","project":"/p","created":"2026-01-01T00:00:00Z"}`, berm.Internal},
		"lacking": {`{"version":1,"name":"lacking"}`, berm.Internal},
		"null":    {`null`, berm.Internal},
	} {
		must(t, os.MkdirAll(filepath.Join(store.path, name, upperDir, "x"), 0o700))
		must(t, os.WriteFile(filepath.Join(store.path, name, description), []byte(c.text), 0o600))
		_, err := store.Get(name)
		expectKind(t, err, c.kind)
		if berm.HintOf(err) == "" {
			t.Errorf("%s: no hint", name)
		}
	}
	// One whose process died with changes, and one without.
	must(t, os.MkdirAll(filepath.Join(store.path, "died", upperDir, "x"), 0o700))
	must(t, os.MkdirAll(filepath.Join(store.path, "unborn", upperDir), 0o700))
	must(t, store.Sweep(t.Context()))
	list, err := store.List()
	must(t, err)
	var names []string
	for _, s := range list {
		names = append(names, s.Name)
		if s.Broken == nil {
			t.Errorf("%s is listed as sound", s.Name)
		}
	}
	if want := []string{"died", "empty", "lacking", "newer", "null", "other", "torn"}; !slices.Equal(names, want) {
		t.Errorf("listed %v, want %v", names, want)
	}
	if _, err := store.Latest("/p"); berm.KindOf(err) != berm.NotFound {
		t.Error(err)
	}
	for _, name := range names {
		must(t, store.Remove(t.Context(), name))
	}
	if left, err := store.entries(); err != nil || len(left) != 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

func TestLatest(t *testing.T) {
	dir := t.TempDir()
	store := openStore(t, dir)
	outer, inner := filepath.Join(dir, "outer"), filepath.Join(dir, "outer", "in", "inner")
	save := func(project string, used int) string {
		s := create(t, store, project)
		s.Runs = []Run{{Started: time.Unix(int64(used), 0)}}
		must(t, s.Save())
		return s.Name
	}
	first := save(outer, 50)
	save(outer, 20)
	innermost := save(inner, 10)
	for at, want := range map[string]string{
		outer:                         first,
		filepath.Join(outer, "in"):    first,
		inner:                         innermost,
		filepath.Join(inner, "a/b"):   innermost,
		filepath.Join(dir, "outer2"):  "",
		dir:                           "",
		filepath.Join(outer, "..foo"): first,
	} {
		s, err := store.Latest(at)
		if want == "" {
			expectKind(t, err, berm.NotFound)
		} else if err != nil || s.Name != want {
			t.Errorf("%s: %v, %v, want %s", at, s, err, want)
		}
	}
}

// hostile makes a tree that a sandbox could leave to annoy whoever deletes it. It returns a
// canary that must stay.
func hostile(t *testing.T, upper, dir string) (canary string) {
	t.Helper()
	canary = filepath.Join(dir, "canary")
	must(t, os.Mkdir(canary, 0o755))
	must(t, os.WriteFile(filepath.Join(canary, "file"), []byte("x"), 0o644))
	must(t, os.Symlink(canary, filepath.Join(upper, "link")))
	must(t, unix.Mkfifo(filepath.Join(upper, "fifo"), 0o600))
	must(t, unix.Mknod(filepath.Join(upper, "whiteout"), unix.S_IFCHR, 0))
	must(t, os.WriteFile(filepath.Join(upper, "-rf\n\x1b[2J\xff"), nil, 0))
	for _, mode := range []os.FileMode{0, 0o111, 0o222, 0o444, 0o555} {
		locked := filepath.Join(upper, fmt.Sprintf("mode-%o", mode), "in", "in")
		must(t, os.MkdirAll(locked, 0o700))
		must(t, os.WriteFile(filepath.Join(locked, "file"), nil, 0o600))
		for range 3 {
			must(t, os.Chmod(locked, mode))
			locked = filepath.Dir(locked)
		}
	}
	many := filepath.Join(upper, "many")
	must(t, os.Mkdir(many, 0o700))
	for i := range 1100 {
		must(t, os.Symlink("..", filepath.Join(many, fmt.Sprint(i))))
	}
	// Deeper than any path can be, with a file at each level.
	fd, err := unix.Open(upper, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	must(t, err)
	name := strings.Repeat("d", 200)
	for range 300 {
		must(t, unix.Mkdirat(fd, name, 0o700))
		below, err := unix.Openat(fd, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		must(t, err)
		unix.Close(fd)
		fd = below
		must(t, unix.Symlinkat(canary, fd, "link"))
	}
	unix.Close(fd)
	return canary
}

// A command can take the rights to the workspace itself away.
func TestUpperWithoutRights(t *testing.T) {
	asEverybody(t, func(t *testing.T, dir string) {
		s := create(t, openStore(t, dir), filepath.Join(dir, "project"))
		must(t, os.WriteFile(s.Upper()+"/file", nil, 0o600))
		for _, mode := range []os.FileMode{0, 0o500, 0o055} {
			must(t, os.Chmod(s.Upper(), mode))
			upper, err := s.OpenUpper()
			must(t, err)
			_, err = upper.Stat("file")
			must(t, err)
			must(t, upper.Close())
			info, err := os.Stat(s.Upper())
			if must(t, err); info.Mode().Perm() != mode|0o500 {
				t.Errorf("%o became %o", mode, info.Mode().Perm())
			}
		}
	})
}

func TestRemoveHostile(t *testing.T) {
	asEverybody(t, func(t *testing.T, dir string) {
		store := openStore(t, dir)
		s := create(t, store, filepath.Join(dir, "p"))
		must(t, os.MkdirAll(filepath.Join(s.Work(), "work"), 0o700))
		must(t, os.Chmod(filepath.Join(s.Work(), "work"), 0)) // as overlayfs does
		canary := hostile(t, s.Upper(), dir)
		must(t, os.Chmod(s.Upper(), 0))
		if changed, err := s.Changed(); err != nil || !changed {
			t.Errorf("changed: %v, %v", changed, err)
		}
		must(t, s.Remove(t.Context()))
		if left, err := store.entries(); err != nil || len(left) != 0 {
			t.Errorf("left %v, %v", left, err)
		}
		if _, err := os.Stat(filepath.Join(canary, "file")); err != nil {
			t.Error(err)
		}
	})
}

func TestEmpty(t *testing.T) {
	asEverybody(t, func(t *testing.T, dir string) {
		store := openStore(t, dir)
		s := create(t, store, filepath.Join(dir, "p"))
		must(t, s.Save())
		put(t, s.Upper(), "dir/file=x")
		must(t, os.Chmod(filepath.Join(s.Upper(), "dir"), 0))
		must(t, os.Mkdir(filepath.Join(s.Work(), "work"), 0))
		must(t, os.Chmod(s.Upper(), 0o555))
		must(t, s.Empty(t.Context()))
		if changed, err := s.Changed(); err != nil || changed {
			t.Errorf("changed: %v, %v", changed, err)
		}
		if info, err := os.Stat(s.Upper()); err != nil || info.Mode().Perm() != 0o755 {
			t.Errorf("%v, %v", info, err)
		}
		if info, err := os.Stat(s.Work()); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("%v, %v", info, err)
		}
		if left, err := store.entries(); err != nil || !slices.Equal(left, []string{s.Name}) {
			t.Errorf("left %v, %v", left, err)
		}
	})
}

func TestRemoveCanBeCancelled(t *testing.T) {
	dir := t.TempDir()
	store := openStore(t, dir)
	s := create(t, store, filepath.Join(dir, "p"))
	must(t, os.WriteFile(filepath.Join(s.Upper(), "file"), nil, 0o600))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Remove(ctx); err == nil {
		t.Error("removed")
	}
	if list, err := store.List(); err != nil || len(list) != 0 {
		t.Errorf("still listed: %v, %v", list, err)
	}
	must(t, store.Sweep(t.Context()))
	if left, err := store.entries(); err != nil || len(left) != 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

func TestRemoveEmptyLeavesItToSweep(t *testing.T) {
	dir := t.TempDir()
	store := openStore(t, dir)
	s := create(t, store, filepath.Join(dir, "p"))
	must(t, s.Save())
	must(t, s.Remove(t.Context()))
	if _, err := store.Get(s.Name); berm.KindOf(err) != berm.NotFound {
		t.Error(err)
	}
	again := create(t, store, filepath.Join(dir, "p"))
	if again.Name != s.Name {
		t.Errorf("the name is not free: %s", again.Name)
	}
	must(t, store.Sweep(t.Context()))
	if left, err := store.entries(); err != nil || !slices.Equal(left, []string{again.Name}) {
		t.Errorf("left %v, %v", left, err)
	}
}

// TestRemovedNamesAreNotGivenAgain: somebody may still mean the removed one.
func TestRemovedNamesAreNotGivenAgain(t *testing.T) {
	dir := t.TempDir()
	store := openStore(t, dir)
	project := filepath.Join(dir, "p")
	s := create(t, store, project)
	must(t, os.WriteFile(filepath.Join(s.Upper(), "file"), nil, 0o600))
	must(t, s.Save())
	s.Unlock()
	must(t, store.Remove(t.Context(), s.Name))
	second := create(t, store, project)
	if second.Name != "p-2" {
		t.Errorf("%s after %s", second.Name, s.Name)
	}
	must(t, second.Save())
	second.Unlock()
	// An older one that goes later does not set the number back, and one of which nothing is
	// left leaves nothing on disk.
	if third := create(t, store, project); third.Name != "p-3" {
		t.Error(third.Name)
	} else {
		must(t, third.Save())
		third.Unlock()
		must(t, store.Remove(t.Context(), third.Name))
	}
	must(t, store.Remove(t.Context(), second.Name))
	if left, err := store.entries(); err != nil || len(left) != 0 {
		t.Errorf("left %v, %v", left, err)
	}
	if next := create(t, store, project); next.Name != "p-4" {
		t.Error(next.Name)
	}
}

// TestRemovalByTwo: what another process deleted meanwhile is no failure.
func TestRemovalByTwo(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, "work"), 0o700))
	work, err := os.Open(filepath.Join(dir, "work"))
	must(t, err)
	defer work.Close()
	must(t, os.Remove(filepath.Join(dir, "work")))
	must(t, (&removal{t.Context(), work}).empty(work, 0))
}

func TestStateDir(t *testing.T) {
	t.Setenv("HOME", "/home/u")
	for set, want := range map[string]string{"": "/home/u/.local/state/berm", "relative": "/home/u/.local/state/berm", "/s": "/s/berm"} {
		t.Setenv("XDG_STATE_HOME", set)
		if dir, err := StateDir(); err != nil || dir != want {
			t.Errorf("%q: %q, %v", set, dir, err)
		}
	}
}

// BenchmarkCreate measures what a session without changes costs its command.
func BenchmarkCreate(b *testing.B) {
	dir := b.TempDir()
	store := openStore(b, dir)
	project := filepath.Join(dir, "p")
	must(b, os.Mkdir(project, 0o755))
	var creating, removing time.Duration
	for b.Loop() {
		began := time.Now()
		s, err := store.Create(project, "")
		must(b, err)
		created := time.Now()
		must(b, s.Remove(b.Context()))
		creating += created.Sub(began)
		removing += time.Since(created)
		s.Unlock()
		must(b, store.Sweep(b.Context()))
	}
	b.ReportMetric(float64(creating.Microseconds())/float64(b.N), "µs/create")
	b.ReportMetric(float64(removing.Microseconds())/float64(b.N), "µs/remove")
}

func BenchmarkSave(b *testing.B) {
	dir := b.TempDir()
	s := create(b, openStore(b, dir), filepath.Join(dir, "p"))
	for b.Loop() {
		must(b, s.Save())
	}
}
