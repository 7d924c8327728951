package control

import (
	"context"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/cleanup"
	"github.com/berm-sandbox/berm/internal/failpoint"
)

// resting is the handle of a sandbox that is paused to disk: there is nothing else of it.
type resting struct{ id berm.SandboxID }

var _ berm.Sandbox = resting{}

func (r resting) err() error {
	return berm.Errorf(berm.Conflict, "sandbox %s is paused, and kept on disk alone", r.id)
}

func (r resting) ID() berm.SandboxID                                 { return r.id }
func (r resting) Close() error                                       { return nil }
func (r resting) Dial(context.Context, uint16) (net.Conn, error)     { return nil, r.err() }
func (r resting) Pause(context.Context) error                        { return r.err() }
func (r resting) Resume(context.Context, time.Time) error            { return r.err() }
func (r resting) SetDeadline(context.Context, time.Time) error       { return r.err() }
func (r resting) Usage(context.Context) (berm.Usage, error)          { return berm.Usage{}, r.err() }
func (r resting) Policy(context.Context) (berm.Policy, error)        { return berm.Policy{}, r.err() }
func (r resting) Link(context.Context) (*os.File, error)             { return nil, r.err() }
func (r resting) Keep(context.Context, *os.File) error               { return r.err() }
func (r resting) Kept(context.Context) (*os.File, error)             { return nil, r.err() }
func (r resting) Writable(context.Context) (berm.Writable, error)    { return nil, r.err() }
func (r resting) Events(context.Context) (<-chan berm.Status, error) { return nil, r.err() }

func (r resting) Snapshot(context.Context, string, bool) (berm.Saved, error) {
	return berm.Saved{}, r.err()
}

func (r resting) Version(context.Context) (string, error) { return "", r.err() }

func (r resting) Status(context.Context) (berm.Status, error) {
	return berm.Status{State: berm.Paused}, nil
}

func (r resting) Kill(_ context.Context, reason berm.Reason) (berm.Exit, error) {
	return berm.Exit{Reason: reason, Code: -1, At: time.Now().UTC()}, nil
}

// keepsMemory says whether a pause puts the memory of the sandbox on disk, as its level can.
func (s *session) keepsMemory() bool {
	info := s.snapshot()
	return s.m.probe(info.Level).Memory && s.m.SnapshotDir != "" && info.Base != nil
}

// toDisk ends the processes of a sandbox that stands still, and keeps its files, and with memory
// its processes too. The session is Pausing before and after. When it fails, the sandbox stands
// still as before.
func (s *session) toDisk(ctx context.Context, memory bool) error {
	info := s.snapshot()
	build, err := s.m.newSaved(ctx, info.Base)
	if err != nil {
		return err
	}
	cu := cleanup.Make(func() { s.m.drop(build) })
	defer cu.Clean()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), snapshotTime)
	defer cancel()
	handle := s.current()
	s.snapping.Lock() // a checkpoint may be under way
	_, err = handle.Snapshot(ctx, s.m.savedDir(build), memory)
	s.snapping.Unlock()
	if err != nil {
		return err
	}
	_, _ = s.look(ctx, system, "pause")
	if err := failpoint.Hit("control.resting"); err != nil {
		return err
	}
	// From here on the files are the sandbox, whoever dies.
	s.mu.Lock()
	if s.info.State == berm.Killed {
		s.mu.Unlock()
		return NotFound(info.ID)
	}
	s.info.SavedAs, s.info.SavedMemory = build, memory
	s.mu.Unlock()
	if err := s.trySave(); err != nil {
		s.mu.Lock()
		s.info.SavedAs, s.info.SavedMemory = "", false
		s.mu.Unlock()
		return err
	}
	cu.Release()
	if err := failpoint.Hit("control.rested"); err != nil {
		return err
	}
	s.endProcesses(ctx, handle)
	return nil
}

// dropMemory leaves a paused sandbox with its files alone. The session is Resuming before and
// after.
func (s *session) dropMemory(ctx context.Context) error {
	s.mu.Lock()
	had := s.info.SavedMemory
	s.info.SavedMemory = false
	s.mu.Unlock()
	if !had {
		return s.toDisk(ctx, false)
	}
	if err := s.trySave(); err != nil {
		s.mu.Lock()
		s.info.SavedMemory = true
		s.mu.Unlock()
		return err
	}
	return nil
}

// endProcesses ends all of a sandbox but its session.
func (s *session) endProcesses(ctx context.Context, handle berm.Sandbox) {
	s.mu.Lock()
	stop, writable := s.stop, s.writable
	s.writable = nil
	s.mu.Unlock()
	stop()
	s.offline()
	if writable != nil {
		_ = writable.Close()
	}
	s.followers.Wait()
	s.forget()
	if _, err := handle.Kill(ctx, berm.ReasonKilled); err != nil {
		// The next resume, or the next server, tries again.
		s.m.Log.Error("ending the processes of a paused sandbox failed", "sandbox", s.info.ID, "error", err)
	}
	_ = handle.Close()
	s.mu.Lock()
	s.handle = resting{s.info.ID}
	s.mu.Unlock()
}

// wake has a sandbox that is kept on disk go on. The session is Resuming before and
// after. When it fails, it rests as before. The caller has reserved what it takes.
func (s *session) wake(ctx context.Context, deadline time.Time) error {
	info := s.snapshot()
	if info.Policy != nil && s.m.Egress.Service == nil {
		return s.m.noNetwork("the network of the sandbox")
	}
	release := s.m.use(info.SavedAs)
	defer release()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTime)
	defer cancel()
	spec, err := s.m.specOf(&info, deadline)
	if err != nil {
		return err
	}
	handle, err := s.m.Engine.Create(ctx, spec)
	if berm.KindOf(err) == berm.AlreadyExists && err != nil { // its processes were not ended
		if _, err = s.m.evict(ctx, info.ID, berm.ReasonKilled); err == nil {
			handle, err = s.m.Engine.Create(ctx, spec)
		}
	}
	if err != nil {
		return err
	}
	cu := cleanup.Make(func() {
		ctx, cancel := context.WithTimeout(context.Background(), transitionTime)
		defer cancel()
		if _, err := handle.Kill(ctx, berm.ReasonKilled); err != nil {
			s.m.Log.Error("ending a sandbox that could not be resumed failed", "sandbox", info.ID, "error", err)
		}
		_ = handle.Close()
	})
	defer cu.Clean()
	if err := failpoint.Hit("control.woken"); err != nil {
		return err
	}
	held, err := handle.Policy(ctx)
	if err != nil {
		return err
	}
	s.mu.Lock()
	if s.info.State == berm.Killed {
		s.mu.Unlock()
		return NotFound(info.ID)
	}
	s.handle, s.agent = handle, 1
	s.info.Degraded, s.info.Boot = held.Degraded, s.m.Boot
	s.mu.Unlock()
	cu.Add(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.handle = resting{info.ID}
	})
	if info.Policy != nil {
		s.online.again()
		cu.Add(s.offline)
		if _, err := s.attach(ctx, false); err != nil {
			return err
		}
	}
	cu.Add(s.forget)
	if !spec.Memory { // else its processes go on
		if err := s.start(ctx); err != nil {
			return err
		}
	}
	cu.Release()
	return nil
}

// specOf is the order for a sandbox that existed before. What its template's limits cannot be here
// is left out or refused as when it was made.
func (m *Manager) specOf(info *Sandbox, deadline time.Time) (berm.Spec, error) {
	_, without, err := m.limits(berm.Limits{}, info.Base.Limits, m.probe(info.Level).Unlimited)
	if err != nil {
		return berm.Spec{}, err
	}
	return berm.Spec{
		ID: info.ID, Level: info.Level, Layers: info.Base.Layers, Hostname: string(info.ID), Limits: info.Limits, Setuid: info.Base.Setuid,
		Link: info.Policy != nil, Deadline: deadline, OnDeadline: info.OnDeadline, From: m.savedDir(info.SavedAs), Memory: info.SavedMemory,
		Guest: m.guest(info.ID, info.Base, info.Env, info.Secure, time.Now().UTC()), Degraded: without,
	}, nil
}

// Rollback gives a sandbox the state of a snapshot: its processes end, what it wrote since is
// gone, and it goes on with those of the snapshot, or starts anew where that has files alone, with
// its id, tokens and deadline. When it does not start, it has what it had before. Kinds: NotFound,
// Conflict, Unavailable (no room for what it has now, or it does not start), Unsupported (a snapshot
// of another template, or with a disk of another size).
func (m *Manager) Rollback(ctx context.Context, id berm.SandboxID, ref string, actor audit.Actor) (Sandbox, error) {
	s, err := m.session(id)
	if err != nil {
		return Sandbox{}, err
	}
	team := s.snapshot().Team
	snap, ok := m.snapshot(team, ref)
	release := sync.OnceFunc(m.use(snap.Build))
	cu := cleanup.Make(release)
	defer cu.Clean()
	if ok {
		_, ok = m.snapshot(team, ref) // it may have been removed before it was in use
	}
	if !ok {
		return Sandbox{}, berm.Errorf(berm.NotFound, "snapshot '%s' not found", ref)
	}
	if _, err := s.settled(ctx); err != nil {
		return Sandbox{}, err
	}
	info := s.snapshot()
	switch {
	case info.Base == nil || !sameLayers(info.Base, &snap.Template):
		return Sandbox{}, berm.Errorf(berm.Unsupported, "snapshot '%s' is not of the template that sandbox %s was made from", ref, id).
			WithHint("create a sandbox from it instead")
	case info.Limits.Disk != snap.Template.Limits.Disk:
		return Sandbox{}, berm.Errorf(berm.Unsupported, "snapshot '%s' is of a disk of another size", ref).WithHint("create a sandbox from it instead")
	case info.Level != snap.Level:
		return Sandbox{}, berm.Errorf(berm.Unsupported, "snapshot '%s' is of level %s", ref, snap.Level)
	}
	before, err := s.rollback(ctx, snap, release, actor)
	if err != nil {
		return Sandbox{}, err
	}
	cu.Release()
	timeout := min(max(time.Until(info.EndAt), min(info.Timeout, minWakeTimeout)), m.MaxTimeout)
	err = s.resume(ctx, timeout, actor, "rollback")
	if err != nil && berm.KindOf(err) == berm.Conflict { // somebody else resumes it
		if state, waiting := s.settled(ctx); waiting == nil && state == berm.Running {
			err = nil
		}
	}
	if err != nil {
		s.undo(ctx, before, timeout)
		if berm.KindOf(err) == berm.Internal {
			err = berm.Errorf(berm.Unavailable, "sandbox %s does not start from snapshot '%s', and has what it had before: %w", id, ref, err)
		}
		return Sandbox{}, err
	}
	before.letGo(m)
	return m.withTokens(s.snapshot()), nil
}

func sameLayers(a, b *berm.Template) bool {
	return slices.EqualFunc(a.Layers, b.Layers, func(a, b berm.Layer) bool { return a.DiffID == b.DiffID })
}

// had is what a sandbox had on disk before a rollback.
type had struct {
	saved   berm.BuildID
	memory  bool
	unpin   func() // nil for none
	running bool   // it ran
}

// letGo removes it. A snapshot stays.
func (h had) letGo(m *Manager) {
	m.drop(h.saved)
	if h.unpin != nil {
		h.unpin()
	}
}

// rollback leaves the sandbox paused with the state of a snapshot, and has unpin called when it needs
// them no more. When it fails, that is the caller's. What it had is the caller's to let go.
func (s *session) rollback(ctx context.Context, snap Snapshot, unpin func(), actor audit.Actor) (had, error) {
	from, via := berm.Running, berm.Pausing
	if s.state() == berm.Paused {
		from, via = berm.Paused, berm.Resuming
	}
	if err := s.begin(from, via); err != nil {
		return had{}, err
	}
	id := s.info.ID
	if err := s.m.emit(id, actor, audit.SandboxRollback, audit.OK, "", map[string]any{"snapshot": snap.ID(), "build": snap.Build}); err != nil {
		_ = s.end(from, nil)
		return had{}, err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), snapshotTime)
	defer cancel()
	s.op <- struct{}{}
	defer func() { <-s.op }()
	s.mu.Lock()
	before := had{s.info.SavedAs, s.info.SavedMemory, s.unpin, from == berm.Running}
	s.mu.Unlock()
	lives := before.saved == ""
	goBack := func(err error) (had, error) {
		s.m.tell(id, actor, audit.SandboxRollback, audit.Failed, err.Error(), nil)
		if s.state() == berm.Killed {
			return had{}, NotFound(id)
		}
		if from == berm.Running {
			s.goOn(ctx)
		} else {
			_ = s.end(from, nil)
		}
		return had{}, err
	}
	if lives {
		var err error
		if before.saved, before.memory, err = s.saveStill(ctx, before.running); err != nil {
			return goBack(err)
		}
	}
	s.mu.Lock()
	killed := s.info.State == berm.Killed
	if !killed {
		s.info.SavedAs, s.info.SavedMemory, s.unpin = snap.Build, snap.Saved.Memory, unpin
	}
	s.mu.Unlock()
	if !killed {
		if err := s.trySave(); err != nil {
			s.mu.Lock()
			s.info.SavedAs, s.info.SavedMemory, s.unpin = "", false, before.unpin
			if !lives {
				s.info.SavedAs, s.info.SavedMemory = before.saved, before.memory
			}
			s.mu.Unlock()
			if lives {
				s.m.drop(before.saved)
			}
			return goBack(err)
		}
	}
	if killed {
		if lives {
			s.m.drop(before.saved)
		}
		return had{}, NotFound(id)
	}
	if err := failpoint.Hit("control.rolled"); err != nil {
		return had{}, err
	}
	if lives {
		_, _ = s.look(ctx, system, "rollback")
		s.endProcesses(ctx, s.current())
	}
	if err := s.end(berm.Paused, nil); err != nil {
		before.letGo(s.m)
		return had{}, err
	}
	return before, nil
}

// saveStill stops a sandbox, unless it stands still, and saves all of it that its level can.
func (s *session) saveStill(ctx context.Context, running bool) (build berm.BuildID, memory bool, err error) {
	handle, info := s.current(), s.snapshot()
	if running {
		if err := handle.Pause(ctx); err != nil && berm.KindOf(err) != berm.Conflict {
			return "", false, err
		}
	}
	if build, err = s.m.newSaved(ctx, info.Base); err != nil {
		return "", false, err
	}
	memory = s.keepsMemory()
	s.snapping.Lock() // a checkpoint may be under way
	_, err = handle.Snapshot(ctx, s.m.savedDir(build), memory)
	s.snapping.Unlock()
	if err != nil {
		s.m.drop(build)
		return "", false, err
	}
	return build, memory, nil
}

// undo gives a sandbox that did not start after a rollback what it had before.
func (s *session) undo(ctx context.Context, before had, timeout time.Duration) {
	if s.begin(berm.Paused, berm.Resuming) != nil { // it is dead, or runs
		before.letGo(s.m)
		return
	}
	s.mu.Lock()
	snapshot := had{saved: s.info.SavedAs, unpin: s.unpin}
	s.mu.Unlock()
	if s.end(berm.Paused, func(info *Sandbox) {
		info.SavedAs, info.SavedMemory, s.unpin = before.saved, before.memory, before.unpin
	}) != nil {
		before.letGo(s.m)
		return
	}
	snapshot.letGo(s.m)
	if !before.running {
		return
	}
	if err := s.resume(ctx, timeout, system, "rollback failed"); err != nil {
		s.m.Log.Error("a sandbox whose rollback failed stays paused", "sandbox", s.info.ID, "error", err)
	}
}

// letGo removes the files that a sandbox was paused to and needs no more. A snapshot stays.
func (s *session) letGo(b berm.BuildID) {
	s.mu.Lock()
	unpin := s.unpin
	s.unpin = nil
	s.mu.Unlock()
	s.m.drop(b)
	if unpin != nil {
		unpin()
	}
}
