package namespace

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/berm-sandbox/berm/internal/driver/namespace/launch"
)

const (
	// maxShelves is for how many kinds of writable layers spares are kept.
	maxShelves = 4
	// spareLimit bounds how long the making of a spare may take.
	spareLimit = 10 * time.Second
	// spareDelay leaves the processors to the first command of the sandbox that was made.
	spareDelay = 20 * time.Millisecond
)

// spares are monitors that were started before they are needed. None knows anything of
// a sandbox: the order that one gets later is the same that a new monitor would get.
type spares struct {
	count int // for each shelf
	spare func(context.Context, launch.Upper) (*keeper, error)

	ctx  context.Context // ends with close
	stop context.CancelFunc

	mu      sync.Mutex
	shelves []*shelf // the last used first
	filling bool
	work    sync.WaitGroup // monitors being made or let go
}

// shelf has the spares with one kind of writable layer.
type shelf struct {
	upper   launch.Upper
	again   bool // whether it was asked for twice: what is used once needs no spares
	waiting []*keeper
}

func (s *spares) start(count int, spare func(context.Context, launch.Upper) (*keeper, error)) {
	s.count, s.spare = count, spare
	s.ctx, s.stop = context.WithCancel(context.Background())
}

// take returns a spare with a writable layer, or nil when there is none.
func (s *spares) take(upper launch.Upper) *keeper {
	if s.count == 0 {
		return nil
	}
	upper.Directory = "" // one sandbox's own
	s.mu.Lock()
	defer s.mu.Unlock()
	own := &shelf{upper: upper}
	if i := slices.IndexFunc(s.shelves, func(o *shelf) bool { return o.upper == upper }); i >= 0 {
		own = s.shelves[i]
		own.again = true
		s.shelves = slices.Delete(s.shelves, i, i+1)
	} else if len(s.shelves) == maxShelves {
		s.clear(s.shelves[maxShelves-1])
		s.shelves = s.shelves[:maxShelves-1]
	}
	s.shelves = slices.Insert(s.shelves, 0, own)
	for len(own.waiting) > 0 {
		k := own.waiting[0]
		own.waiting = own.waiting[1:]
		if !k.lost() {
			return k
		}
		s.work.Go(k.dismiss)
	}
	return nil
}

// fill makes what spares are missing, one after the other in the background. What cannot
// be made is tried again at the next call.
func (s *spares) fill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.filling || s.lacking() == nil {
		return
	}
	s.filling = true
	s.work.Go(func() {
		select {
		case <-s.ctx.Done():
		case <-time.After(spareDelay):
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		for own := s.lacking(); own != nil; own = s.lacking() {
			s.mu.Unlock()
			ctx, cancel := context.WithTimeout(s.ctx, spareLimit)
			k, err := s.spare(ctx, own.upper)
			cancel()
			s.mu.Lock()
			if err != nil {
				break
			}
			// Still wanted, unless it was pushed from the shelves meanwhile.
			if own.waiting = append(own.waiting, k); !slices.Contains(s.shelves, own) {
				s.clear(own)
			}
		}
		s.filling = false
	})
}

// lacking returns a shelf that is not full, or nil. The caller holds the lock.
func (s *spares) lacking() *shelf {
	if s.ctx.Err() != nil {
		return nil
	}
	for _, own := range s.shelves {
		if own.again && len(own.waiting) < s.count {
			return own
		}
	}
	return nil
}

// clear lets the spares of a shelf go without waiting for them. The caller holds the lock.
func (s *spares) clear(own *shelf) {
	for _, k := range own.waiting {
		s.work.Go(k.dismiss)
	}
	own.waiting = nil
}

// close lets all spares go and returns when they are gone.
func (s *spares) close() {
	s.mu.Lock()
	s.stop()
	for _, own := range s.shelves {
		s.clear(own)
	}
	s.shelves = nil
	s.mu.Unlock()
	s.work.Wait()
}
