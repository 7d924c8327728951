package trail

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
)

// ofOne writes n records of a sandbox, each with content of the size, in a file of the log of
// their own, and makes all of it as old as age.
func ofOne(t *testing.T, l *Log, id berm.SandboxID, n, size int, age time.Duration) {
	t.Helper()
	at := time.Now().Add(-age)
	if age > 0 { // retainAs lets the first record be as old, and content comes after that
		at = at.Add(time.Minute) // however slow the test is
	}
	for i := range n {
		b, err := l.NewBlob(audit.KindContent)
		if err != nil {
			t.Fatal(err)
		}
		random := make([]byte, size)
		for j := range random {
			random[j] = byte(rand.Uint32())
		}
		if _, err := b.Write(random); err != nil {
			t.Fatal(err)
		}
		blob, err := b.Commit()
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(filepath.Join(l.dir, audit.BlobDir, blob.SHA256[:2], blob.SHA256), at, at); err != nil {
			t.Fatal(err)
		}
		if err := l.Emit(audit.Record{Sandbox: id, Type: audit.FileChange, Reason: fmt.Sprint(i), Blobs: []audit.Blob{blob}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.rotate(); err != nil {
		t.Fatal(err)
	}
}

// have counts the records and the content of each sandbox that a log still has.
func have(t *testing.T, dir string) map[berm.SandboxID]int {
	t.Helper()
	count := map[berm.SandboxID]int{}
	for line, err := range Dir(dir).Records(0) {
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range line.Blobs {
			f, err := Dir(dir).Blob(b.SHA256)
			if err != nil {
				t.Fatalf("record %d: %v", line.Seq, err)
			}
			f.Close()
			count[line.Sandbox]++
		}
	}
	return count
}

// sizes are what a log takes.
func sizes(t *testing.T, dir string) (total int64) {
	t.Helper()
	parts, err := Dir(dir).parts()
	if err != nil {
		t.Fatal(err)
	}
	blobs, err := contents(filepath.Join(dir, audit.BlobDir))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range parts {
		total += p.size
	}
	return total + sizeSince(blobs, time.Time{})
}

// A log takes no more than its limit; the oldest files go first, with their content.
func TestRetentionByBytes(t *testing.T) {
	dir := t.TempDir()
	const limit = 100 << 10
	l, err := Open(dir, Options{Limit: limit})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 8 {
		ofOne(t, l, berm.SandboxID(fmt.Sprintf("s%d", i)), 4, 8<<10, time.Duration(20-2*i)*time.Hour)
	}
	retainAs(t, l, func(first int) time.Duration { return time.Duration(20-2*(first/4)) * time.Hour })
	if size := sizes(t, dir); size > limit || size < limit/2 {
		t.Errorf("it takes %d bytes of %d", size, limit)
	}
	closeLog(t, l)
	left := have(t, dir)
	if left["s7"] != 4 || left["s0"] != 0 || left["s1"] != 0 {
		t.Errorf("left are %v", left)
	}
	if r := verify(t, dir, Trust{}); len(r.Problems) > 0 || r.First == 1 {
		t.Errorf("%+v", r)
	}
}

// What came in the last minutes stays when it alone is more than the limit: its content could not
// be removed with it yet.
func TestLimitOfAFlood(t *testing.T) {
	dir := t.TempDir()
	l, err := Open(dir, Options{Limit: 20 << 10})
	if err != nil {
		t.Fatal(err)
	}
	ofOne(t, l, "s0", 4, 8<<10, 0)
	ofOne(t, l, "s1", 4, 8<<10, 0)
	if err := l.retain(time.Now()); err != nil {
		t.Fatal(err)
	}
	if left := have(t, dir); left["s0"] != 4 || left["s1"] != 4 {
		t.Errorf("left are %v", left)
	}
	if err := l.retain(time.Now().Add(10 * time.Minute)); err != nil {
		t.Fatal(err)
	}
	if left := have(t, dir); left["s0"] != 0 || sizes(t, dir) > 40<<10 {
		t.Errorf("left are %v, %d bytes", left, sizes(t, dir))
	}
	closeLog(t, l)
	if r := verify(t, dir, Trust{}); len(r.Problems) > 0 {
		t.Errorf("%+v", r)
	}
}

// A blob counts as new when a record is about to name it, however long ago it was written.
func TestBlobIsAsOldAsItsRecord(t *testing.T) {
	dir := t.TempDir()
	b, err := audit.Directory(dir).NewBlob(audit.KindFrames)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	before := time.Now().Add(-10 * time.Second)
	names, err := filepath.Glob(filepath.Join(dir, audit.BlobDir, "new-*"))
	if err != nil || len(names) != 1 {
		t.Fatal(names, err)
	}
	if err := os.Chtimes(names[0], before, before.Add(-24*time.Hour)); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Commit(); err != nil {
		t.Fatal(err)
	}
	blobs, err := contents(filepath.Join(dir, audit.BlobDir))
	if err != nil || len(blobs) != 1 || blobs[0].at.Before(before) {
		t.Errorf("%+v, %v", blobs, err)
	}
}

// Content that is being written stays, however long ago it was begun or written to, and what a
// crash left of such is removed when the next server opens the log.
func TestUnnamedContent(t *testing.T) {
	dir := t.TempDir()
	l, err := Open(dir, Options{Keep: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	b, err := l.NewBlob(audit.KindFrames)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-24 * time.Hour)
	unnamed := func() []string {
		names, err := filepath.Glob(filepath.Join(dir, audit.BlobDir, "new-*"))
		if err != nil {
			t.Fatal(err)
		}
		return names
	}
	if err := os.Chtimes(unnamed()[0], old, old); err != nil {
		t.Fatal(err)
	}
	ofOne(t, l, "s0", 1, 10, 0)
	ofOne(t, l, "s1", 1, 10, 0)
	retainAs(t, l, func(int) time.Duration { return 3 * time.Hour })
	if left := have(t, dir); left["s0"] != 0 {
		t.Errorf("left are %v", left)
	}
	blob, err := b.Commit()
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Emit(audit.Record{Sandbox: "s2", Type: audit.ExecExit, Blobs: []audit.Blob{blob}}); err != nil {
		t.Fatal(err)
	}
	if _, err := l.NewBlob(audit.KindFrames); err != nil {
		t.Fatal(err)
	}
	closeLog(t, l)
	for _, o := range []Options{{Successor: true}, {}} {
		if l, err = Open(dir, o); err != nil {
			t.Fatal(err)
		}
		if left := len(unnamed()); (left == 1) != o.Successor {
			t.Errorf("%+v: left are %d", o, left)
		}
		closeLog(t, l)
	}
	if have(t, dir)["s2"] != 1 {
		t.Error("its record has no content")
	}
}

// Content that was old, and is kept again while old content is looked for, stays: a record is
// about to name it.
func TestContentKeptAgain(t *testing.T) {
	dir := t.TempDir()
	l, err := Open(dir, Options{Keep: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	keepContent(t, l, "s0", "the same")
	if err := l.rotate(); err != nil {
		t.Fatal(err)
	}
	emit(t, l, 1)
	old := time.Now().Add(-3 * time.Hour)
	blobs, err := contents(filepath.Join(dir, audit.BlobDir))
	if err != nil || len(blobs) != 1 {
		t.Fatal(blobs, err)
	}
	if err := os.Chtimes(blobs[0].path, old, old); err != nil {
		t.Fatal(err)
	}
	blobs[0].at = old
	parts, err := Dir(dir).parts()
	if err != nil {
		t.Fatal(err)
	}
	parts[0].began, parts[1].began = old.Add(-time.Minute), old.Add(time.Minute)
	remove, rest, err := l.overdue(parts, blobs, time.Now())
	if err != nil || len(rest) != 1 {
		t.Fatal(remove, rest, err)
	}
	keepContent(t, l, "s1", "the same")
	if err := l.remove(remove, rest); err != nil {
		t.Fatal(err)
	}
	closeLog(t, l)
	if left := have(t, dir); left["s0"] != 0 || left["s1"] != 1 {
		t.Errorf("left are %v", left)
	}
}

// retainAs does what retain does when the files of a log are as old as age says.
func retainAs(t *testing.T, l *Log, age func(i int) time.Duration) {
	t.Helper()
	parts, err := Dir(l.dir).parts()
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	for i := range parts[:len(parts)-1] {
		parts[i].began = now.Add(-age(int(parts[i].first)))
	}
	blobs, err := contents(filepath.Join(l.dir, audit.BlobDir))
	if err != nil {
		t.Fatal(err)
	}
	remove, rest, err := l.overdue(parts, blobs, now)
	if err == nil {
		err = l.remove(remove, rest)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// What is held stays, whatever is due around it, until the hold ends; the log verifies all the
// while, and what is missing without a word is found.
func TestHold(t *testing.T) {
	for name, o := range map[string]Options{"by age": {Keep: 10 * time.Hour}, "by bytes": {Limit: 60 << 10}} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			held := []berm.SandboxID{"s1", "s3"}
			age := func(first int) time.Duration { return time.Duration(40-5*(first/3)) * time.Hour }
			o.Holds = func() ([]berm.SandboxID, error) { return held, nil }
			l, err := Open(dir, o)
			if err != nil {
				t.Fatal(err)
			}
			for i := range 7 {
				ofOne(t, l, berm.SandboxID(fmt.Sprintf("s%d", i)), 3, 8<<10, time.Duration(40-5*i)*time.Hour)
			}
			for range 2 { // the second time nothing is to be done
				retainAs(t, l, age)
			}
			closeLog(t, l)
			left := have(t, dir)
			if left["s0"] != 0 || left["s1"] != 3 || left["s2"] != 0 || left["s3"] != 3 || left["s6"] != 3 {
				t.Errorf("left are %v", left)
			}
			if r := verify(t, dir, Trust{}); len(r.Problems) > 0 {
				t.Errorf("%+v", r)
			}
			removed := 0
			for line, err := range Dir(dir).Records(0) {
				if err != nil {
					t.Fatal(err)
				}
				if line.Type == audit.Removed {
					removed++
				}
			}
			if removed > 4 {
				t.Errorf("%d records tell of removals", removed)
			}
			// The whole log is exported, as far as it is there.
			if r := verifyExport(t, export(t, dir, ""), Trust{}); len(r.Problems) > 0 {
				t.Errorf("export: %+v", r)
			}

			// Another file goes without a word.
			names, firsts, err := Dir(dir).segments()
			if err != nil {
				t.Fatal(err)
			}
			content, err := os.ReadFile(filepath.Join(dir, names[1]))
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Remove(filepath.Join(dir, names[1])); err != nil {
				t.Fatal(err)
			}
			if r := verify(t, dir, Trust{}); len(r.Problems) == 0 || r.Problems[0].Seq != firsts[1] {
				t.Errorf("record %d is missing, and found was %+v", firsts[1], r.Problems)
			}
			if err := os.WriteFile(filepath.Join(dir, names[1]), content, 0o600); err != nil {
				t.Fatal(err)
			}

			held = held[:1]
			l, err = Open(dir, o)
			if err != nil {
				t.Fatal(err)
			}
			retainAs(t, l, age)
			closeLog(t, l)
			if left := have(t, dir); left["s1"] != 3 || left["s3"] != 0 {
				t.Errorf("after the end of a hold are left %v", left)
			}
			if r := verify(t, dir, Trust{}); len(r.Problems) > 0 {
				t.Errorf("%+v", r)
			}
		})
	}
}

// When it cannot be known what is held, nothing is removed.
func TestUnknownHoldsKeepAll(t *testing.T) {
	dir := t.TempDir()
	l, err := Open(dir, Options{Keep: time.Hour, Holds: func() ([]berm.SandboxID, error) { return nil, errors.New("no database") }})
	if err != nil {
		t.Fatal(err)
	}
	emit(t, l, 5)
	if err := l.rotate(); err != nil {
		t.Fatal(err)
	}
	emit(t, l, 5)
	if err := l.retain(time.Now().Add(10 * time.Hour)); err == nil {
		t.Error("it was taken for none")
	}
	closeLog(t, l)
	whole(t, dir, 10)
}

func TestTeam(t *testing.T) {
	dir := t.TempDir()
	makeLog(t, dir)
	l := open(t, dir)
	for _, r := range []audit.Record{{Sandbox: "pooled"}, {Sandbox: "pooled", Team: "blue"}, {Sandbox: "pooled"}} { // a pool has no team
		r.Type = audit.ProcFork
		if err := l.Emit(r); err != nil {
			t.Fatal(err)
		}
	}
	closeLog(t, l)
	for id, want := range map[berm.SandboxID]berm.Team{"sbx0": "", "sbx2": "", "pooled": "blue"} {
		if got, err := Dir(dir).Team(id); err != nil || got != want {
			t.Errorf("%s: %q, %v", id, got, err)
		}
	}
	for _, id := range []berm.SandboxID{"sbx", "sbx3"} {
		if _, err := Dir(dir).Team(id); berm.KindOf(err) != berm.NotFound {
			t.Errorf("%s: %v", id, err)
		}
	}
	if b := []byte(`{"sandbox":"x"}`); !isOf(b, "x") || isOf(bytes.ToUpper(b), "x") {
		t.Error("isOf")
	}
}
