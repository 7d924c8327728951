// Package address judges IP addresses: which are the public internet, and which are
// never to be reached from a sandbox, in whatever form they are written.
package address

import (
	_ "embed" // ranges.txt
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/berm-sandbox/berm"
)

// Class says what an address is. A greater class is a worse destination.
type Class uint8

// The classes of addresses. Every one above Opened is denied whatever a policy says.
const (
	Public    Class = iota // the public internet
	Opened                 // a special range that the operator opened: a rule may name it
	Reserved               // for documentation, benchmarks, protocols, or not allocated
	Tunnel                 // carries IPv4 in IPv6: 6to4, Teredo, NAT64
	Multicast              // and broadcast
	Private                // private, shared and unique local networks
	LinkLocal              //
	Loopback               // and the unspecified address, which Linux connects to loopback
	Host                   // of this host or of the platform
	Metadata               // of a cloud's metadata service, which gives out credentials
	Malformed              // no address, or one with a zone
)

var classNames = [...]string{
	"public", "opened", "reserved", "tunnel", "multicast", "private", "link-local", "loopback", "host", "metadata", "malformed",
}

func (c Class) String() string {
	if int(c) >= len(classNames) {
		return fmt.Sprintf("class %d", uint8(c))
	}
	return classNames[c]
}

// Denied says whether no rule of a policy can allow such an address.
func (c Class) Denied() bool { return c > Opened }

// Config is what the operator says about addresses. The zero Config is the strictest.
type Config struct {
	// Open are ranges that rules may name although they are special. Metadata services,
	// multicast and the unspecified address stay closed in them; loopback and the host's
	// own addresses too, unless the range is that one address.
	Open []netip.Prefix
	// Close are ranges of the platform, such as its sandboxes' subnets and what it
	// listens on.
	Close []netip.Prefix
	// NAT64 are the prefixes under which this network reaches IPv4 (RFC 6052): an address
	// there is as good as the IPv4 address in it.
	NAT64 []netip.Prefix
	// Own says whether an address is the host's own; nil for none.
	Own func(netip.Addr) bool
}

// Table judges addresses. It is safe for concurrent use.
type Table struct {
	open, closed, nat64 []netip.Prefix
	own                 func(netip.Addr) bool
}

// NewTable makes a table. It fails with Invalid when a range of the configuration is none
// or opens everything.
func NewTable(c Config) (*Table, error) {
	for _, p := range slices.Concat(c.Open, c.Close, c.NAT64) {
		if !p.IsValid() || p != p.Masked() || p.Addr().Is4In6() {
			return nil, berm.Errorf(berm.Invalid, "%s is not an address range", p).
				WithHint("write the first address of the range and its length, such as 10.1.0.0/16")
		}
	}
	for _, p := range c.Open {
		if p.Bits() < 8 {
			return nil, berm.Errorf(berm.Invalid, "the range %s is too wide to be opened", p).
				WithHint("open the networks that sandboxes need, one by one")
		}
	}
	for _, p := range c.NAT64 {
		if p.Addr().Is4() || !slices.Contains([]int{32, 40, 48, 56, 64, 96}, p.Bits()) {
			return nil, berm.Errorf(berm.Invalid, "%s is not a NAT64 prefix", p).
				WithHint("RFC 6052 has prefixes of 32, 40, 48, 56, 64 and 96 bits")
		}
	}
	t := &Table{open: c.Open, closed: c.Close, nat64: c.NAT64, own: c.Own}
	if t.own == nil {
		t.own = func(netip.Addr) bool { return false }
	}
	return t, nil
}

// Judge is the class of an address: the worst of its own and of every IPv4 address that
// is embedded in it.
func (t *Table) Judge(addr netip.Addr) Class {
	if !addr.IsValid() || addr.Zone() != "" {
		// netip's prefixes contain no address with a zone: it would pass every list.
		return Malformed
	}
	addr = addr.Unmap()
	worst := t.alone(addr)
	for _, v4 := range t.embedded(addr) {
		worst = max(worst, t.alone(v4))
	}
	return worst
}

// alone judges an address without what is embedded in it.
func (t *Table) alone(addr netip.Addr) Class {
	class := special(addr)
	if class != Metadata && inside(t.nat64, addr) {
		class = Public // what is embedded decides
	}
	if class == Metadata || class == Multicast || addr.IsUnspecified() {
		return class
	}
	if inside(t.closed, addr) || t.own(addr) {
		class = Host
	}
	if class == Loopback || class == Host {
		if slices.Contains(t.open, netip.PrefixFrom(addr, addr.BitLen())) {
			return Opened
		}
		return class
	}
	if class != Public && inside(t.open, addr) {
		return Opened
	}
	return class
}

func inside(list []netip.Prefix, addr netip.Addr) bool {
	return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(addr) })
}

//go:embed ranges.txt
var rangesText string

type span struct {
	prefix netip.Prefix
	class  Class
	what   string
}

// ranges are the ranges of IPv4 and of IPv6, the longest first.
var ranges = sync.OnceValues(func() (v4, v6 []span) {
	for line := range strings.Lines(rangesText) {
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		fields := strings.Fields(line)
		s := span{
			prefix: netip.MustParsePrefix(fields[0]),
			class:  Class(slices.Index(classNames[:], fields[1])),
			what:   strings.Join(fields[2:], " "),
		}
		if s.prefix.Addr().Is4() {
			v4 = append(v4, s)
		} else {
			v6 = append(v6, s)
		}
	}
	longer := func(a, b span) int { return b.prefix.Bits() - a.prefix.Bits() }
	slices.SortStableFunc(v4, longer)
	slices.SortStableFunc(v6, longer)
	return v4, v6
})

// find returns the longest range that has addr, nil for none.
func find(addr netip.Addr) *span {
	list, v6 := ranges()
	if addr.Is6() {
		list = v6
	}
	for i := range list {
		if list[i].prefix.Contains(addr) {
			return &list[i]
		}
	}
	return nil
}

var unicast6 = netip.MustParsePrefix("2000::/3")

// special is the class that the table of ranges gives an address.
func special(addr netip.Addr) Class {
	if s := find(addr); s != nil {
		return s.class
	}
	if addr.Is6() && !unicast6.Contains(addr) {
		return Reserved
	}
	return Public
}

// Describe says what the range of a special address is for; "" for any other.
func Describe(addr netip.Addr) string {
	if addr.Zone() != "" {
		return "an address with a zone"
	}
	if s := find(addr.Unmap()); s != nil {
		return s.what
	}
	return ""
}
