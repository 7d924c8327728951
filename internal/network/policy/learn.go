package policy

import (
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/berm-sandbox/berm"
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

// Extend returns a policy that allows what was denied too, and the ids of the rules that are
// new or were changed: requests are added to what their rule allows, the rest is what Learn
// drafts, after the rules that there are.
func (p *Policy) Extend(denials []Denial) (*Policy, []string) {
	extended, changed := *p, []string{}
	extended.Rules = slices.Clone(p.Rules)
	var flows []Denial
	ofRules := map[string][]Denial{}
	for _, d := range denials {
		i := slices.IndexFunc(extended.Rules, func(r Rule) bool { return r.ID == d.Verdict.Rule })
		if d.Request != nil && i >= 0 && extended.Rules[i].HTTP != nil {
			ofRules[d.Verdict.Rule] = append(ofRules[d.Verdict.Rule], d)
		} else {
			flows = append(flows, d)
		}
	}
	for i := range extended.Rules {
		r := &extended.Rules[i]
		var more []Match
		for _, drafted := range Learn(ofRules[r.ID]) {
			if drafted.HTTP != nil {
				more = append(more, drafted.HTTP.Allow...)
			}
		}
		if len(more) > 0 {
			r.HTTP = &HTTP{Allow: append(slices.Clone(r.HTTP.Allow), more...), Deny: r.HTTP.Deny}
			changed = append(changed, r.ID)
		}
	}
	for _, r := range Learn(flows) {
		id := r.ID
		for n := 2; slices.ContainsFunc(extended.Rules, func(other Rule) bool { return other.ID == r.ID }); n++ {
			r.ID = id + "-" + strconv.Itoa(n)
		}
		extended.Rules = append(extended.Rules, r)
		changed = append(changed, r.ID)
	}
	return &extended, changed
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
	type key struct {
		target Target
		proto  Proto
	}
	drafts := map[key]*draft{}
	for _, d := range denials {
		v := d.Verdict
		if v.Action != Deny || !slices.Contains(learnable, v.Reason) || !v.Flow.Host.nameable() {
			continue
		}
		// The end of a flow whose requests were denied says nothing of them.
		if d.Request == nil && (v.Reason == ReasonMethod || v.Reason == ReasonPath) {
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
