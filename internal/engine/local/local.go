// Package local is the engine that runs sandboxes on this machine: it chooses the
// driver and leases host ids.
package local

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cleanup"
	"github.com/berm-sandbox/berm/internal/failpoint"
	"github.com/berm-sandbox/berm/internal/kernel/claim"
)

// Leases keeps which sandbox holds which range of host ids, across restarts.
type Leases interface {
	// Leases returns the holder of the range that starts at each base.
	Leases(ctx context.Context) (map[uint32]berm.SandboxID, error)
	Lease(ctx context.Context, base uint32, id berm.SandboxID) error
	Release(ctx context.Context, id berm.SandboxID) error
}

// Config is what an engine is made of.
type Config struct {
	Drivers []berm.Driver
	Leases  Leases
	// IDs is the run of host ids to lease from. With a count of zero no ids are
	// leased: the drivers run without root and map their own.
	IDs berm.IDRange
	// Claims keeps the ranges apart from those of other servers of this machine; nil does
	// not.
	Claims *claim.File
	// Ready has the layers of a sandbox that is to be made be there; nil when they are.
	Ready func(ctx context.Context, layers []berm.Layer) error
	// Hold keeps the layers of a sandbox from being removed for as long as it lives. It
	// is called once the sandbox is there; nil does not hold.
	Hold func(ctx context.Context, spec berm.Spec) error
}

// DefaultIDs is the run of host ids that is leased from when nothing else is
// configured: 16,384 sandboxes' worth above what distributions hand out to users.
var DefaultIDs = berm.IDRange{Base: 0x70000000, Count: 16384 * berm.IDsPerSandbox}

// strength orders the levels.
var strength = map[berm.Level]int{berm.Namespace: 1, berm.GVisor: 2, berm.MicroVM: 3}

// Engine is this machine as a berm.Engine.
type Engine struct {
	leases  Leases
	ids     berm.IDRange
	claims  *claim.File
	ready   func(ctx context.Context, layers []berm.Layer) error
	hold    func(ctx context.Context, spec berm.Spec) error
	drivers []berm.Driver // strongest first
	probes  []berm.Probe  // of the drivers, in their order

	mu     sync.Mutex
	leased map[uint32]berm.SandboxID // by base
	owed   []berm.SandboxID          // whose leases could not be given back
	next   uint32                    // slot to try first, so that a range rests before it is used again
}

// New probes the drivers and reads the leases.
func New(ctx context.Context, c Config) (*Engine, error) {
	e := &Engine{leases: c.Leases, ids: c.IDs, claims: c.Claims, ready: c.Ready, hold: c.Hold, drivers: slices.Clone(c.Drivers)}
	slices.SortStableFunc(e.drivers, func(a, b berm.Driver) int { return strength[b.Level()] - strength[a.Level()] })
	for _, d := range e.drivers {
		e.probes = append(e.probes, d.Probe(ctx))
	}
	leased, err := c.Leases.Leases(ctx)
	if err != nil {
		return nil, err
	}
	e.leased = leased
	if slots := e.ids.Count / berm.IDsPerSandbox; slots > 0 {
		// Servers of one machine begin at different places: a range that was let go rests
		// before any of them uses it.
		e.next = rand.Uint32N(slots)
	}
	if e.claims != nil {
		for base := range leased {
			// Monitors kept the claims of the sandboxes that live. A range of a dead one may be
			// another server's by now; the lease goes when the sandbox is removed.
			if _, err := e.claims.Share(slotAt(base)); err != nil {
				return nil, err
			}
		}
	}
	return e, nil
}

// slotAt is the range of a sandbox.
func slotAt(base uint32) berm.IDRange {
	return berm.IDRange{Base: base, Count: berm.IDsPerSandbox}
}

// Probe says what the drivers found when the engine was made, strongest first.
func (e *Engine) Probe(context.Context) []berm.Probe { return slices.Clone(e.probes) }

// Check says why a sandbox of a level cannot be had here. Kind Unsupported.
func (e *Engine) Check(level berm.Level) error {
	_, err := e.driver(level)
	return err
}

// driver chooses the driver for a level.
func (e *Engine) driver(level berm.Level) (berm.Driver, error) {
	for i, d := range e.drivers {
		if level == d.Level() || (level == berm.Auto || level == "") && !e.probes[i].ByName {
			if e.probes[i].Usable {
				return d, nil
			}
			if level == d.Level() {
				return nil, berm.Errorf(berm.Unsupported, "isolation level %s cannot be had here: %s", level, missing(e.probes[i])).
					WithHint("berm doctor shows what is missing and how to get it")
			}
		}
	}
	if level == berm.Auto || level == "" {
		return nil, berm.Errorf(berm.Unsupported, "no isolation level can be had here").
			WithHint("berm doctor shows what is missing and how to get it")
	}
	var levels []string
	for _, d := range e.drivers {
		levels = append(levels, string(d.Level()))
	}
	return nil, berm.Errorf(berm.Unsupported, "isolation level %q is not known here", string(level)).
		WithHint("This server has: %s.", strings.Join(levels, ", "))
}

func missing(p berm.Probe) string {
	var names []string
	for _, f := range p.Features {
		if f.Required && !f.Found {
			name := f.Name
			if f.Detail != "" {
				name += " (" + f.Detail + ")"
			}
			names = append(names, name)
		}
	}
	if names == nil {
		return "the probe found it unusable"
	}
	return "no " + strings.Join(names, ", no ")
}

// Create makes the sandbox of spec on the driver of its level.
func (e *Engine) Create(ctx context.Context, spec berm.Spec) (berm.Sandbox, error) {
	driver, err := e.driver(spec.Level)
	if err != nil {
		return nil, err
	}
	spec.Level = driver.Level()
	if e.ready != nil {
		if err := e.ready(ctx, spec.Layers); err != nil {
			return nil, err
		}
	}
	cu := cleanup.Make()
	defer cu.Clean()
	if e.ids.Count > 0 {
		if spec.IDs, err = e.lease(ctx, spec.ID); err != nil {
			return nil, err
		}
		cu.Add(func() { e.removeFrom(driver, spec.ID) })
	}
	if err := failpoint.Hit("engine.leased"); err != nil {
		return nil, err
	}
	sandbox, err := driver.Create(ctx, spec)
	if err != nil {
		return nil, err
	}
	if e.hold != nil {
		if err := e.hold(ctx, spec); err != nil {
			if _, killErr := sandbox.Kill(context.WithoutCancel(ctx), berm.ReasonKilled); killErr != nil {
				return nil, errors.Join(err, killErr)
			}
			return nil, err
		}
	}
	cu.Release()
	return &handle{sandbox, e}, nil
}

// removeFrom gives a lease back after a failed create, and only when the driver
// says that nothing is left of the sandbox.
func (e *Engine) removeFrom(driver berm.Driver, id berm.SandboxID) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if _, err := driver.Remove(ctx, id); err == nil {
		// A lease that stays is taken back when the server starts next.
		_ = e.release(ctx, id)
	}
}

func (e *Engine) lease(ctx context.Context, id berm.SandboxID) (berm.IDRange, error) {
	e.settle(ctx)
	ids, err := e.choose(id)
	if err != nil {
		return berm.IDRange{}, err
	}
	if err := e.leases.Lease(context.WithoutCancel(ctx), ids.Base, id); err != nil {
		return berm.IDRange{}, errors.Join(err, e.free(ids))
	}
	return ids, nil
}

// choose finds a range that neither this server nor another one of the machine uses.
func (e *Engine) choose(id berm.SandboxID) (berm.IDRange, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	slots := e.ids.Count / berm.IDsPerSandbox
	for i := range slots {
		slot := (e.next + i) % slots
		ids := slotAt(e.ids.Base + slot*berm.IDsPerSandbox)
		if _, held := e.leased[ids.Base]; held {
			continue
		}
		if e.claims != nil {
			if mine, err := e.claims.Take(ids); err != nil {
				return berm.IDRange{}, err
			} else if !mine {
				continue
			}
		}
		e.leased[ids.Base], e.next = id, slot+1
		return ids, nil
	}
	return berm.IDRange{}, berm.Errorf(berm.Exhausted, "all %d host id ranges are leased, by this server or another", slots)
}

// free makes a range choosable again.
func (e *Engine) free(ids berm.IDRange) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.leased, ids.Base)
	if e.claims == nil {
		return nil
	}
	return e.claims.Drop(ids)
}

// release takes the range of a sandbox back. The caller has proof that no process
// and no file of the sandbox is left.
func (e *Engine) release(ctx context.Context, id berm.SandboxID) error {
	e.mu.Lock()
	var base uint32
	held := false
	for b, holder := range e.leased {
		if holder == id {
			base, held = b, true
			break
		}
	}
	e.mu.Unlock()
	if !held {
		return nil
	}
	if err := e.leases.Release(context.WithoutCancel(ctx), id); err != nil {
		return err
	}
	return e.free(slotAt(base))
}

// Open finds a living sandbox again, on whichever driver has it.
func (e *Engine) Open(ctx context.Context, id berm.SandboxID) (berm.Sandbox, error) {
	err := error(berm.Errorf(berm.NotFound, "sandbox %s was not found", id))
	for _, d := range e.drivers {
		sandbox, openErr := d.Open(ctx, id)
		if openErr == nil {
			return &handle{sandbox, e}, nil
		}
		if berm.KindOf(openErr) != berm.NotFound {
			err = openErr
		}
	}
	return nil, err
}

// List names every sandbox that a driver or a lease knows.
func (e *Engine) List(ctx context.Context) ([]berm.SandboxID, error) {
	var all []berm.SandboxID
	for _, d := range e.drivers {
		ids, err := d.List(ctx)
		if err != nil {
			return nil, err
		}
		all = append(all, ids...)
	}
	e.mu.Lock()
	for _, id := range e.leased {
		all = append(all, id)
	}
	e.mu.Unlock()
	slices.Sort(all)
	return slices.Compact(all), nil
}

// Remove takes away all that is left of a sandbox on every driver, then its lease.
func (e *Engine) Remove(ctx context.Context, id berm.SandboxID) (berm.Exit, error) {
	var exit berm.Exit
	for _, d := range e.drivers {
		found, err := d.Remove(ctx, id)
		if err != nil {
			return exit, err
		}
		if found != (berm.Exit{}) {
			exit = found
		}
	}
	return exit, e.release(ctx, id)
}

// handle gives the lease back once Kill has proved that the sandbox is gone.
type handle struct {
	berm.Sandbox
	engine *Engine
}

func (h *handle) Kill(ctx context.Context, reason berm.Reason) (berm.Exit, error) {
	exit, err := h.Sandbox.Kill(ctx, reason)
	if err != nil {
		return exit, err
	}
	// The sandbox is gone, whether or not that can be stored: a full disk is no reason not to kill.
	if h.engine.release(ctx, h.ID()) != nil {
		h.engine.mu.Lock()
		h.engine.owed = append(h.engine.owed, h.ID())
		h.engine.mu.Unlock()
	}
	return exit, nil
}

// settle gives leases back that could not be given back when their sandboxes ended. Those that
// stay are taken back when the server starts next.
func (e *Engine) settle(ctx context.Context) {
	e.mu.Lock()
	owed := e.owed
	e.owed = nil
	e.mu.Unlock()
	for i, id := range owed {
		if e.release(ctx, id) != nil {
			e.mu.Lock()
			e.owed = append(e.owed, owed[i:]...)
			e.mu.Unlock()
			return
		}
	}
}
