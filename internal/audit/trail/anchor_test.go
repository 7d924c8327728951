package trail

import (
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A second machine keeps checkpoints of a log, refuses those of a log that was put back, and
// what it kept tells a check.
func TestWitness(t *testing.T) {
	dir, kept := t.TempDir(), filepath.Join(t.TempDir(), "kept")
	l := open(t, dir)
	emit(t, l, 3)
	closeLog(t, l)
	earlier := t.TempDir()
	if err := os.CopyFS(earlier, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	key := verify(t, dir, Trust{}).Keys[0]
	w, err := NewWitness([]string{key}, nil, FileAnchor(kept))
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(w)
	defer server.Close()
	grow := func(dir string, n int) error {
		t.Helper()
		l, err := Open(dir, Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer closeLog(t, l)
		l.anchors = []Anchor{WitnessAnchor(server.URL)}
		defer func() { l.anchors = nil }()
		emit(t, l, n)
		return l.Checkpoint()
	}
	for range 3 {
		if err := grow(dir, 10); err != nil {
			t.Fatal(err)
		}
	}
	content, err := os.ReadFile(kept)
	if err != nil {
		t.Fatal(err)
	}
	notes := ParseAnchors(string(content))
	if len(notes) != 3 {
		t.Fatalf("%d checkpoints in %q", len(notes), content)
	}
	if r := verify(t, dir, Trust{Anchors: notes}); len(r.Problems) > 0 || r.Anchored != 33 {
		t.Errorf("%+v", r)
	}
	if err := grow(earlier, 5); err == nil || !strings.Contains(err.Error(), "409") {
		t.Errorf("a log that was put back: %v", err)
	}
	if r := verify(t, earlier, Trust{Anchors: notes}); len(r.Problems) == 0 {
		t.Error("a log that was put back passes")
	}
	other := t.TempDir()
	l = open(t, other)
	closeLog(t, l)
	if err := grow(other, 50); err == nil || !strings.Contains(err.Error(), "403") {
		t.Errorf("another log: %v", err)
	}
	if again, err := NewWitness([]string{key}, notes, FileAnchor(kept)); err != nil || again.size != 33 {
		t.Errorf("a witness that begins again: %+v, %v", again, err)
	}
}
