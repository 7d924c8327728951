// Package vault keeps secrets in SQLite, encrypted with a key that is kept elsewhere.
package vault

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/berm-sandbox/berm"
)

// Secret is what is told about a secret. Its value is not among it.
type Secret struct {
	ID       string            `json:"secretID"`
	Name     string            `json:"name"`
	Version  int64             `json:"currentVersion"`
	Metadata map[string]string `json:"metadata"`
	Created  time.Time         `json:"createdAt"`
	Updated  time.Time         `json:"updatedAt"`
}

// The limits of E2B's API.
const (
	MaxName          = 128
	MaxValue         = 64 << 10
	MaxMetadata      = 32
	maxMetadataKey   = 128
	maxMetadataValue = 1024
	maxMetadataAll   = 8 << 10
)

// idPrefix begins the ids of secrets, and no name.
const idPrefix = "sec_"

// Vault is an open store of secrets. Each is of a team, and there is none such for the others. Its
// methods are safe for concurrent use.
type Vault struct {
	lock *os.File
	db   *sql.DB
	keys *keyring
}

// migrations are the steps from an empty database to the present schema, in order. They
// are never changed once released: a new step is appended.
var migrations = []string{`
CREATE TABLE secrets (
	id       TEXT PRIMARY KEY,
	name     TEXT NOT NULL UNIQUE,
	version  BIGINT NOT NULL,
	metadata TEXT NOT NULL,   -- JSON object
	created  BIGINT NOT NULL, -- Unix nanoseconds
	updated  BIGINT NOT NULL,
	key      TEXT NOT NULL,   -- id of the key that the value is encrypted with
	value    BLOB NOT NULL    -- nonce and ciphertext, of the present version alone
);
`, `
CREATE TABLE notes (
	id    TEXT PRIMARY KEY,
	key   TEXT NOT NULL, -- id of the key that the value is encrypted with
	value BLOB NOT NULL  -- nonce and ciphertext
);
`, `
CREATE TABLE owned (
	id       TEXT PRIMARY KEY,
	team     TEXT NOT NULL,
	name     TEXT NOT NULL,
	version  BIGINT NOT NULL,
	metadata TEXT NOT NULL,   -- JSON object
	created  BIGINT NOT NULL, -- Unix nanoseconds
	updated  BIGINT NOT NULL,
	key      TEXT NOT NULL,   -- id of the key that the value is encrypted with
	value    BLOB NOT NULL,   -- nonce and ciphertext, of the present version alone
	UNIQUE (team, name)
);
INSERT INTO owned (id, team, name, version, metadata, created, updated, key, value)
	SELECT id, '', name, version, metadata, created, updated, key, value FROM secrets;
DROP TABLE secrets;
ALTER TABLE owned RENAME TO secrets;
`}

// Open opens the vault in dir, makes it when it is missing, and holds it until Close. The key is in the file
// vault.key beside it, unless the service manager hands one over: $CREDENTIALS_DIRECTORY
// (systemd.exec) with a file berm-vault-key. Kinds: Conflict when another process holds it; Denied when others can read the key;
// Unsupported when a newer Berm wrote the vault.
func Open(ctx context.Context, dir string) (*Vault, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, berm.Errorf(berm.Internal, "secrets: %w", err)
	}
	// A process that does not know of a new key would encrypt with one that is forgotten.
	lock, err := os.OpenFile(filepath.Join(dir, "vault.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "secrets: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return nil, berm.Errorf(berm.Conflict, "the secrets in %s are in use by another process", dir).
			WithHint("ask the process that holds them")
	}
	v, err := openLocked(ctx, dir)
	if err != nil {
		lock.Close()
		return nil, err
	}
	v.lock = lock
	return v, nil
}

func openLocked(ctx context.Context, dir string) (*Vault, error) {
	file := filepath.Join(dir, "vault.db")
	// SQLite would make a file that the umask decides about.
	f, err := os.OpenFile(file, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "secrets: %w", err)
	}
	f.Close()
	// A query string cannot be part of a path with '?' or '%' in it.
	path := strings.NewReplacer("%", "%25", "?", "%3f", "#", "%23").Replace(file)
	db, err := sql.Open("sqlite", "file:"+path+"?_txlock=immediate&_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_pragma=secure_delete(1)")
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "secrets: %w", err)
	}
	db.SetMaxOpenConns(1)
	v := &Vault{db: db}
	if err := v.migrate(ctx); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	used, err := v.usedKeys(ctx)
	if err == nil {
		v.keys, err = openKeys(dir, used)
	}
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return v, nil
}

// Close closes the vault and wipes its keys.
func (v *Vault) Close() error {
	v.keys.wipe()
	return errors.Join(v.db.Close(), v.lock.Close())
}

func (v *Vault) migrate(ctx context.Context) error {
	return v.tx(ctx, func(tx *sql.Tx) error {
		var n int
		if err := tx.QueryRowContext(ctx, "PRAGMA user_version").Scan(&n); err != nil {
			return err
		}
		if n > len(migrations) {
			return berm.Errorf(berm.Unsupported, "the vault of secrets has schema %d, this berm knows up to %d", n, len(migrations)).
				WithHint("use the newer berm that wrote it")
		}
		for ; n < len(migrations); n++ {
			if _, err := tx.ExecContext(ctx, migrations[n]); err != nil {
				return err
			}
		}
		_, err := tx.ExecContext(ctx, fmt.Sprintf("PRAGMA user_version = %d", n))
		return err
	})
}

func (v *Vault) usedKeys(ctx context.Context) ([]string, error) {
	return v.ids(ctx, "SELECT key FROM secrets UNION SELECT key FROM notes")
}

func (v *Vault) ids(ctx context.Context, query string) (ids []string, err error) {
	rows, err := v.db.QueryContext(ctx, query)
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "secrets: %w", err)
	}
	for rows.Next() {
		var id string
		err = errors.Join(err, rows.Scan(&id))
		ids = append(ids, id)
	}
	if err := errors.Join(err, rows.Err(), rows.Close()); err != nil {
		return nil, berm.Errorf(berm.Internal, "secrets: %w", err)
	}
	return ids, nil
}

// tx returns do's error as it is when it has a kind.
func (v *Vault) tx(ctx context.Context, do func(*sql.Tx) error) error {
	tx, err := v.db.BeginTx(ctx, nil)
	if err == nil {
		if err = do(tx); err != nil {
			tx.Rollback() //nolint:errcheck // the first error counts
		} else {
			err = tx.Commit()
		}
	}
	var ours *berm.Error
	if err == nil || errors.As(err, &ours) {
		return err
	}
	return berm.Errorf(berm.Internal, "secrets: %w", err)
}

// Create keeps a secret of a team. The name is kept in lower case. Kinds: Invalid, AlreadyExists.
func (v *Vault) Create(ctx context.Context, team berm.Team, name string, value []byte, metadata map[string]string) (Secret, error) {
	name = strings.ToLower(name)
	if err := checkName(name); err != nil {
		return Secret{}, err
	}
	text, err := check(value, metadata)
	if err != nil {
		return Secret{}, err
	}
	random := make([]byte, 12)
	rand.Read(random)
	now := time.Now().UTC()
	s := Secret{ID: idPrefix + hex.EncodeToString(random), Name: name, Version: 1, Metadata: present(metadata), Created: now, Updated: now}
	key, sealed, err := v.keys.seal(team, s.ID, s.Version, value)
	if err != nil {
		return Secret{}, err
	}
	err = v.tx(ctx, func(tx *sql.Tx) error {
		done, err := tx.ExecContext(ctx, `INSERT INTO secrets (id, team, name, version, metadata, created, updated, key, value)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (team, name) DO NOTHING`,
			s.ID, string(team), s.Name, s.Version, text, now.UnixNano(), now.UnixNano(), key, sealed)
		if err != nil {
			return err
		}
		if n, err := done.RowsAffected(); err != nil || n == 0 {
			return berm.Errorf(berm.AlreadyExists, "there is a secret %q already", name)
		}
		return nil
	})
	if err != nil {
		return Secret{}, err
	}
	return s, nil
}

// Update replaces a secret's value, and its metadata unless that is nil. The old value is
// gone. Kinds: Invalid, NotFound.
func (v *Vault) Update(ctx context.Context, team berm.Team, idOrName string, value []byte, metadata map[string]string) (s Secret, err error) {
	text, err := check(value, metadata)
	if err != nil {
		return Secret{}, err
	}
	err = v.tx(ctx, func(tx *sql.Tx) error {
		if s, err = get(ctx, tx, team, idOrName); err != nil {
			return err
		}
		s.Version++
		s.Updated = time.Now().UTC()
		key, sealed, err := v.keys.seal(team, s.ID, s.Version, value)
		if err != nil {
			return err
		}
		if metadata != nil {
			s.Metadata = metadata
			if _, err := tx.ExecContext(ctx, "UPDATE secrets SET metadata = ? WHERE id = ?", text, s.ID); err != nil {
				return err
			}
		}
		_, err = tx.ExecContext(ctx, "UPDATE secrets SET version = ?, updated = ?, key = ?, value = ? WHERE id = ?",
			s.Version, s.Updated.UnixNano(), key, sealed, s.ID)
		return err
	})
	return s, err
}

// Delete forgets a secret. NotFound when there is none.
func (v *Vault) Delete(ctx context.Context, team berm.Team, idOrName string) error {
	return v.tx(ctx, func(tx *sql.Tx) error {
		s, err := get(ctx, tx, team, idOrName)
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, "DELETE FROM secrets WHERE id = ?", s.ID)
		return err
	})
}

// Get tells about a secret. NotFound when there is none.
func (v *Vault) Get(ctx context.Context, team berm.Team, idOrName string) (s Secret, err error) {
	err = v.tx(ctx, func(tx *sql.Tx) error {
		s, err = get(ctx, tx, team, idOrName)
		return err
	})
	return s, err
}

// List tells about up to limit secrets of a team in the order of their names, beginning after one.
func (v *Vault) List(ctx context.Context, team berm.Team, after string, limit int) ([]Secret, error) {
	all := []Secret{} // [] in JSON
	rows, err := v.db.QueryContext(ctx, "SELECT "+columns+" FROM secrets WHERE team = ? AND name > ? ORDER BY name LIMIT ?", string(team), after, limit)
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "secrets: %w", err)
	}
	for err == nil && rows.Next() {
		var s Secret
		if s, err = scan(rows); err == nil {
			all = append(all, s)
		}
	}
	if err := errors.Join(err, rows.Err(), rows.Close()); err != nil {
		return nil, berm.Errorf(berm.Internal, "secrets: %w", err)
	}
	return all, nil
}

// Value returns the present value of a secret; the caller wipes it. NotFound when there is
// none; Internal when it was changed by whoever has no key.
func (v *Vault) Value(ctx context.Context, team berm.Team, idOrName string) ([]byte, error) {
	var key string
	var sealed []byte
	var s Secret
	err := v.tx(ctx, func(tx *sql.Tx) (err error) {
		if s, err = get(ctx, tx, team, idOrName); err != nil {
			return err
		}
		return tx.QueryRowContext(ctx, "SELECT key, value FROM secrets WHERE id = ?", s.ID).Scan(&key, &sealed)
	})
	if err != nil {
		return nil, err
	}
	if !strings.HasPrefix(s.ID, idPrefix) {
		return nil, corrupt(s.ID) // a note that was put here would open
	}
	return v.keys.open(team, s.ID, s.Version, key, sealed)
}

// Rotate makes a new key, encrypts all values with it and forgets the old ones. When it
// is interrupted, both keys stay, and the next Rotate ends what it began. Unsupported when
// the key comes from the service manager, which has to hand over a file with a new line
// first.
func (v *Vault) Rotate(ctx context.Context) error {
	if err := v.keys.add(); err != nil {
		return err
	}
	err := v.tx(ctx, func(tx *sql.Tx) error {
		return errors.Join(
			v.reseal(ctx, tx, "SELECT team, id, version, key, value FROM secrets", "UPDATE secrets SET key = ?, value = ? WHERE id = ?"),
			v.reseal(ctx, tx, "SELECT '', id, 0, key, value FROM notes", "UPDATE notes SET key = ?, value = ? WHERE id = ?"),
		)
	})
	if err != nil {
		return err
	}
	// What the old key encrypted shall not stay in the log of writes.
	if _, err := v.db.ExecContext(ctx, "PRAGMA wal_checkpoint(TRUNCATE)"); err != nil {
		return berm.Errorf(berm.Internal, "secrets: %w", err)
	}
	return v.keys.forget()
}

// reseal encrypts the values of a table with the last key.
func (v *Vault) reseal(ctx context.Context, tx *sql.Tx, read, write string) error {
	rows, err := tx.QueryContext(ctx, read)
	if err != nil {
		return err
	}
	type row struct {
		team    berm.Team
		id, key string
		version int64
		value   []byte
	}
	var all []row
	for rows.Next() {
		var r row
		err = errors.Join(err, rows.Scan(&r.team, &r.id, &r.version, &r.key, &r.value))
		all = append(all, r)
	}
	if err := errors.Join(err, rows.Err(), rows.Close()); err != nil {
		return err
	}
	for _, r := range all {
		value, err := v.keys.open(r.team, r.id, r.version, r.key, r.value)
		if err != nil {
			return err
		}
		key, sealed, err := v.keys.seal(r.team, r.id, r.version, value)
		clear(value)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, write, key, sealed, r.id); err != nil {
			return err
		}
	}
	return nil
}

// SetNote keeps something that is as secret as a secret and has no name, in the place of what
// has that id; nothing of it is kept when value is empty. An id is none of a secret's.
func (v *Vault) SetNote(ctx context.Context, id string, value []byte) error {
	if strings.HasPrefix(id, idPrefix) {
		return berm.Errorf(berm.Invalid, "%q is the id of a secret", id)
	}
	if len(value) == 0 {
		return v.tx(ctx, func(tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, "DELETE FROM notes WHERE id = ?", id)
			return err
		})
	}
	key, sealed, err := v.keys.seal("", id, 0, value)
	if err != nil {
		return err
	}
	return v.tx(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "INSERT INTO notes (id, key, value) VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET key = excluded.key, value = excluded.value", id, key, sealed)
		return err
	})
}

// Note returns what SetNote kept, nil for nothing; the caller wipes it.
func (v *Vault) Note(ctx context.Context, id string) ([]byte, error) {
	var key string
	var sealed []byte
	err := v.tx(ctx, func(tx *sql.Tx) error {
		err := tx.QueryRowContext(ctx, "SELECT key, value FROM notes WHERE id = ?", id).Scan(&key, &sealed)
		if errors.Is(err, sql.ErrNoRows) {
			return nil
		}
		return err
	})
	if err != nil || sealed == nil {
		return nil, err
	}
	return v.keys.open("", id, 0, key, sealed)
}

// Notes are the ids of all that SetNote kept.
func (v *Vault) Notes(ctx context.Context) (ids []string, err error) {
	return v.ids(ctx, "SELECT id FROM notes")
}

const columns = "id, name, version, metadata, created, updated"

func get(ctx context.Context, tx *sql.Tx, team berm.Team, idOrName string) (Secret, error) {
	column := "name"
	if idOrName = strings.ToLower(idOrName); strings.HasPrefix(idOrName, idPrefix) {
		column = "id"
	}
	s, err := scan(tx.QueryRowContext(ctx, "SELECT "+columns+" FROM secrets WHERE team = ? AND "+column+" = ?", string(team), idOrName))
	if errors.Is(err, sql.ErrNoRows) {
		if checkName(idOrName) != nil && column == "name" {
			// It may be a secret that somebody wrote in the wrong place.
			return s, berm.Errorf(berm.NotFound, "there is no secret of that name")
		}
		return s, berm.Errorf(berm.NotFound, "there is no secret %q", idOrName)
	}
	return s, err
}

func scan(row interface{ Scan(...any) error }) (s Secret, err error) {
	var metadata []byte
	var created, updated int64
	if err = row.Scan(&s.ID, &s.Name, &s.Version, &metadata, &created, &updated); err == nil {
		err = json.Unmarshal(metadata, &s.Metadata)
	}
	s.Created, s.Updated = time.Unix(0, created).UTC(), time.Unix(0, updated).UTC()
	return s, err
}

// checkName takes a name in lower case.
func checkName(name string) error {
	switch {
	case name == "" || len(name) > MaxName || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789_-") != "":
		return berm.Errorf(berm.Invalid, "a secret's name is 1 to %d of letters, digits, _ and -", MaxName)
	case strings.HasPrefix(name, idPrefix):
		return berm.Errorf(berm.Invalid, "a secret's name does not begin with %s: ids do", idPrefix)
	}
	return nil
}

// check returns the metadata as it is stored.
func check(value []byte, metadata map[string]string) (string, error) {
	if len(value) == 0 || len(value) > MaxValue {
		return "", berm.Errorf(berm.Invalid, "a secret's value has 1 to %d bytes", MaxValue)
	}
	all := 0
	for k, v := range metadata {
		if k == "" || len(k) > maxMetadataKey || len(v) > maxMetadataValue {
			return "", berm.Errorf(berm.Invalid, "a key of a secret's metadata has 1 to %d bytes, a value at most %d", maxMetadataKey, maxMetadataValue)
		}
		all += len(k) + len(v)
	}
	if len(metadata) > MaxMetadata || all > maxMetadataAll {
		return "", berm.Errorf(berm.Invalid, "a secret's metadata has at most %d entries of %d bytes together", MaxMetadata, maxMetadataAll)
	}
	text, err := json.Marshal(present(metadata))
	if err != nil {
		return "", berm.Errorf(berm.Invalid, "a secret's metadata: %w", err)
	}
	return string(text), nil
}

// present makes {} of nothing.
func present(metadata map[string]string) map[string]string {
	if metadata == nil {
		return map[string]string{}
	}
	return metadata
}
