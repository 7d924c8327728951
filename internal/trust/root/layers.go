package root

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// Layers is the root that a template's layers make together. It implements fs.FS, with links,
// without following any out of a layer.
type Layers struct {
	roots []*os.Root // highest first
}

// Open opens layers, lowest first.
func Open(layers []berm.Layer) (*Layers, error) {
	l := &Layers{}
	for _, layer := range slices.Backward(layers) {
		r, err := os.OpenRoot(layer.Path)
		if err != nil {
			l.Close()
			return nil, berm.Errorf(berm.Internal, "open a layer of the template: %w", err)
		}
		l.roots = append(l.roots, r)
	}
	return l, nil
}

// Close closes the layers.
func (l *Layers) Close() {
	for _, r := range l.roots {
		r.Close()
	}
}

// find returns the layer that has a name, as an overlay does: the highest one that has it,
// unless a higher one hides it. A name beyond a link is not found.
func (l *Layers) find(name string) (*os.Root, fs.FileInfo, error) {
	visible := l.roots
	for dir := name; ; dir = path.Dir(dir) {
		visible = visible[:shown(visible, dir, dir == name)]
		if dir == "." {
			break
		}
	}
	for _, r := range visible {
		if info, err := r.Lstat(name); err == nil {
			return r, info, nil
		}
	}
	return nil, nil, fs.ErrNotExist
}

// shown is how many layers, from the highest on, have a part in a name, or in what lies below
// it when it is not the last.
func shown(roots []*os.Root, name string, last bool) int {
	for i, r := range roots {
		info, err := r.Lstat(name)
		switch {
		case err != nil:
		case isWhiteout(info), !last && !info.IsDir():
			return i
		case info.IsDir() && isOpaque(r, name):
			return i + 1
		}
	}
	return len(roots)
}

// isWhiteout says whether a file hides those of the same name below (overlayfs).
func isWhiteout(info fs.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && info.Mode().Type() == fs.ModeDevice|fs.ModeCharDevice && st.Rdev == 0
}

// isOpaque says whether a directory hides those of the same name below.
func isOpaque(r *os.Root, name string) bool {
	f, err := r.Open(name)
	if err != nil {
		return false
	}
	defer f.Close()
	for _, attribute := range []string{"user.overlay.opaque", "trusted.overlay.opaque"} {
		value := make([]byte, 1)
		if n, err := unix.Fgetxattr(int(f.Fd()), attribute, value); err == nil && n == 1 && value[0] == 'y' {
			return true
		}
	}
	return false
}

func (l *Layers) in(op, name string, do func(*os.Root, fs.FileInfo) error) error {
	if !fs.ValidPath(name) {
		return &fs.PathError{Op: op, Path: name, Err: fs.ErrInvalid}
	}
	r, info, err := l.find(name)
	if err == nil {
		err = do(r, info)
	}
	var path *fs.PathError
	if err != nil && !errors.As(err, &path) {
		err = &fs.PathError{Op: op, Path: name, Err: err}
	}
	return err
}

// Open opens a file. Directories cannot be read by what it returns.
func (l *Layers) Open(name string) (f fs.File, err error) {
	err = l.in("open", name, func(r *os.Root, _ fs.FileInfo) error {
		f, err = r.Open(name)
		return err
	})
	return f, err
}

// Stat is Lstat: whoever reads a root follows its links.
func (l *Layers) Stat(name string) (fs.FileInfo, error) { return l.Lstat(name) }

// Lstat describes a file.
func (l *Layers) Lstat(name string) (info fs.FileInfo, err error) {
	err = l.in("lstat", name, func(_ *os.Root, found fs.FileInfo) error {
		info = found
		return nil
	})
	return info, err
}

// ReadLink returns what a link holds.
func (l *Layers) ReadLink(name string) (target string, err error) {
	err = l.in("readlink", name, func(r *os.Root, _ fs.FileInfo) error {
		target, err = r.Readlink(name)
		return err
	})
	return target, err
}

// ReadDir lists a directory.
func (l *Layers) ReadDir(name string) ([]fs.DirEntry, error) {
	names := map[string]bool{}
	found := false
	for _, r := range l.roots {
		f, err := r.Open(name)
		if err != nil {
			continue
		}
		found = true
		all, _ := f.Readdirnames(-1)
		f.Close()
		for _, n := range all {
			names[n] = true
		}
	}
	if !found {
		return nil, &fs.PathError{Op: "readdir", Path: name, Err: fs.ErrNotExist}
	}
	var entries []fs.DirEntry
	for n := range names {
		if info, err := l.Lstat(path.Join(name, n)); err == nil {
			entries = append(entries, fs.FileInfoToDirEntry(info))
		}
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return entries, nil
}
