package monitor

import (
	"context"
	"encoding/json"
	"net"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
)

// Client asks one monitor. Its methods are safe for concurrent use; they share
// one connection. When the monitor is gone they fail with NotFound.
type Client struct {
	conn *Conn
	id   berm.SandboxID

	mu      sync.Mutex
	last    uint64
	waiting map[uint64]chan reply
	lost    bool
}

// NewClient shakes hands with the monitor at the other end of conn, which must
// not be used otherwise any more. It is closed when that fails.
func NewClient(ctx context.Context, conn net.Conn) (*Client, error) {
	c := newConn(conn)
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	ours, theirs := Hello{Protocol: Protocol, Oldest: Oldest}, Hello{}
	err := c.write(ours)
	if err == nil {
		err = c.read(&theirs)
	}
	if !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		conn.Close()
		return nil, berm.Errorf(berm.Unavailable, "the monitor does not answer: %w", err)
	}
	if !ours.agrees(theirs) {
		conn.Close()
		return nil, berm.Errorf(berm.Unsupported, "the monitor speaks protocol %d, this server %d", theirs.Protocol, ours.Protocol).
			WithHint("end the sandbox with the version of berm that made it")
	}
	client := &Client{conn: c, id: theirs.ID, waiting: map[uint64]chan reply{}}
	go client.receive()
	return client, nil
}

// ID is the sandbox that the monitor keeps; "" before it was told to create one.
func (c *Client) ID() berm.SandboxID { return c.id }

// Close ends the connection and leaves the sandbox alone.
func (c *Client) Close() error { return c.conn.conn.Close() }

// receive hands replies to those who wait for them.
func (c *Client) receive() {
	for {
		var r reply
		if c.conn.read(&r) != nil {
			break
		}
		c.mu.Lock()
		w := c.waiting[r.N]
		c.mu.Unlock()
		if w == nil {
			continue
		}
		select {
		case w <- r:
		default: // changes that nobody read yet: the newest matter
			select {
			case <-w:
			default:
			}
			w <- r
		}
	}
	c.conn.conn.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lost = true
	for _, w := range c.waiting {
		close(w)
	}
	c.waiting = nil
}

// ask sends a request and returns the channel of its replies, which is closed when
// the monitor is lost, and a function that ends the waiting.
func (c *Client) ask(r request, replies int) (<-chan reply, func(), error) {
	w := make(chan reply, replies)
	c.mu.Lock()
	if c.lost {
		c.mu.Unlock()
		return nil, nil, lost()
	}
	r.N = c.last
	c.last++
	c.waiting[r.N] = w
	c.mu.Unlock()
	forget := func() {
		c.mu.Lock()
		delete(c.waiting, r.N)
		c.mu.Unlock()
	}
	if err := c.conn.write(r); err != nil {
		forget()
		return nil, nil, lost()
	}
	return w, forget, nil
}

// call sends a request and waits for its one reply.
func (c *Client) call(ctx context.Context, r request) (reply, error) {
	w, forget, err := c.ask(r, 1)
	if err != nil {
		return reply{}, err
	}
	defer forget()
	select {
	case answer, ok := <-w:
		if !ok {
			return reply{}, lost()
		}
		if answer.Error != nil {
			return reply{}, answer.Error.err()
		}
		return answer, nil
	case <-ctx.Done():
		return reply{}, berm.Errorf(berm.Unavailable, "waiting for the monitor: %w", context.Cause(ctx))
	}
}

// Prepare has a monitor that was just started make what a later Create will need, in
// the form that its level defines.
func (c *Client) Prepare(ctx context.Context, order any) error { return c.order(ctx, OpPrepare, order) }

// Create tells a monitor that was just started what to make, in the form that its
// level defines.
func (c *Client) Create(ctx context.Context, order any) error { return c.order(ctx, OpCreate, order) }

func (c *Client) order(ctx context.Context, op Op, order any) error {
	raw, err := json.Marshal(order)
	if err != nil {
		return err
	}
	_, err = c.call(ctx, request{Op: op, Create: raw})
	return err
}

// Commit lets the new sandbox live on when this connection ends.
func (c *Client) Commit(ctx context.Context) error {
	_, err := c.call(ctx, request{Op: OpCommit})
	return err
}

// Pause freezes the sandbox.
func (c *Client) Pause(ctx context.Context) error {
	_, err := c.call(ctx, request{Op: OpPause})
	return err
}

// Resume thaws the sandbox.
func (c *Client) Resume(ctx context.Context, deadline time.Time) error {
	_, err := c.call(ctx, request{Op: OpResume, Deadline: deadline})
	return err
}

// SetDeadline moves the deadline; zero removes it.
func (c *Client) SetDeadline(ctx context.Context, deadline time.Time) error {
	_, err := c.call(ctx, request{Op: OpDeadline, Deadline: deadline})
	return err
}

// Status reports state and deadline.
func (c *Client) Status(ctx context.Context) (berm.Status, error) {
	r, err := c.call(ctx, request{Op: OpStatus})
	return value(r.Status, err)
}

// Usage measures what the sandbox uses.
func (c *Client) Usage(ctx context.Context) (berm.Usage, error) {
	r, err := c.call(ctx, request{Op: OpUsage})
	return value(r.Usage, err)
}

// Policy is the whole effective policy.
func (c *Client) Policy(ctx context.Context) (berm.Policy, error) {
	var p berm.Policy
	r, err := c.call(ctx, request{Op: OpPolicy})
	if err == nil && json.Unmarshal(r.Policy, &p) != nil {
		err = berm.Errorf(berm.Internal, "the monitor sent no policy")
	}
	return p, err
}

// Snapshot saves the sandbox's files into a directory, and with memory its processes. A monitor of
// an earlier version knows nothing of that and saves files alone.
func (c *Client) Snapshot(ctx context.Context, dir string, memory bool) (berm.Saved, error) {
	r, err := c.call(ctx, request{Op: OpSnapshot, Directory: dir, Memory: memory})
	return value(r.Saved, err)
}

// Version names what is on the sandbox's disk.
func (c *Client) Version(ctx context.Context) (string, error) {
	r, err := c.call(ctx, request{Op: OpVersion})
	return r.Version, err
}

// Kill ends the sandbox and returns when it is gone.
func (c *Client) Kill(ctx context.Context, reason berm.Reason) (berm.Exit, error) {
	r, err := c.call(ctx, request{Op: OpKill, Reason: reason})
	return value(r.Exit, err)
}

// Events streams changes until the sandbox dies, the monitor is lost or ctx ends.
func (c *Client) Events(ctx context.Context) (<-chan berm.Status, error) {
	replies, forget, err := c.ask(request{Op: OpEvents}, 16)
	if err != nil {
		return nil, err
	}
	out := make(chan berm.Status)
	go func() {
		defer close(out)
		defer forget()
		for {
			var status *berm.Status
			select {
			case r, ok := <-replies:
				if status = r.Status; !ok || status == nil {
					return
				}
			case <-ctx.Done():
				return
			}
			select {
			case out <- *status:
			case <-ctx.Done():
				return
			}
		}
	}()
	return out, nil
}

func value[T any](v *T, err error) (T, error) {
	var zero T
	if err != nil {
		return zero, err
	}
	if v == nil {
		return zero, berm.Errorf(berm.Internal, "the monitor sent an empty answer")
	}
	return *v, nil
}

func lost() error {
	return berm.Errorf(berm.NotFound, "the sandbox's monitor is gone")
}
