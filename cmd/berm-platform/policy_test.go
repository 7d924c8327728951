package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const policyFile = `version: 1
rules:
  - {id: api, to: [api.example.com], http: {methods: [GET], paths: [/a]}}
  - {id: api2, to: [api.example.com]}
  - {id: rest, to: [public], ports: [443], action: ask}
`

func TestPolicyCommands(t *testing.T) {
	s := newSetup(t)
	dir := t.TempDir()
	write := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	file := write("policy.yaml", policyFile)
	log := write("log", `{"kind":"flow","name":"db.example.com","port":5432,"protocol":"tcp","action":"deny","reason":"not_listed"}`+"\n")
	logDir := filepath.Dir(write("data/audit/log.jsonl", `{"v":1,"seq":1,"type":"net.flow","data":{"kind":"flow","name":"db.example.com","port":5432,"protocol":"tcp","action":"deny","reason":"not_listed"}}
{"v":1,"seq":2,"type":"net.flow","data":{"kind":"flow","address":"169.254.169.254","port":80,"protocol":"tcp","action":"deny","reason":"metadata"}}
{"v":1,"seq":3,"type":"net.http","data":{"kind":"http","name":"api.example.com","port":443,"protocol":"tcp","action":"deny","reason":"method","method":"POST","path":"/b"}}
`))
	imported := write("srt.json", `{"network":{"allowedDomains":["a.example.com"]}}`)
	write("wrong.yaml", "version: 1\nrules:\n  - {to: [a.example.com], prots: [1]}\n")
	for _, c := range []struct {
		args string
		code int
		text string // in either stream
	}{
		{"policy check --policy " + file + " https://api.example.com/a", 0, "allowed by rule api. Its requests are looked into"},
		{"policy check --policy " + file + " https://api.example.com/a -X POST", 3, "Denied (method)"},
		{"policy check --policy " + file + " --json x.example.com", 4, `"action": "ask"`},
		{"policy check --allow pypi pypi.org:22", 3, "{to: [pypi.org], ports: [22]}"},
		{"policy check --allow 10.0.0.0/8 --open 10.0.0.0/8 10.1.2.3", 0, "allowed"},
		{"policy check --allow 10.0.0.0/8 --allow pypi pypi.org", 0, "warning: rule 10.0.0.0-8: 10.0.0.0/8 is not the public internet"},
		{"policy check " + file + " https://api.example.com/a", 0, "allowed by rule api"},
		{"policy check pypi.org", 2, "which policy is meant"},
		{"policy check --allow pypi i0abcdefghijklmnopqrs pypi.org", 2, "that of a sandbox, or"},
		{"policy check --allow pypi https://u@pypi.org", 2, "a user"},
		{"policy check --policy " + dir + "/none.yaml pypi.org", 1, "there is no file"},
		{"policy check --policy " + dir + "/wrong.yaml pypi.org", 1, "wrong.yaml:3: unknown key"},
		{"policy explain " + file, 0, "warning: never reached: rule api before it"},
		{"policy explain --json --allow github", 0, `"text": "Allow github on ports 80 and 443."`},
		{"policy explain", 2, "one policy"},
		{"policy learn " + log, 0, "- {id: db.example.com, to: [db.example.com], ports: [5432]}"},
		{"policy learn --policy " + file + " --json " + log, 0, `"to": [`},
		{"policy learn " + logDir, 0, "still denied: 169.254.169.254:80 (metadata)"},
		{"policy learn " + logDir, 0, "- {id: db.example.com, to: [db.example.com], ports: [5432]}"},
		{"policy learn --policy " + file + " " + logDir, 0, "{allow: [{methods: [GET], paths: [\"/a\"]}, {methods: [POST], paths: [\"/b\"]}]}"},
		{"policy learn " + filepath.Dir(logDir), 0, "drafted from 2 denials: api.example.com, db.example.com;"},
		{"policy learn " + t.TempDir(), 1, "there is no audit log in"},
		{"policy learn --all " + log, 2, "--all"},
		{"policy learn " + file, 0, "nothing was denied"},
		{"policy import " + imported, 0, "- {id: allowed-1, to: [a.example.com], ports: [any], action: allow}"},
		{"policy import --from deno " + imported, 1, "neither allowNet nor permissions"},
		{"policy schema", 0, `"$schema"`},
	} {
		r := s.run(strings.Fields(c.args)...)
		if inert(t, r.stdout); r.code != c.code || !strings.Contains(r.stdout+r.stderr, c.text) {
			t.Errorf("%s: %+v", c.args, r)
		}
	}
}

// What a run in this directory was denied is in the user's own log.
func TestPolicyLearnFromRuns(t *testing.T) {
	s := newSetup(t)
	state, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	project, err := filepath.EvalSymlinks(state)
	if err != nil {
		t.Fatal(err)
	}
	home := t.TempDir()
	s.env = append(s.env, "XDG_STATE_HOME="+home)
	if r := s.run("policy", "learn"); r.code != 1 || !strings.Contains(r.stderr, "no berm run in this directory") {
		t.Errorf("%+v", r)
	}
	denial := func(sandbox, name string) string {
		return `{"sandbox":"` + sandbox + `","type":"net.flow","data":{"kind":"flow","name":"` + name + `","port":22,"protocol":"tcp","action":"deny","reason":"not_listed"}}` + "\n"
	}
	create := func(sandbox, workspace, policy string) string {
		return `{"sandbox":"` + sandbox + `","type":"sandbox.create","data":{"workspace":"` + workspace + `"` + policy + `}}` + "\n"
	}
	path := filepath.Join(home, "berm", "audit", "log.jsonl")
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	log := create("i1", project, `,"policy":{"entries":["pypi"]}`) + denial("i1", "first.example.com") +
		create("i2", project, `,"policy":{"entries":["npm"]}`) + create("i3", "/elsewhere", `,"policy":{}`) + create("i4", project, "") +
		denial("i2", "second.example.com") + denial("i3", "third.example.com")
	if err := os.WriteFile(path, []byte(log), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, want := s.ok("policy", "learn"), "version: 1\nrules:\n  - {id: npm, to: [npm]}\n  - {id: second.example.com, to: [second.example.com], ports: [22]}\n"; out != want {
		t.Error(out)
	}
	if out := s.ok("policy", "learn", "--all"); !strings.Contains(out, "first.example.com") || !strings.Contains(out, "second.example.com") || strings.Contains(out, "third") {
		t.Error(out)
	}
}
