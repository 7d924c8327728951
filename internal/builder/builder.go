// Package builder makes templates as E2B's template builder orders them: each step runs in a
// sandbox of its own, made of what the steps before it left, and what it writes becomes a layer.
package builder

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/control"
	"github.com/berm-sandbox/berm/internal/network/address"
	"github.com/berm-sandbox/berm/internal/template"
)

// Config is what a Builder is made of.
type Config struct {
	Sessions *control.Manager
	Store    *template.Store
	Audit    audit.Emitter
	// Dir is where clients' files lie until the steps that copy them.
	Dir string
	// Open are ranges of addresses that registries may have although they are not public.
	Open []string
	// Registries are those that the operator names, whatever their addresses are.
	Registries *template.Registries
	Log        *slog.Logger
}

const (
	// stepTime bounds one step.
	stepTime = time.Hour
	// buildDisk is the least room that a step has, in bytes. Files of the disk that are not
	// written take none.
	buildDisk = 8 << 30
	// atOnce is how many builds of a team run; its others wait for their turn.
	atOnce = 2
	// maxUpload bounds the files of one step in bytes, as they come and unpacked.
	maxUpload = 4 << 30
	// keepUploads is how long a client's files are kept after they were last used.
	keepUploads = 24 * time.Hour
	// keepFailed is how many builds are kept of each template besides those that are in use: the
	// next one takes the steps from them that went well.
	keepFailed = 3
	// maxLog bounds the lines of a build's log.
	maxLog = 20000
)

// fetchTime bounds the fetching of an image. As long as it takes no template of any team can be removed, and the
// registry is whatever an order names.
var fetchTime = time.Hour

var system = audit.Actor{Type: "system"}

// Builder makes templates. The methods are safe for concurrent use.
type Builder struct {
	Config
	ctx     context.Context // ends with Close
	stop    context.CancelFunc
	work    sync.WaitGroup
	outside http.RoundTripper

	mu     sync.Mutex
	builds map[berm.BuildID]*build
	turns  map[berm.Team]chan struct{}
}

// build is one build. Its fields are under the lock of the Builder.
type build struct {
	template.Build
	cancel context.CancelFunc // while it is under way
	more   int                // lines of the log that were left out
}

// New finds the builds of an earlier server again, of which none goes on, and returns a Builder.
func New(c Config) (*Builder, error) {
	b := &Builder{Config: c, builds: map[berm.BuildID]*build{}, turns: map[berm.Team]chan struct{}{}}
	b.ctx, b.stop = context.WithCancel(context.Background())
	table, err := address.NewTableHere(c.Open)
	if err != nil {
		return nil, err
	}
	b.outside = outside(table)
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, berm.Errorf(berm.Internal, "make the directory of builds: %w", err)
	}
	stored, err := c.Store.Builds()
	if err != nil {
		return nil, err
	}
	made, err := c.Store.List(b.ctx)
	if err != nil {
		return nil, err
	}
	for _, s := range stored {
		if s.State == template.Building || s.State == template.Waiting {
			s.State, s.FinishedAt = template.Ready, time.Now().UTC()
			if !slices.ContainsFunc(made, func(t berm.Template) bool { return t.BuildID == s.ID }) {
				s.State, s.Failure = template.Failed, &template.Failure{Message: "the server was stopped during the build"}
			}
			if err := c.Store.SaveBuild(s); err != nil {
				return nil, err
			}
		}
		b.builds[s.ID] = &build{Build: s}
	}
	b.sweep()
	return b, nil
}

// Close ends the builds that are under way.
func (b *Builder) Close() {
	b.stop()
	b.work.Wait()
}

// Request is what is asked for before a build.
type Request struct {
	Team berm.Team
	Name string // NAME or NAME:TAG
	Tags []string
	// CPU in processors, Memory and Disk in bytes; 0 takes what templates have.
	CPU          float64
	Memory, Disk int64
}

// The bounds of E2B's API.
const (
	maxCPU    = 32
	minMemory = 128 << 20
)

// New begins a build of a template, which waits for its order. A name that there is keeps the
// template's id. Kinds: Invalid, Conflict (a recipe has the name).
func (b *Builder) New(r Request) (template.Build, error) {
	// A tag keeps its case, which the name does not have.
	name, tag, tagged := strings.Cut(r.Name, ":")
	name = strings.ToLower(name)
	tags := slices.Clone(r.Tags)
	if tagged {
		tags = append([]string{tag}, tags...)
	}
	if err := template.NotRecipe(name); err != nil {
		return template.Build{}, err
	}
	if len(tags) == 0 {
		tags = []string{template.DefaultTag}
	}
	var names []string
	for _, tag := range tags {
		full, err := template.WithTag(name, tag)
		if err != nil {
			return template.Build{}, err
		}
		full = template.FullName(r.Team, full)
		if !slices.Contains(names, full) {
			names = append(names, full)
		}
	}
	limits, err := b.limits(r)
	if err != nil {
		return template.Build{}, err
	}
	name = template.FullName(r.Team, name)
	id, err := b.Store.IDOf(name)
	if err != nil {
		return template.Build{}, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, other := range b.builds { // one that is not ready yet has the name already
		if alias, _, _ := strings.Cut(other.Names[0], ":"); alias == name {
			id = other.TemplateID
		}
	}
	made := &build{Build: template.Build{
		ID: berm.BuildID(berm.NewUUID()), TemplateID: id, Team: r.Team, Names: names, Limits: limits, State: template.Waiting, CreatedAt: time.Now().UTC(),
	}}
	if err := b.Store.SaveBuild(made.Build); err != nil {
		return template.Build{}, err
	}
	b.builds[made.ID] = made
	return made.Build, nil
}

func (b *Builder) limits(r Request) (berm.Limits, error) {
	l := template.DefaultLimits()
	most := b.Sessions.MaxLimits
	switch {
	case r.CPU < 0 || r.CPU > 0 && r.CPU < 1:
		return l, invalid("CPU count must be at least 1")
	case r.CPU > maxCPU:
		return l, invalid("CPU count must be at most %d", maxCPU)
	case r.CPU > 1 && int64(r.CPU)%2 != 0:
		return l, invalid("CPU count must be 1 or an even number")
	case r.Memory < 0 || r.Memory > 0 && r.Memory < minMemory:
		return l, invalid("Memory must be at least %d MiB", minMemory>>20)
	case most.Memory > 0 && r.Memory > most.Memory:
		return l, invalid("Memory can't be higher than %d MiB", most.Memory>>20)
	case r.Memory>>20%2 != 0:
		return l, invalid("Memory must be divisible by 2")
	case r.Disk < 0 || most.Disk > 0 && r.Disk > most.Disk:
		return l, invalid("Disk can't be higher than %d MiB", most.Disk>>20)
	}
	l.CPU, l.Memory, l.Disk = cmp.Or(r.CPU, l.CPU), cmp.Or(r.Memory, l.Memory), cmp.Or(r.Disk, l.Disk)
	if most.CPU > 0 {
		l.CPU = min(l.CPU, most.CPU)
	}
	return l, nil
}

// Start gives a build its order and begins with it. Kinds: NotFound (also where it is another team's, as
// of all builds), Invalid, Conflict (it has begun).
func (b *Builder) Start(team berm.Team, templateID berm.TemplateID, id berm.BuildID, o Order, actor audit.Actor) error {
	if err := o.Check(); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	s, err := b.find(team, templateID, id)
	if err != nil {
		return err
	}
	if s.State != template.Waiting {
		return berm.Errorf(berm.Conflict, "build %s is %s", id, s.State)
	}
	if b.ctx.Err() != nil {
		return berm.Errorf(berm.Unavailable, "the server is stopping")
	}
	s.State = template.Building
	if err := b.Store.SaveBuild(s.Build); err != nil {
		s.State = template.Waiting
		return err
	}
	ctx, cancel := context.WithCancelCause(b.ctx)
	s.cancel = func() { cancel(berm.Errorf(berm.Conflict, "the build was cancelled")) }
	b.work.Go(func() {
		defer cancel(nil)
		b.run(ctx, s, o, actor)
	})
	return nil
}

// turn is what each build of a team that runs has a place in. Teams wait for builds of their own alone: a step may take an
// hour, and what it needs is bounded by the limits of its team.
func (b *Builder) turn(team berm.Team) chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	turn := b.turns[team]
	if turn == nil {
		turn = make(chan struct{}, atOnce)
		b.turns[team] = turn
	}
	return turn
}

// find needs the lock.
func (b *Builder) find(team berm.Team, templateID berm.TemplateID, id berm.BuildID) (*build, error) {
	s := b.builds[id]
	if s == nil || s.TemplateID != templateID || s.Team != team {
		return nil, berm.Errorf(berm.NotFound, "build '%s' of template '%s' not found", id, templateID)
	}
	return s, nil
}

// Cancel ends a build. Kinds: NotFound, Conflict (it is over).
func (b *Builder) Cancel(team berm.Team, templateID berm.TemplateID, id berm.BuildID) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	s, err := b.find(team, templateID, id)
	switch {
	case err != nil:
		return err
	case s.State == template.Waiting:
		s.State, s.FinishedAt = template.Failed, time.Now().UTC()
		s.Failure = &template.Failure{Message: "the build was cancelled"}
		return b.Store.SaveBuild(s.Build)
	case s.cancel == nil:
		return berm.Errorf(berm.Conflict, "build %s is %s", id, s.State)
	}
	s.cancel()
	return nil
}

// Build returns a build with the lines of its log from an offset on, limit at most. It fails with
// NotFound.
func (b *Builder) Build(team berm.Team, templateID berm.TemplateID, id berm.BuildID, offset, limit int) (template.Build, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s, err := b.find(team, templateID, id)
	if err != nil {
		return template.Build{}, err
	}
	copied := s.Build
	from := min(offset, len(s.Log))
	copied.Log = slices.Clone(s.Log[from:min(from+limit, len(s.Log))])
	return copied, nil
}

// Builds returns the builds of a team's template that are known, newest first, without their logs.
func (b *Builder) Builds(team berm.Team, templateID berm.TemplateID) []template.Build {
	b.mu.Lock()
	defer b.mu.Unlock()
	var found []template.Build
	for _, s := range b.builds {
		if s.TemplateID == templateID && s.Team == team {
			copied := s.Build
			copied.Log = nil
			found = append(found, copied)
		}
	}
	slices.SortFunc(found, func(x, y template.Build) int { return y.CreatedAt.Compare(x.CreatedAt) })
	return found
}

// RemoveTemplate removes a team's template with all its builds. Kinds: NotFound, Denied (it is another
// team's), Conflict (sandboxes use it).
func (b *Builder) RemoveTemplate(ctx context.Context, team berm.Team, ref string, actor audit.Actor) error {
	_, tag, tagged := strings.Cut(ref, ":")
	id := berm.TemplateID(ref) // of one that was never ready
	t, err := b.Store.Owned(team, ref)
	switch {
	case err == nil:
		id = t.ID
		exact := string(id)
		if tagged {
			exact += ":" + tag
		}
		if err := b.Store.Remove(ctx, exact); berm.KindOf(err) == berm.Conflict && err != nil {
			// By which sandboxes is not told: they may be other teams'.
			return berm.Errorf(berm.Conflict, "template '%s' is in use", ref).WithHint("%s", berm.HintOf(err))
		} else if err != nil {
			return err
		}
		b.Sessions.PruneBegun(ctx)
	case berm.KindOf(err) != berm.NotFound || len(b.Builds(team, id)) == 0:
		return err
	}
	if tagged {
		return nil
	}
	if err := b.forget(id); err != nil {
		return err
	}
	if err := b.Store.Collect(ctx); err != nil { // what only the steps of its builds had
		b.Log.Error("layers that nobody needs are left", "error", err)
	}
	return b.Audit.Emit(audit.Record{
		Team: team, Type: audit.TemplateRemove, Src: "builder", Trust: audit.TrustHost, Outcome: audit.OK, Actor: actor, Data: map[string]any{"template": id, "name": ref},
	})
}

// forget forgets the builds of a template that was removed, and its files.
func (b *Builder) forget(templateID berm.TemplateID) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for id, s := range b.builds {
		if s.TemplateID != templateID {
			continue
		}
		if s.cancel != nil {
			s.cancel()
			continue // it is forgotten when it ends
		}
		if err := b.Store.ForgetBuild(id); err != nil {
			return err
		}
		delete(b.builds, id)
	}
	return os.RemoveAll(filepath.Join(b.Dir, string(templateID)))
}

// sweep removes clients' files that nobody used for long.
func (b *Builder) sweep() {
	_ = filepath.WalkDir(b.Dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil
		}
		if info, err := d.Info(); err == nil && time.Since(info.ModTime()) > keepUploads {
			if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
				b.Log.Error("an old upload is left", "file", name, "error", err)
			}
		}
		return nil
	})
}

// forgetOld forgets builds of a template of which nothing is left in use, but the newest.
func (b *Builder) forgetOld(team berm.Team, of berm.TemplateID) {
	tags, err := b.Store.Tags(team, string(of))
	if err != nil && berm.KindOf(err) != berm.NotFound {
		b.Log.Error("old builds are kept", "template", of, "error", err)
		return
	}
	kept := 0
	for _, s := range b.Builds(team, of) {
		if slices.ContainsFunc(tags, func(t template.Tag) bool { return t.BuildID == s.ID }) {
			continue
		}
		if kept++; kept <= keepFailed || s.State == template.Building || s.State == template.Waiting && time.Since(s.CreatedAt) < keepUploads {
			continue
		}
		if err := b.Store.ForgetBuild(s.ID); err != nil {
			b.Log.Error("an old build is kept", "build", s.ID, "error", err)
			continue
		}
		b.mu.Lock()
		delete(b.builds, s.ID)
		b.mu.Unlock()
	}
}
