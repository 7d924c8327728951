package trail

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
)

// later is when the records of a test may be erased.
func later() time.Time { return time.Now().Add(2 * blobMargin) }

var erasing = Erasure{Sandbox: "sbx1", Actor: audit.Actor{Type: "key", ID: "k"}, Reason: "asked for"}

// keep adds a record that names content.
func keepContent(t testing.TB, l *Log, id berm.SandboxID, content string) {
	t.Helper()
	b, err := l.NewBlob(audit.KindContent)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(b, content)
	blob, err := b.Commit()
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Emit(audit.Record{Sandbox: id, Type: audit.FileChange, Blobs: []audit.Blob{blob}}); err != nil {
		t.Fatal(err)
	}
}

// everything is all that the files of a log hold, unpacked.
func everything(t testing.TB, dir string) string {
	t.Helper()
	var all strings.Builder
	for raw, err := range Dir(dir).raw(0) {
		if err != nil {
			t.Fatal(err)
		}
		all.Write(append(bytes.Clone(raw), '\n'))
	}
	err := filepath.WalkDir(filepath.Join(dir, audit.BlobDir), func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		content, err := os.ReadFile(path)
		all.Write(content)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all.String()
}

// A sandbox's records and content are gone, but for what others name too; the rest of the log is
// proved as before, also by checkpoints of before, and goes on.
func TestErase(t *testing.T) {
	dir := t.TempDir()
	var kept anchor
	o := Options{Anchors: []Anchor{&kept}}
	makeLog(t, dir)
	l, err := Open(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	keepContent(t, l, "sbx1", "of one alone")
	keepContent(t, l, "sbx1", "of both")
	keepContent(t, l, "sbx2", "of both")
	if err := l.Emit(audit.Record{Sandbox: "sbx1", Type: audit.HoldSet, Reason: "held"}); err != nil {
		t.Fatal(err)
	}
	if err := l.Emit(audit.Record{Sandbox: "sbx2", Type: audit.SandboxFork, Reason: "sbx1"}); err != nil {
		t.Fatal(err)
	}
	// Contents of both count, or the number would tell that another has them.
	whatIf, err := l.erase(erasing, true, later())
	if err != nil || whatIf.Records != 19 || whatIf.Contents != 3 || whatIf.Named != 1 || whatIf.By != 0 {
		t.Fatalf("a dry run: %+v, %v", whatIf, err)
	}
	if text := everything(t, dir); !strings.Contains(text, "of one alone") || verify(t, dir, Trust{}).Records != made+5 {
		t.Fatal("a dry run erased something")
	}
	done, err := l.erase(erasing, false, later())
	if err != nil || done.Records != 19 || done.Contents != 3 || done.By != made+6 || done.Bytes != whatIf.Bytes {
		t.Fatalf("%+v, %v", done, err)
	}
	if text := everything(t, dir); strings.Contains(text, "of one alone") || strings.Contains(text, "content 4") ||
		!strings.Contains(text, "of both") || !strings.Contains(text, "content 14") || strings.Count(text, `"sandbox":"sbx1"`) != 2 {
		t.Errorf("left is %s", text)
	}
	for range 2 {
		emit(t, l, 6)
		closeLog(t, l)
		r := verify(t, dir, Trust{Anchors: kept})
		if len(r.Problems) > 0 || len(r.Erasures) != 1 || r.Anchored < made+5 {
			t.Fatalf("%+v", r)
		}
		if e := r.Erasures[0]; e.By != made+6 || e.Records != 19 || e.Left != 0 || e.Sandbox != "sbx1" || e.Reason != "asked for" || e.Actor.ID != "k" {
			t.Errorf("%+v", e)
		}
		for _, sandbox := range []berm.SandboxID{"", "sbx1", "sbx2"} {
			if r := verifyExport(t, export(t, dir, sandbox), Trust{Anchors: kept}); len(r.Problems) > 0 || sandbox != "sbx2" && len(r.Erasures) != 1 {
				t.Errorf("export of %q: %+v", sandbox, r)
			}
		}
		if l, err = Open(dir, o); err != nil {
			t.Fatal(err)
		}
	}
	// What came since goes the next time; what tells of the first stays.
	again, err := l.erase(erasing, false, later())
	if err != nil || again.Records != 4 {
		t.Errorf("%+v, %v", again, err)
	}
	if _, err := l.erase(erasing, false, later()); berm.KindOf(err) != berm.NotFound {
		t.Errorf("with nothing left: %v", err)
	}
	closeLog(t, l)
	if r := verify(t, dir, Trust{Anchors: kept}); len(r.Problems) > 0 || len(r.Erasures) != 2 {
		t.Errorf("%+v", r)
	}
}

// What is held is not erased, nor what may still be going on.
func TestEraseIsRefused(t *testing.T) {
	dir := t.TempDir()
	makeLog(t, dir)
	held := []berm.SandboxID{"sbx1"}
	l, err := Open(dir, Options{Holds: func() ([]berm.SandboxID, error) { return held, nil }})
	if err != nil {
		t.Fatal(err)
	}
	for _, dry := range []bool{true, false} {
		if _, err := l.erase(erasing, dry, later()); berm.KindOf(err) != berm.Denied {
			t.Errorf("held: %v", err)
		}
	}
	held = nil
	if _, err := l.Erase(erasing, false); berm.KindOf(err) != berm.Conflict || berm.HintOf(err) == "" {
		t.Errorf("a moment after its last record: %v", err)
	}
	l.holds = func() ([]berm.SandboxID, error) { return nil, fmt.Errorf("no database") }
	if _, err := l.erase(erasing, false, later()); berm.KindOf(err) != berm.Unavailable {
		t.Errorf("with holds unknown: %v", err)
	}
	closeLog(t, l)
	whole(t, dir, made)
}

// Several sandboxes are erased at once, with a record for each, which says whose it was; one that is held or not there
// keeps none of the others. The file that is written to goes on when it has nothing of them.
func TestEraseAll(t *testing.T) {
	dir := t.TempDir()
	l, err := Open(dir, Options{Holds: func() ([]berm.SandboxID, error) { return []berm.SandboxID{"held"}, nil }})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		for _, id := range []berm.SandboxID{"one", "two", "held", "other"} {
			keepContent(t, l, id, fmt.Sprint("of ", id, i))
		}
	}
	for content, by := range map[string][]berm.SandboxID{"of one and two": {"one", "two"}, "of one and held": {"one", "held"}, "of two and other": {"two", "other"}} {
		for _, id := range by {
			keepContent(t, l, id, content)
		}
	}
	erase := func(ids ...berm.SandboxID) ([]Erasure, error) {
		var all []Erasure
		for _, id := range ids {
			all = append(all, Erasure{Sandbox: id, Team: "blue", Reason: "old"})
		}
		return all, l.eraseAll(all, false, later())
	}
	files := func() int {
		names, _, err := Dir(dir).segments()
		if err != nil {
			t.Fatal(err)
		}
		return len(names)
	}
	all, err := erase("held", "one", "nosuch", "two")
	if berm.KindOf(err) != berm.Denied {
		t.Errorf("of one that is held: %v", err)
	}
	for i, want := range []Erasure{{}, {By: 19, Records: 5}, {}, {By: 20, Records: 5}} {
		if got := all[i]; got.By != want.By || want.By > 0 && (got.Records != want.Records || got.Time.IsZero()) {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
	text := everything(t, dir)
	for content, want := range map[string]bool{"of one0": false, "of two2": false, "of one and two": false, "of one and held": true, "of two and other": true, "of held1": true, "of other1": true} {
		if strings.Contains(text, content) != want {
			t.Errorf("%s is there: %v", content, !want)
		}
	}
	if strings.Count(text, `"team":"blue","sandbox":"`) != 2 || files() != 2 {
		t.Errorf("%d files of %s", files(), text)
	}
	keepContent(t, l, "new", "new")
	if _, err := erase("other"); err != nil || files() != 2 {
		t.Errorf("of records in an older file: %d files, %v", files(), err)
	}
	if _, err := erase("new"); err != nil || files() != 3 {
		t.Errorf("of records in the current file: %d files, %v", files(), err)
	}
	if _, err := erase("held", ""); berm.KindOf(err) != berm.Invalid {
		t.Errorf("of no sandbox: %v", err)
	}
	closeLog(t, l)
	if r := verify(t, dir, Trust{}); len(r.Problems) > 0 || len(r.Erasures) != 4 {
		t.Errorf("%+v", r)
	}
	for _, id := range []berm.SandboxID{"", "one", "held"} {
		if r := verifyExport(t, export(t, dir, id), Trust{}); len(r.Problems) > 0 {
			t.Errorf("export of %q: %+v", id, r)
		}
	}
}

// A file with records of nobody else is gone, and a long erasure takes several records.
func TestEraseOfManyRecords(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	ofOne(t, l, "sbx1", 3, 10, 0)
	for range 6000 {
		for _, id := range []berm.SandboxID{"sbx1", "sbx2"} {
			if err := l.EmitAll([]audit.Record{{Sandbox: id, Type: audit.ProcFork}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if e, err := l.erase(erasing, false, later()); err != nil || e.Records != 6003 {
		t.Fatalf("%+v, %v", e, err)
	}
	closeLog(t, l)
	r := verify(t, dir, Trust{})
	total := uint64(0)
	for _, e := range r.Erasures {
		total += e.Records
	}
	if len(r.Problems) > 0 || len(r.Erasures) < 2 || total != 6003 || r.First != 5 {
		t.Errorf("%+v", r)
	}
	if names, _, err := Dir(dir).segments(); err != nil || len(names) != 2 {
		t.Errorf("files %v, %v", names, err)
	}
}

// What is missing beside what was erased is found, and so is an erasure that nobody signed.
func TestEveryEditOfAnErasedLogIsFound(t *testing.T) {
	original := t.TempDir()
	l := open(t, original)
	emit(t, l, 25)
	if _, err := l.erase(erasing, false, later()); err != nil {
		t.Fatal(err)
	}
	emit(t, l, 24)
	closeLog(t, l)
	if r := verify(t, original, Trust{}); len(r.Problems) > 0 {
		t.Fatal(r.Problems)
	}
	random := rand.New(rand.NewPCG(4, 1))
	for round := range 150 {
		dir := filepath.Join(t.TempDir(), "log")
		if err := os.CopyFS(dir, os.DirFS(original)); err != nil {
			t.Fatal(err)
		}
		what, seq := edit(t, dir, random)
		r := verify(t, dir, Trust{})
		if len(r.Problems) == 0 {
			t.Fatalf("round %d: %s was not found", round, what)
		}
		if first := r.Problems[0].Seq; seq > 0 && first != seq {
			t.Logf("round %d: %s: the first bad record is %d: %v", round, what, first, r.Problems)
		}
	}
	// Each record that stayed in the file with holes, taken away as the erased ones were.
	for _, seq := range []uint64{1, 3, 4, 12, 25} {
		dir := filepath.Join(t.TempDir(), "log")
		if err := os.CopyFS(dir, os.DirFS(original)); err != nil {
			t.Fatal(err)
		}
		l := &Log{dir: dir}
		names, _, err := Dir(dir).segments()
		if err != nil {
			t.Fatal(err)
		}
		if err := l.rewrite(names[0], spans{{From: seq, To: seq}}); err != nil {
			t.Fatal(err)
		}
		if r := verify(t, dir, Trust{}); len(r.Problems) == 0 || r.Problems[0].Seq != seq {
			t.Errorf("record %d taken away: %v", seq, r.Problems)
		}
	}
}

// Records of a sandbox have random bits of their own, others none.
func TestSalt(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	emit(t, l, 600)
	if err := l.Emit(audit.Record{Type: audit.ServerStop}); err != nil {
		t.Fatal(err)
	}
	closeLog(t, l)
	seen := map[string]bool{}
	for line, err := range Dir(dir).Records(0) {
		switch {
		case err != nil:
			t.Fatal(err)
		case line.Sandbox == "" && line.Salt != "":
			t.Errorf("record %d has a salt", line.Seq)
		case line.Sandbox != "" && (len(line.Salt) != 16 || seen[line.Salt]):
			t.Fatalf("record %d has the salt %q", line.Seq, line.Salt)
		}
		seen[line.Salt] = true
	}
}

// What records tell to be gone stays told when those records are removed themselves.
func TestRemovalsAreRemembered(t *testing.T) {
	for name, held := range map[string][]berm.SandboxID{"with holds": {"s0", "s2"}, "without": nil} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			l, err := Open(dir, Options{Keep: 10 * time.Hour, Holds: func() ([]berm.SandboxID, error) { return held, nil }})
			if err != nil {
				t.Fatal(err)
			}
			hours := map[uint64]int{} // how old files are, by their first record
			for round := range 8 {
				ofOne(t, l, berm.SandboxID(fmt.Sprintf("s%d", round)), 3, 100, 0)
				if round == 2 {
					if _, err := l.erase(Erasure{Sandbox: "s1", Reason: "asked for"}, false, later()); err != nil {
						t.Fatal(err)
					}
					if err := l.rotate(); err != nil {
						t.Fatal(err)
					}
				}
				parts, err := Dir(dir).parts()
				if err != nil {
					t.Fatal(err)
				}
				for _, p := range parts {
					hours[p.first] += 6
				}
				retainAs(t, l, func(first int) time.Duration { return time.Duration(hours[uint64(first)]) * time.Hour })
				if err := l.Checkpoint(); err != nil {
					t.Fatal(err)
				}
				if r := verify(t, dir, Trust{}); len(r.Problems) > 0 {
					t.Fatalf("round %d: %v", round, r.Problems)
				}
			}
			closeLog(t, l)
			left := have(t, dir)
			if left["s1"] != 0 || left["s3"] != 0 || left["s4"] != 0 || left["s7"] != 3 || held != nil && (left["s0"] != 3 || left["s2"] != 3) {
				t.Errorf("left are %v", left)
			}
		})
	}
}

// Content that somebody keeps again during an erasure is left until it is known whether a record
// names it.
func TestEraseContentKeptAgain(t *testing.T) {
	for _, named := range []bool{true, false} {
		dir := t.TempDir()
		l := open(t, dir)
		keepContent(t, l, "sbx1", "the same")
		path := ""
		if blobs, err := contents(filepath.Join(dir, audit.BlobDir)); err != nil || len(blobs) != 1 {
			t.Fatal(blobs, err)
		} else {
			path = blobs[0].path
		}
		aged := func(age time.Duration) {
			if err := os.Chtimes(path, time.Time{}, time.Now().Add(-age)); err != nil {
				t.Fatal(err)
			}
		}
		// Its record is older, too, but another sandbox has kept it a moment ago.
		aged(-30 * time.Second)
		if _, err := l.erase(erasing, true, time.Now().Add(blobMargin+10*time.Second)); berm.KindOf(err) != berm.Conflict {
			t.Errorf("kept a moment ago: %v", err)
		}
		aged(time.Hour)
		l.holds = func() ([]berm.SandboxID, error) { aged(-blobMargin - time.Hour); return nil, nil } // in the middle
		done, err := l.erase(erasing, false, later())
		if berm.KindOf(err) != berm.Unavailable || done.Left != 1 {
			t.Errorf("kept again meanwhile: %+v, %v", done, err)
		}
		if named {
			keepContent(t, l, "sbx2", "the same")
		} else if err := l.resume(); err == nil {
			t.Error("it is not left")
		}
		aged(3 * blobMargin)
		if err := l.resume(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(path); (err == nil) != named {
			t.Errorf("named %v: %v", named, err)
		}
		closeLog(t, l)
		if r := verify(t, dir, Trust{}); len(r.Problems) > 0 {
			t.Errorf("%+v", r)
		}
	}
}

// What is no sandbox's is not erased.
func TestEraseServer(t *testing.T) {
	l := open(t, t.TempDir())
	defer closeLog(t, l)
	emit(t, l, 3)
	if done, err := l.erase(Erasure{Reason: "all of it"}, true, later()); berm.KindOf(err) != berm.Invalid {
		t.Errorf("%+v, %v", done, err)
	}
}

func TestSpans(t *testing.T) {
	s, err := parseSpans("1-5,9,11-12")
	if err != nil || s.count() != 8 {
		t.Fatal(s, err)
	}
	for n, want := range map[uint64]bool{0: false, 1: true, 5: true, 6: false, 9: true, 10: false, 12: true, 13: false} {
		if s.has(n) != want {
			t.Errorf("%d: %v", n, !want)
		}
	}
	for _, bad := range []string{"", "x", "5-1", "3,2", "1-5,5", "-1", "1-", "99999999999999999999"} {
		if s, err := parseSpans(bad); err == nil {
			t.Errorf("%q is %v", bad, s)
		}
	}
	merged := spans{{From: 11, To: 12}, {From: 1, To: 3}, {From: 4, To: 5}, {From: 2, To: 3}, {From: 9, To: 9}}.merge()
	if !slices.Equal(merged, s) {
		t.Errorf("merged %v", merged)
	}
	for of, want := range map[audit.Removal]uint64{{From: 1, To: 5}: 0, {From: 2, To: 4}: 0, {From: 4, To: 6}: 6, {From: 6, To: 6}: 6, {From: 9, To: 9}: 0, {From: 8, To: 9}: 8, {From: 12, To: 14}: 13, {From: 20, To: 21}: 20} {
		if got := merged.lacks(of); got != want {
			t.Errorf("%v lacks %d, want %d", of, got, want)
		}
	}
	if n := s.common(spans{{From: 4, To: 9}, {From: 12, To: 30}}); n != 4 {
		t.Errorf("common %d", n)
	}
}

// eraser is what the process that TestCrashWhileRecordsAreErased crashes does.
func eraser(dir string) {
	l, err := Open(dir, Options{})
	if err == nil {
		all := []Erasure{erasing}
		if also := os.Getenv("TRAIL_ALSO"); also != "" {
			all = append(all, Erasure{Sandbox: berm.SandboxID(also), Reason: "too"})
		}
		err = l.eraseAll(all, false, later())
	}
	fmt.Println(err)
}
