package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// What a tree may have at most to be copied. The length is what the kernel takes in one
// call (PATH_MAX): a longer path can be made, but hardly any program can open it.
const (
	maxCopied = 1_000_000
	maxPath   = unix.PathMax - 1
	maxXattrs = 64 << 10 // of one file, names and values each
)

// Copied says what CopyTree did.
type Copied struct {
	Entries int
	Bytes   int64 // copied; those shared with the source do not count
	Skipped int   // devices, and the copy itself where it lies in the source
}

// How says how files came over: "cloned" when they share their blocks with the source's,
// else "copied".
func (c Copied) How() string {
	if c.Bytes == 0 {
		return "cloned"
	}
	return "copied"
}

// CopyTree copies src into the empty directory dst, which gets src's attributes: modes, times
// of change of content, user attributes and access lists, holes, hard links and, as root, owners.
// It keeps what overlayfs has in a layer. No link is followed and nothing but files and
// directories is opened. A failure leaves dst half-filled. The error is Exhausted when src
// is too large and Conflict when it changed meanwhile.
func CopyTree(ctx context.Context, src, dst *os.Root) (Copied, error) {
	return copyTree(ctx, src, dst, false)
}

// copyTree copies a tree. With lend, files and directories of src that keep their owner out
// are opened nevertheless, by giving them another mode for that time.
func copyTree(ctx context.Context, src, dst *os.Root, lend bool) (_ Copied, err error) {
	from, err := src.Open(".")
	if err != nil {
		return Copied{}, err
	}
	defer from.Close()
	to, err := dst.Open(".")
	if err != nil {
		return Copied{}, err
	}
	defer to.Close()
	c := &copier{src: int(from.Fd()), dst: int(to.Fd()), root: dst, lend: lend, clone: true, links: map[inode]string{}}
	var st unix.Stat_t
	if err := unix.Fstat(c.dst, &st); err != nil {
		return Copied{}, err
	}
	c.self = inode{st.Dev, st.Ino}
	defer c.takeBack()
	for stack := []string{"."}; len(stack) > 0; {
		dir := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		below, err := c.directory(ctx, dir)
		if err != nil {
			return c.Copied, copyError(err, dir)
		}
		stack = append(stack, below...)
	}
	for _, l := range slices.Backward(c.late) {
		if err := c.finish(l); err != nil {
			return c.Copied, copyError(err, l.path)
		}
	}
	return c.Copied, nil
}

var errReplaced error = berm.Errorf(berm.Conflict, "it was replaced while it was copied")

type inode struct{ dev, ino uint64 }

type copier struct {
	src, dst int
	self     inode    // of dst
	root     *os.Root // dst
	lend     bool
	lent     []lent
	clone    bool             // not yet known to be impossible
	links    map[inode]string // files with several names, by their first one
	late     []late
	Copied
}

// late is a directory that gets its mode when all below it is done.
type late struct {
	path string
	st   unix.Stat_t
}

// lent is a directory of the source that has another mode until the copy is done.
type lent struct {
	path string
	mode uint32
}

// directory copies one directory but for what its directories hold, and returns these.
func (c *copier) directory(ctx context.Context, dir string) (below []string, err error) {
	from, err := c.open(dir)
	if err != nil {
		return nil, err
	}
	defer from.Close()
	to, err := openBeneath(c.dst, dir, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	defer to.Close()
	var self unix.Stat_t
	if err := unix.Fstat(int(from.Fd()), &self); err != nil {
		return nil, err
	}
	if n := len(c.lent); n > 0 && c.lent[n-1].path == dir {
		self.Mode = c.lent[n-1].mode
	}
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		names, err := from.Readdirnames(1024)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			full := path.Join(dir, name)
			if c.Entries++; c.Entries > maxCopied {
				return nil, berm.Errorf(berm.Exhausted, "it holds more than %d entries", maxCopied)
			}
			if len(full) > maxPath {
				return nil, berm.Errorf(berm.Exhausted, "it holds a path longer than %d bytes", maxPath)
			}
			isDir, err := c.entry(ctx, int(from.Fd()), int(to.Fd()), name, full)
			if err != nil {
				return nil, fmt.Errorf("%q: %w", name, err)
			}
			if isDir {
				below = append(below, full)
			}
		}
	}
	if err := copyXattrs(int(from.Fd()), int(to.Fd())); err != nil {
		return nil, err
	}
	if self.Mode&0o700 == 0o700 {
		return below, setMeta(int(to.Fd()), &self)
	}
	c.late = append(c.late, late{dir, self})
	return below, nil
}

// entry copies one entry, of a directory itself alone.
func (c *copier) entry(ctx context.Context, from, to int, name, full string) (isDir bool, err error) {
	var st unix.Stat_t
	if err := unix.Fstatat(from, name, &st, unix.AT_SYMLINK_NOFOLLOW); errors.Is(err, unix.ENOENT) {
		return false, nil // deleted meanwhile
	} else if err != nil {
		return false, err
	}
	kind := st.Mode & unix.S_IFMT
	if kind == unix.S_IFDIR {
		if (inode{st.Dev, st.Ino}) == c.self {
			c.Skipped++
			return false, nil
		}
		return true, unix.Mkdirat(to, name, 0o700)
	}
	if st.Nlink > 1 {
		id := inode{st.Dev, st.Ino}
		if first, ok := c.links[id]; ok {
			// A file system that has no more links (EMLINK) gets another copy.
			if err := c.root.Link(first, full); !errors.Is(err, unix.EMLINK) {
				return false, err
			}
		}
		c.links[id] = full
	}
	switch kind {
	case unix.S_IFREG:
		return false, c.file(ctx, from, to, name, &st)
	case unix.S_IFLNK:
		target := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(from, name, target)
		if errors.Is(err, unix.EINVAL) { // no link any more
			err = errReplaced
		}
		if err != nil {
			return false, err
		}
		if err := unix.Symlinkat(string(target[:n]), to, name); err != nil {
			return false, err
		}
	case unix.S_IFIFO, unix.S_IFSOCK:
		if err := unix.Mknodat(to, name, kind|0o600, 0); err != nil {
			return false, err
		}
	case unix.S_IFCHR:
		if st.Rdev == 0 { // a whiteout, which everybody may make (vfs_mknod)
			return false, unix.Mknodat(to, name, unix.S_IFCHR, 0)
		}
		fallthrough
	default:
		c.Skipped++
		delete(c.links, inode{st.Dev, st.Ino})
		return false, nil
	}
	if err := unix.Fchownat(to, name, int(st.Uid), int(st.Gid), unix.AT_SYMLINK_NOFOLLOW); err != nil && os.Geteuid() == 0 {
		return false, err
	}
	if kind != unix.S_IFLNK {
		// The copy is ours alone: name cannot have become a link.
		if err := unix.Fchmodat(to, name, st.Mode&0o7777, 0); err != nil {
			return false, err
		}
	}
	return false, unix.UtimesNanoAt(to, name, []unix.Timespec{st.Atim, st.Mtim}, unix.AT_SYMLINK_NOFOLLOW)
}

// file copies a regular file.
func (c *copier) file(ctx context.Context, from, to int, name string, st *unix.Stat_t) error {
	const how = unix.O_RDONLY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC | unix.O_NOCTTY
	fd, err := unix.Openat(from, name, how, 0)
	if errors.Is(err, unix.EACCES) && c.lend {
		fd, err = lendFile(from, name, how, st)
	}
	if err != nil {
		return err
	}
	in := os.NewFile(uintptr(fd), name)
	defer in.Close()
	var opened unix.Stat_t
	if err := unix.Fstat(fd, &opened); err != nil {
		return err
	}
	if opened.Mode&unix.S_IFMT != unix.S_IFREG || opened.Ino != st.Ino {
		return errReplaced
	}
	fd, err = unix.Openat(to, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	out := os.NewFile(uintptr(fd), name)
	defer out.Close()
	if opened.Size > 0 {
		if err := c.content(ctx, out, in, opened.Size); err != nil {
			return err
		}
	}
	if err := copyXattrs(int(in.Fd()), fd); err != nil {
		return err
	}
	return setMeta(fd, st)
}

// content fills out with what in holds: with its very blocks where the file system shares
// them, else with a copy of what is not a hole.
func (c *copier) content(ctx context.Context, out, in *os.File, size int64) error {
	to, from := int(out.Fd()), int(in.Fd())
	if c.clone {
		err := unix.IoctlFileClone(to, from)
		if err == nil {
			return nil
		}
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			return err
		}
		c.clone = false
	}
	if err := out.Truncate(size); err != nil {
		return err
	}
	for at := int64(0); at < size; {
		start, err := unix.Seek(from, at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil
		} else if err != nil {
			return err
		}
		end, err := unix.Seek(from, start, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		if end = min(end, size); start >= end {
			return nil
		}
		if err := c.extent(ctx, out, in, start, end); err != nil {
			return err
		}
		at = end
	}
	return nil
}

// extent copies the bytes from start to end, in pieces between which it can be cancelled.
func (c *copier) extent(ctx context.Context, out, in *os.File, start, end int64) error {
	for start < end {
		if err := ctx.Err(); err != nil {
			return err
		}
		read, wrote := start, start
		n, err := unix.CopyFileRange(int(in.Fd()), &read, int(out.Fd()), &wrote, int(min(end-start, 64<<20)), 0)
		if errors.Is(err, unix.EXDEV) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
			var copied int64
			copied, err = io.Copy(io.NewOffsetWriter(out, start), io.NewSectionReader(in, start, min(end-start, 8<<20)))
			n = int(copied)
		}
		if err != nil {
			return err
		}
		if n == 0 {
			return berm.Errorf(berm.Conflict, "it became shorter while it was copied")
		}
		start += int64(n)
		c.Bytes += int64(n)
	}
	return nil
}

// open opens a directory of the source.
func (c *copier) open(dir string) (*os.File, error) {
	f, err := openBeneath(c.src, dir, unix.O_RDONLY|unix.O_DIRECTORY)
	if err == nil && c.lend && os.Geteuid() != 0 {
		// To be read is not enough: what is below must be reachable.
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err == nil && st.Mode&0o100 == 0 {
			c.lent = append(c.lent, lent{dir, st.Mode})
			return f, unix.Fchmod(int(f.Fd()), st.Mode&0o7777|0o700)
		}
	}
	if !errors.Is(err, unix.EACCES) || !c.lend {
		return f, err
	}
	found, err := openBeneath(c.src, dir, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	defer found.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(found.Fd()), &st); err != nil {
		return nil, err
	}
	if err := chmodPath(int(found.Fd()), st.Mode&0o7777|0o700); err != nil {
		return nil, err
	}
	c.lent = append(c.lent, lent{dir, st.Mode})
	return openBeneath(int(found.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY)
}

// takeBack gives the directories of the source their modes again, the deepest first.
func (c *copier) takeBack() {
	for _, l := range slices.Backward(c.lent) {
		if f, err := openBeneath(c.src, l.path, unix.O_RDONLY|unix.O_DIRECTORY); err == nil {
			_ = unix.Fchmod(int(f.Fd()), l.mode&0o7777)
			f.Close()
		}
	}
}

// lendFile opens a file that its owner may not read, which keeps its mode.
func lendFile(dir int, name string, how int, st *unix.Stat_t) (int, error) {
	found, err := unix.Openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(found)
	var now unix.Stat_t
	if err := unix.Fstat(found, &now); err != nil {
		return -1, err
	}
	if now.Mode&unix.S_IFMT != unix.S_IFREG || now.Ino != st.Ino {
		return -1, errReplaced
	}
	if err := chmodPath(found, now.Mode&0o7777|0o400); err != nil {
		return -1, err
	}
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", found), how&^unix.O_NOFOLLOW, 0)
	if back := chmodPath(found, now.Mode&0o7777); err == nil && back != nil {
		unix.Close(fd)
		return -1, back
	}
	return fd, err
}

// finish gives a directory of the copy that is not open to its owner its attributes.
func (c *copier) finish(l late) error {
	to, err := openBeneath(c.dst, l.path, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer to.Close()
	return setMeta(int(to.Fd()), &l.st)
}

// chmodPath sets the mode of what an O_PATH descriptor is of, which fchmod(2) refuses.
func chmodPath(fd int, mode uint32) error {
	return unix.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), mode)
}

// setMeta gives an open file the owner, mode and times of another one.
func setMeta(fd int, st *unix.Stat_t) error {
	// The mode comes after the owner, whose change takes set-uid away.
	if err := unix.Fchown(fd, int(st.Uid), int(st.Gid)); err != nil && os.Geteuid() == 0 {
		return err
	}
	if err := unix.Fchmod(fd, st.Mode&0o7777); err != nil {
		return err
	}
	return futimens(fd, st)
}

func futimens(fd int, st *unix.Stat_t) error {
	return unix.UtimesNanoAt(fd, "", []unix.Timespec{st.Atim, st.Mtim}, unix.AT_EMPTY_PATH)
}

// openBeneath opens a path below dir across no link. A directory's "." is the directory.
func openBeneath(dir int, name string, flags int) (*os.File, error) {
	how := unix.OpenHow{
		Flags:   uint64(flags | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC),
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	}
	if flags&unix.O_PATH != 0 {
		how.Flags &^= unix.O_NONBLOCK // the kernel refuses what has no meaning
	}
	for {
		fd, err := unix.Openat2(dir, name, &how)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return os.NewFile(uintptr(fd), name), nil
	}
}

// copyError names where in the tree a copy failed, and gives errors of the kernel a kind.
func copyError(err error, dir string) error {
	kind, hint := berm.KindOf(err), berm.HintOf(err)
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		kind, hint = berm.Exhausted, "free space, or do without checkpoints"
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		kind = berm.Denied
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOTDIR):
		kind, hint = berm.Conflict, "it changed while it was copied; try again"
	}
	const most = 200 // the path may be longer than a message, and the cause comes after it
	if len(dir) > most {
		dir = dir[:most] + "…"
	}
	return berm.Errorf(kind, "copy the directory %q: %w", dir, err).WithHint("%s", hint)
}
