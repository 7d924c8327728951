// Package apply brings the changes of a session into the project: all or some of them,
// each file at once, and nothing that somebody else changed since the session began.
//
// The session's side is hostile, and the project may hold links to anywhere: nothing is
// followed, on either side, and nothing outside the project is read or written.
package apply

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/local/change"
)

// Outcome is what becomes, or became, of one path.
type Outcome string

// The outcomes. The first two are of a plan only, Applied to Unclear of a run only.
const (
	Apply      Outcome = "apply"       // will be written as the session has it
	Merge      Outcome = "merge"       // changed on both sides, will be written as the merge of both
	Same       Outcome = "same"        // the project has it already
	Conflict   Outcome = "conflict"    // changed outside too
	Flagged    Outcome = "flagged"     // the host would obey it, or much is deleted, and nobody agreed to that
	Skipped    Outcome = "skipped"     // never applied: fifos, sockets, devices, set-user-ID bits, locks
	Applied    Outcome = "applied"     // done
	Merged     Outcome = "merged"      // done, as the merge of both sides
	Failed     Outcome = "failed"      // refused by the system, or it changed meanwhile
	NotApplied Outcome = "not applied" // not reached, because the run stopped before
	Unclear    Outcome = "unclear"     // after a crash: it is neither what was before nor what was planned
)

// Result is the outcome of one path and, unless it went as planned, the reason.
type Result struct {
	Path    string
	Outcome Outcome
	Reason  string
	Deleted bool // the session deleted it
	// Unit is the path with which this one shares outcome and reason: that of a repository,
	// of something in a new directory, or "." when most of the project is deleted.
	Unit string
}

// Request says what to bring where.
type Request struct {
	Dir     string   // the session's directory, for the journal
	Upper   *os.Root // the session's upper; nobody may write to it meanwhile
	Project *os.Root
	Started time.Time // when the session began
	Base    Base      // nil: nothing is known
	// Recorded is when the last command began, and with it the recording of Base; zero
	// is Started.
	Recorded time.Time
	// Changes are what change.List returned: a directory comes before what lies in it.
	Changes []change.Change
	// Paths are files and directories to restrict the changes to; none means all. What a
	// path cannot do without comes along: its new parent directories, and all of a .git.
	Paths []string
	// Consent applies also what the host would execute or obey, and deletes also a repository
	// or most of the project.
	Consent bool
	// Overwrite takes the session's side where both changed, but for repositories.
	Overwrite bool
}

// Plan is what will be done to each path.
type Plan struct {
	request Request
	base    *known
	upper   *tree
	project *tree
	steps   []*step
}

// step is one path of a plan, and its line in the journal.
type step struct {
	Path    raw
	Kind    change.Kind
	Mode    fs.FileMode // what will be there; of a deleted path zero
	Size    int64
	Target  raw
	Was     *Stamp // what is there now; nil: nothing
	Links   uint64 // links of what is there now
	Stage   raw    // directory of the temporary file
	Sum     []byte // SHA-256 of the merged content
	Outcome Outcome
	Reason  string
	Now     *Stamp // what is there after the run

	danger string
	repo   string // the repository of git that it is of
	unit   string // what its outcome is shared with
	merged []byte
	temp   string // name of the temporary file once it exists
}

func (s *step) refuse(outcome Outcome, format string, args ...any) {
	s.Outcome, s.Reason = outcome, fmt.Sprintf(format, args...)
}

// planned says whether the step is to change the project.
func (s *step) planned() bool { return s.Outcome == Apply || s.Outcome == Merge }

func (s *step) deletes() bool { return s.Kind == change.Deleted }

// makesDir: a directory comes where none is. leavesDir: the reverse.
func (s *step) makesDir() bool  { return s.Mode.IsDir() && !s.wasDir() }
func (s *step) leavesDir() bool { return s.wasDir() && !s.Mode.IsDir() }
func (s *step) wasDir() bool    { return s.Was != nil && s.Was.kind() == unix.S_IFDIR }

// New judges each change. It reads both sides and writes nothing.
func New(ctx context.Context, r Request) (*Plan, error) {
	p, err := open(r)
	if err != nil {
		return nil, err
	}
	if err := p.judgeAll(ctx); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// Outside returns which of the changes' paths are not what the session began with in the
// project, as far as that is known; of a repository its .git. It writes nothing, and loads the
// base, which of a large project takes time, only when something there is younger.
func Outside(r Request, load func() Base) ([]string, error) {
	p, err := open(r)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	var younger []string
	for _, c := range r.Changes {
		if !valid(c.Path) {
			continue
		}
		// What was deleted tells by its directory.
		now, err := p.project.stat(c.Path)
		if now != nil && now.Mode&unix.S_IFMT == unix.S_IFDIR {
			continue
		}
		for dir := c.Path; now == nil && err == nil && dir != "."; {
			dir = path.Dir(dir)
			now, err = p.project.stat(dir)
		}
		if err == nil && now != nil && p.base.since(now.Ctim.Nano()) {
			younger = append(younger, c.Path)
		}
	}
	if len(younger) == 0 {
		return nil, nil
	}
	p.base.Base = load()
	var list []string
	for _, name := range younger {
		unit, inUnit := repository(name)
		if inUnit && len(list) > 0 && list[len(list)-1] == unit {
			continue
		}
		now, err := p.project.stat(name)
		if err != nil {
			continue
		}
		_, state := p.base.stat(name)
		if now == nil && state == Present || now != nil && p.moved(name, now) {
			if inUnit {
				name = unit
			}
			list = append(list, name)
		}
	}
	return list, nil
}

func open(r Request) (*Plan, error) {
	if _, err := os.Lstat(journalPath(r.Dir)); err == nil {
		return nil, interrupted()
	}
	applied, err := loadApplied(r.Dir)
	if err != nil {
		return nil, err
	}
	if r.Recorded.IsZero() {
		r.Recorded = r.Started
	}
	p := &Plan{request: r, base: &known{r.Base, r.Started, r.Recorded, applied}}
	if p.upper, err = openTree(r.Upper); err != nil {
		return nil, berm.Errorf(berm.Internal, "open the session's changes: %w", err)
	}
	if p.project, err = openTree(r.Project); err != nil {
		p.upper.Close()
		return nil, berm.Errorf(berm.Internal, "open the project: %w", err)
	}
	return p, nil
}

// Close lets go of both trees.
func (p *Plan) Close() {
	p.upper.Close()
	p.project.Close()
}

// Results are the outcomes so far, in the order of the changes.
func (p *Plan) Results() []Result { return results(p.steps) }

func results(steps []*step) []Result {
	list := make([]Result, len(steps))
	for i, s := range steps {
		list[i] = Result{string(s.Path), s.Outcome, s.Reason, s.deletes(), s.unit}
	}
	return list
}

func (p *Plan) judgeAll(ctx context.Context) error {
	changes, err := choose(p.request.Changes, p.request.Paths)
	if err != nil {
		return err
	}
	merges := &merger{dir: p.request.Dir, left: mergeTotal}
	// Directories that the plan makes, and those that it would have to make but will not.
	made, missing := map[string]bool{}, map[string]*step{}
	for _, c := range changes {
		if err := ctx.Err(); err != nil {
			return err
		}
		s := &step{Path: raw(c.Path), Kind: c.Kind, Mode: c.New.Mode, Size: c.New.Size, Target: raw(c.New.Target), danger: c.Danger, repo: c.Repository}
		if unit, ok := repository(c.Path); ok {
			s.repo = unit
		}
		p.steps = append(p.steps, s)
		if err := p.judge(ctx, s, c, made, merges); err != nil {
			return err
		}
		parent := path.Dir(c.Path)
		if m := missing[parent]; m != nil && s.planned() {
			s.refuse(m.Outcome, "its directory %q is not applied: %s", string(m.Path), m.Reason)
		}
		if s.Mode.IsDir() {
			switch {
			case missing[parent] != nil:
				missing[c.Path] = missing[parent]
			case s.planned() && s.makesDir():
				made[c.Path] = true
			case s.Outcome != Same && !s.planned() && !s.wasDir():
				missing[c.Path] = s
			}
		}
	}
	p.judgeRepositories()
	if !p.request.Consent {
		p.holdRepositories()
		if err := p.holdDeletions(ctx); err != nil {
			return err
		}
	}
	p.keepParents()
	p.keepReplaced()
	p.dropEmpty()
	late := map[string]bool{} // directories that come only once something else has gone
	for _, s := range p.steps {
		name := string(s.Path)
		if s.planned() && s.makesDir() && (s.Was != nil || late[path.Dir(name)]) {
			late[name] = true
		}
		s.Stage = raw(path.Dir(name))
		for late[string(s.Stage)] {
			s.Stage = raw(path.Dir(string(s.Stage)))
		}
	}
	return nil
}

// choose returns the changes at or below the paths, and those that these need.
func choose(changes []change.Change, paths []string) ([]change.Change, error) {
	if len(paths) == 0 {
		return changes, nil
	}
	chosen := map[string]bool{}
	for _, name := range paths {
		name = path.Clean(name)
		if unit, ok := repository(name); ok {
			name = unit
		}
		found := false
		for _, c := range changes {
			if name == "." || c.Path == name || strings.HasPrefix(c.Path, name+"/") {
				chosen[c.Path], found = true, true
			}
		}
		if !found {
			return nil, berm.Errorf(berm.NotFound, "the session changed nothing at %q", name)
		}
	}
	// From the end, so that a parent is seen after all that needs it.
	var list []change.Change
	needed := map[string]bool{}
	for _, c := range slices.Backward(changes) {
		makes := c.New.Mode.IsDir() && !c.Old.Mode.IsDir()
		if !chosen[c.Path] && (!makes || !needed[c.Path]) {
			continue
		}
		list = append(list, c)
		if c.Kind != change.Deleted {
			needed[path.Dir(c.Path)] = true
		}
		if needed[c.Path] {
			needed[path.Dir(c.Path)] = true
		}
	}
	slices.Reverse(list)
	return list, nil
}

// judge decides one path by itself.
func (p *Plan) judge(ctx context.Context, s *step, c change.Change, made map[string]bool, merges *merger) error {
	name := c.Path
	if !valid(name) {
		s.refuse(Skipped, "this is not a path below a directory")
		return nil
	}
	switch s.Mode.Type() {
	case 0, fs.ModeDir, fs.ModeSymlink:
	default:
		s.refuse(Skipped, "fifos, sockets and devices are never made in a project")
		return nil
	}
	if isLock(name) {
		s.refuse(Skipped, "a lock of git in the session is of no use to the project")
		return nil
	}
	if s.Mode.IsDir() && !p.upper.enters(name) {
		s.refuse(Failed, "the session's directory cannot be read: its mode is changed in the session, with chmod u+rwx")
		return nil
	}
	now, err := p.project.stat(name)
	switch {
	case err == nil:
	case (errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP)) && underMade(name, made):
		// What is in the way will have become a directory.
	default:
		s.refuse(Conflict, "%s", whyUnreachable(err))
		return nil
	}
	if now != nil {
		stamp := StampOf(now)
		s.Was, s.Links = &stamp, uint64(now.Nlink) //nolint:unconvert // 32 bits wide on arm64
	}
	if s.deletes() {
		if now == nil {
			s.refuse(Same, "gone on both sides")
			return nil
		}
	} else if same, err := p.project.is(ctx, name, now, c.New, p.upper); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.refuse(Failed, "it cannot be compared: %v", err)
		return nil
	} else if same {
		s.refuse(Same, "")
		if s.Mode&(fs.ModeSetuid|fs.ModeSetgid) != 0 {
			s.refuse(Skipped, "set-user-ID and set-group-ID bits are never applied")
		}
		return nil
	}
	if now != nil && isObject(name) && !s.deletes() {
		s.refuse(Skipped, "the project's repository has an object of this name, and objects never change")
		return nil
	}
	s.Outcome = Apply
	if err := p.outside(ctx, s, c, now, merges); err != nil {
		return err
	}
	if s.Outcome == Conflict && p.request.Overwrite && !inRepository(name) {
		s.Outcome, s.Reason = Apply, ""
	}
	if s.planned() && s.danger != "" && !p.request.Consent {
		s.refuse(Flagged, "%s", s.danger)
	}
	return nil
}

// outside compares what is there now with what was there when the session began.
func (p *Plan) outside(ctx context.Context, s *step, c change.Change, now *unix.Stat_t, merges *merger) error {
	was, state := p.base.stat(c.Path)
	switch {
	case now == nil && state == Present:
		s.refuse(Conflict, "deleted outside since the session began")
	case now == nil:
	case s.wasDir():
		// Times of a directory tell of its entries, which have steps of their own.
		switch {
		case state == Absent && s.Mode.IsDir():
			s.refuse(Conflict, "the directory was created outside too, with another mode")
		case state == Absent:
			s.refuse(Conflict, "created outside since the session began")
		case state == Present && was.Mode != s.Was.Mode:
			s.refuse(Conflict, "its type or mode was changed outside since the session began")
		}
	case state == Absent:
		s.refuse(Conflict, "created outside since the session began")
	case !p.moved(c.Path, now):
	case s.deletes():
		s.refuse(Conflict, "the session deleted it, and it was changed outside since the session began")
	default:
		if s.Was.kind() == unix.S_IFREG && (state == Unknown || was.kind() == unix.S_IFREG) && s.Mode.IsRegular() && !inRepository(c.Path) {
			return merges.merge(ctx, p, s, was, state)
		}
		s.refuse(Conflict, "changed outside since the session began")
	}
	return nil
}

// moved says whether a file is not the one that the session began with.
func (p *Plan) moved(name string, now *unix.Stat_t) bool {
	was, state := p.base.stat(name)
	switch state {
	case Unknown:
		if !p.base.since(now.Ctim.Nano()) {
			return false
		}
	case Present:
		if was == StampOf(now) {
			return false
		}
	case Absent:
		return true
	}
	return !isIndex(name) || !p.sameIndex(name)
}

// keepParents refuses to remove or replace a directory of which something stays.
func (p *Plan) keepParents() {
	stays := map[string]*step{}
	for _, s := range slices.Backward(p.steps) {
		if m := stays[string(s.Path)]; m != nil && s.leavesDir() && s.planned() {
			if m.Outcome == Flagged {
				s.refuse(Flagged, "%s", m.Reason)
				s.unit = cmp.Or(m.unit, string(m.Path))
			} else {
				s.refuse(Conflict, "%q in it is not applied: %s", string(m.Path), m.Reason)
			}
		}
		if s.deletes() && !s.planned() && s.Outcome != Same {
			stays[path.Dir(string(s.Path))] = s
		}
	}
}

// keepReplaced deletes nothing in a directory that stays because what was to come in its place does
// not.
func (p *Plan) keepReplaced() {
	stays := map[string]*step{}
	for _, s := range p.steps {
		m := stays[path.Dir(string(s.Path))]
		switch {
		case m != nil && s.deletes() && s.planned():
			s.refuse(m.Outcome, "%q, which was to replace what it lies in, is not applied: %s", string(m.Path), m.Reason)
			s.unit = cmp.Or(m.unit, string(m.Path))
		case m == nil && s.leavesDir() && !s.deletes() && !s.planned():
			m = s
		}
		if m != nil {
			stays[string(s.Path)] = m
		}
	}
}

// dropEmpty makes no new directory of whose content nothing comes.
func (p *Plan) dropEmpty() {
	filled, refused := map[string]bool{}, map[string]*step{}
	for _, s := range slices.Backward(p.steps) {
		name := string(s.Path)
		if m := refused[name]; m != nil && s.planned() && s.makesDir() && !filled[name] {
			s.refuse(m.Outcome, "nothing in it is applied")
			s.unit = cmp.Or(m.unit, string(m.Path))
		}
		if s.planned() || s.Outcome == Same {
			filled[path.Dir(name)] = true
		} else {
			refused[path.Dir(name)] = s
		}
	}
}

func underMade(name string, made map[string]bool) bool {
	for name != "." {
		if name = path.Dir(name); made[name] {
			return true
		}
	}
	return false
}

func whyUnreachable(err error) string {
	switch {
	case errors.Is(err, errSource):
		return err.Error()
	case errors.Is(err, unix.ELOOP):
		return "a directory above it is a symbolic link in the project"
	case errors.Is(err, unix.ENOTDIR):
		return "a directory above it is not a directory in the project"
	case errors.Is(err, unix.EXDEV):
		return "another file system is mounted above it in the project"
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return "the directory above it is not writable or not searchable: give yourself the right with chmod u+wx"
	case errors.Is(err, unix.ENAMETOOLONG):
		return "its path is longer than the system allows"
	}
	return err.Error()
}
