// Package claim keeps the host ids of sandboxes apart between all servers of a machine.
//
// A claim is a lock on bytes of one file, a byte for each host id. The kernel drops it
// with the last process that holds it, so a crash leaves none behind; and because
// holders share it, a sandbox's monitor keeps the claim that its server made when that
// server is gone.
package claim

import (
	"errors"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// Path is the file in which root's servers claim ids. It is gone after a reboot, like
// every claim.
const Path = "/run/berm/ids"

// File is one holder of claims. The locks belong to the open file and not to the
// process (F_OFD_SETLK): they end with Close. Its methods are safe for concurrent use.
type File struct{ file *os.File }

// Open makes a holder that has no claims yet. The file is for the own user alone:
// whoever could open it could keep every range from being used.
func Open(path string) (*File, error) {
	err := os.MkdirAll(filepath.Dir(path), 0o700)
	var file *os.File
	if err == nil {
		file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	}
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "keep host ids apart from other servers': %w", err).
			WithHint("%s must be writable, and in a container the host's, should other servers run there", filepath.Dir(path))
	}
	return &File{file}, nil
}

// Take claims a range that nobody has, and says whether it could. Others can Share it
// from then on.
func (f *File) Take(ids berm.IDRange) (bool, error) {
	if ok, err := f.lock(unix.F_WRLCK, ids); err != nil || !ok {
		return false, err
	}
	return f.lock(unix.F_RDLCK, ids) // in one step, since the lock is our own
}

// Share claims a range that others may hold too, as a sandbox's monitor does beside its
// server. It says false when somebody is about to Take it: nobody had it then.
func (f *File) Share(ids berm.IDRange) (bool, error) { return f.lock(unix.F_RDLCK, ids) }

// Drop gives a range back.
func (f *File) Drop(ids berm.IDRange) error {
	_, err := f.lock(unix.F_UNLCK, ids)
	return err
}

// Close gives every range back.
func (f *File) Close() error { return f.file.Close() }

func (f *File) lock(how int16, ids berm.IDRange) (bool, error) {
	l := unix.Flock_t{Type: how, Whence: io.SeekStart, Start: int64(ids.Base), Len: int64(ids.Count)}
	err := unix.FcntlFlock(f.file.Fd(), unix.F_OFD_SETLK, &l)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) { // POSIX leaves open which
		return false, nil
	}
	if err != nil {
		return false, berm.Errorf(berm.Internal, "claim host ids %d+%d: %w", ids.Base, ids.Count, err)
	}
	return true, nil
}
