package control

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
)

func named(key, body string) func(*CreateRequest) {
	return func(r *CreateRequest) { r.Request = Request{Key: key, Body: body} }
}

func TestRequestCountsAfterARestart(t *testing.T) {
	w := newWorld(t)
	s := w.create(t, named("k", "b"))
	w.Close()
	w.start(t)
	again := w.create(t, named("k", "b"))
	if again.ID != s.ID || again.AccessToken != s.AccessToken {
		t.Errorf("%s, then %s", s.ID, again.ID)
	}
	r := CreateRequest{Template: "base", Timeout: time.Minute, Actor: tester, Request: Request{Key: "k", Body: "other"}}
	if _, err := w.Create(t.Context(), r); !errors.Is(err, ErrRequestDiffers) {
		t.Errorf("another body: %v", err)
	}
}

// blocked makes the engine's creates wait until release is called.
func blocked(w *world) (entered <-chan struct{}, release func()) {
	in, out := make(chan struct{}, 8), make(chan struct{})
	w.engine.Fail(func(_ berm.SandboxID, method string) error {
		if method == "Create" {
			in <- struct{}{}
			<-out
		}
		return nil
	})
	return in, func() { close(out) }
}

// A caller that leaves takes nothing away from those who stay.
func TestOneOfTwoCallersLeaves(t *testing.T) {
	w := newWorld(t)
	entered, release := blocked(w)
	r := CreateRequest{Template: "base", Timeout: time.Minute, Actor: tester, Request: Request{Key: "k"}}
	impatient, leave := context.WithCancel(t.Context())
	left, stayed := make(chan error), make(chan Sandbox)
	go func() { _, err := w.Create(impatient, r); left <- err }()
	<-entered
	go func() {
		s, err := w.Create(t.Context(), r)
		if err != nil {
			t.Error(err)
		}
		stayed <- s
	}()
	eventually(t, "two callers", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.once["k"].callers == 2
	})
	leave()
	if err := <-left; berm.KindOf(err) != berm.Unavailable {
		t.Errorf("who left: %v", err)
	}
	release()
	s := <-stayed
	if _, err := w.Get(t.Context(), s.ID); err != nil {
		t.Error(err)
	}
}

// A create that nobody waits for any more leaves nothing; who asks anew meanwhile gets
// one of their own.
func TestAllCallersLeave(t *testing.T) {
	w := newWorld(t)
	entered, release := blocked(w)
	r := CreateRequest{Template: "base", Timeout: time.Minute, Actor: tester, Request: Request{Key: "k"}}
	impatient, leave := context.WithCancel(t.Context())
	left := make(chan error)
	go func() { _, err := w.Create(impatient, r); left <- err }()
	<-entered
	leave()
	<-left
	anew := make(chan Sandbox)
	go func() {
		s, err := w.Create(t.Context(), r)
		if err != nil {
			t.Error(err)
		}
		anew <- s
	}()
	eventually(t, "one caller", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.once["k"].callers == 1
	})
	release()
	s := <-anew
	eventually(t, "one sandbox", func() bool {
		ids, _ := w.engine.List(t.Context())
		return len(ids) == 1 && ids[0] == s.ID
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.once) != 0 {
		t.Error("creations are kept")
	}
}
