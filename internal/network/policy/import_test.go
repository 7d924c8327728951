package policy

import (
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
)

func checkImport(t *testing.T, what string, p *Policy, err error, allow, deny string) {
	t.Helper()
	if err != nil {
		t.Errorf("%s: %v", what, err)
		return
	}
	if _, err := DecodeYAML("p", p.YAML()); err != nil {
		t.Errorf("%s: %v\n%s", what, err, p.YAML())
	}
	e, err := NewEvaluator(p, nil, testTable(t))
	if err != nil {
		t.Errorf("%s: %v", what, err)
		return
	}
	for want, list := range map[Action]string{Allow: allow, Deny: deny} {
		for _, s := range strings.Fields(list) {
			if v := e.Decide(flow(t, s)); v.Action != want {
				t.Errorf("%s: %s: %s", what, s, v.Explain())
			}
		}
	}
}

func TestFromSandboxRuntime(t *testing.T) {
	for _, c := range []struct{ settings, allow, deny string }{
		{`{}`, "", "a.example.com:443"},
		{`{"network": {"allowedDomains": []}}`, "", "a.example.com:443"},
		{`{"network": {"allowedDomains": ["a.example.com", "*.b.example.com", "c.example.com:443", "[2606::1]:80", "9.9.9.9"], "deniedDomains": ["x.b.example.com", "a.example.com:22"], "allowLocalBinding": true}, "filesystem": {}}`,
			"a.example.com:443 a.example.com:8080 y.b.example.com:22 c.example.com:443 [2606::1]:80 9.9.9.9:443", "x.b.example.com:443 a.example.com:22 b.example.com:443 c.example.com:80 9.9.9.8:443"},
		{`{"allowedDomains": ["a.example.com"], "deniedDomains": ["*:22"]}`, "a.example.com:443", "a.example.com:22"},
		{`{"allowedDomains": ["a.example.com"], "deniedDomains": ["*"]}`, "", "a.example.com:443"},
	} {
		p, err := FromSandboxRuntime([]byte(c.settings))
		checkImport(t, c.settings, p, err, c.allow, c.deny)
	}
	for _, s := range []string{``, `[]`, `{"allowedDomains": "a.b"}`, `{"allowedDomains": ["*"]}`, `{"allowedDomains": ["*.com"]}`, `{"allowedDomains": ["a.b:x"]}`, `{"allowedDomains": ["2001:db8::1:443:"]}`, `{"allowedDomains": ["127.1"]}`} {
		if _, err := FromSandboxRuntime([]byte(s)); berm.KindOf(err) != berm.Invalid {
			t.Errorf("%s: %v", s, err)
		}
	}
}

func TestFromDeno(t *testing.T) {
	list := func(hosts ...string) *[]string { return &hosts }
	for _, c := range []struct {
		name        string
		allow, deny *[]string
		yes, no     string
	}{
		{"nothing", nil, nil, "", "a.example.com:443"},
		{"all", list(), nil, "a.example.com:443 9.9.9.9:8000", "10.2.0.1:80"},
		{"some", list("a.example.com", "b.example.com:8080", "1.1.1.1:443", "[2606::1]:80", "*.w.example.com"), nil,
			"a.example.com:22 b.example.com:8080 1.1.1.1:443 [2606::1]:80 x.w.example.com:1", "b.example.com:443 1.1.1.1:80 w.example.com:443"},
		{"all but", list(), list("evil.example.com", "8.8.8.8:443"), "a.example.com:443 8.8.8.8:80", "evil.example.com:80 8.8.8.8:443"},
		{"none", list(), list(), "", "a.example.com:443 9.9.9.9:80"},
	} {
		p, err := FromDeno(c.allow, c.deny)
		checkImport(t, c.name, p, err, c.yes, c.no)
	}
	if _, err := FromDeno(list("https://a.b"), nil); berm.KindOf(err) != berm.Invalid {
		t.Error(err)
	}
}

func TestFromVercel(t *testing.T) {
	for _, c := range []struct{ policy, allow, deny string }{
		{`"allow-all"`, "a.example.com:443 9.9.9.9:80", "10.2.0.1:80"}, {`"deny-all"`, "", "a.example.com:443"}, {`{"mode": "deny-all"}`, "", "a.example.com:443"}, {`{}`, "", "a.example.com:443"},
		{`{"allow": ["a.example.com", "*.w.example.com"], "subnets": {"allow": ["9.9.0.0/16"], "deny": ["9.9.9.0/24"]}}`,
			"a.example.com:443 x.w.example.com:5432 9.9.1.1:22 9.9.1.1:443/udp", "w.example.com:443 9.9.9.9:443 b.example.com:443"},
		{`{"allow": {"a.example.com": [], "*": []}}`, "a.example.com:443 z.example.com:443", "9.9.9.9:443"},
		{`{"mode": "custom", "allowedDomains": ["a.example.com"], "allowedCIDRs": ["9.9.9.0/24"], "deniedCIDRs": ["9.9.9.9/32"]}`, "a.example.com:443 9.9.9.8:80", "9.9.9.9:80"},
	} {
		p, err := FromVercel([]byte(c.policy))
		checkImport(t, c.policy, p, err, c.allow, c.deny)
	}
	for s, want := range map[string]berm.Kind{
		``: berm.Invalid, `"all"`: berm.Invalid, `{"mode": "x"}`: berm.Invalid, `{"allow": 7}`: berm.Invalid, `{"allow": ["a b"]}`: berm.Invalid, `{"subnets": {"allow": ["x"]}}`: berm.Invalid,
		`{"allow": {"a.b": [{"transform": [{"headers": {"a": "b"}}]}]}}`: berm.Unsupported,
	} {
		if _, err := FromVercel([]byte(s)); err == nil || berm.KindOf(err) != want {
			t.Errorf("%s: %v", s, err)
		}
	}
	p, err := FromVercel([]byte(`{"allow": ["a.example.com"]}`))
	if err != nil {
		t.Fatal(err)
	}
	e, err := NewEvaluator(p, nil, testTable(t))
	if err != nil {
		t.Fatal(err)
	}
	if v := e.Decide(flow(t, "a.example.com:5432")).DecideTLS(nil); v.Reason != ReasonTLS {
		t.Errorf("without TLS names cannot be matched there: %+v", v)
	}
}

func TestParseEntry(t *testing.T) {
	for in, want := range map[string]string{
		"a.b": "{id: a.b, to: [a.b]}", "a.b:443": `{id: "a.b:443", to: [a.b], ports: [443]}`, "*.a.b:8000-8999": `{id: "all.a.b:8000-8999", to: ["*.a.b"], ports: ["8000-8999"]}`,
		"a.b:any": `{id: "a.b:any", to: [a.b], ports: [any]}`, "10.0.0.0/8:22": `{id: "10.0.0.0-8:22", to: ["10.0.0.0/8"], ports: [22]}`,
		"[2001:db8::1]:80": `{id: "2001:db8::1:80", to: ["2001:db8::1"], ports: [80]}`, "2001:db8::1": `{id: "2001:db8::1", to: ["2001:db8::1"]}`,
		"2001:db8::/32": `{id: "2001:db8::-32", to: ["2001:db8::/32"]}`, "pypi": "{id: pypi, to: [pypi]}", ".a.b": `{id: a.b, to: [".a.b"]}`,
		strings.Repeat("a.", 100) + "b:8000-8999": "",
	} {
		r, err := ParseEntry(in)
		if err != nil || want != "" && r.String() != want {
			t.Errorf("%s: %s %v", in, r.String(), err)
		}
		p := Policy{Rules: []Rule{r}}
		if _, err := DecodeYAML("p", p.YAML()); err != nil {
			t.Error(err)
		}
	}
	for _, in := range []string{"", ":", "a.b:", "a.b:0", ":443", "[::1", "[::1]x", "[::1]x:80", "https://a.b", "a.b/c", "a.b:1:2", "[a.b]:80:"} {
		if r, err := ParseEntry(in); err == nil {
			t.Errorf("%s: %s", in, r.String())
		}
	}
}

func TestImport(t *testing.T) {
	for _, c := range []struct{ content, allow, deny string }{
		{`{"network": {"allowedDomains": ["a.example.com"]}}`, "a.example.com:443", "b.example.com:443"},
		{`"deny-all"`, "", "a.example.com:443"},
		{`{"networkPolicy": "allow-all"}`, "a.example.com:443", ""},
		{`{"networkPolicy": {"allow": ["a.example.com"], "subnets": {"deny": ["9.9.9.0/24"]}}}`, "a.example.com:443", "b.example.com:443 9.9.9.9:443"},
		{`{"mode": "custom", "allowedDomains": ["a.example.com"], "allowedCIDRs": ["9.9.9.0/24"]}`, "a.example.com:443 9.9.9.9:22", "b.example.com:443"},
		{`{"allowNet": ["a.example.com:8443"]}`, "a.example.com:8443", "a.example.com:443"},
		{`{"allowNet": []}`, "a.example.com:443", ""},
		{`{"permissions": {"default": {"net": ["a.example.com"]}}}`, "a.example.com:443", "b.example.com:443"},
		{`{"permissions": {"default": {"net": true}}}`, "a.example.com:443", ""},
		{`{"permissions": {"default": {"net": false, "read": true}}}`, "", "a.example.com:443"},
		{`{"permissions": {"default": {"net": []}}}`, "", "a.example.com:443"},
		{`{"permissions": {"web": {"net": {"allow": true, "deny": ["a.example.com"]}}}}`, "b.example.com:443", "a.example.com:443"},
		{`{"permissions": {"default": {"all": true}}}`, "a.example.com:443", ""},
	} {
		p, err := Import("", []byte(c.content))
		checkImport(t, c.content, p, err, c.allow, c.deny)
	}
	for content, form := range map[string]string{
		`{"allowedDomains": ["a.example.com"]}`: "", `{}`: "", `{"mode":"custom","allowNet":[]}`: "", `[]`: "", `x`: "",
		`{"networkPolicy": {"networkPolicy": {}}}`: "vercel", `{"permissions":{"a":{},"b":{}}}`: "deno", `{"imports":{}}`: "deno",
		`{"permissions": {"default": {"net": "x"}}}`: "deno", `"deny-all"`: "other",
	} {
		if _, err := Import(form, []byte(content)); berm.KindOf(err) != berm.Invalid {
			t.Errorf("%s: %v", content, err)
		}
	}
}

func FuzzImport(f *testing.F) {
	for _, s := range []string{
		`{"network": {"allowedDomains": ["a.example.com", "*.b.example.com:443"], "deniedDomains": ["*:22"]}}`, `"deny-all"`,
		`{"networkPolicy": {"allow": {"a.example.com": []}, "subnets": {"deny": ["9.9.9.0/24"]}}}`, `{"allowNet": ["[2606::1]:80"]}`,
		`{"permissions": {"default": {"net": {"allow": true, "deny": ["a.example.com"]}}}}`,
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, content string) {
		p, err := Import("", []byte(content))
		if err != nil {
			return
		}
		if _, err := DecodeYAML("p", p.YAML()); err != nil {
			t.Fatalf("%v\n%s", err, p.YAML())
		}
	})
}
