package inspect

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	// aheadLimit bounds what is read of a flow before it is judged. Hellos of today's
	// clients have 2 KiB; crypto/tls takes messages up to 64 KiB.
	aheadLimit   = 64 << 10
	aheadTimeout = 5 * time.Second
)

// Conn is a connection of which something was read ahead. Reading starts with that.
type Conn struct {
	net.Conn
	ahead []byte
}

// Ahead wraps a connection of which nothing was read.
func Ahead(c net.Conn) *Conn { return &Conn{Conn: c} }

func (c *Conn) Read(p []byte) (int, error) {
	if len(c.ahead) == 0 {
		return c.Conn.Read(p)
	}
	n := copy(p, c.ahead)
	if c.ahead = c.ahead[n:]; len(c.ahead) == 0 {
		c.ahead = nil
	}
	return n, nil
}

// WriteTo writes all that comes, in the way of the connection below if that has one.
func (c *Conn) WriteTo(w io.Writer) (int64, error) {
	n, err := w.Write(c.ahead)
	if c.ahead = c.ahead[n:]; err != nil {
		return int64(n), err
	}
	c.ahead = nil
	rest, err := io.Copy(w, c.Conn)
	return int64(n) + rest, err
}

// NetConn is the connection below, of which more was read than was given.
func (c *Conn) NetConn() net.Conn { return c.Conn }

// CloseWrite ends the stream towards the peer.
func (c *Conn) CloseWrite() error { return closeWrite(c.Conn) }

// more reads further ahead.
func (c *Conn) more() error {
	if len(c.ahead) >= aheadLimit {
		return &Denial{Reason: ReasonProtocol, Message: "the client sent 64 KiB without saying what it wants"}
	}
	c.ahead = slices.Grow(c.ahead, 512)
	n, err := c.Conn.Read(c.ahead[len(c.ahead):min(cap(c.ahead), aheadLimit)])
	c.ahead = c.ahead[:len(c.ahead)+n]
	if n > 0 {
		return nil
	}
	if err == nil {
		err = io.ErrNoProgress
	}
	return err
}

// limitTime bounds reading ahead; the function returned ends that.
func (c *Conn) limitTime() (func(), error) {
	if err := c.SetReadDeadline(time.Now().Add(aheadTimeout)); err != nil {
		return nil, err
	}
	return func() { c.SetReadDeadline(time.Time{}) }, nil //nolint:errcheck // a dead connection fails at its next use
}

// Protocol is what a client begins to speak.
type Protocol int

// The protocols that can be told from their first bytes.
const (
	Other Protocol = iota
	TLS
	HTTP1
	HTTP2 // without TLS, by prior knowledge
)

// preface begins each connection of HTTP/2 (RFC 9113 section 3.4).
const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// Protocol reads as far ahead as it must to tell the protocol, for five seconds at most.
func (c *Conn) Protocol() (Protocol, error) {
	done, err := c.limitTime()
	if err != nil {
		return Other, err
	}
	defer done()
	for {
		if p, known := protocol(c.ahead); known {
			return p, nil
		}
		if err := c.more(); err != nil {
			return Other, err
		}
	}
}

// protocol judges the first bytes of a connection; they may be too few.
func protocol(b []byte) (p Protocol, known bool) {
	if len(b) == 0 {
		return Other, false
	}
	const handshake = 0x16 // type of the record
	if b[0] == handshake {
		return TLS, true
	}
	if n := min(len(b), len(preface)); string(b[:n]) == preface[:n] {
		return HTTP2, n == len(preface)
	}
	// A method in capitals and a space: other spellings are HTTP as well, which no client
	// uses. SSH begins with SSH-2.0 and may have a space too.
	const longest = 24
	for i, ch := range b[:min(len(b), longest)] {
		switch {
		case ch == ' ' && i > 0:
			return HTTP1, true
		case (ch < 'A' || ch > 'Z') && ch != '-':
			return Other, true
		}
	}
	return Other, len(b) >= longest
}

// Hello is what a TLS client says first, unencrypted (RFC 8446 section 4.1.2).
type Hello struct {
	ServerName string // as sent; empty when absent
	ALPN       []string
	Versions   []uint16 // that the client takes
	// ECH says that there is an encrypted hello, whose name may be another one. Clients send
	// random bytes in its place too, which cannot be told apart.
	ECH bool
}

const extensionECH = 0xfe0d // RFC 9849

// errHello ends the handshake after the hello.
var errHello = errors.New("hello is read")

// Hello reads the ClientHello and leaves it to be read again. It fails with a *Denial when
// there is none, and with an error of the connection, five seconds long at most.
func (c *Conn) Hello() (Hello, error) {
	done, err := c.limitTime()
	if err != nil {
		return Hello{}, err
	}
	defer done()
	var h Hello
	peek := &peeker{Conn: c}
	// crypto/tls puts records and fragments together as a server does.
	err = tls.Server(peek, &tls.Config{
		GetConfigForClient: func(i *tls.ClientHelloInfo) (*tls.Config, error) {
			h = Hello{
				ServerName: i.ServerName,
				ALPN:       slices.Clone(i.SupportedProtos),
				Versions:   slices.Clone(i.SupportedVersions),
				ECH:        slices.Contains(i.Extensions, extensionECH),
			}
			return nil, errHello
		},
	}).HandshakeContext(context.Background())
	switch {
	case errors.Is(err, errHello):
		return h, nil
	case peek.err != nil:
		return Hello{}, peek.err
	}
	return Hello{}, &Denial{Reason: ReasonProtocol, Message: "the client's TLS hello is malformed"}
}

// peeker reads a connection without taking anything from it, and writes nothing.
type peeker struct {
	*Conn
	at  int
	err error // of the connection
}

func (p *peeker) Read(b []byte) (int, error) {
	for p.at == len(p.ahead) {
		if err := p.more(); err != nil {
			p.err = err
			return 0, err
		}
	}
	n := copy(b, p.ahead[p.at:])
	p.at += n
	return n, nil
}

func (p *peeker) Write(b []byte) (int, error)      { return len(b), nil }
func (p *peeker) Close() error                     { return nil }
func (p *peeker) SetDeadline(time.Time) error      { return nil }
func (p *peeker) SetReadDeadline(time.Time) error  { return nil }
func (p *peeker) SetWriteDeadline(time.Time) error { return nil }

// Check says whether the hello is for the flow: a server may serve many names at one
// address. Whether the name may be absent or hidden in a flow that stays encrypted, its rule
// says.
func (h Hello) Check(f Flow) *Denial {
	switch {
	case h.ServerName == "" && net.ParseIP(f.Name) == nil: // a name is never an address (RFC 6066 section 3)
		return &Denial{Reason: ReasonSNI,
			Message: "the TLS hello for " + f.Name + " names no server",
			Hint:    "use a client that sends SNI"}
	case h.ServerName != "" && !sameName(h.ServerName, f.Name):
		return &Denial{Reason: ReasonSNI,
			Message: "the TLS hello for " + f.Name + " names " + strconv.Quote(printable(h.ServerName)),
			Hint:    "connect to the name itself, without --resolve or a hosts file"}
	}
	return nil
}

// printable makes a text of a client fit for a message.
func printable(s string) string {
	if len(s) > 100 {
		s = s[:100] + "…"
	}
	return strings.ToValidUTF8(s, "?")
}

// closeWrite ends the stream towards the peer; a connection that cannot do so is closed.
func closeWrite(c net.Conn) error {
	if half, ok := c.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Close()
}
