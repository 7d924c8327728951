// Package broker is the service of credentials: the process that alone holds a sandbox's
// secrets and the key of its authority. The network service hands it the connections whose
// requests are looked into; it sees no packet.
package broker

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cleanup"
	"github.com/berm-sandbox/berm/internal/credential"
	"github.com/berm-sandbox/berm/internal/network/address"
	"github.com/berm-sandbox/berm/internal/network/ask"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/egress/compile"
	"github.com/berm-sandbox/berm/internal/network/inspect"
	"github.com/berm-sandbox/berm/internal/network/policy"
	"github.com/berm-sandbox/berm/internal/network/quota"
	"github.com/berm-sandbox/berm/internal/network/upstream"
	"github.com/berm-sandbox/berm/internal/service"
)

// authorityLife is how long a sandbox's authority is valid: longer than any sandbox lives.
const authorityLife = 30 * 24 * time.Hour

// Server is the service.
type Server struct {
	// Shared says that its sandboxes are a server's: they may get a policy that reaches the hosts
	// of their credentials later.
	Shared bool

	hosts       *address.Hosts
	credentials *credential.Broker
	flows       *quota.Pool[*sandbox]
	requests    *quota.Pool[*sandbox] // under way

	mu        sync.Mutex
	sandboxes map[berm.SandboxID]*sandbox
}

// What is taken at most, in bytes, by a flow, with its buffers for HTTP/2, and by a request under
// way, with its head, that of the reply, and what has come of the reply and is not taken; and how
// many of each a sandbox has however much memory there is.
const (
	flowMemory    = 512 << 10
	requestMemory = 1 << 20
	flowLimit     = 512
	requestLimit  = 256
)

// Room is for how many flows and requests at a time a process has descriptors and that memory. It
// is called before the process gives its rights away.
func Room(memory int64) (flows, requests int) {
	// Half of the memory for each; a request may have a connection of its own to its upstream.
	return quota.Room(memory/2, flowMemory, 2), quota.Room(memory/2, requestMemory, 2)
}

// New prepares the service, for so many flows and requests of all sandboxes at a time.
func New(flows, requests int) (*Server, error) {
	hosts, err := address.WatchHosts(nil)
	if err != nil {
		return nil, err
	}
	s := &Server{hosts: hosts, flows: quota.NewPool[*sandbox](flows, flowLimit), requests: quota.NewPool[*sandbox](requests, requestLimit), sandboxes: map[berm.SandboxID]*sandbox{}}
	s.credentials = &credential.Broker{Sources: credential.Sources{given: came{}, "secret": came{named: true}}, Report: s.report, Seed: s.seed}
	return s, nil
}

// Serve attends the sandboxes whose owners' connections come over hub, until it ends.
func (s *Server) Serve(hub *net.UnixConn) error { return egress.Hub(hub, s.Attend) }

// Attend serves the sandbox whose owner is at the other end of conn, until that ends.
func (s *Server) Attend(conn *net.UnixConn) {
	defer conn.Close()
	w := service.NewWire(conn)
	var first egress.Order
	if w.First(&first) != nil {
		return
	}
	x := &sandbox{server: s, id: first.Sandbox, wire: w, quota: quota.New(), live: map[*flow]struct{}{}}
	x.answers = ask.New(x.rejudge)
	answer, kept, err := x.open(first)
	if err != nil {
		_ = w.Send(egress.Answer{Error: service.Failed(err)})
		return
	}
	defer x.close()
	err = w.Send(answer, kept)
	if kept != nil {
		kept.Close()
	}
	if err != nil {
		return
	}
	for {
		var next egress.Order
		if w.Receive(&next) != nil {
			return
		}
		answer, err := x.change(next)
		if err != nil {
			answer = egress.Answer{Error: service.Failed(err)}
		}
		if w.Send(answer) != nil {
			return
		}
	}
}

// Pass goes through every lock of every sandbox, and returns: if one is held for ever, it
// does not.
func (s *Server) Pass() {
	s.mu.Lock()
	all := slices.Collect(maps.Values(s.sandboxes))
	s.mu.Unlock()
	for _, x := range all {
		x.mu.Lock()
		x.mu.Unlock() //nolint:staticcheck // that it can be had is all
	}
}

// report tells a sandbox's owner what happened with a credential. A use that cannot be told
// does not happen.
func (s *Server) report(e credential.Event) error {
	s.mu.Lock()
	x := s.sandboxes[e.Sandbox]
	s.mu.Unlock()
	if x == nil {
		return berm.Errorf(berm.NotFound, "sandbox %s has ended", e.Sandbox)
	}
	return x.report(e)
}

// seed is what the placeholders of a sandbox are made from.
func (s *Server) seed(id berm.SandboxID) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if x := s.sandboxes[id]; x != nil {
		return x.seed
	}
	return nil
}

// enter makes a sandbox known, and is undone by leave. AlreadyExists when it is known by
// another connection, whose end may not have been seen yet.
func (s *Server) enter(x *sandbox) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sandboxes[x.id] != nil {
		return berm.Errorf(berm.AlreadyExists, "sandbox %s has its credentials already", x.id)
	}
	s.sandboxes[x.id] = x
	s.flows.Join(x)
	s.requests.Join(x)
	return nil
}

func (s *Server) leave(x *sandbox) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sandboxes, x.id)
	s.flows.Leave(x)
	s.requests.Leave(x)
}

// sandbox is what one sandbox may do with its credentials.
type sandbox struct {
	server      *Server
	id          berm.SandboxID
	wire        *service.Wire
	table       *address.Table
	credentials *credential.Set
	ca          *inspect.CA
	seed        []byte
	revision    uint64 // counts the changes of credentials

	mu        sync.Mutex
	known     map[string]bool     // names that a policy may use for them
	attach    []egress.Attachment // by which the policy has their hosts looked into
	endpoints []egress.Endpoint
	door      *net.UnixConn // nil until it comes
	closed    bool
	policy    *policy.Evaluator
	quota     *quota.Quota // of requests; the network service keeps that of the rest
	// answers are given to both services, so that neither has to believe the other.
	answers  *ask.Answers
	upstream *upstream.Route   // of the policy
	sessions *inspect.Sessions // with whom its roots verify
	live     map[*flow]struct{}
	ending   sync.WaitGroup // of flows
}

// open begins with the first order. What is to be kept for a later process is the caller's to
// close; nil when that is what came.
func (x *sandbox) open(o egress.Order) (_ egress.Answer, kept *os.File, err error) {
	var none egress.Answer
	if o.Protocol != egress.Protocol {
		return none, nil, berm.Errorf(berm.Unsupported, "the service of credentials speaks protocol %d, not %d", egress.Protocol, o.Protocol)
	}
	var door, before *os.File
	if o.Door {
		if door = x.wire.File(); door == nil {
			return none, nil, berm.Errorf(berm.Invalid, "no connection to the network service came with the credentials")
		}
		defer door.Close()
	}
	if o.Authority {
		before = x.wire.File()
	}
	file := x.wire.File()
	if kept, err = x.identify(before); err != nil {
		return none, nil, err
	}
	cu := cleanup.Make(func() {
		if kept != nil {
			kept.Close()
		}
	})
	defer cu.Clean()
	var ranges []netip.Prefix
	for _, text := range o.Open {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return none, nil, berm.Errorf(berm.Invalid, "the range %q to open: %w", text, err)
		}
		ranges = append(ranges, p)
	}
	if x.table, err = address.NewTable(address.Config{Open: ranges, Own: x.server.hosts.Own}); err != nil {
		return none, nil, err
	}
	if err := x.server.enter(x); err != nil {
		return none, nil, err
	}
	cu.Add(func() { x.server.leave(x) })
	if x.credentials, err = x.server.credentials.Open(context.Background(), x.id, 0, nil); err != nil {
		return none, nil, err
	}
	cu.Add(x.credentials.Close)
	answer, err := x.bind(o, file)
	if err != nil {
		return none, nil, err
	}
	if !x.server.Shared {
		if err := x.reachable(); err != nil {
			return none, nil, err
		}
	}
	answer.Authority, answer.Keep = string(x.ca.PEM()), kept != nil
	if o.Trust {
		if answer.Trust, err = compile.Trust(o.Root, x.ca.PEM()); err != nil {
			return none, nil, err
		}
	}
	if door != nil {
		if err := x.useDoor(door); err != nil {
			return none, nil, err
		}
	}
	cu.Release()
	return answer, kept, nil
}

// identify makes the sandbox's authority and seed, or goes on with those of before, and returns
// what to keep of new ones.
func (x *sandbox) identify(before *os.File) (kept *os.File, err error) {
	if before != nil {
		text, err := egress.ReadMemory(before, maxKept)
		if err != nil {
			return nil, err
		}
		defer clear(text)
		x.ca, x.seed, err = parseKept(text)
		return nil, err
	}
	if x.ca, err = inspect.NewCA(authorityLife); err != nil {
		return nil, err
	}
	x.seed = make([]byte, 32)
	rand.Read(x.seed) // never fails
	text, err := x.ca.Marshal()
	if err != nil {
		return nil, err
	}
	text = append(text, pem.EncodeToMemory(&pem.Block{Type: seedBlock, Bytes: x.seed})...)
	defer clear(text)
	return egress.MemoryFile(text)
}

// maxKept bounds what is kept of a sandbox in bytes.
const maxKept = 64 << 10

// seedBlock is the type of the last block of what is kept, after those of the authority.
const seedBlock = "PLACEHOLDER SEED"

func parseKept(text []byte) (*inspect.CA, []byte, error) {
	ca, err := inspect.ParseCA(text)
	if err != nil {
		return nil, nil, err
	}
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if block.Type == seedBlock && len(block.Bytes) == 32 {
			return ca, block.Bytes, nil
		}
	}
	return nil, nil, berm.Errorf(berm.Invalid, "what was kept of the sandbox's placeholders is nothing")
}

// change carries out a later order. What is wrong leaves everything as it was.
func (x *sandbox) change(o egress.Order) (answer egress.Answer, err error) {
	if o.Reply != nil {
		return egress.Answer{Done: true}, x.answers.Give(*o.Reply, true)
	}
	if len(o.Mask) > 0 {
		return egress.Answer{Done: true, Masked: x.credentials.Mask(o.Mask)}, nil
	}
	if o.MaskStream {
		conn, err := service.Conn(x.wire.File())
		if err == nil {
			go x.maskStream(conn)
		}
		return egress.Answer{Done: true}, err
	}
	var door *os.File
	if o.Door {
		if door = x.wire.File(); door == nil {
			return answer, berm.Errorf(berm.Invalid, "no connection came with the message")
		}
		defer door.Close()
	}
	if o.Bind {
		answer, err = x.bind(o, x.wire.File())
	} else {
		answer.Done = true
		answer.Warnings, err = x.set(o.Policy)
	}
	if err == nil && door != nil {
		err = x.useDoor(door)
	}
	return answer, err
}

// useDoor takes connections that come by another door from now on.
func (x *sandbox) useDoor(file *os.File) error {
	conn, err := net.FileConn(file)
	if err != nil {
		return berm.Errorf(berm.Invalid, "the connection to the network service: %w", err)
	}
	door, ok := conn.(*net.UnixConn)
	if !ok {
		conn.Close()
		return berm.Errorf(berm.Invalid, "the connection to the network service is no Unix socket")
	}
	x.mu.Lock()
	old := x.door
	x.door = door
	x.mu.Unlock()
	if old != nil {
		old.Close()
	}
	go x.enter(door)
	return nil
}

// bind takes credentials, with their secrets, and the policy.
func (x *sandbox) bind(o egress.Order, file *os.File) (answer egress.Answer, err error) {
	if err := egress.Unpack(o.Credentials, file); err != nil {
		return answer, err
	}
	secrets := &secrets{}
	defer secrets.wipe()
	var all []credential.Binding
	known := map[string]bool{}
	for i := range o.Credentials {
		c := &o.Credentials[i]
		if known[c.Name] {
			return answer, berm.Errorf(berm.Invalid, "there are two credentials %q", c.Name).WithHint("give them different names; service=SERVICE says what it is then")
		}
		known[c.Name] = true
		secrets.add(c)
		some, err := bindings(c)
		if err != nil {
			return answer, err
		}
		all = append(all, some...)
	}
	if all, err = credential.Normal(all); err != nil {
		return answer, err
	}
	var attach []egress.Attachment
	var endpoints []egress.Endpoint
	for _, b := range all {
		known[b.ID] = true
		hosts := slices.DeleteFunc(slices.Clone(b.Hosts), func(h string) bool { return strings.HasPrefix(h, "!") })
		attach = append(attach, egress.Attachment{Credential: b.ID, Hosts: hosts})
		if b.Endpoint {
			endpoints = append(endpoints, egress.Endpoint{Name: egress.EndpointName(b.ID), Host: b.Hosts[0], Port: b.Ports[0]})
		}
	}
	e, warnings, err := x.compile(o.Policy, known, attach)
	if err != nil {
		return answer, err
	}
	x.revision++
	if err := x.credentials.Update(context.WithValue(context.Background(), secretsKey{}, secrets), x.revision, all); err != nil {
		return answer, err
	}
	x.install(e, known, attach, endpoints)
	return egress.Answer{Done: true, Warnings: warnings, Attach: attach, Endpoints: endpoints, Env: x.credentials.Env(egress.EndpointName)}, nil
}

// reachable refuses a credential that the policy gives no use: whoever gave it most likely
// takes it for a right to reach its hosts.
func (x *sandbox) reachable() error {
	reached := map[string]bool{}
	hosts := map[string][]string{}
	for _, b := range x.credentials.Bindings() {
		name := strings.TrimPrefix(b.Secret, given+":")
		for _, pattern := range b.Hosts {
			host, err := policy.ParseHost(strings.TrimPrefix(pattern, "*."))
			wild := strings.HasPrefix(pattern, "*.") // some name below may be allowed
			reached[name] = reached[name] || wild || err == nil && x.policy.Resolves(host, "A", time.Now())
			hosts[name] = append(hosts[name], pattern)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(hosts)) {
		if !reached[name] {
			return berm.Errorf(berm.Invalid, "the credential %s is for %s, which nothing lets the command reach", name, strings.Join(hosts[name], " and ")).
				WithHint("a credential allows no host: add --allow %s, or a rule to the policy", hosts[name][0])
		}
	}
	return nil
}

// set puts a policy in force, and ends what it does not allow.
func (x *sandbox) set(source egress.Policy) (warnings []string, err error) {
	x.mu.Lock()
	known, attach, endpoints := x.known, x.attach, x.endpoints
	x.mu.Unlock()
	e, warnings, err := x.compile(source, known, attach)
	if err == nil {
		x.install(e, known, attach, endpoints)
	}
	return warnings, err
}

// judge is a policy and what judges by it.
type judge struct {
	*policy.Evaluator
	policy *policy.Policy
	route  *upstream.Route
}

// compile makes a policy of its source, for credentials of those names.
func (x *sandbox) compile(source egress.Policy, known map[string]bool, attach []egress.Attachment) (j judge, warnings []string, err error) {
	source.Attach = attach
	p, err := compile.Policy(source)
	if err != nil {
		return j, nil, err
	}
	for _, id := range compile.Credentials(p) {
		if !known[id] {
			return j, nil, berm.Errorf(berm.Invalid, "the policy wants the credential %q, which nobody gave", id)
		}
	}
	e, err := policy.NewEvaluator(p, nil, x.table)
	if err != nil {
		return j, nil, err
	}
	route, err := upstream.New(source.Upstream, nil, x.table)
	if err != nil {
		return j, nil, err
	}
	for _, w := range p.Warnings(x.table) {
		warnings = append(warnings, w.Text)
	}
	return judge{e, p, route}, warnings, nil
}

// install judges by a policy from now on.
func (x *sandbox) install(judge judge, known map[string]bool, attach []egress.Attachment, endpoints []egress.Endpoint) {
	x.mu.Lock()
	x.policy, x.upstream, x.known, x.attach, x.endpoints = judge.Evaluator, judge.route, known, attach, endpoints
	x.sessions = &inspect.Sessions{} // the route may have other roots
	x.quota.Set(judge.policy)
	x.mu.Unlock()
	x.rejudge()
}

// rejudge ends the flows that are not allowed any more.
func (x *sandbox) rejudge() {
	x.mu.Lock()
	live := slices.Collect(maps.Keys(x.live))
	x.mu.Unlock()
	for _, f := range live {
		if !f.allowed() {
			f.proxy.Close()
		} else {
			f.proxy.Rejudge(context.Background())
		}
	}
}

// route is the way of the policy in force.
func (x *sandbox) route() *upstream.Route {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.upstream
}

// trusted is the route's roots, and the TLS sessions of who was verified by them.
func (x *sandbox) trusted() (*x509.CertPool, *inspect.Sessions) {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.upstream.Roots(), x.sessions
}

func (x *sandbox) evaluator() *policy.Evaluator {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.policy
}

// close ends all rights, and tells what there is still to tell.
func (x *sandbox) close() {
	x.credentials.Close()
	x.answers.Close()
	x.mu.Lock()
	x.closed = true
	if x.door != nil {
		x.door.Close()
	}
	live := slices.Collect(maps.Keys(x.live))
	x.mu.Unlock()
	for _, f := range live {
		f.proxy.Close()
	}
	x.ending.Wait()
	x.server.leave(x)
}

func (x *sandbox) report(e credential.Event) error {
	event := egress.Event{
		Time: e.Time.UTC(), Kind: string(e.Type), Name: e.Name, Port: e.Port, Protocol: string(policy.TCP), Method: e.Method,
		Action: string(policy.Allow), Reason: string(e.Reason), Credential: e.Binding,
	}
	if e.Type != credential.Use && e.Type != credential.Echo {
		event.Action = string(policy.Deny)
	}
	return x.tell(event)
}

// tell tells the owner of an event, without secrets that the sandbox has put into it.
func (x *sandbox) tell(e egress.Event) error {
	for _, text := range []*string{&e.Name, &e.Method, &e.Path, &e.Detail} {
		*text = string(x.credentials.Mask([]byte(*text)))
	}
	return x.wire.Send(egress.Answer{Event: &e})
}
