package inspect

import (
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"testing"
)

func TestOriginForm(t *testing.T) {
	name := Flow{Name: "a.test", Port: 8443}
	v6 := Flow{Name: "2001:db8::1", Port: 443}
	for _, test := range []struct {
		flow         Flow
		host, target string
		want         string // "" is refused
		port         bool
	}{
		{name, "a.test", "/x?y", "/x?y", false},
		{name, "A.TEST.:8443", "/", "/", true},
		{name, "a.test", "*", "*", false},
		{name, "b.test", "https://a.test", "/", false},
		{name, "b.test", "HTTPS://A.test:8443?q", "/?q", true},
		{name, "a.test", "/https://b.test/", "/https://b.test/", false},
		{name, "a.test", "http://a.test/", "", false},
		{name, "a.test", "https://b.test/", "", false},
		{name, "a.test", "https://a.test@b.test/", "", false},
		{name, "a.test:443", "/", "", false},
		{name, "a.test:08443", "/", "", false},
		{name, "a.test:", "/", "", false},
		{name, "a.test..", "/", "", false},
		{name, "", "/", "", false},
		{name, "x.a.test", "/", "", false},
		{name, "\u212a.test", "/", "", false},
		{name, "a.test@b.test", "/", "", false},
		{name, "[a.test]", "/", "", false},
		{v6, "[2001:DB8::1]", "/", "/", false},
		{v6, "[2001:db8::1]:443", "/", "/", true},
		{v6, "2001:db8::1", "/", "", false},
		{v6, "[2001:db8::1%25eth0]", "/", "", false},
	} {
		target, port, denial := originForm(&http.Request{Host: test.host, RequestURI: test.target}, test.flow, "https")
		if target != test.want || port != test.port || (denial == nil) != (test.want != "") {
			t.Errorf("%q %q for %s: %q %t %v", test.host, test.target, test.flow.Name, target, port, denial)
		}
		if denial == nil {
			if back, ok := sameAuthority(hostField(test.flow, port), test.flow); !ok || back != port {
				t.Errorf("%q is not the flow's", hostField(test.flow, port))
			}
		}
	}
	two := &http.Request{Host: "a.test", RequestURI: "/", Header: http.Header{"Host": {"b.test"}}}
	if _, _, denial := originForm(two, name, "https"); denial == nil {
		t.Error("a Host beside another :authority passed")
	}
}

// FuzzOriginForm holds what is accepted against net/url: it must name the same host.
func FuzzOriginForm(f *testing.F) {
	f.Add("a.test:443", "/x")
	f.Add("a.test", "https://a.test:443/x?y")
	f.Add("a.test", "https://a.test@b.test/")
	f.Add("[::1]", "//b.test/")
	f.Fuzz(func(t *testing.T, host, target string) {
		flow := Flow{Name: "a.test", Port: 443}
		got, _, denial := originForm(&http.Request{Host: host, RequestURI: target}, flow, "https")
		if denial != nil {
			return
		}
		if u, err := url.Parse(target); err == nil && u.IsAbs() {
			host = u.Host
		}
		u, err := url.Parse("https://" + host + "/")
		if err != nil || u.User != nil || !strings.EqualFold(strings.TrimSuffix(u.Hostname(), "."), flow.Name) || u.Port() != "" && u.Port() != "443" {
			t.Fatalf("%q %q is taken for %s: %v", host, target, flow.Name, err)
		}
		if _, err := netip.ParseAddr(u.Hostname()); err == nil {
			t.Fatal("an address is no name")
		}
		if out, exact := targetURL("https", flow, got); exact {
			sent := (&http.Request{Method: "GET", URL: out}).URL.RequestURI()
			if sent != got || out.Host != "a.test:443" || !strings.HasPrefix(sent, "/") || strings.HasPrefix(sent, "//") {
				t.Fatalf("%q is sent as %q to %s", got, sent, out.Host)
			}
		}
	})
}
