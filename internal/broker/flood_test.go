package broker

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

// silent is a proxy that takes connections and says nothing.
func silent(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var conns []net.Conn
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		defer mu.Unlock()
		for _, c := range conns {
			c.Close()
		}
	})
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
		}
	}()
	return "http://" + l.Addr().String()
}

// working is a proxy that leads to a server that answers, and what verifies that.
func working(t *testing.T) egress.Upstream {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") }))
	t.Cleanup(server.Close)
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		to, err := net.Dial("tcp", server.Listener.Addr().String())
		if err != nil {
			return
		}
		defer to.Close()
		from, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer from.Close()
		_, _ = io.WriteString(from, "HTTP/1.1 200 OK\r\n\r\n")
		go func() { _, _ = io.Copy(to, from) }()
		_, _ = io.Copy(from, to)
	}))
	t.Cleanup(proxy.Close)
	return egress.Upstream{Proxy: proxy.URL, Roots: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})}
}

// crowd opens a connection of HTTP/2 with so many requests whose heads are as large as they may
// be, and counts the answers by their status.
func (r *rig) crowd(requests int, answers map[string]*atomic.Int64) {
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(r.gets.Trust.Files[0].Data)
	conn := r.hand("example.com", 443, "10.1.2.3")
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	c := tls.Client(conn, &tls.Config{ServerName: "example.com", RootCAs: roots, NextProtos: []string{"h2"}})
	if _, err := io.WriteString(c, http2.ClientPreface); err != nil {
		r.Fatal(err)
	}
	f := http2.NewFramer(c, c)
	f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	if err := f.WriteSettings(); err != nil {
		r.Fatal(err)
	}
	go func() {
		for {
			frame, err := f.ReadFrame()
			if err != nil {
				return
			}
			switch frame := frame.(type) {
			case *http2.MetaHeadersFrame:
				if n := answers[frame.PseudoValue("status")]; n != nil {
					n.Add(1)
				}
			case *http2.RSTStreamFrame:
				answers["refused"].Add(1)
			}
		}
	}()
	var head bytes.Buffer
	e := hpack.NewEncoder(&head)
	for i := range requests {
		head.Reset()
		for _, field := range [][2]string{{":method", "GET"}, {":scheme", "https"}, {":authority", "example.com"}, {":path", "/"}} {
			_ = e.WriteField(hpack.HeaderField{Name: field[0], Value: field[1]})
		}
		for n := range 7 {
			_ = e.WriteField(hpack.HeaderField{Name: "x-" + strconv.Itoa(n), Value: strings.Repeat("~", 4000), Sensitive: true})
		}
		first := true
		for rest := head.Bytes(); len(rest) > 0; first = false {
			piece := rest[:min(len(rest), 16_000)]
			rest = rest[len(piece):]
			if first {
				_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: uint32(2*i + 1), BlockFragment: piece, EndHeaders: len(rest) == 0, EndStream: true})
			} else {
				_ = f.WriteContinuation(uint32(2*i+1), len(rest) == 0, piece)
			}
		}
	}
}

// A sandbox that has as many requests as it can wait for an upstream leaves others theirs, costs
// no more than is set, and is told.
func TestFloodOfRequests(t *testing.T) {
	server, err := New(1000, 2000)
	if err != nil {
		t.Fatal(err)
	}
	forExample := token(egress.Credential{Name: "api", Hosts: []string{"example.com"}})
	bad, err := attend(t, server, "i0000000000000001", egress.Policy{Entries: []string{"example.com"}, Upstream: egress.Upstream{Proxy: silent(t)}}, forExample)
	if err != nil {
		t.Fatal(err)
	}
	good, err := attend(t, server, "i0000000000000002", egress.Policy{Entries: []string{"example.com"}, Upstream: working(t)}, token(egress.Credential{Name: "api", Hosts: []string{"example.com"}}))
	if err != nil {
		t.Fatal(err)
	}
	ask := func() {
		t.Helper()
		if status, body, err := good.get(good.hand("example.com", 443, "10.1.2.3"), "example.com", "/"); err != nil || status != 200 || body != "hello" {
			t.Errorf("the other sandbox: %d %q, %v", status, body, err)
		}
	}
	heap := func() int64 {
		debug.FreeOSMemory()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapInuse + m.StackInuse)
	}
	ask()
	before := heap()
	const conns, streams = 50, 32
	answers := map[string]*atomic.Int64{"429": {}, "refused": {}}
	for range conns {
		bad.crowd(streams, answers)
	}
	// On a busy machine the first are given up before the last have come, and leave their places.
	most := int64(0)
	deadline := time.Now().Add(time.Minute)
	for (most < requestLimit || answers["429"].Load() < conns*streams/2) && time.Now().Before(deadline) {
		time.Sleep(10 * time.Millisecond)
		most = max(most, int64(server.requests.Used()))
	}
	ask()
	cost := heap() - before
	t.Logf("%d requests under way, %d too many, %d refused; they cost %d MiB", most, answers["429"].Load(), answers["refused"].Load(), cost>>20)
	if most != requestLimit {
		t.Errorf("%d requests are under way, want %d", most, requestLimit)
	}
	if n := answers["429"].Load(); n < conns*streams/2 || n > conns*streams-requestLimit {
		t.Errorf("%d requests are too many, want %d", n, conns*streams-requestLimit)
	}
	if limit := int64(64 << 20); cost > limit {
		t.Errorf("they cost %d MiB, more than %d", cost>>20, limit>>20)
	}
	bad.told("limit")
}

// told checks that the owner was told of a denial for a reason.
func (r *rig) told(reason string) {
	r.Helper()
	for range 100 {
		r.mu.Lock()
		for _, e := range r.events {
			if e.Reason == reason && e.Action == "deny" && e.Detail != "" {
				r.mu.Unlock()
				return
			}
		}
		r.mu.Unlock()
		time.Sleep(50 * time.Millisecond)
	}
	r.Errorf("nobody was told of %s", reason)
}

// A sandbox that has as many connections as it can leaves others theirs, and is told.
func TestFloodOfFlows(t *testing.T) {
	server, err := New(100, 100)
	if err != nil {
		t.Fatal(err)
	}
	both := [2]*rig{}
	for i := range both {
		if both[i], err = attend(t, server, []berm.SandboxID{"i0000000000000001", "i0000000000000002"}[i], egress.Policy{Entries: []string{"example.com"}},
			token(egress.Credential{Name: "api", Hosts: []string{"example.com"}})); err != nil {
			t.Fatal(err)
		}
	}
	// closed checks how many of so many connections the service does not keep.
	closed := func(r *rig, conns, want int) {
		var all []net.Conn
		for range conns {
			all = append(all, r.hand("example.com", 443, "10.1.2.3"))
		}
		if status, _, err := r.get(all[0], "example.com", "/"); err != nil || status != http.StatusForbidden && status != http.StatusBadGateway {
			t.Errorf("the first: %d, %v", status, err)
		}
		n := 0
		for at, c := range all[1:] {
			wait := 10 * time.Millisecond
			if conns-1-at <= want { // the last ones
				wait = 10 * time.Second
			}
			_ = c.SetReadDeadline(time.Now().Add(wait))
			if _, err := c.Read(make([]byte, 1)); errors.Is(err, io.EOF) {
				n++
			}
		}
		if n != want {
			t.Errorf("%d of %d connections are closed, want %d", n, conns, want)
		}
	}
	closed(both[0], 80, 30) // half of 100 are served
	both[0].told("limit")
	closed(both[1], 20, 0)
}
