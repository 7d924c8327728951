package harness

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
)

// Proxy is an HTTP and SOCKS5 proxy, whichever its clients speak. It knows whom it has led
// where.
type Proxy struct {
	User, Password string
	// Dial connects to what a client asks for.
	Dial func(ctx context.Context, target string) (net.Conn, error)

	mu  sync.Mutex
	led map[string]string
}

// Via is what the client asked the proxy for whose connection arrives from an address; "" when
// it did not come through the proxy.
func (p *Proxy) Via(remote string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.led[remote]
}

// Serve serves the clients of a listener until it ends.
func (p *Proxy) Serve(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			p.Handle(c)
		}()
	}
}

// Handle serves one client.
func (p *Proxy) Handle(c net.Conn) {
	in := bufio.NewReader(c)
	greet := p.connect
	if first, err := in.Peek(1); err == nil && first[0] == 5 {
		greet = p.socks
	}
	target, yes, err := greet(in, c)
	if err != nil {
		return
	}
	out, err := p.Dial(context.Background(), target)
	if err != nil {
		return
	}
	defer out.Close()
	p.mu.Lock()
	if p.led == nil {
		p.led = map[string]string{}
	}
	p.led[out.LocalAddr().String()] = target
	p.mu.Unlock()
	if _, err := io.WriteString(c, yes); err != nil {
		return
	}
	go func() {
		_, _ = io.Copy(out, in)
		if half, ok := out.(interface{ CloseWrite() error }); ok {
			_ = half.CloseWrite()
		}
	}()
	_, _ = io.Copy(c, out)
}

var errRefused = errors.New("refused")

// connect reads a request for a tunnel.
func (p *Proxy) connect(in *bufio.Reader, c net.Conn) (target, yes string, err error) {
	r, err := http.ReadRequest(in)
	if err != nil {
		return "", "", err
	}
	want := "Basic " + base64.StdEncoding.EncodeToString([]byte(p.User+":"+p.Password))
	if r.Method != http.MethodConnect || p.User != "" && r.Header.Get("Proxy-Authorization") != want {
		_, _ = io.WriteString(c, "HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
		return "", "", errRefused
	}
	return r.RequestURI, "HTTP/1.1 200 OK\r\n\r\n", nil
}

// socks reads a request of SOCKS5 (RFC 1928, RFC 1929).
func (p *Proxy) socks(in *bufio.Reader, c net.Conn) (target, yes string, err error) {
	read := func(n int) []byte {
		b := make([]byte, n)
		if err == nil {
			_, err = io.ReadFull(in, b)
		}
		return b
	}
	read(int(read(2)[1]))
	if p.User == "" {
		_, _ = c.Write([]byte{5, 0})
	} else {
		_, _ = c.Write([]byte{5, 2})
		user := read(int(read(2)[1]))
		password := read(int(read(1)[0]))
		if string(user) != p.User || string(password) != p.Password {
			_, _ = c.Write([]byte{1, 1})
			return "", "", errRefused
		}
		_, _ = c.Write([]byte{1, 0})
	}
	var host string
	switch read(4)[3] {
	case 1:
		host = net.IP(read(4)).String()
	case 3:
		host = string(read(int(read(1)[0])))
	case 4:
		host = net.IP(read(16)).String()
	}
	port := binary.BigEndian.Uint16(read(2))
	return net.JoinHostPort(host, strconv.Itoa(int(port))), "\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00", err
}
