// Package broker is the service of credentials: the process that alone holds a sandbox's
// secrets and the key of its authority. The network service hands it the connections whose
// requests are looked into; it sees no packet.
package broker

import (
	"context"
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
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/egress/compile"
	"github.com/berm-sandbox/berm/internal/network/inspect"
	"github.com/berm-sandbox/berm/internal/network/policy"
	"github.com/berm-sandbox/berm/internal/network/quota"
)

// authorityLife is how long a sandbox's authority is valid: longer than any sandbox lives.
const authorityLife = 30 * 24 * time.Hour

// Attend serves the sandbox whose owner is at the other end of conn, until that ends.
func Attend(conn *net.UnixConn) error {
	defer conn.Close()
	hosts, err := address.WatchHosts(nil)
	if err != nil {
		return err
	}
	w := egress.NewWire(conn)
	var first egress.Order
	_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	if w.Receive(&first) != nil {
		return nil
	}
	_ = conn.SetReadDeadline(time.Time{})
	x := &sandbox{wire: w, quota: quota.New(), live: map[*flow]struct{}{}}
	answer, err := x.open(first, w.File(), hosts)
	if err != nil {
		_ = w.Send(egress.Answer{Error: egress.Failed(err)}, nil)
		return nil
	}
	defer x.close()
	if w.Send(answer, nil) != nil {
		return nil
	}
	for {
		var next egress.Order
		if w.Receive(&next) != nil {
			return nil
		}
		// A policy that is wrong leaves the old one in force.
		warnings, err := x.set(next.Policy)
		answer := egress.Answer{Done: true, Warnings: warnings}
		if err != nil {
			answer = egress.Answer{Error: egress.Failed(err)}
		}
		if w.Send(answer, nil) != nil {
			return nil
		}
	}
}

// sandbox is what one sandbox may do with its credentials.
type sandbox struct {
	wire        *egress.Wire
	table       *address.Table
	credentials *credential.Set
	known       map[string]bool     // names that a policy may use for them
	attach      []egress.Attachment // by which the policy has their hosts looked into
	endpoints   []egress.Endpoint
	ca          *inspect.CA
	door        *net.UnixConn

	mu     sync.Mutex
	closed bool
	policy *policy.Evaluator
	quota  *quota.Quota // of requests; the network service keeps that of the rest
	live   map[*flow]struct{}
	ending sync.WaitGroup // of flows
}

// open begins with the first order and the descriptor of the door.
func (x *sandbox) open(o egress.Order, door *os.File, hosts *address.Hosts) (_ egress.Answer, err error) {
	var none egress.Answer
	if door == nil {
		return none, berm.Errorf(berm.Invalid, "no connection to the network service came with the credentials")
	}
	conn, err := net.FileConn(door)
	door.Close()
	if err != nil {
		return none, berm.Errorf(berm.Invalid, "the connection to the network service: %w", err)
	}
	cu := cleanup.Make(func() { conn.Close() })
	defer cu.Clean()
	var ok bool
	if x.door, ok = conn.(*net.UnixConn); !ok {
		return none, berm.Errorf(berm.Invalid, "the connection to the network service is no Unix socket")
	}
	if o.Protocol != egress.Protocol {
		return none, berm.Errorf(berm.Unsupported, "the service of credentials speaks protocol %d, not %d", egress.Protocol, o.Protocol)
	}
	var ranges []netip.Prefix
	for _, text := range o.Open {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return none, berm.Errorf(berm.Invalid, "the range %q to open: %w", text, err)
		}
		ranges = append(ranges, p)
	}
	if x.table, err = address.NewTable(address.Config{Open: ranges, Own: hosts.Own}); err != nil {
		return none, err
	}
	if err := x.bind(o); err != nil {
		return none, err
	}
	cu.Add(x.credentials.Close)
	warnings, err := x.set(o.Policy)
	if err != nil {
		return none, err
	}
	if err := x.reachable(); err != nil {
		return none, err
	}
	if x.ca, err = inspect.NewCA(authorityLife); err != nil {
		return none, err
	}
	files, env, err := inspect.Trust(os.DirFS("/"), x.ca.PEM(), nil)
	if err != nil {
		return none, err
	}
	trust := &egress.Trust{Env: env}
	for _, f := range files {
		trust.Files = append(trust.Files, egress.TrustFile{Path: f.Path, Data: f.Data})
	}
	cu.Release()
	go x.enter()
	return egress.Answer{Done: true, Warnings: warnings, Trust: trust, Attach: x.attach, Env: x.credentials.Env(egress.EndpointName), Endpoints: x.endpoints}, nil
}

// bind takes the secrets.
func (x *sandbox) bind(o egress.Order) error {
	secrets := given{}
	defer secrets.wipe()
	var all []credential.Binding
	x.known = map[string]bool{}
	for _, c := range o.Credentials {
		if x.known[c.Name] {
			return berm.Errorf(berm.Invalid, "there are two credentials %q", c.Name).WithHint("give them different names; service=SERVICE says what it is then")
		}
		secrets[c.Name], x.known[c.Name] = c.Value, true
		some, err := bindings(c)
		if err != nil {
			return err
		}
		all = append(all, some...)
	}
	b := &credential.Broker{Sources: credential.Sources{"given": secrets}, Report: x.report}
	var err error
	if x.credentials, err = b.Open(context.Background(), o.Sandbox, 1, all); err != nil {
		return err
	}
	for _, bound := range x.credentials.Bindings() {
		x.attach = append(x.attach, egress.Attachment{Credential: bound.ID, Hosts: bound.Hosts})
		x.known[bound.ID] = true
		if bound.Endpoint {
			x.endpoints = append(x.endpoints, egress.Endpoint{Name: egress.EndpointName(bound.ID), Host: bound.Hosts[0], Port: bound.Ports[0]})
		}
	}
	return nil
}

// reachable refuses a credential that the policy gives no use: whoever gave it most likely
// takes it for a right to reach its hosts.
func (x *sandbox) reachable() error {
	reached := map[string]bool{}
	hosts := map[string][]string{}
	for _, b := range x.credentials.Bindings() {
		name := strings.TrimPrefix(b.Secret, scheme)
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
	source.Attach = x.attach
	p, err := compile.Policy(source)
	if err != nil {
		return nil, err
	}
	for _, id := range compile.Credentials(p) {
		if !x.known[id] {
			return nil, berm.Errorf(berm.Invalid, "the policy wants the credential %q, which nobody gave", id)
		}
	}
	e, err := policy.NewEvaluator(p, nil, x.table)
	if err != nil {
		return nil, err
	}
	for _, w := range p.Warnings(x.table) {
		warnings = append(warnings, w.Text)
	}
	x.mu.Lock()
	x.policy = e
	x.quota.Set(p)
	live := slices.Collect(maps.Keys(x.live))
	x.mu.Unlock()
	for _, f := range live {
		if _, v := f.vet(); v.Action != policy.Allow {
			f.proxy.Close()
		} else {
			f.proxy.Rejudge(context.Background())
		}
	}
	return warnings, nil
}

func (x *sandbox) evaluator() *policy.Evaluator {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.policy
}

// close ends all rights, and tells what there is still to tell.
func (x *sandbox) close() {
	x.door.Close()
	x.credentials.Close()
	x.mu.Lock()
	x.closed = true
	live := slices.Collect(maps.Keys(x.live))
	x.mu.Unlock()
	for _, f := range live {
		f.proxy.Close()
	}
	x.ending.Wait()
}

// report tells the owner what happened with a credential. A use that cannot be told does not
// happen.
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

func (x *sandbox) tell(e egress.Event) error {
	return x.wire.Send(egress.Answer{Event: &e}, nil)
}
