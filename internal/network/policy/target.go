package policy

import (
	"net/netip"
	"strings"

	"golang.org/x/net/publicsuffix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/address"
)

type targetKind uint8

const (
	exactName  targetKind = iota + 1 // a.b
	namesBelow                       // *.a.b: any depth below, not a.b
	nameAndAll                       // .a.b: a.b and any depth below
	labelGlob                        // x*y.a.b: one label
	addrRange                        // 192.0.2.0/24 or an address
	namedGroup                       // github
)

// Target is one destination of a rule: a name, names by wildcard, a range of addresses,
// or a group.
type Target struct {
	kind       targetKind
	name       string // the name or the part behind the wildcard, or the group
	head, tail string // around the star of a labelGlob
	prefix     netip.Prefix
}

// ParseTarget reads a destination. It fails with Invalid and says what would be right.
func ParseTarget(s string) (Target, error) {
	addr, plain, found := address.Literal(s)
	if network, _, ok := strings.Cut(s, "/"); ok {
		p, err := netip.ParsePrefix(s)
		if err != nil || p.Addr().Is4In6() {
			return Target{}, berm.Errorf(berm.Invalid, "%q is not an address range", clip(s)).
				WithHint("a range is such as 192.0.2.0/24; of a URL write the host alone, and paths under http:")
		}
		if p != p.Masked() {
			return Target{}, berm.Errorf(berm.Invalid, "%s is not the first address of its range", network).WithHint("write %s", p.Masked())
		}
		return Target{kind: addrRange, prefix: p}, nil
	}
	if found {
		if !plain || addr.Is4In6() {
			return Target{}, disguised(s, addr)
		}
		return Target{kind: addrRange, prefix: netip.PrefixFrom(addr, addr.BitLen())}, nil
	}
	var t Target
	rest, wild := s, true
	if below, ok := strings.CutPrefix(s, "*."); ok {
		t.kind, rest = namesBelow, below
	} else if all, ok := strings.CutPrefix(s, "."); ok {
		t.kind, rest = nameAndAll, all
	} else if label, parent, ok := strings.Cut(s, "."); ok && strings.Count(label, "*") == 1 {
		head, tail, _ := strings.Cut(strings.ToLower(label), "*")
		if !validLabel(head + "x" + tail) {
			return Target{}, berm.Errorf(berm.Invalid, "%q is not a wildcard: the first label must be letters, digits, hyphens and one star", clip(s))
		}
		t, rest = Target{kind: labelGlob, head: head, tail: tail}, parent
	} else {
		t.kind, wild = exactName, false
	}
	if s == "*" {
		return Target{}, berm.Errorf(berm.Invalid, `"*" is too much`).WithHint("write public for the whole public internet")
	}
	if strings.Contains(rest, "*") {
		return Target{}, berm.Errorf(berm.Invalid, "%q has a star at a place where none can be", clip(s)).
			WithHint("*.example.com is every name below, .example.com the name too, api-*.example.com one label")
	}
	if !wild && !strings.Contains(s, ".") { // what groups.txt has has dots
		if _, ok := groups()[s]; ok || s == groupPublic || s == groupNames {
			return groupTarget(s), nil
		}
	}
	name, err := canonicalName(rest)
	if err != nil {
		return Target{}, err
	}
	if !wild && !strings.Contains(name, ".") {
		return Target{}, berm.Errorf(berm.Invalid, "%q is neither a group nor a full name", clip(s)).
			WithHint("the groups are %s", strings.Join(Groups(), ", "))
	}
	t.name = name
	if wild {
		suffix, icann := publicsuffix.PublicSuffix(name)
		if name == suffix && (icann || !strings.Contains(name, ".")) {
			return Target{}, berm.Errorf(berm.Invalid, "%q is every name of a registry", clip(s)).
				WithHint("%s belongs to nobody: name the domains that are needed, or public", name)
		}
	}
	return t, nil
}

func (t Target) String() string {
	switch t.kind {
	case namesBelow:
		return "*." + t.name
	case nameAndAll:
		return "." + t.name
	case labelGlob:
		return t.head + "*" + t.tail + "." + t.name
	case addrRange:
		if t.prefix.IsSingleIP() {
			return t.prefix.Addr().String()
		}
		return t.prefix.String()
	}
	return t.name
}

// matchName says whether a target that is no group has a canonical name in it. Labels
// are compared whole.
func (t Target) matchName(name string) bool {
	switch t.kind {
	case exactName:
		return name == t.name
	case nameAndAll:
		return name == t.name || below(name, t.name)
	case namesBelow:
		return below(name, t.name)
	case labelGlob:
		label, parent, _ := strings.Cut(name, ".")
		return parent == t.name && len(label) >= len(t.head)+len(t.tail) &&
			strings.HasPrefix(label, t.head) && strings.HasSuffix(label, t.tail)
	}
	return false
}

func below(name, parent string) bool {
	n := len(name) - len(parent)
	return n > 1 && name[n-1] == '.' && name[n:] == parent
}

// covers says whether every destination of u is one of t, as far as it can be told.
func (t Target) covers(u Target) bool {
	if t == u {
		return true
	}
	if u.kind == namedGroup {
		if t.kind == namedGroup && t.name == groupPublic {
			return true // also of the group of all names
		}
		members := groups()[u.name]
		for _, m := range members {
			if !t.covers(m) {
				return false
			}
		}
		return len(members) > 0
	}
	switch t.kind {
	case namedGroup:
		switch t.name {
		case groupPublic:
			return u.kind == addrRange && publicRange(u.prefix) || u.kind != addrRange && !private(u.name)
		case groupNames:
			return u.kind != addrRange && !private(u.name)
		}
		for _, m := range groups()[t.name] {
			if m.covers(u) {
				return true
			}
		}
	case addrRange:
		return u.kind == addrRange && t.prefix.Bits() <= u.prefix.Bits() && t.prefix.Contains(u.prefix.Addr())
	case exactName:
		return false
	case namesBelow:
		return u.kind != addrRange && below(u.name, t.name) || (u.kind == namesBelow || u.kind == labelGlob) && u.name == t.name
	case nameAndAll:
		return u.kind != addrRange && (u.name == t.name || below(u.name, t.name))
	case labelGlob:
		return u.kind == exactName && t.matchName(u.name)
	}
	return false
}

// publicRange says whether a range is one public address: of a wider one this table
// cannot tell it.
func publicRange(p netip.Prefix) bool { return p.IsSingleIP() && address.Describe(p.Addr()) == "" }
