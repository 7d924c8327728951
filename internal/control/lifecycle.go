package control

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/cleanup"
	"github.com/berm-sandbox/berm/internal/failpoint"
	"github.com/berm-sandbox/berm/internal/network/policy"
	"github.com/berm-sandbox/berm/internal/store"
)

// Create makes a sandbox and returns when its guest agent answers; of a request that
// was made before it returns the sandbox of then. Kinds: Invalid, NotFound (the
// template), Exhausted (the quota), Conflict (ErrRequestDiffers), Unsupported,
// Unavailable.
func (m *Manager) Create(ctx context.Context, r CreateRequest) (Sandbox, error) {
	if r.Request.Key != "" {
		return m.createOnce(ctx, r)
	}
	return m.create(ctx, r)
}

func (m *Manager) create(ctx context.Context, r CreateRequest) (Sandbox, error) {
	var steps []Step
	last := time.Now()
	step := func(name string) {
		now := time.Now()
		steps = append(steps, Step{name, now.Sub(last)})
		last = now
	}
	if err := m.check(&r); err != nil {
		return Sandbox{}, err
	}
	o, err := m.origin(ctx, &r)
	if err != nil {
		return Sandbox{}, err
	}
	release := m.use(o.saved)
	defer release()
	if o.from != "" {
		if _, ok := m.snapshot(r.Team, r.Template); !ok { // removed before it was in use
			return Sandbox{}, berm.Errorf(berm.NotFound, "snapshot '%s' not found", r.Template)
		}
	}
	allowed, fields, err := m.compile(r.Network, r.Internet)
	if err != nil {
		return Sandbox{}, err
	}
	if r.Policy != nil {
		switch {
		case r.Internet != nil || len(r.Network.AllowOut) > 0 || len(r.Network.DenyOut) > 0:
			return Sandbox{}, berm.Errorf(berm.Invalid, "berm.policy stands in the place of allow_internet_access, network.allowOut and network.denyOut: give one or the others")
		case m.Egress.Service == nil:
			return Sandbox{}, m.noNetwork("berm.policy")
		}
		allowed = r.Policy
	}
	granted, err := m.granting(fields)
	if err != nil {
		return Sandbox{}, err
	}
	granted.Credentials = r.Credentials
	if err := m.checkCredentials(ctx, r.Team, r.Credentials); err != nil {
		return Sandbox{}, err
	}
	step("template")
	o.allowed, o.fields, o.granted = allowed, fields, granted
	info, err := m.make(ctx, r, o, step)
	if err != nil && o.begun && ctx.Err() == nil && berm.KindOf(err) != berm.Exhausted {
		m.Log.Warn("a sandbox cannot go on from its template's start command, which runs again", "template", o.template.Alias(), "error", err)
		m.unbegin(o.saved)
		o.saved, o.memory, o.begun = "", false, false
		info, err = m.make(ctx, r, o, step)
	}
	if err == nil && r.Of == nil && o.saved == "" {
		m.beginLater(o.template, info.Level)
	}
	info.Steps = steps
	return info, err
}

// origin is what a sandbox begins with.
type origin struct {
	template berm.Template
	saved    berm.BuildID   // what to begin with; "" for the files of the template
	memory   bool           // it has processes, which go on
	begun    bool           // they are what the template starts
	from     berm.BuildID   // the snapshot that it is; "" for none
	parent   berm.SandboxID // whose fork it is
	allowed  *policy.Policy
	fields   Fields
	granted  Grants
}

// origin finds the snapshot or the template that a request names.
func (m *Manager) origin(ctx context.Context, r *CreateRequest) (o origin, err error) {
	if r.Of != nil {
		o.template = *r.Of
		return o, nil
	}
	snap, ok := m.snapshot(r.Team, r.Template)
	if !ok {
		o.template, err = m.Templates.Resolve(ctx, r.Team, r.Template)
		if err == nil {
			o.saved, o.begun = m.begun(r, &o.template)
			o.memory = o.begun
		}
		return o, err
	}
	if r.Level != "" && r.Level != berm.Auto && r.Level != snap.Level {
		return o, berm.Errorf(berm.Unsupported, "snapshot '%s' is of level %s", r.Template, snap.Level)
	}
	r.Level = snap.Level
	o.template, o.saved, o.memory, o.from = snap.Template, snap.Build, snap.Saved.Memory, snap.Build
	o.template.ID, o.template.BuildID, o.template.Names = snap.TemplateID, snap.Build, nil
	if snap.Name != "" {
		o.template.Names = []string{snap.ID(), snap.Name}
	}
	return o, nil
}

// make makes a sandbox of what was checked.
func (m *Manager) make(ctx context.Context, r CreateRequest, o origin, step func(string)) (Sandbox, error) {
	template, allowed, fields, granted := o.template, o.allowed, o.fields, o.granted
	begin := time.Now().UTC()
	if r.OnDeadline == "" {
		r.OnDeadline = berm.KillAtDeadline
	}
	spec, err := m.spec(&r, template, begin)
	if err != nil {
		return Sandbox{}, err
	}
	if o.saved != "" {
		spec.From, spec.Memory = m.savedDir(o.saved), o.memory
	}
	of := share{r.Team, spec.Limits, false}
	var warm *member
	if r.Of == nil && (spec.From == "" || o.begun) {
		if err := m.hasRoom(ctx, of); err != nil { // what is taken is gone for others, whatever becomes of it
			return Sandbox{}, err
		}
		warm = m.take(ctx, &spec, template.BuildID)
	}
	cu := cleanup.Make()
	defer cu.Clean()
	if warm != nil {
		cu.Add(func() {
			warm.letAdvanceGo()
			m.discard(warm.handle)
			warm.forget()
		})
		o.begun = spec.Memory
		step("pool")
	}
	if err := m.reserve(ctx, spec.ID, of); err != nil {
		return Sandbox{}, err
	}
	cu.Add(func() { m.release(spec.ID) })
	m.owned(spec.ID, r.Team)
	if err := m.emit(spec.ID, r.Actor, audit.SandboxCreate, audit.OK, "", map[string]any{
		"template": template.Alias(), "templateID": template.ID, "level": spec.Level, "limits": spec.Limits, "deadline": spec.Deadline, "from": o.from, "parent": o.parent,
		"start": template.Start, "ready": template.Ready, "warm": warm != nil,
	}); err != nil {
		return Sandbox{}, err
	}
	step("record")
	engineCtx, cancel := context.WithTimeout(ctx, createTime)
	defer cancel()
	var handle berm.Sandbox
	var held berm.Policy
	if warm != nil {
		handle, held = warm.handle, warm.held
	} else {
		if handle, err = m.Engine.Create(engineCtx, spec); err != nil {
			m.tell(spec.ID, r.Actor, audit.SandboxCreate, audit.Failed, err.Error(), nil)
			if engineCtx.Err() != nil && ctx.Err() == nil {
				err = berm.Errorf(berm.Unavailable, "sandbox was not ready within %s: %w", createTime, err)
			}
			if berm.KindOf(err) == berm.NotFound { // to a client that would be the template
				err = berm.Errorf(berm.Unavailable, "sandbox died while it was made: %w", err)
			}
			return Sandbox{}, err
		}
		cu.Add(func() { m.discard(handle) })
		step("engine")
		if held, err = handle.Policy(engineCtx); err != nil {
			return Sandbox{}, err
		}
	}
	if err := ctx.Err(); err != nil { // nobody would ever learn its id
		return Sandbox{}, berm.Errorf(berm.Unavailable, "create was given up: %w", err)
	}
	if err := failpoint.Hit("control.created"); err != nil {
		return Sandbox{}, err
	}
	policies := []audit.Record{record(spec.ID, r.Actor, audit.PolicySet, audit.OK, "", held)}
	s := newSession(m)
	ready := spec.Memory // else what the template starts has yet to begin
	if warm != nil {
		s, ready = warm.session, warm.ready
	}
	s.handle, s.agent = handle, 1
	s.info = Sandbox{
		ID: spec.ID, TemplateID: template.ID, Alias: template.Alias(), TemplateNames: template.Names,
		Level: m.probe(spec.Level).Level, Limits: spec.Limits, Degraded: held.Degraded, State: berm.Creating,
		CreatedAt: begin, StartedAt: time.Now().UTC(), EndAt: spec.Deadline,
		Timeout: r.Timeout, OnDeadline: r.OnDeadline, AutoResume: r.AutoResume, Secure: r.Secure,
		Internet: r.Internet, Network: r.Network.plain(), Grants: granted, Metadata: r.Metadata, MCP: r.MCP, Owner: r.Actor, Team: r.Team, Request: r.Request,
		Env: r.Env, Base: &template, From: o.from, Parent: o.parent, FilesOnly: r.FilesOnly,
		Checkpoints: r.Checkpoints, Warm: warm != nil, Own: r.Of != nil, Begun: o.begun, Boot: m.Boot,
	}
	var warnings []string
	m.mu.Lock()
	secrets := m.secrets // before the broker reads them
	m.mu.Unlock()
	if spec.Link {
		// What it may reach is recorded together with what it is held to: nothing goes on between them.
		network, err := s.firstPolicy(allowed, r.Network.EgressProxy)
		if err != nil {
			return Sandbox{}, err
		}
		policies = append(policies, network)
	}
	if err := audit.EmitAll(m.Audit, policies); err != nil {
		return Sandbox{}, err
	}
	step("policy")
	if spec.Link {
		cu.Add(func() { m.forgetKept(&s.info) })
		cu.Add(s.offline) // the broker may know it when the service does not take it
		if warnings, err = s.goOnline(ctx, fields, r.Network.EgressProxy); err != nil {
			return Sandbox{}, err
		}
		step("network")
	}
	cu.Add(s.forget)
	if !ready {
		if err := s.start(ctx); err != nil {
			return Sandbox{}, err
		}
		step("start")
	}
	s.become(berm.Running)
	if err := s.trySave(); err != nil {
		return Sandbox{}, err
	}
	if err := m.emit(spec.ID, r.Actor, audit.SandboxStart, audit.OK, "", map[string]any{"ms": time.Since(begin).Milliseconds(), "level": s.info.Level}); err != nil {
		return Sandbox{}, err
	}
	cu.Release()
	s.op <- struct{}{} // until its followers are there, as in resume
	m.mu.Lock()
	delete(m.creating, spec.ID)
	m.sessions[spec.ID] = s
	secrets = m.secrets - secrets
	m.mu.Unlock()
	if secrets > 0 && s.online != nil && !granted.empty() { // of those changes nobody told it
		m.work.Go(func() { s.renew(context.WithoutCancel(ctx)) })
	}
	s.attend(ctx)
	<-s.op
	s.boundLine()
	m.work.Go(func() { s.log("info", "Sandbox started", map[string]string{"template": template.Alias()}) })
	step("save")
	info := m.withTokens(s.snapshot())
	info.Warnings = warnings
	return info, nil
}

// attend follows a sandbox whose processes have just begun.
func (s *session) attend(ctx context.Context) {
	s.traceNow(ctx)
	s.mu.Lock()
	looking := s.writable != nil // in advance
	s.mu.Unlock()
	var err error
	if !looking {
		err = s.openLook(ctx)
	}
	s.followUp(err)
}

// traceNow is trace of processes that have just begun.
func (s *session) traceNow(ctx context.Context) {
	s.mu.Lock()
	before := s.traced
	s.mu.Unlock()
	if before || s.m.Processes == nil {
		return
	}
	status, err := s.current().Status(ctx)
	if err != nil {
		s.m.Log.Warn("the sandbox does not tell its first process", "sandbox", s.info.ID, "error", err)
	}
	s.trace(status.First, false)
}

// trace has the processes inside recorded until forget, if they are not yet; late says that some
// ran before. A sandbox whose processes cannot be followed lives on, and a gap in its log tells.
func (s *session) trace(first *berm.First, late bool) {
	s.mu.Lock()
	before := s.traced
	s.traced = true
	s.mu.Unlock()
	if before || s.m.Processes == nil {
		return
	}
	if err := s.m.Processes.Follow(s.info.ID, first, late); err != nil {
		s.m.tell(s.info.ID, system, audit.Gap, audit.OK, err.Error(), map[string]any{"source": "processes"})
	}
}

// forget ends what trace began.
func (s *session) forget() {
	s.mu.Lock()
	s.traced = false
	s.mu.Unlock()
	if s.m.Processes != nil {
		s.m.Processes.Forget(s.info.ID)
	}
}

// followUp follows a sandbox until its session or its processes end. looking is what the first
// look said.
func (s *session) followUp(looking error) {
	run, stop := context.WithCancel(s.m.ctx)
	looked := make(chan struct{})
	s.mu.Lock()
	s.stop, s.looked = stop, looked
	s.mu.Unlock()
	follow := func(f func()) {
		s.followers.Add(1)
		s.m.work.Go(func() {
			defer s.followers.Done()
			f()
		})
	}
	follow(func() { s.watch(run) })
	follow(func() {
		defer close(looked)
		s.keepLook(run, looking)
	})
	if s.info.Checkpoints.Every > 0 { // never changes
		follow(func() { s.keepCheckpoints(run) })
	}
	if s.online != nil && s.m.Egress.Service != nil {
		follow(s.keepOnline)
	}
}

// discard kills a sandbox that was made but cannot be kept.
func (m *Manager) discard(handle berm.Sandbox) {
	ctx, cancel := context.WithTimeout(context.Background(), transitionTime)
	defer cancel()
	id := handle.ID()
	if _, err := handle.Kill(ctx, berm.ReasonKilled); err != nil {
		m.Log.Error("a sandbox that could not be kept is left until the next start", "sandbox", id, "error", err)
	}
	_ = handle.Close()
	m.tell(id, system, audit.SandboxExit, audit.OK, "could not be kept", nil)
	// It may have been saved already.
	if row, err := m.Store.Sandbox(ctx, id); err == nil {
		row.Killed, row.Request = time.Now(), "" // the same request may make another
		if err := m.Store.SaveSandbox(ctx, row); err != nil {
			m.Log.Error("saving a sandbox failed", "sandbox", id, "error", err)
		}
	}
}

// Get returns a living sandbox, once it is in no transition.
func (m *Manager) Get(ctx context.Context, id berm.SandboxID) (Sandbox, error) {
	s, err := m.session(id)
	if err != nil {
		return Sandbox{}, err
	}
	if _, err := s.settled(ctx); err != nil {
		return Sandbox{}, err
	}
	info := s.snapshot()
	if info.State == berm.Killed {
		return Sandbox{}, NotFound(id)
	}
	return m.withTokens(info), nil
}

// Inspect returns a sandbox that lives or died a short time ago.
func (m *Manager) Inspect(ctx context.Context, id berm.SandboxID) (Sandbox, error) {
	if s, err := m.session(id); err == nil {
		return s.snapshot(), nil
	}
	row, err := m.Store.Sandbox(ctx, id)
	if err != nil {
		if berm.KindOf(err) == berm.NotFound {
			err = NotFound(id)
		}
		return Sandbox{}, err
	}
	var info Sandbox
	if err := json.Unmarshal(row.Record, &info); err != nil {
		return Sandbox{}, berm.Errorf(berm.Internal, "stored sandbox %s: %w", id, err)
	}
	return info, nil
}

// Death waits for the end of a sandbox that is dying, as long as ctx lasts, and returns it as it was
// then. NotFound when there is no such sandbox, or it lives.
func (m *Manager) Death(ctx context.Context, id berm.SandboxID) (Sandbox, error) {
	if s, err := m.session(id); err == nil {
		select {
		case <-s.gone:
		case <-ctx.Done():
			return Sandbox{}, NotFound(id)
		}
	}
	info, err := m.Inspect(ctx, id)
	if err == nil && info.State != berm.Killed {
		err = NotFound(id)
	}
	return info, err
}

// Kill ends a sandbox; nothing is left of it when Kill returns. It is not refused
// when the audit log fails: ending a sandbox is how harm is stopped.
func (m *Manager) Kill(ctx context.Context, id berm.SandboxID, actor audit.Actor) error {
	s, err := m.session(id)
	if err != nil {
		return err
	}
	return s.kill(ctx, actor)
}

// Pause stops a running sandbox and keeps all of it: on disk where its level can save memory,
// else by freezing it. Conflict when it is paused, or another caller is pausing it.
func (m *Manager) Pause(ctx context.Context, id berm.SandboxID, actor audit.Actor) error {
	return m.pause(ctx, id, false, actor)
}

// PauseToFiles ends the processes of a running sandbox and keeps its files, on disk: it starts
// anew when it is resumed. Kinds as of Pause, and Unsupported when its disk cannot be saved.
func (m *Manager) PauseToFiles(ctx context.Context, id berm.SandboxID, actor audit.Actor) error {
	return m.pause(ctx, id, true, actor)
}

// DropMemory has a paused sandbox start anew from its files when it is resumed. One that runs is
// left alone.
func (m *Manager) DropMemory(ctx context.Context, id berm.SandboxID, actor audit.Actor) error {
	s, err := m.session(id)
	if err != nil {
		return err
	}
	state, err := s.settled(ctx)
	if err != nil || state != berm.Paused || s.snapshot().SavedAs != "" && !s.snapshot().SavedMemory {
		return err
	}
	if err := s.begin(berm.Paused, berm.Resuming); err != nil {
		return err
	}
	data := map[string]any{"memory": false}
	if err = m.emit(id, actor, audit.SandboxPause, audit.OK, "", data); err == nil {
		if err = s.dropMemory(ctx); err != nil {
			m.tell(id, actor, audit.SandboxPause, audit.Failed, err.Error(), data)
		}
	}
	return errors.Join(err, s.end(berm.Paused, nil))
}

func (m *Manager) pause(ctx context.Context, id berm.SandboxID, filesOnly bool, actor audit.Actor) error {
	s, err := m.session(id)
	if err != nil {
		return err
	}
	if s.state() == berm.Resuming {
		if _, err := s.settled(ctx); err != nil {
			return err
		}
	}
	return s.pause(ctx, filesOnly, actor)
}

// agentTime is how long the guest agent of a sandbox may take to answer.
const agentTime = 5 * time.Second

// RequireAgent fails with Unavailable when the guest agent of a running sandbox does
// not answer.
func (m *Manager) RequireAgent(ctx context.Context, id berm.SandboxID) error {
	s, err := m.session(id)
	if err != nil {
		return err
	}
	if state, err := s.settled(ctx); err != nil || state != berm.Running {
		return err // pausing tells what is wrong
	}
	ctx, cancel := context.WithTimeout(ctx, agentTime)
	defer cancel()
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return s.current().Dial(ctx, berm.AgentPort)
	}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent/health", nil)
	if err != nil {
		return berm.Errorf(berm.Internal, "guest agent: %w", err)
	}
	answer, err := transport.RoundTrip(request)
	if err != nil {
		return berm.Errorf(berm.Unavailable, "the guest agent does not answer: %w", err)
	}
	answer.Body.Close()
	if answer.StatusCode >= 300 {
		return berm.Errorf(berm.Unavailable, "the guest agent answers %s", answer.Status)
	}
	return nil
}

// Connect makes a sandbox run until at least timeout from now: it resumes a paused
// one, and only ever extends the time of a running one. It waits for a transition
// under way.
func (m *Manager) Connect(ctx context.Context, id berm.SandboxID, timeout time.Duration, actor audit.Actor) (info Sandbox, resumed bool, err error) {
	if err := m.checkTimeout(timeout); err != nil {
		return Sandbox{}, false, err
	}
	s, err := m.session(id)
	if err != nil {
		return Sandbox{}, false, err
	}
	for {
		state, err := s.settled(ctx)
		if err != nil {
			return Sandbox{}, false, err
		}
		switch state {
		case berm.Running:
			err = s.setDeadline(ctx, actor, func(now, end time.Time) time.Time { return later(now.Add(timeout), end) })
		case berm.Paused:
			err = s.resume(ctx, timeout, actor, "connect")
			resumed = err == nil
		default:
			err = NotFound(id)
		}
		// Somebody else changed the state in between: look again.
		if berm.KindOf(err) == berm.Conflict && err != nil && s.state() != state {
			continue
		}
		if err != nil {
			return Sandbox{}, false, err
		}
		return m.withTokens(s.snapshot()), resumed, nil
	}
}

// Resume lets a paused sandbox go on. Conflict when it runs.
func (m *Manager) Resume(ctx context.Context, id berm.SandboxID, timeout time.Duration, actor audit.Actor) (Sandbox, error) {
	if err := m.checkTimeout(timeout); err != nil {
		return Sandbox{}, err
	}
	s, err := m.session(id)
	if err != nil {
		return Sandbox{}, err
	}
	if s.state() == berm.Pausing {
		if _, err := s.settled(ctx); err != nil {
			return Sandbox{}, err
		}
	}
	if err := s.resume(ctx, timeout, actor, "resume"); err != nil {
		return Sandbox{}, err
	}
	return m.withTokens(s.snapshot()), nil
}

// SetTimeout makes the sandbox end timeout from now, sooner or later than before.
func (m *Manager) SetTimeout(ctx context.Context, id berm.SandboxID, timeout time.Duration, actor audit.Actor) error {
	return m.moveDeadline(ctx, id, timeout, actor, func(now, _ time.Time) time.Time { return now.Add(timeout) })
}

// Refresh makes the sandbox live at least until timeout from now.
func (m *Manager) Refresh(ctx context.Context, id berm.SandboxID, timeout time.Duration, actor audit.Actor) error {
	return m.moveDeadline(ctx, id, timeout, actor, func(now, end time.Time) time.Time { return later(now.Add(timeout), end) })
}

func (m *Manager) moveDeadline(ctx context.Context, id berm.SandboxID, timeout time.Duration, actor audit.Actor, choose func(now, end time.Time) time.Time) error {
	if err := m.checkTimeout(timeout); err != nil {
		return err
	}
	s, err := m.session(id)
	if err != nil {
		return err
	}
	if _, err := s.settled(ctx); err != nil {
		return err
	}
	return s.setDeadline(ctx, actor, choose)
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// Policy returns what a sandbox is held to.
func (m *Manager) Policy(ctx context.Context, id berm.SandboxID) (berm.Policy, error) {
	s, err := m.session(id)
	if err != nil {
		return berm.Policy{}, err
	}
	return s.current().Policy(ctx)
}

func (s *session) current() berm.Sandbox {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.handle
}

// Logs returns lines of the log of a sandbox that lives or died a short time ago.
func (m *Manager) Logs(ctx context.Context, id berm.SandboxID, from time.Time, backward bool, limit int) ([]store.LogLine, error) {
	if _, err := m.Inspect(ctx, id); err != nil {
		return nil, err
	}
	return m.Store.Logs(ctx, id, from, backward, limit)
}

// Route is the way into one sandbox for traffic from outside.
type Route struct {
	ID           berm.SandboxID
	Owner        audit.Actor
	AccessToken  string // what the guest agent wants to see; "" when it is open
	TrafficToken string // what requests to user ports must carry; "" when they are public
	MaskHost     string
	HTTPSPorts   []uint16
	s            *session
}

// Route finds the way into a sandbox. It wakes nothing yet.
func (m *Manager) Route(id berm.SandboxID) (*Route, error) {
	s, err := m.session(id)
	if err != nil {
		return nil, err
	}
	info := m.withTokens(s.snapshot())
	return &Route{ID: id, Owner: info.Owner, AccessToken: info.AccessToken, TrafficToken: info.TrafficToken, MaskHost: info.Network.MaskHost, HTTPSPorts: info.Network.HTTPSPorts, s: s}, nil
}

// Enter waits until the sandbox runs and returns a context that ends when streams
// into it must be cut: at pause and at death. It wakes a paused sandbox that has
// auto-resume; of many callers one does, the others wait. NotFound when the sandbox
// is dead or stays paused.
func (r *Route) Enter(ctx context.Context) (context.Context, error) {
	s := r.s
	for {
		s.mu.Lock()
		state, life := s.info.State, s.life
		wakes, timeout := s.info.AutoResume && (s.info.SavedAs == "" || s.info.SavedMemory), max(s.info.Timeout, minWakeTimeout)
		s.mu.Unlock()
		switch {
		case state == berm.Running:
			return life, nil
		case state == berm.Resuming, state == berm.Pausing && wakes:
			if _, err := s.settled(ctx); err != nil {
				return nil, err
			}
		case state == berm.Paused && wakes:
			err := s.resume(ctx, min(timeout, s.m.MaxTimeout), system, "traffic")
			if err != nil && berm.KindOf(err) != berm.Conflict {
				return nil, err
			}
		default:
			return nil, NotFound(r.ID)
		}
	}
}

// Dial opens a byte stream to a port inside the sandbox.
func (r *Route) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	if port == berm.AgentPort {
		if conn := r.s.takeLine(); conn != nil {
			return conn, nil
		}
	}
	conn, err := r.s.current().Dial(ctx, port)
	var berr *berm.Error
	if errors.As(err, &berr) && berr.Kind == berm.Conflict {
		r.s.check(ctx) // paused a moment ago
	}
	return conn, err
}
