package control

import (
	"reflect"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/control/enginetest"
)

// A restart of the machine ends what runs, which is told, and leaves what is paused to its files.
func TestMachineRestarts(t *testing.T) {
	ctx := t.Context()
	_, configure := saves(t)
	boot := "one"
	booted := func(c *Config) { c.Boot = boot }
	w := newWorld(t, configure, booted)
	running, paused, resting := w.create(t), w.create(t), w.create(t)
	if err := w.Pause(ctx, paused.ID, tester); err != nil {
		t.Fatal(err)
	}
	if err := w.PauseToFiles(ctx, resting.ID, tester); err != nil {
		t.Fatal(err)
	}
	w.Close()
	boot = "two"
	w.engine = &enginetest.Engine{} // nothing that ran is left
	w.start(t, configure, booted)
	for _, id := range []berm.SandboxID{running.ID, paused.ID} {
		eventually(t, "end", func() bool { got, err := w.Inspect(ctx, id); return err == nil && got.Exit != nil })
		if got, _ := w.Inspect(ctx, id); got.Exit.Reason != berm.ReasonCrash || got.Exit.Detail != "lost when the machine restarted" {
			t.Errorf("%+v", got.Exit)
		}
	}
	again, resumed, err := w.Connect(ctx, resting.ID, time.Minute, tester)
	if err != nil || !resumed || again.AccessToken != resting.AccessToken || again.Boot != "two" {
		t.Errorf("%+v, %v", again, err)
	}
	// One that is lost without it is told so.
	w.Close()
	w.engine = &enginetest.Engine{}
	w.start(t, configure, booted)
	eventually(t, "end", func() bool { got, err := w.Inspect(ctx, resting.ID); return err == nil && got.Exit != nil })
	if got, _ := w.Inspect(ctx, resting.ID); got.Exit.Detail != "lost while no server ran" {
		t.Errorf("%+v", got.Exit)
	}
}

// What the host cannot give is told of a sandbox that starts from its files too, as it is then.
func TestDegradedAfterRest(t *testing.T) {
	ctx := t.Context()
	_, configure := saves(t)
	w := newWorld(t, configure, func(c *Config) {
		e := c.Engine.(*enginetest.Engine)
		e.Unlimited, e.Degraded = map[string]string{"memory": "no controller"}, []string{"one id"}
	})
	s := w.create(t)
	if len(s.Degraded) != 2 {
		t.Fatalf("%q", s.Degraded)
	}
	rest := func() Sandbox {
		t.Helper()
		if err := w.PauseToFiles(ctx, s.ID, tester); err != nil {
			t.Fatal(err)
		}
		again, _, err := w.Connect(ctx, s.ID, time.Minute, tester)
		if err != nil {
			t.Fatal(err)
		}
		return again
	}
	if again := rest(); !reflect.DeepEqual(again.Degraded, s.Degraded) {
		t.Errorf("%q, was %q", again.Degraded, s.Degraded)
	}
	w.engine.Degraded = []string{"something else"}
	if again := rest(); len(again.Degraded) != 2 || again.Degraded[0] != "something else" {
		t.Errorf("%q", again.Degraded)
	}
}
