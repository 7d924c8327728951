package inspect

import (
	"bytes"
	"crypto/tls"
	"io"
	"net/http"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// BenchmarkInspection compares a client that goes through the proxy with one that asks the
// upstream itself: small requests on one connection, each on a new connection, and a large
// reply and request. The ratio is the direct time over the time through the proxy.
func BenchmarkInspection(b *testing.B) {
	const size = 64 << 20
	piece := make([]byte, 64<<10)
	r := newRig(b, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/down":
			for range size / len(piece) {
				w.Write(piece)
			}
		case "/up":
			io.Copy(io.Discard, r.Body)
		}
	}), options{change: func(c *Config) { c.Log = nil }})
	tr := r.transport()
	tr.TLSClientConfig.RootCAs = r.config.Roots
	tr.TLSClientConfig.ServerName = "localhost"
	b.Cleanup(tr.CloseIdleConnections)
	direct := &http.Client{Transport: tr}

	get := func(c *http.Client, url string) {
		res, err := c.Get(url)
		if err != nil {
			b.Fatal(err)
		}
		io.Copy(io.Discard, res.Body)
		res.Body.Close()
	}
	for _, test := range []struct {
		name  string
		bytes int64
		do    func(c *http.Client, base string)
	}{
		{"request", 0, func(c *http.Client, base string) { get(c, base+"/") }},
		{"connection", 0, func(c *http.Client, base string) {
			t := c.Transport.(*http.Transport).Clone()
			t.TLSClientConfig.ClientSessionCache = tls.NewLRUClientSessionCache(1)
			get(&http.Client{Transport: t}, base+"/")
			t.CloseIdleConnections()
		}},
		{"down", size, func(c *http.Client, base string) { get(c, base+"/down") }},
		{"up", size, func(c *http.Client, base string) {
			res, err := c.Post(base+"/up", "application/octet-stream", io.LimitReader(zeros{}, size))
			if err != nil {
				b.Fatal(err)
			}
			res.Body.Close()
		}},
	} {
		var took float64
		b.Run(test.name+"/direct", func(b *testing.B) {
			b.SetBytes(test.bytes)
			for b.Loop() {
				test.do(direct, r.upstream.URL)
			}
			took = b.Elapsed().Seconds() / float64(b.N)
		})
		b.Run(test.name+"/inspected", func(b *testing.B) {
			b.SetBytes(test.bytes)
			for b.Loop() {
				test.do(r.client, r.url(""))
			}
			b.ReportMetric(took/(b.Elapsed().Seconds()/float64(b.N)), "ratio")
		})
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// BenchmarkHello reads the hello of a flow that stays encrypted.
func BenchmarkHello(b *testing.B) {
	hello := clientHello(b, &tls.Config{ServerName: "a.test", NextProtos: []string{"h2", "http/1.1"}})
	b.ReportAllocs()
	for b.Loop() {
		if h, err := ahead(bytes.NewReader(hello)).Hello(); err != nil || h.ServerName != "a.test" {
			b.Fatal(err)
		}
	}
}

// BenchmarkProxy makes a proxy and drops it, as each sandbox does once.
func BenchmarkProxy(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		NewProxy(Config{}).Close()
	}
}

// BenchmarkLeaf makes the certificate of a name.
func BenchmarkLeaf(b *testing.B) {
	ca, err := NewCA(time.Hour)
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := ca.issue("a.test", time.Now()); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkFlow makes a proxy for one flow with one request, on a connection of its own on both
// sides, as the services do; with Sessions shared by the flows and without.
func BenchmarkFlow(b *testing.B) {
	handler := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	for name, sessions := range map[string]*Sessions{"alone": nil, "sessions": {}} {
		b.Run(name, func(b *testing.B) {
			r := newRig(b, handler, options{perFlow: true, change: func(c *Config) { c.Log, c.Sessions = nil, sessions }})
			t := r.transport()
			t.DisableKeepAlives, t.TLSClientConfig.ClientSessionCache = true, tls.NewLRUClientSessionCache(1)
			client := &http.Client{Transport: t}
			before := used(b)
			for b.Loop() {
				res, err := client.Get(r.url("/"))
				if err != nil {
					b.Fatal(err)
				}
				io.Copy(io.Discard, res.Body)
				res.Body.Close()
			}
			b.ReportMetric(float64(used(b)-before)/float64(b.N)/1e3, "cpu-µs/op")
		})
	}
}

// used is the processor time of the process.
func used(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
