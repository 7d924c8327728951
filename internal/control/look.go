package control

import (
	"context"
	"crypto/rand"
	"net/netip"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/layer"
	"github.com/berm-sandbox/berm/internal/network/link"
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
	if s.m.Blobs == nil {
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

// keepLook records what the sandbox has written when it has ended, unless run ends before. The
// error is that of the first openLook.
func (s *session) keepLook(run context.Context, err error) {
	if s.m.Blobs == nil {
		return
	}
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 10*time.Second) {
		if err == nil {
			err = s.lastLook(run)
		}
		if err == nil || run.Err() != nil {
			return
		}
		if berm.KindOf(err) == berm.Unsupported && !s.killed(run) {
			return
		}
		if s.state() == berm.Killed {
			s.unseen(system, "end", err)
			return
		}
		if !sleep(run, wait) {
			return
		}
		err = s.openLook(run)
	}
}

// killed waits until the sandbox is being killed, or says false when run ends.
func (s *session) killed(run context.Context) bool {
	for {
		s.mu.Lock()
		state, changed := s.info.State, s.changed
		s.mu.Unlock()
		if state == berm.Killed {
			return true
		}
		select {
		case <-changed:
		case <-run.Done():
			return false
		}
	}
}

// lastLook waits for the end of the sandbox.
func (s *session) lastLook(run context.Context) error {
	s.mu.Lock()
	w := s.writable
	s.mu.Unlock()
	if w == nil {
		return nil // its processes are being ended
	}
	defer func() { _ = w.Close() }()
	written, err := w.Last(run)
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
	_, _ = s.record(ctx, written, system, "end") // what is missing is told
	return nil
}

// Changes looks at what a sandbox, running or paused, has written until now, and returns the
// record of it, whose data are audit.Changes. What runs inside goes on writing meanwhile. Kinds:
// Conflict while another look is under way, the state changes, or it is kept on disk alone, Unsupported where what is written
// is not recorded, Unavailable when the record could not be kept.
func (m *Manager) Changes(ctx context.Context, id berm.SandboxID, actor audit.Actor) (audit.Record, error) {
	s, err := m.session(id)
	if err != nil {
		return audit.Record{}, err
	}
	if m.Blobs == nil {
		return audit.Record{}, berm.Errorf(berm.Unsupported, "this server does not record what sandboxes write").
			WithHint("start it with --record changes")
	}
	if state := s.state(); state != berm.Running && state != berm.Paused {
		return audit.Record{}, berm.Errorf(berm.Conflict, "sandbox %s is %s", id, state)
	}
	if s.snapshot().SavedAs != "" {
		return audit.Record{}, berm.Errorf(berm.Conflict, "sandbox %s is paused, and kept on disk alone", id).
			WithHint("resume it first; the record of its pause has what it had written")
	}
	if !s.looking.TryLock() {
		return audit.Record{}, berm.Errorf(berm.Conflict, "what sandbox %s has written is being looked at", id)
	}
	defer s.looking.Unlock()
	return s.look(ctx, actor, "request")
}

// Written opens what a sandbox has written until now, for a layer to be made of it. Kinds:
// NotFound, Unsupported (its disk is one that only it sees).
func (m *Manager) Written(ctx context.Context, id berm.SandboxID) (*berm.Written, error) {
	s, err := m.session(id)
	if err != nil {
		return nil, err
	}
	w, err := s.current().Writable(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = w.Close() }()
	return w.Now(ctx)
}

// look records what the sandbox has written until now, and why it was looked at.
func (s *session) look(ctx context.Context, actor audit.Actor, at string) (audit.Record, error) {
	s.mu.Lock()
	w := s.writable
	s.mu.Unlock()
	if w == nil { // the end tells why
		return audit.Record{}, berm.Errorf(berm.Unsupported, "what sandbox %s writes cannot be looked at", s.info.ID)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookTime)
	defer cancel()
	written, err := w.Now(ctx)
	if err != nil {
		s.unseen(actor, at, err)
		return audit.Record{}, err
	}
	defer written.Close()
	return s.record(ctx, written, actor, at)
}

func (s *session) record(ctx context.Context, written *berm.Written, actor audit.Actor, at string) (audit.Record, error) {
	records, err := layer.Records(ctx, written, s.identity(), s.m.Blobs, at, strings.ToLower(rand.Text()), s.masking())
	if err != nil {
		s.unseen(actor, at, err)
		return audit.Record{}, err
	}
	for i := range records {
		r := &records[i]
		r.Sandbox, r.Actor, r.Src, r.Trust = s.info.ID, actor, "layer", audit.TrustHost
		if lost := s.m.Audit.Emit(*r); lost != nil {
			s.m.Log.Error("audit record lost", "sandbox", s.info.ID, "type", r.Type, "error", lost)
			err = lost
		}
	}
	return records[0], err
}

// masking is what takes the secrets of the sandbox's credentials out of content that is kept; nil
// when it has none.
func (s *session) masking() layer.Mask {
	if info := s.snapshot(); info.Policy == nil || info.Grants.empty() {
		return nil
	}
	s.online.mu.Lock()
	defer s.online.mu.Unlock()
	for _, broker := range []Link{s.online.broker, s.online.last} {
		if broker != nil {
			return broker.Mask
		}
	}
	return func(context.Context, []byte) ([]byte, error) {
		return nil, berm.Errorf(berm.Unavailable, "the service of credentials is not there")
	}
}

// seen waits until what the sandbox wrote has been looked at after its end.
func (s *session) seen() {
	s.mu.Lock()
	looked := s.looked
	s.mu.Unlock()
	select {
	case <-looked:
	case <-time.After(lastLook): // the monitor takes the sandbox away, whoever still looks
	}
}

// identity is what Berm has written into the sandbox.
func (s *session) identity() layer.Identity {
	i := layer.Identity{Sandbox: s.info.ID, Template: s.info.TemplateID, Nameserver: "127.0.0.1"}
	if s.online != nil {
		i.Nameserver = netip.AddrFrom4(link.Default.Gateway).String()
	}
	return i
}

// unseen records that it is not known what the sandbox has written.
func (s *session) unseen(actor audit.Actor, at string, err error) {
	if s.m.Blobs == nil {
		return
	}
	r := audit.Record{
		Sandbox: s.info.ID, Actor: actor, Type: audit.FileChange, Src: "layer", Trust: audit.TrustHost,
		Outcome: audit.Failed, Reason: err.Error(), Data: audit.Changes{At: at, Changes: []audit.Change{}},
	}
	if err := s.m.Audit.Emit(r); err != nil {
		s.m.Log.Error("audit record lost", "sandbox", s.info.ID, "type", r.Type, "error", err)
	}
}
