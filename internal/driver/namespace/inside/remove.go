package inside

import "golang.org/x/sys/unix"

// empty deletes all that is in a directory, following no links. The directory may be a
// mount of its own, and nothing in it is one.
func empty(dir int) error {
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
		for _, name := range names {
			err := unix.Unlinkat(fd, name, 0)
			if err == unix.EISDIR || err == unix.EPERM { // EPERM is what POSIX has for it
				err = emptyBelow(fd, name)
			}
			if err != nil {
				return err
			}
		}
	}
}

// emptyBelow deletes a directory in dir with all that is in it.
func emptyBelow(dir int, name string) error {
	below, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	err = empty(below)
	_ = unix.Close(below)
	if err != nil {
		return err
	}
	return unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
}
