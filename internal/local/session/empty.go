package session

import (
	"context"
	"os"
)

// Empty takes all changes out of the session. It must be locked and no command running in
// it. A crash leaves some of the changes.
func (s *Session) Empty(ctx context.Context) error {
	project, err := os.Stat(s.Project)
	if err != nil {
		return stateError(err, "empty the session "+s.Name)
	}
	for _, dir := range []string{upperDir, workDir} {
		if err = removeTree(ctx, int(s.lock.Fd()), dir); err != nil {
			return stateError(err, "empty the session "+s.Name)
		}
	}
	if err = s.makeLayer(project.Mode()); err != nil {
		return stateError(err, "empty the session "+s.Name)
	}
	return nil
}
