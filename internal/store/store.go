// Package store keeps the state of one server in SQLite: sandboxes, teams, API keys,
// leases of host ids and log lines.
package store

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/kernel/flock"
)

// Format is the number in DATA/VERSION: the layout of the data directory.
const Format = 1

// DB is an open store. The methods are safe for concurrent use.
type DB struct {
	lock  *os.File
	write *sql.DB // one connection: SQLite has one writer at a time
	read  *sql.DB

	prepared sync.Map // of statement to *sql.Stmt: to parse one takes longer than to carry it out
}

// statement is a text for one of the two.
type statement struct {
	db   *sql.DB
	text string
}

// prepare returns the statement that a text is, which is one of a few.
func (db *DB) prepare(ctx context.Context, of *sql.DB, text string) (*sql.Stmt, error) {
	if s, ok := db.prepared.Load(statement{of, text}); ok {
		return s.(*sql.Stmt), nil
	}
	s, err := of.PrepareContext(ctx, text)
	if err != nil {
		return nil, err
	}
	if first, is := db.prepared.LoadOrStore(statement{of, text}, s); is {
		_ = s.Close()
		return first.(*sql.Stmt), nil
	}
	return s, nil
}

// Open opens the data directory dir for the server, makes it when it is missing,
// and holds it exclusively until Close. It waits for a moment for who holds it. Kinds: Conflict when
// another server holds it, Unsupported when a newer Berm wrote it.
func Open(dir string) (*DB, error) { return openWithin(dir, flock.Patience) }

func openWithin(dir string, patience time.Duration) (*DB, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, berm.Errorf(berm.Internal, "data directory: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "data directory: %w", err)
	}
	if err := flock.Take(lock, patience); err != nil {
		lock.Close()
		return nil, berm.Errorf(berm.Conflict, "data directory %s is in use by another server", dir).
			WithHint("Stop it, or choose another directory with --data.")
	}
	db, err := openLocked(dir)
	if err != nil {
		lock.Close()
		return nil, err
	}
	db.lock = lock
	return db, nil
}

// OpenShared opens a data directory beside a server that may hold it, for the
// commands that manage keys and holds.
func OpenShared(dir string) (*DB, error) {
	db, err := openWithin(dir, 0)
	if berm.KindOf(err) != berm.Conflict {
		return db, err
	}
	if err := checkFormat(dir); err != nil {
		return nil, err
	}
	if db, err = connect(dir); err != nil {
		return nil, err
	}
	n, err := db.schema()
	if err == nil && n != len(migrations) {
		err = berm.Errorf(berm.Unsupported, "the running server uses database schema %d, this berm %d", n, len(migrations)).
			WithHint("they are of different versions: start the server again with this berm, or use the server's")
	}
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return db, nil
}

func openLocked(dir string) (*DB, error) {
	// The directory holds set-uid files: nobody else may reach them.
	if err := os.Chmod(dir, 0o700); err != nil {
		return nil, berm.Errorf(berm.Internal, "data directory: %w", err)
	}
	if err := checkFormat(dir); err != nil {
		return nil, err
	}
	db, err := connect(dir)
	if err != nil {
		return nil, err
	}
	if err := db.migrate(dir); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return db, nil
}

// checkFormat reads DATA/VERSION, or writes it into a directory that has none.
func checkFormat(dir string) error {
	path := filepath.Join(dir, "VERSION")
	content, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		content = []byte(strconv.Itoa(Format) + "\n")
		err = os.WriteFile(path, content, 0o600)
	}
	if err != nil {
		return berm.Errorf(berm.Internal, "data directory: %w", err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(content)))
	switch {
	case err != nil:
		return berm.Errorf(berm.Internal, "data directory: %s holds no number", path)
	case n > Format:
		return newer("data directory", n, Format)
	}
	return nil
}

func newer(what string, found, known int) error {
	return berm.Errorf(berm.Unsupported, "the %s has format %d, this berm knows up to %d", what, found, known).
		WithHint("use the newer berm that wrote it")
}

func connect(dir string) (*DB, error) {
	// A query string cannot be part of a path with '?' or '%' in it.
	path := strings.NewReplacer("%", "%25", "?", "%3f", "#", "%23").Replace(filepath.Join(dir, "berm.db"))
	open := func(conns int, options string) (*sql.DB, error) {
		db, err := sql.Open("sqlite", "file:"+path+"?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(NORMAL)&_pragma=foreign_keys(1)"+options)
		if err == nil {
			db.SetMaxOpenConns(conns)
			db.SetMaxIdleConns(conns)
			err = db.Ping()
		}
		if err != nil {
			return nil, berm.Errorf(berm.Internal, "database: %w", err)
		}
		return db, nil
	}
	write, err := open(1, "&_pragma=secure_delete(1)&_txlock=immediate")
	if err != nil {
		return nil, err
	}
	read, err := open(2, "&_pragma=query_only(1)")
	if err != nil {
		return nil, errors.Join(err, write.Close())
	}
	return &DB{write: write, read: read}, nil
}

// Close closes the store and lets the data directory go.
func (db *DB) Close() error {
	err := errors.Join(db.read.Close(), db.write.Close())
	if db.lock != nil {
		err = errors.Join(err, db.lock.Close())
	}
	return err
}

// migrations are the steps from an empty database to the present schema, in order.
// They are never changed once released: a new step is appended.
var migrations = []string{`
CREATE TABLE settings (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE sandboxes (
	id     TEXT PRIMARY KEY,
	killed BIGINT NOT NULL DEFAULT 0, -- Unix nanoseconds; 0 while it lives
	record TEXT NOT NULL              -- JSON, of the session layer
);
CREATE TABLE logs (
	sandbox TEXT NOT NULL,
	time    BIGINT NOT NULL, -- Unix nanoseconds
	level   TEXT NOT NULL,
	message TEXT NOT NULL,
	fields  TEXT NOT NULL    -- JSON object
);
CREATE INDEX logs_by_sandbox ON logs (sandbox, time);
CREATE TABLE keys (
	id      TEXT PRIMARY KEY,
	name    TEXT NOT NULL,
	hash    TEXT NOT NULL UNIQUE, -- SHA-256 of the key, hex
	prefix  TEXT NOT NULL,        -- what is shown of it
	created BIGINT NOT NULL,
	revoked BIGINT NOT NULL DEFAULT 0
);
CREATE TABLE leases (
	base    BIGINT PRIMARY KEY, -- first host id of the range
	sandbox TEXT NOT NULL UNIQUE
);
CREATE TABLE outbox ( -- audit records of processes that do not own the log
	id     INTEGER PRIMARY KEY,
	record TEXT NOT NULL
);
`, `
ALTER TABLE sandboxes ADD COLUMN request TEXT; -- NULL where the create had no idempotency key
CREATE UNIQUE INDEX sandboxes_by_request ON sandboxes (request);
`, `
CREATE TABLE snapshots (
	build  TEXT PRIMARY KEY,
	record TEXT NOT NULL -- JSON, of the session layer
);
`, `
CREATE TABLE holds (
	sandbox TEXT PRIMARY KEY,
	reason  TEXT NOT NULL,
	user    TEXT NOT NULL, -- of the host, who set it
	since   BIGINT NOT NULL
);
`, `
ALTER TABLE keys ADD COLUMN erase BIGINT NOT NULL DEFAULT 0; -- 1: it may erase what the audit log has of a sandbox
`, `
CREATE TABLE teams (
	name    TEXT PRIMARY KEY, -- '' is the server's own
	id      TEXT NOT NULL UNIQUE,
	created BIGINT NOT NULL DEFAULT 0,
	limits  TEXT NOT NULL DEFAULT '{}' -- JSON
);
INSERT INTO teams (name, id) VALUES ('', '00000000-0000-4000-8000-000000000000');
ALTER TABLE keys ADD COLUMN team TEXT NOT NULL DEFAULT '';
`}

// schema returns how many migrations the database has seen.
func (db *DB) schema() (n int, err error) {
	err = db.write.QueryRow("PRAGMA user_version").Scan(&n)
	return n, err
}

// migrate brings the database to the present schema. A database that holds
// something is copied first.
func (db *DB) migrate(dir string) error {
	n, err := db.schema()
	if err != nil {
		return berm.Errorf(berm.Internal, "database: %w", err)
	}
	if n > len(migrations) {
		return newer("database", n, len(migrations))
	}
	if n == len(migrations) {
		return nil
	}
	if n > 0 {
		backup := filepath.Join(dir, fmt.Sprintf("berm.db.schema-%d", n))
		os.Remove(backup) // of an attempt that failed
		if _, err := db.write.Exec("VACUUM INTO ?", backup); err != nil {
			return berm.Errorf(berm.Internal, "backup of the database: %w", err)
		}
	}
	for ; n < len(migrations); n++ {
		err := db.tx(context.Background(), func(tx *sql.Tx) error {
			if _, err := tx.Exec(migrations[n]); err != nil {
				return err
			}
			_, err := tx.Exec(fmt.Sprintf("PRAGMA user_version = %d", n+1))
			return err
		})
		if err != nil {
			return berm.Errorf(berm.Internal, "database migration %d: %w", n+1, err)
		}
	}
	return nil
}

func (db *DB) tx(ctx context.Context, do func(*sql.Tx) error) error {
	tx, err := db.write.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	if err := do(tx); err != nil {
		return errors.Join(err, tx.Rollback())
	}
	return tx.Commit()
}

func (db *DB) exec(ctx context.Context, query string, args ...any) error {
	s, err := db.prepare(ctx, db.write, query)
	if err == nil {
		_, err = s.ExecContext(ctx, args...)
	}
	if err != nil {
		return berm.Errorf(berm.Internal, "database: %w", err)
	}
	return nil
}

// scanner is a row of a result.
type scanner interface{ Scan(...any) error }

// collect runs a query and reads every row with scan.
func collect[T any](ctx context.Context, db *DB, scan func(scanner) (T, error), query string, args ...any) (all []T, err error) {
	rows, err := db.read.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "database: %w", err)
	}
	for err == nil && rows.Next() {
		var v T
		v, err = scan(rows)
		all = append(all, v)
	}
	if err := errors.Join(err, rows.Err(), rows.Close()); err != nil {
		return nil, berm.Errorf(berm.Internal, "database: %w", err)
	}
	return all, nil
}

// Secret returns 32 random bytes that are made at the first call for name and stay
// the same from then on.
func (db *DB) Secret(ctx context.Context, name string) ([]byte, error) {
	fresh := make([]byte, 32)
	rand.Read(fresh)
	if err := db.exec(ctx, "INSERT INTO settings (name, value) VALUES (?, ?) ON CONFLICT DO NOTHING", "secret."+name, fresh); err != nil {
		return nil, err
	}
	var secret []byte
	if err := db.write.QueryRowContext(ctx, "SELECT value FROM settings WHERE name = ?", "secret."+name).Scan(&secret); err != nil {
		return nil, berm.Errorf(berm.Internal, "database: %w", err)
	}
	return secret, nil
}
