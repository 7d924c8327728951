package session

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/local/apply"
)

// generated are directories whose files nobody merges by hand: those that git does not know
// are not copied from there.
var generated = map[string]bool{
	"node_modules": true, "__pycache__": true, "target": true, "dist": true, "build": true,
	"venv": true, ".venv": true, ".tox": true, ".cache": true, ".next": true, ".gradle": true,
}

// grace is how long a command runs before its project is recorded. What changes meanwhile is
// seen by its time.
const grace = 200 * time.Millisecond

// Record writes down what the project is now, for the comparison that tells later what
// changed in it beside the session: of each path what identifies its version, and of text
// files their content, from git where its index vouches for it, else copied, up to 1 MiB
// each and 64 MiB together. Of what the session changed in earlier runs the older record stays.
//
// It runs beside the command, begins when that turns out to take its time, and leaves it the
// processor half of the time; once the command has ended, which closes ended, it waits for
// nothing. When ctx ends it leaves things as they were.
func (s *Session) Record(ctx context.Context, ended <-chan struct{}) error {
	err := s.record(ctx, ended)
	if err != nil && ctx.Err() == nil {
		return stateError(err, "record what the project is")
	}
	return err
}

func (s *Session) record(ctx context.Context, ended <-chan struct{}) error {
	began := time.Now()
	// A command that ends at once and changes nothing needs no record.
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(grace):
	case <-ended:
	}
	project, err := unix.Open(s.Project, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(project)
	r := &recorder{ctx: ctx, ended: ended, project: project, began: began, worked: time.Now()}
	if !s.fresh {
		if r.old, err = s.Base(); err == nil {
			defer r.old.file.Close()
		} else if berm.KindOf(err) != berm.NotFound {
			return err
		}
		upper, err := s.OpenUpper()
		if err != nil {
			return err
		}
		defer upper.Close()
		if r.layer, err = newLayer(upper); err != nil {
			return err
		}
		defer r.layer.top.Close()
	}
	if own, err := filepath.Rel(s.Project, s.store.path); err == nil {
		r.own = own
	}
	r.git = openRepository(s.Project)
	objects := ""
	switch {
	case r.git != nil:
		objects = r.git.objects
	case r.old != nil:
		objects = r.old.objects
	}
	name := filepath.Join(s.Name, baseFile)
	f, err := s.store.root.OpenFile(name+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	r.encoder = newEncoder(f, objects)
	if err := r.all(); err != nil {
		_ = s.store.root.Remove(name + ".new")
		return err
	}
	return s.store.root.Rename(name+".new", name)
}

type recorder struct {
	*encoder
	ctx     context.Context
	ended   <-chan struct{}
	project int
	began   time.Time
	worked  time.Time // since when without a pause
	git     *repository
	own     string // where the store would be in the project
	layer   *layer // what the session changed before; nil in its first run
	old     *Base  // nil when there is no older record
	entries int
	copies  int
	copied  int64
}

// pause ends when the command had as much time as the recorder.
func (r *recorder) pause() error {
	const slice = 4 * time.Millisecond
	if time.Since(r.worked) > slice {
		select {
		case <-r.ctx.Done():
		case <-r.ended:
		case <-time.After(slice):
		}
		r.worked = time.Now()
	}
	return r.ctx.Err()
}

func (r *recorder) all() error {
	var top unix.Stat_t
	if err := unix.Fstat(r.project, &top); err != nil {
		return err
	}
	stack := []string{"."}
	for len(stack) > 0 && r.entries < maxEntries {
		dir := stack[len(stack)-1]
		below, err := r.directory(dir, top.Dev)
		if err != nil {
			return err
		}
		stack = append(stack[:len(stack)-1], below...)
	}
	if err := r.keep(); err != nil {
		return err
	}
	if len(stack) > 0 || r.old != nil && r.old.cut {
		return r.end(tagCut)
	}
	return r.end(tagEnd)
}

// keep takes over what the old base knows of the paths that the session changed.
func (r *recorder) keep() error {
	if r.old == nil {
		return nil
	}
	for name, e := range r.old.entries {
		if err := r.pause(); err != nil {
			return err
		}
		if r.layer.at(name) != covers {
			continue
		}
		var content []byte
		if e.tag == tagContent {
			var err error
			if content, err = r.old.Content(name, maxContent); err != nil {
				return err
			}
		}
		r.add(name, e.tag, e.stamp, e.object, content)
	}
	return nil
}

// directory records a directory and what is in it, but for its directories, which it returns.
// A directory that cannot be read, or is on another file system, is recorded as partial.
func (r *recorder) directory(dir string, dev uint64) (below []string, err error) {
	var st unix.Stat_t
	f, err := openBeneath(r.project, dir, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		if unix.Fstatat(r.project, dir, &st, unix.AT_SYMLINK_NOFOLLOW) == nil {
			r.add(dir, tagPartial, apply.StampOf(&st), "", nil)
		}
		return nil, nil
	}
	defer f.Close()
	fd := int(f.Fd())
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	tag := byte(tagPlain)
	inGit := dir == ".git" || strings.HasSuffix(dir, "/.git") || strings.HasPrefix(dir, ".git/") || strings.Contains(dir, "/.git/")
	for st.Dev == dev && r.entries < maxEntries {
		names, err := f.Readdirnames(512)
		if err != nil {
			if !errors.Is(err, io.EOF) {
				tag = tagPartial
			}
			break
		}
		for _, name := range names {
			if err := r.pause(); err != nil {
				return nil, err
			}
			full := path.Join(dir, name)
			var st unix.Stat_t
			if err := unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil || len(full) > maxPath {
				tag = tagPartial
				continue
			}
			r.entries++
			switch {
			case st.Mode&unix.S_IFMT != unix.S_IFDIR:
				r.file(fd, name, full, &st, inGit)
			case full == r.own, inGit && (name == "objects" || name == "lfs"):
				// What git names by its content never changes.
				r.add(full, tagPartial, apply.StampOf(&st), "", nil)
			default:
				below = append(below, full)
			}
		}
	}
	var now unix.Stat_t
	if err := unix.Fstat(fd, &now); err != nil {
		return nil, err
	}
	if st.Dev != dev || now.Mtim != st.Mtim || r.isLate(st.Mtim) || r.entries >= maxEntries {
		tag = tagPartial
	}
	switch has := r.layer.at(dir); {
	case has == covers:
		r.covered(dir)
		return below, nil
	case has == merges && r.layer != nil && r.old == nil:
		tag = tagPartial // what the session deleted may have been here or not
	}
	r.add(dir, tag, apply.StampOf(&st), "", nil)
	return below, nil
}

// covered records a path that the session changed, where no older record has it.
func (r *recorder) covered(name string) {
	if r.old == nil {
		r.add(name, tagUnknown, apply.Stamp{}, "", nil)
	}
}

// isLate says whether a time is after the recording began.
func (r *recorder) isLate(t unix.Timespec) bool { return t.Nano() > r.began.UnixNano() }

// file records what is no directory.
func (r *recorder) file(dir int, name, full string, st *unix.Stat_t, inGit bool) {
	switch {
	case r.layer.at(full) == covers:
		r.covered(full)
		return
	case r.isLate(st.Ctim):
		r.add(full, tagUnknown, apply.Stamp{}, "", nil)
		return
	case inGit && name == "index" && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Size <= maxContent:
		// git writes it anew to refresh what it knows of files: apply has to see that nothing
		// else became different.
		if content, ok := readFile(dir, name, st, false); ok {
			r.add(full, tagContent, apply.StampOf(st), "", content)
			return
		}
		r.add(full, tagPlain, apply.StampOf(st), "", nil)
		return
	case st.Mode&unix.S_IFMT != unix.S_IFREG || inGit:
		r.add(full, tagPlain, apply.StampOf(st), "", nil)
		return
	}
	oid, tracked := r.git.clean(full, st)
	if oid != "" {
		r.add(full, tagObject, apply.StampOf(st), oid, nil)
		return
	}
	if st.Size <= maxContent && r.copies < maxCopies && r.copied+st.Size <= maxContents && (tracked || !isGenerated(full)) {
		if content, ok := readFile(dir, name, st, true); ok {
			r.copies++
			r.copied += st.Size
			r.add(full, tagContent, apply.StampOf(st), "", content)
			return
		}
	}
	r.add(full, tagPlain, apply.StampOf(st), "", nil)
}

func isGenerated(name string) bool {
	for dir := range strings.SplitSeq(path.Dir(name), "/") {
		if generated[dir] {
			return true
		}
	}
	return false
}

// readFile reads a file, or only if it is text, in the sense of git: without a zero byte
// near the beginning. It says false when the file is no more the one that st is of.
func readFile(dir int, name string, st *unix.Stat_t, text bool) ([]byte, bool) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, false
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	content := make([]byte, st.Size)
	const near = 8000
	head := content[:min(len(content), near)]
	if _, err := io.ReadFull(f, head); err != nil || text && bytes.IndexByte(head, 0) >= 0 {
		return nil, false
	}
	if _, err := io.ReadFull(f, content[len(head):]); err != nil {
		return nil, false
	}
	var now unix.Stat_t
	if err := unix.Fstat(fd, &now); err != nil || apply.StampOf(&now) != apply.StampOf(st) {
		return nil, false
	}
	return content, true
}

// layer is what an upper directory does to the paths of the project.
type layer struct {
	top  *os.File
	seen map[string]byte
}

// What a layer may have at a path.
const (
	shows  = iota // nothing: what is in the project is seen
	merges        // a directory that is seen together with the project's
	covers        // something else, at the path or above it
)

func newLayer(upper *os.Root) (*layer, error) {
	top, err := upper.Open(".")
	if err != nil {
		return nil, err
	}
	return &layer{top, map[string]byte{}}, nil
}

// at returns what the layer has at a path. Paths are asked for below their directory, which
// is why a path without anything above it costs no system call.
func (l *layer) at(name string) byte {
	if l == nil {
		return shows
	}
	if has, ok := l.seen[name]; ok {
		return has
	}
	has := byte(merges)
	if name != "." {
		has = l.at(path.Dir(name))
	}
	if has == merges {
		has = l.look(name)
		l.seen[name] = has
	}
	return has
}

func (l *layer) look(name string) byte {
	dir, err := openBeneath(int(l.top.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) {
		return shows
	}
	if err != nil {
		return covers // no directory, or one that cannot be looked into
	}
	defer dir.Close()
	opaque := make([]byte, 2)
	if n, err := unix.Fgetxattr(int(dir.Fd()), "user.overlay.opaque", opaque); err == nil && string(opaque[:n]) == "y" {
		return covers
	}
	return merges
}
