// Package control runs sessions: it makes sandboxes on an engine and keeps their
// life cycle, deadlines, metrics and logs.
package control

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"log/slog"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/store"
)

// Templates finds the templates that sandboxes are made from.
type Templates interface {
	// Resolve finds a template by what a team calls it: an id, a name or name:tag. NotFound names the
	// reference, also where the template is not for the team.
	Resolve(ctx context.Context, team berm.Team, ref string) (berm.Template, error)
	List(ctx context.Context) ([]berm.Template, error)
}

// Store keeps sessions and their log lines across restarts.
type Store interface {
	SaveSandbox(ctx context.Context, s store.Sandbox) error
	LivingSandboxes(ctx context.Context) ([]store.Sandbox, error)
	Sandbox(ctx context.Context, id berm.SandboxID) (store.Sandbox, error)
	SandboxOf(ctx context.Context, request string) (store.Sandbox, error)
	Prune(ctx context.Context, before time.Time) error
	// Team returns a team with its limits. NotFound when there is none.
	Team(ctx context.Context, name berm.Team) (store.Team, error)
	// SaveSnapshot stores a snapshot and forgets another, unless that is "".
	SaveSnapshot(ctx context.Context, s store.Snapshot, before berm.BuildID) error
	Snapshots(ctx context.Context) ([]store.Snapshot, error)
	DeleteSnapshot(ctx context.Context, build berm.BuildID) error
	AppendLog(ctx context.Context, id berm.SandboxID, line store.LogLine) error
	Logs(ctx context.Context, id berm.SandboxID, from time.Time, backward bool, limit int) ([]store.LogLine, error)
}

// Processes records what runs inside sandboxes. It holds up nothing that happens there.
type Processes interface {
	// Follow begins with a sandbox. late says that it has run unseen until now.
	Follow(id berm.SandboxID, first *berm.First, late bool) error
	// Forget ends it, when what is known is recorded.
	Forget(id berm.SandboxID)
}

// Config is what a Manager is made of.
type Config struct {
	Engine    berm.Engine
	Templates Templates
	Store     Store
	Audit     audit.Emitter
	// Blobs takes the content of files that sandboxes wrote. nil leaves what they wrote
	// unrecorded.
	Blobs audit.Blobs
	// SnapshotDir is where snapshots lie, and what is kept of sandboxes that are paused without
	// memory; "" is nowhere: they are refused.
	SnapshotDir string
	// Depot is a directory on another file system where all of that lies from now on, with a
	// link in SnapshotDir; "" is none.
	Depot string
	// CheckpointBytes bounds the checkpoints of one sandbox together; 0 does not.
	CheckpointBytes int64
	// HoldLayers keeps the layers of a template for as long as the path alive exists; nil does not.
	HoldLayers func(ctx context.Context, name, alive string, t berm.Template) error
	Log        *slog.Logger
	// Seed is what access tokens are derived from, so that they need no storage and
	// survive pause and restart.
	Seed []byte
	// Level is used when a request names none.
	Level berm.Level
	// MaxSandboxes bounds the sandboxes that exist at once. Paused ones count: they
	// keep their memory.
	MaxSandboxes int
	MaxTimeout   time.Duration
	// MaxLimits bounds what a request may ask for over the template's defaults. Zero
	// fields do not bound.
	MaxLimits berm.Limits
	// RequireLimits refuses a sandbox when its template has a limit by default that the
	// host cannot enforce. Otherwise it is made without, and tells so. A limit that the
	// request names is never left out.
	RequireLimits bool
	Egress        Egress
	// Processes records the processes inside; nil does not.
	Processes Processes
	// Owned is told whose a sandbox is before anything is recorded of it, and again after a restart. It
	// is called concurrently; nil is not.
	Owned func(id berm.SandboxID, team berm.Team)
	// Boot names the run of the host's kernel, from its start to its end; "" is not known.
	Boot string
	// Pools are sandboxes that are made in advance.
	Pools []Pool
	// SampleEvery is the time between two metrics samples.
	SampleEvery time.Duration
}

const (
	// keepDead is how long a dead sandbox's reason and logs are kept.
	keepDead = time.Hour
	// transitionTime bounds a pause or resume in the engine. They go on when the
	// client that asked for them is gone: half a transition helps nobody.
	transitionTime = 30 * time.Second
	// createTime bounds a create in the engine.
	createTime = 60 * time.Second
	// minWakeTimeout is the least time to live of a sandbox that traffic woke.
	minWakeTimeout = 5 * time.Minute
)

// Manager holds the sessions of one server. The methods are safe for concurrent
// use.
type Manager struct {
	Config
	ctx  context.Context // ends with Close
	stop context.CancelFunc
	work sync.WaitGroup

	mu       sync.Mutex
	sessions map[berm.SandboxID]*session
	creating map[berm.SandboxID]share
	secrets  int // how often one has changed
	pools    []*pool
	tend     chan struct{} // has the pools looked at
	shelf    *shelf
	once     map[string]*creation // under way, by key of the request
	// beginnings are directories of snapshots; "" is one that is being made or cannot be.
	beginnings map[beginning]berm.BuildID
	building   map[berm.BuildID]bool // are no templates yet, and may have a beginning
}

// New makes a Manager. Start must be called before anything else.
func New(c Config) *Manager {
	m := &Manager{Config: c, sessions: map[berm.SandboxID]*session{}, creating: map[berm.SandboxID]share{}, once: map[string]*creation{}, beginnings: map[beginning]berm.BuildID{}, building: map[berm.BuildID]bool{}, shelf: newShelf(), tend: make(chan struct{}, 1)}
	for _, p := range c.Pools {
		m.pools = append(m.pools, &pool{Pool: p, asked: time.Now()})
	}
	m.ctx, m.stop = context.WithCancel(context.Background())
	return m
}

// Start finds the sandboxes of an earlier server again, removes what is left of
// dead ones, and begins to take metrics.
func (m *Manager) Start(ctx context.Context) error {
	stored, err := m.Store.LivingSandboxes(ctx)
	if err != nil {
		return err
	}
	if err := m.findSnapshots(ctx, stored); err != nil {
		return err
	}
	var group errgroup.Group
	group.SetLimit(8)
	known := map[berm.SandboxID]bool{}
	for _, s := range stored {
		known[s.ID] = true
		group.Go(func() error { return m.adopt(ctx, s) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	if err := m.forgetStrangers(ctx, known); err != nil {
		return err
	}
	held, err := m.Engine.List(ctx)
	if err != nil {
		return err
	}
	for _, id := range held {
		if known[id] {
			continue
		}
		group.Go(func() error {
			m.Log.Warn("removing a sandbox that no session owns", "sandbox", id)
			if _, err := m.evict(ctx, id, berm.ReasonKilled); err != nil {
				// Its host ids stay leased, so it is in nobody's way.
				m.Log.Error("removing a sandbox failed", "sandbox", id, "error", err)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	m.work.Go(m.sampleLoop)
	m.work.Go(m.pruneLoop)
	if len(m.pools) > 0 {
		m.work.Go(m.keepPools)
	}
	return nil
}

// adopt makes a session of a stored sandbox, or records its death.
func (m *Manager) adopt(ctx context.Context, stored store.Sandbox) error {
	s := newSession(m)
	if err := json.Unmarshal(stored.Record, &s.info); err != nil {
		return berm.Errorf(berm.Internal, "stored sandbox %s: %w", stored.ID, err)
	}
	m.owned(s.info.ID, s.info.Team)
	if s.info.SavedAs != "" {
		return m.adoptResting(ctx, s)
	}
	end := func(reason berm.Reason, why string) {
		s.info.State = berm.Killed
		m.work.Go(func() {
			s.unseen(system, "end", berm.Errorf(berm.NotFound, "it ended while no server ran"))
			close(s.looked)
			s.bury(berm.Exit{Reason: reason, Code: -1, Detail: why, At: time.Now().UTC()})
		})
	}
	if s.info.Own {
		end(berm.ReasonKilled, "the server that worked with it ended")
		return nil
	}
	handle, status, err := m.open(ctx, stored.ID)
	if err != nil {
		m.Log.Warn("sandbox did not survive", "sandbox", stored.ID, "error", err)
		why := "lost while no server ran"
		if s.info.Boot != "" && s.info.Boot != m.Boot {
			why = "lost when the machine restarted"
		}
		end(berm.ReasonCrash, why)
		return nil
	}
	s.handle, s.agent = handle, status.Agent
	if s.info.Policy != nil {
		s.online = newOnline()
	}
	unsaved := false
	switch {
	case status.State != berm.Paused:
		s.info.State = berm.Running
	case s.info.State != berm.Paused && (s.info.FilesOnly || s.keepsMemory()): // its deadline came while no server ran
		s.info.State, unsaved = berm.Pausing, true
		s.cut()
	default:
		s.info.State = berm.Paused
		s.cut()
	}
	// The monitor is the owner of the deadline; ours may be older.
	if d := status.Deadline.Sub(s.info.EndAt); !status.Deadline.IsZero() && d.Abs() > time.Millisecond {
		s.info.EndAt = status.Deadline
	}
	m.mu.Lock()
	m.sessions[s.info.ID] = s
	m.mu.Unlock()
	s.trace(status.First, true)
	s.followUp(s.openLook(ctx))
	if s.online != nil && m.Egress.Service == nil {
		m.Log.Error("a sandbox has no network any more", "sandbox", stored.ID, "reason", m.Egress.Missing)
	}
	if unsaved {
		m.work.Go(s.rest)
	}
	return nil
}

// adoptResting makes a session of a sandbox that is kept on disk. Processes that are
// still there go: what is kept is older than what they did in a resume that nobody was told of.
func (m *Manager) adoptResting(ctx context.Context, s *session) error {
	if _, err := m.evict(ctx, s.info.ID, berm.ReasonKilled); err != nil {
		m.Log.Error("ending the processes of a paused sandbox failed", "sandbox", s.info.ID, "error", err)
	}
	s.handle, s.info.State = resting{s.info.ID}, berm.Paused
	close(s.looked)
	s.cut()
	if s.info.Policy != nil {
		s.online = newOnline()
		s.offline()
	}
	m.mu.Lock()
	m.sessions[s.info.ID] = s
	m.mu.Unlock()
	return nil
}

// open opens a sandbox, and tries again while the host is too busy to answer.
func (m *Manager) open(ctx context.Context, id berm.SandboxID) (handle berm.Sandbox, status berm.Status, err error) {
	for wait := 50 * time.Millisecond; ; wait *= 2 {
		if handle, err = m.Engine.Open(ctx, id); err == nil {
			if status, err = handle.Status(ctx); err == nil && status.State != berm.Killed {
				return handle, status, nil
			}
			_ = handle.Close()
			if err == nil {
				err = berm.Errorf(berm.NotFound, "sandbox %s is dead", id)
			}
		}
		if berm.KindOf(err) != berm.Unavailable || wait > 2*time.Second || !sleep(ctx, wait) {
			return nil, status, err
		}
	}
}

// evict ends a sandbox to which there is no handle, dead or alive.
func (m *Manager) evict(ctx context.Context, id berm.SandboxID, reason berm.Reason) (berm.Exit, error) {
	handle, err := m.Engine.Open(ctx, id)
	if err != nil {
		return m.Engine.Remove(ctx, id)
	}
	defer func() { _ = handle.Close() }()
	return handle.Kill(ctx, reason)
}

// Close lets all sandboxes go and leaves them alive.
func (m *Manager) Close() {
	m.stop()
	m.mu.Lock()
	sessions := m.all()
	m.mu.Unlock()
	for _, s := range sessions {
		s.mu.Lock()
		s.cut()
		s.mu.Unlock()
	}
	m.work.Wait()
	for saved := range m.allBegun() {
		m.unbegin(saved)
	}
	var group errgroup.Group
	for _, s := range sessions {
		group.Go(func() error { s.offline(); return nil })
	}
	_ = group.Wait() // none fails
	for _, s := range sessions {
		_ = s.handle.Close()
	}
}

// all returns the sessions. The caller holds m.mu.
func (m *Manager) all() []*session {
	sessions := make([]*session, 0, len(m.sessions))
	for _, s := range m.sessions {
		sessions = append(sessions, s)
	}
	return sessions
}

func (m *Manager) session(id berm.SandboxID) (*session, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s := m.sessions[id]; s != nil {
		return s, nil
	}
	return nil, NotFound(id)
}

// NotFound is about a sandbox that is not there, or is of another team.
func NotFound(id berm.SandboxID) error {
	return berm.Errorf(berm.NotFound, "Sandbox %q doesn't exist or you don't have access to it", string(id))
}

// owned tells whose a sandbox is.
func (m *Manager) owned(id berm.SandboxID, team berm.Team) {
	if m.Owned != nil {
		m.Owned(id, team)
	}
}

// reserve counts a sandbox that is about to be made, or to go on from disk, against what the server and
// its team may have, until release.
func (m *Manager) reserve(ctx context.Context, id berm.SandboxID, s share) error {
	team, err := m.Store.Team(ctx, s.team)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.fitsTeam(s, team.Limits); err != nil {
		return err
	}
	held := m.held()
	if m.MaxSandboxes > 0 && held+m.pooled() >= m.MaxSandboxes && !m.giveWay() {
		return berm.Errorf(berm.Exhausted, "you have reached the maximum number of concurrent sandboxes (%d)", m.MaxSandboxes).
			WithHint("kill a sandbox, or raise max-sandboxes; paused sandboxes keep their memory and count")
	}
	m.creating[id] = s
	return nil
}

// hasRoom refuses a sandbox for which its team has no room at the moment.
func (m *Manager) hasRoom(ctx context.Context, s share) error {
	team, err := m.Store.Team(ctx, s.team)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.fitsTeam(s, team.Limits)
}

func (m *Manager) release(id berm.SandboxID) {
	m.mu.Lock()
	delete(m.creating, id)
	m.mu.Unlock()
}

// held counts the sandboxes that have memory, or soon will. The caller holds m.mu.
func (m *Manager) held() int {
	held := len(m.creating)
	for id, s := range m.sessions {
		if _, waking := m.creating[id]; !waking && s.snapshot().SavedAs == "" { // else it takes disk alone
			held++
		}
	}
	return held
}

// Running returns how many sandboxes are running and how many exist.
func (m *Manager) Running() (running, all int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.sessions {
		if s.state() == berm.Running {
			running++
		}
	}
	return running, len(m.sessions)
}

// token derives a secret of one sandbox.
func (m *Manager) token(purpose string, id berm.SandboxID) string {
	mac := hmac.New(sha256.New, m.Seed)
	mac.Write([]byte(purpose + "\x00" + string(id)))
	return hex.EncodeToString(mac.Sum(nil))
}

// emit records an action. A control action is refused when it fails.
func (m *Manager) emit(id berm.SandboxID, actor audit.Actor, what audit.Type, outcome audit.Outcome, reason string, data any) error {
	return m.Audit.Emit(record(id, actor, what, outcome, reason, data))
}

func record(id berm.SandboxID, actor audit.Actor, what audit.Type, outcome audit.Outcome, reason string, data any) audit.Record {
	return audit.Record{
		Sandbox: id, Actor: actor, Type: what, Src: "control", Trust: audit.TrustHost,
		Outcome: outcome, Reason: reason, Data: data,
	}
}

// tell is emit for what has happened already and cannot be refused any more.
func (m *Manager) tell(id berm.SandboxID, actor audit.Actor, what audit.Type, outcome audit.Outcome, reason string, data any) {
	if err := m.emit(id, actor, what, outcome, reason, data); err != nil {
		m.Log.Error("audit record lost", "sandbox", id, "type", what, "error", err)
	}
}

var system = audit.Actor{Type: "system"}

func (m *Manager) pruneLoop() {
	for sleep(m.ctx, keepDead/10) {
		if err := m.Store.Prune(m.ctx, time.Now().Add(-keepDead)); err != nil {
			m.Log.Error("forgetting dead sandboxes failed", "error", err)
		}
		m.pruneCheckpoints(m.ctx)
		m.PruneBegun(m.ctx)
	}
}

// Match returns the sandbox whose access token fits, as clients that send a token
// or a signature but no sandbox id need it. Sandboxes without a token fit nothing.
func (m *Manager) Match(fits func(token string) bool) (berm.SandboxID, bool) {
	m.mu.Lock()
	var secured []berm.SandboxID
	for id, s := range m.sessions {
		if s.info.Secure { // never changes
			secured = append(secured, id)
		}
	}
	m.mu.Unlock()
	slices.Sort(secured)
	for _, id := range secured {
		if fits(m.token("access", id)) {
			return id, true
		}
	}
	return "", false
}

func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
