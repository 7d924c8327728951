package inspect

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
)

// serve answers each connection by f.
func serve(t *testing.T, f func(net.Conn)) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { defer c.Close(); f(c) }()
		}
	}()
	return l.Addr().String()
}

func dialTCP(ctx context.Context, network, address string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, network, address)
}

// connectProxy is a proxy that connects nowhere, but greets in the place of the target.
func connectProxy(t *testing.T, status string) func(net.Conn) {
	return func(c net.Conn) {
		r, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		if want := "Basic " + base64.StdEncoding.EncodeToString([]byte("user:pa:ss")); r.Header.Get("Proxy-Authorization") != want {
			status = "407 Proxy Authentication Required"
		}
		// The first bytes of the target come with the reply.
		io.WriteString(c, "HTTP/1.1 "+status+"\r\n\r\n"+r.Method+" "+r.RequestURI+"\n")
		io.Copy(c, c)
	}
}

func TestChainHTTP(t *testing.T) {
	authority, err := NewCA(time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := authority.Leaf("127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authority.PEM())
	for _, scheme := range []string{"http", "https"} {
		for status, ok := range map[string]bool{"200 OK": true, "403 Forbidden": false} {
			handler := connectProxy(t, status)
			addr := serve(t, func(c net.Conn) {
				if scheme == "https" {
					c = tls.Server(c, &tls.Config{Certificates: []tls.Certificate{*leaf}})
				}
				handler(c)
				c.Close()
			})
			chain, err := NewChain(scheme+"://user:pa%3Ass@"+addr, roots, dialTCP)
			if err != nil {
				t.Fatal(err)
			}
			c, err := chain.Dial(context.Background(), "a.test", 443)
			if !ok {
				if err == nil || !strings.Contains(err.Error(), "403 Forbidden") || strings.Contains(err.Error(), "pa:ss") {
					t.Errorf("%s: %v", status, err)
				}
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			in := bufio.NewReader(c)
			if line, _ := in.ReadString('\n'); line != "CONNECT a.test:443\n" {
				t.Errorf("%q", line)
			}
			fmt.Fprintln(c, "hello")
			if line, _ := in.ReadString('\n'); line != "hello\n" {
				t.Errorf("%q", line)
			}
			c.Close()
		}
	}
	// A proxy that says nothing is left with the context.
	silent := serve(t, func(c net.Conn) { io.Copy(io.Discard, c) })
	chain, _ := NewChain("http://"+silent, nil, dialTCP)
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := chain.Dial(ctx, "a.test", 443); berm.KindOf(err) != berm.Unavailable {
		t.Error(err)
	}
}

func TestChainSOCKS5(t *testing.T) {
	addr := serve(t, func(c net.Conn) {
		in := bufio.NewReader(c)
		read := func(n int) []byte { b := make([]byte, n); io.ReadFull(in, b); return b }
		read(int(read(2)[1]))
		c.Write([]byte{5, 2})
		user := read(int(read(2)[1]))
		password := read(int(read(1)[0]))
		if string(user)+":"+string(password) != "user:pass" {
			c.Write([]byte{1, 1})
			return
		}
		c.Write([]byte{1, 0})
		head := read(5) // by name
		name := read(int(head[4]))
		port := read(2)
		c.Write([]byte{5, 0, 0, 1, 0, 0, 0, 0, 0, 0})
		fmt.Fprintf(c, "%d %s %d\n", head[3], name, int(port[0])<<8|int(port[1]))
	})
	chain, err := NewChain("socks5://user:pass@"+addr, nil, dialTCP)
	if err != nil {
		t.Fatal(err)
	}
	c, err := chain.Dial(context.Background(), "a.test", 5432)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if b, _ := io.ReadAll(c); string(b) != "3 a.test 5432\n" {
		t.Errorf("%q", b)
	}
	chain, _ = NewChain("socks5://user:wrong@"+addr, nil, dialTCP)
	if _, err := chain.Dial(context.Background(), "a.test", 5432); berm.KindOf(err) != berm.Unavailable {
		t.Error(err)
	}
}

func TestChainRefuses(t *testing.T) {
	for _, u := range []string{"", "proxy:3128", "ftp://proxy", "http://", "http://proxy/path", "http://user:hidden@proxy:x"} {
		if _, err := NewChain(u, nil, dialTCP); berm.KindOf(err) != berm.Invalid || strings.Contains(err.Error(), "hidden") {
			t.Errorf("%q: %v", u, err)
		}
	}
}

// Whatever a proxy says, the chain comes to an end, and what follows its assent is the
// destination's.
func FuzzChain(f *testing.F) {
	f.Add(uint8(0), []byte("HTTP/1.1 200 OK\r\n\r\nhello"))
	f.Add(uint8(0), []byte("HTTP/1.1 407 Who\r\nContent-Length: 5\r\n\r\nhello"))
	f.Add(uint8(1), []byte{5, 0, 5, 0, 0, 1, 1, 2, 3, 4, 0, 80, 'h', 'e', 'l', 'l', 'o'})
	f.Add(uint8(1), []byte{5, 0, 5, 0, 0, 3, 1, 'a', 0, 80, 'h', 'e', 'l', 'l', 'o'})
	f.Add(uint8(2), []byte{5, 2, 1, 0, 5, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 80, 'h'})
	f.Fuzz(func(t *testing.T, kind uint8, says []byte) {
		ours, theirs := net.Pipe()
		proxy := [...]string{"http://proxy", "socks5://proxy", "socks5://user:pass@proxy"}[kind%3]
		chain, err := NewChain(proxy, nil, func(context.Context, string, string) (net.Conn, error) { return ours, nil })
		if err != nil {
			t.Fatal(err)
		}
		go io.Copy(io.Discard, theirs)
		go func() {
			theirs.Write(says)
			theirs.Close()
		}()
		c, err := chain.Dial(t.Context(), "a.test", 443)
		if err != nil {
			return
		}
		defer c.Close()
		if rest, err := io.ReadAll(c); err != nil || !strings.HasSuffix(string(says), string(rest)) {
			t.Errorf("%q of %q, %v", rest, says, err)
		}
	})
}
