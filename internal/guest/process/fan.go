package process

import (
	"sync"

	pb "github.com/berm-sandbox/berm/internal/proto/process"
)

// backlog is how many events wait for one follower: enough to overlap reading and
// sending.
const backlog = 4

// fan hands events to followers.
type fan struct {
	mu        sync.RWMutex
	followers []*follower
	closed    bool
}

type follower struct {
	events chan *pb.ProcessEvent
	gone   chan struct{}
}

// join adds a follower, which gets every event from now on. The caller must leave.
func (f *fan) join() *follower {
	w := &follower{make(chan *pb.ProcessEvent, backlog), make(chan struct{})}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.closed {
		// A new slice: publish walks the old one without the lock.
		f.followers = append(f.followers[:len(f.followers):len(f.followers)], w)
	}
	return w
}

func (f *fan) leave(w *follower) {
	close(w.gone)
	f.mu.Lock()
	defer f.mu.Unlock()
	rest := make([]*follower, 0, len(f.followers))
	for _, other := range f.followers {
		if other != w {
			rest = append(rest, other)
		}
	}
	f.followers = rest
}

func (f *fan) snapshot() []*follower {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.followers
}

func (f *fan) followed() bool { return len(f.snapshot()) > 0 }

// publish waits until every follower has taken the event or left.
func (f *fan) publish(ev *pb.ProcessEvent) {
	for _, w := range f.snapshot() {
		select {
		case w.events <- ev:
		case <-w.gone:
		}
	}
}

// close drops the followers: what comes now is for nobody.
func (f *fan) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.followers, f.closed = nil, true
}
