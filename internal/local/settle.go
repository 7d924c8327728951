package local

import (
	"context"

	"github.com/berm-sandbox/berm/internal/local/apply"
	"github.com/berm-sandbox/berm/internal/local/session"
)

// Settle brings an apply of the session that was stopped in the middle to an end: its
// temporary files leave the project, and what was applied leaves the session. It returns what
// became of each path, nil when no apply was stopped. The session must be locked.
func Settle(ctx context.Context, s *session.Session) ([]apply.Result, error) {
	if !apply.Interrupted(s.Dir()) {
		return nil, nil
	}
	upper, err := s.OpenUpper()
	if err != nil {
		return nil, err
	}
	defer upper.Close()
	project, err := s.OpenProject()
	if err != nil {
		return nil, err
	}
	defer project.Close()
	return apply.Recover(ctx, s.Dir(), upper, project)
}
