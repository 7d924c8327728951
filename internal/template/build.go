package template

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/kernel/claim"
)

// Base is the name of the default template.
const Base = "base"

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

// baseDefaults are what a sandbox of `base` gets unless it asks for something else.
func baseDefaults() berm.Template {
	return berm.Template{
		Names:   []string{Base},
		Limits:  berm.Limits{CPU: 2, Memory: 1 << 30, PIDs: 1024, Disk: 2 << 30},
		User:    "user",
		Workdir: "/home/user",
		Env:     map[string]string{"LANG": "C.UTF-8"},
		Setuid:  true, // sudo
	}
}

// Build makes a template from its recipe, unless it is there and the recipe has
// not changed; force builds it anyway, from the packages of today. Base is the
// one recipe. Unsupported says what this host or user lacks.
func (s *Store) Build(ctx context.Context, name string, force bool, p Progress) (berm.Template, error) {
	if name != Base {
		return berm.Template{}, berm.Errorf(berm.NotFound, "there is no recipe for a template '%s'", name).
			WithHint("`berm template build base` builds the default template; `berm template import` takes any OCI image.")
	}
	recipe := base()
	if t, ok := s.built(recipe); ok && !force {
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
	if t, ok := s.built(recipe); ok && !force { // by another process meanwhile
		return t, nil
	}
	if err := s.Collect(ctx); err != nil {
		return berm.Template{}, err
	}
	unlock, err = s.lock(ctx, "lock", unix.LOCK_SH)
	if err != nil {
		return berm.Template{}, err
	}
	t, err := s.bootstrap(ctx, recipe, p)
	unlock()
	if err != nil {
		return berm.Template{}, err
	}
	return t, s.Collect(ctx) // the layer of the build before
}

// built returns the template that a recipe was made into, if it is whole.
func (s *Store) built(r recipe) (berm.Template, bool) {
	found, err := s.find(Base)
	if err != nil || found.Digest != r.key() {
		return berm.Template{}, false
	}
	for _, l := range found.Layers {
		if _, err := os.Lstat(l.Path); err != nil {
			return berm.Template{}, false
		}
	}
	return found.Template, true
}

// bootstrap installs the recipe's packages in a directory of the builder's own,
// and takes the tar stream of it as the one layer.
func (s *Store) bootstrap(ctx context.Context, r recipe, p Progress) (berm.Template, error) {
	b, err := hostApt(ctx, r)
	if err != nil {
		return berm.Template{}, err
	}
	if !s.ids.shifted() {
		claims, err := claim.Open(claim.Path)
		if err != nil {
			return berm.Template{}, err
		}
		defer func() { _ = claims.Close() }()
		if err := claimBuilder(ctx, claims, p); err != nil {
			return berm.Template{}, err
		}
	}
	dir, err := s.buildDir(ctx)
	if err != nil {
		return berm.Template{}, err
	}
	defer func() { _ = s.removeAll(context.WithoutCancel(ctx), []string{dir}) }()
	archive, err := os.CreateTemp(filepath.Join(s.dir, "tmp"), "archive-")
	if err != nil {
		return berm.Template{}, err
	}
	defer os.Remove(archive.Name())
	defer archive.Close()

	log := &buildLog{progress: p}
	p.say("installing %d packages and what they need: it takes some minutes", len(r.Packages))
	err = inNamespace(ctx, s.ids.buildMap(), "bootstrap", b, nil, filepath.Join(s.dir, dir), nil, archive, log)
	if err != nil {
		return berm.Template{}, log.explain(err)
	}
	p.say("unpacking")
	diffID, err := rewindAndHash(archive)
	if err != nil {
		return berm.Template{}, err
	}
	info, ok, err := s.haveLayer(diffID)
	if err != nil {
		return berm.Template{}, err
	}
	if !ok {
		budget := DefaultBudget
		if info, _, err = s.addLayer(ctx, nil, diffID, archive, &budget); err != nil {
			return berm.Template{}, err
		}
	}
	made := record{Template: baseDefaults(), Source: "recipe:" + Base, Digest: r.key(), Platform: "linux/" + r.Arch}
	made.Layers = []berm.Layer{{DiffID: diffID, Path: s.layerPath(diffID)}}
	made.Size = info.Size
	if made.Packages, err = readPackages(s.layerPath(diffID)); err != nil {
		return berm.Template{}, err
	}
	return s.put(ctx, made)
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
}

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
	if message, ok := strings.CutPrefix(line, "I: "); ok && !strings.Contains(message, "hook") {
		l.progress.say("%s", message)
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
