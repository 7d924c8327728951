package control

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/control/enginetest"
	"github.com/berm-sandbox/berm/internal/store"
)

// saves gives the world a directory for snapshots that outlives its managers.
func saves(t testing.TB) (dir string, configure func(*Config)) {
	dir = t.TempDir()
	return dir, func(c *Config) { c.SnapshotDir = dir }
}

// kept names what lies in a directory.
func kept(t testing.TB, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestPauseToFiles(t *testing.T) {
	ctx := t.Context()
	dir, configure := saves(t)
	w := newWorld(t, configure)
	s := w.create(t, func(r *CreateRequest) { r.Env, r.AutoResume = map[string]string{"A": "b"}, true })
	route, err := w.Route(s.ID)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		if err := w.PauseToFiles(ctx, s.ID, tester); err != nil {
			t.Fatal(err)
		}
		if left, _ := w.engine.List(ctx); len(left) != 0 || len(kept(t, dir)) != 1 {
			t.Fatalf("cycle %d: %v in the engine, %v on disk", i, left, kept(t, dir))
		}
		wantKind(t, w.PauseToFiles(ctx, s.ID, tester), berm.Conflict)
		_, err := route.Enter(ctx) // traffic does not wake it
		wantKind(t, err, berm.NotFound)
		_, err = w.Policy(ctx, s.ID)
		wantKind(t, err, berm.Conflict)
		again, resumed, err := w.Connect(ctx, s.ID, time.Minute, tester)
		if err != nil || !resumed || again.State != berm.Running || again.AccessToken != s.AccessToken || again.ID != s.ID {
			t.Fatalf("cycle %d: %+v, %v", i, again, err)
		}
		if names := kept(t, dir); len(names) != 0 {
			t.Fatalf("cycle %d: %v on disk", i, names)
		}
	}
	last := w.engine.Specs[len(w.engine.Specs)-1]
	if last.Guest.Env["A"] != "b" || last.Guest.Env["LANG"] != "C.UTF-8" || last.Guest.AccessToken != s.AccessToken || last.Limits != s.Limits {
		t.Errorf("%+v", last)
	}
	// It is followed as before: a death is seen.
	w.engine.End(s.ID, berm.ReasonOOM)
	eventually(t, "death", func() bool { _, err := w.Get(ctx, s.ID); return err != nil })

	// Killed while it rests, nothing is left.
	s = w.create(t)
	if err := w.PauseToFiles(ctx, s.ID, tester); err != nil {
		t.Fatal(err)
	}
	if err := w.Kill(ctx, s.ID, tester); err != nil || len(kept(t, dir)) != 0 {
		t.Errorf("%v, %v on disk", err, kept(t, dir))
	}
}

func TestPauseToFilesThatFails(t *testing.T) {
	ctx := t.Context()
	dir, configure := saves(t)
	w := newWorld(t, configure)
	s := w.create(t)
	fail := func(call string, kind berm.Kind) {
		w.engine.Fail(func(_ berm.SandboxID, method string) error {
			if method == call {
				return berm.Errorf(kind, "no")
			}
			return nil
		})
	}
	fail("Snapshot", berm.Unsupported)
	wantKind(t, w.PauseToFiles(ctx, s.ID, tester), berm.Unsupported)
	if got, err := w.Get(ctx, s.ID); err != nil || got.State != berm.Running {
		t.Errorf("%+v, %v", got, err)
	}
	w.engine.Fail(nil)
	if err := w.PauseToFiles(ctx, s.ID, tester); err != nil {
		t.Fatal(err)
	}
	fail("Create", berm.Exhausted)
	_, _, err := w.Connect(ctx, s.ID, time.Minute, tester)
	wantKind(t, err, berm.Exhausted)
	if got, err := w.Get(ctx, s.ID); err != nil || got.State != berm.Paused || len(kept(t, dir)) != 1 {
		t.Errorf("%+v, %v, %v on disk", got, err, kept(t, dir))
	}
	w.engine.Fail(nil)
	if _, _, err := w.Connect(ctx, s.ID, time.Minute, tester); err != nil {
		t.Error(err)
	}
}

// Where the level can, a pause puts memory on disk, and what begins with a snapshot goes on.
func TestPauseToDiskWithMemory(t *testing.T) {
	ctx := t.Context()
	dir, configure := saves(t)
	w := newWorld(t, configure, func(c *Config) { c.Engine.(*enginetest.Engine).Memory = true })
	last := func() berm.Spec { return w.engine.Specs[len(w.engine.Specs)-1] }
	rests := func(id berm.SandboxID, memory bool) {
		t.Helper()
		eventually(t, "rest", func() bool {
			got, err := w.Get(ctx, id)
			return err == nil && got.State == berm.Paused && got.SavedAs != "" && got.SavedMemory == memory
		})
		if left, _ := w.engine.List(ctx); len(left) != 0 || len(kept(t, dir)) != 1 {
			t.Fatalf("%v in the engine, %v on disk", left, kept(t, dir))
		}
	}
	s := w.create(t, func(r *CreateRequest) { r.AutoResume = true })
	if err := w.Pause(ctx, s.ID, tester); err != nil {
		t.Fatal(err)
	}
	rests(s.ID, true)
	wantKind(t, w.Pause(ctx, s.ID, tester), berm.Conflict)
	w.Close() // and it survives the server
	w.start(t, configure)
	rests(s.ID, true)
	route, err := w.Route(s.ID)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := route.Enter(ctx); err != nil { // traffic wakes it
		t.Fatal(err)
	}
	if spec := last(); !spec.Memory || spec.ID != s.ID || len(kept(t, dir)) != 0 {
		t.Errorf("%+v, %v on disk", spec, kept(t, dir))
	}
	// One whose memory is dropped keeps its files.
	if err := w.Pause(ctx, s.ID, tester); err != nil {
		t.Fatal(err)
	}
	if err := w.DropMemory(ctx, s.ID, tester); err != nil {
		t.Fatal(err)
	}
	rests(s.ID, false)
	if _, _, err := w.Connect(ctx, s.ID, time.Minute, tester); err != nil || last().Memory || last().From == "" {
		t.Errorf("%+v, %v", last(), err)
	}
	// What cannot be saved stands still as it is.
	w.engine.Fail(func(_ berm.SandboxID, method string) error {
		if method == "Snapshot" {
			return berm.Errorf(berm.Unavailable, "no")
		}
		return nil
	})
	if err := w.Pause(ctx, s.ID, tester); err != nil {
		t.Fatal(err)
	}
	if got, err := w.Get(ctx, s.ID); err != nil || got.State != berm.Paused || got.SavedAs != "" || len(kept(t, dir)) != 0 {
		t.Errorf("%+v, %v", got, err)
	}
	w.engine.Fail(nil)
	specs := len(w.engine.Specs)
	if _, _, err := w.Connect(ctx, s.ID, time.Minute, tester); err != nil || len(w.engine.Specs) != specs {
		t.Errorf("%v, %d specs", err, len(w.engine.Specs))
	}
	// Snapshots, forks and rollbacks.
	snap, err := w.Snapshot(ctx, s.ID, SnapshotRequest{Name: "kept", Memory: true, Actor: tester})
	if err != nil || !snap.Saved.Memory {
		t.Fatalf("%+v, %v", snap, err)
	}
	if _, err := w.Create(ctx, CreateRequest{Template: "kept", Timeout: time.Minute, Actor: tester}); err != nil || !last().Memory {
		t.Errorf("%+v, %v", last(), err)
	}
	forks, err := w.Fork(ctx, s.ID, 3, time.Minute, true, tester)
	if err != nil || len(forks) != 3 || !last().Memory {
		t.Errorf("%v, %v", forks, err)
	}
	if _, err := w.Rollback(ctx, s.ID, "kept", tester); err != nil || !last().Memory || last().ID != s.ID {
		t.Errorf("%+v, %v", last(), err)
	}
	// At the deadline, with a server and without.
	short := func(r *CreateRequest) { r.OnDeadline, r.Timeout = berm.PauseAtDeadline, 150*time.Millisecond }
	a, b := w.create(t, short), w.create(t, short)
	eventually(t, "rest", func() bool { got, err := w.Get(ctx, a.ID); return err == nil && got.SavedMemory })
	w.Close()
	time.Sleep(300 * time.Millisecond)
	w.start(t, configure)
	eventually(t, "rest", func() bool { got, err := w.Get(ctx, b.ID); return err == nil && got.SavedMemory })
}

// Of a pause at the deadline memory is not kept either, when no server runs as well.
func TestDeadlinePausesToFiles(t *testing.T) {
	ctx := t.Context()
	dir, configure := saves(t)
	w := newWorld(t, configure)
	short := func(r *CreateRequest) {
		r.OnDeadline, r.FilesOnly, r.Timeout = berm.PauseAtDeadline, true, 150*time.Millisecond
	}
	s := w.create(t, short)
	eventually(t, "rest", func() bool {
		got, err := w.Get(ctx, s.ID)
		return err == nil && got.SavedAs != "" && got.State == berm.Paused
	})
	other := w.create(t, short)
	w.Close()
	time.Sleep(300 * time.Millisecond)
	w.start(t, configure)
	eventually(t, "rest", func() bool {
		got, err := w.Get(ctx, other.ID)
		return err == nil && got.SavedAs != "" && got.State == berm.Paused
	})
	if left, _ := w.engine.List(ctx); len(left) != 0 || len(kept(t, dir)) != 2 {
		t.Errorf("%v in the engine, %v on disk", left, kept(t, dir))
	}
	for _, id := range []berm.SandboxID{s.ID, other.ID} {
		if got, _, err := w.Connect(ctx, id, time.Minute, tester); err != nil || !got.FilesOnly {
			t.Errorf("%+v, %v", got, err)
		}
	}
}

// Whatever a server has not finished is finished, or as if it had not begun.
func TestRestartAmongSnapshots(t *testing.T) {
	ctx := t.Context()
	dir, configure := saves(t)
	w := newWorld(t, configure)
	resting, halfway, paused := w.create(t), w.create(t), w.create(t)
	for _, s := range []Sandbox{resting, halfway} {
		if err := w.PauseToFiles(ctx, s.ID, tester); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Pause(ctx, paused.ID, tester); err != nil {
		t.Fatal(err)
	}
	source := w.create(t)
	snap, err := w.Snapshot(ctx, source.ID, SnapshotRequest{Name: "kept", Actor: tester})
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	// A resume that was told to nobody left its sandbox; a snapshot that was not stored left a
	// directory; so did one that was forgotten.
	spec := w.engine.Specs[1]
	spec.ID = halfway.ID
	if _, err := w.engine.Create(ctx, spec); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "stray", "disk"), 0o700); err != nil {
		t.Fatal(err)
	}
	w.start(t, configure)
	if names := kept(t, dir); len(names) != 3 || !slices.Contains(names, string(snap.Build)) || slices.Contains(names, "stray") {
		t.Errorf("%v on disk", names)
	}
	if left, _ := w.engine.List(ctx); len(left) != 2 {
		t.Errorf("%v in the engine", left)
	}
	for _, s := range []Sandbox{resting, halfway, paused} {
		if got, resumed, err := w.Connect(ctx, s.ID, time.Minute, tester); err != nil || !resumed || got.AccessToken != s.AccessToken {
			t.Errorf("%+v, %v, %v", got, resumed, err)
		}
	}
	if _, err := w.Create(ctx, CreateRequest{Template: "kept", Timeout: time.Minute, Actor: tester}); err != nil {
		t.Error(err)
	}
	if err := w.DeleteSnapshot(ctx, "", "kept", tester); err != nil || len(kept(t, dir)) != 0 {
		t.Errorf("%v, %v on disk", err, kept(t, dir))
	}
}

// A snapshot that is deleted while sandboxes are made from it is there until they are.
func TestDeleteDuringCreate(t *testing.T) {
	ctx := t.Context()
	dir, configure := saves(t)
	w := newWorld(t, configure)
	s := w.create(t)
	if _, err := w.Snapshot(ctx, s.ID, SnapshotRequest{Name: "kept", Actor: tester}); err != nil {
		t.Fatal(err)
	}
	reached, go_ := make(chan bool), make(chan bool)
	w.engine.Fail(func(_ berm.SandboxID, method string) error {
		if method == "Create" {
			reached <- true
			<-go_
		}
		return nil
	})
	made := make(chan error, 1)
	go func() {
		_, err := w.Create(ctx, CreateRequest{Template: "kept", Timeout: time.Minute, Actor: tester})
		made <- err
	}()
	<-reached
	if err := w.DeleteSnapshot(ctx, "", "kept", tester); err != nil {
		t.Fatal(err)
	}
	close(go_)
	if err := <-made; err != nil {
		t.Error(err)
	}
	eventually(t, "removal", func() bool { return len(kept(t, dir)) == 0 })
}

// Who pauses a sandbox to its files before its resume follows it ends its processes: that is no
// death.
func TestPausedBeforeItIsFollowed(t *testing.T) {
	ctx := t.Context()
	_, configure := saves(t)
	following := following{}
	w := newWorld(t, configure, func(c *Config) { c.Processes = &following })
	s := w.create(t)
	if err := w.PauseToFiles(ctx, s.ID, tester); err != nil {
		t.Fatal(err)
	}
	paused := make(chan error, 1)
	following.begin = func() {
		done := make(chan struct{})
		go func() {
			paused <- w.PauseToFiles(ctx, s.ID, tester)
			close(done)
		}()
		select {
		case <-done:
		case <-time.After(50 * time.Millisecond):
		}
	}
	if _, _, err := w.Connect(ctx, s.ID, time.Minute, tester); err != nil {
		t.Fatal(err)
	}
	if err := <-paused; err != nil {
		t.Fatal(err)
	}
	time.Sleep(50 * time.Millisecond)
	if got, err := w.Get(ctx, s.ID); err != nil || got.State != berm.Paused {
		t.Errorf("%s, %v", got.State, err)
	}
}

// following is a recorder of processes that does something else.
type following struct{ begin func() }

func (f *following) Follow(berm.SandboxID, *berm.First, bool) error {
	if f.begin != nil {
		f.begin()
	}
	return nil
}

func (f *following) Forget(berm.SandboxID) {}

// A sandbox that could not start from a snapshot keeps it, though it is removed.
func TestRollbackToRemovedSnapshot(t *testing.T) {
	ctx := t.Context()
	dir, configure := saves(t)
	w := newWorld(t, configure)
	s := w.create(t)
	if _, err := w.Snapshot(ctx, s.ID, SnapshotRequest{Name: "kept", Actor: tester}); err != nil {
		t.Fatal(err)
	}
	var once sync.Once
	w.engine.Fail(func(_ berm.SandboxID, method string) error {
		if method != "Create" {
			return nil
		}
		once.Do(func() {
			if err := w.forgetSnapshot(ctx, w.Snapshots(SnapshotFilter{Ref: "kept"})[0], tester); err != nil { // who looked before
				t.Error(err)
			}
		})
		return berm.Errorf(berm.Unavailable, "no")
	})
	_, err := w.Rollback(ctx, s.ID, "kept", tester)
	wantKind(t, err, berm.Unavailable)
	if len(kept(t, dir)) != 1 {
		t.Fatalf("%v on disk", kept(t, dir))
	}
	w.engine.Fail(nil)
	if _, _, err := w.Connect(ctx, s.ID, time.Minute, tester); err != nil {
		t.Error(err)
	}
	if len(kept(t, dir)) != 0 {
		t.Errorf("%v on disk", kept(t, dir))
	}
}

// fullStore keeps no sandbox while it is full.
type fullStore struct {
	Store
	full atomic.Bool
}

func (f *fullStore) SaveSandbox(ctx context.Context, s store.Sandbox) error {
	if f.full.Load() {
		return berm.Errorf(berm.Internal, "database or disk is full")
	}
	return f.Store.SaveSandbox(ctx, s)
}

// What a sandbox was paused to stays while the next server would begin with it.
func TestResumeThatCannotBeStored(t *testing.T) {
	ctx := t.Context()
	dir, configure := saves(t)
	full := &fullStore{}
	w := newWorld(t, configure, func(c *Config) {
		full.Store = c.Store
		c.Store = full
	})
	s := w.create(t)
	if err := w.PauseToFiles(ctx, s.ID, tester); err != nil {
		t.Fatal(err)
	}
	full.full.Store(true)
	if _, _, err := w.Connect(ctx, s.ID, time.Minute, tester); err != nil {
		t.Fatal(err)
	}
	if names := kept(t, dir); len(names) != 1 {
		t.Errorf("%v on disk, though the stored sandbox begins with it", names)
	}
	full.full.Store(false)
}

// Quotas count what has memory.
func TestRestingTakesNoQuota(t *testing.T) {
	ctx := t.Context()
	_, configure := saves(t)
	w := newWorld(t, configure, func(c *Config) { c.MaxSandboxes = 1 })
	first := w.create(t)
	if err := w.PauseToFiles(ctx, first.ID, tester); err != nil {
		t.Fatal(err)
	}
	second := w.create(t)
	_, _, err := w.Connect(ctx, first.ID, time.Minute, tester)
	wantKind(t, err, berm.Exhausted)
	if err := w.Kill(ctx, second.ID, tester); err != nil {
		t.Fatal(err)
	}
	if _, _, err := w.Connect(ctx, first.ID, time.Minute, tester); err != nil {
		t.Error(err)
	}
}

func TestSnapshotRaces(t *testing.T) {
	dir, configure := saves(t)
	w := newWorld(t, configure)
	ctx := context.Background()
	for range 20 {
		s := w.create(t)
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() { w.PauseToFiles(ctx, s.ID, tester) })
			wg.Go(func() { w.Pause(ctx, s.ID, tester) })
			wg.Go(func() { w.Connect(ctx, s.ID, time.Minute, tester) })
			wg.Go(func() { w.DropMemory(ctx, s.ID, tester) })
			wg.Go(func() { w.Snapshot(ctx, s.ID, SnapshotRequest{Name: "raced", Actor: tester}) })
			wg.Go(func() { w.Rollback(ctx, s.ID, "raced", tester) })
			wg.Go(func() {
				forks, _ := w.Fork(ctx, s.ID, 2, time.Minute, false, tester)
				for _, f := range forks {
					if f.Err == nil {
						w.Kill(ctx, f.Sandbox.ID, tester)
					}
				}
			})
			wg.Go(func() { w.DeleteSnapshot(ctx, "", "raced", tester) })
		}
		wg.Go(func() {
			time.Sleep(time.Millisecond)
			if err := w.Kill(ctx, s.ID, tester); err != nil {
				t.Error(err)
			}
		})
		wg.Wait()
	}
	w.DeleteSnapshot(ctx, "", "raced", tester)
	eventually(t, "nothing left in the engine", func() bool { left, _ := w.engine.List(ctx); return len(left) == 0 })
	eventually(t, "nothing left on disk", func() bool { return len(kept(t, dir)) == 0 })
}

// A sandbox that does not start from a snapshot has what it had before, and runs if it ran.
func TestRollbackThatFails(t *testing.T) {
	ctx := t.Context()
	dir, configure := saves(t)
	w := newWorld(t, configure)
	s := w.create(t)
	snap, err := w.Snapshot(ctx, s.ID, SnapshotRequest{Name: "kept", Actor: tester})
	if err != nil {
		t.Fatal(err)
	}
	last := func() string { return filepath.Base(w.engine.Specs[len(w.engine.Specs)-1].From) }
	var once sync.Once
	failOnce := func(failing string) {
		once = sync.Once{}
		w.engine.Fail(func(_ berm.SandboxID, method string) (err error) {
			if method == failing {
				once.Do(func() { err = berm.Errorf(berm.Internal, "it does not start") })
			}
			return err
		})
	}
	failOnce("Create")
	_, err = w.Rollback(ctx, s.ID, "kept", tester)
	wantKind(t, err, berm.Unavailable)
	if got, err := w.Get(ctx, s.ID); err != nil || got.State != berm.Running || got.SavedAs != "" || last() == string(snap.Build) || len(kept(t, dir)) != 1 {
		t.Errorf("%+v, %v, from %s, %v on disk", got, err, last(), kept(t, dir))
	}
	// What it has cannot be saved: it goes on with the same processes.
	made := len(w.engine.Specs)
	failOnce("Snapshot")
	_, err = w.Rollback(ctx, s.ID, "kept", tester)
	if got, _ := w.Get(ctx, s.ID); err == nil || got.State != berm.Running || len(w.engine.Specs) != made || len(kept(t, dir)) != 1 {
		t.Errorf("%+v, %v, %v on disk", got, err, kept(t, dir))
	}
	// One that rests, rests.
	if err := w.PauseToFiles(ctx, s.ID, tester); err != nil {
		t.Fatal(err)
	}
	before, _ := w.Get(ctx, s.ID)
	failOnce("Create")
	_, err = w.Rollback(ctx, s.ID, "kept", tester)
	wantKind(t, err, berm.Unavailable)
	if got, err := w.Get(ctx, s.ID); err != nil || got.State != berm.Paused || got.SavedAs != before.SavedAs || len(kept(t, dir)) != 2 {
		t.Errorf("%+v, %v, %v on disk", got, err, kept(t, dir))
	}
	w.engine.Fail(nil)
	if got, err := w.Rollback(ctx, s.ID, "kept", tester); err != nil || got.State != berm.Running || last() != string(snap.Build) || len(kept(t, dir)) != 1 {
		t.Errorf("%+v, %v, from %s, %v on disk", got, err, last(), kept(t, dir))
	}
}

// No name is the id of another snapshot, and an id names what it always did.
func TestSnapshotNamedLikeAnother(t *testing.T) {
	ctx := t.Context()
	_, configure := saves(t)
	w := newWorld(t, configure)
	s := w.create(t)
	first, err := w.Snapshot(ctx, s.ID, SnapshotRequest{Actor: tester})
	if err != nil {
		t.Fatal(err)
	}
	_, err = w.Snapshot(ctx, s.ID, SnapshotRequest{Name: string(first.TemplateID), Actor: tester})
	wantKind(t, err, berm.AlreadyExists)
	// As an earlier version has left them.
	other, err := w.Snapshot(ctx, s.ID, SnapshotRequest{Name: "other", Actor: tester})
	if err != nil {
		t.Fatal(err)
	}
	w.shelf.mu.Lock()
	other.Name = string(first.TemplateID)
	w.shelf.snapshots[other.Build] = other
	w.shelf.mu.Unlock()
	for range 50 {
		if got, ok := w.snapshot("", string(first.TemplateID)); !ok || got.Build != first.Build {
			t.Fatalf("%+v", got)
		}
	}
}

// A pause that a kill overtakes finds no sandbox.
func TestKillDuringPauseToFiles(t *testing.T) {
	ctx := t.Context()
	_, configure := saves(t)
	w := newWorld(t, configure)
	s := w.create(t)
	w.engine.Fail(func(_ berm.SandboxID, method string) error {
		if method != "Snapshot" {
			return nil
		}
		if err := w.Kill(ctx, s.ID, tester); err != nil {
			t.Error(err)
		}
		return berm.Errorf(berm.Internal, "context canceled")
	})
	wantKind(t, w.PauseToFiles(ctx, s.ID, tester), berm.NotFound)
}
