package index

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"iter"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/trail"
)

// version is that of the schema: a file of another one is made anew.
const version = 3

// Times are nanoseconds since 1970.
const schema = `
CREATE TABLE records (
	seq     INTEGER PRIMARY KEY,
	sandbox TEXT NOT NULL,
	team    TEXT NOT NULL,
	time    INTEGER NOT NULL,
	type    TEXT NOT NULL,
	actor   TEXT NOT NULL,
	kind    TEXT NOT NULL, -- of the actor
	outcome TEXT NOT NULL,
	line    BLOB NOT NULL
);
CREATE INDEX by_sandbox ON records (sandbox, seq);
CREATE INDEX by_team ON records (team, seq) WHERE team <> '';
CREATE INDEX by_type ON records (type, seq);
CREATE INDEX by_actor ON records (actor, seq);
CREATE INDEX by_time ON records (time);
CREATE INDEX by_outcome ON records (outcome, seq);
CREATE TABLE names (
	kind TEXT NOT NULL, -- path or host
	name TEXT NOT NULL,
	seq  INTEGER NOT NULL,
	PRIMARY KEY (kind, name, seq)
) WITHOUT ROWID;
CREATE INDEX names_by_seq ON names (seq);
CREATE TABLE sandboxes (
	id    TEXT PRIMARY KEY,
	team  TEXT NOT NULL,
	last  INTEGER NOT NULL, -- time of its last record
	bytes INTEGER NOT NULL  -- of what an erasure takes: records and contents; 0 when there is nothing
) WITHOUT ROWID;
CREATE INDEX sandboxes_by_team ON sandboxes (team, last);
CREATE TABLE contents (
	sandbox TEXT NOT NULL,
	hash    TEXT NOT NULL,
	size    INTEGER NOT NULL,
	seq     INTEGER NOT NULL, -- of the last record of the sandbox that names it
	PRIMARY KEY (sandbox, hash)
) WITHOUT ROWID;
CREATE TABLE state (one INTEGER PRIMARY KEY CHECK (one = 1), last INTEGER NOT NULL, hash TEXT NOT NULL);
INSERT INTO state VALUES (1, 0, '');
`

// Index is a cache over a log. Its methods are safe for concurrent use.
type Index struct {
	path   string
	source trail.Source

	mu sync.Mutex
	db *sql.DB
}

// Open makes or opens the file of an index. One that cannot be used is made anew: it holds
// nothing that the log does not.
func Open(path string, source trail.Source) (*Index, error) {
	x := &Index{path: path, source: source}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, berm.Errorf(berm.KindOf(err), "index of the audit log: %w", err)
	}
	err := x.open()
	if err != nil {
		err = x.renew()
	}
	if err != nil {
		return nil, err
	}
	return x, nil
}

func (x *Index) open() error {
	// SQLite would make it readable by others.
	f, err := os.OpenFile(x.path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return berm.Errorf(berm.Unavailable, "index of the audit log: %w", err)
	}
	_ = f.Close()
	escaped := strings.NewReplacer("%", "%25", "?", "%3f", "#", "%23").Replace(x.path)
	// It is made again when a crash of the machine spoils it.
	x.db, err = sql.Open("sqlite", "file:"+escaped+"?_pragma=busy_timeout(10000)&_pragma=journal_mode(WAL)&_pragma=synchronous(OFF)&_pragma=secure_delete(1)&_txlock=immediate")
	if err != nil {
		return failed(err)
	}
	x.db.SetMaxOpenConns(1)
	var n int
	if err := x.db.QueryRow("PRAGMA user_version").Scan(&n); err != nil {
		return failed(errors.Join(err, x.db.Close()))
	}
	if n == version {
		return nil
	}
	if n != 0 {
		return failed(errors.Join(errors.New("it is of another version"), x.db.Close()))
	}
	tx, err := x.db.Begin()
	if err == nil {
		_, err = tx.Exec(schema + "PRAGMA user_version = " + strconv.Itoa(version))
		if err == nil {
			err = tx.Commit()
		} else {
			err = errors.Join(err, tx.Rollback())
		}
	}
	if err != nil {
		return failed(errors.Join(err, x.db.Close()))
	}
	return nil
}

// renew begins with an empty file.
func (x *Index) renew() error {
	if x.db != nil {
		_ = x.db.Close()
	}
	for _, end := range []string{"", "-wal", "-shm"} {
		_ = os.Remove(x.path + end)
	}
	return x.open()
}

func failed(err error) error {
	return berm.Errorf(berm.Internal, "index of the audit log: %w", err)
}

// Close closes the index.
func (x *Index) Close() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.db.Close()
}

// Update takes in what came to the log.
func (x *Index) Update(ctx context.Context) error {
	return x.fresh(ctx, func() error { return nil })
}

// Found is a record that a query found.
type Found struct {
	Seq  uint64
	Line json.RawMessage
}

// Query takes in what came to the log and returns the records that a query finds, in order.
func (x *Index) Query(ctx context.Context, q Query) (found []Found, err error) {
	err = x.fresh(ctx, func() error {
		found = nil
		text, args := q.sql()
		rows, err := x.db.QueryContext(ctx, text, args...)
		if err != nil {
			return err
		}
		defer func() { _ = rows.Close() }()
		for rows.Next() {
			var f Found
			if err := rows.Scan(&f.Seq, (*[]byte)(&f.Line)); err != nil {
				return err
			}
			found = append(found, f)
		}
		return rows.Err()
	})
	return found, err
}

// Names says whether a record of the sandbox kept content, which it names by its hash. A hash that is told and of which nothing was kept
// is not enough: whoever knows content could learn from it whether others' records have the same.
func (x *Index) Names(ctx context.Context, id berm.SandboxID, sha256 string) (found bool, err error) {
	err = x.fresh(ctx, func() error {
		return x.db.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM contents WHERE sandbox = ? AND hash = ?)", string(id), sha256).Scan(&found)
	})
	return found, err
}

// Of is what the log has of a sandbox, with what it lost of all.
func (x *Index) Of(ctx context.Context, id berm.SandboxID) trail.Source { return of{ctx, x, id} }

type of struct {
	ctx context.Context
	x   *Index
	id  berm.SandboxID
}

// page is how many records are read at once.
const page = 1000

// Records implements trail.Source.
func (o of) Records(from uint64) iter.Seq2[trail.Line, error] {
	return func(yield func(trail.Line, error) bool) {
		for q := (Query{Sandbox: o.id, Gaps: true, After: max(from, 1) - 1, Limit: page}); ; {
			found, err := o.x.Query(o.ctx, q)
			if err != nil {
				yield(trail.Line{}, err)
				return
			}
			for _, f := range found {
				line := trail.Line{Raw: f.Line}
				err := json.Unmarshal(f.Line, &line.Record)
				if !yield(line, err) {
					return
				}
				q.After = f.Seq
			}
			if len(found) < page {
				return
			}
		}
	}
}

// Blob implements trail.Source.
func (o of) Blob(sha256 string) (io.ReadCloser, error) { return o.x.Blob(sha256) }

// Blob opens content of the log by its hash. Kind NotFound.
func (x *Index) Blob(sha256 string) (io.ReadCloser, error) { return x.source.Blob(sha256) }

// fresh does something with an index of the whole log. A file that is spoilt is made anew.
func (x *Index) fresh(ctx context.Context, do func() error) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	err := x.update(ctx)
	if err == nil {
		err = do()
	}
	var log *unreadable
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.As(err, &log):
		return log.error // the index is not to blame
	}
	if err := x.renew(); err != nil {
		return err
	}
	if err = x.update(ctx); err == nil {
		err = do()
	}
	if err != nil {
		return failed(err)
	}
	return nil
}

// unreadable says that the log cannot be read, and so no question be answered.
type unreadable struct{ error }

// batch is how many records are taken in at once.
const batch = 5000

// update takes in what came to the log since, and forgets what the log did. If the log is not
// the one of before, all is read again.
func (x *Index) update(ctx context.Context) error {
	var last uint64
	var hash string
	if err := x.db.QueryRowContext(ctx, "SELECT last, hash FROM state").Scan(&last, &hash); err != nil {
		return err
	}
	var b *intake
	taken, first, erased := 0, true, false
	commit := func() error {
		if b == nil {
			return nil
		}
		err := b.commit(last, hash)
		b = nil
		return err
	}
	defer func() {
		if b != nil {
			_ = b.tx.Rollback()
		}
	}()
	for line, err := range x.source.Records(last) {
		if err != nil && line.Raw == nil {
			return &unreadable{err}
		}
		if err != nil {
			continue // what is no record is found by whoever verifies the log
		}
		if first && last > 0 && (line.Seq != last || lineHash(line.Raw) != hash) {
			break // first stays set: another log
		}
		if first && last > 0 {
			first = false
			continue
		}
		first = false
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if b == nil {
			if b, err = x.begin(ctx); err != nil {
				return err
			}
		}
		if err := b.take(line); err != nil {
			return err
		}
		erased = erased || line.Type == audit.Erase
		last, hash = line.Seq, lineHash(line.Raw)
		if taken++; taken%batch == 0 {
			if err := commit(); err != nil {
				return err
			}
		}
	}
	if first && last > 0 {
		if err := x.renew(); err != nil {
			return err
		}
		return x.update(ctx) // last is 0 now
	}
	if err := commit(); err != nil {
		return err
	}
	if erased { // what was written before must not stay in the journal
		if _, err := x.db.ExecContext(ctx, "PRAGMA wal_checkpoint(TRUNCATE)"); err != nil {
			return err
		}
	}
	return x.forget(ctx)
}

func lineHash(raw []byte) string {
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:])
}

// forget removes what is older than the first record of the log.
func (x *Index) forget(ctx context.Context) error {
	var oldest, first sql.NullInt64
	if err := x.db.QueryRowContext(ctx, "SELECT min(seq) FROM records").Scan(&oldest); err != nil || !oldest.Valid {
		return err
	}
	for line, err := range x.source.Records(0) {
		if err == nil {
			first = sql.NullInt64{Int64: int64(line.Seq), Valid: true}
			break
		}
	}
	if !first.Valid || first.Int64 <= oldest.Int64 {
		return nil
	}
	tx, err := x.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	if err := forgetSpan(tx, audit.Removal{To: uint64(first.Int64 - 1)}); err != nil {
		return errors.Join(err, tx.Rollback())
	}
	return tx.Commit()
}

// sql writes a query as SQLite takes it.
func (q Query) sql() (string, []any) {
	var where []string
	var args []any
	and := func(text string, values ...any) { where, args = append(where, text), append(args, values...) }
	and("seq > ?", int64(q.After))
	switch {
	case q.Sandbox != "" && q.Gaps:
		and("(sandbox = ? OR sandbox = '' AND type = ?)", string(q.Sandbox), string(audit.Gap))
	case q.Sandbox != "":
		and("sandbox = ?", string(q.Sandbox))
	}
	if q.Actor != "" {
		and("(actor = ? OR records.kind = ?)", q.Actor, q.Actor)
	}
	if len(q.Types) > 0 {
		var any []string
		for _, t := range q.Types {
			any = append(any, "type = ? OR type >= ? AND type < ?")
			args = append(args, t, t+".", t+"/") // '/' follows '.'
		}
		where = append(where, "("+strings.Join(any, " OR ")+")")
	}
	if !q.Since.IsZero() {
		and("time >= ?", q.Since.UnixNano())
	}
	if !q.Until.IsZero() {
		and("time <= ?", q.Until.UnixNano())
	}
	if q.Verdict != "" {
		and("outcome = ?", string(q.Verdict))
	}
	if q.Path != "" {
		key := pathKey(q.Path)
		and("seq IN (SELECT seq FROM names WHERE kind = 'path' AND (name = ? OR name >= ? AND name < ?))", key, key+"/", key+"0") // '0' follows '/'
	}
	if q.Host != "" {
		key := hostKey(q.Host)
		and("seq IN (SELECT seq FROM names WHERE kind = 'host' AND (name = ? OR name >= ? AND name < ?))", key, key+".", key+"/")
	}
	switch {
	case q.Team == nil:
	case q.Sandbox != "" && q.Gaps:
		and("(+team = ? OR sandbox = '')", string(*q.Team))
	case len(where) > 1: // + leaves its index, which has more than those of what else is asked
		and("+team = ?", string(*q.Team))
	case *q.Team == "":
		and("team = ''")
	default:
		and("team = ? AND team <> ''", string(*q.Team)) // by_team has no others
	}
	text := "SELECT seq, line FROM records WHERE " + strings.Join(where, " AND ") + " ORDER BY seq"
	if q.Limit > 0 {
		text += " LIMIT ?"
		args = append(args, q.Limit)
	}
	return text, args
}
