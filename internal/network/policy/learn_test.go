package policy

import (
	"strings"
	"testing"
)

func TestParseDenial(t *testing.T) {
	for line, want := range map[string]string{
		`{"seq":3,"kind":"flow","name":"Db.example.com","port":5432,"protocol":"tcp","action":"deny","reason":"not_listed"}`:                                                            " db.example.com 5432 tcp not_listed",
		`{"v":1,"sandbox":"i0abcdefghijklmnopqrs","type":"net.flow","data":{"kind":"flow","address":"1.1.1.1","port":53,"protocol":"udp","action":"deny","reason":"proto","rule":"x"}}`: "i0abcdefghijklmnopqrs 1.1.1.1 53 udp proto",
		`{"kind":"dns","name":"pypi.org","action":"deny","reason":"not_listed"}`:                                                                                                        " pypi.org 0 tcp not_listed",
		`{"kind":"http","name":"api.example.com","port":443,"protocol":"tcp","action":"deny","reason":"path","method":"GET","path":"/x"}`:                                               " api.example.com 443 tcp path GET /x",
		`{"kind":"flow","name":"a.example.com","port":443,"action":"allow"}`:                                                                                                            "",
		`{"kind":"credential.deny","name":"a.example.com","port":443,"action":"deny"}`:                                                                                                  "",
		`{"kind":"dns","name":"\u001b[2J","action":"deny"}`:                                                                                                                             "",
		`{"type":"sandbox.create","data":{"workspace":"/"}}`:                                                                                                                            "",
		`x`: "", ``: "", `[]`: "",
	} {
		d, id, ok := ParseDenial([]byte(line))
		got := ""
		if ok {
			v := d.Verdict
			got = string(id) + " " + v.Flow.Host.String() + " " + PortRange{v.Flow.Port, v.Flow.Port}.String() + " " + string(v.Flow.Proto) + " " + string(v.Reason)
			if d.Request != nil {
				got += " " + d.Request.Method + " " + d.Request.Target
			}
		}
		if got != want {
			t.Errorf("%s: %q, want %q", line, got, want)
		}
	}
}

// What is drafted allows what was denied, and takes nothing away that was allowed.
func TestExtend(t *testing.T) {
	p := decode(t, `version: 1
rules:
  - {id: api, to: [api.example.com], http: {methods: [GET], paths: [/a]}}
  - {id: db.example.com, to: [other.example.com]}
`)
	var denials []Denial
	for _, line := range []string{
		`{"kind":"http","name":"api.example.com","port":443,"action":"deny","rule":"api","reason":"method","method":"POST","path":"/a"}`,
		`{"kind":"flow","name":"api.example.com","port":443,"action":"deny","rule":"api","reason":"method"}`,
		`{"kind":"flow","name":"db.example.com","port":5432,"protocol":"tcp","action":"deny","reason":"not_listed"}`,
		`{"kind":"dns","name":"pypi.org","action":"deny","reason":"not_listed"}`,
		`{"kind":"flow","address":"169.254.169.254","port":80,"protocol":"tcp","action":"deny","reason":"metadata"}`,
	} {
		d, _, ok := ParseDenial([]byte(line))
		if !ok {
			t.Fatal(line)
		}
		denials = append(denials, d)
	}
	d, err := p.Extend(denials)
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(d.Changed, " "); got != "api db.example.com-2 pypi" || d.Learned != 3 {
		t.Error(got, d.Learned)
	}
	if len(d.Left) != 1 || d.Left[0] != (Left{"169.254.169.254:80", ReasonMetadata}) {
		t.Error(d.Left)
	}
	want := `version: 1
rules:
  - {id: api, to: [api.example.com], http: {allow: [{methods: [GET], paths: ["/a"]}, {methods: [POST], paths: ["/a"]}]}}
  - {id: db.example.com, to: [other.example.com]}
  - {id: db.example.com-2, to: [db.example.com], ports: [5432]}
  - {id: pypi, to: [pypi]}
`
	if got := string(d.Policy.YAML()); got != want {
		t.Error(got)
	}
	if len(p.Rules) != 2 || len(p.Rules[0].HTTP.Allow) != 1 {
		t.Error("the policy that was extended has changed")
	}
}

// A log can be of other policies than the one that is extended: each denial that was learned is
// allowed by what was drafted, which stands where it is reached.
func TestExtendIsReached(t *testing.T) {
	p := decode(t, `version: 1
rules:
  - {id: api, to: [api.example.com], ports: [443], http: {allow: [{methods: [GET], paths: [/a]}]}}
  - {id: no, to: [bad.example.com], action: deny}
  - {id: rest, to: [public], ports: [443], action: ask}
`)
	var denials []Denial
	for _, line := range []string{
		`{"kind":"flow","name":"api.example.com","port":443,"protocol":"tcp","action":"deny","reason":"not_listed"}`,
		`{"kind":"http","name":"api.example.com","port":443,"action":"deny","rule":"gone","reason":"method","method":"POST","path":"/b"}`,
		`{"kind":"flow","name":"api.example.com","port":8443,"protocol":"tcp","action":"deny","reason":"port","rule":"api"}`,
		`{"kind":"http","name":"other.example.com","port":443,"action":"deny","rule":"gone","reason":"path","method":"GET","path":"/c"}`,
		`{"kind":"flow","name":"bad.example.com","port":443,"protocol":"tcp","action":"deny","reason":"not_listed"}`,
	} {
		d, _, ok := ParseDenial([]byte(line))
		if !ok {
			t.Fatal(line)
		}
		denials = append(denials, d)
	}
	draft, err := p.Extend(denials)
	if err != nil {
		t.Fatal(err)
	}
	p = decode(t, string(draft.Policy.YAML()))
	e, err := NewEvaluator(p, nil, testTable(t))
	if err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]Action{
		"api.example.com:443": Allow, "POST https://api.example.com/b": Allow, "api.example.com:8443": Allow, "GET https://other.example.com/c": Allow,
		"GET https://api.example.com/a": Allow, "bad.example.com": Deny, "POST https://api.example.com/a": Deny,
	} {
		method, to, isRequest := strings.Cut(text, " ")
		if !isRequest {
			method, to = "", text
		}
		q, err := ParseQuestion(to, method, now)
		if err != nil {
			t.Fatal(err)
		}
		if v := e.Answer(q); v.Action != want {
			t.Errorf("%s: %s\n%s", text, v.Explain(), draft.Policy.YAML())
		}
	}
	for _, w := range p.Warnings(testTable(t)) {
		t.Error(w)
	}
	if len(draft.Left) != 1 || draft.Left[0] != (Left{"bad.example.com:443", ReasonRule}) || draft.Learned != 4 {
		t.Error(draft.Left, draft.Learned)
	}
}

func FuzzParseDenial(f *testing.F) {
	f.Add(`{"kind":"http","name":"api.example.com","port":443,"action":"deny","rule":"api","reason":"path","method":"GET","path":"/x/../%2e"}`)
	f.Add(`{"sandbox":"x","data":{"kind":"flow","address":"1.1.1.1","port":53,"protocol":"udp","action":"deny","reason":"proto"}}`)
	f.Add(`{"kind":"dns","name":"\u001b[2J","action":"deny","reason":"not_listed"}`)
	base := decode(f, "version: 1\nrules:\n  - {id: api, to: [api.example.com], http: {methods: [GET], paths: [/a]}}\n")
	f.Fuzz(func(t *testing.T, line string) {
		d, _, ok := ParseDenial([]byte(line))
		if !ok {
			return
		}
		draft, err := base.Extend([]Denial{d})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := DecodeYAML("p", draft.Policy.YAML()); err != nil {
			t.Fatalf("%v\n%s", err, draft.Policy.YAML())
		}
	})
}

func decode(t testing.TB, document string) *Policy {
	t.Helper()
	p, err := DecodeYAML("policy.yaml", []byte(document))
	if err != nil {
		t.Fatal(err)
	}
	return p
}
