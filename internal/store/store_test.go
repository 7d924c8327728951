package store

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
)

func open(t *testing.T, dir string) *DB {
	t.Helper()
	db, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

// A server that was killed may leave its lock to a child for a moment: the next one starts all the same.
func TestOpenWaitsForDirectory(t *testing.T) {
	dir := t.TempDir()
	first := open(t, dir)
	go func() {
		time.Sleep(100 * time.Millisecond)
		first.Close()
	}()
	open(t, dir)
}

func TestOpenHoldsDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a ?#% directory")
	db := open(t, dir)
	if _, err := openWithin(dir, 10*time.Millisecond); berm.KindOf(err) != berm.Conflict {
		t.Errorf("second server: %v", err)
	}
	shared, err := OpenShared(dir)
	if err != nil {
		t.Fatal(err)
	}
	key, secret, err := shared.CreateKey(t.Context(), Key{Name: "by the command"})
	if err != nil {
		t.Fatal(err)
	}
	shared.Close()
	if got, err := db.Authenticate(t.Context(), secret); err != nil || got.ID != key.ID {
		t.Errorf("the server does not see the new key: %v", err)
	}
	if mode := must(os.Stat(dir)).Mode().Perm(); mode != 0o700 {
		t.Errorf("mode %o", mode)
	}
	db.Close()
	open(t, dir)
}

func TestOpenRefusesNewerFormat(t *testing.T) {
	dir := t.TempDir()
	os.WriteFile(filepath.Join(dir, "VERSION"), []byte("2\n"), 0o600)
	if _, err := Open(dir); berm.KindOf(err) != berm.Unsupported {
		t.Errorf("newer directory: %v", err)
	}
	dir = t.TempDir()
	db := open(t, dir)
	db.write.Exec("PRAGMA user_version = 99")
	db.Close()
	if _, err := Open(dir); berm.KindOf(err) != berm.Unsupported {
		t.Errorf("newer schema: %v", err)
	}
}

func TestMigrateKeepsBackup(t *testing.T) {
	dir := t.TempDir()
	db := open(t, dir)
	if _, err := db.AddKey(t.Context(), "k", "e2b_"+strings.Repeat("0", 40)); err != nil {
		t.Fatal(err)
	}
	db.Close()
	defer func(old []string) { migrations = old }(migrations)
	migrations = slices.Concat(migrations, []string{"CREATE TABLE more (id TEXT PRIMARY KEY)"})
	db = open(t, dir)
	if keys, err := db.Keys(t.Context()); err != nil || len(keys) != 1 {
		t.Errorf("keys after the migration: %v, %v", keys, err)
	}
	backup, err := sql.Open("sqlite", "file:"+filepath.Join(dir, fmt.Sprintf("berm.db.schema-%d", len(migrations)-1)))
	if err != nil {
		t.Fatal(err)
	}
	defer backup.Close()
	var n int
	if err := backup.QueryRow("SELECT count(*) FROM keys").Scan(&n); err != nil || n != 1 {
		t.Errorf("backup holds %d keys: %v", n, err)
	}
}

func TestFailedMigrationChangesNothing(t *testing.T) {
	dir := t.TempDir()
	open(t, dir).Close()
	defer func(old []string) { migrations = old }(migrations)
	good := migrations
	migrations = slices.Concat(good, []string{"CREATE TABLE more (id TEXT); NOT SQL"})
	if _, err := Open(dir); err == nil {
		t.Fatal("a broken migration passed")
	}
	migrations = good
	open(t, dir)
}

func TestKeys(t *testing.T) {
	ctx := t.Context()
	db := open(t, t.TempDir())
	key, secret, err := db.CreateKey(ctx, Key{Name: "first"})
	if err != nil {
		t.Fatal(err)
	}
	if !keyShape.MatchString(secret) || !strings.HasPrefix(secret, key.Prefix) {
		t.Errorf("key %q, prefix %q", secret, key.Prefix)
	}
	for _, wrong := range []string{"", "e2b_", secret[:43], secret + "0", strings.ToUpper(secret), strings.Repeat("x", 1<<20)} {
		if _, err := db.Authenticate(ctx, wrong); berm.KindOf(err) != berm.Denied {
			t.Errorf("%.50q: %v", wrong, err)
		}
	}
	if _, err := db.AddKey(ctx, "bad", "e2b_0"); berm.KindOf(err) != berm.Invalid {
		t.Errorf("bad shape: %v", err)
	}
	again, err := db.AddKey(ctx, "again", secret)
	if err != nil || again.ID != key.ID {
		t.Errorf("adding a key again: %+v, %v", again, err)
	}
	if _, err := db.RevokeKey(ctx, key.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := db.RevokeKey(ctx, key.ID); berm.KindOf(err) != berm.NotFound {
		t.Errorf("revoked twice: %v", err)
	}
	if _, err := db.Authenticate(ctx, secret); berm.KindOf(err) != berm.Denied {
		t.Errorf("revoked key: %v", err)
	}
	if _, err := db.AddKey(ctx, "back", secret); berm.KindOf(err) != berm.Denied {
		t.Errorf("a revoked key came back: %v", err)
	}

	path := filepath.Join(t.TempDir(), "log")
	log, err := audit.Open(path, nil)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := db.DrainOutbox(ctx, log); err != nil {
			t.Fatal(err)
		}
	}
	log.Close()
	lines := string(must(os.ReadFile(path)))
	if strings.Count(lines, "\n") != 2 || !strings.Contains(lines, "key.create") || !strings.Contains(lines, "key.revoke") {
		t.Errorf("audit records: %s", lines)
	}
	if strings.Contains(lines, secret) {
		t.Error("the key is in the log")
	}
}

func TestSandboxesAndLogs(t *testing.T) {
	ctx := t.Context()
	db := open(t, t.TempDir())
	now := time.Now().UTC()
	live := Sandbox{ID: "i0live", Record: []byte(`{}`)}
	dead := Sandbox{ID: "i0dead", Killed: now.Add(-time.Hour), Request: "r", Record: []byte(`{"a":1}`)}
	for _, s := range []Sandbox{live, {ID: dead.ID, Record: []byte(`{}`)}, dead} {
		if err := db.SaveSandbox(ctx, s); err != nil {
			t.Fatal(err)
		}
	}
	got, err := db.LivingSandboxes(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]Sandbox{live}, got); diff != "" {
		t.Error(diff)
	}
	if got, err := db.Sandbox(ctx, dead.ID); err != nil || !cmp.Equal(dead, got) {
		t.Errorf("dead sandbox: %+v, %v", got, err)
	}
	if got, err := db.SandboxOf(ctx, "r"); err != nil || !cmp.Equal(dead, got) {
		t.Errorf("sandbox of a request: %+v, %v", got, err)
	}
	if _, err := db.SandboxOf(ctx, ""); berm.KindOf(err) != berm.NotFound {
		t.Errorf("sandbox of no request: %v", err)
	}
	if err := db.SaveSandbox(ctx, Sandbox{ID: "i0other", Request: "r", Record: []byte(`{}`)}); err == nil {
		t.Error("two sandboxes of one request")
	}
	for _, id := range []berm.SandboxID{live.ID, dead.ID} {
		for i := range 5 {
			line := LogLine{Time: now.Add(time.Duration(i) * time.Second), Level: "info", Message: string(rune('a' + i)), Fields: "{}"}
			if err := db.AppendLog(ctx, id, line); err != nil {
				t.Fatal(err)
			}
		}
	}
	messages := func(id berm.SandboxID, from time.Time, backward bool, limit int) string {
		lines, err := db.Logs(ctx, id, from, backward, limit)
		if err != nil {
			t.Fatal(err)
		}
		var s string
		for _, line := range lines {
			s += line.Message
		}
		return s
	}
	if s := messages(live.ID, now.Add(time.Second), false, 3); s != "bcd" {
		t.Errorf("forward: %q", s)
	}
	if s := messages(live.ID, now.Add(3*time.Second), true, 3); s != "dcb" {
		t.Errorf("backward: %q", s)
	}
	if err := db.Prune(ctx, now.Add(-time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Sandbox(ctx, dead.ID); berm.KindOf(err) != berm.NotFound {
		t.Errorf("forgotten sandbox: %v", err)
	}
	if s := messages(dead.ID, now, false, 9); s != "" {
		t.Errorf("logs of a forgotten sandbox: %q", s)
	}
}

// What is forgotten is not in the files of the database either; what lives is not forgotten.
func TestForget(t *testing.T) {
	ctx := t.Context()
	dir := t.TempDir()
	db := open(t, dir)
	const text = "of-somebody"
	for _, s := range []Sandbox{{ID: "i0dead", Killed: time.Now(), Record: []byte(`{"a":"` + text + `"}`)}, {ID: "i0live", Record: []byte("{}")}} {
		if err := db.SaveSandbox(ctx, s); err != nil {
			t.Fatal(err)
		}
		if err := db.AppendLog(ctx, s.ID, LogLine{Time: time.Now(), Message: text + string(s.ID), Fields: "{}"}); err != nil {
			t.Fatal(err)
		}
		if err := db.Forget(ctx, s.ID); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := db.Sandbox(ctx, "i0dead"); berm.KindOf(err) != berm.NotFound {
		t.Errorf("forgotten: %v", err)
	}
	if lines, err := db.Logs(ctx, "i0live", time.Time{}, false, 9); err != nil || len(lines) != 1 {
		t.Errorf("of the living: %v, %v", lines, err)
	}
	for _, name := range []string{"berm.db", "berm.db-wal"} {
		content, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || strings.Contains(string(content), text+"i0dead") || strings.Contains(string(content), `"`+text) {
			t.Errorf("%s: %v, or it holds what was forgotten", name, err)
		}
	}
}

// Keys may erase only when they were made so.
func TestErasingKey(t *testing.T) {
	ctx := t.Context()
	db := open(t, t.TempDir())
	_, plain, err := db.CreateKey(ctx, Key{Name: "plain"})
	if err != nil {
		t.Fatal(err)
	}
	_, erasing, err := db.CreateKey(ctx, Key{Name: "erasing", Erase: true})
	if err != nil {
		t.Fatal(err)
	}
	for secret, want := range map[string]bool{plain: false, erasing: true} {
		if key, err := db.Authenticate(ctx, secret); err != nil || key.Erase != want {
			t.Errorf("%+v, %v", key, err)
		}
	}
}

func TestLeases(t *testing.T) {
	ctx := t.Context()
	db := open(t, t.TempDir())
	if err := db.Lease(ctx, 0x70000000, "i0a"); err != nil {
		t.Fatal(err)
	}
	if err := db.Lease(ctx, 0x70000000, "i0b"); err == nil {
		t.Error("a range was leased twice")
	}
	if err := db.Lease(ctx, 0x70010000, "i0a"); err == nil {
		t.Error("a sandbox leased twice")
	}
	for range 2 {
		if err := db.Release(ctx, "i0a"); err != nil {
			t.Error(err)
		}
	}
	if leases, err := db.Leases(ctx); err != nil || len(leases) != 0 {
		t.Errorf("%v, %v", leases, err)
	}
}

func TestSecretIsKept(t *testing.T) {
	dir := t.TempDir()
	db := open(t, dir)
	a := must(db.Secret(t.Context(), "token"))
	b := must(db.Secret(t.Context(), "other"))
	db.Close()
	again := must(open(t, dir).Secret(t.Context(), "token"))
	if len(a) != 32 || string(a) != string(again) || string(a) == string(b) {
		t.Error("secrets are not stable or not apart")
	}
}

func BenchmarkStore(b *testing.B) {
	db, err := Open(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	defer db.Close()
	ctx := context.Background()
	_, secret, _ := db.CreateKey(ctx, Key{Name: "k"})
	b.Run("authenticate", func(b *testing.B) {
		for b.Loop() {
			db.Authenticate(ctx, secret)
		}
	})
	b.Run("save", func(b *testing.B) {
		for b.Loop() {
			db.SaveSandbox(ctx, Sandbox{ID: berm.NewSandboxID(), Record: []byte(`{"x":1}`)})
		}
	})
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
