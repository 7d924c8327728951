package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/client"
)

// Which log is read is said, and a data directory is as good as its log.
func TestAuditNamesTheLogItReads(t *testing.T) {
	s := newSetup(t)
	state, data := t.TempDir(), t.TempDir()
	s.env = append(s.env, "XDG_STATE_HOME="+state, "XDG_DATA_HOME="+t.TempDir())
	own := filepath.Join(state, "berm", "audit")
	for _, dir := range []string{own, filepath.Join(data, "audit")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "log.jsonl"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{data, filepath.Join(data, "audit")} {
		if r := s.run("audit", "verify", "--unsigned", dir); !strings.Contains(r.stdout, filepath.Join(data, "audit")+": ") {
			t.Errorf("%s: %+v", dir, r)
		}
	}
	missing := filepath.Join(data, "missing")
	for _, args := range [][]string{{"audit", "verify"}, {"audit", "key"}, {"audit", "export", "--all"}, {"key", "ls"}} {
		if r := s.run(append(args, "--data", missing)...); r.code != 1 || !strings.Contains(r.stderr, "there is no data directory "+missing) {
			t.Errorf("%v: %+v", args, r)
		}
	}
	if _, err := os.Stat("/var/lib/berm/audit"); err == nil && os.Geteuid() == 0 {
		return // which is read first
	}
	if r := s.run("audit", "verify"); !strings.Contains(r.stderr, "reading the log of berm run, "+own) || !strings.Contains(r.stderr, "--data") {
		t.Errorf("%+v", r)
	}
	if r := s.run("audit", "export", "i0nosuch", "-o", filepath.Join(data, "out.zip")); r.code == 0 || !strings.Contains(r.stderr, "--data") {
		t.Errorf("%+v", r)
	}
}

// A hold is set, listed and ended beside a data directory, with a reason and for a sandbox that
// the log knows.
func TestAuditHold(t *testing.T) {
	s, data := newSetup(t), t.TempDir()
	if err := audit.Append(filepath.Join(data, "audit", "log.jsonl"), audit.Record{Type: audit.SandboxCreate, Team: "blue", Sandbox: "i0abcdefghijklmnopqrs"}); err != nil {
		t.Fatal(err)
	}
	hold := func(args ...string) result {
		return s.run(append([]string{"audit", "hold", "--data", data}, args...)...)
	}
	if r := hold("add", "i0abcdefghijklmnopqrs"); r.code != 2 || !strings.Contains(r.stderr, "reason") {
		t.Errorf("without a reason: %+v", r)
	}
	if r := hold("add", "i0zzzzzzzzzzzzzzzzzzz", "--reason", "x"); r.code == 0 || !strings.Contains(r.stderr, "no record") {
		t.Errorf("unknown: %+v", r)
	}
	if r := hold("add", "i0abcdefghijklmnopqrs", "--reason", "case \x1b[2J"); r.code != 0 {
		t.Errorf("add: %+v", r)
	}
	if r := hold("list"); !strings.Contains(r.stdout, "i0abcdefghijklmnopqrs") || !strings.Contains(r.stdout, `case \x1b[2J`) {
		t.Errorf("list: %+v", r)
	}
	if r := hold("remove", "i0abcdefghijklmnopqrs", "--reason", "closed"); r.code != 0 {
		t.Errorf("remove: %+v", r)
	}
	if r := hold("list", "--json"); strings.TrimSpace(r.stdout) != "[]" {
		t.Errorf("list: %+v", r)
	}
}

func TestAuditExportOCSF(t *testing.T) {
	s, l := newSetup(t), logged(t)
	data := t.TempDir()
	if err := os.Rename(l.Dir, filepath.Join(data, "audit")); err != nil {
		t.Fatal(err)
	}
	out, _ := s.output(0, "audit", "export", "--format", "ocsf", "--data", data, string(told))
	all, _ := s.output(0, "audit", "export", "--format", "ocsf", "--data", data, "--all") // output wants it inert
	if n, of := strings.Count(out, "\n"), strings.Count(all, "\n"); n < 30 || of <= n || !strings.Contains(out, `"class_uid":1007,`) {
		t.Errorf("%d events, %d of all", n, of)
	}
	file := filepath.Join(data, "events.jsonl")
	s.output(0, "audit", "export", "--format", "ocsf", "--data", data, "--all", "-o", file)
	if content, err := os.ReadFile(file); err != nil || string(content) != all {
		t.Errorf("%v, %d bytes", err, len(content))
	}
	s.output(2, "audit", "export", "--format", "cef", "--data", data, "--all")
}

// What is of a team is found in a log that is read on its machine; over a server the key says whose.
func TestAuditOfATeam(t *testing.T) {
	s, l := newSetup(t), logged(t)
	l.Team = "blue"
	l.Session("i0bbbbbbbbbbbbbbbbbbb")
	out, _ := s.output(0, "audit", "--log", l.Dir, "--team", "blue", "--json")
	if n := strings.Count(out, "\n"); n < 20 || strings.Count(out, `"sandbox":"i0bbbbbbbbbbbbbbbbbbb"`) != n {
		t.Errorf("%d records: %s", n, out)
	}
	if own, _ := s.output(0, "audit", "--log", l.Dir, "--team", "default", "--json"); len(own) == 0 || strings.Contains(own, "blue") {
		t.Errorf("of the server's own: %s", own)
	}
	for _, args := range [][]string{{"--team", "blue"}, {"--log", l.Dir, "--team", "No"}} {
		s.output(2, append([]string{"audit"}, args...)...)
	}
}

func TestCreateTellsWhereASecretOfAServerIs(t *testing.T) {
	if r := newSetup(t).run("create", "--cred", "x=env:Z"); r.code != 2 || !strings.Contains(r.stderr, "env: is for berm run") {
		t.Errorf("%+v", r)
	}
}

// What a sandbox has written is recorded and printed, and what the log has of one is erased, by a
// server.
func TestChangesAndErase(t *testing.T) {
	s := newSetup(t)
	id := string(s.server.Add(client.Sandbox{}).ID)
	if r := s.run("audit", "changes", id); r.code != 0 || !strings.Contains(r.stdout, "add    file   /srv/f") {
		t.Errorf("%+v", r)
	}
	if r := s.run("audit", "erase", id); r.code != 2 || !strings.Contains(r.stderr, "--reason") {
		t.Errorf("without a reason: %+v", r)
	}
	if r := s.run("audit", "erase", id, "--dry-run"); r.code != 0 || !strings.Contains(r.stdout, "erased would be 12 records") || strings.Contains(r.stdout, "tells so") || !strings.Contains(r.stderr, "2 records of others") {
		t.Errorf("a dry run: %+v", r)
	}
	if r := s.run("audit", "erase", id, "--reason", "request 31"); r.code != 0 || !strings.Contains(r.stdout, "erased were 12 records") || !strings.Contains(r.stdout, "record 99 tells so") {
		t.Errorf("%+v", r)
	}
}
