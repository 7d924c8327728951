package arrival

import (
	"context"
	"io"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
)

// BlockSize is how much of a blob is fetched at least.
const BlockSize = 256 << 10

// pieceSize is how much of a blob is asked for at once when nobody waits for it.
const pieceSize = 4 << 20

// Ranges gives parts of a blob.
type Ranges interface {
	// Range returns size bytes of a blob from an offset on.
	Range(ctx context.Context, digest string, offset, size int64) (io.ReadCloser, error)
}

// blob is a compressed layer on its way to a file.
type blob struct {
	digest string
	size   int64
	file   *os.File // what has arrived, at its place
	have   *os.File // a byte for each block: 1 when it has arrived
	source Ranges
	// patience is how long whoever waits does so while nothing comes.
	patience time.Duration

	mu      sync.Mutex
	blocks  []state
	changed chan struct{} // closed at the next change of blocks
	waiting int           // calls of ensure that need something
	came    time.Time     // when the last block did
}

type state byte

const (
	absent   state = iota
	present        // as it is noted in have
	coming         // asked for because nothing else was
	expected       // asked for because somebody waits
)

// overtake is how long whoever waits for a block leaves it to a large piece that is on its way.
const overtake = 250 * time.Millisecond

// newBlob goes on where an earlier process stopped.
func newBlob(digest string, size int64, file, have *os.File, source Ranges) (*blob, error) {
	b := &blob{digest: digest, size: size, file: file, have: have, source: source, patience: Patience, changed: make(chan struct{})}
	b.blocks = make([]state, (size+BlockSize-1)/BlockSize)
	known := make([]byte, len(b.blocks))
	n, err := have.ReadAt(known, 0)
	if err != nil && err != io.EOF {
		return nil, err
	}
	for i := range b.blocks {
		if i < n && known[i] == 1 {
			b.blocks[i] = present
		}
	}
	return b, nil
}

// ensure returns when the bytes from one place up to another have arrived. It asks for them
// again and again until ctx ends, or nothing has come for longer than the patience.
func (b *blob) ensure(ctx context.Context, from, to int64) error {
	first, end := int(from/BlockSize), int((to+BlockSize-1)/BlockSize)
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	b.mu.Lock()
	defer b.mu.Unlock()
	begun := time.Now()
	var silent *time.Timer
	silent = time.AfterFunc(b.patience, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		last := begun
		if b.came.After(last) {
			last = b.came
		}
		if left := b.patience - time.Since(last); left > 0 {
			silent.Reset(left)
		} else {
			stop(berm.Errorf(berm.Unavailable, "nothing came for %v", b.patience))
		}
	})
	defer silent.Stop()
	b.waiting++
	defer func() {
		b.waiting--
		b.notify()
	}()
	var last error
	patient := time.NewTimer(overtake)
	defer patient.Stop()
	takes := []state{absent}
	for wait := firstWait; ; {
		at, upTo, pending := b.claim(first, end, expected, takes)
		if at < 0 && !pending {
			return nil
		}
		changed := b.changed
		b.mu.Unlock()
		if at >= 0 {
			if err := b.fetch(ctx, at, upTo, expected); err != nil && ctx.Err() == nil {
				last = err
				wait = pause(ctx, wait)
			}
		} else {
			select {
			case <-changed:
			case <-patient.C:
				takes = []state{absent, coming}
			case <-ctx.Done():
			}
		}
		b.mu.Lock()
		if ctx.Err() != nil {
			if last == nil {
				last = context.Cause(ctx)
			}
			return last
		}
	}
}

// claim takes the next run of blocks in one of the states takes, up to a piece, for the caller to
// fetch as what it says they are then. Without one, pending says whether others fetch some. It
// needs the lock.
func (b *blob) claim(first, end int, as state, takes []state) (at, stop int, pending bool) {
	for at = first; at < end && !slices.Contains(takes, b.blocks[at]); at++ {
		pending = pending || b.blocks[at] != present
	}
	if at == end {
		return -1, 0, pending
	}
	for stop = at; stop < end && stop-at < pieceSize/BlockSize && slices.Contains(takes, b.blocks[stop]); stop++ {
		b.blocks[stop] = as
	}
	return at, stop, true
}

// notify needs the lock.
func (b *blob) notify() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// fetch brings blocks that were claimed as something. Those that it did not bring are absent
// again.
func (b *blob) fetch(ctx context.Context, at, stop int, as state) (err error) {
	defer func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		for ; at < stop; at++ {
			if b.blocks[at] == as {
				b.blocks[at] = absent
			}
		}
		b.notify()
	}()
	from := int64(at) * BlockSize
	to := min(int64(stop)*BlockSize, b.size)
	r, err := b.source.Range(ctx, b.digest, from, to-from)
	if err != nil {
		return err
	}
	defer r.Close()
	buf := make([]byte, BlockSize)
	for from < to {
		piece := buf[:min(BlockSize, to-from)]
		if _, err := io.ReadFull(r, piece); err != nil {
			return err
		}
		if _, err := b.file.WriteAt(piece, from); err != nil {
			return err
		}
		if _, err := b.have.WriteAt([]byte{byte(present)}, int64(at)); err != nil {
			return err
		}
		b.mu.Lock()
		b.blocks[at] = present // perhaps for the second time
		b.came = time.Now()
		b.notify()
		b.mu.Unlock()
		from += int64(len(piece))
		at++
	}
	return nil
}

// forget has what turned out to be wrong fetched again.
func (b *blob) forget(from, to int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := from / BlockSize; i < (to+BlockSize-1)/BlockSize; i++ {
		if b.blocks[i] != present {
			continue
		}
		if _, err := b.have.WriteAt([]byte{byte(absent)}, i); err != nil {
			return err
		}
		b.blocks[i] = absent
	}
	b.notify()
	return nil
}

// fill fetches all that is missing, from the start on: there is what the image's builder
// expects to be needed first. It keeps behind what somebody waits for, of any blob, as busy
// says. report is told why it does not get on, and "" when it does again.
func (b *blob) fill(ctx context.Context, busy func() <-chan struct{}, report func(why string)) error {
	for wait := firstWait; ; {
		if waited := busy(); waited != nil {
			select {
			case <-waited:
				continue
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		b.mu.Lock()
		at, stop, pending := b.claim(0, len(b.blocks), coming, []state{absent})
		changed := b.changed
		b.mu.Unlock()
		switch {
		case at >= 0:
			if err := b.fetch(ctx, at, stop, coming); err != nil && ctx.Err() == nil {
				if wait > firstWait { // once is nothing
					report(err.Error())
				}
				wait = pause(ctx, wait)
			} else if err == nil {
				report("")
				wait = firstWait
			}
		case !pending:
			return nil
		default:
			select {
			case <-changed:
			case <-ctx.Done():
			}
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

// wanted is closed when something changes, and nil when nobody waits.
func (b *blob) wanted() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.waiting == 0 {
		return nil
	}
	return b.changed
}
