// Package upstream is how the services of sandboxes reach what a policy has allowed through
// proxies: the operator's, as corporate networks want it, and one of a sandbox's own.
package upstream

import (
	"context"
	"crypto/x509"
	"errors"
	"net"
	"net/netip"
	"strconv"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/address"
	"github.com/berm-sandbox/berm/internal/network/dns"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/inspect"
	"github.com/berm-sandbox/berm/internal/network/policy"
)

// Route is the way of one sandbox to what its policy has allowed.
type Route struct {
	way           egress.Upstream
	operator, own *inspect.Chain
	roots         *x509.CertPool
	lookup        func(ctx context.Context, name string) ([]netip.Addr, error)
	table         *address.Table
}

// New makes a route. Lookup resolves the names of proxies, as dns.Upstream.Lookup does. The
// operator's proxy is reached wherever it is; a sandbox's own must be where the table lets
// sandboxes go. Kind: Invalid.
func New(u egress.Upstream, lookup func(ctx context.Context, name string) ([]netip.Addr, error), table *address.Table) (*Route, error) {
	r := &Route{way: u, table: table}
	if len(u.Roots) > 0 {
		var err error
		if r.roots, err = x509.SystemCertPool(); err != nil {
			return nil, berm.Errorf(berm.Internal, "the system's authorities: %w", err)
		}
		if !r.roots.AppendCertsFromPEM(u.Roots) {
			return nil, berm.Errorf(berm.Invalid, "the authorities for upstreams hold no certificate in PEM")
		}
	}
	return r, r.use(lookup)
}

// use makes the chains, with lookup.
func (r *Route) use(lookup func(ctx context.Context, name string) ([]netip.Addr, error)) (err error) {
	r.lookup = lookup
	if r.way.Proxy != "" {
		if r.operator, err = inspect.NewChain(r.way.Proxy, r.roots, r.anywhere); err != nil {
			return err
		}
	}
	if r.way.Own == "" {
		return nil
	}
	roots := r.roots
	if len(r.way.OwnRoots) > 0 {
		if roots = x509.NewCertPool(); !roots.AppendCertsFromPEM(r.way.OwnRoots) {
			return berm.Errorf(berm.Invalid, "the authorities for the proxy hold no certificate in PEM")
		}
	}
	if r.own, err = inspect.NewChain(r.way.Own, roots, r.allowed); err == nil && r.way.OwnName != "" {
		r.own.VerifyAs(r.way.OwnName)
	}
	return err
}

// Verify refuses a sandbox's own proxy that is not where sandboxes may go, if that was asked
// for. Kind: Invalid.
func (r *Route) Verify(ctx context.Context) error {
	if r.own == nil || !r.way.Verify {
		return nil
	}
	host := r.own.Host()
	addrs := []netip.Addr{}
	if addr, err := netip.ParseAddr(host); err == nil {
		addrs = append(addrs, addr)
	} else if addrs, err = r.lookup(ctx, host); err != nil {
		return berm.Errorf(berm.Invalid, "the address of the egress proxy does not resolve: %w", err)
	}
	for _, addr := range addrs {
		if r.check(addr) == nil {
			return nil
		}
	}
	return berm.Errorf(berm.Invalid, "the address of the egress proxy is in a private or otherwise internal range")
}

// Resolve looks the names of the proxies up, for With.
func (r *Route) Resolve(ctx context.Context) (map[string][]netip.Addr, error) {
	found := map[string][]netip.Addr{}
	for _, c := range []*inspect.Chain{r.operator, r.own} {
		if c == nil {
			continue
		}
		name := c.Host()
		if _, err := netip.ParseAddr(name); err == nil {
			continue
		}
		addrs, err := r.lookup(ctx, name)
		if err != nil {
			return nil, berm.Errorf(berm.KindOf(err), "the upstream proxy: %w", err)
		}
		found[name] = addrs
	}
	return found, nil
}

// With is the same route with names of proxies that another process has looked up.
func (r *Route) With(found map[string][]netip.Addr) *Route {
	other := *r
	// What was parsed once is parsed again.
	_ = other.use(func(_ context.Context, name string) ([]netip.Addr, error) { return found[name], nil })
	return &other
}

// Roots verify upstreams: those that were given beside the system's; nil are the system's.
func (r *Route) Roots() *x509.CertPool { return r.roots }

// Proxied says whether there is a proxy.
func (r *Route) Proxied() bool { return r.operator != nil || r.own != nil }

// ByName says whether a flow that was allowed goes to a proxy by its name, which the proxy
// resolves. Through the operator's proxy alone that is so for names that the policy names.
// Any other public name could be one of the operator's own network for the proxy: it is
// resolved here, and goes on by an address that was vetted.
func (r *Route) ByName(v policy.Verdict) bool {
	return v.Flow.Host.Name() != "" && (r.own != nil || r.operator != nil && v.Named())
}

// DialName connects to a name through the proxies. Kind: Unavailable.
func (r *Route) DialName(ctx context.Context, name string, port uint16) (*inspect.Conn, error) {
	if r.own != nil {
		return r.own.Dial(ctx, name, port)
	}
	return r.operator.Dial(ctx, name, port)
}

// DialAddrs connects to the first of addresses, all vetted, that the proxies get to. Kind:
// Unavailable.
func (r *Route) DialAddrs(ctx context.Context, addrs []netip.Addr, port uint16) (*inspect.Conn, error) {
	errs := []error{berm.Errorf(berm.Unavailable, "no address is left")}
	for _, addr := range addrs {
		conn, err := r.DialName(ctx, addr.String(), port)
		if err == nil {
			return conn, nil
		}
		errs = append(errs[:0], err)
	}
	return nil, errors.Join(errs...)
}

// anywhere reaches the operator's proxy.
func (r *Route) anywhere(ctx context.Context, network, to string) (net.Conn, error) {
	return r.dial(ctx, network, to, func(netip.Addr) error { return nil })
}

// check refuses addresses that are closed to sandboxes.
func (r *Route) check(addr netip.Addr) error {
	if class := r.table.Judge(addr); class.Denied() {
		return berm.Errorf(berm.Denied, "%s is not dialed: %s", addr, class)
	}
	return nil
}

// allowed reaches a sandbox's own proxy.
func (r *Route) allowed(ctx context.Context, network, to string) (net.Conn, error) {
	if r.operator == nil {
		return r.dial(ctx, network, to, r.check)
	}
	host, port, addrs, err := r.resolve(ctx, to)
	if err != nil {
		return nil, err
	}
	for _, addr := range addrs {
		if r.check(addr) == nil {
			return r.operator.Dial(ctx, addr.String(), port)
		}
	}
	return nil, berm.Errorf(berm.Denied, "no address of %s may be connected to", host)
}

func (r *Route) dial(ctx context.Context, network, to string, check func(netip.Addr) error) (net.Conn, error) {
	host, port, addrs, err := r.resolve(ctx, to)
	if err != nil {
		return nil, err
	}
	dialer := dns.Dialer{
		Lookup: func(context.Context, string) ([]netip.Addr, error) { return addrs, nil },
		Vet: func(_ string, found []netip.Addr) (vetted []netip.Addr, _ error) {
			for _, addr := range found {
				if check(addr) == nil {
					vetted = append(vetted, addr)
				}
			}
			return vetted, nil
		},
		Check: func(to netip.AddrPort) error { return check(to.Addr()) },
	}
	return dialer.DialName(ctx, network, host, port)
}

// resolve reads where a proxy is.
func (r *Route) resolve(ctx context.Context, to string) (host string, port uint16, addrs []netip.Addr, err error) {
	if at, err := netip.ParseAddrPort(to); err == nil {
		return at.Addr().String(), at.Port(), []netip.Addr{at.Addr()}, nil
	}
	host, text, err := net.SplitHostPort(to)
	if err != nil {
		return "", 0, nil, berm.Errorf(berm.Invalid, "the proxy %s: %w", to, err)
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return "", 0, nil, berm.Errorf(berm.Invalid, "the proxy %s: %w", to, err)
	}
	addrs, err = r.lookup(ctx, host)
	return host, uint16(n), addrs, err
}
