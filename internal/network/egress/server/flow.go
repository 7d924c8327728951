package server

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/inspect"
	"github.com/berm-sandbox/berm/internal/network/policy"
	"github.com/berm-sandbox/berm/internal/network/stack"
)

// Times.
const (
	dialPatience  = 20 * time.Second
	helloPatience = 15 * time.Second // for a client's first bytes
)

// flow is one flow of the sandbox's from its question to its record.
type flow struct {
	inside   *stack.Flow
	question policy.Flow
	verdict  policy.Verdict
	address  string // that was dialed

	mu     sync.Mutex
	denied *policy.Verdict // why it was ended, if it was
	failed error
}

func (f *flow) deny(v policy.Verdict) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.denied == nil {
		f.denied = &v
	}
}

func (f *flow) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failed = err
}

// ask decides about a flow that begins. It returns nil when it may not.
func (x *sandbox) ask(inside *stack.Flow, proto policy.Proto) *flow {
	destination := inside.Destination
	host := policy.Host{Addr: destination.Addr()}
	if name := x.names.Name(destination.Addr()); name != "" {
		host = policy.Host{Name: name}
	}
	question := policy.Flow{Host: host, Port: destination.Port(), Proto: proto, Time: time.Now(), Spent: x.isSpent}
	v := x.evaluator().Decide(question)
	f := &flow{inside: inside, question: question, verdict: v}
	if v.Action != policy.Allow || v.Inspect {
		if v.Action == policy.Allow {
			v.Action, v.Reason, v.Detail = policy.Deny, policy.ReasonPolicy, "the rule looks into requests, which this network service cannot"
		}
		f.deny(v)
		x.record(f)
		return nil
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if v.Match != nil && v.Match.Once {
		x.spent[v.Rule] = true
	}
	x.live[f] = struct{}{}
	return f
}

func (x *sandbox) isSpent(rule string) bool { return x.spent[rule] }

// end forgets a flow and records it.
func (x *sandbox) end(f *flow) {
	x.mu.Lock()
	delete(x.live, f)
	x.mu.Unlock()
	x.record(f)
}

func (x *sandbox) record(f *flow) {
	e := egress.Event{
		Time: f.inside.Start, Kind: "flow", Name: f.question.Host.Name, Address: f.address, Port: f.question.Port, Protocol: string(f.inside.Protocol),
		Action: string(policy.Allow), Rule: f.verdict.Rule, Revision: f.verdict.Revision,
		Up: f.inside.Up(), Down: f.inside.Down(), Duration: time.Since(f.inside.Start).Seconds(),
	}
	if e.Address == "" {
		e.Address = f.question.Host.Addr.String()
		if !f.question.Host.Addr.IsValid() {
			e.Address = ""
		}
	}
	f.mu.Lock()
	if f.failed != nil {
		e.Detail = f.failed.Error()
	}
	if v := f.denied; v != nil {
		e.Action, e.Rule, e.Reason, e.Detail, e.Revision = string(policy.Deny), v.Rule, string(v.Reason), v.Explain(), v.Revision
	}
	f.mu.Unlock()
	x.events.add(e)
}

// TCP judges a connection that the sandbox opens.
func (x *sandbox) TCP(ctx context.Context, inside *stack.Flow) func(stack.Conn) {
	f := x.ask(inside, policy.TCP)
	if f == nil {
		return nil
	}
	if opaque := f.verdict.Match != nil && f.verdict.Match.Opaque || f.question.Host.Name == ""; opaque {
		// A refusal outside is one inside.
		outside, err := x.dial(ctx, f, "tcp")
		if err != nil {
			x.end(f)
			return nil
		}
		return func(conn stack.Conn) {
			defer x.end(f)
			defer outside.Close()
			_ = stack.Splice(conn, outside.(*net.TCPConn))
		}
	}
	return func(conn stack.Conn) {
		defer x.end(f)
		if err := x.named(ctx, f, conn); err != nil {
			f.fail(err)
			inside.Reset()
		}
	}
}

var errDenied = errors.New("denied")

// named passes a connection to a name on, if what the client says of its destination is
// that name.
func (x *sandbox) named(ctx context.Context, f *flow, conn stack.Conn) error {
	ahead := inspect.Ahead(conn)
	_ = conn.SetReadDeadline(time.Now().Add(helloPatience))
	protocol, err := ahead.Protocol()
	var hello *policy.Hello
	if err == nil && protocol == inspect.TLS {
		var h inspect.Hello
		if h, err = ahead.Hello(); err == nil {
			hello = &policy.Hello{ServerName: h.ServerName, ECH: h.ECH}
		}
	}
	_ = conn.SetReadDeadline(time.Time{})
	if err != nil {
		return err
	}
	if v := f.verdict.DecideTLS(hello); v.Action != policy.Allow {
		f.deny(v)
		return errDenied
	}
	if hello == nil {
		return x.plain(ctx, f, ahead)
	}
	outside, err := x.dial(ctx, f, "tcp")
	if err != nil {
		return err
	}
	defer outside.Close()
	return stack.Splice(ahead, outside.(*net.TCPConn))
}

// plain passes HTTP without TLS on, each request of which must be for the flow's name.
func (x *sandbox) plain(ctx context.Context, f *flow, conn *inspect.Conn) error {
	p := inspect.NewProxy(inspect.Config{
		Judge: authority{f},
		Dial:  func(ctx context.Context, _ inspect.Flow) (net.Conn, error) { return x.dial(ctx, f, "tcp") },
	})
	defer p.Close()
	return p.Serve(conn, inspect.Flow{Name: f.question.Host.Name, Port: f.question.Port})
}

// authority lets every request to the flow's name pass: the rule does not look into them.
type authority struct{ flow *flow }

func (a authority) HTTP(_ context.Context, r inspect.Request) inspect.Verdict {
	v := a.flow.verdict.DecideHTTP(policy.Request{Method: r.Method, Authority: r.Authority, Target: r.Target, Header: r.Header, BodySize: r.Size})
	if v.Action != policy.Allow {
		a.flow.deny(v)
	}
	return inspect.Verdict{Allow: v.Action == policy.Allow, Target: v.Target, MaxBody: v.MaxBody, Rule: v.Rule, Reason: inspect.Reason(v.Reason), Detail: v.Detail, Hint: v.Explain()}
}

// UDP judges datagrams that the sandbox begins to send.
func (x *sandbox) UDP(ctx context.Context, inside *stack.Flow) func(net.Conn) {
	f := x.ask(inside, policy.UDP)
	if f == nil {
		return nil
	}
	outside, err := x.dial(ctx, f, "udp")
	if err != nil {
		x.end(f)
		return nil
	}
	return func(conn net.Conn) {
		defer x.end(f)
		defer outside.Close()
		stop := context.AfterFunc(ctx, func() { outside.Close() })
		defer stop()
		go func() {
			defer conn.Close()
			pass(conn, outside)
		}()
		pass(outside, conn)
	}
}

// pass copies datagrams, each as it is.
func pass(to io.Writer, from io.Reader) {
	datagram := make([]byte, 64<<10)
	for {
		n, err := from.Read(datagram)
		if err != nil {
			return
		}
		_, _ = to.Write(datagram[:n]) // a lost one is nobody's concern
	}
}

// dial connects to a flow's destination: to one of the addresses of its name that were
// vetted, or to the address itself, which Decide judged. The connection is looked at again
// before its first packet, whatever the resolver of this host made of it.
func (x *sandbox) dial(ctx context.Context, f *flow, network string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialPatience)
	defer cancel()
	addrs := []netip.Addr{f.question.Host.Addr}
	if name := f.question.Host.Name; name != "" {
		found, err := x.server.up.Lookup(ctx, name)
		if err != nil {
			f.fail(err)
			return nil, err
		}
		vetted, v := x.evaluator().Vet(f.verdict, found)
		if v.Action != policy.Allow {
			f.deny(v)
			return nil, errDenied
		}
		addrs = vetted
	}
	var errs []error
	for _, addr := range addrs {
		var d net.Dialer
		conn, err := d.DialContext(ctx, network, netip.AddrPortFrom(addr, f.question.Port).String())
		if err == nil {
			f.address = addr.String()
			return conn, nil
		}
		errs = append(errs, err)
	}
	err := errors.Join(errs...)
	f.fail(err)
	return nil, err
}
