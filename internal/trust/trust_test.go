package trust_test

import (
	"bytes"

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
	"github.com/berm-sandbox/berm/internal/network/inspect"
	"github.com/berm-sandbox/berm/internal/trust"
	"github.com/berm-sandbox/berm/internal/trust/root"
)

func paths(files []trust.File) (names []string) {
	for _, f := range files {
		names = append(names, f.Path)
	}
	slices.Sort(names)
	return names
}

func file(t *testing.T, files []trust.File, name string) []byte {
	t.Helper()
	i := slices.IndexFunc(files, func(f trust.File) bool { return f.Path == name })
	if i < 0 {
		t.Fatalf("%s is not among %v", name, paths(files))
	}
	return files[i].Data
}

func TestTrust(t *testing.T) {
	old, _ := inspect.NewCA(time.Hour)
	ca, _ := inspect.NewCA(time.Hour)
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
		files, env, err := filesOf(test.root, ca.PEM(), test.roots)
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
		"a list that is endless": {"etc/ssl/cert.pem": regular(make([]byte, 8<<20+1))},
	} {
		if _, _, err := filesOf(root, ca.PEM(), nil); berm.KindOf(err) != berm.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestTrustJava has Java's own tool read the store, where there is one.
func TestTrustJava(t *testing.T) {
	ca, _ := inspect.NewCA(time.Hour)
	root := fstest.MapFS{
		"etc/ssl/certs/ca-certificates.crt":               {Data: ca.PEM()},
		"etc/ssl/certs/java/cacerts":                      {Data: []byte("old")},
		"usr/lib/jvm/java-17/lib/security/cacerts":        {Data: []byte("/etc/ssl/certs/java/cacerts"), Mode: fs.ModeSymlink},
		"usr/lib/jvm/temurin-25-jdk/lib/security/cacerts": {Data: []byte("old")},
		"usr/lib/jvm/.java-17.jinfo":                      {},
	}
	other, _ := inspect.NewCA(time.Hour)
	files, _, err := filesOf(root, other.PEM(), nil)
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

func filesOf(fsys fs.FS, ca, roots []byte) ([]trust.File, map[string]string, error) {
	r, err := root.Survey(fsys)
	if err != nil {
		return nil, nil, err
	}
	return trust.Files(r, ca, roots)
}
