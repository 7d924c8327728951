package change

import (
	"errors"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// maxPath is the longest path that the kernel takes in one call (PATH_MAX, with its NUL).
const maxPath = 4095

// openBeneath opens what lies below a directory. No part of the path may be a symbolic
// link.
func openBeneath(dir int, name string, flags int) (int, error) {
	for {
		fd, err := unix.Openat2(dir, name, &unix.OpenHow{
			Flags:   uint64(flags | unix.O_NOFOLLOW | unix.O_CLOEXEC),
			Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
		})
		if err != unix.EINTR {
			return fd, err
		}
	}
}

// openDir opens a directory below a tree's root; "" is the root itself.
func openDir(root int, path string, flags int) (int, error) {
	if path == "" {
		path = "."
	}
	return openBeneath(root, path, flags|unix.O_DIRECTORY)
}

// OpenRegular opens a regular file of a tree for reading. No part of the path may be a
// symbolic link; whatever else lies there is an error, and nothing is waited for.
func OpenRegular(tree *os.Root, path string) (*os.File, error) {
	root, err := tree.Open(".")
	if err != nil {
		return nil, err
	}
	defer root.Close()
	return openRegular(int(root.Fd()), path)
}

// openRegular opens a regular file for reading and fails with errNotRegular on
// everything else.
func openRegular(dir int, path string) (*os.File, error) {
	// A fifo without a writer would hold the open for ever, and a file on which another
	// process has a lease for most of a minute.
	fd, err := openBeneath(dir, path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		unix.Close(fd)
		return nil, errors.Join(err, errNotRegular)
	}
	return os.NewFile(uintptr(fd), ""), nil
}

var errNotRegular = errors.New("not a regular file any more")

// vanished says that what was there a moment ago is not there any more, or is not a
// directory any more: the tree is being written to.
func vanished(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP)
}

// file is what lstat says of a name.
type file struct {
	found bool
	st    unix.Stat_t
	Entry
}

func (f *file) isDir() bool { return f.found && f.Mode.IsDir() }

// whiteout is how overlayfs marks a deleted name: a character device 0:0.
func (f *file) whiteout() bool {
	return f.found && f.st.Mode&unix.S_IFMT == unix.S_IFCHR && f.st.Rdev == 0
}

// lookup returns what lies at a name of an open directory.
func lookup(dir int, name string) (f file, err error) {
	if dir < 0 {
		return f, nil
	}
	err = unix.Fstatat(dir, name, &f.st, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT)
	if vanished(err) {
		return f, nil
	}
	if err != nil {
		return f, err
	}
	f.found = true
	f.Mode = fileMode(f.st.Mode)
	switch f.Mode.Type() {
	case 0:
		f.Size = f.st.Size
	case fs.ModeSymlink:
		// A link that is no link any more keeps an empty target, which differs from every other.
		var buf [maxPath + 1]byte
		if n, err := unix.Readlinkat(dir, name, buf[:]); err == nil {
			f.Target = string(buf[:n])
		}
	}
	return f, nil
}

func fileMode(m uint32) fs.FileMode {
	mode := fs.FileMode(m & 0o777)
	switch m & unix.S_IFMT {
	case unix.S_IFDIR:
		mode |= fs.ModeDir
	case unix.S_IFLNK:
		mode |= fs.ModeSymlink
	case unix.S_IFIFO:
		mode |= fs.ModeNamedPipe
	case unix.S_IFSOCK:
		mode |= fs.ModeSocket
	case unix.S_IFBLK:
		mode |= fs.ModeDevice
	case unix.S_IFCHR:
		mode |= fs.ModeDevice | fs.ModeCharDevice
	}
	if m&unix.S_ISUID != 0 {
		mode |= fs.ModeSetuid
	}
	if m&unix.S_ISGID != 0 {
		mode |= fs.ModeSetgid
	}
	if m&unix.S_ISVTX != 0 {
		mode |= fs.ModeSticky
	}
	return mode
}

// isRepository says whether git may take a directory for a repository, whatever its name,
// when somebody calls it in there. The parts may come from both trees.
func isRepository(old, new int) bool {
	has := func(name string) bool {
		a, _ := lookup(old, name)
		b, _ := lookup(new, name)
		return a.found || b.found
	}
	return has("HEAD") && (has("objects") || has("commondir"))
}

// opaque says whether overlayfs lets nothing of the lower directory show through an
// upper one.
func opaque(dir int) bool {
	var value [2]byte
	n, err := unix.Fgetxattr(dir, "user.overlay.opaque", value[:])
	return err == nil && n == 1 && value[0] == 'y'
}

// readAll reads a regular file below a root up to a limit; more says that there is more
// of it.
func readAll(root int, path string, limit int64) (data []byte, more bool, err error) {
	f, err := openRegular(root, path)
	if err != nil {
		return nil, false, err
	}
	defer f.Close()
	data, err = io.ReadAll(io.LimitReader(f, limit+1))
	if int64(len(data)) > limit {
		return nil, true, err
	}
	return data, false, err
}
