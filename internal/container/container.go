// Package container gives conversations a sandbox with an interpreter: found or made by the
// conversation's thread, kept as long as it is used, with files in and out.
package container

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/capture"
	"github.com/berm-sandbox/berm/internal/control"
)

// Inside sends requests into sandboxes.
type Inside interface {
	// Do sends a request to a port of a running sandbox. It is recorded as the actor's. The answer
	// ends when the sandbox does. Kinds: NotFound (it does not run), Unavailable (nothing listens).
	Do(r *http.Request, id berm.SandboxID, port uint16, actor audit.Actor) (*http.Response, error)
}

// Config is what a Manager is made of.
type Config struct {
	Sessions *control.Manager
	Inside   Inside
	// Template is what containers are made of. It has an interpreter on port Port.
	Template string
	Audit    audit.Emitter
	// Capture keeps what executions show.
	Capture *capture.Recorder
}

// Manager holds the containers of one server. It keeps nothing itself: a container is a sandbox
// with metadata. The methods are safe for concurrent use.
type Manager struct {
	Config
	threads turns
}

// New makes a Manager.
func New(c Config) *Manager { return &Manager{Config: c} }

// Metadata by which the sandbox of a container is known.
const (
	nameKey     = "berm.container"          // its name; "" for none
	threadKey   = "berm.container.thread"   //
	settingsKey = "berm.container.settings" // Request.Settings
)

// DefaultIdle is how long a container lives without use when its request does not say.
const DefaultIdle = 20 * time.Minute

// Bounds on names and threads, in bytes.
const maxWord = 256

// Container is what is known of one at one moment.
type Container struct{ control.Sandbox }

// Name is what its creator calls it; "" is nothing.
func (c *Container) Name() string { return c.Metadata[nameKey] }

// Thread is the conversation that it belongs to; "" is none. A fork has none, though it has all
// metadata of its parent.
func (c *Container) Thread() string {
	if c.Parent != "" {
		return ""
	}
	return c.Metadata[threadKey]
}

// Idle is how long it lives without use.
func (c *Container) Idle() time.Duration { return c.Timeout }

// LastActive is when it was last used: its deadline is the time Idle after that.
func (c *Container) LastActive() time.Time { return c.EndAt.Add(-c.Timeout) }

func of(s control.Sandbox) (Container, bool) {
	_, ok := s.Metadata[nameKey]
	return Container{s}, ok
}

// Request is what a client may choose about a new container.
type Request struct {
	Name string
	// Thread is the conversation that it is for; "" is none. Each actor has threads of its own.
	Thread string
	Idle   time.Duration // 0 is DefaultIdle
	// Settings stands for all of the request but the thread; "" is whatever the container has.
	Settings string
	// Sandbox are the level, limits, network, credentials and actor.
	Sandbox control.CreateRequest
}

func (r *Request) check() error {
	for _, w := range []struct{ what, value string }{{"name", r.Name}, {"thread_id", r.Thread}} {
		if len(w.value) > maxWord || strings.ContainsFunc(w.value, unicode.IsControl) {
			return berm.Errorf(berm.Invalid, "%s takes up to %d bytes without control characters", w.what, maxWord)
		}
	}
	return nil
}

// Create makes a container, or finds the one of the thread, which is used by that; made says
// which. Of several calls at once for a thread one makes it. Kinds: as of control.Manager.Create,
// Conflict when the thread's was made with other settings, Unsupported without the template.
func (m *Manager) Create(ctx context.Context, r Request) (c Container, made bool, err error) {
	if err := r.check(); err != nil {
		return Container{}, false, err
	}
	if r.Thread == "" {
		c, err = m.create(ctx, r)
		return c, true, err
	}
	done, err := m.threads.take(ctx, r.Sandbox.Actor.ID+"\x00"+r.Thread)
	if err != nil {
		return Container{}, false, err
	}
	defer done()
	if c, ok := m.find(r.Sandbox.Actor, r.Thread); ok {
		if r.Settings != "" && r.Settings != c.Metadata[settingsKey] {
			return Container{}, false, berm.Errorf(berm.Conflict, "thread %q has container %s, which was made with other settings", r.Thread, c.ID).
				WithHint("ask with thread_id alone for the container that is there, or delete it first")
		}
		if c, err = m.use(ctx, c.ID, r.Sandbox.Actor); berm.KindOf(err) != berm.NotFound || err == nil {
			return c, false, err
		}
	}
	c, err = m.create(ctx, r)
	return c, true, err
}

// find returns the newest container of a thread.
func (m *Manager) find(owner audit.Actor, thread string) (Container, bool) {
	for _, s := range m.Sessions.List(control.Filter{Metadata: map[string]string{threadKey: thread}}) {
		if c, ok := of(s); ok && c.Owner == owner && c.Thread() == thread {
			return c, true
		}
	}
	return Container{}, false
}

func (m *Manager) create(ctx context.Context, r Request) (Container, error) {
	s := r.Sandbox
	s.Template, s.Timeout, s.OnDeadline = m.Template, cmp.Or(r.Idle, DefaultIdle), berm.KillAtDeadline
	s.Secure, s.Network.Private = true, true // all that comes in comes through here
	s.Metadata = map[string]string{nameKey: r.Name, settingsKey: r.Settings}
	if r.Thread != "" {
		s.Metadata[threadKey] = r.Thread
	}
	made, err := m.Sessions.Create(ctx, s)
	if berm.KindOf(err) == berm.NotFound && err != nil {
		return Container{}, berm.Errorf(berm.Unsupported, "this server has no interpreter: %w", err).
			WithHint("make the template on that host: berm template build %s", m.Template)
	}
	return Container{made}, err
}

// use finds a container that lives, resumes it when it is paused, and has it live on for the time
// Idle. NotFound tells what became of it.
func (m *Manager) use(ctx context.Context, id berm.SandboxID, actor audit.Actor) (Container, error) {
	s, err := m.Sessions.Get(ctx, id)
	if err == nil {
		c, ok := of(s)
		if !ok {
			return Container{}, Unknown(id)
		}
		if s, _, err = m.Sessions.Connect(ctx, id, c.Idle(), actor); err == nil {
			return Container{s}, nil
		}
	}
	return Container{}, m.ended(ctx, id, err)
}

// endTime bounds how long the end of a container that does not answer any more is waited for.
const endTime = 2 * time.Second

// ended makes of an error that comes of a container's end one that tells why it ended.
func (m *Manager) ended(ctx context.Context, id berm.SandboxID, err error) error {
	kind := berm.KindOf(err)
	if inside := (*insideError)(nil); err == nil || kind != berm.NotFound && kind != berm.Unavailable || errors.As(err, &inside) {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTime)
	defer cancel()
	if kind == berm.Unavailable {
		// A container's connections break before it is known that it ended.
		if _, policyErr := m.Sessions.Policy(ctx, id); berm.KindOf(policyErr) != berm.NotFound || policyErr == nil {
			return err
		}
	}
	if s, stillErr := m.Sessions.Get(ctx, id); stillErr == nil && s.State == berm.Paused {
		return berm.Errorf(berm.Conflict, "container %s was paused meanwhile", id).WithHint("it goes on when it is used again")
	}
	s, err := m.Sessions.Death(ctx, id)
	c, ok := of(s)
	if err != nil || !ok {
		return Unknown(id)
	}
	why := "ended"
	if s.Exit != nil {
		switch s.Exit.Reason {
		case berm.ReasonTimeout:
			why = "expired: it was not used for " + strings.TrimSuffix(c.Idle().String(), "0s")
		case berm.ReasonKilled:
			why = "was deleted"
		case berm.ReasonOOM:
			why = "ended: its memory was used up"
		}
	}
	return berm.Errorf(berm.NotFound, "container %s %s", id, why).WithHint("its files are gone; make another container")
}

// Unknown is about a container that is not there, or is of another team.
func Unknown(id berm.SandboxID) error {
	return berm.Errorf(berm.NotFound, "container %q was not found", string(id)).
		WithHint("GET /berm/v1/containers lists those that live; one that is not used ends after its expires_after")
}

// leastHold is the least time between two moves of a container's end, and the time that is too
// short for one.
const leastHold = time.Second

// hold has a container live on until release is called, which is a use too.
func (m *Manager) hold(ctx context.Context, c Container, actor audit.Actor) (release func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	refresh := func() {
		// One that ends meanwhile is told by what is done with it.
		_ = m.Sessions.Refresh(ctx, c.ID, c.Idle(), actor)
	}
	begin := time.Now()
	done, stop := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for tick := time.NewTicker(max(c.Idle()/2, leastHold)); ; {
			select {
			case <-tick.C:
				refresh()
			case <-stop:
				tick.Stop()
				return
			}
		}
	}()
	return func() {
		close(stop)
		<-done
		if time.Since(begin) > leastHold {
			refresh()
		}
		cancel()
	}
}

// Get returns a container, which is a use of it. NotFound tells what became of it.
func (m *Manager) Get(ctx context.Context, id berm.SandboxID, actor audit.Actor) (Container, error) {
	return m.use(ctx, id, actor)
}

// Filter chooses containers of a list, those of a team. Other zero fields choose all.
type Filter struct {
	Team      berm.Team
	Name      string
	Thread    string
	Owner     audit.Actor // whose Thread it is
	Ascending bool
	// After is the container that the list goes on behind; "" begins it.
	After berm.SandboxID
}

// List returns the containers that the filter chooses by their creation, newest first unless it
// says otherwise. It is no use of them. Invalid when After is not known.
func (m *Manager) List(ctx context.Context, f Filter) ([]Container, error) {
	all := []Container{}
	for _, s := range m.Sessions.List(control.Filter{Team: &f.Team}) {
		if c, ok := of(s); ok && (f.Name == "" || f.Name == c.Name()) && (f.Thread == "" || f.Thread == c.Thread() && f.Owner == c.Owner) {
			all = append(all, c)
		}
	}
	order := func(a, b Container) int {
		c := cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
		if f.Ascending {
			return c
		}
		return -c
	}
	slices.SortFunc(all, order)
	if f.After == "" {
		return all, nil
	}
	s, err := m.Sessions.Inspect(ctx, f.After) // it may have ended since
	last, ok := of(s)
	if err != nil || !ok || s.Team != f.Team {
		return nil, berm.Errorf(berm.Invalid, "after: there is no container %q", string(f.After)).WithHint("begin the list anew")
	}
	return slices.DeleteFunc(all, func(c Container) bool { return order(c, last) <= 0 }), nil
}

// Delete ends a container; nothing is left of it when Delete returns.
func (m *Manager) Delete(ctx context.Context, id berm.SandboxID, actor audit.Actor) error {
	s, err := m.Sessions.Get(ctx, id)
	if err == nil {
		if _, ok := of(s); !ok {
			return Unknown(id)
		}
		err = m.Sessions.Kill(ctx, id, actor)
	}
	return m.ended(ctx, id, err)
}
