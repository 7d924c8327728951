package store

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
)

// Hold keeps what the audit log has of a sandbox from being removed.
type Hold struct {
	Sandbox berm.SandboxID `json:"sandbox"`
	Reason  string         `json:"reason"`
	User    string         `json:"user"` // of the host, who set it
	Since   time.Time      `json:"since"`
	Team    berm.Team      `json:"-"` // whose the sandbox is, for the record of a change; it is not stored
}

// SetHold begins a hold. AlreadyExists when the sandbox has one.
func (db *DB) SetHold(ctx context.Context, h Hold) error {
	h.Since = time.Now().UTC()
	return db.change(ctx, func(tx *sql.Tx) error {
		switch err := tx.QueryRowContext(ctx, "SELECT sandbox FROM holds WHERE sandbox = ?", string(h.Sandbox)).Scan(new(string)); {
		case err == nil:
			return berm.Errorf(berm.AlreadyExists, "sandbox %s is held already", h.Sandbox)
		case !errors.Is(err, sql.ErrNoRows):
			return err
		}
		if _, err := tx.ExecContext(ctx, "INSERT INTO holds (sandbox, reason, user, since) VALUES (?, ?, ?, ?)", string(h.Sandbox), h.Reason, h.User, h.Since.UnixNano()); err != nil {
			return err
		}
		return outbox(ctx, tx, h.record(audit.HoldSet))
	})
}

// EndHold ends a hold, for a reason. NotFound when the sandbox has none.
func (db *DB) EndHold(ctx context.Context, h Hold) error {
	h.Since = time.Now().UTC()
	return db.change(ctx, func(tx *sql.Tx) error {
		result, err := tx.ExecContext(ctx, "DELETE FROM holds WHERE sandbox = ?", string(h.Sandbox))
		if err != nil {
			return err
		}
		if n, err := result.RowsAffected(); err != nil || n == 0 {
			return errors.Join(err, berm.Errorf(berm.NotFound, "sandbox %s is not held", h.Sandbox))
		}
		return outbox(ctx, tx, h.record(audit.HoldEnd))
	})
}

// record tells of a change, which counted from Since on, though the record may come later.
func (h Hold) record(what audit.Type) audit.Record {
	return audit.Record{
		Team: h.Team, Sandbox: h.Sandbox, Actor: audit.Actor{Type: "user", ID: h.User}, Type: what, Reason: h.Reason,
		Data: map[string]any{"at": h.Since},
	}
}

// change is tx for changes that may be refused with an error of a kind.
func (db *DB) change(ctx context.Context, do func(*sql.Tx) error) error {
	err := db.tx(ctx, do)
	var kind *berm.Error
	if err == nil || errors.As(err, &kind) {
		return err
	}
	return berm.Errorf(berm.Internal, "database: %w", err)
}

// Holds lists the holds, the oldest first.
func (db *DB) Holds(ctx context.Context) ([]Hold, error) {
	holds, err := collect(ctx, db, func(row scanner) (h Hold, err error) {
		var since int64
		if err = row.Scan(&h.Sandbox, &h.Reason, &h.User, &since); err != nil {
			return h, berm.Errorf(berm.Internal, "database: %w", err)
		}
		h.Since = moment(since)
		return h, nil
	}, "SELECT sandbox, reason, user, since FROM holds ORDER BY since")
	if holds == nil {
		holds = []Hold{} // [] in JSON
	}
	return holds, err
}
