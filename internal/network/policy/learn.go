package policy

import (
	"encoding/json"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/address"
)

// Denial is something that was denied, as far as a rule could change it.
type Denial struct {
	Verdict Verdict
	Request *Request // nil when it was a flow
}

// ParseDenial reads a denial as services tell it and logs keep it, and the sandbox whose it is
// if that is said: a line of an audit log, or of berm net log --json. It says false when the
// line tells of something else.
func ParseDenial(line []byte) (d Denial, sandbox berm.SandboxID, ok bool) {
	type event struct {
		Kind, Name, Address, Protocol, Action, Rule, Method, Path string

		Port   uint16
		Reason Reason
	}
	var l struct {
		event
		Sandbox berm.SandboxID
		Data    event
	}
	if len(line) > maxDocument || json.Unmarshal(line, &l) != nil {
		return Denial{}, "", false
	}
	e := l.event
	if l.Data.Kind != "" {
		e = l.Data
	}
	if e.Kind != "flow" && e.Kind != "dns" && e.Kind != "http" || Action(e.Action) != Deny {
		return Denial{}, "", false
	}
	to := e.Name
	if to == "" {
		to = e.Address
	}
	host, err := ParseHost(to)
	if err != nil {
		return Denial{}, "", false
	}
	d.Verdict = Verdict{Action: Deny, Reason: e.Reason, Rule: e.Rule, Flow: Flow{Host: host, Port: e.Port, Proto: TCP}}
	if Proto(e.Protocol) == UDP {
		d.Verdict.Flow.Proto = UDP
	}
	if e.Kind == "http" {
		d.Request = &Request{Method: e.Method, Target: e.Path}
	}
	return d, l.Sandbox, true
}

// Draft is a policy that allows what was denied.
type Draft struct {
	Policy  *Policy
	Changed []string // the ids of the rules that are new or were changed
	Learned int      // of the denials
	Left    []Left   // what stays denied, each once
}

// Left is what was denied and stays denied in a draft.
type Left struct {
	What   string `json:"what"`
	Reason Reason `json:"reason"`
}

// Extend drafts what allows what was denied too. A request is added to what the rule allows
// that decides about its host; the rest is what Learn drafts, after the rules that there are or
// before the one that asks about it. What the policy allows needs nothing, and what it still
// denies then is left: no policy can allow it, or a rule denies it.
func (p *Policy) Extend(denials []Denial) (*Draft, error) {
	e, err := p.learning()
	if err != nil {
		return nil, err
	}
	extended := *p
	extended.Rules = slices.Clone(p.Rules)
	var rest []Denial
	before := map[key]int{} // the rule that asks about a destination
	ofRules := map[int][]Denial{}
	for _, d := range denials {
		if !d.learnable() {
			continue
		}
		switch v := e.decide(d); {
		case v.Action == Allow:
		case d.Request != nil && (v.Reason == ReasonMethod || v.Reason == ReasonPath):
			ofRules[v.order] = append(ofRules[v.order], d)
		case v.Action == Ask || slices.Contains(learnable, v.Reason):
			if v.Action == Ask {
				k := key{v.Flow.target(), v.Flow.Proto}
				if at, ok := before[k]; !ok || v.order < at {
					before[k] = v.order
				}
			}
			rest = append(rest, d)
		}
	}
	d := &Draft{Policy: &extended, Changed: []string{}}
	for i := range extended.Rules {
		r := &extended.Rules[i]
		var more []Match
		for _, drafted := range Learn(ofRules[i]) {
			if drafted.HTTP != nil {
				more = append(more, drafted.HTTP.Allow...)
			}
		}
		if len(more) > 0 {
			r.HTTP = &HTTP{Allow: append(slices.Clone(r.HTTP.Allow), more...), Deny: r.HTTP.Deny}
			d.Changed = append(d.Changed, r.ID)
		}
	}
	first := map[int][]Rule{}
	var last []Rule
	for _, r := range Learn(rest) {
		id := r.ID
		for n := 2; slices.ContainsFunc(extended.Rules, func(other Rule) bool { return other.ID == r.ID }); n++ {
			r.ID = id + "-" + strconv.Itoa(n)
		}
		d.Changed = append(d.Changed, r.ID)
		if at, ok := before[key{r.To[0], r.proto()}]; ok {
			first[at] = append(first[at], r)
		} else {
			last = append(last, r)
		}
	}
	var rules []Rule
	for i, r := range extended.Rules {
		rules = append(append(rules, first[i]...), r)
	}
	if rules = append(rules, last...); len(rules) > 0 {
		extended.Rules = rules
	}
	return d, d.judge(denials)
}

// judge tells what of the denials the draft allows.
func (d *Draft) judge(denials []Denial) error {
	e, err := d.Policy.learning()
	if err != nil {
		return err
	}
	seen := map[Left]bool{}
	for _, denial := range denials {
		if denial.ends() {
			continue
		}
		reason := denial.Verdict.Reason
		if denial.learnable() {
			v := e.decide(denial)
			if v.Action == Allow {
				d.Learned++
				continue
			}
			if reason = v.Reason; reason == "" {
				reason = ReasonAsk
			}
		}
		if l := (Left{denial.String(), reason}); !seen[l] {
			seen[l] = true
			d.Left = append(d.Left, l)
		}
	}
	return nil
}

// key is a destination.
type key struct {
	target Target
	proto  Proto
}

// openable are the networks that an operator may have opened.
var openable = []netip.Prefix{
	netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("100.64.0.0/10"), netip.MustParsePrefix("172.16.0.0/12"),
	netip.MustParsePrefix("192.168.0.0/16"), netip.MustParsePrefix("fc00::/8"), netip.MustParsePrefix("fd00::/8"),
}

// learning decides for drafts. What the operator had not opened, the denials themselves tell.
func (p *Policy) learning() (*Evaluator, error) {
	table, err := address.NewTable(address.Config{Open: openable})
	if err != nil {
		return nil, err
	}
	return NewEvaluator(p, nil, table)
}

// decide says what a policy says of something that was denied.
func (e *Evaluator) decide(d Denial) Verdict {
	f := d.Verdict.Flow
	f.Time = time.Now()
	ports := []uint16{f.Port}
	if f.Port == 0 { // a name that was asked for
		ports = []uint16{443, 80}
	}
	var v Verdict
	for _, f.Port = range ports {
		if v = e.Decide(f); v.Action == Allow {
			break
		}
	}
	if d.Request != nil && v.Action == Allow {
		r := *d.Request
		r.Authority = f.Host.String()
		v = v.DecideHTTP(r)
	}
	return v
}

// ends says whether a denial is the end of a flow whose requests were denied, which says
// nothing of them.
func (d Denial) ends() bool {
	r := d.Verdict.Reason
	return d.Request == nil && (r == ReasonMethod || r == ReasonPath)
}

// learnable says whether a rule could allow what was denied.
func (d Denial) learnable() bool {
	v := d.Verdict
	return v.Action == Deny && slices.Contains(learnable, v.Reason) && v.Flow.Host.nameable() && !d.ends()
}

// String is what was denied, for people.
func (d Denial) String() string {
	text := d.Verdict.Flow.Host.String()
	if port := d.Verdict.Flow.Port; port != 0 {
		text = net.JoinHostPort(text, strconv.Itoa(int(port)))
	}
	if d.Request != nil {
		path, _, _ := strings.Cut(d.Request.Target, "?")
		text = clip(d.Request.Method + " " + text + path)
	}
	return text
}

// Learn drafts the rules that would allow what was denied: exact names and ports, the
// methods and paths that were tried, a group where all of a name's kind is one. Denials
// that no rule can change are left out. A draft is for a person to read: an agent that is
// led astray asks for what it should not get.
func Learn(denials []Denial) []Rule {
	type draft struct {
		verdict  Verdict
		ports    map[uint16]bool
		requests map[string]map[string]bool // paths by method
	}
	drafts := map[key]*draft{}
	for _, d := range denials {
		v := d.Verdict
		if !d.learnable() {
			continue
		}
		k := key{v.Flow.target(), v.Flow.Proto}
		if drafts[k] == nil {
			drafts[k] = &draft{v, map[uint16]bool{}, map[string]map[string]bool{}}
		}
		if v.Flow.Port != 0 { // else a name that was asked for: the ports of the web
			drafts[k].ports[v.Flow.Port] = true
		}
		if d.Request == nil {
			continue
		}
		raw, _, _ := strings.Cut(d.Request.Target, "?")
		p, err := parsePath(raw)
		if err != nil {
			continue
		}
		// The first reading, as a pattern is written: what would be a pattern itself is not
		// drafted.
		glob, err := ParseGlob("/" + strings.Join(p.readings[0], "/"))
		if method, e := parseMethod(d.Request.Method); err == nil && e == nil && !strings.Contains(glob.text, "*") {
			if drafts[k].requests[method] == nil {
				drafts[k].requests[method] = map[string]bool{}
			}
			drafts[k].requests[method][glob.text] = true
		}
	}
	var rules []Rule
	ids := map[string]bool{}
	for _, k := range slices.SortedFunc(maps.Keys(drafts), func(a, b key) int {
		return strings.Compare(a.target.String()+" "+string(a.proto), b.target.String()+" "+string(b.proto))
	}) {
		d := drafts[k]
		r := d.verdict.rule(slices.Sorted(maps.Keys(d.ports))...)
		web := !slices.ContainsFunc(r.Ports, func(p PortRange) bool { return p != webPorts[0] && p != webPorts[1] })
		if group := groupOf(k.target.name); group != "" && k.proto == TCP && web && len(d.requests) == 0 {
			r.To, r.Ports = []Target{groupTarget(group)}, nil
		}
		for _, method := range slices.Sorted(maps.Keys(d.requests)) {
			m := Match{Methods: []string{method}}
			for _, path := range slices.Sorted(maps.Keys(d.requests[method])) {
				m.Paths = append(m.Paths, Glob{path})
			}
			if r.HTTP == nil {
				r.HTTP = &HTTP{}
			}
			r.HTTP.Allow = append(r.HTTP.Allow, m)
		}
		if r.ID = id(r.To[0]); r.Proto == UDP {
			r.ID += "-udp"
		}
		if !ids[r.ID] { // the same group for two names
			ids[r.ID] = true
			rules = append(rules, *r)
		}
	}
	return rules
}

// learnable are the reasons that a rule can change.
var learnable = []Reason{ReasonNotListed, ReasonPort, ReasonProto, ReasonExpired, ReasonMethod, ReasonPath}

// groupOf is the group that has a name and no wildcard, "" for none.
func groupOf(name string) string {
	for _, group := range slices.Sorted(maps.Keys(groups())) {
		members := groups()[group]
		if slices.ContainsFunc(members, func(t Target) bool { return t.kind == exactName && t.name == name }) {
			return group
		}
	}
	return ""
}
