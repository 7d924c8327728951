package store

import (
	"context"

	"github.com/berm-sandbox/berm"
)

// Leases returns which sandbox holds the id range that starts at each base.
func (db *DB) Leases(ctx context.Context) (map[uint32]berm.SandboxID, error) {
	type lease struct {
		base uint32
		id   berm.SandboxID
	}
	all, err := collect(ctx, db, func(row scanner) (l lease, err error) {
		err = row.Scan(&l.base, &l.id)
		return l, err
	}, "SELECT base, sandbox FROM leases")
	leases := map[uint32]berm.SandboxID{}
	for _, l := range all {
		leases[l.base] = l.id
	}
	return leases, err
}

// Lease gives the id range that starts at base to a sandbox. It fails when the
// range is held, or the sandbox holds one.
func (db *DB) Lease(ctx context.Context, base uint32, id berm.SandboxID) error {
	return db.exec(ctx, "INSERT INTO leases (base, sandbox) VALUES (?, ?)", base, id)
}

// Release takes the range of a sandbox back. Having none is no error.
func (db *DB) Release(ctx context.Context, id berm.SandboxID) error {
	return db.exec(ctx, "DELETE FROM leases WHERE sandbox = ?", id)
}
