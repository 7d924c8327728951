package template

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
	"golang.org/x/sys/unix"
)

// packedEntry is one thing of a tree, as a test compares it.
type packedEntry struct {
	kind    byte
	mode    int64
	content string
	uid     int
}

// read takes a tree apart; whiteouts and opaque directories are entries of their own kind.
func read(t *testing.T, root string) map[string]packedEntry {
	t.Helper()
	all := map[string]packedEntry{}
	err := filepath.Walk(root, func(name string, info os.FileInfo, err error) error {
		if err != nil || name == root {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(name, &st); err != nil {
			return err
		}
		e := packedEntry{kind: 'f', mode: int64(st.Mode & 0o7777), uid: int(st.Uid)}
		switch {
		case info.IsDir():
			e.kind = 'd'
			if n, err := unix.Lgetxattr(name, opaqueXattr, make([]byte, 8)); err == nil && n == 1 {
				e.content = "opaque"
			}
		case info.Mode()&os.ModeSymlink != 0:
			e.kind = 'l'
			e.content, _ = os.Readlink(name)
		case info.Mode()&os.ModeCharDevice != 0:
			e = packedEntry{kind: 'w', content: "hides"}
		case info.Mode().IsRegular():
			b, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			e.content = string(b)
		}
		all[strings.TrimPrefix(name, root+"/")] = e
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// A file whose name would remove others in a layer is not packed.
func TestNamesOfWhiteoutsAreNotPacked(t *testing.T) {
	for _, name := range []string{".wh.usr", ".wh..wh..opq", "dir/.wh.x"} {
		tree := t.TempDir()
		if err := errors.Join(os.MkdirAll(filepath.Join(tree, "dir"), 0o755), os.WriteFile(filepath.Join(tree, name), nil, 0o644)); err != nil {
			t.Fatal(err)
		}
		_, err := packTrees(t.Context(), []*os.File{openTree(t, tree)}, 0, 0, io.Discard)
		if berm.KindOf(err) != berm.Invalid || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Random trees of what a sandbox wrote are the same in the layer that is made of them.
func TestPackedTreesAreUnpackedAgain(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to make whiteouts and owners")
	}
	const base = 300000
	store, err := Open(filepath.Join(t.TempDir(), "templates"))
	if err != nil {
		t.Fatal(err)
	}
	for seed := range uint64(25) {
		r := rand.New(rand.NewPCG(seed, 1))
		upper, lower := t.TempDir(), t.TempDir()
		grow(t, r, upper, base, 0)
		if err := os.Chown(upper, base, base); err != nil {
			t.Fatal(err)
		}
		want := read(t, upper)
		for name, e := range want { // there must be something to hide
			below := filepath.Join(lower, name)
			if e.kind == 'd' && e.content != "" {
				below = filepath.Join(below, "hidden")
			} else if e.kind != 'w' {
				continue
			}
			if err := errors.Join(os.MkdirAll(filepath.Dir(below), 0o755), os.WriteFile(below, nil, 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		release, err := store.Hold(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var layers []berm.Layer
		for _, dir := range []string{lower, upper} {
			w, ids := &berm.Written{Upper: openTree(t, dir)}, 0
			if dir == upper {
				w.Layers, ids = []*os.File{openTree(t, lower)}, base
			}
			var packed bytes.Buffer
			if _, err := packTrees(t.Context(), append([]*os.File{w.Upper}, w.Layers...), ids, 0, &packed); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			w.Close()
			layer, _, err := store.AddLayer(t.Context(), layers, &packed)
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			layers = append(layers, layer)
		}
		release()
		got := read(t, layers[1].Path)
		for name, e := range got {
			if e.kind == 'w' {
				e.content = ""
				got[name] = e
			}
		}
		for name, e := range want {
			e.uid -= base
			if e.kind == 'w' {
				e.uid = 0
			}
			// Below an opaque directory there is nothing to hide.
			for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
				if want[dir].content == "opaque" && (e.kind == 'w' || e.kind == 'd') {
					e.content = ""
				}
			}
			if _, ok := got[name]; e.kind == 'w' && e.content == "" && !ok {
				continue
			}
			if e.kind == 'w' {
				e.content = ""
			}
			if got[name] != e {
				t.Errorf("seed %d: %s is %+v, want %+v", seed, name, got[name], e)
			}
		}
		for name := range got {
			if _, ok := want[name]; !ok {
				t.Errorf("seed %d: %s came from nowhere", seed, name)
			}
		}
	}
}

func openTree(t *testing.T, name string) *os.File {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// grow fills a directory at random.
func grow(t *testing.T, r *rand.Rand, dir string, base, depth int) {
	t.Helper()
	try := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	var files []string
	for i := range 2 + r.IntN(5) {
		name := path.Join(dir, []string{"n", "long name ", "ü", "\xff", "-", "é\n"}[r.IntN(6)]+fmt.Sprint(i))
		owned := true
		switch k := r.IntN(7); {
		case k == 0 && depth < 4:
			try(os.Mkdir(name, 0o755))
			grow(t, r, name, base, depth+1)
			if r.IntN(2) == 0 {
				try(unix.Setxattr(name, opaqueXattr, []byte("y"), 0))
			}
			try(os.Chmod(name, os.FileMode(0o700+r.IntN(64))|os.ModeSticky))
		case k == 1:
			try(os.Symlink([]string{"../../etc/passwd", "/", "none"}[r.IntN(3)], name))
		case k == 2:
			try(unix.Mknod(name, unix.S_IFCHR, 0))
			owned = false
		case k == 3 && len(files) > 0:
			try(os.Link(files[r.IntN(len(files))], name))
			owned = false
		default:
			try(os.WriteFile(name, bytes.Repeat([]byte{byte(i)}, r.IntN(5000)), 0o600))
			files = append(files, name)
		}
		if owned {
			try(os.Lchown(name, base+r.IntN(2000), base+r.IntN(2000)))
		}
	}
	for _, f := range files {
		if r.IntN(3) == 0 { // after the owner, whose change takes it away
			try(os.Chmod(f, 0o755|os.ModeSetuid))
		}
	}
}

// Devices, FIFOs and sockets that are there make no layer fail, and are not in it; neither is what
// Berm writes into each sandbox, nor a directory that is as it was below.
func TestPackedIsWhatIsTheTemplates(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to make devices")
	}
	upper, lower := t.TempDir(), t.TempDir()
	for _, dir := range []string{"etc", "run/e2b", "var/log", "proc", "new"} {
		if err := os.MkdirAll(filepath.Join(upper, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{"etc", "run", "var/log", "proc"} {
		if err := os.MkdirAll(filepath.Join(lower, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []string{"etc/hostname", "etc/machine-id", "run/e2b/.E2B_SANDBOX", "proc/x", "var/log/a"} {
		if err := os.WriteFile(filepath.Join(upper, file), []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(unix.Mkfifo(upper+"/fifo", 0o644), unix.Mknod(upper+"/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3)))); err != nil {
		t.Fatal(err)
	}
	w := &berm.Written{Upper: openTree(t, upper), Layers: []*os.File{openTree(t, lower)}}
	defer w.Close()
	var packed bytes.Buffer
	n, err := packTrees(t.Context(), append([]*os.File{w.Upper}, w.Layers...), 0, 0, &packed)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for archive := tar.NewReader(&packed); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
	}
	if got := strings.Join(names, " "); got != "new/ var/ var/log/ var/log/a" || n != len(names) {
		t.Errorf("%d: %s", n, got)
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := packTrees(cancelled, append([]*os.File{w.Upper}, w.Layers...), 0, 0, io.Discard); !errors.Is(err, context.Canceled) {
		t.Errorf("a build that was cancelled goes on: %v", err)
	}
}
