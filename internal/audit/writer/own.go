package writer

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/service"
)

// handOver opens the directory of a log, which is made when there is none, after it has become the
// writer's: itself, what lies in it, and the directories of contents. A log that root wrote before
// becomes so here; a crash leaves the rest to the next start. Contents need not be the writer's:
// it gives them names and removes them, which is a matter of their directories.
//
// Only what is root's is given away, and no file that has another name elsewhere, so nothing that
// somebody linked here.
func handOver(path string) (*os.File, error) {
	failed := func(err error) error {
		return berm.Errorf(berm.Internal, "hand the audit log over to its writer: %w", err)
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, failed(err)
	}
	uid, gid := service.ID(service.Auditd)
	dir, err := give(unix.AT_FDCWD, path, unix.O_DIRECTORY, uid, gid) // it may be a link, to another disk
	if err != nil {
		return nil, failed(err)
	}
	for _, below := range []string{".", audit.BlobDir} {
		if err := giveAll(dir, below, uid, gid); err != nil && !errors.Is(err, fs.ErrNotExist) {
			dir.Close()
			return nil, failed(err)
		}
	}
	return dir, nil
}

// giveAll gives away what lies in a directory below dir, contents left out.
func giveAll(dir *os.File, name string, uid, gid uint32) error {
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	in := os.NewFile(uintptr(fd), name)
	defer in.Close()
	entries, err := in.ReadDir(-1)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if name == audit.BlobDir && !e.IsDir() {
			continue
		}
		f, err := give(fd, e.Name(), unix.O_NOFOLLOW, uid, gid)
		if errors.Is(err, fs.ErrNotExist) { // a writer that ends is at work
			continue
		}
		if err != nil {
			return err
		}
		f.Close()
	}
	return nil
}

// give gives one file or directory away, if it is to be. It returns it open, a directory for
// reading.
func give(at int, name string, flags int, uid, gid uint32) (*os.File, error) {
	fd, err := unix.Openat(at, name, unix.O_PATH|unix.O_CLOEXEC|flags, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), filepath.Base(name))
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		f.Close()
		return nil, err
	}
	isDir := st.Mode&unix.S_IFMT == unix.S_IFDIR
	mine := isDir || st.Mode&unix.S_IFMT == unix.S_IFREG && st.Nlink == 1
	if st.Uid == 0 && uid != 0 && mine {
		if err := unix.Fchownat(fd, "", int(uid), int(gid), unix.AT_EMPTY_PATH); err != nil {
			f.Close()
			return nil, err
		}
	}
	return f, nil
}
