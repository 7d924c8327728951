package server

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/ask"
	"github.com/berm-sandbox/berm/internal/network/dns"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/inspect"
	"github.com/berm-sandbox/berm/internal/network/policy"
	"github.com/berm-sandbox/berm/internal/network/quota"
	"github.com/berm-sandbox/berm/internal/network/stack"
	"github.com/berm-sandbox/berm/internal/service"
)

// Times.
const (
	dialPatience  = 20 * time.Second
	helloPatience = 15 * time.Second // for a client's first bytes
)

// flow is one flow of the sandbox's from its question to its record.
type flow struct {
	sandbox  *sandbox
	inside   *stack.Flow
	question policy.Flow
	verdict  policy.Verdict
	judge    *policy.Evaluator // whose verdict it is
	brokered *service.Wire     // by which it was handed over; under the sandbox's lock
	id       uint64            // of one that was handed over
	endpoint string            // by whose name it was asked for
	// candidates are the names of a real address that several share; nil else.
	candidates []string
	yes        string      // the rule whose question was answered for this flow alone
	use        *quota.Use  // of the policy's limits
	timer      *time.Timer // at the end of its time; nil: it has no end; under the sandbox's lock

	mu      sync.Mutex
	address string          // that was dialed
	denied  *policy.Verdict // why it was ended, if it was
	failed  error
	// unreached says that dialing failed.
	unreached bool
}

// to is the address that was dialed.
func (f *flow) to() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.address
}

func (f *flow) dialed(addr netip.Addr) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.address = addr.String()
}

func (f *flow) isDenied() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.denied != nil
}

func (f *flow) deny(v policy.Verdict) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.denied == nil {
		f.denied = &v
	}
}

// refuse is deny by who looks at what the client says.
func (f *flow) refuse(reason inspect.Reason, why string) {
	v := f.verdict
	v.Action, v.Reason, v.Detail = policy.Deny, policy.Reason(reason), why
	f.deny(v)
}

func (f *flow) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failed = err
}

// unreach is fail of dialing.
func (f *flow) unreach(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failed, f.unreached = err, true
}

// begin decides about a flow that begins. It returns nil when it may not.
func (x *sandbox) begin(ctx context.Context, inside *stack.Flow, proto policy.Proto) *flow {
	destination := inside.Destination
	host, port, endpoint := policy.AddrHost(destination.Addr()), destination.Port(), ""
	candidates := x.names.All(destination.Addr())
	if len(candidates) > 0 {
		name := candidates[0]
		if e, ok := x.endpoint(name); ok && port == 80 && proto == policy.TCP {
			endpoint, name, port = name, e.Host, e.Port
		}
		named, err := policy.ParseHost(name)
		if err != nil { // the responder gave an address to no name
			return nil
		}
		host = named
	}
	question := policy.Flow{Host: host, Port: port, Proto: proto, Time: time.Now(), Spent: x.isSpent}
	f := &flow{sandbox: x, inside: inside, question: question, endpoint: endpoint}
	if len(candidates) > 1 {
		f.candidates = candidates
	}
	// Under the lock, so that a policy that comes meanwhile judges it again, and a rule for
	// one flow is for one.
	x.mu.Lock()
	v := x.decide(question, "")
	for _, name := range f.candidates { // of several names of a real address, one that may be meant
		if v.Action != policy.Deny {
			break
		}
		if host, err := policy.ParseHost(name); err == nil {
			other := question
			other.Host = host
			if w := x.decide(other, ""); w.Action != policy.Deny {
				v, question, f.question = w, other, other
			}
		}
	}
	for v.Action == policy.Ask {
		x.mu.Unlock()
		v, f.yes = x.await(ctx, question, v)
		x.mu.Lock()
		if v.Action == policy.Allow { // it may have been taken back meanwhile
			v = x.decide(question, f.yes)
		}
	}
	f.verdict, f.judge = v, x.policy
	allowed := v.Action == policy.Allow && (!inspects(v) || x.ca != nil || x.broker != nil)
	var limit *quota.Exceeded
	if allowed && !x.server.flows.Take(x) {
		allowed, limit = false, &quota.Exceeded{Limit: "flows of all sandboxes together"}
	}
	if allowed {
		use, err := x.quota.Open(v.Rule)
		if allowed = !errors.As(err, &limit); allowed {
			f.use, inside.Meter = use, f.meter
			f.time()
		} else {
			x.server.flows.Give(x)
		}
	}
	if allowed {
		if v.Match != nil && v.Match.Once {
			x.spent[v.Rule] = true
		}
		x.live[f] = struct{}{}
	}
	x.mu.Unlock()
	if allowed {
		return f
	}
	switch {
	case limit != nil:
		v = beyond(v, limit)
	case v.Action == policy.Allow:
		v.Action, v.Reason, v.Detail = policy.Deny, policy.ReasonPolicy, "the rule looks into requests, and the sandbox was not made to trust that"
	}
	f.deny(v)
	x.record(f)
	return nil
}

// isSpent is asked by Decide, under the lock.
func (x *sandbox) isSpent(rule string) bool { return x.spent[rule] }

// vet returns those addresses of a flow's name that may be dialed by the policy in force.
func (x *sandbox) vet(f *flow, found []netip.Addr) ([]netip.Addr, policy.Verdict) {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.policy.Vet(x.current(f), found)
}

// current is the verdict about a flow by the policy in force. The caller holds the lock.
func (x *sandbox) current(f *flow) policy.Verdict {
	if f.judge == x.policy {
		return f.verdict
	}
	question := f.question
	question.Time, question.Spent = time.Now(), nil
	return x.decide(question, f.yes)
}

// rejudge ends a flow that a new policy does not allow, or not in the same way. The caller
// holds the lock.
func (x *sandbox) rejudge(f *flow) {
	question := f.question
	question.Time, question.Spent = time.Now(), nil
	v := x.decide(question, f.yes)
	if v.Action == policy.Ask {
		v = ask.Refused(v, "the answer does not hold any more")
	}
	if addr, err := netip.ParseAddr(f.to()); err == nil && v.Action == policy.Allow && question.Host.Name() != "" {
		_, v = x.policy.Vet(v, []netip.Addr{addr})
	}
	if v.Action == policy.Allow && (inspects(v) != inspects(f.verdict) || direct(v) != direct(f.verdict)) {
		v.Action, v.Reason, v.Detail = policy.Deny, policy.ReasonPolicy, "the rule that now applies looks at how such a flow begins"
	}
	if v.Action != policy.Allow {
		f.deny(v)
		f.inside.Reset()
		return
	}
	f.use.Move(v.Rule)
	f.time()
}

// inspects says whether the requests of a flow are looked into. What is not direct is TLS or
// HTTP, so there is no difference between the two kinds.
func inspects(v policy.Verdict) bool { return v.Inspect || v.Sniff }

// direct says whether a flow is passed on as it is: what it says of its destination need not
// be looked at, because the rule says so, because it is about an address, or because the
// rule is about all that is public and the port not one of HTTP.
func direct(v policy.Verdict) bool {
	if v.Flow.Host.Name() == "" || v.Match != nil && v.Match.Opaque {
		return true
	}
	if v.Flow.Port == 80 || v.Flow.Port == 443 {
		return false
	}
	return v.Match == nil || slices.ContainsFunc(v.Match.To, func(t policy.Target) bool { return t.String() == "public" })
}

// end forgets a flow and records it.
func (x *sandbox) end(f *flow) {
	x.mu.Lock()
	delete(x.live, f)
	f.release()
	x.mu.Unlock()
	x.server.flows.Give(x)
	x.record(f)
}

func (x *sandbox) record(f *flow) {
	e := egress.Event{
		Time: f.inside.Start, Kind: "flow", Name: f.question.Host.Name(), Address: f.to(), Port: f.question.Port, Protocol: string(f.inside.Protocol),
		Action: string(policy.Allow), Rule: f.verdict.Rule, Revision: f.verdict.Revision,
		Up: f.inside.Up(), Down: f.inside.Down(), Duration: time.Since(f.inside.Start).Seconds(),
	}
	if e.Address == "" {
		e.Address = f.question.Host.Addr().String()
		if !f.question.Host.Addr().IsValid() {
			e.Address = ""
		}
	}
	f.mu.Lock()
	if f.failed != nil {
		e.Detail, e.Unreached = egress.Outcome(f.failed), f.unreached
	}
	if v := f.denied; v != nil {
		e.Action, e.Rule, e.Reason, e.Detail, e.Revision = string(policy.Deny), v.Rule, string(v.Reason), v.Explain(), v.Revision
	}
	f.mu.Unlock()
	x.events.add(e)
}

// TCP judges a connection that the sandbox opens. One to port 53 is a query to whatever
// server it is for.
func (x *sandbox) TCP(ctx context.Context, inside *stack.Flow) func(stack.Conn) {
	if inside.Destination.Port() == 53 {
		return func(conn stack.Conn) { _ = x.responder.Serve(ctx, conn) }
	}
	f := x.begin(ctx, inside, policy.TCP)
	if f == nil {
		return nil
	}
	if f.endpoint != "" {
		return func(conn stack.Conn) {
			defer x.end(f)
			if err := x.handOver(ctx, f, x.door(), conn); err != nil {
				f.fail(err)
				inside.Reset()
			}
		}
	}
	if direct(f.verdict) {
		// A refusal outside is one inside.
		outside, err := x.dial(ctx, f, "tcp")
		if err != nil {
			x.end(f)
			return nil
		}
		return func(conn stack.Conn) {
			defer x.end(f)
			defer outside.Close()
			_ = stack.Splice(conn, outside.(stack.Conn))
		}
	}
	return func(conn stack.Conn) {
		defer x.end(f)
		if err := x.named(ctx, f, conn); err != nil {
			if denial := (*inspect.Denial)(nil); errors.As(err, &denial) {
				f.refuse(denial.Reason, denial.Message)
			}
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
	if hello != nil {
		x.choose(f, hello.ServerName)
	}
	if v := f.verdict.DecideTLS(hello); v.Action != policy.Allow {
		f.deny(v)
		return errDenied
	}
	if hello == nil || inspects(f.verdict) {
		if door := x.door(); door != nil {
			return x.handOver(ctx, f, door, ahead)
		}
		return x.look(f, ahead)
	}
	outside, err := x.dial(ctx, f, "tcp")
	if err != nil {
		return err
	}
	defer outside.Close()
	return stack.Splice(ahead, outside.(stack.Conn))
}

// choose makes a flow to a real address that several names share one to the name that the
// client asks for, if that is one of them and the policy has nothing against it.
func (x *sandbox) choose(f *flow, name string) {
	if !slices.Contains(f.candidates, name) || name == f.question.Host.Name() {
		return
	}
	host, err := policy.ParseHost(name)
	if err != nil {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	question := f.question
	question.Host = host
	v := x.decide(question, "")
	if v.Action != policy.Allow || v.Match != nil && v.Match.Once || inspects(v) && x.ca == nil && x.broker == nil {
		return // DecideTLS tells that it is another name
	}
	f.mu.Lock()
	f.question, f.verdict, f.judge = question, v, x.policy
	f.mu.Unlock()
	f.use.Move(v.Rule)
	f.time()
}

// look passes HTTP on, each request of which is judged: it must be for the flow's name, and be
// one that the rule allows.
func (x *sandbox) look(f *flow, conn *inspect.Conn) error {
	x.mu.Lock()
	r, sessions := x.upstream, x.sessions
	x.mu.Unlock()
	p := inspect.NewProxy(inspect.Config{
		CA:       x.ca,
		Roots:    r.Roots(),
		Sessions: sessions,
		Judge:    requests{x, f},
		Log:      func(r inspect.Record) { x.request(f, r) },
		Dial:     func(ctx context.Context, _ inspect.Flow) (net.Conn, error) { return x.dial(ctx, f, "tcp") },
	})
	defer p.Close()
	return p.Serve(conn, inspect.Flow{Name: f.question.Host.Name(), Port: f.question.Port})
}

// request tells of a request that was looked into.
func (x *sandbox) request(f *flow, r inspect.Record) {
	if !inspects(f.verdict) {
		// The flow is told, and with it why a request of it was refused.
		if r.Reason != "" && !r.Reason.Failed() {
			f.refuse(r.Reason, r.Err)
		}
		return
	}
	e := egress.Event{
		Time: r.Start, Kind: "http", Name: f.question.Host.Name(), Address: f.to(), Port: f.question.Port, Protocol: string(f.inside.Protocol),
		Action: string(policy.Allow), Rule: r.Rule, Revision: f.verdict.Revision, Method: r.Method, Path: r.Path, Status: r.Status,
		Up: r.Sent, Down: r.Received, Duration: r.Duration.Seconds(), Detail: r.Err,
	}
	if e.Unreached = r.Reason.Failed(); r.Reason != "" && !e.Unreached {
		e.Action, e.Reason = string(policy.Deny), string(r.Reason)
	}
	f.mu.Lock()
	if v := f.denied; v != nil && v.Reason == policy.ReasonLimit && r.Err != "" { // it was cut
		e.Action, e.Reason, e.Rule, e.Detail = string(policy.Deny), string(v.Reason), v.Rule, v.Explain()
	}
	f.mu.Unlock()
	x.events.add(e)
}

// requests judges those of one flow.
type requests struct {
	sandbox *sandbox
	flow    *flow
}

func (a requests) HTTP(_ context.Context, r inspect.Request) inspect.Verdict {
	a.sandbox.mu.Lock()
	v := a.sandbox.current(a.flow)
	a.sandbox.mu.Unlock()
	v = v.DecideHTTP(policy.Request{Method: r.Method, Authority: r.Authority, Target: r.Target, Header: r.Header, BodySize: r.Size})
	if v.Action == policy.Allow {
		if limit := (*quota.Exceeded)(nil); errors.As(a.sandbox.quota.Request(v.Rule), &limit) {
			v = beyond(v, limit)
		}
	}
	if v.Action != policy.Allow {
		a.flow.deny(v)
	}
	return inspect.Verdict{Allow: v.Action == policy.Allow, Target: v.Target, MaxBody: v.MaxBody, Rule: v.Rule, Reason: inspect.Reason(v.Reason), Detail: v.Detail, Hint: v.Explain()}
}

// UDP judges datagrams that the sandbox begins to send.
func (x *sandbox) UDP(ctx context.Context, inside *stack.Flow) func(net.Conn) {
	f := x.begin(ctx, inside, policy.UDP)
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
	if r, v := x.route(f); r.Proxied() {
		return x.dialProxied(ctx, f, r, v, network)
	}
	dialer := dns.Dialer{
		Lookup: x.server.up.Lookup,
		Vet: func(_ string, found []netip.Addr) ([]netip.Addr, error) {
			vetted, v := x.vet(f, found)
			if v.Action != policy.Allow {
				f.deny(v)
				return nil, errDenied
			}
			return vetted, nil
		},
		// Of a name or not, no address that a socket is about to be connected to is special.
		Check: func(to netip.AddrPort) error {
			if class := x.table.Judge(to.Addr()); class.Denied() {
				return berm.Errorf(berm.Denied, "%s is not dialed: %s", to.Addr(), class)
			}
			return nil
		},
	}
	var conn net.Conn
	var err error
	if name := f.question.Host.Name(); name != "" {
		conn, err = dialer.DialName(ctx, network, name, f.question.Port)
	} else {
		conn, err = dialer.DialAddr(ctx, network, netip.AddrPortFrom(f.question.Host.Addr(), f.question.Port))
	}
	if err != nil {
		if !errors.Is(err, errDenied) {
			f.unreach(err)
		}
		return nil, err
	}
	if addr, parseErr := netip.ParseAddrPort(conn.RemoteAddr().String()); parseErr == nil {
		x.mu.Lock()
		f.dialed(addr.Addr().Unmap())
		if f.judge != x.policy { // it came meanwhile, and knew no address to judge
			x.rejudge(f)
		}
		x.mu.Unlock()
	}
	if f.isDenied() {
		conn.Close()
		return nil, errDenied
	}
	return conn, nil
}
