package egress

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"sync"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/policy"
)

// Link is a sandbox's link as its owner holds it. Its methods are safe for concurrent use.
type Link struct {
	wire    *wire
	events  func(Event)
	ordered sync.Mutex // held while an order waits for its answer
	answers chan answer
	done    chan struct{}
}

// Attach hands a sandbox's link to the process at the other end of conn, with the policy
// under which it is used from the first packet on. Events are told to events, one at a time.
// The caller keeps its own descriptor of the link.
func Attach(ctx context.Context, conn *net.UnixConn, id berm.SandboxID, link *os.File, p *policy.Policy, open []string, events func(Event)) (*Link, error) {
	l := &Link{wire: newWire(conn), events: events, answers: make(chan answer, 1), done: make(chan struct{})}
	go l.receive()
	o, err := orderOf(p)
	if err == nil {
		o.Protocol, o.Sandbox, o.Open = Protocol, id, open
		err = l.order(ctx, o, link)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return l, nil
}

func orderOf(p *policy.Policy) (order, error) {
	raw, err := json.Marshal(p)
	if err != nil {
		return order{}, berm.Errorf(berm.Internal, "policy: %w", err)
	}
	return order{Policy: raw, Revision: p.Revision}, nil
}

// Set replaces the policy. Flows that it does not allow are reset before Set returns.
func (l *Link) Set(ctx context.Context, p *policy.Policy) error {
	o, err := orderOf(p)
	if err != nil {
		return err
	}
	return l.order(ctx, o, nil)
}

func (l *Link) order(ctx context.Context, o order, link *os.File) error {
	l.ordered.Lock()
	defer l.ordered.Unlock()
	if err := l.wire.send(o, link); err != nil {
		return berm.Errorf(berm.Unavailable, "the network service is gone: %w", err)
	}
	select {
	case a := <-l.answers:
		if a.Error != nil {
			return a.Error.err()
		}
		return nil
	case <-l.done:
		return berm.Errorf(berm.Unavailable, "the network service is gone")
	case <-ctx.Done():
		l.Close() // its answer would be taken for that of the next order
		return berm.Errorf(berm.Unavailable, "waiting for the network service: %w", context.Cause(ctx))
	}
}

func (l *Link) receive() {
	defer close(l.done)
	for {
		var a answer
		if l.wire.receive(&a) != nil {
			return
		}
		if a.Event != nil {
			l.events(*a.Event)
			continue
		}
		l.answers <- a
	}
}

// Done is closed when the process is gone, and the link with it.
func (l *Link) Done() <-chan struct{} { return l.done }

// Close ends the link: every flow is reset.
func (l *Link) Close() error { return l.wire.conn.Close() }
