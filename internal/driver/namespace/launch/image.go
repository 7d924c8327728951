package launch

import (
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// copyImage makes a nameless copy of a file system image in the current directory:
// when the last descriptor goes, so do its bytes.
func copyImage(image string) (*os.File, error) {
	from, err := os.Open(image)
	if err != nil {
		return nil, err
	}
	defer from.Close()
	to, err := nameless()
	if err != nil {
		return nil, err
	}
	if err := copySparse(to, from); err != nil {
		to.Close()
		return nil, err
	}
	return to, nil
}

// Unnamed is the pattern of the names that files without a name have for a moment, where
// the file system knows no such files.
const Unnamed = "upper-*.new"

// nameless opens a new file without a name.
func nameless() (*os.File, error) {
	fd, err := unix.Open(".", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == nil {
		return os.NewFile(uintptr(fd), "upper"), nil
	}
	// Not every file system has O_TMPFILE.
	f, err := os.CreateTemp(".", Unnamed)
	if err != nil {
		return nil, err
	}
	return f, os.Remove(f.Name())
}

// copySparse copies what is written in from and leaves the holes.
func copySparse(to, from *os.File) error {
	if unix.IoctlFileClone(int(to.Fd()), int(from.Fd())) == nil {
		return nil
	}
	info, err := from.Stat()
	if err != nil {
		return err
	}
	if err := to.Truncate(info.Size()); err != nil {
		return err
	}
	for at := int64(0); ; {
		start, err := unix.Seek(int(from.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil
		} else if err != nil {
			return err
		}
		end, err := unix.Seek(int(from.Fd()), start, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		if _, err := io.Copy(io.NewOffsetWriter(to, start), io.NewSectionReader(from, start, end-start)); err != nil {
			return err
		}
		at = end
	}
}
