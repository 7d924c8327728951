// Package forward sends the records of a log on to other systems.
package forward

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/trail"
)

// How long a target that fails is left alone: longer each time.
const (
	retryFirst = time.Second
	retryLast  = 5 * time.Minute
)

// Target takes records.
type Target interface {
	// Send sends lines, at least one. It returns nil when the target has all of them; it gets
	// them again otherwise.
	Send(ctx context.Context, lines []trail.Line) error
	// AtOnce is how many lines Send takes at most.
	AtOnce() int
}

// Forwarder sends records to a target, in order, each at least once: the log is the queue, and
// a file tells how far it got, so that neither a crash nor a target that is away for days loses
// one.
type Forwarder struct {
	Dir    string // of the log
	Places string // directory of files that tell how far targets got; it is made
	Name   string // of the target, for the file
	Types  []string
	Target Target
	Log    *slog.Logger
}

// ParseTypes checks a list of record types, each of which stands for all that begin so too, as
// in a query: sandbox, sandbox.*, and * for all. Kind Invalid.
func ParseTypes(types []string) error {
	for _, t := range types {
		if !slices.ContainsFunc(audit.Types, func(known audit.Type) bool { return matches(t, known) }) {
			return berm.Errorf(berm.Invalid, "there are no records of type %q", t).WithHint("docs/audit.md lists them; sandbox are all about the life of sandboxes")
		}
	}
	return nil
}

func matches(want string, t audit.Type) bool {
	prefix, wild := strings.CutSuffix(want, "*")
	return string(t) == want || wild && strings.HasPrefix(string(t), prefix) || !wild && strings.HasPrefix(string(t), want+".")
}

// wants reports whether a record is sent.
func (f *Forwarder) wants(t audit.Type) bool {
	return slices.ContainsFunc(f.Types, func(want string) bool { return matches(want, t) })
}

// Run sends until ctx ends. It begins with the records that come after next, if it never ran
// before.
func (f *Forwarder) Run(ctx context.Context, next uint64) {
	at, err := f.load()
	if err != nil {
		f.Log.Error("records are sent from now on", "target", f.Name, "error", err)
	}
	if at == 0 {
		if at = next; f.save(at) != nil {
			f.Log.Error("the place in the log cannot be kept", "target", f.Name)
		}
	}
	for ctx.Err() == nil {
		at = f.follow(ctx, at)
		select {
		case <-ctx.Done():
		case <-time.After(retryLast):
		}
	}
}

// follow sends the records from a number on until the log cannot be read, or ctx ends. It
// returns the number of the next.
func (f *Forwarder) follow(ctx context.Context, at uint64) uint64 {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	lines := make(chan trail.Line, f.Target.AtOnce())
	go func() {
		defer close(lines)
		for line, err := range trail.Dir(f.Dir).Follow(ctx, at) {
			if err != nil {
				f.Log.Error("records are not sent", "target", f.Name, "error", err)
				return
			}
			if !f.wants(line.Type) {
				continue
			}
			line.Raw = bytes.Clone(line.Raw)
			select {
			case lines <- line:
			case <-ctx.Done():
				return
			}
		}
	}()
	for line := range lines {
		batch := []trail.Line{line}
		for waiting := true; waiting && len(batch) < f.Target.AtOnce(); {
			select {
			case line, ok := <-lines:
				if waiting = ok; ok {
					batch = append(batch, line)
				}
			default:
				waiting = false
			}
		}
		if !f.send(ctx, batch) {
			return at
		}
		at = batch[len(batch)-1].Seq + 1
		if err := f.save(at); err != nil {
			f.Log.Error("the place in the log cannot be kept", "target", f.Name, "error", err)
		}
	}
	return at
}

// send tries until the target has the lines. It returns false when ctx ends before.
func (f *Forwarder) send(ctx context.Context, lines []trail.Line) bool {
	for pause := retryFirst; ; pause = min(2*pause, retryLast) {
		err := f.Target.Send(ctx, lines)
		if err == nil {
			return true
		}
		if ctx.Err() != nil {
			return false
		}
		f.Log.Warn("records are sent again later", "target", f.Name, "first", lines[0].Seq, "in", pause, "error", err)
		select {
		case <-ctx.Done():
			return false
		case <-time.After(pause):
		}
	}
}

func (f *Forwarder) path() string { return filepath.Join(f.Places, "sent-"+f.Name+".json") }

type place struct {
	Next uint64 `json:"next"` // the number of the record to look at
}

func (f *Forwarder) load() (uint64, error) {
	content, err := os.ReadFile(f.path())
	if errors.Is(err, fs.ErrNotExist) { // before there were Places
		content, err = os.ReadFile(filepath.Join(f.Dir, filepath.Base(f.path())))
	}
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	var p place
	if err == nil {
		err = json.Unmarshal(content, &p)
	}
	return p.Next, err
}

func (f *Forwarder) save(next uint64) error {
	content, err := json.Marshal(place{next})
	if err == nil {
		err = os.MkdirAll(f.Places, 0o700)
	}
	if err == nil {
		err = os.WriteFile(f.path()+".new", content, 0o600)
	}
	if err == nil {
		err = os.Rename(f.path()+".new", f.path())
	}
	return err
}
