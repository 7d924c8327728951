package control

import (
	"context"
	"encoding/json"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/network/address"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/egress/compile"
	"github.com/berm-sandbox/berm/internal/network/policy"
)

// Egress is how sandboxes reach networks.
type Egress struct {
	// Service carries what they send; nil when this host cannot have it.
	Service Service
	// Broker looks into their requests; nil when there is none.
	Broker Broker
	// Asker answers what rules ask; nil when there is nobody, and all of it is denied.
	Asker Asker
	// Missing says why there is no Service.
	Missing string
	// Public lets a sandbox reach the public internet when its creator says nothing, as E2B
	// does; else it reaches nothing then.
	Public bool
	// Open are ranges of special addresses that policies may name.
	Open []string
	// Upstream is the operator's way to what policies allow.
	Upstream egress.Upstream
}

// Service is the network service.
type Service interface {
	// Attach gives it a sandbox's link, which the caller keeps a descriptor of, and the policy
	// for it. Requests are looked into by the Broker at the other end of door, which is nil
	// when none are. What happens is told to events.
	Attach(ctx context.Context, id berm.SandboxID, link, door *os.File, p egress.Policy, open []string, events func(egress.Event)) (Link, []string, error)
}

// Link is a sandbox's connection to the Service or the Broker; see egress.Link.
type Link interface {
	Set(ctx context.Context, p egress.Policy) (warnings []string, err error)
	Door(ctx context.Context, p egress.Policy, door *os.File) (warnings []string, err error)
	// MaskStream, of a link to the Broker, sends back what comes over a connection without
	// secrets.
	MaskStream(ctx context.Context, conn *os.File) error
	// Mask, of a link to the Broker, returns a text without secrets, as long as it was.
	Mask(ctx context.Context, text []byte) ([]byte, error)
	Reply(ctx context.Context, r egress.Reply) error
	Done() <-chan struct{}
	Finish(ctx context.Context)
}

// Policy is what a sandbox may reach. It is replaced and never changed.
type Policy struct {
	Reach    string          `json:"reach"`              // in a word: ReachPublic, ReachRules or ReachNothing
	Revision int             `json:"revision"`           // counts the changes
	Inspects bool            `json:"inspects,omitempty"` // it looks into requests
	Document json.RawMessage `json:"document"`           // as policy.DecodeJSON reads it
}

// What a sandbox can reach, in a word.
const (
	ReachPublic  = "public"  // the public internet
	ReachRules   = "rules"   // what the rules of its policy say
	ReachNothing = "nothing" // nothing, until its policy is changed
	ReachNone    = "none"    // nothing: it has no link
)

// Reach is what the sandbox can reach, in a word.
func (s *Sandbox) Reach() string {
	if s.Policy == nil {
		return ReachNone
	}
	return s.Policy.Reach
}

func newPolicy(p *policy.Policy, revision int) (*Policy, error) {
	document, err := json.Marshal(p)
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "network policy: %w", err)
	}
	reach := ReachNothing
	switch {
	case len(p.Rules) > 0:
		reach = ReachRules
	case p.Default == policy.AllowPublic:
		reach = ReachPublic
	}
	return &Policy{Reach: reach, Revision: revision, Inspects: p.CanInspect(), Document: document}, nil
}

func (p *Policy) order() egress.Policy {
	return egress.Policy{JSON: p.Document, Source: "policy", Revision: strconv.Itoa(p.Revision)}
}

// compile makes a policy of E2B's fields, with the fields that requests get, and refuses what
// this server cannot do.
func (m *Manager) compile(n Network, internet *bool) (*policy.Policy, Fields, error) {
	p, transforms, err := policy.FromE2B(policy.E2B{AllowOut: n.AllowOut, DenyOut: n.DenyOut, AllowInternet: internet, Rules: n.Transforms}, m.Egress.Public)
	switch {
	case err != nil:
		return nil, nil, err
	case m.Egress.Service == nil && len(n.AllowOut) > 0:
		return nil, nil, m.noNetwork("network.allowOut")
	case m.Egress.Service == nil && len(transforms) > 0:
		return nil, nil, m.noNetwork("network.rules")
	}
	if err := m.checkProxy(n.EgressProxy); err != nil {
		return nil, nil, err
	}
	p.Attach = nil // which the broker adds
	return p, fieldsOf(transforms), nil
}

// noNetwork refuses what needs a network.
func (m *Manager) noNetwork(what string) error {
	missing := m.Egress.Missing
	if missing == "" {
		missing = "this server has no network service"
	}
	return berm.Errorf(berm.Unsupported, "%s cannot be honoured: sandboxes of this server have no network but loopback: %s", what, missing).
		WithHint("berm doctor --fix-hints, on that host, says how to get it")
}

const (
	attachTime = 10 * time.Second
	// finishTime bounds how long the end of a sandbox waits for what the service has to tell.
	finishTime = time.Second
	// Events of which a sandbox gets records of their own; of the others the next record tells
	// the number. A sandbox can be denied as often as it likes.
	denialsPerSecond = 50 // and requests that were looked into
	denialsAtOnce    = 500
	flowsPerSecond   = 200 // that were allowed
	flowsAtOnce      = 2000
	// maxFlows is how many flows and denials of a sandbox are kept for NetworkLog.
	maxFlows = 1000
	// maxEventText bounds each text of an event in bytes.
	maxEventText = 1 << 10
)

// FlowEvent is a flow, a denial, a request that was looked into, or a query that the network service told of.
type FlowEvent struct {
	Seq uint64 `json:"seq"` // counts the events of the sandbox while this server runs
	egress.Event
}

// Traffic counts what a sandbox did on networks while this server runs.
type Traffic struct {
	Up, Down                       int64 // bytes of flows that ended
	Allowed, Denied, DeniedQueries uint64
}

// online is the network of one sandbox.
type online struct {
	// setting is held while the policy changes or the link is attached, so that the policy
	// of the session is the one in force.
	setting sync.Mutex

	mu          sync.Mutex
	link        Link                // nil while the service does not have it
	broker      Link                // nil while the broker does not know the sandbox
	last        Link                // to the broker, of a sandbox that was killed and whose files are still looked at
	toldAgent   berm.GuestConfig    // what the guest agent was told last
	untoldAgent *berm.GuestConfig   // what a paused sandbox's agent is still to be told
	attach      []egress.Attachment // that the broker made of the grants
	endpoints   []egress.Endpoint   // the same
	changed     chan struct{}       // has an element when keepOnline is to look again
	traffic     Traffic
	flows       []FlowEvent
	seq         uint64
	denials     *rate.Limiter
	allowed     *rate.Limiter
	untold      int

	over chan struct{} // closed when the sandbox ends
}

// again begins anew after an end, for a sandbox that starts again.
func (o *online) again() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.over, o.toldAgent, o.untoldAgent = make(chan struct{}), berm.GuestConfig{}, nil
}

func newOnline() *online {
	return &online{over: make(chan struct{}), changed: make(chan struct{}, 1), denials: rate.NewLimiter(denialsPerSecond, denialsAtOnce), allowed: rate.NewLimiter(flowsPerSecond, flowsAtOnce)}
}

// firstPolicy sets that of a new sandbox, and returns the record that is to tell of it.
func (s *session) firstPolicy(p *policy.Policy, proxy *EgressProxy) (_ audit.Record, err error) {
	if s.info.Policy, err = newPolicy(p, 1); err != nil {
		return audit.Record{}, err
	}
	data := map[string]any{"network": s.info.Policy}
	if !s.info.Grants.empty() {
		data["grants"] = s.info.Grants
	}
	if proxy != nil {
		data["egressProxy"] = proxy.plain()
	}
	return record(s.info.ID, s.info.Owner, audit.PolicySet, audit.OK, "", data), nil
}

// goOnline gives a new sandbox its network, with the fields that its requests get, and returns what is
// probably not meant in its policy. The record of that was written.
func (s *session) goOnline(ctx context.Context, fields Fields, proxy *EgressProxy) (warnings []string, err error) {
	if len(fields) > 0 {
		if err := s.m.Egress.Broker.SetFields(ctx, s.info.ID, fields); err != nil {
			return nil, err
		}
	}
	if proxy != nil {
		if _, err := s.keepProxy(ctx, proxy); err != nil {
			return nil, err
		}
	}
	s.online = newOnline()
	return s.attach(ctx, true)
}

// attach gives the link to the service, with the policy of the session, which nobody has
// judged before when it is new.
func (s *session) attach(ctx context.Context, isNew bool) (warnings []string, err error) {
	o := s.online
	o.setting.Lock()
	defer o.setting.Unlock()
	info := s.snapshot()
	ctx, cancel := context.WithTimeout(ctx, attachTime)
	defer cancel()
	file, err := s.takeLink(ctx)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	door, err := s.openDoor(ctx, &info)
	if err != nil {
		return nil, err
	}
	if door != nil {
		defer door.Close()
	}
	order, err := s.order(ctx, &info)
	if err != nil {
		return nil, err
	}
	order.Upstream.Verify = isNew
	link, warnings, err := s.m.Egress.Service.Attach(ctx, info.ID, file, door, order, s.m.Egress.Open, s.flow)
	if err != nil {
		return nil, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	select {
	case <-o.over:
		go finish(link)
	default:
		o.link = link
	}
	return warnings, nil
}

// takeLink returns the other end of the sandbox's link, for the caller to close.
func (s *session) takeLink(ctx context.Context) (*os.File, error) {
	s.mu.Lock()
	link := s.link
	s.link = nil
	s.mu.Unlock()
	if link != nil {
		return link, nil
	}
	return s.current().Link(ctx)
}

func finish(link Link) {
	ctx, cancel := context.WithTimeout(context.Background(), finishTime)
	defer cancel()
	link.Finish(ctx)
}

// keepOnline gives the link to the service whenever the service does not have it, and the
// sandbox to the broker. What the sandbox sends meanwhile reaches nobody.
func (s *session) keepOnline() {
	o := s.online
	const least, most = 50 * time.Millisecond, 5 * time.Second
	for wait := least; ; {
		link, broker := o.links()
		info := s.snapshot()
		var err error
		switch {
		case link == nil:
			_, err = s.attach(s.m.ctx, false)
		case broker == nil && info.inspected():
			err = s.rebroker(s.m.ctx)
		}
		if err != nil {
			if s.isOver() {
				return
			}
			s.m.Log.Error("a sandbox has no network, or no requests are looked into", "sandbox", s.info.ID, "error", err)
			if !s.pauseFor(wait) {
				return
			}
			wait = min(2*wait, most)
			continue
		}
		if link, broker = o.links(); link == nil {
			return // it is over
		}
		begin := time.Now()
		var lost string
		select {
		case <-link.Done():
			lost = "the network service"
		case <-done(broker):
			lost = "the service of credentials"
		case <-o.changed:
			continue
		case <-o.over:
			return
		case <-s.m.ctx.Done():
			return
		}
		o.lose(link, broker)
		if s.isOver() {
			return
		}
		s.m.Log.Warn(lost+" was lost; attaching the sandbox again", "sandbox", s.info.ID)
		if time.Since(begin) > most {
			wait = least
			continue
		}
		if !s.pauseFor(wait) {
			return
		}
		wait = min(2*wait, most)
	}
}

func (s *session) isOver() bool {
	select {
	case <-s.online.over:
		return true
	default:
		return s.m.ctx.Err() != nil
	}
}

func (s *session) pauseFor(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-s.online.over:
	case <-s.m.ctx.Done():
	}
	return false
}

// offline ends every flow at once, and returns when what happened is told.
func (s *session) offline() {
	o := s.online
	if o == nil {
		return
	}
	o.mu.Lock()
	select {
	case <-o.over:
	default:
		close(o.over)
	}
	link, broker := o.link, o.broker
	o.link, o.broker, o.last = nil, nil, broker
	o.mu.Unlock()
	var ending sync.WaitGroup
	if link != nil {
		ending.Go(func() { finish(link) })
	}
	if broker != nil {
		ending.Go(func() {
			// Its secrets are masked in what is kept of the files. No flow is left that could get one.
			if s.m.Blobs != nil && s.state() == berm.Killed {
				s.seen()
			}
			finish(broker)
		})
	}
	ending.Wait()
}

// flow takes in what the service tells.
func (s *session) flow(e egress.Event) {
	if e.Kind == egress.Asks {
		go s.asked(e) // as many at a time as the service asks
		return
	}
	o, denied := s.online, e.Action == "deny"
	for _, text := range []*string{&e.Name, &e.Detail, &e.Path, &e.Method, &e.Rule} { // the sandbox chose some
		if len(*text) > maxEventText {
			*text = (*text)[:maxEventText] + "…"
		}
	}
	record := audit.Record{
		Sandbox: s.info.ID, Actor: system, Type: audit.NetFlow, Src: "egress", Trust: audit.TrustHost,
		Outcome: audit.OK, Reason: e.Reason, PolicyID: e.Revision, Data: e,
	}
	switch {
	case e.Kind == "dns":
		record.Type = audit.NetDNS
	case e.Credential != "" || strings.HasPrefix(e.Kind, credentialKind):
		record.Type = audit.Type(e.Kind)
	}
	o.mu.Lock()
	times := uint64(max(e.Count, 1))
	switch {
	case e.Kind == "http" || strings.HasPrefix(e.Kind, credentialKind): // a part of a flow
	case !denied:
		o.traffic.Allowed++
		o.traffic.Up += e.Up
		o.traffic.Down += e.Down
	case e.Kind == "dns":
		o.traffic.DeniedQueries += times
	default:
		o.traffic.Denied += times
		o.traffic.Up += e.Up // of a flow that a new policy ended
		o.traffic.Down += e.Down
	}
	o.seq++
	if len(o.flows) == maxFlows {
		o.flows = append(o.flows[:0], o.flows[1:]...)
	}
	o.flows = append(o.flows, FlowEvent{o.seq, e})
	limiter := o.allowed
	if denied {
		record.Outcome = audit.Denied
	}
	if denied || e.Kind != "flow" {
		limiter = o.denials
	}
	if !limiter.Allow() {
		o.untold++
		o.mu.Unlock()
		return
	}
	gap := o.untold
	o.untold = 0
	o.mu.Unlock()
	emit := func(r audit.Record) {
		if err := s.m.Audit.Emit(r); err != nil {
			s.m.Log.Error("audit record lost", "sandbox", s.info.ID, "type", r.Type, "error", err)
		}
	}
	if gap > 0 {
		emit(audit.Record{
			Sandbox: s.info.ID, Actor: system, Type: audit.Gap, Src: "egress", Trust: audit.TrustHost, Outcome: audit.OK,
			Reason: "there were too many at once", Data: map[string]any{"source": "egress", "count": gap},
		})
	}
	emit(record)
}

// ErrPolicyChanged tells that the policy in force is not the one that a change was made of.
var ErrPolicyChanged = berm.Errorf(berm.Conflict, "the network policy was changed meanwhile").WithHint("read it again and make the change of that")

// SetNetwork replaces what a sandbox may reach by what E2B's fields say. Kinds: Invalid,
// NotFound, Unsupported.
func (m *Manager) SetNetwork(ctx context.Context, id berm.SandboxID, n Network, internet *bool, actor audit.Actor) error {
	p, fields, err := m.compile(n, internet)
	if err != nil {
		return err
	}
	granted, err := m.granting(fields)
	if err != nil {
		return err
	}
	s, err := m.session(id)
	if err != nil {
		return err
	}
	info := s.snapshot()
	if info.Policy == nil {
		if len(n.AllowOut) > 0 || len(fields) > 0 || n.EgressProxy != nil {
			return berm.Errorf(berm.Unsupported, "network.allowOut, rules and egressProxy cannot be honoured: sandbox %s was made without a network", id)
		}
		return nil // nothing is reached whatever the fields say
	}
	_, _, err = s.setPolicy(ctx, p, 0, actor, &granted, fields, n.EgressProxy, func(info *Sandbox) {
		info.Network.AllowOut, info.Network.DenyOut, info.Internet = n.AllowOut, n.DenyOut, internet
		info.Network.EgressProxy = n.EgressProxy.plain()
	})
	return err
}

// SetPolicy replaces the network policy of a sandbox, if its revision is still the one
// given; 0 is any. It returns the new one's, with warnings about it. Flows that it does not
// allow are reset. Kinds: Invalid, NotFound, Unsupported, Conflict (ErrPolicyChanged).
func (m *Manager) SetPolicy(ctx context.Context, id berm.SandboxID, p *policy.Policy, revision int, actor audit.Actor) (int, []string, error) {
	s, err := m.session(id)
	if err != nil {
		return 0, nil, err
	}
	if s.snapshot().Policy == nil {
		return 0, nil, m.noNetwork("a network policy")
	}
	revision, warnings, err := s.setPolicy(ctx, p, revision, actor, nil, nil, nil, func(info *Sandbox) {
		info.Network.AllowOut, info.Network.DenyOut, info.Internet = nil, nil, nil
	})
	if err == nil && p.Asks() && m.Egress.Asker == nil {
		warnings = append(warnings, "rules that ask deny: this server has nobody to ask (--ask-webhook)")
	}
	return revision, warnings, err
}

// CheckNetwork judges a question by the network policy of a sandbox that is in force. Kinds:
// NotFound (also without a policy), Invalid.
func (m *Manager) CheckNetwork(id berm.SandboxID, q policy.Question) (policy.Verdict, error) {
	p, table, err := m.policy(id)
	if err != nil {
		return policy.Verdict{}, err
	}
	e, err := policy.NewEvaluator(p, nil, table)
	if err != nil {
		return policy.Verdict{}, err
	}
	return e.Answer(q), nil
}

// ExplainNetwork says in plain words what the network policy of a sandbox that is in force
// allows, and returns its revision. Kinds: NotFound (also without a policy).
func (m *Manager) ExplainNetwork(id berm.SandboxID) (policy.Description, string, error) {
	p, table, err := m.policy(id)
	if err != nil {
		return policy.Description{}, "", err
	}
	return p.Describe(table, time.Now()), p.Revision, nil
}

// policy is the network policy of a sandbox that is in force, and the addresses as it takes them.
func (m *Manager) policy(id berm.SandboxID) (*policy.Policy, *address.Table, error) {
	s, err := m.session(id)
	if err != nil {
		return nil, nil, err
	}
	stored := s.snapshot().Policy
	if stored == nil {
		return nil, nil, berm.Errorf(berm.NotFound, "sandbox %s has no network policy: it has no network but loopback", id)
	}
	p, err := compile.Policy(stored.order())
	if err != nil {
		return nil, nil, err
	}
	table, err := address.NewTableHere(m.Egress.Open)
	return p, table, err
}

// setPolicy replaces the policy and, if granted is not nil, the fields that requests get.
func (s *session) setPolicy(ctx context.Context, p *policy.Policy, revision int, actor audit.Actor, granted *Grants, fields Fields, proxy *EgressProxy, also func(*Sandbox)) (int, []string, error) {
	o := s.online
	o.setting.Lock()
	defer o.setting.Unlock()
	before := s.snapshot()
	switch {
	case before.State == berm.Killed:
		return 0, nil, NotFound(before.ID)
	case revision != 0 && revision != before.Policy.Revision:
		return 0, nil, ErrPolicyChanged
	}
	next, err := newPolicy(p, before.Policy.Revision+1)
	if err != nil {
		return 0, nil, err
	}
	record := map[string]any{"network": next}
	if granted != nil {
		record["fields"], record["egressProxy"] = granted.Fields, proxy.plain()
	}
	if err := s.m.emit(before.ID, actor, audit.PolicySet, audit.OK, "", record); err != nil {
		return 0, nil, err
	}
	ctx, cancel := detached(ctx)
	defer cancel()
	back := func() {}
	if granted != nil && (len(granted.Fields) > 0 || len(before.Grants.Fields) > 0) {
		broker := s.m.Egress.Broker
		old, err := broker.Fields(ctx, before.ID)
		if err == nil {
			err = broker.SetFields(ctx, before.ID, fields)
		}
		if err != nil {
			return 0, nil, err
		}
		back = func() {
			if err := broker.SetFields(ctx, before.ID, old); err != nil {
				s.m.Log.Error("putting fields of requests back failed", "sandbox", before.ID, "error", err)
			}
		}
	}
	if granted != nil && (proxy != nil || before.Network.EgressProxy != nil) {
		fieldsBack := back
		proxyBack, err := s.keepProxy(ctx, proxy)
		if err != nil {
			fieldsBack()
			return 0, nil, err
		}
		back = func() {
			proxyBack()
			fieldsBack()
		}
	}
	warnings, err := s.install(ctx, func(info *Sandbox) {
		info.Policy = next
		if granted != nil {
			info.Grants.Fields, info.Grants.FieldSecrets = granted.Fields, granted.FieldSecrets
		}
		also(info)
	}, back)
	if err != nil {
		return 0, nil, err
	}
	return next.Revision, warnings, nil
}

// change changes what the broker grants a sandbox.
func (s *session) change(ctx context.Context, actor audit.Actor, what audit.Type, data any, change func(*Sandbox)) error {
	o := s.online
	o.setting.Lock()
	defer o.setting.Unlock()
	info := s.snapshot()
	if info.State == berm.Killed {
		return NotFound(info.ID)
	}
	if err := s.m.emit(info.ID, actor, what, audit.OK, "", data); err != nil {
		return err
	}
	ctx, cancel := detached(ctx)
	defer cancel()
	_, err := s.install(ctx, change, func() {})
	return err
}

// install stores a change of policy or grants and puts it in force, or leaves everything as it
// was and calls back. The caller holds setting.
func (s *session) install(ctx context.Context, change func(*Sandbox), back func()) (warnings []string, err error) {
	before := s.snapshot()
	// Stored first: a server that starts again must not fall back to what was taken away.
	store := func(change func(*Sandbox)) error {
		s.mu.Lock()
		change(&s.info)
		s.mu.Unlock()
		return s.trySave()
	}
	undo := func() {
		back()
		err := store(func(info *Sandbox) {
			info.Policy, info.Network, info.Internet, info.Grants = before.Policy, before.Network, before.Internet, before.Grants
		})
		if err != nil {
			s.m.Log.Error("saving a sandbox failed", "sandbox", before.ID, "error", err)
		}
	}
	if err := store(change); err != nil {
		undo()
		return nil, err
	}
	after := s.snapshot()
	warnings, err = s.enforce(ctx, !reflect.DeepEqual(before.Network.EgressProxy, after.Network.EgressProxy))
	// Without a link, what is attached later is so with this, and nothing passes until then.
	if err == nil || berm.KindOf(err) == berm.Unavailable {
		return warnings, nil
	}
	undo()
	if _, again := s.enforce(ctx, false); again != nil && berm.KindOf(again) != berm.Unavailable {
		s.m.Log.Error("putting a network policy back failed", "sandbox", before.ID, "error", again)
	}
	return nil, err
}

// enforce puts the policy and the grants of the session in force, with a proxy whose place was
// not judged before when it is new. The caller holds setting.
func (s *session) enforce(ctx context.Context, newProxy bool) (warnings []string, err error) {
	o := s.online
	info := s.snapshot()
	link, broker := o.links()
	if broker != nil { // also without a link: what was taken away must not come back with it
		if err := s.bind(ctx, broker, &info); err != nil {
			return nil, err
		}
	}
	if link == nil {
		return nil, berm.Errorf(berm.Unavailable, "the network service does not have the sandbox's link")
	}
	var door *os.File
	if broker == nil && info.inspected() {
		select {
		case o.changed <- struct{}{}: // there is a link more to look after, or one to try again
		default:
		}
		if door, err = s.openDoor(ctx, &info); err != nil {
			return nil, err
		}
		defer door.Close()
	}
	order, err := s.order(ctx, &info) // with what the broker attaches
	if err != nil {
		return nil, err
	}
	if order.Upstream.Verify = newProxy; door != nil {
		return link.Door(ctx, order, door)
	}
	return link.Set(ctx, order)
}

// NetworkLog returns what a living sandbox did on networks after the event of that number,
// oldest first: the last maxFlows events while this server runs. The audit log has all.
func (m *Manager) NetworkLog(id berm.SandboxID, after uint64) ([]FlowEvent, error) {
	s, err := m.session(id)
	if err != nil {
		return nil, err
	}
	events := []FlowEvent{}
	if s.online == nil {
		return events, nil
	}
	s.online.mu.Lock()
	defer s.online.mu.Unlock()
	flows := s.online.flows
	first, _ := slices.BinarySearchFunc(flows, after+1, func(e FlowEvent, seq uint64) int {
		return int(int64(e.Seq) - int64(seq))
	})
	return append(events, flows[first:]...), nil
}

// Traffic returns what each living sandbox with a network did.
func (m *Manager) Traffic() map[berm.SandboxID]Traffic {
	m.mu.Lock()
	sessions := m.all()
	m.mu.Unlock()
	all := map[berm.SandboxID]Traffic{}
	for _, s := range sessions {
		if s.online != nil {
			s.online.mu.Lock()
			all[s.info.ID] = s.online.traffic
			s.online.mu.Unlock()
		}
	}
	return all
}
