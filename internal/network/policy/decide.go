package policy

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/address"
)

// Reason says why something was denied. The list is closed.
type Reason string

// The reasons of denials.
const (
	ReasonMetadata    Reason = "metadata"           // a cloud's metadata service
	ReasonPrivate     Reason = "private"            // a private network
	ReasonHost        Reason = "host"               // the host, or its loopback
	ReasonMulticast   Reason = "multicast"          //
	ReasonReserved    Reason = "reserved"           // not the public internet
	ReasonDestination Reason = "destination"        // neither a name nor an address
	ReasonOperator    Reason = "operator"           // the operator's own rules
	ReasonRule        Reason = "rule"               // a rule of the policy denies it
	ReasonNotListed   Reason = "not_listed"         // no rule names it
	ReasonPort        Reason = "port"               // a rule names it with other ports
	ReasonProto       Reason = "proto"              // a rule names it with another protocol
	ReasonExpired     Reason = "expired"            // a rule named it until some time, or for one use
	ReasonDNSPrivate  Reason = "dns_private_answer" // an allowed name has no address that may be dialed
	ReasonSNI         Reason = "sni_mismatch"
	ReasonECH         Reason = "ech"
	ReasonTLS         Reason = "tls" // the rule requires or forbids TLS
	ReasonAuthority   Reason = "authority_mismatch"
	ReasonMethod      Reason = "method"
	ReasonPath        Reason = "path"
	ReasonQuery       Reason = "query"
	ReasonHeader      Reason = "header"
	ReasonBody        Reason = "body" // too large, or of a type that is not listed
	ReasonUpgrade     Reason = "upgrade"
	ReasonLimit       Reason = "limit"
	ReasonAsk         Reason = "ask" // a rule asks, and there was no yes
	ReasonNoSession   Reason = "no_session"
	ReasonCredential  Reason = "credential"   // nobody is there who could give it
	ReasonPolicy      Reason = "policy_error" // there is no policy
)

// Flow is a connection or an exchange of datagrams that begins.
type Flow struct {
	Host  Host
	Port  uint16
	Proto Proto // TCP or UDP
	Time  time.Time
	// Spent says whether a rule for one flow was used; nil for none.
	Spent func(rule string) bool
}

// Verdict is what was decided about a flow or a request, and by what.
type Verdict struct {
	Action   Action
	Reason   Reason // "" when Action is Allow
	Rule     string // the rule that decided, or that came nearest; "" for none
	Revision string
	Detail   string // what is wrong in particular; may be empty
	Flow     Flow
	// Match is the rule whose limits and credentials apply; nil for the default.
	Match *Rule
	// Credentials are those that may be used.
	Credentials []string
	// Inspect says that requests have to be looked into: DecideHTTP decides each.
	Inspect bool
	// Sniff says the same if the client begins with TLS or HTTP. Else the flow is passed on
	// as it is: no rule asks for HTTP on its port.
	Sniff bool
	// Target is the request target to forward, in a verdict about a request.
	Target string
	// MaxBody is the most bytes of the request's body that may be forwarded; 0 for no limit.
	MaxBody int64

	order  int  // how many rules stand before the one that decided
	named  bool // the destination is named, and not only public
	byName bool // of the evaluator
}

// Named says whether the rule that decided names the destination. Else it, or the
// default, means all that is public, and it does not matter which public name it is.
func (v Verdict) Named() bool { return v.named }

// Evaluator decides by a policy. It is safe for concurrent use and never changes.
type Evaluator struct {
	policy *Policy
	table  *address.Table
	floor  ruleset
	rules  ruleset
	byName bool // some rule does more to a name than to allow it
}

// ruleset is rules in order, with an index by which of them a destination can match: a
// decision does not take longer for more rules.
type ruleset struct {
	list   []compiled
	names  map[string][]int // by the name, or what follows the wildcard
	groups []int            // rules about all that is public
	ranges []int            // rules with ranges
}

func (s *ruleset) add(r *Rule) {
	c, i := compile(r), len(s.list)
	s.list = append(s.list, c)
	if s.names == nil {
		s.names = map[string][]int{}
	}
	for _, t := range c.names {
		s.names[t.name] = append(s.names[t.name], i)
	}
	if c.public || c.named {
		s.groups = append(s.groups, i)
	}
	if len(c.ranges) > 0 {
		s.ranges = append(s.ranges, i)
	}
}

// about returns the rules that may match a destination, in order.
func (s *ruleset) about(h Host) []int {
	found := slices.Clone(s.groups)
	if h.name == "" {
		found = append(found, s.ranges...)
	}
	for name := h.name; name != ""; _, name, _ = strings.Cut(name, ".") {
		found = append(found, s.names[name]...)
	}
	slices.Sort(found)
	return slices.Compact(found)
}

type compiled struct {
	*Rule
	names         []Target
	ranges        []netip.Prefix
	public, named bool // the groups of that name
}

// NewEvaluator prepares a policy under the operator's floor, whose rules can only deny.
// It fails with Invalid when a rule contradicts itself. Nobody may change the policy
// afterwards.
func NewEvaluator(p *Policy, floor []Rule, table *address.Table) (*Evaluator, error) {
	e := &Evaluator{policy: p, table: table}
	for i := range floor {
		if floor[i].action() != Deny {
			return nil, berm.Errorf(berm.Invalid, "rule %s of the operator does not deny", floor[i].ID).
				WithHint("the operator's rules stand above every policy and can only deny")
		}
	}
	for _, list := range []struct {
		from []Rule
		to   *ruleset
	}{{floor, &e.floor}, {p.Rules, &e.rules}} {
		for i := range list.from {
			r := &list.from[i]
			if err := r.check(); err != nil {
				return nil, err
			}
			list.to.add(r)
			names := slices.ContainsFunc(r.To, func(t Target) bool { return t.kind != addrRange })
			e.byName = e.byName || names && (r.action() != Allow || r.inspects())
		}
	}
	return e, nil
}

func compile(r *Rule) compiled {
	c := compiled{Rule: r}
	add := func(t Target) {
		if t.kind == addrRange {
			c.ranges = append(c.ranges, t.prefix)
		} else {
			c.names = append(c.names, t)
		}
	}
	for _, t := range r.To {
		switch {
		case t.kind != namedGroup:
			add(t)
		case t.name == groupPublic:
			c.public = true
		case t.name == groupNames:
			c.named = true
		default:
			for _, m := range groups()[t.name] {
				add(m)
			}
		}
	}
	return c
}

// guarded are ports that only a rule which names them opens: mail, through which
// sandboxes would send spam, and DNS, which Berm answers itself.
var guarded = [...]uint16{25, 53, 465, 587, 853}

// fit says how far a rule matches.
type fit uint8

const (
	fitNone fit = iota
	fitHost
	fitProto
	fitPort
	fitAll
)

// fits also says whether the rule names the destination, or means all that is public.
func (c *compiled) fits(f Flow, addr netip.Addr, class address.Class) (fit, bool) {
	var named, hit bool
	if name := f.Host.name; name != "" {
		named = slices.ContainsFunc(c.names, func(t Target) bool { return t.matchName(name) })
		hit = named || (c.public || c.named) && !private(name)
	} else {
		named = slices.ContainsFunc(c.ranges, func(p netip.Prefix) bool { return p.Contains(addr) })
		hit = named || c.public && class == address.Public
	}
	if !hit {
		return fitNone, false
	}
	return c.fitsService(f), named
}

// fitsService is fits for a destination that the rule means.
func (c *compiled) fitsService(f Flow) fit {
	if proto := c.proto(); proto != AnyProto && proto != f.Proto {
		return fitHost
	}
	allows := c.action() != Deny
	if !slices.ContainsFunc(c.ports(), func(p PortRange) bool {
		return p.contains(f.Port) && (!allows || p.From == p.To || !slices.Contains(guarded[:], f.Port))
	}) {
		return fitProto
	}
	if !c.Expires.IsZero() && !f.Time.Before(c.Expires) || c.Once && f.Spent != nil && f.Spent(c.ID) {
		return fitPort
	}
	return fitAll
}

var nearReasons = [...]Reason{fitHost: ReasonProto, fitProto: ReasonPort, fitPort: ReasonExpired}

// Decide judges a flow by what is known when it begins: the first rule that matches wins.
// A flow to a name that is allowed still needs Vet for the addresses of the name.
func (e *Evaluator) Decide(f Flow) Verdict {
	v := Verdict{Action: Deny, Flow: f, Reason: ReasonPolicy}
	if e == nil {
		return v
	}
	v.Revision, v.order = e.policy.Revision, len(e.rules.list)
	v.byName = e.byName
	addr, class := f.Host.addr, address.Public
	if f.Host.name == "" {
		class = e.table.Judge(addr)
		addr = e.table.Canonical(addr)
		v.Detail = address.Describe(addr)
		if class.Denied() {
			v.Reason = classReason(class)
			return v
		}
	} else if v.Reason = forbidden(f.Host.name); v.Reason != "" {
		return v
	}
	if f.Port == 0 || f.Proto != TCP && f.Proto != UDP {
		v.Reason = ReasonDestination
		return v
	}
	for _, i := range e.floor.about(f.Host) {
		if fit, _ := e.floor.list[i].fits(f, addr, class); fit == fitAll {
			v.Rule, v.Reason, v.Detail = e.floor.list[i].ID, ReasonOperator, e.floor.list[i].Reason
			return v
		}
	}
	nearest := fitNone
	for _, i := range e.rules.about(f.Host) {
		r := &e.rules.list[i]
		fit, named := r.fits(f, addr, class)
		if fit != fitAll {
			if fit > nearest && r.action() != Deny {
				nearest, v.Rule = fit, r.ID
			}
			continue
		}
		v.Action, v.Rule, v.Match, v.order, v.named = r.action(), r.ID, r.Rule, i, named
		if v.Reason, v.Detail = "", r.Reason; v.Action == Deny {
			v.Reason, v.Match = ReasonRule, nil
			return v
		}
		e.attach(&v)
		return v
	}
	public := class == address.Public && (f.Host.name == "" || !private(f.Host.name))
	if e.policy.Default == AllowPublic && public {
		switch {
		case f.Proto != TCP:
			nearest = max(nearest, fitHost)
		case slices.Contains(guarded[:], f.Port):
			nearest = max(nearest, fitProto)
		default:
			v.Action, v.Reason, v.Rule = Allow, "", ""
			e.attach(&v)
			return v
		}
	}
	if v.Reason = ReasonNotListed; nearest != fitNone {
		v.Reason = nearReasons[nearest]
	}
	return v
}

// attach adds the credentials of the flow's destination. They need TCP that Berm may
// look into.
func (e *Evaluator) attach(v *Verdict) {
	if v.Match != nil {
		v.Credentials, v.Inspect = slices.Clone(v.Match.Attach), v.Match.inspects()
		if v.Match.TLS == TLSPassthrough || v.Match.Opaque {
			return
		}
	}
	id := e.attached(v.Flow.Host.name)
	if id == "" || v.Flow.Proto != TCP {
		return
	}
	v.Credentials = append(v.Credentials, id)
	if web := v.Flow.Port == 80 || v.Flow.Port == 443; web || v.Inspect {
		v.Inspect = true
	} else {
		v.Sniff = true
	}
}

// attached is the credential for a name: of the exact name before the longest wildcard.
func (e *Evaluator) attached(name string) string {
	best, id := -1, ""
	for _, a := range e.policy.Attach {
		for _, t := range a.To {
			if name == "" || !t.matchName(name) {
				continue
			}
			length := len(t.name)
			if t.kind == exactName {
				length = 1 << 10
			}
			if length > best {
				best, id = length, a.Credential
			}
		}
	}
	return id
}

func classReason(c address.Class) Reason {
	switch c {
	case address.Metadata:
		return ReasonMetadata
	case address.Private, address.LinkLocal:
		return ReasonPrivate
	case address.Host, address.Loopback:
		return ReasonHost
	case address.Multicast:
		return ReasonMulticast
	case address.Malformed:
		return ReasonDestination
	}
	return ReasonReserved
}

// Vet returns those addresses of a flow's name that may be dialed: public ones, and
// opened ones if the verdict's rule names the name; none that the operator's floor or a
// range in an earlier rule denies. When none is left the verdict returned denies.
func (e *Evaluator) Vet(v Verdict, addrs []netip.Addr) ([]netip.Addr, Verdict) {
	if v.Action != Allow {
		return nil, v
	}
	var left []netip.Addr
	denied := Verdict{
		Action: Deny, Reason: ReasonDNSPrivate, Rule: v.Rule, Revision: v.Revision, Flow: v.Flow,
		Detail: "the name has no address",
	}
	for _, a := range addrs {
		class := e.table.Judge(a)
		addr := e.table.Canonical(a)
		if class.Denied() || class == address.Opened && !v.named {
			denied.Reason, denied.Rule, denied.Detail = ReasonDNSPrivate, v.Rule, "its address "+addr.String()+" is not public: a rule must name the host, and the operator must open the address"
			if class == address.Opened {
				denied.Detail = "its address " + addr.String() + " is opened for rules that name the host alone, and none does"
			}
			continue
		}
		by := e.rangeDenies(v, addr)
		if by == nil {
			left = append(left, a)
			continue
		}
		denied.Reason, denied.Rule, denied.Detail = ReasonRule, by.ID, "its address "+addr.String()+" is in a range of the rule"
	}
	if len(left) == 0 {
		return nil, denied
	}
	return left, v
}

// rangeDenies returns the rule before the verdict's own that decides about the address
// and does not plainly allow it: its conditions would not be the ones that are enforced.
func (e *Evaluator) rangeDenies(v Verdict, addr netip.Addr) *Rule {
	for _, rules := range [...]*ruleset{&e.floor, &e.rules} {
		for _, i := range rules.ranges {
			r := &rules.list[i]
			if rules == &e.rules && i >= v.order {
				break
			}
			if !slices.ContainsFunc(r.ranges, func(p netip.Prefix) bool { return p.Contains(addr) }) || r.fitsService(v.Flow) != fitAll {
				continue
			}
			if r.action() == Allow && !r.inspects() && r.TLS == "" && r.Limits == (Limits{}) {
				return nil
			}
			return r.Rule
		}
	}
	return nil
}

// NeedsInspection says whether requests over TCP to a destination have to be looked into,
// so that the sandbox must trust Berm's certificate for it.
func (e *Evaluator) NeedsInspection(host Host, port uint16, now time.Time) bool {
	v := e.Decide(Flow{Host: host, Port: port, Proto: TCP, Time: now})
	return v.Action != Deny && (v.Inspect || v.Sniff)
}

// CanInspect says whether any flow may need inspection, so that certificates have to be
// installed at all.
func (e *Evaluator) CanInspect() bool { return e.policy.CanInspect() }

// Asks says whether some rule leaves flows to somebody.
func (p *Policy) Asks() bool {
	return slices.ContainsFunc(p.Rules, func(r Rule) bool { return r.action() == Ask })
}

// NextExpiry is when the next rule ends after now, zero for never: flows that it let pass
// are to be judged again then.
func (e *Evaluator) NextExpiry(now time.Time) (next time.Time) {
	for i := range e.policy.Rules {
		if t := e.policy.Rules[i].Expires; t.After(now) && (next.IsZero() || t.Before(next)) {
			next = t
		}
	}
	return next
}

// Resolves says whether a question for a name is answered: a rule or the default could
// let a flow to it pass on some port, and the record type is one of the policy's or of that
// rule's. What is not answered is not asked upstream.
func (e *Evaluator) Resolves(host Host, recordType string, now time.Time) bool {
	if e == nil || host.name == "" || forbidden(host.name) != "" {
		return false
	}
	rule, ok := e.allowing(host.name, now)
	return ok && (recordType == "A" || slices.Contains(e.policy.DNS.Types, recordType) || rule != nil && slices.Contains(rule.DNSTypes, recordType))
}

// Names says whether the rule that could let a flow to a name pass names exactly that, and asks
// nobody: that the sandbox looks it up tells no more than the policy does.
func (e *Evaluator) Names(host Host, now time.Time) bool {
	if e == nil {
		return false
	}
	rule, ok := e.allowing(host.name, now)
	return ok && rule != nil && rule.action() == Allow && slices.ContainsFunc(rule.To, func(t Target) bool { return t.kind == exactName && t.name == host.name })
}

// allowing is the first rule that could let a flow to a name pass, nil for the default.
func (e *Evaluator) allowing(name string, now time.Time) (*Rule, bool) {
	f := Flow{Host: Host{name: name}, Time: now, Proto: TCP}
	var denials []*compiled // those before, which may leave nothing
	for _, i := range e.floor.about(f.Host) {
		denials = append(denials, &e.floor.list[i])
	}
	leaves := func(r *compiled) bool {
		return !slices.ContainsFunc(denials, func(d *compiled) bool { return d.deniesAll(name, r) })
	}
	for _, i := range e.rules.about(f.Host) {
		r := &e.rules.list[i]
		if r.action() == Deny {
			denials = append(denials, r)
			continue
		}
		fit, _ := r.fits(f, netip.Addr{}, address.Public)
		if fit != fitNone && (r.Expires.IsZero() || now.Before(r.Expires)) && leaves(r) {
			return r.Rule, true
		}
	}
	return nil, e.policy.Default == AllowPublic && !private(name) && leaves(&compiled{Rule: &Rule{Ports: anyPorts}})
}

// deniesAll says whether c matches a name with every port and protocol of r.
func (c *compiled) deniesAll(name string, r *compiled) bool {
	fit, _ := c.fits(Flow{Host: Host{name: name}, Proto: TCP}, netip.Addr{}, address.Public)
	return fit != fitNone && coversService(c.Rule, r.Rule)
}

// coversService says whether a rule has all ports and protocols of another, for ever.
func coversService(r, of *Rule) bool {
	if !r.Expires.IsZero() || r.Once || r.proto() != AnyProto && r.proto() != of.proto() {
		return false
	}
	for _, p := range of.ports() {
		if !slices.ContainsFunc(r.ports(), func(q PortRange) bool { return q.From <= p.From && p.To <= q.To }) {
			return false
		}
	}
	return true
}

// header returns a header's values, whatever the case of its name.
func header(all map[string][]string, name string) (values []string) {
	for key, v := range all {
		if strings.EqualFold(key, name) {
			values = append(values, v...)
		}
	}
	return values
}
