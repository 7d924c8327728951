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
	Team    berm.Team      `json:"team,omitempty"` // whose the sandbox was
	Actor   audit.Actor    `json:"actor"`
	Reason  string         `json:"reason"`
	Time    time.Time      `json:"time"`
	Records uint64         `json:"records"`
	// Left is how many of them are still there: a crash interrupted it.
	Left uint64 `json:"left,omitempty"`
	// What only who erases learns. Contents that others name, too, stay and count: whoever has content is not told whether
	// another has the same.
	Bytes    int64     `json:"bytes,omitempty"` // of records, not packed, and contents
	Contents int       `json:"contents,omitempty"`
	First    time.Time `json:"first,omitzero"` // of the records
	Last     time.Time `json:"last,omitzero"`
	// Named is how many records of others hold the sandbox's id; they stay. It is not counted of several.
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
	After uint64    `json:"after"` // the records that tell of it follow this one
	Blobs []string  `json:"blobs"` // that only erased records named
	Time  time.Time `json:"time"`  // when that was so
}

// erasureText bounds the numbers that one record has room for, in bytes.
const erasureText = 16 << 10

// Erase takes what the log has of a sandbox out of it: records that tell so, by whom and why, are
// signed first. With dry it only says what that would be. The sandbox must have ended. Kinds:
// NotFound when there is nothing of it, Denied while it is held, Conflict until two minutes after
// content of it was kept, Unavailable; Left tells then whether it is on record.
func (l *Log) Erase(e Erasure, dry bool) (Erasure, error) { return l.erase(e, dry, time.Now()) }

func (l *Log) erase(e Erasure, dry bool, now time.Time) (Erasure, error) {
	all := []Erasure{e}
	err := l.eraseAll(all, dry, now)
	return all[0], err
}

// EraseAll erases several sandboxes by one change of the files. Those that must not be erased are left, with By 0,
// and the error is that of the first of them.
func (l *Log) EraseAll(all []Erasure) ([]Erasure, error) {
	all = slices.Clone(all)
	err := l.eraseAll(all, false, time.Now())
	return all, err
}

func (l *Log) eraseAll(all []Erasure, dry bool, now time.Time) error {
	l.files.Lock()
	defer l.files.Unlock()
	if slices.ContainsFunc(all, func(e Erasure) bool { return e.Sandbox == "" }) { // that is what records of the server have
		return berm.Errorf(berm.Invalid, "which sandbox's records are to be erased?")
	}
	if err := l.resume(); err != nil {
		return err
	}
	after := l.Seq()
	if err := Dir(l.dir).find(all); err != nil {
		return err
	}
	may, refused := l.mayErase(all, now)
	if len(may) == 0 || dry {
		return refused
	}
	var gone spans
	var records []audit.Record
	u := underway{After: after, Time: now}
	for _, e := range may {
		gone, records = append(gone, e.spans...), append(records, e.records()...)
		u.Blobs = slices.AppendSeq(u.Blobs, maps.Keys(e.blobs))
	}
	// From here on all of them are in files that nobody writes to.
	if inCurrent, err := Dir(l.dir).inCurrent(gone); err != nil {
		return err
	} else if inCurrent {
		if err := l.rotate(); err != nil {
			return err
		}
	}
	marker, err := json.Marshal(u)
	if err == nil {
		err = writeFile(filepath.Join(l.dir, eraseFile), string(marker))
	}
	if err == nil {
		err = failpoint.Hit("audit/erase")
	}
	if err == nil {
		err = l.EmitAll(records)
	}
	if err != nil {
		_ = os.Remove(filepath.Join(l.dir, eraseFile)) // without a record it says nothing
		return err
	}
	if err := l.resume(); err != nil {
		for _, e := range may {
			e.Left = e.Records
		}
		return berm.Errorf(berm.KindOf(err), "the erasure is on record and not finished: %w", err).WithHint("the server tries again every minute")
	}
	for line, err := range Dir(l.dir).Records(after + 1) {
		if err != nil || line.Type != audit.Erase {
			continue
		}
		if at := slices.IndexFunc(may, func(e *Erasure) bool { return e.Sandbox == line.Sandbox && e.By == 0 }); at >= 0 {
			may[at].By, may[at].Time = line.Seq, line.Time
		}
	}
	return refused
}

// inCurrent reports whether some records are in the file that is written to.
func (d Dir) inCurrent(gone spans) (bool, error) {
	for raw, err := range d.file(current) {
		if err != nil {
			return false, berm.Errorf(berm.Internal, "audit log: %w", err)
		}
		first, ok := seqOf(raw)
		return !ok || slices.ContainsFunc(gone, func(s audit.Removal) bool { return s.To >= first }), nil
	}
	return false, nil
}

// mayErase leaves out what must not be erased, or not yet: the error tells why of the first.
func (l *Log) mayErase(all []Erasure, now time.Time) (may []*Erasure, refused error) {
	var holds []berm.SandboxID
	if l.holds != nil {
		var err error
		if holds, err = l.holds(); err != nil {
			return nil, berm.Errorf(berm.Unavailable, "which sandboxes are held: %w", err)
		}
	}
	for i := range all {
		e := &all[i]
		if err := e.refused(holds, now); err == nil {
			may = append(may, e)
		} else if refused == nil {
			refused = err
		}
	}
	return may, refused
}

// refused says why an erasure that was looked for must not be, or not yet.
func (e *Erasure) refused(holds []berm.SandboxID, now time.Time) error {
	if e.Records == 0 {
		return berm.Errorf(berm.NotFound, "the log has no record of sandbox %s that could be erased", e.Sandbox)
	}
	if slices.Contains(holds, e.Sandbox) {
		return berm.Errorf(berm.Denied, "sandbox %s is held", e.Sandbox).
			WithHint("`berm audit hold list` tells why, and `berm audit hold remove` ends it")
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
			Team: e.Team, Sandbox: e.Sandbox, Actor: e.Actor, Type: audit.Erase, Src: audit.OwnSource, Trust: audit.TrustHost, Outcome: audit.OK, Reason: e.Reason,
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

// find looks for what a log has of sandboxes.
func (d Dir) find(all []Erasure) error {
	of := map[berm.SandboxID]*Erasure{}
	for i := range all {
		all[i].blobs = map[string]int64{}
		of[all[i].Sandbox] = &all[i]
	}
	for raw, err := range d.raw(0) {
		if err != nil {
			return berm.Errorf(berm.Internal, "audit log: %w", err).WithHint("`berm audit verify` tells what is wrong")
		}
		e := of[berm.SandboxID(firstSandbox(raw))]
		if e == nil {
			if len(all) == 1 && bytes.Contains(raw, []byte(all[0].Sandbox)) {
				all[0].Named++
			}
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
	var gone spans
	blobs := map[string]int64{}
	for i := range all {
		gone = append(gone, all[i].spans...)
		maps.Copy(blobs, all[i].blobs)
	}
	if err := d.keepNamed(blobs, gone.merge()); err != nil {
		return err
	}
	for i := range all {
		e := &all[i]
		for hash, size := range e.blobs {
			e.Contents, e.Bytes = e.Contents+1, e.Bytes+size
			if _, alone := blobs[hash]; !alone {
				delete(e.blobs, hash)
				continue
			}
			// Another sandbox may have kept it again, and not be named with it yet.
			if info, err := os.Stat(filepath.Join(string(d), audit.BlobDir, hash[:2], hash)); err == nil && info.ModTime().After(e.named) {
				e.named = info.ModTime()
			}
		}
	}
	return nil
}

// firstSandbox is whose record a line is. Of one that is nobody's it may be an id that its data name.
func firstSandbox(raw []byte) []byte {
	_, rest, _ := bytes.Cut(raw, []byte(`"sandbox":"`))
	id, _, _ := bytes.Cut(rest, []byte{'"'})
	return id
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
		if line.Type == audit.Erase {
			part, err := Erased(line)
			if err != nil {
				return berm.Errorf(berm.Internal, "audit log: record %d: %w", line.Seq, err)
			}
			gone = append(gone, part...)
		}
	}
	if len(gone) > 0 { // else a crash came before it was on record
		if err := l.takeOut(gone.merge(), u); err != nil {
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
		if gone.common(spans{{From: firsts[i], To: last}}) == 0 {
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
