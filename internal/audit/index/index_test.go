package index

import (
	"bytes"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/audittest"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

const (
	one = berm.SandboxID("i0aaaaaaaaaaaaaaaaaaa")
	two = berm.SandboxID("i0bbbbbbbbbbbbbbbbbbb")
)

func sessions(t *testing.T) (*audittest.Log, *Index) {
	t.Helper()
	l := audittest.New(t, t.TempDir())
	l.Add(audit.Record{Type: audit.ServerStart, Src: "server"})
	l.Session(one)
	l.Add(audit.Record{Type: audit.APICall, Actor: audit.Actor{Type: "anonymous"}, Outcome: audit.Denied, Data: map[string]any{"status": 401}})
	l.Team = "blue"
	l.Session(two)
	l.Add(audit.Record{Type: audit.SecretSet, Team: "blue"})
	l.Team = "red"
	l.Hostile("i0ccccccccccccccccccc")
	l.Team = ""
	return l, open(t, l, filepath.Join(t.TempDir(), "cache", "index.db"))
}

func open(t *testing.T, l *audittest.Log, path string) *Index {
	t.Helper()
	x, err := Open(path, trail.Dir(l.Dir))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = x.Close() })
	return x
}

func seqs(t *testing.T, x *Index, q Query) (all []uint64) {
	t.Helper()
	found, err := x.Query(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range found {
		all = append(all, f.Seq)
	}
	return all
}

func scanned(t *testing.T, l *audittest.Log, q Query) (all []uint64) {
	t.Helper()
	for line, err := range Scan(trail.Dir(l.Dir), q) {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, line.Seq)
	}
	return all
}

// The index finds what reading the whole log finds.
func TestIndexFindsWhatTheLogHas(t *testing.T) {
	l, x := sessions(t)
	mid := audittest.Begin.Add(5 * time.Second)
	own, blue, none := berm.Team(""), berm.Team("blue"), berm.Team("green")
	for _, c := range []struct {
		q    Query
		want int // records; -1: some
	}{
		{Query{}, -1},
		{Query{Sandbox: one}, -1},
		{Query{Sandbox: one, Gaps: true}, -1},
		{Query{Sandbox: "i0ddddddddddddddddddd"}, 0},
		{Query{Team: &own}, -1},
		{Query{Team: &blue}, -1},
		{Query{Team: &none}, 0},
		{Query{Team: &blue, Types: []string{"secret"}}, 1},
		{Query{Team: &own, Types: []string{"secret"}}, 0},
		{Query{Team: &own, Types: []string{"server.start", "api.call", "audit.gap"}, After: 1}, -1},
		{Query{Team: &blue, Sandbox: one}, 0},
		{Query{Team: &own, Sandbox: two}, 0},
		{Query{Team: &blue, Sandbox: two}, -1},
		{Query{Team: &blue, Sandbox: two, Gaps: true}, -1},
		{Query{Team: &blue, Host: "git.test"}, 2},
		{Query{Team: &blue, After: 20, Limit: 7}, 7},
		{Query{Actor: "k1", Types: []string{"exec.start"}}, 9},
		{Query{Actor: "anonymous"}, 1},
		{Query{Actor: "nobody"}, 0},
		{Query{Types: []string{"net"}, Sandbox: two}, 6},
		{Query{Types: []string{"net.dns", "limit"}, Sandbox: two}, 2},
		{Query{Types: []string{"ne"}}, 0},
		{Query{Verdict: audit.Denied, Types: []string{"net"}, Sandbox: one}, 3},
		{Query{Since: mid}, -1},
		{Query{Until: mid}, -1},
		{Query{Since: mid, Until: mid}, 0},
		{Query{Path: "/workspace/main.go"}, 6},
		{Query{Path: "/workspace/node_modules/"}, 2},
		{Query{Path: "/workspace/node"}, 0},
		{Query{Path: "/usr/lib/git-core"}, 2},
		{Query{Path: "/"}, -1},
		{Query{Host: "git.test"}, 4},
		{Query{Host: "test"}, -1},
		{Query{Host: "TEST."}, -1},
		{Query{Host: "it.test"}, 0},
		{Query{Host: "evil.test", Verdict: audit.Denied}, 4},
		{Query{Host: "169.254.169.254"}, 2},
		{Query{Host: "169.254"}, -1},
		{Query{Host: "git.test", Path: "/"}, 0},
		{Query{After: 20, Limit: 7}, 7},
		{Query{Host: audittest.Evil}, 2},
		{Query{Path: "/" + audittest.Evil}, 1},
	} {
		got, want := seqs(t, x, c.q), scanned(t, l, c.q)
		if !slices.Equal(got, want) {
			t.Errorf("%+v: the index finds %v, the log has %v", c.q, got, want)
		}
		if c.want >= 0 && len(got) != c.want || c.want < 0 && len(got) == 0 {
			t.Errorf("%+v: %d records, want %d", c.q, len(got), c.want)
		}
		back, err := Parse(c.q.Values())
		c.q.Gaps, c.q.Team = false, nil // of no URL
		if err != nil || !reflect.DeepEqual(back, c.q) {
			t.Errorf("%+v becomes %+v, %v", c.q, back, err)
		}
	}
}

// The log alone counts: whatever is done to the index, it finds what the log has.
func TestIndexIsOnlyACache(t *testing.T) {
	l, x := sessions(t)
	path := x.path
	check := func(what string) {
		t.Helper()
		if got := seqs(t, open(t, l, path), Query{}); !slices.Equal(got, scanned(t, l, Query{})) {
			t.Errorf("%s: finds %d records", what, len(got))
		}
	}
	_ = seqs(t, x, Query{})
	_ = x.Close()
	check("opened again")
	for _, end := range []string{"", "-wal", "-shm"} {
		_ = os.Remove(path + end)
	}
	check("lost")
	if err := os.WriteFile(path, []byte("not a database, but long enough to be one with a header"), 0o600); err != nil {
		t.Fatal(err)
	}
	check("spoilt")
	spoil, err := Open(path, trail.Dir(l.Dir))
	if err != nil {
		t.Fatal(err)
	}
	for _, damage := range []string{"DROP TABLE names", "DELETE FROM state", "PRAGMA user_version = 99"} {
		if _, err := spoil.db.Exec(damage); err != nil {
			t.Fatal(err)
		}
		_ = spoil.Close()
		check(damage)
		if spoil, err = Open(path, trail.Dir(l.Dir)); err != nil {
			t.Fatal(err)
		}
	}
	_ = spoil.Close()
	// Another log in its place, which has records of the same numbers.
	if err := os.Remove(filepath.Join(l.Dir, "log.jsonl")); err != nil {
		t.Fatal(err)
	}
	other := audittest.New(t, l.Dir)
	other.Session(two)
	check("another log")
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
}

// What comes to the log is found at once, and what leaves it is forgotten.
func TestIndexFollows(t *testing.T) {
	l, x := sessions(t)
	last := seqs(t, x, Query{})
	l.Flow(one, egress.Event{Kind: "flow", Name: "new.test", Action: "allow"})
	if got := seqs(t, x, Query{After: last[len(last)-1]}); len(got) != 1 {
		t.Errorf("%d new records", len(got))
	}
	content, err := os.ReadFile(filepath.Join(l.Dir, "log.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	at := 0
	for range 20 {
		at += slices.Index(content[at:], '\n') + 1
	}
	if err := os.WriteFile(filepath.Join(l.Dir, "log.jsonl"), content[at:], 0o600); err != nil {
		t.Fatal(err)
	}
	if got := seqs(t, x, Query{}); got[0] != 21 {
		t.Errorf("record %d is still found", got[0])
	}
}

func TestNames(t *testing.T) {
	l, x := sessions(t)
	hash := l.Blob(audit.KindContent, audittest.MainAfter).SHA256
	secret := l.Blob(audit.KindContent, "no record names it").SHA256
	told := l.Blob(audit.KindContent, "kept for another").SHA256
	l.Add(audit.Record{Sandbox: one, Type: audit.FileAPI, Data: audit.FileAccess{Path: "/guess", Op: "write", SHA256: told}})
	l.Add(audit.Record{Sandbox: one, Type: audit.FileChange, Data: audit.Changes{Changes: []audit.Change{{Path: "/guess", Op: "add", Kind: "symlink", Before: told, After: told}}}})
	for _, c := range []struct {
		id   berm.SandboxID
		hash string
		want bool
	}{{one, hash, true}, {"i0ccccccccccccccccccc", hash, false}, {one, secret, false}, {one, told, false}} {
		if got, err := x.Names(t.Context(), c.id, c.hash); err != nil || got != c.want {
			t.Errorf("%s of %s: %v, %v", c.hash, c.id, got, err)
		}
	}
}

// A sandbox's records are read page by page.
func TestOf(t *testing.T) {
	l, x := sessions(t)
	for range 2500 {
		l.Proc(two, audit.ProcFork, audit.Process{PID: 7})
	}
	want := scanned(t, l, Query{Sandbox: two, Gaps: true, After: 99})
	var got []uint64
	for line, err := range x.Of(t.Context(), two).Records(100) {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, line.Seq)
	}
	if len(got) < 2500 || !slices.Equal(got, want) {
		t.Errorf("%d records, want %d", len(got), len(want))
	}
}

// What the log tells to be removed is not found any more, also in its middle.
func TestForgetsWhatIsRemoved(t *testing.T) {
	l, x := sessions(t)
	before := seqs(t, x, Query{})
	l.Add(audit.Record{Type: audit.Removed, Data: audit.Removal{From: before[2], To: before[4]}})
	got := seqs(t, x, Query{})
	want := append(append([]uint64{}, before[:2]...), before[5:]...)
	if want = append(want, before[len(before)-1]+1); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// What the log tells to be erased is not found any more, and not in the files of the index either.
func TestForgetsWhatIsErased(t *testing.T) {
	l, x := sessions(t)
	l.Add(audit.Record{Sandbox: "gone", Type: audit.ExecStart, Data: audit.Command{Argv: []string{"a-secret-of-somebody"}}})
	before := seqs(t, x, Query{})
	last := before[len(before)-1]
	l.Add(audit.Record{Sandbox: "gone", Type: audit.Erase, Data: audit.Erasure{Records: 3, Seqs: fmt.Sprintf("%d-%d,%d", before[2], before[3], last)}})
	got := seqs(t, x, Query{})
	want := append(append([]uint64{}, before[:2]...), before[4:len(before)-1]...)
	if want = append(want, last+1); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	for _, end := range []string{"", "-wal"} {
		content, err := os.ReadFile(x.path + end)
		if err != nil || bytes.Contains(content, []byte("a-secret-of-somebody")) {
			t.Errorf("index%s: %v, or it holds what was erased", end, err)
		}
	}
}

// A log that cannot be read is no log without records.
func TestUnreadableLog(t *testing.T) {
	l, x := sessions(t)
	before := seqs(t, x, Query{})
	path := filepath.Join(l.Dir, "log.jsonl")
	if err := os.Rename(path, path+".away"); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path, 0o700); err != nil { // reading it fails
		t.Fatal(err)
	}
	if found, err := x.Query(t.Context(), Query{}); err == nil {
		t.Errorf("%d records", len(found))
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".away", path); err != nil {
		t.Fatal(err)
	}
	if got := seqs(t, x, Query{}); len(got) != len(before) {
		t.Errorf("%d records, want %d", len(got), len(before))
	}
}

func TestParseRefuses(t *testing.T) {
	for _, q := range []string{"sandbox=A/b", "since=yesterday", "until=1", "verdict=maybe", "path=relative", "after=-1", "after=x", "limit=-1"} {
		values, err := url.ParseQuery(q)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Parse(values); berm.KindOf(err) != berm.Invalid {
			t.Errorf("%s: %v", q, err)
		}
	}
}

func BenchmarkUpdate(b *testing.B) {
	l := audittest.New(b, b.TempDir())
	for i := range 100 {
		l.Session(berm.SandboxID(fmt.Sprintf("i0aaaaaaaaaaaaaaaa%03d", i)))
	}
	n, before := 0, processor()
	for b.Loop() {
		x, err := Open(filepath.Join(b.TempDir(), "index.db"), trail.Dir(l.Dir))
		if err != nil {
			b.Fatal(err)
		}
		found, err := x.Query(b.Context(), Query{})
		if err != nil {
			b.Fatal(err)
		}
		n += len(found)
		_ = x.Close()
	}
	b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "records/s")
	b.ReportMetric(float64((processor()-before).Microseconds())/float64(n), "cpu-µs/record")
}

// processor is the processor time of this process.
func processor() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
