package template

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// State is how far a build is.
type State string

// The states of a build, as E2B's API names them. The last two are final.
const (
	Waiting  State = "waiting" // for its order
	Building State = "building"
	Ready    State = "ready"
	Failed   State = "error"
)

// Stage is what a template is like after one step of its build. The next build that does the
// same takes it as it is.
type Stage struct {
	Key     string            `json:"key"`             // hash over what the step did and all steps before it
	Image   string            `json:"image,omitempty"` // whose name an order had, if it is an image that was fetched
	Layers  []berm.Layer      `json:"layers"`
	Size    int64             `json:"size"` // bytes on disk
	User    string            `json:"user"`
	Workdir string            `json:"workdir"`
	Env     map[string]string `json:"env,omitempty"`
	Setuid  bool              `json:"setuid"`
}

// LogLine is one line that a build told.
type LogLine struct {
	Time    time.Time `json:"timestamp"`
	Level   string    `json:"level"` // debug, info, warn or error
	Message string    `json:"message"`
	Step    string    `json:"step,omitempty"` // as in Failure
}

// Failure is why a build failed. Step is "base", "finalize" or the number of a step, from 1; Stage is
// where it stands, and "" the template's own.
type Failure struct {
	Message string `json:"message"`
	Step    string `json:"step,omitempty"`
	Stage   string `json:"stage,omitempty"`
}

// Build is one build of a template, from its order on.
type Build struct {
	ID         berm.BuildID    `json:"id"`
	TemplateID berm.TemplateID `json:"templateID"`
	Team       berm.Team       `json:"team,omitempty"`
	Names      []string        `json:"names"` // that the template gets when it is ready
	Limits     berm.Limits     `json:"limits"`
	State      State           `json:"state"`
	Failure    *Failure        `json:"failure,omitempty"`
	Stages     []Stage         `json:"stages,omitempty"`
	Log        []LogLine       `json:"log,omitempty"`
	CreatedAt  time.Time       `json:"createdAt"`
	FinishedAt time.Time       `json:"finishedAt,omitzero"`
}

// Builds returns the builds that are kept, oldest first.
func (s *Store) Builds() ([]Build, error) {
	files, err := filepath.Glob(filepath.Join(s.dir, "builds", "*.json"))
	if err != nil {
		return nil, err
	}
	var builds []Build
	for _, file := range files {
		var b Build
		err := readJSON(file, &b)
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, err
		}
		for i := range b.Stages {
			for j := range b.Stages[i].Layers {
				l := &b.Stages[i].Layers[j]
				l.Path = filepath.Join(s.dir, l.Path)
			}
		}
		builds = append(builds, b)
	}
	slices.SortFunc(builds, func(a, b Build) int { return a.CreatedAt.Compare(b.CreatedAt) })
	return builds, nil
}

// SaveBuild stores a build; the layers of its stages stay for as long as it is there.
func (s *Store) SaveBuild(b Build) (err error) {
	b.Stages = slices.Clone(b.Stages)
	for i := range b.Stages {
		stage := &b.Stages[i]
		stage.Layers = slices.Clone(stage.Layers)
		for j := range stage.Layers {
			if stage.Layers[j].Path, err = filepath.Rel(s.dir, stage.Layers[j].Path); err != nil {
				return err
			}
		}
	}
	return s.writeJSON(filepath.Join("builds", string(b.ID)+".json"), b)
}

// ForgetBuild removes what is known of a build. The template that it made stays.
func (s *Store) ForgetBuild(id berm.BuildID) error {
	return ignoreNotExist(os.Remove(filepath.Join(s.dir, "builds", string(id)+".json")))
}

// Holds says whether all layers are in the store. Until the lock that Hold took is released, no
// layer goes.
func (s *Store) Holds(layers []berm.Layer) bool {
	return !slices.ContainsFunc(layers, func(l berm.Layer) bool {
		_, err := os.Lstat(l.Path)
		return err != nil
	})
}

// Hold keeps all layers from being removed until release is called. It is for the moment
// between finding or making a layer and naming it in a build or a template.
func (s *Store) Hold(ctx context.Context) (release func(), err error) {
	return s.lock(ctx, "lock", unix.LOCK_SH)
}

// AddLayer unpacks a layer, an archive in the form of OCI's, over others, and returns it with
// its size in bytes on disk. The caller holds the store. Kinds: Invalid (malformed, hostile or
// too large), Exhausted (no room).
func (s *Store) AddLayer(ctx context.Context, below []berm.Layer, archive io.Reader) (berm.Layer, int64, error) {
	if len(below) >= maxLayers {
		return berm.Layer{}, 0, berm.Errorf(berm.Invalid, "the template has %d layers, and no room for more", len(below)).
			WithHint("Join commands, so that there are fewer steps.")
	}
	var chains []string
	for _, l := range below {
		chains = append(chains, "sha256:"+filepath.Base(l.Path))
	}
	budget := DefaultBudget
	info, chain, err := s.addLayer(ctx, chains, "", archive, &budget)
	return berm.Layer{DiffID: info.DiffID, Path: s.layerPath(chain)}, info.Size, err
}

// Publish makes a template of what a build came to, under the names of the build. The template
// keeps the id of the build's.
func (s *Store) Publish(ctx context.Context, b Build, t berm.Template) (berm.Template, error) {
	t.ID, t.BuildID, t.Team, t.Names = b.TemplateID, b.ID, b.Team, b.Names
	return s.put(ctx, record{Template: t, Source: orderedPrefix + string(b.ID)})
}

// IDOf is the id that a build under this full name has: that of the template with the name, whatever
// its tag, or a new one.
func (s *Store) IDOf(name string) (berm.TemplateID, error) {
	records, err := s.records()
	if err != nil {
		return "", err
	}
	if id, ok := idOf(records, name); ok {
		return id, nil
	}
	return berm.NewTemplateID(), nil
}

// DefaultTag is the tag of a name without one.
const DefaultTag = "default"

// Tag is one name of a template's build.
type Tag struct {
	Name      string
	BuildID   berm.BuildID
	CreatedAt time.Time
}

// Tags returns the tags of a template that a team means, newest build first. It fails with NotFound.
func (s *Store) Tags(team berm.Team, ref string) ([]Tag, error) {
	records, err := s.recordsFor(team)
	if err != nil {
		return nil, err
	}
	found, err := resolve(records, team, ref)
	if err != nil {
		return nil, err
	}
	var tags []Tag
	for _, r := range records {
		for _, name := range r.Names {
			if r.ID == found.ID {
				tags = append(tags, Tag{TagOf(name), r.BuildID, r.CreatedAt})
			}
		}
	}
	slices.SortStableFunc(tags, func(a, b Tag) int { return b.CreatedAt.Compare(a.CreatedAt) })
	return tags, nil
}

// TagOf is the tag of a name.
func TagOf(name string) string {
	if _, tag, ok := strings.Cut(name, ":"); ok {
		return tag
	}
	return DefaultTag
}

// WithTag is a name with a tag, in the one spelling that the store has for it.
func WithTag(name, tag string) (string, error) {
	if tag != DefaultTag {
		name += ":" + tag
	}
	return name, CheckName(name)
}

// inTeam is WithTag for a name with its team.
func inTeam(team berm.Team, full, tag string) (string, error) {
	name, found := strings.CutPrefix(full, FullName(team, ""))
	tagged, err := WithTag(name, tag)
	if found {
		tagged = FullName(team, tagged)
	}
	return tagged, err
}

// owned finds a build that a team means to change.
func owned(records []record, team berm.Team, ref string) (record, error) {
	r, err := resolve(records, team, ref)
	if err == nil {
		err = ownedBy(team, r, ref)
	}
	return r, err
}

func ownedBy(team berm.Team, r record, ref string) error {
	if r.Team != team {
		return berm.Errorf(berm.Denied, "template '%s' is of team %s, and not of yours, %s", ref, r.Team, team)
	}
	return nil
}

// Owned finds a template that a team means to change, whatever tags it has if the team names none. Kinds:
// NotFound, Denied (it is of another team).
func (s *Store) Owned(team berm.Team, ref string) (berm.Template, error) {
	records, err := s.recordsFor(team)
	if err != nil {
		return berm.Template{}, err
	}
	if of, _ := meaning(records, team, ref); len(of) > 0 && !strings.Contains(ref, ":") {
		return s.own(of[0].Template), ownedBy(team, of[0], ref)
	}
	r, err := owned(records, team, ref)
	return s.own(r.Template), err
}

// AddTags gives further tags to the build that ref means, and takes them from the others of the
// template. Kinds: NotFound, Denied (it is of another team), Invalid (a tag).
func (s *Store) AddTags(ctx context.Context, team berm.Team, ref string, tags []string) (berm.Template, error) {
	unlock, err := s.lock(ctx, "names.lock", unix.LOCK_EX)
	if err != nil {
		return berm.Template{}, err
	}
	defer unlock()
	records, err := s.recordsFor(team)
	if err != nil {
		return berm.Template{}, err
	}
	r, err := owned(records, team, ref)
	if err != nil {
		return berm.Template{}, err
	}
	alias, _, _ := strings.Cut(r.Alias(), ":")
	r.Names = slices.Clone(r.Names)
	var added []string
	for _, tag := range tags {
		name, err := inTeam(team, alias, tag)
		if err != nil {
			return berm.Template{}, err
		}
		if !slices.Contains(r.Names, name) {
			added = append(added, name)
			r.Names = append(r.Names, name)
		}
	}
	if err := s.write(r); err != nil {
		return berm.Template{}, err
	}
	return s.own(r.Template), s.takeNames(records, added, r.file)
}

// RemoveTags takes tags from a template; a build that has none left goes. The tag "default"
// stays. Kinds: NotFound, Denied (it is of another team), Invalid.
func (s *Store) RemoveTags(ctx context.Context, team berm.Team, ref string, tags []string) error {
	unlock, err := s.lock(ctx, "names.lock", unix.LOCK_EX)
	if err != nil {
		return err
	}
	defer unlock()
	alias, _, _ := strings.Cut(ref, ":")
	records, err := s.recordsFor(team)
	if err != nil {
		return err
	}
	of, full := meaning(records, team, alias)
	if len(of) == 0 {
		return notFound(alias)
	}
	if err := ownedBy(team, of[0], alias); err != nil {
		return err
	}
	var names []string
	for _, tag := range tags {
		name, err := inTeam(team, full, tag)
		switch {
		case err != nil:
			return err
		case tag == DefaultTag:
			return berm.Errorf(berm.Invalid, "the tag %q cannot be removed", tag)
		}
		before := len(names)
		for _, r := range of {
			names = append(names, r.meant(name)...)
		}
		if len(names) == before {
			return berm.Errorf(berm.NotFound, "template '%s' has no tag %q", alias, tag)
		}
	}
	return s.takeNames(of, names, "")
}

// SetPublic says whether a template, with all its builds, is public. Kinds: NotFound, Denied (it is of
// another team), Invalid (it was made on the server's host, and always is).
func (s *Store) SetPublic(ctx context.Context, team berm.Team, ref string, public bool) (berm.Template, error) {
	unlock, err := s.lock(ctx, "names.lock", unix.LOCK_EX)
	if err != nil {
		return berm.Template{}, err
	}
	defer unlock()
	records, err := s.recordsFor(team)
	if err != nil {
		return berm.Template{}, err
	}
	found, err := owned(records, team, ref)
	if err != nil {
		return berm.Template{}, err
	}
	if !public && !found.ordered() {
		return berm.Template{}, berm.Errorf(berm.Invalid, "template '%s' was made on the server's host, and is for every team", ref)
	}
	for _, r := range records {
		if r.ID != found.ID || r.Public == public {
			continue
		}
		r.Public = public
		if err := s.write(r); err != nil {
			return berm.Template{}, err
		}
	}
	found.Public = public
	return s.own(found.Template), nil
}
