package trail

import (
	"archive/zip"
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
)

// What somebody can do who may write all of a log but does not have its key.

// rewrite changes records of the current file and makes the chain after them anew.
func rewrite(t *testing.T, dir, old, new string) {
	t.Helper()
	path := filepath.Join(dir, current)
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	prev := ""
	for line := range strings.Lines(strings.ReplaceAll(string(content), old, new)) {
		var r map[string]any
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatal(err)
		}
		if prev != "" {
			r["prev"] = prev
		}
		text, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		prev = audit.Chain(text)
		out.Write(append(text, '\n'))
	}
	if err := os.WriteFile(path, out.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
}

// A key of the attacker's stands before the one that is trusted, which hands over to nobody.
func TestKeyBeforeTheTrustedOne(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	emit(t, l, 12)
	closeLog(t, l)
	trusted := verify(t, dir, Trust{}).Keys[0]
	genuine, err := readStrings(filepath.Join(dir, handoverFile))
	if err != nil {
		t.Fatal(err)
	}

	rewrite(t, dir, "GET /sandboxes", "GET /forged")
	private, public, err := newKey(l.Origin())
	if err != nil {
		t.Fatal(err)
	}
	attacker, err := note.NewSigner(private)
	if err != nil {
		t.Fatal(err)
	}
	first, err := handover(public, attacker)
	if err != nil {
		t.Fatal(err)
	}
	v, err := note.NewVerifier(trusted)
	if err != nil {
		t.Fatal(err)
	}
	second, err := note.Open([]byte(genuine[0]), note.VerifierList(v))
	if err != nil {
		t.Fatal(err)
	}
	both, err := note.Sign(second, attacker)
	if err != nil {
		t.Fatal(err)
	}
	tree := tree{}
	for line, err := range Dir(dir).Records(0) {
		if err != nil {
			t.Fatal(err)
		}
		tree.add(line.Raw)
	}
	forged, err := sign(Checkpoint{Origin: l.Origin(), Size: tree.size, Root: tree.root(), Time: time.Now()}, attacker)
	if err != nil {
		t.Fatal(err)
	}
	for name, lines := range map[string][]string{handoverFile: {first, string(both)}, checkpointFile: {forged}} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
		for _, line := range lines {
			if err := appendString(filepath.Join(dir, name), line); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := os.WriteFile(filepath.Join(dir, treeFile), tree.pending, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, keyFile), []byte(private), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := verify(t, dir, Trust{Key: trusted}); len(r.Problems) == 0 {
		t.Errorf("the log passes: %+v", r)
	}
	if r := verifyExport(t, export(t, dir, ""), Trust{Key: trusted}); len(r.Problems) == 0 {
		t.Errorf("an export of it passes: %+v", r)
	}
}

// A log with an older key in front of the trusted one is whole all the same.
func TestTrustInALaterKey(t *testing.T) {
	dir := t.TempDir()
	makeLog(t, dir)
	keys := verify(t, dir, Trust{}).Keys
	if r := verify(t, dir, Trust{Key: keys[1]}); len(r.Problems) > 0 || r.SignedTo != made {
		t.Errorf("%+v", r)
	}
}

// Records are cut off at the front, and a record at the end, which nobody signed, says that
// they were removed on purpose.
func TestRemovalThatNobodySigned(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	emit(t, l, 40)
	closeLog(t, l)
	path := filepath.Join(dir, current)
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.SplitAfter(string(content), "\n")
	last := strings.TrimSuffix(lines[39], "\n")
	removal, err := json.Marshal(audit.Record{V: audit.Version, Seq: 41, Time: time.Now(), Type: audit.Removed, Data: audit.Removal{To: 20}, Prev: audit.Chain([]byte(last))})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(strings.Join(lines[20:40], "")+string(removal)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := verify(t, dir, Trust{}); len(r.Problems) == 0 {
		t.Errorf("%+v", r)
	}
}

// Without its checkpoints a log that has a key is not signed again.
func TestCheckpointsTakenAway(t *testing.T) {
	dir := t.TempDir()
	makeLog(t, dir)
	rewrite(t, dir, "GET /sandboxes", "GET /forged")
	for _, name := range []string{checkpointFile, treeFile} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Open(dir, Options{}); berm.KindOf(err) != berm.Internal {
		t.Errorf("opened: %v", err)
	}
}

// Records that have been without a signature for long are told.
func TestUnsignedRecordsAreTold(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	emit(t, l, 5)
	closeLog(t, l)
	content, err := os.ReadFile(filepath.Join(dir, current))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.SplitAfter(string(content), "\n")
	add := func(at time.Time) {
		t.Helper()
		line, err := json.Marshal(audit.Record{V: audit.Version, Seq: 6, Time: at, Prev: audit.Chain([]byte(strings.TrimSuffix(lines[4], "\n")))})
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, current), append(bytes.Clone(content), append(line, '\n')...), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	add(time.Now())
	if r := verify(t, dir, Trust{}); len(r.Problems) > 0 || r.SignedTo != 5 || r.Last != 6 {
		t.Errorf("a record of now: %+v", r)
	}
	add(time.Now().Add(-time.Hour))
	if r := verify(t, dir, Trust{}); len(r.Problems) == 0 || r.Problems[0].Seq != 6 {
		t.Errorf("one of an hour ago: %+v", r)
	}
}

// An export has each name once, and nothing that no record names.
func TestStrayFilesInAnExport(t *testing.T) {
	dir := t.TempDir()
	makeLog(t, dir)
	content := export(t, dir, "")
	for _, name := range []string{exportRecords, audit.BlobDir + "/../../../x", audit.BlobDir + "/" + strings.Repeat("0", 64), "x"} {
		original, err := zip.NewReader(bytes.NewReader(content), int64(len(content)))
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		w := zip.NewWriter(&b)
		for _, f := range original.File {
			if err := w.Copy(f); err != nil {
				t.Fatal(err)
			}
		}
		f, err := w.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(f, "forged"); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		a, err := OpenArchive(bytes.NewReader(b.Bytes()), int64(b.Len()))
		if err == nil && len(a.Verify(Trust{}).Problems) == 0 {
			t.Errorf("%s passes", name)
		}
	}
}
