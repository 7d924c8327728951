package container

import (
	"context"
	"sync"

	"github.com/berm-sandbox/berm"
)

// turns gives each name to one caller at a time.
type turns struct {
	mu    sync.Mutex
	names map[string]*turn
}

type turn struct {
	free    chan struct{} // has one element when nobody has the name
	callers int           // that have it or wait, under the lock of turns
}

// take waits for a name. The caller calls done when it needs it no more.
func (t *turns) take(ctx context.Context, name string) (done func(), err error) {
	t.mu.Lock()
	if t.names == nil {
		t.names = map[string]*turn{}
	}
	mine := t.names[name]
	if mine == nil {
		mine = &turn{free: make(chan struct{}, 1)}
		mine.free <- struct{}{}
		t.names[name] = mine
	}
	mine.callers++
	t.mu.Unlock()
	leave := func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if mine.callers--; mine.callers == 0 {
			delete(t.names, name)
		}
	}
	select {
	case <-mine.free:
		return func() { mine.free <- struct{}{}; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, berm.Errorf(berm.Unavailable, "the container of this thread is being made: %w", ctx.Err())
	}
}
