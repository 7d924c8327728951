package harness

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// InternetAddress is the address of Internet, one of documentation (RFC 5737).
const InternetAddress = "198.51.100.7"

// Internet makes the namespaces of the calling process, which are new, an internet for a
// command, and returns its exit code: the loopback has an address, a resolver gives every name but nowhere.*
// that address, and there handler serves HTTP, and TLS for names, and a proxy, which may be nil,
// at port 3128, and with TLS at 3129. What the command needs to trust that is ca.pem in the
// directory.
func Internet(dir string, handler http.Handler, proxy *Proxy, names []string, argv []string) (int, error) {
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
	authority := filepath.Join(dir, "ca.pem")
	if err := serveAt(authority, names, handler, proxy); err != nil {
		return 0, err
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), "SSL_CERT_FILE="+authority)
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
	addr := netip.MustParseAddr(InternetAddress).As4()
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
			if q := m.Questions[0]; strings.HasPrefix(q.Name.String(), "nowhere.") {
				m.RCode = dnsmessage.RCodeNameError
			} else if q.Type == dnsmessage.TypeA {
				m.Answers = []dnsmessage.Resource{{
					Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 60},
					Body:   &dnsmessage.AResource{A: netip.MustParseAddr(InternetAddress).As4()},
				}}
			}
			if reply, err := m.Pack(); err == nil {
				_, _ = conn.WriteTo(reply, from)
			}
		}
	}()
	return nil
}

// serveAt serves HTTP and TLS. The authority's certificate comes into a file.
func serveAt(authority string, names []string, handler http.Handler, proxy *Proxy) error {
	certificate, err := issue(authority, names)
	if err != nil {
		return err
	}
	for _, port := range []string{"80", "443", "3128", "3129"} {
		l, err := net.Listen("tcp", InternetAddress+":"+port)
		if err != nil {
			return err
		}
		if port == "443" || port == "3129" {
			l = tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{certificate}})
		}
		switch {
		case len(port) < 4:
			go func() { _ = http.Serve(l, handler) }()
		case proxy != nil:
			go proxy.Serve(l)
		}
	}
	return nil
}

// issue makes an authority and a certificate of it for names.
func issue(path string, names []string) (tls.Certificate, error) {
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
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "www.example"}, DNSNames: names,
		NotBefore: template.NotBefore, NotAfter: template.NotAfter, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	raw, err := x509.CreateCertificate(rand.Reader, leaf, template, &key.PublicKey, key)
	if err != nil {
		return none, err
	}
	block := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: authority})
	return tls.Certificate{Certificate: [][]byte{raw}, PrivateKey: key}, os.WriteFile(path, block, 0o644)
}
