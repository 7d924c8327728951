package apply

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/local/change"
)

// sightVariable makes this program mount a session's overlay in a mount namespace of its
// own, edit it as the seed has it and write down what it sees.
const sightVariable = "BERM_TEST_SIGHT"

type sight struct {
	Root   string
	Seed   uint64 // 0: only look
	Script string // for the shell, in the session's view
}

func TestMain(m *testing.M) {
	if order := os.Getenv(sightVariable); order != "" {
		if err := see(order); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func see(order string) error {
	var s sight
	if err := json.Unmarshal([]byte(order), &s); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	view := filepath.Join(s.Root, "view")
	for _, dir := range []string{"view", "session/work"} {
		if err := os.MkdirAll(filepath.Join(s.Root, dir), 0o755); err != nil {
			return err
		}
	}
	options := fmt.Sprintf("userxattr,lowerdir=%s/project,upperdir=%s/session/upper,workdir=%s/session/work", s.Root, s.Root, s.Root)
	if err := unix.Mount("overlay", view, "overlay", 0, options); err != nil {
		return fmt.Errorf("mount an overlay: %w", err)
	}
	defer unix.Unmount(view, 0)
	if s.Seed != 0 {
		edit(view, rand.New(rand.NewPCG(s.Seed, 1)), 60)
	}
	if s.Script != "" {
		cmd := exec.Command("sh", "-euc", s.Script)
		cmd.Dir = view
		cmd.Env = append(os.Environ(), gitEnv...)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
	}
	out, err := os.Create(filepath.Join(s.Root, "seen.json"))
	if err != nil {
		return err
	}
	t := &fatalist{}
	seen := snapshot(t, view)
	if err := json.NewEncoder(out).Encode(seen); err != nil {
		return err
	}
	return out.Close()
}

var gitEnv = []string{"GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1", "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.org",
	"GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.org"}

// fatalist lets the helpers of tests be used without one.
type fatalist struct{ testing.TB }

func (*fatalist) Helper()           {}
func (*fatalist) Fatal(args ...any) { panic(fmt.Sprint(args...)) }

// look returns what the session sees, after edits when seed is not 0.
func (f *fixture) look(seed uint64) map[string]string {
	f.t.Helper()
	return f.see(sight{Root: f.root, Seed: seed})
}

// do runs a script in the session's view.
func (f *fixture) do(script string) map[string]string {
	f.t.Helper()
	return f.see(sight{Root: f.root, Script: script})
}

func (f *fixture) see(s sight) map[string]string {
	f.t.Helper()
	order, _ := json.Marshal(s)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), sightVariable+"="+string(order), "GORACE=atexit_sleep_ms=0")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: os.Geteuid(), HostID: os.Geteuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: os.Getegid(), HostID: os.Getegid(), Size: 1}}
		cmd.SysProcAttr.AmbientCaps = []uintptr{unix.CAP_SYS_ADMIN, unix.CAP_DAC_OVERRIDE} // what mounting takes
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		f.t.Fatalf("%v: %s", err, out)
	}
	b, err := os.ReadFile(filepath.Join(f.root, "seen.json"))
	if err != nil {
		f.t.Fatal(err)
	}
	seen := map[string]string{}
	if err := json.Unmarshal(b, &seen); err != nil {
		f.t.Fatal(err)
	}
	return seen
}

// edit does random things below dir. What fails was not possible, and that is fine.
func edit(dir string, r *rand.Rand, n int) {
	names := []string{"a", "b", "c", "d"}
	pick := func() string {
		full := dir
		for range 1 + r.IntN(3) {
			full = filepath.Join(full, names[r.IntN(len(names))])
		}
		return full
	}
	for range n {
		name := pick()
		switch r.IntN(10) {
		case 0, 1, 2:
			os.WriteFile(name, []byte(strconv.Itoa(r.IntN(5))), 0o644)
		case 3:
			os.MkdirAll(name, 0o755)
		case 4:
			os.RemoveAll(name)
		case 5:
			os.RemoveAll(name) // the new directory is opaque
			os.Mkdir(name, 0o755)
			os.WriteFile(name+"/a", []byte(strconv.Itoa(r.IntN(5))), 0o644)
		case 6:
			os.Remove(name)
			os.Symlink(names[r.IntN(len(names))], name)
		case 7:
			modes := []os.FileMode{0o600, 0o755, 0o444, 0o555, 0o700}
			st, err := os.Lstat(name)
			if err != nil || st.Mode()&os.ModeSymlink != 0 {
				continue
			}
			if st.IsDir() && os.Geteuid() != 0 {
				modes = []os.FileMode{0o755, 0o700} // others keep an ordinary user out, here as there
			}
			os.Chmod(name, modes[r.IntN(len(modes))])
		case 8:
			os.Rename(name, pick())
		case 9:
			os.Link(name, pick())
		}
	}
}

// TestView applies what random edits made to a project that nobody else touched: first
// some of the paths, which must not change what the session sees, then all.
func TestView(t *testing.T) {
	rounds := 8
	if os.Getenv("BERM_TEST_ALL") != "" {
		rounds = 150
	}
	first := rand.Uint64N(1<<40) + 1
	for seed := first; seed < first+uint64(rounds); seed++ {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			f := newFixture(t)
			r := rand.New(rand.NewPCG(seed, 2))
			edit(filepath.Join(f.root, "project"), r, 40)
			f.begin()
			want := f.look(seed)
			for range 3 {
				changes := f.request().Changes
				if len(changes) == 0 {
					break
				}
				f.base = remember(t, filepath.Join(f.root, "project"))
				name := changes[r.IntN(len(changes))].Path
				for n, result := range f.apply(f.request(name)) {
					if result.Outcome != Applied && result.Outcome != Flagged && result.Outcome != Conflict {
						t.Errorf("%q: %+v", n, result)
					}
				}
				compare(t, "the view after "+name, f.look(0), want)
				if t.Failed() {
					return
				}
			}
			f.base = remember(t, filepath.Join(f.root, "project"))
			consent := f.request()
			consent.Consent = true
			for n, result := range f.apply(consent) {
				if result.Outcome != Applied {
					t.Errorf("%q: %+v", n, result)
				}
			}
			compare(t, "the project", snapshot(t, filepath.Join(f.root, "project")), want)
			compare(t, "the view at the end", f.look(0), want)
			if left, err := change.List(t.Context(), f.upper, f.project, change.Limits{}); err != nil || len(left) > 0 {
				t.Errorf("left: %v, %v", left, err)
			}
			noTemps(t, filepath.Join(f.root, "project"))
		})
	}
}

// TestHostile applies uppers that no overlay made to projects full of links that lead out.
func TestHostile(t *testing.T) {
	rounds := 30
	if os.Getenv("BERM_TEST_ALL") != "" {
		rounds = 500
	}
	first := rand.Uint64N(1<<40) + 1
	for seed := first; seed < first+uint64(rounds); seed++ {
		f := newFixture(t)
		f.write("outside", map[string]string{"a": "secret", "b/c": "secret", "c/d": "secret"})
		r := rand.New(rand.NewPCG(seed, 3))
		project, upper := filepath.Join(f.root, "project"), filepath.Join(f.session, "upper")
		edit(project, r, 30)
		hostile(project, f.root, r, 10)
		f.begin()
		edit(upper, r, 30)
		hostile(upper, f.root, r, 20)
		before := snapshot(t, f.root)
		plan := f.request()
		plan.Consent = r.IntN(2) == 0
		if r.IntN(2) == 0 { // the project changes after it was listed
			hostile(project, f.root, r, 8)
			before = snapshot(t, f.root)
		}
		for name, result := range f.apply(plan) {
			if result.Outcome == Unclear || result.Outcome == NotApplied || result.Outcome != Applied && result.Outcome != Same && result.Reason == "" {
				t.Errorf("%q: %+v", name, result)
			}
		}
		outside := func(tree map[string]string) map[string]string {
			kept := map[string]string{}
			for name, what := range tree {
				if !strings.HasPrefix(name, "project/") && !strings.HasPrefix(name, "session/") {
					kept[name] = what
				}
			}
			return kept
		}
		after := snapshot(t, f.root)
		compare(t, "outside", outside(after), outside(before))
		secret := snapshot(t, filepath.Join(f.root, "outside"))["a"]
		for name, what := range after {
			if strings.HasPrefix(name, "project/") && what == secret && before[name] != secret {
				t.Errorf("%s shows what is outside", name)
			}
		}
		noTemps(t, f.root)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// hostile puts things into dir that an overlay would not.
func hostile(dir, root string, r *rand.Rand, n int) {
	names := []string{"a", "b", "c", "d"}
	for range n {
		name := dir
		for range 1 + r.IntN(3) {
			name = filepath.Join(name, names[r.IntN(len(names))])
		}
		// Not through a link that an earlier turn made: this is the test's own hand.
		parent := filepath.Dir(name)
		if real, err := filepath.EvalSymlinks(parent); err != nil || real != parent {
			continue
		}
		if st, err := os.Lstat(parent); err != nil || !st.IsDir() {
			continue
		}
		os.RemoveAll(name)
		switch r.IntN(8) {
		case 0:
			os.Symlink(filepath.Join(root, "outside"), name)
		case 1:
			os.Symlink("../outside/a", name)
		case 2:
			unix.Mkfifo(name, 0o644)
		case 3:
			unix.Mknod(name, unix.S_IFCHR|0o644, int(unix.Mkdev(1, 3)))
		case 4:
			unix.Mknod(name, unix.S_IFCHR, 0)
		case 5:
			os.Mkdir(name, 0o755)
			unix.Setxattr(name, opaqueAttribute, []byte("y"), 0)
			os.WriteFile(name+"/a\n\x1b]0;x\a", []byte("odd"), 0o4755)
		case 6:
			unix.Mknod(name, unix.S_IFSOCK|0o644, 0)
		case 7:
			os.Symlink("/proc/self/environ", name)
		}
	}
}
