package policy

import (
	"net/netip"
	"slices"

	"golang.org/x/net/publicsuffix"

	"github.com/berm-sandbox/berm/internal/network/address"
)

// Warning is what is probably not meant.
type Warning struct {
	Rule string
	Line int // 0 for none
	Text string
}

// maxComparisons bounds the search for rules that are never reached: it grows with the
// square of the destinations.
const maxComparisons = 1 << 21

// Warnings are what in a policy is well-formed and probably wrong: rules that are never
// reached, wildcards over what strangers own, ranges that no rule opens. Of a very large
// policy not every rule is compared with every other.
func (p *Policy) Warnings(table *address.Table) []Warning {
	var all []Warning
	comparisons := 0
	for i := range p.Rules {
		r := &p.Rules[i]
		warn := func(text string) { all = append(all, Warning{r.ID, r.Line, text}) }
		for j := range p.Rules[:i] {
			if earlier := &p.Rules[j]; comparisons < maxComparisons && earlier.shadows(r, &comparisons) {
				text := "never reached: rule " + earlier.ID + " before it has all of its destinations"
				if earlier.action() != r.action() {
					text += " and says " + string(earlier.action())
				}
				warn(text)
				break
			}
		}
		if r.action() == Deny {
			continue
		}
		for _, t := range r.To {
			if suffix, icann := publicsuffix.PublicSuffix(t.name); t.kind != exactName && t.kind != namedGroup && t.name == suffix && !icann && t.name != "" {
				warn(t.String() + " is every customer of " + suffix + ", strangers too")
			}
			if t.kind == addrRange && table.Judge(t.prefix.Addr()).Denied() && table.Judge(last(t.prefix)).Denied() {
				warn(t.String() + " is not the public internet (" + table.Judge(t.prefix.Addr()).String() + "): it stays denied unless the operator opens it (--open)")
			}
			if t.kind == exactName && forbidden(t.name) != "" {
				warn(t.String() + " is denied whatever rules say")
			}
		}
	}
	return all
}

// shadows says whether a rule has all destinations, ports and protocols of a later one,
// for ever. It adds to comparisons.
func (r *Rule) shadows(later *Rule, comparisons *int) bool {
	*comparisons++
	if !coversService(r, later) || len(later.To) == 0 {
		return false
	}
	for _, t := range later.To {
		if *comparisons += len(r.To); *comparisons > maxComparisons {
			return false
		}
		if !slices.ContainsFunc(r.To, func(s Target) bool { return s.covers(t) }) {
			return false
		}
	}
	// A wide range of ports does not open guarded ports, single ones do.
	if r.action() == Deny {
		return true
	}
	for _, p := range later.ports() {
		for _, port := range guarded {
			if p.contains(port) && !slices.Contains(r.ports(), PortRange{port, port}) {
				return false
			}
		}
	}
	return true
}

// last is the last address of a range.
func last(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	addr, _ := netip.AddrFromSlice(b)
	return addr
}
