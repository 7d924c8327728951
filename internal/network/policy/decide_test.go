package policy

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/address"
)

var now = time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)

func testTable(t testing.TB) *address.Table {
	t.Helper()
	own := netip.MustParseAddr("9.9.9.10")
	table, err := address.NewTable(address.Config{
		Open: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")},
		Own:  func(a netip.Addr) bool { return a == own },
	})
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func evaluator(t testing.TB, document string, floor ...Rule) *Evaluator {
	t.Helper()
	p, err := DecodeYAML("policy.yaml", []byte("version: 1\n"+document))
	if err != nil {
		t.Fatal(err)
	}
	p.Revision = "r7"
	e, err := NewEvaluator(p, floor, testTable(t))
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// flow reads "HOST:PORT" or "HOST:PORT/udp".
func flow(t testing.TB, s string) Flow {
	t.Helper()
	s, proto, _ := strings.Cut(s, "/")
	i := strings.LastIndexByte(s, ':')
	host, err := ParseHost(s[:i])
	if err != nil {
		t.Fatal(err)
	}
	port, err := strconv.ParseUint(s[i+1:], 10, 16)
	if err != nil {
		t.Fatal(err)
	}
	if proto == "" {
		proto = "tcp"
	}
	return Flow{Host: host, Port: uint16(port), Proto: Proto(proto), Time: now}
}

const example = `
default: deny
dns: {mode: synthetic, types: [A, TXT]}
rules:
  - id: no-gists
    to: [gist.github.com, "*.gist.github.com"]
    action: deny
    reason: gists are public
  - id: npm
    to: [registry.example.com, "*.registry.example.com"]
    ports: [443]
    http: {methods: [GET, HEAD], paths: ["/**"], max_body: 1MiB}
  - id: api
    to: [api.github.com]
    ports: [443]
    http:
      allow:
        - {methods: [GET], paths: ["/repos/acme/**"]}
        - {methods: [POST], paths: ["/repos/acme/*/issues"], content_types: [application/json], max_body: 64KiB}
      deny: [{paths: ["/repos/acme/secret/**"]}]
    credential: github-app
  - id: git
    to: [github]
  - {id: db, to: [db.acme.example], ports: [5432], app: tcp, limits: {up: 50MiB/h, flows: 4}}
  - {id: range, to: [9.9.9.0/24, 10.1.2.3, 10.0.0.0/8], ports: [443, 8000-9000]}
  - {id: mail, to: [smtp.example.com], ports: [any, 587], dns_types: [MX]}
  - {id: quic, to: [quic.example.com], ports: [443], proto: udp}
  - {id: gone, to: [old.example.com], expires_at: 2026-11-29T11:00:00Z}
  - {id: once, to: [once.example.com], once: true}
  - {id: wide, to: [wide.example.com], ports: [any]}
  - {id: lan, to: [nas.corp.internal]}
  - {id: ask, to: [ask.example.com], action: ask}
`

func TestDecide(t *testing.T) {
	e := evaluator(t, example, Rule{ID: "floor", To: []Target{{kind: namesBelow, name: "forbidden.registry.example.com"}}, Action: Deny})
	for in, want := range map[string]string{
		"registry.example.com:443": "allow npm", "a.b.registry.example.com:443": "allow npm", "x.forbidden.registry.example.com:443": "deny operator floor",
		"registry.example.com:80": "deny port npm", "registry.example.com:443/udp": "deny proto npm", "evilregistry.example.com:443": "deny not_listed ",
		"gist.github.com:443": "deny rule no-gists", "gist.github.com:22": "deny rule no-gists", "github.com:443": "allow git", "github.com:22": "deny port git",
		"raw.githubusercontent.com:80": "allow git", "githubusercontent.com:80": "deny not_listed ",
		"db.acme.example:5432": "allow db", "db.acme.example:5433": "deny port db",
		"9.9.9.9:443": "allow range", "9.9.9.9:8500": "allow range", "9.9.9.9:80": "deny port range", "9.9.9.10:443": "deny host ", "9.9.8.9:443": "deny not_listed ",
		"10.1.2.3:443": "allow range", "10.2.2.3:443": "deny private ", "[::ffff:9.9.9.9]:443": "allow range", "[::ffff:10.2.0.1]:443": "deny private ",
		"169.254.169.254:80": "deny metadata ", "metadata.google.internal:80": "deny metadata ", "metadata:80": "deny metadata ", "instance-data:80": "deny metadata ",
		"instance-data.ec2.internal:80": "deny metadata ", "localhost:80": "deny host ", "a.localhost:443": "deny host ", "127.0.0.1:443": "deny host ",
		"224.0.0.1:443": "deny multicast ", "198.18.0.1:443": "deny reserved ", "[fec0::1]:443": "deny private ",
		"smtp.example.com:587": "allow mail", "smtp.example.com:25": "deny port mail", "smtp.example.com:1000": "allow mail",
		"quic.example.com:443/udp": "allow quic", "quic.example.com:443": "deny proto quic", "old.example.com:443": "deny expired gone",
		"once.example.com:443": "allow once", "wide.example.com:53": "deny port wide", "wide.example.com:54": "allow wide",
		"nas.corp.internal:80": "allow lan", "x.corp.internal:80": "deny not_listed ", "ask.example.com:443": "ask ask", "wide.example.com:0": "deny destination ",
	} {
		v := e.Decide(flow(t, in))
		got := string(v.Action) + " "
		if v.Action == Deny {
			got += string(v.Reason) + " "
		}
		if got += v.Rule; got != want {
			t.Errorf("%s: %q, want %q", in, got, want)
		}
		if v.Revision != "r7" || v.Flow.Port != flow(t, in).Port || (v.Action == Deny) != (v.Reason != "") || v.Explain() == "" {
			t.Errorf("%s: %+v", in, v)
		}
	}
	f := flow(t, "once.example.com:443")
	f.Spent = func(rule string) bool { return rule == "once" }
	if v := e.Decide(f); v.Action != Deny || v.Reason != ReasonExpired {
		t.Errorf("a spent rule: %+v", v)
	}
	if v := (*Evaluator)(nil).Decide(f); v.Action != Deny || v.Reason != ReasonPolicy {
		t.Errorf("no policy: %+v", v)
	}
	if v := e.Decide(Flow{Port: 80, Proto: TCP}); v.Action != Deny || v.Reason != ReasonDestination {
		t.Errorf("no destination: %+v", v)
	}
	if !e.Decide(flow(t, "github.com:443")).Named() || e.Decide(flow(t, "none.example.com:443")).Named() {
		t.Error("Named")
	}
	for host, want := range map[string]bool{"registry.example.com": true, "api.github.com": true, "github.com": false, "db.acme.example": false, "gist.github.com": false} {
		if e.NeedsInspection(Host{name: host}, 443, now) != want {
			t.Errorf("inspection of %s: %v", host, !want)
		}
	}
	for name, want := range map[string]bool{
		"github.com": true, "gist.github.com": false, "x.forbidden.registry.example.com": false, "quic.example.com": true, "old.example.com": false,
		"unknown.example.com": false, "metadata.google.internal": false, "nas.corp.internal": true, "ask.example.com": true, "localhost": false,
	} {
		if e.Resolves(Host{name: name}, "A", now) != want {
			t.Errorf("%s is resolved: %v", name, !want)
		}
	}
	for recordType, want := range map[string]bool{"A": true, "TXT": true, "MX": true, "SRV": false} {
		if e.Resolves(Host{name: "smtp.example.com"}, recordType, now) != want {
			t.Errorf("%s: %v", recordType, !want)
		}
	}
	if !e.CanInspect() || evaluator(t, "").CanInspect() {
		t.Error("CanInspect")
	}
}

func TestDefaultPublic(t *testing.T) {
	e := evaluator(t, "default: allow-public\nrules: [{id: no, to: [evil.example.com], action: deny}, {id: some, to: [half.example.com], ports: [22], action: deny}]")
	for in, want := range map[string]Reason{
		"example.com:443": "", "example.com:22": "", "1.1.1.1:9000": "", "example.com:25": ReasonPort, "1.1.1.1:53": ReasonPort, "1.1.1.1:443/udp": ReasonProto,
		"10.1.2.3:443": ReasonNotListed /* opened is not public */, "10.2.2.3:443": ReasonPrivate, "x.internal:443": ReasonNotListed, "printer:80": ReasonNotListed,
		"evil.example.com:8080": ReasonRule, "evil.example.com:53/udp": ReasonRule, "half.example.com:22": ReasonRule, "half.example.com:443": "",
	} {
		if v := e.Decide(flow(t, in)); v.Reason != want {
			t.Errorf("%s: %s, want %s", in, v.Reason, want)
		}
	}
	for name, want := range map[string]bool{"example.com": true, "evil.example.com": false, "half.example.com": true, "printer": false} {
		if e.Resolves(Host{name: name}, "A", now) != want {
			t.Errorf("%s is resolved: %v", name, !want)
		}
	}
}

func TestVet(t *testing.T) {
	e := evaluator(t, `
default: allow-public
rules:
  - {id: resolver, to: [8.8.8.8], ports: [any], proto: any}
  - {id: no-google, to: [8.8.0.0/16], action: deny}
  - {id: checked, to: [7.7.7.0/24], ports: [443], http: {methods: [GET]}}
  - {id: db, to: [db.example.com]}
  - {id: later, to: [6.6.6.6], action: deny}
`, Rule{ID: "floor", To: []Target{rangeTarget(netip.MustParsePrefix("5.5.5.0/24"))}, Action: Deny})
	for _, c := range []struct {
		flow, addrs, left string
		reason            Reason
		rule              string
	}{
		{"x.example.com:443", "1.1.1.1 10.2.0.1 ::ffff:127.0.0.1 2606::1 64:ff9b::a9fe:a9fe", "1.1.1.1 2606::1", "", ""},
		{"x.example.com:443", "10.2.0.1 127.0.0.1 9.9.9.10 169.254.169.254", "", ReasonDNSPrivate, ""},
		{"x.example.com:443", "", "", ReasonDNSPrivate, ""},
		{"x.example.com:443", "8.8.4.4 8.8.8.8", "8.8.8.8", "", ""},
		{"x.example.com:443", "8.8.4.4", "", ReasonRule, "no-google"},
		{"x.example.com:443", "7.7.7.7", "", ReasonRule, "checked"},
		{"x.example.com:80", "7.7.7.7", "7.7.7.7", "", ""},
		{"x.example.com:443", "5.5.5.5", "", ReasonRule, "floor"},
		{"x.example.com:443", "10.1.2.3", "", ReasonDNSPrivate, ""}, // opened, but nobody named the name
		{"db.example.com:443", "10.1.2.3", "10.1.2.3", "", "db"},
		{"db.example.com:443", "6.6.6.6", "6.6.6.6", "", "db"}, // the name's rule comes first
		{"x.example.com:443", "6.6.6.6", "", ReasonRule, "later"},
	} {
		var addrs []netip.Addr
		for _, a := range strings.Fields(c.addrs) {
			addrs = append(addrs, netip.MustParseAddr(a))
		}
		left, v := e.Vet(e.Decide(flow(t, c.flow)), addrs)
		got := strings.Trim(fmt.Sprint(left), "[]")
		if got != c.left || v.Reason != c.reason || v.Rule != c.rule || (v.Action == Allow) != (c.left != "") {
			t.Errorf("%s at %s: %s, %s of %q", c.flow, c.addrs, got, v.Reason, v.Rule)
		}
	}
}

func TestNextExpiry(t *testing.T) {
	e := evaluator(t, `rules:
  - {to: [a.example.com], expires_at: 2026-11-29T11:00:00Z}
  - {to: [b.example.com], expires_at: 2026-11-29T14:00:00Z}
  - {to: [c.example.com], expires_at: 2026-11-29T13:00:00Z}
  - {to: [d.example.com]}`)
	at := e.NextExpiry(now)
	if !at.Equal(now.Add(time.Hour)) || !e.NextExpiry(now.Add(2*time.Hour)).IsZero() {
		t.Errorf("next at %v", at)
	}
	f := flow(t, "c.example.com:443")
	if f.Time = at.Add(-1); e.Decide(f).Action != Allow {
		t.Error("ended before its time")
	}
	if f.Time = at; e.Decide(f).Action != Deny {
		t.Error("did not end at its time")
	}
}

// TestNAT64: on a network that reaches IPv4 through a prefix, ranges mean the address in it.
func TestNAT64(t *testing.T) {
	table, err := address.NewTable(address.Config{NAT64: []netip.Prefix{netip.MustParsePrefix("64:ff9b::/96")}})
	if err != nil {
		t.Fatal(err)
	}
	p, err := DecodeYAML("p", []byte("version: 1\ndefault: allow-public\nrules: [{id: no, to: [8.8.8.0/24], action: deny}]"))
	if err != nil {
		t.Fatal(err)
	}
	e, err := NewEvaluator(p, nil, table)
	if err != nil {
		t.Fatal(err)
	}
	for in, want := range map[string]Reason{"[64:ff9b::808:808]:443": ReasonRule, "[64:ff9b::909:909]:443": "", "[64:ff9b::a00:1]:443": ReasonPrivate} {
		f := flow(t, in)
		if v := e.Decide(f); v.Reason != want {
			t.Errorf("%s: %s", in, v.Explain())
		}
		left, _ := e.Vet(e.Decide(flow(t, "a.example.com:443")), []netip.Addr{f.Host.Addr()})
		if (left != nil) != (want == "") {
			t.Errorf("%s at a name: %v", in, left)
		}
	}
}

func TestCheck(t *testing.T) {
	name := []Target{{kind: exactName, name: "a.b"}}
	open := []Match{{}}
	for _, r := range []Rule{
		{}, {To: name, Action: Deny, HTTP: &HTTP{Allow: open}}, {To: name, Action: Deny, Attach: []string{"x"}}, {To: name, HTTP: &HTTP{}},
		{To: name, HTTP: &HTTP{Deny: open}}, {To: name, HTTP: &HTTP{Allow: open}, TLS: TLSPassthrough}, {To: name, HTTP: &HTTP{Allow: open}, Opaque: true},
		{To: name, Attach: []string{"x"}, Proto: UDP}, {To: name, Audit: AuditBody, Proto: AnyProto}, {To: name, Opaque: true, TLS: TLSRequire},
	} {
		if _, err := NewEvaluator(&Policy{Rules: []Rule{r}}, nil, testTable(t)); berm.KindOf(err) != berm.Invalid {
			t.Errorf("%+v: %v", r, err)
		}
	}
	if _, err := NewEvaluator(&Policy{}, []Rule{{ID: "f", To: name}}, testTable(t)); berm.KindOf(err) != berm.Invalid {
		t.Errorf("a floor that allows: %v", err)
	}
}

// slowDecide decides by the documents' text: it knows rules as they are written.
func slowDecide(p *Policy, f Flow) string {
	if f.Host.name == "" {
		if slowDenied(f.Host.addr) {
			return "deny"
		}
	} else if f.Host.name == "localhost" || strings.HasPrefix(f.Host.name, "metadata") {
		return "deny"
	}
	isGuarded := slices.Contains([]uint16{25, 53, 465, 587, 853}, f.Port)
	for i := range p.Rules {
		r := &p.Rules[i]
		hit := false
		for _, t := range r.To {
			s := t.String()
			isRange := s[0] >= '0' && s[0] <= '9'
			switch {
			case f.Host.name != "" && !isRange:
				hit = hit || slowMatch(s, f.Host.name)
			case f.Host.name == "" && isRange:
				hit = hit || slowContains(s, f.Host.addr)
			case f.Host.name == "" && s == "public":
				hit = hit || !slowContains("10.0.0.0/8", f.Host.addr)
			}
		}
		deny := r.Action == Deny
		protoOK := r.Proto == f.Proto || r.Proto == AnyProto || r.Proto == "" && (deny || f.Proto == TCP)
		portOK := len(r.Ports) == 0 && (deny || f.Port == 80 || f.Port == 443)
		for _, q := range r.Ports {
			if f.Port >= q.From && f.Port <= q.To && (deny || !isGuarded || q.From == q.To) {
				portOK = true
			}
		}
		if hit && protoOK && portOK && (r.Expires.IsZero() || r.Expires.After(f.Time)) {
			if r.Action == "" {
				return "allow " + r.ID
			}
			return string(r.Action) + " " + r.ID
		}
	}
	public := f.Host.name != "" && slowMatch("public", f.Host.name) || f.Host.name == "" && !slowContains("10.0.0.0/8", f.Host.addr)
	if p.Default == AllowPublic && public && f.Proto == TCP && !isGuarded {
		return "allow "
	}
	return "deny"
}

// slowContains is a range check by numbers.
func slowContains(s string, a netip.Addr) bool {
	network, size, ok := strings.Cut(s, "/")
	base := netip.MustParseAddr(network)
	if base.Is4() != a.Is4() {
		return false
	}
	if !ok {
		return base == a
	}
	n, _ := strconv.Atoi(size)
	// Only ranges of up to 32 bits are made by the generator.
	x, y := base.As16(), a.As16()
	at := 0
	if a.Is4() {
		at = 12
	}
	return (binary.BigEndian.Uint32(x[at:])^binary.BigEndian.Uint32(y[at:]))>>(32-n) == 0
}

// slowDenied knows of those addresses that the generator makes which no rule opens.
func slowDenied(a netip.Addr) bool {
	for _, s := range []string{"127.0.0.0/8", "169.254.0.0/16", "9.9.9.10"} {
		if slowContains(s, a) {
			return true
		}
	}
	return slowContains("10.0.0.0/8", a) && !slowContains("10.1.0.0/16", a)
}

func randomFlow(r *rand.Rand) Flow {
	f := Flow{Port: pick(r, uint16(80), 443, 443, 443, 22, 25, 53, 8080), Proto: pick(r, TCP, TCP, TCP, UDP), Time: now}
	if r.IntN(3) > 0 {
		f.Host.name = pick(r, randomName(r), randomName(r), "pypi.org", "api.github.com", "localhost", "metadata.google.internal")
	} else {
		f.Host.addr = netip.MustParseAddr(pick(r, "9.9.9.9", "9.9.9.10", "9.1.1.1", "10.1.2.3", "10.2.2.3", "2600::1", "2601::1", "169.254.169.254", "127.0.0.1", "8.8.8.8"))
	}
	return f
}

func randomPolicy(r *rand.Rand) *Policy {
	p := &Policy{Default: pick(r, DenyAll, AllowPublic, "")}
	for i := range r.IntN(8) {
		rule := Rule{ID: "r" + strconv.Itoa(i), Action: pick(r, Allow, Deny, Ask, ""), Proto: pick(r, "", "", TCP, UDP, AnyProto), TLS: pick(r, "", TLSAuto, TLSRequire)}
		for range 1 + r.IntN(3) {
			t, err := ParseTarget(randomTarget(r))
			if err != nil {
				panic(err)
			}
			rule.To = append(rule.To, t)
		}
		for range r.IntN(3) {
			rule.Ports = append(rule.Ports, pick(r, AnyPort, PortRange{443, 443}, PortRange{22, 22}, PortRange{25, 25}, PortRange{20, 90}, PortRange{8000, 9000}))
		}
		if r.IntN(4) == 0 {
			rule.Expires = now.Add(time.Duration(r.IntN(3)-1) * time.Hour)
		}
		if rule.action() != Deny && rule.Proto == "" && r.IntN(3) == 0 {
			rule.HTTP = &HTTP{Allow: []Match{{Methods: []string{"GET"}, Paths: []Glob{{"/a b/**"}}, MaxBody: 1 << r.IntN(40)}}}
			if r.IntN(2) == 0 {
				rule.HTTP.Allow = append(rule.HTTP.Allow, Match{Require: []string{"x-a"}, Query: []string{"a: b"}})
				rule.HTTP.Deny = []Match{{Upgrade: []string{"websocket"}, ContentTypes: []string{"text/html"}, Forbid: []string{"on"}}}
			}
			rule.Attach = pick(r, nil, []string{"c1"}, []string{"c1", "null"})
		}
		if rule.action() != Deny {
			rule.Limits = pick(r, Limits{}, Limits{Up: Rate{50 << 20, time.Hour}, Flows: 7}, Limits{Down: Rate{Bytes: 12345}, Total: Rate{1 << 30, time.Second}, NewFlows: 9, Duration: 90 * time.Second})
		}
		if rule.inspects() {
			rule.Limits.Requests = 2
		}
		rule.Reason = pick(r, "", "plain", `"quotes" and # signs: ü`, "- no", "~")
		rule.Once, rule.Audit = r.IntN(9) == 0, pick(r, "", AuditMeta)
		p.Rules = append(p.Rules, rule)
	}
	return p
}

func TestFirstMatchWins(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	table, counts := testTable(t), map[string]int{}
	for range 800 {
		p := randomPolicy(r)
		e, err := NewEvaluator(p, nil, table)
		if err != nil {
			t.Fatal(err)
		}
		shadowed := map[string]bool{}
		for _, w := range p.Warnings(table) {
			if strings.HasPrefix(w.Text, "never reached") {
				shadowed[w.Rule] = true
			}
		}
		for range 20 {
			f := randomFlow(r)
			v := e.Decide(f)
			got := string(v.Action) + " " + v.Rule
			if v.Action == Deny && v.Reason != ReasonRule {
				got = "deny"
			}
			if want := slowDecide(p, f); got != want {
				t.Fatalf("%+v\nis %q, want %q by\n%s", f, got, want, p.YAML())
			}
			if v.Action != Deny && f.Host.name == "" && slowDenied(f.Host.addr) {
				t.Fatalf("%+v is allowed by\n%s", f, p.YAML())
			}
			if v.Match != nil && shadowed[v.Rule] {
				t.Fatalf("%+v reaches rule %s, which is never reached, of\n%s", f, v.Rule, p.YAML())
			}
			if v.Action != Deny && f.Host.name != "" && !e.Resolves(Host{name: f.Host.name}, "A", f.Time) {
				t.Fatalf("%+v is allowed by %s, but its name is not resolved\n%s", f, v.Rule, p.YAML())
			}
			counts[string(v.Action)]++
		}
	}
	for _, action := range []string{"allow", "deny", "ask"} {
		if counts[action] < 100 {
			t.Errorf("decisions: %v", counts)
		}
	}
}

// TestHardDenials: whatever the policy, what must never be reached is not, by address and
// by name.
func TestHardDenials(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	table := testTable(t)
	never := []string{
		"169.254.169.254", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::", "127.0.0.1", "::1", "0.0.0.0", "::", "10.2.0.1", "192.168.0.1", "9.9.9.10",
		"::ffff:9.9.9.10", "100.100.100.200", "fd00:ec2::254", "224.0.0.1", "255.255.255.255", "198.18.0.1",
	}
	for range 1000 {
		p := randomPolicy(r)
		var wide Rule
		for _, s := range []string{"public", "0.0.0.0/0", "::/0", "169.254.169.254", "9.9.9.10", ".example.com"} {
			target, err := ParseTarget(s)
			if err != nil {
				t.Fatal(err)
			}
			wide.To = append(wide.To, target)
		}
		wide.ID, wide.Ports, wide.Proto = "wide", []PortRange{AnyPort, {53, 53}, {25, 25}}, AnyProto
		p.Rules = slices.Insert(p.Rules, r.IntN(len(p.Rules)+1), wide)
		e, err := NewEvaluator(p, nil, table)
		if err != nil {
			t.Fatal(err)
		}
		addr := netip.MustParseAddr(never[r.IntN(len(never))])
		f := Flow{Host: Host{addr: addr}, Port: pick(r, uint16(80), 443, 53), Proto: pick(r, TCP, UDP), Time: now}
		if v := e.Decide(f); v.Action != Deny || v.Match != nil {
			t.Fatalf("%s is allowed: %+v", addr, v)
		}
		f.Host = Host{name: randomName(r)}
		if left, v := e.Vet(e.Decide(f), []netip.Addr{addr}); left != nil || v.Action == Allow {
			t.Fatalf("%s at %s is allowed: %+v", f.Host, addr, v)
		}
	}
}

func BenchmarkDecide(b *testing.B) {
	p := &Policy{}
	for i := range 1000 {
		t, err := ParseTarget(fmt.Sprintf(pickAt(i, "h%d.example.com", "*.w%d.example.com", "api-*.g%d.example.com"), i))
		if err != nil {
			b.Fatal(err)
		}
		p.Rules = append(p.Rules, Rule{ID: strconv.Itoa(i), To: []Target{t}})
	}
	e, err := NewEvaluator(p, nil, testTable(b))
	if err != nil {
		b.Fatal(err)
	}
	for _, s := range []string{"nothing.example.com:443", "a.w997.example.com:443", "1.1.1.1:443"} {
		f := flow(b, s)
		b.Run(s, func(b *testing.B) {
			for b.Loop() {
				e.Decide(f)
			}
		})
	}
}

func pickAt(i int, list ...string) string { return list[i%len(list)] }

func TestNamesExactly(t *testing.T) {
	e := evaluator(t, `default: allow-public
rules:
  - {to: [no.example.com], action: deny}
  - {to: ["*.example.com", one.example.org]}
  - {to: [api.example.com], ports: [443]}
  - {to: [ask.example.net], action: ask}
  - {to: [old.example.net], expires_at: 2020-01-01T00:00:00Z}
  - {to: [one.example.net]}
`)
	for name, want := range map[string]bool{
		"one.example.org": true, "one.example.net": true,
		"no.example.com": false, "x.example.com": false, "api.example.com": false, // of the wildcard, which comes first
		"ask.example.net": false, "old.example.net": false, "public.example": false,
	} {
		if got := e.Names(Host{name: name}, now); got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
