package filesystem

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	pb "github.com/berm-sandbox/berm/internal/proto/filesystem"
)

// maxDirs bounds the directories of one recursive watch; the kernel has a limit of
// its own for each user (fs.inotify.max_user_watches).
const maxDirs = 65536

// readAtOnce is how many entries of a directory are in memory at a time.
const readAtOnce = 512

const watchMask = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_ATTRIB | unix.IN_DELETE | unix.IN_DELETE_SELF |
	unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_MOVE_SELF | unix.IN_ONLYDIR

var (
	errLost     = errors.New("events were lost: there were more than could be queued")
	errTooLarge = fmt.Errorf("more than %d directories to watch", maxDirs)
)

// inotify watches one directory, or a tree.
//
// A directory made in a watched tree is watched, and searched for what was made in
// it before the watch stood, before its own creation is told: whoever writes into
// it afterwards is seen.
type inotify struct {
	f         *os.File
	root      string
	recursive bool
	dirs      map[int32]*watchedDir // by watch descriptor
}

type watchedDir struct {
	rel string // path below root; "." for the root
	// told names entries that were found by searching. The kernel may have their
	// creation queued as well.
	told map[string]struct{}
}

// change is one event; name is relative to the root.
type change struct {
	name string
	typ  pb.EventType
}

func newInotify(root string, recursive bool) (*inotify, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("inotify_init1", err)
	}
	w := &inotify{
		f:         os.NewFile(uintptr(fd), "inotify"),
		root:      root,
		recursive: recursive,
		dirs:      map[int32]*watchedDir{},
	}
	if _, err := w.add(".", false); err != nil {
		w.close()
		return nil, err
	}
	if len(w.dirs) == 0 {
		w.close()
		return nil, &os.PathError{Op: "watch", Path: root, Err: os.ErrNotExist}
	}
	return w, nil
}

func (w *inotify) close() { w.f.Close() }

// add watches the directory rel and, in a recursive watch, those below it. With
// search it returns what is in them already.
func (w *inotify) add(rel string, search bool) ([]change, error) {
	raw, err := w.f.SyscallConn()
	if err != nil {
		return nil, err
	}
	mask := uint32(watchMask)
	if rel != "." {
		mask |= unix.IN_DONT_FOLLOW
	}
	path := filepath.Join(w.root, rel)
	wd, addErr := 0, error(nil)
	if err := raw.Control(func(fd uintptr) { wd, addErr = unix.InotifyAddWatch(int(fd), path, mask) }); err != nil {
		return nil, err
	}
	switch addErr {
	case nil:
	case unix.ENOENT, unix.ENOTDIR, unix.ELOOP:
		return nil, nil // it is gone again
	default:
		return nil, &os.PathError{Op: "watch", Path: path, Err: addErr}
	}
	if len(w.dirs) >= maxDirs {
		return nil, errTooLarge
	}
	// The descriptor is an old one when the directory was moved here.
	d := &watchedDir{rel: rel}
	w.dirs[int32(wd)] = d
	if !w.recursive {
		return nil, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, nil // unreadable or gone: nothing to search
	}
	defer f.Close()
	var found []change
	for {
		entries, err := f.ReadDir(readAtOnce)
		if err != nil {
			return found, nil
		}
		for _, e := range entries {
			name := filepath.Join(rel, e.Name())
			if search {
				if d.told == nil {
					d.told = map[string]struct{}{}
				}
				d.told[e.Name()] = struct{}{}
				found = append(found, change{name, pb.EventType_EVENT_TYPE_CREATE})
				if fi, err := e.Info(); err == nil && fi.Mode().IsRegular() && fi.Size() > 0 {
					found = append(found, change{name, pb.EventType_EVENT_TYPE_WRITE})
				}
			}
			if e.IsDir() {
				more, err := w.add(name, search)
				if err != nil {
					return nil, err
				}
				found = append(found, more...)
			}
		}
		if len(found) > maxPolled {
			return nil, errLost
		}
	}
}

// drop forgets the directory rel and all below: they have been moved away.
func (w *inotify) drop(rel string) {
	raw, err := w.f.SyscallConn()
	if err != nil {
		return
	}
	for wd, d := range w.dirs {
		if d.rel == rel || strings.HasPrefix(d.rel, rel+"/") {
			delete(w.dirs, wd)
			_ = raw.Control(func(fd uintptr) { _, _ = unix.InotifyRmWatch(int(fd), uint32(wd)) })
		}
	}
}

// run tells changes until emit says false, the watch is closed, or it breaks.
func (w *inotify) run(emit func(change) bool) error {
	buf := make([]byte, 16<<10)
	for {
		n, err := w.f.Read(buf)
		if err != nil {
			return err
		}
		for rest := buf[:n]; len(rest) >= unix.SizeofInotifyEvent; {
			wd := int32(binary.NativeEndian.Uint32(rest))
			mask := binary.NativeEndian.Uint32(rest[4:])
			length := int(binary.NativeEndian.Uint32(rest[12:]))
			name := strings.TrimRight(string(rest[unix.SizeofInotifyEvent:unix.SizeofInotifyEvent+length]), "\x00")
			rest = rest[unix.SizeofInotifyEvent+length:]
			changes, err := w.translate(wd, mask, name)
			if err != nil {
				return err
			}
			for _, c := range changes {
				if !emit(c) {
					return nil
				}
			}
		}
	}
}

// translate makes changes of one event of the kernel, and keeps the set of watched
// directories up to date.
func (w *inotify) translate(wd int32, mask uint32, name string) ([]change, error) {
	if mask&unix.IN_Q_OVERFLOW != 0 {
		return nil, errLost
	}
	d := w.dirs[wd]
	if d == nil {
		return nil, nil
	}
	if mask&unix.IN_IGNORED != 0 {
		delete(w.dirs, wd)
		return nil, nil
	}
	if name == "" && d.rel != "." {
		return nil, nil // the parent's watch tells it as well
	}
	rel := filepath.Join(d.rel, name)
	is := func(bits uint32) bool { return mask&bits != 0 }
	dir := w.recursive && is(unix.IN_ISDIR) && name != ""
	var out []change
	tell := func(t pb.EventType) { out = append(out, change{rel, t}) }

	if is(unix.IN_MOVED_FROM | unix.IN_DELETE) {
		delete(d.told, name)
	}
	if is(unix.IN_CREATE | unix.IN_MOVED_TO) {
		_, told := d.told[name]
		delete(d.told, name)
		if !told {
			tell(pb.EventType_EVENT_TYPE_CREATE)
			if dir {
				found, err := w.add(rel, is(unix.IN_CREATE))
				if err != nil {
					return nil, err
				}
				out = append(out, found...)
			}
		}
	}
	if is(unix.IN_MOVED_FROM | unix.IN_MOVE_SELF) {
		if dir && is(unix.IN_MOVED_FROM) {
			w.drop(rel)
		}
		tell(pb.EventType_EVENT_TYPE_RENAME)
	}
	if is(unix.IN_ATTRIB) {
		tell(pb.EventType_EVENT_TYPE_CHMOD)
	}
	if is(unix.IN_MODIFY) {
		tell(pb.EventType_EVENT_TYPE_WRITE)
	}
	if is(unix.IN_DELETE | unix.IN_DELETE_SELF) {
		tell(pb.EventType_EVENT_TYPE_REMOVE)
	}
	return out, nil
}
