package network

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// inside is set in the process that is the internet.
const inside = "BERM_TEST_INTERNET"

// repository names, for that process, the directory of a git repository that it serves.
const repository = "BERM_TEST_REPOSITORY"

// The internet of the test, a network namespace of its own behind a pair of links. It owns
// addresses of the real one, which nothing here has a way to.
const (
	ours, gateway = "10.77.0.1", "10.77.0.2"
	one, eight    = "1.1.1.1", "8.8.8.8"
	resolver      = "9.9.9.9"
	site          = "93.184.215.14"
	documentation = "203.0.113.7"
	metadata      = "169.254.169.254"
	private       = "10.9.9.9"
	shared        = "100.64.9.9"
)

var addresses = []string{one, eight, resolver, site, documentation, metadata, private, shared}

// connectivity is what E2B's tests ask whether there is an internet.
const connectivity = "connectivitycheck.gstatic.com"

// domain has the names of ports of sandboxes where the server of the test owns port 443, to which
// the internet leads them.
const domain = "berm.test"

// statuses are what E2B's tests expect of hosts of the real internet.
var statuses = map[string]int{one: 301, eight: 302, connectivity: 204}

var names = map[string]string{
	connectivity + ".": site,
	"www.example.com.": site, "files.example.com.": eight, "other.example.org.": one,
	"rebind.example.net.": private, "rebind.example.com.": private, "metadata.example.net.": metadata, "docs.example.net.": documentation,
}

// world is what the internet saw.
type world struct {
	mu    sync.Mutex
	Seen  map[string]int // connections by the address that they were for
	Open  map[string]int // those that are open
	Asked map[string]int // names that were resolved
	Bare  int            // requests for /hash without the field in question
	Posts int            // requests for /hash that were not GET
}

func (w *world) serve(l net.Listener, handle func(net.Conn)) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		host, _, _ := net.SplitHostPort(conn.LocalAddr().String())
		w.count(host, 1)
		go func() {
			handle(conn)
			conn.Close()
			w.count(host, -1)
		}()
	}
}

func (w *world) count(host string, n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.Open[host] += n
	if n > 0 {
		w.Seen[host]++
	}
}

// internet is the program of the namespace.
func internet() {
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	// Told by its parent that the links are there.
	_, err := bufio.NewReader(os.Stdin).ReadString('\n')
	check(err)
	script := "ip link set lo up && ip addr add " + gateway + "/30 dev away && ip link set away up"
	for _, a := range addresses {
		script += " && ip addr add " + a + "/32 dev lo"
	}
	out, err := exec.Command("/bin/sh", "-c", script).CombinedOutput()
	if err != nil {
		log.Fatalf("%v: %s", err, out)
	}
	w := &world{Seen: map[string]int{}, Open: map[string]int{}, Asked: map[string]int{}}
	listen := func(port string, handle func(net.Conn)) {
		l, err := net.Listen("tcp4", ":"+port)
		check(err)
		go w.serve(l, handle)
	}
	listen("7", func(c net.Conn) { _, _ = io.Copy(c, c) })
	listen("22", func(c net.Conn) { // who speaks first
		_, _ = io.WriteString(c, "SSH-2.0-test\r\n")
		_, _ = io.Copy(io.Discard, c)
	})
	// Two proxies: one of the operator's network, and one that a sandbox's creator has.
	var proxies []*harness.Proxy
	for _, at := range []string{gateway, one} {
		p := &harness.Proxy{User: "user", Password: proxyPassword, Dial: func(ctx context.Context, target string) (net.Conn, error) {
			host, port, err := net.SplitHostPort(target)
			if err != nil {
				return nil, err
			}
			if addr, ok := names[strings.ToLower(host)+"."]; ok {
				host = addr
			}
			return new(net.Dialer).DialContext(ctx, "tcp4", net.JoinHostPort(host, port))
		}}
		proxies = append(proxies, p)
		l, err := net.Listen("tcp4", at+":3128")
		check(err)
		go w.serve(l, p.Handle)
	}
	hello := func(c net.Conn) {
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		r, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		body, status := "hello "+r.Host, 200
		if s, ok := statuses[r.Host]; ok {
			body, status = "", s
		}
		if name, ok := strings.CutPrefix(r.URL.Path, "/app.git/"); ok { // a repository, served as files
			content, err := os.ReadFile(filepath.Join(os.Getenv(repository), filepath.Clean("/"+name)))
			if body, status = string(content), 200; err != nil {
				status = 404
			}
		}
		switch r.URL.Path {
		case "/hash": // what came in a field, without telling it
			w.mu.Lock()
			if r.Header.Get(r.URL.Query().Get("field")) == "" {
				w.Bare++
			}
			if r.Method != http.MethodGet {
				w.Posts++
			}
			w.mu.Unlock()
			body = fmt.Sprintf("%x", sha256.Sum256([]byte(r.Header.Get(r.URL.Query().Get("field")))))
		case "/via": // the proxies that it came through
			body = proxies[0].Via(c.RemoteAddr().String()) + "+" + proxies[1].Via(c.RemoteAddr().String())
		case "/echo":
			body = fmt.Sprint(r.Header)
		}
		fmt.Fprintf(c, "HTTP/1.1 %d x\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", status, len(body), body)
	}
	listen("80", hello)
	listen("8080", hello)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "internet"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		DNSNames: []string{"*.example.com", "*." + domain, connectivity}, IPAddresses: []net.IP{net.ParseIP(one), net.ParseIP(eight)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	check(err)
	secure := &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
	listen("443", func(c net.Conn) {
		s := tls.Server(c, secure)
		if err := s.Handshake(); err == nil && strings.HasSuffix(s.ConnectionState().ServerName, "."+domain) {
			relay(s)
		} else {
			hello(s)
		}
	})
	packets, err := net.ListenPacket("udp4", resolver+":53")
	check(err)
	go w.resolve(packets)
	datagrams, err := net.ListenPacket("udp4", one+":7")
	check(err)
	go func() {
		b := make([]byte, 2048)
		for {
			n, from, err := datagrams.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = datagrams.WriteTo(b[:n], from)
		}
	}()
	control, err := net.Listen("tcp4", gateway+":8000")
	check(err)
	fmt.Println("ready")
	check(http.Serve(control, http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/certificate" {
			_ = pem.Encode(out, &pem.Block{Type: "CERTIFICATE", Bytes: der})
			return
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		_ = json.NewEncoder(out).Encode(w)
	})))
}

// relay passes a connection on to the server of the test, whose ports of sandboxes have names
// below domain.
func relay(c *tls.Conn) {
	server, err := tls.Dial("tcp", net.JoinHostPort(ours, "443"), &tls.Config{ServerName: c.ConnectionState().ServerName, InsecureSkipVerify: true}) //nolint:gosec // it is the test's
	if err != nil {
		return
	}
	defer server.Close()
	go func() {
		_, _ = io.Copy(server, c)
		_ = server.CloseWrite()
	}()
	_, _ = io.Copy(c, server)
}

func (w *world) resolve(conn net.PacketConn) {
	b := make([]byte, 2048)
	for {
		n, from, err := conn.ReadFrom(b)
		if err != nil {
			return
		}
		var m dnsmessage.Message
		if m.Unpack(b[:n]) != nil || len(m.Questions) != 1 {
			continue
		}
		q := m.Questions[0]
		m.Response, m.RecursionAvailable, m.Additionals = true, true, nil
		name := strings.ToLower(q.Name.String())
		w.mu.Lock()
		w.Asked[strings.TrimSuffix(name, ".")]++
		w.mu.Unlock()
		addr, ok := names[name]
		if strings.HasSuffix(name, "."+domain+".") {
			addr, ok = site, true
		}
		if !ok {
			m.RCode = dnsmessage.RCodeNameError
		} else if q.Type == dnsmessage.TypeA {
			m.Answers = []dnsmessage.Resource{{
				Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 5},
				Body:   &dnsmessage.AResource{A: netip.MustParseAddr(addr).As4()},
			}}
		}
		if answer, err := m.Pack(); err == nil {
			_, _ = conn.WriteTo(answer, from)
		}
	}
}

// startInternet makes the namespace and the links, for as long as the test runs.
func startInternet(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("missing: ip(8), package iproute2, which makes links")
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = exec.Command("ip", "link", "del", "home").Run() // the namespace would take it away later
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	script := fmt.Sprintf("ip link add home type veth peer name away netns %d && ip addr add %s/30 dev home && ip link set home up && ip route add default via %s",
		cmd.Process.Pid, ours, gateway)
	if text, err := exec.Command("/bin/sh", "-c", script).CombinedOutput(); err != nil {
		t.Fatalf("links: %v: %s", err, text)
	}
	if _, err := io.WriteString(in, "go\n"); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the internet does not start: %q, %v", line, err)
	}
}

// look asks the internet what it saw.
func look(t *testing.T) *world {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+gateway+":8000/", nil)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	w := &world{}
	if err := json.NewDecoder(answer.Body).Decode(w); err != nil {
		t.Fatal(err)
	}
	return w
}
