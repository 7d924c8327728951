package policy

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"net/url"
	stdpath "path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func TestDecideTLS(t *testing.T) {
	e := evaluator(t, `
rules:
  - {id: plain, to: [a.example.com]}
  - {id: strict, to: [b.example.com], tls: require}
  - {id: none, to: [c.example.com], tls: forbid}
  - {id: opaque, to: [d.example.com], app: tcp}
  - {id: hidden, to: [e.example.com], ech: allow}
  - {id: seen, to: [f.example.com], http: {methods: [GET]}}
  - {id: pinned, to: [g.example.com], tls: passthrough}
  - {id: must, to: [h.example.com], tls: intercept}
  - {id: range, to: [9.9.9.9]}
`)
	for _, c := range []struct {
		host  string
		hello *Hello
		want  Reason
	}{
		{"a.example.com", &Hello{ServerName: "a.example.com"}, ""}, {"a.example.com", &Hello{ServerName: "A.Example.COM."}, ""}, {"a.example.com", nil, ""},
		{"a.example.com", &Hello{ServerName: "b.example.com"}, ReasonSNI}, {"a.example.com", &Hello{}, ReasonSNI}, {"a.example.com", &Hello{ServerName: "a.example.com\x00"}, ReasonSNI},
		{"a.example.com", &Hello{ServerName: "9.9.9.9"}, ReasonSNI},
		{"a.example.com", &Hello{ServerName: "a.example.com", ECH: true}, ReasonECH}, {"e.example.com", &Hello{ServerName: "e.example.com", ECH: true}, ""},
		{"f.example.com", &Hello{ServerName: "f.example.com", ECH: true}, ""}, {"g.example.com", &Hello{ServerName: "g.example.com", ECH: true}, ReasonECH},
		{"b.example.com", nil, ReasonTLS}, {"b.example.com", &Hello{ServerName: "b.example.com"}, ""}, {"h.example.com", nil, ReasonTLS},
		{"c.example.com", &Hello{ServerName: "c.example.com"}, ReasonTLS}, {"c.example.com", nil, ""},
		{"d.example.com", nil, ""}, {"d.example.com", &Hello{}, ""}, {"d.example.com", &Hello{ServerName: "x", ECH: true}, ""},
		{"9.9.9.9", &Hello{ServerName: "whatever.example.com"}, ""}, {"9.9.9.9", nil, ""},
		{"z.example.com", nil, ReasonNotListed},
	} {
		v := e.Decide(flow(t, c.host+":443")).DecideTLS(c.hello)
		if v.Reason != c.want || (v.Action == Allow) != (c.want == "") {
			t.Errorf("%s with %+v: %q, want %q", c.host, c.hello, v.Reason, c.want)
		}
	}
}

func TestHiddenNames(t *testing.T) {
	hidden, none := &Hello{ServerName: "a.example.com", ECH: true}, &Hello{}
	for _, c := range []struct {
		document    string
		ech, noName Reason
	}{
		{"default: allow-public", "", ""},
		{"rules: [{to: [names]}]", "", ""},
		{"default: allow-public\nrules: [{to: [9.9.9.9], action: deny}]", "", ""},
		{"default: allow-public\nrules: [{to: [evil.example.com], action: deny}]", ReasonECH, ""},
		{"default: allow-public\nrules: [{to: [b.example.com]}]", "", ""},
		{"default: allow-public\nrules: [{to: [b.example.com], http: {methods: [GET]}}]", ReasonECH, ""},
		{"rules: [{to: [.example.com]}]", ReasonECH, ReasonSNI},
	} {
		v := evaluator(t, c.document).Decide(flow(t, "a.example.com:443"))
		if ech, noName := v.DecideTLS(hidden).Reason, v.DecideTLS(none).Reason; ech != c.ech || noName != c.noName {
			t.Errorf("%s: %q %q, want %q %q", c.document, ech, noName, c.ech, c.noName)
		}
	}
}

func TestDecideHTTP(t *testing.T) {
	e := evaluator(t, example+`
  - {id: plain, to: [plain.example.com]}
  - {id: ws, to: [ws.example.com], http: {upgrade: [websocket], require: [x-team], forbid: [range]}}
  - {id: q, to: [q.example.com], http: {allow: [{query: [page, "a b"]}], deny: [{query: [admin]}, {methods: [DELETE]}, {content_types: [text/html]}]}}
`)
	h := func(pairs ...string) map[string][]string {
		m := map[string][]string{}
		for i := 0; i < len(pairs); i += 2 {
			m[pairs[i]] = append(m[pairs[i]], pairs[i+1])
		}
		return m
	}
	for _, c := range []struct {
		host   string
		r      Request
		want   Reason
		target string
	}{
		{"registry.example.com", Request{Method: "GET", Target: "/a//b"}, ReasonPath, ""},
		{"registry.example.com", Request{Method: "GET", Target: "/a/../b?x=1"}, "", "/b?x=1"},
		{"registry.example.com", Request{Method: "GET", Target: "/@types%2fnode"}, "", "/@types%2Fnode"},
		{"registry.example.com", Request{Method: "POST", Target: "/"}, ReasonMethod, ""},
		{"registry.example.com", Request{Method: "get", Target: "/"}, ReasonMethod, ""},
		{"registry.example.com", Request{Method: "GET ", Target: "/"}, ReasonMethod, ""},
		{"registry.example.com", Request{Method: "TRACE", Target: "/"}, ReasonMethod, ""},
		{"registry.example.com", Request{Method: "GET", Target: "/", Header: h("x-http-method-override", "DELETE")}, ReasonMethod, ""},
		{"registry.example.com", Request{Method: "GET", Target: "/", BodySize: 1 << 20}, "", "/"},
		{"registry.example.com", Request{Method: "GET", Target: "/", BodySize: 1<<20 + 1}, ReasonBody, ""},
		{"registry.example.com", Request{Method: "GET", Target: "/", BodySize: -1}, "", "/"},
		{"registry.example.com", Request{Method: "GET", Target: "/", Header: h("Upgrade", "websocket")}, ReasonUpgrade, ""},
		{"registry.example.com", Request{Method: "GET", Target: "/", Header: h("Upgrade", "h2c")}, "", "/"},
		{"registry.example.com", Request{Method: "GET", Target: "http://evil.test/"}, ReasonPath, ""},
		{"registry.example.com", Request{Method: "OPTIONS", Target: "*"}, ReasonPath, ""},
		{"registry.example.com", Request{Method: "GET", Target: "/?a b"}, ReasonPath, ""},
		{"api.github.com", Request{Method: "GET", Target: "/repos/acme/x"}, "", "/repos/acme/x"},
		{"api.github.com", Request{Method: "GET", Target: "/repos/evil/x"}, ReasonPath, ""},
		{"api.github.com", Request{Method: "GET", Target: "/repos/acme/../evil/x"}, ReasonPath, ""},
		{"api.github.com", Request{Method: "GET", Target: "/repos/acme/..%2fevil"}, ReasonPath, ""},
		{"api.github.com", Request{Method: "GET", Target: "/repos/acme%2fx"}, ReasonPath, ""}, // one reading is not in the rule
		{"api.github.com", Request{Method: "POST", Target: "/repos/acme/x/issues", BodySize: 9, Header: h("Content-Type", "application/json; charset=utf-8")}, "", "/repos/acme/x/issues"},
		{"api.github.com", Request{Method: "POST", Target: "/repos/acme/x/issues", BodySize: 9, Header: h("content-type", "text/plain")}, ReasonBody, ""},
		{"api.github.com", Request{Method: "POST", Target: "/repos/acme/x/pulls"}, ReasonMethod, ""},
		{"api.github.com", Request{Method: "GET", Target: "/repos/acme/secret/x"}, ReasonRule, ""},
		{"api.github.com", Request{Method: "GET", Target: "/repos/acme/x/../secret/x"}, ReasonRule, ""},
		{"api.github.com", Request{Method: "GET", Target: "/repos/acme/secret%2fx"}, ReasonRule, ""},
		{"api.github.com", Request{Method: "GET", Target: "/repos/acme/secret;v=1/x"}, ReasonRule, ""},
		{"plain.example.com", Request{Method: "PATCH", Target: "/x?y"}, "", "/x?y"},
		{"plain.example.com", Request{Method: "GET", Target: "//a/%2e%2e/b"}, "", "//a/%2e%2e/b"}, // nothing is judged by it
		{"plain.example.com", Request{Method: "OPTIONS", Target: "*"}, "", "*"}, {"plain.example.com", Request{Method: "GET", Target: "*x"}, ReasonPath, ""},
		{"plain.example.com", Request{Method: "GET", Target: ""}, ReasonPath, ""}, {"plain.example.com", Request{Method: "GET", Target: "/a\nb"}, ReasonPath, ""},
		{"q.example.com", Request{Method: "GET", Target: "//a"}, "", "//a"},
		{"plain.example.com", Request{Method: "CONNECT", Target: "evil.test:443"}, ReasonMethod, ""},
		{"ws.example.com", Request{Method: "GET", Target: "/", Header: h("upgrade", "WebSocket", "X-Team", "a")}, "", "/"},
		{"ws.example.com", Request{Method: "GET", Target: "/", Header: h("Upgrade", "websocket, other/1", "X-Team", "a")}, ReasonUpgrade, ""},
		{"ws.example.com", Request{Method: "GET", Target: "/"}, ReasonHeader, ""},
		{"ws.example.com", Request{Method: "GET", Target: "/", Header: h("X-Team", "a", "Range", "bytes=0-1")}, ReasonHeader, ""},
		{"q.example.com", Request{Method: "GET", Target: "/?page=1&a+b=2&a%20b"}, "", "/?page=1&a+b=2&a%20b"},
		{"q.example.com", Request{Method: "GET", Target: "/?pag%65=1"}, "", "/?pag%65=1"},
		{"q.example.com", Request{Method: "GET", Target: "/?page=1;admin=1"}, ReasonRule, ""}, // cannot be read in one way
		{"q.example.com", Request{Method: "GET", Target: "/?%61dmin=1"}, ReasonRule, ""},
		{"q.example.com", Request{Method: "GET", Target: "/?other=1"}, ReasonQuery, ""},
		{"q.example.com", Request{Method: "DELETE", Target: "/"}, ReasonRule, ""},
		{"q.example.com", Request{Method: "POST", Target: "/", Header: h("X-Method-Override", "DELETE")}, ReasonRule, ""},
		{"q.example.com", Request{Method: "POST", Target: "/", BodySize: 5, Header: h("Content-Type", "text/html;x")}, ReasonRule, ""},
	} {
		v := e.Decide(flow(t, c.host+":443"))
		if v.Action != Allow {
			t.Fatalf("%s: %+v", c.host, v)
		}
		c.r.Authority = c.host
		v = v.DecideHTTP(c.r)
		if v.Reason != c.want || v.Target != c.target || (v.Action == Allow) != (c.want == "") {
			t.Errorf("%s %s at %s %v: %q %q (%s), want %q %q", c.r.Method, c.r.Target, c.host, c.r.Header, v.Reason, v.Target, v.Detail, c.want, c.target)
		}
		if v.Action == Deny && !strings.HasPrefix(v.Explain(), "Denied ("+string(c.want)+")") {
			t.Errorf("%s", v.Explain())
		}
	}
	v := e.Decide(flow(t, "registry.example.com:443")).DecideHTTP(Request{Method: "GET", Authority: "registry.example.com", Target: "/", BodySize: -1})
	if v.MaxBody != 1<<20 {
		t.Errorf("MaxBody %d", v.MaxBody)
	}
	v = e.Decide(flow(t, "api.github.com:443"))
	if len(v.Credentials) != 1 || v.Credentials[0] != "github-app" {
		t.Errorf("credentials: %v", v.Credentials)
	}
}

func TestAuthority(t *testing.T) {
	e := evaluator(t, `rules: [{to: [a.example.com, 9.9.9.9, "2606::1"], ports: [443, 8443]}]`)
	for _, c := range []struct {
		flow, authority string
		want            bool
	}{
		{"a.example.com:443", "a.example.com", true}, {"a.example.com:443", "A.example.com:443", true}, {"a.example.com:8443", "a.example.com:8443", true},
		{"a.example.com:443", "a.example.com.", true}, {"a.example.com:443", "a.example.com:8443", false}, {"a.example.com:443", "b.example.com", false},
		{"a.example.com:443", "", false}, {"a.example.com:443", "a.example.com@evil.test", false}, {"a.example.com:443", "a.example.com:80:443", false},
		{"a.example.com:443", "a.example.com:", false}, {"a.example.com:443", "a.example.com:+443", false}, {"a.example.com:443", "9.9.9.9", false},
		{"9.9.9.9:443", "9.9.9.9", true}, {"9.9.9.9:443", "9.9.9.9:443", true}, {"9.9.9.9:443", "a.example.com", false}, {"9.9.9.9:443", "9.9.9.8", false}, {"9.9.9.9:443", "0x09.9.9.9", false},
		{"2606::1:443", "[2606::1]", true}, {"2606::1:443", "[2606::1]:443", true}, {"2606::1:443", "[2606::1]:80", false},
	} {
		f := flow(t, strings.Replace(c.flow, "2606::1:443", "1.1.1.1:443", 1))
		if strings.HasPrefix(c.flow, "2606") {
			f.Host = Host{addr: netip.MustParseAddr("2606::1")}
		}
		v := e.Decide(f).DecideHTTP(Request{Method: "GET", Authority: c.authority, Target: "/"})
		if (v.Action == Allow) != c.want || !c.want && v.Reason != ReasonAuthority {
			t.Errorf("%s for %q: %+v", c.flow, c.authority, v)
		}
	}
}

// TestServersReadTheSame: however a server reads the path of a request that was let pass,
// it is one that the rule allows and does not deny.
func TestServersReadTheSame(t *testing.T) {
	globs := map[string]*regexp.Regexp{
		"/v1/**": regexp.MustCompile(`^/v1/`), "/v1/*/x": regexp.MustCompile(`^/v1/[^/]*/x$`), "/*": regexp.MustCompile(`^/[^/]*$`), "/**": regexp.MustCompile(`^/`),
		"/admin/**": regexp.MustCompile(`^/admin/`), "/v1/admin": regexp.MustCompile(`^/v1/admin$`), "/v1/secret*": regexp.MustCompile(`^/v1/secret[^/]*$`),
	}
	names := slices.Sorted(maps.Keys(globs))
	pieces := []string{"/", "/", "v1", "admin", "x", "secret", "..", ".", "%2e%2e", "%2f", "%2F", ";", ";a=b", "%3b", "//", "%61dmin", "%5c", "\\", "%252e", "a", "%", "%00", "~", "%7E"}
	parameters := regexp.MustCompile(`;[^/]*`)
	r := rand.New(rand.NewPCG(19, 20))
	allowed := 0
	for range 60_000 {
		allow, deny := names[r.IntN(len(names))], names[r.IntN(len(names))]
		rule := &Rule{HTTP: &HTTP{Allow: []Match{{Paths: []Glob{{allow}}}}, Deny: []Match{{Paths: []Glob{{deny}}}}}}
		v := Verdict{Action: Allow, Match: rule, Flow: Flow{Host: Host{name: "a.b"}, Port: 443}}
		target := "/"
		for range r.IntN(7) {
			target += pieces[r.IntN(len(pieces))]
		}
		v = v.DecideHTTP(Request{Method: "GET", Authority: "a.b", Target: target})
		if v.Action != Allow {
			continue
		}
		allowed++
		u, err := url.ParseRequestURI(v.Target)
		if err != nil {
			t.Fatalf("%q is forwarded as %q: %v", target, v.Target, err)
		}
		twice, err := url.PathUnescape(u.Path)
		if err != nil {
			twice = u.Path
		}
		for _, reading := range []string{u.Path, v.Target, twice, parameters.ReplaceAllString(u.Path, ""), parameters.ReplaceAllString(twice, ""), strings.ReplaceAll(u.Path, "\\", "/")} {
			clean := stdpath.Clean(reading)
			if strings.HasSuffix(reading, "/") && clean != "/" {
				clean += "/"
			}
			if reading == v.Target && strings.Contains(reading, "%") {
				continue // a server that never decodes
			}
			if !globs[allow].MatchString(clean) || globs[deny].MatchString(clean) {
				t.Fatalf("%q is forwarded as %q and may be read as %q: allowed is %s, denied %s", target, v.Target, clean, allow, deny)
			}
		}
	}
	if allowed < 3000 {
		t.Errorf("only %d requests were allowed", allowed)
	}
}

func TestDenyConditions(t *testing.T) {
	e := evaluator(t, `rules: [{to: [a.example.com], http: {allow: [{upgrade: [websocket]}], deny: [{upgrade: [websocket], require: [x-a]}, {forbid: [x-b], methods: [PUT]}, {content_types: [a/b]}]}}]`)
	for _, c := range []struct {
		method string
		header map[string][]string
		body   int64
		want   Reason
	}{
		{"GET", nil, 0, ""}, {"GET", map[string][]string{"Upgrade": {"websocket"}}, 0, ""}, {"GET", map[string][]string{"X-A": {""}}, 0, ""},
		{"GET", map[string][]string{"Upgrade": {"websocket"}, "X-A": {""}}, 0, ReasonRule},
		{"PUT", nil, 0, ReasonRule}, {"PUT", map[string][]string{"x-B": {"1"}}, 0, ""},
		{"POST", map[string][]string{"Content-Type": {"a/b"}}, 0, ""}, {"POST", map[string][]string{"Content-Type": {"A/B; c=d"}}, 1, ReasonRule},
		{"POST", map[string][]string{"Content-Type": {"c/d"}}, 1, ""}, {"POST", map[string][]string{"Content-Type": {"c/d", "a/b"}}, -1, ReasonRule}, {"POST", map[string][]string{"Content-Type": {"///"}}, 1, ReasonRule}, {"POST", nil, 1, ""},
	} {
		v := e.Decide(flow(t, "a.example.com:443")).DecideHTTP(Request{Method: c.method, Authority: "a.example.com", Target: "/", Header: c.header, BodySize: c.body})
		if v.Reason != c.want {
			t.Errorf("%s %v with %d bytes: %q, want %q", c.method, c.header, c.body, v.Reason, c.want)
		}
	}
}
