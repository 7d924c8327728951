package packages

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"net/http/cgi"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/mod/module"
	"golang.org/x/mod/sumdb"
	"golang.org/x/mod/sumdb/dirhash"
	"golang.org/x/mod/sumdb/note"

	"github.com/berm-sandbox/berm/test/internet"
)

// The hosts of the registries, each with an address of its own.
var hosts = map[string]string{
	"pypi.org": "93.184.217.1", "files.pythonhosted.org": "93.184.217.2", "registry.npmjs.org": "93.184.217.3",
	"proxy.golang.org": "93.184.217.4", "sum.golang.org": "93.184.217.5", "index.crates.io": "93.184.217.6", "static.crates.io": "93.184.217.7",
	"github.com": "93.184.217.8", "deb.debian.org": "93.184.217.9", "security.debian.org": "93.184.217.10",
}

// registries serve one small package of each kind, named tiny.
type registries struct {
	*internet.Internet
	private atomic.Bool // who asks must have the secret
	secret  string
	sums    string // verifies sum.golang.org
	files   map[string][]byte
	sumdb   http.Handler
	repos   string
}

func newRegistries(t *testing.T) *registries {
	t.Helper()
	r := &registries{Internet: internet.Start(t), secret: "s3cr3t-of-a-registry-0123456789", files: map[string][]byte{}, repos: t.TempDir()}
	for name, address := range hosts {
		r.Names.Set(name, address)
	}
	for _, make := range []func() error{r.pypi, r.npm, r.golang, r.crates, r.github, r.debian} {
		if err := make(); err != nil {
			t.Fatal(err)
		}
	}
	r.Serve(t, netip.Addr{}, r, 80, 443)
	return r
}

func (r *registries) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	if r.private.Load() && !r.knows(q) {
		w.Header().Set("WWW-Authenticate", `Basic realm="registry"`)
		http.Error(w, "who?", http.StatusUnauthorized)
		return
	}
	if q.Host == "github.com" {
		body, _ := io.ReadAll(q.Body) // CGI knows no chunks
		q.Body, q.ContentLength, q.TransferEncoding = io.NopCloser(bytes.NewReader(body)), int64(len(body)), nil
		(&cgi.Handler{Path: "/usr/bin/git", Args: []string{"http-backend"}, Env: []string{"GIT_PROJECT_ROOT=" + r.repos, "GIT_HTTP_EXPORT_ALL=1", "REMOTE_USER=agent"}}).ServeHTTP(w, q)
		return
	}
	if q.Host == "sum.golang.org" {
		r.sumdb.ServeHTTP(w, q)
		return
	}
	data, ok := r.files[q.Host+q.URL.Path]
	switch {
	case !ok:
		http.NotFound(w, q)
	case q.Method == http.MethodGet || q.Method == http.MethodHead:
		if strings.HasPrefix(q.URL.Path, "/simple/") {
			w.Header().Set("Content-Type", "text/html")
		}
		_, _ = w.Write(data)
	default:
		http.Error(w, "not here", http.StatusMethodNotAllowed)
	}
}

// knows says whether a request has the secret, where its registry wants one: files are
// often elsewhere, for everybody.
func (r *registries) knows(q *http.Request) bool {
	_, password, _ := q.BasicAuth()
	switch q.Host {
	case "files.pythonhosted.org", "sum.golang.org", "static.crates.io":
		return true
	case "index.crates.io":
		return q.Header.Get("Authorization") == r.secret
	}
	return password == r.secret || q.Header.Get("Authorization") == "Bearer "+r.secret
}

func (r *registries) pypi() error {
	wheel, err := zipped(map[string]string{
		"tiny.py":                          "answer = 42\n",
		"tiny-1.0.dist-info/METADATA":      "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
		"tiny-1.0.dist-info/WHEEL":         "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
		"tiny-1.0.dist-info/RECORD":        "tiny.py,,\ntiny-1.0.dist-info/METADATA,,\ntiny-1.0.dist-info/WHEEL,,\ntiny-1.0.dist-info/RECORD,,\n",
		"tiny-1.0.dist-info/top_level.txt": "tiny\n",
	})
	r.files["files.pythonhosted.org/packages/tiny-1.0-py3-none-any.whl"] = wheel
	r.files["pypi.org/simple/tiny/"] = fmt.Appendf(nil, `<!DOCTYPE html><html><body><a href="https://files.pythonhosted.org/packages/tiny-1.0-py3-none-any.whl#sha256=%x">tiny-1.0-py3-none-any.whl</a></body></html>`, sha256.Sum256(wheel))
	return err
}

func (r *registries) npm() error {
	manifest := `{"name":"tiny","version":"1.0.0","main":"index.js"}`
	archive, err := tarred(map[string]string{"package/package.json": manifest, "package/index.js": "module.exports = 42\n"})
	r.files["registry.npmjs.org/tiny/-/tiny-1.0.0.tgz"] = archive
	sum := sha512.Sum512(archive)
	r.files["registry.npmjs.org/tiny"] = fmt.Appendf(nil, `{"name":"tiny","dist-tags":{"latest":"1.0.0"},"versions":{"1.0.0":{"name":"tiny","version":"1.0.0","main":"index.js","dist":{`+
		`"tarball":"https://registry.npmjs.org/tiny/-/tiny-1.0.0.tgz","shasum":"%x","integrity":"sha512-%s"}}}}`, sha1.Sum(archive), base64.StdEncoding.EncodeToString(sum[:]))
	return err
}

func (r *registries) golang() error {
	const at = "proxy.golang.org/example.com/tiny/@v/"
	mod := "module example.com/tiny\n\ngo 1.21\n"
	archive, err := zipped(map[string]string{"example.com/tiny@v1.0.0/go.mod": mod, "example.com/tiny@v1.0.0/tiny.go": "package tiny\n\nconst Answer = 42\n"})
	if err != nil {
		return err
	}
	r.files[at+"list"] = []byte("v1.0.0\n")
	r.files[at+"v1.0.0.info"] = []byte(`{"Version":"v1.0.0","Time":"2024-01-01T00:00:00Z"}`)
	r.files[at+"v1.0.0.mod"], r.files[at+"v1.0.0.zip"] = []byte(mod), archive
	file, err := os.CreateTemp(r.repos, "*.zip")
	if err == nil {
		defer file.Close()
		_, err = file.Write(archive)
	}
	if err != nil {
		return err
	}
	whole, err := dirhash.HashZip(file.Name(), dirhash.Hash1)
	if err != nil {
		return err
	}
	alone, err := dirhash.Hash1([]string{"go.mod"}, func(string) (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(mod)), nil })
	if err != nil {
		return err
	}
	signer, verifier, err := note.GenerateKey(nil, "sum.golang.org")
	if err != nil {
		return err
	}
	r.sums = verifier
	r.sumdb = sumdb.NewServer(sumdb.NewTestServer(signer, func(path, version string) ([]byte, error) {
		if (module.Version{Path: path, Version: version}) != (module.Version{Path: "example.com/tiny", Version: "v1.0.0"}) {
			return nil, os.ErrNotExist
		}
		return fmt.Appendf(nil, "example.com/tiny v1.0.0 %s\nexample.com/tiny v1.0.0/go.mod %s\n", whole, alone), nil
	}))
	return nil
}

func (r *registries) crates() error {
	archive, err := tarred(map[string]string{
		"tiny-1.0.0/Cargo.toml": "[package]\nname = \"tiny\"\nversion = \"1.0.0\"\nedition = \"2021\"\n", "tiny-1.0.0/src/lib.rs": "pub const ANSWER: u32 = 42;\n",
	})
	r.files["index.crates.io/config.json"] = []byte(`{"dl":"https://static.crates.io/crates","api":"https://crates.io"}`)
	r.files["index.crates.io/ti/ny/tiny"] = fmt.Appendf(nil, `{"name":"tiny","vers":"1.0.0","deps":[],"cksum":"%x","features":{},"yanked":false}`+"\n", sha256.Sum256(archive))
	r.files["static.crates.io/crates/tiny/1.0.0/download"] = archive
	return err
}

func (r *registries) github() error {
	bare := filepath.Join(r.repos, "org", "tiny.git")
	work := filepath.Join(r.repos, "work")
	script := `git init -q --bare -b main "$1" && git --git-dir "$1" config http.receivepack true && git init -q -b main "$2" && cd "$2" && echo 42 >answer && git add answer &&
git -c user.name=a -c user.email=a@a.test commit -qm one && git push -q "$1" HEAD:main`
	if out, err := exec.Command("sh", "-c", script, "sh", bare, work).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

func (r *registries) debian() error {
	control, err := tarred(map[string]string{"./control": "Package: tiny\nVersion: 1.0\nArchitecture: all\nMaintainer: a <a@a.test>\nDescription: small\n"})
	if err != nil {
		return err
	}
	data, err := tarred(map[string]string{"./etc/tiny": "42\n"})
	if err != nil {
		return err
	}
	var deb bytes.Buffer
	deb.WriteString("!<arch>\n")
	for _, member := range []struct {
		name string
		data []byte
	}{{"debian-binary", []byte("2.0\n")}, {"control.tar.gz", control}, {"data.tar.gz", data}} {
		fmt.Fprintf(&deb, "%-16s%-12d%-6d%-6d%-8s%-10d`\n", member.name, 0, 0, 0, "100644", len(member.data))
		deb.Write(member.data)
		if len(member.data)%2 == 1 {
			deb.WriteByte('\n')
		}
	}
	index := fmt.Sprintf("Package: tiny\nVersion: 1.0\nArchitecture: all\nMaintainer: a <a@a.test>\nFilename: pool/tiny_1.0_all.deb\nSize: %d\nSHA256: %x\nDescription: small\n\n", deb.Len(), sha256.Sum256(deb.Bytes()))
	release := "Suite: stable\nCodename: stable\nArchitectures: amd64 arm64 all\nComponents: main\nDate: Mon, 01 Jan 2024 00:00:00 UTC\nSHA256:\n"
	for _, arch := range []string{"amd64", "arm64", "all"} {
		path := "main/binary-" + arch + "/Packages"
		r.files["deb.debian.org/debian/dists/stable/"+path] = []byte(index)
		release += fmt.Sprintf(" %x %d %s\n", sha256.Sum256([]byte(index)), len(index), path)
	}
	r.files["deb.debian.org/debian/dists/stable/Release"] = []byte(release)
	r.files["deb.debian.org/debian/pool/tiny_1.0_all.deb"] = deb.Bytes()
	return nil
}

func zipped(files map[string]string) ([]byte, error) {
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for name, content := range files {
		w, err := z.Create(name)
		if err != nil {
			return nil, err
		}
		if _, err := io.WriteString(w, content); err != nil {
			return nil, err
		}
	}
	err := z.Close()
	return b.Bytes(), err
}

func tarred(files map[string]string) ([]byte, error) {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	t := tar.NewWriter(z)
	for name, content := range files {
		if err := t.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content))}); err != nil {
			return nil, err
		}
		if _, err := io.WriteString(t, content); err != nil {
			return nil, err
		}
	}
	if err := t.Close(); err != nil {
		return nil, err
	}
	err := z.Close()
	return b.Bytes(), err
}
