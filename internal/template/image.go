package template

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/containerd/stargz-snapshotter/estargz"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/template/arrival"
)

// Bounds of what an image's description may hold.
const (
	maxConfig = 4 << 20
	maxLayers = 127 // as Docker has it; the kernel stacks 500
)

// image is one image to import, wherever it comes from.
type image struct {
	name   string // suggested for the template
	digest string // of its manifest, or of its configuration where it has none
	config v1.ConfigFile
	layers []blob         // lowest first, compressed or not
	place  *arrival.Place // nil when it is not from a registry
}

// blob is one layer of an image that is not in the store.
type blob struct {
	diffID string
	size   int64 // as it comes
	open   func() (io.ReadCloser, error)
	digest string          // of the blob; "" where nobody says
	table  string          // digest of its table of contents; "" when it has none
	known  map[string]bool // see ImportOptions
}

// isPath tells a file from the name of an image: a name never begins so.
func isPath(ref string) bool {
	return strings.HasPrefix(ref, "/") || strings.HasPrefix(ref, "./") || strings.HasPrefix(ref, "../") || ref == "." || ref == ".."
}

// canonical is how a reference is recorded and found again.
func canonical(ref string) (string, error) {
	if isPath(ref) {
		return filepath.Abs(ref)
	}
	parsed, err := name.ParseReference(ref)
	if err != nil {
		return "", berm.Errorf(berm.Invalid, "image reference %q: %w", ref, err).
			WithHint("A file or directory begins with / or ./; anything else is the name of an image in a registry.")
	}
	return parsed.Name(), nil
}

// openImage finds an image by a reference that canonical returned.
func openImage(ctx context.Context, ref string, platform v1.Platform, opts ImportOptions, p Progress) (*image, error) {
	if !isPath(ref) {
		return opts.Registries.find(ctx, ref, platform, opts, p)
	}
	info, err := os.Stat(ref)
	if err != nil {
		return nil, berm.Errorf(berm.NotFound, "image: %w", err)
	}
	if info.IsDir() {
		return fromLayout(ref, platform)
	}
	return fromDockerSave(ref, platform)
}

// fromLayout reads an OCI image layout, a directory with an index.json.
func fromLayout(dir string, platform v1.Platform) (*image, error) {
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, berm.Errorf(berm.Invalid, "%s is no OCI image layout: %w", dir, err)
	}
	if _, err := index.IndexManifest(); err != nil {
		return nil, brokenIndex(dir, err)
	}
	img, err := fromIndex(index, platform, 0)
	if err != nil {
		return nil, err
	}
	return fromV1(img, path.Base(dir), platform)
}

func brokenIndex(dir string, err error) error {
	return berm.Errorf(berm.Invalid, "%s is no index of images: %w", filepath.Join(dir, "index.json"), err)
}

// fromIndex takes the image for the platform. One without a platform, as tools
// write that pack a single image, is judged by its configuration later.
func fromIndex(index v1.ImageIndex, platform v1.Platform, depth int) (v1.Image, error) {
	manifest, err := index.IndexManifest()
	if err != nil {
		return nil, berm.Errorf(berm.Invalid, "image index: %w", err)
	}
	var offered []string
	for _, d := range manifest.Manifests {
		if d.Platform != nil && !d.Platform.Satisfies(platform) {
			if d.Platform.OS != "unknown" { // what attests to another
				offered = append(offered, d.Platform.String())
			}
			continue
		}
		if img, err := described(index, d, platform, depth); berm.KindOf(err) != berm.NotFound {
			return img, err
		}
	}
	return nil, berm.Errorf(berm.NotFound, "the image is not made for %s but for: %s", platform, strings.Join(offered, ", "))
}

// described takes the image that an index has under a descriptor, and checks that it is the
// one. It fails with NotFound where that is neither an image nor an index with one for the
// platform.
func described(index v1.ImageIndex, d v1.Descriptor, platform v1.Platform, depth int) (v1.Image, error) {
	switch {
	case d.MediaType.IsImage():
		img, err := index.Image(d.Digest)
		if err != nil {
			return nil, unreadable("manifest", err)
		}
		raw, err := img.RawManifest()
		if err != nil {
			return nil, unreadable("manifest", err)
		}
		return img, hashesTo(raw, d.Digest, "manifest")
	case d.MediaType.IsIndex() && depth < 3:
		nested, err := index.ImageIndex(d.Digest)
		if err != nil {
			return nil, unreadable("index", err)
		}
		raw, err := nested.RawManifest()
		if err != nil {
			return nil, unreadable("index", err)
		}
		if err := hashesTo(raw, d.Digest, "index"); err != nil {
			return nil, err
		}
		return fromIndex(nested, platform, depth+1)
	}
	return nil, berm.Errorf(berm.NotFound, "%s is no image", d.MediaType)
}

// unreadable gives what cannot be read of an image a kind; a registry's answers get theirs
// from registryError.
func unreadable(what string, err error) error {
	if answer := (*transport.Error)(nil); errors.As(err, &answer) || berm.KindOf(err) != berm.Internal {
		return err
	}
	return berm.Errorf(berm.Invalid, "image %s: %w", what, err)
}

// hashesTo checks a part of an image's description against its digest.
func hashesTo(raw []byte, want v1.Hash, what string) error {
	sum, _, err := v1.SHA256(bytes.NewReader(raw))
	if err == nil && sum != want {
		err = berm.Errorf(berm.Invalid, "the image's %s is %s and not %s", what, sum, want)
	}
	return err
}

// fromV1 checks the description of an image and takes it over.
func fromV1(img v1.Image, suggested string, platform v1.Platform) (*image, error) {
	manifest, err := img.Manifest()
	if err != nil {
		return nil, berm.Errorf(berm.Invalid, "image manifest: %w", err)
	}
	if manifest.Config.Size > maxConfig {
		return nil, berm.Errorf(berm.Invalid, "the image's configuration has %d bytes", manifest.Config.Size)
	}
	raw, err := img.RawConfigFile()
	if err != nil {
		return nil, berm.Errorf(berm.Invalid, "image configuration: %w", err)
	}
	digest, err := img.Digest()
	if err != nil {
		return nil, err
	}
	result := &image{name: suggested, digest: digest.String()}
	if err := result.setConfig(raw, manifest.Config.Digest, platform); err != nil {
		return nil, err
	}
	if len(manifest.Layers) != len(result.config.RootFS.DiffIDs) {
		return nil, berm.Errorf(berm.Invalid, "the image has %d layers and %d diff-ids", len(manifest.Layers), len(result.config.RootFS.DiffIDs))
	}
	for i, d := range manifest.Layers {
		if len(d.URLs) > 0 {
			// The image would choose which hosts this one talks to.
			return nil, berm.Errorf(berm.Unsupported, "layer %s is to be fetched from elsewhere", d.Digest)
		}
		layer, err := img.LayerByDigest(d.Digest)
		if err != nil {
			return nil, berm.Errorf(berm.Invalid, "layer %s: %w", d.Digest, err)
		}
		result.layers = append(result.layers, blob{
			diffID: result.config.RootFS.DiffIDs[i].String(), size: d.Size, open: layer.Compressed,
			digest: d.Digest.String(), table: d.Annotations[estargz.TOCJSONDigestAnnotation],
		})
	}
	return result, nil
}

// setConfig checks an image's configuration against its digest and the platform.
// Every layer is then checked against the configuration.
func (img *image) setConfig(raw []byte, digest v1.Hash, platform v1.Platform) error {
	if digest != (v1.Hash{}) {
		if err := hashesTo(raw, digest, "configuration"); err != nil {
			return err
		}
	}
	if err := json.Unmarshal(raw, &img.config); err != nil {
		return berm.Errorf(berm.Invalid, "image configuration: %w", err)
	}
	c := &img.config
	if c.OS != "" && c.OS != platform.OS || c.Architecture != "" && c.Architecture != platform.Architecture {
		return berm.Errorf(berm.Unsupported, "the image is made for %s/%s, not %s", c.OS, c.Architecture, platform).
			WithHint("Choose another with --platform, if the image has one.")
	}
	if n := len(c.RootFS.DiffIDs); n == 0 || n > maxLayers {
		return berm.Errorf(berm.Invalid, "the image has %d layers; 1 to %d are possible", n, maxLayers)
	}
	for _, d := range c.RootFS.DiffIDs {
		if _, err := v1.NewHash(d.String()); err != nil || d.Algorithm != "sha256" {
			return berm.Errorf(berm.Invalid, "diff-id %q is no SHA-256", d)
		}
	}
	return nil
}

// fromDockerSave reads what `docker save` and `podman save` write: a tar archive
// with a manifest.json. The archive is read from its start for each layer.
func fromDockerSave(file string, platform v1.Platform) (*image, error) {
	raw, err := readMember(file, "manifest.json", maxConfig)
	if err != nil {
		return nil, err
	}
	var manifests []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	if err := json.Unmarshal(raw, &manifests); err != nil {
		return nil, berm.Errorf(berm.Invalid, "%s: manifest.json: %w", file, err)
	}
	if len(manifests) != 1 {
		return nil, berm.Errorf(berm.Invalid, "%s holds %d images", file, len(manifests)).WithHint("Save one image per file.")
	}
	m := manifests[0]
	if raw, err = readMember(file, m.Config, maxConfig); err != nil {
		return nil, err
	}
	img := &image{name: strings.TrimSuffix(path.Base(file), ".tar")}
	if len(m.RepoTags) > 0 {
		img.name = strings.TrimSuffix(path.Base(m.RepoTags[0]), ":"+name.DefaultTag)
	}
	if err := img.setConfig(raw, v1.Hash{}, platform); err != nil {
		return nil, err
	}
	digest, _, err := v1.SHA256(strings.NewReader(string(raw)))
	if err != nil {
		return nil, err
	}
	img.digest = digest.String()
	if len(m.Layers) != len(img.config.RootFS.DiffIDs) {
		return nil, berm.Errorf(berm.Invalid, "the image has %d layers and %d diff-ids", len(m.Layers), len(img.config.RootFS.DiffIDs))
	}
	for i, member := range m.Layers {
		img.layers = append(img.layers, blob{
			diffID: img.config.RootFS.DiffIDs[i].String(),
			open:   func() (io.ReadCloser, error) { return openMember(file, member) },
		})
	}
	return img, nil
}

func readMember(file, member string, limit int64) ([]byte, error) {
	r, err := openMember(file, member)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = berm.Errorf(berm.Invalid, "%s: %q is larger than %d bytes", file, member, limit)
	}
	return b, err
}

// openMember opens one file of a tar archive, which may be compressed itself. A
// layer that equals another may be a symbolic link to it.
func openMember(file, member string) (io.ReadCloser, error) {
	for range 2 {
		f, err := os.Open(file)
		if err != nil {
			return nil, berm.Errorf(berm.NotFound, "image: %w", err)
		}
		budget := DefaultBudget
		plain, err := decompress(f, &budget)
		if err != nil {
			f.Close()
			return nil, err
		}
		archive := tar.NewReader(plain)
		link := ""
		for {
			h, err := archive.Next()
			if err != nil {
				f.Close()
				if errors.Is(err, io.EOF) {
					err = errors.New("the archive does not hold it")
				}
				return nil, berm.Errorf(berm.Invalid, "%s: %q: %w", file, member, err).
					WithHint("A file must be what `docker save` writes; a directory an OCI image layout.")
			}
			if path.Clean(h.Name) != path.Clean(member) {
				continue
			}
			if h.Typeflag == tar.TypeSymlink {
				link = path.Join(path.Dir(h.Name), h.Linkname)
				break
			}
			return struct {
				io.Reader
				io.Closer
			}{archive, f}, nil
		}
		f.Close()
		member = link
	}
	return nil, berm.Errorf(berm.Invalid, "%s: %q is a link to a link", file, member)
}

// defaults are what sandboxes of the image get unless they ask for something else.
func (img *image) defaults() (berm.Template, Config) {
	c := img.config.Config
	t := berm.Template{User: "root", Workdir: "/", Limits: DefaultLimits(), Env: map[string]string{}}
	if user, _, _ := strings.Cut(c.User, ":"); user != "" {
		t.User = user
	}
	if path.IsAbs(c.WorkingDir) {
		t.Workdir = path.Clean(c.WorkingDir)
	}
	for _, assignment := range c.Env {
		if key, value, ok := strings.Cut(assignment, "="); ok && key != "" {
			t.Env[key] = value
		}
	}
	return t, Config{Entrypoint: c.Entrypoint, Cmd: c.Cmd, Labels: c.Labels, Ports: slices.Sorted(maps.Keys(c.ExposedPorts))}
}

// parsePlatform reads "os/arch[/variant]"; "" is this machine's.
func parsePlatform(s string) (v1.Platform, error) {
	if s == "" {
		return v1.Platform{OS: "linux", Architecture: runtime.GOARCH}, nil
	}
	p, err := v1.ParsePlatform(s)
	if err != nil || p.OS != "linux" || p.Architecture == "" {
		return v1.Platform{}, berm.Errorf(berm.Invalid, "platform %q: want linux/ARCH", s)
	}
	return *p, nil
}

func (b blob) String() string { return fmt.Sprintf("layer %.19s", b.diffID) }
