package trail

import (
	"bufio"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
)

// Report is what a check found.
type Report struct {
	Origin      string    `json:"origin"`
	Records     uint64    `json:"records"` // that were read
	First       uint64    `json:"first"`   // the number of the first of them
	Last        uint64    `json:"last"`
	Blobs       int       `json:"blobs"`
	Checkpoints int       `json:"checkpoints"`
	Keys        []string  `json:"keys"`               // public keys, the first first
	Trusted     string    `json:"trusted,omitempty"`  // the key that the caller knew, else "": the log vouches for itself
	SignedTo    uint64    `json:"signedTo"`           // the last record that a checkpoint covers
	SignedAt    time.Time `json:"signedAt"`           // its time
	Anchored    uint64    `json:"anchored,omitempty"` // the last record that an outside checkpoint covers
	Gaps        int       `json:"gaps"`               // records that tell of lost ones
	Unrecorded  int       `json:"unrecorded"`         // records that tell what is not recorded, such as processes of a level
	Steps       []uint64  `json:"clockSteps"`         // records whose time is before that of the one before
	Erasures    []Erasure `json:"erasures,omitempty"` // what records tell to be erased
	// Problems are in the order of the records. None means that the log is whole.
	Problems []Problem `json:"problems"`
}

// Problem is something that must not be.
type Problem struct {
	Seq  uint64 `json:"seq,omitempty"` // the first record concerned, 0 if it is none
	What string `json:"what"`
}

func (p Problem) String() string {
	if p.Seq == 0 {
		return p.What
	}
	return fmt.Sprintf("record %d: %s", p.Seq, p.What)
}

// maxProblems bounds a report: where much is wrong, the first tells enough.
const maxProblems = 100

func (r *Report) problem(seq uint64, format string, args ...any) {
	if len(r.Problems) < maxProblems {
		r.Problems = append(r.Problems, Problem{seq, fmt.Sprintf(format, args...)})
	}
}

// clockStep is how far time may go backwards from one record to the next: several threads
// read the clock before one of them writes first.
const clockStep = time.Second

// unsignedTime is how long records may be without a signature before that is a problem.
const unsignedTime = time.Minute

// Trust is what a check relies on from outside.
type Trust struct {
	Key     string   // a public key of the log; "" trusts the first that the log names
	Anchors []string // checkpoints that were kept elsewhere, as notes
	// Unsigned takes a log that nobody signed, as berm run keeps: whoever may write it can
	// make its chain anew.
	Unsigned bool
}

// Verify checks the log in dir: each line, the chain, the tree, the signatures, the blobs.
// Nothing in it is trusted but what trust names. The error is of reading; what was found
// is in the report.
func Verify(dir string, trust Trust) (*Report, error) {
	if _, err := os.Stat(dir); err != nil {
		return nil, berm.Errorf(berm.NotFound, "audit log: %w", err)
	}
	r := &Report{Problems: []Problem{}, Steps: []uint64{}, Keys: []string{}}
	keys, points := r.signatures(dir, trust)
	anchors := r.anchors(trust.Anchors, keys)
	hashes, err := readLeaves(filepath.Join(dir, treeFile))
	if err != nil {
		return nil, err
	}
	c := checker{report: r, source: Dir(dir), marks: append(points, anchors...), hashes: hashes, blobs: map[string]bool{}}
	slices.SortStableFunc(c.marks, func(a, b mark) int { return cmp.Compare(a.Size, b.Size) })
	for raw, err := range Dir(dir).raw(0) {
		if err != nil {
			r.problem(c.next(), "%v", err)
			break
		}
		c.line(raw)
	}
	c.end()
	r.sort()
	return r, nil
}

// signatures reads keys and checkpoints.
func (r *Report) signatures(dir string, trust Trust) ([]note.Verifier, []mark) {
	handovers, err := readStrings(filepath.Join(dir, handoverFile))
	if err != nil {
		r.problem(0, "%v", err)
	}
	keys := r.keys(handovers, trust)
	notes, err := readStrings(filepath.Join(dir, checkpointFile))
	if err != nil {
		r.problem(0, "%v", err)
	}
	var marks []mark
	last := -1
	for i, text := range notes {
		c, key, err := openCheckpoint(text, keys)
		if err != nil {
			// Those of keys before the one that is trusted say nothing; the first that it signed
			// covers what they did.
			if r.Trusted == "" || r.Trusted == r.Keys[0] || len(marks) > 0 {
				r.problem(0, "checkpoint %d: %v", i+1, err)
			}
			continue
		}
		at := slices.Index(keys, key)
		if at < last {
			r.problem(0, "checkpoint %d is signed by a key that had handed over to another", i+1)
			continue
		}
		last = at
		r.Checkpoints++
		if len(marks) > 0 && c.Size < marks[len(marks)-1].Size {
			r.problem(0, "checkpoint %d has fewer records than the one before", i+1)
		}
		if c.Size >= r.SignedTo {
			r.SignedTo, r.SignedAt = c.Size, c.Time
		}
		marks = append(marks, mark{c, fmt.Sprintf("checkpoint %d", i+1)})
	}
	if len(marks) == 0 && !trust.Unsigned {
		r.problem(0, "the log has no checkpoint that a trusted key signed")
	}
	return keys, marks
}

// keys checks the keys of a log.
func (r *Report) keys(handovers []string, trust Trust) []note.Verifier {
	keys, err := keyChain(handovers)
	if err != nil {
		r.problem(0, "%v", err)
	}
	if len(handovers) == 0 && !trust.Unsigned {
		r.problem(0, "no key signed this log")
	}
	for _, h := range handovers[:len(keys)] {
		_, public, _ := parseHandover(h) // keyChain has read it
		r.Keys = append(r.Keys, public)
	}
	if len(keys) > 0 {
		r.Origin = keys[0].Name()
	}
	if trust.Key == "" {
		return keys
	}
	// The first note of a key vouches for itself, so anybody can put another key before the one
	// that is known: only that and those that follow it are trusted.
	at := slices.Index(r.Keys, trust.Key)
	if at < 0 {
		r.problem(0, "the key %s is not among those of this log", trust.Key)
		return nil
	}
	r.Trusted = trust.Key
	return keys[at:]
}

// sort puts the problems in the order of the records.
func (r *Report) sort() {
	slices.SortStableFunc(r.Problems, func(a, b Problem) int { return cmp.Compare(a.Seq, b.Seq) })
}

// anchors reads checkpoints that were kept outside.
func (r *Report) anchors(texts []string, keys []note.Verifier) []mark {
	var marks []mark
	for i, text := range texts {
		c, _, err := openCheckpoint(text, keys)
		if err != nil {
			r.problem(0, "outside checkpoint %d: %v", i+1, err)
			continue
		}
		r.Anchored = max(r.Anchored, c.Size)
		marks = append(marks, mark{c, fmt.Sprintf("the outside checkpoint of %s", c.Time.Format(time.RFC3339))})
	}
	return marks
}

// mark is a root that the lines must have at some size.
type mark struct {
	Checkpoint
	name string
}

// checker goes through the lines of a log.
type checker struct {
	report *Report
	source Source
	marks  []mark      // by size
	hashes []tlog.Hash // of the lines, as the tree's file has them; it is not trusted itself

	tree     tree   // of the lines that were read
	stored   tree   // of hashes
	proven   uint64 // records that have the root that was signed
	doubtful bool   // a root was missed, and hashes have not told by which record
	prev     string
	time     time.Time
	blobs    map[string]bool
	missing  spans     // that are not there
	removed  spans     // that records tell to be gone on purpose
	unsigned time.Time // of the first record that no checkpoint covers
}

// next is the number that the next record must have.
func (c *checker) next() uint64 { return c.tree.size + 1 }

// line checks the next line.
func (c *checker) line(raw []byte) {
	r := c.report
	leaf := leafHash(raw)
	known := c.tree.size < uint64(len(c.hashes)) && c.hashes[c.tree.size] == leaf
	var h header
	err := decode(raw, &h, known)
	if r.Records == 0 {
		c.start(h, err)
	}
	r.Records++
	n := c.next()
	switch {
	case err != nil:
		r.problem(n, "this is not a record: %v", err)
	case h.Seq < n:
		r.problem(n, "record %d comes again before it", h.Seq)
		return
	case h.Seq > n:
		c.skip(h)
	}
	if err == nil {
		c.content(h)
	}
	if at := c.tree.size; at < uint64(len(c.hashes)) && c.hashes[at] != leaf && err == nil {
		r.problem(at+1, "it is not what the hash tree has")
	}
	c.prev = audit.Chain(raw)
	c.push(leaf)
}

// start takes the number of the first line: earlier files may have been removed, and the tree
// proves what they were.
func (c *checker) start(h header, err error) {
	c.report.First = 1
	c.prev = audit.Chain(nil)
	if err != nil || h.Seq <= 1 || h.Seq-1 > uint64(len(c.hashes)) {
		return
	}
	c.report.First = h.Seq
	c.skip(h)
}

// skip goes on with a record before which others are missing. Should they have been removed on
// purpose, the tree proves what they were.
func (c *checker) skip(h header) {
	c.missing = append(c.missing, audit.Removal{From: c.next(), To: h.Seq - 1})
	for c.next() < h.Seq && c.tree.size < uint64(len(c.hashes)) {
		c.push(c.hashes[c.tree.size])
	}
	c.prev = h.Prev
}

// gone tells which records are missing though no record tells so, and what of an erasure is still
// there.
func (c *checker) gone() {
	r := c.report
	removed := c.removed.merge()
	for _, m := range c.missing {
		if n := removed.lacks(m); n > 0 {
			r.problem(n, "it is missing, with all up to record %d, and no record tells that they were removed or erased", m.To)
		}
	}
	for i := range r.Erasures {
		e := &r.Erasures[i]
		e.Left = e.Records - e.spans.common(c.missing)
	}
}

// content checks one record.
func (c *checker) content(l header) {
	r := c.report
	r.Last = l.Seq
	if l.Prev != c.prev {
		r.problem(l.Seq, "it does not continue the record before: one of the two was changed")
	}
	if l.V != audit.Version {
		r.problem(l.Seq, "its version %d is not known", l.V)
	}
	if l.Time.Before(c.time.Add(-clockStep)) {
		r.Steps = append(r.Steps, l.Seq)
	}
	c.time = l.Time
	if l.Seq == r.SignedTo+1 {
		c.unsigned = l.Time
	}
	switch l.Type {
	case audit.Gap:
		if lost := (struct{ Count int }{}); json.Unmarshal(l.Data, &lost) == nil && lost.Count == 0 {
			r.Unrecorded++
			break
		}
		r.Gaps++
	case audit.Removed:
		var removal audit.Removal
		if l.Seq > r.SignedTo { // anybody can append one
			break
		}
		if json.Unmarshal(l.Data, &removal) == nil {
			c.removed = append(c.removed, removal)
		}
	case audit.Erase:
		e, err := erasureOf(l.Data)
		if l.Seq > r.SignedTo || err != nil {
			break
		}
		e.By, e.Sandbox, e.Reason, e.Actor, e.Time = l.Seq, l.Sandbox, l.Reason, l.Actor, l.Time
		r.Erasures = append(r.Erasures, e)
		c.removed = append(c.removed, e.spans...)
	}
	for _, b := range l.Blobs {
		c.blob(l.Seq, b)
	}
}

// blob checks content that a record names.
func (c *checker) blob(seq uint64, b audit.Blob) {
	if c.blobs[b.SHA256] {
		return
	}
	c.blobs[b.SHA256] = true
	c.report.Blobs++
	f, err := c.source.Blob(b.SHA256)
	if err != nil {
		c.report.problem(seq, "%v", err)
		return
	}
	defer f.Close()
	sum := sha256.New()
	n, err := io.Copy(sum, io.LimitReader(f, audit.MaxBlob+1))
	switch {
	case err != nil:
		c.report.problem(seq, "its content %s: %v", b.SHA256, err)
	case n != b.Size:
		c.report.problem(seq, "its content %s has %d bytes and not %d", b.SHA256, n, b.Size)
	case hex.EncodeToString(sum.Sum(nil)) != b.SHA256:
		c.report.problem(seq, "its content %s was changed", b.SHA256)
	}
}

// push adds a line and checks the marks at its size.
func (c *checker) push(leaf tlog.Hash) {
	c.tree.addLeaf(leaf)
	c.tree.pending = c.tree.pending[:0]
	if at := c.stored.size; at < uint64(len(c.hashes)) {
		c.stored.addLeaf(c.hashes[at])
		c.stored.pending = c.stored.pending[:0]
	}
	for len(c.marks) > 0 && c.marks[0].Size <= c.tree.size {
		m := c.marks[0]
		c.marks = c.marks[1:]
		switch {
		case m.Size < c.tree.size: // it was told when it was read
		case c.tree.root() == m.Root:
			c.proven = m.Size
		case c.stored.size == m.Size && c.stored.root() == m.Root:
			// The tree's file is what was signed: it has told which record is another.
		case !c.doubtful:
			c.doubtful = true
			c.report.problem(c.proven+1, "the records from here to %d are not what %s has", m.Size, m.name)
		}
	}
}

// end is called after the last line.
func (c *checker) end() {
	r := c.report
	if c.tree.size < r.SignedTo {
		r.problem(c.next(), "it is missing: %d records were signed", r.SignedTo)
	}
	if c.tree.size < r.Anchored {
		r.problem(c.next(), "it is missing: an outside checkpoint has %d records", r.Anchored)
	}
	// A server signs what it writes within seconds, and what one that was killed had written when
	// the next starts.
	if !c.unsigned.IsZero() && len(r.Keys) > 0 && time.Since(c.unsigned) > unsignedTime {
		r.problem(r.SignedTo+1, "no checkpoint covers the records from here on, though a server signs within seconds: it was killed and not started again, or checkpoints were taken away")
	}
	c.gone()
}

// readLeaves reads the hashes of the lines that a tree's file has; no file has none.
func readLeaves(path string) ([]tlog.Hash, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "audit tree: %w", err)
	}
	defer f.Close()
	var all []tlog.Hash
	err = leaves(bufio.NewReaderSize(f, 1<<16), func(_ uint64, h tlog.Hash) { all = append(all, h) })
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) { // half a hash at the end
		return nil, berm.Errorf(berm.Internal, "audit tree: %w", err)
	}
	return all, nil
}
