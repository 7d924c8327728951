package control

import (
	"context"
	"encoding/json"

	"github.com/berm-sandbox/berm"
)

// Request names a create, so that a client that does not know how a call ended can
// make it again. It counts as long as the sandbox is known: an hour beyond its end.
// A create that failed leaves nothing, and the same request may try again.
type Request struct {
	Key  string `json:"key,omitempty"`  // of one client and one create
	Body string `json:"body,omitempty"` // what was asked for, as a hash
}

// ErrRequestDiffers tells that a request's key was used for another create.
var ErrRequestDiffers = berm.Errorf(berm.Conflict, "the idempotency key was used for a different request")

// creation is a create under way, with all calls that wait for it.
type creation struct {
	body   string
	done   chan struct{}
	result Sandbox // set, like err, before done is closed
	err    error

	// Under the lock of the manager:
	callers   int
	abandoned bool               // by all callers, before it ended
	cancel    context.CancelFunc // called by the last caller
}

// createOnce makes the sandbox of a request, or finds it.
func (m *Manager) createOnce(ctx context.Context, r CreateRequest) (Sandbox, error) {
	for {
		c := m.join(ctx, r)
		if c.body != r.Request.Body {
			m.leave(c)
			return Sandbox{}, ErrRequestDiffers
		}
		select {
		case <-c.done:
		case <-ctx.Done():
			m.leave(c)
			return Sandbox{}, berm.Errorf(berm.Unavailable, "create was given up: %w", ctx.Err())
		}
		if m.leave(c) {
			continue // all who came before had given it up
		}
		return c.result, c.err
	}
}

// join finds the creation under way, or begins one.
func (m *Manager) join(ctx context.Context, r CreateRequest) *creation {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c := m.once[r.Request.Key]; c != nil {
		c.callers++
		return c
	}
	// It belongs to all its callers, of whom the first may leave before the others.
	shared, cancel := context.WithCancel(context.WithoutCancel(ctx))
	c := &creation{body: r.Request.Body, done: make(chan struct{}), callers: 1, cancel: cancel}
	m.once[r.Request.Key] = c
	m.work.Go(func() {
		c.result, c.err = m.recall(shared, r)
		if berm.KindOf(c.err) == berm.NotFound {
			c.result, c.err = m.create(shared, r)
		}
		m.mu.Lock()
		delete(m.once, r.Request.Key)
		m.mu.Unlock()
		close(c.done)
	})
	return c
}

// leave takes one caller away from a creation, and gives it up with the last. It tells
// whether it was given up before it ended.
func (m *Manager) leave(c *creation) (abandoned bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	c.callers--
	if c.callers == 0 {
		select {
		case <-c.done:
		default:
			c.abandoned = true
		}
		c.cancel()
	}
	return c.abandoned
}

// recall returns the sandbox that a request made before. NotFound when it made none.
func (m *Manager) recall(ctx context.Context, r CreateRequest) (Sandbox, error) {
	row, err := m.Store.SandboxOf(ctx, r.Request.Key)
	if err != nil {
		return Sandbox{}, err
	}
	var info Sandbox
	if s, err := m.session(row.ID); err == nil {
		info = s.snapshot()
	} else if err := json.Unmarshal(row.Record, &info); err != nil {
		return Sandbox{}, berm.Errorf(berm.Internal, "stored sandbox %s: %w", row.ID, err)
	}
	if info.Request.Body != r.Request.Body {
		return Sandbox{}, ErrRequestDiffers
	}
	return m.withTokens(info), nil
}
