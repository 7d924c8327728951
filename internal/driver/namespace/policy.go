package namespace

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/namespace/plan"
	"github.com/berm-sandbox/berm/internal/kernel/capability"
	"github.com/berm-sandbox/berm/internal/kernel/landlock"
	"github.com/berm-sandbox/berm/internal/kernel/seccomp"
)

// Names on the stage on which init puts the root together. They show up inside, in
// the options of the root's overlay: short and without meaning.
const (
	stageRoot  = "r"
	stageUpper = "u"
	stageBoot  = "b"
)

const (
	hidden = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	mebi   = 1 << 20
)

// masked show nothing: kernel memory, keys of the host's users, the kernel's log and
// settings, hardware, and other tenants' disks.
var masked = []string{
	"/proc/acpi", "/proc/asound", "/proc/cmdline", "/proc/config.gz", "/proc/diskstats", "/proc/driver", "/proc/fs",
	"/proc/interrupts", "/proc/iomem", "/proc/ioports", "/proc/kallsyms", "/proc/kcore", "/proc/key-users", "/proc/keys",
	"/proc/kmsg", "/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags", "/proc/latency_stats", "/proc/locks",
	"/proc/modules", "/proc/mtrr", "/proc/pagetypeinfo", "/proc/partitions", "/proc/sched_debug", "/proc/schedstat",
	"/proc/scsi", "/proc/slabinfo", "/proc/softirqs", "/proc/swaps", "/proc/sysrq-trigger", "/proc/timer_list",
	"/proc/timer_stats", "/proc/tty/driver", "/proc/vmallocinfo", "/proc/zoneinfo", "/proc/pressure",
	"/proc/sys/fs/binfmt_misc", "/proc/sys/kernel/hung_task_detect_count",
}

// readOnly can be read and not written, not even by those with all capabilities inside:
// some files there belong to uid 0 whatever its rights are, and are the host's.
var readOnly = []string{"/proc/bus", "/proc/irq", "/proc/sys"}

var devices = []string{"null", "zero", "full", "random", "urandom", "tty"}

// cpus is where programs look for the number of processors.
const cpus = "/sys/devices/system/cpu"

// rlimits are set in every sandbox, so that none is inherited from the server.
var rlimits = []struct {
	resource   int
	name       string
	soft, hard uint64
}{
	// 1 and not 0: the kernel hands a core to a program of the host's core_pattern
	// whatever the limit is, but at 1.
	{unix.RLIMIT_CORE, "core file size", 1, 1},
	{unix.RLIMIT_NOFILE, "open files", 65536, 1 << 20},
	{unix.RLIMIT_STACK, "stack", 8 * mebi, unix.RLIM_INFINITY},
	{unix.RLIMIT_MEMLOCK, "locked memory", 8 * mebi, 8 * mebi},
	{unix.RLIMIT_MSGQUEUE, "message queues", 819200, 819200},
}

// setUp is the plan for a spec and the policy that the plan amounts to: both are made
// in one pass, so that what is shown is what is done.
type setUp struct {
	steps  []plan.Step
	policy berm.Policy
}

func (s *setUp) add(step plan.Step) { s.steps = append(s.steps, step) }

// mount adds a mount below the new root and shows it in the policy.
func (s *setUp) mount(target, fstype string, flags uint64, options string) {
	s.add(plan.Step{Op: plan.Mount, Target: stageRoot + target, Source: fstype, Flags: flags, Data: options})
	s.show(target, fstype, flags, options)
}

func (s *setUp) show(target, what string, flags uint64, options string) {
	line := target + " " + what
	if names := flagNames(flags); names != "" {
		line += " " + names
	}
	if options != "" {
		line += " (" + options + ")"
	}
	s.policy.Mounts = append(s.policy.Mounts, line)
}

func flagNames(flags uint64) string {
	var names []string
	for _, f := range []struct {
		flag uint64
		name string
	}{{unix.MS_RDONLY, "ro"}, {unix.MS_NOSUID, "nosuid"}, {unix.MS_NODEV, "nodev"}, {unix.MS_NOEXEC, "noexec"}} {
		if flags&f.flag != 0 {
			names = append(names, f.name)
		}
	}
	return strings.Join(names, ",")
}

// setUp makes the plan and the policy of a spec.
func (d *Driver) setUp(spec berm.Spec) (*setUp, error) {
	s := &setUp{policy: berm.Policy{
		Level:      berm.Namespace,
		Namespaces: []string{"user", "pid", "mount", "network", "ipc", "uts", "cgroup"},
		IDMap:      d.host.ids(spec).String(),
		Limits:     spec.Limits,
		Network:    "none but loopback",
		Cgroup:     d.groups.String(),
		Degraded:   slices.Concat(d.host.degraded, spec.Degraded),
	}}
	s.root(d, spec)
	s.proc()
	s.dev(d, spec)
	s.sys()
	s.add(plan.Step{Op: plan.Hostname, Data: spec.Hostname})
	s.add(plan.Step{Op: plan.Loopback})
	s.add(plan.Step{Op: plan.Enter, Target: stageRoot})
	s.identity(spec)
	for _, r := range rlimits {
		s.add(plan.Step{Op: plan.Rlimit, FD: r.resource, Flags: r.soft, Target: strconv.FormatUint(r.hard, 10), Data: r.name})
		text := amount
		if r.resource == unix.RLIMIT_NOFILE { // the one that does not count bytes
			text = func(n uint64) string { return strconv.FormatUint(n, 10) }
		}
		s.policy.Rlimits = append(s.policy.Rlimits, fmt.Sprintf("%s: %s, at most %s", r.name, text(r.soft), text(r.hard)))
	}
	return s, s.rights(spec)
}

// root puts the layers and the writable layer on top of each other. All names are
// relative, so that no path of the host shows in /proc/self/mountinfo.
func (s *setUp) root(d *Driver, spec berm.Spec) {
	s.add(plan.Step{Op: plan.Stage, Data: "mode=0755,size=1m"})
	fd := int(plan.FDCount)
	place := func(name string) {
		s.add(plan.Step{Op: plan.Mkdir, Target: name, Flags: 0o755})
		s.add(plan.Step{Op: plan.Move, Target: name, FD: fd})
		fd++
	}
	lower := make([]string, len(spec.Layers))
	for i := range spec.Layers {
		name := strconv.Itoa(i)
		place(name)
		lower[len(lower)-1-i] = name // overlayfs wants the top first
	}
	var upper string
	switch d.upper(spec) {
	case upperImage:
		place(stageUpper)
		upper = fmt.Sprintf("at most %s on disk", amount(uint64(spec.Limits.Disk)))
	case upperDirectory:
		place(stageUpper)
		upper = "on the host's disk, not limited"
	case upperMemory:
		options := "mode=0755"
		upper = "in memory, at most half of the host's"
		if spec.Limits.Disk > 0 {
			options += ",size=" + strconv.FormatInt(spec.Limits.Disk, 10)
			upper = "in memory, at most " + amount(uint64(spec.Limits.Disk))
		}
		s.add(plan.Step{Op: plan.Mkdir, Target: stageUpper, Flags: 0o755})
		s.add(plan.Step{Op: plan.Mount, Target: stageUpper, Source: "tmpfs", Flags: unix.MS_NODEV, Data: options})
	}
	s.add(plan.Step{Op: plan.Mkdir, Target: stageUpper + "/upper", Flags: 0o755})
	s.add(plan.Step{Op: plan.Mkdir, Target: stageUpper + "/work", Flags: 0o700})

	s.add(plan.Step{Op: plan.Mkdir, Target: stageRoot, Flags: 0o755})
	flags := uint64(unix.MS_NODEV)
	if !spec.Setuid {
		flags |= unix.MS_NOSUID
	}
	s.add(plan.Step{Op: plan.Mount, Target: stageRoot, Source: "overlay", Flags: flags,
		// The writable layer does not outlive the sandbox: volatile spares every wait
		// for the disk.
		Data: "lowerdir=" + strings.Join(lower, ":") + ",upperdir=u/upper,workdir=u/work,userxattr,volatile"})
	s.show("/", "overlay", flags, fmt.Sprintf("%d read-only layers; writes: %s", len(lower), upper))
	for _, dir := range []string{"/proc", "/dev", "/sys", "/etc"} {
		s.add(plan.Step{Op: plan.Mkdir, Target: stageRoot + dir, Flags: 0o755})
	}
}

// proc mounts a process table of the sandbox's own and closes what is the host's.
func (s *setUp) proc() {
	s.mount("/proc", "proc", hidden, "")
	for _, path := range readOnly {
		s.add(plan.Step{Op: plan.ReadOnly, Target: stageRoot + path})
	}
	for _, path := range masked {
		s.add(plan.Step{Op: plan.Mask, Target: stageRoot + path})
	}
	s.policy.ReadOnly, s.policy.Masked = readOnly, masked
	s.add(plan.Step{Op: plan.File, Target: stageBoot, Flags: 0o444, Data: uuid() + "\n"})
	s.add(plan.Step{Op: plan.Bind, Source: stageBoot, Target: stageRoot + "/proc/sys/kernel/random/boot_id", Flags: unix.MS_RDONLY | hidden})
	s.show("/proc/sys/kernel/random/boot_id", "file", unix.MS_RDONLY|hidden, "own value")
}

// dev makes the few devices that programs expect.
func (s *setUp) dev(d *Driver, spec berm.Spec) {
	s.mount("/dev", "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=0755,size=1m,nr_inodes=1024")
	for _, name := range devices {
		s.add(plan.Step{Op: plan.File, Target: stageRoot + "/dev/" + name, Flags: 0o666})
		s.add(plan.Step{Op: plan.Bind, Source: "/dev/" + name, Target: stageRoot + "/dev/" + name, Flags: unix.MS_NOSUID | unix.MS_NOEXEC})
		s.policy.Devices = append(s.policy.Devices, "/dev/"+name)
	}
	for _, link := range [][2]string{
		{"/proc/self/fd", "fd"}, {"fd/0", "stdin"}, {"fd/1", "stdout"}, {"fd/2", "stderr"}, {"pts/ptmx", "ptmx"},
	} {
		s.add(plan.Step{Op: plan.Symlink, Source: link[0], Target: stageRoot + "/dev/" + link[1]})
	}
	s.add(plan.Step{Op: plan.Mkdir, Target: stageRoot + "/dev/pts", Flags: 0o755})
	// All instances together have as many terminals as the host, 3072 unless its
	// administrator changed it: max leaves some to the other sandboxes.
	options := "newinstance,ptmxmode=0666,mode=0620,max=256"
	if d.host.ids(spec).HasGroup(5) {
		options += ",gid=5" // group tty of every distribution
	}
	s.mount("/dev/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, options)
	s.add(plan.Step{Op: plan.Mkdir, Target: stageRoot + "/dev/shm", Flags: 0o1777})
	s.mount("/dev/shm", "tmpfs", hidden, fmt.Sprintf("mode=1777,size=%d", sharedMemory(spec.Limits)))
}

// sharedMemory is the size of /dev/shm. It counts as memory of the sandbox.
func sharedMemory(l berm.Limits) int64 {
	if l.Memory > 0 {
		return max(l.Memory/2, mebi)
	}
	return 64 * mebi
}

// sys shows the processors and nothing else: sysfs tells of the host's hardware.
func (s *setUp) sys() {
	s.mount("/sys", "tmpfs", hidden, "mode=0755,size=64k")
	dir := stageRoot + "/sys"
	for part := range strings.SplitSeq(strings.TrimPrefix(cpus, "/sys/"), "/") {
		dir += "/" + part
		s.add(plan.Step{Op: plan.Mkdir, Target: dir, Flags: 0o755})
	}
	if _, err := os.Stat(cpus); err == nil {
		s.add(plan.Step{Op: plan.Bind, Source: cpus, Target: stageRoot + cpus, Flags: unix.MS_RDONLY | hidden})
		s.show(cpus, "sysfs", unix.MS_RDONLY|hidden, "")
	}
	s.add(plan.Step{Op: plan.Remount, Target: stageRoot + "/sys", Flags: unix.MS_RDONLY | hidden})
}

// identity writes what tells one machine from another.
func (s *setUp) identity(spec berm.Spec) {
	id := make([]byte, 16)
	rand.Read(id)
	for _, f := range []struct{ name, content string }{
		{"hostname", spec.Hostname + "\n"},
		{"hosts", "127.0.0.1\tlocalhost\n127.0.1.1\t" + spec.Hostname + "\n::1\tlocalhost ip6-localhost ip6-loopback\n"},
		{"resolv.conf", "nameserver 127.0.0.1\noptions attempts:1 timeout:1\n"},
		{"machine-id", hex.EncodeToString(id) + "\n"},
	} {
		s.add(plan.Step{Op: plan.File, Target: "/etc/" + f.name, Flags: 0o644, Data: f.content})
	}
}

// rights gives away what the sandbox must not have. The filter comes before the
// capabilities go, because a sandbox with set-uid programs has no no_new_privs, which
// is the other way to be allowed to load it.
func (s *setUp) rights(spec berm.Spec) error {
	s.landlock()
	s.policy.Capabilities = capability.Inside.Names()
	s.add(plan.Step{Op: plan.Bounding, Flags: uint64(capability.Inside)})
	if s.policy.NoNewPrivs = !spec.Setuid; s.policy.NoNewPrivs {
		s.add(plan.Step{Op: plan.NoNewPrivs})
	}
	f, err := filterOf(spec.Profile)
	if err != nil {
		return err
	}
	s.policy.Seccomp = f.description
	s.add(plan.Step{Op: plan.Seccomp, Data: f.program})
	s.add(plan.Step{Op: plan.Capabilities, Flags: uint64(capability.Inside)})
	return nil
}

// filter is an assembled seccomp profile.
type filter struct {
	program     string       // of struct sock_filter
	description berm.Seccomp // shared: not to be changed
}

// filters has those that were used, by the names of their profiles: to assemble one takes
// as long as the rest of a plan.
var filters sync.Map

func filterOf(name string) (filter, error) {
	if f, ok := filters.Load(name); ok {
		return f.(filter), nil
	}
	profile, err := seccomp.Lookup(name)
	if err != nil {
		return filter{}, err
	}
	code, err := profile.Assemble("")
	if err != nil {
		return filter{}, err
	}
	program := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(code))), len(code)*int(unsafe.Sizeof(code[0])))
	f := filter{string(program), profile.Describe()}
	filters.Store(name, f)
	return f, nil
}

// landlock closes device nodes a second time, behind capabilities and mount flags.
func (s *setUp) landlock() {
	abi := landlock.ABI()
	if abi < 2 {
		s.policy.Landlock = fmt.Sprintf("off: ABI %d; the first that lets files move between directories is 2 (Linux 5.19)", abi)
		return
	}
	step := plan.Step{Op: plan.Landlock, Flags: unix.LANDLOCK_ACCESS_FS_MAKE_CHAR | unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK | unix.LANDLOCK_ACCESS_FS_REFER}
	s.policy.Landlock = fmt.Sprintf("ABI %d: no making of device nodes, no change of mounts, no tracing of processes outside", abi)
	if abi >= 5 { // Linux 6.10
		step.Flags |= unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
		step.Source = "/dev/pts /dev/" + strings.Join(devices, " /dev/")
		s.policy.Landlock += ", no ioctl on other devices than those listed"
	}
	s.add(step)
}

func uuid() string {
	var b [16]byte
	rand.Read(b[:])
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:])
}

func amount(n uint64) string {
	switch {
	case n == unix.RLIM_INFINITY:
		return "unlimited"
	case n >= mebi && n%mebi == 0:
		return fmt.Sprintf("%d MiB", n/mebi)
	}
	return strconv.FormatUint(n, 10)
}
