package capture

import (
	"sync"
	"time"
)

const (
	// maxQueued is how many bytes of a command's answer wait to be recorded; then the answer waits.
	maxQueued = 256 << 10
	// small pieces are recorded at once, if nothing waits: to hand them over would cost more.
	small = 4 << 10
)

// queue has pieces worked off in order, by a goroutine that lives while there are any. Nothing
// is dropped: who is faster than the work waits for it.
type queue struct {
	work func(piece)

	mu      sync.Mutex
	changed sync.Cond
	waiting *batch // nil: nothing waits
	working bool
	closed  bool
}

// piece is a part of an answer, or the new size of the command's terminal.
type piece struct {
	at     time.Duration // since the start of the command
	resize bool
	data   []byte // not to be kept
}

// batch is what waits. Data lies in one buffer, so that many small pieces take no more than a
// few large ones.
type batch struct {
	data   []byte
	pieces []piece
}

var batches = sync.Pool{New: func() any { return &batch{data: make([]byte, 0, maxQueued+32<<10)} }}

func newQueue(work func(piece)) *queue {
	q := &queue{work: work}
	q.changed.L = &q.mu
	return q
}

// put takes a piece, whose data may be used again when it returns. What comes after close is
// dropped.
func (q *queue) put(p piece) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.waiting != nil && len(q.waiting.data) >= maxQueued && !q.closed {
		q.changed.Wait()
	}
	if q.closed {
		return
	}
	if !q.working && len(p.data) <= small {
		q.working = true
		q.mu.Unlock()
		q.work(p)
		q.mu.Lock()
		q.working = false
		q.changed.Broadcast()
	} else {
		if q.waiting == nil {
			q.waiting = batches.Get().(*batch)
		}
		b := q.waiting
		b.data = append(b.data, p.data...)
		p.data = b.data[len(b.data)-len(p.data):]
		b.pieces = append(b.pieces, p)
	}
	if q.waiting != nil && !q.working {
		q.working = true
		go q.run()
	}
}

// run works off what waits.
func (q *queue) run() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.waiting != nil {
		b := q.waiting
		q.waiting = nil
		q.changed.Broadcast()
		q.mu.Unlock()
		for _, p := range b.pieces {
			q.work(p)
		}
		clear(b.pieces)
		b.data, b.pieces = b.data[:0], b.pieces[:0]
		batches.Put(b)
		q.mu.Lock()
	}
	q.working = false
	q.changed.Broadcast()
}

// close waits until all is worked off, and reports whether it was open. Work is done no more.
func (q *queue) close() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false
	}
	q.closed = true
	for q.working || q.waiting != nil {
		q.changed.Wait()
	}
	return true
}
