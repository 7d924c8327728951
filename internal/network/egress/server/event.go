package server

import (
	"sync"
	"time"

	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/service"
)

// maxWaiting bounds the events that were not sent yet. Beyond it equal denials are counted
// together, and flows that were allowed are still told: their number is limited.
const maxWaiting = 1024

// events sends what happened, without holding up those who tell of it.
type events struct {
	wire *service.Wire

	mu      sync.Mutex
	waiting []egress.Event
	more    chan struct{}
	done    chan struct{} // closed by close
	sent    chan struct{} // closed when nothing is sent any more
}

func newEvents(w *service.Wire) *events {
	e := &events{wire: w, more: make(chan struct{}, 1), done: make(chan struct{}), sent: make(chan struct{})}
	go e.send()
	return e
}

// add tells of an event.
func (e *events) add(event egress.Event) {
	event.Time = event.Time.UTC()
	e.mu.Lock()
	defer e.mu.Unlock()
	// A flow that was cut is told by itself, as one that ended, with its bytes: what limits flows
	// limits their number.
	cut := func(e *egress.Event) bool { return e.Kind == "flow" && e.Up+e.Down > 0 }
	if event.Action == "deny" && !cut(&event) {
		// A program that tries again and again is one event.
		for i := len(e.waiting) - 1; i >= 0; i-- {
			w := &e.waiting[i]
			if !cut(w) && w.Action == event.Action && w.Kind == event.Kind && w.Name == event.Name && w.Address == event.Address && w.Port == event.Port && w.Reason == event.Reason && w.Method == event.Method && w.Path == event.Path {
				w.Count = max(w.Count, 1) + 1
				return
			}
		}
		if len(e.waiting) >= maxWaiting {
			last := &e.waiting[len(e.waiting)-1]
			last.Count = max(last.Count, 1) + 1
			return
		}
	}
	e.waiting = append(e.waiting, event)
	select {
	case e.more <- struct{}{}:
	default:
	}
}

func (e *events) send() {
	defer close(e.sent)
	for last := false; !last; {
		select {
		case <-e.more:
			select { // so that equal ones come together
			case <-time.After(50 * time.Millisecond):
			case <-e.done:
			}
		case <-e.done:
			last = true
		}
		e.mu.Lock()
		batch := e.waiting
		e.waiting = nil
		e.mu.Unlock()
		for i := range batch {
			if e.wire.Send(egress.Answer{Event: &batch[i]}, nil) != nil {
				return
			}
		}
	}
}

// close sends what is waiting, and no more.
func (e *events) close() {
	close(e.done)
	<-e.sent
}
