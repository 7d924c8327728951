package trail

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/failpoint"
)

// Erasure is records of one sandbox that were, or are to be, taken out of a log. Their hashes
// stay, so that the rest is proved as before.
type Erasure struct {
	By      uint64         `json:"by"` // the record that tells of it, the first if there are several; 0 while there is none
	Sandbox berm.SandboxID `json:"sandbox"`
	Actor   audit.Actor    `json:"actor"`
	Reason  string         `json:"reason"`
	Time    time.Time      `json:"time"`
	Records uint64         `json:"records"`
	// Left is how many of them are still there: a crash interrupted it.
	Left uint64 `json:"left,omitempty"`
	// What only who erases learns.
	Bytes    int64     `json:"bytes,omitempty"` // of records, not packed, and contents
	Contents int       `json:"contents,omitempty"`
	First    time.Time `json:"first,omitzero"` // of the records
	Last     time.Time `json:"last,omitzero"`
	// Named is how many records of others hold the sandbox's id; they stay.
	Named int `json:"named,omitempty"`

	spans spans
	blobs map[string]int64 // sizes by hash
	named time.Time        // of the last record that names one, or when one was kept last
}

// Erasable says whether a record goes when its sandbox is erased. What tells why it was kept or
// erased stays.
func Erasable(t audit.Type) bool {
	return t != audit.Erase && t != audit.HoldSet && t != audit.HoldEnd
}

// eraseFile is in the directory of a log while an erasure is under way.
const eraseFile = "erasing"

// underway is what an interrupted erasure is finished by.
type underway struct {
	Sandbox berm.SandboxID `json:"sandbox"`
	After   uint64         `json:"after"` // the records that tell of it follow this one
	Blobs   []string       `json:"blobs"` // that only erased records named
	Time    time.Time      `json:"time"`  // when that was so
}

// erasureText bounds the numbers that one record has room for, in bytes.
const erasureText = 16 << 10

// Erase takes what the log has of a sandbox out of it: records that tell so, by whom and why, are
// signed first. With dry it only says what that would be. The sandbox must have ended. Kinds:
// NotFound when there is nothing of it, Denied while it is held, Conflict until two minutes after
// content of it was kept, Unavailable; Left tells then whether it is on record.
func (l *Log) Erase(e Erasure, dry bool) (Erasure, error) { return l.erase(e, dry, time.Now()) }

func (l *Log) erase(e Erasure, dry bool, now time.Time) (Erasure, error) {
	l.files.Lock()
	defer l.files.Unlock()
	if e.Sandbox == "" { // that is what records of the server have
		return e, berm.Errorf(berm.Invalid, "which sandbox's records are to be erased?")
	}
	if err := l.resume(); err != nil {
		return e, err
	}
	after := l.Seq()
	if err := Dir(l.dir).find(&e); err != nil {
		return e, err
	}
	if e.Records == 0 {
		return e, berm.Errorf(berm.NotFound, "the log has no record of sandbox %s that could be erased", e.Sandbox)
	}
	if err := l.mayErase(e, now); err != nil || dry {
		return e, err
	}
	// From here on all of them are in files that nobody writes to.
	if err := l.rotate(); err != nil {
		return e, err
	}
	marker, err := json.Marshal(underway{e.Sandbox, after, slices.Sorted(maps.Keys(e.blobs)), now})
	if err == nil {
		err = writeFile(filepath.Join(l.dir, eraseFile), string(marker))
	}
	if err == nil {
		err = failpoint.Hit("audit/erase")
	}
	if err == nil {
		err = l.EmitAll(e.records())
	}
	if err != nil {
		_ = os.Remove(filepath.Join(l.dir, eraseFile)) // without a record it says nothing
		return e, err
	}
	if err := l.resume(); err != nil {
		e.Left = e.Records
		return e, berm.Errorf(berm.KindOf(err), "the erasure is on record and not finished: %w", err).WithHint("the server tries again every minute")
	}
	for line, err := range Dir(l.dir).Records(after + 1) {
		if err == nil && line.Type == audit.Erase && line.Sandbox == e.Sandbox {
			e.By, e.Time = line.Seq, line.Time
			break
		}
	}
	return e, nil
}

// mayErase refuses what must not be erased, or not yet.
func (l *Log) mayErase(e Erasure, now time.Time) error {
	if l.holds != nil {
		holds, err := l.holds()
		if err != nil {
			return berm.Errorf(berm.Unavailable, "which sandboxes are held: %w", err)
		}
		if slices.Contains(holds, e.Sandbox) {
			return berm.Errorf(berm.Denied, "sandbox %s is held", e.Sandbox).
				WithHint("`berm audit hold list` tells why, and `berm audit hold remove` ends it")
		}
	}
	// A record of another sandbox may be about to name the same content, which was kept before.
	if wait := e.named.Add(blobMargin).Sub(now); wait > 0 {
		return berm.Errorf(berm.Conflict, "content of sandbox %s was kept in the last two minutes", e.Sandbox).
			WithHint("try again in %s", wait.Round(time.Second))
	}
	return nil
}

// records are those that tell of an erasure.
func (e Erasure) records() (all []audit.Record) {
	add := func(part spans, text string) {
		all = append(all, audit.Record{
			Sandbox: e.Sandbox, Actor: e.Actor, Type: audit.Erase, Src: audit.OwnSource, Trust: audit.TrustHost, Outcome: audit.OK, Reason: e.Reason,
			Data: audit.Erasure{Records: int(part.count()), Seqs: text},
		})
	}
	rest := e.spans
	for len(rest) > 0 {
		text, n := "", 0
		for n < len(rest) && len(text) < erasureText {
			text, n = text+","+spanText(rest[n]), n+1
		}
		add(rest[:n], text[1:])
		rest = rest[n:]
	}
	return all
}

// erasureOf reads the data of a record of an erasure.
func erasureOf(data json.RawMessage) (e Erasure, err error) {
	var told audit.Erasure
	if err = json.Unmarshal(data, &told); err == nil {
		e.spans, err = parseSpans(told.Seqs)
	}
	e.Records = e.spans.count()
	return e, err
}

// Erased returns the numbers that a record of an erasure names.
func Erased(line Line) ([]audit.Removal, error) {
	var h header
	if err := json.Unmarshal(line.Raw, &h); err != nil {
		return nil, err
	}
	e, err := erasureOf(h.Data)
	return e.spans, err
}

// find looks for what a log has of a sandbox.
func (d Dir) find(e *Erasure) error {
	id := []byte(e.Sandbox)
	e.blobs = map[string]int64{}
	for raw, err := range d.raw(0) {
		if err != nil {
			return berm.Errorf(berm.Internal, "audit log: %w", err).WithHint("`berm audit verify` tells what is wrong")
		}
		if !bytes.Contains(raw, id) {
			continue
		}
		var h header
		if err := json.Unmarshal(raw, &h); err != nil {
			return berm.Errorf(berm.Internal, "audit log: %w", err).WithHint("`berm audit verify` tells what is wrong")
		}
		switch {
		case h.Sandbox != e.Sandbox:
			e.Named++
			continue
		case !Erasable(h.Type):
			continue
		}
		if last := len(e.spans) - 1; last >= 0 && e.spans[last].To+1 == h.Seq {
			e.spans[last].To = h.Seq
		} else {
			e.spans = append(e.spans, audit.Removal{From: h.Seq, To: h.Seq})
		}
		if e.Records == 0 {
			e.First = h.Time
		}
		e.Records, e.Last, e.Bytes = e.Records+1, h.Time, e.Bytes+int64(len(raw))+1
		for _, b := range h.Blobs {
			e.blobs[b.SHA256], e.named = b.Size, h.Time
		}
	}
	if err := d.keepNamed(e.blobs, e.spans); err != nil {
		return err
	}
	for hash, size := range e.blobs {
		e.Contents, e.Bytes = e.Contents+1, e.Bytes+size
		// Another sandbox may have kept it again, and not be named with it yet.
		if info, err := os.Stat(filepath.Join(string(d), audit.BlobDir, hash[:2], hash)); err == nil && info.ModTime().After(e.named) {
			e.named = info.ModTime()
		}
	}
	return nil
}

// keepNamed leaves out contents that other records than some name.
func (d Dir) keepNamed(blobs map[string]int64, but spans) error {
	if len(blobs) == 0 {
		return nil
	}
	for raw, err := range d.raw(0) {
		if err != nil {
			return berm.Errorf(berm.Internal, "audit log: %w", err)
		}
		if !bytes.Contains(raw, []byte(`"blobs":`)) {
			continue
		}
		var h header
		if err := decode(raw, &h, false); err != nil {
			return berm.Errorf(berm.Internal, "audit log: %w", err)
		}
		if but.has(h.Seq) {
			continue
		}
		for _, b := range h.Blobs {
			delete(blobs, b.SHA256)
		}
	}
	return nil
}

// resume does what is left of an erasure that is on record. The caller holds files, or is alone.
func (l *Log) resume() error {
	marker := filepath.Join(l.dir, eraseFile)
	text, err := os.ReadFile(marker)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return berm.Errorf(berm.Internal, "erase records: %w", err)
	}
	var u underway
	if err := json.Unmarshal(text, &u); err != nil {
		return berm.Errorf(berm.Internal, "erase records: %s: %w", eraseFile, err)
	}
	var gone spans
	for line, err := range Dir(l.dir).Records(u.After + 1) {
		if err != nil {
			return berm.Errorf(berm.Internal, "audit log: %w", err)
		}
		if line.Type == audit.Erase && line.Sandbox == u.Sandbox {
			part, err := Erased(line)
			if err != nil {
				return berm.Errorf(berm.Internal, "audit log: record %d: %w", line.Seq, err)
			}
			gone = append(gone, part...)
		}
	}
	if len(gone) > 0 { // else a crash came before it was on record
		if err := l.takeOut(gone, u); err != nil {
			return err
		}
	}
	if err := os.Remove(marker); err != nil {
		return berm.Errorf(berm.Internal, "erase records: %w", err)
	}
	return nil
}

// takeOut removes records from the files that are not written to any more, and then contents
// that no other record names.
func (l *Log) takeOut(gone spans, u underway) error {
	if err := l.secure(); err != nil {
		return err
	}
	names, firsts, err := Dir(l.dir).segments()
	if err != nil {
		return err
	}
	for i, name := range names[:len(names)-1] {
		last := firsts[i+1] - 1 // of the current file it may be 0, and then this is no bound
		if firsts[i] > gone[len(gone)-1].To || last < gone[0].From {
			continue
		}
		if err := l.rewrite(name, gone); err != nil {
			return err
		}
		if err := failpoint.Hit("audit/erase-file"); err != nil {
			return err
		}
	}
	blobs := map[string]int64{}
	for _, hash := range u.Blobs {
		blobs[hash] = 0
	}
	if err := Dir(l.dir).keepNamed(blobs, nil); err != nil {
		return err
	}
	before := u.Time
	if margin := time.Now().Add(-blobMargin); margin.After(before) {
		before = margin
	}
	left := 0
	for hash := range blobs {
		removed, err := l.removeBlob(filepath.Join(l.dir, audit.BlobDir, hash[:2], hash), before)
		if err != nil {
			return berm.Errorf(berm.Internal, "erase content: %w", err)
		}
		if !removed {
			left++
		}
		if err := failpoint.Hit("audit/erase-content"); err != nil {
			return err
		}
	}
	if left > 0 { // a record that is not there yet decides
		return berm.Errorf(berm.Unavailable, "%d pieces of content were kept again meanwhile", left)
	}
	return nil
}

// rewrite writes a file of the log anew without some records, and removes it when it had no
// others. Readers find one or the other.
func (l *Log) rewrite(name string, gone spans) error {
	plain := strings.TrimSuffix(strings.TrimSuffix(filepath.Join(l.dir, name), packedEnd), plainEnd) + plainEnd
	packed := strings.TrimSuffix(plain, plainEnd) + packedEnd
	kept, left := 0, 0
	err := compress(packed+".new", func(w io.Writer) error {
		for raw, err := range Dir(l.dir).file(name) {
			if err != nil {
				return err
			}
			var h header
			if err := decode(raw, &h, true); err != nil {
				return err
			}
			if gone.has(h.Seq) {
				left++
				continue
			}
			kept++
			if _, err := w.Write(raw); err != nil {
				return err
			}
			if _, err := w.Write([]byte{'\n'}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := failpoint.Hit("audit/erase-written"); err != nil {
		return err
	}
	remove := []string{plain}
	switch {
	case left == 0:
		remove = []string{packed + ".new"}
	case kept == 0:
		remove = []string{plain, packed, packed + ".new"}
	default:
		if err := os.Rename(packed+".new", packed); err != nil {
			return berm.Errorf(berm.Unavailable, "erase records: %w", err)
		}
	}
	for _, path := range remove {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return berm.Errorf(berm.Unavailable, "erase records: %w", err)
		}
	}
	return nil
}
