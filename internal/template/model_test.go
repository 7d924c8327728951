package template

import (
	"archive/tar"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// file is an inode of the model: what applying all archives one after the other
// to one tree in memory gives. It is written as plainly as can be, without looking
// at how unpack does it.
type file struct {
	kind     byte // tar type: TypeDir, TypeReg, TypeSymlink
	mode     int64
	uid, gid int
	mtime    int64
	content  string // or a link's target
	xattr    string // user.k
	children map[string]*file
	layer    int // that last touched it
}

func newModel() *file {
	return &file{kind: tar.TypeDir, mode: 0o755, children: map[string]*file{}}
}

// clone copies a tree and keeps its hard links.
func (f *file) clone(seen map[*file]*file) *file {
	if c := seen[f]; c != nil {
		return c
	}
	c := *f
	seen[f] = &c
	if f.children != nil {
		c.children = map[string]*file{}
		for name, child := range f.children {
			c.children[name] = child.clone(seen)
		}
	}
	return &c
}

var errModel = errors.New("refused")

// walk returns the directories from the root to the one that name leads to.
func (f *file) walk(name string, layer int, create bool) ([]*file, error) {
	stack := []*file{f}
	todo := strings.Split(name, "/")
	for links := 0; len(todo) > 0; {
		part := todo[0]
		todo = todo[1:]
		at := stack[len(stack)-1]
		switch child := at.children[part]; {
		case part == "" || part == ".":
		case part == "..":
			stack = stack[:max(1, len(stack)-1)]
		case child == nil && create:
			made := newModel()
			made.layer = layer
			at.children[part] = made
			for _, parent := range stack {
				parent.layer = layer
			}
			stack = append(stack, made)
		case child == nil:
			return nil, errModel
		case child.kind == tar.TypeDir:
			stack = append(stack, child)
		case child.kind == tar.TypeSymlink:
			if links++; links > maxLinks {
				return nil, errModel
			}
			if strings.HasPrefix(child.content, "/") {
				stack = stack[:1]
			}
			todo = append(strings.Split(child.content, "/"), todo...)
		default:
			return nil, errModel
		}
	}
	return stack, nil
}

// prune removes what earlier layers put below a directory.
func (f *file) prune(layer int) {
	for name, child := range f.children {
		if child.layer < layer {
			delete(f.children, name)
		} else if child.kind == tar.TypeDir {
			child.prune(layer)
		}
	}
}

func (f *file) holds(other *file) bool {
	if f == other {
		return true
	}
	for _, child := range f.children {
		if child.holds(other) {
			return true
		}
	}
	return false
}

func (f *file) apply(h *tar.Header, content string, layer int) error {
	dir, base := path.Split(path.Clean(h.Name))
	if base == "." {
		f.mode, f.uid, f.gid, f.mtime, f.layer = h.Mode, h.Uid, h.Gid, h.ModTime.Unix(), layer
		return nil
	}
	stack, err := f.walk(dir, layer, true)
	if err != nil {
		return err
	}
	parent := stack[len(stack)-1]
	touch := func() {
		for _, d := range stack {
			d.layer = layer
		}
	}
	if base == opaqueMarker {
		touch()
		parent.prune(layer)
		return nil
	}
	if name, ok := strings.CutPrefix(base, whiteoutPrefix); ok {
		if old := parent.children[name]; old != nil && old.layer < layer {
			touch()
			delete(parent.children, name)
		} else if old != nil && old.kind == tar.TypeDir {
			old.prune(layer)
		}
		return nil
	}
	made := &file{kind: h.Typeflag, mode: h.Mode, uid: h.Uid, gid: h.Gid, mtime: h.ModTime.Unix(), content: content, xattr: h.PAXRecords["SCHILY.xattr.user.k"], layer: layer}
	old := parent.children[base]
	switch h.Typeflag {
	case tar.TypeLink:
		targetDir, targetBase := path.Split(path.Clean(h.Linkname))
		from, err := f.walk(targetDir, layer, false)
		if err != nil {
			return err
		}
		made = from[len(from)-1].children[targetBase]
		if made == nil || made.kind == tar.TypeDir {
			return errModel
		}
		if made == old && from[len(from)-1] == parent && targetBase == base {
			return nil
		}
		for _, d := range from {
			d.layer = layer
		}
		made.layer = layer
		if old != nil && old.kind == tar.TypeDir && old.holds(from[len(from)-1]) {
			return errModel
		}
	case tar.TypeSymlink:
		made.content, made.mode, made.xattr = h.Linkname, 0o777, ""
	case tar.TypeDir:
		made.content, made.xattr, made.children = "", "", map[string]*file{}
		if old != nil && old.kind == tar.TypeDir {
			made.children = old.children
		}
	}
	touch()
	parent.children[base] = made
	return nil
}

// lines describes a tree, one line a file.
func (f *file) lines(name string) []string {
	line := fmt.Sprintf("%s %c %o %d:%d %d %q %q", name, f.kind, f.mode, f.uid, f.gid, f.mtime, f.content, f.xattr)
	all := []string{line}
	for _, child := range slices.Sorted(maps.Keys(f.children)) {
		all = append(all, f.children[child].lines(path.Join(name, child))...)
	}
	return all
}

// readTree reads a directory of the disk into a model.
func readTree(t *testing.T, dir string) *file {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		t.Fatal(err)
	}
	f := &file{mode: int64(st.Mode & 0o7777), uid: int(st.Uid), gid: int(st.Gid), mtime: st.Mtim.Sec}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		f.kind, f.children = tar.TypeDir, map[string]*file{}
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			f.children[e.Name()] = readTree(t, filepath.Join(dir, e.Name()))
		}
	case unix.S_IFREG:
		f.kind = tar.TypeReg
		b, err := os.ReadFile(dir)
		if err != nil {
			t.Fatal(err)
		}
		f.content = string(b)
		value := make([]byte, 100)
		if n, err := unix.Getxattr(dir, "user.k", value); err == nil {
			f.xattr = string(value[:n])
		}
	case unix.S_IFLNK:
		target, err := os.Readlink(dir)
		if err != nil {
			t.Fatal(err)
		}
		f.kind, f.content = tar.TypeSymlink, target
	case unix.S_IFCHR:
		f.kind = tar.TypeChar
	default:
		t.Fatalf("%s has mode %o", dir, st.Mode)
	}
	return f
}

// merge stacks one layer's tree on another as overlayfs is documented to.
func merge(t *testing.T, below *file, dir string) *file {
	t.Helper()
	f := readTree(t, dir)
	var stack func(below, above *file, dir string) *file
	stack = func(below, above *file, dir string) *file {
		value := make([]byte, 8)
		n, err := unix.Getxattr(dir, opaqueXattr, value)
		if err == nil && string(value[:n]) == "y" || below == nil || below.kind != tar.TypeDir {
			below = newModel()
		}
		for name, child := range above.children {
			old := below.children[name]
			switch child.kind {
			case tar.TypeChar:
				delete(above.children, name)
			case tar.TypeDir:
				above.children[name] = stack(old, child, filepath.Join(dir, name))
			}
			delete(below.children, name)
		}
		maps.Copy(above.children, below.children)
		return above
	}
	return stack(below, f, dir)
}

// overlay reads what layers (lowest first) give in a sandbox.
func overlay(t *testing.T, layers []string) (result *file) {
	t.Helper()
	mounted(t, layers, func(dir string) { result = readTree(t, dir) })
	return result
}

// mounted mounts layers (lowest first) as a sandbox would, has the result looked at, and
// lets the mount go with the thread that made its namespace.
func mounted(t *testing.T, layers []string, look func(dir string)) {
	t.Helper()
	done := make(chan error)
	target, empty := t.TempDir(), t.TempDir()
	go func() {
		defer close(done)      // also when look ends the test
		runtime.LockOSThread() // and never unlocked: the thread ends with its namespace
		done <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
				return err
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return err
			}
			lower := slices.Clone(layers)
			slices.Reverse(lower)
			options := "userxattr,lowerdir=" + strings.Join(append(lower, empty), ":")
			if err := unix.Mount("overlay", target, "overlay", unix.MS_RDONLY, options); err != nil {
				return fmt.Errorf("mount %s: %w", options, err)
			}
			look(target)
			return nil
		}()
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func modTime(n int64) time.Time { return time.Unix(1_600_000_000+n, 0) }

// find returns the names below dir, for checks that nothing else was made.
func find(t *testing.T, dir string) []string {
	t.Helper()
	var names []string
	err := filepath.WalkDir(dir, func(name string, _ fs.DirEntry, err error) error {
		if name != dir {
			names = append(names, strings.TrimPrefix(name, dir+"/"))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}
