package credential

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

func packet(text string) string { return fmt.Sprintf("%04x%s", len(text)+4, text) }

var (
	zero = strings.Repeat("0", 40)
	one  = strings.Repeat("1", 40)
	two  = strings.Repeat("2", 40)
)

func TestReadCommands(t *testing.T) {
	many := ""
	for i := range maxCommands + 1 {
		many += packet(fmt.Sprintf("%s %s refs/heads/%d", one, two, i))
	}
	for name, c := range map[string]struct {
		body string
		want string // the commands, or "" for an error
	}{
		"one":               {packet(one+" "+two+" refs/heads/a\x00 report-status\n") + "0000PACK…", "[{refs/heads/a false}]"},
		"deletion":          {packet(one+" "+zero+" refs/heads/a\x00 report-status delete-refs") + "0000", "[{refs/heads/a true}]"},
		"two":               {packet(zero+" "+two+" refs/heads/a\x00caps") + packet(one+" "+zero+" refs/tags/b\n") + "0000PACK", "[{refs/heads/a false} {refs/tags/b true}]"},
		"SHA-256":           {packet(strings.Repeat("a", 64)+" "+strings.Repeat("b", 64)+" refs/heads/a\x00") + "0000", "[{refs/heads/a false}]"},
		"shallow":           {packet("shallow "+one) + packet(one+" "+two+" refs/heads/a\x00caps") + "0000", "[{refs/heads/a false}]"},
		"none":              {"0000", "[]"},
		"empty":             {"", ""},
		"cut":               {packet(one + " " + two + " refs/heads/a\x00")[:50], ""},
		"no flush":          {packet(one + " " + two + " refs/heads/a\x00"), ""},
		"bad length":        {"00zz", ""},
		"delimiter":         {"0001", ""},
		"empty packet":      {"0004", ""},
		"too long":          {"fff1" + strings.Repeat("x", 0xfff1-4), ""},
		"signed":            {packet("push-cert\x00caps\n") + "0000", ""},
		"half":              {packet(one+" refs/heads/a\x00") + "0000", ""},
		"no ref":            {packet(one+" "+two+" \x00") + "0000", ""},
		"odd ref":           {packet(one+" "+two+" refs/heads/../x\x00") + "0000", ""},
		"ref with space":    {packet(one+" "+two+" refs/heads/a b\x00") + "0000", ""},
		"NUL in the second": {packet(one+" "+two+" refs/heads/a\x00") + packet(one+" "+two+" refs/heads/b\x00refs/heads/a") + "0000", ""},
		"HEAD":              {packet(one+" "+two+" HEAD\x00") + "0000", ""},
		"upper case":        {packet(strings.Repeat("A", 40)+" "+two+" refs/heads/a\x00") + "0000", ""},
		"mixed hashes":      {packet(one+" "+strings.Repeat("b", 64)+" refs/heads/a\x00") + "0000", ""},
		"late shallow":      {packet(one+" "+two+" refs/heads/a\x00") + packet("shallow "+one) + "0000", ""},
		"many":              {many + "0000", ""},
		"long":              {strings.Repeat(packet(one+" "+two+" refs/heads/"+strings.Repeat("x", 60000)), 5) + "0000", ""},
	} {
		r := strings.NewReader(c.body)
		commands, read, err := readCommands(r)
		got := ""
		if err == nil {
			got = fmt.Sprint(commands)
		}
		if got != c.want {
			t.Errorf("%s: %s %v", name, got, err)
		}
		if rest, _ := io.ReadAll(r); err == nil && string(read)+string(rest) != c.body {
			t.Errorf("%s: the body is another one: %q", name, read)
		}
	}
}

func TestPush(t *testing.T) {
	rules := Rules{Repositories: []string{"acme/app", "acme/lib-*"}, Push: []string{"refs/heads/agent/**", "refs/tags/v*"}}
	for name, c := range map[string]struct {
		method, url, body string
		change            func(*Rules, *http.Request)
		want              Reason // "" with the credential, "none" without
	}{
		"fetch":                {"GET", "/acme/app/info/refs?service=git-upload-pack", "", nil, ""},
		"fetch .git":           {"POST", "/acme/app.git/git-upload-pack", "0000", nil, ""},
		"fetch lib":            {"POST", "/acme/lib-x/git-upload-pack", "0000", nil, ""},
		"fetch another":        {"GET", "/other/app/info/refs?service=git-upload-pack", "", nil, "none"},
		"fetch below":          {"GET", "/acme/app/x/info/refs?service=git-upload-pack", "", nil, "none"},
		"dumb":                 {"GET", "/acme/app/info/refs", "", nil, "none"},
		"more in the query":    {"GET", "/acme/app/info/refs?service=git-upload-pack&x=y", "", nil, "none"},
		"file":                 {"GET", "/acme/app/objects/info/packs", "", nil, "none"},
		"large files":          {"POST", "/acme/app.git/info/lfs/objects/batch", "{}", nil, "none"},
		"web":                  {"GET", "/acme/app/settings", "", nil, "none"},
		"PUT":                  {"PUT", "/acme/app/git-receive-pack", "0000", nil, "none"},
		"around":               {"GET", "/acme/app/../../other/app/info/refs?service=git-upload-pack", "", nil, Slot},
		"push begins":          {"GET", "/acme/app/info/refs?service=git-receive-pack", "", nil, ""},
		"push":                 {"POST", "/acme/app/git-receive-pack", packet(one+" "+two+" refs/heads/agent/x/y\x00caps") + "0000PACK rest", nil, ""},
		"push a tag":           {"POST", "/acme/app/git-receive-pack", packet(zero+" "+two+" refs/tags/v1\x00caps") + "0000PACK", nil, ""},
		"probe":                {"POST", "/acme/app/git-receive-pack", "0000", nil, ""},
		"push to main":         {"POST", "/acme/app/git-receive-pack", packet(one+" "+two+" refs/heads/main\x00caps") + "0000PACK", nil, Ref},
		"main beside":          {"POST", "/acme/app/git-receive-pack", packet(one+" "+two+" refs/heads/agent/x\x00caps") + packet(one+" "+two+" refs/heads/main") + "0000PACK", nil, Ref},
		"delete":               {"POST", "/acme/app/git-receive-pack", packet(one+" "+zero+" refs/heads/agent/x\x00caps") + "0000", nil, Ref},
		"delete, allowed":      {"POST", "/acme/app/git-receive-pack", packet(one+" "+zero+" refs/heads/agent/x\x00caps") + "0000", func(r *Rules, _ *http.Request) { r.Delete = true }, ""},
		"push elsewhere":       {"GET", "/other/app/info/refs?service=git-receive-pack", "", nil, Repository},
		"push elsewhere, body": {"POST", "/other/app/git-receive-pack", "0000", nil, Repository},
		"push when reading":    {"GET", "/acme/app/info/refs?service=git-receive-pack", "", func(r *Rules, _ *http.Request) { r.Push = nil }, Ref},
		"garbage":              {"POST", "/acme/app/git-receive-pack", "garbage", nil, Protocol},
		"compressed":           {"POST", "/acme/app/git-receive-pack", "0000", func(_ *Rules, out *http.Request) { out.Header.Set("Content-Encoding", "gzip") }, Protocol},
		"no body":              {"POST", "/acme/app/git-receive-pack", "", nil, Protocol},
	} {
		r := newRig()
		rules := rules
		out := request(t, c.method, "https://git.test"+c.url, c.body)
		if c.change != nil {
			c.change(&rules, out)
		}
		s := r.open(t, Binding{ID: "git", Kind: Git, Secret: "secret:token", Hosts: []string{"git.test"}, Git: &rules})
		_, err := s.Attach(Flow{"git.test", 443, "git.test"}, out)
		var refusal *Refusal
		switch {
		case c.want == "" || c.want == "none":
			user, password, _ := out.BasicAuth()
			if err != nil || (user == "x-access-token" && password == tokenSecret) != (c.want == "") {
				t.Errorf("%s: %v %v", name, out.Header, err)
				continue
			}
			var body []byte
			if out.Body != nil {
				body, err = io.ReadAll(out.Body)
			}
			if err != nil || string(body) != c.body {
				t.Errorf("%s: the body became %q: %v", name, body, err)
			}
		case !errors.As(err, &refusal) || refusal.Reason != c.want || out.Header.Get("Authorization") != "":
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzReadCommands(f *testing.F) {
	f.Add([]byte(packet(one+" "+two+" refs/heads/a\x00 report-status\n") + "0000PACK"))
	f.Add([]byte(packet("shallow "+one) + packet(one+" "+zero+" refs/tags/b\x00") + "0000"))
	f.Add([]byte(packet("push-cert\x00x") + "0000"))
	f.Add([]byte("0004"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		commands, read, err := readCommands(r)
		if err != nil {
			return
		}
		if len(read) > maxSection || len(commands) > maxCommands || !bytes.HasPrefix(b, read) || len(b)-r.Len() != len(read) {
			t.Fatalf("%d commands from %d bytes", len(commands), len(read))
		}
		for _, c := range commands {
			if !isRef(c.ref) || !bytes.Contains(read, []byte(" "+c.ref)) {
				t.Fatalf("%q", c.ref)
			}
		}
	})
}
