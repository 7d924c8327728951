package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
)

// serveFlags runs configure for `berm serve` and returns what the flags are then.
func serveFlags(t *testing.T, file string, env map[string]string, args ...string) (get func(string) string, err error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := newServeCommand()
	if err := cmd.ParseFlags(args); err != nil {
		t.Fatal(err)
	}
	lookup := func(name string) (string, bool) { v, ok := env[name]; return v, ok }
	err = configure(cmd, path, lookup)
	return func(name string) string { return cmd.Flag(name).Value.String() }, err
}

func TestFlagWinsOverEnvironmentOverFile(t *testing.T) {
	const file = "version: 1\nserve:\n  listen: file:1\n  data: file\n  max-sandboxes: 7\n  max-timeout: 2h\n"
	get, err := serveFlags(t, file, map[string]string{"BERM_LISTEN": "env:2", "BERM_DATA": "env"}, "--listen", "flag:3")
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"listen": "flag:3", "data": "env", "max-sandboxes": "7", "max-timeout": "2h0m0s", "level": "auto"} {
		if got := get(name); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
}

func TestConfigurationIsStrict(t *testing.T) {
	for name, file := range map[string]string{
		"no version":      "serve:\n  listen: a:1\n",
		"other version":   "version: 2\n",
		"unknown section": "version: 1\nserver:\n  listen: a:1\n",
		"unknown setting": "version: 1\nserve:\n  lisen: a:1\n",
		"help":            "version: 1\nserve:\n  help: true\n",
		"wrong type":      "version: 1\nserve:\n  max-sandboxes: many\n",
		"a list":          "version: 1\nserve:\n  listen: [a, b]\n",
		"twice":           "version: 1\nserve:\n  listen: a:1\n  listen: b:1\n",
		"no YAML":         "{",
	} {
		if _, err := serveFlags(t, file, nil); berm.KindOf(err) != berm.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := serveFlags(t, "version: 1\n", map[string]string{"BERM_MAX_SANDBOXES": "x"}); berm.KindOf(err) != berm.Invalid {
		t.Errorf("bad environment: %v", err)
	}
	if err := configure(newServeCommand(), filepath.Join(t.TempDir(), "none"), os.LookupEnv); err == nil {
		t.Error("a named file that is missing passed")
	}
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	if err := configure(newServeCommand(), "", func(string) (string, bool) { return "", false }); err != nil {
		t.Errorf("no file at all: %v", err)
	}
}

// What is wrong with a registry is told with its line, in the words of the file.
func TestRegistriesOfTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	for text, want := range map[string][2]string{
		"registries:": {},
		"registries:\n  docker.io:\n    mirrors: [/a]":  {},
		"registries:\n  docker.io:\n    mirors: [/a]":   {":4: unknown key \"mirors\" in registry docker.io", "known are ca, mirrors"},
		"registries:\n  docker.io:\n    mirrors: /a":    {":4: mirrors must be a list", ""},
		"registries:\n  docker.io:\n    ca: [/a]":       {":4: ca must be a single value", ""},
		"registries:\n  docker.io: /a":                  {":3: registry docker.io must be a mapping", ""},
		"registries:\n\n  docker.io:\n    mirrors: [a]": {":5: registry docker.io: mirror \"a\"", ""},
		"registries: [a]":                               {":2: registries must be a mapping", ""},
		"registrys: {}":                                 {":2: unknown key \"registrys\" in the configuration", "known are preset,"},
	} {
		if err := os.WriteFile(path, []byte("version: 1\n"+text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := registries(path, os.LookupEnv)
		if want[0] == "" {
			if err != nil {
				t.Errorf("%q: %v", text, err)
			}
			continue
		}
		if berm.KindOf(err) != berm.Invalid || err == nil || !strings.Contains(err.Error(), path+want[0]) || !strings.HasPrefix(berm.HintOf(err), want[1]) || strings.ContainsAny(err.Error(), "\n") {
			t.Errorf("%q: %v, hint %q; want %q", text, err, berm.HintOf(err), want)
		}
	}
}

func TestKeyCommandsFindTheServersData(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte("version: 1\nserve:\n  data: /from/file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		env  map[string]string
		args []string
		want string
	}{
		{map[string]string{"BERM_CONFIG": path}, nil, "/from/file"},
		{map[string]string{"BERM_CONFIG": path, "BERM_DATA": "/from/env"}, nil, "/from/env"},
		{map[string]string{"BERM_CONFIG": path, "BERM_DATA": "/from/env"}, []string{"--data", "/from/flag"}, "/from/flag"},
	} {
		cmd := newKeyCommand()
		cmd.Flags().AddFlagSet(cmd.PersistentFlags())
		if err := cmd.ParseFlags(c.args); err != nil {
			t.Fatal(err)
		}
		err := configureData(cmd, func(name string) (string, bool) { v, ok := c.env[name]; return v, ok })
		if got := cmd.Flag("data").Value.String(); err != nil || got != c.want {
			t.Errorf("%v %v: %s, %v", c.env, c.args, got, err)
		}
	}
}

func TestKeyCommands(t *testing.T) {
	data := t.TempDir()
	keyCommand := func(args ...string) string {
		t.Helper()
		var out bytes.Buffer
		root := newRootCommand()
		root.SetOut(&out)
		root.SetArgs(append([]string{"key", "--data", data}, args...))
		if err := root.ExecuteContext(t.Context()); err != nil {
			t.Fatalf("berm key %s: %v", args, err)
		}
		return out.String()
	}
	none := filepath.Join(data, "none")
	root := newRootCommand()
	root.SetArgs([]string{"key", "create", "--data", none})
	if err := root.ExecuteContext(t.Context()); berm.KindOf(err) != berm.NotFound || berm.HintOf(err) == "" {
		t.Errorf("a key of no server: %v", err)
	}
	if _, err := os.Stat(none); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("made %s: %v", none, err)
	}
	secret := strings.TrimSpace(keyCommand("create", "--name", "first\x1b[31m"))
	if !regexp.MustCompile(`^e2b_[0-9a-f]{40}$`).MatchString(secret) {
		t.Errorf("created %q", secret)
	}
	var made struct{ ID, Key string }
	if err := json.Unmarshal([]byte(keyCommand("create", "--json")), &made); err != nil || made.Key == "" {
		t.Errorf("%v %v", made, err)
	}
	list := keyCommand("ls")
	if strings.Contains(list, secret) || strings.ContainsAny(list, "\x1b\"") || strings.Count(list, "\n") != 3 {
		t.Errorf("list:\n%s", list)
	}
	keyCommand("revoke", made.ID)
	var keys []struct{ ID, Revoked string }
	if err := json.Unmarshal([]byte(keyCommand("ls", "--json")), &keys); err != nil || len(keys) != 2 || keys[0].Revoked != "" || keys[1].Revoked == "" {
		t.Errorf("%+v %v", keys, err)
	}
}
