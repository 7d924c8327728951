package policy

import (
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
)

func TestAnswer(t *testing.T) {
	e := evaluator(t, `
rules:
  - {id: api, to: [api.example.com], http: {methods: [GET], paths: ["/repos/**"]}}
  - {id: plain, to: [plain.example.com], tls: forbid}
  - {id: wss, to: [ws.example.com], http: {upgrade: [websocket]}}
  - {id: six, to: ["2606:4700::/32"], ports: [any]}
  - {id: rest, to: [public], action: ask}
`)
	for _, c := range []struct {
		to, method, rule string
		action           Action
		reason           Reason
	}{
		{"https://api.example.com/repos/a?x=1", "", "api", Allow, ""},
		{"https://api.example.com:443/repos/a", "GET", "api", Allow, ""},
		{"HTTPS://API.example.com/repos/%2e%2e/users", "", "api", Deny, ReasonPath},
		{"https://api.example.com/repos/a", "DELETE", "api", Deny, ReasonMethod},
		{"http://api.example.com/users", "", "api", Deny, ReasonPath},
		{"api.example.com", "", "api", Allow, ""},
		{"api.example.com:22", "", "api", Deny, ReasonPort},
		{"https://plain.example.com", "", "plain", Deny, ReasonTLS},
		{"http://plain.example.com", "", "plain", Allow, ""},
		{"wss://ws.example.com/x", "", "wss", Allow, ""},
		{"ws://api.example.com/repos/a", "", "api", Deny, ReasonUpgrade},
		{"https://[2606:4700::1]:8443/x", "", "six", Allow, ""},
		{"[2606:4700::1]:22", "", "six", Allow, ""},
		{"2606:4700::1", "", "six", Allow, ""},
		{"https://other.example.com/", "POST", "rest", Ask, ""},
		{"other.example.com:443/udp", "", "rest", Deny, ReasonProto},
		{"http://169.254.169.254/latest", "", "", Deny, ReasonMetadata},
	} {
		q, err := ParseQuestion(c.to, c.method, time.Now())
		if err != nil {
			t.Errorf("%s: %v", c.to, err)
			continue
		}
		v := e.Answer(q)
		if v.Action != c.action || v.Reason != c.reason || v.Rule != c.rule {
			t.Errorf("%s %s: %s %s by %q: %s", c.method, c.to, v.Action, v.Reason, v.Rule, v.Explain())
		}
		if a := v.Answer(); a.Action != v.Action || a.Explanation == "" {
			t.Errorf("%+v", a)
		}
	}
	for _, wrong := range []string{"", "a b", "ftp://a.example.com", "https://", "https://u:p@a.example.com/", "https://a.example.com/#x", "a.example.com:0", "a.example.com:99999", "https://a.example.com:x/", "[::1", "0x7f.1", "a.example.com/path"} {
		if q, err := ParseQuestion(wrong, "", time.Now()); berm.KindOf(err) != berm.Invalid {
			t.Errorf("%s: %+v %v", wrong, q, err)
		}
	}
	if _, err := ParseQuestion("a.example.com:22", "GET", time.Now()); berm.KindOf(err) != berm.Invalid {
		t.Errorf("a method without a URL: %v", err)
	}
}

func FuzzParseQuestion(f *testing.F) {
	for _, s := range []string{"https://api.example.com:8443/a/../b?x#y", "http://[::ffff:1.2.3.4]/", "a.example.com:22/udp", "ws://x.y", "//", "http://%00/", "[::1]:80", "a:b:c", "ԁ.example"} {
		f.Add(s, "GET")
	}
	e := evaluator(f, "rules:\n  - {id: api, to: [api.example.com], http: {paths: [/a]}}\n")
	f.Fuzz(func(t *testing.T, text, method string) {
		q, err := ParseQuestion(text, method, time.Time{})
		if err != nil {
			if berm.KindOf(err) != berm.Invalid {
				t.Fatal(err)
			}
			return
		}
		if v := e.Answer(q); v.Action == Allow && v.Flow.Host.name != "api.example.com" {
			t.Fatal(v.Explain())
		}
	})
}

func TestDescribe(t *testing.T) {
	p := decode(t, `version: 1
limits: {up: 1GiB, flows: 10}
rules:
  - {id: api, to: [api.example.com], http: {allow: [{methods: [GET], paths: ["/a/**"]}, {methods: [POST], max_body: 1KiB}], deny: [{paths: [/a/x]}]}}
  - {id: db, to: [db.example.com, "*.db.example.com"], ports: [5432, 6000-6010], app: tcp, expires_at: 2026-01-01T00:00:00Z}
  - {id: no, to: [198.51.100.0/24], action: deny, reason: old}
  - {id: api2, to: [api.example.com]}
`)
	d := p.Describe(testTable(t), time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC))
	var lines []string
	for _, r := range d.Rules {
		lines = append(lines, r.Text)
		lines = append(lines, r.Requests...)
		for _, w := range r.Warnings {
			lines = append(lines, "! "+w)
		}
	}
	lines = append(append(lines, d.Default), d.Also...)
	want := `Allow api.example.com on ports 80 and 443.
allow GET of /a/**
allow POST, with a body of at most 1KiB
deny every method of /a/x
Allow db.example.com and *.db.example.com on ports 5432 and 6000-6010, whatever is spoken, until 2026-01-01T00:00:00Z.
! it has expired
Deny 198.51.100.0/24 on all ports over TCP and UDP. Reason: old
Allow api.example.com on ports 80 and 443.
! never reached: rule api before it has all of its destinations
Everything else is denied.
All flows together: at most 1GiB sent and 10 flows at a time.`
	if got := strings.Join(lines, "\n"); got != want {
		t.Error(got)
	}
	if got := decode(t, "version: 1\n").Describe(testTable(t), time.Now()).Default; got != "Everything is denied." {
		t.Error(got)
	}
}
