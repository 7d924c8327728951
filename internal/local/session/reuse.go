package session

import (
	"context"

	"golang.org/x/sys/unix"
)

// Reuse lets overlayfs mount a layer again that was mounted as volatile. Nothing but a crash
// of the machine makes that unsafe (Documentation/filesystems/overlayfs.rst), and then what
// was not written to disk yet is missing. The session must be locked.
func (s *Session) Reuse(ctx context.Context) error {
	work, err := unix.Openat(int(s.lock.Fd()), workDir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == nil {
		err = removeTree(ctx, work, "work") // of overlayfs, with the mark
		_ = unix.Close(work)
	}
	if err != nil {
		return stateError(err, "use the session "+s.Name+" again")
	}
	return nil
}
