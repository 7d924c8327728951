package template

import (
	"archive/tar"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// testUser is an id that no account has; testRange are its subordinate ids.
const (
	testUser  = 54321
	testRange = 0x6f000000
)

// The tests of this package pass for an ordinary user too: one with subordinate
// ids, and one without. Root runs them again as such, behind a mount namespace
// in which the system's files about users name it.
func TestAsOrdinaryUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("this is the ordinary user")
	}
	if os.Getenv("BERM_TEST_ALL") == "" {
		t.Skip("runs all tests twice more: set BERM_TEST_ALL=1")
	}
	for name, subordinate := range map[string]string{
		"subordinate ids": fmt.Sprintf("tester:%d:%d\n", testRange, berm.IDsPerSandbox),
		"a single id":     "",
	} {
		t.Run(name, func(t *testing.T) {
			home := userHome(t)
			binary := filepath.Join(home, "template.test")
			self, err := os.ReadFile("/proc/self/exe")
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(binary, self, 0o755); err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command(binary, "-test.count=1", "-test.v", "-test.skip=TestInterpreterServer") // no user differs there
			cmd.Dir = home
			cmd.Env = append(os.Environ(), "HOME="+home, "TMPDIR="+home, "XDG_CACHE_HOME=")
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: testUser, Gid: testUser}}
			out, err := runWithFiles(t, cmd, map[string]string{
				"/etc/passwd": fmt.Sprintf("root:x:0:0::/root:/bin/sh\ntester:x:%d:%d::%s:/bin/sh\n", testUser, testUser, home),
				"/etc/subuid": subordinate,
				"/etc/subgid": subordinate,
			})
			if err != nil {
				t.Errorf("%v\n%s", err, out)
			}
			shifted := strings.Contains(string(out), "--- PASS: TestSubordinateIDs")
			single := strings.Contains(string(out), "--- PASS: TestSingleID")
			if shifted != (subordinate != "") || single == shifted {
				t.Errorf("tests of subordinate ids ran: %v, of a single id: %v\n%s", shifted, single, out)
			}
		})
	}
}

// userHome is a directory of the test user's that it can reach.
func userHome(t *testing.T) string {
	t.Helper()
	home, err := os.MkdirTemp("", "berm-user-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(home); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chown(home, testUser, testUser); err != nil {
		t.Fatal(err)
	}
	return home
}

// runWithFiles runs a command for which some files of the system have another
// content.
func runWithFiles(t *testing.T, cmd *exec.Cmd, files map[string]string) (out []byte, err error) {
	t.Helper()
	dir := t.TempDir()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with its namespace
		done <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
				return err
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return err
			}
			for file, content := range files {
				mine := filepath.Join(dir, filepath.Base(file))
				if err := os.WriteFile(mine, []byte(content), 0o644); err != nil {
					return err
				}
				if err := unix.Mount(mine, file, "", unix.MS_BIND, ""); err != nil {
					return fmt.Errorf("mount over %s: %w", file, err)
				}
			}
			var err error
			out, err = cmd.CombinedOutput()
			return err
		}()
	}()
	return out, <-done
}

// An image's owners are stored as the user's subordinate ids, and all of it can be
// taken away again.
func TestSubordinateIDs(t *testing.T) {
	i := hostIDs()
	if !i.shifted() {
		t.Skip("needs an ordinary user with newuidmap and 65536 ids in /etc/subuid and /etc/subgid")
	}
	s := newStore(t)
	owned := func(name string, uid, gid int, mode int64) entry {
		e := file644(name, name)
		e.Uid, e.Gid, e.Mode = uid, gid, mode
		return e
	}
	secret := dir755("secret")
	secret.Mode = 0o500
	secret.Uid = 7
	first := []entry{owned("root", 0, 0, 0o4755), owned("user", 1000, 100, 0o600), secret, owned("secret/gone", 65535, 65535, 0), dir755("opaque"), owned("opaque/old", 1, 1, 0o644), link(tar.TypeSymlink, "l", "secret")}
	second := []entry{file644("secret/.wh.gone", ""), link(tar.TypeLink, "hard", "user"), file644("opaque/"+opaqueMarker, ""), owned("l/new", 8, 8, 0o644)}
	budget := DefaultBudget
	info1, chain1, err := s.addLayer(t.Context(), nil, "", bytes.NewReader(archive(t, first...)), &budget)
	if err != nil {
		t.Fatal(err)
	}
	if budget.Entries != DefaultBudget.Entries-int64(len(first)) {
		t.Errorf("%d entries are left of the budget", budget.Entries)
	}
	info2, chain2, err := s.addLayer(t.Context(), []string{chain1}, "", bytes.NewReader(archive(t, second...)), &budget)
	if err != nil {
		t.Fatal(err)
	}
	check := func(name string, mode, uid, gid uint32) {
		t.Helper()
		var st unix.Stat_t
		if err := unix.Lstat(name, &st); err != nil {
			t.Error(err)
		} else if st.Mode != mode || st.Uid != i.uids.Base+uid || st.Gid != i.gids.Base+gid {
			t.Errorf("%s has mode %o, owner %d:%d", filepath.Base(name), st.Mode, st.Uid-i.uids.Base, st.Gid-i.gids.Base)
		}
	}
	below, above := s.layerPath(chain1), s.layerPath(chain2)
	check(below, unix.S_IFDIR|0o755, 0, 0)
	check(below+"/root", unix.S_IFREG|0o4755, 0, 0)
	check(below+"/user", unix.S_IFREG|0o600, 1000, 100)
	check(below+"/secret", unix.S_IFDIR|0o500, 7, 0)
	check(above+"/secret", unix.S_IFDIR|0o500, 7, 0)
	check(above+"/hard", unix.S_IFREG|0o600, 1000, 100)

	made := record{Template: berm.Template{Names: []string{"a"}, Layers: []berm.Layer{{DiffID: info1.DiffID, Path: below}, {DiffID: info2.DiffID, Path: above}}}}
	if _, err := s.put(t.Context(), made); err != nil {
		t.Fatal(err)
	}
	bad := budget
	if _, _, err := s.addLayer(t.Context(), nil, "", bytes.NewReader(archive(t, file644("../x", ""))), &bad); err == nil || berm.KindOf(err) != berm.Invalid {
		t.Errorf("a hostile layer: %v", err)
	}
	if err := s.Remove(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"layers", "tmp"} {
		if got := find(t, filepath.Join(s.dir, dir)); len(got) > 0 {
			t.Errorf("%s holds %q", dir, got)
		}
	}
}

func TestSingleID(t *testing.T) {
	if i := hostIDs(); !i.own {
		t.Skip("needs an ordinary user without subordinate ids")
	}
	s := newStore(t)
	budget := DefaultBudget
	foreign := file644("f", "x")
	foreign.Uid = 1000
	_, _, err := s.addLayer(t.Context(), nil, "", bytes.NewReader(archive(t, foreign)), &budget)
	if berm.KindOf(err) != berm.Unsupported || !strings.Contains(berm.HintOf(err), "/etc/subuid") {
		t.Errorf("got %v, hint %q", err, berm.HintOf(err))
	}
	_, err = s.Build(t.Context(), Base, false, nil)
	if berm.KindOf(err) != berm.Unsupported || !strings.Contains(berm.HintOf(err), "/etc/subuid") {
		t.Errorf("base: got %v, hint %q", err, berm.HintOf(err))
	}
	closed := dir755("closed")
	closed.Mode = 0
	budget = DefaultBudget
	_, chain, err := s.addLayer(t.Context(), nil, "", bytes.NewReader(archive(t, file644("closed/f", "x"), closed)), &budget)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(filepath.Join(s.layerPath(chain), "closed")); err != nil || info.Mode().Perm() != 0 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if err := s.Collect(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := layerNames(t, s); !cmp.Equal(got, []string(nil)) {
		t.Errorf("left %q", got)
	}
}
