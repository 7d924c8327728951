// Package dns answers a sandbox's queries with addresses that stand for names.
//
// Each allowed name gets one address of its own (198.18.0.0/15, RFC 2544: never routed), the
// same for as long as the sandbox lives and never another name's. A flow to it carries
// exactly one name, whatever its protocol, and nobody outside is asked anything until a
// connection is made, so that nothing leaks by asking.
package dns

import (
	"net/netip"
	"sync"
)

// pool are the addresses that stand for names. The first and the last are left out, as in
// every network.
var pool = netip.MustParsePrefix("198.18.0.0/15")

// poolSize is how many names a sandbox can have.
const poolSize = 1<<17 - 2

// Names are the names of one sandbox. Its methods are safe for concurrent use.
type Names struct {
	mu    sync.Mutex
	addrs map[string]netip.Addr
	names []string // by the number of their address
}

// NewNames returns an empty set.
func NewNames() *Names { return &Names{addrs: map[string]netip.Addr{}} }

// Addr returns the address that stands for a name, which is in the form of policy.Host. It
// says false when there are no more.
func (n *Names) Addr(name string) (netip.Addr, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if addr, ok := n.addrs[name]; ok {
		return addr, true
	}
	if len(n.names) >= poolSize {
		return netip.Addr{}, false
	}
	n.names = append(n.names, name)
	addr := number(len(n.names))
	n.addrs[name] = addr
	return addr, true
}

// Name returns the name that an address stands for; "" when it stands for none.
func (n *Names) Name(addr netip.Addr) string {
	if !pool.Contains(addr) {
		return ""
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if i := index(addr); i >= 1 && i <= len(n.names) {
		return n.names[i-1]
	}
	return ""
}

// InPool says whether an address can only stand for a name.
func InPool(addr netip.Addr) bool { return pool.Contains(addr) }

func number(i int) netip.Addr {
	base := pool.Addr().As4()
	v := uint32(base[0])<<24 | uint32(base[1])<<16 | uint32(base[2])<<8 | uint32(base[3])
	v += uint32(i)
	return netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)})
}

func index(addr netip.Addr) int {
	a, base := addr.As4(), pool.Addr().As4()
	v := func(b [4]byte) uint32 {
		return uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
	}
	return int(v(a) - v(base))
}
