package local

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/cgi"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// The internet of the tests: a network namespace whose loopback has an address of
// documentation (RFC 5737), a resolver that gives every name below .example that address,
// and there a server of HTTP and TLS.
const internetAddress = "198.51.100.7"

// internet is the part of this program that is the internet for the command that follows.
// It runs in namespaces of its own.
func internet(dir string, argv []string) (int, error) {
	if err := loopback(); err != nil {
		return 0, err
	}
	resolv := filepath.Join(dir, "resolv.conf")
	if err := os.WriteFile(resolv, []byte("nameserver 127.0.0.1\n"), 0o644); err != nil {
		return 0, err
	}
	real, err := filepath.EvalSymlinks("/etc/resolv.conf")
	if err != nil {
		return 0, err
	}
	if err := unix.Mount(resolv, real, "", unix.MS_BIND, ""); err != nil {
		return 0, err
	}
	// As distributions have it.
	if err := unix.Mount("none", "/dev/net", "tmpfs", 0, "mode=0755"); err != nil {
		return 0, err
	}
	if err := unix.Mknod("/dev/net/tun", unix.S_IFCHR, int(unix.Mkdev(10, 200))); err != nil {
		return 0, err
	}
	if err := os.Chmod("/dev/net/tun", 0o666); err != nil {
		return 0, err
	}
	if err := resolve(); err != nil {
		return 0, err
	}
	if err := serve(filepath.Join(dir, "ca.pem")); err != nil {
		return 0, err
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), "SSL_CERT_FILE="+filepath.Join(dir, "ca.pem"))
	if err := cmd.Run(); cmd.ProcessState == nil {
		return 0, err
	}
	return cmd.ProcessState.ExitCode(), nil
}

// loopback gives lo its addresses.
func loopback() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	up, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	up.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, up); err != nil {
		return err
	}
	alias, err := unix.NewIfreq("lo:1")
	if err != nil {
		return err
	}
	addr := netip.MustParseAddr(internetAddress).As4()
	if err := alias.SetInet4Addr(addr[:]); err != nil {
		return err
	}
	return unix.IoctlIfreq(s, unix.SIOCSIFADDR, alias)
}

// resolve answers queries.
func resolve() error {
	conn, err := net.ListenPacket("udp", "127.0.0.1:53")
	if err != nil {
		return err
	}
	go func() {
		query := make([]byte, 1500)
		for {
			n, from, err := conn.ReadFrom(query)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(query[:n]) != nil || len(m.Questions) != 1 {
				continue
			}
			m.Response, m.Additionals = true, nil
			if q := m.Questions[0]; q.Type == dnsmessage.TypeA {
				m.Answers = []dnsmessage.Resource{{
					Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 60},
					Body:   &dnsmessage.AResource{A: netip.MustParseAddr(internetAddress).As4()},
				}}
			}
			if reply, err := m.Pack(); err == nil {
				_, _ = conn.WriteTo(reply, from)
			}
		}
	}()
	return nil
}

// serve answers each request with its method and target; /hash with the hash of what
// authorises it, and /echo with that itself. git.example has a repository for whoever knows
// the secret. The authority's certificate comes into a file.
func serve(authority string) error {
	repository := filepath.Join(filepath.Dir(authority), "o", "r.git")
	made := sync.OnceValue(func() error {
		return exec.Command("git", "init", "-q", "--bare", repository).Run()
	})
	git := &cgi.Handler{Path: "/usr/bin/git", Args: []string{"http-backend"}, Env: []string{"GIT_PROJECT_ROOT=" + filepath.Dir(authority), "GIT_HTTP_EXPORT_ALL=1", "REMOTE_USER=agent"}}
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Host == "git.example" {
			if user, password, _ := r.BasicAuth(); user != "x-access-token" || password != secret || made() != nil {
				http.Error(w, "who?", http.StatusForbidden)
				return
			}
			body, _ := io.ReadAll(r.Body) // CGI knows no chunks
			r.Body, r.ContentLength, r.TransferEncoding = io.NopCloser(bytes.NewReader(body)), int64(len(body)), nil
			git.ServeHTTP(w, r)
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		switch r.URL.Path {
		case "/hash":
			fmt.Fprintf(w, "%x", sha256.Sum256([]byte(r.Header.Get("Authorization"))))
			return
		case "/redirect":
			http.Redirect(w, r, "https://"+r.Host+"/next", http.StatusFound)
			return
		case "/echo":
			w.Header().Set("Echo", r.Header.Get("Authorization"))
			fmt.Fprintf(w, "<%s>", r.Header.Get("Authorization"))
			return
		}
		fmt.Fprintf(w, "%s %s %s\n", r.Method, r.Host, r.URL)
	})
	certificate, err := issue(authority)
	if err != nil {
		return err
	}
	for _, port := range []string{"80", "443"} {
		l, err := net.Listen("tcp", internetAddress+":"+port)
		if err != nil {
			return err
		}
		if port == "443" {
			l = tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{certificate}})
		}
		go func() { _ = http.Serve(l, handler) }()
	}
	return nil
}

// issue makes an authority and a certificate of it for the names of the test.
func issue(path string) (tls.Certificate, error) {
	var none tls.Certificate
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return none, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority of the test"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	authority, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return none, err
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "www.example"}, DNSNames: []string{"*.example", "*.sub.example"},
		NotBefore: template.NotBefore, NotAfter: template.NotAfter, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	raw, err := x509.CreateCertificate(rand.Reader, leaf, template, &key.PublicKey, key)
	if err != nil {
		return none, err
	}
	block := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: authority})
	return tls.Certificate{Certificate: [][]byte{raw}, PrivateKey: key}, os.WriteFile(path, block, 0o644)
}
