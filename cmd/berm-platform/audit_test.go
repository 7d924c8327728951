package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
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

func TestCreateTellsWhereASecretOfAServerIs(t *testing.T) {
	if r := newSetup(t).run("create", "--cred", "x=env:Z"); r.code != 2 || !strings.Contains(r.stderr, "env: is for berm run") {
		t.Errorf("%+v", r)
	}
}
