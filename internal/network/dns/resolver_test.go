package dns

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/berm-sandbox/berm"
)

func TestParseResolver(t *testing.T) {
	for text, want := range map[string]string{
		"192.0.2.53:53":                         "192.0.2.53:53",
		"[2001:db8::1]:53":                      "[2001:db8::1]:53",
		"tls://192.0.2.53":                      "tls://192.0.2.53:853 192.0.2.53",
		"tls://[2001:db8::1]:8853#DNS.example":  "tls://[2001:db8::1]:8853 dns.example",
		"https://192.0.2.53/dns-query":          "https://192.0.2.53:443/dns-query 192.0.2.53",
		"https://192.0.2.53:8443/q#dns.example": "https://192.0.2.53:8443/q dns.example",
	} {
		r, err := ParseResolver(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if got := strings.TrimSpace(r.String() + " " + r.TLS); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
	for _, wrong := range []string{
		"", "192.0.2.53", "dns.example:53", "192.0.2.53:0", "tls://", "tls://dns.example", "tls://192.0.2.53/x", "tls://192.0.2.53:0", "tls://192.0.2.53#a b", "tls://u@192.0.2.53",
		"https://192.0.2.53", "https://192.0.2.53/", "https://dns.example/dns-query", "https://192.0.2.53/q?x=1", "http://192.0.2.53/q", "udp://192.0.2.53", "tls://[fe80::1%25lo]",
	} {
		if r, err := ParseResolver(wrong); berm.KindOf(err) != berm.Invalid {
			t.Errorf("%q: %v %v", wrong, r, err)
		}
	}
}

func FuzzParseResolver(f *testing.F) {
	for _, s := range []string{"192.0.2.53:53", "tls://[2001:db8::1]:8853#dns.example", "https://192.0.2.53:8443/q#dns.example", "tls://%31"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		r, err := ParseResolver(text)
		if err == nil && (!r.At.IsValid() || r.At.Port() == 0) {
			t.Errorf("%q: %v", text, r)
		}
	})
}

// encrypted is a resolver whose certificate is for 127.0.0.1 and example.com, over TLS or over
// HTTPS, and how often it was connected to.
func encrypted(t *testing.T, https bool, reply func([]byte) []byte) (at netip.AddrPort, roots *x509.CertPool, connections *atomic.Int32) {
	t.Helper()
	connections = &atomic.Int32{}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.Method != http.MethodPost || r.URL.Path != "/dns-query" || r.Header.Get("Content-Type") != "application/dns-message" || r.ProtoMajor != 2 || body[0]|body[1] != 0 {
			http.Error(w, "wrong", http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "application/dns-message")
		_, _ = w.Write(reply(body))
	}))
	s.EnableHTTP2 = true
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			connections.Add(1)
		}
	}
	s.StartTLS()
	t.Cleanup(s.Close)
	roots = x509.NewCertPool()
	roots.AddCert(s.Certificate())
	at = netip.MustParseAddrPort(s.Listener.Addr().String())
	if https {
		return at, roots, connections
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: s.TLS.Certificates})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			connections.Add(1)
			go func() {
				defer conn.Close()
				for n := range 3 { // then it gives up
					var size [2]byte
					if _, err := io.ReadFull(conn, size[:]); err != nil {
						return
					}
					message := make([]byte, binary.BigEndian.Uint16(size[:]))
					if _, err := io.ReadFull(conn, message); err != nil {
						return
					}
					answer := reply(message)
					if _, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))), answer...)); err != nil || n > 3 {
						return
					}
				}
			}()
		}
	}()
	return netip.MustParseAddrPort(l.Addr().String()), roots, connections
}

func TestEncryptedResolvers(t *testing.T) {
	reply := func(message []byte) []byte {
		var m dnsmessage.Message
		if err := m.Unpack(message); err != nil {
			return nil
		}
		m.Response, m.Additionals = true, nil
		if m.Questions[0].Type == dnsmessage.TypeA {
			addRecord(&m, canonical(m.Questions[0].Name), "192.0.2.1", 0)
		}
		packed, _ := m.Pack()
		return packed
	}
	for _, https := range []bool{false, true} {
		at, roots, connections := encrypted(t, https, reply)
		form := "tls://" + at.String() + "%s"
		if https {
			form = "https://" + at.String() + "/dns-query%s"
		}
		for _, name := range []string{"", "#example.com"} {
			r, err := ParseResolver(fmt.Sprintf(form, name))
			if err != nil {
				t.Fatal(err)
			}
			r.config.RootCAs = roots
			u, before := NewUpstream([]*Resolver{r}), connections.Load()
			for i := range 20 {
				if got, err := u.Lookup(context.Background(), fmt.Sprintf("n%d.test", i)); err != nil || fmt.Sprint(got) != "[192.0.2.1]" {
					t.Fatalf("%s: %v %v", r, got, err)
				}
			}
			if n := connections.Load() - before; n > 20 || https && n > 2 {
				t.Errorf("%s: %d connections for 40 questions", r, n)
			}
		}
		// The name in the certificate counts, and nothing is asked in another way.
		for _, c := range []struct {
			name  string
			roots *x509.CertPool
		}{{"#other.example", roots}, {"", x509.NewCertPool()}} {
			r, err := ParseResolver(fmt.Sprintf(form, c.name))
			if err != nil {
				t.Fatal(err)
			}
			r.config.RootCAs = c.roots
			if got, err := NewUpstream([]*Resolver{r}).Lookup(context.Background(), "x.test"); berm.KindOf(err) != berm.Unavailable || len(got) > 0 || !strings.Contains(err.Error(), "certificate") {
				t.Errorf("%s: %v %v", r, got, err)
			}
		}
	}
}
