package policy

import (
	"strconv"
	"strings"
	"time"

	"github.com/berm-sandbox/berm/internal/network/address"
)

// Description is a policy in plain words.
type Description struct {
	Rules   []RuleDescription `json:"rules"` // in order: the first that matches decides
	Default string            `json:"default"`
	Also    []string          `json:"also,omitempty"` // about names, limits and credentials
	// Warnings are what is probably not meant and belongs to no rule.
	Warnings []string `json:"warnings,omitempty"`
}

// RuleDescription is a rule in plain words.
type RuleDescription struct {
	ID       string   `json:"id"`
	Line     int      `json:"line,omitempty"` // in its file
	Text     string   `json:"text"`
	Requests []string `json:"requests,omitempty"` // which may pass, and which not
	Warnings []string `json:"warnings,omitempty"`
}

// Describe says what a policy means.
func (p *Policy) Describe(table *address.Table, now time.Time) Description {
	everything := "Everything else"
	if len(p.Rules) == 0 {
		everything = "Everything"
	}
	d := Description{Rules: []RuleDescription{}, Default: everything + " is denied."}
	if p.Default == AllowPublic {
		d.Default = everything + " on the public internet is allowed over TCP, but for the ports of mail and DNS."
	}
	for i := range p.Rules {
		d.Rules = append(d.Rules, p.Rules[i].describe(now))
	}
	for _, w := range p.Warnings(table) {
		at := &d.Warnings
		for i := range d.Rules {
			if d.Rules[i].ID == w.Rule {
				at = &d.Rules[i].Warnings
			}
		}
		*at = append(*at, w.Text)
	}
	if p.DNS.Real {
		d.Also = append(d.Also, "Names have their real addresses. Those that share one can be taken for each other where TLS does not tell them apart.")
	}
	if len(p.DNS.Types) > 0 {
		d.Also = append(d.Also, "Of all allowed names the records "+strings.Join(p.DNS.Types, ", ")+" are looked up.")
	}
	if limits := p.Limits.describe(); limits != "" {
		d.Also = append(d.Also, "All flows together: "+limits+".")
	}
	for _, a := range p.Attach {
		d.Also = append(d.Also, "Requests to "+targets(a.To)+" get the credential "+a.Credential+".")
	}
	return d
}

func (r *Rule) describe(now time.Time) RuleDescription {
	verb := map[Action]string{Allow: "Allow ", Deny: "Deny ", Ask: "Ask about "}[r.action()]
	text := verb + targets(r.To)
	var ports []string
	for _, p := range r.ports() {
		ports = append(ports, p.String())
	}
	switch {
	case len(r.ports()) == 1 && r.ports()[0] == AnyPort:
		text += " on all ports"
	case len(ports) == 1 && !strings.Contains(ports[0], "-"):
		text += " on port " + ports[0]
	default:
		text += " on ports " + and(ports)
	}
	switch r.proto() {
	case UDP:
		text += " over UDP"
	case AnyProto:
		text += " over TCP and UDP"
	}
	add := func(more string) { text += ", " + more }
	if r.Opaque {
		add("whatever is spoken")
	}
	switch r.TLS {
	case TLSPassthrough:
		add("with TLS left closed")
	case TLSRequire:
		add("with TLS only")
	case TLSForbid:
		add("without TLS")
	}
	if r.ECH {
		add("also where the client hides the name")
	}
	if len(r.Attach) > 0 {
		add("with the credential " + and(r.Attach))
	}
	if len(r.DNSTypes) > 0 {
		add("with the DNS records " + and(r.DNSTypes))
	}
	if limits := r.Limits.describe(); limits != "" {
		add("all together " + limits)
	}
	if r.Once {
		add("once")
	}
	if !r.Expires.IsZero() {
		add("until " + r.Expires.Format(time.RFC3339))
	}
	if text += "."; r.Reason != "" {
		text += " Reason: " + r.Reason
	}
	d := RuleDescription{ID: r.ID, Line: r.Line, Text: text}
	switch {
	case r.HTTP != nil:
		for _, list := range []struct {
			verb    string
			entries []Match
		}{{"allow", r.HTTP.Allow}, {"deny", r.HTTP.Deny}} {
			for i := range list.entries {
				d.Requests = append(d.Requests, list.verb+" "+list.entries[i].describe(list.verb == "allow"))
			}
		}
	case r.inspects():
		d.Requests = []string{"allow every request, which is looked into"}
	}
	if !r.Expires.IsZero() && !now.Before(r.Expires) {
		d.Warnings = append(d.Warnings, "it has expired")
	}
	return d
}

// describe is the conditions of requests that a rule allows or denies.
func (m *Match) describe(allows bool) string {
	text := "every method"
	if len(m.Methods) > 0 {
		text = strings.Join(m.Methods, ", ")
	}
	if len(m.Paths) > 0 {
		text += " of " + join(m.Paths, Glob.String)
	}
	with := func(what string, list []string) {
		if len(list) > 0 {
			text += ", " + what + " " + and(list)
		}
	}
	if allows && m.Query != nil {
		if len(m.Query) == 0 {
			text += ", without a query"
		}
		with("with no keys in the query but", m.Query)
	} else {
		with("with one of these keys in the query:", m.Query)
	}
	with("with the headers", m.Require)
	with("without the headers", m.Forbid)
	with("with a body of", m.ContentTypes)
	with("switching to", m.Upgrade)
	if m.MaxBody > 0 {
		text += ", with a body of at most " + formatBytes(m.MaxBody)
	}
	return text
}

func (l Limits) describe() string {
	var parts []string
	add := func(text string) { parts = append(parts, text) }
	if l.Up.Bytes > 0 {
		add("at most " + l.Up.String() + " sent")
	}
	if l.Down.Bytes > 0 {
		add("at most " + l.Down.String() + " received")
	}
	if l.Total.Bytes > 0 {
		add("at most " + l.Total.String() + " in both directions")
	}
	for _, count := range []struct {
		n    int64
		what string
	}{{l.Flows, "flows at a time"}, {l.NewFlows, "new flows a second"}, {l.Requests, "requests a second"}, {l.Queries, "queries for names a second"}} {
		if count.n > 0 {
			add(strconv.FormatInt(count.n, 10) + " " + count.what)
		}
	}
	if l.Duration > 0 {
		add("each flow for " + l.Duration.String() + " at most")
	}
	return and(parts)
}

func targets(list []Target) string { return join(list, Target.String) }

func join[T any](list []T, text func(T) string) string {
	var parts []string
	for _, v := range list {
		parts = append(parts, text(v))
	}
	return and(parts)
}

// and joins words as people do.
func and(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:len(words)-1], ", ") + " and " + words[len(words)-1]
}
