package template

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/kernel/claim"
)

// Base is the name of the default template.
const Base = "base"

// made is a recipe, what is laid over its tree, and what sandboxes of its template get unless they
// ask for something else.
type made struct {
	recipe   recipe
	over     map[string]string // files by path: a layer of its own, so that their change does not install all packages anew
	defaults berm.Template
}

// recipes are those that are built in.
var recipes = map[string]func() made{
	Base:        func() made { return made{base(), nil, baseDefaults()} },
	"browser":   browser,
	"desktop":   desktop,
	"httpbin":   httpbin,
	Interpreter: interpreter,
}

// Recipes are the names of the templates that Build knows.
func Recipes() []string { return slices.Sorted(maps.Keys(recipes)) }

// NotRecipe refuses a name of the recipes, with a tag or without: who builds or imports something else
// under it would change what everybody gets who asks for it, base above all. Kind: Conflict.
func NotRecipe(name string) error {
	if alias, _, _ := strings.Cut(name, ":"); recipes[alias] != nil {
		return berm.Errorf(berm.Conflict, "'%s' is what `berm template build %s` makes: give the template another name", alias, alias)
	}
	return nil
}

// Progress is told what a long call is at. It may be nil. Calls come one at a time.
type Progress func(Step)

// Step is one report of progress.
type Step struct {
	Message string
	Done    int64 // bytes, of Total; both 0 when the step has no length
	Total   int64
}

func (p Progress) say(format string, args ...any) {
	if p != nil {
		p(Step{Message: fmt.Sprintf(format, args...)})
	}
}

// DefaultLimits are those of a template that names none.
func DefaultLimits() berm.Limits {
	return berm.Limits{CPU: 2, Memory: 1 << 30, PIDs: 1024, Disk: 2 << 30}
}

// baseDefaults are what a sandbox of `base` gets unless it asks for something else.
func baseDefaults() berm.Template {
	return berm.Template{
		Names:   []string{Base},
		Limits:  DefaultLimits(),
		User:    "user",
		Workdir: "/home/user",
		Env:     map[string]string{"LANG": "C.UTF-8"},
		Setuid:  true, // sudo
	}
}

// Build makes a template from its recipe, unless it is there and the recipe has
// not changed; force builds it anyway, from the packages of today. Recipes has the
// names. Unsupported says what this host or user lacks.
func (s *Store) Build(ctx context.Context, name string, force bool, p Progress) (berm.Template, error) {
	known, ok := recipes[name]
	if !ok {
		return berm.Template{}, berm.Errorf(berm.NotFound, "there is no recipe for a template '%s'", name).
			WithHint("there are recipes for %s; `berm template import` takes any OCI image.", strings.Join(Recipes(), ", "))
	}
	m := known()
	if t, ok := s.built(m); ok && !force {
		return t, nil
	}
	if s.ids.own {
		_, _, err := s.ids.stored(1000, 1000)
		return berm.Template{}, err
	}
	unlock, err := s.lock(ctx, "build.lock", unix.LOCK_EX)
	if err != nil {
		return berm.Template{}, err
	}
	defer unlock()
	if t, ok := s.built(m); ok && !force { // by another process meanwhile
		return t, nil
	}
	if err := s.Collect(ctx); err != nil {
		return berm.Template{}, err
	}
	unlock, err = s.lock(ctx, "lock", unix.LOCK_SH)
	if err != nil {
		return berm.Template{}, err
	}
	t, err := s.make(ctx, m, force, p)
	unlock()
	if err != nil {
		return berm.Template{}, err
	}
	return t, s.Collect(ctx) // the layer of the build before
}

// built returns the template that a recipe was made into, if it is whole.
func (s *Store) built(m made) (berm.Template, bool) {
	found, err := s.find(m.defaults.Alias())
	t := found.Template
	ok := err == nil && found.Digest == m.key() && t.Start == m.defaults.Start && t.Ready == m.defaults.Ready && whole(found)
	return t, ok
}

// whole says whether the layers of a template are there.
func whole(r record) bool {
	for _, l := range r.Layers {
		if _, err := os.Lstat(l.Path); err != nil {
			return false
		}
	}
	return true
}

// make makes a template, of the layer that the same recipe was made into for another, unless it
// is to be made anew.
func (s *Store) make(ctx context.Context, m made, anew bool, p Progress) (berm.Template, error) {
	all, err := s.records()
	if err != nil {
		return berm.Template{}, err
	}
	i := slices.IndexFunc(all, func(r record) bool { return strings.HasPrefix(r.Digest, m.recipe.key()) && whole(r) })
	var t record
	if i >= 0 && !anew {
		t = all[i]
	} else if t, err = s.bootstrap(ctx, m.recipe, p); err != nil {
		return berm.Template{}, err
	}
	layers, size := t.Layers[:1], t.Size
	t.Template, t.Source, t.Digest = m.defaults, "recipe:"+m.defaults.Alias(), m.key()
	t.Layers, t.Size = layers, size
	if m.over != nil {
		if err := s.layOver(ctx, &t, m.over); err != nil {
			return berm.Template{}, err
		}
	}
	return s.put(ctx, t)
}

// key changes when the recipe does, or what is laid over it.
func (m made) key() string {
	if m.over == nil {
		return m.recipe.key()
	}
	sum := sha256.Sum256(pack(m.over))
	return m.recipe.key() + "+" + hex.EncodeToString(sum[:])
}

// layOver adds files to a template as its uppermost layer.
func (s *Store) layOver(ctx context.Context, t *record, files map[string]string) error {
	data := pack(files)
	sum := sha256.Sum256(data)
	layer := blob{diffID: "sha256:" + hex.EncodeToString(sum[:]), size: int64(len(data)), open: func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(data)), nil
	}}
	budget := DefaultBudget
	info, chain, err := s.importLayer(ctx, []string{t.Layers[0].DiffID}, layer, &budget, func(int64) {})
	if err != nil {
		return err
	}
	t.Layers = append(slices.Clip(t.Layers), berm.Layer{DiffID: layer.diffID, Path: s.layerPath(chain)})
	below, _, err := s.haveLayer(t.Layers[0].DiffID)
	t.Size = below.Size + info.Size
	return err
}

// pack archives files with the directories that lead to them, readable for all, the same for the
// same files.
func pack(files map[string]string) []byte {
	names := map[string]bool{} // and whether each is a directory
	for name := range files {
		names[name] = false
		for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
			names[dir+"/"] = true
		}
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, name := range slices.Sorted(maps.Keys(names)) {
		h := tar.Header{Name: name, Mode: 0o644, Size: int64(len(files[name])), ModTime: time.Unix(epoch, 0), Format: tar.FormatPAX}
		if names[name] {
			h.Mode, h.Typeflag = 0o755, tar.TypeDir
		}
		err := w.WriteHeader(&h)
		if err == nil {
			_, err = io.WriteString(w, files[name])
		}
		if err != nil {
			panic(err) // they are in memory, and as long as they say
		}
	}
	_ = w.Close()
	return b.Bytes()
}

// bootstrap installs the recipe's packages in a directory of the builder's own,
// and takes the tar stream of it as the one layer.
func (s *Store) bootstrap(ctx context.Context, r recipe, p Progress) (record, error) {
	b, err := hostApt(ctx, r)
	if err != nil {
		return record{}, err
	}
	if !s.ids.shifted() {
		claims, err := claim.Open(claim.Path)
		if err != nil {
			return record{}, err
		}
		defer func() { _ = claims.Close() }()
		if err := claimBuilder(ctx, claims, p); err != nil {
			return record{}, err
		}
	}
	dir, err := s.buildDir(ctx)
	if err != nil {
		return record{}, err
	}
	defer func() { _ = s.removeAll(context.WithoutCancel(ctx), []string{dir}) }()
	archive, err := os.CreateTemp(filepath.Join(s.dir, "tmp"), "archive-")
	if err != nil {
		return record{}, err
	}
	defer os.Remove(archive.Name())
	defer archive.Close()

	log := &buildLog{progress: p}
	p.say("installing %d packages and what they need: it takes some minutes", len(r.Packages))
	err = inNamespace(ctx, s.ids.buildMap(), "bootstrap", b, nil, filepath.Join(s.dir, dir), nil, archive, log)
	if err != nil {
		return record{}, log.explain(err)
	}
	p.say("unpacking")
	diffID, err := rewindAndHash(archive)
	if err != nil {
		return record{}, err
	}
	info, ok, err := s.haveLayer(diffID)
	if err != nil {
		return record{}, err
	}
	if !ok {
		budget := DefaultBudget
		if info, _, err = s.addLayer(ctx, nil, diffID, archive, &budget); err != nil {
			return record{}, err
		}
	}
	t := record{Digest: r.key(), Platform: "linux/" + r.Arch}
	t.Layers = []berm.Layer{{DiffID: diffID, Path: s.layerPath(diffID)}}
	t.Size = info.Size
	t.Packages, err = readPackages(s.layerPath(diffID))
	return t, err
}

// claimBuilder waits until nobody else on this machine, be it a build in another store or
// a sandbox, has the ids of the builder.
func claimBuilder(ctx context.Context, claims *claim.File, p Progress) error {
	for said := false; ; said = true {
		mine, err := claims.Take(builderIDs)
		if err != nil || mine {
			return err
		}
		if !said {
			p.say("waiting: another build on this machine uses host ids %d to %d", builderIDs.Base, builderIDs.Base+builderIDs.Count-1)
		}
		select {
		case <-ctx.Done():
			return berm.Errorf(berm.Unavailable, "another build on this machine did not end: %w", context.Cause(ctx))
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// buildDir makes a directory that belongs to the ids of the builder, relative to
// the store. Its mode lets the helper enter before it has taken those ids.
func (s *Store) buildDir(ctx context.Context) (string, error) {
	name := filepath.Join("tmp", "build-"+rand.Text())
	path := filepath.Join(s.dir, name)
	if err := os.Mkdir(path, 0o711); err != nil {
		return "", err
	}
	if err := os.Chmod(path, 0o711); err != nil { // whatever the umask is
		return "", err
	}
	o := ownership{Path: path, ID: int(builderIDs.Base)}
	if !s.ids.shifted() {
		return name, o.run()
	}
	o.ID = 1 // see storageMap
	return name, inNamespace(ctx, s.ids.storageMap(), "own", o, nil, s.dir, nil, nil, os.Stderr)
}

type ownership struct {
	Path string
	ID   int
}

func (o ownership) run() error { return os.Lchown(o.Path, o.ID, o.ID) }

func runOwn(args []byte) error {
	var o ownership
	if err := json.Unmarshal(args, &o); err != nil {
		return err
	}
	return o.run()
}

func rewindAndHash(f *os.File) (diffID string, err error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	hash := sha256.New()
	if _, err := io.Copy(hash, f); err != nil {
		return "", err
	}
	_, err = f.Seek(0, io.SeekStart)
	return "sha256:" + hex.EncodeToString(hash.Sum(nil)), err
}

// readPackages reads the list that the build left in the layer.
func readPackages(layer string) ([]string, error) {
	root, err := os.OpenRoot(layer)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	f, err := root.Open(packageList)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 1<<20))
	return strings.Split(strings.TrimSpace(string(b)), "\n"), err
}

// buildLog turns mmdebstrap's output into progress and keeps the end of it.
type buildLog struct {
	progress Progress
	mu       sync.Mutex
	partial  []byte
	last     []string
	// Of what apt is installing: all, and what dpkg has told of.
	total, unpacked, setUp int
}

// progressEvery is how many packages make a line of progress.
const progressEvery = 50

func (l *buildLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.partial = append(l.partial, p...)
	for {
		line, rest, ok := bytes.Cut(l.partial, []byte("\n"))
		if !ok {
			break
		}
		l.partial = rest
		l.line(strings.TrimRight(string(line), "\r"))
	}
	return len(p), nil
}

func (l *buildLog) line(line string) {
	message, said := strings.CutPrefix(line, "I: ")
	switch {
	case said && !strings.Contains(message, "hook"):
		l.progress.say("%s", message)
	case strings.Contains(line, " newly installed, "):
		_, _ = fmt.Sscanf(line, "%d upgraded, %d newly", new(int), &l.total)
		l.unpacked, l.setUp = 0, 0
	case strings.HasPrefix(line, "Unpacking "):
		if l.unpacked++; l.unpacked%progressEvery == 0 {
			l.progress.say("unpacked %d of %d packages", l.unpacked, l.total)
		}
	case strings.HasPrefix(line, "Setting up "):
		if l.setUp++; l.setUp%progressEvery == 0 {
			l.progress.say("set up %d of %d packages", l.setUp, l.total)
		}
	}
	if l.last = append(l.last, line); len(l.last) > 20 {
		l.last = l.last[1:]
	}
}

// explain adds what mmdebstrap said last to an error of its.
func (l *buildLog) explain(err error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := berm.Errorf(berm.KindOf(err), "%w\n%s", err, strings.Join(l.last, "\n"))
	e.Hint = berm.HintOf(err)
	return e
}
