package inspect

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
)

const (
	handshakeTimeout = 10 * time.Second
	headTimeout      = 10 * time.Second
	idleTimeout      = 2 * time.Minute
	streamLimit      = 32 // requests at a time on one connection
	refusalTimeout   = 10 * time.Second
)

// Config is what a Proxy works with.
type Config struct {
	CA    *CA // nil refuses TLS
	Judge Judge
	// Dial connects to the flow's destination, at an address that the policy has vetted, and
	// bounds how many connections there are. It may fail with a *Denial.
	Dial        func(context.Context, Flow) (net.Conn, error)
	Roots       *x509.CertPool // that upstreams are verified by; nil is the system's
	Sessions    *Sessions      // of TLS, shared with other proxies of the sandbox that have the same CA and Roots; may be nil
	Credentials Credentials    // may be nil
	Log         func(Record)   // called once per request, by many goroutines; may be nil
	// Begin bounds how many requests there are at a time. One for which it is not ok is refused;
	// end is called when another is over. It may be nil.
	Begin func() (end func(), ok bool)
}

// Proxy stands in the middle of the flows of one sandbox. Connections to upstreams are kept
// per name and port, and never shared with another sandbox.
type Proxy struct {
	Config
	server *http.Server
	door   door

	mu      sync.Mutex
	closed  bool
	clients map[*client]struct{}
	sites   map[siteKey]*site
	active  map[*exchange]context.CancelCauseFunc // allowed and not answered to the end
	changes int                                   // calls of Rejudge
}

// NewProxy starts a proxy. It needs Close.
func NewProxy(c Config) *Proxy {
	p := &Proxy{
		Config:  c,
		door:    door{conns: make(chan net.Conn), closed: make(chan struct{})},
		clients: map[*client]struct{}{},
		sites:   map[siteKey]*site{},
		active:  map[*exchange]context.CancelCauseFunc{},
	}
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true) // Serve decides which connections may
	p.server = &http.Server{
		Handler:   http.HandlerFunc(p.handle),
		Protocols: &protocols,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: streamLimit,
			// What the upstream does not take; the client is on this machine.
			MaxReceiveBufferPerConnection: 256 << 10, MaxReceiveBufferPerStream: 128 << 10,
		},
		MaxHeaderBytes:               headLimit,
		ReadHeaderTimeout:            headTimeout,
		IdleTimeout:                  idleTimeout,
		ErrorLog:                     log.New(io.Discard, "", 0), // a client can make it write as much as it likes
		DisableGeneralOptionsHandler: true,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, clientKey{}, clientOf(c))
		},
	}
	go p.server.Serve(&p.door) //nolint:errcheck // it ends with the door
	return p
}

// Close ends all flows, what they wait for, and the connections to upstreams.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.closed = true
	clients, sites := p.clients, p.sites
	p.clients, p.sites = nil, nil
	p.mu.Unlock()
	p.server.Close() //nolint:errcheck // the door's
	for c := range clients {
		c.Close() //nolint:errcheck // it is over in any case
	}
	for _, s := range sites {
		s.transport.CloseIdleConnections()
	}
}

// Rejudge asks the judge again about every request that is not answered to its end, and cuts
// those that it does not allow any more. It is called after the policy has changed.
func (p *Proxy) Rejudge(ctx context.Context) {
	p.mu.Lock()
	p.changes++
	active := maps.Clone(p.active)
	p.mu.Unlock()
	for x, cut := range active {
		if v := p.Judge.HTTP(ctx, x.request); !v.Allow {
			cut(x.denied(v))
		}
	}
}

// Serve answers a connection of the sandbox until it ends, and closes it. Whether it speaks
// TLS is seen from its first byte. A *Denial says that the flow was refused before there
// was a request to answer.
func (p *Proxy) Serve(conn net.Conn, f Flow) error {
	ahead, ok := conn.(*Conn)
	if !ok {
		ahead = Ahead(conn)
	}
	c := &client{Conn: ahead, proxy: p, done: make(chan struct{})}
	if !p.enter(c) {
		conn.Close()
		return net.ErrClosed
	}
	defer c.Close() //nolint:errcheck // it is over in any case
	inner, err := p.open(c, f)
	if err != nil {
		return err
	}
	select {
	case p.door.conns <- inner:
		<-c.done
		return nil
	case <-p.door.closed:
		return net.ErrClosed
	}
}

// open brings a connection to where HTTP begins.
func (p *Proxy) open(c *client, f Flow) (inner net.Conn, err error) {
	protocol, err := c.Protocol()
	if err != nil {
		return nil, err
	}
	switch protocol {
	case TLS:
		return p.openTLS(c, f)
	case HTTP1:
		scheme := "http"
		if f.Endpoint != "" {
			scheme = "https"
		}
		c.site, err = p.site(siteKey{flow: f, scheme: scheme})
		c.framing = &framing{Conn: c, client: c}
		return c.framing, err
	case HTTP2:
		if !f.H2C {
			c.refusal = &Denial{Reason: ReasonProtocol, Message: "HTTP/2 without TLS is not allowed for " + f.Address(),
				Hint: "use HTTP/1.1 or https, or allow h2c by the rule"}
		}
		c.site, err = p.site(siteKey{flow: f, scheme: "http", http2: true})
		return c, err
	}
	return nil, &Denial{Reason: ReasonProtocol, Message: "the flow to " + f.Address() + " is neither TLS nor HTTP",
		Hint: "for another protocol allow the port by a rule with proto: tcp"}
}

func (p *Proxy) openTLS(c *client, f Flow) (net.Conn, error) {
	hello, err := c.Hello()
	switch {
	case err != nil:
	case p.CA == nil || f.Endpoint != "":
		err = &Denial{Reason: ReasonProtocol, Message: "TLS is not allowed for " + f.Address(), Hint: "use http"}
	default:
		// An encrypted hello beside is without effect: there is no key for it.
		if denial := hello.Check(f); denial != nil {
			err = denial
		}
	}
	if err != nil {
		if d := (*Denial)(nil); errors.As(err, &d) {
			d.Alert(c)
		}
		return nil, err
	}
	if c.site, err = p.site(siteKey{flow: f, scheme: "https"}); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), handshakeTimeout)
	defer cancel()
	config := c.site.tls
	// Who can do without HTTP/2 does: libcurl 7.88 (Debian 12) now and then sends 64 KiB of a
	// large push twice by it. gRPC offers nothing else.
	if slices.Contains(hello.ALPN, "h2") && !slices.Contains(hello.ALPN, "http/1.1") {
		config = c.site.tls2
	}
	conn := tls.Server(c, config)
	if err := conn.HandshakeContext(ctx); err != nil {
		return nil, berm.Errorf(berm.Invalid, "TLS with the client of %s: %w", f.Address(), err).
			WithHint("a client that does not trust the sandbox's authority, or pins certificates, needs a rule with tls: passthrough")
	}
	if conn.ConnectionState().NegotiatedProtocol == "h2" {
		return conn, nil
	}
	c.framing = &framing{Conn: conn, client: c}
	return c.framing, nil
}

func (p *Proxy) enter(c *client) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.clients[c] = struct{}{}
	return true
}

// client is one connection of the sandbox.
type client struct {
	*Conn
	proxy   *Proxy
	site    *site
	framing *framing // of HTTP/1
	seen    int      // requests of HTTP/1, which come one after the other
	refusal *Denial  // of every request
	once    sync.Once
	done    chan struct{}
}

func (c *client) Close() error {
	err := c.Conn.Close()
	c.once.Do(func() {
		close(c.done)
		c.proxy.mu.Lock()
		delete(c.proxy.clients, c)
		c.proxy.mu.Unlock()
	})
	return err
}

type clientKey struct{}

// clientOf finds the client under what Serve gave to the server.
func clientOf(c net.Conn) *client {
	switch c := c.(type) {
	case *framing:
		return c.client
	case *tls.Conn:
		return c.NetConn().(*client)
	}
	return c.(*client)
}

// door is the listener by which connections reach the HTTP server.
type door struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (d *door) Accept() (net.Conn, error) {
	select {
	case c := <-d.conns:
		return c, nil
	case <-d.closed:
		return nil, net.ErrClosed
	}
}

func (d *door) Close() error {
	d.once.Do(func() { close(d.closed) })
	return nil
}

func (d *door) Addr() net.Addr { return &net.UnixAddr{Net: "unix"} }
