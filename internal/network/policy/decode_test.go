package policy

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/berm-sandbox/berm"
)

var exact = cmp.Options{
	cmp.Comparer(func(a, b Target) bool { return a == b }),
	cmp.Comparer(func(a, b Glob) bool { return a == b }),
}

func TestDecode(t *testing.T) {
	p, err := DecodeYAML("policy.yaml", []byte("version: 1\n"+example+"limits: {up: 1GiB/d, down: 5GiB, total: 1MiB/s, flows: 512, new_flows: 9, requests: 20, queries: 30, duration: 1h}\n"))
	if err != nil {
		t.Fatal(err)
	}
	if want := (Limits{Up: Rate{1 << 30, 24 * time.Hour}, Down: Rate{Bytes: 5 << 30}, Total: Rate{1 << 20, time.Second}, Flows: 512, NewFlows: 9, Requests: 20, Queries: 30, Duration: time.Hour}); p.Limits != want {
		t.Errorf("limits: %+v", p.Limits)
	}
	if r := p.Rules[1]; r.ID != "npm" || r.Line != 10 || r.HTTP.Allow[0].MaxBody != 1<<20 || len(r.HTTP.Allow[0].Methods) != 2 || r.Ports[0] != (PortRange{443, 443}) {
		t.Errorf("rule: %+v", r)
	}
	if r := p.Rules[2]; len(r.HTTP.Allow) != 2 || len(r.HTTP.Deny) != 1 || r.Attach[0] != "github-app" {
		t.Errorf("rule: %+v", r)
	}
	if p, err = DecodeYAML("p", []byte("version: 1\nrules: [{to: [a.b]}, {to: [c.d]}]")); err != nil || p.Rules[1].ID != "rule-2" {
		t.Errorf("ids: %+v %v", p, err)
	}
}

func TestDecodeErrors(t *testing.T) {
	deep := strings.Repeat("[", 40) + strings.Repeat("]", 40)
	for _, c := range []struct{ document, want string }{
		{"", "p:1: the document is empty"}, {"# nothing\n", "p:1: the document is empty"}, {"version: 2", "p:1: want version: 1"}, {"version: '1'", "p:1: want version: 1"}, {"default: deny", "p:1: the version is missing"},
		{"[]", "p:1: the policy must be a mapping"}, {"x", "p:1: the policy must be a mapping"}, {"\xef\xbb\xbfversion: 1", "p:1: a byte order mark"},
		{"version: 1\n---\nversion: 1", "p:2: a second document"}, {"version: 1\nversion: 1", `p:2: "version" stands here a second time`},
		{"version: 1\nrule: []", `p:2: unknown key "rule" in the policy`}, {"version: 1\n\t- x", "p:2: "}, {"version: 1\nrules: &a [*a]", "p:2: "},
		{"version: 1\nrules: &a []", "p:2: anchors and aliases"}, {"version: 1\ndefault: !!str deny", "p:2: tags are not supported"},
		{"version: 1\nrules:\n- {to: [a.b]}\n- {to: [a.b], port: [1]}", `p:4: unknown key "port" in a rule`},
		{"version: 1\nrules:\n- to: a.b", "p:3: this must be a list: [a.b]"}, {"version: 1\nrules:\n- to:\n  - a.b\n  - '*.com'", `p:5: "*.com" is every name`},
		{"version: 1\nrules:\n- to: [a.b]\n  ports: [0]", `p:4: "0" is not a port`}, {"version: 1\nrules: [{to: [a.b], ports: [+1]}]", "is not a port"}, {"version: 1\nrules: [{to: [a.b], ports: [9-1]}]", "is not a port"},
		{"version: 1\nrules: [{to: [a.b], ports: [65536]}]", "is not a port"}, {"version: 1\nrules: [{to: []}]", "p:2: rule rule-1 names no destination"}, {"version: 1\nrules: [{id: x}]", "rule x names no destination"},
		{"version: 1\nrules: [{id: x, to: [a.b]}, {id: x, to: [a.b]}]", "p:2: a second rule x"}, {"version: 1\nrules: [{id: 'a b', to: [a.b]}]", "is not an id"},
		{"version: 1\nrules: [{to: [a.b], action: block}]", "it must be one of allow, deny, ask"}, {"version: 1\nrules: [{to: [a.b], once: yes}]", "p:2: this must be true or false"},
		{"version: 1\nrules: [{to: [a.b], http: {methods: [get]}}]", "write it in capitals"}, {"version: 1\nrules: [{to: [a.b], http: {paths: [a]}}]", "must begin with a slash"},
		{"version: 1\nrules: [{to: [a.b], http: {allow: [{}], methods: [GET]}}]", "conditions beside allow and deny"}, {"version: 1\nrules: [{to: [a.b], http: {deny: [{}]}}]", "allows no request"},
		{"version: 1\nrules: [{to: [a.b], http: {allow: [{}], deny: [{max_body: 1KiB}]}}]", "max_body belongs"}, {"version: 1\nrules: [{to: [a.b], http: {max_body: 1MB}}]", "is not an amount"},
		{"version: 1\nrules: [{to: [a.b], http: {max_body: 9999999TiB}}]", "is not an amount"}, {"version: 1\nlimits: {up: 1MiB/y}", "is not a period"}, {"version: 1\nlimits: {flows: 0}", "is not a number"},
		{"version: 1\nlimits: {duration: -1s}", "is not a time"}, {"version: 1\nrules: [{to: [a.b], expires_at: tomorrow}]", "is not a time"}, {"version: 1\ndns: {mode: fake}", "it must be one of synthetic, real"},
		{"version: 1\nrules: [{to: [a.b], reason: \"a\\nb\"}]", "one line"}, {"version: 1\nrules: [{to: [a.b], reason: \"\\e[2J\"}]", "one line"}, {"version: 1\ndefault:", "a value is missing"},
		{"version: 1\nrules: " + deep, "more than 32 levels"}, {"version: 1\nattach: [{to: [public], credential: x}]", "attach wants"}, {"version: 1\nattach: [{to: [a.b]}]", "attach wants"},
		{"version: 1\n? [a]\n: b", "unknown key"}, {"version: 1\n<<: {default: deny}", `unknown key "<<"`}, {"version: 1\nrules: [{to: [" + strings.Repeat("a.b,", 1025) + "]}]", "more than 1024 entries"},
		{"version: 1\nrules: [" + strings.Repeat("{},", 4097) + "]", "more than 4096 rules"}, {strings.Repeat("#", maxDocument+1), "larger than 256 KiB"}, {"version: 1\nrules: [{to: ['" + strings.Repeat("a", 5000) + "']}]", "longer than"},
	} {
		_, err := DecodeYAML("p", []byte(c.document))
		if berm.KindOf(err) != berm.Invalid || err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%.60q: %v, want %q", c.document, err, c.want)
		}
	}
	for _, c := range []struct{ document, want string }{
		{"", "p:1: the document ends too early"}, {"{", "p:1: "}, {"{\n\"version\": 1,\n\"version\": 1}", `p:3: "version" stands here a second time`}, {"{\"version\": 1}\n{}", "p:2: something after"},
		{"{\"version\": 1,\n\"rules\": [\n{\"to\": [\"a.b\"],\n\"x\": 1}]}", `p:4: unknown key "x"`}, {"{\"version\": 1, \"rules\": [{\"to\": null}]}", "must be a list"}, {"{\"version\": NaN}", "p:1: "},
		{"\xef\xbb\xbf{}", "p:1: "}, {"{\"version\": \"1\"}", "want version: 1"}, {"{\"version\": 1, \"rules\": " + deep + "}", "more than 32 levels"}, {"[1}", "p:1: "}, {"{\"version\" 1}", "p:1: "}, {"nope", "p:1: "},
	} {
		_, err := DecodeJSON("p", []byte(c.document))
		if berm.KindOf(err) != berm.Invalid || err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%.60q: %v, want %q", c.document, err, c.want)
		}
	}
	_, err := DecodeYAML("p", []byte("version: 1\nrules: [{to: [nope]}]"))
	if !strings.Contains(berm.HintOf(err), "pypi") {
		t.Errorf("the hint is lost: %q", berm.HintOf(err))
	}
}

// TestRoundTrip: what is written is read as what it was, in both languages.
func TestRoundTrip(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	for range 150 {
		p := randomPolicy(r)
		p.Attach = pick(r, nil, []Attachment{{To: []Target{{kind: namesBelow, name: "a.b"}}, Credential: "c"}})
		p.DNS = pick(r, DNS{}, DNS{Real: true, Types: []string{"A"}})
		p.Limits = pick(r, Limits{}, Limits{Up: Rate{3 << 40, time.Second}})
		fromYAML, err := DecodeYAML("p", p.YAML())
		if err != nil {
			t.Fatalf("%v\n%s", err, p.YAML())
		}
		content, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		fromJSON, err := DecodeJSON("p", content)
		if err != nil {
			t.Fatalf("%v\n%s", err, content)
		}
		for i := range fromYAML.Rules {
			fromYAML.Rules[i].Line, fromJSON.Rules[i].Line = 0, 0
		}
		if p.Rules == nil {
			fromYAML.Rules, fromJSON.Rules = nil, nil
		}
		for _, got := range []*Policy{fromYAML, fromJSON} {
			if diff := cmp.Diff(p, got, exact); diff != "" {
				t.Fatalf("%s\n%s", diff, p.YAML())
			}
		}
	}
}

func FuzzDecodeYAML(f *testing.F) {
	f.Add("version: 1\n" + example)
	f.Add("version: 1\nrules: [{to: [a.b], http: {allow: [{}], deny: [{query: [a]}]}}]\nattach: [{to: [a.b], credential: c}]")
	f.Add("version: 1\nrules: []\nattach: []\ndns: {types: []}")
	f.Add("version: 1\nlimits: {up: 1KiB/h}\ndns: {mode: real}\n---\n")
	r := rand.New(rand.NewPCG(13, 14))
	for range 5 {
		f.Add(string(randomPolicy(r).YAML()))
	}
	table := testTable(f)
	f.Fuzz(func(t *testing.T, s string) {
		p, err := DecodeYAML("p", []byte(s))
		if err != nil {
			return
		}
		checkDecoded(t, p, func(p *Policy) (*Policy, error) { return DecodeYAML("p", p.YAML()) })
		if _, err := NewEvaluator(p, nil, table); err != nil {
			t.Fatal(err)
		}
		p.Warnings(table)
	})
}

func FuzzDecodeJSON(f *testing.F) {
	f.Add(`{"version": 1, "rules": [{"to": ["a.b", "*.c.d"], "ports": [1, "2-3"], "http": {"methods": ["GET"]}}]}`)
	r := rand.New(rand.NewPCG(15, 16))
	for range 5 {
		content, err := json.Marshal(randomPolicy(r))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(content))
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := DecodeJSON("p", []byte(s))
		if err != nil {
			return
		}
		if !json.Valid([]byte(s)) {
			t.Fatalf("%q is no JSON", s)
		}
		checkDecoded(t, p, func(p *Policy) (*Policy, error) {
			content, err := json.Marshal(p)
			if err != nil {
				return nil, err
			}
			return DecodeJSON("p", content)
		})
	})
}

func checkDecoded(t *testing.T, p *Policy, again func(*Policy) (*Policy, error)) {
	t.Helper()
	q, err := again(p)
	if err != nil {
		t.Fatalf("%v\n%s", err, p.YAML())
	}
	if a, b := string(p.YAML()), string(q.YAML()); a != b {
		t.Fatalf("first\n%s\nthen\n%s", a, b)
	}
}

func ExampleRule_String() {
	r, err := ParseEntry("api.example.com:8443")
	fmt.Println(r.String(), err)
	// Output: {id: "api.example.com:8443", to: [api.example.com], ports: [8443]} <nil>
}
