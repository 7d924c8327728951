package inspect

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// rig is a proxy between a listener, which stands for the sandbox's side, and an upstream
// of the test. The flow's name is localhost and its port the listener's, so that any client
// gets there without tricks.
type rig struct {
	proxy    *Proxy
	flow     Flow
	config   Config
	caFile   string
	upstream *httptest.Server
	// client trusts the proxy's authority only.
	client *http.Client
	served chan error // what Serve returned

	mu      sync.Mutex
	records []Record
}

type judgeFunc func(context.Context, Request) Verdict

func (f judgeFunc) HTTP(ctx context.Context, r Request) Verdict { return f(ctx, r) }

// allowAll judges like a rule without conditions.
var allowAll = judgeFunc(func(_ context.Context, r Request) Verdict {
	if strings.Contains(r.Target, "..") {
		return Verdict{Reason: "path"}
	}
	return Verdict{Allow: true, Target: r.Target, Rule: "all"}
})

type options struct {
	plain   bool // upstream without TLS
	perFlow bool // a proxy for each
	h2c     bool
	change  func(*Config)

	endpoint string // the name of the flow's
}

func newRig(t testing.TB, handler http.Handler, o options) *rig {
	t.Helper()
	r := &rig{served: make(chan error, 1000)}
	r.upstream = httptest.NewUnstartedServer(handler)
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(o.h2c)
	r.upstream.Config.Protocols = &protocols
	roots := x509.NewCertPool()
	if o.plain {
		r.upstream.Start()
	} else {
		// The upstream has an authority of its own, which the sandbox does not know.
		authority, err := NewCA(time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		leaf, err := authority.Leaf("localhost")
		if err != nil {
			t.Fatal(err)
		}
		roots.AppendCertsFromPEM(authority.PEM())
		r.upstream.EnableHTTP2 = true
		r.upstream.TLS = &tls.Config{Certificates: []tls.Certificate{*leaf}}
		r.upstream.StartTLS()
	}
	t.Cleanup(r.upstream.Close)

	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	r.flow = Flow{Name: "localhost", Port: uint16(l.Addr().(*net.TCPAddr).Port), H2C: o.h2c, Endpoint: o.endpoint}
	ca, err := NewCA(time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	r.caFile = filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(r.caFile, ca.PEM(), 0o644); err != nil {
		t.Fatal(err)
	}
	r.config = Config{
		CA: ca, Judge: allowAll, Roots: roots,
		Dial: func(ctx context.Context, f Flow) (net.Conn, error) {
			if f != r.flow {
				return nil, errors.New("dialed for another flow")
			}
			return (&net.Dialer{}).DialContext(ctx, "tcp", r.upstream.Listener.Addr().String())
		},
		Log: func(rec Record) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.records = append(r.records, rec)
		},
	}
	if o.change != nil {
		o.change(&r.config)
	}
	r.proxy = NewProxy(r.config)
	t.Cleanup(r.proxy.Close)
	var serving sync.WaitGroup
	t.Cleanup(serving.Wait)
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				p := r.proxy
				if o.perFlow {
					p = NewProxy(r.config)
					defer p.Close()
				}
				err := p.Serve(c, r.flow)
				select {
				case r.served <- err:
				default: // a benchmark does not look
				}
			})
		}
	})
	t.Cleanup(r.proxy.Close)
	t.Cleanup(func() { l.Close() })
	r.client = &http.Client{Transport: r.transport(), Timeout: 20 * time.Second,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	t.Cleanup(r.client.CloseIdleConnections)
	return r
}

func (r *rig) pool() *x509.CertPool {
	pool := x509.NewCertPool()
	if r.config.CA != nil {
		pool.AppendCertsFromPEM(r.config.CA.PEM())
	}
	return pool
}

// transport speaks HTTP/2 where there is TLS: who offers HTTP/1.1 too does not get it.
func (r *rig) transport() *http.Transport {
	var protocols http.Protocols
	protocols.SetHTTP2(r.upstream.TLS != nil)
	protocols.SetHTTP1(r.upstream.TLS == nil)
	return &http.Transport{TLSClientConfig: &tls.Config{RootCAs: r.pool()}, Protocols: &protocols, DisableCompression: true, ExpectContinueTimeout: 10 * time.Second}
}

// http1 is a client that speaks HTTP/1.1 only.
func (r *rig) http1(t testing.TB) *http.Client {
	tr := r.transport()
	tr.Protocols = nil
	tr.TLSClientConfig.NextProtos = []string{"http/1.1"}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 20 * time.Second}
}

// url is the URL of a path as the sandbox writes it.
func (r *rig) url(path string) string {
	scheme := "https"
	if r.upstream.TLS == nil {
		scheme = "http"
	}
	return scheme + "://" + r.flow.Address() + path
}

// dial opens a TLS connection without ALPN, or a plain one.
func (r *rig) dial(t testing.TB) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", r.flow.Address())
	if err != nil {
		t.Fatal(err)
	}
	if r.upstream.TLS != nil {
		c = tls.Client(c, &tls.Config{RootCAs: r.pool(), ServerName: "localhost"})
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(20 * time.Second))
	return c
}

// last waits for the number of records and returns the last.
func (r *rig) last(t testing.TB, n int) Record {
	t.Helper()
	for range 200 {
		r.mu.Lock()
		if len(r.records) >= n {
			rec := r.records[n-1]
			r.mu.Unlock()
			return rec
		}
		r.mu.Unlock()
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("there is no record %d", n)
	return Record{}
}
