package launch

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// copyImage makes a nameless copy of a file system image beside it, where the two can share their
// bytes: when the last descriptor goes, so do its own.
func copyImage(image string) (*os.File, error) {
	from, err := os.Open(image)
	if err != nil {
		return nil, err
	}
	defer from.Close()
	to, err := nameless(filepath.Dir(image))
	if err != nil {
		return nil, err
	}
	if _, err := copySparse(to, from, func() bool { return false }); err != nil {
		to.Close()
		return nil, err
	}
	return to, nil
}

// Unnamed is the pattern of the names that files without a name have for a moment, where
// the file system knows no such files.
const Unnamed = "upper-*.new"

// nameless opens a new file without a name in a directory.
func nameless(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == nil {
		return os.NewFile(uintptr(fd), "upper"), nil
	}
	// Not every file system has O_TMPFILE.
	f, err := os.CreateTemp(dir, Unnamed)
	if err != nil {
		return nil, err
	}
	return f, os.Remove(f.Name())
}

// copyChunk is how much is copied at once, before it is asked whether to stop.
const copyChunk = 16 << 20

// copySparse makes to a copy of from and says whether they share their bytes, which the file
// system may clone. Otherwise what is written in from is copied and the holes are left, until
// stop says so.
func copySparse(to, from *os.File, stop func() bool) (shared bool, err error) {
	if unix.IoctlFileClone(int(to.Fd()), int(from.Fd())) == nil {
		return true, nil
	}
	info, err := from.Stat()
	if err != nil {
		return false, err
	}
	if err := to.Truncate(info.Size()); err != nil {
		return false, err
	}
	for at := int64(0); ; {
		start, err := unix.Seek(int(from.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return false, nil
		} else if err != nil {
			return false, err
		}
		end, err := unix.Seek(int(from.Fd()), start, unix.SEEK_HOLE)
		if err != nil {
			return false, err
		}
		for at = start; at < end; {
			if stop() {
				return false, context.Canceled
			}
			n, err := copyRange(to, from, at, min(end-at, copyChunk))
			if err != nil {
				return false, err
			}
			at += n
		}
	}
}

// copyRange copies up to size bytes from one place of a file to the same of another. The
// kernel does so itself where both are of one file system.
func copyRange(to, from *os.File, at, size int64) (int64, error) {
	in, out := at, at
	n, err := unix.CopyFileRange(int(from.Fd()), &in, int(to.Fd()), &out, int(size), 0)
	if err == nil && n > 0 {
		return int64(n), nil
	}
	if err != nil && !errors.Is(err, unix.EXDEV) && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOSYS) && !errors.Is(err, unix.EOPNOTSUPP) {
		return 0, err
	}
	copied, err := io.Copy(io.NewOffsetWriter(to, at), io.NewSectionReader(from, at, size))
	if err == nil && copied == 0 {
		err = io.ErrUnexpectedEOF
	}
	return copied, err
}
