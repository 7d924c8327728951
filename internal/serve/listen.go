package serve

import (
	"errors"
	"net"
	"sync"
	"time"
)

// split serves TLS and plain HTTP on one port: a TLS connection begins with the byte
// 22, the record type of a handshake, which no HTTP method or preface does.
func split(listener net.Listener, patience time.Duration) (plain, secure net.Listener) {
	p := &half{listener, make(chan net.Conn), make(chan struct{}), sync.Once{}}
	s := &half{listener, make(chan net.Conn), make(chan struct{}), sync.Once{}}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				if isTemporary(err) {
					time.Sleep(10 * time.Millisecond)
					continue
				}
				_, _ = p.Close(), s.Close() // the listener is broken or closed already
				return
			}
			go sort(conn, p, s, patience)
		}
	}()
	return p, s
}

// isTemporary says whether accepting may work again: descriptors come back.
func isTemporary(err error) bool {
	var t interface{ Temporary() bool }
	return errors.As(err, &t) && t.Temporary()
}

// sort reads the first byte of a connection and hands it to its side.
func sort(conn net.Conn, plain, secure *half, patience time.Duration) {
	var first [1]byte
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	if _, err := conn.Read(first[:]); err != nil {
		conn.Close()
		return
	}
	_ = conn.SetReadDeadline(time.Time{})
	side := plain
	if first[0] == 22 {
		side = secure
	}
	select {
	case side.conns <- &unread{Conn: conn, first: first[0], waiting: true}:
	case <-side.closed:
		conn.Close()
	}
}

// half is a listener for one kind of connections of another listener.
type half struct {
	net.Listener
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (h *half) Accept() (net.Conn, error) {
	select {
	case conn := <-h.conns:
		return conn, nil
	case <-h.closed:
		return nil, net.ErrClosed
	}
}

func (h *half) Close() error {
	h.once.Do(func() { close(h.closed) })
	return h.Listener.Close()
}

// unread is a connection whose first byte was read already.
type unread struct {
	net.Conn
	mu      sync.Mutex
	first   byte
	waiting bool
}

func (u *unread) Read(p []byte) (int, error) {
	u.mu.Lock()
	if u.waiting && len(p) > 0 {
		p[0], u.waiting = u.first, false
		u.mu.Unlock()
		return 1, nil
	}
	u.mu.Unlock()
	return u.Conn.Read(p)
}
