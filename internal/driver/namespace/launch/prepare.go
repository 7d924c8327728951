package launch

import (
	"encoding/json"
	"os"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/failpoint"
)

// Spare is what a monitor makes before it knows its sandbox: the mount of a writable
// layer. The kernel takes it back with the monitor.
type Spare struct {
	Upper Upper `json:"upper"`
	disk  disk
}

// Make carries out a request to prepare.
func (s *Spare) Make(order json.RawMessage) (err error) {
	if err = json.Unmarshal(order, s); err != nil {
		return err
	}
	if s.Upper.Image != "" {
		if s.disk, err = s.Upper.open(); err != nil {
			return err
		}
		warm(int(s.disk.root.Fd()))
	}
	return failpoint.Hit("launch.prepare")
}

// warm makes the kernel read what the first new directory in a file system needs. Each
// block comes through the loop device, whose worker may take milliseconds on a busy host.
// It changes nothing, and nothing depends on it.
func warm(root int) {
	for _, dir := range []string{"upper/x", "work/x"} {
		if unix.Mkdirat(root, dir, 0o700) == nil {
			_ = unix.Unlinkat(root, dir, unix.AT_REMOVEDIR)
		}
	}
}

// take returns the mount of a writable layer: the one that was made before if that is
// of the same image, else a new one.
func (s *Spare) take(u Upper) (disk, error) {
	d := s.disk
	s.disk = disk{}
	if d.root != nil && s.Upper == u {
		return d, nil
	}
	d.close()
	return u.open()
}

// Enter makes a sandbox's directory the working directory and locks it. The lock is held
// as long as the file that is returned: it tells whoever cleans up that a monitor lives.
func Enter(directory string) (*os.File, error) {
	if err := os.Chdir(directory); err != nil {
		return nil, fault("enter the sandbox's directory", err)
	}
	dir, err := os.Open(".")
	if err != nil {
		return nil, fault("enter the sandbox's directory", err)
	}
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		dir.Close()
		return nil, fault("another monitor keeps this sandbox", err)
	}
	if err := failpoint.Hit("launch.enter"); err != nil {
		dir.Close()
		return nil, err
	}
	return dir, nil
}
