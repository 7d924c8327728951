package store

import (
	"context"

	"github.com/berm-sandbox/berm"
)

// Leases returns which sandbox holds the id range that starts at each base.
func (db *DB) Leases(ctx context.Context) (map[uint32]berm.SandboxID, error) {
	rows, err := db.read.QueryContext(ctx, "SELECT base, sandbox FROM leases")
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "database: %w", err)
	}
	defer rows.Close()
	leases := map[uint32]berm.SandboxID{}
	for rows.Next() {
		var base uint32
		var id berm.SandboxID
		if err := rows.Scan(&base, &id); err != nil {
			return nil, berm.Errorf(berm.Internal, "database: %w", err)
		}
		leases[base] = id
	}
	if err := rows.Err(); err != nil {
		return nil, berm.Errorf(berm.Internal, "database: %w", err)
	}
	return leases, nil
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
