package template

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/berm-sandbox/berm"
)

// testRegistry is a registry on loopback that remembers what it was asked.
type testRegistry struct {
	*httptest.Server
	host string
	mu   sync.Mutex
	// guard answers a request in the registry's place, or lets it pass.
	guard func(w http.ResponseWriter, r *http.Request) (answered bool)
	auth  []string // of each request
}

func newRegistry(t *testing.T, start func(http.Handler) *httptest.Server) *testRegistry {
	t.Helper()
	r := &testRegistry{}
	store := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	r.Server = start(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r.mu.Lock()
		guard := r.guard
		r.auth = append(r.auth, req.Header.Get("Authorization"))
		r.mu.Unlock()
		if guard == nil || !guard(w, req) {
			store.ServeHTTP(w, req)
		}
	}))
	r.Config.ErrorLog = log.New(io.Discard, "", 0)
	t.Cleanup(r.Close)
	_, r.host, _ = strings.Cut(r.URL, "://")
	return r
}

// asked returns the Authorization of all requests since the last call.
func (r *testRegistry) asked() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := r.auth
	r.auth = nil
	return all
}

func (r *testRegistry) push(t *testing.T, repository string, img v1.Image) {
	t.Helper()
	ref, err := name.ParseReference(r.host + "/" + repository)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(ref, img, remote.WithTransport(r.Client().Transport)); err != nil {
		t.Fatal(err)
	}
	r.asked()
}

func registriesOf(t *testing.T, config map[string]RegistryConfig) *Registries {
	t.Helper()
	r, err := NewRegistries(config)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// redirected leads requests for other hosts to a server, and counts them.
type redirected struct {
	to string
	n  int
}

func (r *redirected) RoundTrip(req *http.Request) (*http.Response, error) {
	r.n++
	if r.to == "" {
		return nil, errors.New("the network was asked")
	}
	req = req.Clone(context.WithoutCancel(req.Context()))
	req.URL.Scheme, req.URL.Host = "http", r.to
	return http.DefaultTransport.RoundTrip(req)
}

func digestOf(t *testing.T, img v1.Image) string {
	t.Helper()
	d, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	return d.String()
}

func here(t *testing.T) v1.Platform {
	t.Helper()
	p, err := parsePlatform("")
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Images are taken from directories under the names that they have in their registry,
// without a request.
func TestDirectoriesAsMirrors(t *testing.T) {
	platform := here(t)
	dir := t.TempDir()
	several, err := layout.Write(filepath.Join(dir, "team", "app"), empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	one, two := testImage(t, platform.Architecture, "one"), testImage(t, platform.Architecture, "two")
	for tag, img := range map[string]v1.Image{"v1": one, "v2": two} {
		if err := several.AppendImage(img, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": tag})); err != nil {
			t.Fatal(err)
		}
	}
	single, err := layout.Write(filepath.Join(dir, "team", "single:v3"), empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	if err := single.AppendImage(testImage(t, platform.Architecture, "single")); err != nil {
		t.Fatal(err)
	}
	tag, err := name.NewTag("python:3.12")
	if err != nil {
		t.Fatal(err)
	}
	if err := tarball.WriteToFile(filepath.Join(dir, "python:3.12.tar"), tag, testImage(t, platform.Architecture, "saved")); err != nil {
		t.Fatal(err)
	}
	registries := registriesOf(t, map[string]RegistryConfig{
		"registry.test": {Mirrors: []string{filepath.Join(dir, "missing"), dir}},
		"docker.io":     {Mirrors: []string{dir}},
	})
	s := newStore(t)
	for ref, want := range map[string]string{
		"registry.test/team/app:v1":                    "one",
		"registry.test/team/app:v2":                    "two",
		"registry.test/team/app@" + digestOf(t, one):   "one",
		"registry.test/team/single:v3":                 "single",
		"python:3.12":                                  "saved",
		"docker.io/library/python:3.12":                "saved",
		"index.docker.io/team/app@" + digestOf(t, two): "two",
	} {
		way := &redirected{}
		made, err := s.Import(t.Context(), ref, ImportOptions{Registries: registries, Transport: way, Pull: true}, nil)
		if err != nil || way.n > 0 {
			t.Errorf("%s: %v, after %d requests", ref, err, way.n)
			continue
		}
		checkImported(t, s, made, want)
	}
	for _, ref := range []string{"registry.test/team/app:v9", "registry.test/other", "registry.test/team/app@sha256:" + strings.Repeat("0", 64)} {
		way := &redirected{}
		if _, err := s.Import(t.Context(), ref, ImportOptions{Registries: registries, Transport: way}, nil); err == nil || way.n == 0 {
			t.Errorf("%s: %v: the registry was not asked for what the mirror lacks", ref, err)
		}
	}
	// A manifest that is not what its name says.
	if err := os.WriteFile(filepath.Join(dir, "team", "app", "blobs", "sha256", strings.TrimPrefix(digestOf(t, one), "sha256:")), mustManifest(t, two), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, ref := range []string{"registry.test/team/app:v1", "registry.test/team/app@" + digestOf(t, one)} {
		way := &redirected{}
		_, err := newStore(t).Import(t.Context(), ref, ImportOptions{Registries: registries, Transport: way}, nil)
		if berm.KindOf(err) != berm.Invalid || err == nil || way.n > 0 {
			t.Errorf("%s, forged: %v, after %d requests", ref, err, way.n)
		}
	}
}

func mustManifest(t *testing.T, img v1.Image) []byte {
	t.Helper()
	raw, err := img.RawManifest()
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// Of a mirror and the registry the mirror is asked first; it is shown nothing that is for
// the registry.
func TestRegistriesAsMirrors(t *testing.T) {
	platform := here(t)
	mirror, origin := newRegistry(t, httptest.NewServer), newRegistry(t, httptest.NewServer)
	mirror.push(t, "cache/team/app:v1", testImage(t, platform.Architecture, "mirrored"))
	origin.push(t, "team/app:v1", testImage(t, platform.Architecture, "original"))
	origin.push(t, "team/new:v1", testImage(t, platform.Architecture, "new"))
	registries := registriesOf(t, map[string]RegistryConfig{"registry.test": {Mirrors: []string{"http://" + mirror.host + "/cache"}}})
	secret := Basic("user", "for the registry alone")
	pull := func(ref string) (berm.Template, *Store, error) {
		s := newStore(t)
		made, err := s.Import(t.Context(), ref, ImportOptions{Registries: registries, Transport: &redirected{to: origin.host}, Login: secret}, nil)
		return made, s, err
	}

	made, s, err := pull("registry.test/team/app:v1")
	if err != nil {
		t.Fatal(err)
	}
	checkImported(t, s, made, "mirrored")
	if got := strings.Join(mirror.asked(), ""); got != "" {
		t.Errorf("the mirror was shown %q", got)
	}
	if got := origin.asked(); len(got) > 0 {
		t.Errorf("the registry got %d requests for what its mirror has", len(got))
	}

	made, s, err = pull("registry.test/team/new:v1")
	if err != nil {
		t.Fatal(err)
	}
	checkImported(t, s, made, "new")

	mirror.guard = func(w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(http.StatusBadGateway)
		return true
	}
	if made, s, err = pull("registry.test/team/app:v1"); err != nil {
		t.Fatal(err)
	}
	checkImported(t, s, made, "original")

	// What it says under a digest is something else.
	pinned := testImage(t, platform.Architecture, "pinned")
	mirror.guard = func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/manifests/") {
			return false
		}
		w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
		w.Write(mustManifest(t, testImage(t, platform.Architecture, "another")))
		return true
	}
	if _, _, err = pull("registry.test/team/app@" + digestOf(t, pinned)); err == nil || berm.KindOf(err) != berm.Invalid {
		t.Errorf("a forged manifest: %v", err)
	}
}

func TestRegistryConfig(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "no.pem"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for host, c := range map[string]RegistryConfig{
		"":               {},
		"a b":            {},
		"http://a.test":  {},
		"a.test/path":    {},
		"missing.test":   {CA: filepath.Join(dir, "missing.pem")},
		"no-ca.test":     {CA: filepath.Join(dir, "no.pem")},
		"relative.test":  {Mirrors: []string{"./images"}},
		"word.test":      {Mirrors: []string{"srv/images"}},
		"empty.test":     {Mirrors: []string{""}},
		"encrypted.test": {Mirrors: []string{"https://mirror.test"}},
	} {
		if _, err := NewRegistries(map[string]RegistryConfig{host: c}); err == nil || berm.KindOf(err) != berm.Invalid {
			t.Errorf("%q: %+v: %v", host, c, err)
		}
	}
}

// What a mirror that is down says, and one with a broken index.
func TestMirrorsThatFail(t *testing.T) {
	dir := t.TempDir()
	index := filepath.Join(dir, "index.json")
	if err := os.WriteFile(index, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	down := httptest.NewServer(nil)
	down.Close()
	at := strings.TrimPrefix(down.URL, "http://")
	var said []string
	_, err := newStore(t).Import(t.Context(), "registry.test/app:v1", ImportOptions{
		Registries: registriesOf(t, map[string]RegistryConfig{"registry.test": {Mirrors: []string{down.URL, t.TempDir(), dir}}}),
	}, func(s Step) { said = append(said, s.Message) })
	if err == nil || berm.KindOf(err) != berm.Invalid || !strings.Contains(err.Error(), index) {
		t.Errorf("a broken index: %v", err)
	}
	if len(said) != 2 || !strings.HasPrefix(said[0], at+" does not answer: ") || !strings.Contains(said[1], " has no registry.test/app:v1: ") {
		t.Errorf("said %q", said)
	}
	if _, err := newStore(t).Import(t.Context(), dir, ImportOptions{}, nil); err == nil || berm.KindOf(err) != berm.Invalid || !strings.Contains(err.Error(), index) {
		t.Errorf("a broken index of a layout: %v", err)
	}
}

// An authority is trusted for the registry that it was given for, and for no other.
func TestOwnAuthority(t *testing.T) {
	platform := here(t)
	r := newRegistry(t, httptest.NewTLSServer)
	r.push(t, "app:v1", testImage(t, platform.Architecture, "x"))
	file := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: r.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	s := newStore(t)
	ref := r.host + "/app:v1"
	for name, config := range map[string]map[string]RegistryConfig{
		"no authority":         nil,
		"one for another host": {"other.test": {CA: file}, r.host: {}},
	} {
		if _, err := s.Import(t.Context(), ref, ImportOptions{Registries: registriesOf(t, config)}, nil); err == nil {
			t.Errorf("%s: the registry was trusted", name)
		}
	}
	own := registriesOf(t, map[string]RegistryConfig{r.host: {CA: file}})
	made, err := s.Import(t.Context(), ref, ImportOptions{Registries: own}, nil)
	if err != nil {
		t.Fatal(err)
	}
	checkImported(t, s, made, "x")

	// The library would ask a registry at such an address without TLS too.
	plain := newRegistry(t, httptest.NewServer)
	plain.push(t, "app:v1", testImage(t, platform.Architecture, "x"))
	_, err = newStore(t).Import(t.Context(), plain.host+"/app:v1", ImportOptions{Registries: registriesOf(t, map[string]RegistryConfig{plain.host: {CA: file}})}, nil)
	if got := plain.asked(); err == nil || len(got) > 0 {
		t.Errorf("without TLS: %v, after %d requests", err, len(got))
	}
}

// The error for a platform that an image does not have lists what it has.
func TestPlatforms(t *testing.T) {
	r := newRegistry(t, httptest.NewServer)
	index := v1.ImageIndex(empty.Index)
	for _, p := range []v1.Platform{{OS: "linux", Architecture: "amd64"}, {OS: "linux", Architecture: "arm64", Variant: "v8"}, {OS: "unknown", Architecture: "unknown"}} {
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: testImage(t, p.Architecture, p.Architecture), Descriptor: v1.Descriptor{Platform: &p}})
	}
	tag, err := name.NewTag(r.host + "/app:v1")
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.WriteIndex(tag, index); err != nil {
		t.Fatal(err)
	}
	digest, err := index.Digest()
	if err != nil {
		t.Fatal(err)
	}
	for _, ref := range []string{tag.Name(), r.host + "/app@" + digest.String()} {
		s := newStore(t)
		made, err := s.Import(t.Context(), ref, ImportOptions{Platform: "linux/arm64", Name: "app"}, nil)
		if err != nil {
			t.Fatal(err)
		}
		checkImported(t, s, made, "arm64")
		_, err = s.Import(t.Context(), ref, ImportOptions{Platform: "linux/s390x"}, nil)
		if err == nil || berm.KindOf(err) != berm.NotFound || !strings.Contains(err.Error(), "not made for linux/s390x but for: linux/amd64, linux/arm64/v8") || strings.Contains(err.Error(), "unknown") {
			t.Errorf("got %v", err)
		}
	}
}

// bearer makes a registry want a token, which it gives for a password.
func (r *testRegistry) bearer(user, password string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.guard = func(w http.ResponseWriter, req *http.Request) bool {
		if req.URL.Path == "/token" {
			if u, p, _ := req.BasicAuth(); u != user || p != password || req.URL.Query().Get("scope") != "repository:app:pull" {
				w.WriteHeader(http.StatusUnauthorized)
			} else {
				io.WriteString(w, `{"token":"token for the registry"}`)
			}
			return true
		}
		if req.Header.Get("Authorization") == "Bearer token for the registry" {
			return false
		}
		w.Header().Set("WWW-Authenticate", `Bearer realm="`+r.URL+`/token",service="test"`)
		w.WriteHeader(http.StatusUnauthorized)
		return true
	}
}

func TestGoogleLogin(t *testing.T) {
	r := newRegistry(t, httptest.NewServer)
	r.push(t, "app:v1", testImage(t, here(t).Architecture, "x"))
	key := `{"type":"service_account","private_key":"x"}`
	r.bearer("_json_key", key)
	for given, kind := range map[string]berm.Kind{key: 0, `{"type":"service_account","private_key":"y"}`: berm.Denied} {
		login, err := Google(given)
		if err != nil {
			t.Fatal(err)
		}
		_, err = newStore(t).Import(t.Context(), r.host+"/app:v1", ImportOptions{Login: login}, nil)
		if kind == 0 && err != nil || kind != 0 && (err == nil || berm.KindOf(err) != kind) {
			t.Errorf("%s: %v", given, err)
		}
	}
	for _, bad := range []string{"", "x", `{"type":"authorized_user"}`} {
		if _, err := Google(bad); err == nil || berm.KindOf(err) != berm.Invalid {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// fakeAmazon is the service that gives passwords, which checks signatures as Amazon documents
// them (Signature Version 4), by code that has nothing in common with the library.
type fakeAmazon struct {
	t              *testing.T
	secret, answer string
	status         int
	elsewhere      http.RoundTripper
	asked          int
}

func (f *fakeAmazon) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Host != "api.ecr.eu-central-1.amazonaws.com" {
		return f.elsewhere.RoundTrip(r)
	}
	f.asked++
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	w := httptest.NewRecorder()
	if r.URL.Scheme != "https" || r.Method != "POST" || r.URL.Path != "/" || string(body) != "{}" || r.Header.Get("X-Amz-Target") != "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken" {
		f.t.Errorf("%s %s %q, %v", r.Method, r.URL, body, r.Header)
	}
	mac := func(key []byte, text string) []byte {
		h := hmac.New(sha256.New, key)
		h.Write([]byte(text))
		return h.Sum(nil)
	}
	hash := func(text string) string {
		sum := sha256.Sum256([]byte(text))
		return hex.EncodeToString(sum[:])
	}
	_, after, _ := strings.Cut(r.Header.Get("Authorization"), "SignedHeaders=")
	signed, signature, _ := strings.Cut(after, ", Signature=")
	canonical := "POST\n/\n\n"
	for _, h := range strings.Split(signed, ";") {
		value := r.Header.Get(h)
		switch h {
		case "host":
			value = r.URL.Host
		case "content-length":
			value = fmt.Sprint(r.ContentLength)
		}
		canonical += h + ":" + value + "\n"
	}
	canonical += "\n" + signed + "\n" + hash(string(body))
	now := r.Header.Get("X-Amz-Date")
	scope := now[:8] + "/eu-central-1/ecr/aws4_request"
	key := mac(mac(mac(mac([]byte("AWS4"+f.secret), now[:8]), "eu-central-1"), "ecr"), "aws4_request")
	want := hex.EncodeToString(mac(key, "AWS4-HMAC-SHA256\n"+now+"\n"+scope+"\n"+hash(canonical)))
	switch {
	case signature != want || !strings.Contains(r.Header.Get("Authorization"), "Credential=AKID/"+scope) || !strings.Contains(signed, "x-amz-target"):
		w.WriteHeader(http.StatusBadRequest)
		io.WriteString(w, `{"__type":"InvalidSignatureException","message":"the signature does not match"}`)
	default:
		w.WriteHeader(f.status)
		io.WriteString(w, f.answer)
	}
	return w.Result(), nil
}

func TestAmazonLogin(t *testing.T) {
	r := newRegistry(t, httptest.NewServer)
	r.push(t, "app:v1", testImage(t, here(t).Architecture, "x"))
	r.bearer("AWS", "pass:word")
	good := `{"authorizationData":[{"authorizationToken":"` + base64.StdEncoding.EncodeToString([]byte("AWS:pass:word")) + `","expiresAt":1.6e9,"proxyEndpoint":"https://1.dkr.ecr.eu-central-1.amazonaws.com"}]}`
	for name, c := range map[string]struct {
		secret, answer string
		status         int
		kind           berm.Kind
		want           string
	}{
		"right":       {"secret", good, 200, 0, ""},
		"wrong key":   {"another", good, 200, berm.Denied, "InvalidSignatureException"},
		"no rights":   {"secret", `{"__type":"AccessDeniedException","message":"no"}`, 400, berm.Denied, "AccessDeniedException"},
		"out":         {"secret", "", 503, berm.Unavailable, ""},
		"empty":       {"secret", `{"authorizationData":[]}`, 200, berm.Unavailable, ""},
		"not base64":  {"secret", `{"authorizationData":[{"authorizationToken":"?"}]}`, 200, berm.Unavailable, ""},
		"endless":     {"secret", strings.Repeat(" ", 2*maxToken) + good, 200, berm.Unavailable, ""},
		"no password": {"secret", `{"authorizationData":[{"authorizationToken":"eA=="}]}`, 200, berm.Unavailable, ""},
	} {
		t.Run(name, func(t *testing.T) {
			login, err := Amazon("AKID", c.secret, "eu-central-1")
			if err != nil {
				t.Fatal(err)
			}
			service := &fakeAmazon{t: t, secret: "secret", answer: c.answer, status: c.status, elsewhere: http.DefaultTransport}
			_, err = newStore(t).Import(t.Context(), r.host+"/app:v1", ImportOptions{Login: login, Transport: service}, nil)
			if c.kind == 0 && err != nil || c.kind != 0 && (err == nil || berm.KindOf(err) != c.kind || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v", err)
			}
			if err != nil && strings.Contains(err.Error(), c.secret) {
				t.Errorf("the error holds the key: %v", err)
			}
			if service.asked != 1 {
				t.Errorf("asked %d times", service.asked)
			}
		})
	}
	for _, bad := range [][3]string{{"", "s", "eu-central-1"}, {"i", "", "eu-central-1"}, {"i", "s", ""}, {"i", "s", "evil.test/"}, {"i", "s", "eu-central-1.evil.test#"}} {
		if _, err := Amazon(bad[0], bad[1], bad[2]); err == nil || berm.KindOf(err) != berm.Invalid {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func FuzzReadToken(f *testing.F) {
	f.Add(200, `{"authorizationData":[{"authorizationToken":"QVdTOng="}]}`)
	f.Add(400, `{"__type":"x","message":"y"}`)
	f.Fuzz(func(t *testing.T, status int, body string) {
		if _, _, err := readToken(status, strings.NewReader(body)); err != nil && berm.KindOf(err) != berm.Denied && berm.KindOf(err) != berm.Unavailable {
			t.Errorf("%v", err)
		}
	})
}
