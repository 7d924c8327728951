package template

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/template/arrival"
)

// RegistryConfig is how one registry is reached, as the configuration file says it.
type RegistryConfig struct {
	// CA is a file of authorities, PEM, by which the registry is trusted beside the system's.
	CA string `json:"ca"`
	// Mirrors are where its images are looked for first, in this order: directories, and
	// registries as [http://]HOST[:PORT][/PATH].
	Mirrors []string `json:"mirrors"`
}

// Registries are the registries of which a machine's configuration says something. Nil are
// none.
type Registries struct {
	mirrors map[string][]mirror
	ways    map[string]http.RoundTripper // to mirrors, and to registries with an authority of their own
	cas     map[string][]byte            // those authorities, PEM
}

// mirror is one place of a registry's images.
type mirror struct {
	dir      string // or, if it is "":
	registry name.Registry
	prefix   string // of names of repositories there
}

// NewRegistries checks a configuration, by host and port of each registry as they stand in
// names of images. It fails with Invalid.
func NewRegistries(config map[string]RegistryConfig) (*Registries, error) {
	r := &Registries{mirrors: map[string][]mirror{}, ways: map[string]http.RoundTripper{}, cas: map[string][]byte{}}
	for _, host := range slices.Sorted(maps.Keys(config)) {
		c := config[host]
		registry, err := name.NewRegistry(host, name.StrictValidation)
		if err != nil || host == "" {
			return nil, berm.Errorf(berm.Invalid, "registry %q: want HOST or HOST:PORT, as in names of images", host)
		}
		if c.CA != "" {
			way := remote.DefaultTransport.(*http.Transport).Clone()
			pem, err := os.ReadFile(c.CA)
			if err == nil {
				way.TLSClientConfig, err = trusting(c.CA, pem)
			}
			if err != nil {
				return nil, berm.Errorf(berm.Invalid, "registry %s: ca: %w", host, err)
			}
			r.cas[registry.RegistryStr()] = pem
			r.ways[registry.RegistryStr()] = arrival.Encrypted{RoundTripper: way}
		}
	}
	for host, c := range config {
		registry, err := name.NewRegistry(host)
		if err != nil {
			return nil, err
		}
		for _, place := range c.Mirrors {
			m, err := parseMirror(place)
			if err != nil {
				return nil, berm.Errorf(berm.Invalid, "registry %s: %w", host, err)
			}
			r.mirrors[registry.RegistryStr()] = append(r.mirrors[registry.RegistryStr()], m)
			if at := m.registry.RegistryStr(); m.dir == "" && r.ways[at] == nil {
				r.ways[at] = remote.DefaultTransport.(*http.Transport).Clone()
			}
		}
	}
	return r, nil
}

func trusting(file string, pem []byte) (*tls.Config, error) {
	authorities, err := x509.SystemCertPool()
	if err != nil {
		return nil, err
	}
	if !authorities.AppendCertsFromPEM(pem) {
		return nil, berm.Errorf(berm.Invalid, "%s holds no certificate", file)
	}
	return &tls.Config{RootCAs: authorities, MinVersion: tls.VersionTLS12}, nil
}

func parseMirror(place string) (m mirror, err error) {
	if filepath.IsAbs(place) {
		return mirror{dir: filepath.Clean(place)}, nil
	}
	bare, plain := strings.CutPrefix(place, "http://")
	host, prefix, _ := strings.Cut(bare, "/")
	how := []name.Option{name.StrictValidation}
	if plain {
		how = append(how, name.Insecure)
	}
	// A word alone would be a directory beside who knows which.
	word := !plain && host != "localhost" && !strings.ContainsAny(host, ".:")
	if m.registry, err = name.NewRegistry(host, how...); err != nil || host == "" || word || strings.Contains(bare, "://") || strings.HasPrefix(host, ".") {
		return m, berm.Errorf(berm.Invalid, "mirror %q: want the absolute path of a directory, or [http://]HOST[:PORT][/PATH] with a dot or a port in HOST", place)
	}
	m.prefix = strings.Trim(prefix, "/")
	return m, nil
}

// way leads to mirrors and to registries with an authority of their own, wherever the operator
// has them, and to all others as elsewhere says.
func (r *Registries) way(elsewhere http.RoundTripper) http.RoundTripper {
	if elsewhere == nil {
		elsewhere = remote.DefaultTransport
	}
	if r == nil {
		return elsewhere
	}
	return ways{r.ways, elsewhere}
}

type ways struct {
	named     map[string]http.RoundTripper
	elsewhere http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (w ways) RoundTrip(r *http.Request) (*http.Response, error) {
	if named := w.named[r.URL.Host]; named != nil {
		return named.RoundTrip(r)
	}
	return w.elsewhere.RoundTrip(r)
}

// find looks for an image where its registry's mirrors are, then in the registry. What a
// mirror lacks, or one that does not answer, is passed over; a mirror that answers with
// something wrong is not.
func (r *Registries) find(ctx context.Context, ref string, platform v1.Platform, opts ImportOptions, p Progress) (*image, error) {
	parsed, err := name.ParseReference(ref)
	if err != nil {
		return nil, err
	}
	var mirrors []mirror
	if r != nil {
		mirrors = r.mirrors[parsed.Context().RegistryStr()]
	}
	for _, m := range mirrors {
		var img *image
		if m.dir != "" {
			img, err = fromDirectory(m.dir, parsed, platform)
		} else { // What the registry is shown is not for its mirror.
			img, err = r.fromRegistry(ctx, m.reference(parsed), platform, remote.WithAuthFromKeychain(authn.DefaultKeychain), r.way(opts.Transport))
		}
		if err == nil {
			p.say("%s is from %s", ref, m)
			return img, nil
		}
		switch berm.KindOf(err) {
		case berm.NotFound:
			p.say("%s has no %s: %v", m, ref, err)
		case berm.Unavailable:
			p.say("%s does not answer: %v", m, err)
		case berm.Denied:
			p.say("%s does not give %s: %v", m, ref, err)
		default:
			return nil, err
		}
	}
	as := remote.WithAuthFromKeychain(authn.DefaultKeychain)
	way := r.way(opts.Transport)
	if opts.Login != nil {
		user, password, err := opts.Login(ctx, way)
		if err != nil {
			return nil, err
		}
		if as = remote.WithAuth(authn.Anonymous); user != "" || password != "" {
			as = remote.WithAuth(&authn.Basic{Username: user, Password: password})
		}
	}
	return r.fromRegistry(ctx, parsed, platform, as, way)
}

func (m mirror) String() string { return cmp.Or(m.dir, path.Join(m.registry.RegistryStr(), m.prefix)) }

// reference is the name that an image has in a mirror.
func (m mirror) reference(of name.Reference) name.Reference {
	repository := m.registry.Repo(path.Join(m.prefix, of.Context().RepositoryStr()))
	if digest, ok := of.(name.Digest); ok {
		return repository.Digest(digest.DigestStr())
	}
	return repository.Tag(of.Identifier())
}

func (r *Registries) fromRegistry(ctx context.Context, ref name.Reference, platform v1.Platform, as remote.Option, way http.RoundTripper) (*image, error) {
	found, err := remote.Get(ref, remote.WithContext(ctx), as, remote.WithUserAgent("berm"), remote.WithTransport(way))
	if err != nil {
		return nil, registryError(ref.Name(), err)
	}
	var img v1.Image
	if found.MediaType.IsIndex() {
		index, err := found.ImageIndex()
		if err != nil {
			return nil, registryError(ref.Name(), err)
		}
		if img, err = fromIndex(index, platform, 0); err != nil {
			return nil, registryError(ref.Name(), err)
		}
	} else if img, err = found.Image(); err != nil {
		return nil, registryError(ref.Name(), err)
	}
	result, err := fromV1(img, suggested(ref), platform)
	if err != nil {
		return nil, err
	}
	at := ref.Context()
	result.place = &arrival.Place{Registry: at.RegistryStr(), Insecure: at.Scheme() == "http", Repository: at.RepositoryStr()}
	if r != nil {
		result.place.CA = r.cas[at.RegistryStr()]
	}
	return result, nil
}

// suggested is what a template is called after the name of an image.
func suggested(ref name.Reference) string {
	alias := path.Base(ref.Context().RepositoryStr())
	if tag, ok := ref.(name.Tag); ok && tag.TagStr() != name.DefaultTag {
		alias += ":" + tag.TagStr()
	}
	return alias
}

// registryError gives a registry's answer a kind, unless it has one.
func registryError(ref string, err error) error {
	var known *berm.Error
	if errors.As(err, &known) {
		e := berm.Errorf(known.Kind, "image %s: %w", ref, err)
		e.Hint = berm.HintOf(err)
		return e
	}
	var answer *transport.Error
	if errors.As(err, &answer) {
		switch answer.StatusCode {
		case http.StatusNotFound:
			return berm.Errorf(berm.NotFound, "image %s: %w", ref, err)
		case http.StatusUnauthorized, http.StatusForbidden:
			return berm.Errorf(berm.Denied, "image %s: %w", ref, err).WithHint("Check the name, or log in: credentials are read from Docker's configuration file.")
		case http.StatusTooManyRequests:
			return berm.Errorf(berm.Unavailable, "image %s: %w", ref, err).WithHint("The registry limits how often one may ask: log in or wait.")
		}
	}
	kind := berm.Unavailable
	var failed net.Error
	if answer == nil && !errors.As(err, &failed) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, context.Canceled) {
		kind = berm.Invalid // it answered, and what it said was wrong
	}
	return berm.Errorf(kind, "image %s: %w", ref, err)
}

// fromDirectory looks for an image below a directory: REPOSITORY:TAG is a layout,
// REPOSITORY:TAG.tar what `docker save` writes, and REPOSITORY, or the directory itself, a
// layout of several images. Docker's "library/" may be left out.
func fromDirectory(dir string, ref name.Reference, platform v1.Platform) (*image, error) {
	repository := ref.Context().RepositoryStr()
	if !filepath.IsLocal(repository) {
		return nil, berm.Errorf(berm.Invalid, "%q is no name of a file", repository)
	}
	img, err := fromLayoutOf(dir, ref, platform)
	for _, r := range slices.Compact([]string{repository, strings.TrimPrefix(repository, "library/")}) {
		if berm.KindOf(err) != berm.NotFound {
			break
		}
		base := filepath.Join(dir, r)
		if img, err = fromLayoutOf(base, ref, platform); berm.KindOf(err) != berm.NotFound {
			break
		}
		tag, ok := ref.(name.Tag)
		if !ok {
			continue
		}
		tagged := base + ":" + tag.TagStr()
		if info, e := os.Stat(tagged); e == nil && info.IsDir() {
			img, err = fromLayout(tagged, platform)
		} else if info, e := os.Stat(tagged + ".tar"); e == nil && info.Mode().IsRegular() {
			img, err = fromDockerSave(tagged+".tar", platform)
		}
	}
	if err != nil {
		return nil, err
	}
	img.name = suggested(ref)
	return img, nil
}

// fromLayoutOf takes one image of a layout of several: by its digest, or by the name or
// tag that it has there.
func fromLayoutOf(dir string, ref name.Reference, platform v1.Platform) (*image, error) {
	missing := berm.Errorf(berm.NotFound, "%s does not have it", dir)
	if _, err := os.Stat(filepath.Join(dir, "index.json")); err != nil {
		return nil, missing
	}
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, berm.Errorf(berm.Invalid, "%s is no OCI image layout: %w", dir, err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return nil, brokenIndex(dir, err)
	}
	names := []string{ref.Identifier(), ref.Name(), ref.String(), ref.Context().RepositoryStr() + ":" + ref.Identifier()}
	i := slices.IndexFunc(manifest.Manifests, func(d v1.Descriptor) bool {
		if digest, ok := ref.(name.Digest); ok {
			return d.Digest.String() == digest.DigestStr()
		}
		return slices.Contains(names, d.Annotations["org.opencontainers.image.ref.name"]) || slices.Contains(names, d.Annotations["io.containerd.image.name"])
	})
	if i < 0 {
		return nil, missing
	}
	// The platform of an image in a layout is told by its configuration too.
	img, err := described(index, manifest.Manifests[i], platform, 0)
	if err != nil {
		return nil, err
	}
	return fromV1(img, suggested(ref), platform)
}
