package serve

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/index"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/store"
)

const (
	retainEvery = time.Minute
	// retainShare is how much longer than a look that erased something no other comes: an erasure reads all of
	// the log.
	retainShare = 20
	// retainMargin is how long what a sandbox did stays at least after its end.
	retainMargin = 2 * time.Minute
	// retainAtOnce bounds the sandboxes that are erased by one change of the log.
	retainAtOnce = 1000
	// retainSlack is which part of a team's limit is free after an erasure, so that not each look has one.
	retainSlack = 10
)

// living says which sandboxes have not ended, paused ones and those that wait in a pool too.
type living func(context.Context) (map[berm.SandboxID]bool, error)

func livingSandboxes(db *store.DB, engine berm.Engine) living {
	return func(ctx context.Context) (map[berm.SandboxID]bool, error) {
		lives := map[berm.SandboxID]bool{}
		held, err := engine.List(ctx)
		if err != nil {
			return nil, err
		}
		for _, id := range held {
			lives[id] = true
		}
		stored, err := db.LivingSandboxes(ctx)
		for _, s := range stored {
			lives[s.ID] = true
		}
		return lives, err
	}
}

// retainLoop erases what teams keep no longer.
func (e *eraser) retainLoop(ctx context.Context, living living, log *slog.Logger) {
	for wait := retainEvery; ; {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		begin := time.Now()
		if err := e.retain(ctx, living, begin); err != nil && ctx.Err() == nil {
			log.Error("the audit log keeps more of a team's sandboxes than it should", "error", err)
		}
		wait = max(retainEvery, retainShare*time.Since(begin))
	}
}

// retain erases what the log has of sandboxes that have ended, where their teams keep it no longer.
func (e *eraser) retain(ctx context.Context, living living, now time.Time) error {
	teams, err := e.db.Teams(ctx)
	if err != nil {
		return err
	}
	teams = slices.DeleteFunc(teams, func(t store.Team) bool { return t.Limits.AuditKeep == 0 && t.Limits.AuditLimit == 0 })
	if len(teams) == 0 {
		return nil
	}
	lives, err := living(ctx)
	if err != nil {
		return err
	}
	held := map[berm.SandboxID]bool{}
	holds, err := e.db.Holds(ctx)
	if err != nil {
		return err
	}
	for _, h := range holds {
		held[h.Sandbox] = true
	}
	var due []trail.Erasure
	for _, t := range teams {
		of, err := e.due(ctx, t, lives, held, now)
		if err != nil {
			return err
		}
		due = append(due, of...)
	}
	for some := range slices.Chunk(due, retainAtOnce) {
		if err := e.eraseAll(ctx, some); err != nil {
			return err
		}
	}
	return nil
}

// due is what of a team is to be erased.
func (e *eraser) due(ctx context.Context, t store.Team, lives, held map[berm.SandboxID]bool, now time.Time) (due []trail.Erasure, err error) {
	chosen, freed := map[berm.SandboxID]bool{}, int64(0)
	erase := func(k index.Kept, why string) {
		due = append(due, trail.Erasure{Sandbox: k.Sandbox, Team: t.Name, Actor: audit.Actor{Type: "system"}, Reason: why})
		chosen[k.Sandbox], freed = true, freed+k.Bytes
	}
	if keep := t.Limits.AuditKeep; keep > 0 {
		old, err := e.index.Kept(ctx, t.Name, now.Add(-max(keep, retainMargin)))
		if err != nil {
			return nil, err
		}
		for _, k := range old {
			if !lives[k.Sandbox] && !held[k.Sandbox] {
				erase(k, fmt.Sprintf("team %s keeps records for %s", t.Name, keep))
			}
		}
	}
	limit := t.Limits.AuditLimit
	if limit == 0 {
		return due, nil
	}
	total, err := e.index.Bytes(ctx, t.Name)
	if err != nil || total-freed <= limit {
		return due, err
	}
	all, err := e.index.Kept(ctx, t.Name, now.Add(-retainMargin))
	if err != nil {
		return nil, err
	}
	enough := limit
	for _, k := range all {
		switch {
		case total-freed <= enough:
			return due, nil
		case lives[k.Sandbox], chosen[k.Sandbox]:
		case held[k.Sandbox]: // it takes nothing of the limit: the rest would be gone for it
			freed += k.Bytes
		default:
			erase(k, fmt.Sprintf("team %s keeps %d bytes of records", t.Name, limit))
			enough = limit - limit/retainSlack
		}
	}
	return due, nil
}

// eraseAll erases sandboxes. Those that may not be erased after all have another look.
func (e *eraser) eraseAll(ctx context.Context, all []trail.Erasure) error {
	var err error
	finished := make(chan struct{})
	go func() { // a server that stops does not wait for it: the next start makes up for what is left
		defer close(finished)
		all, err = e.log.EraseAll(all)
	}()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-finished:
	}
	if failed := e.index.Update(ctx); failed != nil {
		return failed
	}
	for _, done := range all {
		if done.By == 0 && done.Left == 0 {
			continue
		}
		if _, gone := e.db.Sandbox(ctx, done.Sandbox); berm.KindOf(gone) == berm.NotFound {
			continue
		}
		if failed := e.db.Forget(ctx, done.Sandbox); failed != nil {
			return failed
		}
	}
	switch berm.KindOf(err) {
	case berm.Conflict, berm.Denied, berm.NotFound:
		return nil
	}
	return err
}
