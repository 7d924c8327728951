package gvisor

import (
	"context"
	"testing"

	"golang.org/x/sync/semaphore"

	"github.com/berm-sandbox/berm"
)

// More starts than may be at a time wait, and give up with whoever asked.
func TestTurns(t *testing.T) {
	d := &Driver{turns: semaphore.NewWeighted(atOnce)}
	for range atOnce {
		if err := d.turn(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	given, cancel := context.WithCancel(t.Context())
	late, next := make(chan error), make(chan error)
	go func() { late <- d.turn(given) }()
	cancel()
	if err := <-late; err == nil || berm.KindOf(err) != berm.Unavailable || berm.HintOf(err) == "" {
		t.Errorf("one too many: %v", err)
	}
	go func() { next <- d.turn(t.Context()) }()
	select {
	case err := <-next:
		t.Errorf("one too many: %v", err)
	default:
	}
	d.turns.Release(1)
	if err := <-next; err != nil {
		t.Error(err)
	}
}
