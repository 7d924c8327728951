package router

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/capture"
	"github.com/berm-sandbox/berm/internal/control"
	"github.com/berm-sandbox/berm/internal/control/enginetest"
	"github.com/berm-sandbox/berm/internal/store"
)

// world is a router before sandboxes in memory.
type world struct {
	*httptest.Server
	t        testing.TB
	sessions *control.Manager
	engine   *enginetest.Engine
	router   *Router
}

// echo answers with what it was asked.
func echo(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	json.NewEncoder(w).Encode(map[string]any{
		"host": r.Host, "path": r.URL.EscapedPath(), "query": r.URL.RawQuery, "method": r.Method, "header": r.Header, "body": string(body), "proto": r.Proto,
	})
}

// agent stands in for the guest agent.
func agent() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	mux.HandleFunc("/stream", func(w http.ResponseWriter, r *http.Request) {
		for i := 0; ; i++ {
			if _, err := fmt.Fprintf(w, "data: %d\n\n", i); err != nil {
				return
			}
			w.(http.Flusher).Flush()
			select {
			case <-r.Context().Done():
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
	})
	mux.HandleFunc("/duplex", func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).EnableFullDuplex()
		w.WriteHeader(http.StatusOK)
		w.(http.Flusher).Flush()
		lines := bufio.NewScanner(r.Body)
		for lines.Scan() {
			fmt.Fprintln(w, strings.ToUpper(lines.Text()))
			w.(http.Flusher).Flush()
		}
	})
	mux.HandleFunc("/trailers", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "Grpc-Status")
		io.WriteString(w, r.Proto)
		w.Header().Set("Grpc-Status", "0")
	})
	mux.HandleFunc("/upgrade-me", func(w http.ResponseWriter, r *http.Request) {
		conn, buf, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		fmt.Fprint(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		for {
			line, err := buf.ReadString('\n')
			if err != nil {
				return
			}
			fmt.Fprint(conn, "echo "+line)
		}
	})
	mux.HandleFunc("/sink", func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, n)
	})
	mux.HandleFunc("/source", func(w http.ResponseWriter, r *http.Request) {
		chunk := make([]byte, 1<<20)
		for range 64 {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	})
	mux.HandleFunc("/headers", func(w http.ResponseWriter, r *http.Request) {
		for i := range 200 {
			w.Header().Set(fmt.Sprint("X-", i), strings.Repeat("a", 10<<10))
		}
	})
	mux.HandleFunc("/broken", func(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) })
	mux.HandleFunc("/", echo)
	return mux
}

func newWorld(t testing.TB, domain string) *world {
	t.Helper()
	db, err := store.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	engine := &enginetest.Engine{Ports: map[uint16]http.Handler{berm.AgentPort: agent(), 8000: agent()}}
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	sessions := control.New(control.Config{
		Engine: engine, Templates: enginetest.Templates{}, Store: db, Audit: audit.Discard, Log: log,
		Seed: make([]byte, 32), MaxTimeout: 24 * time.Hour, SampleEvery: time.Minute,
	})
	if err := sessions.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(sessions.Close)
	plane := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "control plane") })
	w := &world{t: t, sessions: sessions, engine: engine, router: New(Config{Sessions: sessions, Control: plane, Domain: domain, Capture: capture.New(audit.Discard, audit.Directory(t.TempDir()), true, log), Log: log})}
	w.Server = httptest.NewUnstartedServer(w.router)
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	w.Config.Protocols = &protocols
	w.Config.ErrorLog = silent
	w.Start()
	t.Cleanup(w.Close)
	return w
}

func (w *world) create(change ...func(*control.CreateRequest)) control.Sandbox {
	w.t.Helper()
	r := control.CreateRequest{Template: "base", Timeout: time.Minute, Secure: true}
	for _, f := range change {
		f(&r)
	}
	s, err := w.sessions.Create(context.Background(), r)
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

// request makes a request for a host; headers come in pairs.
func (w *world) request(method, host, path string, body io.Reader, header ...string) *http.Request {
	w.t.Helper()
	r, err := http.NewRequest(method, w.URL+path, body)
	if err != nil {
		w.t.Fatal(err)
	}
	if host != "" {
		r.Host = host
	}
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	return r
}

func (w *world) get(host, path string, header ...string) (int, string, http.Header) {
	w.t.Helper()
	r, err := http.DefaultTransport.RoundTrip(w.request("GET", host, path, nil, header...))
	if err != nil {
		w.t.Fatal(err)
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return r.StatusCode, string(body), r.Header
}

func TestDispatch(t *testing.T) {
	w := newWorld(t, "berm.test")
	s := w.create()
	id := string(s.ID)
	const plane, inside, lost = "control plane", `"path":"/x"`, "The sandbox was not found"
	for _, c := range []struct {
		host   string
		header []string
		status int
		want   string
	}{
		{"127.0.0.1:3000", nil, 200, plane},
		{"127.0.0.1:3000", []string{idHeader, id, portHeader, "8000"}, 200, inside},
		{"127.0.0.1", []string{idHeader, id}, 200, inside},
		{"[::1]:3000", []string{idHeader, id, portHeader, "8000"}, 200, inside},
		{"localhost", []string{idHeader, id, portHeader, "8000"}, 200, inside},
		{"sandbox.berm.test:1", []string{idHeader, id, portHeader, "8000"}, 200, inside},
		{"sandbox.berm.test", nil, 400, "missing"},
		{"sandbox.berm.test", []string{idHeader, "A B"}, 400, "Invalid sandbox ID"},
		{"localhost", []string{idHeader, id, portHeader, "0"}, 400, "port"},
		{"localhost", []string{idHeader, id, portHeader, "65536"}, 400, "port"},
		{"localhost", []string{idHeader, id, portHeader, "-1"}, 400, "port"},
		{"localhost", []string{idHeader, id, portHeader, "80@1"}, 400, "port"},
		{"localhost", []string{idHeader, id + "-client", portHeader, "8000"}, 200, inside},
		{"localhost", []string{idHeader, "unknown"}, 502, lost},
		{"api.berm.test", []string{idHeader, id}, 200, plane}, // a header does not turn the API into a sandbox
		{"berm.test", nil, 200, plane},
		{"8000-" + id + ".berm.test", nil, 200, inside},
		{"8000-" + id + ".berm.test:8443", nil, 200, inside},
		{"8000-" + id + ".BERM.test.", nil, 200, inside},
		{"8000-" + id + "-client.berm.test", nil, 200, inside},
		{"8000-" + id + ".berm.test", []string{idHeader, "other", portHeader, "22"}, 200, inside},
		{"8000-" + id + ".other.test", nil, 200, plane},
		{"8000-" + id, nil, 200, plane},
		{"0-" + id + ".berm.test", nil, 200, plane},
		{"65536-" + id + ".berm.test", nil, 200, plane},
		{"-1-" + id + ".berm.test", nil, 200, plane},
		{"8000-unknown.berm.test", nil, 502, lost},
		{"8001-" + id + ".berm.test", nil, 502, "port is not open"},
	} {
		status, body, _ := w.get(c.host, "/x", c.header...)
		if status != c.status || !strings.Contains(body, c.want) {
			t.Errorf("host %s, header %q: %d %s, want %d %s", c.host, c.header, status, body, c.status, c.want)
		}
	}
}

func TestServerWithoutDomainGoesByEveryName(t *testing.T) {
	w := newWorld(t, "")
	s := w.create()
	for host, header := range map[string][]string{
		"berm.internal:3000":                      {idHeader, string(s.ID)},
		"8000-" + string(s.ID) + ".whatever.test": nil,
	} {
		if status, body, _ := w.get(host, "/x", header...); status != 200 || !strings.Contains(body, `"path":"/x"`) {
			t.Errorf("%s: %d %s", host, status, body)
		}
	}
	if _, body, _ := w.get("api.berm.internal", "/sandboxes"); body != "control plane" {
		t.Errorf("api: %s", body)
	}
}

func TestProblems(t *testing.T) {
	w := newWorld(t, "berm.test")
	s := w.create()
	browser := []string{"User-Agent", "Mozilla/5.0 (X11)", "Accept", "text/html,application/xhtml+xml"}
	closedPort := "8001-" + string(s.ID) + ".berm.test"
	var wg sync.WaitGroup // a closed port is tried for most of a second
	for _, c := range []struct {
		host   string
		header []string
		html   bool
		want   []string
	}{
		{closedPort, nil, false, []string{`{"sandboxId":"` + string(s.ID) + `","message":"The sandbox is running but port is not open","port":8001,"code":502}`}},
		{"8000-gone.berm.test", nil, false, []string{`{"sandboxId":"gone","message":"The sandbox was not found","code":502}`}},
		{closedPort, browser, true, []string{"no service running on port 8001", string(s.ID)}},
		{"8000-gone.berm.test", browser, true, []string{"Sandbox Not Found"}},
		{closedPort, append([]string{"Sec-Fetch-Mode", "navigate"}, browser...), true, []string{"no service running on port"}},
		{closedPort, append([]string{"Sec-Fetch-Mode", "cors"}, browser...), false, nil},
		{closedPort, append([]string{"X-Requested-With", "XMLHttpRequest"}, browser...), false, nil},
		{closedPort, []string{"User-Agent", "Mozilla/5.0", "Accept", "application/json, text/html"}, false, nil},
		{closedPort, []string{"User-Agent", "curl/8", "Accept", "*/*"}, false, nil},
	} {
		wg.Go(func() {
			status, body, header := w.get(c.host, "/", c.header...)
			wantType := "application/json; charset=utf-8"
			if c.html {
				wantType = "text/html; charset=utf-8"
				if !strings.HasPrefix(body, "<html") || !strings.HasSuffix(body, "</html>") {
					t.Errorf("page %q", body)
				}
			}
			if status != 502 || header.Get("Content-Type") != wantType {
				t.Errorf("%s %q: %d %s", c.host, c.header, status, header.Get("Content-Type"))
			}
			for _, text := range c.want {
				if !strings.Contains(body, text) {
					t.Errorf("%s %q: no %q in %s", c.host, c.header, text, body)
				}
			}
		})
	}
	wg.Wait()
	if status, body, _ := w.get("8000-"+string(s.ID)+".berm.test", "/broken"); status != 502 || !strings.Contains(body, "no valid answer") {
		t.Errorf("broken service: %d %s", status, body)
	}
}

func TestReservedRoutes(t *testing.T) {
	w := newWorld(t, "berm.test")
	s := w.create()
	for _, path := range []string{"/init", "/INIT", "/init/", "//init", "/a/../init", "/%69nit", "/freeze", "/unfreeze", "/fsfreeze", "/fsthaw", "/collapse", "/upgrade"} {
		for _, method := range []string{"GET", "POST", "PUT", "OPTIONS", "HEAD"} {
			r, err := http.DefaultTransport.RoundTrip(w.request(method, "localhost", path, nil, idHeader, string(s.ID)))
			if err != nil {
				t.Fatal(err)
			}
			body, _ := io.ReadAll(r.Body)
			r.Body.Close()
			if r.StatusCode != http.StatusNotFound || method != "HEAD" && !strings.Contains(string(body), "reserved for the E2B control plane") {
				t.Errorf("%s %s: %d %s", method, path, r.StatusCode, body)
			}
		}
	}
	if status, _, _ := w.get("8000-"+string(s.ID)+".berm.test", "/init"); status != 200 {
		t.Errorf("/init of a user's server: %d", status)
	}
}

func TestTrafficToken(t *testing.T) {
	w := newWorld(t, "berm.test")
	s := w.create(func(r *control.CreateRequest) { r.Network.Private = true })
	other := w.create(func(r *control.CreateRequest) { r.Network.Private = true })
	host := "8000-" + string(s.ID) + ".berm.test"
	for token, want := range map[string]string{
		"":                 "Token header 'e2b-traffic-access-token' is missing",
		"wrong":            "Provided token in header 'e2b-traffic-access-token' is invalid",
		other.TrafficToken: "is invalid",
		s.AccessToken:      "is invalid",
	} {
		if status, body, _ := w.get(host, "/x", trafficHeader, token); status != 403 || !strings.Contains(body, want) {
			t.Errorf("token %q: %d %s", token, status, body)
		}
	}
	if status, body, _ := w.get(host, "/x", trafficHeader, s.TrafficToken); status != 200 || strings.Contains(body, s.TrafficToken) {
		t.Errorf("right token: %d %s", status, body)
	}
	if status, _, _ := w.get("49983-"+string(s.ID)+".berm.test", "/health"); status != 204 {
		t.Errorf("the agent's port asks for the traffic token: %d", status)
	}
	if status, body, _ := w.get(host, "/", "User-Agent", "Mozilla/5.0", "Accept", "text/html"); status != 403 || !strings.Contains(body, "Missing Traffic Access Token") {
		t.Errorf("page: %d %s", status, body)
	}
}

func TestWhatTheSandboxSees(t *testing.T) {
	w := newWorld(t, "berm.test")
	s := w.create(func(r *control.CreateRequest) { r.Network.MaskHost = "localhost:${PORT}" })
	key := "e2b_" + strings.Repeat("a", 40)
	host := "8000-" + string(s.ID) + ".berm.test"
	_, body, _ := w.get(host, "/a%2Fb/c?x=1&y=%20;z", "X-API-Key", key, "Authorization", "Bearer "+key, "X-Forwarded-For", "6.6.6.6", "X-Access-Token", "mine", "Connection", "X-Access-Token")
	var seen struct {
		Host, Path, Query string
		Header            http.Header
	}
	if err := json.Unmarshal([]byte(body), &seen); err != nil {
		t.Fatal(err)
	}
	h := seen.Header
	if seen.Host != "localhost:8000" || h.Get("X-Forwarded-Host") != host || h.Get("X-Forwarded-Proto") != "http" || h.Get("X-Forwarded-For") != "127.0.0.1" {
		t.Errorf("forwarding: %s %v", seen.Host, h)
	}
	if seen.Path != "/a%2Fb/c" || seen.Query != "x=1&y=%20;z" {
		t.Errorf("path %s, query %s", seen.Path, seen.Query)
	}
	if strings.Contains(body, key) {
		t.Error("the API key reached the sandbox")
	}
	_, body, _ = w.get(host, "/", "X-API-Key", "key-of-the-users-app")
	if !strings.Contains(body, "key-of-the-users-app") {
		t.Error("a user's own header was lost")
	}
}

// signedURL is a file URL as clients make it.
func signedURL(token, operation, path, user, expiration string) string {
	q := url.Values{"path": {path}, "signature": {sign(path, operation, user, token, expiration)}}
	if user != "" {
		q.Set("username", user)
	}
	if expiration != "" {
		q.Set("signature_expiration", expiration)
	}
	return "/files?" + q.Encode()
}

func TestSignature(t *testing.T) {
	const want = "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E"
	if got := sign("hello.txt", "read", "user", "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0", ""); got != want {
		t.Errorf("signature %s, want %s", got, want)
	}
}

func TestRequestsWithoutSandbox(t *testing.T) {
	w := newWorld(t, "berm.test")
	w.create()
	s := w.create()
	w.create(func(r *control.CreateRequest) { r.Secure = false })
	for path, want := range map[string]int{
		signedURL(s.AccessToken, "read", "a.txt", "user", ""):      200,
		signedURL(s.AccessToken, "read", "a.txt", "", "99"):        200, // the agent judges the expiry
		signedURL(s.AccessToken, "write", "a.txt", "user", ""):     401,
		signedURL("", "read", "a.txt", "user", ""):                 401, // an unsecured sandbox has no token to sign with
		signedURL(s.AccessToken, "read", "a.txt", "", "") + "&x=1": 200,
		"/files?path=a":                401,
		"/files?path=a&signature=v1_x": 401,
		"/files?path=a&signature=" + strings.Repeat("x", 9999): 401,
		"/process.Process/List":                                401,
		"/filesystem.Filesystem/Stat":                          401,
	} {
		if status, body, _ := w.get("127.0.0.1", path); status != want {
			t.Errorf("%s: %d %s, want %d", path, status, body, want)
		}
	}
	for token, want := range map[string]int{s.AccessToken: 200, "wrong": 401} {
		if status, body, _ := w.get("127.0.0.1", "/process.Process/List", "X-Access-Token", token); status != want {
			t.Errorf("token %q: %d %s", token, status, body)
		}
	}
	w.sessions.Kill(t.Context(), s.ID, audit.Actor{})
	if status, _, _ := w.get("127.0.0.1", signedURL(s.AccessToken, "read", "a.txt", "user", "")); status != 401 {
		t.Errorf("signed URL of a dead sandbox: %d", status)
	}
}

func TestStreamsAreCut(t *testing.T) {
	for name, end := range map[string]func(*world, berm.SandboxID){
		"kill":    func(w *world, id berm.SandboxID) { w.sessions.Kill(context.Background(), id, audit.Actor{}) },
		"pause":   func(w *world, id berm.SandboxID) { w.sessions.Pause(context.Background(), id, audit.Actor{}) },
		"timeout": func(w *world, id berm.SandboxID) { w.sessions.SetTimeout(context.Background(), id, 0, audit.Actor{}) },
	} {
		for _, protocol := range []string{"HTTP/1.1", "HTTP/2.0"} {
			t.Run(name+" "+protocol, func(t *testing.T) {
				w := newWorld(t, "")
				s := w.create()
				transport := &http.Transport{Protocols: new(http.Protocols)}
				transport.Protocols.SetHTTP1(protocol == "HTTP/1.1")
				transport.Protocols.SetUnencryptedHTTP2(protocol == "HTTP/2.0")
				defer transport.CloseIdleConnections()
				r, err := transport.RoundTrip(w.request("GET", "", "/stream", nil, idHeader, string(s.ID)))
				if err != nil {
					t.Fatal(err)
				}
				defer r.Body.Close()
				if r.Proto != protocol {
					t.Fatalf("protocol %s", r.Proto)
				}
				if _, err := io.ReadFull(r.Body, make([]byte, 30)); err != nil {
					t.Fatal(err)
				}
				begin := time.Now()
				go end(w, s.ID)
				if _, err := io.Copy(io.Discard, r.Body); err == nil || errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
					t.Errorf("the stream ended as if it were whole: %v", err)
				}
				if took := time.Since(begin); took > 10*time.Second {
					t.Errorf("cut after %v", took)
				}
				if status, _, _ := w.get("", "/health", idHeader, string(s.ID)); status != 502 {
					t.Errorf("/health afterwards: %d", status)
				}
			})
		}
	}
}

func TestWebSocket(t *testing.T) {
	w := newWorld(t, "")
	s := w.create()
	conn, err := net.Dial("tcp", w.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "GET /upgrade-me HTTP/1.1\r\nHost: 8000-%s.x.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", s.ID)
	buf := bufio.NewReader(conn)
	r, err := http.ReadResponse(buf, nil)
	if err != nil || r.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("%v %v", r, err)
	}
	r.Body.Close()
	for range 3 {
		fmt.Fprint(conn, "hello\n")
		if line, err := buf.ReadString('\n'); err != nil || line != "echo hello\n" {
			t.Fatalf("%q %v", line, err)
		}
	}
	w.sessions.Kill(t.Context(), s.ID, audit.Actor{})
	conn.SetReadDeadline(time.Now().Add(30 * time.Second))
	if _, err := buf.ReadString('\n'); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("after kill: %v", err)
	}
}

func TestFullDuplex(t *testing.T) {
	w := newWorld(t, "")
	s := w.create()
	in, out := io.Pipe()
	r, err := http.DefaultTransport.RoundTrip(w.request("POST", "", "/duplex", in, idHeader, string(s.ID)))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	lines := bufio.NewReader(r.Body)
	for range 3 {
		io.WriteString(out, "ping\n")
		if line, err := lines.ReadString('\n'); err != nil || line != "PING\n" {
			t.Fatalf("%q %v", line, err)
		}
	}
	out.Close()
}

func TestGRPCGoesOverHTTP2WithTrailers(t *testing.T) {
	w := newWorld(t, "")
	s := w.create()
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	defer transport.CloseIdleConnections()
	r, err := transport.RoundTrip(w.request("POST", "", "/trailers", strings.NewReader("x"), idHeader, string(s.ID), "Content-Type", "application/grpc+proto", "TE", "trailers"))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	body, _ := io.ReadAll(r.Body)
	if string(body) != "HTTP/2.0" || r.Trailer.Get("Grpc-Status") != "0" {
		t.Errorf("%s, trailers %v", body, r.Trailer)
	}
}

// What a program inside answers must not take the server's memory.
func TestAnswersHeadersAreBounded(t *testing.T) {
	w := newWorld(t, "")
	s := w.create()
	if status, body, _ := w.get("", "/headers", idHeader, string(s.ID), portHeader, "8000"); status != http.StatusBadGateway {
		t.Errorf("HTTP/1.1: %d %.100s", status, body)
	}
	transport := &http.Transport{Protocols: new(http.Protocols), MaxResponseHeaderBytes: 16 << 20}
	transport.Protocols.SetUnencryptedHTTP2(true)
	defer transport.CloseIdleConnections()
	r, err := transport.RoundTrip(w.request("POST", "", "/headers", nil, idHeader, string(s.ID), portHeader, "8000", "Content-Type", "application/grpc"))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	if r.StatusCode != http.StatusBadGateway {
		t.Errorf("HTTP/2: %s", r.Status)
	}
}

// Clients of HTTP/2 take the reset of a stream on which they still send for a failure,
// whatever was answered.
func TestRefusalTakesInTheBody(t *testing.T) {
	w := newWorld(t, "")
	s := w.create()
	for path, id := range map[string]string{"/init": string(s.ID), "/files": "i0aaaaaaaaaaaaaaaaaaa", "/v2/sandboxes": ""} {
		conn, err := net.Dial("tcp", w.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(10 * time.Second))
		var block bytes.Buffer
		fields := hpack.NewEncoder(&block)
		for _, f := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":authority", "127.0.0.1"}, {":path", path}, {"content-length", "2"}, {"e2b-sandbox-id", id}} {
			if f[1] != "" {
				fields.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]})
			}
		}
		io.WriteString(conn, http2.ClientPreface)
		framer := http2.NewFramer(conn, conn)
		framer.WriteSettings()
		framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true})
		time.Sleep(50 * time.Millisecond) // the server would have answered by now
		framer.WriteData(1, true, []byte("{}"))
		framer.WritePing(false, [8]byte{1})
		for answered, acknowledged := false, false; !answered || !acknowledged; {
			frame, err := framer.ReadFrame()
			if err != nil {
				t.Fatalf("%s: %v", path, err)
			}
			switch frame := frame.(type) {
			case *http2.RSTStreamFrame:
				t.Fatalf("%s: stream reset: %v", path, frame.ErrCode)
			case *http2.DataFrame:
				answered = answered || frame.StreamEnded()
			case *http2.PingFrame:
				acknowledged = acknowledged || frame.IsAck()
			}
		}
	}
}

func TestLargeBodiesTakeConstantMemory(t *testing.T) {
	w := newWorld(t, "")
	s := w.create()
	peak := watchHeap(t)
	const size = 64 << 20
	r, err := http.DefaultTransport.RoundTrip(w.request("POST", "", "/sink", io.LimitReader(zeros{}, size), idHeader, string(s.ID)))
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(r.Body)
	r.Body.Close()
	if string(body) != fmt.Sprint(size) {
		t.Errorf("%s bytes arrived", body)
	}
	r, err = http.DefaultTransport.RoundTrip(w.request("GET", "", "/source", nil, idHeader, string(s.ID)))
	if err != nil {
		t.Fatal(err)
	}
	n, err := io.Copy(io.Discard, r.Body)
	r.Body.Close()
	if n != size || err != nil {
		t.Errorf("%d bytes came, %v", n, err)
	}
	if grown := peak(); grown > 16<<20 {
		t.Errorf("the heap grew by %d MiB", grown>>20)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// watchHeap returns a function that tells by how much the heap grew at most.
func watchHeap(t *testing.T) func() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	start, peak := m.HeapAlloc, m.HeapAlloc
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
				runtime.ReadMemStats(&m)
				peak = max(peak, m.HeapAlloc)
			}
		}
	}()
	return func() uint64 { close(stop); <-stopped; return peak - start }
}

func TestTrafficWakesOnce(t *testing.T) {
	w := newWorld(t, "")
	s := w.create(func(r *control.CreateRequest) { r.AutoResume = true })
	stays := w.create()
	var resumes atomic.Int32
	w.engine.Fail(func(_ berm.SandboxID, method string) error {
		if method == "Resume" {
			resumes.Add(1)
			time.Sleep(20 * time.Millisecond)
		}
		return nil
	})
	for _, id := range []berm.SandboxID{s.ID, stays.ID} {
		if err := w.sessions.Pause(t.Context(), id, audit.Actor{}); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	for range 30 {
		wg.Go(func() {
			if status, body, _ := w.get("8000-"+string(s.ID)+".x.test", "/x"); status != 200 {
				t.Errorf("%d %s", status, body)
			}
		})
	}
	wg.Wait()
	if resumes.Load() != 1 {
		t.Errorf("%d resumes", resumes.Load())
	}
	if status, _, _ := w.get("8000-"+string(stays.ID)+".x.test", "/x"); status != 502 {
		t.Errorf("a sandbox that stays paused answers %d", status)
	}
}

func TestServerThatStartsLate(t *testing.T) {
	w := newWorld(t, "")
	s := w.create()
	var tries atomic.Int32
	w.engine.Fail(func(_ berm.SandboxID, method string) error {
		if method == "Dial" && tries.Add(1) < 4 {
			return berm.Errorf(berm.Unavailable, "nothing listens yet")
		}
		return nil
	})
	if status, body, _ := w.get("8000-"+string(s.ID)+".x.test", "/x"); status != 200 {
		t.Errorf("%d %s", status, body)
	}
}

func TestHTTPSPort(t *testing.T) {
	w := newWorld(t, "")
	inside := httptest.NewTLSServer(http.HandlerFunc(echo))
	defer inside.Close()
	s := w.create(func(r *control.CreateRequest) { r.Network.HTTPSPorts = []uint16{8443} })
	route, _ := w.sessions.Route(s.ID)
	l := w.router.line(route, context.Background())
	l.http1.DialContext = func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("tcp", inside.Listener.Addr().String())
	}
	l.http1.TLSClientConfig = &tls.Config{InsecureSkipVerify: true}
	out := httptest.NewRecorder()
	l.proxy(route, 8443, exchange{}).ServeHTTP(out, httptest.NewRequest(http.MethodGet, "https://8443-x.berm.test/x", nil))
	if out.Code != 200 || !strings.Contains(out.Body.String(), `"path":"/x"`) {
		t.Errorf("%d %s", out.Code, out.Body)
	}
}

func TestIdleConnectionsAreBounded(t *testing.T) {
	w := newWorld(t, "")
	s := w.create()
	var dials atomic.Int32
	w.engine.Fail(func(_ berm.SandboxID, method string) error {
		if method == "Dial" {
			dials.Add(1)
		}
		return nil
	})
	for range 20 {
		w.get("", "/x", idHeader, string(s.ID))
	}
	if n := dials.Load(); n > 2 {
		t.Errorf("%d connections for 20 requests one after another", n)
	}
	w.router.mu.Lock()
	l := w.router.lines[s.ID]
	w.router.mu.Unlock()
	if l.http1.MaxIdleConns+l.http2.MaxIdleConns > 3 {
		t.Error("more than 3 idle connections per sandbox")
	}
	w.sessions.Kill(t.Context(), s.ID, audit.Actor{})
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		w.router.mu.Lock()
		n := len(w.router.lines)
		w.router.mu.Unlock()
		if n == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatal("connections of a dead sandbox are kept")
		}
	}
}

func TestPreflight(t *testing.T) {
	w := newWorld(t, "berm.test")
	s := w.create()
	for host, header := range map[string][]string{
		"49983-" + string(s.ID) + ".berm.test": nil,
		"localhost":                            {idHeader, string(s.ID)},
	} {
		header = append(header, "Origin", "https://app.test", "Access-Control-Request-Method", "POST", "Access-Control-Request-Headers", "x-access-token")
		r, err := http.DefaultTransport.RoundTrip(w.request("OPTIONS", host, "/files", nil, header...))
		if err != nil {
			t.Fatal(err)
		}
		r.Body.Close()
		if r.StatusCode != http.StatusNoContent || r.Header.Get("Access-Control-Allow-Origin") != "*" || r.Header.Get("Access-Control-Allow-Headers") != "x-access-token" {
			t.Errorf("%s: %d %v", host, r.StatusCode, r.Header)
		}
	}
}

func FuzzHost(f *testing.F) {
	f.Add("8000-i0abc.berm.test", "berm.test")
	f.Add("49983-i0abc-0.x", "")
	f.Add("80@1.1.1.1-i0", "")
	f.Fuzz(func(t *testing.T, host, domain string) {
		to, ok := parseHost(hostOf(host), domain)
		if !ok {
			return
		}
		if _, err := berm.ParseSandboxID(string(to.id)); err != nil || to.port == 0 {
			t.Errorf("%q is taken for port %d of %q", host, to.port, to.id)
		}
	})
}

func FuzzHeaders(f *testing.F) {
	f.Add("i0abc", "49983")
	f.Add("i0abc-0", "")
	f.Fuzz(func(t *testing.T, id, port string) {
		to, err := parseHeaders(id, port)
		if err != nil {
			return
		}
		if _, err := berm.ParseSandboxID(string(to.id)); err != nil || to.port == 0 {
			t.Errorf("%q %q is taken for port %d of %q", id, port, to.port, to.id)
		}
	})
}

func BenchmarkProxy(b *testing.B) {
	w := newWorld(b, "")
	s := w.create()
	body := bytes.NewReader(nil)
	for b.Loop() {
		r, err := http.DefaultTransport.RoundTrip(w.request("GET", "", "/health", body, idHeader, string(s.ID)))
		if err != nil {
			b.Fatal(err)
		}
		r.Body.Close()
	}
}
