package launch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/failpoint"
	"github.com/berm-sandbox/berm/internal/monitor"
)

// SavedDisk is the image of a snapshot in its directory: a file system of the size of the
// disk that it is of.
const SavedDisk = "disk"

// Snapshot saves the writable layer while every process of the sandbox stands still.
//
// The file system itself is not frozen (FIFREEZE): that would outlive this process and keep
// the disk for ever. With no process that could write, its sync leaves an image with all data in
// it, which is as good as one that was unmounted but for the space of files that are open and have no name any more.
func (s *Sandbox) Snapshot(dir string) (saved berm.Saved, err error) {
	if err := s.savable(); err != nil {
		return saved, err
	}
	failed := func(err error) (berm.Saved, error) {
		if s.ending.Load() {
			return saved, berm.Errorf(berm.NotFound, "the sandbox is dead")
		}
		if errors.Is(err, unix.ENOSPC) {
			return saved, noRoom(err)
		}
		return saved, fault("save the disk", err)
	}
	image, err := s.synced()
	if err != nil {
		return failed(err)
	}
	defer image.Close()
	monitor.Trace("disk synced")
	if err := failpoint.Hit("launch.synced"); err != nil {
		return saved, err
	}
	to, err := os.OpenFile(filepath.Join(dir, SavedDisk), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return failed(err)
	}
	defer to.Close()
	if saved.Shared, err = copySparse(to, image, s.ending.Load); err != nil {
		return failed(err)
	}
	monitor.Trace("disk saved")
	var stat unix.Stat_t
	if err := unix.Fstat(int(to.Fd()), &stat); err != nil {
		return failed(err)
	}
	saved.Size = stat.Blocks * 512
	return saved, failpoint.Hit("launch.saved")
}

// savable refuses a disk that no snapshot can be made of.
func (s *Sandbox) savable() error {
	if s.image == nil {
		return berm.Errorf(berm.Unsupported, "the disk of this sandbox cannot be saved: it is no file system of its own").
			WithHint("snapshots and forks need a server of root and a sandbox with a limit of its disk")
	}
	return nil
}

// Settle writes what is in memory of the disk to the host's, where a snapshot in dir will be a clone:
// to clone a file waits for that, so that a sandbox would stand still the longer the more it wrote
// last. Copies read what is in memory.
func (s *Sandbox) Settle(dir string) error {
	if err := s.savable(); err != nil {
		return err
	}
	trial, err := nameless(dir)
	if errors.Is(err, unix.ENOSPC) {
		return noRoom(err)
	} else if err != nil {
		return fault("try to clone the disk", err)
	}
	defer trial.Close()
	image, err := s.synced()
	if err == nil {
		defer image.Close()
		first := unix.FileCloneRange{Src_fd: int64(image.Fd()), Src_length: trialSize}
		if unix.IoctlFileCloneRange(int(trial.Fd()), &first) == nil {
			err = unix.Fdatasync(int(image.Fd()))
			monitor.Trace("disk settled")
		}
	}
	if err != nil && s.ending.Load() {
		return berm.Errorf(berm.NotFound, "the sandbox is dead")
	} else if err != nil {
		return fault("sync the disk", err)
	}
	return nil
}

// trialSize is what is cloned to see whether that can be done: a block of most file systems.
const trialSize = 4096

// synced opens the image of the disk once all that was written to the disk is in it. The
// descriptor is its own: the end of the sandbox closes the others.
func (s *Sandbox) synced() (*os.File, error) {
	image, err := duplicate(s.image)
	if err != nil {
		return nil, err
	}
	root, err := unix.Openat(int(s.upper.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == nil {
		err = errors.Join(unix.Syncfs(root), unix.Close(root))
	}
	if err != nil {
		image.Close()
		return nil, err
	}
	return image, nil
}

// Version is when the image was last written to, once all that the sandbox wrote is in it. The
// file system writes nothing by itself: its tables are not initialised in the background, and
// reading moves no times.
func (s *Sandbox) Version() (string, error) {
	if s.image == nil {
		return "", berm.Errorf(berm.Unsupported, "the disk of this sandbox is no file system of its own")
	}
	image, err := s.synced()
	if err != nil {
		return "", fault("sync the disk", err)
	}
	defer image.Close()
	var stat unix.Stat_t
	if err := unix.Fstat(int(image.Fd()), &stat); err != nil {
		return "", fault("look at the disk", err)
	}
	// Whoever saves the disk next has what was written until the clock of files moves on, and
	// what is written later has another time.
	var tick unix.Timespec
	if err := unix.ClockGetres(unix.CLOCK_REALTIME_COARSE, &tick); err != nil {
		return "", fault("look at the clock", err)
	}
	time.Sleep(time.Until(time.Unix(stat.Ctim.Unix()).Add(2 * time.Duration(tick.Nano()))))
	return fmt.Sprintf("%d-%d", stat.Ino, stat.Ctim.Nano()), nil
}

func duplicate(f *os.File) (*os.File, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	fd := -1
	err = errors.Join(raw.Control(func(original uintptr) {
		fd, err = unix.FcntlInt(original, unix.F_DUPFD_CLOEXEC, 0)
	}), err)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

func noRoom(err error) error {
	return berm.Errorf(berm.Unavailable, "no room for a sandbox's disk or memory: %w", err).
		WithHint("delete snapshots, kill sandboxes or make room where the server's data directory is")
}
