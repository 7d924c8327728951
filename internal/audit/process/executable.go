package process

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/audit/process/ledger"
	"github.com/berm-sandbox/berm/internal/kernel/trace"
)

// executable is the file of an execution.
type executable struct {
	path string // inside; "" when only the kernel's name of the file is known
	key  ledger.Version
	file *os.File // to be hashed; nil when there is no need or no way
}

// seen is an executable as the kernel names it, for processes that are gone before they are
// looked at.
type seen struct {
	namespace uint32
	inode     uint64
	size      int64
	changed   int64
	name      string
}

// hashes are those of executables.
type hashes struct {
	ledger.Hashes
	mu   sync.Mutex
	last map[seen]executable
}

// maxLast bounds what is remembered.
const maxLast = 10_000

// look finds the file of an execution and where its process works. The process may be gone, or
// executing something else by now.
func (h *hashes) look(b *box, e trace.Event) (*executable, string) {
	if b.over.Load() {
		return nil, ""
	}
	dir := fmt.Sprintf("/proc/%d/", e.Host)
	cwd, _ := os.Readlink(dir + "cwd")
	// A lease that somebody inside has on the file must not hold this up.
	f, err := os.OpenFile(dir+"exe", os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err == nil {
		if x := h.check(f, e); x != nil {
			x.path, _ = os.Readlink(dir + "exe")
			return h.remember(e, x), cwd
		}
		f.Close()
		cwd = ""
	}
	h.mu.Lock()
	before, ok := h.last[seenOf(e)]
	h.mu.Unlock()
	if ok {
		return &before, cwd
	}
	for _, name := range b.names(e, cwd) {
		if x := h.find(b, e, name); x != nil {
			return x, cwd
		}
	}
	return nil, cwd
}

// names are those that the file of an execution may have; what is found by one is held against
// what the kernel said.
func (b *box) names(e trace.Event, cwd string) (names []string) {
	dirs := []string{cwd}
	if parent, ok := b.hosts[e.Parent]; ok { // which mostly works in the same place, and is still there
		dir, _ := os.Readlink(fmt.Sprintf("/proc/%d/cwd", parent))
		dirs = append(dirs, dir)
	}
	first, _, _ := bytes.Cut(e.Args, []byte{0}) // of a script, the interpreter
	for _, name := range []string{e.File, string(first)} {
		if strings.HasPrefix(name, "/") {
			names = append(names, name)
			continue
		}
		for _, dir := range dirs {
			if strings.HasPrefix(dir, "/") && name != "" {
				names = append(names, dir+"/"+name)
			}
		}
	}
	return names
}

// find looks for the file of an execution by a name of it. The name is resolved as inside, and
// no link of /proc is followed.
func (h *hashes) find(b *box, e trace.Event, name string) *executable {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.root == nil || !strings.HasPrefix(name, "/") {
		return nil
	}
	fd, err := unix.Openat2(int(b.root.Fd()), name, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil
	}
	f := os.NewFile(uintptr(fd), "exe")
	x := h.check(f, e)
	if x == nil {
		f.Close()
		return nil
	}
	x.path, _ = os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	return h.remember(e, x)
}

// check makes an executable of an open file if it is that of the event.
func (h *hashes) check(f *os.File, e trace.Event) *executable {
	v, ok := ledger.VersionOf(f)
	if !ok || v.Ino != e.Inode || v.Size != e.Size || v.Ctime.Nano() != e.Changed {
		return nil
	}
	return &executable{key: v, file: f}
}

func seenOf(e trace.Event) seen { return seen{e.Namespace, e.Inode, e.Size, e.Changed, e.Name} }

// remember keeps an executable for later ones, and closes its file if its hash is known.
func (h *hashes) remember(e trace.Event, x *executable) *executable {
	if h.Known(x.key) != "" {
		x.file.Close()
		x.file = nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.last == nil || len(h.last) > maxLast {
		h.last = map[seen]executable{}
	}
	h.last[seenOf(e)] = executable{path: x.path, key: x.key}
	return x
}

// sum is the hash of an executable, "" when it cannot be known any more. Large ones do not wait for
// theirs while the sandbox is being taken away.
func (h *hashes) sum(b *box, x *executable) string {
	if x.file == nil {
		return h.Known(x.key)
	}
	return h.Sum(x.file, x.key, b.over.Load)
}
