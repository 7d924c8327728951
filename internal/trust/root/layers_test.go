package root

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

func TestLayers(t *testing.T) {
	dirs := []string{t.TempDir(), t.TempDir(), t.TempDir()} // lowest first
	put := func(layer int, name, content string) {
		t.Helper()
		path := filepath.Join(dirs[layer], name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put(0, "etc/a", "low")
	put(1, "etc/a", "middle")
	put(2, "etc/b", "high")
	put(0, "etc/gone", "low")
	put(0, "opt/java/lib/security/cacerts", "store")
	put(0, "hidden/x", "low")
	put(2, "hidden/y", "high")
	put(0, "was/dir", "low")
	put(1, "was", "a file now")
	if err := os.Symlink("/etc/a", filepath.Join(dirs[2], "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../../outside", filepath.Join(dirs[2], "out")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setxattr(filepath.Join(dirs[2], "hidden"), "user.overlay.opaque", []byte("y"), 0); err != nil {
		t.Skipf("missing: extended attributes in %s: %v", dirs[2], err)
	}
	if err := unix.Mknod(filepath.Join(dirs[1], "etc/gone"), unix.S_IFCHR, 0); err != nil {
		t.Skipf("missing: the right to make whiteouts: %v", err)
	}
	var layers []berm.Layer
	for _, dir := range dirs {
		layers = append(layers, berm.Layer{Path: dir})
	}
	l, err := Open(layers)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for name, want := range map[string]string{
		"etc/a": "middle", "etc/b": "high", "etc/gone": "", "hidden/x": "", "hidden/y": "high", "was/dir": "", "was": "a file now", "out": "",
	} {
		got, err := fs.ReadFile(l, name)
		if string(got) != want || (err == nil) != (want != "") {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if found, err := fs.Glob(l, "opt/*/lib/security/cacerts"); err != nil || len(found) != 1 {
		t.Errorf("%v, %v", found, err)
	}
	if real, _, err := resolve(l, "link"); err != nil || real != "etc/a" {
		t.Errorf("%q, %v", real, err)
	}
	r, err := Survey(l)
	if err != nil || len(r.Stores) != 1 || r.Stores[0] != "/opt/java/lib/security/cacerts" {
		t.Errorf("%+v, %v", r, err)
	}
}
