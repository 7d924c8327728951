package inspect

import (
	"bytes"
	"crypto/x509"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/berm-sandbox/berm"
)

func paths(files []File) (names []string) {
	for _, f := range files {
		names = append(names, f.Path)
	}
	slices.Sort(names)
	return names
}

func file(t *testing.T, files []File, name string) []byte {
	t.Helper()
	i := slices.IndexFunc(files, func(f File) bool { return f.Path == name })
	if i < 0 {
		t.Fatalf("%s is not among %v", name, paths(files))
	}
	return files[i].Data
}

func TestTrust(t *testing.T) {
	old, _ := NewCA(time.Hour)
	ca, _ := NewCA(time.Hour)
	regular := func(b []byte) *fstest.MapFile { return &fstest.MapFile{Data: b, Mode: 0o644} }
	link := func(to string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(to), Mode: fs.ModeSymlink} }
	noNewline := bytes.TrimRight(old.PEM(), "\n")
	for name, test := range map[string]struct {
		root  fstest.MapFS
		roots []byte
		want  []string
		env   string
	}{
		"debian": {
			root: fstest.MapFS{
				"etc/ssl/certs/ca-certificates.crt": regular(noNewline),
				"usr/sbin/update-ca-certificates":   regular(nil),
			},
			want: []string{"/etc/ssl/certs/ca-certificates.crt", "/usr/local/share/ca-certificates/sandbox.crt"},
			env:  "/etc/ssl/certs/ca-certificates.crt",
		},
		"fedora": {
			root: fstest.MapFS{
				"etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem": regular(old.PEM()),
				"etc/pki/tls/certs/ca-bundle.crt":                  link("/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem"),
				"etc/pki/tls/cert.pem":                             link("certs/ca-bundle.crt"),
				"etc/ssl/certs":                                    link("../pki/tls/certs"),
				"usr/bin/update-ca-trust":                          regular(nil),
				"etc/pki/ca-trust/source/anchors":                  {Mode: fs.ModeDir},
			},
			want: []string{
				"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", "/etc/pki/ca-trust/source/anchors/sandbox.crt",
				"/usr/local/share/ca-certificates/sandbox.crt",
			},
			env: "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
		},
		"nothing": {
			root:  fstest.MapFS{"bin/sh": regular(nil)},
			roots: old.PEM(),
			want:  []string{"/etc/ssl/certs/ca-certificates.crt", "/usr/local/share/ca-certificates/sandbox.crt"},
			env:   "/etc/ssl/certs/ca-certificates.crt",
		},
		"links out and around": {
			root: fstest.MapFS{
				"etc/ssl/cert.pem":                  link("../../../../ca.pem"),
				"ca.pem":                            regular(old.PEM()),
				"etc/ssl/certs/ca-certificates.crt": link("/nowhere"),
			},
			want: []string{"/ca.pem", "/usr/local/share/ca-certificates/sandbox.crt"},
			env:  "/ca.pem",
		},
	} {
		files, env, err := Trust(test.root, ca.PEM(), test.roots)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got := paths(files); !slices.Equal(got, test.want) {
			t.Errorf("%s: %v", name, got)
		}
		if string(file(t, files, test.env)) != string(old.PEM())+string(ca.PEM()) {
			t.Errorf("%s: %s", name, file(t, files, test.env))
		}
		if env["SSL_CERT_FILE"] != test.env || env["NODE_EXTRA_CA_CERTS"] != "/usr/local/share/ca-certificates/sandbox.crt" {
			t.Errorf("%s: %v", name, env)
		}
		for _, f := range files {
			if bytes.Contains(f.Data, []byte("PRIVATE")) {
				t.Errorf("%s: %s holds a key", name, f.Path)
			}
		}
	}
	for name, root := range map[string]fstest.MapFS{
		"a list in a circle":     {"etc/ssl/cert.pem": link("cert.pem")},
		"a list that is a pipe":  {"etc/ssl/cert.pem": &fstest.MapFile{Mode: fs.ModeNamedPipe}},
		"a list that is endless": {"etc/ssl/cert.pem": regular(make([]byte, bundleLimit+1))},
	} {
		if _, _, err := Trust(root, ca.PEM(), nil); berm.KindOf(err) != berm.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestTrustJava has Java's own tool read the store, where there is one.
func TestTrustJava(t *testing.T) {
	ca, _ := NewCA(time.Hour)
	root := fstest.MapFS{
		"etc/ssl/certs/ca-certificates.crt":               {Data: ca.PEM()},
		"etc/ssl/certs/java/cacerts":                      {Data: []byte("old")},
		"usr/lib/jvm/java-17/lib/security/cacerts":        {Data: []byte("/etc/ssl/certs/java/cacerts"), Mode: fs.ModeSymlink},
		"usr/lib/jvm/temurin-25-jdk/lib/security/cacerts": {Data: []byte("old")},
		"usr/lib/jvm/.java-17.jinfo":                      {},
	}
	other, _ := NewCA(time.Hour)
	files, _, err := Trust(root, other.PEM(), nil)
	if err != nil {
		t.Fatal(err)
	}
	store := file(t, files, "/etc/ssl/certs/java/cacerts")
	if !bytes.Equal(store, file(t, files, "/usr/lib/jvm/temurin-25-jdk/lib/security/cacerts")) || len(files) != 4 {
		t.Errorf("%v", paths(files))
	}
	keytool, err := exec.LookPath("keytool")
	if err != nil || os.Getenv("BERM_TEST_ALL") == "" {
		t.Log("the store was not read by Java: there is no keytool, or BERM_TEST_ALL is not set")
		return
	}
	name := filepath.Join(t.TempDir(), "cacerts")
	os.WriteFile(name, store, 0o644)
	for _, password := range [][]string{nil, {"-storepass", "changeit"}} {
		cmd := exec.Command(keytool, append([]string{"-list", "-rfc", "-keystore", name}, password...)...)
		cmd.Stdin = strings.NewReader("\n")
		out, err := cmd.Output()
		if err != nil || strings.Count(string(out), "BEGIN CERTIFICATE") != 2 {
			t.Errorf("%v: %v: %s", password, err, out)
		}
	}
}

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
