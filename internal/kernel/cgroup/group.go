package cgroup

import (
	"context"
	"errors"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// A Group is the control group of one sandbox: one directory in each hierarchy that
// is used. It holds no descriptor.
type Group struct {
	id          string
	manager     *Manager
	hierarchies []*hierarchy
}

// ID is the name that the group was made with.
func (g *Group) ID() string { return g.id }

// Dirs lists the group's directories.
func (g *Group) Dirs() []string {
	dirs := make([]string, len(g.hierarchies))
	for i, h := range g.hierarchies {
		dirs[i] = h.path(g.id)
	}
	return dirs
}

// unified returns the group's v2 directory, or "".
func (g *Group) unified() string {
	for _, h := range g.hierarchies {
		if h.v2 {
			return h.path(g.id)
		}
	}
	return ""
}

// dir returns the group's directory in the hierarchy of a controller, and whether
// that is v2; "" when it is not used.
func (g *Group) dir(controller string) (dir string, v2 bool) {
	h := g.manager.with(controller)
	for _, own := range g.hierarchies {
		if own == h {
			return h.path(g.id), h.v2
		}
	}
	return "", false
}

// Start calls start, which starts a process that is to be born into the group. v2 is the
// group's v2 directory for CLONE_INTO_CGROUP (UseCgroupFD of syscall.SysProcAttr), nil
// without v2; it is closed afterwards.
//
// The v1 groups are inherited: Start has entered them with the calling thread, and
// leaves them again. Moving a process (Add) makes the kernel wait until no thread of the
// machine is in the middle of a fork, for several ms per hierarchy where that has not
// happened lately; a thread that moves itself, or is born in place, waits for nothing.
// When Start fails although start did not, the process is the caller's to end.
func (g *Group) Start(start func(v2 *os.File) error) error {
	runtime.LockOSThread() // not unlocked after a failure to leave: the thread must not be used again
	dir, err := g.File()
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	if dir != nil {
		defer dir.Close()
	}
	var entered []*hierarchy
	for _, h := range g.hierarchies {
		if h.v2 {
			continue
		}
		if err = write(h.path(g.id), "tasks", "0"); err != nil { // 0 is the calling thread
			break
		}
		entered = append(entered, h)
	}
	if err == nil {
		err = start(dir)
	} else {
		err = berm.Errorf(berm.Internal, "enter cgroup: %w", err)
	}
	for _, h := range entered {
		if left := write(h.own, "tasks", "0"); left != nil {
			return berm.Errorf(berm.Internal, "leave cgroup: %w", errors.Join(left, err))
		}
	}
	runtime.UnlockOSThread()
	return err
}

// File opens the group's v2 directory; nil without v2. The caller closes it.
func (g *Group) File() (*os.File, error) {
	dir := g.unified()
	if dir == "" {
		return nil, nil
	}
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "open cgroup %s: %w", dir, err)
	}
	return os.NewFile(uintptr(fd), dir), nil
}

// Add moves a running process with all its threads into the group, in every hierarchy.
// What it starts later is in it too. See Start for what it costs.
func (g *Group) Add(pid int) error {
	for _, dir := range g.Dirs() {
		err := write(dir, "cgroup.procs", strconv.Itoa(pid))
		if errors.Is(err, unix.ESRCH) {
			return berm.Errorf(berm.NotFound, "add to cgroup: no process %d", pid)
		}
		if err != nil {
			return berm.Errorf(berm.Internal, "add process %d to cgroup: %w", pid, err)
		}
	}
	return nil
}

// Processes lists the ids of the group's processes.
func (g *Group) Processes() ([]int, error) {
	if len(g.hierarchies) == 0 {
		return nil, nil
	}
	list, err := read(g.hierarchies[0].path(g.id), "cgroup.procs")
	if err != nil {
		return nil, berm.Errorf(berm.NotFound, "no cgroup: %w", err)
	}
	var pids []int
	for field := range strings.FieldsSeq(list) {
		if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// Remove removes the group once it is empty; removing it twice is no error. The kernel
// lets go of exited processes a little late, so Remove tries again until ctx ends,
// for 2 s at most. Conflict when processes are left then.
func (g *Group) Remove(ctx context.Context) error {
	err := poll(ctx, 2*time.Second, func() (bool, error) {
		err := g.remove()
		if errors.Is(err, unix.EBUSY) {
			return false, nil
		}
		return err == nil, err
	})
	switch {
	case err == nil:
		return nil
	case isTimeout(err):
		pids, _ := g.Processes()
		return berm.Errorf(berm.Conflict, "remove cgroup %s: busy, processes %v: %w", g.id, pids, err)
	default:
		return berm.Errorf(berm.Internal, "remove cgroup %s: %w", g.id, err)
	}
}

// RemoveEmpty removes the group if no process is in it.
func (g *Group) RemoveEmpty() { _ = g.remove() }

// remove tries once, in all hierarchies, and returns the first error.
func (g *Group) remove() error {
	var first error
	for _, dir := range g.Dirs() {
		if err := unix.Rmdir(dir); err != nil && err != unix.ENOENT && first == nil {
			first = &os.PathError{Op: "rmdir", Path: dir, Err: err}
		}
	}
	return first
}

var errTimeout = errors.New("time is up")

func isTimeout(err error) bool {
	return errors.Is(err, errTimeout) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

// poll calls done until it returns true or an error, ctx ends or the time is up, at
// first after 50 µs, then ever more seldom down to every 10 ms: the kernel offers no
// event for most of what is waited for here, and it is mostly there at once.
func poll(ctx context.Context, limit time.Duration, done func() (bool, error)) error {
	end := time.Now().Add(limit)
	for pause := 50 * time.Microsecond; ; pause = min(2*pause, 10*time.Millisecond) {
		if ok, err := done(); ok || err != nil {
			return err
		}
		if time.Now().After(end) {
			return errTimeout
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}
