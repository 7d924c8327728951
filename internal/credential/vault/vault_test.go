package vault

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/credential"
)

var _ credential.Source = (*Vault)(nil)

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
	b, err := v.Value(t.Context(), name)
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
	s, err := v.Create(ctx, "API_Key", []byte(canary), map[string]string{"team": "x"})
	if err != nil || s.Name != "api_key" || s.Version != 1 || !strings.HasPrefix(s.ID, "sec_") {
		t.Fatal(s, err)
	}
	if _, err := v.Create(ctx, "api_key", []byte("other"), nil); berm.KindOf(err) != berm.AlreadyExists {
		t.Error("a second one of the name:", err)
	}
	for _, name := range []string{"api_key", "API_KEY", s.ID} {
		if got := value(t, v, name); got != canary {
			t.Errorf("%s is %q", name, got)
		}
	}
	updated, err := v.Update(ctx, s.ID, []byte(canary+"2"), nil)
	if err != nil || updated.Version != 2 || updated.Metadata["team"] != "x" || !updated.Created.Equal(s.Created) {
		t.Fatal(updated, err)
	}
	for _, name := range []string{"b", "c"} {
		if _, err := v.Create(ctx, name, []byte("v-"+name), nil); err != nil {
			t.Fatal(err)
		}
	}
	page, err := v.List(ctx, "api_key", 1)
	if err != nil || len(page) != 1 || page[0].Name != "b" || page[0].Metadata == nil {
		t.Error(page, err)
	}
	if shown := fmt.Sprintf("%+v", page) + fmt.Sprintf("%+v", updated); strings.Contains(shown, "CANARY") || strings.Contains(shown, "v-b") {
		t.Error("a value is told:", shown)
	}
	v.Close()
	if _, err := v.Create(ctx, "late", []byte("x"), nil); err == nil {
		t.Error("a closed vault takes secrets")
	}

	v = open(t, dir)
	if got := value(t, v, "api_key"); got != canary+"2" {
		t.Errorf("after opening again it is %q", got)
	}
	if err := v.Delete(ctx, "b"); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{v.Delete(ctx, "b"), second(v.Get(ctx, "b")), second(v.Value(ctx, "b")), second(v.Update(ctx, "b", []byte("x"), nil))} {
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
		"no name":       second(v.Create(t.Context(), "", []byte("x"), nil)),
		"long name":     second(v.Create(t.Context(), strings.Repeat("n", 129), []byte("x"), nil)),
		"slash":         second(v.Create(t.Context(), "a/b", []byte("x"), nil)),
		"id":            second(v.Create(t.Context(), "SEC_a", []byte("x"), nil)),
		"no value":      second(v.Create(t.Context(), "a", nil, nil)),
		"long value":    second(v.Create(t.Context(), "a", make([]byte, MaxValue+1), nil)),
		"many entries":  second(v.Create(t.Context(), "a", []byte("x"), many)),
		"long entries":  second(v.Create(t.Context(), "a", []byte("x"), big)),
		"long key":      second(v.Create(t.Context(), "a", []byte("x"), map[string]string{strings.Repeat("k", 129): ""})),
		"long metadata": second(v.Create(t.Context(), "a", []byte("x"), map[string]string{"k": strings.Repeat("v", 1025)})),
	} {
		if berm.KindOf(err) != berm.Invalid || err == nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := v.Create(t.Context(), strings.Repeat("n", 128), make([]byte, MaxValue), nil); err != nil {
		t.Error("what is just within the limits:", err)
	}
}

// Nothing on disk but the key file gives a value away, not even with SQLite's leftovers.
func TestNothingInTheClear(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	v := open(t, dir)
	if _, err := v.Create(t.Context(), "a", []byte(canary), nil); err != nil {
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
		if _, err := v.Create(t.Context(), fmt.Sprint("s", i), []byte(fmt.Sprint(canary, i)), nil); err != nil {
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
			if _, err := v.Create(t.Context(), name, []byte(canary+name), nil); err != nil {
				t.Fatal(err)
			}
		}
		if err := v.keys.add(); err != nil {
			t.Fatal(err)
		}
		if encrypted {
			if _, err := v.Update(t.Context(), "a", []byte(canary+"a"), nil); err != nil {
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
	} {
		v := open(t, t.TempDir())
		for _, name := range []string{"a", "b"} {
			if _, err := v.Create(t.Context(), name, []byte(canary+name+"\x01"), nil); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := v.db.Exec(change); err != nil {
			t.Fatal(name, err)
		}
		got, err := v.Value(t.Context(), "a")
		if err == nil || got != nil || strings.Contains(err.Error(), "CANARY") {
			t.Errorf("%s: %q %v", name, got, err)
		}
	}
}

func TestKeyFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	v := open(t, dir)
	if _, err := v.Create(t.Context(), "a", []byte(canary), nil); err != nil {
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
	if _, err := v.Create(t.Context(), "a", []byte(canary), nil); err != nil {
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
