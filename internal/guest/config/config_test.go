package config

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestLifeOfAConfiguration(t *testing.T) {
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "config"))
	if err != nil {
		t.Fatal(err)
	}
	run := filepath.Join(dir, "run")
	c, err := Open(f, run)
	if err != nil || c.Ready() {
		t.Fatalf("an empty file: ready %v, %v", c.Ready(), err)
	}
	steps := []struct {
		init, token, env, workdir string
	}{
		{`{"sandboxID":"i1","templateID":"t1","accessToken":"secret","envVars":{"A":"1"},"timestamp":"2026-01-02T00:00:00Z"}`, "secret", "1", ""},
		{`{}`, "secret", "1", ""}, // takes nothing away
		{``, "secret", "1", ""},
		{`{"accessToken":"","envVars":{"B":"2"},"defaultWorkdir":"/w"}`, "secret", "", "/w"},
		{`{"accessToken":"old","timestamp":"2026-01-01T00:00:00Z"}`, "secret", "", "/w"}, // a late copy
		{`{"accessToken":"new","timestamp":"2026-01-03T00:00:00Z","unknown":[1]}`, "new", "", "/w"},
	}
	for i, step := range steps {
		if err := c.Init([]byte(step.init)); err != nil {
			t.Fatal(err)
		}
		// The next agent finds the same.
		next, err := Open(f, "")
		if err != nil {
			t.Fatalf("step %d: %v", i, err)
		}
		for _, c := range []*Config{c, next} {
			if !c.Authorized(step.token) || c.Authorized("") || c.Authorized(step.token+"x") || !c.Secured() {
				t.Errorf("step %d: token %q", i, c.Token())
			}
			if env := c.Env(); env["A"] != step.env || env["E2B_SANDBOX_ID"] != "i1" || env["E2B_SANDBOX"] != "true" {
				t.Errorf("step %d: environment %v", i, env)
			}
			if c.Workdir() != step.workdir {
				t.Errorf("step %d: workdir %q", i, c.Workdir())
			}
		}
	}
	for name, want := range map[string]string{".E2B_SANDBOX": "true", ".E2B_SANDBOX_ID": "i1", ".E2B_TEMPLATE_ID": "t1"} {
		if got, err := os.ReadFile(filepath.Join(run, name)); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	for _, bad := range []string{`[]`, `{`, `{"accessToken":1}`, `{"envVars":{"A":`} {
		if err := c.Init([]byte(bad)); err == nil {
			t.Errorf("%s was taken", bad)
		}
	}
	if !c.Authorized("new") {
		t.Error("a bad call changed the token")
	}
}

func TestOpenRefusesWhatItCannotRead(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config")
	if err := os.WriteFile(file, []byte(`{"accessToken":`), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := Open(f, ""); err == nil {
		t.Error("half a configuration would leave the agent without its token")
	}
}

func TestAccount(t *testing.T) {
	c, _ := Open(nil, "")
	if err := c.Init([]byte(`{"defaultUser":"root"}`)); err != nil {
		t.Fatal(err)
	}
	if a, err := c.Account(""); err != nil || a.UID != 0 {
		t.Errorf("default user: %v, %v", a, err)
	}
	var ue *UserError
	if _, err := c.Account("nobody-at-all"); !errors.As(err, &ue) || err.Error() != "invalid username: 'nobody-at-all'" {
		t.Errorf("unknown user: %v", err)
	}
}

func FuzzInit(f *testing.F) {
	f.Add([]byte(`{"accessToken":"x","envVars":{"A":"b"}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, _ := Open(nil, "")
		if err := c.Init([]byte(`{"accessToken":"first"}`)); err != nil {
			t.Fatal(err)
		}
		c.Init(data)
		if !c.Secured() {
			t.Errorf("%q took away the token", data)
		}
	})
}
