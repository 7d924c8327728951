// Package session keeps copy-on-write views of projects on disk: each session's changes,
// what the project was when it began, and checkpoints to go back to.
//
// The directories upper and work of a session were written by the sandbox and are hostile;
// everything beside them is written by Berm alone.
package session

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/failpoint"
)

// trashPrefix begins the names of what is being deleted. No session's name has a dot.
const trashPrefix = ".trash-"

// Store is the directory that holds the sessions of one user. Its methods are safe for
// concurrent use, by several processes too.
type Store struct {
	path string
	root *os.Root
}

// StateDir returns Berm's directory of the XDG base directory specification for what lasts
// longer than a run: $XDG_STATE_HOME/berm, by default ~/.local/state/berm.
func StateDir() (string, error) {
	// The specification has relative paths ignored.
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "berm"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", berm.Errorf(berm.Invalid, "find the directory of sessions: %w", err).
			WithHint("set HOME or XDG_STATE_HOME")
	}
	return filepath.Join(home, ".local", "state", "berm"), nil
}

// Open opens the store below stateDir, and makes it when there is none.
func Open(stateDir string) (*Store, error) {
	path := filepath.Join(stateDir, "sessions")
	root, err := os.OpenRoot(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err = os.MkdirAll(path, 0o700); err == nil {
			root, err = os.OpenRoot(path)
		}
	}
	if err != nil {
		return nil, stateError(err, "open the store of sessions")
	}
	return &Store{path, root}, nil
}

// Close lets go of the store's directory. Sessions of it cannot be used any more.
func (s *Store) Close() error { return s.root.Close() }

// Create makes a session of a project, given by its absolute path without symbolic links,
// and locks it. Nothing but directories is written: until Note or Save it is not listed,
// and when its process dies before, Sweep takes it away unless it holds changes.
func (s *Store) Create(project, preset string) (*Session, error) {
	if !filepath.IsAbs(project) {
		return nil, berm.Errorf(berm.Invalid, "%q is no absolute path", project)
	}
	var st unix.Stat_t
	err := unix.Stat(project, &st)
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
		err = unix.ENOTDIR
	}
	if err != nil {
		return nil, berm.Errorf(berm.Invalid, "use %q as a workspace: %w", project, err)
	}
	slug := slug(project)
	for n := s.retired(slug) + 1; ; n++ {
		name := slug + "-" + strconv.Itoa(n)
		if err := s.root.Mkdir(name, 0o700); errors.Is(err, fs.ErrExist) {
			continue
		} else if err != nil {
			return nil, stateError(err, "make a session")
		}
		session := &Session{Name: name, Project: project, Created: time.Now(), Preset: preset, store: s, fresh: true}
		if err := session.flock(); berm.KindOf(err) == berm.Conflict || berm.KindOf(err) == berm.NotFound {
			continue // Sweep took it for what a dead process left
		} else if err != nil {
			_ = s.root.Remove(name)
			return nil, err
		}
		if err := makeLayer(session.lock, &st); err != nil {
			_ = s.discard(context.Background(), name)
			session.Unlock()
			return nil, stateError(err, "make a session")
		}
		return session, nil
	}
}

// slug makes the first part of a session's name of its project's.
func slug(project string) string {
	const most = 24
	var b strings.Builder
	for _, c := range []byte(strings.ToLower(filepath.Base(project))) {
		switch {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9':
			b.WriteByte(c)
		case b.Len() > 0 && !strings.HasSuffix(b.String(), "-"):
			b.WriteByte('-')
		}
		if b.Len() == most {
			break
		}
	}
	if name := strings.TrimRight(b.String(), "-"); name != "" {
		return name
	}
	return "project"
}

// retiredPrefix begins the names of symbolic links that hold, for each first part of a name,
// the highest number that a removed session had. A link comes and is read in one call.
const retiredPrefix = ".retired-"

// retired returns the highest number of a removed session: somebody may still mean that one
// by its name.
func (s *Store) retired(slug string) int {
	number, err := s.root.Readlink(retiredPrefix + slug)
	n, _ := strconv.Atoi(number)
	if err != nil || n < 0 || n > 1e9 {
		return 0
	}
	return n
}

// retire has a name not given again.
func (s *Store) retire(name string) error {
	dash := strings.LastIndexByte(name, '-')
	n, err := strconv.Atoi(name[dash+1:])
	if dash < 0 || err != nil || n <= s.retired(name[:dash]) {
		return nil
	}
	temporary := retiredPrefix + rand.Text() // no first part has capitals
	if err = s.root.Symlink(strconv.Itoa(n), temporary); err == nil {
		err = s.root.Rename(temporary, retiredPrefix+name[:dash])
	}
	if err != nil {
		return stateError(err, "remove the session "+name)
	}
	return nil
}

// isName says whether a session could be called name.
func isName(name string) bool {
	const letters = "abcdefghijklmnopqrstuvwxyz0123456789"
	return name != "" && len(name) <= 64 && strings.Contains(letters, name[:1]) && strings.Trim(name, letters+"-") == ""
}

// Get returns a session. The error is NotFound when there is none, Unsupported when a newer
// Berm wrote it and Internal when its description is damaged.
func (s *Store) Get(name string) (*Session, error) {
	session := &Session{Name: name, store: s}
	if !isName(name) {
		return nil, session.missing(fs.ErrNotExist)
	}
	if err := session.load(); err != nil {
		return nil, err
	}
	return session, nil
}

// List returns all sessions, oldest first. One that cannot be used has Broken set, and only
// its name is known.
func (s *Store) List() ([]*Session, error) {
	names, err := s.entries()
	if err != nil {
		return nil, err
	}
	var list []*Session
	for _, name := range names {
		if !isName(name) {
			continue
		}
		session := &Session{Name: name, store: s}
		err := session.load()
		if berm.KindOf(err) == berm.NotFound {
			if changed, _ := session.Changed(); !changed || session.Running() {
				continue // just being made, just being removed, or for Sweep
			}
			err = session.damaged(err)
		}
		session.Broken = err
		list = append(list, session)
	}
	slices.SortFunc(list, func(a, b *Session) int {
		if order := a.Created.Compare(b.Created); order != 0 {
			return order
		}
		return strings.Compare(a.Name, b.Name)
	})
	return list, nil
}

// Latest returns the session that was used last of the project that dir is or lies in; of
// projects inside each other the innermost that has a session. The error is NotFound when
// there is none.
func (s *Store) Latest(dir string) (*Session, error) {
	list, err := s.List()
	if err != nil {
		return nil, err
	}
	var latest *Session
	for _, session := range list {
		rel, err := filepath.Rel(session.Project, dir)
		if session.Broken != nil || err != nil || !filepath.IsLocal(rel) {
			continue
		}
		if latest == nil || len(session.Project) > len(latest.Project) ||
			len(session.Project) == len(latest.Project) && !session.Used().Before(latest.Used()) {
			latest = session
		}
	}
	if latest == nil {
		return nil, berm.Errorf(berm.NotFound, "%q has no session", dir).
			WithHint("`berm sessions` lists the sessions of all projects")
	}
	return latest, nil
}

// Remove deletes a session, also a broken one. The error is Conflict while it is in use.
func (s *Store) Remove(ctx context.Context, name string) error {
	session := &Session{Name: name, store: s}
	if !isName(name) {
		return session.missing(fs.ErrNotExist)
	}
	if err := session.flockPatiently(); err != nil {
		return err
	}
	defer session.Unlock()
	return session.Remove(ctx)
}

// discard moves a session out of sight in one step and deletes it. What a crash leaves of it
// is Sweep's to delete.
func (s *Store) discard(ctx context.Context, name string) error {
	trash, err := s.throw(name)
	if err != nil {
		return err
	}
	return s.delete(ctx, trash)
}

func (s *Store) throw(name string) (trash string, err error) {
	trash = trashPrefix + rand.Text()
	if err := s.root.Rename(name, trash); err != nil {
		return "", stateError(err, "remove the session "+name)
	}
	return trash, failpoint.Hit("session.thrown")
}

func (s *Store) delete(ctx context.Context, name string) error {
	dir, err := s.root.Open(".")
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := removeTree(ctx, int(dir.Fd()), name); err != nil {
		return berm.Errorf(berm.KindOf(err), "delete %s: %w", filepath.Join(s.path, name), err)
	}
	return nil
}

// Sweep deletes what removals and runs that died left behind. It may take long, so it is
// for the time when a command runs anyway.
func (s *Store) Sweep(ctx context.Context) error {
	names, err := s.entries()
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		switch {
		case strings.HasPrefix(name, trashPrefix):
			errs = append(errs, s.delete(ctx, name))
		case isName(name):
			errs = append(errs, s.sweepAbandoned(ctx, name))
		}
	}
	return errors.Join(errs...)
}

// sweepAbandoned deletes a session whose process was killed in its first run and that
// changed nothing.
func (s *Store) sweepAbandoned(ctx context.Context, name string) error {
	session := &Session{Name: name, store: s}
	if !session.abandoned() || session.flock() != nil {
		return nil
	}
	defer session.Unlock()
	if !session.abandoned() {
		return nil
	}
	return s.discard(ctx, name)
}

// abandoned says whether the session's only run did not end and changed nothing, unless it
// still goes on.
func (s *Session) abandoned() bool {
	if changed, err := s.Changed(); changed || err != nil {
		return false
	}
	if err := s.load(); err != nil {
		return berm.KindOf(err) == berm.NotFound
	}
	return len(s.Runs) == 1 && s.Runs[0].Ended.IsZero()
}

// entries returns the names of sessions, and of what is to be deleted, sorted.
func (s *Store) entries() ([]string, error) {
	dir, err := s.root.Open(".")
	if err == nil {
		var names []string
		names, err = dir.Readdirnames(-1)
		dir.Close()
		if err == nil || errors.Is(err, io.EOF) {
			names = slices.DeleteFunc(names, func(name string) bool { return strings.HasPrefix(name, retiredPrefix) })
			slices.Sort(names)
			return names, nil
		}
	}
	return nil, stateError(err, "list the sessions")
}

// stateError gives an error of the state directory its kind.
func stateError(err error, what string) error {
	if errors.As(err, new(*berm.Error)) {
		return err
	}
	kind, hint := berm.Internal, ""
	switch {
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EROFS):
		kind, hint = berm.Denied, "set XDG_STATE_HOME to a directory that you can write"
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		kind, hint = berm.Exhausted, "free space, with `berm discard` for instance, or set XDG_STATE_HOME to another file system"
	case errors.Is(err, fs.ErrNotExist):
		kind = berm.NotFound
	}
	return berm.Errorf(kind, "%s: %w", what, err).WithHint("%s", hint)
}
