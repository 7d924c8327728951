package serve

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
)

// forgetEvery is how long records of a sandbox may come after its end, at least.
const forgetEvery = time.Hour

// owners knows whose sandboxes are. Those of the server's own team are in no table.
type owners struct {
	mu sync.RWMutex
	of map[berm.SandboxID]*owner
}

type owner struct {
	team  berm.Team
	ended bool // at the last look
}

func newOwners() *owners { return &owners{of: map[berm.SandboxID]*owner{}} }

// own says whose a sandbox is.
func (o *owners) own(id berm.SandboxID, team berm.Team) {
	if team == "" {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.of[id] = &owner{team: team}
}

// team is whose a sandbox is.
func (o *owners) team(id berm.SandboxID) berm.Team {
	o.mu.RLock()
	defer o.mu.RUnlock()
	if found := o.of[id]; found != nil {
		return found.team
	}
	return ""
}

// name has a record of a sandbox tell whose that is.
func (o *owners) name(r *audit.Record) {
	if r.Sandbox != "" && r.Team == "" {
		r.Team = o.team(r.Sandbox)
	}
}

// forget drops sandboxes that have ended, or never came to be, at this look and the one before: records of
// flows come after the end.
func (o *owners) forget(living map[berm.SandboxID]bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for id, found := range o.of {
		if found.ended && !living[id] {
			delete(o.of, id)
		}
		found.ended = !living[id]
	}
}

// forgetLoop forgets what has ended.
func (o *owners) forgetLoop(ctx context.Context, living living, log *slog.Logger) {
	for tick := time.NewTicker(forgetEvery); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return
		case <-tick.C:
		}
		lives, err := living(ctx)
		if err != nil {
			log.Error("whose sandboxes were is not forgotten", "error", err)
			continue
		}
		o.forget(lives)
	}
}

// ownedLog is a log whose records of sandboxes tell whose these are, whoever hands them over.
type ownedLog struct {
	auditLog
	owners *owners
}

// Emit implements audit.Emitter.
func (l ownedLog) Emit(r audit.Record) error {
	l.owners.name(&r)
	return l.auditLog.Emit(r)
}

// EmitAll is that of audit.Log.
func (l ownedLog) EmitAll(records []audit.Record) error {
	records = slices.Clone(records) // they are the caller's
	for i := range records {
		l.owners.name(&records[i])
	}
	return audit.EmitAll(l.auditLog, records)
}
