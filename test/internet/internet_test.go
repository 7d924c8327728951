package internet

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

// What a host does there is seen: names, connections with what they say, and single packets.
func TestInternet(t *testing.T) {
	harness.Slow(t)
	i := Start(t)
	i.Names.Set("www.test", "93.184.216.10")
	i.Names.Set("*.www.test", "www.test")
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "hello %s", r.Host) })
	i.Serve(t, netip.Addr{}, handler, 80, 443)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(i.Authority.PEM)
	client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, DisableKeepAlives: true}}
	for _, url := range []string{"http://www.test/", "https://a.www.test/", "http://169.254.169.254/", "http://[2606::1]/"} {
		answer, err := client.Get(url)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(answer.Body)
		answer.Body.Close()
		if !strings.HasPrefix(string(body), "hello ") {
			t.Errorf("%s: %q", url, body)
		}
	}
	if asked := i.Names.Asked(); !slices.Contains(asked, "www.test") || !slices.Contains(asked, "a.www.test") {
		t.Errorf("asked: %v", asked)
	}
	streams := i.Streams()
	if len(streams) != 4 || !streams[1].TLS || streams[1].Name != "a.www.test" || !strings.Contains(string(streams[1].Data()), "Host: a.www.test\r\n") {
		t.Errorf("streams: %+v", streams)
	}
	conn, err := net.Dial("udp", "8.8.8.8:4433")
	if err != nil {
		t.Fatal(err)
	}
	_, _ = conn.Write(make([]byte, 100))
	conn.Close()
	time.Sleep(50 * time.Millisecond)
	seen := i.Packets()
	for _, want := range []Packet{
		{netip.MustParseAddr("93.184.216.10"), "tcp", 443}, {netip.MustParseAddr("2606::1"), "tcp", 80},
		{netip.MustParseAddr("169.254.169.254"), "tcp", 80}, {netip.MustParseAddr(Resolver), "udp", 53},
	} {
		if seen[want] < 40 {
			t.Errorf("%s: %d bytes", want, seen[want])
		}
	}
	if n := seen[Packet{netip.MustParseAddr("8.8.8.8"), "udp", 4433}]; n != 128 {
		t.Errorf("%d bytes of a datagram", n)
	}
	for p := range seen {
		if p.Proto != "tcp" && p.Proto != "udp" {
			t.Errorf("%s: noise", p)
		}
	}
	i.Authority.Spoil("bad.www.test", OtherHost)
	if answer, err := client.Get("https://bad.www.test/"); err == nil {
		answer.Body.Close()
		t.Error("a certificate of another host is accepted")
	}
}
