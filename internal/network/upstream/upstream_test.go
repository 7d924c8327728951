package upstream

import (
	"bufio"
	"context"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/address"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/policy"
)

// proxy takes one tunnel after another, says whom each was for, and is the next proxy for
// what follows.
func proxy(t *testing.T) string {
	t.Helper()
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
			go func() {
				defer c.Close()
				for in := bufio.NewReader(c); ; {
					r, err := http.ReadRequest(in)
					if err != nil {
						return
					}
					if _, err := c.Write([]byte("HTTP/1.1 200 " + r.RequestURI + "\r\n\r\n")); err != nil {
						return
					}
					if strings.HasPrefix(r.RequestURI, "end.test") {
						_, _ = c.Write([]byte("reached"))
						return
					}
				}
			}()
		}
	}()
	return l.Addr().String()
}

func table(t *testing.T, open ...string) *address.Table {
	t.Helper()
	var c address.Config
	for _, o := range open {
		c.Open = append(c.Open, netip.MustParsePrefix(o))
	}
	table, err := address.NewTable(c)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

// A sandbox's own proxy is where the policy's table lets it be; the operator's is anywhere.
func TestOwnProxyIsVetted(t *testing.T) {
	at := proxy(t)
	lookup := func(_ context.Context, name string) ([]netip.Addr, error) {
		addr, ok := map[string]string{"inside.test": "127.0.0.1", "meta.test": "169.254.169.254", "public.test": "8.8.4.4", "corp.test": "10.1.2.3"}[name]
		if !ok {
			return nil, berm.Errorf(berm.NotFound, "no %s", name)
		}
		return []netip.Addr{netip.MustParseAddr(addr)}, nil
	}
	_, port, _ := net.SplitHostPort(at)
	for name, c := range map[string]struct {
		way  egress.Upstream
		kind berm.Kind // 0: it gets there
	}{
		"operator's":              {egress.Upstream{Proxy: "http://" + at}, 0},
		"operator's by name":      {egress.Upstream{Proxy: "http://inside.test:" + port}, 0},
		"own here":                {egress.Upstream{Own: "http://" + at}, berm.Denied},
		"own by a name of here":   {egress.Upstream{Own: "http://inside.test:" + port}, berm.Denied},
		"own metadata":            {egress.Upstream{Own: "http://169.254.169.254:80"}, berm.Denied},
		"own through it":          {egress.Upstream{Proxy: "http://" + at, Own: "http://public.test:9"}, 0},
		"own private through it":  {egress.Upstream{Proxy: "http://" + at, Own: "http://corp.test:9"}, berm.Denied},
		"own metadata through it": {egress.Upstream{Proxy: "http://" + at, Own: "http://meta.test:9"}, berm.Denied},
		"unknown":                 {egress.Upstream{Proxy: "http://nowhere.test:9"}, berm.NotFound},
	} {
		r, err := New(c.way, lookup, table(t))
		if err != nil {
			t.Fatal(name, err)
		}
		conn, err := r.DialName(t.Context(), "end.test", 443)
		if c.kind != 0 {
			if kind := berm.KindOf(err); kind != berm.Unavailable || !strings.Contains(err.Error(), map[berm.Kind]string{berm.Denied: "may be connected to", berm.NotFound: "no nowhere.test"}[c.kind]) {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
		if text, err := bufio.NewReader(conn).ReadString('d'); text != "reached" {
			t.Errorf("%s: %q, %v", name, text, err)
		}
		conn.Close()
	}
}

func TestByName(t *testing.T) {
	tab := table(t)
	p, err := policy.DecodeYAML("", []byte("version: 1\ndefault: allow-public\nrules: [{id: a, to: [named.test.example.com]}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	e, err := policy.NewEvaluator(p, nil, tab)
	if err != nil {
		t.Fatal(err)
	}
	judge := func(name string) policy.Verdict {
		host, err := policy.ParseHost(name)
		if err != nil {
			t.Fatal(err)
		}
		return e.Decide(policy.Flow{Host: host, Port: 443, Proto: policy.TCP, Time: time.Now()})
	}
	for _, c := range []struct {
		way           egress.Upstream
		named, public bool
	}{
		{egress.Upstream{}, false, false}, {egress.Upstream{Proxy: "http://192.0.2.1"}, true, false},
		{egress.Upstream{Own: "socks5://192.0.2.1"}, true, true}, {egress.Upstream{Proxy: "http://192.0.2.1", Own: "socks5://192.0.2.1"}, true, true},
	} {
		r, err := New(c.way, nil, tab)
		if err != nil {
			t.Fatal(err)
		}
		if r.ByName(judge("named.test.example.com")) != c.named || r.ByName(judge("other.example.com")) != c.public || r.ByName(judge("203.0.114.9")) {
			t.Errorf("%+v", c)
		}
	}
}
