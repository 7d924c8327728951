package trail

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
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
	// The same again, with a signature that anybody added, is taken and not kept twice.
	padded := notes[len(notes)-1] + "\u2014 berm-padding " + strings.Repeat("A", 100) + "\n"
	for range 3 {
		response, err := http.Post(server.URL, "text/plain", strings.NewReader(padded))
		if err != nil || response.StatusCode != http.StatusOK {
			t.Fatalf("%+v, %v", response, err)
		}
		response.Body.Close()
	}
	if again, err := os.ReadFile(kept); err != nil || len(again) != len(content) {
		t.Errorf("%d bytes are kept of %d", len(again), len(content))
	}
	if crlf := ParseAnchors(strings.ReplaceAll(string(content), "\n", "\r\n")); len(crlf) != 3 {
		t.Errorf("%d checkpoints with CRLF", len(crlf))
	}
	other := t.TempDir()
	l = open(t, other)
	closeLog(t, l)
	if err := grow(other, 50); err == nil || !strings.Contains(err.Error(), "403") {
		t.Errorf("another log: %v", err)
	}
	if again, err := NewWitness([]string{key}, notes, FileAnchor(kept)); err != nil || again.last.Size != 33 {
		t.Errorf("a witness that begins again: %+v, %v", again, err)
	}
}

// away is an anchor that can be out of reach.
type away struct {
	anchor
	err error
}

func (a *away) Keep(text string) error {
	if a.err != nil {
		return a.err
	}
	return a.anchor.Keep(text)
}

// An anchor that cannot be reached holds up neither removals nor erasures, and gets what it has missed
// in a log in which nothing happens.
func TestAnchorOutOfReach(t *testing.T) {
	var near anchor
	far := away{err: errors.New("out of reach")}
	l, err := Open(t.TempDir(), Options{Keep: time.Hour, Anchors: []Anchor{&near, &far}})
	if err != nil {
		t.Fatal(err)
	}
	ofOne(t, l, "s0", 1, 10, 0)
	ofOne(t, l, "s1", 1, 10, 0)
	retainAs(t, l, func(int) time.Duration { return 3 * time.Hour })
	if left := have(t, l.dir); left["s0"] != 0 {
		t.Errorf("left are %v", left)
	}
	keepContent(t, l, "sbx1", "x")
	if _, err := l.erase(erasing, false, later()); err != nil {
		t.Error(err)
	}
	if err := l.Checkpoint(); err == nil {
		t.Error("that an anchor is out of reach is not told")
	}
	had := len(near)
	far.err = nil
	l.retell()
	if err := l.Checkpoint(); err != nil {
		t.Error(err)
	}
	notes := far.anchor
	if len(notes) != 1 || len(near) != had {
		t.Errorf("%d came, and %d again", len(notes), len(near)-had)
	}
	closeLog(t, l)
	if r := verify(t, l.dir, Trust{Anchors: notes}); len(r.Problems) > 0 || r.Anchored == 0 {
		t.Errorf("%+v", r)
	}
}
