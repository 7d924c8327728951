package builder

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/address"
)

// outside is the way to registries for who has a key of the server and names them: it does not
// lead to what only the server's host can reach. A proxy of the environment is the operator's,
// and judges by itself.
func outside(table *address.Table) http.RoundTripper {
	way := remote.DefaultTransport.(*http.Transport).Clone()
	plain := &net.Dialer{Timeout: 30 * time.Second}
	guarded := &net.Dialer{Timeout: plain.Timeout, ControlContext: func(_ context.Context, _, to string, _ syscall.RawConn) error {
		at, err := netip.ParseAddrPort(to)
		if err != nil {
			return err
		}
		if class := table.Judge(at.Addr()); class.Denied() {
			return berm.Errorf(berm.Denied, "a registry at a %s address, %s", class, at.Addr()).WithHint("berm serve --open %s lets it be reached", at.Addr())
		}
		return nil
	}}
	way.DialContext = func(ctx context.Context, network, to string) (net.Conn, error) {
		if isProxy(to) {
			return plain.DialContext(ctx, network, to)
		}
		return guarded.DialContext(ctx, network, to)
	}
	return way
}

// isProxy says whether HOST:PORT is a proxy that the environment names.
func isProxy(to string) bool {
	for _, scheme := range []string{"http", "https"} {
		proxy, err := http.ProxyFromEnvironment(&http.Request{URL: &url.URL{Scheme: scheme, Host: "registry.invalid"}})
		if err != nil || proxy == nil {
			continue
		}
		port := proxy.Port()
		if port == "" {
			port = map[string]string{"http": "80", "https": "443", "socks5": "1080"}[proxy.Scheme]
		}
		if net.JoinHostPort(proxy.Hostname(), port) == to {
			return true
		}
	}
	return false
}
