// Package ports serves the socket through which the outside reaches the TCP ports
// inside the sandbox.
//
// Each connection begins with three bytes: the protocol version, 1, and the port in
// network order. One status byte answers; after status OK the connection is the
// port's byte stream. The agent's own port is not dialled but accepted here.
package ports

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/berm-sandbox/berm"
)

// version of the preface.
const version = 1

// The status bytes.
const (
	statusOK      = 0
	statusRefused = 1 // nothing listens on the port
	statusFailed  = 2
)

const (
	handshakeTimeout = 5 * time.Second
	dialTimeout      = 5 * time.Second
)

// Listener accepts the connections that are for the agent, and forwards the others.
type Listener struct {
	net.Listener
	conns  chan net.Conn
	done   chan struct{}
	failed error // why accepting ended; set before done is closed
}

// Listen serves l until it is closed.
func Listen(l net.Listener) *Listener {
	p := &Listener{Listener: l, conns: make(chan net.Conn), done: make(chan struct{})}
	go p.serve()
	return p
}

// Conn is a connection to the agent from outside.
type Conn struct{ net.Conn }

// Accept returns the next connection that is for the agent: a *Conn.
func (p *Listener) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, p.failed
	}
}

func (p *Listener) serve() {
	for {
		c, err := p.Listener.Accept()
		if err != nil {
			// A lack of descriptors or memory passes; all else is the end.
			if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ENOMEM) ||
				errors.Is(err, syscall.ENOBUFS) || errors.Is(err, syscall.ECONNABORTED) {
				time.Sleep(20 * time.Millisecond)
				continue
			}
			p.failed = err
			close(p.done)
			return
		}
		go p.handle(c)
	}
}

func (p *Listener) handle(c net.Conn) {
	_ = c.SetDeadline(time.Now().Add(handshakeTimeout))
	port, ok := readPreface(c)
	if !ok {
		_, _ = c.Write([]byte{statusFailed})
		c.Close()
		return
	}
	if port == berm.AgentPort {
		if _, err := c.Write([]byte{statusOK}); err != nil {
			c.Close()
			return
		}
		_ = c.SetDeadline(time.Time{})
		select {
		case p.conns <- &Conn{c}:
		case <-p.done:
			c.Close()
		}
		return
	}
	target, status := dial(port)
	_ = c.SetDeadline(time.Now().Add(handshakeTimeout))
	_, err := c.Write([]byte{status})
	if target == nil {
		c.Close()
		return
	}
	if err != nil {
		c.Close()
		target.Close()
		return
	}
	_ = c.SetDeadline(time.Time{})
	splice(c, target)
}

// readPreface reads the three bytes; ok is false for another version, port 0, or a
// connection that ends or dawdles.
func readPreface(r io.Reader) (port uint16, ok bool) {
	var b [3]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return 0, false
	}
	port = binary.BigEndian.Uint16(b[1:])
	return port, b[0] == version && port != 0
}

// dial connects to a port on the loopback of IPv4, else of IPv6.
func dial(port uint16) (net.Conn, byte) {
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
	defer cancel()
	status := byte(statusRefused)
	for _, host := range []string{"127.0.0.1", "::1"} {
		var d net.Dialer
		c, err := d.DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(int(port))))
		if err == nil {
			return c, statusOK
		}
		// A sandbox may have no IPv6: then nothing listens there either.
		if !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.EADDRNOTAVAIL) &&
			!errors.Is(err, syscall.EAFNOSUPPORT) && !errors.Is(err, syscall.ENETUNREACH) {
			status = statusFailed
		}
	}
	return nil, status
}

// splice copies both ways until both are done. The end of one direction is passed
// on alone; an error ends both.
func splice(a, b net.Conn) {
	var wg sync.WaitGroup
	pass := func(dst, src net.Conn) {
		_, err := io.Copy(dst, src)
		if err == nil {
			err = dst.(interface{ CloseWrite() error }).CloseWrite()
		}
		if err != nil && !errors.Is(err, syscall.ENOTCONN) {
			_ = a.SetDeadline(time.Unix(1, 0))
			_ = b.SetDeadline(time.Unix(1, 0))
		}
	}
	wg.Go(func() { pass(a, b) })
	pass(b, a)
	wg.Wait()
	a.Close()
	b.Close()
}

// The messages through which connections come that somebody else accepted, and what is to be
// done about them: one byte each.
const (
	messageConnection = 1 // with the descriptor of one
	messageRelease    = 2 // close all that came; answered by the same when it is done
	messageRenew      = 3 // with the descriptor of a new configuration; answered likewise
)

// File makes the listener of an inherited descriptor: a listening socket, or a connected one
// (SOCK_SEQPACKET) through which connections that somebody else accepted come as descriptors.
// Through that one the agent is also told to close them, before its memory is saved, and gets
// another configuration, which renew takes, when it goes on as another sandbox's.
func File(fd uintptr, renew func(*os.File) error) (net.Listener, error) {
	f := os.NewFile(fd, "agent.sock")
	defer f.Close() // what is made of it has a copy
	if _, err := syscall.Getpeername(int(fd)); err != nil {
		return net.FileListener(f)
	}
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	return &received{UnixConn: c.(*net.UnixConn), renew: renew, open: map[*receivedConn]bool{}}, nil
}

// received is a listener whose connections are received.
type received struct {
	*net.UnixConn
	renew func(*os.File) error

	mu   sync.Mutex
	open map[*receivedConn]bool
}

// receivedConn is a connection that is closed with all others.
type receivedConn struct {
	*net.UnixConn
	from *received
}

// Close closes it for good: the descriptor is gone when it returns.
func (c *receivedConn) Close() error {
	c.from.mu.Lock()
	delete(c.from.open, c)
	c.from.mu.Unlock()
	return c.UnixConn.Close()
}

func (r *received) Addr() net.Addr { return r.LocalAddr() }

// Accept returns the next connection.
func (r *received) Accept() (net.Conn, error) {
	for b, rights := make([]byte, 1), make([]byte, syscall.CmsgSpace(4)); ; {
		n, size, _, _, err := r.ReadMsgUnix(b, rights)
		if err != nil {
			return nil, err
		}
		if n == 0 {
			return nil, io.EOF
		}
		var f *os.File // lost for want of descriptors, or none was sent
		if parts, err := syscall.ParseSocketControlMessage(rights[:size]); err == nil && len(parts) == 1 {
			if fds, err := syscall.ParseUnixRights(&parts[0]); err == nil && len(fds) == 1 {
				f = os.NewFile(uintptr(fds[0]), "received")
			}
		}
		switch {
		case b[0] == messageRelease:
			r.release()
			_, _ = r.Write(b)
		case b[0] == messageRenew && f != nil:
			if r.renew(f) == nil {
				_, _ = r.Write(b)
			}
		case b[0] == messageConnection && f != nil:
			c, err := net.FileConn(f)
			f.Close()
			if unix, ok := c.(*net.UnixConn); ok && err == nil {
				conn := &receivedConn{UnixConn: unix, from: r}
				r.mu.Lock()
				r.open[conn] = true
				r.mu.Unlock()
				return conn, nil
			}
		}
		if f != nil {
			f.Close()
		}
	}
}

// release closes every connection.
func (r *received) release() {
	r.mu.Lock()
	conns := slices.Collect(maps.Keys(r.open))
	r.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
	}
}
