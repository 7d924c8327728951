package local

import (
	"context"
	"slices"
	"sync"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/control/enginetest"
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
