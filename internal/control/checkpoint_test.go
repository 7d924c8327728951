package control

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
)

func beforeExec(keep int) func(*CreateRequest) {
	return func(r *CreateRequest) { r.Checkpoints = Checkpoints{Exec: true, Keep: keep} }
}

// exec is what the router does before a command.
func (w *world) exec(t testing.TB, id berm.SandboxID) {
	t.Helper()
	route, err := w.Route(id)
	if err != nil {
		t.Fatal(err)
	}
	route.Checkpoint(t.Context())
}

func TestCheckpointBeforeExec(t *testing.T) {
	ctx := t.Context()
	dir, configure := saves(t)
	w := newWorld(t, configure)
	s, without := w.create(t, beforeExec(3)), w.create(t)
	w.exec(t, without.ID)
	w.exec(t, s.ID)
	w.exec(t, s.ID) // nothing was written
	if all := w.Snapshots(SnapshotFilter{}); len(all) != 1 || all[0].Sandbox != s.ID || all[0].Checkpoint != BeforeExec {
		t.Fatalf("%+v", all)
	}
	first := w.Snapshots(SnapshotFilter{})[0]
	for range 3 {
		w.engine.Write(s.ID)
		w.exec(t, s.ID)
	}
	all := w.Snapshots(SnapshotFilter{Sandbox: s.ID})
	if len(all) != 3 || len(kept(t, dir)) != 3 {
		t.Fatalf("%d checkpoints, %v on disk", len(all), kept(t, dir))
	}
	for _, snap := range all {
		if snap.Build == first.Build {
			t.Error("the oldest is kept")
		}
	}
	// One that somebody asked for counts as the last, and does not go.
	w.engine.Write(s.ID)
	asked, err := w.Snapshot(ctx, s.ID, SnapshotRequest{Actor: tester})
	if err != nil {
		t.Fatal(err)
	}
	w.exec(t, s.ID)
	if got := w.Snapshots(SnapshotFilter{Sandbox: s.ID}); len(got) != 4 || got[0].Build != asked.Build {
		t.Errorf("%+v", got)
	}
	child, err := w.Create(ctx, CreateRequest{Template: all[0].ID(), Timeout: time.Minute, Actor: tester})
	if err != nil || child.From != all[0].Build {
		t.Errorf("%+v, %v", child, err)
	}
	if _, err := w.Rollback(ctx, s.ID, all[0].ID(), tester); err != nil {
		t.Error(err)
	}
	if err := w.Pause(ctx, s.ID, tester); err != nil {
		t.Fatal(err)
	}
	w.engine.Write(s.ID)
	w.exec(t, s.ID) // there is no command either
	if got := w.Snapshots(SnapshotFilter{Sandbox: s.ID}); len(got) != 4 {
		t.Errorf("%+v", got)
	}
}

func TestCheckpointByClock(t *testing.T) {
	ctx := t.Context()
	_, configure := saves(t)
	w := newWorld(t, configure)
	s := w.create(t, func(r *CreateRequest) { r.Checkpoints = Checkpoints{Every: time.Second} })
	eventually(t, "checkpoint", func() bool { return len(w.Snapshots(SnapshotFilter{Sandbox: s.ID})) == 1 })
	if got, err := w.Get(ctx, s.ID); err != nil || got.Checkpoints.Keep != defaultKeep || w.Snapshots(SnapshotFilter{Sandbox: s.ID})[0].Checkpoint != ByClock {
		t.Errorf("%+v, %v", got, err)
	}
	w.Close()
	w.start(t, configure)
	w.engine.Write(s.ID)
	eventually(t, "checkpoint of the next server", func() bool { return len(w.Snapshots(SnapshotFilter{Sandbox: s.ID})) == 2 })
	if err := w.PauseToFiles(ctx, s.ID, tester); err != nil { // the clock is stopped
		t.Fatal(err)
	}
	if _, _, err := w.Connect(ctx, s.ID, time.Minute, tester); err != nil {
		t.Fatal(err)
	}
	w.engine.Write(s.ID)
	eventually(t, "checkpoint after a pause", func() bool { return len(w.Snapshots(SnapshotFilter{Sandbox: s.ID})) == 3 })
}

func TestMissedCheckpoint(t *testing.T) {
	ctx := t.Context()
	dir, configure := saves(t)
	w := newWorld(t, configure)
	s := w.create(t, beforeExec(3))
	w.engine.Fail(func(_ berm.SandboxID, method string) error {
		if method == "Snapshot" {
			return berm.Errorf(berm.Unavailable, "no room")
		}
		return nil
	})
	w.exec(t, s.ID)
	w.exec(t, s.ID)
	got, err := w.Get(ctx, s.ID)
	if err != nil || got.Missed == nil || got.Missed.Count != 2 || got.Missed.Reason != "no room" || got.Missed.Checkpoint != BeforeExec || len(kept(t, dir)) != 0 {
		t.Errorf("%+v, %v", got, err)
	}
	w.audit.mu.Lock()
	last := w.audit.all[len(w.audit.all)-1]
	w.audit.mu.Unlock()
	if last.Type != audit.SnapshotTake || last.Outcome != audit.Failed || last.Reason != "no room" {
		t.Errorf("%+v", last)
	}
	w.engine.Fail(nil)
	w.audit.setFail(errors.New("the disk is full")) // what cannot be recorded is not taken
	w.exec(t, s.ID)
	w.audit.setFail(nil)
	if got, _ := w.Get(ctx, s.ID); got.Missed.Count != 3 || len(kept(t, dir)) != 0 {
		t.Errorf("%+v, %v on disk", got.Missed, kept(t, dir))
	}
	w.exec(t, s.ID)
	if n := len(w.Snapshots(SnapshotFilter{Sandbox: s.ID})); n != 1 {
		t.Errorf("%d checkpoints", n)
	}
}

func TestCheckpointBytes(t *testing.T) {
	dir, configure := saves(t)
	w := newWorld(t, configure, func(c *Config) { c.CheckpointBytes = 2*4096 + 1 })
	s := w.create(t, beforeExec(10))
	for range 5 {
		w.engine.Write(s.ID)
		w.exec(t, s.ID)
	}
	if len(kept(t, dir)) != 2 {
		t.Errorf("%v on disk", kept(t, dir))
	}
	w.Close()
	w.start(t, configure, func(c *Config) { c.CheckpointBytes = 4095 })
	w.engine.Write(s.ID)
	w.exec(t, s.ID)
	got, err := w.Get(t.Context(), s.ID)
	if err != nil || got.Missed == nil || len(kept(t, dir)) != 2 {
		t.Errorf("%+v, %v, %v on disk", got.Missed, err, kept(t, dir))
	}
}

// Checkpoints go when their sandbox is forgotten, other snapshots stay.
func TestCheckpointsOfTheDead(t *testing.T) {
	ctx := t.Context()
	dir, configure := saves(t)
	w := newWorld(t, configure)
	s := w.create(t, beforeExec(3))
	w.exec(t, s.ID)
	if _, err := w.Snapshot(ctx, s.ID, SnapshotRequest{Name: "mine", Actor: tester}); err != nil {
		t.Fatal(err)
	}
	if err := w.Kill(ctx, s.ID, tester); err != nil {
		t.Fatal(err)
	}
	w.pruneCheckpoints(ctx)
	if len(kept(t, dir)) != 2 {
		t.Fatalf("%v on disk", kept(t, dir))
	}
	if err := w.db.Prune(ctx, time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	w.pruneCheckpoints(ctx)
	if all := w.Snapshots(SnapshotFilter{}); len(all) != 1 || all[0].Name != "mine" || len(kept(t, dir)) != 1 {
		t.Errorf("%+v, %v on disk", all, kept(t, dir))
	}
}

// Commands that come at once share a checkpoint; what their sandbox's users do waits for it, and
// none of it fails.
func TestCheckpointAmongOthers(t *testing.T) {
	ctx := t.Context()
	dir, configure := saves(t)
	w := newWorld(t, configure)
	for _, other := range []func(berm.SandboxID) error{
		func(id berm.SandboxID) error {
			_, err := w.Snapshot(ctx, id, SnapshotRequest{Actor: tester})
			return err
		},
		func(id berm.SandboxID) error { return w.PauseToFiles(ctx, id, tester) },
		func(id berm.SandboxID) error {
			forks, err := w.Fork(ctx, id, 1, time.Minute, false, tester)
			if err == nil {
				err = forks[0].Err
			}
			return err
		},
		func(id berm.SandboxID) error { return w.Kill(ctx, id, tester) },
	} {
		s := w.create(t, beforeExec(3))
		reached, once := make(chan bool), sync.Once{}
		w.engine.Fail(func(_ berm.SandboxID, method string) error {
			if method == "Snapshot" {
				once.Do(func() {
					close(reached)
					time.Sleep(20 * time.Millisecond)
				})
			}
			return nil
		})
		route, err := w.Route(s.ID)
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() { route.Checkpoint(ctx) })
		}
		<-reached
		if err := other(s.ID); err != nil {
			t.Error(err)
		}
		wg.Wait()
		w.engine.Fail(nil)
		taken := 0
		for _, snap := range w.Snapshots(SnapshotFilter{Sandbox: s.ID}) {
			if snap.Checkpoint != "" {
				taken++
			}
		}
		if got, err := w.Inspect(ctx, s.ID); err != nil || got.Missed != nil || taken > 1 {
			t.Errorf("%+v, %v, %d checkpoints", got.Missed, err, taken)
		}
	}
	w.Close()
	w.start(t, configure)
	if want := len(w.Snapshots(SnapshotFilter{})) + 1; len(kept(t, dir)) != want { // and the files of the one that is paused
		t.Errorf("%v on disk, want %d", kept(t, dir), want)
	}
}

func TestCheckpointsRefused(t *testing.T) {
	ctx := t.Context()
	_, configure := saves(t)
	w := newWorld(t, configure)
	for _, c := range []Checkpoints{{Every: time.Millisecond}, {Keep: 3}, {Exec: true, Keep: 101}, {Every: -time.Hour}, {Exec: true, Keep: -1}} {
		_, err := w.Create(ctx, CreateRequest{Template: "base", Timeout: time.Minute, Actor: tester, Checkpoints: c})
		wantKind(t, err, berm.Invalid)
	}
	w = newWorld(t)
	_, err := w.Create(ctx, CreateRequest{Template: "base", Timeout: time.Minute, Actor: tester, Checkpoints: Checkpoints{Exec: true}})
	wantKind(t, err, berm.Unsupported)
}
