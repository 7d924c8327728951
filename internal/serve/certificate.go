package serve

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/berm-sandbox/berm"
)

// certificates loads the server's certificate, or makes one for development.
func (c *Config) certificates() (*tls.Config, error) {
	cert, key := c.TLSCert, c.TLSKey
	if c.DevTLS {
		var err error
		if cert, key, err = devCertificate(filepath.Join(c.Data, "tls"), c.Domain); err != nil {
			return nil, berm.Errorf(berm.Internal, "development certificate: %w", err)
		}
	}
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return nil, berm.Errorf(berm.Invalid, "TLS certificate: %w", err)
	}
	return &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}, nil
}

// devCertificate returns the files of a certificate for a domain and all names below
// it, signed by an authority of its own that clients are told to trust. The
// authority is kept, the certificate made anew when it does not fit.
func devCertificate(dir, domain string) (cert, key string, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", "", err
	}
	ca, err := devAuthority(filepath.Join(dir, "ca.pem"), filepath.Join(dir, "ca-key.pem"))
	if err != nil {
		return "", "", err
	}
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	if pair, err := tls.LoadX509KeyPair(cert, key); err == nil {
		fits := pair.Leaf.VerifyHostname("x."+domain) == nil && time.Until(pair.Leaf.NotAfter) > 30*24*time.Hour &&
			pair.Leaf.CheckSignatureFrom(ca.Leaf) == nil
		if fits {
			return cert, key, nil
		}
	}
	template := &x509.Certificate{
		Subject:     pkix.Name{CommonName: domain},
		DNSNames:    []string{domain, "*." + domain, "localhost"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
		NotBefore:   time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(0, 0, 397),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	return cert, key, issue(template, ca, cert, key)
}

func devAuthority(cert, key string) (*tls.Certificate, error) {
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err == nil {
		return &pair, nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	template := &x509.Certificate{
		Subject:   pkix.Name{CommonName: "Berm development authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(10, 0, 0),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign,
	}
	if err := issue(template, nil, cert, key); err != nil {
		return nil, err
	}
	pair, err = tls.LoadX509KeyPair(cert, key)
	return &pair, err
}

// issue makes a key and a certificate signed by ca, or by itself without one.
func issue(template *x509.Certificate, ca *tls.Certificate, certFile, keyFile string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	if template.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120)); err != nil {
		return err
	}
	parent, signer := template, any(key)
	if ca != nil {
		parent, signer = ca.Leaf, ca.PrivateKey
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		return err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	if err := os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), 0o600); err != nil {
		return err
	}
	return os.WriteFile(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644)
}
