package lazy

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/stargz-snapshotter/estargz"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/time/rate"

	"github.com/berm-sandbox/berm/test/harness"
)

// bandwidth is what the registry sends at most, in bytes a second, to all together.
const bandwidth = 50 << 20

// slow are connections that share a bandwidth.
type slow struct {
	net.Listener
	*rate.Limiter
}

func (s slow) Accept() (net.Conn, error) {
	c, err := s.Listener.Accept()
	return slowConn{c, s.Limiter}, err
}

type slowConn struct {
	net.Conn
	limit *rate.Limiter
}

func (c slowConn) Write(p []byte) (n int, err error) {
	for len(p) > 0 && err == nil {
		piece := p[:min(len(p), 64<<10)]
		if err = c.limit.WaitN(context.Background(), len(piece)); err != nil {
			return n, err
		}
		var m int
		m, err = c.Conn.Write(piece)
		n, p = n+m, p[m:]
	}
	return n, err
}

// TestSpeed measures the time from the begin of an import to the first output of a command in a
// sandbox: of the same image, lazily and whole. BERM_TEST_LAZY_MIB is how large it is.
func TestSpeed(t *testing.T) {
	size, err := strconv.Atoi(os.Getenv("BERM_TEST_LAZY_MIB"))
	if err != nil {
		t.Skip("a measurement: make bench-lazy")
	}
	harness.Slow(t)
	p := newPlace(t)
	ref := largeImage(t, size)
	server := harness.Serve(t, "--level", "namespace", "--templates", p.templates)
	took := map[string]time.Duration{}
	for _, how := range []string{"lazily", "whole"} {
		args := []string{"import", ref, "--name", how}
		if how == "lazily" {
			args = append(args, "--lazy")
		}
		begun := time.Now()
		p.berm(t, args...)
		sandbox, err := server.Create(t.Context(), 5*time.Minute, map[string]any{"templateID": how})
		if err != nil {
			t.Fatal(err)
		}
		if got := run(t, sandbox, "cat /word"); got != "swordfish\n" {
			t.Fatalf("got %q", got)
		}
		took[how] = time.Since(begun)
		if how == "lazily" {
			eventually(t, "the image", func() bool { return !strings.Contains(p.berm(t, "ls", "--local"), "arriving") })
			t.Logf("all of it was there after %.1f s", time.Since(begun).Seconds())
		}
		if err := sandbox.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
		p.berm(t, "rm", "--local", how)
		p.gone(t)
	}
	t.Logf("%d MiB: first output after %.1f s lazily, %.1f s whole: %.0f times sooner", size, took["lazily"].Seconds(), took["whole"].Seconds(), took["whole"].Seconds()/took["lazily"].Seconds())
}

// largeImage is an image of random files of 4 MiB, in a registry with a bandwidth.
func largeImage(t *testing.T, size int) (ref string) {
	t.Helper()
	small, err := image()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	plain, err := os.Create(filepath.Join(dir, "plain"))
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	w := tar.NewWriter(plain)
	failed := copyEntries(w, small.base)
	random := rand.NewChaCha8([32]byte{2})
	for i := range size / 4 {
		failed = errors.Join(failed, w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprintf("noise/%d", i), Mode: 0o644, Size: 4 << 20}))
		_, err := io.CopyN(w, random, 4<<20)
		failed = errors.Join(failed, err)
	}
	failed = errors.Join(failed, w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "word", Mode: 0o644, Size: 10}))
	_, err = io.WriteString(w, "swordfish\n")
	if failed = errors.Join(failed, err, w.Close()); failed != nil {
		t.Fatal(failed)
	}
	length, err := plain.Seek(0, io.SeekEnd)
	if err != nil {
		t.Fatal(err)
	}
	blob, err := estargz.Build(io.NewSectionReader(plain, 0, length), estargz.WithCompressionLevel(1))
	if err != nil {
		t.Fatal(err)
	}
	defer blob.Close()
	packed, err := os.Create(filepath.Join(dir, "packed"))
	if err != nil {
		t.Fatal(err)
	}
	defer packed.Close()
	if _, err := io.Copy(packed, blob); err != nil {
		t.Fatal(err)
	}
	layer, err := tarball.LayerFromFile(packed.Name())
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.Append(empty.Image, mutate.Addendum{Layer: layer, Annotations: map[string]string{estargz.TOCJSONDigestAnnotation: blob.TOCDigest().String()}})
	if err != nil {
		t.Fatal(err)
	}
	limit := rate.NewLimiter(rate.Inf, 1<<20)
	blobs := filepath.Join(dir, "blobs")
	if err := os.Mkdir(blobs, 0o700); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(ranges(blobs, registry.New(registry.Logger(log.New(io.Discard, "", 0)), registry.WithBlobHandler(registry.NewDiskBlobHandler(blobs)))))
	server.Listener = slow{server.Listener, limit}
	server.Start()
	t.Cleanup(server.Close)
	ref = strings.TrimPrefix(server.URL, "http://") + "/large"
	parsed, err := name.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(parsed, img); err != nil {
		t.Fatal(err)
	}
	limit.SetLimit(bandwidth)
	return ref
}

// ranges answers requests for parts of blobs from their files, as registries do.
func ranges(dir string, otherwise http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, digest, ok := strings.Cut(r.URL.Path, "/blobs/sha256:")
		if !ok || r.Method != http.MethodGet || r.Header.Get("Range") == "" {
			otherwise.ServeHTTP(w, r)
			return
		}
		http.ServeFile(w, r, filepath.Join(dir, "sha256", digest))
	})
}

func copyEntries(w *tar.Writer, archive []byte) error {
	from := tar.NewReader(strings.NewReader(string(archive)))
	for {
		h, err := from.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = w.WriteHeader(h)
		}
		if err == nil {
			_, err = io.Copy(w, from)
		}
		if err != nil {
			return err
		}
	}
}
