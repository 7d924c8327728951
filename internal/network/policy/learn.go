package policy

import (
	"maps"
	"slices"
	"strings"
)

// Denial is something that was denied, as far as a rule could change it.
type Denial struct {
	Verdict Verdict
	Request *Request // nil when it was a flow
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
		if v.Action != Deny || !slices.Contains(learnable, v.Reason) {
			continue
		}
		k := key{v.Flow.target(), v.Flow.Proto}
		if drafts[k] == nil {
			drafts[k] = &draft{v, map[uint16]bool{}, map[string]map[string]bool{}}
		}
		drafts[k].ports[v.Flow.Port] = true
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
