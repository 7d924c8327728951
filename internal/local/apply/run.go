package apply

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/failpoint"
)

// Run carries the plan out. First new directories are made and every new file is written
// beside its place, so that a full disk is found before anything changed; then each is put in its place at once, after
// a look whether that is still as it was planned. A path that fails does not stop the
// others; what concerns the whole disk or ctx does, with an error.
func (p *Plan) Run(ctx context.Context) ([]Result, error) {
	unlock, err := p.project.lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	if _, err := os.Lstat(journalPath(p.request.Dir)); err == nil {
		return nil, interrupted()
	}
	r := &run{Plan: p, journal: journal{Version: journalVersion, Token: rand.Text(), Steps: p.steps}}
	if err := r.save(p.request.Dir); err != nil {
		return nil, err
	}
	if err := failpoint.Hit("apply.journal"); err != nil {
		return nil, err
	}
	stop := r.stage(ctx)
	if stop == nil {
		stop = failpoint.Hit("apply.staged")
	}
	if stop == nil {
		stop = r.placeAll(ctx)
	}
	for i, s := range r.Steps {
		if s.temp != "" {
			p.project.discard(string(s.Stage), r.temp(i))
		}
		if s.planned() {
			s.refuse(NotApplied, "the apply stopped before it")
		}
	}
	if err := r.place(p.request.Dir, p.project); err != nil {
		return p.Results(), errors.Join(stop, err)
	}
	if err := failpoint.Hit("apply.placed"); err != nil {
		return p.Results(), err
	}
	return p.Results(), errors.Join(stop, r.finish(p.request.Dir, p.project, p.upper))
}

type run struct {
	*Plan
	journal
	broken map[string]string // repositories of which a path failed, and the reason
}

// lock keeps two applies to one project apart. File systems without locks of directories
// (NFS) go without: each path is still compared before it is replaced.
func (t *tree) lock() (unlock func(), err error) {
	err = unix.Flock(t.fd(), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, berm.Errorf(berm.Conflict, "another apply to this project is running").WithHint("wait for it to end")
	}
	return func() { unix.Flock(t.fd(), unix.LOCK_UN) }, nil //nolint:errcheck // nothing to do about it
}

// sync makes the tree durable.
func (t *tree) sync() error { return unix.Syncfs(t.fd()) }

// fatal says why an error concerns more than its path, or returns nil.
func fatal(err error) error {
	kind, hint := berm.Internal, "see the kernel's log"
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		kind, hint = berm.Exhausted, "make room in the project's file system and apply again"
	case errors.Is(err, unix.EROFS):
		kind, hint = berm.Denied, "the project's file system is mounted read-only"
	case errors.Is(err, unix.EIO):
	default:
		return nil
	}
	return berm.Errorf(kind, "apply stopped: %w", err).WithHint("%s", hint)
}

// stage makes the new directories, writes the temporary files and makes them durable.
// With an error the directories are gone again.
func (r *run) stage(ctx context.Context) (err error) {
	var made []*step
	defer func() {
		if err == nil {
			return
		}
		for _, s := range slices.Backward(made) {
			if at, e := r.project.at(string(s.Path)); e == nil {
				if unix.Unlinkat(at.fd(), at.name, unix.AT_REMOVEDIR) == nil {
					s.refuse(NotApplied, "the apply stopped before it")
				}
				at.Close()
			}
		}
	}()
	for i, s := range r.Steps {
		if !s.planned() || !s.makesDir() || s.Was != nil || string(s.Stage) != path.Dir(string(s.Path)) {
			continue
		}
		if err := failpoint.Hit(fmt.Sprintf("apply.make.%d", i)); err != nil {
			return err
		}
		err := r.placeOne(ctx, s)
		if s.Outcome == Applied {
			made = append(made, s)
		}
		if err != nil {
			return err
		}
	}
	// A directory that becomes writable becomes so first.
	for _, s := range r.Steps {
		const wx = 0o300
		if s.planned() && s.Mode.IsDir() && s.wasDir() && s.Was.Mode&wx != wx && entryBits(s.Mode)&wx == wx {
			if err := r.placeOne(ctx, s); err != nil {
				return err
			}
		}
	}
	n := 0
	for _, s := range r.Steps {
		if s.planned() && s.Mode.IsRegular() && !s.deletes() {
			n++
		}
	}
	for i, s := range r.Steps {
		if !s.planned() || s.deletes() || s.Mode.IsDir() && (s.Was == nil || s.wasDir()) {
			continue
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := r.stageOne(ctx, i, s, n <= few); err != nil {
			if err := fatal(err); err != nil {
				return err
			}
			s.refuse(Failed, "%s", whyUnreachable(err))
			r.breakUnit(s)
		}
	}
	if n > few {
		if err := r.project.sync(); err != nil {
			return fatal(err)
		}
	}
	return nil
}

var errSource = errors.New("the session's file cannot be read, or changed meanwhile")

func (r *run) stageOne(ctx context.Context, i int, s *step, durable bool) error {
	at, err := r.project.at(path.Join(string(s.Stage), r.temp(i)))
	if err != nil {
		return err
	}
	defer at.Close()
	s.temp = at.name
	switch {
	case s.Mode.IsDir():
		err = unix.Mkdirat(at.fd(), at.name, 0o700)
	case s.Mode.IsRegular():
		err = r.copy(ctx, at, s, durable)
	default:
		err = unix.Symlinkat(string(s.Target), at.fd(), at.name)
	}
	if err == nil {
		err = r.own(at, s)
	}
	if err == nil && s.Mode.IsRegular() {
		// After the owner: a change of owner may take bits away.
		err = r.project.chmod(path.Join(string(s.Stage), at.name), entryBits(s.Mode))
	}
	if err != nil {
		r.project.discard(string(s.Stage), at.name)
		s.temp = ""
	}
	return err
}

// copy writes the new content of a step to a new file.
func (r *run) copy(ctx context.Context, at place, s *step, durable bool) error {
	fd, err := unix.Openat(at.fd(), at.name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	to := os.NewFile(uintptr(fd), at.name)
	defer to.Close()
	if s.Outcome == Merge {
		_, err = to.Write(s.merged)
	} else {
		err = r.copySource(ctx, to, s)
	}
	if err == nil && durable {
		err = to.Sync()
	}
	return err
}

func (r *run) copySource(ctx context.Context, to *os.File, s *step) error {
	from, before, err := r.upper.file(string(s.Path))
	if err != nil {
		return fmt.Errorf("%w: %w", errSource, err)
	}
	defer from.Close()
	if before.Size != s.Size || bits(before.Mode) != entryBits(s.Mode) {
		return errSource
	}
	if err := copyData(ctx, to, from, s.Size); err != nil {
		return err
	}
	var after unix.Stat_t
	if err := unix.Fstat(int(from.Fd()), &after); err != nil {
		return err
	}
	if StampOf(&after) != StampOf(before) {
		return errSource
	}
	return nil
}

// own gives a new file the owner of what it replaces, else that of its directory, as far
// as the caller may: root works in other people's projects too.
func (r *run) own(at place, s *step) error {
	like, err := r.project.stat(string(s.Path))
	if err != nil || like == nil {
		if like = new(unix.Stat_t); unix.Fstat(at.fd(), like) != nil {
			return nil
		}
		if os.Geteuid() != 0 {
			return nil // the kernel chose the group
		}
	}
	uid := -1
	if os.Geteuid() == 0 {
		uid = int(like.Uid)
	}
	err = unix.Fchownat(at.fd(), at.name, uid, int(like.Gid), unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EINVAL) {
		return nil
	}
	return err
}

// placeAll puts everything in its place, in an order in which nothing is missing that
// something else rests on: a rename shows the new name before the old one goes.
func (r *run) placeAll(ctx context.Context) error {
	n := 0
	for _, s := range order(r.Steps) {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := failpoint.Hit(fmt.Sprintf("apply.place.%d", n)); err != nil {
			return err
		}
		n++
		if unit, ok := repository(string(s.Path)); ok && r.broken[unit] != "" {
			s.refuse(NotApplied, "another path of the repository failed: %s", r.broken[unit])
			continue
		}
		if err := r.placeOne(ctx, s); err != nil {
			return err
		}
	}
	// Modes of directories last: one may forbid to write to it.
	for _, s := range slices.Backward(r.Steps) {
		if s.Outcome == Applied && s.Mode.IsDir() {
			if err := r.project.chmod(string(s.Path), entryBits(s.Mode)); err != nil {
				s.Reason = "its mode could not be set: " + err.Error()
			}
		}
	}
	return failpoint.Hit("apply.modes")
}

func order(steps []*step) []*step {
	replaced := map[string]bool{} // directories that something else replaces
	for _, s := range steps {
		if s.planned() && s.leavesDir() && !s.deletes() {
			replaced[string(s.Path)] = true
		}
	}
	var first, writes, last []*step
	for _, s := range slices.Backward(steps) {
		switch {
		case !s.planned():
		case !s.deletes():
			writes = append(writes, s)
		case underMade(string(s.Path), replaced):
			first = append(first, s)
		default:
			last = append(last, s)
		}
	}
	slices.Reverse(writes)
	slices.SortStableFunc(writes, func(a, b *step) int { return rank(a) - rank(b) })
	return slices.Concat(first, writes, last)
}

// placeOne returns only errors that stop the run.
func (r *run) placeOne(ctx context.Context, s *step) error {
	err := r.replace(s)
	switch {
	case err == nil && s.Outcome == Merge:
		s.refuse(Merged, "")
	case err == nil && s.Mode.IsRegular() && s.Mode&(fs.ModeSetuid|fs.ModeSetgid) != 0:
		s.refuse(Applied, "without its set-user-ID or set-group-ID bit, which is never applied")
	case err == nil:
		s.refuse(Applied, "")
	case fatal(err) != nil:
		return fatal(err)
	case errors.Is(err, errMoved), errors.Is(err, unix.EEXIST), errors.Is(err, unix.ENOTEMPTY):
		s.refuse(Conflict, "changed outside while the apply ran")
		if errors.Is(err, unix.ENOTEMPTY) {
			s.refuse(Conflict, "the directory has files that the session did not know")
		}
		for _, other := range r.Steps {
			if other != s && other.done() && strings.EqualFold(string(other.Path), string(s.Path)) {
				s.refuse(Conflict, "the project's file system takes it and %q for the same name", string(other.Path))
			}
		}
	default:
		s.refuse(Failed, "%s", whyUnreachable(err))
	}
	if err != nil {
		r.breakUnit(s)
	}
	return ctx.Err()
}

func (r *run) breakUnit(s *step) {
	if unit, ok := repository(string(s.Path)); ok {
		if r.broken == nil {
			r.broken = map[string]string{}
		}
		r.broken[unit] = s.Reason
	}
}

var errMoved = errors.New("it is not what it was")

// untouched says whether st, nil for nothing, is what the plan saw.
func (s *step) untouched(st *unix.Stat_t) bool {
	if st == nil || s.Was == nil {
		return st == nil && s.Was == nil
	}
	now := StampOf(st)
	if s.wasDir() {
		return now.Mode == s.Was.Mode
	}
	if s.Links > 1 {
		// Its other links may have been replaced by this run, which sets the ctime.
		now.Ctime = s.Was.Ctime
	}
	return now == *s.Was
}

func (r *run) replace(s *step) error {
	at, err := r.project.at(string(s.Path))
	if err != nil {
		return err
	}
	defer at.Close()
	now, err := at.stat()
	if err != nil {
		return err
	}
	if !s.untouched(now) {
		return errMoved
	}
	if s.temp == "" {
		return r.replaceBare(at, s)
	}
	from, err := r.project.at(path.Join(string(s.Stage), s.temp))
	if err != nil {
		return err
	}
	defer from.Close()
	switch {
	case s.Was == nil:
		err = renameNew(from, at)
	case s.wasDir() || s.Mode.IsDir():
		err = swap(from, at, s)
	default:
		err = unix.Renameat(from.fd(), from.name, at.fd(), at.name)
	}
	if err == nil {
		s.temp = ""
	}
	return err
}

// replaceBare carries out what needs no temporary file.
func (r *run) replaceBare(at place, s *step) error {
	switch {
	case s.deletes() && s.wasDir():
		return unix.Unlinkat(at.fd(), at.name, unix.AT_REMOVEDIR)
	case s.deletes():
		return unix.Unlinkat(at.fd(), at.name, 0)
	case s.wasDir():
		// What a directory becomes unwritable by waits until it was written to.
		if entryBits(s.Mode)&0o300 != 0o300 {
			return nil
		}
		return r.project.chmod(string(s.Path), entryBits(s.Mode))
	}
	if err := unix.Mkdirat(at.fd(), at.name, 0o700); err != nil {
		return err
	}
	return r.own(at, s)
}

// renameNew renames to a name that must be free.
func renameNew(from, to place) error {
	err := unix.Renameat2(from.fd(), from.name, to.fd(), to.name, unix.RENAME_NOREPLACE)
	if !errors.Is(err, unix.EINVAL) {
		return err
	}
	// File systems that do not know the flag know links, which never replace.
	if err := unix.Linkat(from.fd(), from.name, to.fd(), to.name, 0); err != nil {
		return err
	}
	return unix.Unlinkat(from.fd(), from.name, 0)
}

// swap puts a directory in the place of something else, or the reverse.
func swap(from, to place, s *step) error {
	remove, add := unix.AT_REMOVEDIR, 0
	if s.Mode.IsDir() {
		remove, add = 0, unix.AT_REMOVEDIR
	}
	err := unix.Renameat2(from.fd(), from.name, to.fd(), to.name, unix.RENAME_EXCHANGE)
	if errors.Is(err, unix.EINVAL) {
		// Without the flag there is a moment at which nothing has the name.
		if err := unix.Unlinkat(to.fd(), to.name, remove); err != nil {
			return err
		}
		return unix.Renameat(from.fd(), from.name, to.fd(), to.name)
	}
	if err != nil {
		return err
	}
	if err := failpoint.Hit("apply.swapped"); err != nil {
		return err
	}
	if err = unix.Unlinkat(from.fd(), from.name, remove); err == nil {
		return nil
	}
	// Somebody put a file into the directory meanwhile: it comes back.
	if unix.Renameat2(from.fd(), from.name, to.fd(), to.name, unix.RENAME_EXCHANGE) == nil {
		unix.Unlinkat(from.fd(), from.name, add) //nolint:errcheck // the first error counts
		s.temp = ""
	}
	return err
}

// discard removes a temporary file or empty directory, if it is there.
func (t *tree) discard(dir, name string) {
	at, err := t.at(path.Join(dir, name))
	if err != nil {
		return
	}
	defer at.Close()
	if errors.Is(unix.Unlinkat(at.fd(), at.name, 0), unix.EISDIR) {
		unix.Unlinkat(at.fd(), at.name, unix.AT_REMOVEDIR) //nolint:errcheck // a full one is somebody's
	}
}

// chmod sets the bits of a file or directory and keeps a directory's set-group-ID, which
// it has from its parent.
func (t *tree) chmod(name string, mode uint32) error {
	f, err := t.open(name, unix.O_PATH|unix.O_NOFOLLOW)
	if err != nil {
		return err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		mode |= st.Mode & unix.S_ISGID
	case unix.S_IFREG:
	default:
		return errMoved
	}
	if st.Mode&0o7777 == mode {
		return nil
	}
	// An O_PATH descriptor takes no fchmod, but its name in /proc does, and it needs no
	// right to read the file.
	return unix.Chmod(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), mode)
}
