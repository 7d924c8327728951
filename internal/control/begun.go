package control

import (
	"context"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/cleanup"
)

// beginTime bounds the life of a sandbox that is made for those to come to begin with.
const beginTime = 10 * time.Minute

// beginning names what is saved of a template whose start command has begun: sandboxes that are made
// of the template go on from there. It goes with the template and with the server, and is made again
// when it is missed.
type beginning struct {
	build berm.BuildID // of the template
	level berm.Level
}

// starts says whether there is something to begin with.
func starts(t *berm.Template) bool { return t.Start != "" || t.Ready != "" }

// begun finds what a sandbox of a template goes on from: only one with the limits of the template.
func (m *Manager) begun(r *CreateRequest, t *berm.Template) (berm.BuildID, bool) {
	if !starts(t) || r.Limits != (berm.Limits{}) {
		return "", false
	}
	level := r.Level
	if level == "" {
		level = m.Level
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	saved := m.beginnings[beginning{t.BuildID, m.probe(level).Level}]
	return saved, saved != ""
}

// Begin makes a sandbox of a build, which must be ready, and saves it for those to come to begin
// with where the server's level can; elsewhere it only shows that it can be ready. The build is no
// template yet: until done is called that is no reason to remove what was saved. Kinds as of Create.
func (m *Manager) Begin(ctx context.Context, t berm.Template, actor audit.Actor) (done func(), err error) {
	level := m.probe(m.Level).Level
	if !m.probe(level).Memory || m.SnapshotDir == "" {
		level = berm.Namespace
	}
	m.mu.Lock()
	m.building[t.BuildID] = true
	m.mu.Unlock()
	done = func() {
		m.mu.Lock()
		delete(m.building, t.BuildID)
		m.mu.Unlock()
	}
	return done, m.begin(ctx, t, level, actor)
}

func (m *Manager) begin(ctx context.Context, t berm.Template, level berm.Level, actor audit.Actor) error {
	info, err := m.create(ctx, CreateRequest{
		Template: string(t.ID), Of: &t, Level: level, Timeout: min(beginTime, m.MaxTimeout), Secure: true,
		Metadata: map[string]string{"berm.build": string(t.BuildID)}, Actor: actor, Team: t.Team,
	})
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), transitionTime)
		defer cancel()
		if err := m.Kill(ctx, info.ID, system); err != nil && berm.KindOf(err) != berm.NotFound {
			m.Log.Error("a sandbox is left until its deadline", "sandbox", info.ID, "error", err)
		}
	}()
	if !m.probe(level).Memory || m.SnapshotDir == "" {
		return nil
	}
	if err := m.saveBegun(ctx, info.ID, beginning{t.BuildID, info.Level}); err != nil {
		m.Log.Warn("the start command of a template runs in each of its sandboxes", "template", t.Alias(), "build", t.BuildID, "error", err)
	}
	return nil
}

func (m *Manager) saveBegun(ctx context.Context, id berm.SandboxID, b beginning) error {
	s, err := m.session(id)
	if err != nil {
		return err
	}
	saved := berm.BuildID(berm.NewUUID())
	if err := m.makeSaved(saved); err != nil {
		return err
	}
	cu := cleanup.Make(func() { m.drop(saved) })
	defer cu.Clean()
	ctx, cancel := context.WithTimeout(ctx, snapshotTime)
	defer cancel()
	s.snapping.Lock()
	_, err = s.current().Snapshot(ctx, m.savedDir(saved), true)
	s.snapping.Unlock()
	if err != nil {
		return err
	}
	cu.Release()
	m.mu.Lock()
	before := m.beginnings[b]
	m.beginnings[b] = saved
	m.mu.Unlock()
	m.drop(before)
	return nil
}

// beginLater has what was missed made beside whatever comes.
func (m *Manager) beginLater(t berm.Template, level berm.Level) {
	if begin := m.beginOnce(t, level); begin != nil {
		m.work.Go(begin)
	}
}

// beginOnce is what makes what was missed; nil where that cannot be, is under way, has failed, or
// there is no room.
func (m *Manager) beginOnce(t berm.Template, level berm.Level) func() {
	if !starts(&t) || !m.probe(level).Memory || m.SnapshotDir == "" {
		return nil
	}
	b := beginning{t.BuildID, level}
	m.mu.Lock()
	defer m.mu.Unlock()
	_, known := m.beginnings[b]
	if known || m.ctx.Err() != nil || m.MaxSandboxes > 0 && m.held()+m.pooled()+1 > m.MaxSandboxes {
		return nil
	}
	m.beginnings[b] = "" // being made; one that fails is not tried again
	return func() {
		ctx, cancel := context.WithTimeout(m.ctx, beginTime)
		defer cancel()
		if err := m.begin(ctx, t, level, system); err != nil && m.ctx.Err() == nil {
			m.Log.Warn("the start command of a template runs in each of its sandboxes", "template", t.Alias(), "build", t.BuildID, "error", err)
		}
		m.PruneBegun(ctx) // the template may have gone meanwhile
	}
}

// unbegin forgets what a sandbox could not go on from.
func (m *Manager) unbegin(saved berm.BuildID) {
	m.mu.Lock()
	for b, s := range m.beginnings {
		if s == saved {
			delete(m.beginnings, b)
		}
	}
	m.mu.Unlock()
	m.drop(saved)
}

// PruneBegun removes what was saved of builds that are no template any more. It is for who removed
// some; what other processes remove is seen later.
func (m *Manager) PruneBegun(ctx context.Context) {
	begun := m.allBegun() // before templates are listed: those that are made meanwhile stay
	all, err := m.Templates.List(ctx)
	if err != nil {
		m.Log.Error("what templates begin with is kept", "error", err)
		return
	}
	known := map[berm.BuildID]bool{}
	for _, t := range all {
		known[t.BuildID] = true
	}
	for saved, build := range begun {
		if !known[build] {
			m.unbegin(saved)
		}
	}
}

// allBegun returns what is saved, and of which build, but for those that are no templates yet.
func (m *Manager) allBegun() map[berm.BuildID]berm.BuildID {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := map[berm.BuildID]berm.BuildID{}
	for b, saved := range m.beginnings {
		if saved != "" && !m.building[b.build] {
			all[saved] = b.build
		}
	}
	return all
}
