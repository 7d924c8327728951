package writer

import (
	"cmp"
	"errors"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/trail"
)

// Config is what a log is opened with.
type Config struct {
	Dir     string                           // of the log
	Program func() (*os.File, error)         // opens the executable that has the command service.Auditd
	Keep    time.Duration                    // as trail.Options
	Limit   int64                            // as trail.Options
	Holds   func() ([]berm.SandboxID, error) // as trail.Options
	Log     *slog.Logger                     // of what goes wrong beside records
	Anchors []string                         // files that get checkpoints
	// Witnesses are URLs that get checkpoints.
	Witnesses []string
	// Wait is for how long another process that writes the log is waited for.
	Wait time.Duration
}

// Log is a log whose writer is a process of its own: it is started again when it dies, and knows by
// itself when the server does. The methods are safe for concurrent use.
type Log struct {
	c       Config
	anchors []*os.File
	origin  string

	mu      sync.Mutex
	queue   []*batch      // the last one takes more; the first may be on its way
	gap     gap           // what the next batch begins with
	refused int           // records for which there was no space, of which the writer has yet to tell
	seq     uint64        // the last record that is known
	link    *link         // to the writer; nil while there is none
	busy    bool          // somebody sends it a batch, and has more sent then
	waits   bool          // run waits for that
	linked  chan struct{} // closed when there is one, or none to come
	closed  bool
	work    chan struct{} // there is something to do
	stopped chan struct{}
}

// gap is what a record tells of records that are missing.
type gap struct {
	lost   int    // how many were not taken
	reason string // why the writer was started again
}

// patience is how long a record waits for a writer that hangs or was lost; shorter in tests.
var patience = 10 * time.Second

// Batches gather while another is on its way, up to these.
const (
	fullBatch   = 256 << 10 // bytes
	fullRecords = 1000
)

// smallBatch is what a connection takes from whoever sends it without having to wait for a writer that hangs, in
// bytes.
const smallBatch = 64 << 10

// batch is records that are sent at once. Its fields are under the lock of the log, but for refused
// and err once done is closed.
type batch struct {
	body    []byte // begins with room for its length
	ends    []int  // of each record in body
	first   int    // records that a writer before had taken
	gap     gap    // that the first record tells
	timer   *time.Timer
	on      *link         // that it was sent on; nil is none
	done    chan struct{} // closed when those who wait are told
	refused map[int]error
	err     error // of those that have no own
}

// Open starts the writer of a log, which it opens or creates. Kinds as of trail.Open.
func Open(c Config) (*Log, error) {
	l := &Log{c: c, work: make(chan struct{}, 1), linked: make(chan struct{}), stopped: make(chan struct{})}
	for _, path := range c.Anchors { // the writer cannot reach them by name
		f, err := trail.FileAnchor(path).Open()
		if err != nil {
			return nil, errors.Join(err, l.closeAnchors())
		}
		l.anchors = append(l.anchors, f)
	}
	k, r, err := newLink(c, l.anchors, unknown)
	if err != nil {
		return nil, errors.Join(err, l.closeAnchors())
	}
	l.origin = r.Origin
	l.up(k, r)
	go l.run()
	return l, nil
}

// PID is the process id of the writer, 0 while there is none.
func (l *Log) PID() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.link == nil {
		return 0
	}
	return l.link.process.PID
}

// Origin is the name of the log, which tells it from others.
func (l *Log) Origin() string { return l.origin }

// Seq is the number of the last record that is known.
func (l *Log) Seq() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.seq
}

// Emit appends a record. The writer has written it when Emit returns. While there is no writer it
// waits, but not for ever: kind Unavailable then, and a gap record tells of it.
func (l *Log) Emit(r audit.Record) error {
	var room [1 << 10]byte
	body, err := audit.AppendBody(room[:0], r)
	if err != nil {
		return err
	}
	places, err := l.add(body)
	if err != nil {
		return err
	}
	return places[0].wait()
}

// EmitAll appends several records, which wait for the writer together. Its error is that of the first that was
// refused.
func (l *Log) EmitAll(records []audit.Record) (err error) {
	bodies := make([][]byte, len(records))
	for i, r := range records {
		if bodies[i], err = audit.AppendBody(nil, r); err != nil {
			return err
		}
	}
	places, err := l.add(bodies...)
	for _, p := range places {
		err = cmp.Or(err, p.wait())
	}
	return err
}

// place is where a record is.
type place struct {
	*batch
	at int
}

// wait returns when the writer has written a record, or why not.
func (p place) wait() error {
	<-p.done
	if err, ok := p.refused[p.at]; ok {
		return err
	}
	return p.err
}

// add has records sent.
func (l *Log) add(bodies ...[]byte) (places []place, err error) {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil, berm.Errorf(berm.Unavailable, "audit log is closed")
	}
	for _, body := range bodies {
		b := l.gathering()
		places = append(places, place{b, b.add(body)})
	}
	if l.busy {
		l.mu.Unlock()
		return places, nil
	}
	k, b := l.link, l.queue[0]
	if k == nil || len(b.body) > smallBatch || len(l.queue) > 1 || b.on != nil {
		l.mu.Unlock()
		l.wake()
		return places, nil
	}
	// Who comes alone talks to the writer itself: to have it done by run takes two more turns of the scheduler.
	l.busy, b.on = true, k
	l.mu.Unlock()
	err = l.exchange(k, b, true)
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		_ = k.records.Close() // run finds it so
	}
	l.mu.Lock()
	l.busy = false
	more := len(l.queue) > 0 || l.closed || l.waits
	l.mu.Unlock()
	if more {
		l.wake()
	}
	return places, nil
}

// gathering is the batch that takes more records. The caller holds the lock.
func (l *Log) gathering() *batch {
	if n := len(l.queue); n > 0 {
		if b := l.queue[n-1]; b.on == nil && !b.over() && len(b.body) < fullBatch && len(b.ends) < fullRecords {
			return b
		}
	}
	b := &batch{body: make([]byte, lengthSize, 1<<10), done: make(chan struct{})}
	b.timer = time.AfterFunc(patience, func() { l.giveUp(b) })
	if l.gap != (gap{}) {
		body, _ := audit.AppendBody(nil, l.gap.record()) // which is short
		b.add(body)
		b.gap, l.gap = l.gap, gap{}
	}
	l.queue = append(l.queue, b)
	return b
}

func (g gap) record() audit.Record {
	reason := g.reason
	if reason == "" {
		reason = "the writer of the audit log did not answer"
	}
	return audit.Record{
		Actor: audit.Actor{Type: "system"}, Type: audit.Gap, Src: "server", Trust: audit.TrustHost, Outcome: audit.OK,
		Reason: reason, Data: map[string]any{"source": "writer", "count": g.lost},
	}
}

func (g *gap) add(lost int, reason string) {
	g.lost += lost
	g.reason = cmp.Or(g.reason, reason)
}

// add appends a record and returns its number in the batch.
func (b *batch) add(body []byte) int {
	b.body = appendEntry(b.body, body)
	b.ends = append(b.ends, len(b.body))
	return len(b.ends) - 1
}

// left is how many of the records of others are not taken.
func (b *batch) left() (n int, g gap) {
	n = len(b.ends) - b.first
	if b.gap != (gap{}) && b.first == 0 {
		return n - 1, b.gap
	}
	return n, gap{}
}

// miss has the next gap record tell of what is left of a batch. The caller holds the lock.
func (l *Log) miss(b *batch) {
	n, told := b.left()
	l.gap.add(n+told.lost, told.reason)
}

// over reports whether those who wait were told.
func (b *batch) over() bool {
	select {
	case <-b.done:
		return true
	default:
		return false
	}
}

// finish tells those who wait, unless that was done.
func (b *batch) finish(err error, refused map[int]error) {
	if !b.over() {
		b.timer.Stop()
		b.err, b.refused = err, refused
		close(b.done)
	}
}

// giveUp tells those who wait for a batch that it takes too long.
func (l *Log) giveUp(b *batch) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if b.over() {
		return
	}
	b.finish(berm.Errorf(berm.Unavailable, "the writer of the audit log does not answer").WithHint("it is started again; the server's log tells why"), nil)
	if b.on != nil {
		_ = b.on.records.SetReadDeadline(time.Now()) // whoever waits for the answer may wait for its own record
	} else {
		l.miss(b)
		l.queue = slices.DeleteFunc(l.queue, func(other *batch) bool { return other == b })
	}
}

func (l *Log) wake() {
	select {
	case l.work <- struct{}{}:
	default:
	}
}

// run sends batches, one at a time, and starts the writer again when it is lost.
func (l *Log) run() {
	defer close(l.stopped)
	pause := time.Duration(0) // before it is started again
	for mine := false; ; {    // whether busy is run's
		l.mu.Lock()
		if mine {
			l.busy = false
		}
		k, closed := l.link, l.closed
		var b *batch
		first := false // that it is sent on this connection
		if len(l.queue) > 0 {
			b = l.queue[0]
		}
		l.waits = l.busy
		busy, lost := l.busy, k == nil || k.over()
		mine = !busy && (b != nil || closed || lost)
		if mine {
			l.busy = true
			if b != nil && !lost {
				first, b.on = b.on != k, k
			}
		}
		l.mu.Unlock()
		switch {
		case busy:
			<-l.work
		case b == nil && closed:
			return
		case lost:
			if !l.relink(k, pause) && closed && l.waited() {
				return
			}
			pause = min(max(2*pause, 50*time.Millisecond), 5*time.Second)
		case b == nil:
			select {
			case <-l.work:
			case <-k.process.Exited:
			}
		default:
			switch err := l.exchange(k, b, first); {
			case err == nil:
				pause = 0
			case !errors.Is(err, os.ErrDeadlineExceeded):
				k.end()
			}
		}
	}
}

// exchange has a batch written, or what a writer before left of it, and takes the answer. send is false when only
// the answer is missing. An error but os.ErrDeadlineExceeded says that the writer is lost.
func (l *Log) exchange(k *link, b *batch, send bool) error {
	first := b.first // which only changes when another writer is linked, and body not any more
	if send {
		text := b.body
		if first > 0 {
			text = append(make([]byte, lengthSize), b.body[b.ends[first-1]:]...)
		}
		setLength(text)
		if _, err := k.records.Write(text); err != nil {
			return err
		}
	}
	seq, refused, err := readAnswer(k.records)
	if err != nil {
		_ = k.records.SetReadDeadline(time.Time{})
		return err
	}
	var failed map[int]error
	var whole error
	for _, r := range refused {
		if r.At == all {
			whole = r.Error.Err()
			continue
		}
		if failed == nil {
			failed = map[int]error{}
		}
		failed[first+r.At] = r.Error.Err()
	}
	for at := range first {
		if whole != nil { // those before were taken
			if failed == nil {
				failed = map[int]error{}
			}
			failed[at] = nil
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if seq > l.seq { // it tells of them before it writes another one
		l.refused = 0
	}
	l.seq = seq
	if whole != nil { // the writer counts what it has no space for, and not what a gap stands for
		n, told := b.left()
		l.gap.add(told.lost, told.reason)
		l.refused += n
	}
	b.finish(whole, failed)
	l.queue = l.queue[1:]
	return nil
}

// waited reports whether nobody waits for what is left.
func (l *Log) waited() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !slices.ContainsFunc(l.queue, func(b *batch) bool { return !b.over() })
}

// relink ends what is left of the writer and starts another one, after a while. It reports whether
// there is one.
func (l *Log) relink(old *link, pause time.Duration) bool {
	if old != nil {
		old.end()
		l.c.Log.Error("the writer of the audit log was lost", "error", old.process.Err, "hint", berm.HintOf(old.process.Err))
		l.mu.Lock()
		l.link, l.linked = nil, make(chan struct{})
		l.gap.add(0, old.process.Err.Error())
		l.mu.Unlock()
	}
	time.Sleep(pause)
	l.mu.Lock()
	after := int64(l.seq)
	l.mu.Unlock()
	k, r, err := newLink(l.c, l.anchors, after)
	if err == nil && r.Origin != l.origin {
		k.end()
		err = berm.Errorf(berm.Internal, "another log lies in its place")
	}
	if err != nil {
		l.c.Log.Error("the audit log has no writer", "error", err, "hint", berm.HintOf(err))
		return false
	}
	l.up(k, r)
	return true
}

// up goes on with another writer, which knows what the one before has taken.
func (l *Log) up(k *link, r ready) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.link, l.seq = k, r.Seq
	close(l.linked)
	if !r.Told {
		l.gap.lost += l.refused // the writer before knew of them, and told nobody
	}
	l.refused = 0
	if len(l.queue) > 0 && l.queue[0].on != nil {
		b := l.queue[0]
		b.first = min(b.first+r.Taken, len(b.ends))
		if n, told := b.left(); b.over() || n == 0 && told == (gap{}) {
			l.miss(b)
			b.finish(nil, nil)
			l.queue = l.queue[1:]
		}
	}
	if l.gap.reason != "" {
		l.gathering()
	}
}

// ask asks the writer, when there is one.
func (l *Log) ask(m message) (answer, error) {
	end := time.After(patience)
	for {
		l.mu.Lock()
		k, linked := l.link, l.linked
		l.mu.Unlock()
		if k != nil {
			a, lost, err := k.ask(m)
			if !lost || m.Erase != nil || m.EraseAll != nil || m.Rotate || m.Close {
				return a, err
			}
		}
		select {
		case <-linked:
			// A writer that was lost a moment ago is not known to be yet.
			time.Sleep(time.Millisecond)
		case <-end:
			return answer{}, berm.Errorf(berm.Unavailable, "the audit log has no writer")
		case <-l.stopped:
			return answer{}, berm.Errorf(berm.Unavailable, "audit log is closed")
		}
	}
}

// NewBlob implements audit.Blobs: the writer makes the file, and names it.
func (l *Log) NewBlob(kind string) (*audit.BlobWriter, error) {
	a, err := l.ask(message{Begin: true})
	if err != nil {
		return nil, err
	}
	if a.file == nil {
		return nil, berm.Errorf(berm.Unavailable, "audit blob: no file came").WithHint("the server may have too many open")
	}
	return audit.WriteBlob(a.file, kind, func(sum string) error {
		_, err := l.ask(message{Name: a.Name, SHA256: sum})
		return err
	}), nil
}

// Erase is that of trail.Log.
func (l *Log) Erase(e trail.Erasure, dry bool) (trail.Erasure, error) {
	a, err := l.ask(message{Erase: &e, Dry: dry})
	if a.Erase != nil {
		e = *a.Erase
	}
	return e, err
}

// EraseAll is that of trail.Log.
func (l *Log) EraseAll(all []trail.Erasure) ([]trail.Erasure, error) {
	a, err := l.ask(message{EraseAll: all})
	if a.EraseAll != nil {
		all = a.EraseAll
	}
	return all, err
}

// RotateKey is that of trail.Log.
func (l *Log) RotateKey() error {
	_, err := l.ask(message{Rotate: true})
	return err
}

// Close has the writer sign what it wrote, and end.
func (l *Log) Close() error {
	l.mu.Lock()
	if l.gap != (gap{}) {
		l.gathering()
	}
	l.closed = true
	l.mu.Unlock()
	l.wake()
	<-l.stopped
	l.mu.Lock()
	k := l.link
	l.mu.Unlock()
	if k == nil {
		return errors.Join(berm.Errorf(berm.Unavailable, "the audit log has no writer"), l.closeAnchors())
	}
	_, _, err := k.ask(message{Close: true})
	k.end()
	return errors.Join(err, l.closeAnchors())
}

func (l *Log) closeAnchors() (err error) {
	for _, f := range l.anchors {
		err = errors.Join(err, f.Close())
	}
	return err
}
