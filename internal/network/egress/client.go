package egress

import (
	"context"
	"net"
	"os"
	"sync"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/link"
	"github.com/berm-sandbox/berm/internal/service"
	"github.com/berm-sandbox/berm/internal/trust/root"
)

// Link is a sandbox's link as its owner holds it. Its methods are safe for concurrent use.
type Link struct {
	wire    *service.Wire
	events  func(Event)
	ordered sync.Mutex // held while an order waits for its answer
	answers chan arrival
	done    chan struct{}
	asks    bool // from the beginning
}

// Asks says whether the first policy had rules that ask.
func (l *Link) Asks() bool { return l.asks }

// arrival is an answer with the descriptor that came with it.
type arrival struct {
	Answer
	file *os.File
}

// Attach hands a sandbox's link to the service at the other end of conn, with the policy
// under which it is used from the first packet on, and returns warnings about the policy.
// With door, an end of a connection, the service of credentials at its other end looks into
// requests; without one rules that need it let nothing through. Events are told to events, one
// at a time. The caller keeps its own descriptors.
// Kinds: Invalid (the policy), Unavailable, Unsupported.
func Attach(ctx context.Context, conn *net.UnixConn, id berm.SandboxID, own, door *os.File, p Policy, open []string, events func(Event)) (*Link, []string, error) {
	l := newLink(conn, events)
	a, err := l.order(ctx, Order{Protocol: Protocol, Sandbox: id, Policy: p, Open: open, Door: door != nil, Frames: frames(own)}, door, own)
	if err != nil {
		_ = conn.Close()
		return nil, nil, err
	}
	return l, a.Warnings, nil
}

// frames says whether a link carries Ethernet frames.
func frames(file *os.File) (yes bool) {
	if raw, err := file.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { yes = link.Frames(int(fd)) })
	}
	return yes
}

// Prepare is the first half of Attach, for whoever makes the sandbox: it returns what has to
// be trusted inside, nil for nothing, where the programs are those of a root, or, when that is
// nil, of this machine. Connect is the other half.
func Prepare(ctx context.Context, conn *net.UnixConn, id berm.SandboxID, p Policy, open []string, programs *root.Root, door *os.File, events func(Event)) (*Link, *Trust, []string, error) {
	l := newLink(conn, events)
	a, err := l.order(ctx, Order{Protocol: Protocol, Sandbox: id, Policy: p, Open: open, Trust: true, Root: programs, Door: door != nil}, door)
	if err != nil {
		_ = conn.Close()
		return nil, nil, nil, err
	}
	l.asks = a.Asks
	return l, a.Trust, a.Warnings, nil
}

// Bindings is what a sandbox is to get from the service of credentials.
type Bindings struct {
	Policy      Policy // by which it judges requests
	Open        []string
	Credentials []Credential
	// Door is an end of a connection at whose other end is the network service; nil when Door
	// brings it later.
	Door *os.File
	// Kept is what an earlier service had kept for this sandbox; nil for nothing.
	Kept *os.File
	// Trust asks what has to be trusted inside, where the programs are those of Root, or, when
	// that is nil, of this machine.
	Trust bool
	Root  *root.Root
}

// Brokered is what a sandbox gets from the service of credentials.
type Brokered struct {
	Attach    []Attachment      // for the policy of the network service
	Endpoints []Endpoint        // for that policy too
	Authority string            // certificate, in PEM, that has to be trusted inside
	Trust     *Trust            // if it was asked for
	Env       map[string]string // for the programs inside
	Warnings  []string          // about the policy
	// Keep is what a later service needs in Bindings.Kept, for the caller to close; nil when it
	// is what that was.
	Keep *os.File
}

// Broker gives credentials to the service of credentials at the other end of conn. They end
// with the link, which never gets one of a sandbox.
// Kinds: Invalid (the policy, credentials), Unavailable, Unsupported.
func Broker(ctx context.Context, conn *net.UnixConn, id berm.SandboxID, b Bindings, events func(Event)) (*Link, Brokered, error) {
	l := newLink(conn, events)
	o := Order{
		Protocol: Protocol, Sandbox: id, Policy: b.Policy, Open: b.Open, Bind: true, Credentials: b.Credentials,
		Door: b.Door != nil, Authority: b.Kept != nil, Trust: b.Trust, Root: b.Root,
	}
	a, err := l.bind(ctx, o, b.Door, b.Kept)
	if err != nil {
		conn.Close()
		return nil, Brokered{}, err
	}
	return l, a, nil
}

// Bind replaces the credentials and the policy, at the service of credentials.
func (l *Link) Bind(ctx context.Context, p Policy, credentials []Credential) (Brokered, error) {
	return l.bind(ctx, Order{Policy: p, Bind: true, Credentials: credentials})
}

func (l *Link) bind(ctx context.Context, o Order, files ...*os.File) (Brokered, error) {
	secrets, err := packSecrets(o.Credentials)
	if err != nil {
		return Brokered{}, err
	}
	defer secrets.Close()
	a, err := l.order(ctx, o, append(files, secrets)...)
	if err != nil {
		return Brokered{}, err
	}
	return Brokered{Attach: a.Attach, Endpoints: a.Endpoints, Authority: a.Authority, Trust: a.Trust, Env: a.Env, Warnings: a.Warnings, Keep: a.file}, nil
}

// Mask has the service of credentials mask the secrets of its credentials in a text: they are
// nowhere else. The text keeps its length.
func (l *Link) Mask(ctx context.Context, text []byte) ([]byte, error) {
	if len(text) == 0 {
		return text, nil
	}
	a, err := l.order(ctx, Order{Mask: text})
	return a.Masked, err
}

// MaskStream is Mask for what comes over a connection, whose other end it gets, and goes back
// over it, as long as it was.
func (l *Link) MaskStream(ctx context.Context, conn *os.File) error {
	_, err := l.order(ctx, Order{MaskStream: true}, conn)
	return err
}

// Door replaces the policy, and the connection between the network service and that of
// credentials, one end of which it brings.
func (l *Link) Door(ctx context.Context, p Policy, door *os.File) ([]string, error) {
	a, err := l.order(ctx, Order{Policy: p, Door: true}, door)
	return a.Warnings, err
}

// Connect hands over the link after Prepare.
func (l *Link) Connect(ctx context.Context, link *os.File) error {
	_, err := l.order(ctx, Order{Frames: frames(link)}, link)
	return err
}

func newLink(conn *net.UnixConn, events func(Event)) *Link {
	l := &Link{wire: service.NewWire(conn), events: events, answers: make(chan arrival, 1), done: make(chan struct{})}
	go l.receive()
	return l
}

// Set replaces the policy. Flows that it does not allow are reset before Set returns.
func (l *Link) Set(ctx context.Context, p Policy) ([]string, error) {
	a, err := l.order(ctx, Order{Policy: p})
	return a.Warnings, err
}

func (l *Link) order(ctx context.Context, o Order, files ...*os.File) (arrival, error) {
	l.ordered.Lock()
	defer l.ordered.Unlock()
	if err := l.wire.Send(o, files...); err != nil {
		return arrival{}, berm.Errorf(berm.Unavailable, "the network service is gone: %w", err)
	}
	select {
	case a := <-l.answers:
		return a.result()
	case <-l.done:
		select {
		case a := <-l.answers: // its last: a service leaves after it has refused
			return a.result()
		default:
			return arrival{}, berm.Errorf(berm.Unavailable, "the network service is gone")
		}
	case <-ctx.Done():
		_ = l.Close() // its answer would be taken for that of the next order
		return arrival{}, berm.Errorf(berm.Unavailable, "waiting for the network service: %w", context.Cause(ctx))
	}
}

// result is the answer, or the error that it brings.
func (a arrival) result() (arrival, error) {
	if a.Error != nil {
		return arrival{}, a.Error.Err()
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
		came := arrival{Answer: a}
		if a.Keep {
			came.file = l.wire.File()
		}
		l.answers <- came
	}
}

// Done is closed when the process is gone, and the link with it.
func (l *Link) Done() <-chan struct{} { return l.done }

// Finish ends the link when the sandbox has ended, and returns when what happened is told,
// or ctx ends.
func (l *Link) Finish(ctx context.Context) {
	_ = l.wire.CloseWrite()
	select {
	case <-l.done:
	case <-ctx.Done():
	}
	_ = l.Close()
}

// Close ends the link: every flow is reset.
func (l *Link) Close() error { return l.wire.Close() }
