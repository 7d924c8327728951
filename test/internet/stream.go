package internet

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Stream is one connection that was accepted, and what came over it, decrypted.
type Stream struct {
	To   netip.AddrPort
	Name string // that TLS asked for; empty without TLS
	TLS  bool

	mu   sync.Mutex
	data []byte
}

// keep bounds what is kept of a stream.
const keep = 1 << 20

// Data is what came so far, the first mebibyte of it.
func (s *Stream) Data() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return bytes.Clone(s.data)
}

// Streams returns the connections that were accepted by servers of Serve since the last call.
func (i *Internet) Streams() []*Stream {
	i.mu.Lock()
	defer i.mu.Unlock()
	streams := i.streams
	i.streams = nil
	return streams
}

// Serve is a web server at an address and ports of the internet, a zero address being every
// one. It speaks TLS with who begins so, with the certificate that names says for a name, and
// else the authority's.
func (i *Internet) Serve(t testing.TB, at netip.Addr, handler http.Handler, ports ...uint16) {
	t.Helper()
	for _, port := range ports {
		conns := &accepted{Listener: i.Listen(t, at, port), ready: make(chan net.Conn)}
		server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second, ErrorLog: silent}
		go func() { _ = server.Serve(conns) }()
		go conns.accept(i)
		t.Cleanup(func() { _ = server.Close() })
	}
}

// accepted hands out connections whose first byte is known.
type accepted struct {
	net.Listener
	ready chan net.Conn
	done  atomic.Bool
}

func (a *accepted) Accept() (net.Conn, error) {
	conn, ok := <-a.ready
	if !ok {
		return nil, net.ErrClosed
	}
	return conn, nil
}

func (a *accepted) accept(i *Internet) {
	var waiting sync.WaitGroup
	for {
		conn, err := a.Listener.Accept()
		if err != nil {
			break
		}
		to := conn.LocalAddr().(*net.TCPAddr).AddrPort()
		s := &Stream{To: netip.AddrPortFrom(to.Addr().Unmap(), to.Port())}
		i.mu.Lock()
		i.streams = append(i.streams, s)
		i.mu.Unlock()
		waiting.Go(func() {
			if c := i.begin(conn, s); c != nil && !a.done.Load() {
				select {
				case a.ready <- c:
				case <-time.After(10 * time.Second):
					c.Close()
				}
			}
		})
	}
	a.done.Store(true)
	waiting.Wait()
	close(a.ready)
}

// begin looks whether a connection is TLS, and shakes hands then.
func (i *Internet) begin(conn net.Conn, s *Stream) net.Conn {
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	ahead := bufio.NewReader(conn)
	first, err := ahead.Peek(1)
	if err != nil {
		conn.Close()
		return nil
	}
	var c net.Conn = peeked{conn, ahead}
	if first[0] == 22 {
		secure := tls.Server(c, &tls.Config{GetCertificate: func(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
			s.mu.Lock()
			s.TLS, s.Name = true, h.ServerName
			s.mu.Unlock()
			return i.Authority.certificate(h.ServerName)
		}})
		if err := secure.Handshake(); err != nil {
			conn.Close()
			return nil
		}
		c = secure
	}
	_ = conn.SetDeadline(time.Time{})
	return recorded{c, s}
}

// peeked reads what was looked at first.
type peeked struct {
	net.Conn
	ahead *bufio.Reader
}

func (p peeked) Read(b []byte) (int, error) { return p.ahead.Read(b) }

// recorded keeps what is read.
type recorded struct {
	net.Conn
	stream *Stream
}

func (r recorded) Read(b []byte) (int, error) {
	n, err := r.Conn.Read(b)
	r.stream.mu.Lock()
	defer r.stream.mu.Unlock()
	if room := keep - len(r.stream.data); room > 0 {
		r.stream.data = append(r.stream.data, b[:min(n, room)]...)
	}
	return n, err
}
