// Package wall plans what init builds around the processes of a sandbox, and tells what
// that amounts to.
package wall

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/namespace/launch"
	"github.com/berm-sandbox/berm/internal/driver/namespace/plan"
	"github.com/berm-sandbox/berm/internal/kernel/capability"
	"github.com/berm-sandbox/berm/internal/kernel/landlock"
	"github.com/berm-sandbox/berm/internal/kernel/notify"
	"github.com/berm-sandbox/berm/internal/kernel/seccomp"
	"github.com/berm-sandbox/berm/internal/network/link"
)

// Names on the stage on which init puts the root together. They show up inside, in
// the options of the root's overlay: short and without meaning.
const (
	stageRoot  = "r"
	stageUpper = "u"
	stageBoot  = "b"
	// Of a workspace with a layer of its own.
	stageProject = "w"
	stageSession = "s"
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

// Config is what a wall is made for.
type Config struct {
	IDs      launch.IDs
	Limits   berm.Limits
	Profile  string // of seccomp; "" is the default
	Hostname string
	Setuid   bool // see berm.Spec
	// Capabilities are what root inside keeps. Other users have none.
	Capabilities capability.Set
	Root         Root
	// Processes bounds processes and threads without a control group; 0 does not. It
	// bounds each user inside, so it is for sandboxes that have one.
	Processes uint64
	// HostNetwork: the sandbox is in the network namespace of the host. It reaches what the
	// host reaches, but for abstract Unix sockets, which need Landlock ABI 6 to be closed.
	HostNetwork bool
	// NoSetID: no file can be given set-user-ID or set-group-ID bits, because some belong
	// to the host.
	NoSetID bool
	// CallersGroup: the sandbox's processes are in the process group of the caller, which
	// a signal to "my group" reaches whatever the pid namespace.
	CallersGroup bool
	// Link: the sandbox has a link to a network service outside. See launch.Order.
	Link bool
	// Watch: a listener outside is told of what is executed. See plan.Watch.
	Watch    bool
	Cgroup   string   // the layout of control groups, for the policy
	Degraded []string // what the host could not give, for the policy
}

// Root is what the file system inside is made of.
type Root interface {
	// build adds the steps from the empty stage to all that is not in /proc, /dev or /sys.
	build(*SetUp, Config)
	// finish adds the steps that enter the root and give the machine a name of its own.
	finish(*SetUp, Config)
}

// SetUp is a plan and the policy that it amounts to: both are made in one pass, so that
// what is shown is what is done.
type SetUp struct {
	Steps   []plan.Step
	Trees   []launch.Tree // that the plan attaches, in this order
	policy  berm.Policy
	seccomp func() berm.Seccomp
	pinned  map[string]bool // see Host.pin
}

// Policy is what the plan amounts to.
func (s *SetUp) Policy() berm.Policy {
	p := s.policy
	p.Seccomp = s.seccomp()
	return p
}

func (s *SetUp) add(step plan.Step) { s.Steps = append(s.Steps, step) }

// mount adds a mount below the new root and shows it in the policy.
func (s *SetUp) mount(target, fstype string, flags uint64, options string) {
	s.add(plan.Step{Op: plan.Mount, Target: stageRoot + target, Source: fstype, Flags: flags, Data: options})
	s.show(target, fstype, flags, options)
}

func (s *SetUp) show(target, what string, flags uint64, options string) {
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
	}{{unix.MS_RDONLY, "ro"}, {unix.MS_NOSUID, "nosuid"}, {unix.MS_NODEV, "nodev"}, {unix.MS_NOEXEC, "noexec"}, {unix.MS_NOATIME, "noatime"}} {
		if flags&f.flag != 0 {
			names = append(names, f.name)
		}
	}
	return strings.Join(names, ",")
}

// Plan makes the plan and the policy of a wall. It fails with Invalid when there is no
// such seccomp profile.
func Plan(c Config) (*SetUp, error) {
	s := &SetUp{policy: berm.Policy{
		Level:      berm.Namespace,
		Namespaces: []string{"user", "pid", "mount", "network", "ipc", "uts", "cgroup"},
		IDMap:      c.IDs.String(),
		IDBase:     c.IDs.Root(),
		Limits:     c.Limits,
		Network:    "none but loopback",
		Cgroup:     c.Cgroup,
		Degraded:   c.Degraded,
	}}
	s.add(plan.Step{Op: plan.Stage, Data: "mode=0755,size=1m"})
	c.Root.build(s, c)
	s.proc()
	s.dev(c)
	s.sys()
	s.add(plan.Step{Op: plan.Hostname, Data: c.Hostname})
	if c.HostNetwork {
		s.policy.Network = "the host's, without restriction"
		s.policy.Namespaces = slices.DeleteFunc(s.policy.Namespaces, func(n string) bool { return n == "network" })
	} else {
		s.add(plan.Step{Op: plan.Loopback})
	}
	if c.Link {
		s.policy.Network = "what the policy of the network service lets through"
		if c.IDs.Kind != launch.Leased {
			s.add(plan.Step{Op: plan.Link})
		}
	}
	c.Root.finish(s, c)
	for _, r := range rlimits {
		s.rlimit(r.resource, r.name, r.soft, r.hard)
	}
	if c.Processes > 0 {
		s.rlimit(unix.RLIMIT_NPROC, "processes", c.Processes, c.Processes)
	}
	return s, s.rights(c)
}

func (s *SetUp) rlimit(resource int, name string, soft, hard uint64) {
	s.add(plan.Step{Op: plan.Rlimit, FD: resource, Flags: soft, Target: strconv.FormatUint(hard, 10), Data: name})
	text := amount
	if resource == unix.RLIMIT_NOFILE || resource == unix.RLIMIT_NPROC { // they do not count bytes
		text = func(n uint64) string { return strconv.FormatUint(n, 10) }
	}
	s.policy.Rlimits = append(s.policy.Rlimits, fmt.Sprintf("%s: %s, at most %s", name, text(soft), text(hard)))
}

// place attaches the next tree to a new directory of the stage.
func (s *SetUp) place(name string, tree launch.Tree) {
	s.add(plan.Step{Op: plan.Mkdir, Target: name, Flags: 0o755})
	s.attach(name, tree)
}

func (s *SetUp) attach(target string, tree launch.Tree) {
	s.add(plan.Step{Op: plan.Move, Target: target, FD: len(s.Trees)})
	s.Trees = append(s.Trees, tree)
}

// proc mounts a process table of the sandbox's own and closes what is the host's.
func (s *SetUp) proc() {
	s.mount("/proc", "proc", hidden, "")
	for _, path := range readOnly {
		s.add(plan.Step{Op: plan.ReadOnly, Target: stageRoot + path})
	}
	for _, path := range masked {
		s.add(plan.Step{Op: plan.Mask, Target: stageRoot + path})
	}
	s.policy.ReadOnly, s.policy.Masked = readOnly, append(s.policy.Masked, masked...)
	s.add(plan.Step{Op: plan.File, Target: stageBoot, Flags: 0o444, Data: berm.NewUUID() + "\n"})
	s.add(plan.Step{Op: plan.Bind, Source: stageBoot, Target: stageRoot + "/proc/sys/kernel/random/boot_id", Flags: unix.MS_RDONLY | hidden})
	s.show("/proc/sys/kernel/random/boot_id", "file", unix.MS_RDONLY|hidden, "own value")
}

// dev makes the few devices that programs expect.
func (s *SetUp) dev(c Config) {
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
	if c.IDs.HasGroup(5) {
		options += ",gid=5" // group tty of every distribution
	}
	s.mount("/dev/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, options)
	s.add(plan.Step{Op: plan.Mkdir, Target: stageRoot + "/dev/shm", Flags: 0o1777})
	s.mount("/dev/shm", "tmpfs", hidden, fmt.Sprintf("mode=1777,size=%d", SharedMemory(c.Limits)))
}

// SharedMemory is the size of /dev/shm. It counts as memory of the sandbox.
func SharedMemory(l berm.Limits) int64 {
	if l.Memory > 0 {
		return max(l.Memory/2, mebi)
	}
	return 64 * mebi
}

// sys shows the processors and nothing else: sysfs tells of the host's hardware.
func (s *SetUp) sys() {
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

// Identity is what tells one machine from another, by the names of files in /etc.
func Identity(hostname string, linked bool) [][2]string {
	nameserver := "127.0.0.1"
	if linked {
		nameserver = netip.AddrFrom4(link.Default.Gateway).String()
	}
	id := make([]byte, 16)
	rand.Read(id)
	return [][2]string{
		{"hostname", hostname + "\n"},
		{"hosts", "127.0.0.1\tlocalhost\n127.0.1.1\t" + hostname + "\n::1\tlocalhost ip6-localhost ip6-loopback\n"},
		{"resolv.conf", "nameserver " + nameserver + "\noptions attempts:1 timeout:5\n"},
		{"machine-id", hex.EncodeToString(id) + "\n"},
	}
}

// rights gives away what the sandbox must not have. The filter comes before the
// capabilities go, because a sandbox with set-uid programs has no no_new_privs, which
// is the other way to be allowed to load it.
func (s *SetUp) rights(c Config) error {
	if err := s.landlock(c); err != nil {
		return err
	}
	s.policy.Capabilities = c.Capabilities.Names()
	s.add(plan.Step{Op: plan.Bounding, Flags: uint64(c.Capabilities)})
	if s.policy.NoNewPrivs = !c.Setuid; s.policy.NoNewPrivs {
		s.add(plan.Step{Op: plan.NoNewPrivs})
	}
	f, err := filterOf(c.Profile, c.NoSetID, c.CallersGroup)
	if err != nil {
		return err
	}
	s.seccomp = f.describe
	if c.Watch {
		s.add(plan.Step{Op: plan.Watch, Data: notify.Filter(), Flags: notify.Flags})
	}
	s.add(plan.Step{Op: plan.Seccomp, Data: f.program})
	s.add(plan.Step{Op: plan.Capabilities, Flags: uint64(c.Capabilities)})
	if c.CallersGroup && holdsSignals() {
		// After the capabilities, which the threads of init drop by signalling each other.
		// Every rule set forbids to move files between directories unless it allows it
		// (LANDLOCK_ACCESS_FS_REFER in Documentation/userspace-api/landlock.rst).
		s.add(plan.Step{Op: plan.Landlock, FD: unix.LANDLOCK_SCOPE_SIGNAL, Flags: unix.LANDLOCK_ACCESS_FS_REFER})
		s.policy.Landlock += ", no signals to processes outside"
	}
	return nil
}

// holdsSignals says whether Landlock can keep signals inside; where not, the filter does.
func holdsSignals() bool { return landlock.HoldsSignals(landlock.ABI()) }

// filter is an assembled seccomp profile.
type filter struct {
	program  string              // of struct sock_filter
	describe func() berm.Seccomp // shared: not to be changed
}

// filters has those that were used, by profile: to assemble one takes
// as long as the rest of a plan.
var filters sync.Map

func filterOf(name string, noSetID, callersGroup bool) (filter, error) {
	type key struct {
		name                  string
		noSetID, callersGroup bool
	}
	k := key{name, noSetID, callersGroup}
	if f, ok := filters.Load(k); ok {
		return f.(filter), nil
	}
	profile, err := seccomp.Lookup(name)
	if err != nil {
		return filter{}, err
	}
	if noSetID {
		profile = profile.WithoutSetID()
	}
	if callersGroup {
		profile = profile.WithoutGroup(!holdsSignals())
	}
	code, err := profile.Assemble("")
	if err != nil {
		return filter{}, err
	}
	program := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(code))), len(code)*int(unsafe.Sizeof(code[0])))
	f := filter{string(program), sync.OnceValue(profile.Describe)}
	filters.Store(k, f)
	return f, nil
}

// landlock closes device nodes a second time, behind capabilities and mount flags.
func (s *SetUp) landlock(c Config) error {
	abi := landlock.ABI()
	if c.HostNetwork && abi < 6 {
		return berm.Errorf(berm.Unsupported, "the host's network would open the sockets of X11, D-Bus and others: Landlock ABI %d cannot close them", abi).
			WithHint("use Linux 6.12 or newer (ABI 6)")
	}
	if abi < 2 {
		s.policy.Landlock = fmt.Sprintf("off: ABI %d; the first that lets files move between directories is 2 (Linux 5.19)", abi)
		return nil
	}
	step := plan.Step{Op: plan.Landlock, Flags: unix.LANDLOCK_ACCESS_FS_MAKE_CHAR | unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK | unix.LANDLOCK_ACCESS_FS_REFER}
	s.policy.Landlock = fmt.Sprintf("ABI %d: no making of device nodes, no change of mounts, no tracing of processes outside", abi)
	if abi >= 5 { // Linux 6.10
		step.Flags |= unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
		step.Source = "/dev/pts " + strings.Join(s.policy.Devices, " ")
		s.policy.Landlock += ", no ioctl on other devices than those listed"
	}
	if c.HostNetwork {
		step.FD = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET
		s.policy.Landlock += ", no abstract sockets outside"
	}
	s.add(step)
	return nil
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
