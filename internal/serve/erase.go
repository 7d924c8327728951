package serve

import (
	"context"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit/index"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/store"
)

// eraser takes what is kept of a sandbox out of all that keeps it.
type eraser struct {
	log   auditLog
	index *index.Index
	db    *store.DB
}

// Erase implements e2b.Eraser.
func (e *eraser) Erase(ctx context.Context, what trail.Erasure, dry bool) (trail.Erasure, error) {
	// An index that has seen what goes need not be made anew.
	var err error
	if what.Team, err = e.index.Team(ctx, what.Sandbox); err != nil && berm.KindOf(err) != berm.NotFound {
		return what, err
	}
	done, err := e.log.Erase(what, dry)
	// One that was interrupted is done again, with nothing left in the log. What is on record and not finished
	// will be.
	if dry || err != nil && berm.KindOf(err) != berm.NotFound && done.Left == 0 {
		return done, err
	}
	for _, forget := range []func() error{
		func() error { return e.index.Update(ctx) },
		func() error { return e.db.Forget(ctx, what.Sandbox) },
	} {
		if failed := forget(); failed != nil {
			return done, failed
		}
	}
	return done, err
}
