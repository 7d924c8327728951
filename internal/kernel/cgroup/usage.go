package cgroup

import (
	"errors"
	"io/fs"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// Usage measures what the group uses; the disk fields stay 0, and so does what has no
// controller here. MemoryUsed is without the page cache, which is MemoryCache: what
// the kernel can take back without writing to swap. NotFound when the group is gone.
func (g *Group) Usage() (berm.Usage, error) {
	u := berm.Usage{At: time.Now(), CPUs: float64(runtime.NumCPU())}
	if err := errors.Join(g.cpuUsage(&u), g.memoryUsage(&u), g.pidsUsage(&u)); errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return u, berm.Errorf(berm.NotFound, "measure cgroup %s: %w", g.id, err)
	} else if err != nil {
		return u, berm.Errorf(berm.Internal, "measure cgroup %s: %w", g.id, err)
	}
	return u, nil
}

func (g *Group) cpuUsage(u *berm.Usage) error {
	if dir := g.unified(); dir != "" { // counted with and without the controller
		stat, err := readTable(dir, "cpu.stat")
		if err != nil {
			return err
		}
		u.CPUTime = time.Duration(stat["usage_usec"]) * time.Microsecond
	} else if dir, _ := g.dir("cpuacct"); dir != "" {
		ns, err := readNumber(dir, "cpuacct.usage")
		if err != nil {
			return err
		}
		u.CPUTime = time.Duration(ns)
	}
	dir, v2 := g.dir("cpu")
	if dir == "" {
		return nil
	}
	var quota, period string
	if v2 {
		s, err := read(dir, "cpu.max")
		if err != nil {
			return err
		}
		quota, period, _ = strings.Cut(s, " ")
	} else {
		var err1, err2 error
		quota, err1 = read(dir, "cpu.cfs_quota_us")
		period, err2 = read(dir, "cpu.cfs_period_us")
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
	}
	q, err1 := strconv.ParseFloat(quota, 64) // "max" in v2 and -1 in v1 are no limit
	p, err2 := strconv.ParseFloat(period, 64)
	if err1 == nil && err2 == nil && q > 0 && p > 0 {
		u.CPUs = min(u.CPUs, q/p)
	}
	return nil
}

func (g *Group) memoryUsage(u *berm.Usage) error {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return err
	}
	u.MemoryTotal = int64(info.Totalram) * int64(info.Unit)
	dir, v2 := g.dir("memory")
	if dir == "" {
		return nil
	}
	current, limit, cache, shmem := "memory.usage_in_bytes", "memory.limit_in_bytes", "total_cache", "total_shmem"
	if v2 {
		current, limit, cache, shmem = "memory.current", "memory.max", "file", "shmem"
	}
	used, err1 := readNumber(dir, current)
	most, err2 := readNumber(dir, limit)
	stat, err3 := readTable(dir, "memory.stat")
	oom, err4 := g.OOMKills()
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return err
	}
	// tmpfs counts as page cache, but cannot be dropped.
	u.MemoryCache = max(stat[cache]-stat[shmem], 0)
	u.MemoryUsed = max(used-u.MemoryCache, 0)
	if most > 0 {
		u.MemoryTotal = min(u.MemoryTotal, most)
	}
	u.OOMKills = oom
	return nil
}

func (g *Group) pidsUsage(u *berm.Usage) (err error) {
	if dir, _ := g.dir("pids"); dir != "" {
		u.PIDs, err = readNumber(dir, "pids.current")
	}
	return err
}

// OOMKills counts the processes of the group that the kernel ended for memory.
func (g *Group) OOMKills() (int64, error) {
	dir, v2 := g.dir("memory")
	if dir == "" {
		return 0, nil
	}
	file := "memory.oom_control"
	if v2 {
		file = "memory.events"
	}
	events, err := readTable(dir, file)
	return events["oom_kill"], err
}
