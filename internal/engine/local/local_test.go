package local

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/control/enginetest"
	"github.com/berm-sandbox/berm/internal/kernel/claim"
	"github.com/berm-sandbox/berm/internal/store"
)

// driver makes a driver of an engine in memory.
type driver struct {
	*enginetest.Engine
	level  berm.Level
	usable bool
}

func (d *driver) Level() berm.Level { return d.level }
func (d *driver) Probe(context.Context) berm.Probe {
	return berm.Probe{Level: d.level, Usable: d.usable, Features: []berm.Feature{{Name: "moon phase", Required: true, Found: d.usable}}}
}

func openStore(t *testing.T, dir string) *store.DB {
	t.Helper()
	db, err := store.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

func newEngine(t *testing.T, db *store.DB, slots uint32, drivers ...berm.Driver) *Engine {
	t.Helper()
	e, err := New(t.Context(), Config{Drivers: drivers, Leases: db, IDs: berm.IDRange{Base: 0x70000000, Count: slots * berm.IDsPerSandbox}})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// Two servers give out the same run of ids: no range is given out twice, not even when
// one of them is gone and only its sandboxes' monitors are left.
func TestServersOfOneMachine(t *testing.T) {
	ctx := t.Context()
	path := filepath.Join(t.TempDir(), "ids")
	dirs := [2]string{t.TempDir(), t.TempDir()}
	var claims [2]*claim.File
	var dbs [2]*store.DB
	drivers := [2]*driver{{&enginetest.Engine{}, berm.Namespace, true}, {&enginetest.Engine{}, berm.Namespace, true}}
	start := func(n int) *Engine {
		t.Helper()
		var err error
		if claims[n], err = claim.Open(path); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = claims[n].Close() })
		dbs[n] = openStore(t, dirs[n])
		e, err := New(ctx, Config{Drivers: []berm.Driver{drivers[n]}, Leases: dbs[n], Claims: claims[n],
			IDs: berm.IDRange{Base: 0x70000000, Count: 3 * berm.IDsPerSandbox}})
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	create := func(e *Engine) berm.Sandbox {
		t.Helper()
		s, err := e.Create(ctx, berm.Spec{ID: berm.NewSandboxID()})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	a, b := start(0), start(1)
	one, _, three := create(a), create(b), create(a)
	bases := map[uint32]bool{drivers[0].Specs[0].IDs.Base: true, drivers[1].Specs[0].IDs.Base: true, drivers[0].Specs[1].IDs.Base: true}
	if len(bases) != 3 {
		t.Errorf("ranges at %v", bases)
	}
	_, err := b.Create(ctx, berm.Spec{ID: berm.NewSandboxID()})
	wantKind(t, err, berm.Exhausted)

	// The first server dies. The monitor of one sandbox holds its claim, the other is dead.
	monitor, err := claim.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	if ok, err := monitor.Share(drivers[0].Specs[0].IDs); err != nil || !ok {
		t.Fatal(ok, err)
	}
	if err := errors.Join(claims[0].Close(), dbs[0].Close()); err != nil {
		t.Fatal(err)
	}
	create(b)
	if got := drivers[1].Specs[1].IDs; got != drivers[0].Specs[1].IDs {
		t.Errorf("the range of a dead sandbox was to be used, not %v", got)
	}
	_, err = b.Create(ctx, berm.Spec{ID: berm.NewSandboxID()})
	wantKind(t, err, berm.Exhausted)

	// It comes back, finds the living sandbox, and gives its range back at the end.
	a = start(0)
	if err := monitor.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = b.Create(ctx, berm.Spec{ID: berm.NewSandboxID()})
	wantKind(t, err, berm.Exhausted)
	for _, id := range []berm.SandboxID{three.ID(), one.ID()} {
		s, err := a.Open(ctx, id)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Kill(ctx, berm.ReasonKilled); err != nil {
			t.Fatal(err)
		}
	}
	create(b)
	if got := drivers[1].Specs[2].IDs; got != drivers[0].Specs[0].IDs {
		t.Errorf("the range that was given back was to be used, not %v", got)
	}
}

func wantKind(t *testing.T, err error, kind berm.Kind) {
	t.Helper()
	if err == nil || berm.KindOf(err) != kind {
		t.Errorf("error %v, want kind %v", err, kind)
	}
}

func TestLevels(t *testing.T) {
	weak := &driver{&enginetest.Engine{}, berm.Namespace, true}
	strong := &driver{&enginetest.Engine{}, berm.GVisor, true}
	absent := &driver{&enginetest.Engine{}, berm.MicroVM, false}
	e := newEngine(t, openStore(t, t.TempDir()), 10, weak, absent, strong)
	for level, want := range map[berm.Level]*driver{berm.Auto: strong, "": strong, berm.Namespace: weak, berm.GVisor: strong} {
		before := len(want.Specs)
		if _, err := e.Create(t.Context(), berm.Spec{ID: berm.NewSandboxID(), Level: level}); err != nil {
			t.Fatal(err)
		}
		if len(want.Specs) != before+1 || want.Specs[before].Level != want.level {
			t.Errorf("level %q went elsewhere", level)
		}
	}
	for _, level := range []berm.Level{berm.MicroVM, "none"} {
		_, err := e.Create(t.Context(), berm.Spec{ID: berm.NewSandboxID(), Level: level})
		wantKind(t, err, berm.Unsupported)
	}
	_, err := newEngine(t, openStore(t, t.TempDir()), 1, absent).Create(t.Context(), berm.Spec{Level: berm.Auto})
	wantKind(t, err, berm.Unsupported)
}

func TestLeasesFollowProofOfDeath(t *testing.T) {
	ctx := t.Context()
	d := &driver{&enginetest.Engine{}, berm.Namespace, true}
	dir := t.TempDir()
	db := openStore(t, dir)
	e := newEngine(t, db, 2, d)
	held := func() int {
		leases, err := db.Leases(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return len(leases)
	}
	a, err := e.Create(ctx, berm.Spec{ID: berm.NewSandboxID()})
	if err != nil {
		t.Fatal(err)
	}
	b, err := e.Create(ctx, berm.Spec{ID: berm.NewSandboxID()})
	if err != nil {
		t.Fatal(err)
	}
	if ids := d.Specs[0].IDs; ids.Count != berm.IDsPerSandbox || ids == d.Specs[1].IDs {
		t.Errorf("ranges %v and %v", ids, d.Specs[1].IDs)
	}
	_, err = e.Create(ctx, berm.Spec{ID: berm.NewSandboxID()})
	wantKind(t, err, berm.Exhausted)

	d.Fail(func(_ berm.SandboxID, method string) error {
		if method == "Kill" || method == "Remove" {
			return berm.Errorf(berm.Internal, "a process does not die")
		}
		return nil
	})
	if _, err := a.Kill(ctx, berm.ReasonKilled); err == nil || held() != 2 {
		t.Errorf("a lease was given back without proof: %d held, %v", held(), err)
	}
	if _, err := e.Remove(ctx, a.ID()); err == nil || held() != 2 {
		t.Errorf("a lease was given back without proof: %d held, %v", held(), err)
	}
	d.Fail(nil)
	if _, err := a.Kill(ctx, berm.ReasonKilled); err != nil || held() != 1 {
		t.Errorf("after the kill: %d held, %v", held(), err)
	}
	d.End(b.ID(), berm.ReasonOOM)
	if exit, err := e.Remove(ctx, b.ID()); err != nil || exit.Reason != berm.ReasonOOM || held() != 0 {
		t.Errorf("after the removal: %d held, %+v, %v", held(), exit, err)
	}

	// A create that fails gives its lease back, unless something is left.
	d.Fail(func(_ berm.SandboxID, method string) error {
		if method == "Create" {
			return berm.Errorf(berm.Internal, "no")
		}
		return nil
	})
	e.Create(ctx, berm.Spec{ID: berm.NewSandboxID()})
	if held() != 0 {
		t.Error("a failed create keeps its lease")
	}
	d.Fail(func(berm.SandboxID, string) error { return berm.Errorf(berm.Internal, "no") })
	stuck := berm.NewSandboxID()
	e.Create(ctx, berm.Spec{ID: stuck})
	if held() != 1 {
		t.Error("a lease was given back without proof")
	}
	d.Fail(nil)
	// The next server knows the sandbox by its lease.
	e = newEngine(t, db, 2, d)
	if ids, err := e.List(ctx); err != nil || !slices.Contains(ids, stuck) {
		t.Errorf("list %v, %v", ids, err)
	}
	if _, err := e.Remove(ctx, stuck); err != nil || held() != 0 {
		t.Errorf("after the removal: %d held, %v", held(), err)
	}
}

func TestRangesRestAndNeverOverlap(t *testing.T) {
	ctx := t.Context()
	d := &driver{&enginetest.Engine{}, berm.Namespace, true}
	e := newEngine(t, openStore(t, t.TempDir()), 8, d)
	first, err := e.Create(ctx, berm.Spec{ID: berm.NewSandboxID()})
	if err != nil {
		t.Fatal(err)
	}
	first.Kill(ctx, berm.ReasonKilled)
	e.Create(ctx, berm.Spec{ID: berm.NewSandboxID()})
	if d.Specs[0].IDs == d.Specs[1].IDs {
		t.Error("a range was used again at once")
	}
	var wg sync.WaitGroup
	for range 7 {
		wg.Go(func() {
			if _, err := e.Create(ctx, berm.Spec{ID: berm.NewSandboxID()}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	seen := map[uint32]bool{}
	for _, spec := range d.Specs[1:] {
		if seen[spec.IDs.Base] || spec.IDs.Base < 0x70000000 || spec.IDs.Base >= 0x70000000+8*berm.IDsPerSandbox {
			t.Errorf("range %x twice or outside", spec.IDs.Base)
		}
		seen[spec.IDs.Base] = true
	}
}

func TestHoldFails(t *testing.T) {
	d := &driver{&enginetest.Engine{}, berm.Namespace, true}
	db := openStore(t, t.TempDir())
	e, err := New(t.Context(), Config{Drivers: []berm.Driver{d}, Leases: db, Hold: func(context.Context, berm.Spec) error {
		return berm.Errorf(berm.NotFound, "the template was removed")
	}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = e.Create(t.Context(), berm.Spec{ID: berm.NewSandboxID()})
	wantKind(t, err, berm.NotFound)
	if ids, _ := e.List(t.Context()); len(ids) > 0 {
		t.Errorf("left: %v", ids)
	}
}

func TestOpen(t *testing.T) {
	ctx := t.Context()
	a := &driver{&enginetest.Engine{}, berm.Namespace, true}
	b := &driver{&enginetest.Engine{}, berm.GVisor, true}
	e := newEngine(t, openStore(t, t.TempDir()), 4, a, b)
	s, err := e.Create(ctx, berm.Spec{ID: berm.NewSandboxID(), Level: berm.Namespace})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := e.Open(ctx, s.ID()); err != nil || got.ID() != s.ID() {
		t.Errorf("%v", err)
	}
	_, err = e.Open(ctx, "unknown")
	wantKind(t, err, berm.NotFound)
	b.Fail(func(berm.SandboxID, string) error { return berm.Errorf(berm.Unavailable, "busy") })
	_, err = e.Open(ctx, "unknown") // it may be on the busy one
	wantKind(t, err, berm.Unavailable)
}

// full is a store that cannot be written to.
type full struct {
	*store.DB
	err error
}

func (f *full) Release(ctx context.Context, id berm.SandboxID) error {
	if f.err != nil {
		return f.err
	}
	return f.DB.Release(ctx, id)
}

// A kill is done when the sandbox is gone; its lease follows when it can be stored.
func TestKillWithAFullDisk(t *testing.T) {
	ctx := t.Context()
	db := &full{DB: openStore(t, t.TempDir())}
	e, err := New(ctx, Config{Drivers: []berm.Driver{&driver{&enginetest.Engine{}, berm.Namespace, true}}, Leases: db,
		IDs: berm.IDRange{Base: 0x70000000, Count: 2 * berm.IDsPerSandbox}})
	if err != nil {
		t.Fatal(err)
	}
	create := func() (berm.Sandbox, error) { return e.Create(ctx, berm.Spec{ID: berm.NewSandboxID()}) }
	s, err := create()
	if err != nil {
		t.Fatal(err)
	}
	db.err = berm.Errorf(berm.Internal, "database: database or disk is full")
	if exit, err := s.Kill(ctx, berm.ReasonKilled); err != nil || exit.Reason != berm.ReasonKilled {
		t.Errorf("%+v, %v", exit, err)
	}
	if _, err := create(); err != nil {
		t.Error(err)
	}
	_, err = create() // nobody gets the range before
	wantKind(t, err, berm.Exhausted)
	db.err = nil
	if _, err := create(); err != nil {
		t.Error(err)
	}
}
