package policy

import (
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/berm-sandbox/berm"
)

// E2B is what E2B's API says about traffic out of a sandbox, at creation and in updates.
type E2B struct {
	AllowOut, DenyOut []string
	AllowInternet     *bool // allow_internet_access; nil when it is not given
	// Rules are the headers to set for each host: a name, or "*.suffix".
	Rules map[string][]E2BTransform
}

// E2BTransform changes requests on their way.
type E2BTransform struct {
	Headers map[string]string
}

// Transform is headers that requests to some names get. Values may hold references to
// secrets and are as secret themselves: they are for the broker, not for the policy.
type Transform struct {
	ID      string // the credential that the policy attaches
	To      Target
	Headers map[string]string
}

// allTraffic is ALL_TRAFFIC of E2B's SDKs.
const allTraffic = "0.0.0.0/0"

// Limits of E2B's API.
const (
	maxE2BDomains     = 10
	maxE2BDomain      = 128
	maxE2BTransforms  = 1
	maxE2BHeaders     = 20
	maxE2BHeaderName  = 64
	maxE2BHeaderValue = 2048
)

// FromE2B compiles E2B's fields. Public says what a sandbox may reach when nothing is said:
// the public internet, as with E2B, or nothing. It fails with Invalid and the message of
// E2B's API.
//
// The order is E2B's: what is allowed, then what is denied, then the rest. Names are
// allowed on ports 80 and 443, addresses on every port and protocol. Three things differ:
// addresses that are not the public internet stay denied, the rest is TCP only, and no
// resolver is opened beside the sandbox's own.
func FromE2B(c E2B, public bool) (*Policy, []Transform, error) {
	if c.AllowInternet != nil {
		public = *c.AllowInternet
	}
	for _, s := range c.DenyOut {
		if _, ok := e2bRange(s); !ok {
			return nil, nil, berm.Errorf(berm.Invalid, "invalid denied CIDR %s", clip(s))
		}
	}
	p := &Policy{Default: DenyAll}
	for i, s := range c.AllowOut {
		r := Rule{ID: "allowOut-" + strconv.Itoa(i+1), Action: Allow}
		prefix, isRange := e2bRange(s)
		switch {
		case isRange && s == allTraffic:
			r.To, r.Ports, r.Proto = []Target{groupTarget(groupPublic)}, anyPorts, AnyProto
		case isRange:
			r.To, r.Ports, r.Proto = []Target{rangeTarget(prefix)}, anyPorts, AnyProto
		case isAddress(s):
			return nil, nil, berm.Errorf(berm.Invalid, "invalid allowed address %s", clip(s))
		case s == "*":
			r.To = []Target{groupTarget(groupNames)}
		default:
			t, err := ParseTarget(s)
			if err != nil || t.kind != exactName && t.kind != namesBelow {
				return nil, nil, berm.Errorf(berm.Invalid, "invalid allowed domain %s", clip(s)).
					WithHint("a domain is such as example.com or *.example.com")
			}
			r.To = []Target{t}
		}
		if !isRange && public && !slices.Contains(c.DenyOut, allTraffic) {
			return nil, nil, berm.Errorf(berm.Invalid, "When specifying allowed domains in allow out, you must include 'ALL_TRAFFIC' in deny out to block all other traffic.")
		}
		p.Rules = append(p.Rules, r)
	}
	for i, s := range c.DenyOut {
		if s == allTraffic {
			public = false // everything that is not allowed before is denied by default
			continue
		}
		prefix, _ := e2bRange(s)
		p.Rules = append(p.Rules, Rule{ID: "denyOut-" + strconv.Itoa(i+1), To: []Target{rangeTarget(prefix)}, Action: Deny})
	}
	if public {
		p.Default = AllowPublic
	}
	transforms, err := e2bTransforms(c.Rules)
	for _, t := range transforms {
		p.Attach = append(p.Attach, Attachment{To: []Target{t.To}, Credential: t.ID})
	}
	return p, transforms, err
}

// e2bRange reads an address or a range. As in E2B's API, one that begins with the
// unspecified address is none, except ALL_TRAFFIC; host bits are ignored.
func e2bRange(s string) (netip.Prefix, bool) {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		addr, err := netip.ParseAddr(s)
		if err != nil || addr.Zone() != "" {
			return p, false
		}
		p = netip.PrefixFrom(addr, addr.BitLen())
	}
	if p.Addr().IsUnspecified() && s != allTraffic {
		return p, false
	}
	if p.Addr().Is4In6() {
		if p.Bits() < 96 {
			return p, false
		}
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p.Masked(), true
}

func isAddress(s string) bool {
	if _, err := netip.ParsePrefix(s); err == nil {
		return true
	}
	_, err := netip.ParseAddr(s)
	return err == nil
}

func e2bTransforms(rules map[string][]E2BTransform) ([]Transform, error) {
	invalid := func(format string, args ...any) ([]Transform, error) {
		return nil, berm.Errorf(berm.Invalid, format, args...)
	}
	if len(rules) > maxE2BDomains {
		return invalid("Network rules can have at most %d domains.", maxE2BDomains)
	}
	var all []Transform
	for _, domain := range slices.Sorted(maps.Keys(rules)) {
		if domain == "" {
			return invalid("Rule domain must not be empty.")
		}
		if len(domain) > maxE2BDomain {
			return invalid("Rule domain %q exceeds maximum length of %d characters.", domain, maxE2BDomain)
		}
		to, err := ParseTarget(domain)
		if err != nil || to.kind != exactName && to.kind != namesBelow {
			return invalid("Rule domain %q is not a valid domain name.", domain)
		}
		if len(rules[domain]) > maxE2BTransforms {
			return invalid("Domain %q can have at most %d transform rule.", domain, maxE2BTransforms)
		}
		for _, t := range rules[domain] {
			if err := checkE2BHeaders(domain, t.Headers); err != nil {
				return nil, err
			}
			if len(t.Headers) > 0 {
				all = append(all, Transform{ID: "transform-" + strconv.Itoa(len(all)+1), To: to, Headers: t.Headers})
			}
		}
	}
	return all, nil
}

func checkE2BHeaders(domain string, headers map[string]string) error {
	if len(headers) > maxE2BHeaders {
		return berm.Errorf(berm.Invalid, "Domain %q can have at most %d headers per rule.", domain, maxE2BHeaders)
	}
	for _, name := range slices.Sorted(maps.Keys(headers)) {
		value := headers[name]
		switch {
		case name == "":
			return berm.Errorf(berm.Invalid, "Header name in rule for domain %q must not be empty.", domain)
		case !isToken(name): // also for characters that are neither: the message is E2B's
			return berm.Errorf(berm.Invalid, "Header name %q in rule for domain %q must not contain CR or LF characters.", clip(name), domain)
		case len(name) > maxE2BHeaderName:
			return berm.Errorf(berm.Invalid, "Header name %q in rule for domain %q exceeds maximum length of %d characters.", clip(name), domain, maxE2BHeaderName)
		case strings.ContainsAny(value, "\r\n\x00"):
			return berm.Errorf(berm.Invalid, "Value for header %q in rule for domain %q must not contain CR or LF characters.", name, domain)
		case len(value) > maxE2BHeaderValue:
			return berm.Errorf(berm.Invalid, "Value for header %q in rule for domain %q exceeds maximum length of %d characters.", name, domain, maxE2BHeaderValue)
		}
	}
	return nil
}

// isToken says whether s can be the name of a header (RFC 9110 5.6.2).
func isToken(s string) bool {
	return strings.Trim(strings.ToLower(s), "abcdefghijklmnopqrstuvwxyz0123456789!#$%&'*+-.^_`|~") == ""
}
