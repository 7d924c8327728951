package server

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os/user"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/guest/config"
	"github.com/berm-sandbox/berm/internal/guest/ports"
	pb "github.com/berm-sandbox/berm/internal/proto/process"
	"github.com/berm-sandbox/berm/internal/proto/process/processconnect"
)

const token = "a-token"

// agent is a server with its two entrances.
type agent struct {
	t      *testing.T
	socket string // for callers from outside
	inside string // address for programs in the sandbox
}

func start(t *testing.T, configJSON string) *agent {
	t.Helper()
	c, _ := config.Open(nil, "")
	if configJSON != "" {
		if err := c.Init([]byte(configJSON)); err != nil {
			t.Fatal(err)
		}
	}
	a := &agent{t: t, socket: filepath.Join(t.TempDir(), "s")}
	outside, err := net.Listen("unix", a.socket)
	if err != nil {
		t.Fatal(err)
	}
	inside, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	a.inside = inside.Addr().String()
	s := New(c)
	go s.Serve(ports.Listen(outside))
	go s.Serve(inside)
	t.Cleanup(func() { s.Close() })
	return a
}

// dial does what the server outside does.
func (a *agent) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", a.socket)
	if err != nil {
		return nil, err
	}
	if _, err := c.Write([]byte{1, berm.AgentPort >> 8, berm.AgentPort & 0xff}); err != nil {
		return nil, err
	}
	var status [1]byte
	_, err = io.ReadFull(c, status[:])
	return c, err
}

func (a *agent) client(h2 bool) *http.Client {
	tr := &http.Transport{DialContext: a.dial}
	if h2 {
		tr.Protocols = new(http.Protocols)
		tr.Protocols.SetUnencryptedHTTP2(true)
	}
	a.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 20 * time.Second}
}

func (a *agent) do(c *http.Client, method, url, body string, header ...string) (*http.Response, string) {
	a.t.Helper()
	req, err := http.NewRequestWithContext(a.t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		a.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		a.t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		a.t.Fatal(err)
	}
	return resp, string(data)
}

func configFor(t *testing.T, rest string) string {
	t.Helper()
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	return `{"defaultUser":"` + me.Username + `","defaultWorkdir":"/"` + rest + `}`
}

func TestAuthorization(t *testing.T) {
	a := start(t, configFor(t, `,"accessToken":"`+token+`","envVars":{"A":"b"}`))
	const refused = `{"code":401,"message":"unauthorized access, please provide a valid access token or method signing if supported"}` + "\n"
	for _, where := range []string{"outside", "inside"} {
		c, url := a.client(false), "http://agent"
		if where == "inside" {
			c, url = http.DefaultClient, "http://"+a.inside
		}
		for _, tc := range []struct{ method, path, body string }{
			{"GET", "/envs", ""},
			{"GET", "/metrics", ""},
			{"POST", "/files/compose", "{}"},
			{"DELETE", "/files", ""},
			{"GET", "/nothing", ""},
			{"POST", "/process.Process/List", "{}"},
			{"POST", "/process.Process/Start", ""},
			{"POST", "/filesystem.Filesystem/Stat", "{}"},
		} {
			for _, header := range [][]string{nil, {"X-Access-Token", "wrong"}} {
				resp, body := a.do(c, tc.method, url+tc.path, tc.body, append(header, "Content-Type", "application/json")...)
				if resp.StatusCode != 401 || body != refused || resp.Header.Get("Access-Control-Allow-Origin") != "*" {
					t.Errorf("%s, %s %s: %d %q", where, tc.method, tc.path, resp.StatusCode, body)
				}
			}
		}
		if resp, body := a.do(c, "GET", url+"/health", ""); resp.StatusCode != 204 || body != "" {
			t.Errorf("%s: health: %d %q", where, resp.StatusCode, body)
		}
		if resp, body := a.do(c, "GET", url+"/files?path=/etc/passwd", ""); resp.StatusCode != 401 || !strings.Contains(body, "missing signature") {
			t.Errorf("%s: files: %d %q", where, resp.StatusCode, body)
		}
		resp, body := a.do(c, "GET", url+"/envs", "", "X-Access-Token", token)
		var env map[string]string
		if err := json.Unmarshal([]byte(body), &env); err != nil || resp.StatusCode != 200 || env["A"] != "b" || env["E2B_SANDBOX"] != "true" {
			t.Errorf("%s: envs: %d %q", where, resp.StatusCode, body)
		}
	}
	// A Go client must read the refusal as what it is.
	client := processconnect.NewProcessClient(a.client(true), "http://agent")
	if _, err := client.List(t.Context(), connect.NewRequest(&pb.ListRequest{})); connect.CodeOf(err) != connect.CodeUnauthenticated {
		t.Errorf("connect: %v", err)
	}
}

func TestUnsecured(t *testing.T) {
	a := start(t, configFor(t, ""))
	if resp, _ := a.do(a.client(false), "GET", "http://agent/envs", ""); resp.StatusCode != 200 {
		t.Errorf("without a token: %d", resp.StatusCode)
	}
}

func TestInit(t *testing.T) {
	a := start(t, "")
	c := a.client(false)
	if resp, _ := a.do(c, "GET", "http://agent/health", ""); resp.StatusCode != 204 {
		t.Errorf("health before: %d", resp.StatusCode)
	}
	for _, path := range []string{"/envs", "/files?path=/etc/passwd", "/metrics"} {
		if resp, _ := a.do(c, "GET", "http://agent"+path, ""); resp.StatusCode != 503 {
			t.Errorf("%s before: %d", path, resp.StatusCode)
		}
	}
	// Nobody inside may configure the agent, ever.
	for _, path := range append(reserved, "/init?x=y", "//init") {
		for _, method := range []string{"GET", "POST", "PUT", "OPTIONS"} {
			resp, body := a.do(&http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }},
				method, "http://"+a.inside+path, `{"accessToken":"mine"}`, "X-Access-Token", token)
			if path == "//init" {
				if resp.StatusCode/100 == 2 && method != "OPTIONS" {
					t.Errorf("%s %s: %d", method, path, resp.StatusCode)
				}
			} else if resp.StatusCode != 404 || !strings.Contains(body, "reserved for the E2B control plane") {
				t.Errorf("%s %s: %d %q", method, path, resp.StatusCode, body)
			}
		}
	}
	if resp, body := a.do(c, "POST", "http://agent/init", configFor(t, `,"accessToken":"`+token+`"`)); resp.StatusCode != 204 {
		t.Fatalf("init: %d %q", resp.StatusCode, body)
	}
	if resp, _ := a.do(c, "GET", "http://agent/envs", "", "X-Access-Token", token); resp.StatusCode != 200 {
		t.Errorf("envs after: %d", resp.StatusCode)
	}
	if resp, _ := a.do(c, "POST", "http://agent/init", `{"accessToken":"other"}`); resp.StatusCode != 401 {
		t.Errorf("init without the token: %d", resp.StatusCode)
	}
	if resp, _ := a.do(c, "POST", "http://agent/init", `{"accessToken":"other"}`, "X-Access-Token", token); resp.StatusCode != 204 {
		t.Errorf("a new token: %d", resp.StatusCode)
	}
	if resp, _ := a.do(c, "GET", "http://agent/envs", "", "X-Access-Token", token); resp.StatusCode != 401 {
		t.Errorf("the old token: %d", resp.StatusCode)
	}
	if resp, _ := a.do(c, "POST", "http://agent/init", `{`, "X-Access-Token", "other"); resp.StatusCode != 400 {
		t.Errorf("bad init: %d", resp.StatusCode)
	}
}

func TestCORS(t *testing.T) {
	a := start(t, configFor(t, `,"accessToken":"`+token+`"`))
	resp, _ := a.do(a.client(false), "OPTIONS", "http://agent/process.Process/Start", "", "Origin", "https://page.example",
		"Access-Control-Request-Method", "POST", "Access-Control-Request-Headers", "authorization,x-access-token")
	h := resp.Header
	if resp.StatusCode != 204 || h.Get("Access-Control-Allow-Origin") != "*" || !strings.Contains(h.Get("Access-Control-Allow-Methods"), "POST") ||
		h.Get("Access-Control-Allow-Headers") != "authorization,x-access-token" {
		t.Errorf("%d %v", resp.StatusCode, h)
	}
}

func TestMetrics(t *testing.T) {
	a := start(t, configFor(t, ""))
	var m metrics
	for range 2 {
		_, body := a.do(a.client(false), "GET", "http://agent/metrics", "")
		if err := json.Unmarshal([]byte(body), &m); err != nil {
			t.Fatal(err, body)
		}
		time.Sleep(110 * time.Millisecond)
	}
	if m.CPUs < 1 || m.MemTotal == 0 || m.MemUsed == 0 || m.MemUsed > m.MemTotal || m.DiskTotal == 0 || m.TotalMiB != m.MemTotal>>20 ||
		m.CPUUsed < 0 || m.CPUUsed > 100 || time.Since(time.Unix(m.At, 0)) > time.Minute {
		t.Errorf("%+v", m)
	}
}

// Every codec and HTTP version that clients use, over the socket.
func TestProtocols(t *testing.T) {
	a := start(t, configFor(t, `,"accessToken":"`+token+`"`))
	for name, tc := range map[string]struct {
		h2      bool
		options []connect.ClientOption
	}{
		"HTTP/1.1 JSON":  {false, []connect.ClientOption{connect.WithProtoJSON()}},
		"HTTP/1.1 proto": {false, nil},
		"h2c JSON":       {true, []connect.ClientOption{connect.WithProtoJSON()}},
		"h2c gRPC":       {true, []connect.ClientOption{connect.WithGRPC()}},
		"gRPC-Web":       {false, []connect.ClientOption{connect.WithGRPCWeb()}},
	} {
		t.Run(name, func(t *testing.T) {
			c := processconnect.NewProcessClient(a.client(tc.h2), "http://agent", tc.options...)
			req := connect.NewRequest(&pb.StartRequest{Process: &pb.ProcessConfig{Cmd: "/bin/echo", Args: []string{"hi"}}})
			req.Header().Set("X-Access-Token", token)
			stream, err := c.Start(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			var out string
			ended := false
			for stream.Receive() {
				out += string(stream.Msg().GetEvent().GetData().GetStdout())
				ended = ended || stream.Msg().GetEvent().GetEnd() != nil
			}
			if stream.Err() != nil || out != "hi\n" || !ended {
				t.Errorf("%q, ended %v, %v", out, ended, stream.Err())
			}
		})
	}
}

// Clients that mean no deadline may say 0.
func TestZeroTimeout(t *testing.T) {
	a := start(t, configFor(t, ""))
	resp, body := a.do(a.client(false), "POST", "http://agent/process.Process/List", "{}", "Content-Type", "application/json", "Connect-Timeout-Ms", "0")
	if resp.StatusCode != 200 {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
}

// Bad input: answered, never with a crash.
func TestBadInput(t *testing.T) {
	a := start(t, configFor(t, ""))
	c := a.client(false)
	for _, tc := range []struct {
		path, contentType, body string
		code                    int
	}{
		{"/process.Process/List", "application/json", "{", 400},
		{"/process.Process/List", "application/json", `{"unknown":1}`, 200},
		{"/process.Process/List", "text/plain", "{}", 415},
		{"/process.Process/SendSignal", "application/json", `{"process":{"pid":"x"}}`, 400},
		{"/process.Process/SendSignal", "application/json", `{"process":{"pid":1},"signal":9}`, 404},
		{"/process.Process/SendSignal", "application/json", `{}`, 400},
		{"/process.Process/SendInput", "application/json", `{"process":{"pid":1},"input":{"stdin":"%%%"}}`, 400},
		{"/process.Process/Nothing", "application/json", `{}`, 404},
		{"/filesystem.Filesystem/Stat", "application/json", `{"path":"a\u0000b"}`, 400},
		{"/filesystem.Filesystem/Stat", "application/proto", "\xff\xff\xff", 400},
		{"/filesystem.Filesystem/GetWatcherEvents", "application/json", `{"watcher_id":"w1"}`, 404},
	} {
		resp, body := a.do(c, "POST", "http://agent"+tc.path, tc.body, "Content-Type", tc.contentType)
		if resp.StatusCode != tc.code {
			t.Errorf("%s %q: %d %q, want %d", tc.path, tc.body, resp.StatusCode, body, tc.code)
		}
	}
	huge, err := a.dial(t.Context(), "", "")
	if err != nil {
		t.Fatal(err)
	}
	defer huge.Close()
	huge.SetDeadline(time.Now().Add(10 * time.Second))
	go io.WriteString(huge, "GET /health HTTP/1.1\r\nHost: a\r\nX: "+strings.Repeat("x", 1<<20)+"\r\n\r\n")
	if answer, _ := io.ReadAll(huge); !strings.HasPrefix(string(answer), "HTTP/1.1 431") {
		t.Errorf("a header of 1 MiB: %.80q", answer)
	}
	if resp, _ := a.do(c, "GET", "http://agent/health", ""); resp.StatusCode != 204 {
		t.Errorf("afterwards: %d", resp.StatusCode)
	}
}
