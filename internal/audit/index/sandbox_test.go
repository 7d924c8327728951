package index

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/audittest"
	"github.com/berm-sandbox/berm/internal/audit/trail"
)

var end = time.Now().Add(time.Hour)

// kept is what reading the log says of a sandbox.
func kept(t *testing.T, l *audittest.Log, id berm.SandboxID) (k Kept) {
	t.Helper()
	k.Sandbox = id
	contents := map[string]bool{}
	for line, err := range trail.Dir(l.Dir).Records(0) {
		if err != nil {
			t.Fatal(err)
		}
		if line.Sandbox != id || !trail.Erasable(line.Type) {
			continue
		}
		k.Last, k.Bytes = line.Time, k.Bytes+int64(len(line.Raw))+1
		for _, b := range line.Blobs {
			if !contents[b.SHA256] {
				k.Bytes += b.Size
			}
			contents[b.SHA256] = true
		}
	}
	return k
}

func check(t *testing.T, x *Index, team berm.Team, until time.Time, want ...Kept) {
	t.Helper()
	got, err := x.Kept(t.Context(), team, until)
	if err != nil {
		t.Fatal(err)
	}
	total := int64(0)
	same := len(got) == len(want)
	for i := range want {
		total += want[i].Bytes
		same = same && got[i].Sandbox == want[i].Sandbox && got[i].Bytes == want[i].Bytes && got[i].Last.Equal(want[i].Last)
	}
	if !same {
		t.Errorf("team %s has %+v, want %+v", team, got, want)
	}
	if until != end {
		return
	}
	if n, err := x.Bytes(t.Context(), team); err != nil || n != total {
		t.Errorf("team %s has %d bytes, want %d: %v", team, n, total, err)
	}
}

// The index knows how much the log has of each sandbox, taken in at once or a record at a time, and whose it is.
func TestKept(t *testing.T) {
	l, x := sessions(t)
	ofOne, ofTwo, three := kept(t, l, one), kept(t, l, two), kept(t, l, "i0ccccccccccccccccccc")
	for range 2 {
		check(t, x, "", end, ofOne)
		check(t, x, "blue", end, ofTwo)
		check(t, x, "red", end, three)
		check(t, x, "green", end)
		x = open(t, l, filepath.Join(t.TempDir(), "another.db"))
	}
	check(t, x, "blue", ofTwo.Last.Add(-1))
	check(t, x, "blue", ofTwo.Last, ofTwo)
	// Content that it named before, and new one, a record and a look at a time; holds do not count.
	l.Team = "blue"
	for i := range 3 {
		l.Add(audit.Record{Sandbox: two, Type: audit.FileChange, Blobs: []audit.Blob{l.Blob(audit.KindContent, audittest.MainAfter), l.Blob(audit.KindContent, fmt.Sprint("new", i/2))}})
		l.Add(audit.Record{Sandbox: two, Type: audit.HoldSet})
		check(t, x, "blue", end, kept(t, l, two))
	}
	// Another sandbox that ended before the first.
	l.Wait(-time.Minute)
	l.Session("i0ddddddddddddddddddd")
	check(t, x, "blue", end, kept(t, l, "i0ddddddddddddddddddd"), kept(t, l, two))
	for id, want := range map[berm.SandboxID]berm.Team{one: "", two: "blue", "i0ccccccccccccccccccc": "red"} {
		if team, err := x.Team(t.Context(), id); err != nil || team != want {
			t.Errorf("%s is of team %q, want %q: %v", id, team, want, err)
		}
	}
	if _, err := x.Team(t.Context(), "i0eeeeeeeeeeeeeeeeeee"); berm.KindOf(err) != berm.NotFound {
		t.Errorf("of a sandbox that was not: %v", err)
	}
}

// What goes out of the log is not counted any more, and whose it was is known while there is a record.
func TestKeptOfWhatIsGone(t *testing.T) {
	l := audittest.New(t, t.TempDir())
	x := open(t, l, filepath.Join(t.TempDir(), "index.db"))
	l.Team = "blue"
	first, shared := l.Blob(audit.KindContent, "first"), l.Blob(audit.KindContent, "shared")
	for _, blobs := range [][]audit.Blob{{first, shared}, {shared}, nil} {
		l.Add(audit.Record{Sandbox: one, Type: audit.FileChange, Blobs: blobs})
		l.Add(audit.Record{Sandbox: two, Type: audit.FileChange, Blobs: blobs})
	}
	full, of := kept(t, l, one), kept(t, l, two)
	check(t, x, "blue", end, full, of)
	// The first two records are in a file that is removed.
	l.Add(audit.Record{Type: audit.Removed, Data: audit.Removal{From: 1, To: 2}})
	line := (full.Bytes - first.Size - shared.Size) / 3 // about
	got, err := x.Kept(t.Context(), "blue", end)
	if err != nil || len(got) != 2 || got[0].Bytes >= full.Bytes-first.Size-line/2 || got[0].Bytes <= shared.Size+line/2 {
		t.Errorf("after a removal: %+v of %+v, %v", got, full, err)
	}
	// What came between the look and the record of the erasure stays to be erased.
	l.Add(audit.Record{Sandbox: one, Type: audit.NetFlow})
	late := kept(t, l, one)
	l.Add(audit.Record{Sandbox: one, Type: audit.Erase, Data: audit.Erasure{Records: 2, Seqs: "3,5"}})
	got, err = x.Kept(t.Context(), "blue", end)
	if err != nil || len(got) != 2 || got[1].Sandbox != one || got[1].Bytes >= line*3/2 || !got[1].Last.Equal(late.Last) {
		t.Errorf("after an erasure: %+v, %v", got, err)
	}
	l.Add(audit.Record{Sandbox: one, Type: audit.Erase, Data: audit.Erasure{Records: 1, Seqs: "8"}})
	if got, err = x.Kept(t.Context(), "blue", end); err != nil || len(got) != 1 || got[0].Sandbox != two {
		t.Errorf("with nothing left: %+v, %v", got, err)
	}
	if team, err := x.Team(t.Context(), one); err != nil || team != "blue" {
		t.Errorf("erased was one of %q, %v", team, err)
	}
	l.Add(audit.Record{Type: audit.Removed, Data: audit.Removal{From: 1, To: 10}})
	if _, err := x.Team(t.Context(), one); berm.KindOf(err) != berm.NotFound {
		t.Errorf("whose it was is known of no record: %v", err)
	}
}

// What ran in a sandbox before it was a team's is the team's to see, whether it was taken in before or with what
// tells so.
func TestRecordsFromBeforeATeam(t *testing.T) {
	for name, look := range map[string]bool{"seen before": true, "at once": false} {
		t.Run(name, func(t *testing.T) {
			l := audittest.New(t, t.TempDir())
			x := open(t, l, filepath.Join(t.TempDir(), "index.db"))
			blue := berm.Team("blue")
			for range 3 {
				l.Proc(one, audit.ProcFork, audit.Process{PID: 7})
			}
			if look {
				check(t, x, "", end, kept(t, l, one))
			}
			l.Team = blue
			l.Add(audit.Record{Sandbox: one, Type: audit.SandboxCreate})
			l.Team = ""
			l.Add(audit.Record{Sandbox: one, Type: audit.HoldSet})
			if got := seqs(t, x, Query{Team: &blue}); len(got) != 5 {
				t.Errorf("the team sees %v", got)
			}
			check(t, x, "", end)
			check(t, x, blue, end, kept(t, l, one))
		})
	}
}
