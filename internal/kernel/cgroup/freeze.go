package cgroup

import (
	"context"
	"errors"
	"io/fs"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// freezeLimit bounds how long processes in the middle of a system call may take to
// stop.
const freezeLimit = 5 * time.Second

// Freeze stops every process of the group where it is, and returns when all have
// stopped. When that fails, or ctx ends first, the group is thawed again. Kinds:
// Unsupported (no freezer here), Unavailable (a process does not stop).
func (g *Group) Freeze(ctx context.Context) error {
	err := g.freeze(ctx)
	if err == nil {
		return nil
	}
	if berm.KindOf(err) == berm.Unsupported {
		return err
	}
	_ = g.thaw(context.WithoutCancel(ctx))
	if isTimeout(err) {
		return berm.Errorf(berm.Unavailable, "freeze cgroup %s: a process does not stop: %w", g.id, err)
	}
	return berm.Errorf(berm.Internal, "freeze cgroup %s: %w", g.id, err)
}

// Thaw lets every process of the group go on, and returns when they do.
func (g *Group) Thaw(ctx context.Context) error {
	err := g.thaw(ctx)
	if err != nil && berm.KindOf(err) != berm.Unsupported {
		return berm.Errorf(berm.Internal, "thaw cgroup %s: %w", g.id, err)
	}
	return err
}

// Frozen says whether the group is frozen or about to be.
func (g *Group) Frozen() (bool, error) {
	if dir := g.unified(); dir != "" {
		wanted, err := readNumber(dir, "cgroup.freeze")
		return wanted == 1, err
	}
	dir, _ := g.dir("freezer")
	if dir == "" {
		return false, nil
	}
	wanted, err := readNumber(dir, "freezer.self_freezing")
	return wanted == 1, err
}

func (g *Group) freeze(ctx context.Context) error {
	if dir := g.unified(); dir != "" {
		if err := write(dir, "cgroup.freeze", "1"); err != nil {
			return err
		}
		return poll(ctx, freezeLimit, func() (bool, error) {
			events, err := readTable(dir, "cgroup.events")
			return events["frozen"] == 1, err
		})
	}
	dir, _ := g.dir("freezer")
	if dir == "" {
		return g.noFreezer()
	}
	// v1 stays FREEZING when a task forks at the wrong moment; writing again makes it
	// look at all tasks anew.
	return poll(ctx, freezeLimit, func() (bool, error) {
		if err := write(dir, "freezer.state", "FROZEN"); err != nil {
			return false, err
		}
		state, err := read(dir, "freezer.state")
		return state == "FROZEN", err
	})
}

func (g *Group) thaw(ctx context.Context) error {
	if dir := g.unified(); dir != "" {
		if err := write(dir, "cgroup.freeze", "0"); err != nil {
			return err
		}
		return poll(ctx, freezeLimit, func() (bool, error) {
			events, err := readTable(dir, "cgroup.events")
			return events["frozen"] == 0, err
		})
	}
	dir, _ := g.dir("freezer")
	if dir == "" {
		return g.noFreezer()
	}
	return poll(ctx, freezeLimit, func() (bool, error) {
		if err := write(dir, "freezer.state", "THAWED"); err != nil {
			return false, err
		}
		state, err := read(dir, "freezer.state")
		return state == "THAWED", err
	})
}

func (g *Group) noFreezer() error {
	return berm.Errorf(berm.Unsupported, "cannot freeze: no cgroup v2 and cgroup controller freezer: %s", g.manager.Missing()["freezer"]).WithHint(delegate)
}

// Kill ends every process of the group, also frozen, stopped and forking ones, and
// returns when none is left. It fails with Unavailable when ctx ends first; then they
// have got their signal all the same.
func (g *Group) Kill(ctx context.Context) error {
	if dir := g.unified(); dir != "" {
		err := write(dir, "cgroup.kill", "1") // kernel 5.14
		if err == nil {
			return g.killed(poll(ctx, time.Minute, func() (bool, error) {
				events, err := readTable(dir, "cgroup.events")
				return events["populated"] == 0, err
			}))
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return g.killed(err)
		}
	}
	// Frozen processes cannot fork away from the list, nor can their ids be taken by
	// others before they are thawed.
	return g.killed(poll(ctx, time.Minute, func() (bool, error) {
		pids, err := g.Processes()
		if err != nil || len(pids) == 0 {
			return true, err
		}
		frozen, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
		defer cancel()
		if g.freeze(frozen) == nil {
			if pids, err = g.Processes(); err != nil {
				return true, err
			}
		}
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		_ = g.thaw(ctx)
		return false, nil
	}))
}

func (g *Group) killed(err error) error {
	switch {
	case err == nil || errors.Is(err, fs.ErrNotExist) || berm.KindOf(err) == berm.NotFound:
		return nil
	case isTimeout(err):
		return berm.Errorf(berm.Unavailable, "kill cgroup %s: processes are left: %w", g.id, err)
	default:
		return berm.Errorf(berm.Internal, "kill cgroup %s: %w", g.id, err)
	}
}
