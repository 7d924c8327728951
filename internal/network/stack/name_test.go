package stack_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/internal/network/dns"
	"github.com/berm-sandbox/berm/internal/network/stack"
)

// A program inside resolves a name and connects to it: the flow carries the name, the
// connection outside goes to the address that was vetted, and nothing was asked before.
func TestANameFromTheQueryToTheConnection(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("the real one"))
			c.Close()
		}
	}()
	names := dns.NewNames()
	answers := dns.NewResponder(names, dns.Zone{Allowed: func(name string) bool { return name == "good.test" }}, func() bool { return true })
	lookups := make(chan string, 10)
	dialer := &dns.Dialer{
		Lookup: func(_ context.Context, name string) ([]netip.Addr, error) {
			lookups <- name
			return []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("127.0.0.1")}, nil
		},
		Vet:   func(_ string, addrs []netip.Addr) ([]netip.Addr, error) { return addrs[1:], nil },
		Check: func(netip.AddrPort) error { return nil },
	}
	j := &judge{
		query: func(_ netip.Addr, m []byte) []byte { return answers.Answer(t.Context(), m) },
		tcp: func(ctx context.Context, f *stack.Flow) func(stack.Conn) {
			if f.Destination.Port() == 53 {
				return func(c stack.Conn) { _ = answers.Serve(ctx, c) }
			}
			name := names.Name(f.Destination.Addr())
			if name == "" {
				return nil
			}
			out, err := dialer.DialName(ctx, "tcp", name, netip.MustParseAddrPort(l.Addr().String()).Port())
			if err != nil {
				t.Error(err)
				return nil
			}
			return func(c stack.Conn) {
				defer out.Close()
				_ = stack.Splice(c, out.(*net.TCPConn))
			}
		},
	}
	b := start(t, j, stack.Limits{})
	for _, network := range []string{"udp", "tcp"} {
		resolver := net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
			return b.Connect(network, "10.0.2.2:53")
		}}
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		addrs, err := resolver.LookupHost(ctx, "good.test.")
		if fmt.Sprint(addrs) != "[198.18.0.1]" || err != nil {
			t.Fatalf("%s: %v, %v", network, addrs, err)
		}
		if len(lookups) > 0 {
			t.Errorf("%s: a query inside asked outside about %s", network, <-lookups)
		}
		c := b.MustConnect(t, "tcp", addrs[0]+":443")
		if got, err := io.ReadAll(c); string(got) != "the real one" {
			t.Errorf("%s: %q, %v", network, got, err)
		}
		if name := <-lookups; name != "good.test" {
			t.Errorf("%s: asked outside about %s", network, name)
		}
		var missing *net.DNSError
		if addrs, err := resolver.LookupHost(ctx, "evil.test."); !errors.As(err, &missing) || !missing.IsNotFound {
			t.Errorf("%s: evil.test: %v, %v", network, addrs, err)
		}
		if _, err := b.Connect("tcp", "198.18.0.2:443"); err == nil {
			t.Error("an address that stands for no name is connected to")
		}
	}
}
