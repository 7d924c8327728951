package index

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/trail"
)

// intake takes records in, in one transaction.
type intake struct {
	tx       *sql.Tx
	source   trail.Source
	prepared map[string]*sql.Stmt
	of       map[berm.SandboxID]*tally // what is added to table sandboxes
}

// tally is what records add to what a sandbox has.
type tally struct {
	team  berm.Team
	known bool // the index has records of it
	last  int64
	bytes int64
}

func (x *Index) begin(ctx context.Context) (*intake, error) {
	tx, err := x.db.BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	return &intake{tx, x.source, map[string]*sql.Stmt{}, map[berm.SandboxID]*tally{}}, nil
}

// statement prepares a statement once.
func (b *intake) statement(text string) (*sql.Stmt, error) {
	if s := b.prepared[text]; s != nil {
		return s, nil
	}
	s, err := b.tx.Prepare(text)
	if err == nil {
		b.prepared[text] = s
	}
	return s, err
}

// exec does a statement, and returns how many rows it changed.
func (b *intake) exec(text string, args ...any) (int64, error) {
	s, err := b.statement(text)
	if err != nil {
		return 0, err
	}
	result, err := s.Exec(args...)
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

// commit ends the transaction, with the last record that was taken.
func (b *intake) commit(last uint64, hash string) error {
	err := b.settle()
	if err == nil {
		_, err = b.tx.Exec("UPDATE state SET last = ?, hash = ?", int64(last), hash)
	}
	if err != nil {
		return errors.Join(err, b.tx.Rollback())
	}
	return b.tx.Commit()
}

// take takes one record in, and forgets what it tells to be gone.
func (b *intake) take(line trail.Line) error {
	team, seq := line.Team, int64(line.Seq)
	if line.Sandbox != "" {
		var err error
		if team, err = b.count(line); err != nil {
			return err
		}
	}
	if _, err := b.exec("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", seq, string(line.Sandbox), string(team), line.Time.UnixNano(), string(line.Type), line.Actor.ID, line.Actor.Type, string(line.Outcome), line.Raw); err != nil {
		return err
	}
	n := namesOf(line, b.source)
	for _, of := range [...]struct {
		kind string
		list []string
	}{{"path", n.paths}, {"host", n.hosts}} {
		for _, s := range of.list {
			if _, err := b.exec("INSERT OR IGNORE INTO names VALUES (?, ?, ?)", of.kind, s, seq); err != nil {
				return err
			}
		}
	}
	switch line.Type {
	case audit.Removed:
		var record struct{ Data audit.Removal }
		if json.Unmarshal(line.Raw, &record) != nil {
			return nil // it is no record of a server's
		}
		if err := b.settle(); err != nil {
			return err
		}
		return forgetSpan(b.tx, record.Data)
	case audit.Erase:
		spans, err := trail.Erased(line)
		if err != nil {
			return nil // it is no record of a server's
		}
		if err := b.settle(); err != nil {
			return err
		}
		for _, s := range spans {
			if err := deleteSpan(b.tx, s); err != nil {
				return err
			}
		}
		return recount(b.tx, line.Sandbox)
	}
	return nil
}

// count counts a record for its sandbox, and says whose it is: what came before the sandbox was anybody's, and what
// tells no team, is its team's too.
func (b *intake) count(line trail.Line) (berm.Team, error) {
	t := b.of[line.Sandbox]
	if t == nil {
		t = &tally{}
		s, err := b.statement("SELECT team FROM sandboxes WHERE id = ?")
		if err != nil {
			return "", err
		}
		switch err := s.QueryRow(string(line.Sandbox)).Scan(&t.team); {
		case err == nil:
			t.known = true
		case !errors.Is(err, sql.ErrNoRows):
			return "", err
		}
		b.of[line.Sandbox] = t
	}
	if t.team == "" && line.Team != "" {
		t.team = line.Team
		if t.known {
			if _, err := b.exec("UPDATE records SET team = ? WHERE sandbox = ? AND team = ''", string(t.team), string(line.Sandbox)); err != nil {
				return "", err
			}
		}
	}
	t.known = true
	if trail.Erasable(line.Type) {
		t.last, t.bytes = line.Time.UnixNano(), t.bytes+int64(len(line.Raw))+1
		for _, blob := range line.Blobs {
			first, err := b.exec("INSERT OR IGNORE INTO contents VALUES (?, ?, ?, ?)", string(line.Sandbox), blob.SHA256, blob.Size, int64(line.Seq))
			if err == nil && first == 0 {
				_, err = b.exec("UPDATE contents SET seq = ? WHERE sandbox = ? AND hash = ?", int64(line.Seq), string(line.Sandbox), blob.SHA256)
			}
			if err != nil {
				return "", err
			}
			t.bytes += first * blob.Size
		}
	}
	if line.Team != "" {
		return line.Team, nil
	}
	return t.team, nil
}

// settle brings what was counted into the table.
func (b *intake) settle() error {
	for id, t := range b.of {
		if _, err := b.exec(`INSERT INTO sandboxes VALUES (?, ?, ?, ?)
			ON CONFLICT (id) DO UPDATE SET team = excluded.team, last = max(last, excluded.last), bytes = bytes + excluded.bytes`,
			string(id), string(t.team), t.last, t.bytes); err != nil {
			return err
		}
	}
	clear(b.of)
	return nil
}

// forgetSpan removes records of all sandboxes.
func forgetSpan(tx *sql.Tx, s audit.Removal) error {
	rows, err := tx.Query("SELECT DISTINCT sandbox FROM records WHERE seq BETWEEN ? AND ? AND sandbox <> ''", int64(s.From), int64(s.To))
	if err != nil {
		return err
	}
	defer func() { _ = rows.Close() }()
	var of []berm.SandboxID
	for rows.Next() {
		var id berm.SandboxID
		if err := rows.Scan(&id); err != nil {
			return err
		}
		of = append(of, id)
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return err
	}
	if err := deleteSpan(tx, s); err != nil {
		return err
	}
	for _, id := range of {
		if err := recount(tx, id); err != nil {
			return err
		}
	}
	return nil
}

func deleteSpan(tx *sql.Tx, s audit.Removal) error {
	from, to := int64(s.From), int64(s.To)
	_, err := tx.Exec("DELETE FROM names WHERE seq BETWEEN ? AND ?; DELETE FROM records WHERE seq BETWEEN ? AND ?", from, to, from, to)
	return err
}

// recount counts what is left of a sandbox.
func recount(tx *sql.Tx, id berm.SandboxID) error {
	if _, err := tx.Exec("DELETE FROM contents WHERE sandbox = ? AND seq NOT IN (SELECT seq FROM records WHERE sandbox = ?)", string(id), string(id)); err != nil {
		return err
	}
	var records int
	var bytes int64
	rows, err := tx.Query("SELECT type, count(*), sum(length(line) + 1) FROM records WHERE sandbox = ? GROUP BY type", string(id))
	if err != nil {
		return err
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var t audit.Type
		var count int
		var size int64
		if err := rows.Scan(&t, &count, &size); err != nil {
			return err
		}
		if records += count; trail.Erasable(t) {
			bytes += size
		}
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return err
	}
	if records == 0 {
		_, err := tx.Exec("DELETE FROM sandboxes WHERE id = ?", string(id))
		return err
	}
	_, err = tx.Exec("UPDATE sandboxes SET bytes = ? + (SELECT coalesce(sum(size), 0) FROM contents WHERE sandbox = id) WHERE id = ?", bytes, string(id))
	return err
}
