package inside

import (
	"time"

	"golang.org/x/sys/unix"
)

// othersEnd is how long processes of a sandbox whose monitor was lost may take to end: the
// kernel has begun to kill them, and nobody can wait for them.
const othersEnd = 10 * time.Second

// empty deletes all that is in a directory, following no links. The directory may be a
// mount of its own, and nothing in it is one. Until a time it bears with others that still
// change what is in it.
func empty(dir int, until time.Time) error {
	// A descriptor of the place alone cannot be listed.
	fd, err := unix.Openat(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	buf := make([]byte, 16<<10)
	for {
		// From the start each time: what was listed is gone.
		if _, err := unix.Seek(fd, 0, unix.SEEK_SET); err != nil {
			return err
		}
		n, err := unix.ReadDirent(fd, buf)
		if err != nil {
			return err
		}
		_, _, names := unix.ParseDirent(buf[:n], -1, nil)
		if len(names) == 0 {
			return nil
		}
		var changed error
		for _, name := range names {
			switch err := remove(fd, name, until); err {
			case nil:
			case unix.ENOENT, unix.ENOTEMPTY, unix.ENOTDIR, unix.ELOOP:
				changed = err
			default:
				return err
			}
		}
		if changed != nil {
			if time.Now().After(until) {
				return changed
			}
			time.Sleep(time.Millisecond)
		}
	}
}

// remove deletes what has a name in dir.
func remove(dir int, name string, until time.Time) error {
	err := unix.Unlinkat(dir, name, 0)
	if err != unix.EISDIR && err != unix.EPERM { // EPERM is what POSIX has for it
		return err
	}
	below, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	err = empty(below, until)
	_ = unix.Close(below)
	if err != nil {
		return err
	}
	return unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
}
