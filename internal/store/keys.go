package store

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"regexp"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
)

// Key is an API key as it is stored: its hash cannot be turned back into the key.
type Key struct {
	ID      string    `json:"id"`
	Name    string    `json:"name"`
	Team    berm.Team `json:"team,omitempty"` // "" is the server's own
	Prefix  string    `json:"prefix"`         // the first characters of the key
	Created time.Time `json:"created"`
	Revoked time.Time `json:"revoked,omitzero"`
	// Erase says that it may erase what the audit log has of a sandbox.
	Erase bool `json:"erase,omitempty"`
}

// keyShape is what E2B clients accept as an API key; old ones check it.
var keyShape = regexp.MustCompile(`^e2b_[0-9a-f]{40}$`)

const visiblePrefix = len("e2b_") + 6

// CreateKey makes an API key with the name, the team and the rights of key, and returns it; it cannot be
// shown again. NotFound when there is no such team.
func (db *DB) CreateKey(ctx context.Context, key Key) (Key, string, error) {
	if _, err := db.Team(ctx, key.Team); err != nil {
		return Key{}, "", err
	}
	random := make([]byte, 20)
	rand.Read(random)
	secret := "e2b_" + hex.EncodeToString(random)
	key, err := db.addKey(ctx, key, secret)
	return key, secret, err
}

// AddKey makes a key that the caller chose valid. Adding it again changes nothing.
// Invalid when it has not the shape of a key; Denied when it was revoked.
func (db *DB) AddKey(ctx context.Context, name, secret string) (Key, error) {
	if !keyShape.MatchString(secret) {
		return Key{}, berm.Errorf(berm.Invalid, "an API key is e2b_ and 40 hexadecimal digits in lower case")
	}
	key, err := db.key(ctx, db.write, "hash = ?", hashKey(secret))
	switch {
	case berm.KindOf(err) == berm.NotFound:
		return db.addKey(ctx, Key{Name: name}, secret)
	case err == nil && !key.Revoked.IsZero():
		return Key{}, berm.Errorf(berm.Denied, "API key %s… was revoked", key.Prefix)
	}
	return key, err
}

func (db *DB) addKey(ctx context.Context, key Key, secret string) (Key, error) {
	key.ID, key.Prefix, key.Created = newKeyID(), secret[:visiblePrefix], time.Now().UTC()
	err := db.tx(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, "INSERT INTO keys (id, name, hash, prefix, created, erase, team) VALUES (?, ?, ?, ?, ?, ?, ?)",
			key.ID, key.Name, hashKey(secret), key.Prefix, key.Created.UnixNano(), key.Erase, string(key.Team)); err != nil {
			return err
		}
		return outbox(ctx, tx, keyRecord(audit.KeyCreate, key))
	})
	if err != nil {
		return Key{}, berm.Errorf(berm.Internal, "database: %w", err)
	}
	return key, nil
}

// RevokeKey makes a key invalid at once. NotFound when there is no valid key of
// that id.
func (db *DB) RevokeKey(ctx context.Context, id string) (Key, error) {
	key, err := db.key(ctx, db.write, "id = ? AND revoked = 0", id)
	if err != nil {
		return Key{}, err
	}
	key.Revoked = time.Now().UTC()
	err = db.tx(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, "UPDATE keys SET revoked = ? WHERE id = ?", key.Revoked.UnixNano(), id); err != nil {
			return err
		}
		return outbox(ctx, tx, keyRecord(audit.KeyRevoke, key))
	})
	if err != nil {
		return Key{}, berm.Errorf(berm.Internal, "database: %w", err)
	}
	return key, nil
}

// Keys lists all keys, oldest first, revoked ones too.
func (db *DB) Keys(ctx context.Context) ([]Key, error) {
	keys, err := collect(ctx, db, scanKey, selectKey+" ORDER BY created")
	if keys == nil {
		keys = []Key{} // [] in JSON
	}
	return keys, err
}

// Authenticate returns the valid key that secret is. Denied when there is none. The
// lookup is by hash, so its time tells nothing about the key.
func (db *DB) Authenticate(ctx context.Context, secret string) (Key, error) {
	if len(secret) > 256 {
		return Key{}, berm.Errorf(berm.Denied, "Invalid API key")
	}
	key, err := db.key(ctx, db.read, "hash = ? AND revoked = 0", hashKey(secret))
	if berm.KindOf(err) == berm.NotFound {
		return Key{}, berm.Errorf(berm.Denied, "Invalid API key")
	}
	return key, err
}

func (db *DB) key(ctx context.Context, from *sql.DB, where string, arg any) (Key, error) {
	s, err := db.prepare(ctx, from, selectKey+" WHERE "+where)
	if err != nil {
		return Key{}, berm.Errorf(berm.Internal, "database: %w", err)
	}
	return scanKey(s.QueryRowContext(ctx, arg))
}

const selectKey = "SELECT id, name, prefix, created, revoked, erase, team FROM keys"

func scanKey(row scanner) (Key, error) {
	var key Key
	var created, revoked int64
	err := row.Scan(&key.ID, &key.Name, &key.Prefix, &created, &revoked, &key.Erase, &key.Team)
	if errors.Is(err, sql.ErrNoRows) {
		return Key{}, berm.Errorf(berm.NotFound, "no such API key")
	}
	if err != nil {
		return Key{}, berm.Errorf(berm.Internal, "database: %w", err)
	}
	key.Created, key.Revoked = moment(created), moment(revoked)
	return key, nil
}

func newKeyID() string {
	random := make([]byte, 8)
	rand.Read(random)
	return hex.EncodeToString(random)
}

func hashKey(secret string) string {
	sum := sha256.Sum256([]byte(secret))
	return hex.EncodeToString(sum[:])
}

// keyRecord tells that a key was changed.
func keyRecord(what audit.Type, key Key) audit.Record {
	data := map[string]any{"key": key.ID, "name": key.Name, "prefix": key.Prefix, "at": time.Now().UTC()}
	if key.Erase {
		data["erase"] = true
	}
	return audit.Record{Team: key.Team, Actor: audit.Actor{Type: "user"}, Type: what, Data: data}
}

// outbox leaves an audit record for the owner of the log: keys and holds may be changed by
// another process than the server. It is in the transaction of the change, so that
// neither is without the other.
func outbox(ctx context.Context, tx *sql.Tx, record audit.Record) error {
	record.Src, record.Trust, record.Outcome = "store", audit.TrustHost, audit.OK
	text, err := json.Marshal(record)
	if err == nil {
		_, err = tx.ExecContext(ctx, "INSERT INTO outbox (record) VALUES (?)", string(text))
	}
	return err
}

// DrainOutbox hands the waiting audit records to log, oldest first, and forgets
// each that was taken.
func (db *DB) DrainOutbox(ctx context.Context, log audit.Emitter) error {
	type entry struct {
		id     int64
		record audit.Record
	}
	waiting, err := collect(ctx, db, func(row scanner) (e entry, err error) {
		var record []byte
		if err = row.Scan(&e.id, &record); err == nil {
			err = json.Unmarshal(record, &e.record)
		}
		return e, err
	}, "SELECT id, record FROM outbox ORDER BY id")
	if err != nil {
		return err
	}
	for _, e := range waiting {
		if err := log.Emit(e.record); err != nil {
			return err
		}
		if err := db.exec(ctx, "DELETE FROM outbox WHERE id = ?", e.id); err != nil {
			return err
		}
	}
	return nil
}
