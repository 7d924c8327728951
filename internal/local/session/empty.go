package session

import (
	"context"

	"golang.org/x/sys/unix"
)

// Empty takes all changes out of the session. It must be locked and no command running in
// it. A crash leaves some of the changes.
func (s *Session) Empty(ctx context.Context) error {
	var project unix.Stat_t
	err := unix.Stat(s.Project, &project)
	for _, dir := range []string{upperDir, workDir} {
		if err == nil {
			err = removeTree(ctx, int(s.lock.Fd()), dir)
		}
	}
	if err == nil {
		err = s.makeLayer(&project)
	}
	if err != nil {
		return stateError(err, "empty the session "+s.Name)
	}
	return nil
}
