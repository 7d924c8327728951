package broker

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/credential"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/service"
)

const secret = "s3cr3t-of-the-test-0123456789"

// rig is a service with the two ends that talk to it.
type rig struct {
	*testing.T
	owner   *egress.Link
	gets    egress.Brokered
	network *service.Wire

	mu     sync.Mutex
	events []egress.Event
}

func files(t *testing.T) (*net.UnixConn, *os.File) {
	t.Helper()
	ours, theirs, err := service.Pair()
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn.(*net.UnixConn), theirs
}

// begin starts a service for one sandbox, which opens private addresses for policies to name.
func begin(t *testing.T, p egress.Policy, credentials ...egress.Credential) (*rig, error) {
	t.Helper()
	server, err := New(1000, 1000)
	if err != nil {
		t.Fatal(err)
	}
	return attend(t, server, "i0000000000000000", p, credentials...)
}

// attend has a service serve one more sandbox.
func attend(t *testing.T, server *Server, id berm.SandboxID, p egress.Policy, credentials ...egress.Credential) (*rig, error) {
	t.Helper()
	ownerConn, file := files(t)
	its, err := net.FileConn(file)
	file.Close()
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		server.Attend(its.(*net.UnixConn))
	}()
	network, door := files(t)
	defer door.Close()
	r := &rig{T: t, network: service.NewWire(network)}
	r.owner, r.gets, err = egress.Broker(t.Context(), ownerConn, id, egress.Bindings{
		Policy: p, Open: []string{"10.0.0.0/8"}, Credentials: credentials, Door: door, Trust: true,
	}, func(e egress.Event) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.events = append(r.events, e)
	})
	t.Cleanup(func() {
		ownerConn.Close()
		select {
		case <-done:
		case <-time.After(10 * time.Second):
			t.Error("the service does not end with its owner")
		}
	})
	return r, err
}

// hand gives a flow to the service as the network service does.
func (r *rig) hand(name string, port uint16, addr string) net.Conn {
	r.Helper()
	conn, theirs := files(r.T)
	defer theirs.Close()
	if err := r.network.Send(egress.Flow{Name: name, Port: port, Addresses: []netip.Addr{netip.MustParseAddr(addr)}}, theirs); err != nil {
		r.Fatal(err)
	}
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	return conn
}

// get asks over TLS, trusting what a sandbox is made to trust.
func (r *rig) get(conn net.Conn, name, path string) (status int, body string, err error) {
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(r.gets.Trust.Files[0].Data)
	c := tls.Client(conn, &tls.Config{ServerName: name, RootCAs: roots})
	if err := c.Handshake(); err != nil {
		return 0, "", err
	}
	fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", path, name)
	reply, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return 0, "", err
	}
	defer reply.Body.Close()
	content, err := io.ReadAll(reply.Body)
	return reply.StatusCode, string(content), err
}

func token(c egress.Credential) egress.Credential {
	c.Value = []byte(secret)
	return c
}

// The process that hands flows over reads hostile packets: what it says is judged again.
func TestHandedFlowsAreJudged(t *testing.T) {
	r, err := begin(t, egress.Policy{Entries: []string{"api.example"}}, token(egress.Credential{Name: "api", Hosts: []string{"api.example"}}))
	if err != nil {
		t.Fatal(err)
	}
	for name, flow := range map[string]struct {
		name string
		port uint16
	}{"other name": {"other.example", 443}, "other port": {"api.example", 22}, "no name": {"198.51.100.7", 443}, "nonsense": {"a b", 443}} {
		conn := r.hand(flow.name, flow.port, "10.1.2.3")
		if n, err := conn.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
			t.Errorf("%s: %d bytes, %v", name, n, err)
		}
	}
	for _, addr := range []string{"127.0.0.1", "169.254.169.254", "192.168.1.1"} {
		status, body, err := r.get(r.hand("api.example", 443, addr), "api.example", "/")
		if err != nil || status != http.StatusForbidden || !strings.Contains(body, "dns_private_answer") {
			t.Errorf("%s: %d %q, %v", addr, status, body, err)
		}
	}
}

// A policy that changes ends what it does not allow, at once.
func TestPolicyChanges(t *testing.T) {
	r, err := begin(t, egress.Policy{Entries: []string{"api.example", "other.example"}}, token(egress.Credential{Name: "api", Hosts: []string{"api.example"}}))
	if err != nil {
		t.Fatal(err)
	}
	conn := r.hand("api.example", 443, "10.1.2.3")
	if _, err := conn.Write([]byte{0x16}); err != nil { // a hello that does not go on
		t.Fatal(err)
	}
	if _, err := r.owner.Set(t.Context(), egress.Policy{Entries: []string{"no host at all"}}); err == nil {
		t.Error("a policy that is wrong")
	}
	if _, err := r.owner.Set(t.Context(), egress.Policy{Entries: []string{"other.example"}}); err != nil {
		t.Fatal(err)
	}
	if n, err := conn.Read(make([]byte, 1)); n != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%d bytes, %v", n, err)
	}
	if n, err := r.hand("api.example", 443, "10.1.2.3").Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("a new one: %d bytes, %v", n, err)
	}
}

// What a service is known for is set without being said.
func TestServices(t *testing.T) {
	r, err := begin(t, egress.Policy{Entries: []string{"github", "api.openai.com", "git.example"}},
		token(egress.Credential{Name: "github", Service: "github"}), token(egress.Credential{Name: "models", Service: "openai"}),
		token(egress.Credential{Name: "forge", Hosts: []string{"git.example"}, Repositories: []string{"a/*"}, Push: []string{"refs/heads/agent/*"}}))
	if err != nil {
		t.Fatal(err)
	}
	hosts := map[string]string{}
	for _, a := range r.gets.Attach {
		hosts[a.Credential] = strings.Join(a.Hosts, " ")
	}
	if fmt.Sprint(hosts) != "map[forge:git.example github:api.github.com github-git:github.com models:api.openai.com]" {
		t.Errorf("hosts %v", hosts)
	}
	env := r.gets.Env
	if env["GITHUB_TOKEN"] == "" || env["OPENAI_API_KEY"] == "" || env["GIT_CONFIG_COUNT"] == "" || env["OPENAI_BASE_URL"] != "" {
		t.Errorf("environment %v", env)
	}
	for name, value := range env {
		if strings.Contains(value, secret) {
			t.Errorf("%s has the secret", name)
		}
	}
}

// What may be pushed with GitHub's token is what its API is held to.
func TestGitHubRules(t *testing.T) {
	for _, c := range []egress.Credential{
		{Name: "a", Service: "github", Repositories: []string{"acme/app"}},
		{Name: "a", Service: "github", Push: []string{"refs/heads/agent/*"}},
	} {
		all, err := bindings(&c)
		if err != nil || len(all) != 2 || all[0].Git == nil || all[1].Git == nil || all[0].Kind == credential.Git {
			t.Errorf("%+v: %+v, %v", c, all, err)
		}
		if _, err := credential.Normal(all); err != nil {
			t.Error(err)
		}
	}
	if all, err := bindings(&egress.Credential{Name: "a", Service: "github"}); err != nil || all[0].Git != nil {
		t.Errorf("%+v, %v", all, err)
	}
}

func TestRefusedCredentials(t *testing.T) {
	for says, credentials := range map[string][]egress.Credential{
		"nothing lets the command reach": {{Name: "a", Hosts: []string{"api.elsewhere"}}},
		"two credentials":                {{Name: "a", Hosts: []string{"api.example"}}, {Name: "a", Hosts: []string{"api.example"}}},
		"no host with a port":            {{Name: "a", Hosts: []string{"api.example:0"}}},
		"different ports":                {{Name: "a", Hosts: []string{"api.example", "b.example:8443"}}},
		"is no name but an address":      {{Name: "a", Hosts: []string{"192.0.2.1"}}},
		"is not for credentials":         {{Name: "a", Hosts: []string{"api.example"}, Header: "Host"}},
	} {
		for i := range credentials {
			credentials[i] = token(credentials[i])
		}
		if _, err := begin(t, egress.Policy{Entries: []string{"api.example"}}, credentials...); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
	}
}

// A request that the network service cuts is denied in the record too, and not one that its
// client gave up.
func TestCut(t *testing.T) {
	r, err := begin(t, egress.Policy{Entries: []string{"api.example"}}, token(egress.Credential{Name: "api", Hosts: []string{"api.example"}}))
	if err != nil {
		t.Fatal(err)
	}
	conn := r.hand("api.example", 443, "10.1.2.3")
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(r.gets.Trust.Files[0].Data)
	c := tls.Client(conn, &tls.Config{ServerName: "api.example", RootCAs: roots})
	if err := c.Handshake(); err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(c, "POST / HTTP/1.1\r\nHost: api.example\r\nContent-Length: 100\r\n\r\npart")
	if err := r.network.Send(egress.Flow{Cut: &egress.Cut{Reason: "limit", Rule: "api", Detail: "1KiB sent"}}); err != nil {
		t.Fatal(err)
	}
	conn.Close()
	for range 1000 {
		r.mu.Lock()
		for _, e := range r.events {
			if e.Kind == "http" {
				defer r.mu.Unlock()
				if e.Action != "deny" || e.Reason != "limit" || e.Rule != "api" || e.Detail != "1KiB sent" {
					t.Errorf("%+v", e)
				}
				return
			}
		}
		r.mu.Unlock()
		time.Sleep(20 * time.Millisecond)
	}
	t.Error("no request was told of")
}
