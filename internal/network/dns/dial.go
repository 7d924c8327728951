package dns

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/berm-sandbox/berm"
)

// headStart is how long an address has before the next is tried beside it (RFC 8305).
const headStart = 250 * time.Millisecond

// Dialer connects to names: to addresses that were vetted, never to a name.
type Dialer struct {
	// Lookup returns the addresses of a name, as Upstream.Lookup does.
	Lookup func(ctx context.Context, name string) ([]netip.Addr, error)
	// Vet returns those of the addresses that may be dialed, or why there are none.
	Vet func(name string, addrs []netip.Addr) ([]netip.Addr, error)
	// Check looks once more at what a socket is about to be connected to.
	Check func(netip.AddrPort) error
}

// DialName connects to a port of a name; network is "tcp" or "udp". Of several addresses it
// takes the one that answers first, with a head start for the earlier. Kinds: those of
// Lookup and Vet, and Unavailable.
func (d *Dialer) DialName(ctx context.Context, network, name string, port uint16) (net.Conn, error) {
	found, err := d.Lookup(ctx, name)
	if err != nil {
		return nil, err
	}
	vetted, err := d.Vet(name, found)
	if err != nil {
		return nil, err
	}
	if len(vetted) == 0 {
		return nil, berm.Errorf(berm.Denied, "no address of %s may be connected to", name)
	}
	conn, err := d.race(ctx, network, interleaved(vetted), port)
	if err != nil {
		return nil, berm.Errorf(berm.Unavailable, "connect to %s: %w", name, err)
	}
	return conn, nil
}

// DialAddr connects to an address, which the caller vetted. Kind: Unavailable.
func (d *Dialer) DialAddr(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
	conn, err := d.one(ctx, network, to)
	if err != nil {
		return nil, berm.Errorf(berm.Unavailable, "connect to %s: %w", to, err)
	}
	return conn, nil
}

func (d *Dialer) one(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
	dialer := net.Dialer{ControlContext: func(_ context.Context, _, address string, _ syscall.RawConn) error {
		actual, err := netip.ParseAddrPort(address)
		if err != nil {
			return err
		}
		if actual.Port() != to.Port() || actual.Addr().Unmap() != to.Addr().Unmap() {
			return errors.New("a socket for " + to.String() + " would be connected to " + address)
		}
		return d.Check(actual)
	}}
	return dialer.DialContext(ctx, network, to.String())
}

// race tries addresses one after another, the next when one failed or did not answer within
// its head start.
func (d *Dialer) race(ctx context.Context, network string, addrs []netip.Addr, port uint16) (net.Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		conn net.Conn
		err  error
	}
	results := make(chan result)
	tried, failures := 0, 0
	var errs []error
	next := time.NewTimer(0)
	defer next.Stop()
	for {
		select {
		case <-next.C:
			if tried == len(addrs) {
				continue
			}
			to := netip.AddrPortFrom(addrs[tried], port)
			tried++
			go func() {
				conn, err := d.one(ctx, network, to)
				select {
				case results <- result{conn, err}:
				case <-ctx.Done(): // another was first
					if conn != nil {
						conn.Close()
					}
				}
			}()
			next.Reset(headStart)
		case r := <-results:
			if r.err == nil {
				return r.conn, nil
			}
			errs = append(errs, r.err)
			if failures++; failures == len(addrs) {
				return nil, errors.Join(errs...)
			}
			next.Reset(0)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// interleaved puts addresses of both families by turns, the family of the first first.
func interleaved(addrs []netip.Addr) []netip.Addr {
	var families [2][]netip.Addr
	for _, a := range addrs {
		i := 0
		if a.Is4() != addrs[0].Is4() {
			i = 1
		}
		families[i] = append(families[i], a)
	}
	list := make([]netip.Addr, 0, len(addrs))
	for i := range addrs {
		for _, f := range families {
			if i < len(f) {
				list = append(list, f[i])
			}
		}
	}
	return list
}
