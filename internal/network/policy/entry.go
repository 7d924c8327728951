package policy

import (
	"net/netip"
	"strings"
)

// ParseEntry reads a destination with or without ports as command lines have it:
// HOST, HOST:PORT, HOST:FROM-TO, RANGE or [IPv6]:PORT. A rule without ports allows 80 and
// 443. Its id tells where it comes from.
func ParseEntry(s string) (Rule, error) {
	host, ports := s, ""
	if inner, rest, ok := strings.Cut(strings.TrimPrefix(s, "["), "]"); ok && s[0] == '[' {
		host, ports = inner, strings.TrimPrefix(rest, ":")
		if rest != "" && rest[0] != ':' {
			host = s // refused below
		}
	} else if h, p, ok := strings.Cut(s, ":"); ok && !strings.Contains(p, ":") {
		host, ports = h, p
	}
	t, err := ParseTarget(host)
	if err != nil {
		return Rule{}, err
	}
	r := Rule{ID: id(t), To: []Target{t}}
	if ports != "" || strings.HasSuffix(s, ":") {
		p, err := ParsePorts(ports)
		if err != nil {
			return Rule{}, err
		}
		r.Ports = []PortRange{p}
		r.ID += ":" + p.String()
	}
	return r, nil
}

// groupTarget is one of the two groups that are no list.
func groupTarget(name string) Target { return Target{kind: namedGroup, name: name} }

func rangeTarget(p netip.Prefix) Target { return Target{kind: addrRange, prefix: p.Masked()} }
