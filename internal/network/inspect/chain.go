package inspect

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/proxy"

	"github.com/berm-sandbox/berm"
)

// chainTimeout bounds how long a proxy upstream may take to connect further.
const chainTimeout = 30 * time.Second

// Chain reaches destinations through a proxy upstream, as corporate networks want it. It
// stands after policy: it is asked for what the policy has allowed.
type Chain struct {
	proxy *url.URL
	addr  string
	name  string // by which an https or socks5s proxy is verified
	roots *x509.CertPool
	dial  func(ctx context.Context, network, address string) (net.Conn, error)
}

// NewChain takes the proxy's URL: http, https, socks5, where socks5h means the same, or socks5s,
// which is SOCKS5 by TLS, with user and password if it wants them. Roots verify the proxy's
// certificate, nil are the system's; dial reaches the proxy itself. It fails with Invalid.
func NewChain(proxyURL string, roots *x509.CertPool, dial func(ctx context.Context, network, address string) (net.Conn, error)) (*Chain, error) {
	u, err := url.Parse(proxyURL)
	if err != nil {
		// The error of url.Parse shows the URL, password included.
		return nil, berm.Errorf(berm.Invalid, "the URL of the upstream proxy is malformed")
	}
	port := map[string]string{"http": "80", "https": "443", "socks5": "1080", "socks5h": "1080", "socks5s": "1080"}[u.Scheme]
	if port == "" || u.Hostname() == "" || u.Path != "" && u.Path != "/" || u.RawQuery != "" {
		return nil, berm.Errorf(berm.Invalid, "the URL of the upstream proxy %s is not of the form scheme://host:port", u.Redacted()).
			WithHint("the scheme is http, https or socks5")
	}
	if p := u.Port(); p != "" {
		port = p
	}
	return &Chain{proxy: u, name: u.Hostname(), addr: net.JoinHostPort(u.Hostname(), port), roots: roots, dial: dial}, nil
}

// VerifyAs has the proxy's certificate be of another name than its URL's.
func (c *Chain) VerifyAs(name string) { c.name = name }

// Host is the name or address of the proxy.
func (c *Chain) Host() string { return c.proxy.Hostname() }

// Dial connects through the proxy to host, a name that the proxy resolves or an address.
func (c *Chain) Dial(ctx context.Context, host string, port uint16) (*Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, chainTimeout)
	defer cancel()
	target := net.JoinHostPort(host, strconv.Itoa(int(port)))
	conn, err := c.connect(ctx, target)
	if err != nil {
		return nil, berm.Errorf(berm.Unavailable, "reach %s through the upstream proxy %s: %w", target, c.addr, err)
	}
	return conn, nil
}

func (c *Chain) connect(ctx context.Context, target string) (*Conn, error) {
	conn, err := c.dial(ctx, "tcp", c.addr)
	if err != nil {
		return nil, err
	}
	// The end of the context ends every read and write below.
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	tunnel, err := c.greet(ctx, conn, target)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return tunnel, nil
}

// greet asks the proxy for a connection.
func (c *Chain) greet(ctx context.Context, conn net.Conn, target string) (*Conn, error) {
	if c.proxy.Scheme == "https" || c.proxy.Scheme == "socks5s" {
		secure := tls.Client(conn, &tls.Config{ServerName: c.name, RootCAs: c.roots, MinVersion: tls.VersionTLS12})
		if err := secure.HandshakeContext(ctx); err != nil {
			return nil, err
		}
		conn = secure
	}
	if strings.HasPrefix(c.proxy.Scheme, "socks") {
		return c.socks(ctx, conn, target)
	}
	return c.tunnel(conn, target)
}

// socks asks a SOCKS proxy for a connection (RFC 1928, RFC 1929).
func (c *Chain) socks(ctx context.Context, conn net.Conn, target string) (*Conn, error) {
	var auth *proxy.Auth
	if c.proxy.User != nil {
		password, _ := c.proxy.User.Password()
		auth = &proxy.Auth{User: c.proxy.User.Username(), Password: password}
	}
	socks, err := proxy.SOCKS5("tcp", c.addr, auth, nil)
	if err != nil {
		return nil, err
	}
	// The dialer's own connection cannot end one direction alone.
	_, err = socks.(interface {
		DialWithConn(ctx context.Context, c net.Conn, network, address string) (net.Addr, error)
	}).DialWithConn(ctx, conn, "tcp", target)
	return Ahead(conn), err
}

// tunnel asks an HTTP proxy for a tunnel (RFC 9110 section 9.3.6).
func (c *Chain) tunnel(conn net.Conn, target string) (*Conn, error) {
	request := "CONNECT " + target + " HTTP/1.1\r\nHost: " + target + "\r\n"
	if u := c.proxy.User; u != nil {
		password, _ := u.Password()
		request += "Proxy-Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte(u.Username()+":"+password)) + "\r\n"
	}
	if _, err := io.WriteString(conn, request+"\r\n"); err != nil {
		return nil, err
	}
	reader := bufio.NewReader(io.LimitReader(conn, headLimit))
	res, err := http.ReadResponse(reader, &http.Request{Method: http.MethodConnect})
	if err != nil {
		return nil, err
	}
	res.Body.Close() // a reply to CONNECT has none
	if res.StatusCode != http.StatusOK {
		return nil, errors.New("it answers " + strconv.Quote(printable(res.Status)))
	}
	// A server that speaks first may have been faster than this reader.
	first := make([]byte, reader.Buffered())
	if _, err := io.ReadFull(reader, first); err != nil {
		return nil, err
	}
	return &Conn{Conn: conn, ahead: first}, nil
}
