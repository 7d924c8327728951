package template

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/berm-sandbox/berm"
)

// testImage has two layers; the second replaces a file of the first through a link
// and removes another.
func testImage(t *testing.T, arch, content string) v1.Image {
	t.Helper()
	img := empty.Image
	for _, entries := range [][]entry{
		{dir755("app"), file644("app/f", "old"), file644("app/gone", "x"), link(tar.TypeSymlink, "current", "app")},
		{file644("current/f", content), file644("current/.wh.gone", ""), {&tar.Header{Typeflag: tar.TypeFifo, Name: "pipe"}, ""}},
	} {
		data := archive(t, entries...)
		layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil })
		if err != nil {
			t.Fatal(err)
		}
		if img, err = mutate.AppendLayers(img, layer); err != nil {
			t.Fatal(err)
		}
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", arch
	config.Config = v1.Config{User: "app:staff", WorkingDir: "/app/", Env: []string{"A=1=2", "B=", "broken"}, Cmd: []string{"run"}, ExposedPorts: map[string]struct{}{"80/tcp": {}}}
	if img, err = mutate.ConfigFile(img, config); err != nil {
		t.Fatal(err)
	}
	return img
}

func checkImported(t *testing.T, s *Store, made berm.Template, content string) {
	t.Helper()
	if made.User != "app" || made.Workdir != "/app" || made.Setuid || !cmp.Equal(made.Env, map[string]string{"A": "1=2", "B": ""}) {
		t.Errorf("template %+v", made)
	}
	merged := newModel()
	for _, l := range made.Layers {
		merged = merge(t, merged, l.Path)
	}
	if got := merged.children["app"].children; len(got) != 1 || got["f"].content != content {
		t.Errorf("app holds %v", merged.lines("/"))
	}
	r, err := s.find(string(made.ID))
	if err != nil || !cmp.Equal(r.Skipped, []string{"pipe"}) || !cmp.Equal(r.Config, Config{Cmd: []string{"run"}, Ports: []string{"80/tcp"}}) {
		t.Errorf("record %+v, %v", r, err)
	}
	if again, err := s.Resolve(t.Context(), "", made.Alias()); err != nil || !cmp.Equal(again, made) {
		t.Errorf("resolved %+v, %v", again, err)
	}
}

func TestImportFromRegistry(t *testing.T) {
	var requests atomic.Int64
	handler := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		handler.ServeHTTP(w, r)
	}))
	defer server.Close()
	host := strings.TrimPrefix(server.URL, "http://")
	other := "arm64"
	if p, _ := parsePlatform(""); p.Architecture == other {
		other = "amd64"
	}
	platform, err := parsePlatform("")
	if err != nil {
		t.Fatal(err)
	}
	index := mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: testImage(t, other, "other"), Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: other}}},
		mutate.IndexAddendum{Add: testImage(t, platform.Architecture, "mine"), Descriptor: v1.Descriptor{Platform: &platform}})
	tag, err := name.ParseReference(host + "/team/app:v1")
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.WriteIndex(tag, index); err != nil {
		t.Fatal(err)
	}
	s := newStore(t)
	made, err := s.Import(t.Context(), tag.Name(), ImportOptions{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if made.Alias() != "app:v1" {
		t.Errorf("named %v", made.Names)
	}
	checkImported(t, s, made, "mine")

	before := requests.Load()
	again, err := s.Import(t.Context(), tag.Name(), ImportOptions{}, nil)
	if err != nil || !cmp.Equal(again, made) || requests.Load() != before {
		t.Errorf("again: %+v, %v, after %d requests", again, err, requests.Load()-before)
	}
	pulled, err := s.Import(t.Context(), tag.Name(), ImportOptions{Pull: true}, nil)
	if err != nil || pulled.ID != made.ID || !cmp.Equal(pulled.Layers, made.Layers) || requests.Load() == before {
		t.Errorf("pulled: %+v, %v, after %d requests", pulled, err, requests.Load()-before)
	}
	starts, err := s.Import(t.Context(), tag.Name(), ImportOptions{Start: "serve", Ready: "ask"}, nil)
	if found, _ := s.Resolve(t.Context(), "", "app:v1"); err != nil || starts.ID != made.ID || found.Start != "serve" || found.Ready != "ask" {
		t.Errorf("with commands: %+v, %v", found, err)
	}
	foreign, err := s.Import(t.Context(), tag.Name(), ImportOptions{Platform: "linux/" + other, Name: "foreign"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	checkImported(t, s, foreign, "other")

	for ref, kind := range map[string]berm.Kind{
		host + "/team/app:v2": berm.NotFound,
		host + "/TEAM/app":    berm.Invalid,
		"127.0.0.1:1/app":     berm.Unavailable,
	} {
		if _, err := s.Import(t.Context(), ref, ImportOptions{}, nil); err == nil || berm.KindOf(err) != kind {
			t.Errorf("%s: got %v, want %v", ref, err, kind)
		}
	}
	if _, err := s.Import(t.Context(), tag.Name(), ImportOptions{Platform: "linux/s390x"}, nil); err == nil {
		t.Error("an image for no platform of the index was taken")
	}
	if _, err := s.Import(t.Context(), tag.Name(), ImportOptions{Name: "../x"}, nil); err == nil || berm.KindOf(err) != berm.Invalid {
		t.Errorf("name ../x: %v", err)
	}
}

func TestImportFromFiles(t *testing.T) {
	platform, err := parsePlatform("")
	if err != nil {
		t.Fatal(err)
	}
	img := testImage(t, platform.Architecture, "mine")
	tag, err := name.NewTag("example.com/team/app:v1")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	file, tree := filepath.Join(dir, "saved.tar"), filepath.Join(dir, "tree")
	if err := tarball.WriteToFile(file, tag, img); err != nil {
		t.Fatal(err)
	}
	path, err := layout.Write(tree, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	if err := path.AppendImage(img, layout.WithPlatform(platform)); err != nil {
		t.Fatal(err)
	}
	s := newStore(t)
	for ref, want := range map[string]string{file: "app:v1", tree: "tree"} {
		made, err := s.Import(t.Context(), ref, ImportOptions{}, nil)
		if err != nil {
			t.Errorf("%s: %v", ref, err)
			continue
		}
		if made.Alias() != want {
			t.Errorf("%s is named %v, want %s", ref, made.Names, want)
		}
		checkImported(t, s, made, "mine")
	}

	if _, err := s.Import(t.Context(), tree, ImportOptions{Platform: "linux/s390x"}, nil); err == nil || berm.KindOf(err) != berm.NotFound {
		t.Errorf("another platform: %v", err)
	}
	// A blob that is not what it is called: another layer, one byte changed.
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	digest, err := layers[1].Digest()
	if err != nil {
		t.Fatal(err)
	}
	blob := filepath.Join(tree, "blobs", "sha256", digest.Hex)
	if err := os.WriteFile(blob, archive(t, file644("evil", "x")), 0o600); err != nil {
		t.Fatal(err)
	}
	fresh := newStore(t)
	if _, err := fresh.Import(t.Context(), tree, ImportOptions{}, nil); err == nil || berm.KindOf(err) != berm.Invalid {
		t.Errorf("a forged layer: %v", err)
	}
	if list, err := fresh.List(t.Context()); len(list) != 0 || err != nil {
		t.Errorf("a forged image left %v, %v", list, err)
	}
	config, err := img.ConfigName()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(tree, "blobs", "sha256", config.Hex), []byte(`{"os":"linux"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := fresh.Import(t.Context(), tree, ImportOptions{}, nil); err == nil || berm.KindOf(err) != berm.Invalid {
		t.Errorf("a forged configuration: %v", err)
	}
}

func TestHostileImages(t *testing.T) {
	platform, err := parsePlatform("")
	if err != nil {
		t.Fatal(err)
	}
	good := testImage(t, platform.Architecture, "x")
	foreign, err := mutate.Append(empty.Image, mutate.Addendum{
		Layer: static.NewLayer([]byte("x"), types.OCILayer),
		URLs:  []string{"http://169.254.169.254/latest/meta-data"},
	})
	if err != nil {
		t.Fatal(err)
	}
	layer := static.NewLayer(archive(t, file644("f", "x")), types.OCIUncompressedLayer)
	many := empty.Image
	for range maxLayers + 1 {
		if many, err = mutate.AppendLayers(many, layer); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		img  v1.Image
		kind berm.Kind
	}{
		"layer from elsewhere": {foreign, berm.Unsupported},
		"too many layers":      {many, berm.Invalid},
		"no layers":            {empty.Image, berm.Invalid},
		"fewer diff-ids":       {fewerDiffIDs{good}, berm.Invalid},
		"huge configuration":   {hugeConfig{good}, berm.Invalid},
	} {
		if _, err := fromV1(c.img, "x", platform); err == nil || berm.KindOf(err) != c.kind {
			t.Errorf("%s: got %v, want %v", name, err, c.kind)
		}
	}
}

type fewerDiffIDs struct{ v1.Image }

func (i fewerDiffIDs) Manifest() (*v1.Manifest, error) {
	m, err := i.Image.Manifest()
	if err != nil {
		return nil, err
	}
	m = m.DeepCopy()
	m.Layers = append(m.Layers, m.Layers[0])
	return m, nil
}

type hugeConfig struct{ v1.Image }

func (i hugeConfig) Manifest() (*v1.Manifest, error) {
	m, err := i.Image.Manifest()
	if err != nil {
		return nil, err
	}
	m = m.DeepCopy()
	m.Config.Size = 1 << 40
	return m, nil
}

func TestHostileDockerSave(t *testing.T) {
	config := `{"os":"linux","rootfs":{"type":"layers","diff_ids":["sha256:` + strings.Repeat("0", 64) + `"]}}`
	manifest := func(config, layer string) entry {
		return file644("manifest.json", fmt.Sprintf(`[{"Config":%q,"Layers":[%q]}]`, config, layer))
	}
	cases := map[string][]entry{
		"no manifest":             {file644("x", "x")},
		"not JSON":                {file644("manifest.json", "x")},
		"no image":                {file644("manifest.json", "[]")},
		"configuration missing":   {manifest("c", "l")},
		"layer missing":           {manifest("c", "l"), file644("c", config)},
		"layer is another":        {manifest("c", "l"), file644("c", config), file644("l", "x")},
		"layer links to itself":   {manifest("c", "l"), file644("c", config), link(tar.TypeSymlink, "l", "l")},
		"layer links to the host": {manifest("c", "l"), file644("c", config), link(tar.TypeSymlink, "l", "/etc/passwd")},
		"configuration climbs":    {manifest("../../etc/passwd", "l"), file644("l", "x")},
		"diff-id is a path":       {manifest("c", "l"), file644("c", `{"rootfs":{"diff_ids":["sha256:../../x"]}}`), file644("l", "x")},
		"huge configuration":      {manifest("c", "l"), file644("c", strings.Repeat(" ", maxConfig+1)), file644("l", "x")},
	}
	for name, entries := range cases {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "x.tar")
			if err := os.WriteFile(file, archive(t, entries...), 0o600); err != nil {
				t.Fatal(err)
			}
			s := newStore(t)
			if _, err := s.Import(t.Context(), file, ImportOptions{Name: "x"}, nil); err == nil || berm.KindOf(err) != berm.Invalid {
				t.Errorf("got %v, want it refused", err)
			}
			if got := append(find(t, filepath.Join(s.dir, "layers")), find(t, filepath.Join(s.dir, "tmp"))...); len(got) > 0 {
				t.Errorf("left %q", got)
			}
		})
	}
	s := newStore(t)
	if _, err := s.Import(t.Context(), "/nonexistent.tar", ImportOptions{}, nil); berm.KindOf(err) != berm.NotFound || err == nil {
		t.Errorf("no file: %v", err)
	}
}
