package enginetest

import (
	"context"
	"io"
	"os"
	"slices"
	"sync"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/service"
)

// Network is a network service in memory that lets nothing through and remembers what it
// was told.
type Network struct {
	mu    sync.Mutex
	fail  error
	links map[berm.SandboxID]*Link
	count int
}

// Fail makes every later Attach and Set fail with err.
func (n *Network) Fail(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.fail = err
}

// Attach takes a link.
func (n *Network) Attach(_ context.Context, id berm.SandboxID, link, _ *os.File, p egress.Policy, _ []string, events func(egress.Event)) (*Link, []string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.fail != nil {
		return nil, nil, n.fail
	}
	if _, err := link.Stat(); err != nil {
		return nil, nil, err
	}
	if n.links == nil {
		n.links = map[berm.SandboxID]*Link{}
	}
	n.count++
	l := &Link{network: n, policy: p, done: make(chan struct{}), Tell: events}
	n.links[id] = l
	return l, []string{"a warning"}, nil
}

// Attached is how often a link was attached.
func (n *Network) Attached() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.count
}

// Link returns the link of a sandbox, nil when there is none.
func (n *Network) Link(id berm.SandboxID) *Link {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.links[id]
}

// Die ends all links as the death of the service does.
func (n *Network) Die() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for id, l := range n.links {
		l.end()
		delete(n.links, id)
	}
}

// Link is a link in the hands of a Network.
type Link struct {
	// Tell tells the owner of an event.
	Tell func(egress.Event)

	network *Network
	policy  egress.Policy
	sets    int
	replies []egress.Reply
	ended   sync.Once
	done    chan struct{}
}

// Policy is the one in force.
func (l *Link) Policy() egress.Policy {
	l.network.mu.Lock()
	defer l.network.mu.Unlock()
	return l.policy
}

// Set replaces the policy.
func (l *Link) Set(_ context.Context, p egress.Policy) ([]string, error) {
	l.network.mu.Lock()
	defer l.network.mu.Unlock()
	if l.network.fail != nil {
		return nil, l.network.fail
	}
	l.policy = p
	l.sets++
	return []string{"a warning"}, nil
}

// Sets is how often the policy was replaced.
func (l *Link) Sets() int {
	l.network.mu.Lock()
	defer l.network.mu.Unlock()
	return l.sets
}

// Door replaces the policy.
func (l *Link) Door(ctx context.Context, p egress.Policy, door *os.File) ([]string, error) {
	if _, err := door.Stat(); err != nil {
		return nil, err
	}
	return l.Set(ctx, p)
}

// Reply remembers an answer.
func (l *Link) Reply(_ context.Context, r egress.Reply) error {
	l.network.mu.Lock()
	defer l.network.mu.Unlock()
	l.replies = append(l.replies, r)
	return nil
}

// Replies are the answers so far.
func (l *Link) Replies() []egress.Reply {
	l.network.mu.Lock()
	defer l.network.mu.Unlock()
	return slices.Clone(l.replies)
}

// Mask masks nothing.
func (l *Link) Mask(_ context.Context, text []byte) ([]byte, error) { return text, nil }

// MaskStream masks nothing.
func (l *Link) MaskStream(_ context.Context, file *os.File) error {
	conn, err := service.Conn(file)
	if err != nil {
		return err
	}
	go func() {
		defer conn.Close()
		_, _ = io.Copy(conn, conn)
	}()
	return nil
}

func (l *Link) end() { l.ended.Do(func() { close(l.done) }) }

// Done is closed when the link has ended.
func (l *Link) Done() <-chan struct{} { return l.done }

// Finish ends the link.
func (l *Link) Finish(context.Context) { l.end() }
