//go:build failpoint

package depot

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// openerVariable makes this program open a depot in that directory, of sizeVariable bytes and one
// kind, at whose failpoint it dies or fails.
const (
	openerVariable = "BERM_TEST_OPENER"
	kindVariable   = "BERM_TEST_KIND"
	sizeVariable   = "BERM_TEST_SIZE"
)

var points = []string{"depot.file", "depot.format", "depot.name", "depot.grow", "depot.attach", "depot.mount", "depot.remove"}

// TestCrashAnywhere lets a server die, or fail, between any two steps of making, growing, mounting
// and removing a depot: the next one goes on, with what was saved.
func TestCrashAnywhere(t *testing.T) {
	if dir := os.Getenv(openerVariable); dir != "" {
		size, err := strconv.ParseInt(os.Getenv(sizeVariable), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		kinds = slices.DeleteFunc(kinds, func(k kind) bool { return k.name != os.Getenv(kindVariable) })
		_, err = Open(t.Context(), dir, size)
		t.Fatalf("survived the failpoint: %v", err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// broken opens a depot in a process that ends at a point, and says whether it came there.
	broken := func(t *testing.T, dir string, size int64, point, action string) bool {
		opener := exec.Command(self, "-test.run=^TestCrashAnywhere$")
		opener.Env = append(os.Environ(), "BERM_FAILPOINTS="+point+"="+action, openerVariable+"="+dir, sizeVariable+"="+strconv.FormatInt(size, 10), kindVariable+"="+kinds[0].name)
		out, err := opener.CombinedOutput()
		if err == nil {
			t.Fatalf("no failure: %s", out)
		}
		if action == "crash" {
			return strings.Contains(err.Error(), "killed")
		}
		return strings.Contains(string(out), "failpoint "+point)
	}
	each(t, func(t *testing.T) {
		for _, action := range []string{"crash", "error"} {
			reached := map[string]bool{}
			t.Run(action, func(t *testing.T) {
				data := data(t, 0)
				// Made: by the last of those that were interrupted everywhere before.
				for _, point := range points {
					if broken(t, data, 1<<30, point, action) {
						reached[point] = true
					}
				}
				d := open(t, data, 1<<30)
				path := save(t, d, data, "kept")
				// Mounted again, as a new server of a machine that restarted does, and grown.
				size := int64(1 << 30)
				for _, point := range points {
					if err := d.Close(); err != nil {
						t.Error(err)
					}
					size += 1 << 28
					if broken(t, data, size, point, action) {
						reached[point] = true
					}
				}
				d = open(t, data, size)
				holds(t, path, "kept")
				var st unix.Statfs_t
				if err := unix.Statfs(d.Images(), &st); err != nil || int64(st.Blocks)*st.Bsize < size-1<<28 {
					t.Errorf("it has %d MiB, %v", st.Blocks*uint64(st.Bsize)>>20, err)
				}
				// Removed.
				if err := os.Remove(filepath.Dir(path)); err != nil {
					t.Fatal(err)
				}
				for _, point := range points {
					if broken(t, data, 0, point, action) {
						reached[point] = true
					}
				}
				if d := open(t, data, 0); d != nil {
					t.Error("not removed")
				}
				if left, err := filepath.Glob(filepath.Join(data, "depot*")); err != nil || len(left) > 0 {
					t.Errorf("left: %v, %v", left, err)
				}
				if left := attached(t, data); left != "" {
					t.Errorf("attached:%s", left)
				}
			})
			for _, point := range points {
				if !reached[point] {
					t.Errorf("%s=%s was never reached", point, action)
				}
			}
		}
	})
}
