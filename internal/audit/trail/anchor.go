package trail

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/note"

	"github.com/berm-sandbox/berm"
)

// FileAnchor appends checkpoints to a file, which should lie on another disk or machine and be
// append-only (chattr +a).
type FileAnchor string

// Open opens or creates the file.
func (path FileAnchor) Open() (*os.File, error) {
	f, err := os.OpenFile(string(path), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, berm.Errorf(berm.Unavailable, "anchor of the audit log: %w", err)
	}
	return f, nil
}

// Keep implements Anchor.
func (path FileAnchor) Keep(checkpoint string) error {
	f, err := path.Open()
	if err != nil {
		return err
	}
	return errors.Join(OpenAnchor{f}.Keep(checkpoint), f.Close())
}

// OpenAnchor is the file of a FileAnchor, for whoever may not open it.
type OpenAnchor struct{ File *os.File }

// Keep implements Anchor.
func (a OpenAnchor) Keep(checkpoint string) error {
	_, err := a.File.WriteString(checkpoint + "\n")
	if err == nil {
		err = a.File.Sync()
	}
	if err != nil {
		return berm.Errorf(berm.Unavailable, "anchor of the audit log: %w", err)
	}
	return nil
}

// WitnessAnchor sends checkpoints to a Witness, by its URL. One that cannot be reached gets the
// next checkpoint, which covers all before.
type WitnessAnchor string

// Keep implements Anchor.
func (url WitnessAnchor) Keep(checkpoint string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, string(url), strings.NewReader(checkpoint))
	if err != nil {
		return berm.Errorf(berm.Invalid, "witness of the audit log: %w", err)
	}
	request.Header.Set("Content-Type", "text/plain; charset=utf-8")
	response, err := witnessClient.Do(request)
	if err != nil {
		return berm.Errorf(berm.Unavailable, "witness of the audit log: %w", err)
	}
	defer response.Body.Close()
	if response.StatusCode/100 != 2 {
		text, _ := io.ReadAll(io.LimitReader(response.Body, 500))
		return berm.Errorf(berm.Unavailable, "witness of the audit log: %s: %s", response.Status, bytes.TrimSpace(text))
	}
	return nil
}

// witnessClient follows no redirects: a checkpoint is meant for one place.
var witnessClient = &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}

// maxNote bounds a checkpoint in bytes.
const maxNote = 4 << 10

// Witness takes the checkpoints of one log by HTTP and keeps those that the log's key signed
// and that do not have fewer records than one before.
type Witness struct {
	keys []note.Verifier
	keep Anchor
	turn chan struct{}
	last Checkpoint
}

// NewWitness goes on from the checkpoints that were kept before, in the order in which they
// came. The keys are public ones of the log. Kind Invalid.
func NewWitness(keys, before []string, keep Anchor) (*Witness, error) {
	w := &Witness{keep: keep, turn: make(chan struct{}, 1)}
	for _, key := range keys {
		v, err := note.NewVerifier(key)
		if err != nil {
			return nil, berm.Errorf(berm.Invalid, "key %q: %w", key, err).WithHint("`berm audit key` on the server prints it")
		}
		w.keys = append(w.keys, v)
	}
	for _, text := range before {
		c, _, err := openCheckpoint(text, w.keys)
		if err != nil {
			return nil, berm.Errorf(berm.Invalid, "a checkpoint that was kept: %w", err)
		}
		if c.Size >= w.last.Size {
			w.last = c
		}
	}
	return w, nil
}

// ServeHTTP takes a checkpoint by POST: 200 when it is kept, 403 when no key signed it, 409
// when the log had more records before, which means that it was cut or put back.
func (w *Witness) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		http.Error(rw, "POST a checkpoint", http.StatusMethodNotAllowed)
		return
	}
	text, err := io.ReadAll(http.MaxBytesReader(rw, r.Body, maxNote))
	if err != nil {
		http.Error(rw, err.Error(), http.StatusBadRequest)
		return
	}
	c, _, err := openCheckpoint(string(text), w.keys)
	if err != nil {
		http.Error(rw, err.Error(), http.StatusForbidden)
		return
	}
	w.turn <- struct{}{}
	defer func() { <-w.turn }()
	switch {
	case c.Size < w.last.Size:
		http.Error(rw, "the log had more records before", http.StatusConflict)
		return
	case c.Size == w.last.Size && w.last.Size > 0:
		if c.Root != w.last.Root {
			http.Error(rw, "the log had other records before", http.StatusConflict)
		}
		return // it is kept already
	}
	kept, err := w.known(text)
	if err == nil {
		err = w.keep.Keep(kept)
	}
	if err != nil {
		http.Error(rw, err.Error(), http.StatusServiceUnavailable)
		return
	}
	w.last = c
}

// known is a note without signatures of others, which anybody can add.
func (w *Witness) known(text []byte) (string, error) {
	n, err := note.Open(text, note.VerifierList(w.keys...))
	if err != nil {
		return "", err
	}
	kept, err := note.Sign(&note.Note{Text: n.Text, Sigs: n.Sigs})
	return string(kept), err
}

// ParseAnchors reads the checkpoints that a FileAnchor kept, as far as they are whole.
func ParseAnchors(content string) []string {
	content = strings.ReplaceAll(content, "\r\n", "\n") // what went through another system
	var notes []string
	// A note is a text, an empty line and lines that begin with a dash; another empty line
	// ends it here.
	for len(content) > 0 {
		text, rest, ok := strings.Cut(content, "\n\n")
		if !ok {
			break
		}
		signatures, after, ok := strings.Cut(rest, "\n\n")
		if !ok {
			break
		}
		notes = append(notes, text+"\n\n"+signatures+"\n")
		content = after
	}
	return notes
}
