package template

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/stargz-snapshotter/estargz"
	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// lazyLayer is an archive as a layer whose files can be fetched one by one.
func lazyLayer(t testing.TB, data []byte, opts ...estargz.Option) mutate.Addendum {
	t.Helper()
	blob, err := estargz.Build(io.NewSectionReader(bytes.NewReader(data), 0, int64(len(data))), opts...)
	if err != nil {
		t.Fatal(err)
	}
	defer blob.Close()
	packed, err := io.ReadAll(blob)
	if err != nil {
		t.Fatal(err)
	}
	return packedLayer(t, packed, blob.TOCDigest().String())
}

// packedLayer is a compressed layer that is said to have a table of contents.
func packedLayer(t testing.TB, packed []byte, table string) mutate.Addendum {
	t.Helper()
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(packed)), nil })
	if err != nil {
		t.Fatal(err)
	}
	a := mutate.Addendum{Layer: layer}
	if table != "" {
		a.Annotations = map[string]string{estargz.TOCJSONDigestAnnotation: table}
	}
	return a
}

// imageOf is an image of layers, for this machine.
func imageOf(t testing.TB, layers ...mutate.Addendum) v1.Image {
	t.Helper()
	img, err := mutate.Append(empty.Image, layers...)
	if err != nil {
		t.Fatal(err)
	}
	platform, err := parsePlatform("")
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", platform.Architecture
	if img, err = mutate.ConfigFile(img, config); err != nil {
		t.Fatal(err)
	}
	return img
}

// gate holds requests for parts of layers until it is opened.
type gate struct {
	open  chan struct{}
	once  sync.Once
	parts atomic.Int64 // requests that came
}

// Open lets all requests through, from now on.
func (g *gate) Open() { g.once.Do(func() { close(g.open) }) }

// gated lets a registry answer requests for tables of contents alone, and others when the gate
// is open. They are told apart by their order: arm makes it begin.
func gated(r *testRegistry, armed *atomic.Bool) *gate {
	g := &gate{open: make(chan struct{})}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.guard = func(_ http.ResponseWriter, req *http.Request) bool {
		if req.Method == http.MethodGet && req.Header.Get("Range") != "" && armed.Load() {
			g.parts.Add(1)
			select {
			case <-g.open:
			case <-req.Context().Done():
			}
		}
		return false
	}
	return g
}

// needsLazy skips where nothing can arrive lazily.
func needsLazy(t testing.TB) {
	t.Helper()
	if err := lazily(); err != nil {
		t.Skipf("lazy start: %v", err)
	}
}

// nothingArrives waits until nothing of an arrival is left in the store: no process, no mount,
// no file.
func nothingArrives(t testing.TB, s *Store) {
	t.Helper()
	eventually(t, "the arrival to be gone", func() bool {
		left, err := os.ReadDir(filepath.Join(s.dir, "arriving"))
		return err == nil && len(left) == 0
	})
	mounts, err := os.ReadFile("/proc/thread-self/mounts") // the first thread may be in a namespace of a test
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), s.dir) {
		t.Errorf("left a mount: %s", mounts)
	}
}

func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited too long for %s", what)
		}
	}
}

// arrived waits for a template to be whole.
func arrived(t testing.TB, s *Store, name string) berm.Template {
	t.Helper()
	var found berm.Template
	eventually(t, name+" to be whole", func() bool {
		var err error
		if found, err = s.Resolve(t.Context(), "", name); err != nil {
			t.Fatal(err)
		}
		if found.Arriving != nil && found.Arriving.Failed != "" {
			t.Fatal(found.Arriving.Failed)
		}
		return found.Arriving == nil
	})
	return found
}

// leased stands for a sandbox of a template.
func leased(t testing.TB, s *Store, of berm.Template) (killed func()) {
	t.Helper()
	sandbox := filepath.Join(t.TempDir(), "sandbox")
	if err := os.Mkdir(sandbox, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := s.Lease(t.Context(), "sandbox", sandbox, of); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := os.Remove(sandbox); err != nil {
			t.Error(err)
		}
	}
}

// closeArrivals ends what a test has left arriving, so that nothing outlives it.
func closeArrivals(t testing.TB, s *Store) {
	t.Cleanup(func() {
		list, err := s.List(context.Background())
		if err != nil {
			t.Error(err)
		}
		for _, made := range list {
			if err := s.Remove(context.Background(), string(made.ID)); err != nil {
				t.Error(err)
			}
		}
		nothingArrives(t, s)
	})
}

// A lazy layer is, file by file, what the unpacked one is, and becomes it.
func TestLazyIsWhatIsUnpacked(t *testing.T) {
	needsLazy(t)
	big := strings.Repeat("0123456789abcdef", 20_000)
	second := func(e entry) entry { e.ModTime = e.ModTime.Add(time.Second); return e }
	lower := archive(t,
		dir755("app"), file644("app/f", "old"), file644("app/gone", "x"), file644("app/big", big), file644("app/none", ""),
		link(tar.TypeSymlink, "current", "app"), dir755("covered"), file644("covered/below", "x"),
		entry{&tar.Header{Typeflag: tar.TypeReg, Name: "sudo", Mode: 0o4755, Uid: 0, Gid: 5, ModTime: modTime(3)}, "set-uid"},
		entry{&tar.Header{Typeflag: tar.TypeDir, Name: "home/u/", Mode: 0o2770, Uid: 1000, Gid: 65534, ModTime: modTime(4)}, ""},
		entry{&tar.Header{Typeflag: tar.TypeReg, Name: "home/u/attributes", Uid: 1000, Gid: 1000, Mode: 0, ModTime: modTime(5), Format: tar.FormatPAX,
			PAXRecords: map[string]string{"SCHILY.xattr.user.k": "v=\n\x00", "SCHILY.xattr.user.overlay.opaque": "y", "SCHILY.xattr.security.capability": "x"}}, "a"},
		link(tar.TypeLink, "home/u/same", "app/big"), link(tar.TypeLink, "same", "app/big"),
	)
	upper := archive(t,
		second(file644("current/f", "new")), file644("current/.wh.gone", ""), file644("covered/"+opaqueMarker, ""), file644("covered/only", "y"),
		link(tar.TypeSymlink, "home/u/away", "../../../../etc/passwd"), entry{&tar.Header{Typeflag: tar.TypeFifo, Name: "pipe"}, ""},
	)
	r := newRegistry(t, httptest.NewServer)
	r.push(t, "app:v1", imageOf(t,
		lazyLayer(t, lower, estargz.WithChunkSize(10_000), estargz.WithPrioritizedFiles([]string{"app/f"})), lazyLayer(t, upper)))

	whole := newStore(t)
	want, err := whole.Import(t.Context(), r.host+"/app:v1", ImportOptions{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	s := newStore(t)
	closeArrivals(t, s)
	var armed atomic.Bool
	g := gated(r, &armed)
	defer g.Open()
	made, err := s.Import(t.Context(), r.host+"/app:v1", ImportOptions{Lazy: Always}, func(p Step) {
		if strings.Contains(p.Message, "while they arrive") {
			armed.Store(true)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if made.Arriving == nil || made.Arriving.Total == 0 || made.Arriving.Bytes != 0 || len(made.Layers) != 2 {
		t.Fatalf("made %+v, %+v", made, made.Arriving)
	}
	if len(made.Layers) != len(want.Layers) || made.Layers[0].DiffID != want.Layers[0].DiffID {
		t.Errorf("layers %+v, want %+v", made.Layers, want.Layers)
	}
	// All but contents is there though nothing has come.
	for i := range made.Layers {
		wantNames := find(t, want.Layers[i].Path)
		if diff := cmp.Diff(wantNames, find(t, real(t, made.Layers[i].Path))); diff != "" {
			t.Errorf("layer %d (-unpacked +lazy):\n%s", i, diff)
		}
	}
	if r, err := s.find("app:v1"); err != nil || !cmp.Equal(r.Skipped, []string{"pipe"}) {
		t.Errorf("skipped %v, %v", r.Skipped, err)
	}
	killed := leased(t, s, made)
	var kept *os.File
	compare := func(made berm.Template) {
		t.Helper()
		var merged, mergedWant map[string]string
		for i := range made.Layers {
			what, times, one := describe(t, real(t, made.Layers[i].Path))
			whatWant, timesWant, oneWant := describe(t, want.Layers[i].Path)
			delete(times, "app/gone") // a whiteout
			delete(timesWant, "app/gone")
			for _, diff := range []string{cmp.Diff(whatWant, what), cmp.Diff(timesWant, times), cmp.Diff(oneWant, one)} {
				if diff != "" {
					t.Errorf("layer %d (-unpacked +lazy):\n%s", i, diff)
				}
			}
		}
		mounted(t, paths(made.Layers), func(dir string) { merged, _, _ = describe(t, dir) })
		mounted(t, paths(want.Layers), func(dir string) { mergedWant, _, _ = describe(t, dir) })
		if diff := cmp.Diff(mergedWant, merged); diff != "" {
			t.Errorf("(-unpacked +lazy):\n%s", diff)
		}
	}
	if kept, err = os.Open(filepath.Join(made.Layers[0].Path, "app")); err != nil {
		t.Fatal(err)
	}
	defer kept.Close()
	// Nothing becomes whole meanwhile.
	unlock, err := s.lock(t.Context(), "lock", unix.LOCK_EX)
	if err != nil {
		t.Fatal(err)
	}
	g.Open()
	compare(made)
	unlock()
	whole2 := arrived(t, s, "app:v1")
	compare(whole2)
	if whole2.Layers[1].Path != s.layerPath(filepath.Base(want.Layers[1].Path)) || whole2.Size != want.Size {
		t.Errorf("became %+v, want %+v", whole2, want)
	}
	// Who has the lazy layer still reads it, and who knows it by its name finds the whole one.
	if got, err := os.ReadFile(fmt.Sprintf("/proc/self/fd/%d/big", kept.Fd())); err != nil || string(got) != big {
		t.Errorf("through the old mount: %d bytes, %v", len(got), err)
	}
	for _, l := range made.Layers {
		if to := real(t, l.Path); filepath.Dir(to) != filepath.Join(s.dir, "layers") {
			t.Errorf("%s leads to %s", l.Path, to)
		}
	}
	kept.Close()
	killed()
	nothingArrives(t, s)
	if err := s.Collect(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := layerNames(t, s); len(got) != 2 {
		t.Errorf("layers %q", got)
	}
}

// real follows the link that the name of a lazy layer is.
func real(t testing.TB, path string) string {
	t.Helper()
	to, err := filepath.EvalSymlinks(path)
	if err != nil {
		t.Fatal(err)
	}
	return to
}

func paths(layers []berm.Layer) (all []string) {
	for _, l := range layers {
		all = append(all, l.Path)
	}
	return all
}

// A read of what has not come waits for it alone.
func TestLazyReadsWhatIsAskedFor(t *testing.T) {
	needsLazy(t)
	random := rand.NewChaCha8([32]byte{})
	noise := make([]byte, 9<<20) // three pieces
	_, _ = random.Read(noise)
	r := newRegistry(t, httptest.NewServer)
	r.push(t, "app", imageOf(t, lazyLayer(t, archive(t, file644("big", string(noise)), file644("small", "s")))))
	// Everything but requests for less than a piece waits.
	free := make(chan struct{})
	var asked atomic.Int64
	r.mu.Lock()
	r.guard = func(_ http.ResponseWriter, req *http.Request) bool {
		var from, to int64
		if n, _ := fmt.Sscanf(req.Header.Get("Range"), "bytes=%d-%d", &from, &to); n == 2 {
			if asked.Add(to - from + 1); to-from+1 >= 4<<20 {
				select {
				case <-free:
				case <-req.Context().Done():
				}
			}
		}
		return false
	}
	r.mu.Unlock()
	s := newStore(t)
	closeArrivals(t, s)
	made, err := s.Import(t.Context(), r.host+"/app", ImportOptions{Lazy: Always}, nil)
	if err != nil {
		t.Fatal(err)
	}
	killed := leased(t, s, made)
	if got, err := os.ReadFile(filepath.Join(made.Layers[0].Path, "small")); err != nil || string(got) != "s" {
		t.Errorf("got %q, %v", got, err)
	}
	if now, err := s.Resolve(t.Context(), "", "app"); err != nil || now.Arriving == nil || now.Arriving.Bytes == 0 || now.Arriving.Bytes >= now.Arriving.Total {
		t.Errorf("%+v, %v", now.Arriving, err)
	}
	close(free)
	got, err := os.ReadFile(filepath.Join(made.Layers[0].Path, "big"))
	if err != nil || !bytes.Equal(got, noise) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	arrived(t, s, "app")
	killed()
	nothingArrives(t, s)
	// What is here need not arrive.
	if again, err := s.Import(t.Context(), r.host+"/app", ImportOptions{Lazy: Always, Name: "again"}, nil); err != nil || again.Arriving != nil {
		t.Errorf("imported again: %+v, %v", again, err)
	}
}

// A template is told why its image does not get on, and an import of it without --lazy waits.
func TestLazyWaits(t *testing.T) {
	needsLazy(t)
	r := newRegistry(t, httptest.NewServer)
	r.push(t, "app:v1", imageOf(t, lazyLayer(t, archive(t, file644("f", "x")))))
	var broken atomic.Bool
	r.mu.Lock()
	r.guard = func(w http.ResponseWriter, req *http.Request) bool {
		if !broken.Load() || req.Header.Get("Range") == "" {
			return false
		}
		w.WriteHeader(http.StatusBadGateway)
		return true
	}
	r.mu.Unlock()
	s := newStore(t)
	closeArrivals(t, s)
	made, err := s.Import(t.Context(), r.host+"/app:v1", ImportOptions{Lazy: Always}, func(Step) { broken.Store(true) })
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the reason", func() bool {
		now, err := s.Resolve(t.Context(), "", "app:v1")
		return err == nil && now.Arriving != nil && strings.Contains(now.Arriving.Waits, "502")
	})
	killed := leased(t, s, made)
	waits := make(chan error, 1)
	said := make(chan string, 10)
	go func() {
		now, err := s.Import(t.Context(), r.host+"/app:v1", ImportOptions{}, func(p Step) { said <- p.Message })
		if err == nil && (now.Arriving != nil || now.ID != made.ID) {
			err = fmt.Errorf("imported %+v", now)
		}
		waits <- err
	}()
	if what := <-said; !strings.Contains(what, "on its way") {
		t.Errorf("said %q", what)
	}
	broken.Store(false)
	if err := <-waits; err != nil {
		t.Error(err)
	}
	// A sandbox that was made before has the layer that new ones have, and no tag need be said.
	if err := s.Remove(t.Context(), "app"); berm.KindOf(err) != berm.Conflict {
		t.Errorf("remove: %v", err)
	}
	killed()
	if err := s.Remove(t.Context(), "app"); err != nil {
		t.Error(err)
	}
	nothingArrives(t, s)
}

// An image that is not what it says is not used, and gives way to the next import.
func TestLazyFails(t *testing.T) {
	needsLazy(t)
	data := archive(t, file644("f", "x"))
	img := imageOf(t, lazyLayer(t, data))
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config = config.DeepCopy()
	config.RootFS.DiffIDs[0].Hex = strings.Repeat("0", 64)
	wrong, err := mutate.ConfigFile(img, config)
	if err != nil {
		t.Fatal(err)
	}
	r := newRegistry(t, httptest.NewServer)
	r.push(t, "app:v1", wrong)
	s := newStore(t)
	closeArrivals(t, s)
	made, err := s.Import(t.Context(), r.host+"/app:v1", ImportOptions{Lazy: Always}, nil)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the failure", func() bool {
		now, err := s.Resolve(t.Context(), "", "app:v1")
		return err == nil && now.Arriving != nil && now.Arriving.Failed != ""
	})
	if err := s.Serve(t.Context(), made.Layers); berm.KindOf(err) != berm.Invalid || berm.HintOf(err) == "" {
		t.Errorf("serve: %v", err)
	}
	if _, err := s.Import(t.Context(), r.host+"/app:v1", ImportOptions{}, nil); berm.KindOf(err) != berm.Invalid {
		t.Errorf("import of the wrong image: %v", err)
	}
	r.push(t, "app:v1", img)
	again, err := s.Import(t.Context(), r.host+"/app:v1", ImportOptions{}, nil)
	if err != nil || again.Arriving != nil || again.BuildID == made.BuildID {
		t.Errorf("import of the right one: %+v, %v", again, err)
	}
	nothingArrives(t, s)
}

// What cannot arrive lazily is imported whole and the reason said, or refused.
func TestNotLazy(t *testing.T) {
	data := archive(t, file644("f", "x"))
	plain := packedLayer(t, data, "")
	r := newRegistry(t, httptest.NewServer)
	r.push(t, "plain", imageOf(t, plain))
	r.push(t, "lazy", imageOf(t, lazyLayer(t, data)))
	r.push(t, "claimed", imageOf(t, packedLayer(t, data, "sha256:"+strings.Repeat("0", 64))))
	r.push(t, "below", imageOf(t, lazyLayer(t, data), plain))
	r.push(t, "link", imageOf(t, plain, lazyLayer(t, archive(t, link(tar.TypeLink, "g", "f")))))
	able := lazily
	defer func() { lazily = able }()
	for name, c := range map[string]struct {
		image, reason string
		host          error
	}{
		"host":              {"lazy", "no such kernel", errors.New("no such kernel")},
		"no table":          {"plain", "no table of contents", nil},
		"no eStargz":        {"claimed", "no eStargz", nil},
		"whole layer above": {"below", "no table of contents", nil},
		"link to below":     {"link", "links to a file of a layer below", nil},
	} {
		t.Run(name, func(t *testing.T) {
			if c.host == nil {
				needsLazy(t)
			}
			lazily = func() error { return c.host }
			defer func() { lazily = able }()
			s := newStore(t)
			_, err := s.Import(t.Context(), r.host+"/"+c.image, ImportOptions{Lazy: Always}, nil)
			if berm.KindOf(err) != berm.Unsupported || !strings.Contains(err.Error(), c.reason) {
				t.Errorf("got %v, want %q", err, c.reason)
			}
			var said strings.Builder
			made, err := s.Import(t.Context(), r.host+"/"+c.image, ImportOptions{Lazy: Auto}, func(p Step) { said.WriteString(p.Message + "\n") })
			if err != nil || made.Arriving != nil {
				t.Fatalf("%+v, %v", made.Arriving, err)
			}
			if !strings.Contains(said.String(), c.reason) {
				t.Errorf("said %q", said.String())
			}
			nothingArrives(t, s)
		})
	}
}
