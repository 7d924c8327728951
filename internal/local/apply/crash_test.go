//go:build failpoint

package apply

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const crashVariable = "BERM_TEST_CRASH"

func crashFixture(t *testing.T, root string) *fixture {
	f := openFixture(t, root)
	if _, err := os.Lstat(filepath.Join(root, "project/edit")); err == nil {
		return f
	}
	lines := "1\n2\n3\n4\n5\n6\n7\n8\n9\n"
	f.write("project", map[string]string{
		"edit": "old", "gone": "x", "dir/one": "1", "file": "f", "tree/b": "b", "link": "->edit", "merge": lines, "kept": "kept", "mode/x": "x",
	})
	f.begin()
	f.write("session/upper", map[string]string{
		"edit": "new", "new/deep/n": "n", "file/now": "d", "tree": "file", "link": "->new", "merge": strings.Replace(lines, "8", "session", 1), "mode": "",
	})
	os.Chmod(filepath.Join(f.session, "upper/mode"), 0o500)
	f.whiteout("gone", "dir")
	f.write("project", map[string]string{"merge": strings.Replace(lines, "2", "project", 1)})
	return f
}

// TestCrash kills an apply between every two steps. Then each path is as before or after,
// the settlement says which, and a second apply brings the rest.
func TestCrash(t *testing.T) {
	if root := os.Getenv(crashVariable); root != "" {
		f := crashFixture(t, root)
		f.apply(f.request())
		return
	}
	done := newFixture(t)
	whole := crashFixture(t, done.root)
	before := snapshot(t, filepath.Join(done.root, "project"))
	want := whole.apply(whole.request())
	after := snapshot(t, filepath.Join(done.root, "project"))
	n, places := 0, 0
	for name, r := range want {
		if r.Outcome != Applied && r.Outcome != Merged {
			t.Fatalf("%q: %+v", name, r)
		}
		n++
		if name != "new" && name != "new/deep" { // made before
			places++
		}
	}
	points := []string{"apply.journal", "apply.staged", "apply.swapped", "apply.modes", "apply.placed", "apply.recorded", "apply.forgotten", "apply.make.9", "apply.make.10"}
	for i := range places {
		points = append(points, fmt.Sprintf("apply.place.%d", i))
	}
	for _, point := range points {
		t.Run(point, func(t *testing.T) {
			root := t.TempDir()
			cmd := exec.Command("/proc/self/exe", "-test.run=^TestCrash$", "-test.timeout=30s")
			cmd.Env = append(os.Environ(), crashVariable+"="+root, "BERM_FAILPOINTS="+point+"=crash", "GORACE=atexit_sleep_ms=0")
			if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(err.Error(), "killed") {
				t.Fatalf("%v: %s", err, out)
			}
			f := crashFixture(t, root)
			if _, err := New(t.Context(), Request{Dir: f.session, Upper: f.upper, Project: f.project}); err == nil {
				t.Error("a plan over an apply that is not settled")
			}
			status, err := Status(t.Context(), f.session, f.upper, f.project)
			if err != nil {
				t.Fatal(err)
			}
			settled, err := Recover(t.Context(), f.session, f.upper, f.project)
			if err != nil {
				t.Fatal(err)
			}
			said := byPath(settled)
			if fmt.Sprint(status) != fmt.Sprint(settled) || len(said) != n {
				t.Errorf("status %v\nrecovered %v", status, settled)
			}
			now := snapshot(t, filepath.Join(root, "project"))
			for name, r := range said {
				switch expect := map[Outcome]string{Applied: after[name], Merged: after[name], NotApplied: before[name]}[r.Outcome]; {
				case r.Outcome != Applied && r.Outcome != Merged && r.Outcome != NotApplied:
					t.Errorf("%q: %+v", name, r)
				case now[name] != expect:
					t.Errorf("%q: said to be %s, but it is %q and should be %q", name, r.Outcome, now[name], expect)
				}
			}
			noTemps(t, root)
			if list, err := Recover(t.Context(), f.session, f.upper, f.project); err != nil || list != nil {
				t.Errorf("recovered again: %v, %v", list, err)
			}
			// The rest, with a base that knows what the crashed apply had done already.
			f.base, f.started = remember(t, filepath.Join(root, "project")), time.Now()
			f.apply(f.request())
			now = snapshot(t, filepath.Join(root, "project"))
			if said["merge"].Outcome == NotApplied {
				// With that base the session's side alone has changed.
				now["merge"] = after["merge"]
			}
			compare(t, "the project", now, after)
			compare(t, "upper", snapshot(t, filepath.Join(f.session, "upper")), nil)
		})
	}
}
