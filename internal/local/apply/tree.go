package apply

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/local/change"
)

// tree is a directory below which no symbolic link is followed and no other mount is
// entered: both would lead out of what the session saw.
type tree struct{ dir *os.File }

func openTree(root *os.Root) (*tree, error) {
	dir, err := root.Open(".")
	if err != nil {
		return nil, err
	}
	return &tree{dir}, nil
}

func (t *tree) Close() { t.dir.Close() }

func (t *tree) fd() int { return int(t.dir.Fd()) }

func (t *tree) open(name string, flags uint64) (*os.File, error) {
	how := unix.OpenHow{
		Flags:   flags | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	}
	for {
		fd, err := unix.Openat2(t.fd(), name, &how)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return os.NewFile(uintptr(fd), name), nil
	}
}

// place is one name in an open directory.
type place struct {
	dir  *os.File
	name string
}

func (p place) Close() { p.dir.Close() }

func (p place) fd() int { return int(p.dir.Fd()) }

func (t *tree) at(name string) (place, error) {
	dir, err := t.open(path.Dir(name), unix.O_PATH|unix.O_DIRECTORY)
	return place{dir, path.Base(name)}, err
}

// stat returns nil when nothing is there.
func (p place) stat() (*unix.Stat_t, error) {
	var st unix.Stat_t
	err := unix.Fstatat(p.fd(), p.name, &st, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return &st, nil
}

// enters says whether the caller may list a directory and reach what is in it.
func (t *tree) enters(name string) bool {
	p, err := t.at(name)
	if err != nil {
		return true // which is another error's to tell
	}
	defer p.Close()
	err = unix.Faccessat(p.fd(), p.name, unix.R_OK|unix.X_OK, unix.AT_EACCESS|unix.AT_SYMLINK_NOFOLLOW)
	return !errors.Is(err, unix.EACCES)
}

// stat returns nil when nothing is at name, also because its directory is missing.
func (t *tree) stat(name string) (*unix.Stat_t, error) {
	p, err := t.at(name)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer p.Close()
	return p.stat()
}

// file opens a regular file to read. Anything else is fs.ErrInvalid and was not opened
// in a way that could wait or act.
func (t *tree) file(name string) (*os.File, *unix.Stat_t, error) {
	f, err := t.open(name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY)
	if err != nil {
		return nil, nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		f.Close()
		return nil, nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		f.Close()
		return nil, nil, fs.ErrInvalid
	}
	return f, &st, nil
}

// content reads a regular file of at most limit bytes.
func (t *tree) content(name string, limit int64) ([]byte, error) {
	f, st, err := t.file(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if st.Size > limit {
		return nil, unix.EFBIG
	}
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = unix.EFBIG
	}
	return b, err
}

func (p place) readlink() (string, error) {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(p.fd(), p.name, buf)
	return string(buf[:max(n, 0)]), err
}

// is says whether what st describes is at name of t is what entry describes; from has the
// content of entry.
func (t *tree) is(ctx context.Context, name string, st *unix.Stat_t, entry change.Entry, from *tree) (bool, error) {
	if st == nil || entry.Mode.Type() != modeOf(st.Mode).Type() {
		return false, nil
	}
	switch entry.Mode.Type() {
	case fs.ModeSymlink:
		p, err := t.at(name)
		if err != nil {
			return false, err
		}
		defer p.Close()
		target, err := p.readlink()
		return err == nil && target == entry.Target, err
	case fs.ModeDir:
		return bits(st.Mode) == entryBits(entry.Mode), nil
	case 0:
		if st.Size != entry.Size || bits(st.Mode) != entryBits(entry.Mode) {
			return false, nil
		}
		return equal(ctx, t, from, name)
	}
	return false, nil
}

// equal compares a file of the same name in two trees.
func equal(ctx context.Context, a, b *tree, name string) (bool, error) {
	fa, _, err := a.file(name)
	if err != nil {
		return false, err
	}
	defer fa.Close()
	fb, _, err := b.file(name)
	if err != nil {
		return false, err
	}
	defer fb.Close()
	bufs := make([]byte, 2*64<<10)
	ba, bb := bufs[:64<<10], bufs[64<<10:]
	for ctx.Err() == nil {
		na, erra := io.ReadFull(fa, ba)
		nb, errb := io.ReadFull(fb, bb)
		if !bytes.Equal(ba[:na], bb[:nb]) {
			return false, nil
		}
		for _, err := range []error{erra, errb} {
			if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
				return false, err
			}
		}
		if erra != nil || errb != nil {
			return true, nil
		}
	}
	return false, ctx.Err()
}

// digest is the SHA-256 of a regular file of a size.
func (t *tree) digest(ctx context.Context, name string, size int64) (sum [sha256.Size]byte, err error) {
	f, st, err := t.file(name)
	if err != nil {
		return sum, err
	}
	defer f.Close()
	if st.Size != size {
		return sum, unix.EBUSY // it changes meanwhile
	}
	h := sha256.New()
	for left := size; left > 0 && ctx.Err() == nil; {
		n, err := io.CopyN(h, f, min(left, 1<<20))
		if err != nil {
			return sum, err
		}
		left -= n
	}
	return [sha256.Size]byte(h.Sum(nil)), ctx.Err()
}

// bits are the bits of a mode that apply writes: neither set-user-ID nor set-group-ID.
func bits(mode uint32) uint32 { return mode & 0o1777 }

func entryBits(mode fs.FileMode) uint32 {
	b := uint32(mode.Perm())
	if mode&fs.ModeSticky != 0 {
		b |= unix.S_ISVTX
	}
	return b
}

func modeOf(mode uint32) fs.FileMode {
	m := fs.FileMode(mode & 0o777)
	switch mode & unix.S_IFMT {
	case unix.S_IFDIR:
		m |= fs.ModeDir
	case unix.S_IFLNK:
		m |= fs.ModeSymlink
	case unix.S_IFREG:
	case unix.S_IFIFO:
		m |= fs.ModeNamedPipe
	case unix.S_IFSOCK:
		m |= fs.ModeSocket
	case unix.S_IFCHR:
		m |= fs.ModeDevice | fs.ModeCharDevice
	default:
		m |= fs.ModeDevice
	}
	return m
}

// valid says whether a path is one of names below a directory.
func valid(name string) bool {
	return name != "." && !strings.ContainsRune(name, 0) && path.Clean(name) == name &&
		name != ".." && !strings.HasPrefix(name, "../") && !strings.HasPrefix(name, "/")
}

// copyData copies size bytes and leaves the holes of a sparse file out: its size costs a
// sandbox nothing and must not cost the host its disk.
func copyData(ctx context.Context, to, from *os.File, size int64) error {
	for at := int64(0); at < size; {
		if err := ctx.Err(); err != nil {
			return err
		}
		start, err := unix.Seek(int(from.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) { // no data behind at
			break
		}
		if err != nil {
			return err
		}
		end, err := unix.Seek(int(from.Fd()), start, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		end = min(end, size, start+64<<20)
		if _, err := from.Seek(start, io.SeekStart); err != nil {
			return err
		}
		if _, err := to.Seek(start, io.SeekStart); err != nil {
			return err
		}
		n, err := io.CopyN(to, from, end-start)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if n == 0 {
			break
		}
		at = start + n
	}
	return to.Truncate(size)
}
