package egress

import (
	"context"
	"net"
	"os"
	"sync"

	"github.com/berm-sandbox/berm"
)

// Link is a sandbox's link as its owner holds it. Its methods are safe for concurrent use.
type Link struct {
	wire    *Wire
	events  func(Event)
	ordered sync.Mutex // held while an order waits for its answer
	answers chan Answer
	done    chan struct{}
}

// Attach hands a sandbox's link to the service at the other end of conn, with the policy
// under which it is used from the first packet on, and returns warnings about the policy.
// Events are told to events, one at a time. The caller keeps its own descriptor of the link.
// Kinds: Invalid (the policy), Unavailable, Unsupported.
func Attach(ctx context.Context, conn *net.UnixConn, id berm.SandboxID, link *os.File, p Policy, open []string, events func(Event)) (*Link, []string, error) {
	l := newLink(conn, events)
	a, err := l.order(ctx, Order{Protocol: Protocol, Sandbox: id, Policy: p, Open: open}, link)
	if err != nil {
		_ = conn.Close()
		return nil, nil, err
	}
	return l, a.Warnings, nil
}

// Prepare is the first half of Attach, for whoever makes the sandbox: it returns what has to
// be trusted inside, nil for nothing. Connect is the other half. With broker, an end of a
// connection, the service of credentials at its other end looks into requests, and has
// endpoints.
func Prepare(ctx context.Context, conn *net.UnixConn, id berm.SandboxID, p Policy, open []string, broker *os.File, endpoints []Endpoint, events func(Event)) (*Link, *Trust, []string, error) {
	l := newLink(conn, events)
	a, err := l.order(ctx, Order{Protocol: Protocol, Sandbox: id, Policy: p, Open: open, Trust: true, Broker: broker != nil, Endpoints: endpoints}, broker)
	if err != nil {
		_ = conn.Close()
		return nil, nil, nil, err
	}
	return l, a.Trust, a.Warnings, nil
}

// Brokered is what a sandbox gets from the service of credentials.
type Brokered struct {
	Attach    []Attachment      // for the policy of the network service
	Endpoints []Endpoint        // for the network service
	Trust     *Trust            // that has to be trusted inside
	Env       map[string]string // for the programs inside
	Warnings  []string          // about the policy
}

// Broker gives credentials to the service of credentials at the other end of conn, with the
// policy by which it judges requests, and with the end of a connection at whose other end is
// the network service. The credentials end with the link, which never gets one of a sandbox.
// Kinds: Invalid (the policy, credentials), Unavailable, Unsupported.
func Broker(ctx context.Context, conn *net.UnixConn, id berm.SandboxID, p Policy, open []string, credentials []Credential, network *os.File, events func(Event)) (*Link, Brokered, error) {
	l := newLink(conn, events)
	a, err := l.order(ctx, Order{Protocol: Protocol, Sandbox: id, Policy: p, Open: open, Credentials: credentials}, network)
	if err != nil {
		conn.Close()
		return nil, Brokered{}, err
	}
	return l, Brokered{Attach: a.Attach, Endpoints: a.Endpoints, Trust: a.Trust, Env: a.Env, Warnings: a.Warnings}, nil
}

// Connect hands over the link after Prepare.
func (l *Link) Connect(ctx context.Context, link *os.File) error {
	_, err := l.order(ctx, Order{}, link)
	return err
}

func newLink(conn *net.UnixConn, events func(Event)) *Link {
	l := &Link{wire: NewWire(conn), events: events, answers: make(chan Answer, 1), done: make(chan struct{})}
	go l.receive()
	return l
}

// Set replaces the policy. Flows that it does not allow are reset before Set returns.
func (l *Link) Set(ctx context.Context, p Policy) ([]string, error) {
	a, err := l.order(ctx, Order{Policy: p}, nil)
	return a.Warnings, err
}

func (l *Link) order(ctx context.Context, o Order, link *os.File) (Answer, error) {
	l.ordered.Lock()
	defer l.ordered.Unlock()
	if err := l.wire.Send(o, link); err != nil {
		return Answer{}, berm.Errorf(berm.Unavailable, "the network service is gone: %w", err)
	}
	select {
	case a := <-l.answers:
		return a.result()
	case <-l.done:
		select {
		case a := <-l.answers: // its last: a service leaves after it has refused
			return a.result()
		default:
			return Answer{}, berm.Errorf(berm.Unavailable, "the network service is gone")
		}
	case <-ctx.Done():
		_ = l.Close() // its answer would be taken for that of the next order
		return Answer{}, berm.Errorf(berm.Unavailable, "waiting for the network service: %w", context.Cause(ctx))
	}
}

// result is the answer, or the error that it brings.
func (a Answer) result() (Answer, error) {
	if a.Error != nil {
		return Answer{}, a.Error.err()
	}
	return a, nil
}

func (l *Link) receive() {
	defer close(l.done)
	for {
		var a Answer
		if l.wire.Receive(&a) != nil {
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

// Finish ends the link when the sandbox has ended, and returns when what happened is told,
// or ctx ends.
func (l *Link) Finish(ctx context.Context) {
	_ = l.wire.conn.CloseWrite()
	select {
	case <-l.done:
	case <-ctx.Done():
	}
	_ = l.Close()
}

// Close ends the link: every flow is reset.
func (l *Link) Close() error { return l.wire.Close() }
