// Package layer records how what a sandbox wrote differs from its template.
//
// What it reads was made by hostile code: package change walks it, nothing is followed,
// opened unless it is a regular file, or waited for.
package layer

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/kernel/mount"
	"github.com/berm-sandbox/berm/internal/local/change"
)

// Bounds of one record.
const (
	maxInline  = 20 << 10  // bytes of changes in the line
	maxBlobs   = 60        // named in one line
	maxContent = 256 << 10 // bytes of a file whose content is kept
	maxKept    = 16 << 20  // bytes of content of all files together
	maxFiles   = 2000      // files whose content is kept
)

// Records compares what a sandbox wrote with its template; what Berm wrote, to tell it who it is,
// is left out while nobody changed it. The first record has the changes,
// those that follow continue it and name content that it has no room for; the caller fills in whose they are.
// Content goes to blobs; mask, which may be nil, takes known secrets out of what is kept
// of files, and where it fails nothing more is kept. When ctx ends, or there is more than can be looked at, the
// record tells what is known and what is missing.
func Records(ctx context.Context, w *berm.Written, of Identity, blobs audit.Blobs, at, trace string, mask Mask) ([]audit.Record, error) {
	upper, err := os.OpenRoot(name(w.Upper))
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "open the writable layer: %w", err)
	}
	defer upper.Close()
	lower, err := openLower(w.Layers)
	if err != nil {
		return nil, err
	}
	defer lower.Close()
	walk, cancel := share(ctx)
	defer cancel()
	found, failure := change.List(walk, upper, lower, change.Limits{})
	if failure != nil && found == nil {
		return nil, failure
	}
	l := &look{ctx: ctx, identity: of, to: blobs, mask: mask, upper: upper, lower: lower, have: map[string]bool{}, data: audit.Changes{At: at}}
	r := audit.Record{Type: audit.FileChange, Outcome: audit.OK, TraceID: trace}
	if failure != nil {
		r.Outcome, r.Reason = audit.Failed, "not everything is told: "+failure.Error()
	}
	all := l.describe(slices.DeleteFunc(found, l.own))
	if err := l.fit(&r, all); err != nil {
		return nil, err
	}
	records := []audit.Record{r}
	for blobs := range slices.Chunk(l.blobs, maxBlobs) {
		if len(records[0].Blobs)+len(blobs) <= maxBlobs {
			records[0].Blobs = append(records[0].Blobs, blobs...)
			continue
		}
		records = append(records, audit.Record{Type: audit.FileChange, Outcome: audit.OK, TraceID: trace,
			Data: audit.Changes{At: at, Continues: true, Changes: []audit.Change{}}, Blobs: blobs})
	}
	return records, nil
}

// share leaves a third of the time that there is for what comes after the walk.
func share(ctx context.Context) (context.Context, context.CancelFunc) {
	end, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, end.Add(-time.Until(end)/3))
}

// Summary is the record of how two trees differ as package change lists it: without hashes and
// content, for who cannot wait for them. failure is what kept the list from being whole.
func Summary(found []change.Change, failure error, at string) audit.Record {
	all := make([]audit.Change, len(found))
	for i, c := range found {
		all[i] = describe(c)
	}
	n := inline(all)
	r := audit.Record{Type: audit.FileChange, Outcome: audit.OK, Data: audit.Changes{At: at, Changes: all[:n:n], More: len(all) - n}}
	if failure != nil {
		r.Outcome, r.Reason = audit.Failed, "not everything is told: "+failure.Error()
	}
	return r
}

func name(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// openLower opens what layers look like on top of each other, the lowest given first.
func openLower(layers []*os.File) (*os.Root, error) {
	if len(layers) == 1 {
		return os.OpenRoot(name(layers[0]))
	}
	var dirs []string
	for _, l := range slices.Backward(layers) {
		dirs = append(dirs, name(l))
	}
	// It is seen in no mount table, and goes with its last descriptor.
	fd, err := mount.New("overlay", "berm", mount.ReadOnly|mount.NoDev|mount.NoSuid, mount.Value("lowerdir", strings.Join(dirs, ":")), mount.Flag("userxattr"))
	if err != nil {
		return nil, berm.Errorf(berm.KindOf(err), "put the template's layers together: %w", err)
	}
	merged := os.NewFile(uintptr(fd), "template")
	defer merged.Close()
	return os.OpenRoot(name(merged))
}

// look is one comparison under way.
type look struct {
	ctx          context.Context
	identity     Identity
	to           audit.Blobs
	upper, lower *os.Root
	data         audit.Changes
	blobs        []audit.Blob
	have         map[string]bool // the hashes of blobs
	kept         int64
	stopped      bool // keeping content failed
	mask         Mask
	unmasked     error // why content is not kept
}

// Mask takes secrets out of content.
type Mask func(ctx context.Context, content []byte) ([]byte, error)

// describe turns changes into those of a record, with hashes. Small files come first, so that
// a large one cannot use up the time of all others.
func (l *look) describe(found []change.Change) []audit.Change {
	all := make([]audit.Change, len(found))
	order := make([]int, len(found))
	for i, c := range found {
		all[i], order[i] = describe(c), i
	}
	size := func(i int) int64 { return found[i].Old.Size + found[i].New.Size }
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(size(a), size(b)) })
	for _, i := range order {
		c, a := found[i], &all[i]
		if c.Kind != change.Added && c.Old.Mode.IsRegular() {
			a.Before, a.KeptBefore = l.sum(l.lower, c.Path)
		}
		if c.Kind != change.Deleted && c.New.Mode.IsRegular() {
			a.After, a.KeptAfter = l.sum(l.upper, c.Path)
		}
		if a.Op == "modify" && c.Old.Mode.Type() == c.New.Mode.Type() && (a.Before != "" && a.Before == a.After || c.New.Mode.IsDir()) {
			a.Op = "mode"
		}
	}
	return all
}

// describe is what is known of a change without reading anything.
func describe(c change.Change) audit.Change {
	e := c.New
	a := audit.Change{Path: c.Path, PathBytes: inexact(c.Path)}
	switch c.Kind {
	case change.Added:
		a.Op = "add"
	case change.Deleted:
		a.Op, e = "delete", c.Old
	default:
		a.Op = "modify"
	}
	a.Kind, a.Size = kind(e.Mode), e.Size
	a.Mode = fmt.Sprintf("%04o", change.UnixPerm(e.Mode))
	if c.Old.Mode.Type() == fs.ModeSymlink && c.Kind != change.Added {
		a.Before = hash(c.Old.Target)
	}
	if e.Mode.Type() == fs.ModeSymlink {
		a.Target, a.TargetBytes = e.Target, inexact(e.Target)
		if c.Kind != change.Deleted {
			a.After = hash(e.Target)
		}
	}
	return a
}

// inexact returns the bytes of a text that JSON cannot hold.
func inexact(s string) []byte {
	if utf8.ValidString(s) {
		return nil
	}
	return []byte(s)
}

func hash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}

func kind(m fs.FileMode) string {
	switch m.Type() {
	case 0:
		return "file"
	case fs.ModeDir:
		return "dir"
	case fs.ModeSymlink:
		return "link"
	case fs.ModeNamedPipe:
		return "fifo"
	case fs.ModeSocket:
		return "socket"
	}
	return "device"
}

// sum is the hash of a file's content, which is kept if it is small text, and the hash of what is
// kept if that is another. It is "" for what cannot be read, or not in time: then it is not even
// opened, as that takes seconds for a hundred thousand files.
func (l *look) sum(tree *os.Root, path string) (of, kept string) {
	if l.ctx.Err() != nil {
		l.data.Unhashed++
		return "", ""
	}
	f, err := change.OpenRegular(tree, path)
	if err != nil {
		l.data.Unhashed++
		return "", ""
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || holes(info) > maxHoles {
		l.data.Unhashed++
		return "", ""
	}
	var head bytes.Buffer
	sum := sha256.New()
	n, err := io.CopyN(io.MultiWriter(sum, &head), f, maxContent+1)
	if err == nil { // there is more
		head.Reset()
		for err == nil && l.ctx.Err() == nil {
			_, err = io.CopyN(sum, f, 4<<20)
		}
	}
	if l.ctx.Err() != nil || err != io.EOF { //nolint:errorlint // io.CopyN returns it as it is
		l.data.Unhashed++
		return "", ""
	}
	of = hex.EncodeToString(sum.Sum(nil))
	if n > 0 && n <= maxContent && bytes.IndexByte(head.Bytes(), 0) < 0 {
		if kept = l.keep(head.Bytes()); kept == of {
			kept = ""
		}
	}
	return of, kept
}

// maxHoles bounds what is hashed of a file that is not there: a terabyte costs the sandbox nothing,
// and whoever looks all the time there is.
const maxHoles = 256 << 20

// holes is how much longer a file is than what it takes on disk.
func holes(info fs.FileInfo) int64 {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0
	}
	return info.Size() - stat.Blocks*512
}

// keep stores content with secrets, and what looks like one, masked, as long as there is room, and returns
// the hash of what is stored. The changes are what counts: content that cannot be kept is not worth
// to lose them.
func (l *look) keep(content []byte) string {
	if l.stopped || l.kept+int64(len(content)) > maxKept || len(l.blobs) >= maxFiles {
		return ""
	}
	if l.mask != nil {
		masked, err := l.mask(l.ctx, content)
		if err != nil {
			l.stopped, l.unmasked = true, err
			return ""
		}
		content = masked
	}
	blob, err := store(l.to, audit.KindContent, audit.MaskTokens(content))
	if err != nil {
		l.stopped = true
		return ""
	}
	if !l.have[blob.SHA256] {
		l.have[blob.SHA256] = true
		l.kept += int64(len(content))
		l.blobs = append(l.blobs, blob)
	}
	return blob.SHA256
}

func store(to audit.Blobs, kind string, content []byte) (audit.Blob, error) {
	w, err := to.NewBlob(kind)
	if err != nil {
		return audit.Blob{}, err
	}
	if _, err := w.Write(content); err != nil {
		w.Discard()
		return audit.Blob{}, err
	}
	return w.Commit()
}

// inline is how many changes one line takes.
func inline(all []audit.Change) (n int) {
	for size := 0; n < len(all); n++ {
		line, _ := json.Marshal(all[n]) // texts and numbers always marshal
		if size += len(line) + 1; size > maxInline {
			break
		}
	}
	return n
}

// fit puts as many changes into the line as it takes, and all into a blob when that is not
// all.
func (l *look) fit(r *audit.Record, all []audit.Change) error {
	n := inline(all)
	l.data.Changes, l.data.More = all[:n:n], len(all)-n
	if l.data.Unhashed > 0 {
		r.Outcome = audit.Failed
		r.Reason = strings.TrimPrefix(fmt.Sprintf("%s; %d files could not be read, or not in time", r.Reason, l.data.Unhashed), "; ")
	}
	if l.unmasked != nil {
		r.Outcome = audit.Failed
		r.Reason = strings.TrimPrefix(fmt.Sprintf("%s; not all content is kept, since it could not be looked through for secrets: %v", r.Reason, l.unmasked), "; ")
	}
	r.Data = l.data
	if l.data.More == 0 {
		return nil
	}
	content, err := json.Marshal(all)
	if err != nil {
		return berm.Errorf(berm.Internal, "describe changes: %w", err)
	}
	for len(content) > audit.MaxBlob { // hundreds of thousands: not all of them fit
		all = all[:len(all)*3/4]
		r.Outcome, r.Reason = audit.Failed, fmt.Sprintf("only the first %d changes are told", len(all))
		if content, err = json.Marshal(all); err != nil {
			return berm.Errorf(berm.Internal, "describe changes: %w", err)
		}
	}
	blob, err := store(l.to, audit.KindChanges, content)
	if err != nil {
		return err
	}
	r.Blobs = append(r.Blobs, blob)
	return nil
}
