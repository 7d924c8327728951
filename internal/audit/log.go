package audit

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// syncEvery is how long a record may wait to be forced to disk. Records reach the
// kernel before Emit returns, so only a crash of the machine can lose them.
const syncEvery = 50 * time.Millisecond

// Log is an append-only file of records, one JSON object a line, each line chained
// to the one before by its hash. It has one writer at a time. The methods are safe
// for concurrent use.
type Log struct {
	host string
	path string
	keep Keeper // nil: nobody follows

	mu      sync.Mutex
	file    *os.File
	size    int64 // bytes of whole lines
	seq     uint64
	prev    string
	err     error // first failure: from then on nothing is taken
	lost    int   // records for which there was no space since the last one
	unsaved bool
	lines   []byte // of the last append, to be used again
	ends    []int  // of its lines, without the newlines
	salts   []byte // random, for the next records

	syncing sync.Mutex
	stop    chan struct{}
	stopped chan struct{}
}

// maxKept bounds what a log keeps in memory to write lines in.
const maxKept = 1 << 20

// Keeper follows a log. Its methods are called one at a time.
type Keeper interface {
	// Last returns the line before a file that is empty; nil is none.
	Last() ([]byte, error)
	// Appended is called with each line that was written, without the newline; it must not
	// keep it.
	Appended(line []byte)
	// Again reports whether a line that a crash cut off comes again, so that it is not lost.
	Again() bool
}

// Open opens or creates the log at path; keep, which may be nil, follows what is appended
// from then on. A last line that a crash cut off is taken away and told by a gap record.
// Kinds: Conflict when another process writes to it, Internal when its last whole line is
// not a record or the file cannot be used.
func Open(path string, keep Keeper) (*Log, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, berm.Errorf(berm.Internal, "audit log: %w", err)
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "audit log: %w", err)
	}
	l := &Log{file: file, path: path, keep: keep, stop: make(chan struct{}), stopped: make(chan struct{})}
	l.host, _ = os.Hostname()
	if err := l.recover(); err != nil {
		file.Close()
		return nil, err
	}
	go l.syncLoop()
	return l, nil
}

// lockPatience is how long Append waits for others that append to the same log.
const lockPatience = 5 * time.Second

// Append adds records to the log at path and closes it again: for programs that are done
// in a moment, of which many may write to one log. Nothing is forced to disk. Kinds as of
// Open; Conflict means that another process kept the log for seconds.
func Append(path string, records ...Record) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return berm.Errorf(berm.Internal, "audit log: %w", err)
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return berm.Errorf(berm.Internal, "audit log: %w", err)
	}
	defer file.Close()
	l := &Log{file: file, path: path}
	l.host, _ = os.Hostname()
	for end := time.Now().Add(lockPatience); ; time.Sleep(2 * time.Millisecond) {
		err := l.recover()
		if err == nil {
			break
		}
		if berm.KindOf(err) != berm.Conflict || time.Now().After(end) {
			return err
		}
	}
	return l.EmitAll(records)
}

// recover finds the end of the chain.
func (l *Log) recover() error {
	if err := unix.Flock(int(l.file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return berm.Errorf(berm.Conflict, "audit log %s is in use: %w", l.file.Name(), err)
	}
	size, err := l.file.Seek(0, io.SeekEnd)
	if err != nil {
		return berm.Errorf(berm.Internal, "audit log: %w", err)
	}
	// Two lines: the last whole one and one that was cut off. They are seldom long.
	var tail []byte
	for _, most := range []int64{8 << 10, 2*(MaxLine+1) + 1} {
		tail = make([]byte, min(size, most))
		if _, err := l.file.ReadAt(tail, size-int64(len(tail))); err != nil {
			return berm.Errorf(berm.Internal, "audit log: %w", err)
		}
		if bytes.Count(tail, []byte{'\n'}) > 1 { // the last whole line is all here
			break
		}
	}
	end := bytes.LastIndexByte(tail, '\n') + 1
	torn := len(tail) - end
	if end == 0 && size > int64(len(tail)) {
		return damaged(l.file.Name(), errors.New("no end of line in its last part"))
	}
	l.size = size - int64(torn)
	var line []byte
	if end > 0 {
		line = tail[bytes.LastIndexByte(tail[:end-1], '\n')+1 : end-1]
	} else if l.keep != nil {
		if line, err = l.keep.Last(); err != nil {
			return err
		}
	}
	if line != nil {
		var last struct{ Seq uint64 }
		if err := json.Unmarshal(line, &last); err != nil {
			return damaged(l.file.Name(), err)
		}
		l.seq, l.prev = last.Seq, Chain(line)
	} else {
		l.prev = Chain(nil)
	}
	if torn == 0 {
		return nil
	}
	if err := l.file.Truncate(l.size); err != nil {
		return berm.Errorf(berm.Internal, "audit log: %w", err)
	}
	lost := 1
	if l.keep != nil && l.keep.Again() {
		lost = 0
	}
	return l.Emit(Record{
		Actor: Actor{Type: "system"}, Type: Gap, Src: OwnSource, Trust: TrustHost, Outcome: OK,
		Reason: "a crash cut off the last line",
		Data:   map[string]any{"source": "log", "count": lost, "bytes": torn},
	})
}

func damaged(path string, err error) error {
	return berm.Errorf(berm.Internal, "audit log %s is damaged: %w", path, err).
		WithHint("keep the file for inspection under another name; a new log is started then")
}

// Chain is the Prev of the record that follows line; nil is the first.
func Chain(line []byte) string {
	hashed := make([]byte, 0, 1<<10) // most lines fit, and it stays on the stack
	if line != nil {
		hashed = append(append(hashed, 1), line...)
	}
	sum := sha256.Sum256(hashed)
	var text [44]byte
	base64.StdEncoding.Encode(text[:], sum[:])
	return string(text[:])
}

// Emit appends a record. It has been written when Emit returns, and is forced to
// disk within syncEvery. A record for which there is no space is lost; the next one
// that is taken comes after a gap record. After any other failure every later Emit fails
// too: the chain cannot go on over a hole.
func (l *Log) Emit(r Record) error { return l.EmitAll([]Record{r}) }

// EmitAll appends several records by one system call, all of them or none. Kind Invalid says that
// one of them is too long or cannot be encoded.
func (l *Log) EmitAll(records []Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return l.err
	}
	if l.lost > 0 {
		gap := Record{
			Actor: Actor{Type: "system"}, Type: Gap, Src: OwnSource, Trust: TrustHost, Outcome: OK,
			Reason: "there was no space for them", Data: map[string]any{"source": "log", "count": l.lost},
		}
		if err := l.append(gap); err != nil {
			l.lost += len(records) - 1 // append counted the gap, which stands for the first
			return err
		}
		l.lost = 0
	}
	return l.append(records...)
}

// append is EmitAll of lines. The caller holds the lock.
func (l *Log) append(records ...Record) error {
	lines, ends := l.lines[:0], l.ends[:0]
	seq, prev, now := l.seq, l.prev, time.Now().UTC()
	for i := range records {
		r := records[i]
		seq++
		r.V, r.Seq, r.Time, r.Host, r.Salt, r.Prev = Version, seq, now, l.host, "", prev
		if l.keep != nil && r.Sandbox != "" { // the hash of its line may outlive it
			r.Salt = l.salt()
		}
		start := len(lines)
		var err error
		if lines, err = encode(lines, &r); err != nil {
			return berm.Errorf(berm.Invalid, "audit record: %w", err)
		}
		prev = Chain(lines[start:])
		ends = append(ends, len(lines))
		lines = append(lines, '\n')
	}
	if cap(lines) <= maxKept {
		l.lines, l.ends = lines, ends
	}
	if n, err := l.file.Write(lines); err != nil {
		var back error
		if n > 0 { // the next line must not be glued to half a line
			back = l.file.Truncate(l.size)
		}
		failure := berm.Errorf(berm.Unavailable, "audit log cannot be written: %w", errors.Join(err, back))
		if back == nil && (errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT)) {
			l.lost += len(records)
			return failure.WithHint("control actions are refused until there is space on the disk of the data directory")
		}
		l.err = failure.WithHint("control actions are refused until the server is started again with a log that can be written")
		return l.err
	}
	l.size += int64(len(lines))
	l.seq, l.prev, l.unsaved = seq, prev, true
	if l.keep != nil {
		start := 0
		for _, end := range ends {
			l.keep.Appended(lines[start:end])
			start = end + 1
		}
	}
	return nil
}

// saltSize is that of Record.Salt in bytes.
const saltSize = 12

// salt makes the salt of a record. The caller holds the lock.
func (l *Log) salt() string {
	if len(l.salts) < saltSize { // one call of the kernel is for many
		l.salts = make([]byte, 256*saltSize)
		rand.Read(l.salts)
	}
	var text [saltSize / 3 * 4]byte
	base64.StdEncoding.Encode(text[:], l.salts[:saltSize])
	l.salts = l.salts[saltSize:]
	return string(text[:])
}

// Seq is the number of the last record.
func (l *Log) Seq() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.seq
}

// Size is how many bytes the current file has.
func (l *Log) Size() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.size
}

// Rotate gives the current file another name, which it returns, made from the number of its
// first record, and goes on in an empty one. A file without records stays.
func (l *Log) Rotate(name func(first uint64) string) (string, error) {
	l.syncing.Lock() // a file that is being saved must not be closed
	defer l.syncing.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil || l.size == 0 {
		return "", l.err
	}
	head := make([]byte, min(l.size, MaxLine+1))
	if _, err := l.file.ReadAt(head, 0); err != nil {
		return "", berm.Errorf(berm.Internal, "audit log: %w", err)
	}
	var record struct{ Seq uint64 }
	if err := json.Unmarshal(head[:max(bytes.IndexByte(head, '\n'), 0)], &record); err != nil {
		return "", damaged(l.path, err)
	}
	if err := unix.Fdatasync(int(l.file.Fd())); err != nil {
		return "", berm.Errorf(berm.Unavailable, "audit log cannot be saved: %w", err)
	}
	old := filepath.Join(filepath.Dir(l.path), name(record.Seq))
	if err := os.Rename(l.path, old); err != nil {
		return "", berm.Errorf(berm.Unavailable, "audit log: %w", err)
	}
	file, err := os.OpenFile(l.path, os.O_CREATE|os.O_EXCL|os.O_RDWR|os.O_APPEND, 0o600)
	if err == nil {
		err = unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if err != nil {
		l.err = berm.Errorf(berm.Unavailable, "audit log: %w", err)
		return "", l.err
	}
	l.file.Close()
	l.file, l.size, l.unsaved = file, 0, false
	return old, nil
}

func (l *Log) syncLoop() {
	defer close(l.stopped)
	for tick := time.NewTicker(syncEvery); ; {
		select {
		case <-tick.C:
			_ = l.Sync() // l.err keeps it
		case <-l.stop:
			tick.Stop()
			return
		}
	}
}

// Sync forces what was written to disk, without holding up Emit meanwhile.
func (l *Log) Sync() error {
	l.syncing.Lock() // who finds nothing unsaved must not return before it is saved
	defer l.syncing.Unlock()
	l.mu.Lock()
	due, file, err := l.unsaved && l.err == nil, l.file, l.err
	l.unsaved = false
	l.mu.Unlock()
	if !due {
		return err
	}
	if err := unix.Fdatasync(int(file.Fd())); err != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		// The kernel forgets dirty pages after a failed sync: nobody can say what
		// is on disk.
		l.err = berm.Errorf(berm.Unavailable, "audit log cannot be saved: %w", err)
		return l.err
	}
	return nil
}

// Close forces what was written to disk and closes the log.
func (l *Log) Close() error {
	close(l.stop)
	<-l.stopped
	_ = l.Sync()
	l.syncing.Lock() // as in Rotate
	defer l.syncing.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	err := l.err
	l.err = berm.Errorf(berm.Unavailable, "audit log is closed")
	return errors.Join(err, l.file.Close())
}
