package store

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/berm-sandbox/berm"
)

// Sandbox is a stored sandbox. Record belongs to the session layer.
type Sandbox struct {
	ID      berm.SandboxID
	Killed  time.Time // zero while it lives
	Request string    // names the create that made it, of at most one sandbox; "" for none
	Record  []byte
}

// SaveSandbox stores a sandbox, over an older state of it.
func (db *DB) SaveSandbox(ctx context.Context, s Sandbox) error {
	return db.exec(ctx, `INSERT INTO sandboxes (id, killed, request, record) VALUES (?, ?, NULLIF(?, ''), ?)
		ON CONFLICT (id) DO UPDATE SET killed = excluded.killed, request = excluded.request, record = excluded.record`,
		s.ID, nanos(s.Killed), s.Request, string(s.Record))
}

// Sandbox returns a stored sandbox, also a dead one. NotFound when there is none.
func (db *DB) Sandbox(ctx context.Context, id berm.SandboxID) (Sandbox, error) {
	return db.sandbox(ctx, "id = ?", string(id))
}

// SandboxOf returns the sandbox that a create made, also a dead one. NotFound when
// there is none, or it was forgotten.
func (db *DB) SandboxOf(ctx context.Context, request string) (Sandbox, error) {
	return db.sandbox(ctx, "request = ?", request)
}

func (db *DB) sandbox(ctx context.Context, where, arg string) (Sandbox, error) {
	var s Sandbox
	var killed int64
	err := db.read.QueryRowContext(ctx, "SELECT id, killed, COALESCE(request, ''), record FROM sandboxes WHERE "+where, arg).
		Scan(&s.ID, &killed, &s.Request, &s.Record)
	if errors.Is(err, sql.ErrNoRows) {
		return Sandbox{}, berm.Errorf(berm.NotFound, "sandbox %s was not found", arg)
	}
	if err != nil {
		return Sandbox{}, berm.Errorf(berm.Internal, "database: %w", err)
	}
	s.Killed = moment(killed)
	return s, nil
}

// LivingSandboxes returns the stored sandboxes that were not killed.
func (db *DB) LivingSandboxes(ctx context.Context) ([]Sandbox, error) {
	return collect(ctx, db, func(row scanner) (s Sandbox, err error) {
		err = row.Scan(&s.ID, &s.Record)
		return s, err
	}, "SELECT id, record FROM sandboxes WHERE killed = 0")
}

// Prune forgets sandboxes that died before t, with their log lines.
func (db *DB) Prune(ctx context.Context, t time.Time) error {
	const dead = "killed > 0 AND killed < ?"
	if err := db.exec(ctx, "DELETE FROM logs WHERE sandbox IN (SELECT id FROM sandboxes WHERE "+dead+")", t.UnixNano()); err != nil {
		return err
	}
	return db.exec(ctx, "DELETE FROM sandboxes WHERE "+dead, t.UnixNano())
}

// Forget forgets a dead sandbox, with its log lines, so that the files of the database do not hold
// them either.
func (db *DB) Forget(ctx context.Context, id berm.SandboxID) error {
	err := db.change(ctx, func(tx *sql.Tx) error {
		result, err := tx.ExecContext(ctx, "DELETE FROM sandboxes WHERE id = ? AND killed > 0", string(id))
		if err != nil {
			return err
		}
		if n, err := result.RowsAffected(); err != nil || n == 0 {
			return err // it lives, or was forgotten with them
		}
		_, err = tx.ExecContext(ctx, "DELETE FROM logs WHERE sandbox = ?", string(id))
		return err
	})
	if err != nil {
		return err
	}
	return db.exec(ctx, "PRAGMA wal_checkpoint(TRUNCATE)")
}

// LogLine is one line of a sandbox's log.
type LogLine struct {
	Time    time.Time
	Level   string // debug, info, warn or error
	Message string
	Fields  string // JSON object
}

// AppendLog adds a line to a sandbox's log.
func (db *DB) AppendLog(ctx context.Context, id berm.SandboxID, line LogLine) error {
	return db.exec(ctx, "INSERT INTO logs (sandbox, time, level, message, fields) VALUES (?, ?, ?, ?, ?)",
		id, line.Time.UnixNano(), line.Level, line.Message, line.Fields)
}

// Logs returns up to limit lines of a sandbox's log, in the order asked for, from
// the moment given on (oldest first) or back from it (newest first).
func (db *DB) Logs(ctx context.Context, id berm.SandboxID, from time.Time, backward bool, limit int) ([]LogLine, error) {
	query := "SELECT time, level, message, fields FROM logs WHERE sandbox = ? AND time >= ? ORDER BY time, rowid LIMIT ?"
	if backward {
		query = "SELECT time, level, message, fields FROM logs WHERE sandbox = ? AND time <= ? ORDER BY time DESC, rowid DESC LIMIT ?"
	}
	return collect(ctx, db, func(row scanner) (line LogLine, err error) {
		var at int64
		err = row.Scan(&at, &line.Level, &line.Message, &line.Fields)
		line.Time = moment(at)
		return line, err
	}, query, id, from.UnixNano(), limit)
}

func nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func moment(nanos int64) time.Time {
	if nanos == 0 {
		return time.Time{}
	}
	return time.Unix(0, nanos).UTC()
}
