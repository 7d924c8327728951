package e2b

import (
	"context"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/control"
	"github.com/berm-sandbox/berm/internal/control/enginetest"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

type carrier struct{ *enginetest.Network }

func (c carrier) Attach(ctx context.Context, id berm.SandboxID, link, door *os.File, p egress.Policy, open []string, events func(egress.Event)) (control.Link, []string, error) {
	l, warnings, err := c.Network.Attach(ctx, id, link, door, p, open, events)
	if err != nil {
		return nil, nil, err
	}
	return l, warnings, nil
}

// broker is a service of credentials in memory as Broker.
type broker struct {
	*enginetest.Network
	enginetest.Vault
}

func (b broker) Open(ctx context.Context, id berm.SandboxID, o control.Brokering, events func(egress.Event)) (control.Link, egress.Brokered, error) {
	l, _, err := b.Attach(ctx, id, o.Door, nil, o.Policy, o.Open, events)
	if err != nil {
		return nil, egress.Brokered{}, err
	}
	got, err := b.Bind(ctx, id, o.Team, l, o.Policy, o.Grants)
	if err == nil && o.Kept == nil {
		got.Keep, err = os.Open(os.DevNull)
	}
	return l, got, err
}

func (b broker) Bind(ctx context.Context, id berm.SandboxID, _ berm.Team, l control.Link, p egress.Policy, g control.Grants) (egress.Brokered, error) {
	_, err := l.Set(ctx, p)
	return egress.Brokered{Authority: "authority of " + string(id)}, err
}

func (b broker) CheckFields(fields control.Fields) ([]string, error) { return b.Secrets(fields), nil }

func (b broker) SetFields(_ context.Context, id berm.SandboxID, fields control.Fields) error {
	b.Keep(id, fields)
	return nil
}

func (b broker) Fields(_ context.Context, id berm.SandboxID) (control.Fields, error) {
	return b.Kept(id), nil
}

func newOnlineWorld(t *testing.T, public bool) (*world, *enginetest.Network) {
	n := &enginetest.Network{}
	return newWorld(t, func(c *control.Config) {
		c.Egress = control.Egress{Service: carrier{n}, Broker: broker{&enginetest.Network{}, enginetest.NewVault()}, Public: public}
	}), n
}

func TestNetworkFields(t *testing.T) {
	w, n := newOnlineWorld(t, true)
	s := w.create(`{"templateID":"base"}`)
	if s.Berm.Network != "public" || s.Berm.DefaultEgress != "public" {
		t.Errorf("%+v", s.Berm)
	}
	s = w.create(`{"templateID":"base","network":{"allowOut":["*.example.com","192.0.2.1"],"denyOut":["0.0.0.0/0"]}}`)
	at := "/sandboxes/" + string(s.SandboxID)
	if d := w.detail(at); s.Berm.Network != "rules" || len(d.Network.AllowOut) != 2 || len(d.Network.DenyOut) != 1 {
		t.Errorf("%+v, %+v", s.Berm, d.Network)
	}
	for body, refusal := range map[string]struct {
		status int
		text   string
	}{
		`{"denyOut":["example.com"]}`:                                                      {400, "invalid denied CIDR example.com"},
		`{"allowOut":["example.com"]}`:                                                     {400, "you must include 'ALL_TRAFFIC' in deny out"},
		`{"allowOut":["a b"],"denyOut":["0.0.0.0/0"]}`:                                     {400, "a b"},
		`{"rules":{"example.com":[{"transform":{"headers":{"A\r\n":"b"}}}]}}`:              {400, "must not contain CR or LF"},
		`{"rules":{"":[{"transform":{"headers":{"A":"b"}}}]}}`:                             {400, "must not be empty"},
		`{"rules":{"example.com":[{"transform":{"headers":{"A":"1"}}},{"transform":{}}]}}`: {400, "example.com"},
		`{"egressProxy":{"address":"192.0.2.1"}}`:                                          {400, "host:port"},
		`{"egressProxy":{"address":"192.0.2.1:0"}}`:                                        {400, "host:port"},
		`{"egressProxy":{"address":"socks5://192.0.2.1:1"}}`:                               {400, "host:port"},
		`{"egressProxy":{"address":"127.1:1080"}}`:                                         {400, "in disguise"},
		`{"egressProxy":{"address":"0x7f000001:1080"}}`:                                    {400, "in disguise"},
		`{"egressProxy":{"address":"2130706433:1080"}}`:                                    {400, "in disguise"},
		`{"egressProxy":{"address":"proxy.1:1080"}}`:                                       {400, "in disguise"},
		`{"egressProxy":{}}`:                                                               {400, "host:port"},
		`{"egressProxy":{"address":"a:1","password":"p"}}`:                                 {400, "a password needs a username"},
		`{"egressProxy":{"address":"a:1","username":"` + strings.Repeat("u", 256) + `"}}`:  {400, "longer than 255"},
		`{"egressProxy":{"address":"a:1","tls":{"enabled":false,"serverName":"b"}}}`:       {400, "tls is not enabled"},
		`{"egressProxy":{"address":"a:1","tls":{"enabled":true,"caCert":"no"}}}`:           {400, "no certificate"},
		`{"dnsServers":["192.0.2.1"]}`:                                                     {501, "network.dnsServers"},
		`{"allowOut":"example.com"}`:                                                       {400, "allowOut"},
	} {
		for method, path := range map[string]string{"PUT": at + "/network", "POST": "/v2/sandboxes"} {
			send := body
			if method == "POST" {
				send = `{"templateID":"base","network":` + body + `}`
			}
			if r := w.want(refusal.status, method, path, send); !strings.Contains(string(r.body), refusal.text) {
				t.Errorf("%s %s: %s", method, send, r.body)
			}
		}
	}
	if n.Link(s.SandboxID).Policy().Revision != "1" {
		t.Error("a refused update changed the policy")
	}
	w.want(204, "PUT", at+"/network", `{"egressProxy":{"address":"proxy.example:1080","username":"u","password":"p4ssw0rd","tls":{"enabled":true}}}`)
	if got := n.Link(s.SandboxID).Policy().Upstream; got.Own != "socks5s://u:p4ssw0rd@proxy.example:1080" || !got.Verify {
		t.Errorf("%+v", got)
	}
	if r := w.want(200, "GET", at, ""); strings.Contains(string(r.body), "p4ssw0rd") || !strings.Contains(string(r.body), `"egressProxy":{"address":"proxy.example:1080","username":"u","tls":{"enabled":true}}`) {
		t.Errorf("%s", r.body)
	}
	w.want(204, "PUT", at+"/network", `{"allow_internet_access":false}`)
	if got := n.Link(s.SandboxID).Policy().Upstream; got.Own != "" {
		t.Errorf("an update without a proxy left %+v", got)
	}
	if d := w.detail(at); d.Berm.Network != "nothing" || d.Network != nil || d.Internet == nil || *d.Internet {
		t.Errorf("%+v", d)
	}
	w.want(204, "PUT", at+"/network", `{}`)
	if d := w.detail(at); d.Berm.Network != "public" {
		t.Errorf("%+v", d.Berm)
	}
	w.want(404, "PUT", "/sandboxes/"+string(berm.NewSandboxID())+"/network", `{}`)

	denying, _ := newOnlineWorld(t, false)
	if s := denying.create(`{"templateID":"base"}`); s.Berm.Network != "nothing" || s.Berm.DefaultEgress != "deny" {
		t.Errorf("%+v", s.Berm)
	}
	// Nothing else passes there, so names alone are enough.
	denying.want(201, "POST", "/v2/sandboxes", `{"templateID":"base","network":{"allowOut":["example.com"]}}`)
}

func TestNetworkPolicy(t *testing.T) {
	w, n := newOnlineWorld(t, true)
	s := w.create(`{"templateID":"base"}`)
	at := "/berm/v1/sandboxes/" + string(s.SandboxID) + "/network"
	first := w.want(200, "GET", at, "")
	if first.header.Get("ETag") != `"1"` || !json.Valid(first.body) {
		t.Errorf("%v %s", first.header, first.body)
	}
	const next = `{"version":1,"rules":[{"id":"web","to":["example.com"]}]}`
	changed := w.want(200, "PUT", at, next, "If-Match", `"1"`)
	if changed.header.Get("ETag") != `"2"` || !strings.Contains(string(changed.body), `"revision":2`) {
		t.Errorf("%v %s", changed.header, changed.body)
	}
	for _, tag := range []string{`"1"`, `"02"`, "2", `W/"2"`, `"-1"`, `"0"`, "x"} {
		w.want(412, "PUT", at, next, "If-Match", tag)
	}
	w.want(200, "PUT", at, next, "If-Match", "*")
	w.want(200, "PUT", at, "version: 1\nrules:\n  - {id: org, to: [example.org]}\n", "Content-Type", "application/yaml")
	got := w.want(200, "GET", at, "", "Accept", "application/yaml")
	if text := string(got.body); got.header.Get("ETag") != `"4"` || !strings.Contains(text, "- {id: org, to: [example.org]") {
		t.Errorf("%v %s", got.header, text)
	}
	if p := n.Link(s.SandboxID).Policy(); p.Revision != "4" || !strings.Contains(string(p.JSON), "example.org") {
		t.Errorf("in force: %s %s", p.Revision, p.JSON)
	}
	if r := w.want(400, "PUT", at, "version: 1\n"); !strings.Contains(string(r.body), "Content-Type: application/yaml") {
		t.Errorf("%s", r.body)
	}
	for _, wrong := range []string{"", "{}", `{"version":2}`, `{"version":1,"rules":[{"to":["*.com"]}]}`, `{"version":1,"other":1}`} {
		w.want(400, "PUT", at, wrong)
	}
	if w.want(200, "GET", at, "").header.Get("ETag") != `"4"` {
		t.Error("a refused policy counts")
	}
	offline := newWorld(t)
	o := offline.create(`{"templateID":"base"}`)
	if o.Berm.DefaultEgress != "deny" {
		t.Errorf("%+v", o.Berm)
	}
	at = "/berm/v1/sandboxes/" + string(o.SandboxID) + "/network"
	offline.want(404, "GET", at, "")
	offline.want(501, "PUT", at, next)
	offline.want(200, "GET", at+"/log", "")
}

func TestNetworkCheck(t *testing.T) {
	w, _ := newOnlineWorld(t, true)
	s := w.create(`{"templateID":"base"}`)
	at := "/berm/v1/sandboxes/" + string(s.SandboxID) + "/network"
	w.want(200, "PUT", at, `{"version":1,"rules":[{"id":"web","to":["example.com"],"http":{"methods":["GET"]}}]}`)
	for query, want := range map[string]string{
		"to=https%3A%2F%2Fexample.com%2Fa":             `"action":"allow","rule":"web","revision":"2"`,
		"to=https%3A%2F%2Fexample.com%2Fa&method=POST": `"reason":"method"`,
		"to=other.example.com%3A22":                    `"remedy":"{to: [other.example.com], ports: [22]}"`,
	} {
		if r := w.want(200, "GET", at+"/check?"+query, ""); !strings.Contains(string(r.body), want) {
			t.Errorf("%s: %s", query, r.body)
		}
	}
	w.want(400, "GET", at+"/check", "")
	w.want(400, "GET", at+"/check?to=a%20b", "")
	w.want(404, "GET", "/berm/v1/sandboxes/"+string(berm.NewSandboxID())+"/network/check?to=example.com", "")
	offline := newWorld(t)
	o := offline.create(`{"templateID":"base"}`)
	offline.want(404, "GET", "/berm/v1/sandboxes/"+string(o.SandboxID)+"/network/check?to=example.com", "")
}

// A server knows what its operator opened.
func TestNetworkExplain(t *testing.T) {
	w := newWorld(t, func(c *control.Config) {
		c.Egress = control.Egress{Service: carrier{&enginetest.Network{}}, Broker: broker{&enginetest.Network{}, enginetest.NewVault()}, Open: []string{"10.9.0.0/16"}}
	})
	s := w.create(`{"templateID":"base","berm":{"policy":{"version":1,"rules":[{"id":"open","to":["10.9.1.0/24"]},{"id":"closed","to":["10.8.0.0/16"]}]}}}`)
	r := w.want(200, "GET", "/berm/v1/sandboxes/"+string(s.SandboxID)+"/network/explain", "")
	text := string(r.body)
	if r.header.Get("ETag") != `"1"` || strings.Contains(text, "10.9.1.0/24 is not the public internet") || !strings.Contains(text, "10.8.0.0/16 is not the public internet") || strings.Contains(text, `"line"`) {
		t.Errorf("%v %s", r.header, text)
	}
	w.want(404, "GET", "/berm/v1/sandboxes/"+string(berm.NewSandboxID())+"/network/explain", "")
}

func TestNetworkLog(t *testing.T) {
	w, n := newOnlineWorld(t, true)
	s := w.create(`{"templateID":"base"}`)
	tell := n.Link(s.SandboxID).Tell
	tell(egress.Event{Time: time.Now(), Kind: "flow", Name: "example.com", Port: 443, Protocol: "tcp", Action: "allow", Up: 1, Down: 2})
	tell(egress.Event{Time: time.Now(), Kind: "dns", Name: "\x1b[2J", Action: "deny", Reason: "not_listed"})
	var log struct{ Events []control.FlowEvent }
	at := "/berm/v1/sandboxes/" + string(s.SandboxID) + "/network/log"
	w.want(200, "GET", at+"?after=1", "").into(t, &log)
	if len(log.Events) != 1 || log.Events[0].Seq != 2 || log.Events[0].Reason != "not_listed" {
		t.Errorf("%+v", log)
	}
	w.want(400, "GET", at+"?after=-1", "")
	w.want(404, "GET", "/berm/v1/sandboxes/"+string(berm.NewSandboxID())+"/network/log", "")
	text := string(w.want(200, "GET", "/metrics", "").body)
	for _, line := range []string{`network_bytes_total{direction="up",sandbox="` + string(s.SandboxID) + `"} 1`, `network_denied_queries_total{sandbox="` + string(s.SandboxID) + `"} 1`} {
		if !strings.Contains(text, line) {
			t.Errorf("no %s", line)
		}
	}
}

// What was meant to close a network, or to open a part of it, is never taken for nothing.
func TestUnknownKeys(t *testing.T) {
	w, n := newOnlineWorld(t, true)
	for body, text := range map[string]string{
		`"network":{"allow_out":["1.1.1.1"]}`:                                          `network.allow_out\" is not a field; known here: allowOut, denyOut`,
		`"network":{"Allowout":["1.1.1.1"]}`:                                           "network.Allowout",
		`"network":{"network":{}}`:                                                     "network.network",
		`"network":{"bogus":1},"network":{}`:                                           "network.bogus",
		`"network":{"allow_internet_access":false}`:                                    "network.allow_internet_access",
		`"network":{"rules":{"example.com":[{"transform":{"header":{}}}]}}`:            "network.rules.example.com.transform.header",
		`"network":{"egressProxy":{"address":"a:1","user":"x"}}`:                       "network.egressProxy.user",
		`"berm":{"network":{}}`:                                                        "berm.network",
		`"berm":{"policies":{}}`:                                                       "known here: level, limits, credentials, policy",
		`"berm":{"limits":{"ram":1}}`:                                                  "berm.limits.ram",
		`"berm":{"credentials":[{"name":"a","secret":"secret:some","hostz":["a.b"]}]}`: "berm.credentials.hostz",
		`"allowInternetAccess":false`:                                                  "did you mean allow_internet_access?",
		`"Network":{}`:                                                                 "did you mean network?",
		`"BERM":{}`:                                                                    "did you mean berm?",
		`"Secure":true`:                                                                "did you mean secure?",
		`"allow_out":["1.1.1.1"]`:                                                      "did you mean network.allowOut?",
		`"denyOut":["0.0.0.0/0"]`:                                                      "did you mean network.denyOut?",
		`"berm":{"policy":{"version":1,"other":1}}`:                                    "other",
		`"berm":{"policy":{"version":1}},"allow_internet_access":true`:                 "give one or the others",
		`"berm":{"policy":{"version":1}},"network":{"denyOut":["0.0.0.0/0"]}`:          "give one or the others",
	} {
		if r := w.want(400, "POST", "/v2/sandboxes", `{"templateID":"base",`+body+`}`); !strings.Contains(string(r.body), text) {
			t.Errorf("%s: %s", body, r.body)
		}
	}
	s := w.create(`{"templateID":"base","berm":{"policy":{"version":1,"rules":[{"id":"web","to":["example.com"]}]}},"some_other_key":{"a":1}}`)
	first := n.Link(s.SandboxID).Policy()
	if s.Berm.Network != "rules" || first.Revision != "1" || !strings.Contains(string(first.JSON), "example.com") {
		t.Errorf("%+v, %s", s.Berm, first.JSON)
	}
	for _, body := range []string{
		`{"network":{"allowOut":["192.0.2.2"]}}`, `{"allow_out":[]}`, `{"allowInternetAccess":false}`, `{"allowPublicTraffic":false}`, `{"version":1}`,
	} {
		if r := w.want(400, "PUT", "/sandboxes/"+string(s.SandboxID)+"/network", body); !strings.Contains(string(r.body), "known here: allowOut, denyOut, dnsServers, egressProxy, rules, allow_internet_access") {
			t.Errorf("%s: %s", body, r.body)
		}
	}
	if n.Link(s.SandboxID).Policy().Revision != "1" {
		t.Error("a refused update changed the policy")
	}
	offline := newWorld(t)
	offline.want(501, "POST", "/v2/sandboxes", `{"templateID":"base","berm":{"policy":{"version":1}}}`)
}
