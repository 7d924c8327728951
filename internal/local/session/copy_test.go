package session

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// layerTree fills dir with all that overlayfs and a sandbox without rights leave in a layer.
func layerTree(t testing.TB, dir string) {
	t.Helper()
	at := func(name string) string { return filepath.Join(dir, name) }
	past := time.Date(2001, 2, 3, 4, 5, 6, 789, time.UTC)
	must(t, os.MkdirAll(at("opaque/below"), 0o755))
	must(t, os.WriteFile(at("opaque/below/script"), []byte("#!/bin/sh\n"), 0o755))
	must(t, os.WriteFile(at("odd \xff\n-name"), []byte("text"), 0o640))
	must(t, os.Chmod(at("odd \xff\n-name"), 0o640|os.ModeSetuid|os.ModeSetgid))
	must(t, os.WriteFile(at("empty"), nil, 0o600))
	must(t, os.Link(at("odd \xff\n-name"), at("opaque/hard link")))
	must(t, os.Symlink("/etc/passwd", at("link")))
	must(t, os.Symlink("../../..", at("opaque/up")))
	must(t, os.Symlink("nowhere", at("dangling")))
	must(t, unix.Mkfifo(at("fifo"), 0o622))
	must(t, unix.Mknod(at("socket"), unix.S_IFSOCK|0o755, 0))
	must(t, unix.Mknod(at("whiteout"), unix.S_IFCHR, 0))
	must(t, os.Link(at("whiteout"), at("opaque/whiteout"))) // overlayfs links them, too
	must(t, os.Mkdir(at("sticky"), 0o700))
	must(t, os.Chmod(at("sticky"), 0o777|os.ModeSticky))
	must(t, os.Mkdir(at("read-only"), 0o700))
	must(t, os.WriteFile(at("read-only/file"), []byte("x"), 0o444))
	must(t, os.Chmod(at("read-only"), 0o555))
	must(t, unix.Setxattr(at("opaque"), "user.overlay.opaque", []byte("y"), 0))
	must(t, unix.Setxattr(at("empty"), "user.name", []byte("value\x00\xff"), 0))
	sparse, err := os.Create(at("sparse"))
	must(t, err)
	defer sparse.Close()
	for _, at := range []int64{1 << 20, 1 << 33} {
		_, err = sparse.WriteAt([]byte("data"), at)
		must(t, err)
	}
	must(t, sparse.Truncate(1<<40))
	for _, name := range []string{"opaque/below/script", "empty", "opaque", "link", "read-only"} {
		ts := unix.NsecToTimespec(past.UnixNano())
		must(t, unix.UtimesNanoAt(unix.AT_FDCWD, at(name), []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW))
	}
	must(t, os.Chmod(dir, 0o750))
}

// lockedTree adds what keeps even its owner out.
func lockedTree(t testing.TB, dir string) {
	t.Helper()
	for i, mode := range []os.FileMode{0, 0o100, 0o200, 0o400, 0o600} {
		at := filepath.Join(dir, fmt.Sprint("locked-", i))
		must(t, os.MkdirAll(filepath.Join(at, "in"), 0o700))
		must(t, os.WriteFile(filepath.Join(at, "in", "file"), []byte("x"), 0))
		must(t, os.Chmod(filepath.Join(at, "in"), mode))
		must(t, os.Chmod(at, mode))
	}
}

// snapshot describes a tree, in other ways than the code under test, as far as a copy has to
// be the same. Run by root it sees behind every mode, else it changes them and says so.
func snapshot(t testing.TB, dir string) map[string]string {
	t.Helper()
	tree := map[string]string{}
	first := map[uint64]string{}
	var walk func(name string)
	walk = func(name string) {
		full := filepath.Join(dir, name)
		var st unix.Stat_t
		must(t, unix.Lstat(full, &st))
		line := fmt.Sprintf("%o %d:%d", st.Mode, st.Uid, st.Gid)
		kind := st.Mode & unix.S_IFMT
		if kind != unix.S_IFCHR {
			line += fmt.Sprint(" ", st.Mtim.Nano())
		}
		if kind != unix.S_IFDIR && st.Nlink > 1 {
			if first[st.Ino] == "" {
				first[st.Ino] = name
			}
			line += " = " + first[st.Ino]
		}
		opened := st.Mode & 0o777
		if kind == unix.S_IFREG || kind == unix.S_IFDIR {
			must(t, unix.Chmod(full, st.Mode&0o7777|0o700))
			list := make([]byte, 4096)
			n, err := unix.Llistxattr(full, list)
			must(t, err)
			attributes := strings.Split(string(list[:n]), "\x00")
			slices.Sort(attributes)
			for _, a := range attributes {
				if a != "" {
					value := make([]byte, 4096)
					n, err := unix.Lgetxattr(full, a, value)
					must(t, err)
					line += fmt.Sprintf(" %s=%q", a, value[:n])
				}
			}
		}
		switch kind {
		case unix.S_IFREG:
			if st.Size > 1<<30 {
				f, err := os.Open(full)
				must(t, err)
				for at := int64(0); ; {
					if at, err = unix.Seek(int(f.Fd()), at, unix.SEEK_DATA); err != nil {
						break
					}
					end, err := unix.Seek(int(f.Fd()), at, unix.SEEK_HOLE)
					must(t, err)
					line += fmt.Sprintf(" %d-%d", at, end)
					at = end
				}
				f.Close()
				line += fmt.Sprint(" of ", st.Size)
			} else {
				data, err := os.ReadFile(full)
				must(t, err)
				line += fmt.Sprintf(" %q", data)
			}
		case unix.S_IFLNK:
			target, err := os.Readlink(full)
			must(t, err)
			line += " -> " + target
		case unix.S_IFCHR:
			line += fmt.Sprint(" ", st.Rdev)
		case unix.S_IFDIR:
			entries, err := os.ReadDir(full)
			must(t, err)
			for _, e := range entries {
				walk(filepath.Join(name, e.Name()))
			}
		}
		if kind == unix.S_IFREG || kind == unix.S_IFDIR {
			must(t, unix.Chmod(full, opened|st.Mode&0o7000))
		}
		tree[name] = line
	}
	walk(".")
	return tree
}

func same(t *testing.T, got, want map[string]string) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if got[name] != want[name] {
			t.Errorf("%q:\n got %s\nwant %s", name, got[name], want[name])
		}
	}
	for name := range got {
		if _, ok := want[name]; !ok {
			t.Errorf("%q: got %s, want nothing", name, got[name])
		}
	}
}

func openRoot(t testing.TB, dir string) *os.Root {
	t.Helper()
	must(t, os.MkdirAll(dir, 0o700))
	root, err := os.OpenRoot(dir)
	must(t, err)
	t.Cleanup(func() { root.Close() })
	return root
}

func TestCopyTree(t *testing.T) {
	asEverybody(t, func(t *testing.T, dir string) {
		from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
		src, dst := openRoot(t, from), openRoot(t, to)
		layerTree(t, from)
		if os.Geteuid() == 0 {
			must(t, os.Chown(filepath.Join(from, "link"), 1234, 5678))
			must(t, os.Chown(filepath.Join(from, "opaque"), 1234, 5678))
			must(t, os.Chown(filepath.Join(from, "odd \xff\n-name"), 1234, 5678)) // takes set-uid away
			must(t, os.Chmod(filepath.Join(from, "odd \xff\n-name"), 0o640|os.ModeSetuid|os.ModeSetgid))
			must(t, unix.Mknod(filepath.Join(from, "device"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
		}
		copied, err := CopyTree(t.Context(), src, dst)
		must(t, err)
		if os.Geteuid() == 0 {
			if copied.Skipped != 1 {
				t.Errorf("skipped %d", copied.Skipped)
			}
			must(t, os.Remove(filepath.Join(from, "device")))
			info, err := os.Stat(to) // the removal changed its time
			must(t, err)
			must(t, os.Chtimes(from, info.ModTime(), info.ModTime()))
		}
		if copied.Bytes > 1<<20 {
			t.Errorf("copied holes: %d bytes", copied.Bytes)
		}
		same(t, snapshot(t, to), snapshot(t, from))
	})
}

func TestCopyLockedTree(t *testing.T) {
	asEverybody(t, func(t *testing.T, dir string) {
		from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
		src, dst := openRoot(t, from), openRoot(t, to)
		lockedTree(t, from)
		before := snapshot(t, from)
		if _, err := copyTree(t.Context(), src, dst, true); err != nil {
			t.Fatal(err)
		}
		same(t, snapshot(t, from), before)
		same(t, snapshot(t, to), before)
		if os.Geteuid() != 0 {
			_, err := CopyTree(t.Context(), src, openRoot(t, filepath.Join(dir, "other")))
			expectKind(t, err, berm.Denied)
			same(t, snapshot(t, from), before)
		}
	})
}

func TestCopyRefuses(t *testing.T) {
	dir := t.TempDir()
	src := openRoot(t, filepath.Join(dir, "from"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := CopyTree(ctx, src, openRoot(t, filepath.Join(dir, "to"))); err == nil {
		t.Error("not cancelled")
	}
	canary := hostile(t, src.Name(), dir) // with paths that are too long
	before := snapshot(t, canary)
	to := openRoot(t, filepath.Join(dir, "to2"))
	_, err := CopyTree(t.Context(), src, to)
	expectKind(t, err, berm.Exhausted)
	same(t, snapshot(t, canary), before)
}

func TestCopyIntoItself(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "file=x", "state/file=y")
	copied, err := CopyTree(t.Context(), openRoot(t, dir), openRoot(t, filepath.Join(dir, "state", "copy")))
	must(t, err)
	if copied.Skipped != 1 || copied.Entries != 4 {
		t.Errorf("%+v", copied)
	}
	if _, err := os.Stat(filepath.Join(dir, "state/copy/state/file")); err != nil {
		t.Error(err)
	}
}

// TestCopyWhileReplaced copies a file and a directory that become links to a canary all the
// time: nothing of the canary is copied.
func TestCopyWhileReplaced(t *testing.T) {
	dir := t.TempDir()
	from := filepath.Join(dir, "from")
	src := openRoot(t, from)
	canary := filepath.Join(dir, "canary")
	must(t, os.Mkdir(canary, 0o700))
	must(t, os.WriteFile(filepath.Join(canary, "file"), []byte("secret"), 0o600))
	must(t, os.Mkdir(filepath.Join(from, "dir"), 0o700))
	must(t, os.WriteFile(filepath.Join(from, "dir", "file"), []byte("mine"), 0o600))
	must(t, os.WriteFile(filepath.Join(from, "file"), []byte("mine"), 0o600))
	must(t, os.Symlink(canary, filepath.Join(from, "dir-link")))
	must(t, os.Symlink(filepath.Join(canary, "file"), filepath.Join(from, "file-link")))
	must(t, unix.Mkfifo(filepath.Join(from, "fifo"), 0o600))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			for _, pair := range [][2]string{{"dir", "dir-link"}, {"file", "file-link"}, {"file", "fifo"}} {
				_ = unix.Renameat2(unix.AT_FDCWD, filepath.Join(from, pair[0]), unix.AT_FDCWD, filepath.Join(from, pair[1]), unix.RENAME_EXCHANGE)
			}
		}
	}()
	for i := range 100 {
		to := filepath.Join(dir, fmt.Sprint("to", i))
		dst := openRoot(t, to)
		if _, err := CopyTree(t.Context(), src, dst); err != nil && berm.KindOf(err) != berm.Conflict {
			t.Errorf("%v (%v)", err, berm.KindOf(err))
		}
		must(t, filepath.WalkDir(to, func(path string, e fs.DirEntry, err error) error {
			if err == nil && e.Type().IsRegular() {
				if data, _ := os.ReadFile(path); strings.Contains(string(data), "secret") {
					t.Errorf("%s holds the canary", path)
				}
			}
			return err
		}))
		must(t, os.RemoveAll(to))
	}
	cancel()
	<-done
}

func BenchmarkCopyTree(b *testing.B) {
	dir := b.TempDir()
	src := openRoot(b, filepath.Join(dir, "from"))
	for i := range 1000 {
		name := fmt.Sprintf("d%d", i%20)
		_ = src.Mkdir(name, 0o755)
		must(b, src.WriteFile(fmt.Sprintf("%s/f%d", name, i), make([]byte, 4000), 0o644))
	}
	for i := range b.N {
		dst := openRoot(b, filepath.Join(dir, fmt.Sprint("to", i)))
		_, err := CopyTree(b.Context(), src, dst)
		must(b, err)
	}
}
