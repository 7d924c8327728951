package control

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/berm-sandbox/berm"
)

// Checkpoints says when a sandbox is saved without anybody asking. The zero one is never.
type Checkpoints struct {
	Every time.Duration `json:"every,omitempty"` // by the clock; 0 is not
	Exec  bool          `json:"exec,omitempty"`  // before each command that a client starts
	Keep  int           `json:"keep,omitempty"`  // how many there are at most: the oldest goes
}

// What a checkpoint was taken for.
const (
	ByClock    = "clock"
	BeforeExec = "exec"
)

// MissedCheckpoint is a checkpoint that could not be taken.
type MissedCheckpoint struct {
	At         time.Time `json:"at"`
	Checkpoint string    `json:"checkpoint"` // ByClock or BeforeExec
	Reason     string    `json:"reason"`
	Count      int       `json:"count"` // of all that were missed
}

const (
	leastEvery  = time.Second
	defaultKeep = 10
	maxKeep     = 100
)

func (c *Checkpoints) any() bool { return c.Every > 0 || c.Exec }

// check refuses what means nothing, and completes the rest.
func (c *Checkpoints) check() error {
	switch {
	case c.Every != 0 && c.Every < leastEvery:
		return berm.Errorf(berm.Invalid, "checkpoints can be %s apart at least", leastEvery)
	case c.Keep < 0 || c.Keep > maxKeep:
		return berm.Errorf(berm.Invalid, "from 1 to %d checkpoints can be kept", maxKeep)
	case c.Keep > 0 && !c.any():
		return berm.Errorf(berm.Invalid, "checkpoints are kept, but none is taken").WithHint("say when: every so often, or before each exec")
	case c.any() && c.Keep == 0:
		c.Keep = defaultKeep
	}
	return nil
}

// Checkpoint saves the sandbox before a command that a client is about to start, if it was made
// so and something was written since it was saved last. What goes wrong is recorded, and is no
// reason not to start the command.
func (r *Route) Checkpoint(ctx context.Context) {
	if r.s.info.Checkpoints.Exec { // never changes
		r.s.checkpoint(ctx, BeforeExec)
	}
}

// keepCheckpoints takes checkpoints by the clock until run ends.
func (s *session) keepCheckpoints(run context.Context) {
	info := s.snapshot()
	last := info.StartedAt
	if taken := s.checkpoints(); len(taken) > 0 {
		last = taken[0].CreatedAt
	}
	for sleep(run, time.Until(last.Add(info.Checkpoints.Every))) {
		s.checkpoint(run, ByClock)
		last = time.Now()
	}
}

// checkpoints are those of the sandbox, newest first.
func (s *session) checkpoints() []Snapshot {
	return slices.DeleteFunc(s.m.Snapshots(SnapshotFilter{Sandbox: s.info.ID}), func(snap Snapshot) bool { return snap.Checkpoint == "" })
}

// checkpoint takes one, unless the sandbox does not run or nothing was written since it was saved
// last. Who comes while one is being taken waits for that.
func (s *session) checkpoint(ctx context.Context, why string) {
	s.mu.Lock()
	if s.info.State != berm.Running {
		s.mu.Unlock()
		return
	}
	if s.underway != nil {
		s.mu.Unlock()
		s.awaitCheckpoint(ctx)
		return
	}
	done := make(chan struct{})
	s.underway = done
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.underway = nil
		s.mu.Unlock()
		close(done)
	}()
	err := s.takeCheckpoint(ctx, why)
	if err == nil || s.state() != berm.Running {
		return
	}
	s.mu.Lock()
	missed := MissedCheckpoint{At: time.Now().UTC(), Checkpoint: why, Reason: err.Error(), Count: 1}
	if s.info.Missed != nil {
		missed.Count += s.info.Missed.Count
	}
	s.info.Missed = &missed
	s.mu.Unlock()
	s.save()
	s.log("warn", "A checkpoint could not be taken", map[string]string{"checkpoint": why, "reason": err.Error()})
}

// awaitCheckpoint waits for the end of a checkpoint and says whether there was one.
func (s *session) awaitCheckpoint(ctx context.Context) bool {
	s.mu.Lock()
	underway := s.underway
	s.mu.Unlock()
	if underway == nil {
		return false
	}
	select {
	case <-underway:
	case <-ctx.Done():
	}
	return true
}

func (s *session) takeCheckpoint(ctx context.Context, why string) error {
	snap := Snapshot{
		TemplateID: berm.NewTemplateID(), Tag: defaultTag, Sandbox: s.info.ID, Team: s.info.Team, Checkpoint: why, Version: s.version(ctx),
	}
	if saved := s.m.Snapshots(SnapshotFilter{Sandbox: s.info.ID}); len(saved) > 0 && saved[0].Version == snap.Version && snap.Version != "" {
		return nil
	}
	if err := s.take(ctx, &snap, false, system); err != nil {
		return err
	}
	return s.trim(ctx)
}

// trim removes the oldest checkpoints while there are too many, or they are too large.
func (s *session) trim(ctx context.Context) error {
	all := s.checkpoints()
	var size int64
	for i, snap := range all {
		size += snap.Saved.Size
		full := s.m.CheckpointBytes > 0 && size > s.m.CheckpointBytes
		if i < s.info.Checkpoints.Keep && !full {
			continue
		}
		if i == 0 {
			return errors.Join(s.m.forgetSnapshot(ctx, snap, system), berm.Errorf(berm.Exhausted,
				"a checkpoint of %d MiB is larger than all of them may be, %d MiB", size>>20, s.m.CheckpointBytes>>20))
		}
		for _, old := range slices.Backward(all[i:]) {
			if err := s.m.forgetSnapshot(ctx, old, system); err != nil {
				return err
			}
		}
		break
	}
	return nil
}

// pruneCheckpoints removes the checkpoints of sandboxes that are forgotten.
func (m *Manager) pruneCheckpoints(ctx context.Context) {
	for _, snap := range m.Snapshots(SnapshotFilter{}) {
		if snap.Checkpoint == "" {
			continue
		}
		if _, err := m.Inspect(ctx, snap.Sandbox); err == nil || berm.KindOf(err) != berm.NotFound {
			continue
		}
		if err := m.forgetSnapshot(ctx, snap, system); err != nil {
			m.Log.Error("removing a checkpoint failed", "build", snap.Build, "error", err)
		}
	}
}
