package dns

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/berm-sandbox/berm"
)

// keep is how long addresses of a name are used again, and maxKept of how many names.
const (
	keep    = 10 * time.Second
	maxKept = 4096
)

// Upstream asks the host's resolvers for the real addresses of names. Its methods are safe
// for concurrent use.
type Upstream struct {
	resolver net.Resolver
	group    singleflight.Group

	mu   sync.Mutex
	kept map[string]kept
}

type kept struct {
	addrs []netip.Addr
	until time.Time
}

// NewUpstream uses the resolvers given, or those of /etc/resolv.conf when there are none.
func NewUpstream(resolvers []netip.AddrPort) *Upstream {
	u := &Upstream{resolver: net.Resolver{PreferGo: true}, kept: map[string]kept{}}
	if len(resolvers) > 0 {
		u.resolver.Dial = func(ctx context.Context, network, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, network, resolvers[rand.IntN(len(resolvers))].String())
		}
	}
	return u
}

// Lookup returns the addresses of a name, none of them judged. Kinds: NotFound (no such
// name), Unavailable.
func (u *Upstream) Lookup(ctx context.Context, name string) ([]netip.Addr, error) {
	u.mu.Lock()
	k, ok := u.kept[name]
	u.mu.Unlock()
	if ok && time.Now().Before(k.until) {
		return k.addrs, nil
	}
	found, err, _ := u.group.Do(name, func() (any, error) {
		// The last dot keeps the search list of this host out.
		addrs, err := u.resolver.LookupNetIP(ctx, "ip", strings.TrimSuffix(name, ".")+".")
		if err != nil {
			return nil, err
		}
		u.mu.Lock()
		defer u.mu.Unlock()
		if len(u.kept) >= maxKept {
			clear(u.kept)
		}
		u.kept[name] = kept{addrs, time.Now().Add(keep)}
		return addrs, nil
	})
	var dnsErr *net.DNSError
	switch {
	case errors.As(err, &dnsErr) && dnsErr.IsNotFound:
		return nil, berm.Errorf(berm.NotFound, "there is no name %s", name)
	case err != nil:
		return nil, berm.Errorf(berm.Unavailable, "resolve %s: %w", name, err)
	}
	return found.([]netip.Addr), nil
}

// reversed reads the address in a name below in-addr.arpa.
func reversed(digits string) netip.Addr {
	parts := strings.Split(digits, ".")
	if len(parts) != 4 {
		return netip.Addr{}
	}
	addr, err := netip.ParseAddr(parts[3] + "." + parts[2] + "." + parts[1] + "." + parts[0])
	if err != nil {
		return netip.Addr{}
	}
	return addr
}
