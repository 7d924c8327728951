// Package dns answers a sandbox's queries with addresses that stand for names, and asks for
// the real addresses when a connection is made.
//
// Each allowed name gets one address of its own (198.18.0.0/15, RFC 2544: never routed), the
// same for as long as the sandbox lives and never another name's. A flow to it carries
// exactly one name, whatever its protocol, and nobody outside is asked anything until a
// connection is made, so that nothing leaks by asking.
package dns

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/net/publicsuffix"
	"golang.org/x/time/rate"
)

// pool are the addresses that stand for names. The first and the last are left out, as in
// every network.
var pool = netip.MustParsePrefix("198.18.0.0/15")

// poolSize is how many names a sandbox can have.
const poolSize = 1<<17 - 2

// newNames is how many names below one registered domain a sandbox may come to use in an
// hour: each can carry bytes to that domain's servers, once it is connected to.
const newNames = 500

// maxDomains is how many domains have a budget of their own. A policy allows fewer.
const maxDomains = 8192

// Names are the names of one sandbox. Its methods are safe for concurrent use.
type Names struct {
	mu      sync.Mutex
	addrs   map[string]netip.Addr
	names   []string // by the number of their address
	budgets map[string]*rate.Limiter
	asked   map[string]bool         // names that were looked up outside
	real    map[netip.Addr][]string // that were told, with their names, the last one that was asked for first
}

// NewNames returns an empty set.
func NewNames() *Names {
	return &Names{addrs: map[string]netip.Addr{}, budgets: map[string]*rate.Limiter{}, asked: map[string]bool{}, real: map[netip.Addr][]string{}}
}

// Addr returns the address that stands for a name, which is in lower case without a last
// dot. It says false when there are no more, or too many new names below one domain.
func (n *Names) Addr(name string) (netip.Addr, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if addr, ok := n.addrs[name]; ok {
		return addr, true
	}
	if len(n.names) >= poolSize || !n.affords(name) {
		return netip.Addr{}, false
	}
	n.names = append(n.names, name)
	addr := number(len(n.names))
	n.addrs[name] = addr
	return addr, true
}

// affords takes a new name off the budget of its domain.
func (n *Names) affords(name string) bool {
	domain, err := publicsuffix.EffectiveTLDPlusOne(name)
	if err != nil {
		domain = name // a suffix itself, or one label
	}
	budget := n.budgets[domain]
	if budget == nil {
		if len(n.budgets) >= maxDomains {
			return false
		}
		budget = rate.NewLimiter(rate.Every(time.Hour/newNames), newNames)
		n.budgets[domain] = budget
	}
	return budget.Allow()
}

// Name returns the name that an address stands for; "" when it stands for none. Of several
// that share a real address it is the one that was asked for last.
func (n *Names) Name(addr netip.Addr) string {
	if all := n.All(addr); len(all) > 0 {
		return all[0]
	}
	return ""
}

// All returns the names that an address stands for: one at most, if it is not a real one.
func (n *Names) All(addr netip.Addr) []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !InPool(addr) {
		return slices.Clone(n.real[addr])
	}
	if i := index(addr); i >= 1 && i <= len(n.names) {
		return n.names[i-1 : i : i]
	}
	return nil
}

// Bounds of what is kept of real addresses.
const (
	maxReal   = 1 << 16
	maxShared = 16 // names of one address
)

// ask says whether a name may be looked up outside, and takes a new one off the budget of its
// domain.
func (n *Names) ask(name string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.asked[name] {
		return true
	}
	if len(n.asked) >= poolSize || !n.affords(name) {
		return false
	}
	n.asked[name] = true
	return true
}

// learn keeps the real addresses of a name, and returns those that are kept. There is nothing
// but IPv4 inside.
func (n *Names) learn(name string, found []netip.Addr) (told []netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, addr := range found {
		all, known := n.real[addr]
		if !addr.Is4() || InPool(addr) || !known && len(n.real) >= maxReal {
			continue
		}
		all = append([]string{name}, slices.DeleteFunc(slices.Clone(all), func(other string) bool { return other == name })...)
		n.real[addr] = all[:min(len(all), maxShared)]
		told = append(told, addr)
	}
	return told
}

// InPool says whether an address can only stand for a name.
func InPool(addr netip.Addr) bool { return pool.Contains(addr) }

func number(i int) netip.Addr {
	a := pool.Addr().As4()
	binary.BigEndian.PutUint32(a[:], binary.BigEndian.Uint32(a[:])+uint32(i))
	return netip.AddrFrom4(a)
}

func index(addr netip.Addr) int {
	a, base := addr.As4(), pool.Addr().As4()
	return int(binary.BigEndian.Uint32(a[:]) - binary.BigEndian.Uint32(base[:]))
}
