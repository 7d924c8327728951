package change

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/berm-sandbox/berm"
	"golang.org/x/sys/unix"
)

// Limits bounds what a listing takes; zero means the default. A path longer than the
// kernel takes at once (4095 bytes) is always too long.
type Limits struct {
	Entries int   // looked at in both trees; default 1,000,000
	Depth   int   // of directories; default 512
	Bytes   int64 // of the paths and targets of all changes together; default 256 MiB
}

func (l Limits) withDefaults() Limits {
	if l.Entries == 0 {
		l.Entries = 1_000_000
	}
	if l.Depth == 0 {
		l.Depth = 512
	}
	if l.Bytes == 0 {
		l.Bytes = 256 << 20
	}
	return l
}

// List returns how the view that overlayfs makes of a project and an upper directory
// differs from the project. It looks only at what the upper directory names.
//
// The changes are sorted so that a directory comes right before all that lies in it. Each
// entry has its own: a directory that was added or deleted as well as everything below
// it, and a directory that became a file (or the reverse) besides what it had or has
// below. A directory that both have is a change only when its mode is different, a
// regular file when its mode or content is. Owners, times, extended attributes and hard
// links do not count, nor does the mode of the workspace itself.
//
// With an error of kind Exhausted (a limit), or the deadline of ctx exceeded, the changes found so far come too, and with one
// of kind Denied all but those in the directories that cannot be read. A session that
// still runs is a moving target: what vanishes while it is looked at is left out.
func List(ctx context.Context, upper, project *os.Root, limits Limits) ([]Change, error) {
	return walk(ctx, project, upper, limits, true)
}

// Compare returns how one plain directory differs from another, in the same form as List.
func Compare(ctx context.Context, before, after *os.Root, limits Limits) ([]Change, error) {
	return walk(ctx, before, after, limits, false)
}

type walker struct {
	ctx      context.Context
	limits   Limits
	overlay  bool // new is the upper directory of an overlay over old
	old, new int
	pending  []directory
	entries  int
	bytes    int64
	changes  []Change
	denied   error // the first directory that cannot be read
	buffers  [2][]byte
}

// directory is one that is still to be visited.
type directory struct {
	path     string // "" is the root
	depth    int
	old, new bool // the tree has a directory at path
	opaque   bool // nothing of the old one shows through the new one
	// repo is where, in a path below here, that inside a bare repository of git begins; -1
	// outside of any.
	repo int
}

func walk(ctx context.Context, before, after *os.Root, limits Limits, overlay bool) ([]Change, error) {
	old, err := before.Open(".")
	if err != nil {
		return nil, failed("", err)
	}
	defer old.Close()
	new, err := after.Open(".")
	if err != nil {
		return nil, failed("", err)
	}
	defer new.Close()
	w := &walker{
		ctx: ctx, limits: limits.withDefaults(), overlay: overlay,
		old: int(old.Fd()), new: int(new.Fd()),
		pending: []directory{{old: true, new: true, opaque: !overlay, repo: -1}},
	}
	for err == nil && len(w.pending) > 0 {
		last := len(w.pending) - 1
		next := w.pending[last]
		w.pending = w.pending[:last]
		// One directory that nobody may read does not hide all others.
		if err = w.visit(next); berm.KindOf(err) == berm.Denied {
			w.denied = cmp.Or(w.denied, err)
			err = nil
		}
	}
	if err != nil && berm.KindOf(err) != berm.Exhausted && !errors.Is(err, context.DeadlineExceeded) {
		return nil, err
	}
	slices.SortFunc(w.changes, func(a, b Change) int { return order(a.Path, b.Path) })
	return w.changes, cmp.Or(err, w.denied)
}

// order compares paths component by component.
func order(a, b string) int {
	n, i := min(len(a), len(b)), 0
	for i+16 <= n && a[i:i+16] == b[i:i+16] {
		i += 16
	}
	for ; i < n; i++ {
		if a[i] == b[i] {
			continue
		}
		// The end of a component comes before every byte of a name.
		switch {
		case a[i] == '/':
			return -1
		case b[i] == '/':
			return 1
		}
		return int(a[i]) - int(b[i])
	}
	return len(a) - len(b)
}

func failed(path string, err error) error {
	kind := berm.Internal
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
		kind = berm.Denied
	}
	if path == "" {
		path = "."
	}
	e := berm.Errorf(kind, "read %s: %w", Quote(path), err)
	if kind == berm.Denied {
		e = e.WithHint("give yourself the right to read it; a directory that the session made is changed inside the session, by chmod u+rwx")
	}
	return e
}

// visit compares one directory and queues those in it. Its descriptors are closed before
// another is visited, so that the depth of a tree takes none.
func (w *walker) visit(d directory) error {
	old, new := -1, -1
	var err error
	if d.new {
		new, err = openDir(w.new, d.path, unix.O_RDONLY)
		if vanished(err) {
			return nil
		}
		if err != nil {
			return failed(d.path, err)
		}
		defer unix.Close(new)
		d.opaque = d.opaque || w.overlay && d.path != "" && opaque(new)
	}
	d.opaque = d.opaque || !d.new
	if d.old {
		flags := unix.O_PATH
		if d.opaque {
			flags = unix.O_RDONLY
		}
		old, err = openDir(w.old, d.path, flags)
		switch {
		case vanished(err):
			old = -1
		case err != nil:
			return failed(d.path, err)
		default:
			defer unix.Close(old)
		}
	}
	if d.repo < 0 && isRepository(old, new) {
		d.repo = len(d.path)
	}
	names, err := w.names(d, old, new)
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := w.ctx.Err(); err != nil {
			return err
		}
		if err := w.compare(d, old, new, name); err != nil {
			return err
		}
	}
	return nil
}

// names returns the names to compare: those of the new directory and, where nothing of
// the old one shows through, those of that one too.
func (w *walker) names(d directory, old, new int) ([]string, error) {
	var names []string
	read := func(dir int) error {
		// The descriptor of a File is its own, so it gets a second one.
		fd, err := openBeneath(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY)
		if vanished(err) {
			return nil
		}
		if err != nil {
			return failed(d.path, err)
		}
		f := os.NewFile(uintptr(fd), "") // whose errors hold no name from the sandbox
		defer f.Close()
		for {
			some, err := f.Readdirnames(1024)
			names = append(names, some...)
			if w.entries+len(names) > w.limits.Entries {
				return berm.Errorf(berm.Exhausted, "more than %d files and directories to compare: the limit of entries", w.limits.Entries).
					WithHint("delete inside the session what is not needed")
			}
			if errors.Is(err, io.EOF) || vanished(err) {
				return w.ctx.Err()
			}
			if err != nil {
				return failed(d.path, err)
			}
			if err := w.ctx.Err(); err != nil {
				return err
			}
		}
	}
	if new >= 0 {
		if err := read(new); err != nil {
			return nil, err
		}
	}
	if d.opaque && old >= 0 {
		if err := read(old); err != nil {
			return nil, err
		}
		slices.Sort(names)
		names = slices.Compact(names)
	}
	w.entries += len(names)
	return names, nil
}

func (w *walker) compare(d directory, oldDir, newDir int, name string) error {
	path := name
	if d.path != "" {
		path = d.path + "/" + name
	}
	if len(path) > maxPath {
		return berm.Errorf(berm.Exhausted, "a path below %s… is longer than %d bytes: the kernel's limit of a path", Quote(path[:64]), maxPath).
			WithHint("delete inside the session what is not needed")
	}
	old, err := lookup(oldDir, name)
	if err != nil {
		return failed(path, err)
	}
	new, err := lookup(newDir, name)
	if err != nil {
		return failed(path, err)
	}
	if w.overlay && new.whiteout() {
		new = file{}
	}
	if !old.found && !new.found {
		return nil
	}
	c := Change{Path: path, Kind: Modified, Old: old.Entry, New: new.Entry}
	switch {
	case !old.found:
		c.Kind = Added
	case !new.found:
		c.Kind = Deleted
	}
	differ := c.Kind != Modified
	if !differ {
		if differ, err = w.differ(oldDir, newDir, name, &old, &new); err != nil {
			return err
		}
	}
	if differ {
		if err := w.add(d, c); err != nil {
			return err
		}
	}
	if old.isDir() || new.isDir() {
		if d.depth >= w.limits.Depth {
			return berm.Errorf(berm.Exhausted, "%s lies deeper than %d directories: the limit of depth", Quote(path), w.limits.Depth).
				WithHint("delete inside the session what is not needed")
		}
		w.pending = append(w.pending, directory{path: path, depth: d.depth + 1, old: old.isDir(), new: new.isDir(), opaque: d.opaque, repo: d.repo})
	}
	return nil
}

func (w *walker) add(d directory, c Change) error {
	w.bytes += int64(len(c.Path) + len(c.Old.Target) + len(c.New.Target))
	if w.bytes > w.limits.Bytes {
		return berm.Errorf(berm.Exhausted, "the names of the changes take more than %d bytes: the limit of names", w.limits.Bytes).
			WithHint("delete inside the session what is not needed")
	}
	at := c.New
	if c.Kind == Deleted {
		// A protection may be what goes; set-uid bits and links are not dangerous any more.
		at = Entry{Mode: c.Old.Mode & os.ModeDir}
	}
	if d.repo >= 0 {
		c.Repository = cmp.Or(c.Path[:d.repo], ".")
	}
	c.Danger = Danger(c.Path, at)
	if c.Danger == "" && d.repo >= 0 {
		c.Danger = Danger(".git/"+strings.TrimPrefix(c.Path[d.repo:], "/"), at)
	}
	w.changes = append(w.changes, c)
	return nil
}

func (w *walker) differ(oldDir, newDir int, name string, old, new *file) (bool, error) {
	switch {
	case old.Mode.Type() == os.ModeSymlink && new.Mode.Type() == os.ModeSymlink:
		return old.Target != new.Target || old.Target == "", nil
	case old.Mode != new.Mode:
		return true, nil
	case old.Mode.Type()&os.ModeDevice != 0:
		return old.st.Rdev != new.st.Rdev, nil
	case !old.Mode.IsRegular():
		return false, nil
	case old.Size != new.Size:
		return true, nil
	case old.st.Dev == new.st.Dev && old.st.Ino == new.st.Ino:
		return false, nil
	}
	a, err := openRegular(oldDir, name)
	if err != nil {
		// Cannot be read, or is something else by now: not known to be the same.
		return true, nil
	}
	defer a.Close()
	b, err := openRegular(newDir, name)
	if err != nil {
		return true, nil
	}
	defer b.Close()
	return w.contentDiffers(a, b)
}

func (w *walker) contentDiffers(a, b io.Reader) (bool, error) {
	if w.buffers[0] == nil {
		w.buffers = [2][]byte{make([]byte, 32<<10), make([]byte, 32<<10)}
	}
	for {
		if err := w.ctx.Err(); err != nil {
			return false, err
		}
		n, errA := io.ReadFull(a, w.buffers[0])
		m, errB := io.ReadFull(b, w.buffers[1])
		if !bytes.Equal(w.buffers[0][:n], w.buffers[1][:m]) {
			return true, nil
		}
		if errA != nil || errB != nil {
			return !ended(errA) || !ended(errB), nil
		}
	}
}

func ended(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}
