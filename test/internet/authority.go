package internet

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"log"
	"math/big"
	"sync"
	"time"
)

// silent is for servers whose clients break the rules on purpose.
var silent = log.New(io.Discard, "", 0)

// Authority makes the certificates of the internet's servers.
type Authority struct {
	PEM []byte // to be trusted

	key  *ecdsa.PrivateKey
	root *x509.Certificate

	mu   sync.Mutex
	made map[string]*tls.Certificate
}

func newAuthority() (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	root := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority of the test"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, root, root, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	block := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return &Authority{PEM: block, key: key, root: root, made: map[string]*tls.Certificate{}}, nil
}

// Wrong is what can be the matter with a certificate.
type Wrong int

// What can be the matter.
const (
	Expired Wrong = iota
	SelfSigned
	OtherHost
)

// Spoil gives a name a certificate that nobody is to accept.
func (a *Authority) Spoil(name string, wrong Wrong) error {
	c, err := a.issue(name, &wrong)
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.made[name] = c
	return nil
}

func (a *Authority) certificate(name string) (*tls.Certificate, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.made[name]; c != nil {
		return c, nil
	}
	c, err := a.issue(name, nil)
	if err == nil && len(a.made) < 1000 {
		a.made[name] = c
	}
	return c, err
}

func (a *Authority) issue(name string, wrong *Wrong) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		NotBefore: a.root.NotBefore, NotAfter: a.root.NotAfter, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	parent, signer := a.root, a.key
	if wrong != nil {
		switch *wrong {
		case Expired:
			leaf.NotBefore, leaf.NotAfter = time.Now().Add(-48*time.Hour), time.Now().Add(-24*time.Hour)
		case SelfSigned:
			parent, signer = leaf, key
		case OtherHost:
			leaf.DNSNames = []string{"other." + name}
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, leaf, parent, &key.PublicKey, signer)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}
