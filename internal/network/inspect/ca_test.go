package inspect

import (
	"crypto/x509"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
)

func TestCA(t *testing.T) {
	ca, err := NewCA(48 * time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	other, _ := NewCA(48 * time.Hour)
	if ca.cert.Subject.String() == other.cert.Subject.String() {
		t.Error("two authorities have the same name")
	}
	if !ca.cert.MaxPathLenZero || ca.cert.MaxPathLen != 0 || !ca.cert.IsCA {
		t.Error("it can make other authorities")
	}
	roots := x509.NewCertPool()
	roots.AddCert(ca.cert)
	strangers := x509.NewCertPool()
	strangers.AddCert(other.cert)
	for _, name := range []string{"a.test", "203.0.113.1", "2001:db8::1", strings.Repeat("a.", 60) + "test"} {
		leaf, err := ca.Leaf(name)
		if err != nil {
			t.Fatal(err)
		}
		again, _ := ca.Leaf(name)
		if leaf != again {
			t.Errorf("%s is issued each time", name)
		}
		for _, at := range []time.Duration{-55 * time.Minute, 23 * time.Hour} {
			if _, err := leaf.Leaf.Verify(x509.VerifyOptions{DNSName: bracketed(name), Roots: roots, CurrentTime: time.Now().Add(at)}); err != nil {
				t.Error(err)
			}
		}
		if _, err := leaf.Leaf.Verify(x509.VerifyOptions{DNSName: "b.test", Roots: roots}); err == nil {
			t.Errorf("the leaf of %s is good for another name", name)
		}
		if _, err := leaf.Leaf.Verify(x509.VerifyOptions{DNSName: bracketed(name), Roots: strangers}); err == nil {
			t.Errorf("the leaf of %s is good in another sandbox", name)
		}
	}
	for i := range leafCache {
		ca.leaves[fmt.Sprint(i, ".test")] = ca.leaves["a.test"]
	}
	if ca.Leaf("b.test"); len(ca.leaves) > leafCache+4 {
		t.Errorf("%d leaves are kept", len(ca.leaves))
	}
	short, _ := NewCA(time.Minute)
	leaf, err := short.Leaf("a.test")
	if again, _ := short.Leaf("a.test"); err != nil || leaf != again || leaf.Leaf.NotAfter.After(short.cert.NotAfter) {
		t.Error("a leaf outlives its authority, or is made each time", err)
	}
	dead, _ := NewCA(-time.Minute)
	if _, err := dead.Leaf("a.test"); berm.KindOf(err) != berm.Unavailable {
		t.Error(err)
	}
}

func bracketed(name string) string {
	if strings.Contains(name, ":") {
		return "[" + name + "]"
	}
	return name
}
