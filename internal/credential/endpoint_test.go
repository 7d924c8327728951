package credential

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"net/http/httptrace"
	"net/http/httputil"
	"net/textproto"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// upstream is a TLS server that stands for example.com, and the transport to it alone.
func upstream(t *testing.T, handler http.Handler) func(Flow) http.RoundTripper {
	t.Helper()
	server := httptest.NewTLSServer(handler)
	t.Cleanup(server.Close)
	transport := server.Client().Transport.(*http.Transport).Clone()
	transport.DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, server.Listener.Addr().String())
	}
	t.Cleanup(transport.CloseIdleConnections)
	return func(Flow) http.RoundTripper { return transport }
}

// endpoints serves those of a set with one binding, example, and returns their URL.
func endpoints(t *testing.T, b Binding, handler http.HandlerFunc) (*rig, *Set, string) {
	t.Helper()
	r := newRig()
	b.ID, b.Secret, b.Hosts = "example", "secret:token", []string{"example.com"}
	s := r.open(t, b)
	e := &Endpoints{Set: s, Transport: upstream(t, handler), Judge: func(f Flow, out *http.Request) *Refusal {
		if f.Name != "example.com" || out.URL.Host != "example.com" || strings.HasPrefix(out.URL.Path, "/v1/forbidden") {
			return &Refusal{Reason: "path", Message: "no rule allows it", Hint: "ask"}
		}
		return nil
	}}
	server := httptest.NewServer(e)
	t.Cleanup(server.Close)
	return r, s, server.URL
}

func TestEndpoint(t *testing.T) {
	r, s, base := endpoints(t, Binding{Service: "openai"}, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Seen", r.Header.Get("Authorization"))
		switch r.URL.Path {
		case "/v1/redirect":
			http.Redirect(w, r, "https://example.com/v1/next?x=1", http.StatusFound)
		case "/v1/evil":
			http.Redirect(w, r, "https://evil.test/?t="+r.Header.Get("Authorization"), http.StatusFound)
		case "/v1/gzip":
			w.Header().Set("Content-Encoding", "gzip")
			w.Write([]byte("x"))
		case "/v1/hints":
			w.Header().Set("Link", r.Header.Get("Authorization"))
			w.WriteHeader(http.StatusEarlyHints)
			w.Header().Del("Link")
			fmt.Fprint(w, "ok")
		case "/v1/trailer":
			w.Header().Set("Trailer", "X-Sum")
			fmt.Fprint(w, "ok")
			w.Header().Set("X-Sum", r.Header.Get("Authorization"))
		default:
			body, err := io.ReadAll(r.Body)
			json.NewEncoder(w).Encode(map[string]any{"uri": r.RequestURI, "host": r.Host, "auth": r.Header.Get("Authorization"), "fields": r.Header, "body": string(body), "err": fmt.Sprint(err)})
		}
	})
	env := s.Env(base)
	if env["OPENAI_BASE_URL"] != base+"/example/v1" || !strings.HasPrefix(env["OPENAI_API_KEY"], "sk-proj-berm") {
		t.Fatal(env)
	}
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	do := func(method, path, body string, set ...string) (*http.Response, string) {
		t.Helper()
		request, err := http.NewRequest(method, env["OPENAI_BASE_URL"]+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("Authorization", "Bearer "+env["OPENAI_API_KEY"])
		for i := 0; i < len(set); i += 2 {
			request.Header.Set(set[i], set[i+1])
		}
		request = request.WithContext(httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
			t.Error("informational reply", code, h)
			return nil
		}}))
		response, err := client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if all := fmt.Sprint(response.Header, response.Trailer, string(text)); strings.Contains(all, "CANARY") {
			t.Errorf("%s %s: %s", method, path, all)
		}
		return response, string(text)
	}
	masked := "Bearer " + strings.Repeat("*", len(tokenSecret))
	response, text := do("POST", "/a%20b/c%3Fd?x=%7E&y", "hello", "X-Forwarded-For", "1.2.3.4", "X-Own", "y")
	var seen struct {
		URI, Host, Auth, Body string
		Fields                http.Header
	}
	if err := json.Unmarshal([]byte(text), &seen); err != nil {
		t.Fatal(err, text)
	}
	if response.StatusCode != 200 || response.Header.Get("X-Seen") != masked || seen.Auth != masked || seen.URI != "/v1/a%20b/c%3Fd?x=%7E&y" ||
		seen.Host != "example.com" || seen.Body != "hello" || seen.Fields.Get("X-Own") != "y" || seen.Fields.Get("X-Forwarded-For") != "" || seen.Fields.Get("Accept-Encoding") != "identity" {
		t.Error(response, text)
	}
	if response, _ := do("GET", "/redirect", ""); response.Header.Get("Location") != "/example/v1/next?x=1" {
		t.Error(response.Header)
	}
	if response, _ := do("GET", "/evil", ""); !strings.HasPrefix(response.Header.Get("Location"), "https://evil.test/?t=Bearer") {
		t.Error(response.Header)
	}
	do("GET", "/hints", "")
	if response, _ := do("GET", "/trailer", ""); response.Trailer.Get("X-Sum") != masked {
		t.Error(response.Trailer)
	}
	if response, _ := do("GET", "/gzip", ""); response.StatusCode != http.StatusBadGateway {
		t.Error(response.Status)
	}
	for name, c := range map[string]struct {
		path, body string
		set        []string
		reason     string
	}{
		"policy":                {"/forbidden", "", nil, "path"},
		"upgrade":               {"/x", "", []string{"Connection", "Upgrade", "Upgrade", "websocket"}, string(Slot)},
		"placeholder in a body": {"/x", "xx" + env["OPENAI_API_KEY"], nil, string(Misuse)},
		"placeholder elsewhere": {"/x", "", []string{"X-Key", env["OPENAI_API_KEY"]}, string(Misuse)},
	} {
		response, text := do("POST", c.path, c.body, c.set...)
		if response.StatusCode != http.StatusForbidden || response.Header.Get("X-Berm-Deny") != c.reason || !strings.Contains(text, `"reason":"`+c.reason) {
			t.Errorf("%s: %s %v %s", name, response.Status, response.Header, text)
		}
	}
	response, err := http.Get(base + "/other/v1/x")
	if err != nil || response.StatusCode != http.StatusNotFound {
		t.Error(response, err)
	}
	response.Body.Close()
	r.mu.Lock()
	defer r.mu.Unlock()
	if all := fmt.Sprint(r.events); strings.Contains(all, "CANARY") {
		t.Error(all)
	}
}

// A stream of events comes through as it is sent, and ends when the credential is revoked.
func TestEndpointStream(t *testing.T) {
	next := make(chan string)
	_, s, base := endpoints(t, Binding{Service: "anthropic"}, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for {
			select {
			case text := <-next:
				fmt.Fprint(w, text)
				w.(http.Flusher).Flush()
			case <-r.Context().Done():
				return
			}
		}
	})
	response := make(chan *http.Response, 1)
	go func() {
		got, err := http.Get(s.Env(base)["ANTHROPIC_BASE_URL"] + "/v1/messages")
		if err != nil {
			t.Error(err)
		}
		response <- got
	}()
	next <- "data: 1\n\n"
	got := <-response
	if got == nil {
		t.FailNow()
	}
	defer got.Body.Close()
	lines := bufio.NewReader(got.Body)
	for i := 1; i < 4; i++ {
		// Nothing more is sent before this piece has arrived.
		if line, err := lines.ReadString('\n'); err != nil || line != fmt.Sprintf("data: %d\n", i) {
			t.Fatalf("%q %v", line, err)
		}
		lines.ReadString('\n')
		next <- fmt.Sprintf("data: %d\n\n", i+1)
	}
	start := time.Now()
	s.Close()
	if rest, err := io.ReadAll(lines); err == nil {
		t.Errorf("the reply ended well, with %q", rest)
	}
	if d := time.Since(start); d > time.Second {
		t.Errorf("it went on for %v", d)
	}
}

func TestServices(t *testing.T) {
	for _, name := range Services() {
		r := newRig()
		s := r.open(t, Binding{ID: "b", Service: name, Secret: "secret:token"})
		env := s.Env("http://broker.internal")
		found := false
		for _, value := range env {
			found = found || strings.HasPrefix(value, "http://broker.internal/b")
		}
		if !found {
			t.Errorf("%s: %v", name, env)
		}
		if name == "pypi" && env["PIP_TRUSTED_HOST"] != "broker.internal" {
			t.Error(env)
		}
	}
}

// git itself, against a repository that asks for the secret, sees neither secret nor
// placeholder and writes what it may.
func TestGitItself(t *testing.T) {
	home := t.TempDir()
	r := newRig()
	s := r.open(t, Binding{ID: "git", Kind: Git, Secret: "secret:token", Hosts: []string{"git.test"}, Ports: []uint16{443},
		Git: &Rules{Repositories: []string{"acme/app"}, Push: []string{"refs/heads/agent/*"}}})
	git := func(arguments ...string) (string, error) {
		command := exec.CommandContext(t.Context(), "git", arguments...)
		command.Dir = home
		command.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, "GIT_CONFIG_NOSYSTEM=1", "GIT_SSL_NO_VERIFY=1",
			"GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@b", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@b"}
		for name, value := range s.Env("http://broker.internal") {
			command.Env = append(command.Env, name+"="+value)
		}
		out, err := command.CombinedOutput()
		return string(out), err
	}
	must := func(arguments ...string) string {
		t.Helper()
		out, err := git(arguments...)
		if err != nil {
			t.Fatalf("git %v: %v: %s", arguments, err, out)
		}
		return out
	}
	for from, want := range map[string]string{
		"git@git.test:acme/app.git":       "https://git.test/acme/app.git",
		"ssh://git@git.test/acme/app.git": "https://git.test/acme/app.git",
		"ssh://git.test/acme/app":         "https://git.test/acme/app",
		"git@other.test:acme/app.git":     "git@other.test:acme/app.git",
	} {
		if got := strings.TrimSpace(must("ls-remote", "--get-url", from)); got != want {
			t.Errorf("%s is %s", from, got)
		}
	}

	project := filepath.Join(home, "server")
	for _, name := range []string{"acme/app", "acme/other"} {
		must("init", "-q", "--bare", filepath.Join(project, name+".git"))
		must("-C", filepath.Join(project, name+".git"), "config", "http.receivepack", "true")
	}
	backend, err := exec.LookPath("git")
	if err != nil {
		t.Fatal(err)
	}
	handler := &cgi.Handler{Path: backend, Args: []string{"http-backend"}, Env: []string{"GIT_PROJECT_ROOT=" + project, "GIT_HTTP_EXPORT_ALL=1", "HOME=" + home}}
	transport := upstream(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); user != "x-access-token" || password != tokenSecret {
			w.Header().Set("WWW-Authenticate", "Basic")
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		handler.ServeHTTP(w, r)
	}))
	// What stands in the middle of the sandbox's TLS.
	flow := Flow{"git.test", 443, "git.test"}
	allow := func(Flow, *http.Request) *Refusal { return nil }
	middle := httptest.NewTLSServer(&httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) {
			p.Out.URL.Scheme, p.Out.URL.Host, p.Out.Host = "https", "git.test", "git.test"
		},
		Transport:    exchange{&Endpoints{Set: s, Judge: allow, Transport: func(f Flow) http.RoundTripper { return atExample{transport(f)} }}, flow, ""},
		ErrorHandler: fail, FlushInterval: -1,
	})
	t.Cleanup(middle.Close)
	url := middle.URL + "/acme/app.git"

	must("clone", "-q", url, "work")
	must("-C", "work", "commit", "-q", "--allow-empty", "-m", "one")
	must("-C", "work", "push", "-q", "origin", "HEAD:refs/heads/agent/one")
	if out := must("ls-remote", url); !strings.Contains(out, "refs/heads/agent/one") {
		t.Error(out)
	}
	for _, arguments := range [][]string{
		{"-C", "work", "push", "-q", "origin", "HEAD:refs/heads/main"},
		{"-C", "work", "push", "-q", "origin", "HEAD:refs/heads/agent/two", "HEAD:refs/heads/main"},
		{"-C", "work", "push", "-q", "origin", ":refs/heads/agent/one"},
		{"-C", "work", "push", "-q", middle.URL + "/acme/other.git", "HEAD:refs/heads/agent/one"},
		{"clone", "-q", middle.URL + "/acme/other.git", "other"},
	} {
		if out, err := git(arguments...); err == nil {
			t.Errorf("git %v went well: %s", arguments, out)
		}
	}
	if out := must("ls-remote", url); strings.Contains(out, "main") || strings.Contains(out, "two") || !strings.Contains(out, "agent/one") {
		t.Error(out)
	}
	filepath.WalkDir(filepath.Join(home, "work"), func(path string, d os.DirEntry, _ error) error {
		if b, err := os.ReadFile(path); err == nil && strings.Contains(string(b), "CANARY") {
			t.Error("the secret is in", path)
		}
		return nil
	})
}

// atExample sends to the name that the test's upstream has a certificate for.
type atExample struct{ http.RoundTripper }

func (a atExample) RoundTrip(out *http.Request) (*http.Response, error) {
	out = out.Clone(out.Context())
	out.URL.Host = "example.com"
	return a.RoundTripper.RoundTrip(out)
}
