// Package policy decides what may leave a sandbox: one ordered list of rules, of which
// the first that matches a destination wins, below denials that no rule reopens.
package policy

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
)

// Action is what happens to a flow or a request.
type Action string

// The actions. Whoever asks gets to say yes or no within a time; silence is Deny.
const (
	Allow Action = "allow"
	Deny  Action = "deny"
	Ask   Action = "ask"
)

// Policy is what one sandbox may reach. The zero Policy denies everything.
type Policy struct {
	Rules   []Rule
	Default Default
	DNS     DNS
	Limits  Limits // of the whole sandbox
	// Attach are credentials for requests that some rule allows: they allow nothing.
	Attach []Attachment
	// Revision names this state of the policy in verdicts and records.
	Revision string
}

// Default says what happens to a destination that no rule matches.
type Default string

// The defaults; the empty one is DenyAll.
const (
	DenyAll     Default = "deny"
	AllowPublic Default = "allow-public" // TCP to the public internet
)

// DNS is how names are resolved.
type DNS struct {
	// Real gives the sandbox real addresses instead of synthetic ones. It is weaker: two
	// names may share an address.
	Real bool
	// Types are the record types beside A that are answered for every allowed name.
	Types []string
}

// Rule says what happens to some destinations.
type Rule struct {
	ID     string
	To     []Target
	Ports  []PortRange // empty: 80 and 443; to deny, all
	Proto  Proto       // empty: TCP; to deny, any
	Opaque bool        // the stream is not TLS or HTTP to be checked by name: ssh, databases
	TLS    TLS         // empty: TLSAuto
	ECH    bool        // let an encrypted client hello pass that hides the name
	// DNSTypes are record types beside A that are answered for the names of this rule.
	DNSTypes []string
	HTTP     *HTTP     // nil: any request, not looked at
	Attach   []string  // ids of credentials for requests to this rule's destinations
	Limits   Limits    // of all its flows together
	Expires  time.Time // zero: never
	Once     bool      // for one flow
	Action   Action    // empty: Allow
	Reason   string    // for people
	Audit    Audit     // empty: AuditMeta
	Line     int       // in the file it was read from; 0 for none
}

// Attachment binds a credential to names.
type Attachment struct {
	To         []Target
	Credential string // its id; the policy never holds the credential
}

// Proto is a transport protocol.
type Proto string

// The transport protocols.
const (
	TCP      Proto = "tcp"
	UDP      Proto = "udp"
	AnyProto Proto = "any"
)

// TLS says what a rule wants of TLS.
type TLS string

// What a rule wants of TLS.
const (
	TLSAuto        TLS = "auto"        // intercepted when the rule looks into requests
	TLSPassthrough TLS = "passthrough" // never intercepted
	TLSIntercept   TLS = "intercept"   // always intercepted
	TLSRequire     TLS = "require"     // as auto, and nothing but TLS
	TLSForbid      TLS = "forbid"      // no TLS
)

// Audit says how much of a flow is recorded.
type Audit string

// How much of a flow is recorded.
const (
	AuditNone    Audit = "none"
	AuditMeta    Audit = "meta"
	AuditHeaders Audit = "headers"
	AuditBody    Audit = "body"
)

// HTTP is which requests a rule lets pass: those that match an entry of Allow and none
// of Deny.
type HTTP struct {
	Allow, Deny []Match
}

// Match is conditions of a request; an empty one is always met.
type Match struct {
	Methods []string
	Paths   []Glob
	// Query are keys of the query: in Allow no other may occur, in Deny one of them does.
	Query []string
	// Require and Forbid are names of headers that must and must not be there.
	Require, Forbid []string
	// ContentTypes are media types of the body, if there is one.
	ContentTypes []string
	// Upgrade are the protocols to which the connection may be switched, such as
	// "websocket". In Allow an empty list is none.
	Upgrade []string
	// MaxBody is the most bytes of the body; 0 for no limit. In Allow only.
	MaxBody int64
}

// Limits bounds what is used of the network. Zero means no limit of that kind.
type Limits struct {
	Up, Down Rate          // out of the sandbox and into it
	Total    Rate          // both together
	Flows    int64         // at the same time
	NewFlows int64         // a second
	Requests int64         // a second, of those that are looked into
	Queries  int64         // for names, a second; of the whole sandbox only
	Duration time.Duration // of a flow
}

// Rate is an amount of bytes, in all or in each period.
type Rate struct {
	Bytes int64
	Per   time.Duration // 0: in all
}

// PortRange is a run of ports, ends included.
type PortRange struct{ From, To uint16 }

// AnyPort is every port.
var AnyPort = PortRange{1, 65535}

var (
	anyPorts = []PortRange{AnyPort}
	webPorts = []PortRange{{80, 80}, {443, 443}}
)

// ports are the ports of a rule. What denies means all of them unless it names some.
func (r *Rule) ports() []PortRange {
	switch {
	case len(r.Ports) > 0:
		return r.Ports
	case r.action() == Deny:
		return anyPorts
	}
	return webPorts
}

// proto is the protocol of a rule, by the same measure.
func (r *Rule) proto() Proto {
	switch {
	case r.Proto != "":
		return r.Proto
	case r.action() == Deny:
		return AnyProto
	}
	return TCP
}

func (r *Rule) action() Action {
	if r.Action == "" {
		return Allow
	}
	return r.Action
}

// inspects says whether requests of the rule have to be looked into.
func (r *Rule) inspects() bool {
	return r.HTTP != nil || r.TLS == TLSIntercept || len(r.Attach) > 0 || r.Audit == AuditHeaders || r.Audit == AuditBody
}

// check says what is wrong with a rule that is well-formed.
func (r *Rule) check() error {
	switch {
	case len(r.To) == 0:
		return berm.Errorf(berm.Invalid, "rule %s names no destination", r.ID).WithHint("add to: with names, ranges or groups")
	case r.action() == Deny && (r.HTTP != nil || len(r.Attach) > 0):
		return berm.Errorf(berm.Invalid, "rule %s denies and yet says which requests are allowed", r.ID).
			WithHint("to deny some requests, allow the destination and list them under http: deny:")
	case r.action() == Deny && r.Limits != (Limits{}):
		return berm.Errorf(berm.Invalid, "rule %s denies and yet has limits", r.ID)
	case r.Limits.Queries > 0:
		return berm.Errorf(berm.Invalid, "rule %s limits queries, which belong to no rule", r.ID).WithHint("put it into the limits of the policy")
	case r.Limits.Requests > 0 && !r.inspects():
		return berm.Errorf(berm.Invalid, "rule %s limits requests, which it does not look into", r.ID).
			WithHint("http: {} in the rule has every request looked into")
	case r.HTTP != nil && len(r.HTTP.Allow) == 0:
		return berm.Errorf(berm.Invalid, "rule %s allows no request", r.ID).
			WithHint("what http: allow: does not list is denied; allow: [{}] is every request")
	case r.inspects() && (r.TLS == TLSPassthrough || r.Opaque || r.Proto == UDP || r.Proto == AnyProto):
		return berm.Errorf(berm.Invalid, "rule %s wants to look into requests that it lets pass unseen", r.ID).
			WithHint("http, credential and audit of headers need TCP without tls: passthrough and app: tcp")
	case r.Opaque && r.TLS != "" && r.TLS != TLSAuto:
		return berm.Errorf(berm.Invalid, "rule %s has tls and app: tcp: TLS is not looked for there", r.ID)
	}
	return nil
}

func (p PortRange) contains(port uint16) bool { return p.From <= port && port <= p.To }

func (p PortRange) String() string {
	switch p {
	case PortRange{p.From, p.From}:
		return strconv.Itoa(int(p.From))
	case AnyPort:
		return "any"
	}
	return fmt.Sprintf("%d-%d", p.From, p.To)
}

// ParsePorts reads a port, a range such as 8000-8999, or "any".
func ParsePorts(s string) (PortRange, error) {
	if s == "any" {
		return AnyPort, nil
	}
	first, last, isRange := strings.Cut(s, "-")
	from, err := parsePort(first)
	to := from
	if isRange && err == nil {
		to, err = parsePort(last)
	}
	if err != nil || to < from {
		return PortRange{}, berm.Errorf(berm.Invalid, "%q is not a port from 1 to 65535 or a range of them", clip(s))
	}
	return PortRange{from, to}, nil
}

func parsePort(s string) (uint16, error) {
	if s == "" || strings.Trim(s, "0123456789") != "" {
		return 0, strconv.ErrSyntax // no signs
	}
	n, err := strconv.ParseUint(s, 10, 16)
	if n == 0 {
		err = strconv.ErrRange
	}
	return uint16(n), err
}

// clip keeps a message short.
func clip(s string) string {
	if len(s) > 200 {
		return s[:200] + "…"
	}
	return s
}

// CanInspect says whether the policy may look into requests.
func (p *Policy) CanInspect() bool {
	return len(p.Attach) > 0 || slices.ContainsFunc(p.Rules, func(r Rule) bool { return r.inspects() })
}
