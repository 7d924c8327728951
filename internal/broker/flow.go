package broker

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/credential"
	"github.com/berm-sandbox/berm/internal/network/dns"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/inspect"
	"github.com/berm-sandbox/berm/internal/network/policy"
	"github.com/berm-sandbox/berm/internal/network/quota"
	"github.com/berm-sandbox/berm/internal/service"
)

// dialPatience bounds how long an upstream may take to answer.
const dialPatience = 20 * time.Second

// flow is a connection of the sandbox's that was handed over. It judges its requests.
type flow struct {
	sandbox *sandbox
	host    policy.Host
	port    uint16
	inside  string       // the endpoint by whose name the sandbox reaches it
	found   []netip.Addr // by the network service
	proxies map[string][]netip.Addr
	yes     string // the rule whose question was answered for this flow alone
	proxy   *inspect.Proxy
	id      uint64
	cut     atomic.Pointer[egress.Cut] // why the network service ends it
}

// enter takes the connections that the network service hands over.
func (x *sandbox) enter(door *net.UnixConn) {
	w := service.NewWire(door)
	for {
		var handed egress.Flow
		if w.Receive(&handed) != nil {
			return
		}
		if handed.Cut != nil {
			x.mu.Lock()
			for f := range x.live {
				if f.id == handed.ID {
					f.cut.Store(handed.Cut)
				}
			}
			x.mu.Unlock()
			continue
		}
		if file := w.File(); file != nil {
			x.begin(handed, file)
		}
	}
}

// begin serves a connection if the policy allows it. The network service has asked the same
// policy, but it is the process that hostile packets reach: it is not believed.
func (x *sandbox) begin(handed egress.Flow, file *os.File) {
	conn, err := net.FileConn(file)
	file.Close()
	if err != nil {
		return
	}
	host, err := policy.ParseHost(handed.Name)
	f := &flow{sandbox: x, id: handed.ID, host: host, port: handed.Port, inside: handed.Endpoint, found: handed.Addresses, proxies: handed.Proxies}
	if err != nil || host.Name() == "" || f.inside != "" && !x.serves(handed) || f.admit().Action != policy.Allow {
		conn.Close()
		return
	}
	if !x.server.flows.Take(x) {
		conn.Close()
		e := f.event(time.Now(), inspect.ReasonLimit)
		e.Detail = "too many flows at a time that are looked into"
		_ = x.tell(e)
		return
	}
	roots, sessions := x.trusted()
	f.proxy = inspect.NewProxy(inspect.Config{
		CA: x.ca, Judge: f, Dial: f.dial, Roots: roots, Sessions: sessions, Credentials: attacher{x.credentials}, Log: f.log,
		Begin: f.count,
	})
	x.mu.Lock()
	if x.closed {
		x.mu.Unlock()
		x.server.flows.Give(x)
		f.proxy.Close()
		conn.Close()
		return
	}
	x.live[f] = struct{}{}
	x.ending.Add(1)
	x.mu.Unlock()
	go f.serve(conn)
}

// serves says whether a connection is to one of the endpoints, and to what that stands for.
func (x *sandbox) serves(handed egress.Flow) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return slices.Contains(x.endpoints, egress.Endpoint{Name: handed.Endpoint, Host: handed.Name, Port: handed.Port})
}

func (f *flow) serve(conn net.Conn) {
	x := f.sandbox
	defer x.ending.Done()
	err := f.proxy.Serve(conn, inspect.Flow{Name: f.host.Name(), Port: f.port, Endpoint: f.inside})
	f.proxy.Close()
	x.server.flows.Give(x)
	x.mu.Lock()
	delete(x.live, f)
	x.mu.Unlock()
	// Before there was a request.
	what := egress.Outcome(err)
	if what == "" {
		return
	}
	var reason inspect.Reason // none: it failed
	if denial := (*inspect.Denial)(nil); errors.As(err, &denial) {
		reason = denial.Reason
	}
	e := f.event(time.Now(), reason)
	e.Detail = what
	_ = x.tell(e)
}

// admit is judge of a flow that begins, which may use an answer that holds once.
func (f *flow) admit() policy.Verdict {
	v, once := f.sandbox.answers.Apply(f.decide())
	if once {
		f.yes = v.Rule
	}
	return v
}

// judge is the verdict about the flow by the policy in force and what was answered.
func (f *flow) judge() policy.Verdict {
	v := f.decide()
	if v.Action == policy.Ask && v.Rule == f.yes {
		v.Action = policy.Allow
		return v
	}
	v, _ = f.sandbox.answers.Apply(v)
	return v
}

func (f *flow) decide() policy.Verdict {
	return f.sandbox.evaluator().Decide(policy.Flow{Host: f.host, Port: f.port, Proto: policy.TCP, Time: time.Now()})
}

// vet returns the addresses that may be dialed.
func (f *flow) vet() ([]netip.Addr, policy.Verdict) {
	return f.sandbox.evaluator().Vet(f.judge(), f.found)
}

// allowed says whether the policy in force allows the flow.
func (f *flow) allowed() bool {
	v := f.judge()
	if !f.sandbox.route().ByName(v) {
		_, v = f.vet()
	}
	return v.Action == policy.Allow
}

// count counts a request that is under way.
func (f *flow) count() (end func(), ok bool) {
	x := f.sandbox
	return func() { x.server.requests.Give(x) }, x.server.requests.Take(x)
}

// HTTP judges a request.
func (f *flow) HTTP(_ context.Context, r inspect.Request) inspect.Verdict {
	v := f.judge().DecideHTTP(policy.Request{Method: r.Method, Authority: r.Authority, Target: r.Target, Header: r.Header, BodySize: r.Size})
	if v.Action == policy.Allow {
		if limit := (*quota.Exceeded)(nil); errors.As(f.sandbox.quota.Request(v.Rule), &limit) {
			v.Action, v.Reason, v.Rule, v.Detail = policy.Deny, policy.ReasonLimit, limit.Rule, limit.Limit
		}
	}
	return inspect.Verdict{Allow: v.Action == policy.Allow, Target: v.Target, MaxBody: v.MaxBody, Rule: v.Rule, Reason: inspect.Reason(v.Reason), Detail: v.Detail, Hint: v.Explain()}
}

func (f *flow) dial(ctx context.Context, _ inspect.Flow) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialPatience)
	defer cancel()
	v := f.judge()
	if r := f.sandbox.route().With(f.proxies); r.Proxied() && v.Action == policy.Allow {
		if r.ByName(v) {
			return r.DialName(ctx, f.host.Name(), f.port)
		}
		addrs, v := f.vet()
		if v.Action == policy.Allow {
			return r.DialAddrs(ctx, addrs, f.port)
		}
	}
	dialer := dns.Dialer{
		Lookup: func(context.Context, string) ([]netip.Addr, error) { return f.found, nil },
		Vet: func(string, []netip.Addr) ([]netip.Addr, error) {
			addrs, v := f.vet()
			if v.Action != policy.Allow {
				return nil, &inspect.Denial{Reason: inspect.Reason(v.Reason), Rule: v.Rule, Message: v.Explain()}
			}
			return addrs, nil
		},
		Check: func(to netip.AddrPort) error {
			if class := f.sandbox.table.Judge(to.Addr()); class.Denied() {
				return berm.Errorf(berm.Denied, "%s is not dialed: %s", to.Addr(), class)
			}
			return nil
		},
	}
	return dialer.DialName(ctx, "tcp", f.host.Name(), f.port)
}

// event is one about the flow; a reason makes it a denial, or says that the upstream failed.
func (f *flow) event(start time.Time, reason inspect.Reason) egress.Event {
	e := egress.Event{
		Time: start.UTC(), Kind: "http", Name: f.host.Name(), Port: f.port, Protocol: string(policy.TCP), Action: string(policy.Allow),
		Revision: f.judge().Revision,
	}
	if e.Unreached = reason.Failed(); reason != "" && !e.Unreached {
		e.Action, e.Reason = string(policy.Deny), string(reason)
	}
	return e
}

// log tells of a request.
func (f *flow) log(r inspect.Record) {
	e := f.event(r.Start, r.Reason)
	e.Rule, e.Method, e.Path, e.Status = r.Rule, r.Method, r.Path, r.Status
	e.Up, e.Down, e.Duration, e.Detail = r.Sent, r.Received, r.Duration.Seconds(), r.Err
	if cut := f.cut.Load(); cut != nil && r.Err != "" {
		e.Action, e.Reason, e.Rule, e.Detail = string(policy.Deny), cut.Reason, cut.Rule, cut.Detail
	}
	_ = f.sandbox.tell(e)
}

// attacher gives requests their credentials.
type attacher struct{ credentials *credential.Set }

func (a attacher) Attach(r inspect.Request, _ inspect.Verdict, out *http.Request) (inspect.Filter, error) {
	f := credential.Flow{Name: r.Flow.Name, Port: r.Flow.Port}
	if r.Scheme == "https" { // the proxy takes no other name in the hello, and an endpoint has one
		f.SNI = r.Flow.Name
	}
	filter, err := a.credentials.Attach(f, out)
	if filter == nil || err != nil { // a nil *Filter is no nil Filter
		return nil, err
	}
	return filter, nil
}

func (attacher) Denial(err error) *inspect.Denial {
	var refusal *credential.Refusal
	if !errors.As(err, &refusal) {
		return nil
	}
	return &inspect.Denial{Reason: inspect.Reason(refusal.Reason), Message: refusal.Message, Hint: refusal.Hint}
}

func (a attacher) Missing(r inspect.Request, res *http.Response) *inspect.Denial {
	refusal := a.credentials.Missing(credential.Flow{Name: r.Flow.Name, Port: r.Flow.Port}, res.Request, res.StatusCode)
	if refusal == nil {
		return nil
	}
	return a.Denial(refusal)
}
