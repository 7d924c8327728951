package session

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// removalDepth is how many directories a removal has open at once. A deeper one is moved up
// first: paths of any depth are removed with few descriptors.
const removalDepth = 64

// Remove deletes the session, which must be locked. A crash leaves it whole or out of sight.
// One that this process made and nothing changed is only moved away, for Sweep to delete: its
// caller is a command that ends, and a rmdir costs a hundred times as much as a rename.
func (s *Session) Remove(ctx context.Context) error {
	changed, err := s.Changed()
	if err != nil {
		return err
	}
	if !s.fresh { // else nobody was told its name
		if err := s.store.retire(s.Name); err != nil {
			return err
		}
	}
	trash, err := s.store.throw(s.Name)
	if err != nil || s.fresh && !changed {
		return err
	}
	return s.store.delete(ctx, trash)
}

// Empty takes all changes out of the session. It must be locked and no command running in
// it. A crash leaves all changes or none.
func (s *Session) Empty(ctx context.Context) error {
	trash, err := s.empty()
	if err != nil {
		return stateError(err, "empty the session "+s.Name)
	}
	return s.store.delete(ctx, trash)
}

// empty exchanges the changes for an empty layer.
func (s *Session) empty() (trash string, err error) {
	var project unix.Stat_t
	if err := unix.Stat(s.Project, &project); err != nil {
		return "", err
	}
	trash = trashPrefix + rand.Text()
	if err := s.store.root.Mkdir(trash, 0o700); err != nil {
		return "", err
	}
	dir, err := s.store.root.Open(trash)
	if err != nil {
		return "", err
	}
	defer dir.Close()
	if err := makeLayer(dir, &project); err != nil {
		return "", err
	}
	for _, name := range []string{upperDir, workDir} {
		if err := s.exchange(name, int(dir.Fd()), name); err != nil {
			return "", err
		}
	}
	return trash, nil
}

// removeTree deletes name below the directory parent with all that is in it. No link is
// followed, and modes that keep the owner out are changed.
func removeTree(ctx context.Context, parent int, name string) error {
	top, err := openWritable(parent, name)
	if errors.Is(err, unix.ENOENT) {
		return nil // another process deletes it too
	}
	if err != nil {
		return err
	}
	defer top.Close()
	if err := (&removal{ctx, top}).empty(top, 0); err != nil {
		return err
	}
	return ignoreMissing(unix.Unlinkat(parent, name, unix.AT_REMOVEDIR))
}

type removal struct {
	ctx context.Context
	top *os.File
}

// empty deletes all that is in dir.
func (r *removal) empty(dir *os.File, depth int) error {
	for {
		seen, failed, err := r.pass(dir, depth)
		if err != nil {
			return err
		}
		if failed != nil {
			return failed
		}
		if !seen {
			return nil
		}
		// A file system may leave entries out while others are deleted.
		if _, err := dir.Seek(0, io.SeekStart); err != nil {
			return err
		}
	}
}

// pass deletes each entry of dir once. It says whether there was any, and the first failure.
func (r *removal) pass(dir *os.File, depth int) (seen bool, failed, err error) {
	for {
		if err := r.ctx.Err(); err != nil {
			return seen, failed, err
		}
		names, err := dir.Readdirnames(1024)
		// A directory that another process deleted too has no entries, and the kernel says so.
		if errors.Is(err, io.EOF) || errors.Is(err, unix.ENOENT) {
			return seen, failed, nil
		}
		if err != nil {
			return seen, failed, err
		}
		for _, name := range names {
			seen = true
			if err := r.entry(dir, name, depth); err != nil && failed == nil {
				failed = err
			}
		}
	}
}

func (r *removal) entry(dir *os.File, name string, depth int) error {
	fd := int(dir.Fd())
	err := ignoreMissing(unix.Unlinkat(fd, name, 0))
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) { // POSIX has EPERM
		return err
	}
	err = ignoreMissing(unix.Unlinkat(fd, name, unix.AT_REMOVEDIR))
	if !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EEXIST) {
		return err
	}
	child, err := openWritable(fd, name) // to be moved it must be writable, too
	if err != nil {
		return ignoreMissing(err)
	}
	defer child.Close()
	if depth == removalDepth {
		return unix.Renameat(fd, name, int(r.top.Fd()), rand.Text())
	}
	if err := r.empty(child, depth+1); err != nil {
		return err
	}
	return ignoreMissing(unix.Unlinkat(fd, name, unix.AT_REMOVEDIR))
}

// openWritable opens a directory, and gives its owner all rights on it.
func openWritable(parent int, name string) (*os.File, error) {
	const how = unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat(parent, name, how|unix.O_RDONLY, 0)
	if errors.Is(err, unix.EACCES) {
		fd, err = openLocked(parent, name, how)
	}
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err == nil && st.Mode&0o700 != 0o700 {
		_ = unix.Fchmod(fd, st.Mode&0o7777|0o700) // if it matters, the deletion tells
	}
	return os.NewFile(uintptr(fd), name), nil
}

// openLocked opens a directory whose mode does not let its owner in.
func openLocked(parent int, name string, how int) (int, error) {
	path, err := unix.Openat(parent, name, how|unix.O_PATH, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(path)
	// A mode cannot be set through such a descriptor, but through its name in /proc.
	if err := unix.Chmod(fmt.Sprintf("/proc/self/fd/%d", path), 0o700); err != nil {
		return -1, berm.Errorf(berm.Denied, "open the directory %q: %w", name, err)
	}
	return unix.Openat(path, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
}

func ignoreMissing(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}
