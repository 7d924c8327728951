package trail

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/failpoint"
)

// blobMargin is how much older than its record a blob may be: it is kept first.
const blobMargin = 2 * time.Minute

// shares is in how many files a log is kept at least, so that little more than what is too much
// is removed at once.
const shares = 10

// part is one file of the log.
type part struct {
	name  string
	first uint64    // number of its first record; 0 of the current one if it is the only one
	began time.Time // of its first record; zero if it has none
	size  int64
}

// content is one blob.
type content struct {
	path string
	at   time.Time
	size int64
}

// retain removes what is older than the log keeps, and then what is more than it may take, whole
// files from the oldest on but for those with a record of a sandbox that is held. Records tell
// so before, and the tree keeps the hashes, so that the rest is proved as before.
func (l *Log) retain(now time.Time) error {
	if l.keep == 0 && l.limit == 0 {
		return nil
	}
	parts, err := Dir(l.dir).parts()
	if err != nil {
		return err
	}
	blobs, err := contents(filepath.Join(l.dir, audit.BlobDir))
	if err != nil {
		return err
	}
	// Files end by their age and their share too, so that a log that grows slowly, or whose
	// content is large, gets old files.
	if last := parts[len(parts)-1]; !last.began.IsZero() && (l.keep > 0 && now.Sub(last.began) > l.keep/shares ||
		l.limit > 0 && last.size+sizeSince(blobs, last.began) > l.limit/shares) {
		if err := l.rotate(); err != nil {
			return err
		}
		if parts, err = Dir(l.dir).parts(); err != nil {
			return err
		}
	}
	remove, rest, err := l.overdue(parts, blobs, now)
	if err != nil {
		return err
	}
	return l.remove(remove, rest)
}

// remove removes files of the log and blobs.
func (l *Log) remove(remove []removal, rest []content) error {
	if !slices.ContainsFunc(remove, func(r removal) bool { return len(r.names) > 0 }) {
		return nil
	}
	for _, r := range remove {
		if err := l.Emit(audit.Record{
			Actor: audit.Actor{Type: "system"}, Type: audit.Removed, Src: audit.OwnSource, Trust: audit.TrustHost, Outcome: audit.OK,
			Reason: r.why, Data: r.Removal,
		}); err != nil {
			return err
		}
	}
	if err := l.secure(); err != nil {
		return err
	}
	for _, r := range remove {
		for _, name := range r.names {
			if err := failpoint.Hit("audit/remove"); err != nil {
				return err
			}
			if err := os.Remove(filepath.Join(l.dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return berm.Errorf(berm.Internal, "remove old records: %w", err)
			}
		}
	}
	for _, b := range rest {
		if _, err := l.removeBlob(b.path, b.at); err != nil {
			return berm.Errorf(berm.Internal, "remove old content: %w", err)
		}
	}
	return nil
}

// removal is adjacent files that are to be removed, for one reason, or none that were removed
// before: what told of that may go now.
type removal struct {
	audit.Removal
	names []string
	why   string
}

// overdue says which files are to be removed, and which blobs with them: those that are older than
// all files that stay, but for what those name that begin soon after, or have a held sandbox.
func (l *Log) overdue(parts []part, blobs []content, now time.Time) (remove []removal, rest []content, err error) {
	var holds []berm.SandboxID
	if l.holds != nil {
		if holds, err = l.holds(); err != nil {
			return nil, nil, fmt.Errorf("which sandboxes are held: %w", err)
		}
	}
	var total int64
	for _, p := range parts {
		total += p.size
	}
	total += sizeSince(blobs, time.Time{})
	needed := map[string]bool{}
	need := func(names []string) {
		for _, name := range names {
			needed[name] = true
		}
	}
	var end time.Time                        // of what is removed
	from, stays := uint64(1), false          // after the last record that stays or is removed; whether any does
	for i, p := range parts[:len(parts)-1] { // the current one ends before
		next := parts[i+1]
		until := next.began // of what p has
		if until.IsZero() {
			until = now
		}
		why := ""
		switch age := now.Sub(until); {
		case age <= blobMargin: // a record may still come that names content of then
		case l.keep > 0 && age > l.keep:
			why = "they are older than " + l.keep.String()
		case l.limit > 0 && total > l.limit:
			why = fmt.Sprintf("the log takes more than %d bytes", l.limit)
		}
		if why == "" {
			break
		}
		held := false
		if len(holds) > 0 {
			has, err := Dir(l.dir).named(p.name, holds)
			if err != nil {
				return nil, nil, err
			}
			// What tells why records are missing in a file that stays is kept like that.
			if held = has.held || stays && has.erasure; held {
				need(has.blobs)
				if p.first > from {
					remove = append(remove, removal{audit.Removal{From: from, To: p.first - 1}, nil, "they were removed before"})
				}
				from, stays = has.last+1, true
			}
		}
		if !held {
			r := removal{audit.Removal{From: from, To: next.first - 1}, []string{p.name}, why}
			from = next.first
			if last := len(remove) - 1; last >= 0 && remove[last].To+1 == r.From && remove[last].why == why {
				remove[last].To, remove[last].names = r.To, append(remove[last].names, p.name)
			} else {
				remove = append(remove, r)
			}
			end = until
		}
		total -= p.size // what is held takes nothing of the limit: the rest would be gone for it
		for len(blobs) > 0 && blobs[0].at.Before(until) {
			rest = append(rest, blobs[0])
			total -= blobs[0].size
			blobs = blobs[1:]
		}
	}
	for _, p := range parts {
		if p.began.Before(end) || p.began.After(end.Add(blobMargin)) {
			continue
		}
		has, err := Dir(l.dir).named(p.name, nil)
		if err != nil {
			return nil, nil, err
		}
		need(has.blobs)
	}
	return remove, slices.DeleteFunc(rest, func(b content) bool { return !b.at.Before(end) || needed[filepath.Base(b.path)] }), nil
}

// parts lists the files of a log, the current one last.
func (d Dir) parts() ([]part, error) {
	names, firsts, err := d.segments()
	if err != nil {
		return nil, err
	}
	var all []part
	for i, name := range names {
		p := part{name: name, first: firsts[i]}
		for raw, err := range d.file(name) {
			var h header
			if err == nil {
				err = decode(raw, &h, false)
			}
			if err != nil {
				return nil, berm.Errorf(berm.Internal, "audit log: %w", err)
			}
			p.began, p.first = h.Time, h.Seq
			break
		}
		switch info, err := os.Stat(filepath.Join(string(d), name)); {
		case err == nil:
			p.size = info.Size()
		case !errors.Is(err, fs.ErrNotExist): // the current one may not be there yet
			return nil, berm.Errorf(berm.Internal, "audit log: %w", err)
		}
		all = append(all, p)
	}
	return all, nil
}

// holding is what a file of the log has.
type holding struct {
	blobs   []string // contents that its records name
	last    uint64   // its last record
	held    bool     // one is of a sandbox that is held
	erasure bool     // one tells of an erasure
}

// named reads a file of the log.
func (d Dir) named(name string, holds []berm.SandboxID) (has holding, err error) {
	for raw, err := range d.file(name) {
		var h header
		if err == nil {
			err = decode(raw, &h, true)
		}
		if err != nil {
			return has, berm.Errorf(berm.Internal, "audit log: %w", err)
		}
		has.last = h.Seq
		has.held = has.held || slices.ContainsFunc(holds, func(id berm.SandboxID) bool { return isOf(raw, id) })
		has.erasure = has.erasure || h.Type == audit.Erase
		for _, b := range h.Blobs {
			has.blobs = append(has.blobs, b.SHA256)
		}
	}
	return has, nil
}

// isOf reports whether a line is of a sandbox. It may say so of another line that has such a
// text: that keeps more, not less.
func isOf(raw []byte, id berm.SandboxID) bool {
	return bytes.Contains(raw, []byte(`"sandbox":"`+string(id)+`"`))
}

// Team is whose a sandbox is or was, by its newest records that tell it. NotFound when the log has none of it.
func (d Dir) Team(id berm.SandboxID) (berm.Team, error) {
	names, _, err := d.segments()
	if err != nil {
		return "", err
	}
	for _, name := range slices.Backward(names) {
		found := false
		for raw, err := range d.file(name) {
			if err != nil {
				return "", berm.Errorf(berm.Internal, "audit log: %w", err)
			}
			if !isOf(raw, id) {
				continue
			}
			var record struct {
				Sandbox berm.SandboxID
				Team    berm.Team
			}
			if json.Unmarshal(raw, &record) != nil || record.Sandbox != id {
				continue
			}
			if found = true; record.Team != "" {
				return record.Team, nil
			}
		}
		if found {
			return "", nil
		}
	}
	return "", berm.Errorf(berm.NotFound, "the log in %s has no record of sandbox %s", d, id)
}

// contents lists the blobs in a directory, the oldest first. A blob that a new record names is
// written anew, so that its time is that of the last record that does. What has no name yet is still
// written.
func contents(dir string) ([]content, error) {
	var all []content
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() && filepath.Dir(path) != dir {
			var info fs.FileInfo
			if info, err = e.Info(); err == nil {
				all = append(all, content{path, info.ModTime(), info.Size()})
			}
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "content of the audit log: %w", err)
	}
	slices.SortFunc(all, func(a, b content) int { return cmp.Or(a.at.Compare(b.at), cmp.Compare(a.path, b.path)) })
	return all, nil
}

// sizeSince is what blobs since a time take.
func sizeSince(blobs []content, since time.Time) (size int64) {
	for _, b := range slices.Backward(blobs) {
		if b.at.Before(since) {
			break
		}
		size += b.size
	}
	return size
}
