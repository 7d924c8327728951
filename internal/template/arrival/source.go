package arrival

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/berm-sandbox/berm"
)

// Between two tries to fetch something the wait grows from the first to the last.
const (
	firstWait = 200 * time.Millisecond
	lastWait  = 10 * time.Second
)

// silence is how long a registry may send nothing.
const silence = 30 * time.Second

// pause waits before the next try, and returns how long to wait then.
func pause(ctx context.Context, wait time.Duration) time.Duration {
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
	return min(2*wait, lastWait)
}

// Place is a repository of a registry.
type Place struct {
	Registry   string `json:"registry"`           // host and port
	Insecure   bool   `json:"insecure,omitempty"` // without TLS, as a mirror is configured
	Repository string `json:"repository"`
	CA         []byte `json:"ca,omitempty"` // PEM, trusted beside the system's; then TLS alone
}

// Repo is the place in the words of the library.
func (p Place) Repo() (name.Repository, error) {
	var how []name.Option
	if p.Insecure {
		how = append(how, name.Insecure)
	}
	registry, err := name.NewRegistry(p.Registry, how...)
	if err != nil {
		return name.Repository{}, err
	}
	return registry.Repo(p.Repository), nil
}

// Source fetches parts of the blobs of one repository.
type Source struct {
	repo name.Repository
	auth authn.Authenticator
	way  http.RoundTripper
	url  string

	mu     sync.Mutex
	client *http.Client // once the registry has said how it is to be asked
}

// NewSource prepares to ask, with a credential of the registry.
func NewSource(p Place, auth authn.AuthConfig) (*Source, error) {
	repo, err := p.Repo()
	if err != nil {
		return nil, err
	}
	plain := remote.DefaultTransport.(*http.Transport).Clone()
	plain.ResponseHeaderTimeout = silence
	way := http.RoundTripper(plain)
	scheme := repo.Scheme()
	if len(p.CA) > 0 {
		authorities, err := x509.SystemCertPool()
		if err != nil {
			return nil, err
		}
		if !authorities.AppendCertsFromPEM(p.CA) {
			return nil, invalid("the registry's ca holds no certificate")
		}
		plain.TLSClientConfig = &tls.Config{RootCAs: authorities, MinVersion: tls.VersionTLS12}
		way, scheme = Encrypted{plain}, "https"
	}
	at := url.URL{Scheme: scheme, Host: repo.RegistryStr(), Path: "/v2/" + repo.RepositoryStr() + "/blobs/"}
	return &Source{repo: repo, auth: authn.FromConfig(auth), way: way, url: at.String()}, nil
}

// Encrypted is the way to a registry with an authority of its own. The library would try one
// at a private address without TLS too.
type Encrypted struct{ http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (e Encrypted) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme != "https" {
		return nil, berm.Errorf(berm.Denied, "a registry with a ca is asked by https alone")
	}
	return e.RoundTripper.RoundTrip(r)
}

func (s *Source) ask(ctx context.Context) (*http.Client, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.client == nil {
		way, err := transport.NewWithContext(ctx, s.repo.Registry, s.auth, s.way, []string{s.repo.Scope(transport.PullScope)})
		if err != nil {
			return nil, unavailable(err)
		}
		s.client = &http.Client{Transport: way, CheckRedirect: func(r *http.Request, via []*http.Request) error {
			if strings.HasPrefix(s.url, "https:") && r.URL.Scheme != "https" || len(via) > 5 {
				return errors.New("the registry leads elsewhere")
			}
			return nil
		}}
	}
	return s.client, nil
}

func unavailable(err error) error { return berm.Errorf(berm.Unavailable, "ask the registry: %w", err) }

// Range implements Ranges. It fails with Unsupported when the registry sends no parts of
// blobs, and with Unavailable.
func (s *Source) Range(ctx context.Context, digest string, offset, size int64) (io.ReadCloser, error) {
	ctx, cancel := context.WithCancel(ctx)
	body, err := s.open(ctx, digest, offset, size)
	if err != nil {
		cancel()
		return nil, err
	}
	return &attended{body: body, left: size, cancel: cancel, timer: time.AfterFunc(silence, cancel)}, nil
}

func (s *Source) open(ctx context.Context, digest string, offset, size int64) (io.ReadCloser, error) {
	client, err := s.ask(ctx)
	if err != nil {
		return nil, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+digest, nil)
	if err != nil {
		return nil, err
	}
	r.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", offset, offset+size-1))
	r.Header.Set("Accept-Encoding", "identity")
	r.Header.Set("User-Agent", "berm")
	answer, err := client.Do(r)
	if err != nil {
		return nil, unavailable(err)
	}
	if answer.StatusCode == http.StatusPartialContent && strings.HasPrefix(answer.Header.Get("Content-Range"), fmt.Sprintf("bytes %d-", offset)) {
		return answer.Body, nil
	}
	answer.Body.Close()
	if answer.StatusCode == http.StatusOK {
		return nil, berm.Errorf(berm.Unsupported, "the registry sends no parts of layers")
	}
	return nil, berm.Errorf(berm.Unavailable, "the registry answers with status %d to a request for a part of a layer", answer.StatusCode)
}

// attended is a body that must not be silent for long, and of which no more is read than was
// asked for.
type attended struct {
	body   io.ReadCloser
	left   int64
	cancel func()
	timer  *time.Timer
}

func (a *attended) Read(p []byte) (int, error) {
	if a.left == 0 {
		return 0, io.EOF
	}
	n, err := a.body.Read(p[:min(int64(len(p)), a.left)])
	a.left -= int64(n)
	a.timer.Reset(silence)
	return n, err
}

// Close implements io.Closer. A body that was read to its end leaves the connection for the
// next request.
func (a *attended) Close() error {
	if a.left == 0 {
		_, _ = io.CopyN(io.Discard, a.body, 1)
	}
	a.timer.Stop()
	err := a.body.Close()
	a.cancel()
	return err
}

// Reader reads a blob at any place, for as long as ctx lives.
type Reader struct {
	Ctx    context.Context //nolint:containedctx // io.ReaderAt has none
	Source Ranges
	Digest string
}

// ReadAt implements io.ReaderAt.
func (r Reader) ReadAt(p []byte, off int64) (int, error) {
	body, err := r.Source.Range(r.Ctx, r.Digest, off, int64(len(p)))
	if err != nil {
		return 0, err
	}
	defer body.Close()
	return io.ReadFull(body, p)
}
