package template

import (
	"context"
	"io"
	"net/http"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/failpoint"
	"github.com/berm-sandbox/berm/internal/template/arrival"
)

// ImportOptions says how to import an image.
type ImportOptions struct {
	Name     string // of the template; "" takes the image's
	Platform string // "linux/ARCH"; "" is this machine's
	Pull     bool   // ask the registry even if the image is in the store
	Setuid   bool   // its set-uid programs (sudo) may gain rights inside
	// Lazy says whether sandboxes may be made before the image has arrived. That is for images
	// of a registry in the format eStargz, and for root.
	Lazy Lazy
	// Start and Ready are the template's.
	Start, Ready string
	// Login tells what the registry is shown; nil is Docker's configuration.
	Login Login
	// Registries are those that the machine's configuration names.
	Registries *Registries
	// Transport reaches all others; nil is the host's own way.
	Transport http.RoundTripper

	unnamed bool            // it becomes no template
	known   map[string]bool // the layers of the store that need not come again, by name; nil are all
}

// Import makes a template from an image: a path to an OCI image layout or to a
// file of `docker save` (beginning with / or ./), or a name in a registry. A name
// that was imported before is not asked for again unless opts.Pull is set. Kinds:
// NotFound, Denied, Unavailable (the registry), Invalid (the image is malformed,
// hostile or too large), Unsupported (another platform, or owners that this user
// cannot store). Of a name whose image is on its way, it waits for that unless opts.Lazy allows
// otherwise.
func (s *Store) Import(ctx context.Context, ref string, opts ImportOptions, p Progress) (berm.Template, error) {
	platform, err := parsePlatform(opts.Platform)
	if err != nil {
		return berm.Template{}, err
	}
	source, err := canonical(ref)
	if err != nil {
		return berm.Template{}, err
	}
	if opts.Name != "" {
		if err := CheckName(opts.Name); err != nil {
			return berm.Template{}, err
		}
	}
	if !isPath(source) && !opts.Pull {
		if t, ok, err := s.imported(source, platform.String(), opts); err != nil {
			return berm.Template{}, err
		} else if ok && opts.Lazy == Whole {
			if t, err = s.Whole(ctx, t, p); berm.KindOf(err) != berm.Invalid || err == nil {
				return t, err
			}
			p.say("it is imported anew: %v", err)
		} else if ok {
			return t, nil
		}
	}
	if err := s.Collect(ctx); err != nil {
		return berm.Template{}, err
	}
	unlock, err := s.lock(ctx, "lock", unix.LOCK_SH)
	if err != nil {
		return berm.Template{}, err
	}
	defer unlock()
	return s.bring(ctx, source, platform, opts, p)
}

// bring makes a template of an image that canonical found a name for. The caller holds the store.
func (s *Store) bring(ctx context.Context, source string, platform v1.Platform, opts ImportOptions, p Progress) (berm.Template, error) {
	img, err := openImage(ctx, source, platform, opts, p)
	if err != nil {
		return berm.Template{}, err
	}
	made := record{Source: source, Digest: img.digest, Platform: platform.String()}
	made.Template, made.Config = img.defaults()
	made.Setuid, made.Start, made.Ready = opts.Setuid, opts.Start, opts.Ready
	made.Names = []string{img.name}
	if opts.Name != "" {
		made.Names = []string{opts.Name}
	}
	if opts.unnamed {
		made.Names = nil
	} else if err := CheckName(made.Names[0]); err != nil {
		return berm.Template{}, err
	}
	from, tables := len(img.layers), [][]arrival.Entry(nil)
	if opts.Lazy != Whole {
		var reason error
		if from, tables, reason, err = s.mayArrive(ctx, img, opts); err != nil {
			return berm.Template{}, err
		}
		if err := opts.Lazy.allow(len(tables), reason, p); err != nil {
			return berm.Template{}, err
		}
	}
	budget := DefaultBudget
	var chains []string
	for i := 0; i < len(img.layers); i++ {
		if i == from {
			p.say("%d layers are used while they arrive", len(tables))
			lazy := made
			keep, useless, err := s.arrive(ctx, img, chains, tables, &lazy)
			if err == nil {
				made = lazy
				defer keep.Close() // when the template is stored
				break
			}
			if berm.KindOf(err) != berm.Unsupported {
				return berm.Template{}, err
			}
			if useless == 0 {
				useless = len(tables)
			}
			from, tables = from+useless, tables[useless:]
			if err := opts.Lazy.allow(len(tables), err, p); err != nil {
				return berm.Template{}, err
			}
		}
		layer := img.layers[i]
		layer.known = opts.known
		info, chain, err := s.importLayer(ctx, chains, layer, &budget, func(done int64) {
			if p != nil {
				p(Step{Message: layer.String(), Done: done, Total: layer.size})
			}
		})
		if err != nil {
			return berm.Template{}, err
		}
		p.say("%s (%d of %d) is in place", layer, i+1, len(img.layers))
		chains = append(chains, chain)
		made.Layers = append(made.Layers, berm.Layer{DiffID: layer.diffID, Path: s.layerPath(chain)})
		made.Size += info.Size
		made.Skipped = append(made.Skipped, info.Skipped...)
	}
	if err := failpoint.Hit("template.arrival.started"); err != nil {
		return berm.Template{}, err
	}
	for _, name := range made.Skipped {
		p.say("left out %q: a device or FIFO", name)
	}
	if opts.unnamed {
		return made.Template, nil
	}
	return s.put(ctx, made)
}

// Image finds what a team begins a build from an image with, if that is here: the template that the team
// calls what the image is, or what the image was imported as. So a machine without a registry has the
// images that it was given under their names.
func (s *Store) Image(ctx context.Context, team berm.Team, ref string) (t berm.Template, ok bool, err error) {
	name := strings.TrimPrefix(strings.TrimPrefix(ref, "docker.io/"), "library/")
	if !strings.Contains(name, "/") { // else it would be the name of a team
		if t, err := s.Resolve(ctx, team, name); berm.KindOf(err) != berm.NotFound || err == nil {
			return t, err == nil, err
		}
	}
	source, platform, err := imageName(ref)
	if err != nil {
		return t, false, err
	}
	return s.imported(source, platform.String(), ImportOptions{Setuid: true})
}

// Fetch fetches an image as Import does, and makes no template of it: the caller, who holds the store,
// takes note of its layers. Layers of other teams come again, so that nobody has them who knows
// no more than their hashes. Kinds as of Import.
func (s *Store) Fetch(ctx context.Context, team berm.Team, ref string, opts ImportOptions, p Progress) (berm.Template, error) {
	source, platform, err := imageName(ref)
	if err != nil {
		return berm.Template{}, err
	}
	opts.unnamed = true
	if opts.known, err = s.layersFor(team); err != nil {
		return berm.Template{}, err
	}
	return s.bring(ctx, source, platform, opts, p)
}

// imageName reads the name of an image in a registry, for this machine.
func imageName(ref string) (source string, platform v1.Platform, err error) {
	if isPath(ref) {
		return "", platform, berm.Errorf(berm.Invalid, "%q is no name of an image", ref)
	}
	if source, err = canonical(ref); err == nil {
		platform, err = parsePlatform("")
	}
	return source, platform, err
}

// layersFor are the names of the layers of templates and builds that a team may know of.
func (s *Store) layersFor(team berm.Team) (map[string]bool, error) {
	records, err := s.recordsFor(team)
	if err != nil {
		return nil, err
	}
	builds, err := s.Builds()
	if err != nil {
		return nil, err
	}
	known := map[string]bool{}
	for _, r := range records {
		for _, l := range r.Layers {
			known[filepath.Base(l.Path)] = true
		}
	}
	for _, b := range builds {
		for _, stage := range b.Stages {
			for _, l := range stage.Layers {
				if b.Team == team {
					known[filepath.Base(l.Path)] = true
				}
			}
		}
	}
	return known, nil
}

// imported finds an earlier import of the same image by name.
func (s *Store) imported(source, platform string, opts ImportOptions) (berm.Template, bool, error) {
	records, err := s.records()
	if err != nil {
		return berm.Template{}, false, err
	}
	for _, r := range records {
		if r.Arriving != nil && s.arriving(r.Arriving.ID).Failed != "" {
			continue
		}
		if r.Source == source && r.Platform == platform && r.Setuid == opts.Setuid && r.Start == opts.Start && r.Ready == opts.Ready && (opts.Name == "" || opts.Name == r.Alias()) {
			return r.Template, true, nil
		}
	}
	return berm.Template{}, false, nil
}

// importLayer takes a layer from the store, or fetches and unpacks it.
func (s *Store) importLayer(ctx context.Context, below []string, layer blob, b *Budget, at func(done int64)) (layerInfo, string, error) {
	parent := ""
	if len(below) > 0 {
		parent = below[len(below)-1]
	}
	chain := chainID(parent, layer.diffID)
	if layer.known == nil || layer.known[filepath.Base(s.layerPath(chain))] {
		if info, ok, err := s.haveLayer(chain); ok || err != nil {
			return info, chain, err
		}
	}
	r, err := layer.open()
	if err != nil {
		if berm.KindOf(err) == berm.Internal {
			err = berm.Errorf(berm.Unavailable, "%s: %w", layer, err)
		}
		return layerInfo{}, "", err
	}
	defer r.Close()
	return s.addLayer(ctx, below, layer.diffID, &meter{r: r, at: at}, b)
}

// meter reports how much was read.
type meter struct {
	r    io.Reader
	n    int64
	last int64
	at   func(done int64)
}

func (m *meter) Read(p []byte) (int, error) {
	n, err := m.r.Read(p)
	if m.n += int64(n); m.n-m.last >= 1<<20 {
		m.last = m.n
		m.at(m.n)
	}
	return n, err
}
