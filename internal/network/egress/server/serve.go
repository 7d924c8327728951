// Package server is the network service: the process through which alone sandboxes reach
// networks. It reads their links, answers their DNS and lets through what each one's policy
// allows. It holds no secret.
package server

import (
	"bytes"
	"context"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/address"
	"github.com/berm-sandbox/berm/internal/network/ask"
	"github.com/berm-sandbox/berm/internal/network/dns"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/egress/compile"
	"github.com/berm-sandbox/berm/internal/network/inspect"
	"github.com/berm-sandbox/berm/internal/network/policy"
	"github.com/berm-sandbox/berm/internal/network/quota"
	"github.com/berm-sandbox/berm/internal/network/stack"
	"github.com/berm-sandbox/berm/internal/network/upstream"
	"github.com/berm-sandbox/berm/internal/service"
	"github.com/berm-sandbox/berm/internal/trust/root"
)

// Server is the service.
type Server struct {
	hosts *address.Hosts
	up    *dns.Upstream
	flows *quota.Pool[*sandbox]

	mu        sync.Mutex
	sandboxes map[*sandbox]struct{} // that have their link
}

// New prepares the service. Names are resolved by the host's own resolvers, which
// Config names.
func New(c Config) (*Server, error) {
	hosts, err := address.WatchHosts(nil)
	if err != nil {
		return nil, err
	}
	if c.Flows <= 0 {
		c.Flows = 1 << 30
	}
	return &Server{
		hosts: hosts, up: dns.NewUpstream(c.Resolvers), sandboxes: map[*sandbox]struct{}{},
		flows: quota.NewPool[*sandbox](c.Flows, 0),
	}, nil
}

// Pass goes through every lock of every sandbox, and returns: if one is held for ever, it
// does not.
func (s *Server) Pass() {
	s.mu.Lock()
	all := slices.Collect(maps.Keys(s.sandboxes))
	s.mu.Unlock()
	for _, x := range all {
		x.pass()
	}
}

func (x *sandbox) pass() {
	x.mu.Lock()
	x.mu.Unlock() //nolint:staticcheck // that it can be had is all
	x.events.mu.Lock()
	x.events.mu.Unlock() //nolint:staticcheck // as above
	x.stack.Flows()
}

// Config is what the service is started with.
type Config struct {
	Resolvers []*dns.Resolver // that names are asked of; none uses those of /etc/resolv.conf
	Flows     int             // of all sandboxes at a time; 0 is as many as each may have
}

// Serve attends the sandboxes whose connections come over hub, one descriptor with each
// byte, until it ends.
func (s *Server) Serve(hub *net.UnixConn) error {
	return egress.Hub(hub, s.Attend)
}

// Attend serves one sandbox until its connection ends.
func (s *Server) Attend(conn *net.UnixConn) {
	defer conn.Close()
	w := service.NewWire(conn)
	var first egress.Order
	if w.First(&first) != nil {
		return
	}
	x, warnings, err := s.open(w, first)
	if err != nil {
		_ = w.Send(egress.Answer{Error: service.Failed(err)}, nil)
		return
	}
	defer x.close()
	if w.Send(egress.Answer{Done: true, Warnings: warnings, Trust: x.trust, Asks: x.asks}, nil) != nil {
		return
	}
	if first.Trust {
		var second egress.Order
		if w.Receive(&second) != nil {
			return
		}
		answer := egress.Answer{Done: true}
		if err := x.connect(w.File(), second.Frames); err != nil {
			answer = egress.Answer{Error: service.Failed(err)}
		}
		if w.Send(answer) != nil || answer.Error != nil {
			return
		}
	}
	s.mu.Lock()
	s.sandboxes[x] = struct{}{}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.sandboxes, x)
		s.mu.Unlock()
	}()
	ending := make(chan struct{})
	defer close(ending) // before x.close, which has still to tell what happened
	go func() {         // a link that failed ends the connection: its owner makes another
		select {
		case <-x.stack.Done():
			conn.Close()
		case <-ending:
		}
	}()
	for {
		var next egress.Order
		if w.Receive(&next) != nil {
			return
		}
		if next.Reply != nil {
			answer := egress.Answer{Done: true}
			if err := x.answers.Give(*next.Reply, false); err != nil {
				answer = egress.Answer{Error: service.Failed(err)}
			}
			if w.Send(answer) != nil {
				return
			}
			continue
		}
		// A policy that is wrong leaves the old one in force.
		door := w.File()
		warnings, err := x.set(next)
		if door != nil {
			if err == nil && next.Door {
				err = x.useBroker(door)
			} else {
				door.Close()
			}
		}
		if err != nil {
			_ = w.Send(egress.Answer{Error: service.Failed(err)}, nil)
			continue
		}
		if w.Send(egress.Answer{Done: true, Warnings: warnings}, nil) != nil {
			return
		}
	}
}

// open begins to use a link.
func (s *Server) open(w *service.Wire, o egress.Order) (_ *sandbox, warnings []string, err error) {
	if o.Protocol != egress.Protocol {
		return nil, nil, berm.Errorf(berm.Unsupported, "the network service speaks protocol %d, not %d", egress.Protocol, o.Protocol)
	}
	var door, link *os.File
	if o.Door {
		door = w.File()
	}
	if !o.Trust {
		link = w.File()
	}
	if o.Door && door == nil || !o.Trust && link == nil {
		return nil, nil, berm.Errorf(berm.Invalid, "a descriptor is missing with the policy")
	}
	var ranges []netip.Prefix
	for _, text := range o.Open {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, nil, berm.Errorf(berm.Invalid, "the range %q to open: %w", text, err)
		}
		ranges = append(ranges, p)
	}
	table, err := address.NewTable(address.Config{Open: ranges, Own: s.hosts.Own})
	if err != nil {
		return nil, nil, err
	}
	x := &sandbox{id: o.Sandbox, server: s, table: table, names: dns.NewNames(), events: newEvents(w), quota: quota.New(), live: map[*flow]struct{}{}}
	x.answers = ask.New(x.rejudgeAll)
	x.responder = dns.NewResponder(x.names, dns.Zone{Allowed: x.resolves, Missing: x.missing, Outside: x.asksOutside, Real: x.isReal, Told: x.told, Upstream: s.up}, x.admits)
	s.flows.Join(x)
	if warnings, err = x.set(o); err == nil {
		if door != nil {
			err = x.useBroker(door)
		} else if o.Trust {
			err = x.makeTrust(o.Root)
		}
	}
	if err == nil && link != nil {
		err = x.connect(link, o.Frames)
	}
	if err != nil {
		s.flows.Leave(x)
		x.events.close()
		return nil, nil, err
	}
	return x, warnings, nil
}

// connect begins to use a link, with frames around its packets or without.
func (x *sandbox) connect(link *os.File, frames bool) error {
	if link == nil {
		return berm.Errorf(berm.Invalid, "no link came with the message")
	}
	// The stack closes what it is given, and the descriptor belongs to a file.
	raw, err := link.SyscallConn()
	if err != nil {
		return berm.Errorf(berm.Internal, "use the link: %w", err)
	}
	fd := -1
	if controlErr := raw.Control(func(own uintptr) { fd, err = unix.FcntlInt(own, unix.F_DUPFD_CLOEXEC, 0) }); controlErr != nil {
		err = controlErr
	}
	link.Close()
	if err != nil {
		return berm.Errorf(berm.Internal, "use the link: %w", err)
	}
	if frames {
		x.stack, err = stack.NewEthernet(fd, x, stack.Limits{})
	} else {
		x.stack, err = stack.New(fd, x, stack.Limits{})
	}
	return err
}

// authorityLife is how long a sandbox's authority is valid: longer than any sandbox lives.
const authorityLife = 30 * 24 * time.Hour

// makeTrust makes the sandbox's authority if its policy looks into requests, and says what has
// to be trusted inside.
func (x *sandbox) makeTrust(programs *root.Root) (err error) {
	if !x.evaluator().CanInspect() {
		return nil
	}
	if x.ca, err = inspect.NewCA(authorityLife); err != nil {
		return err
	}
	x.trust, err = compile.Trust(programs, x.ca.PEM())
	return err
}

// sandbox is one sandbox's network. It judges the flows of its stack.
type sandbox struct {
	id     berm.SandboxID
	server *Server
	table  *address.Table
	names  *dns.Names
	stack  *stack.Stack

	responder *dns.Responder

	events  *events
	quota   *quota.Quota
	answers *ask.Answers
	ca      *inspect.CA // nil: no requests are looked into
	trust   *egress.Trust

	mu        sync.Mutex
	broker    *service.Wire // looks into requests in our stead; nil for none
	policy    *policy.Evaluator
	endpoints map[string]egress.Endpoint // of the broker's, by name
	upstream  *upstream.Route            // of the policy
	sessions  *inspect.Sessions          // with whom its roots verify
	real      bool                       // names have their real addresses
	asks      bool                       // some rule does
	given     egress.Policy              // in force
	spent     map[string]bool            // rules of it for one flow that were used
	live      map[*flow]struct{}
	handed    uint64      // flows that the broker got
	expiry    *time.Timer // at the end of the next rule that ends
}

// set puts a policy in force, and resets the flows that it does not allow.
func (x *sandbox) set(o egress.Order) (warnings []string, err error) {
	p, err := compile.Policy(o.Policy)
	if err != nil {
		return nil, err
	}
	if ids := compile.Credentials(p); o.Trust && !o.Door && len(ids) > 0 {
		return nil, berm.Errorf(berm.Invalid, "the policy wants the credential %q, which nobody gave", ids[0]).WithHint("--cred %s=SOURCE gives it", ids[0])
	}
	e, err := policy.NewEvaluator(p, nil, x.table)
	if err != nil {
		return nil, err
	}
	route, err := upstream.New(o.Policy.Upstream, x.server.up.Lookup, x.table)
	if err == nil {
		err = route.Verify(context.Background())
	}
	if err != nil {
		return nil, err
	}
	for _, w := range p.Warnings(x.table) {
		warnings = append(warnings, w.Text)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.spent == nil || !sameRules(x.given, o.Policy) {
		x.spent = map[string]bool{}
	}
	x.policy, x.given, x.upstream, x.endpoints = e, o.Policy, route, map[string]egress.Endpoint{}
	for _, e := range o.Policy.Endpoints {
		x.endpoints[e.Name] = e
	}
	x.sessions = &inspect.Sessions{}
	x.quota.Set(p)
	x.asks, x.real = p.Asks(), p.DNS.Real
	for f := range x.live {
		x.rejudge(f)
	}
	x.expire()
	return warnings, nil
}

// sameRules says whether a policy is another one's rules again, as they come with new credentials or
// another service of these: what is for one flow is not for another then.
func sameRules(a, b egress.Policy) bool {
	return a.Revision == b.Revision && a.YAML == b.YAML && bytes.Equal(a.JSON, b.JSON) && slices.Equal(a.Entries, b.Entries)
}

// expiryStep bounds how long a timer waits for the end of a rule: it stands still while the
// machine sleeps, and knows nothing of a clock that is set.
const expiryStep = 10 * time.Second

// expire judges the flows again when a rule's time is over. The caller holds the lock.
func (x *sandbox) expire() {
	if x.expiry != nil {
		x.expiry.Stop()
	}
	next := x.policy.NextExpiry(time.Now())
	if next.IsZero() {
		return
	}
	in := x.policy
	x.expiry = time.AfterFunc(min(time.Until(next), expiryStep), func() {
		x.mu.Lock()
		defer x.mu.Unlock()
		if x.policy != in {
			return
		}
		if !time.Now().Before(next) {
			for f := range x.live {
				x.rejudge(f)
			}
		}
		x.expire()
	})
}

func (x *sandbox) evaluator() *policy.Evaluator {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.policy
}

func (x *sandbox) close() {
	x.mu.Lock()
	if x.expiry != nil {
		x.expiry.Stop()
	}
	x.mu.Unlock()
	x.answers.Close()
	if x.stack != nil { // it never got its link
		x.stack.Close()
	}
	x.server.flows.Leave(x)
	if broker := x.door(); broker != nil {
		_ = broker.Close()
	}
	x.events.close()
}

// Query answers one DNS message.
func (x *sandbox) Query(ctx context.Context, _ netip.Addr, message []byte) []byte {
	return x.responder.Answer(ctx, message)
}

// resolves says whether there is a name for the sandbox.
func (x *sandbox) resolves(name string) bool {
	if _, ok := x.endpoint(name); ok {
		return true
	}
	host, err := policy.ParseHost(name)
	allowed := err == nil && x.evaluator().Resolves(host, "A", time.Now())
	if !allowed {
		x.events.add(egress.Event{Time: time.Now(), Kind: "dns", Name: name, Action: "deny", Reason: string(policy.ReasonNotListed)})
	}
	return allowed
}

// existsPatience bounds how long a query waits for whether its name exists: less than resolvers
// inside wait for an answer.
const existsPatience = time.Second

// missing says whether a name that a rule names exactly is known not to exist. Its addresses are
// asked for as they will be when it is connected to; through a proxy they never are.
func (x *sandbox) missing(ctx context.Context, name string) bool {
	host, err := policy.ParseHost(name)
	x.mu.Lock()
	evaluator, route := x.policy, x.upstream
	_, endpoint := x.endpoints[name]
	x.mu.Unlock()
	if err != nil || endpoint || route.Proxied() || !evaluator.Names(host, time.Now()) {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, existsPatience)
	defer cancel()
	_, err = x.server.up.Lookup(ctx, name)
	return err != nil && berm.KindOf(err) == berm.NotFound
}

// asksOutside says whether records of a type are looked up for a name.
func (x *sandbox) asksOutside(name, recordType string) bool {
	host, err := policy.ParseHost(name)
	return err == nil && x.evaluator().Resolves(host, recordType, time.Now())
}

// isReal says whether names have their real addresses.
func (x *sandbox) isReal() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.real
}

// told are the addresses of a name that the sandbox may know: none that is denied whatever a
// policy says.
func (x *sandbox) told(found []netip.Addr) []netip.Addr {
	return slices.DeleteFunc(slices.Clone(found), func(a netip.Addr) bool { return x.table.Judge(a).Denied() })
}

// Limited tells of a flow that a limit refused.
func (x *sandbox) Limited(f *stack.Flow, limit stack.Limit) {
	x.events.add(egress.Event{
		Time: time.Now(), Kind: "flow", Name: x.names.Name(f.Destination.Addr()), Address: f.Destination.Addr().String(), Port: f.Destination.Port(),
		Protocol: string(f.Protocol), Action: "deny", Reason: string(policy.ReasonLimit), Detail: string(limit),
	})
}
