package server

import (
	"testing"

	"github.com/berm-sandbox/berm/internal/network/egress"
)

// Equal denials are one event; flows that passed until a new policy cut them are as many as there were.
func TestEqualDenialsAreOneEvent(t *testing.T) {
	e := &events{more: make(chan struct{}, 1)}
	denied := egress.Event{Kind: "flow", Action: "deny", Name: "a.example", Port: 80, Reason: "not_listed"}
	cut := denied
	cut.Up, cut.Down = 10, 20
	for range 2 {
		e.add(denied)
		e.add(cut)
	}
	counts, bytes := 0, int64(0)
	for _, w := range e.waiting {
		counts += max(w.Count, 1)
		bytes += w.Up + w.Down
	}
	if len(e.waiting) != 3 || counts != 4 || bytes != 60 {
		t.Errorf("%d events of %d flows and %d bytes: %+v", len(e.waiting), counts, bytes, e.waiting)
	}
}
