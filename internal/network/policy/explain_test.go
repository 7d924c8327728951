package policy

import (
	"strings"
	"testing"
)

func TestExplain(t *testing.T) {
	e := evaluator(t, example)
	for in, want := range map[string]string{
		"pkg.example.org:443":         "Denied (not_listed): pkg.example.org:443 is not in the policy. This rule would allow it:\n  - {to: [pkg.example.org], ports: [443]}",
		"9.8.7.6:5432/udp":            "Denied (not_listed): 9.8.7.6:5432/udp is not in the policy. This rule would allow it:\n  - {to: [\"9.8.7.6\"], ports: [5432], proto: udp}",
		"registry.example.com:80":     "Denied (port): registry.example.com:80: rule npm has the destination, but not this port. This rule would allow it:\n  - {to: [registry.example.com], ports: [80]}",
		"gist.github.com:443":         "Denied (rule): gist.github.com:443 is denied by rule no-gists (gists are public). Change or remove the rule to allow it.",
		"169.254.169.254:80":          "Denied (metadata): 169.254.169.254:80 is most clouds' instance metadata. No policy can allow it.",
		"10.9.0.1:443":                "Denied (private): 10.9.0.1:443 is private use (RFC 1918). No policy can allow it; the operator of this host can open single ranges (--open).",
		"github.com:443":              "github.com:443 is allowed by rule git.",
		"ask.example.com:443":         "ask.example.com:443 needs a yes: rule ask asks for it.",
		"metadata.google.internal:80": "Denied (metadata): metadata.google.internal:80 is a name of a cloud's metadata service. No policy can allow it.",
		"9.9.9.10:443":                "Denied (host): 9.9.9.10:443 is the host that runs the sandbox. No policy can allow it; the operator of this host can open single ranges (--open).",
	} {
		if got := e.Decide(flow(t, in)).Explain(); got != want {
			t.Errorf("%s:\n%s\nwant\n%s", in, got, want)
		}
	}
	v := e.Decide(flow(t, "api.github.com:443")).DecideHTTP(Request{Method: "DELETE", Authority: "api.github.com", Target: "/repos/acme/x"})
	if got := v.Explain(); got != "Denied (method): api.github.com:443 is in rule api, but DELETE is not a method of the rule. It allows GET of /repos/acme/**; "+
		"POST of /repos/acme/*/issues, with a body of application/json, with a body of at most 64KiB. It denies every method of /repos/acme/secret/**." {
		t.Error(got)
	}
	// What is said to allow it does.
	for _, in := range []string{"pkg.example.org:443", "9.8.7.6:5432/udp", "registry.example.com:80", "a.b.c:25", "old.example.com:443", "[2606::1]:22"} {
		_, line, _ := strings.Cut(e.Decide(flow(t, in)).Explain(), "\n")
		if v := evaluator(t, "rules:\n"+line).Decide(flow(t, in)); v.Action != Allow {
			t.Errorf("%s is not allowed by %s: %s", in, line, v.Explain())
		}
	}
}

func TestLearn(t *testing.T) {
	e := evaluator(t, example)
	var denials []Denial
	for _, s := range []string{
		"pkg.example.org:443", "pkg.example.org:8443", "pypi.org:443", "files.pythonhosted.org:443", "1.1.1.1:853/udp", "10.9.0.1:443", "169.254.169.254:80", "gist.github.com:443",
		"github.com:22", "github.com:443", "x.githubusercontent.evil.com:443", "pkg.example.org:443",
	} {
		denials = append(denials, Denial{Verdict: e.Decide(flow(t, s))})
	}
	for _, r := range []Request{
		{Method: "GET", Target: "/orgs/acme?x=1"}, {Method: "GET", Target: "/orgs/../users/me"}, {Method: "DELETE", Target: "/repos/acme/x"}, {Method: "GET", Target: "//"}, {Method: "get", Target: "/x"}, {Method: "GET", Target: "/a*b/**"},
	} {
		r.Authority = "api.github.com"
		denials = append(denials, Denial{Verdict: e.Decide(flow(t, "api.github.com:443")).DecideHTTP(r), Request: &r})
	}
	p := Policy{Rules: Learn(denials)}
	want := `version: 1
rules:
  - {id: "1.1.1.1-udp", to: ["1.1.1.1"], ports: [853], proto: udp}
  - {id: api.github.com, to: [api.github.com], ports: [443], http: {allow: [{methods: [DELETE], paths: ["/repos/acme/x"]}, {methods: [GET], paths: ["/orgs/acme", "/users/me"]}]}}
  - {id: pypi, to: [pypi]}
  - {id: github.com, to: [github.com], ports: [22]}
  - {id: pkg.example.org, to: [pkg.example.org], ports: [443, 8443]}
  - {id: x.githubusercontent.evil.com, to: [x.githubusercontent.evil.com], ports: [443]}
`
	if got := string(p.YAML()); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if _, err := DecodeYAML("p", p.YAML()); err != nil {
		t.Error(err)
	}
	if Learn(nil) != nil {
		t.Error("rules out of nothing")
	}
}

func TestWarnings(t *testing.T) {
	p, err := DecodeYAML("p", []byte(`version: 1
rules:
  - {id: a, to: ["*.example.com", pypi], ports: [443]}
  - {id: b, to: [x.example.com], ports: [443]}
  - {id: c, to: [x.example.com], ports: [80]}
  - {id: d, to: [files.pythonhosted.org, "api-*.example.com"], ports: [443], proto: tcp, action: deny}
  - {id: e, to: [public], ports: [any], proto: any}
  - {id: f, to: [late.example.org], ports: [25, 443]}
  - {id: g, to: [late.example.org], ports: [8443]}
  - {id: h, to: ["*.github.io", 10.9.0.0/16, 10.1.0.0/16, 8.0.0.0/6, metadata.google.internal]}
  - {id: i, to: [10.9.0.0/24], ports: [443]}
  - {id: j, to: [once.example.org], once: true}
`))
	if err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	for _, w := range p.Warnings(testTable(t)) {
		got.WriteString(w.Rule + " " + w.Text + "\n")
		if w.Line != strings.Index("abcdefghij", w.Rule)+3 {
			t.Errorf("line %d of rule %s", w.Line, w.Rule)
		}
	}
	want := `b never reached: rule a before it has all of its destinations
d never reached: rule a before it has all of its destinations and says allow
g never reached: rule e before it has all of its destinations
h *.github.io is every customer of github.io, strangers too
h 10.9.0.0/16 is not the public internet (private): it stays denied unless the operator opens it (--open)
h metadata.google.internal is denied whatever rules say
i never reached: rule h before it has all of its destinations
i 10.9.0.0/24 is not the public internet (private): it stays denied unless the operator opens it (--open)
j never reached: rule e before it has all of its destinations
`
	if got.String() != want {
		t.Errorf("got\n%s\nwant\n%s", got.String(), want)
	}
}
