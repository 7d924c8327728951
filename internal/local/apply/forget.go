package apply

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// opaqueAttribute marks a directory of an upper that hides the one below it. The kernel
// sets it on every directory that is made in an overlay, too.
const opaqueAttribute = "user.overlay.opaque"

// Forget takes paths whose content the project has by now out of an upper, so that the
// session's view of them stays the same. The overlay must not be mounted.
func Forget(upper, project *os.Root, paths []string) error {
	u, err := openTree(upper)
	if err != nil {
		return err
	}
	defer u.Close()
	p, err := openTree(project)
	if err != nil {
		return err
	}
	defer p.Close()
	return forget(u, p, paths)
}

func forget(upper, project *tree, paths []string) error {
	f := &forgetter{upper: upper, project: project, ready: map[string]bool{}, modes: map[string]uint32{}}
	err := f.all(paths)
	for dir, mode := range f.modes {
		if e := upper.chmod(dir, mode); e != nil && !errors.Is(e, unix.ENOENT) {
			err = errors.Join(err, e)
		}
	}
	if err != nil {
		return berm.Errorf(berm.Internal, "take what was applied out of the session: %w", err)
	}
	return nil
}

type forgetter struct {
	upper, project *tree
	ready          map[string]bool   // directories that are prepared
	modes          map[string]uint32 // modes to give back to directories of the upper
}

func (f *forgetter) all(paths []string) error {
	dirs := map[string]bool{}
	for _, name := range paths {
		if err := f.prepare(path.Dir(name)); err != nil {
			return err
		}
		st, err := f.upper.stat(name)
		if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) || err == nil && st == nil {
			continue // hidden by what replaced a directory above it
		}
		if err != nil {
			return err
		}
		dir := path.Dir(name)
		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			dir = name
			if err := f.prepare(dir); err != nil {
				return err
			}
		} else if err := f.unlink(name, 0); err != nil {
			return err
		}
		for ; dir != "."; dir = path.Dir(dir) {
			dirs[dir] = true
		}
	}
	for _, dir := range slices.Backward(slices.Sorted(maps.Keys(dirs))) {
		if err := f.prune(dir); err != nil {
			return err
		}
	}
	return nil
}

func (f *forgetter) unlink(name string, flags int) error {
	at, err := f.upper.at(name)
	if err != nil {
		return err
	}
	defer at.Close()
	return unix.Unlinkat(at.fd(), at.name, flags)
}

// prune removes a directory that says nothing any more.
func (f *forgetter) prune(dir string) error {
	mine, err := f.upper.stat(dir)
	if err != nil || mine == nil {
		return err
	}
	mode, changed := f.modes[dir]
	if !changed {
		mode = mine.Mode
	}
	below, err := f.project.stat(dir)
	if err != nil || below == nil || below.Mode&unix.S_IFMT != unix.S_IFDIR || bits(below.Mode) != bits(mode) {
		return nil // it still makes a directory, or changes one
	}
	if err := f.unlink(dir, unix.AT_REMOVEDIR); !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

// prepare makes a directory of the upper ready to have entries taken out of it: writable,
// and not opaque. What an opaque directory hides is hidden entry by entry instead, before
// the mark goes, so that the view never changes.
func (f *forgetter) prepare(dir string) error {
	if f.ready[dir] {
		return nil
	}
	f.ready[dir] = true
	if dir != "." {
		if err := f.prepare(path.Dir(dir)); err != nil {
			return err
		}
	}
	mine, err := f.upper.open(dir, unix.O_PATH|unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	if err != nil {
		return err
	}
	defer mine.Close()
	if err := f.open(dir, mine); err != nil {
		return err
	}
	if dir == "." || !opaque(mine) {
		return nil
	}
	if err := f.hide(dir, mine); err != nil {
		return err
	}
	if err := unix.Removexattr(self(mine), opaqueAttribute); err != nil {
		return fmt.Errorf("remove %s: %w", opaqueAttribute, err)
	}
	return nil
}

// open gives the caller the rights to a directory of the upper until the end.
func (f *forgetter) open(name string, dir *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return err
	}
	if os.Geteuid() == 0 || st.Mode&0o700 == 0o700 {
		return nil
	}
	f.modes[name] = bits(st.Mode)
	return f.upper.chmod(name, bits(st.Mode)|0o700)
}

// hide makes each entry below an opaque directory as invisible as the mark did.
func (f *forgetter) hide(dir string, mine *os.File) error {
	below, err := f.project.open(dir, unix.O_RDONLY|unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	if err != nil {
		return err
	}
	defer below.Close()
	names, err := readNames(below)
	if err != nil {
		return err
	}
	for _, name := range names {
		at := place{mine, name}
		st, err := at.stat()
		switch {
		case err != nil:
		case st == nil:
			err = unix.Mknodat(at.fd(), name, unix.S_IFCHR, 0) // a whiteout
		case st.Mode&unix.S_IFMT == unix.S_IFDIR:
			var child *os.File
			if child, err = f.upper.open(dir+"/"+name, unix.O_PATH|unix.O_DIRECTORY); err == nil {
				if err = f.open(dir+"/"+name, child); err == nil {
					err = unix.Setxattr(self(child), opaqueAttribute, []byte("y"), 0)
				}
				child.Close()
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func opaque(dir *os.File) bool {
	var value [1]byte
	n, err := unix.Getxattr(self(dir), opaqueAttribute, value[:])
	return err == nil && n == 1 && value[0] == 'y'
}

// self is a name for an O_PATH descriptor, which calls on extended attributes do not take.
func self(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }
