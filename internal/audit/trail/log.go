package trail

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/mod/sumdb/note"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/failpoint"
)

// When a checkpoint is signed and a file of the log is full.
const (
	checkpointEvery   = 5 * time.Second // if there are new records
	checkpointRecords = 1000
	segmentSize       = 64 << 20 // bytes
	retainEvery       = time.Minute
)

// Names of files beside those of Dir.
const (
	treeFile       = "tree"
	checkpointFile = "checkpoints.jsonl"
)

// Log is the writer of a log that proves itself: audit.Log in files of bounded size, with a
// hash tree over its lines, signed. It has one writer at a time; the methods are safe for
// concurrent use.
type Log struct {
	*audit.Log
	dir    string
	origin string
	boot   string
	keep   time.Duration
	limit  int64
	holds  func() ([]berm.SandboxID, error)
	errors *slog.Logger
	again  bool // what the writer before did not finish comes again

	mu   sync.Mutex // of the tree, which follows the log under its lock
	tree *tree

	files  sync.Mutex // one change at a time of the files that are not written to any more
	naming sync.Mutex // of contents: none is named while one is removed

	signing     sync.Mutex // one checkpoint at a time
	key         note.Signer
	checkpoints *stringsFile
	signed      uint64 // lines of the last checkpoint
	anchors     []Anchor
	behind      []Anchor // those that do not have it
	last        string   // that checkpoint
	untold      bool     // it was given to none of them yet

	due     chan struct{}
	stop    chan struct{}
	stopped chan struct{}
}

// Anchor keeps checkpoints where whoever holds the log cannot change them.
type Anchor interface {
	// Keep is called with each signed checkpoint, one at a time.
	Keep(checkpoint string) error
}

// Options are what a log is opened with.
type Options struct {
	Log     *slog.Logger // of what goes wrong beside records; nil is the default
	Anchors []Anchor
	// Keep is how long records are kept at least; older ones are removed in time. 0 is for ever.
	Keep time.Duration
	// Limit is how many bytes records and their content may take, but for those that Holds
	// keeps; the oldest are removed in time. 0 is any number.
	Limit int64
	// Holds names the sandboxes of which nothing is removed; nil is none.
	Holds func() ([]berm.SandboxID, error)
	// Successor is set when only the writer before has died: contents that were begun are still
	// written, and records that it did not write come again.
	Successor bool
}

// Open opens or creates the log in dir. Kinds as of audit.Open, and Internal when the log has
// fewer records than were signed.
func Open(dir string, o Options) (*Log, error) {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	l := &Log{dir: dir, boot: bootID(), errors: o.Log, anchors: o.Anchors, keep: o.Keep, limit: o.Limit, holds: o.Holds, again: o.Successor, due: make(chan struct{}, 1), stop: make(chan struct{}), stopped: make(chan struct{})}
	records, err := audit.Open(filepath.Join(dir, current), l)
	if err != nil {
		return nil, err
	}
	l.Log = records
	if err := l.open(); err != nil {
		return nil, errors.Join(err, records.Close())
	}
	if !o.Successor {
		if err := audit.Directory(dir).RemoveUnnamed(); err != nil {
			l.errors.Error("what is left of contents that were never finished is not removed", "error", err)
		}
	}
	go l.run()
	return l, nil
}

// open reads what is beside the records.
func (l *Log) open() error {
	key, handovers, err := loadKey(l.dir)
	if err != nil {
		return err
	}
	l.key, l.origin = key, key.Name()
	keys, err := keyChain(handovers)
	if err != nil {
		return berm.Errorf(berm.Internal, "audit log: %w", err)
	}
	notes, err := readStrings(filepath.Join(l.dir, checkpointFile))
	if err != nil {
		return err
	}
	var last Checkpoint
	if len(notes) > 0 {
		if last, _, err = openCheckpoint(notes[len(notes)-1], keys); err != nil {
			return berm.Errorf(berm.Internal, "the last checkpoint of the audit log: %w", err)
		}
	}
	named, err := readStrings(filepath.Join(l.dir, handoverFile))
	if err != nil {
		return err
	}
	if len(notes) == 0 && len(named) > 0 {
		return damaged(l.dir, "has a key and no checkpoint: they were taken away")
	}
	l.signed = last.Size
	if have := l.Seq(); have < l.signed {
		return damaged(l.dir, fmt.Sprintf("has %d records, and %d were signed: it was cut or replaced", have, l.signed))
	}
	if l.checkpoints, err = openStrings(filepath.Join(l.dir, checkpointFile)); err != nil {
		return err
	}
	tree, err := l.openTree(last)
	if err != nil {
		return err
	}
	l.mu.Lock()
	l.tree = tree
	l.mu.Unlock()
	if len(notes) == 0 {
		l.mu.Lock()
		c := l.now()
		l.mu.Unlock()
		if err := l.sign(c); err != nil {
			return err
		}
	}
	if err := announce(l.dir, handovers); err != nil {
		return err
	}
	for _, name := range l.unpacked() {
		if err := l.pack(name); err != nil { // a full disk is no reason not to serve
			l.errors.Error("an older file of the audit log is not packed", "error", err)
		}
	}
	if err := l.resume(); err != nil { // as above
		l.errors.Error("an erasure of audit records is not finished", "error", err)
	}
	return nil
}

// openTree reads the tree as far as it is what was signed, and makes the rest from the lines,
// all of it if the file is not.
func (l *Log) openTree(last Checkpoint) (*tree, error) {
	path := filepath.Join(l.dir, treeFile)
	t, err := openTree(path, last.Size)
	if err != nil {
		return nil, err
	}
	if t.size != last.Size || last.Size > 0 && t.root() != last.Root {
		t.file.Close()
		if t, err = openTree(path, 0); err != nil {
			return nil, err
		}
	}
	for line, err := range Dir(l.dir).Records(t.size + 1) {
		if err == nil && line.Seq != t.size+1 {
			err = fmt.Errorf("record %d follows record %d", line.Seq, t.size)
		}
		if err != nil {
			return nil, damaged(l.dir, fmt.Sprintf("cannot be read: %v", err))
		}
		if t.add(line.Raw); t.size == last.Size && t.root() != last.Root {
			return nil, damaged(l.dir, fmt.Sprintf("is not what was signed: a record up to %d was changed", last.Size))
		}
	}
	return t, nil
}

func damaged(dir, what string) error {
	return berm.Errorf(berm.Internal, "the audit log in %s %s", dir, what).
		WithHint("`berm audit verify` names the record; keep the directory for inspection under another name, and a new log is started")
}

// Origin is the name of the log, which tells it from others.
func (l *Log) Origin() string { return l.origin }

// NewBlob implements audit.Blobs.
func (l *Log) NewBlob(kind string) (*audit.BlobWriter, error) {
	f, err := audit.Directory(l.dir).CreateBlob()
	if err != nil {
		return nil, err
	}
	name := filepath.Base(f.Name())
	return audit.WriteBlob(f, kind, func(sum string) error { return l.KeepBlob(name, sum) }), nil
}

// KeepBlob is that of audit.Directory, for who has the file of a blob from elsewhere.
func (l *Log) KeepBlob(name, sum string) error {
	l.naming.Lock()
	defer l.naming.Unlock()
	return audit.Directory(l.dir).KeepBlob(name, sum)
}

// removeBlob removes content that was kept before a time. It reports false of content that was
// kept again: a record is about to name it.
func (l *Log) removeBlob(path string, before time.Time) (bool, error) {
	l.naming.Lock()
	defer l.naming.Unlock()
	info, err := os.Stat(path)
	if err == nil && info.ModTime().After(before) {
		return false, nil
	}
	if err == nil {
		err = os.Remove(path)
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return err == nil, err
}

// Last implements audit.Keeper: the chain goes on over files.
func (l *Log) Last() ([]byte, error) {
	names, _, err := Dir(l.dir).segments()
	if err != nil {
		return nil, err
	}
	if len(names) < 2 {
		return nil, nil
	}
	var last []byte
	for line, err := range Dir(l.dir).file(names[len(names)-2]) {
		if err != nil {
			return nil, berm.Errorf(berm.Internal, "audit log: %w", err)
		}
		last = append(last[:0], line...)
	}
	return last, nil
}

// Appended implements audit.Keeper.
func (l *Log) Appended(line []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.tree == nil { // open reads it
		return
	}
	l.tree.add(line)
	if l.tree.size%checkpointRecords == 0 {
		select {
		case l.due <- struct{}{}:
		default:
		}
	}
}

// Again implements audit.Keeper.
func (l *Log) Again() bool { return l.again }

// run signs checkpoints and begins new files.
func (l *Log) run() {
	defer close(l.stopped)
	tick, old := time.NewTicker(checkpointEvery), time.NewTicker(retainEvery)
	defer tick.Stop()
	defer old.Stop()
	for {
		select {
		case now := <-old.C:
			l.tend(func() {
				if err := l.resume(); err != nil {
					l.errors.Error("an erasure of audit records is not finished", "error", err)
				}
				if err := l.retain(now); err != nil {
					l.errors.Error("old audit records are not removed", "error", err)
				}
			})
			l.retell()
		case <-tick.C:
		case <-l.due:
		case <-l.stop:
			return
		}
		if err := l.Checkpoint(); err != nil {
			l.errors.Error("checkpoint of the audit log", "error", err)
		}
		if l.Size() > segmentSize {
			l.tend(func() {
				if err := l.rotate(); err != nil {
					l.errors.Error("audit log goes on in a large file", "error", err)
				}
			})
		}
	}
}

// tend does something to the files, unless an erasure does: that may take long, and must not hold
// up signing.
func (l *Log) tend(do func()) {
	if l.files.TryLock() {
		defer l.files.Unlock()
		do()
	}
}

// Checkpoint forces all records so far to disk, signs them, and has anchors keep that, unless it was
// done.
func (l *Log) Checkpoint() error {
	l.signing.Lock()
	defer l.signing.Unlock()
	if err := l.checkpoint(); err != nil || !l.untold {
		return err
	}
	return l.anchor()
}

// anchor gives the last checkpoint to those that do not have it. The caller holds signing.
func (l *Log) anchor() error {
	l.untold = false
	var failed []error
	l.behind = slices.DeleteFunc(l.behind, func(a Anchor) bool {
		err := a.Keep(l.last)
		failed = append(failed, err)
		return err == nil
	})
	return errors.Join(failed...)
}

// retell has anchors that could not be reached keep the last checkpoint: in a log in which nothing
// happens there is no next one.
func (l *Log) retell() {
	l.signing.Lock()
	defer l.signing.Unlock()
	l.untold = len(l.behind) > 0
}

// checkpoint is Checkpoint without anchors: one that cannot be reached is no reason not to remove
// what is to be removed. The caller holds signing.
func (l *Log) checkpoint() error {
	l.mu.Lock()
	c, hashes := l.now(), l.tree.take()
	l.mu.Unlock()
	// Only Checkpoint writes them; should that fail, they are made again from the lines
	// when the log is opened.
	if err := l.tree.save(hashes); err != nil {
		return berm.Errorf(berm.Unavailable, "audit tree: %w", err)
	}
	if c.Size == l.signed {
		return nil
	}
	return l.sign(c)
}

// secure is Checkpoint before records are taken away, from which the tree could be made again.
func (l *Log) secure() error {
	l.signing.Lock()
	defer l.signing.Unlock()
	if err := l.checkpoint(); err != nil {
		return err
	}
	if l.tree.broken {
		return berm.Errorf(berm.Unavailable, "the hashes of the audit log could not be written, so that no record can be removed").
			WithHint("they are made again when the server is started with space on its disk")
	}
	if err := l.tree.file.Sync(); err != nil {
		return berm.Errorf(berm.Unavailable, "audit tree: %w", err)
	}
	return nil
}

// now is what the log is now. The caller holds mu.
func (l *Log) now() Checkpoint {
	return Checkpoint{Origin: l.origin, Size: l.tree.size, Root: l.tree.root(), Time: time.Now(), Boot: l.boot}
}

// sign signs a checkpoint. The caller holds signing.
func (l *Log) sign(c Checkpoint) error {
	// What is signed must outlive the machine: a log with fewer records would look cut.
	if err := l.Sync(); err != nil {
		return err
	}
	if err := failpoint.Hit("audit/sign"); err != nil {
		return err
	}
	text, err := sign(c, l.key)
	if err != nil {
		return berm.Errorf(berm.Internal, "audit checkpoint: %w", err)
	}
	if err := l.checkpoints.add(text); err != nil {
		return err
	}
	l.signed, l.last, l.behind, l.untold = c.Size, text, slices.Clone(l.anchors), true
	return nil
}

// rotate begins a new file and packs the old one.
func (l *Log) rotate() error {
	old, err := l.Rotate(func(first uint64) string { return fmt.Sprintf("%s%020d%s", segment, first, plainEnd) })
	if err != nil || old == "" {
		return err
	}
	if err := failpoint.Hit("audit/rotate"); err != nil {
		return err
	}
	return l.pack(filepath.Base(old))
}

// unpacked are old files that a crash left as they were.
func (l *Log) unpacked() []string {
	names, _, err := Dir(l.dir).segments()
	if err != nil {
		return nil
	}
	return slices.DeleteFunc(names, func(name string) bool { return name == current || strings.HasSuffix(name, packedEnd) })
}

// pack compresses a file of the log. Readers find one or the other at any time.
func (l *Log) pack(name string) error {
	plain := filepath.Join(l.dir, name)
	packed := strings.TrimSuffix(plain, plainEnd) + packedEnd
	in, err := os.Open(plain)
	if err != nil {
		return berm.Errorf(berm.Internal, "audit log: %w", err)
	}
	defer in.Close()
	if err := compress(packed+".new", func(w io.Writer) error { _, err := io.Copy(w, in); return err }); err != nil {
		return err
	}
	if err := os.Rename(packed+".new", packed); err != nil {
		return berm.Errorf(berm.Unavailable, "audit log: %w", err)
	}
	if err := failpoint.Hit("audit/pack"); err != nil {
		return err
	}
	if err := os.Remove(plain); err != nil {
		return berm.Errorf(berm.Unavailable, "audit log: %w", err)
	}
	return nil
}

// compress writes a file that is on disk when it returns.
func compress(path string, write func(io.Writer) error) error {
	out, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return berm.Errorf(berm.Unavailable, "audit log: %w", err)
	}
	// The fastest makes files as small as the default does, of records, in half the time.
	w, err := zstd.NewWriter(out, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest))
	if err == nil {
		if err = write(w); err == nil {
			err = w.Close()
		}
	}
	if err == nil {
		err = out.Sync()
	}
	if err = errors.Join(err, out.Close()); err != nil {
		_ = os.Remove(path)
		failure := berm.Errorf(berm.Unavailable, "audit log: %w", err)
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			return failure.WithHint("its files are written anew beside themselves: make space on the disk of the log")
		}
		return failure
	}
	return nil
}

// RotateKey has another key sign from now on. The old one vouches for it.
func (l *Log) RotateKey() error {
	l.signing.Lock()
	defer l.signing.Unlock()
	if err := l.checkpoint(); err != nil { // by the old key
		return err
	}
	key, text, err := rotateKey(l.dir, l.key)
	if err != nil {
		return err
	}
	l.key = key
	_, public, err := parseHandover(text)
	if err != nil {
		return berm.Errorf(berm.Internal, "audit key: %w", err)
	}
	return l.Emit(audit.Record{
		Actor: audit.Actor{Type: "system"}, Type: audit.KeyRotate, Src: audit.OwnSource, Trust: audit.TrustHost, Outcome: audit.OK,
		Data: audit.KeyChange{New: public},
	})
}

// Close signs what was written and closes the log.
func (l *Log) Close() error {
	close(l.stop)
	<-l.stopped
	err := errors.Join(l.Checkpoint(), l.Log.Close())
	return errors.Join(err, l.tree.file.Close(), l.checkpoints.file.Close())
}

// Keys returns the public keys that signed the log in dir, the first first. Kind NotFound
// when nothing was signed.
func Keys(dir string) ([]string, error) {
	handovers, err := readStrings(filepath.Join(dir, handoverFile))
	if err != nil {
		return nil, err
	}
	if len(handovers) == 0 {
		return nil, berm.Errorf(berm.NotFound, "the log in %s is not signed", dir)
	}
	if _, err := keyChain(handovers); err != nil {
		return nil, berm.Errorf(berm.Internal, "audit log: %w", err)
	}
	keys := make([]string, len(handovers))
	for i, h := range handovers {
		_, keys[i], _ = parseHandover(h) // keyChain has read it
	}
	return keys, nil
}
