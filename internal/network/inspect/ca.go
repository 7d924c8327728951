package inspect

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"math/big"
	"net"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
)

const (
	leafLife = 24 * time.Hour
	// leafSpare is how long before its end a leaf is replaced.
	leafSpare = time.Hour
	// backDate lets clients in whose clock is behind.
	backDate = time.Hour
	// leafCache bounds the leaves that are kept: one name each, which a wildcard rule lets
	// the sandbox choose.
	leafCache = 1024
)

// CA is the certificate authority of one sandbox. Its key exists in this process's memory
// alone, and only that sandbox trusts it.
type CA struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey

	mu     sync.Mutex
	leaves map[string]*tls.Certificate
}

// NewCA makes an authority that lives as long as its sandbox may.
func NewCA(life time.Duration) (*CA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	// Whoever sees the certificate learns nothing from its name, and two sandboxes never
	// have the same.
	name := make([]byte, 8)
	rand.Read(name) // never fails
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber:          serial(),
		Subject:               pkix.Name{CommonName: "Local CA " + hex.EncodeToString(name)},
		NotBefore:             now.Add(-backDate),
		NotAfter:              now.Add(life),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &CA{cert: cert, key: key, leaves: map[string]*tls.Certificate{}}, nil
}

func serial() *big.Int {
	b := make([]byte, 16)
	rand.Read(b) // never fails
	b[0] &= 0x7f // positive
	b[0] |= 0x40 // and of full length
	return new(big.Int).SetBytes(b)
}

// Marshal returns certificate and key, in PEM, for ParseCA.
func (ca *CA) Marshal() ([]byte, error) {
	key, err := x509.MarshalPKCS8PrivateKey(ca.key)
	if err != nil {
		return nil, err
	}
	defer clear(key)
	return append(ca.PEM(), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key})...), nil
}

// ParseCA makes the authority that Marshal wrote. Kind: Invalid.
func ParseCA(text []byte) (*CA, error) {
	invalid := berm.Errorf(berm.Invalid, "what was kept of the sandbox's certificate authority is none")
	certBlock, rest := pem.Decode(text)
	if certBlock == nil {
		return nil, invalid
	}
	keyBlock, _ := pem.Decode(rest)
	if keyBlock == nil {
		return nil, invalid
	}
	defer clear(keyBlock.Bytes)
	cert, err := x509.ParseCertificate(certBlock.Bytes)
	if err != nil {
		return nil, invalid
	}
	key, err := x509.ParsePKCS8PrivateKey(keyBlock.Bytes)
	if err != nil {
		return nil, invalid
	}
	ec, ok := key.(*ecdsa.PrivateKey)
	if !ok || !ec.PublicKey.Equal(cert.PublicKey) {
		return nil, invalid
	}
	return &CA{cert: cert, key: ec, leaves: map[string]*tls.Certificate{}}, nil
}

// PEM is the certificate, without its key.
func (ca *CA) PEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.cert.Raw})
}

// Leaf returns a certificate for a name or an address, made when there is none that is
// valid for a while.
func (ca *CA) Leaf(name string) (*tls.Certificate, error) {
	now := time.Now()
	ca.mu.Lock()
	defer ca.mu.Unlock()
	if leaf := ca.leaves[name]; leaf != nil {
		end := leaf.Leaf.NotAfter
		if now.Before(end.Add(-leafSpare)) || end.Equal(ca.cert.NotAfter) {
			return leaf, nil
		}
	}
	leaf, err := ca.issue(name, now)
	if err != nil {
		return nil, err
	}
	if len(ca.leaves) >= leafCache {
		for other := range ca.leaves { // any one
			delete(ca.leaves, other)
			break
		}
	}
	ca.leaves[name] = leaf
	return leaf, nil
}

func (ca *CA) issue(name string, now time.Time) (*tls.Certificate, error) {
	if !now.Before(ca.cert.NotAfter) {
		return nil, berm.Errorf(berm.Unavailable, "the sandbox's certificate authority has expired").
			WithHint("start a new sandbox: an authority lives as long as a sandbox may")
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial(),
		NotBefore:    now.Add(-backDate),
		NotAfter:     now.Add(leafLife),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	// Nothing of a chain may be valid when its root is not.
	if template.NotBefore.Before(ca.cert.NotBefore) {
		template.NotBefore = ca.cert.NotBefore
	}
	if template.NotAfter.After(ca.cert.NotAfter) {
		template.NotAfter = ca.cert.NotAfter
	}
	if ip := net.ParseIP(name); ip != nil {
		template.IPAddresses = []net.IP{ip}
	} else {
		template.DNSNames = []string{name}
	}
	if len(name) <= 64 { // ub-common-name, RFC 5280
		template.Subject.CommonName = name
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, key.Public(), ca.key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: cert}, nil
}
