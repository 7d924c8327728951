package control

import (
	"context"
	"encoding/json"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/failpoint"
	"github.com/berm-sandbox/berm/internal/store"
)

// session is one sandbox with its state machine. A transition is a state of its
// own: whoever needs the state after it waits for changed.
type session struct {
	m *Manager
	// op is held over a call to the engine that changes state or deadline, so that
	// the order here is the order there. Kill does not take it: it wins.
	op chan struct{}

	mu      sync.Mutex
	info    Sandbox
	handle  berm.Sandbox
	agent   int                // generations of the guest agent seen
	changed chan struct{}      // closed at the next change of state
	life    context.Context    // ends when streams into the sandbox must be cut
	cut     context.CancelFunc //
	samples []Sample

	saving   sync.Mutex    // two saves must not overtake each other
	snapping sync.Mutex    // held during a snapshot; who holds it waits for no transition
	underway chan struct{} // closed at the end of a checkpoint, under mu; nil while there is none
	gone     chan struct{} // closed when nothing is left of the sandbox
	// stop ends the followers of the processes that it has now; looked is closed when what they
	// wrote is recorded. Both, and writable, are under mu.
	stop      context.CancelFunc
	followers sync.WaitGroup
	looked    chan struct{}
	writable  berm.Writable
	looking   sync.Mutex // over a look that a client asked for
	killedAt  time.Time  // since when it is Killed, under mu; zero before
	online    *online    // nil for a sandbox without a link
	unpin     func()     // lets a snapshot go that SavedAs names, under mu; nil when it names none
	traced    bool       // whether its processes are recorded, under mu
	line      net.Conn   // to the agent, for the next request, under mu; nil for none
	link      *os.File   // fetched in advance, of a sandbox that nobody has yet; nil for none
}

func newSession(m *Manager) *session {
	s := &session{m: m, op: make(chan struct{}, 1), changed: make(chan struct{}), gone: make(chan struct{}), looked: make(chan struct{}), stop: func() {}}
	s.life, s.cut = context.WithCancel(context.Background())
	return s
}

func (s *session) snapshot() Sandbox {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.info
}

func (s *session) state() berm.State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.info.State
}

// become moves the session to next and wakes the waiters. The caller holds s.mu and
// has checked that the state may.
func (s *session) become(next berm.State) {
	if !s.info.State.CanBecome(next) {
		panic("session: " + s.info.State + " cannot become " + next)
	}
	s.info.State = next
	switch next {
	case berm.Running:
		if s.life.Err() != nil {
			s.life, s.cut = context.WithCancel(context.Background())
		}
	case berm.Killed:
		s.killedAt = time.Now()
		s.cut()
	default:
		s.cut()
	}
	close(s.changed)
	s.changed = make(chan struct{})
}

// settled waits until the session is in no transition and returns its state.
func (s *session) settled(ctx context.Context) (berm.State, error) {
	for {
		s.mu.Lock()
		state, changed := s.info.State, s.changed
		s.mu.Unlock()
		if state != berm.Pausing && state != berm.Resuming {
			return state, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return state, berm.Errorf(berm.Unavailable, "sandbox is %s: %w", state, ctx.Err())
		}
	}
}

// detached is the context of a transition: see transitionTime.
func detached(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), transitionTime)
}

// begin moves the session from one settled state into a transition.
func (s *session) begin(from, via berm.State) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch s.info.State {
	case from:
		s.become(via)
		return nil
	case berm.Killed:
		return NotFound(s.info.ID)
	default:
		return berm.Errorf(berm.Conflict, "sandbox %s is %s", s.info.ID, s.info.State)
	}
}

// end finishes a transition, unless the sandbox was killed meanwhile.
func (s *session) end(next berm.State, change func(*Sandbox)) error {
	s.mu.Lock()
	if s.info.State == berm.Killed {
		s.mu.Unlock()
		return NotFound(s.info.ID)
	}
	if change != nil {
		change(&s.info)
	}
	s.become(next)
	s.mu.Unlock()
	s.save()
	return nil
}

func (s *session) pause(ctx context.Context, filesOnly bool, actor audit.Actor) error {
	if err := s.begin(berm.Running, berm.Pausing); err != nil {
		return err
	}
	id := s.info.ID
	var data any
	if filesOnly {
		data = map[string]any{"memory": false}
	}
	if err := s.m.emit(id, actor, audit.SandboxPause, audit.OK, "", data); err != nil {
		_ = s.end(berm.Running, nil)
		return err
	}
	ctx, cancel := detached(ctx)
	defer cancel()
	s.op <- struct{}{}
	err := s.current().Pause(ctx)
	<-s.op
	if kind := berm.KindOf(err); err != nil && kind != berm.Conflict {
		s.m.tell(id, actor, audit.SandboxPause, audit.Failed, err.Error(), nil)
		if kind == berm.NotFound { // dead; the event will tell why
			err = NotFound(id)
		}
		_ = s.end(berm.Running, nil)
		return err
	}
	onDisk := filesOnly || s.keepsMemory()
	if onDisk {
		saving := s.toDisk(ctx, !filesOnly)
		switch {
		case saving == nil:
		case s.state() == berm.Killed:
			return NotFound(id)
		case filesOnly:
			s.m.tell(id, actor, audit.SandboxPause, audit.Failed, saving.Error(), data)
			s.goOn(ctx)
			return saving
		default: // it stands still, and nothing of it is lost
			s.m.Log.Warn("a paused sandbox keeps its memory in use", "sandbox", id, "error", saving)
			onDisk = false
		}
	}
	if endErr := s.end(berm.Paused, nil); endErr != nil {
		return endErr
	}
	if !onDisk {
		_, _ = s.look(ctx, system, "pause") // a record tells what cannot be seen
	}
	s.log("info", "Sandbox paused", nil)
	return err // Conflict when the deadline paused it first
}

// goOn lets a sandbox run again whose pause failed.
func (s *session) goOn(ctx context.Context) {
	info := s.snapshot()
	err := s.current().Resume(ctx, info.EndAt)
	if err == nil || berm.KindOf(err) == berm.Conflict {
		_ = s.end(berm.Running, nil)
		return
	}
	s.m.Log.Error("a sandbox stays paused, since its pause failed and it does not go on", "sandbox", info.ID, "error", err)
	_ = s.end(berm.Paused, nil)
}

func (s *session) resume(ctx context.Context, timeout time.Duration, actor audit.Actor, why string) error {
	if err := s.begin(berm.Paused, berm.Resuming); err != nil {
		return err
	}
	id := s.info.ID
	if err := s.m.emit(id, actor, audit.SandboxResume, audit.OK, why, nil); err != nil {
		_ = s.end(berm.Paused, nil)
		return err
	}
	ctx, cancel := detached(ctx)
	defer cancel()
	// Until its followers are there: who ends its processes first would be followed as its death.
	s.op <- struct{}{}
	defer func() { <-s.op }()
	deadline := time.Now().Add(timeout).UTC()
	info := s.snapshot()
	rested := info.SavedAs
	var err error
	if rested != "" {
		if err = s.m.reserve(ctx, id, share{info.Team, info.Limits, true}); err == nil {
			defer s.m.release(id) // when it counts by itself
			err = s.wake(ctx, deadline)
		}
	} else if err = s.handle.Resume(ctx, deadline); berm.KindOf(err) == berm.Conflict && err != nil { // it runs already, whoever resumed it
		err = s.handle.SetDeadline(ctx, deadline)
	}
	if err != nil {
		s.m.tell(id, actor, audit.SandboxResume, audit.Failed, err.Error(), nil)
		if berm.KindOf(err) == berm.NotFound {
			err = NotFound(id)
		}
		_ = s.end(berm.Paused, nil)
		return err
	}
	if rested == "" {
		s.informResumed(ctx)
	}
	err = s.end(berm.Running, func(info *Sandbox) {
		info.StartedAt, info.EndAt, info.SavedAs, info.SavedMemory = time.Now().UTC(), deadline, "", false
	})
	if err == nil && rested != "" {
		if err := failpoint.Hit("control.awake"); err != nil {
			return err
		}
		// Until it is stored that the sandbox runs, the next server would begin with these files.
		if err := s.trySave(); err == nil {
			s.letGo(rested)
		} else {
			s.m.Log.Error("files of a resumed sandbox are left until the next start", "sandbox", id, "error", err)
		}
		ctx, cancel := detached(ctx) // the sandbox may have taken long to be ready
		defer cancel()
		s.attend(ctx)
	}
	if err == nil {
		s.log("info", "Sandbox resumed", map[string]string{"reason": why})
	}
	return err
}

// setDeadline moves the deadline of a running sandbox to what choose makes of the
// present one. Choosing the present one changes nothing.
func (s *session) setDeadline(ctx context.Context, actor audit.Actor, choose func(now, end time.Time) time.Time) error {
	select {
	case s.op <- struct{}{}:
		defer func() { <-s.op }()
	case <-ctx.Done():
		return berm.Errorf(berm.Unavailable, "sandbox is busy: %w", ctx.Err())
	}
	info := s.snapshot()
	switch info.State {
	case berm.Running:
	case berm.Killed:
		return NotFound(info.ID)
	default:
		return berm.Errorf(berm.Conflict, "sandbox %s is %s", info.ID, info.State)
	}
	end := choose(time.Now().UTC(), info.EndAt)
	if end.Equal(info.EndAt) {
		return nil
	}
	if err := s.m.emit(info.ID, actor, audit.SandboxUpdate, audit.OK, "", map[string]any{"deadline": end}); err != nil {
		return err
	}
	ctx, cancel := detached(ctx)
	defer cancel()
	if err := s.handle.SetDeadline(ctx, end); err != nil {
		switch berm.KindOf(err) {
		case berm.NotFound:
			return NotFound(info.ID)
		case berm.Conflict:
			s.check(ctx)
		}
		return err
	}
	s.mu.Lock()
	s.info.EndAt = end
	s.mu.Unlock()
	s.save()
	return nil
}

// kill ends the sandbox and returns when nothing of it is left. Of several callers
// the first is told of success, the others that there is no such sandbox.
func (s *session) kill(ctx context.Context, actor audit.Actor) error {
	s.mu.Lock()
	if s.info.State == berm.Killed {
		s.mu.Unlock()
		select {
		case <-s.gone:
		case <-ctx.Done():
		}
		return NotFound(s.info.ID)
	}
	s.become(berm.Killed)
	s.mu.Unlock()
	ctx, cancel := detached(ctx)
	defer cancel()
	offline := make(chan struct{})
	go func() {
		defer close(offline)
		s.offline()
	}()
	exit, err := s.current().Kill(ctx, berm.ReasonKilled)
	<-offline
	if err != nil {
		s.m.Log.Error("killing a sandbox failed, trying again", "sandbox", s.info.ID, "error", err)
		s.m.work.Go(func() { s.bury(berm.Exit{Reason: berm.ReasonKilled, Code: -1, At: time.Now().UTC()}) })
		return berm.Errorf(berm.Internal, "killing sandbox %s: %w", s.info.ID, err)
	}
	s.finish(exit, actor)
	return nil
}

// ended takes note that the sandbox died by itself.
func (s *session) ended(exit berm.Exit) {
	s.mu.Lock()
	if s.info.State == berm.Killed { // kill tells the story
		s.mu.Unlock()
		return
	}
	s.become(berm.Killed)
	s.mu.Unlock()
	s.offline()
	s.bury(exit)
}

// bury removes what is left of a dead sandbox, as often as it takes, and finishes
// the session. The exit given is used when the engine knows none.
func (s *session) bury(exit berm.Exit) {
	// A sandbox that has just died is still being taken away: Kill waits for that, where
	// Remove would find it alive.
	evict := func(ctx context.Context) (berm.Exit, error) { return s.m.evict(ctx, s.info.ID, exit.Reason) }
	take := evict
	if handle := s.current(); handle != nil {
		take = func(ctx context.Context) (berm.Exit, error) { return handle.Kill(ctx, exit.Reason) }
	}
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, time.Minute) {
		ctx, cancel := context.WithTimeout(s.m.ctx, transitionTime)
		found, err := take(ctx)
		cancel()
		take = evict
		if err == nil {
			if found != (berm.Exit{}) {
				exit = found
			}
			s.finish(exit, system)
			return
		}
		if s.m.ctx.Err() != nil {
			return // the next server finds it
		}
		s.m.Log.Error("removing a dead sandbox failed", "sandbox", s.info.ID, "error", err)
		if !sleep(s.m.ctx, wait) {
			return
		}
	}
}

// finish closes the books of a sandbox of which nothing is left.
func (s *session) finish(exit berm.Exit, actor audit.Actor) {
	s.mu.Lock()
	s.info.Exit = &exit
	s.mu.Unlock()
	s.m.forgetKept(&s.info)
	s.letGo(s.snapshot().SavedAs)
	// First: who does not find it among the living looks there.
	if err := s.trySave(); err != nil {
		s.m.Log.Error("saving the end of a sandbox failed, trying again", "sandbox", s.info.ID, "error", err)
		s.m.work.Go(s.saveEnd)
	}
	s.m.mu.Lock()
	delete(s.m.sessions, s.info.ID)
	s.m.mu.Unlock()
	fields := map[string]string{"reason": string(exit.Reason)}
	if exit.Detail != "" {
		fields["detail"] = exit.Detail
	}
	s.log("info", "Sandbox ended", fields)
	if exit.Reason == berm.ReasonOOM {
		s.m.tell(s.info.ID, system, audit.LimitHit, audit.OK, exit.Detail, map[string]any{"limit": "memory"})
	}
	s.seen()
	s.forget()
	s.m.tell(s.info.ID, actor, audit.SandboxExit, audit.OK, string(exit.Reason), exit)
	if handle := s.current(); handle != nil {
		_ = handle.Close()
	}
	close(s.gone)
}

// watch follows what the sandbox's monitor reports until run ends or the sandbox is dead.
func (s *session) watch(run context.Context) {
	for run.Err() == nil {
		if events, err := s.current().Events(run); err == nil {
			s.check(s.m.ctx) // for what happened before
			for status := range events {
				if run.Err() != nil || s.observe(status) {
					return
				}
			}
		}
		if run.Err() != nil || s.state() == berm.Killed {
			return
		}
		// The monitor is lost, or only the connection to it.
		handle, _, err := s.m.open(run, s.info.ID)
		if run.Err() != nil {
			return
		}
		if err != nil {
			s.ended(berm.Exit{Reason: berm.ReasonCrash, Code: -1, Detail: "its monitor was lost", At: time.Now().UTC()})
			return
		}
		s.op <- struct{}{}
		s.mu.Lock()
		old := s.handle
		s.handle = handle
		s.mu.Unlock()
		<-s.op
		_ = old.Close()
		s.check(s.m.ctx)
		sleep(run, 100*time.Millisecond)
	}
}

// observe takes in one report and says whether it was the last.
func (s *session) observe(status berm.Status) bool {
	if status.Exit != nil {
		s.ended(*status.Exit)
		return true
	}
	s.follow(status)
	s.mu.Lock()
	paused := status.State == berm.Paused && s.info.State == berm.Running
	s.mu.Unlock()
	if paused {
		s.check(s.m.ctx)
	}
	return false
}

// follow tells that the guest agent was started again.
func (s *session) follow(status berm.Status) {
	s.mu.Lock()
	lost := status.Agent > s.agent && s.agent > 0
	s.agent = max(s.agent, status.Agent)
	s.mu.Unlock()
	if lost {
		s.m.tell(s.info.ID, system, audit.AgentLost, audit.OK, "", map[string]any{"generation": status.Agent})
		s.log("warn", "The guest agent ended and was started again", nil)
	}
}

// check looks what no report told of: another agent, a pause by the deadline. A report alone is no
// proof: it may be older than a resume.
func (s *session) check(ctx context.Context) {
	s.mu.Lock()
	before := s.changed
	s.mu.Unlock()
	status, err := s.current().Status(ctx)
	if err != nil {
		return
	}
	s.follow(status)
	if status.State != berm.Paused {
		return
	}
	s.mu.Lock()
	if s.info.State != berm.Running || s.changed != before { // resumed since the monitor answered
		s.mu.Unlock()
		return
	}
	s.become(berm.Pausing)
	filesOnly := s.info.FilesOnly
	s.mu.Unlock()
	onDisk := filesOnly || s.keepsMemory()
	if !onDisk {
		if s.end(berm.Paused, nil) != nil {
			return
		}
	}
	s.save()
	s.m.tell(s.info.ID, system, audit.SandboxPause, audit.OK, "deadline", nil)
	if onDisk {
		s.m.work.Go(s.rest)
	} else {
		s.m.work.Go(func() { _, _ = s.look(s.m.ctx, system, "pause") })
	}
	s.log("info", "Sandbox paused at its deadline", nil)
}

// rest keeps a sandbox that its deadline paused on disk. One that cannot be saved stays paused
// with its memory in use.
func (s *session) rest() {
	memory := !s.snapshot().FilesOnly
	if err := s.toDisk(s.m.ctx, memory); err != nil {
		s.m.tell(s.info.ID, system, audit.SandboxPause, audit.Failed, err.Error(), map[string]any{"memory": memory})
		s.m.Log.Error("a paused sandbox keeps its memory in use", "sandbox", s.info.ID, "error", err)
	}
	_ = s.end(berm.Paused, nil)
}

// save stores the session as it is. Failing is no reason to fail what has happened
// already: the next change is saved anew.
func (s *session) save() {
	if err := s.trySave(); err != nil {
		s.m.Log.Error("saving a sandbox failed", "sandbox", s.info.ID, "error", err)
	}
}

// saveEnd stores the session as it is, as often as it takes: no later change will.
func (s *session) saveEnd() {
	for wait := time.Second; sleep(s.m.ctx, wait); wait = min(2*wait, time.Minute) {
		if s.trySave() == nil {
			return
		}
	}
}

func (s *session) trySave() error {
	s.saving.Lock()
	defer s.saving.Unlock()
	info := s.snapshot()
	record, err := json.Marshal(info)
	if err != nil {
		return err
	}
	row := store.Sandbox{ID: info.ID, Request: info.Request.Key, Record: record}
	if info.Exit != nil {
		row.Killed = info.Exit.At
		if row.Killed.IsZero() {
			row.Killed = time.Now()
		}
	}
	return s.m.Store.SaveSandbox(context.Background(), row)
}

// log adds a line to the sandbox's log.
func (s *session) log(level, message string, fields map[string]string) {
	if fields == nil {
		fields = map[string]string{}
	}
	text, err := json.Marshal(fields)
	if err == nil {
		err = s.m.Store.AppendLog(context.Background(), s.info.ID, store.LogLine{
			Time: time.Now().UTC(), Level: level, Message: message, Fields: string(text),
		})
	}
	if err != nil {
		s.m.Log.Error("log line lost", "sandbox", s.info.ID, "error", err)
	}
	attrs := []any{"sandbox", s.info.ID}
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		attrs = append(attrs, name, fields[name])
	}
	s.m.Log.Info(message, attrs...)
}
