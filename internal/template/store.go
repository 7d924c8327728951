// Package template keeps templates: images unpacked into layers, with the
// defaults of the sandboxes that are made from them.
package template

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/failpoint"
)

// Store is a directory of templates. Several processes may use it at once.
//
//	BUILD.json      one file per build of a template
//	builds/BUILD.json  what building it told, and the layers after each of its steps
//	layers/CHAIN/   one unpacked layer; CHAIN is the hexadecimal OCI chain-id
//	layers/CHAIN.json  its size
//	arriving/ID/    an image that has not arrived in full; see lazy.go
//	leases/SANDBOX.json  layers that a living sandbox uses
//	tmp/            what is being made
//	lock            shared by those who add layers, exclusive for who removes some
//	names.lock      exclusive for who changes a template's file
type Store struct {
	dir string
	ids ids

	mu    sync.Mutex
	cache map[string]cached // by file
	swept time.Time         // when leases were last looked through
}

// cached is a template's file as it was read. A file is never changed, but
// replaced by another.
type cached struct {
	info os.FileInfo
	record
}

// DefaultDir is where the caller's templates are: /var/cache/berm/templates for
// root, else below $XDG_CACHE_HOME.
func DefaultDir() (string, error) {
	if os.Geteuid() == 0 {
		return "/var/cache/berm/templates", nil
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", berm.Errorf(berm.Invalid, "find the cache directory: %w", err).WithHint("Set HOME or XDG_CACHE_HOME, or use --templates DIR.")
	}
	return filepath.Join(cache, "berm", "templates"), nil
}

// Open opens the store in dir, or in DefaultDir if dir is "", and makes it if
// there is none.
func Open(dir string) (*Store, error) {
	if dir == "" {
		var err error
		if dir, err = DefaultDir(); err != nil {
			return nil, err
		}
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	if err := makePrivate(dir); err != nil {
		return nil, err
	}
	for _, sub := range []string{"layers", "leases", "builds", "arriving", "tmp"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o700); err != nil {
			return nil, berm.Errorf(berm.Internal, "make the template store: %w", err)
		}
	}
	return &Store{dir: dir, ids: hostIDs()}, nil
}

// makePrivate makes a directory that is the caller's alone: layers hold set-uid
// files of every image. A directory that others may enter is not closed to them:
// it may be /tmp.
func makePrivate(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return berm.Errorf(berm.Internal, "make the template store: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return berm.Errorf(berm.Internal, "the template store %s: %w", dir, err)
	}
	if int(st.Uid) != os.Geteuid() || st.Mode&0o077 != 0 {
		return berm.Errorf(berm.Denied, "the template store %s must belong to you and be closed to others", dir).
			WithHint("Use another directory, or `chmod 700 %s`.", dir)
	}
	return nil
}

// Shifted says whether its files belong to subordinate ids, those of an ordinary user: they can
// neither be read nor made by this process itself.
func (s *Store) Shifted() bool { return s.ids.shifted() }

// Dir is the store's absolute path.
func (s *Store) Dir() string { return s.dir }

// record is the file of one build of a template. What names a template has, its builds share:
// a name without a tag, or with one, belongs to one build at a time. The name of a team's template
// begins with the team, but for the server's own.
type record struct {
	berm.Template
	file     string   // base name
	Source   string   `json:"source"`             // recipe or image that it was made from
	Digest   string   `json:"digest"`             // key of the recipe, or digest of the image's manifest
	Platform string   `json:"platform"`           // such as "linux/amd64"
	Packages []string `json:"packages,omitempty"` // "name version", for recipes
	Skipped  []string `json:"skipped,omitempty"`  // devices and FIFOs that the image holds
	Config   Config   `json:"config"`
}

// ordered says whether a team ordered the build from a server. All else was made on the host by who
// runs it, and is for every team.
func (r *record) ordered() bool { return strings.HasPrefix(r.Source, orderedPrefix) }

// orderedPrefix is what the source of a build that was ordered begins with; its id follows.
const orderedPrefix = "build:"

// Config is what an image says about how it wants to be run.
type Config struct {
	Entrypoint []string          `json:"entrypoint,omitempty"`
	Cmd        []string          `json:"cmd,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	Ports      []string          `json:"ports,omitempty"`
}

// List returns all templates, by name.
func (s *Store) List(context.Context) ([]berm.Template, error) {
	records, err := s.records()
	if err != nil {
		return nil, err
	}
	list := make([]berm.Template, 0, len(records))
	for _, r := range records {
		list = append(list, s.own(r.Template))
	}
	return list, nil
}

func (s *Store) records() ([]record, error) {
	files, err := filepath.Glob(filepath.Join(s.dir, "*.json"))
	if err != nil {
		return nil, err
	}
	var records []record
	for _, file := range files {
		r, err := s.read(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, err
		}
		records = append(records, r)
	}
	slices.SortFunc(records, func(a, b record) int {
		return cmp.Or(cmp.Compare(a.Alias(), b.Alias()), cmp.Compare(a.ID, b.ID))
	})
	return records, nil
}

// read returns a template's file. Creating a sandbox resolves its template, which
// must not cost a parse.
func (s *Store) read(file string) (record, error) {
	info, err := os.Stat(file)
	if err != nil {
		return record{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if c, ok := s.cache[file]; ok && os.SameFile(c.info, info) && c.info.ModTime().Equal(info.ModTime()) {
		return c.record, nil
	}
	var r record
	if err := readJSON(file, &r); err != nil {
		return record{}, err
	}
	r.file = filepath.Base(file)
	r.Public = r.Public || !r.ordered() // earlier versions did not write that
	for i := range r.Layers {
		r.Layers[i].Path = filepath.Join(s.dir, r.Layers[i].Path)
	}
	if s.cache == nil {
		s.cache = map[string]cached{}
	}
	s.cache[file] = cached{info, r}
	return r, nil
}

// readJSON reads a file of the store.
func readJSON(file string, value any) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, value); err != nil {
		return berm.Errorf(berm.Internal, "template file %s: %w", file, err).WithHint("Remove the file and build or import the template again.")
	}
	return nil
}

// Resolve finds a template by what a team calls it: its id or [TEAM/]NAME, and a tag. "latest" and
// "default" are the tags of a name that has none. A name without a team is one of the team's own, or
// else one of the server's own team. It fails with NotFound, also where a template is not for the team.
func (s *Store) Resolve(_ context.Context, team berm.Team, ref string) (berm.Template, error) {
	records, err := s.recordsFor(team)
	if err != nil {
		return berm.Template{}, err
	}
	r, err := resolve(records, team, ref)
	return s.own(r.Template), err
}

// recordsFor returns the builds that a team may know of.
func (s *Store) recordsFor(team berm.Team) ([]record, error) {
	records, err := s.records()
	return slices.DeleteFunc(records, func(r record) bool { return !r.For(team) }), err
}

// own copies a template of the cache for a caller who may change it, with how far it is.
func (s *Store) own(t berm.Template) berm.Template {
	t.Names, t.Layers, t.Env = slices.Clone(t.Names), slices.Clone(t.Layers), maps.Clone(t.Env)
	if t.Arriving != nil {
		t.Arriving = s.arriving(t.Arriving.ID)
	}
	return t
}

// find finds a build of whatever team.
func (s *Store) find(ref string) (record, error) {
	records, err := s.records()
	if err != nil {
		return record{}, err
	}
	return resolve(records, "", ref)
}

// resolve finds the build that a team means.
func resolve(records []record, team berm.Team, ref string) (record, error) {
	of, full := meaning(records, team, ref)
	for _, name := range spellings(full) {
		// Who stopped between giving a name to a new build and taking it from the old one left
		// it to both.
		var found *record
		for i, r := range of {
			if len(r.meant(name)) > 0 && (found == nil || r.CreatedAt.After(found.CreatedAt)) {
				found = &of[i]
			}
		}
		if found != nil {
			return *found, nil
		}
	}
	// An id alone, of a template whose builds all have tags.
	if len(of) > 0 && string(of[0].ID) == full {
		return of[0], nil
	}
	return record{}, notFound(ref)
}

func notFound(ref string) error {
	return berm.Errorf(berm.NotFound, "template '%s' not found", ref).
		WithHint("`berm template ls` lists the templates; `berm template import` and `build` make some.")
}

// meaning returns the builds of the template that a team means, and what the store calls that. An id wins
// over a name, which somebody may have given because it is the id of another's.
func meaning(records []record, team berm.Team, ref string) (of []record, full string) {
	alias, tag, tagged := strings.Cut(ref, ":")
	id := berm.TemplateID(alias)
	if !slices.ContainsFunc(records, func(r record) bool { return r.ID == id }) {
		known := false
		for _, name := range fullNames(team, alias) {
			if id, known = idOf(records, name); known {
				alias = name
				break
			}
		}
		if !known {
			return nil, ref
		}
	}
	for _, r := range records {
		if r.ID == id {
			of = append(of, r)
		}
	}
	if tagged {
		alias += ":" + tag
	}
	return of, alias
}

// fullNames are the names in the store that a team may mean by a name, best first.
func fullNames(team berm.Team, name string) []string {
	before, rest, ok := strings.Cut(name, "/")
	if !ok {
		return []string{FullName(team, name), name}
	}
	other, err := berm.ParseTeam(before)
	if err != nil {
		return nil
	}
	return []string{FullName(other, rest)}
}

// FullName is what the store calls a template of a team.
func FullName(team berm.Team, name string) string {
	if team == "" {
		return name
	}
	return string(team) + "/" + name
}

// meant returns which of a build's names a reference means; the template's id may stand in the
// place of the name.
func (r *record) meant(ref string) (names []string) {
	alias, tag, tagged := strings.Cut(ref, ":")
	for _, own := range r.Names {
		ownAlias, ownTag, ownTagged := strings.Cut(own, ":")
		if (alias == ownAlias || alias == string(r.ID)) && tag == ownTag && tagged == ownTagged {
			names = append(names, own)
		}
	}
	return names
}

// spellings are the names that a reference may stand for, best first.
func spellings(ref string) []string {
	all := []string{ref}
	if name, tag, ok := strings.Cut(ref, ":"); !ok {
		all = append(all, ref+":latest", ref+":default")
	} else if tag == "latest" || tag == "default" {
		all = append(all, name)
	}
	return all
}

// Ensure resolves a template, and builds it first if it is missing and there is a
// recipe for it.
func (s *Store) Ensure(ctx context.Context, ref string, p Progress) (berm.Template, error) {
	t, err := s.Resolve(ctx, "", ref)
	if berm.KindOf(err) == berm.NotFound && slices.Contains(spellings(ref), Base) {
		return s.Build(ctx, Base, false, p)
	}
	return t, err
}

// CheckName keeps names to what URLs, shells and the E2B protocol take.
func CheckName(name string) error {
	alias, tag, tagged := strings.Cut(name, ":")
	if !isWord(alias, lowerCase) || tagged && !isWord(tag, lowerCase+upperCase+"_") {
		return berm.Errorf(berm.Invalid, "template name %q: want lower-case letters, digits, '.', '_' and '-', and an optional :tag", name)
	}
	return nil
}

const (
	lowerCase = "abcdefghijklmnopqrstuvwxyz0123456789"
	upperCase = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
)

// isWord says whether s begins with one of first and goes on with those, '.', '_'
// and '-'.
func isWord(s, first string) bool {
	return s != "" && len(s) <= 128 && strings.Contains(first, s[:1]) && strings.Trim(s, first+"._-") == ""
}

// put stores a build under its names, and takes them from the builds that had them: one that
// has none left goes. A template that has such a name, whatever its tag, keeps its id.
func (s *Store) put(ctx context.Context, r record) (berm.Template, error) {
	unlock, err := s.lock(ctx, "names.lock", unix.LOCK_EX)
	if err != nil {
		return berm.Template{}, err
	}
	defer unlock()
	records, err := s.records()
	if err != nil {
		return berm.Template{}, err
	}
	if id, ok := idOf(records, r.Alias()); ok {
		r.ID = id
	}
	r.Public = !r.ordered() || slices.ContainsFunc(records, func(other record) bool { return other.ID == r.ID && other.Public && other.ordered() })
	r.ID = cmp.Or(r.ID, berm.NewTemplateID())
	r.BuildID = cmp.Or(r.BuildID, berm.BuildID(berm.NewUUID()))
	r.CreatedAt, r.file = time.Now().UTC(), string(r.BuildID)+".json"
	if err := failpoint.Hit("template.put"); err != nil {
		return berm.Template{}, err
	}
	if err := s.write(r); err != nil {
		return berm.Template{}, err
	}
	return s.own(r.Template), s.takeNames(records, r.Names, r.file)
}

// idOf finds the template that a name belongs to, whatever its tag.
func idOf(records []record, name string) (berm.TemplateID, bool) {
	alias, _, _ := strings.Cut(name, ":")
	for _, r := range records {
		for _, own := range r.Names {
			if other, _, _ := strings.Cut(own, ":"); other == alias {
				return r.ID, true
			}
		}
	}
	return "", false
}

// write stores a build's file. Its layers are named relative to the store, which may be moved.
func (s *Store) write(r record) (err error) {
	r.Layers = slices.Clone(r.Layers)
	for i := range r.Layers {
		if r.Layers[i].Path, err = filepath.Rel(s.dir, r.Layers[i].Path); err != nil {
			return err
		}
	}
	return s.writeJSON(r.file, r)
}

// takeNames takes names from all builds but the one in keep.
func (s *Store) takeNames(records []record, names []string, keep string) error {
	for _, r := range records {
		left := slices.DeleteFunc(slices.Clone(r.Names), func(n string) bool { return slices.Contains(names, n) })
		switch {
		case r.file == keep || len(left) == len(r.Names):
		case len(left) == 0:
			if err := os.Remove(filepath.Join(s.dir, r.file)); err != nil {
				return err
			}
		default:
			r.Names = left
			if err := s.write(r); err != nil {
				return err
			}
		}
	}
	return nil
}

// Remove forgets a template, of whatever team, with all its builds, or with a tag one name of it, and
// removes the layers that no other one needs. It fails with NotFound, and with Conflict while a living
// sandbox uses them.
func (s *Store) Remove(ctx context.Context, ref string) error {
	unlock, err := s.lock(ctx, "lock", unix.LOCK_EX)
	if err != nil {
		return err
	}
	defer unlock()
	unlockNames, err := s.lock(ctx, "names.lock", unix.LOCK_EX)
	if err != nil {
		return err
	}
	defer unlockNames()
	leases, err := s.leases()
	if err != nil {
		return err
	}
	s.alsoWhole(leases)
	records, err := s.records()
	if err != nil {
		return err
	}
	of, full := meaning(records, "", ref)
	var names []string
	for _, r := range of {
		if !strings.Contains(ref, ":") {
			names = append(names, r.Names...)
			continue
		}
		for _, name := range spellings(full) {
			names = append(names, r.meant(name)...)
		}
	}
	if len(names) == 0 {
		return notFound(ref)
	}
	var going []record
	stay := map[string]bool{} // layers
	for _, other := range records {
		if slices.ContainsFunc(other.Names, func(n string) bool { return !slices.Contains(names, n) }) {
			for _, l := range other.Layers {
				stay[l.Path] = true
			}
		} else {
			going = append(going, other)
		}
	}
	for _, other := range going {
		for _, l := range other.Layers {
			// Those of a template that this one is built on are used by that one's sandboxes too.
			if users := leases[filepath.Base(l.Path)]; !stay[l.Path] && len(users) > 0 {
				return berm.Errorf(berm.Conflict, "template '%s' is in use by %s", ref, strings.Join(users, ", ")).WithHint("Kill the sandboxes, and remove the snapshots, first.")
			}
		}
	}
	if err := s.takeNames(records, names, ""); err != nil {
		return err
	}
	return s.collect(ctx)
}

// Collect removes the layers that neither a template nor a living sandbox needs,
// and what crashes left half-made. It does nothing while others add layers.
func (s *Store) Collect(ctx context.Context) error {
	unlock, err := s.tryLock("lock", unix.LOCK_EX)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	return s.collect(ctx)
}

// collect needs the exclusive lock.
func (s *Store) collect(ctx context.Context) error {
	records, err := s.records()
	if err != nil {
		return err
	}
	used, err := s.leases()
	if err != nil {
		return err
	}
	for _, r := range records {
		for _, l := range r.Layers {
			used[filepath.Base(l.Path)] = append(used[filepath.Base(l.Path)], string(r.ID))
		}
	}
	builds, err := s.Builds()
	if err != nil {
		return err
	}
	for _, b := range builds {
		for _, stage := range b.Stages {
			for _, l := range stage.Layers {
				used[filepath.Base(l.Path)] = append(used[filepath.Base(l.Path)], string(b.ID))
			}
		}
	}
	s.alsoWhole(used)
	if err := s.collectArrivals(); err != nil {
		return err
	}
	var garbage []string
	layers, err := os.ReadDir(filepath.Join(s.dir, "layers"))
	if err != nil {
		return err
	}
	for _, l := range layers {
		if len(used[strings.TrimSuffix(l.Name(), ".json")]) == 0 {
			garbage = append(garbage, filepath.Join("layers", l.Name()))
		}
	}
	unfinished, err := os.ReadDir(filepath.Join(s.dir, "tmp"))
	if err != nil {
		return err
	}
	for _, u := range unfinished {
		info, err := u.Info()
		if err != nil || strings.HasPrefix(u.Name(), jsonPrefix) && time.Since(info.ModTime()) < writeTime {
			continue // it has its place now, or is being written: for that nobody takes the lock
		}
		garbage = append(garbage, filepath.Join("tmp", u.Name()))
	}
	return s.removeAll(ctx, garbage)
}

// alsoWhole adds to who uses layers those who know them by the names that they had while they
// arrived.
func (s *Store) alsoWhole(used map[string][]string) {
	for name := range maps.Clone(used) {
		if whole, err := os.Readlink(filepath.Join(s.dir, "layers", name)); err == nil && filepath.Base(whole) == whole {
			used[whole] = append(used[whole], used[name]...)
		}
	}
}

// lease is the file that tells of a living sandbox.
type lease struct {
	Alive  string   `json:"alive"`  // the sandbox lives as long as this path exists
	Layers []string `json:"layers"` // names in layers/
}

// Lease keeps the layers of t from being removed for as long as the path alive
// exists: the sandbox's own directory, which goes when the sandbox is gone for
// certain. So a server that dies needs to release nothing. It fails with NotFound
// when the template was removed meanwhile.
func (s *Store) Lease(ctx context.Context, id berm.SandboxID, alive string, t berm.Template) error {
	unlock, err := s.lock(ctx, "lock", unix.LOCK_SH)
	if err != nil {
		return err
	}
	defer unlock()
	if err := s.Serve(ctx, t.Layers); err != nil {
		return err
	}
	l := lease{Alive: alive}
	for _, layer := range t.Layers {
		if _, err := os.Stat(layer.Path); err != nil {
			return berm.Errorf(berm.NotFound, "template '%s' was removed", cmp.Or(t.Alias(), string(t.ID)))
		}
		l.Layers = append(l.Layers, filepath.Base(layer.Path))
	}
	s.mu.Lock()
	sweep := time.Since(s.swept) > time.Minute
	if sweep {
		s.swept = time.Now()
	}
	s.mu.Unlock()
	if sweep {
		if _, err := s.leases(); err != nil {
			return err
		}
	}
	return s.replace(filepath.Join("leases", string(id)+".json"), l, false)
}

// leases returns the living sandboxes by layer, and removes the files of dead ones.
func (s *Store) leases() (map[string][]string, error) {
	files, err := filepath.Glob(filepath.Join(s.dir, "leases", "*.json"))
	if err != nil {
		return nil, err
	}
	used := map[string][]string{}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // swept by another process
		}
		if err != nil {
			return nil, err
		}
		var l lease
		if err := json.Unmarshal(b, &l); err != nil {
			return nil, fmt.Errorf("lease %s: %w", file, err)
		}
		if _, err := os.Lstat(l.Alive); errors.Is(err, fs.ErrNotExist) {
			if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, err
			}
			continue
		}
		for _, layer := range l.Layers {
			used[layer] = append(used[layer], strings.TrimSuffix(filepath.Base(file), ".json"))
		}
	}
	return used, nil
}

// jsonPrefix begins the names of the store's files in tmp, and writeTime bounds how long one is written.
const (
	jsonPrefix = "json-"
	writeTime  = time.Minute
)

// writeJSON replaces a file of the store in one step, and for good.
func (s *Store) writeJSON(name string, value any) error { return s.replace(name, value, true) }

// replace does not wait for the disk unless durable is set: leases need not
// outlive the machine's sandboxes.
func (s *Store) replace(name string, value any, durable bool) error {
	b, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Join(s.dir, "tmp"), jsonPrefix)
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if _, err := f.Write(append(b, '\n')); err != nil {
		return err
	}
	if durable {
		if err := f.Sync(); err != nil {
			return err
		}
	}
	return os.Rename(f.Name(), filepath.Join(s.dir, name))
}

// lock takes a lock of the store, waiting for it as long as ctx allows.
func (s *Store) lock(ctx context.Context, name string, how int) (unlock func(), err error) {
	for {
		unlock, err := s.tryLock(name, how)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return unlock, err
		}
		select {
		case <-ctx.Done():
			return nil, berm.Errorf(berm.Unavailable, "the template store is busy: %w", ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// tryLock fails with EWOULDBLOCK when another process, or another call in this
// one, has the lock.
func (s *Store) tryLock(name string, how int) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(s.dir, name), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, err
	}
	return func() { f.Close() }, nil
}
