package control

import (
	"bytes"
	"context"
	"errors"
	"os"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cleanup"
	"github.com/berm-sandbox/berm/internal/failpoint"
)

// Pool has sandboxes of one template and level made before somebody asks for them.
type Pool struct {
	Template string     // id, name or name:tag
	Level    berm.Level // "" is the server's default
	Size     int        // how many wait
}

const (
	// memberLife is how long a waiting sandbox outlives the server that made it.
	memberLife = 10 * time.Minute
	// poolCheck is the time between two looks at the waiting sandboxes.
	poolCheck = 30 * time.Second
	// poolDelay leaves the processors to the first command of the sandbox that was taken.
	poolDelay = 20 * time.Millisecond
	// poolPatience is how long a pool waits for creations under way before it makes one itself.
	poolPatience = time.Second
	// poolIdle is after how long a pool that nobody asks keeps one sandbox only.
	poolIdle = time.Hour
	// poolReserve is what of the host's memory, in bytes, must be available for one more.
	poolReserve = 512 << 20
)

// pool is a Pool at work. What is not atomic is under the lock of the manager.
type pool struct {
	Pool
	members      []*member
	hits, misses atomic.Int64
	asked        time.Time // when it was asked last, or began
	template     berm.TemplateID
	broken       string    // why none can be made, to be told once
	plain        time.Time // until when those that are made do not begin what the template starts
}

// member is a sandbox that nobody owns yet.
type member struct {
	*session
	spec  berm.Spec
	held  berm.Policy
	ready bool // what the template starts has begun
	// setting is held over each change of the deadline, so that the owner's is the last.
	setting sync.Mutex
}

// PoolState is what a pool is at a moment.
type PoolState struct {
	Pool
	Waiting      int
	Hits, Misses int64 // creations that found one waiting, and that did not
}

// Pools tells of all pools.
func (m *Manager) Pools() []PoolState {
	m.mu.Lock()
	defer m.mu.Unlock()
	states := make([]PoolState, len(m.pools))
	for i, p := range m.pools {
		states[i] = PoolState{Pool: p.Pool, Waiting: len(p.members), Hits: p.hits.Load(), Misses: p.misses.Load()}
	}
	return states
}

// common is what of a spec cannot be given to a sandbox later. Whether it goes on with what its
// template starts or began that itself is no difference.
func (m *Manager) common(spec berm.Spec) berm.Spec {
	spec.From, spec.Memory = "", false
	spec.Level = m.probe(spec.Level).Level
	spec.ID, spec.Hostname, spec.IDs, spec.Deadline = "", "", berm.IDRange{}, time.Time{}
	spec.Guest = berm.GuestConfig{TemplateID: spec.Guest.TemplateID, User: spec.Guest.User, Workdir: spec.Guest.Workdir}
	return spec
}

// take gives the sandbox of spec, whose identity becomes that of one that waited, or returns nil
// when none of the same build fits. It is the caller's then.
func (m *Manager) take(ctx context.Context, spec *berm.Spec, build berm.BuildID) *member {
	if len(m.Config.Pools) == 0 {
		return nil
	}
	wanted := m.common(*spec)
	for {
		p, taken := m.pop(wanted, build)
		if taken == nil {
			if p != nil {
				p.misses.Add(1)
				m.tendPools()
			}
			return nil
		}
		given := *spec
		given.ID, given.Hostname, given.From, given.Memory = taken.spec.ID, taken.spec.Hostname, taken.spec.From, taken.spec.Memory
		given.Guest.SandboxID = given.ID
		if given.Guest.AccessToken != "" {
			given.Guest.AccessToken = m.token("access", given.ID)
		}
		var group errgroup.Group
		group.Go(func() error { return taken.initAgent(ctx, "", given.Guest) })
		group.Go(func() error {
			taken.setting.Lock()
			defer taken.setting.Unlock()
			return taken.handle.SetDeadline(ctx, given.Deadline)
		})
		err := group.Wait()
		m.tendPools()
		if err == nil {
			p.hits.Add(1)
			*spec = given
			return taken
		}
		m.Log.Warn("a sandbox of the pool is of no use", "template", p.Template, "error", err)
		m.work.Go(func() { m.dismiss(taken) })
		if ctx.Err() != nil {
			return nil
		}
	}
}

// pop takes a member that fits from its pool. It returns the pool that was asked, nil for none.
func (m *Manager) pop(wanted berm.Spec, build berm.BuildID) (*pool, *member) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var asked *pool
	for _, p := range m.pools {
		if p.template != wanted.Guest.TemplateID || m.poolLevel(p) != wanted.Level {
			continue
		}
		asked, p.asked = p, time.Now()
		for i, candidate := range p.members {
			if m.fits(candidate, wanted, build) {
				p.members = append(p.members[:i:i], p.members[i+1:]...)
				return p, candidate
			}
		}
	}
	return asked, nil
}

// fits says whether a member is what a spec and a build of a template make, up to what can be given later.
func (m *Manager) fits(waiting *member, wanted berm.Spec, build berm.BuildID) bool {
	return waiting.info.Base.BuildID == build && reflect.DeepEqual(m.common(waiting.spec), wanted)
}

func (m *Manager) poolLevel(p *pool) berm.Level {
	if p.Level == "" {
		return m.probe(m.Level).Level
	}
	return m.probe(p.Level).Level
}

// pooled counts the members of all pools. The caller holds m.mu.
func (m *Manager) pooled() (n int) {
	for _, p := range m.pools {
		n += len(p.members)
	}
	return n
}

// giveWay lets a waiting sandbox go for one that somebody wants, and says whether there was one.
// The caller holds m.mu.
func (m *Manager) giveWay() bool {
	for _, p := range m.pools {
		if n := len(p.members); n > 0 {
			out := p.members[n-1]
			p.members = p.members[:n-1]
			m.work.Go(func() { m.dismiss(out) })
			return true
		}
	}
	return false
}

// dismiss ends a sandbox that nobody got. What stays is removed at the next start.
func (m *Manager) dismiss(out *member) {
	ctx, cancel := context.WithTimeout(context.Background(), transitionTime)
	defer cancel()
	out.letAdvanceGo()
	if _, err := out.handle.Kill(ctx, berm.ReasonKilled); err != nil {
		m.Log.Error("ending a sandbox of a pool failed", "sandbox", out.spec.ID, "error", err)
	}
	out.forget()
	_ = out.handle.Close()
}

// tendPools has the pools looked at soon.
func (m *Manager) tendPools() {
	select {
	case m.tend <- struct{}{}:
	default:
	}
}

// keepPools fills the pools, one sandbox after the other, until the manager is closed, and ends
// all that wait then.
func (m *Manager) keepPools() {
	for next := time.NewTimer(0); ; next.Reset(poolCheck) {
		select {
		case <-m.tend:
			sleep(m.ctx, poolDelay)
		case <-next.C:
			m.checkMembers()
		case <-m.ctx.Done():
			m.mu.Lock()
			pools := m.pools
			m.pools = nil
			m.mu.Unlock()
			var group errgroup.Group
			for _, p := range pools {
				for _, out := range p.members {
					group.Go(func() error { m.dismiss(out); return nil })
				}
			}
			_ = group.Wait() // none fails
			return
		}
		for _, p := range m.pools { // changed here alone
			m.fill(p)
		}
	}
}

// checkMembers lets those go that do not answer, and gives the others time.
func (m *Manager) checkMembers() {
	m.mu.Lock()
	var all []*member
	for _, p := range m.pools {
		all = append(all, p.members...)
	}
	m.mu.Unlock()
	for _, waiting := range all {
		if err := m.prolong(waiting); err != nil && m.ctx.Err() == nil {
			m.Log.Warn("a sandbox of a pool does not answer", "sandbox", waiting.spec.ID, "error", err)
			m.withdraw(func(_ *pool, other *member) bool { return other == waiting })
		}
	}
}

// prolong gives a member time, unless somebody has taken it.
func (m *Manager) prolong(waiting *member) error {
	waiting.setting.Lock()
	defer waiting.setting.Unlock()
	m.mu.Lock()
	waits := slices.ContainsFunc(m.pools, func(p *pool) bool { return slices.Contains(p.members, waiting) })
	m.mu.Unlock()
	if !waits {
		return nil
	}
	ctx, cancel := context.WithTimeout(m.ctx, agentTime)
	defer cancel()
	return waiting.handle.SetDeadline(ctx, time.Now().Add(memberLife))
}

// withdraw lets the members go that it is told to, unless somebody takes them first.
func (m *Manager) withdraw(out func(*pool, *member) bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.pools {
		var stay []*member
		for _, waiting := range p.members {
			if out(p, waiting) {
				m.work.Go(func() { m.dismiss(waiting) })
			} else {
				stay = append(stay, waiting)
			}
		}
		p.members = stay
	}
}

// fill makes what a pool lacks. Of a template that has changed all are made anew.
func (m *Manager) fill(p *pool) {
	for m.ctx.Err() == nil {
		err := m.fillOne(p)
		if errors.Is(err, errFull) {
			return
		}
		reason := ""
		if err != nil {
			reason = err.Error()
		}
		if reason != p.broken && m.ctx.Err() == nil && err != nil {
			m.Log.Warn("a pool cannot be filled", "template", p.Template, "error", err)
		}
		p.broken = reason
		if err != nil {
			return // the next look tries again
		}
	}
}

// errFull says that a pool lacks nothing, or is to have no more for now.
var errFull = berm.Errorf(berm.Exhausted, "full")

func (m *Manager) fillOne(p *pool) error {
	ctx, cancel := context.WithTimeout(m.ctx, createTime)
	defer cancel()
	t, err := m.Templates.Resolve(ctx, "", p.Template)
	if err != nil {
		m.withdraw(func(of *pool, _ *member) bool { return of == p })
		return err
	}
	r := CreateRequest{Level: p.Level, Timeout: memberLife, OnDeadline: berm.KillAtDeadline}
	spec, err := m.spec(&r, t, time.Now().UTC())
	if err != nil {
		return err
	}
	wanted := m.common(spec)
	m.withdraw(func(of *pool, waiting *member) bool { return of == p && !m.fits(waiting, wanted, t.BuildID) })
	for wait := time.Duration(0); wait < poolPatience; wait += poolDelay {
		m.mu.Lock()
		busy := len(m.creating) > 0
		m.mu.Unlock()
		if !busy || !sleep(ctx, poolDelay) {
			break
		}
	}
	m.mu.Lock()
	p.template = t.ID
	size := p.Size
	if time.Since(p.asked) > poolIdle {
		size = min(size, 1)
	}
	full := len(p.members) >= size || m.MaxSandboxes > 0 && m.held()+m.pooled() >= m.MaxSandboxes
	m.mu.Unlock()
	if full {
		return errFull
	}
	if left := available(); left < poolReserve {
		return berm.Errorf(berm.Exhausted, "only %d MiB of memory are available, less than %d MiB", left>>20, poolReserve>>20)
	}
	if begin := m.beginOnce(t, wanted.Level); begin != nil {
		begin()
		return nil // the pool is looked at anew, with what has changed meanwhile
	}
	made, err := m.makeMember(ctx, spec, t)
	if err != nil {
		return err
	}
	cu := cleanup.Make(func() { m.dismiss(made) })
	defer cu.Clean()
	if !made.ready && starts(&t) && time.Now().After(p.plain) {
		if err := made.start(ctx); err != nil {
			if m.ctx.Err() == nil {
				// Perhaps for want of a network, which only its owner brings.
				m.Log.Warn("the start command of a template cannot be ready in a pool and runs when a sandbox is taken", "template", p.Template, "error", err)
			}
			p.plain = time.Now().Add(memberLife)
			return nil // the pool is looked at anew
		}
		made.ready = true
	}
	cu.Release()
	m.mu.Lock()
	p.members = append(p.members, made)
	m.mu.Unlock()
	return nil
}

// makeMember makes a sandbox that nobody owns yet. It goes on with what its template starts where that
// is saved.
func (m *Manager) makeMember(ctx context.Context, spec berm.Spec, t berm.Template) (_ *member, err error) {
	saved, begun := m.begun(&CreateRequest{Level: spec.Level}, &t)
	if begun {
		defer m.use(saved)()
		spec.From, spec.Memory = m.savedDir(saved), true
		defer func() {
			if err != nil && ctx.Err() == nil {
				m.unbegin(saved) // the next look does without
			}
		}()
	}
	handle, err := m.Engine.Create(ctx, spec)
	if err != nil {
		return nil, err
	}
	made := &member{session: newSession(m), spec: spec, ready: begun}
	made.handle, made.info = handle, Sandbox{ID: spec.ID, Base: &t}
	cu := cleanup.Make(func() { m.dismiss(made) })
	defer cu.Clean()
	if made.held, err = handle.Policy(ctx); err != nil {
		return nil, err
	}
	if err := failpoint.Hit("control.pooled"); err != nil {
		return nil, err
	}
	if err := made.advance(ctx, spec.Link); err != nil {
		return nil, err
	}
	if begun {
		if err = made.begins(ctx, "", t.Ready); err != nil {
			return nil, err
		}
	}
	cu.Release()
	return made, nil
}

// advance does for a sandbox that nobody has yet what does not depend on who gets it.
func (s *session) advance(ctx context.Context, linked bool) (err error) {
	s.warmAgent(ctx) // before processes are recorded: it is nobody's
	s.traceNow(ctx)
	if err := s.openLook(ctx); err != nil {
		s.m.Log.Debug("what a sandbox of a pool writes is looked at later", "sandbox", s.info.ID, "error", err)
	}
	if linked {
		if s.link, err = s.handle.Link(ctx); err != nil {
			return err
		}
	}
	return failpoint.Hit("control.advanced")
}

// letAdvanceGo undoes advance, but for the records of processes, which forget ends.
func (s *session) letAdvanceGo() {
	s.dropLine()
	s.mu.Lock()
	link, writable := s.link, s.writable
	s.link, s.writable = nil, nil
	s.mu.Unlock()
	if link != nil {
		_ = link.Close()
	}
	if writable != nil {
		_ = writable.Close()
	}
}

// available is how much of the host's memory programs can get, in bytes; plenty where that is
// not told.
func available() int64 {
	const plenty = 1 << 62
	info, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return plenty
	}
	for line := range bytes.Lines(info) {
		if fields := bytes.Fields(line); len(fields) == 3 && string(fields[0]) == "MemAvailable:" {
			if n, err := strconv.ParseInt(string(fields[1]), 10, 64); err == nil {
				return n << 10
			}
		}
	}
	return plenty
}
