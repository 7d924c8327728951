package client_test

import (
	"context"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/client/clienttest"
)

func TestCreateGetKill(t *testing.T) {
	s := clienttest.Start(t)
	c, ctx := s.Client(t), t.Context()
	made, err := c.Create(ctx, client.CreateOptions{Template: "base", Timeout: 90500 * time.Millisecond, AutoPause: true, AutoResume: true})
	if err != nil {
		t.Fatal(err)
	}
	got, err := c.Get(ctx, made.ID)
	if err != nil {
		t.Fatal(err)
	}
	if left := got.EndAt.Sub(got.StartedAt); left != 91*time.Second { // rounded up
		t.Errorf("time to live %v", left)
	}
	if want := (client.Lifecycle{OnTimeout: berm.PauseAtDeadline, AutoResume: true}); got.Lifecycle == nil || *got.Lifecycle != want {
		t.Errorf("lifecycle %+v", got.Lifecycle)
	}
	if err := c.Kill(ctx, made.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Get(ctx, made.ID); berm.KindOf(err) != berm.NotFound {
		t.Errorf("get after kill: %v", err)
	}
	if _, err := c.Create(ctx, client.CreateOptions{Template: "nosuch"}); berm.KindOf(err) != berm.NotFound || !strings.Contains(err.Error(), "nosuch") {
		t.Errorf("unknown template: %v", err)
	}
}

func TestPauseResume(t *testing.T) {
	s := clienttest.Start(t)
	c, ctx, id := s.Client(t), t.Context(), s.Add(client.Sandbox{}).ID
	if err := c.Pause(ctx, id); err != nil {
		t.Fatal(err)
	}
	if err := c.Pause(ctx, id); berm.KindOf(err) != berm.Conflict {
		t.Errorf("second pause: %v", err)
	}
	for _, want := range []bool{true, false} {
		if _, resumed, err := c.Resume(ctx, id, 0); err != nil || resumed != want {
			t.Errorf("resumed %v, want %v; %v", resumed, want, err)
		}
	}
}

func TestListPagesAndFilters(t *testing.T) {
	s := clienttest.Start(t)
	odd := map[string]string{"k 1": "v&2=%+ü", "b": ""}
	var all, odds []berm.SandboxID
	for i := range 5 {
		b := client.Sandbox{}
		if i%2 == 1 {
			b.Metadata = odd
		}
		id := s.Add(b).ID
		all = append(all, id)
		if i%2 == 1 {
			odds = append(odds, id)
		}
	}
	s.Edit(all[1], func(b *client.Sandbox) { b.State = berm.Paused })
	slices.Reverse(all)
	slices.Reverse(odds)
	c := s.Client(t)
	for _, test := range []struct {
		filter client.Filter
		want   []berm.SandboxID
	}{
		{client.Filter{}, all},
		{client.Filter{Metadata: odd}, odds},
		{client.Filter{Metadata: map[string]string{"k 1": "other"}}, nil},
		{client.Filter{States: []berm.State{berm.Paused, berm.Running}}, all},
		{client.Filter{States: []berm.State{berm.Paused}, Metadata: odd}, odds[1:]},
	} {
		var got []berm.SandboxID
		err := c.List(t.Context(), test.filter, func(b client.Sandbox) bool {
			got = append(got, b.ID)
			return true
		})
		if err != nil || !slices.Equal(got, test.want) {
			t.Errorf("%+v: %v, want %v; %v", test.filter, got, test.want, err)
		}
	}
	// Encoded three times on the wire, as the SDKs do.
	if !slices.ContainsFunc(s.Requests(), func(r string) bool { return strings.Contains(r, "metadata=b%253D%2526k%2525201%253Dv%252526") }) {
		t.Errorf("encoding of metadata: %q", s.Requests())
	}
}

func TestEndlessPages(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Next-Token", "same")
		w.Write([]byte("[]"))
	}))
	defer server.Close()
	c, err := client.New(client.Config{URL: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.List(t.Context(), client.Filter{}, func(client.Sandbox) bool { return true }); berm.KindOf(err) != berm.Internal {
		t.Errorf("a server that ignores the token: %v", err)
	}
}

func TestErrorsHaveKindsAndHints(t *testing.T) {
	s := clienttest.Start(t)
	closed := httptest.NewServer(nil)
	closed.Close()
	notOurs := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte("<html>")) }))
	defer notOurs.Close()
	secure := httptest.NewUnstartedServer(nil)
	secure.Config.ErrorLog = log.New(io.Discard, "", 0)
	secure.StartTLS()
	defer secure.Close()
	advising := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNotImplemented)
		_, _ = io.WriteString(w, `{"code":501,"message":"no","berm":{"hint":"ask berm doctor"}}`)
	}))
	defer advising.Close()
	for name, test := range map[string]struct {
		config client.Config
		kind   berm.Kind
		hint   string
	}{
		"the server's":  {client.Config{URL: advising.URL}, berm.Unsupported, "ask berm doctor"},
		"wrong key":     {client.Config{URL: s.URL, Key: "e2b_wrong"}, berm.Denied, "BERM_API_KEY"},
		"nobody there":  {client.Config{URL: closed.URL}, berm.Unavailable, "berm serve"},
		"another thing": {client.Config{URL: notOurs.URL}, berm.Internal, "address of a Berm server"},
		"own authority": {client.Config{URL: secure.URL}, berm.Unavailable, "--ca"},
		"https to http": {client.Config{URL: strings.Replace(s.URL, "http:", "https:", 1)}, berm.Unavailable, "http://"},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := client.New(test.config)
			if err != nil {
				t.Fatal(err)
			}
			_, err = c.Get(t.Context(), "i0")
			if berm.KindOf(err) != test.kind || !strings.Contains(berm.HintOf(err), test.hint) {
				t.Errorf("%v, kind %v, hint %q", err, berm.KindOf(err), berm.HintOf(err))
			}
		})
	}
}

func TestKeyIsNotRedirected(t *testing.T) {
	var leaked bool
	thief := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { leaked = true }))
	defer thief.Close()
	server := httptest.NewServer(http.RedirectHandler(thief.URL, http.StatusTemporaryRedirect))
	defer server.Close()
	c, err := client.New(client.Config{URL: server.URL, Key: clienttest.Key})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Get(t.Context(), "i0"); err == nil || leaked {
		t.Errorf("error %v, followed: %v", err, leaked)
	}
}

func TestBadConfig(t *testing.T) {
	for _, c := range []client.Config{
		{URL: ""}, {URL: "127.0.0.1:7676"}, {URL: "ftp://host"}, {URL: "http://"}, {URL: "http://user:pw@host"}, {URL: "http://host?x"},
		{URL: "http://host", Key: "a\r\nX-Other: b"}, {URL: "http://host", Key: "a b"},
		{URL: "http://host", SandboxURL: "host"}, {URL: "https://host", CA: "/does/not/exist"},
	} {
		if _, err := client.New(c); berm.KindOf(err) != berm.Invalid {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func TestCanceled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := clienttest.Start(t).Client(t).Get(ctx, "i0"); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func TestContextsFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "contexts.yaml")
	load := func() *client.Contexts {
		t.Helper()
		c, err := client.LoadContexts(path)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	c := load()
	home := client.Context{Name: "home", URL: "http://127.0.0.1:1", Key: "e2b_home"}
	work := client.Context{Name: "work", URL: "https://work.example", SandboxURL: "https://s.work.example"}
	for _, context := range []client.Context{home, work} {
		if err := c.Add(context); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Save(); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	c = load()
	if diff := cmp.Diff([]client.Context{home, work}, c.Contexts); diff != "" || c.Current != "home" {
		t.Errorf("current %q, contexts (-want +got):\n%s", c.Current, diff)
	}
	if err := c.Remove("home"); err != nil || c.Current != "" {
		t.Errorf("after removal the current one is %q; %v", c.Current, err)
	}
	if err := c.Remove("home"); berm.KindOf(err) != berm.NotFound {
		t.Errorf("second removal: %v", err)
	}
	for _, name := range []string{"", "../x", "-x", ".x", "a b", "a\n", "ä", strings.Repeat("x", 64)} {
		if err := c.Add(client.Context{Name: name, URL: "http://h"}); berm.KindOf(err) != berm.Invalid {
			t.Errorf("name %q: %v", name, err)
		}
	}
}

func TestContextsFileIsStrict(t *testing.T) {
	path := filepath.Join(t.TempDir(), "contexts.yaml")
	for name, test := range map[string]struct {
		text string
		mode os.FileMode
		kind berm.Kind
	}{
		"readable by others": {"version: 1\ncontexts: []\n", 0o644, berm.Denied},
		"unknown key":        {"version: 1\ncontexts: []\nextra: 1\n", 0o600, berm.Invalid},
		"no version":         {"contexts: []\n", 0o600, berm.Invalid},
		"newer version":      {"version: 2\ncontexts: []\n", 0o600, berm.Invalid},
		"no YAML":            {"\t{", 0o600, berm.Invalid},
		"empty":              {"", 0o600, berm.Invalid},
		"twice":              {"version: 1\ncontexts: [{name: a, url: 'http://h'}, {name: a, url: 'http://i'}]\n", 0o600, berm.Invalid},
	} {
		t.Run(name, func(t *testing.T) {
			if err := os.WriteFile(path, []byte(test.text), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(path, test.mode); err != nil {
				t.Fatal(err)
			}
			if _, err := client.LoadContexts(path); berm.KindOf(err) != test.kind || err == nil {
				t.Errorf("%v", err)
			}
		})
	}
}

func TestChoose(t *testing.T) {
	contexts := &client.Contexts{Version: 1, Current: "home", Contexts: []client.Context{
		{Name: "home", URL: "http://home", Key: "homekey"},
		{Name: "bare", URL: "http://bare"},
	}}
	none := &client.Contexts{Version: 1}
	for name, test := range map[string]struct {
		contexts *client.Contexts
		name     string
		env      map[string]string
		want     client.Config
		kind     berm.Kind
	}{
		"current":                    {contexts, "", nil, client.Config{URL: "http://home", Key: "homekey"}, 0},
		"environment wins":           {contexts, "", map[string]string{"E2B_API_URL": "http://env", "E2B_API_KEY": "k", "E2B_SANDBOX_URL": "http://s"}, client.Config{URL: "http://env", SandboxURL: "http://s", Key: "k"}, 0},
		"flag wins over environment": {contexts, "home", map[string]string{"BERM_URL": "http://env", "BERM_API_KEY": "k"}, client.Config{URL: "http://home", Key: "homekey"}, 0},
		"own names first":            {none, "", map[string]string{"E2B_API_URL": "http://e2b", "BERM_URL": "http://berm", "E2B_API_KEY": "e", "BERM_API_KEY": "b"}, client.Config{URL: "http://berm", Key: "b"}, 0},
		"domain":                     {none, "", map[string]string{"E2B_DOMAIN": "berm.example", "E2B_API_KEY": "k"}, client.Config{URL: "https://api.berm.example", Key: "k"}, 0},
		"stored key stays home":      {contexts, "", map[string]string{"BERM_URL": "http://evil"}, client.Config{}, berm.Denied},
		"key of the environment":     {contexts, "bare", map[string]string{"BERM_API_KEY": "k"}, client.Config{URL: "http://bare", Key: "k"}, 0},
		"no key":                     {contexts, "bare", nil, client.Config{}, berm.Denied},
		"local":                      {none, "", map[string]string{"BERM_API_KEY": "k"}, client.Config{URL: client.DefaultURL, Key: "k"}, 0},
		"nothing":                    {none, "", nil, client.Config{}, berm.Denied},
		"unknown":                    {contexts, "nosuch", nil, client.Config{}, berm.NotFound},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := test.contexts.Choose(test.name, func(k string) string { return test.env[k] })
			if got != test.want || err != nil && berm.KindOf(err) != test.kind || (err != nil) != (test.kind != 0) {
				t.Errorf("%+v, %v", got, err)
			}
			if err != nil && berm.HintOf(err) == "" {
				t.Errorf("no hint: %v", err)
			}
		})
	}
}
