package policy

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
)

func e2bEvaluator(t *testing.T, c E2B, public bool) *Evaluator {
	t.Helper()
	p, _, err := FromE2B(c, public)
	if err != nil {
		t.Fatal(err)
	}
	// What compiles can also be written down.
	if _, err := DecodeYAML("p", p.YAML()); err != nil {
		t.Fatalf("%v\n%s", err, p.YAML())
	}
	e, err := NewEvaluator(p, nil, testTable(t))
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestE2B(t *testing.T) {
	yes, no := true, false
	deny := []string{"0.0.0.0/0"}
	for _, c := range []struct {
		name   string
		e2b    E2B
		public bool
		allow  string
		deny   string
	}{
		{"nothing said", E2B{}, true, "example.com:443 example.com:8080 1.1.1.1:443 8.8.8.8:22", "10.2.0.1:80 1.1.1.1:53/udp 1.1.1.1:25 169.254.169.254:80"},
		{"nothing said, default deny", E2B{}, false, "", "example.com:443 1.1.1.1:443"},
		{"said yes, default deny", E2B{AllowInternet: &yes}, false, "example.com:443", ""},
		{"said no", E2B{AllowInternet: &no}, true, "", "example.com:443 1.1.1.1:443"},
		{"all denied", E2B{DenyOut: deny}, true, "", "example.com:443 1.1.1.1:443 [2606::1]:443"},
		{"one denied", E2B{DenyOut: []string{"8.8.8.8"}}, true, "1.1.1.1:443 example.com:443", "8.8.8.8:443 8.8.8.8:53/udp"},
		{"allow beats deny", E2B{AllowOut: []string{"1.1.1.1", "8.8.0.0/16"}, DenyOut: deny}, true, "1.1.1.1:443 1.1.1.1:7000/udp 8.8.9.9:22", "1.1.1.2:443 example.com:443 1.1.1.1:25"},
		{"names", E2B{AllowOut: []string{"Example.com", "*.wild.example.org"}, DenyOut: deny}, true,
			"example.com:443 example.com:80 a.b.wild.example.org:443", "www.example.com:443 wild.example.org:443 example.com:22 evilexample.com:443 1.1.1.1:443"},
		{"names, internet off", E2B{AllowOut: []string{"example.com"}, AllowInternet: &no}, true, "example.com:443", "other.com:443"},
		{"names, default deny", E2B{AllowOut: []string{"example.com"}}, false, "example.com:443", "other.com:443"},
		{"all names", E2B{AllowOut: []string{"*"}, DenyOut: deny}, true, "example.com:443 a.b.c:80", "1.1.1.1:443 example.com:22 x.internal:80"},
		{"allow all, deny all", E2B{AllowOut: deny, DenyOut: deny}, true, "example.com:443 1.1.1.1:7000/udp example.com:22", "10.2.0.1:80 127.0.0.1:80"},
		{"host bits", E2B{DenyOut: []string{"8.8.8.8/16"}}, true, "8.7.1.1:443", "8.8.1.1:443"},
		{"mapped", E2B{DenyOut: []string{"::ffff:8.8.8.8"}}, true, "8.8.8.9:443", "8.8.8.8:443"},
		{"private is not opened", E2B{AllowOut: []string{"10.2.0.0/16", "169.254.169.254", "0.0.0.0/0"}}, true, "1.1.1.1:443", "10.2.0.1:443 169.254.169.254:80"},
		{"opened by the operator", E2B{AllowOut: []string{"10.1.0.0/16"}, DenyOut: deny}, true, "10.1.0.1:443", "10.2.0.1:443"},
	} {
		e := e2bEvaluator(t, c.e2b, c.public)
		for _, s := range strings.Fields(c.allow) {
			if v := e.Decide(flow(t, s)); v.Action != Allow {
				t.Errorf("%s: %s: %s", c.name, s, v.Explain())
			}
		}
		for _, s := range strings.Fields(c.deny) {
			if v := e.Decide(flow(t, s)); v.Action != Deny {
				t.Errorf("%s: %s: %s", c.name, s, v.Explain())
			}
		}
	}
	// A denied address is denied by any name.
	e := e2bEvaluator(t, E2B{DenyOut: []string{"8.8.8.8"}}, true)
	if left, v := e.Vet(e.Decide(flow(t, "dns.example.com:443")), []netip.Addr{netip.MustParseAddr("8.8.8.8")}); left != nil || v.Reason != ReasonRule {
		t.Errorf("%v %+v", left, v)
	}
}

func TestE2BErrors(t *testing.T) {
	many := map[string][]E2BTransform{}
	for i := range 11 {
		many[fmt.Sprintf("h%d.example.com", i)] = nil
	}
	headers := map[string]string{}
	for i := range 21 {
		headers[fmt.Sprintf("X-%d", i)] = "v"
	}
	rule := func(domain string, h map[string]string) E2B {
		return E2B{Rules: map[string][]E2BTransform{domain: {{Headers: h}}}}
	}
	for _, c := range []struct {
		e2b  E2B
		want string
	}{
		{E2B{DenyOut: []string{"example.com"}}, "invalid denied CIDR example.com"},
		{E2B{DenyOut: []string{"10.0.0.0/33"}}, "invalid denied CIDR 10.0.0.0/33"},
		{E2B{DenyOut: []string{"0.0.0.0"}}, "invalid denied CIDR 0.0.0.0"},
		{E2B{DenyOut: []string{"::/0"}}, "invalid denied CIDR ::/0"},
		{E2B{DenyOut: []string{"fe80::1%eth0"}}, "invalid denied CIDR fe80::1%eth0"},
		{E2B{AllowOut: []string{"0.0.0.0/8"}}, "invalid allowed address 0.0.0.0/8"},
		{E2B{AllowOut: []string{"::"}}, "invalid allowed address ::"},
		{E2B{AllowOut: []string{"example.com"}}, "When specifying allowed domains in allow out, you must include 'ALL_TRAFFIC' in deny out to block all other traffic."},
		{E2B{AllowOut: []string{"*"}}, "When specifying allowed domains in allow out, you must include 'ALL_TRAFFIC' in deny out to block all other traffic."},
		{E2B{AllowOut: []string{"a b"}, DenyOut: []string{"0.0.0.0/0"}}, "invalid allowed domain a b"},
		{E2B{AllowOut: []string{"pypi"}, DenyOut: []string{"0.0.0.0/0"}}, "invalid allowed domain pypi"},
		{E2B{AllowOut: []string{"*.com"}, DenyOut: []string{"0.0.0.0/0"}}, "invalid allowed domain *.com"},
		{E2B{Rules: many}, "Network rules can have at most 10 domains."},
		{rule("", nil), "Rule domain must not be empty."},
		{rule(strings.Repeat("a", 129), nil), "exceeds maximum length of 128 characters."},
		{rule("a b", nil), `Rule domain "a b" is not a valid domain name.`},
		{E2B{Rules: map[string][]E2BTransform{"a.b": {{}, {}}}}, `Domain "a.b" can have at most 1 transform rule.`},
		{rule("a.b", headers), `Domain "a.b" can have at most 20 headers per rule.`},
		{rule("a.b", map[string]string{"": "x"}), `Header name in rule for domain "a.b" must not be empty.`},
		{rule("a.b", map[string]string{"a\r": "x"}), `Header name "a\r" in rule for domain "a.b" must not contain CR or LF characters.`},
		{rule("a.b", map[string]string{strings.Repeat("a", 65): "x"}), "exceeds maximum length of 64 characters."},
		{rule("a.b", map[string]string{"a": "x\n"}), `Value for header "a" in rule for domain "a.b" must not contain CR or LF characters.`},
		{rule("a.b", map[string]string{"a": strings.Repeat("x", 2049)}), `Value for header "a" in rule for domain "a.b" exceeds maximum length of 2048 characters.`},
	} {
		_, _, err := FromE2B(c.e2b, true)
		if berm.KindOf(err) != berm.Invalid || err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
}

func TestE2BTransforms(t *testing.T) {
	secret := map[string]string{"Authorization": "Bearer ${e2b.secrets.TOKEN}"}
	c := E2B{AllowOut: []string{"api.example.com", "*.example.com"}, DenyOut: []string{"0.0.0.0/0"}, Rules: map[string][]E2BTransform{
		"api.example.com": {{Headers: secret}}, "*.example.com": {{Headers: map[string]string{"X-A": "b"}}}, "*.deep.example.com": {{Headers: map[string]string{"X-B": "c"}}},
		"other.example.org": {{Headers: secret}}, "none.example.com": {},
	}}
	p, transforms, err := FromE2B(c, true)
	if err != nil || len(transforms) != 4 {
		t.Fatal(transforms, err)
	}
	if strings.Contains(string(p.YAML()), "TOKEN") {
		t.Error("the policy holds what is the broker's")
	}
	e, err := NewEvaluator(p, nil, testTable(t))
	if err != nil {
		t.Fatal(err)
	}
	by := map[string]string{}
	for _, x := range transforms {
		by[x.ID] = x.To.String()
	}
	for host, want := range map[string]string{
		"api.example.com": "api.example.com", "x.example.com": "*.example.com", "x.deep.example.com": "*.deep.example.com",
	} {
		v := e.Decide(flow(t, host+":443"))
		if len(v.Credentials) != 1 || by[v.Credentials[0]] != want || !v.Inspect || !e.NeedsInspection(Host{name: host}, 443, now) {
			t.Errorf("%s: %+v", host, v)
		}
	}
	// Rules do not grant access.
	if v := e.Decide(flow(t, "other.example.org:443")); v.Action != Deny {
		t.Errorf("%+v", v)
	}
	// On other ports only what is HTTP is looked into.
	p, _, err = FromE2B(E2B{Rules: c.Rules}, true)
	if err != nil {
		t.Fatal(err)
	}
	if e, err = NewEvaluator(p, nil, testTable(t)); err != nil {
		t.Fatal(err)
	}
	if v := e.Decide(flow(t, "api.example.com:18443")); v.Inspect || !v.Sniff || len(v.Credentials) != 1 {
		t.Errorf("%+v", v)
	}
	if v := e.Decide(flow(t, "plain.example.net:443")); v.Inspect || v.Sniff || v.Credentials != nil {
		t.Errorf("%+v", v)
	}
}
