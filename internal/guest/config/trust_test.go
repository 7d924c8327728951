package config

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/berm-sandbox/berm"
)

const authority = "-----BEGIN CERTIFICATE-----\nbmV3\n-----END CERTIFICATE-----\n"

// What the host says is trusted inside, once, also by the next agent; what the template and the
// creator set wins.
func TestAuthority(t *testing.T) {
	root := t.TempDir()
	bundle := filepath.Join(root, "etc/ssl/certs/ca-certificates.crt")
	if err := os.MkdirAll(filepath.Dir(bundle), 0o755); err != nil {
		t.Fatal(err)
	}
	const old = "-----BEGIN CERTIFICATE-----\nb2xk\n-----END CERTIFICATE-----"
	if err := os.WriteFile(bundle, []byte(old), 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := os.Create(filepath.Join(t.TempDir(), "config"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	check := func(c *Config, when string) {
		t.Helper()
		got, err := os.ReadFile(bundle)
		if err != nil || string(got) != old+"\n"+authority {
			t.Errorf("%s: the list is %q, %v", when, got, err)
		}
		if info, err := os.Stat(bundle); err != nil || info.Mode() != 0o644 {
			t.Errorf("%s: its mode is %v, %v", when, info.Mode(), err)
		}
		anchor := filepath.Join(root, "usr/local/share/ca-certificates/sandbox.crt")
		if got, err := os.ReadFile(anchor); err != nil || string(got) != authority {
			t.Errorf("%s: the anchor is %q, %v", when, got, err)
		}
		env := c.Env()
		if env["SSL_CERT_FILE"] != "/etc/ssl/certs/ca-certificates.crt" || env["CURL_CA_BUNDLE"] != "mine" || env["TOKEN"] != "placeholder" || env["OWN"] != "own" {
			t.Errorf("%s: environment %v", when, env)
		}
	}
	told := func(g berm.GuestConfig) []byte {
		text, err := json.Marshal(g)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	c, err := Open(file, root+RunDir)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Init(told(berm.GuestConfig{SandboxID: "i0", Env: map[string]string{"CURL_CA_BUNDLE": "mine", "OWN": "own"}})); err != nil {
		t.Fatal(err)
	}
	if c.Env()["SSL_CERT_FILE"] != "" {
		t.Error("an authority without being told of one")
	}
	for range 2 { // the second time nothing is added
		if err := c.Init(told(berm.GuestConfig{Authority: authority, Placeholders: map[string]string{"TOKEN": "placeholder", "OWN": "other"}})); err != nil {
			t.Fatal(err)
		}
		check(c, "told")
	}
	if err := c.Init(told(berm.GuestConfig{Workdir: "/srv"})); err != nil {
		t.Fatal(err)
	}
	check(c, "told of something else")
	next, err := Open(file, root+RunDir)
	if err != nil {
		t.Fatal(err)
	}
	check(next, "the next agent")
	if err := next.Init(told(berm.GuestConfig{Placeholders: map[string]string{}})); err != nil || next.Env()["TOKEN"] != "" {
		t.Errorf("a placeholder that was taken away: %v, %v", next.Env(), err)
	}
	left, err := filepath.Glob(filepath.Join(filepath.Dir(bundle), ".berm-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	// What cannot be trusted is said, and changes nothing.
	before, _ := os.ReadFile(file.Name())
	if err := os.Remove(bundle); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(bundle, 0o755); err != nil {
		t.Fatal(err)
	}
	if next.Init(told(berm.GuestConfig{Authority: authority + authority})) == nil {
		t.Error("a list that is a directory is trusted")
	}
	if after, _ := os.ReadFile(file.Name()); !bytes.Equal(before, after) {
		t.Error("a configuration that failed was kept")
	}
	// An agent by hand has no root of its own to write to.
	byHand, err := Open(nil, "")
	if err != nil {
		t.Fatal(err)
	}
	if byHand.Init(told(berm.GuestConfig{Authority: authority})) == nil {
		t.Error("an agent outside of a sandbox changed the machine")
	}
}
