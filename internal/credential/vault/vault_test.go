package vault

import (
	"bytes"
	"crypto/sha256"
	"database/sql"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/crypto/chacha20poly1305"

	"github.com/berm-sandbox/berm"
)

const canary = "CANARY-secret-value-0123456789"

func open(t *testing.T, dir string) *Vault {
	t.Helper()
	v, err := Open(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { v.Close() })
	return v
}

func value(t *testing.T, v *Vault, name string) string {
	t.Helper()
	b, err := v.Value(t.Context(), "", name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestVault(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "a?b%20")
	ctx := t.Context()
	v := open(t, dir)
	s, err := v.Create(ctx, "", "API_Key", []byte(canary), map[string]string{"team": "x"})
	if err != nil || s.Name != "api_key" || s.Version != 1 || !strings.HasPrefix(s.ID, "sec_") {
		t.Fatal(s, err)
	}
	if _, err := v.Create(ctx, "", "api_key", []byte("other"), nil); berm.KindOf(err) != berm.AlreadyExists {
		t.Error("a second one of the name:", err)
	}
	for _, name := range []string{"api_key", "API_KEY", s.ID} {
		if got := value(t, v, name); got != canary {
			t.Errorf("%s is %q", name, got)
		}
	}
	updated, err := v.Update(ctx, "", s.ID, []byte(canary+"2"), nil)
	if err != nil || updated.Version != 2 || updated.Metadata["team"] != "x" || !updated.Created.Equal(s.Created) {
		t.Fatal(updated, err)
	}
	for _, name := range []string{"b", "c"} {
		if _, err := v.Create(ctx, "", name, []byte("v-"+name), nil); err != nil {
			t.Fatal(err)
		}
	}
	page, err := v.List(ctx, "", "api_key", 1)
	if err != nil || len(page) != 1 || page[0].Name != "b" || page[0].Metadata == nil {
		t.Error(page, err)
	}
	if shown := fmt.Sprintf("%+v", page) + fmt.Sprintf("%+v", updated); strings.Contains(shown, "CANARY") || strings.Contains(shown, "v-b") {
		t.Error("a value is told:", shown)
	}
	v.Close()
	if _, err := v.Create(ctx, "", "late", []byte("x"), nil); err == nil {
		t.Error("a closed vault takes secrets")
	}

	v = open(t, dir)
	if got := value(t, v, "api_key"); got != canary+"2" {
		t.Errorf("after opening again it is %q", got)
	}
	if err := v.Delete(ctx, "", "b"); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{v.Delete(ctx, "", "b"), second(v.Get(ctx, "", "b")), second(v.Value(ctx, "", "b")), second(v.Update(ctx, "", "b", []byte("x"), nil))} {
		if berm.KindOf(err) != berm.NotFound {
			t.Error("a deleted secret:", err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

func TestLimits(t *testing.T) {
	t.Parallel()
	v := open(t, t.TempDir())
	many := map[string]string{}
	for i := range MaxMetadata + 1 {
		many[fmt.Sprint(i)] = "x"
	}
	big := map[string]string{}
	for i := range 9 {
		big[fmt.Sprint(i)] = strings.Repeat("x", maxMetadataValue)
	}
	for name, err := range map[string]error{
		"no name":       second(v.Create(t.Context(), "", "", []byte("x"), nil)),
		"long name":     second(v.Create(t.Context(), "", strings.Repeat("n", 129), []byte("x"), nil)),
		"slash":         second(v.Create(t.Context(), "", "a/b", []byte("x"), nil)),
		"id":            second(v.Create(t.Context(), "", "SEC_a", []byte("x"), nil)),
		"no value":      second(v.Create(t.Context(), "", "a", nil, nil)),
		"long value":    second(v.Create(t.Context(), "", "a", make([]byte, MaxValue+1), nil)),
		"many entries":  second(v.Create(t.Context(), "", "a", []byte("x"), many)),
		"long entries":  second(v.Create(t.Context(), "", "a", []byte("x"), big)),
		"long key":      second(v.Create(t.Context(), "", "a", []byte("x"), map[string]string{strings.Repeat("k", 129): ""})),
		"long metadata": second(v.Create(t.Context(), "", "a", []byte("x"), map[string]string{"k": strings.Repeat("v", 1025)})),
	} {
		if berm.KindOf(err) != berm.Invalid || err == nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := v.Create(t.Context(), "", strings.Repeat("n", 128), make([]byte, MaxValue), nil); err != nil {
		t.Error("what is just within the limits:", err)
	}
}

// Nothing on disk but the key file gives a value away, not even with SQLite's leftovers.
func TestNothingInTheClear(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	v := open(t, dir)
	if _, err := v.Create(t.Context(), "", "a", []byte(canary), nil); err != nil {
		t.Fatal(err)
	}
	if err := v.SetNote(t.Context(), "i0note", []byte(canary)); err != nil {
		t.Fatal(err)
	}
	check := func() {
		t.Helper()
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			info, _ := e.Info()
			if info.Mode().Perm()&0o077 != 0 {
				t.Errorf("%s has mode %v", e.Name(), info.Mode())
			}
			b, err := os.ReadFile(filepath.Join(dir, e.Name()))
			if err != nil {
				t.Fatal(err)
			}
			if bytes.Contains(b, []byte("CANARY")) || bytes.Contains(b, []byte(base64.StdEncoding.EncodeToString([]byte(canary))[:20])) {
				t.Errorf("%s holds the value", e.Name())
			}
		}
	}
	check()
	if err := v.Rotate(t.Context()); err != nil {
		t.Fatal(err)
	}
	check()
}

func TestRotate(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	v := open(t, dir)
	for i := range 5 {
		if _, err := v.Create(t.Context(), "", fmt.Sprint("s", i), []byte(fmt.Sprint(canary, i)), nil); err != nil {
			t.Fatal(err)
		}
	}
	for _, note := range []string{canary, canary + "2"} {
		if err := v.SetNote(t.Context(), "i0note", []byte(note)); err != nil {
			t.Fatal(err)
		}
	}
	before, _ := os.ReadFile(filepath.Join(dir, keyFile))
	if err := v.Rotate(t.Context()); err != nil {
		t.Fatal(err)
	}
	after, _ := os.ReadFile(filepath.Join(dir, keyFile))
	if bytes.Equal(before, after) || bytes.Count(after, []byte("\n")) != 1 || bytes.Contains(after, bytes.TrimSpace(before)) {
		t.Error("the old key is still there")
	}
	v.Close()
	v = open(t, dir)
	for i := range 5 {
		if got := value(t, v, fmt.Sprint("s", i)); got != fmt.Sprint(canary, i) {
			t.Errorf("s%d is %q", i, got)
		}
	}
	if note, err := v.Note(t.Context(), "i0note"); string(note) != canary+"2" || err != nil {
		t.Errorf("the note is %q, %v", note, err)
	}
	if ids, err := v.Notes(t.Context()); len(ids) != 1 || err != nil {
		t.Errorf("notes %v, %v", ids, err)
	}
	if err := v.SetNote(t.Context(), "i0note", nil); err != nil {
		t.Fatal(err)
	}
	if note, err := v.Note(t.Context(), "i0note"); note != nil || err != nil {
		t.Errorf("a note that was taken away is %q, %v", note, err)
	}
	v.Close()

	// With the old key nothing opens any more.
	if err := os.WriteFile(filepath.Join(dir, keyFile), before, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), dir); berm.KindOf(err) != berm.NotFound {
		t.Error("with the old key:", err)
	}
}

// A rotation that stopped after the new key was written, or after values were encrypted
// with it, is ended by the next one.
func TestInterruptedRotation(t *testing.T) {
	t.Parallel()
	for _, encrypted := range []bool{false, true} {
		dir := t.TempDir()
		v := open(t, dir)
		for _, name := range []string{"a", "b"} {
			if _, err := v.Create(t.Context(), "", name, []byte(canary+name), nil); err != nil {
				t.Fatal(err)
			}
		}
		if err := v.keys.add(); err != nil {
			t.Fatal(err)
		}
		if encrypted {
			if _, err := v.Update(t.Context(), "", "a", []byte(canary+"a"), nil); err != nil {
				t.Fatal(err)
			}
		}
		v.Close()
		v = open(t, dir)
		if value(t, v, "a") != canary+"a" || value(t, v, "b") != canary+"b" {
			t.Error("a value is lost")
		}
		if err := v.Rotate(t.Context()); err != nil {
			t.Fatal(err)
		}
		if len(v.keys.keys) != 1 || value(t, v, "a") != canary+"a" || value(t, v, "b") != canary+"b" {
			t.Error("the rotation was not ended")
		}
	}
}

// Whoever can write the database, but has no key, can neither change a value nor give one
// secret the value of another or of an older version.
func TestTampering(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]string{
		"swapped": "UPDATE secrets SET value = (SELECT value FROM secrets WHERE name = 'b') WHERE name = 'a'",
		"version": "UPDATE secrets SET version = version + 1 WHERE name = 'a'",
		"bit":     "UPDATE secrets SET value = substr(value, 1, length(value) - 1) || x'00' WHERE name = 'a'",
		"short":   "UPDATE secrets SET value = x'00' WHERE name = 'a'",
		"key":     "UPDATE secrets SET key = 'other' WHERE name = 'a'",
		"team":    "UPDATE secrets SET team = 'blue' WHERE name = 'a'",
		"ours":    "UPDATE secrets SET team = '' WHERE name = 'theirs'",
		// The bytes that bind a value, cut into id, version and team at another place.
		"cut":  "UPDATE secrets SET team = '', id = CAST(CAST(id AS BLOB) || x'000000' AS TEXT), version = (version << 24) | 0x726564 WHERE name = 'theirs'",
		"note": "UPDATE secrets SET id = 'i0note', version = 0, key = (SELECT key FROM notes), value = (SELECT value FROM notes) WHERE name = 'a'",
	} {
		v := open(t, t.TempDir())
		for _, name := range []string{"a", "b"} {
			if _, err := v.Create(t.Context(), "", name, []byte(canary+name+"\x01"), nil); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := v.Create(t.Context(), "red", "theirs", []byte(canary), nil); err != nil {
			t.Fatal(err)
		}
		if err := v.SetNote(t.Context(), "i0note", []byte(canary)); err != nil {
			t.Fatal(err)
		}
		if done, err := v.db.Exec(change); err != nil {
			t.Fatal(name, err)
		} else if n, _ := done.RowsAffected(); n != 1 {
			t.Fatal(name, "changes nothing")
		}
		opened := 0
		for _, team := range []berm.Team{"", "red", "blue"} {
			for _, secret := range []string{"a", "theirs"} {
				got, err := v.Value(t.Context(), team, secret)
				switch {
				case err == nil && (team == "" && secret == "a" || team == "red" && secret == "theirs"):
					opened++
				case err == nil || got != nil || strings.Contains(err.Error(), "CANARY"):
					t.Errorf("%s: %s of %s is %q %v", name, secret, team, got, err)
				}
			}
		}
		if opened != 1 {
			t.Errorf("%s: %d of two secrets open, and one was changed", name, opened)
		}
	}
}

// A team has its own secrets, whatever the others call theirs.
func TestTeams(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	v := open(t, t.TempDir())
	ids := map[berm.Team]string{}
	for _, team := range []berm.Team{"", "blue", "red"} {
		s, err := v.Create(ctx, team, "Key", []byte("of "+team), nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := v.Create(ctx, team, "key", []byte("x"), nil); berm.KindOf(err) != berm.AlreadyExists {
			t.Errorf("a second one of %s: %v", team, err)
		}
		ids[team] = s.ID
	}
	if _, err := v.Create(ctx, "red", "only", []byte("x"), nil); err != nil {
		t.Fatal(err)
	}
	for team, id := range ids {
		for _, other := range []berm.Team{"", "blue", "green"} {
			if other == team {
				continue
			}
			for _, name := range []string{id, "only"} {
				unknown := second(v.Get(ctx, other, "sec_unknown"))
				for _, err := range []error{
					v.Delete(ctx, other, name), second(v.Get(ctx, other, name)), second(v.Value(ctx, other, name)), second(v.Update(ctx, other, name, []byte("x"), nil)),
				} {
					if berm.KindOf(err) != berm.NotFound || strings.ReplaceAll(err.Error(), name, "") != strings.ReplaceAll(unknown.Error(), "sec_unknown", "") {
						t.Errorf("%s of %s for %s: %v", name, team, other, err)
					}
				}
			}
		}
	}
	if _, err := v.Update(ctx, "blue", "key", []byte("another of blue"), nil); err != nil {
		t.Fatal(err)
	}
	if err := v.Delete(ctx, "red", "KEY"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		for team, want := range map[berm.Team]string{"": "key: of ", "blue": "key: another of blue", "red": "only: x", "green": ""} {
			all, err := v.List(ctx, team, "", 10)
			got := ""
			for _, s := range all {
				value, err := v.Value(ctx, team, s.ID)
				if err != nil {
					t.Error(err)
				}
				got += s.Name + ": " + string(value)
			}
			if err != nil || got != want {
				t.Errorf("%s has %q, want %q, %v", team, got, want, err)
			}
		}
		if err := v.Rotate(ctx); err != nil {
			t.Fatal(err)
		}
	}
}

// A vault of before there were teams is the server's own team's.
func TestVaultWithoutTeams(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	dir := t.TempDir()
	secret := bytes.Repeat([]byte{7}, chacha20poly1305.KeySize)
	if err := os.WriteFile(filepath.Join(dir, "vault.key"), []byte("berm-vault-key-1:"+base64.StdEncoding.EncodeToString(secret)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	aead, err := chacha20poly1305.NewX(secret)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(append([]byte("berm vault key\x00"), secret...))
	key := hex.EncodeToString(sum[:8])
	sealed := func(value, bound string) []byte {
		nonce := bytes.Repeat([]byte{9}, chacha20poly1305.NonceSizeX)
		return aead.Seal(nonce, nonce, []byte(value), []byte(bound))
	}
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "vault.db")+"?_pragma=journal_mode(WAL)")
	if err != nil {
		t.Fatal(err)
	}
	for _, statement := range []struct {
		text string
		args []any
	}{
		{"CREATE TABLE secrets (id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, version BIGINT NOT NULL, metadata TEXT NOT NULL, created BIGINT NOT NULL, updated BIGINT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL)", nil},
		{"CREATE TABLE notes (id TEXT PRIMARY KEY, key TEXT NOT NULL, value BLOB NOT NULL)", nil},
		{"INSERT INTO secrets VALUES (?, ?, ?, ?, ?, ?, ?, ?)", []any{"sec_one", "one", 3, `{"a":"b"}`, 1000, 2000, key, sealed(canary, "sec_one\x00\x00\x00\x00\x00\x00\x00\x00\x03")}},
		{"INSERT INTO secrets VALUES (?, ?, ?, ?, ?, ?, ?, ?)", []any{"sec_two", "two", 1, `{}`, 1000, 1000, key, sealed(canary+"2", "sec_two\x00\x00\x00\x00\x00\x00\x00\x00\x01")}},
		{"INSERT INTO notes VALUES (?, ?, ?)", []any{"i0note", key, sealed(canary+"n", "i0note\x00\x00\x00\x00\x00\x00\x00\x00\x00")}},
		{"PRAGMA user_version = 2", nil},
	} {
		if _, err := db.Exec(statement.text, statement.args...); err != nil {
			t.Fatal(err)
		}
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}

	check := func(v *Vault) {
		t.Helper()
		note, err := v.Note(ctx, "i0note")
		if value(t, v, "one") != canary || value(t, v, "sec_two") != canary+"2" || string(note) != canary+"n" || err != nil {
			t.Errorf("a value is another: %v", err)
		}
		s, err := v.Get(ctx, "", "one")
		if err != nil || s.ID != "sec_one" || s.Version != 3 || s.Metadata["a"] != "b" || s.Created.UnixNano() != 1000 || s.Updated.UnixNano() != 2000 {
			t.Errorf("%+v, %v", s, err)
		}
		if all, err := v.List(ctx, "blue", "", 10); len(all) != 0 || err != nil {
			t.Errorf("another team has %v, %v", all, err)
		}
	}
	v := open(t, dir)
	check(v)
	if _, err := v.Create(ctx, "blue", "one", []byte("x"), nil); err != nil {
		t.Error("another team cannot have the name:", err)
	}
	if err := v.Delete(ctx, "blue", "one"); err != nil {
		t.Error(err)
	}
	v.Close()
	v = open(t, dir)
	check(v)
	if err := v.Rotate(ctx); err != nil {
		t.Fatal(err)
	}
	check(v)
	if s, err := v.Update(ctx, "", "one", []byte("new"), nil); err != nil || s.Version != 4 || value(t, v, "one") != "new" {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestKeyFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	v := open(t, dir)
	if _, err := v.Create(t.Context(), "", "a", []byte(canary), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), dir); berm.KindOf(err) != berm.Conflict {
		t.Error("a second process:", err)
	}
	v.Close()
	path := filepath.Join(dir, keyFile)
	good, _ := os.ReadFile(path)
	for name, c := range map[string]struct {
		change func()
		kind   berm.Kind
	}{
		"readable": {func() { os.Chmod(path, 0o640) }, berm.Denied},
		"gone":     {func() { os.Remove(path) }, berm.NotFound},
		"empty":    {func() { os.WriteFile(path, nil, 0o600) }, berm.NotFound},
		"garbage":  {func() { os.WriteFile(path, []byte("x\n"), 0o600) }, berm.Invalid},
		"long":     {func() { os.WriteFile(path, []byte(strings.TrimSpace(string(good))+"AAAA\n"), 0o600) }, berm.Invalid},
		"link":     {func() { os.Rename(path, path+"2"); os.Symlink(path+"2", path) }, berm.Internal},
		"fifo dir": {func() { os.Remove(path); os.Mkdir(path, 0o700) }, berm.Invalid},
	} {
		c.change()
		if v, err := Open(t.Context(), dir); err == nil || berm.KindOf(err) != c.kind {
			t.Errorf("%s: %v", name, err)
			if v != nil {
				v.Close()
			}
		}
		os.RemoveAll(path)
		os.WriteFile(path, good, 0o600)
	}
	if got := value(t, open(t, dir), "a"); got != canary {
		t.Errorf("in the end it is %q", got)
	}
}

func TestKeyOfTheServiceManager(t *testing.T) {
	dir, credentials := t.TempDir(), t.TempDir()
	line := func(b byte) string {
		return linePrefix + base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{b}, 32)) + "\n"
	}
	give := func(text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(credentials, handed), []byte(text), 0o440); err != nil {
			t.Fatal(err)
		}
		os.Chmod(filepath.Join(credentials, handed), 0o640)
		if err := os.WriteFile(filepath.Join(credentials, handed), []byte(text), 0o440); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("CREDENTIALS_DIRECTORY", credentials)
	give(line(1))
	v := open(t, dir)
	if _, err := v.Create(t.Context(), "", "a", []byte(canary), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, keyFile)); err == nil {
		t.Error("a key file was made")
	}
	if err := v.Rotate(t.Context()); berm.KindOf(err) != berm.Unsupported {
		t.Error("rotation without a new key:", err)
	}
	v.Close()
	give(line(1) + line(2))
	v = open(t, dir)
	if err := v.Rotate(t.Context()); err != nil {
		t.Fatal(err)
	}
	v.Close()
	give(line(2))
	if got := value(t, open(t, dir), "a"); got != canary {
		t.Errorf("with the new key it is %q", got)
	}
}

func TestNewerSchema(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	v := open(t, dir)
	if _, err := v.db.Exec("PRAGMA user_version = 99"); err != nil {
		t.Fatal(err)
	}
	v.Close()
	if _, err := Open(t.Context(), dir); berm.KindOf(err) != berm.Unsupported {
		t.Error(err)
	}
}
