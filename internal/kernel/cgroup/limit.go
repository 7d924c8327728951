package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// period is the CPU bandwidth period in µs, and minQuota the least that the kernel
// takes as a share of it.
const (
	period   = 100_000
	minQuota = 1_000
)

// A Disk is a whole block device: throttling does not know partitions.
type Disk struct{ Major, Minor uint32 }

func (d Disk) String() string { return fmt.Sprintf("%d:%d", d.Major, d.Minor) }

// DiskOf returns the disk that holds the file system of a path. It fails with
// Unsupported when that is no block device (tmpfs, overlay, btrfs, …).
func DiskOf(path string) (Disk, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return Disk{}, berm.Errorf(berm.Internal, "find the disk of %s: %w", path, err)
	}
	d := Disk{unix.Major(st.Dev), unix.Minor(st.Dev)}
	dir, err := filepath.EvalSymlinks("/sys/dev/block/" + d.String())
	if err != nil {
		return Disk{}, berm.Errorf(berm.Unsupported, "%s lies on no block device", path)
	}
	if _, err := os.Stat(filepath.Join(dir, "partition")); err != nil {
		return d, nil
	}
	number, err := read(filepath.Dir(dir), "dev")
	if err != nil {
		return Disk{}, berm.Errorf(berm.Internal, "find the disk of %s: %w", path, err)
	}
	if _, err := fmt.Sscanf(number, "%d:%d", &d.Major, &d.Minor); err != nil {
		return Disk{}, berm.Errorf(berm.Internal, "find the disk of %s: %w", path, err)
	}
	return d, nil
}

// delegate is what to do when groups cannot be made.
const delegate = "run berm as root, or in a scope that systemd delegates: systemd-run --user --scope -p Delegate=yes berm …"

// Check refuses limits that cannot be enforced here: Invalid or Unsupported, with the
// reason. Limits.Disk is not looked at.
func (m *Manager) Check(l berm.Limits, disks ...Disk) error {
	if l.Memory < 0 || l.CPU < 0 || l.PIDs < 0 || l.ReadBytes < 0 || l.WriteBytes < 0 {
		return berm.Errorf(berm.Invalid, "a limit is negative")
	}
	if l.CPU > 0 && l.CPU*period < minQuota {
		return berm.Errorf(berm.Invalid, "a limit of %g cores is below the kernel's least, %g", l.CPU, float64(minQuota)/period)
	}
	missing := m.Missing()
	for controller, set := range map[string]bool{
		"memory": l.Memory > 0, "cpu": l.CPU > 0, "pids": l.PIDs > 0, "io": l.ReadBytes > 0 || l.WriteBytes > 0,
	} {
		if why, gone := missing[controller]; set && gone {
			return berm.Errorf(berm.Unsupported, "no %s limit: cgroup controller %s: %s", controller, controller, why).WithHint(delegate)
		}
	}
	if l.Memory > 0 {
		if err := m.checkSwap(); err != nil {
			return err
		}
	}
	if l.ReadBytes > 0 || l.WriteBytes > 0 {
		if len(disks) == 0 {
			return berm.Errorf(berm.Unsupported, "no io limit: the sandbox's files lie on no disk that can be throttled")
		}
		// v1 charges the write-back of buffered data to the kernel's flusher.
		if l.WriteBytes > 0 && !m.with("io").v2 {
			return berm.Errorf(berm.Unsupported, "no limit on written bytes: cgroup v1 does not see buffered writes").
				WithHint("boot with systemd.unified_cgroup_hierarchy=1")
		}
	}
	return nil
}

// checkSwap refuses a memory limit that swap would soften: v1 without memsw.
func (m *Manager) checkSwap() error {
	h := m.with("memory")
	if h.v2 || unix.Access(filepath.Join(h.parent, "memory.memsw.limit_in_bytes"), unix.F_OK) == nil {
		return nil
	}
	swaps, err := os.ReadFile(filepath.Join(m.proc, "swaps"))
	if err == nil && strings.Count(string(swaps), "\n") <= 1 || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return berm.Errorf(berm.Unsupported, "no memory limit: the kernel does not count swap").
		WithHint("boot with swapaccount=1, or turn swap off")
}

// limit puts the limits of memory, cpu and pids in force.
func (g *Group) limit(l berm.Limits) error {
	type setting struct {
		file, value string
		optional    bool // absent where the kernel has no swap, which checkSwap has judged
	}
	set := func(controller string, v1, v2 []setting) error {
		h := g.manager.with(controller)
		settings := v1
		if h.v2 {
			settings = v2
		}
		for _, s := range settings {
			err := write(h.path(g.id), s.file, s.value)
			if err != nil && (!s.optional || !errors.Is(err, fs.ErrNotExist)) {
				return berm.Errorf(berm.Internal, "limit %s: %w", controller, err)
			}
		}
		return nil
	}
	if l.Memory > 0 {
		bytes := strconv.FormatInt(l.Memory, 10)
		if err := set("memory",
			[]setting{{"memory.limit_in_bytes", bytes, false}, {"memory.memsw.limit_in_bytes", bytes, true}},
			[]setting{{"memory.max", bytes, false}, {"memory.swap.max", "0", true}}); err != nil {
			return err
		}
	}
	if l.CPU > 0 {
		quota := strconv.FormatInt(int64(l.CPU*period), 10)
		if err := set("cpu",
			[]setting{{"cpu.cfs_period_us", strconv.Itoa(period), false}, {"cpu.cfs_quota_us", quota, false}},
			[]setting{{"cpu.max", fmt.Sprintf("%s %d", quota, period), false}}); err != nil {
			return err
		}
	}
	if l.PIDs > 0 {
		count := []setting{{"pids.max", strconv.FormatInt(l.PIDs, 10), false}}
		if err := set("pids", count, count); err != nil {
			return err
		}
	}
	return nil
}

// LimitDisk puts the limits on bytes per second in force for one disk more, such as
// the loop device of the sandbox's writable layer.
func (g *Group) LimitDisk(d Disk, l berm.Limits) error {
	if l.ReadBytes == 0 && l.WriteBytes == 0 {
		return nil
	}
	if err := g.manager.Check(berm.Limits{ReadBytes: l.ReadBytes, WriteBytes: l.WriteBytes}, d); err != nil {
		return err
	}
	h := g.manager.with("io")
	file, value := "blkio.throttle.read_bps_device", fmt.Sprintf("%v %d", d, l.ReadBytes)
	if h.v2 {
		file, value = "io.max", d.String()
		if l.ReadBytes > 0 {
			value += fmt.Sprintf(" rbps=%d", l.ReadBytes)
		}
		if l.WriteBytes > 0 {
			value += fmt.Sprintf(" wbps=%d", l.WriteBytes)
		}
	}
	if err := write(h.path(g.id), file, value); err != nil {
		return berm.Errorf(berm.Internal, "limit disk %v: %w", d, err)
	}
	return nil
}
