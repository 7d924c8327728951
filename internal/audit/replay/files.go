package replay

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/rogpeppe/go-internal/diff"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
)

// look is one look at the writable layer, with all changes.
type look struct {
	event   *Event
	at      string
	changes []audit.Change
}

// File is a path that differed from the template at a time.
type File struct {
	audit.Change
	Time time.Time // when that was seen
	// Seen is who saw it: "layer", in the writable layer, or "api", written by the files API
	// since.
	Seen string
}

// see takes in a look, or an access by the files API.
func (t *Timeline) see(e *Event) {
	data, ok := e.Data.(*audit.Changes)
	if !ok || e.continues() {
		return
	}
	if e.unseen() {
		t.unseen = e
		return
	}
	l := &look{event: e, at: data.At, changes: data.Changes}
	if data.More > 0 {
		for _, b := range e.Blobs {
			if b.Kind != audit.KindChanges {
				continue
			}
			content, err := t.Content(b.SHA256)
			var all []audit.Change
			if err == nil {
				err = json.Unmarshal(content, &all)
			}
			if err != nil {
				t.warn("%d changes of files are not shown: %v", data.More, err)
				continue
			}
			l.changes = all
		}
	}
	l.changes = slices.Clone(l.changes)
	for i, c := range l.changes { // the layer's root is the sandbox's
		l.changes[i].Path = path.Join("/", c.Path)
	}
	t.looks = append(t.looks, l)
}

// continues says that a record is part of the look before it. Berm once wrote such records without
// the mark: they name content, and tell of no change that it could be of.
func (e *Event) continues() bool {
	data, ok := e.Data.(*audit.Changes)
	return ok && (data.Continues || len(data.Changes)+data.More == 0 && len(e.Blobs) > 0)
}

// unseen says that a look at the writable layer could not be taken.
func (e *Event) unseen() bool {
	data, ok := e.Data.(*audit.Changes)
	return ok && e.Outcome == audit.Failed && len(data.Changes)+data.More == 0
}

// Unseen says why it is not known what the files of a sandbox were after the last look at them, ""
// where that look was the last one that was tried.
func (t *Timeline) Unseen() string {
	last := t.look(t.End)
	if t.unseen == nil || last != nil && last.event.Time.After(t.unseen.Time) {
		return ""
	}
	return fmt.Sprintf("what changed until %s is not known: %s", t.Clock(t.unseen.Time), t.unseen.Reason)
}

// Looked says whether there was a look at the writable layer until a time, and why the last
// one was taken.
func (t *Timeline) Looked(at time.Time) (time.Time, string, bool) {
	if l := t.look(at); l != nil {
		return l.event.Time, l.at, true
	}
	return time.Time{}, "", false
}

// Unlooked says what is known of files where nobody looked at the writable layer, "" where somebody
// did.
func (t *Timeline) Unlooked() string {
	switch {
	case len(t.looks) > 0:
		return ""
	case t.direct:
		return "not on record: it wrote straight into the project"
	case t.Local:
		return "not on record: `berm diff` shows it while the session is there"
	case t.unseen != nil:
		return t.Unseen()
	case !t.Ended:
		return "the writable layer was not looked at yet: `berm audit changes` does"
	}
	return "the writable layer was not looked at"
}

func (t *Timeline) look(at time.Time) (last *look) {
	for _, l := range t.looks {
		if !l.event.Time.After(at) {
			last = l
		}
	}
	return last
}

// FilesAt is what was known at a time to differ from the template, by path: from the last look
// at the writable layer, and what the files API did since.
func (t *Timeline) FilesAt(at time.Time) []File {
	files := map[string]File{}
	var since time.Time
	if l := t.look(at); l != nil {
		since = l.event.Time
		for _, c := range l.changes {
			files[c.Path] = File{c, since, "layer"}
		}
	}
	for _, e := range t.Of(Files, at) {
		a, ok := e.Data.(*audit.FileAccess)
		if !ok || e.Time.Before(since) || e.Outcome != audit.OK {
			continue
		}
		add := func(name, op, kind string) {
			if before, ok := files[name]; ok && before.Op == "add" && op == "modify" {
				op = "add"
			}
			files[name] = File{audit.Change{Path: name, Op: op, Kind: kind, Size: a.Size, After: a.SHA256}, e.Time, "api"}
		}
		switch a.Op {
		case "write":
			add(a.Path, "modify", "file")
		case "mkdir":
			add(a.Path, "add", "dir")
		case "remove":
			add(a.Path, "delete", "file")
		case "move":
			add(a.Path, "delete", "file")
			add(a.To, "modify", "file")
		}
	}
	list := make([]File, 0, len(files))
	for _, f := range files {
		list = append(list, f)
	}
	slices.SortFunc(list, func(a, b File) int { return strings.Compare(a.Path, b.Path) })
	return list
}

// maxText bounds a file whose lines are compared, in bytes.
const maxText = 1 << 20

// Diff tells how a file that differed at a time had changed since it was seen before: as a
// unified diff, or in a sentence where its content was not kept or is no text.
func (t *Timeline) Diff(f File) string {
	oldHash := cmp.Or(f.KeptBefore, f.Before)
	for _, l := range t.looks {
		if !l.event.Time.Before(f.Time) {
			break
		}
		for _, c := range l.changes {
			if c.Path == f.Path {
				oldHash = cmp.Or(c.KeptAfter, c.After)
			}
		}
	}
	switch {
	case f.Kind == "link":
		return fmt.Sprintf("a link to %s", f.Target)
	case f.Op == "delete":
		return "it was deleted"
	case f.Op == "mode":
		return fmt.Sprintf("its mode is %s now", f.Mode)
	case f.Kind != "file":
		return "a " + f.Kind
	case f.After == "":
		return "its content is not known"
	}
	read := func(hash, what string) ([]byte, string) {
		content, err := t.Content(hash)
		switch {
		case berm.KindOf(err) == berm.NotFound:
			return nil, fmt.Sprintf("%s was not kept (SHA-256 %s)", what, hash)
		case err != nil:
			return nil, err.Error()
		case len(content) > maxText:
			return nil, fmt.Sprintf("%s is too large to compare (%d bytes)", what, len(content))
		case !utf8.Valid(content) || bytes.IndexByte(content, 0) >= 0:
			return nil, fmt.Sprintf("%s is no text (%d bytes)", what, len(content))
		}
		return content, ""
	}
	now, why := read(cmp.Or(f.KeptAfter, f.After), "its content")
	if why != "" {
		return why
	}
	var before []byte
	name := strings.TrimPrefix(f.Path, "/")
	from, note := "a/"+name, ""
	switch {
	case oldHash != "":
		if before, why = read(oldHash, "the content before"); why != "" {
			note = why + "; all of it now:\n"
		}
	case f.Op != "add":
		note = "what it held before is not known; all of it now:\n"
	default:
		from = "/dev/null"
	}
	if text := diff.Diff(from, before, "b/"+name, now); text != nil {
		_, text, _ := strings.Cut(string(text), "\n") // "diff a b"
		return note + text
	}
	if f.Before != f.After && (f.KeptBefore != "" || f.KeptAfter != "") {
		return "it differs in what is masked"
	}
	return "its content is as before"
}

// Counts says how many paths were added, changed and deleted.
func Counts(files []File) (added, changed, deleted int) {
	for _, f := range files {
		switch {
		case f.Kind == "dir" && f.Op != "delete":
		case f.Op == "add":
			added++
		case f.Op == "delete":
			deleted++
		default:
			changed++
		}
	}
	return added, changed, deleted
}
