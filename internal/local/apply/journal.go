package apply

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/failpoint"
	"github.com/berm-sandbox/berm/internal/local/change"
)

// journal is what a run leaves in the session's directory while it works. It is durable
// before the first write to the project. From it and the two trees follows, for each path,
// whether it was applied: no line per path is needed.
type journal struct {
	Version int
	Token   string // in the names of the temporary files
	Placed  bool   // the outcomes are final; the session's side remains to be done
	Steps   []*step
}

const journalVersion = 1

func journalPath(dir string) string { return filepath.Join(dir, "apply.json") }

func interrupted() error {
	return berm.Errorf(berm.Conflict, "an earlier apply of this session is running or was interrupted").
		WithHint("run berm apply again: it first settles the earlier one")
}

// temp is the name of the temporary file of a step.
func (j *journal) temp(i int) string { return ".berm-" + j.Token + "-" + strconv.Itoa(i) }

// write replaces a JSON file so that it is wholly there or not, also after a power cut.
func write(dir, name string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, name+"-")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(b)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), filepath.Join(dir, name)); err != nil {
		return err
	}
	return syncDir(dir)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

func (j *journal) save(dir string) error {
	if err := write(dir, filepath.Base(journalPath(dir)), j); err != nil {
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			return berm.Errorf(berm.Exhausted, "write the journal: %w", err).
				WithHint("make room in the file system of the sessions, %s", dir)
		}
		return berm.Errorf(berm.Internal, "write the journal: %w", err)
	}
	return nil
}

// loadJournal returns nil when no run was interrupted.
func loadJournal(dir string) (*journal, error) {
	b, err := os.ReadFile(journalPath(dir))
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "read the journal: %w", err)
	}
	j := &journal{}
	if err := json.Unmarshal(b, j); err != nil {
		return nil, berm.Errorf(berm.Internal, "the journal %s is damaged: %w", journalPath(dir), err)
	}
	if j.Version != journalVersion {
		return nil, berm.Errorf(berm.Unsupported, "the journal %s has version %d, of another berm", journalPath(dir), j.Version)
	}
	return j, nil
}

// Status says how far an interrupted run came: for each path Applied, Merged, NotApplied
// or Unclear. It writes nothing, and returns nil when no run was interrupted. While a run
// is at work it fails with Conflict.
func Status(ctx context.Context, dir string, upper, project *os.Root) ([]Result, error) {
	return recoverRun(ctx, dir, upper, project, false)
}

// Recover returns what Status does and settles it: temporary files are removed, what was
// applied leaves the session's changes, what was not stays there.
func Recover(ctx context.Context, dir string, upper, project *os.Root) ([]Result, error) {
	return recoverRun(ctx, dir, upper, project, true)
}

func recoverRun(ctx context.Context, dir string, upper, project *os.Root, settle bool) ([]Result, error) {
	if j, err := loadJournal(dir); j == nil {
		return nil, err
	}
	u, err := openTree(upper)
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "open the session's changes: %w", err)
	}
	defer u.Close()
	p, err := openTree(project)
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "open the project: %w", err)
	}
	defer p.Close()
	unlock, err := p.lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	j, err := loadJournal(dir) // again: whoever held the lock may have ended well
	if j == nil {
		return nil, err
	}
	if !j.Placed {
		for _, s := range j.Steps {
			if !s.planned() {
				continue
			}
			if err := s.settle(ctx, p, u); err != nil {
				return nil, err
			}
		}
	}
	if !settle {
		return results(j.Steps), nil
	}
	if !j.Placed {
		for i, s := range j.Steps {
			p.discard(string(s.Stage), j.temp(i))
			if s.Outcome == Applied && s.Mode.IsDir() {
				if err := p.chmod(string(s.Path), entryBits(s.Mode)); err != nil {
					s.Reason = "its mode could not be set: " + err.Error()
				}
			}
		}
		if err := j.place(dir, p); err != nil {
			return results(j.Steps), err
		}
	}
	return results(j.Steps), j.finish(dir, p, u)
}

// settle finds out whether a step was carried out before a crash.
func (s *step) settle(ctx context.Context, project, upper *tree) error {
	now, err := project.stat(string(s.Path))
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		now, err = nil, nil
	}
	done := false
	switch {
	case err != nil:
	case s.deletes():
		done = now == nil
	case s.Mode.IsDir() && s.makesDir():
		done = now != nil && now.Mode&unix.S_IFMT == unix.S_IFDIR
	case s.Outcome == Merge:
		done, err = project.sum(string(s.Path), now, s)
	default:
		done, err = project.is(ctx, string(s.Path), now, s.entry(), upper)
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		s.refuse(Unclear, "it cannot be compared: %v", err)
	case done && s.Outcome == Merge:
		s.refuse(Merged, "")
	case done:
		s.refuse(Applied, "")
	case s.untouched(now):
		s.refuse(NotApplied, "the apply was interrupted before it")
	default:
		s.refuse(Unclear, "it is neither what it was before the interrupted apply nor what the session has")
	}
	return nil
}

func (s *step) entry() change.Entry {
	return change.Entry{Mode: s.Mode, Size: s.Size, Target: string(s.Target)}
}

// sum says whether a file is the merged one.
func (t *tree) sum(name string, now *unix.Stat_t, s *step) (bool, error) {
	if now == nil || now.Mode&unix.S_IFMT != unix.S_IFREG || now.Size != s.Size || bits(now.Mode) != entryBits(s.Mode) {
		return false, nil
	}
	f, _, err := t.file(name)
	if err != nil {
		return false, err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return false, err
	}
	return string(h.Sum(nil)) == string(s.Sum), nil
}

// place makes the outcomes final. What the project has is durable by now.
func (j *journal) place(dir string, project *tree) error {
	if err := j.sync(project); err != nil {
		return berm.Errorf(berm.Internal, "write the project to disk: %w", err)
	}
	for _, s := range j.Steps {
		if !s.done() {
			continue
		}
		if st, err := project.stat(string(s.Path)); err == nil && st != nil {
			stamp := StampOf(st)
			s.Now = &stamp
		}
	}
	j.Placed = true
	return j.save(dir)
}

// few is how many files are made durable one by one: what else a busy disk has to write
// need not be waited for then.
const few = 32

// sync makes the renames and removals durable.
func (j *journal) sync(project *tree) error {
	dirs := map[string]bool{}
	for _, s := range j.Steps {
		if s.done() && s.Outcome != Same {
			dirs[path.Dir(string(s.Path))] = true
		}
	}
	if len(dirs) > few {
		return project.sync()
	}
	for dir := range dirs {
		d, err := project.open(dir, unix.O_RDONLY|unix.O_DIRECTORY)
		if errors.Is(err, unix.ENOENT) {
			continue // removed after what was in it
		}
		if err != nil {
			return project.sync()
		}
		err = d.Sync()
		d.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// done says whether the project has what the session had at the path.
func (s *step) done() bool {
	return s.Outcome == Applied || s.Outcome == Merged || s.Outcome == Same
}

// finish does the session's side. It can be done again after a crash in it.
func (j *journal) finish(dir string, project, upper *tree) error {
	applied, err := loadApplied(dir)
	if err != nil {
		return err
	}
	at := time.Now()
	var paths []string
	for _, s := range j.Steps {
		if !s.done() {
			continue
		}
		name := string(s.Path)
		paths = append(paths, name)
		r := record{Path: s.Path, Stamp: s.Now, At: at}
		if isIndex(name) && s.Now != nil {
			if b, err := project.content(name, indexLimit); err == nil {
				r.Index = indexSum(b)
			}
		}
		applied[name] = r
		if inRepository(name) && s.Outcome != Same {
			// Its mtime would tell of a reference that came from elsewhere.
			if st, err := project.stat(path.Dir(name)); err == nil && st != nil {
				stamp := StampOf(st)
				applied[path.Dir(name)] = record{Path: raw(path.Dir(name)), Stamp: &stamp, At: at}
			}
		}
	}
	if err := write(dir, appliedFile, slices.Collect(maps.Values(applied))); err != nil {
		return berm.Errorf(berm.Internal, "write what was applied: %w", err)
	}
	if err := failpoint.Hit("apply.recorded"); err != nil {
		return err
	}
	if err := forget(upper, project, paths); err != nil {
		return err
	}
	if err := failpoint.Hit("apply.forgotten"); err != nil {
		return err
	}
	if err := os.Remove(journalPath(dir)); err != nil {
		return berm.Errorf(berm.Internal, "remove the journal: %w", err)
	}
	return nil
}
