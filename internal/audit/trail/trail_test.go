package trail

import (
	"archive/zip"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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

func open(t testing.TB, dir string) *Log {
	t.Helper()
	l, err := Open(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func emit(t testing.TB, l *Log, n int) {
	t.Helper()
	for i := range n {
		r := audit.Record{
			Sandbox: berm.SandboxID(fmt.Sprintf("sbx%d", i%3)), Actor: audit.Actor{Type: "key", ID: "k"}, Type: audit.APICall, Src: "api",
			Trust: audit.TrustHost, Outcome: audit.OK, Data: map[string]any{"route": "GET /sandboxes", "status": 200 + i},
		}
		if i%10 == 4 {
			b, err := l.NewBlob(audit.KindContent)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(b, "content %d", i)
			blob, err := b.Commit()
			if err != nil {
				t.Fatal(err)
			}
			r.Blobs = []audit.Blob{blob}
		}
		if err := l.Emit(r); err != nil {
			t.Fatal(err)
		}
	}
}

func closeLog(t testing.TB, l *Log) {
	t.Helper()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

func verify(t testing.TB, dir string, trust Trust) *Report {
	t.Helper()
	r, err := Verify(dir, trust)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// whole fails the test unless the log has n records and nothing is wrong.
func whole(t testing.TB, dir string, n uint64) *Report {
	t.Helper()
	r := verify(t, dir, Trust{})
	if len(r.Problems) > 0 || r.Records != n || r.SignedTo != n {
		t.Fatalf("want %d whole records: %+v", n, r)
	}
	return r
}

// makeLog makes a log of three openings, two keys and two files.
func makeLog(t testing.TB, dir string) {
	t.Helper()
	l := open(t, dir)
	emit(t, l, 17)
	closeLog(t, l)
	l = open(t, dir)
	emit(t, l, 8)
	if err := l.rotate(); err != nil {
		t.Fatal(err)
	}
	emit(t, l, 5)
	if err := l.RotateKey(); err != nil { // one record
		t.Fatal(err)
	}
	closeLog(t, l)
	l = open(t, dir)
	emit(t, l, 19)
	closeLog(t, l)
}

const made = 50 // records of makeLog

func TestLogVerifies(t *testing.T) {
	dir := t.TempDir()
	makeLog(t, dir)
	r := whole(t, dir, made)
	if len(r.Keys) != 2 || r.Blobs == 0 || r.Checkpoints < 3 {
		t.Errorf("%+v", r)
	}
	if r := verify(t, dir, Trust{Key: r.Keys[0]}); len(r.Problems) > 0 || r.Trusted == "" {
		t.Errorf("%+v", r)
	}
	names, _ := filepath.Glob(filepath.Join(dir, "log*"))
	if len(names) != 2 || !strings.HasSuffix(names[0], "log-00000000000000000001.jsonl.zst") {
		t.Errorf("files %v", names)
	}
	n := uint64(0)
	for line, err := range Dir(dir).Records(20) {
		if err != nil || line.Seq != 20+n {
			t.Fatalf("record %d, %v; want %d", line.Seq, err, 20+n)
		}
		n++
	}
	if n != made-19 {
		t.Errorf("%d records from 20 on", n)
	}
}

// A log that another program made, or an earlier version, gets a key and a tree when it is
// opened.
func TestOldLogIsSignedFromNowOn(t *testing.T) {
	dir := t.TempDir()
	old, err := audit.Open(filepath.Join(dir, current), nil)
	if err != nil {
		t.Fatal(err)
	}
	for range 7 {
		if err := old.Emit(audit.Record{Type: audit.APICall}); err != nil {
			t.Fatal(err)
		}
	}
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	l := open(t, dir)
	emit(t, l, 3)
	closeLog(t, l)
	whole(t, dir, 10)
}

func TestTreeIsMadeAgain(t *testing.T) {
	dir := t.TempDir()
	makeLog(t, dir)
	for _, damage := range []func(path string) error{
		os.Remove,
		func(path string) error { return os.Truncate(path, 33) },
		func(path string) error { return os.WriteFile(path, bytes.Repeat([]byte("x"), 32*10), 0o600) },
	} {
		if err := damage(filepath.Join(dir, treeFile)); err != nil {
			t.Fatal(err)
		}
		l := open(t, dir)
		emit(t, l, 3)
		closeLog(t, l)
		whole(t, dir, l.signed)
	}
}

// Whatever single thing is changed in a log that was closed, the check finds it, and names no
// record after the one that was changed.
func TestEveryEditIsFound(t *testing.T) {
	original := t.TempDir()
	makeLog(t, original)
	rounds := 100
	if os.Getenv("BERM_TEST_ALL") != "" {
		rounds = 1000
	}
	random := rand.New(rand.NewPCG(1, uint64(rounds)))
	for round := range rounds {
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
			t.Fatalf("round %d: %s: the first bad record is %d and not %d: %v", round, what, first, seq, r.Problems)
		}
	}
}

// edit changes one thing and returns which record it concerns, 0 if not a certain one.
func edit(t *testing.T, dir string, random *rand.Rand) (what string, seq uint64) {
	t.Helper()
	path := filepath.Join(dir, current)
	const first = 26 // record of the current file
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.SplitAfter(string(content), "\n")
	lines = lines[:len(lines)-1]
	i := random.IntN(len(lines))
	write := func(lines []string) {
		if err := os.WriteFile(path, []byte(strings.Join(lines, "")), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	flip := func(path string) {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		content[random.IntN(len(content)-1)] ^= 1 << random.IntN(7)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	blobs, err := filepath.Glob(filepath.Join(dir, audit.BlobDir, "??", "*"))
	if err != nil || len(blobs) == 0 {
		t.Fatal("there are no blobs")
	}
	switch random.IntN(11) {
	case 0:
		b := []byte(lines[i])
		at := random.IntN(len(b) - 1)
		b[at] ^= 1 << random.IntN(7)
		lines[i] = string(b)
		write(lines)
		if b[at] == '\n' { // another line by number
			return fmt.Sprintf("a bit of byte %d of record %d", at, first+i), 0
		}
		return fmt.Sprintf("a bit of byte %d of record %d", at, first+i), uint64(first + i)
	case 1:
		write(append(lines[:i:i], lines[i+1:]...))
		return fmt.Sprintf("record %d without", first+i), uint64(first + i)
	case 2:
		i = random.IntN(len(lines) - 1)
		lines[i], lines[i+1] = lines[i+1], lines[i]
		write(lines)
		return fmt.Sprintf("records %d and the next exchanged", first+i), uint64(first + i)
	case 3:
		write(lines[:i])
		return fmt.Sprintf("cut before record %d", first+i), uint64(first + i)
	case 4:
		write(append(append(lines[:i:i], lines[i]), lines[i:]...))
		return fmt.Sprintf("record %d twice", first+i), 0
	case 5: // changed, and all hashes after it made again
		prev := ""
		for j := i; j < len(lines); j++ {
			var r map[string]any
			if err := json.Unmarshal([]byte(lines[j]), &r); err != nil {
				t.Fatal(err)
			}
			if j == i {
				r["reason"] = "forged"
			} else {
				r["prev"] = prev
			}
			line, err := json.Marshal(r)
			if err != nil {
				t.Fatal(err)
			}
			lines[j], prev = string(line)+"\n", audit.Chain(line)
		}
		write(lines)
		return fmt.Sprintf("record %d and the chain after it", first+i), uint64(first + i)
	case 6:
		flip(blobs[random.IntN(len(blobs))])
		return "a bit of a blob", 0
	case 7:
		if err := os.Remove(blobs[random.IntN(len(blobs))]); err != nil {
			t.Fatal(err)
		}
		return "a blob without", 0
	case 8:
		flip(filepath.Join(dir, checkpointFile))
		return "a bit of a checkpoint", 0
	case 9: // another key signs all
		other := t.TempDir()
		makeLog(t, other)
		for _, name := range []string{keyFile, handoverFile} {
			content, err := os.ReadFile(filepath.Join(other, name))
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return "the keys of another log", 0
	default:
		flip(filepath.Join(dir, handoverFile))
		return "a bit of a key", 0
	}
}

// A log that was put back to an earlier state of it, with all that is beside it, is whole by
// itself: what was kept outside finds it, and so does the key when all of it is another log.
func TestRollbackIsFoundFromOutside(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	emit(t, l, 20)
	closeLog(t, l)
	earlier := t.TempDir()
	if err := os.CopyFS(earlier, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	var kept anchor
	l, err := Open(dir, Options{Anchors: []Anchor{&kept}})
	if err != nil {
		t.Fatal(err)
	}
	emit(t, l, 20)
	closeLog(t, l)
	if r := verify(t, dir, Trust{Anchors: kept}); len(r.Problems) > 0 || r.Anchored != 40 {
		t.Errorf("%+v", r)
	}
	if r := verify(t, earlier, Trust{}); len(r.Problems) > 0 {
		t.Errorf("the earlier state is not whole: %+v", r)
	}
	if r := verify(t, earlier, Trust{Anchors: kept}); len(r.Problems) == 0 || r.Problems[0].Seq != 21 {
		t.Errorf("rolled back: %+v", r)
	}
	other := t.TempDir()
	makeLog(t, other)
	key := verify(t, dir, Trust{}).Keys[0]
	if r := verify(t, other, Trust{Key: key}); len(r.Problems) == 0 {
		t.Error("another log passes for this one")
	}
}

// A file that cannot be packed, for which there may be no space, is no reason not to open the log.
func TestOpenUnpacked(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	emit(t, l, 3)
	names := func() []string { return l.unpacked() }
	if err := os.Mkdir(filepath.Join(dir, fmt.Sprintf("log-%020d.jsonl.zst.new", 1)), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := l.rotate(); err == nil || len(names()) != 1 {
		t.Fatal(names(), err)
	}
	for _, left := range []int{1, 0} {
		closeLog(t, l)
		l = open(t, dir)
		if len(names()) != left {
			t.Errorf("not packed are %v", names())
		}
		_ = os.Remove(filepath.Join(dir, fmt.Sprintf("log-%020d.jsonl.zst.new", 1))) // what is in its way
	}
	closeLog(t, l)
	whole(t, dir, 3)
}

type anchor []string

func (a *anchor) Keep(checkpoint string) error { *a = append(*a, checkpoint); return nil }

func export(t *testing.T, dir string, sandbox berm.SandboxID) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := Export(&b, dir, sandbox); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func verifyExport(t *testing.T, content []byte, trust Trust) *Report {
	t.Helper()
	a, err := OpenArchive(bytes.NewReader(content), int64(len(content)))
	if err != nil {
		t.Fatal(err)
	}
	return a.Verify(trust)
}

func TestExport(t *testing.T) {
	dir := t.TempDir()
	makeLog(t, dir)
	key := verify(t, dir, Trust{}).Keys[0]
	for sandbox, n := range map[berm.SandboxID]uint64{"": made, "sbx1": 17} {
		content := export(t, dir, sandbox)
		r := verifyExport(t, content, Trust{Key: key})
		if len(r.Problems) > 0 || r.Records != n || r.Trusted != key || r.Blobs == 0 {
			t.Errorf("%q: %+v", sandbox, r)
		}
		a, err := OpenArchive(bytes.NewReader(content), int64(len(content)))
		if err != nil {
			t.Fatal(err)
		}
		for line, err := range a.Records(0) {
			if err != nil || sandbox != "" && line.Sandbox != sandbox {
				t.Fatalf("%+v, %v", line, err)
			}
		}
	}
	other := t.TempDir()
	makeLog(t, other)
	if r := verifyExport(t, export(t, other, ""), Trust{Key: key}); len(r.Problems) == 0 {
		t.Error("an export of another log passes")
	}
	if err := Export(io.Discard, dir, "absent"); berm.KindOf(err) != berm.NotFound {
		t.Errorf("an absent sandbox: %v", err)
	}
}

// Every edit of a file in an export is found, and the record is named where it is one.
func TestEveryEditOfAnExportIsFound(t *testing.T) {
	dir := t.TempDir()
	makeLog(t, dir)
	content := export(t, dir, "sbx1")
	original, err := zip.NewReader(bytes.NewReader(content), int64(len(content)))
	if err != nil {
		t.Fatal(err)
	}
	random := rand.New(rand.NewPCG(2, 3))
	for round := range 200 {
		victim := original.File[random.IntN(len(original.File))]
		how := random.IntN(4)
		var b bytes.Buffer
		w := zip.NewWriter(&b)
		var seq uint64
		for _, f := range original.File {
			r, err := f.Open()
			if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(r)
			if err != nil {
				t.Fatal(err)
			}
			if f == victim {
				switch {
				case how == 0:
					continue // left out
				case how == 1:
					text[random.IntN(len(text))] ^= 1 << random.IntN(7)
				case how == 2 && len(text) > 1:
					text = text[:random.IntN(len(text)-1)]
				case f.Name == exportRecords:
					lines := bytes.SplitAfter(bytes.TrimSuffix(text, []byte("\n")), []byte("\n"))
					i := random.IntN(len(lines))
					var h header
					if err := json.Unmarshal(lines[i], &h); err != nil {
						t.Fatal(err)
					}
					seq = h.Seq
					text = bytes.Join(slices.Delete(lines, i, i+1), nil)
				default:
					text = append(text, text...)
				}
			}
			out, err := w.Create(f.Name)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := out.Write(text); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		a, err := OpenArchive(bytes.NewReader(b.Bytes()), int64(b.Len()))
		if err != nil {
			continue
		}
		r := a.Verify(Trust{})
		if len(r.Problems) == 0 {
			t.Fatalf("round %d: edit %d of %s was not found", round, how, victim.Name)
		}
		if seq > 0 && !slices.ContainsFunc(r.Problems, func(p Problem) bool { return p.Seq == seq }) {
			t.Fatalf("round %d: record %d was taken away: %v", round, seq, r.Problems)
		}
	}
}

func FuzzExport(f *testing.F) {
	dir := f.TempDir()
	makeLog(f, dir)
	var b bytes.Buffer
	if err := Export(&b, dir, "sbx1"); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, content []byte) {
		if a, err := OpenArchive(bytes.NewReader(content), int64(len(content))); err == nil {
			a.Verify(Trust{})
			for line, err := range a.Records(0) {
				_, _ = line, err
			}
		}
	})
}

func FuzzManifest(f *testing.F) {
	f.Add(manifest{Origin: "o", Seqs: []uint64{1, 2, 5}, Files: map[string]string{"a": strings.Repeat("0", 64)}}.text())
	f.Fuzz(func(t *testing.T, text string) {
		if strings.Count(text, "-") > 3 { // numbers take memory
			return
		}
		m, err := parseManifest(text)
		if err != nil {
			return
		}
		if again, err := parseManifest(m.text()); err != nil || !slices.Equal(again.Seqs, m.Seqs) {
			t.Fatalf("%+v, %v", again, err)
		}
	})
}

func TestRetention(t *testing.T) {
	dir := t.TempDir()
	l, err := Open(dir, Options{Keep: 20 * time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	emit(t, l, 25)
	now := time.Now()
	for _, later := range []time.Duration{time.Hour, 3 * time.Hour, 6 * time.Hour} { // the second ends a file
		if err := l.retain(now.Add(later)); err != nil {
			t.Fatal(err)
		}
	}
	emit(t, l, 5)
	// All records are of now, so that both files are as old: the older goes, once its next is
	// older than what is kept.
	if err := l.retain(now.Add(30 * time.Hour)); err != nil {
		t.Fatal(err)
	}
	closeLog(t, l)
	r := verify(t, dir, Trust{})
	if len(r.Problems) > 0 || r.First <= 1 || r.SignedTo != r.Last {
		t.Fatalf("%+v", r)
	}
	if blobs, err := filepath.Glob(filepath.Join(dir, audit.BlobDir, "??", "*")); err != nil || len(blobs) == 0 {
		t.Errorf("content of records that are kept is gone: %v, %v", blobs, err)
	}
	// Whoever removes records without a word is found.
	names, _, err := Dir(dir).segments()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, names[0])); err != nil {
		t.Fatal(err)
	}
	if r := verify(t, dir, Trust{}); len(r.Problems) == 0 {
		t.Errorf("%+v", r)
	}
	l = open(t, dir) // goes on all the same: what is signed is proved by the tree
	closeLog(t, l)
}

// A log with fewer records than were signed is not written to.
func TestCutLogIsNotOpened(t *testing.T) {
	dir := t.TempDir()
	makeLog(t, dir)
	if err := os.Truncate(filepath.Join(dir, current), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, Options{}); berm.KindOf(err) != berm.Internal || !strings.Contains(err.Error(), "signed") {
		t.Errorf("opened: %v", err)
	}
}

func TestBlobIsOpenedByHashOnly(t *testing.T) {
	dir := Dir(t.TempDir())
	for _, name := range []string{"", "../../etc/passwd", strings.Repeat("g", 64), strings.Repeat("A", 64)} {
		if _, err := dir.Blob(name); berm.KindOf(err) != berm.Invalid {
			t.Errorf("%q: %v", name, err)
		}
	}
	if _, err := dir.Blob(strings.Repeat("0", 64)); berm.KindOf(err) != berm.NotFound {
		t.Errorf("absent: %v", err)
	}
}

func FuzzCheckpoint(f *testing.F) {
	f.Add("origin\n5\nAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\ntime 2026-01-01T00:00:00Z\nboot x\n")
	f.Fuzz(func(t *testing.T, text string) {
		c, err := parseCheckpoint(text)
		if err == nil {
			if again, err := parseCheckpoint(c.text()); err != nil || again.Size != c.Size || again.Root != c.Root {
				t.Fatalf("%+v, %v", again, err)
			}
		}
	})
}

// Of any record, what is read of the ends of its line is what reading all of it gives.
func FuzzDecode(f *testing.F) {
	f.Add("h", `a","prev":"x"},`, "net.flow", uint64(7), int64(1))
	f.Add(`","host":"`, `"}`, "audit.key", uint64(1<<63), int64(1<<60))
	f.Fuzz(func(t *testing.T, host, reason, kind string, seq uint64, at int64) {
		r := audit.Record{V: audit.Version, Seq: seq, Time: time.Unix(at%(1<<35), at%1e9).UTC(), Host: host, Type: audit.Type(kind), Reason: reason, Data: map[string]any{reason: host}, Prev: audit.Chain([]byte(reason))}
		line, err := json.Marshal(r)
		if err != nil {
			t.Skip()
		}
		for _, known := range []bool{false, true} {
			var fast, slow header
			if err := errors.Join(decode(line, &fast, known), json.Unmarshal(line, &slow)); err != nil {
				t.Fatal(err)
			}
			if fast.Seq != slow.Seq || fast.V != slow.V || !fast.Time.Equal(slow.Time) || fast.Prev != slow.Prev {
				t.Fatalf("%s: %+v, %+v", line, fast, slow)
			}
		}
	})
}

func FuzzLines(f *testing.F) {
	f.Add([]byte("{\"v\":1,\"seq\":1}\n{\n\n"))
	f.Fuzz(func(t *testing.T, content []byte) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, current), content, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Verify(dir, Trust{}); err != nil {
			t.Fatal(err)
		}
		for line, err := range Dir(dir).Records(0) {
			_, _ = line, err
		}
	})
}

// A record that tells what is not recorded tells of no loss.
func TestWhatIsNotRecordedIsNotLost(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	for _, data := range []map[string]any{{"source": "processes"}, {"source": "egress", "count": 3}} {
		if err := l.Emit(audit.Record{Type: audit.Gap, Outcome: audit.OK, Data: data}); err != nil {
			t.Fatal(err)
		}
	}
	closeLog(t, l)
	if r := verify(t, dir, Trust{}); r.Gaps != 1 || r.Unrecorded != 1 {
		t.Errorf("%d lost, %d not recorded", r.Gaps, r.Unrecorded)
	}
}
