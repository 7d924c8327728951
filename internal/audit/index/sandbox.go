package index

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/berm-sandbox/berm"
)

// Team is whose a sandbox is or was. NotFound when the log has nothing of it.
func (x *Index) Team(ctx context.Context, id berm.SandboxID) (team berm.Team, err error) {
	missing := false
	err = x.fresh(ctx, func() error {
		err := x.db.QueryRowContext(ctx, "SELECT team FROM sandboxes WHERE id = ?", string(id)).Scan(&team)
		missing = errors.Is(err, sql.ErrNoRows)
		if missing {
			return nil
		}
		return err
	})
	if missing && err == nil {
		err = berm.Errorf(berm.NotFound, "the log has no record of sandbox %s", id)
	}
	return team, err
}

// Kept is what the log has of a sandbox that an erasure would take.
type Kept struct {
	Sandbox berm.SandboxID
	Last    time.Time // of its last record
	Bytes   int64     // of records and contents, also those that others name
}

// Kept lists what the log has of the sandboxes of a team whose last record is of until or before, those that
// ended first first.
func (x *Index) Kept(ctx context.Context, team berm.Team, until time.Time) (all []Kept, err error) {
	err = x.fresh(ctx, func() error {
		all = nil
		rows, err := x.db.QueryContext(ctx, "SELECT id, last, bytes FROM sandboxes WHERE team = ? AND last <= ? AND bytes > 0 ORDER BY last, id", string(team), until.UnixNano())
		if err != nil {
			return err
		}
		defer func() { _ = rows.Close() }()
		for rows.Next() {
			var k Kept
			var last int64
			if err := rows.Scan(&k.Sandbox, &last, &k.Bytes); err != nil {
				return err
			}
			k.Last = time.Unix(0, last)
			all = append(all, k)
		}
		return rows.Err()
	})
	return all, err
}

// Bytes is how much the log has of all sandboxes of a team, as Kept counts.
func (x *Index) Bytes(ctx context.Context, team berm.Team) (n int64, err error) {
	err = x.fresh(ctx, func() error {
		return x.db.QueryRowContext(ctx, "SELECT coalesce(sum(bytes), 0) FROM sandboxes WHERE team = ?", string(team)).Scan(&n)
	})
	return n, err
}
