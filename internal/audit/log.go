package audit

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
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

	mu      sync.Mutex
	file    *os.File
	size    int64 // bytes of whole lines
	seq     uint64
	prev    string
	err     error // first failure: from then on nothing is taken
	lost    int   // records for which there was no space since the last one
	unsaved bool

	stop    chan struct{}
	stopped chan struct{}
}

// Open opens or creates the log at path. A last line that a crash cut off is taken
// away and told by a gap record. Kinds: Conflict when another process writes to it,
// Internal when its last whole line is not a record or the file cannot be used.
func Open(path string) (*Log, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, berm.Errorf(berm.Internal, "audit log: %w", err)
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "audit log: %w", err)
	}
	l := &Log{file: file, stop: make(chan struct{}), stopped: make(chan struct{})}
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
	l := &Log{file: file}
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
	for _, r := range records {
		if err := l.Emit(r); err != nil {
			return err
		}
	}
	return nil
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
	// Two lines: the last whole one and one that was cut off.
	tail := make([]byte, min(size, 2*(MaxLine+1)+1))
	if _, err := l.file.ReadAt(tail, size-int64(len(tail))); err != nil {
		return berm.Errorf(berm.Internal, "audit log: %w", err)
	}
	end := bytes.LastIndexByte(tail, '\n') + 1
	torn := len(tail) - end
	if end == 0 && size > int64(len(tail)) {
		return damaged(l.file.Name(), errors.New("no end of line in its last part"))
	}
	l.size = size - int64(torn)
	if end > 0 {
		start := bytes.LastIndexByte(tail[:end-1], '\n') + 1
		line := tail[start : end-1]
		var last struct{ Seq uint64 }
		if err := json.Unmarshal(line, &last); err != nil {
			return damaged(l.file.Name(), err)
		}
		l.seq, l.prev = last.Seq, chain(line)
	} else {
		l.prev = chain(nil)
	}
	if torn == 0 {
		return nil
	}
	if err := l.file.Truncate(l.size); err != nil {
		return berm.Errorf(berm.Internal, "audit log: %w", err)
	}
	return l.Emit(Record{
		Actor: Actor{Type: "system"}, Type: Gap, Src: "audit", Trust: TrustHost, Outcome: OK,
		Reason: "a crash cut off the last line",
		Data:   map[string]any{"source": "log", "count": 1, "bytes": torn},
	})
}

func damaged(path string, err error) error {
	return berm.Errorf(berm.Internal, "audit log %s is damaged: %w", path, err).
		WithHint("keep the file for inspection under another name; a new log is started then")
}

// chain is the Prev of the record that follows line.
func chain(line []byte) string {
	h := sha256.New()
	if line != nil {
		h.Write([]byte{1})
		h.Write(line)
	}
	return base64.StdEncoding.EncodeToString(h.Sum(nil))
}

// Emit appends a record. It has been written when Emit returns, and is forced to
// disk within syncEvery. A record for which there is no space is lost; the next one
// that is taken comes after a gap record. After any other failure every later Emit fails
// too: the chain cannot go on over a hole.
func (l *Log) Emit(r Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return l.err
	}
	if l.lost > 0 {
		gap := Record{
			Actor: Actor{Type: "system"}, Type: Gap, Src: "audit", Trust: TrustHost, Outcome: OK,
			Reason: "there was no space for them", Data: map[string]any{"source": "log", "count": l.lost},
		}
		if err := l.append(gap); err != nil {
			return err
		}
		l.lost = 0
	}
	return l.append(r)
}

// append is Emit of one line. The caller holds the lock.
func (l *Log) append(r Record) error {
	r.V, r.Seq, r.Time, r.Host, r.Prev = Version, l.seq+1, time.Now().UTC(), l.host, l.prev
	line, err := encode(r)
	if err != nil {
		return berm.Errorf(berm.Internal, "audit record: %w", err)
	}
	if n, err := l.file.Write(append(line, '\n')); err != nil {
		var back error
		if n > 0 { // the next line must not be glued to half a line
			back = l.file.Truncate(l.size)
		}
		failure := berm.Errorf(berm.Unavailable, "audit log cannot be written: %w", errors.Join(err, back))
		if back == nil && (errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT)) {
			l.lost++
			return failure.WithHint("control actions are refused until there is space on the disk of the data directory")
		}
		l.err = failure.WithHint("control actions are refused until the server is started again with a log that can be written")
		return l.err
	}
	l.size += int64(len(line)) + 1
	l.seq, l.prev, l.unsaved = r.Seq, chain(line), true
	return nil
}

// encode makes a line that is at most MaxLine bytes long.
func encode(r Record) ([]byte, error) {
	line, err := json.Marshal(r)
	if err != nil || len(line) <= MaxLine {
		return line, err
	}
	r.Data = map[string]any{"cut": len(line)}
	if len(r.Reason) > 1024 {
		r.Reason = r.Reason[:1024]
	}
	line, err = json.Marshal(r)
	if err == nil && len(line) > MaxLine {
		err = fmt.Errorf("%d bytes are too long for a line", len(line))
	}
	return line, err
}

func (l *Log) syncLoop() {
	defer close(l.stopped)
	for tick := time.NewTicker(syncEvery); ; {
		select {
		case <-tick.C:
			l.sync()
		case <-l.stop:
			tick.Stop()
			return
		}
	}
}

// sync forces what was written to disk, without holding up Emit meanwhile.
func (l *Log) sync() {
	l.mu.Lock()
	due := l.unsaved && l.err == nil
	l.unsaved = false
	l.mu.Unlock()
	if !due {
		return
	}
	if err := unix.Fdatasync(int(l.file.Fd())); err != nil {
		l.mu.Lock()
		// The kernel forgets dirty pages after a failed sync: nobody can say what
		// is on disk.
		l.err = berm.Errorf(berm.Unavailable, "audit log cannot be saved: %w", err)
		l.mu.Unlock()
	}
}

// Close forces what was written to disk and closes the log.
func (l *Log) Close() error {
	close(l.stop)
	<-l.stopped
	l.sync()
	l.mu.Lock()
	defer l.mu.Unlock()
	err := l.err
	l.err = berm.Errorf(berm.Unavailable, "audit log is closed")
	return errors.Join(err, l.file.Close())
}
