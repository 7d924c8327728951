package control

import (
	"context"
	"crypto/rand"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/layer"
)

const (
	// lastLook bounds how long what a dead sandbox wrote is looked at: it is to be gone
	// within two seconds. See monitor.LayerPatience.
	lastLook  = 800 * time.Millisecond
	leastLook = 100 * time.Millisecond
	// lookTime bounds a look at a sandbox that lives on.
	lookTime = 10 * time.Second
)

// openLook begins a look at what the sandbox writes, if that is recorded.
func (s *session) openLook(ctx context.Context) error {
	if s.m.AuditDir == "" {
		return nil
	}
	w, err := s.current().Writable(ctx)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.writable = w
	s.mu.Unlock()
	return nil
}

// keepLook records what the sandbox has written when it has ended. It closes s.looked. The
// error is that of the first openLook.
func (s *session) keepLook(err error) {
	defer close(s.looked)
	if s.m.AuditDir == "" {
		return
	}
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 10*time.Second) {
		if err == nil {
			err = s.lastLook()
		}
		if err == nil || s.m.ctx.Err() != nil {
			return
		}
		if berm.KindOf(err) == berm.Unsupported && !s.killed() {
			return
		}
		if s.state() == berm.Killed {
			s.unseen("end", err)
			return
		}
		if !sleep(s.m.ctx, wait) {
			return
		}
		err = s.openLook(s.m.ctx)
	}
}

// killed waits until the sandbox is being killed, or says false when the server stops.
func (s *session) killed() bool {
	for {
		s.mu.Lock()
		state, changed := s.info.State, s.changed
		s.mu.Unlock()
		if state == berm.Killed {
			return true
		}
		select {
		case <-changed:
		case <-s.m.ctx.Done():
			return false
		}
	}
}

// lastLook waits for the end of the sandbox.
func (s *session) lastLook() error {
	s.mu.Lock()
	w := s.writable
	s.mu.Unlock()
	defer func() { _ = w.Close() }()
	written, err := w.Last(s.m.ctx)
	if err != nil {
		return err
	}
	defer written.Close()
	s.mu.Lock()
	killedAt := s.killedAt
	s.mu.Unlock()
	left := lastLook
	if !killedAt.IsZero() {
		// The kernel forgets files one by one, half a million in a second: those of the view
		// until now, those of the disk under it afterwards, which takes as long again.
		left = max(lastLook-2*time.Since(killedAt), leastLook)
	}
	ctx, cancel := context.WithTimeout(s.m.ctx, left)
	defer cancel()
	s.record(ctx, written, "end")
	return nil
}

// look records what the sandbox has written until now, and why it was looked at.
func (s *session) look(ctx context.Context, at string) {
	s.mu.Lock()
	w := s.writable
	s.mu.Unlock()
	if w == nil {
		return // the end tells why
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookTime)
	defer cancel()
	written, err := w.Now(ctx)
	if err != nil {
		s.unseen(at, err)
		return
	}
	defer written.Close()
	s.record(ctx, written, at)
}

func (s *session) record(ctx context.Context, written *berm.Written, at string) {
	records, err := layer.Records(ctx, written, s.m.AuditDir, at, strings.ToLower(rand.Text()))
	if err != nil {
		s.unseen(at, err)
		return
	}
	for _, r := range records {
		r.Sandbox, r.Actor, r.Src, r.Trust = s.info.ID, system, "layer", audit.TrustHost
		if err := s.m.Audit.Emit(r); err != nil {
			s.m.Log.Error("audit record lost", "sandbox", s.info.ID, "type", r.Type, "error", err)
		}
	}
}

// unseen records that it is not known what the sandbox has written.
func (s *session) unseen(at string, err error) {
	if s.m.AuditDir == "" {
		return
	}
	r := audit.Record{
		Sandbox: s.info.ID, Actor: system, Type: audit.FileChange, Src: "layer", Trust: audit.TrustHost,
		Outcome: audit.Failed, Reason: err.Error(), Data: audit.Changes{At: at, Changes: []audit.Change{}},
	}
	if err := s.m.Audit.Emit(r); err != nil {
		s.m.Log.Error("audit record lost", "sandbox", s.info.ID, "type", r.Type, "error", err)
	}
}
