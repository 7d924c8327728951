package serve

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/control/enginetest"
	"github.com/berm-sandbox/berm/internal/store"
)

// driver is a driver over an engine in memory that outlives servers.
type driver struct{ *enginetest.Engine }

func (driver) Level() berm.Level                      { return berm.Namespace }
func (d driver) Probe(ctx context.Context) berm.Probe { return d.Engine.Probe(ctx)[0] }

// instance is a server that runs.
type instance struct {
	t      *testing.T
	config Config
	out    *enginetest.Log
	addr   string
	stop   context.CancelFunc
	done   chan error
}

func run(t *testing.T, change ...func(*Config)) *instance {
	t.Helper()
	i := &instance{t: t, out: &enginetest.Log{}, done: make(chan error, 1)}
	i.config = Config{
		Listen: "127.0.0.1:0", Data: t.TempDir(), DefaultEgress: EgressPublic, MaxTimeout: time.Hour, Templates: enginetest.Templates{},
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Out: i.out,
		Drivers: func(Watch, string) ([]berm.Driver, error) { return []berm.Driver{driver{&enginetest.Engine{}}}, nil },
	}
	for _, f := range change {
		f(&i.config)
	}
	i.start()
	return i
}

func (i *instance) start() {
	i.t.Helper()
	var ctx context.Context
	ctx, i.stop = context.WithCancel(context.Background())
	i.t.Cleanup(i.stop)
	go func() { i.done <- Run(ctx, i.config) }()
	served := regexp.MustCompile(`serves at http://(\S+)`)
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		if all := served.FindAllStringSubmatch(i.out.String(), -1); len(all) > 0 && all[len(all)-1][1] != i.addr {
			i.addr = all[len(all)-1][1]
			return
		}
		select {
		case err := <-i.done:
			i.t.Fatalf("the server ended: %v", err)
		default:
		}
		if time.Now().After(end) {
			i.t.Fatal("the server does not serve")
		}
	}
}

func (i *instance) shutdown() {
	i.t.Helper()
	i.stop()
	select {
	case err := <-i.done:
		if err != nil {
			i.t.Error(err)
		}
	case <-time.After(grace + 5*time.Second):
		i.t.Fatal("the server does not stop")
	}
}

func (i *instance) post(key, path, body string) (int, string) {
	i.t.Helper()
	return do(i.t, http.DefaultClient, "POST", "http://"+i.addr+path, key, body)
}

func do(t *testing.T, client *http.Client, method, url, key, body string) (int, string) {
	t.Helper()
	r, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("X-API-Key", key)
	answer, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	content, _ := io.ReadAll(answer.Body)
	return answer.StatusCode, string(content)
}

var keyShape = regexp.MustCompile(`e2b_[0-9a-f]{40}`)

func TestFirstStartPrintsAKeyOnce(t *testing.T) {
	engine := &enginetest.Engine{}
	i := run(t, func(c *Config) {
		c.Drivers = func(Watch, string) ([]berm.Driver, error) { return []berm.Driver{driver{engine}}, nil }
	})
	key := keyShape.FindString(i.out.String())
	if key == "" {
		t.Fatalf("no key in %s", i.out)
	}
	status, body := i.post(key, "/v2/sandboxes", `{"templateID":"base"}`)
	if status != 201 {
		t.Fatalf("%d %s", status, body)
	}
	id := regexp.MustCompile(`i0[a-z0-9]{19}`).FindString(body)
	i.shutdown()
	i.start()
	if n := len(keyShape.FindAllString(i.out.String(), -1)); n != 1 {
		t.Errorf("%d keys printed", n)
	}
	if status, body := do(t, http.DefaultClient, "GET", "http://"+i.addr+"/sandboxes/"+id, key, ""); status != 200 {
		t.Errorf("the sandbox after a restart: %d %s", status, body)
	}
	log, err := os.ReadFile(filepath.Join(i.config.Data, "audit", "log.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	for _, what := range []string{"key.create", "server.start", "sandbox.create", "sandbox.start", "server.stop"} {
		if !bytes.Contains(log, []byte(what)) {
			t.Errorf("no %s in the audit log", what)
		}
	}
	if bytes.Contains(log, []byte(key)) {
		t.Error("the key is in the audit log")
	}
}

// A start that fails shows no key, and leaves none that the next one would not show.
func TestAStartThatFailsMakesNoKey(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte(strings.Repeat("s", 32)), 0o644); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	i := run(t)
	i.shutdown()
	for what, change := range map[string]func(*Config){
		"a port that is taken":            func(c *Config) { c.Listen = listener.Addr().String() },
		"a secret that others can read":   func(c *Config) { c.Webhooks, c.WebhookSecret = []string{"http://127.0.0.1:1"}, secret },
		"a certificate that is not there": func(c *Config) { c.TLSCert, c.TLSKey = "nosuch", "nosuch" },
	} {
		c := i.config
		c.Data, c.Out = t.TempDir(), &enginetest.Log{}
		change(&c)
		if err := Run(t.Context(), c); err == nil || keyShape.MatchString(fmt.Sprint(c.Out)) {
			t.Errorf("%s: %v, %s", what, err, c.Out)
		}
		next := run(t, func(n *Config) { n.Data = c.Data })
		if !keyShape.MatchString(next.out.String()) {
			t.Errorf("%s: the next start shows no key: %s", what, next.out)
		}
		next.shutdown()
	}
}

func TestWhatLeavesTheMachine(t *testing.T) {
	for addr, want := range map[string]bool{"127.0.0.1:1": false, "127.8.0.1:1": false, "[::1]:1": false, "0.0.0.0:1": true, "[::]:1": true, "192.0.2.1:1": true} {
		at, err := net.ResolveTCPAddr("tcp", addr)
		if err != nil || leaves(at) != want {
			t.Errorf("%s: %t, %v", addr, leaves(at), err)
		}
	}
}

func TestWrongSettings(t *testing.T) {
	i := run(t)
	i.shutdown()
	for want, change := range map[string]func(*Config){
		"--webhook-secret-file": func(c *Config) { c.Webhooks = []string{"http://127.0.0.1:1"} },
		"--ask-secret-file":     func(c *Config) { c.AskWebhook = "http://127.0.0.1:1" },
		"--webhook-events":      func(c *Config) { c.WebhookEvents = []string{"nosuch"} },
		"--otlp-events":         func(c *Config) { c.OTLPEvents = []string{"nosuch"} },
		"--open":                func(c *Config) { c.Open = []string{"10.1.2.3/16"} },
	} {
		c := i.config
		c.Data = t.TempDir()
		change(&c)
		if err := Run(t.Context(), c); berm.KindOf(err) != berm.Invalid || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	one := run(t, func(c *Config) { c.Open = []string{"192.0.2.2", "10.1.0.0/16"} })
	if one.config.Open[0] != "192.0.2.2/32" {
		t.Errorf("%v", one.config.Open)
	}
}

// A level that somebody named is there, or the server does not start and says what there is.
func TestLevelThatCannotBeHad(t *testing.T) {
	for level, want := range map[berm.Level]string{"foo": `"foo" is not known here`, berm.MicroVM: `"microvm" is not known here`, berm.GVisor: "cannot be had here: no runsc (not found)"} {
		var setting SettingError
		err := Run(t.Context(), Config{
			Listen: "127.0.0.1:0", Data: t.TempDir(), DefaultEgress: EgressPublic, Log: slog.New(slog.DiscardHandler), Needed: []berm.Level{level},
			Drivers: func(Watch, string) ([]berm.Driver, error) {
				return []berm.Driver{driver{&enginetest.Engine{}}, unusable{driver{&enginetest.Engine{}}}}, nil
			},
		})
		if !errors.As(err, &setting) || !strings.Contains(err.Error(), want) || berm.HintOf(err) == "" {
			t.Errorf("%s: %v", level, err)
		}
	}
}

// unusable is a driver of a level that this host does not have.
type unusable struct{ driver }

func (unusable) Level() berm.Level { return berm.GVisor }

func (unusable) Probe(context.Context) berm.Probe {
	return berm.Probe{Level: berm.GVisor, ByName: true, Features: []berm.Feature{{Name: "runsc", Required: true, Detail: "not found"}}}
}

func TestBootstrapKey(t *testing.T) {
	key := "e2b_" + strings.Repeat("0123456789", 4)
	i := run(t, func(c *Config) { c.BootstrapKey = key })
	if strings.Contains(i.out.String(), "e2b_") {
		t.Error("a key was printed")
	}
	if status, body := i.post(key, "/v2/sandboxes", `{"templateID":"base"}`); status != 201 {
		t.Errorf("%d %s", status, body)
	}
	c := i.config
	c.Data, c.BootstrapKey = t.TempDir(), "short"
	if err := Run(t.Context(), c); berm.KindOf(err) != berm.Invalid {
		t.Errorf("bad bootstrap key: %v", err)
	}
}

func TestKeysChangeWhileTheServerRuns(t *testing.T) {
	i := run(t)
	db, err := store.OpenShared(i.config.Data)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	key, secret, err := db.CreateKey(t.Context(), store.Key{Name: "second"})
	if err != nil {
		t.Fatal(err)
	}
	if status, body := i.post(secret, "/v2/sandboxes", `{"templateID":"base"}`); status != 201 {
		t.Errorf("new key: %d %s", status, body)
	}
	if _, err := db.RevokeKey(t.Context(), key.ID); err != nil {
		t.Fatal(err)
	}
	if status, _ := i.post(secret, "/v2/sandboxes", `{"templateID":"base"}`); status != 401 {
		t.Errorf("revoked key: %d", status)
	}
}

func TestOneServerPerDataDirectory(t *testing.T) {
	i := run(t)
	if err := Run(t.Context(), i.config); berm.KindOf(err) != berm.Conflict {
		t.Errorf("second server: %v", err)
	}
}

// trusting returns a client that trusts the authority of a server and resolves every
// name to it.
func (i *instance) trusting(http2 bool) *http.Client {
	i.t.Helper()
	pem, err := os.ReadFile(filepath.Join(i.config.Data, "tls", "ca.pem"))
	if err != nil {
		i.t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	transport := &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: http2,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, i.addr)
		},
	}
	i.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func TestDevDomain(t *testing.T) {
	i := run(t, func(c *Config) { c.Domain, c.DevTLS = "berm.test", true })
	key := keyShape.FindString(i.out.String())
	_, port, _ := net.SplitHostPort(i.addr)
	for _, http2 := range []bool{false, true} {
		client := i.trusting(http2)
		status, body := do(t, client, "POST", "https://api.berm.test/v2/sandboxes", key, `{"templateID":"base"}`)
		if status != 201 || !strings.Contains(body, `"domain":"berm.test:`+port+`"`) {
			t.Errorf("%d %s", status, body)
		}
		if status, body := do(t, client, "GET", "https://8000-unknown.berm.test/", "", ""); status != 502 {
			t.Errorf("%d %s", status, body)
		}
		answer, err := client.Get("https://api.berm.test/health")
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		if (answer.ProtoMajor == 2) != http2 {
			t.Errorf("protocol %s", answer.Proto)
		}
	}
	if status, _ := i.post("", "/v2/sandboxes", ""); status != 401 {
		t.Errorf("plain HTTP on the same port: %d", status)
	}
	ca := func() string { b, _ := os.ReadFile(filepath.Join(i.config.Data, "tls", "ca.pem")); return string(b) }
	first := ca()
	i.shutdown()
	i.config.Domain = "other.test"
	i.start()
	if status, _ := do(t, i.trusting(true), "GET", "https://api.other.test/health", "", ""); status != 200 || ca() != first {
		t.Errorf("after another domain: %d", status)
	}
	if info, err := os.Stat(filepath.Join(i.config.Data, "tls", "ca-key.pem")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("key of the authority: %v %v", info, err)
	}
}

func TestHTTP2WithoutTLS(t *testing.T) {
	i := run(t)
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	defer transport.CloseIdleConnections()
	answer, err := (&http.Client{Transport: transport}).Get("http://" + i.addr + "/health")
	if err != nil {
		t.Fatal(err)
	}
	answer.Body.Close()
	if answer.ProtoMajor != 2 {
		t.Errorf("protocol %s", answer.Proto)
	}
}

// raw sends bytes and returns what comes back until the server closes.
func (i *instance) raw(send string, wait time.Duration) (string, error) {
	i.t.Helper()
	conn, err := net.Dial("tcp", i.addr)
	if err != nil {
		i.t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(wait))
	io.WriteString(conn, send)
	answer, err := io.ReadAll(conn)
	return string(answer), err
}

func TestHostileClients(t *testing.T) {
	i := run(t, func(c *Config) { c.Domain, c.DevTLS = "berm.test", true })
	for name, c := range map[string]struct{ send, want string }{
		"no HTTP":           {"\x00\x01\x02garbage\r\n\r\n", "400"},
		"TLS garbage":       {"\x16\x03\x01\x00\x05hello", "\x15"},
		"huge header":       {"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + strings.Repeat("a", 1<<20) + "\r\n\r\n", "431"},
		"many headers":      {"GET / HTTP/1.1\r\nHost: localhost\r\n" + strings.Repeat("X: a\r\n", 50_000) + "\r\n", "431"},
		"two hosts":         {"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "400"},
		"smuggling":         {"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x HTTP/1.1\r\n\r\n", "40"},
		"absolute form":     {"GET http://169.254.169.254/latest HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", "404"},
		"CONNECT":           {"CONNECT 10.0.0.1:22 HTTP/1.1\r\nHost: 10.0.0.1:22\r\nConnection: close\r\n\r\n", "404"},
		"NUL in the target": {"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n", "400"},
		"userinfo as host":  {"GET / HTTP/1.1\r\nHost: 80@169.254.169.254-i0abc\r\nConnection: close\r\n\r\n", "40"},
	} {
		answer, err := i.raw(c.send, 5*time.Second)
		first, _, _ := strings.Cut(answer, "\r\n")
		if !strings.Contains(first, c.want) && (err == nil || answer != "") {
			t.Errorf("%s: %q, %v", name, first, err)
		}
		var ne net.Error
		if errors.As(err, &ne) && ne.Timeout() {
			t.Errorf("%s: the server waits", name)
		}
	}
	if status, _ := do(t, http.DefaultClient, "GET", "http://"+i.addr+"/health", "", ""); status != 200 {
		t.Errorf("the server is not well afterwards: %d", status)
	}
}

func TestSlowClientsAreCutOff(t *testing.T) {
	if os.Getenv("BERM_TEST_ALL") == "" {
		t.Skip("takes the time limit for headers; BERM_TEST_ALL=1 runs it")
	}
	i := run(t, func(c *Config) { c.Domain, c.DevTLS = "berm.test", true })
	var wg sync.WaitGroup
	for name, start := range map[string]string{
		"nothing sent":         "",
		"half a header":        "GET / HTTP/1.1\r\nHost: local",
		"half a TLS hello":     "\x16\x03\x01\x02\x00\x01",
		"half an HTTP/2 hello": "PRI * HTTP/2.0\r\n",
	} {
		wg.Go(func() {
			begin := time.Now()
			_, err := i.raw(start, headerTime+10*time.Second)
			var ne net.Error
			if errors.As(err, &ne) && ne.Timeout() {
				t.Errorf("%s: still open after %v", name, time.Since(begin))
			}
		})
	}
	// A request whose body does not come.
	key := keyShape.FindString(i.out.String())
	wg.Go(func() {
		conn, err := net.Dial("tcp", i.addr)
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		fmt.Fprintf(conn, "POST /v2/sandboxes HTTP/1.1\r\nHost: localhost\r\nX-API-Key: %s\r\nContent-Length: 100\r\n\r\n{", key)
		conn.SetReadDeadline(time.Now().Add(45 * time.Second))
		answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil || answer.StatusCode != http.StatusBadRequest {
			t.Errorf("a body that does not come: %v, %v", answer, err)
			return
		}
		answer.Body.Close()
	})
	// Others are served meanwhile.
	for range 20 {
		begin := time.Now()
		if status, _ := do(t, http.DefaultClient, "GET", "http://"+i.addr+"/health", "", ""); status != 200 || time.Since(begin) > 10*time.Second {
			t.Errorf("%d after %v", status, time.Since(begin))
		}
		time.Sleep(20 * time.Millisecond)
	}
	wg.Wait()
}

func TestShutdownLeavesSandboxesAlive(t *testing.T) {
	engine := &enginetest.Engine{}
	i := run(t, func(c *Config) {
		c.BootstrapKey = "e2b_" + strings.Repeat("0", 40)
		c.Drivers = func(Watch, string) ([]berm.Driver, error) { return []berm.Driver{driver{engine}}, nil }
	})
	if status, body := i.post(i.config.BootstrapKey, "/v2/sandboxes", `{"templateID":"base"}`); status != 201 {
		t.Fatalf("%d %s", status, body)
	}
	i.shutdown()
	if alive, _ := engine.List(t.Context()); len(alive) != 1 || len(engine.Removed) > 0 {
		t.Errorf("alive %v, removed %v", alive, engine.Removed)
	}
}
