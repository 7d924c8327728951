package store

import (
	"context"
	"database/sql"

	"github.com/berm-sandbox/berm"
)

// Snapshot is a stored snapshot. Record belongs to the session layer.
type Snapshot struct {
	Build  berm.BuildID
	Record []byte
}

// SaveSnapshot stores a snapshot and forgets the one that it takes the place of, unless that
// is "".
func (db *DB) SaveSnapshot(ctx context.Context, s Snapshot, before berm.BuildID) error {
	err := db.tx(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, "INSERT INTO snapshots (build, record) VALUES (?, ?)", s.Build, string(s.Record)); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, "DELETE FROM snapshots WHERE build = ?", before)
		return err
	})
	if err != nil {
		return berm.Errorf(berm.Internal, "database: %w", err)
	}
	return nil
}

// Snapshots returns all stored snapshots.
func (db *DB) Snapshots(ctx context.Context) ([]Snapshot, error) {
	return collect(ctx, db, func(row scanner) (s Snapshot, err error) {
		err = row.Scan(&s.Build, &s.Record)
		return s, err
	}, "SELECT build, record FROM snapshots")
}

// DeleteSnapshot forgets a snapshot. One that is not there is no error.
func (db *DB) DeleteSnapshot(ctx context.Context, build berm.BuildID) error {
	return db.exec(ctx, "DELETE FROM snapshots WHERE build = ?", build)
}
