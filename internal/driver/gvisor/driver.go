// Package gvisor is the gvisor level: the sandbox's programs run on gVisor's kernel, a
// process of its own that asks the host's for little, behind namespaces and a filter.
//
// Monitor, disk, control group, agent and handle are those of the namespace level, whose
// driver makes the sandbox. What differs is the wall: runsc, and what it is told.
package gvisor

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/namespace"
	"github.com/berm-sandbox/berm/internal/driver/namespace/launch"
	"github.com/berm-sandbox/berm/internal/driver/namespace/plan"
	"github.com/berm-sandbox/berm/internal/driver/namespace/wall"
	"github.com/berm-sandbox/berm/internal/embedded"
	"github.com/berm-sandbox/berm/internal/kernel/capability"
	"github.com/berm-sandbox/berm/internal/kernel/seccomp"
)

// Config says what a driver uses.
type Config struct {
	// Runsc is the path of the executable; "" looks beside this program and in PATH.
	Runsc string
	// Platform is how gVisor gets hold of system calls: systrap, ptrace or kvm. "" is the
	// first of systrap and ptrace that works here.
	Platform string
	// Watch has gVisor tell of the processes inside: see berm.First.
	Watch bool
}

// Driver makes sandboxes of the gvisor level. It is a berm.Driver.
type Driver struct {
	*namespace.Driver // makes, finds and removes them
	config            Config
	probed            func() found
	init, agent       string // paths of the executables that run inside
	turns             *semaphore.Weighted
}

// atOnce is how many sandboxes may start at a time; others wait in the order in which they came. A
// start is processor time above all: more at once are not there sooner, and each has only so long
// until its agent must serve.
var atOnce = max(4, 2*int64(runtime.NumCPU()))

var _ berm.Driver = (*Driver)(nil)

// New returns a driver whose sandboxes are made by host, which the caller closes. Kinds:
// Unsupported (no helpers in this build), Internal.
func New(host *namespace.Driver, config Config) (*Driver, error) {
	d := &Driver{Driver: host, config: config, turns: semaphore.NewWeighted(atOnce)}
	d.probed = once(config)
	for name, path := range map[string]*string{embedded.Init: &d.init, embedded.Guest: &d.agent} {
		var err error
		if *path, err = host.Program(name); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// Level is berm.GVisor.
func (d *Driver) Level() berm.Level { return berm.GVisor }

// Create makes a sandbox and returns when its agent answers.
func (d *Driver) Create(ctx context.Context, spec berm.Spec) (berm.Sandbox, error) {
	if spec.Level != berm.GVisor && spec.Level != berm.Auto {
		return nil, berm.Errorf(berm.Unsupported, "this driver makes no sandboxes of level %q", spec.Level)
	}
	f := d.probed()
	if f.err != nil {
		return nil, f.err
	}
	if _, err := seccomp.Lookup(spec.Profile); err != nil {
		return nil, err
	}
	if spec.Profile != "" && spec.Profile != seccomp.Default {
		return nil, berm.Errorf(berm.Unsupported, "level gvisor has no seccomp profile %q: system calls inside are gVisor's", spec.Profile).
			WithHint("leave the profile out, or ask for level namespace")
	}
	if err := d.turn(ctx); err != nil {
		return nil, err
	}
	defer d.turns.Release(1)
	return d.Make(ctx, spec, func(spec berm.Spec, upper launch.Upper) (launch.Order, error) { return d.wall(f, spec, upper) })
}

// turn waits until one more sandbox may start.
func (d *Driver) turn(ctx context.Context) error {
	if err := d.turns.Acquire(ctx, 1); err != nil {
		return berm.Errorf(berm.Unavailable, "%d sandboxes are being started, and others were to come first: %w", atOnce, err).
			WithHint("a pool (--pool) has some started before they are asked for")
	}
	return nil
}

// counter is where a control group of gVisor's own is, until it is covered.
const counter = "/dev/processes"

// setUp are capabilities that init has until its plan is carried out.
const setUp = capability.Inside | 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_SETPCAP

// wall is what init, runsc and the monitor are told, and the policy that it amounts to.
func (d *Driver) wall(f found, spec berm.Spec, upper launch.Upper) (launch.Order, error) {
	order := launch.Order{Limits: spec.Limits, Watch: d.config.Watch}
	mapped := d.IDs(spec)
	if mapped.Kind != launch.Leased && spec.Memory {
		return order, berm.Errorf(berm.Unsupported, "the sandboxes of an ordinary user do not go on from memory").WithHint("run berm serve as root, or begin with the files alone")
	}
	made := d.manifest(f, spec)
	var from manifest
	if spec.Memory {
		var err error
		if from, err = d.saved(spec, made); err != nil {
			return order, err
		}
		made.Init, made.Agent = from.Init, from.Agent
	}
	init, agent := d.program(made.Init, embedded.Init), d.program(made.Agent, embedded.Guest)
	for _, layer := range spec.Layers {
		order.Trees = append(order.Trees, launch.Tree{Path: layer.Path})
	}
	if upper != (launch.Upper{}) { // else it is made of memory
		order.Trees = append(order.Trees, launch.Tree{Upper: true})
	}

	var steps []plan.Step
	if spec.Limits.PIDs > 0 {
		// gVisor's kernel fails badly when the host's refuses it a thread. So it counts
		// processes itself, and the host's limit is above all that it could need for them.
		if order.Limits.PIDs = threads(spec.Limits.PIDs); d.Missing()["pids"] != "" {
			order.Limits.PIDs = 0 // the host's limit only keeps what carries the sandbox from doing worse
		}
		group := counter + "/s"
		steps = append(steps,
			plan.Step{Op: plan.Mkdir, Target: counter, Flags: 0o700},
			plan.Step{Op: plan.Mount, Target: counter, Source: "cgroup", Data: "pids"},
			plan.Step{Op: plan.Mkdir, Target: group, Flags: 0o700},
			plan.Step{Op: plan.File, Target: group + "/pids.max", Data: strconv.FormatInt(spec.Limits.PIDs, 10)},
			plan.Step{Op: plan.File, Target: group + "/cgroup.procs", Data: "1"},
			plan.Step{Op: plan.Mount, Target: counter, Source: "tmpfs", Flags: unix.MS_RDONLY, Data: "mode=0555"},
		)
	}
	identity := identity(spec)
	steps = append(steps, identity...)
	steps = append(steps,
		plan.Step{Op: plan.Bind, Source: bootID, Target: "/proc/sys/kernel/random/boot_id", Flags: unix.MS_RDONLY},
		plan.Step{Op: plan.Bounding, Flags: uint64(capability.Inside)},
		plan.Step{Op: plan.Capabilities, Flags: uint64(capability.Inside)})
	order.Plan = plan.Encode(steps)

	ids := []specs.LinuxIDMapping{{ContainerID: 0, HostID: uint32(mapped.Root()), Size: berm.IDsPerSandbox}}
	if mapped.Kind != launch.Leased {
		ids[0].HostID = 0 // runsc is in a user namespace with these alone
	}
	rights := setUp.Names()
	set := specs.Spec{
		Version:  specs.Version,
		Hostname: spec.Hostname,
		Root:     &specs.Root{Path: launch.StageRoot},
		Process: &specs.Process{
			Args: []string{launch.Programs + "/" + filepath.Base(init)}, Cwd: "/",
			Env:             []string{plan.AgentVariable + "=" + launch.Programs + "/" + filepath.Base(agent), "GOGC=off", "GOMAXPROCS=1"},
			Capabilities:    &specs.LinuxCapabilities{Bounding: rights, Effective: rights, Permitted: rights},
			NoNewPrivileges: !spec.Setuid,
			Rlimits: []specs.POSIXRlimit{
				{Type: "RLIMIT_CORE"},
				{Type: "RLIMIT_NOFILE", Soft: 65536, Hard: 1 << 20},
				{Type: "RLIMIT_STACK", Soft: 8 << 20, Hard: unix.RLIM_INFINITY},
			},
		},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "nodev", "noexec"}},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "nodev", "noexec", "ro"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=0755"}},
			{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "nodev", "noexec", "mode=1777", "size=" + strconv.FormatInt(wall.SharedMemory(spec.Limits), 10)}},
			{Destination: launch.Programs, Type: "bind", Source: launch.StagePrograms, Options: []string{"rbind", "ro", "nosuid", "nodev"}},
			// gVisor puts a file system in memory on an empty /tmp unless it is told something of
			// it. What it does not know, it leaves alone.
			{Destination: "/tmp", Type: "none-of-its-own", Source: "none"},
		},
		Linux: &specs.Linux{UIDMappings: ids, GIDMappings: ids},
	}
	for _, kind := range []specs.LinuxNamespaceType{specs.UserNamespace, specs.PIDNamespace, specs.NetworkNamespace, specs.IPCNamespace, specs.UTSNamespace, specs.MountNamespace} {
		set.Linux.Namespaces = append(set.Linux.Namespaces, specs.LinuxNamespace{Type: kind})
		if kind == specs.NetworkNamespace && spec.Link {
			set.Linux.Namespaces[len(set.Linux.Namespaces)-1].Path = launch.StageNetwork
		}
	}
	raw, err := json.Marshal(set)
	if err != nil {
		return order, berm.Errorf(berm.Internal, "spec of runsc: %w", err)
	}
	order.GVisor = &launch.GVisor{Runsc: f.runsc, Flags: f.flags(spec.Link), Init: init, Agent: agent, Spec: raw}
	if order.GVisor.Manifest, err = json.Marshal(made); err != nil {
		return order, berm.Errorf(berm.Internal, "manifest: %w", err)
	}
	if spec.Memory {
		order.GVisor.From = &launch.Memory{Directory: filepath.Join(spec.From, launch.SavedMemory)}
		if from.ID != spec.ID { // else it is the same one that goes on
			order.GVisor.From.Renew = plan.Encode(identity)
		}
	}
	if spec.Setuid {
		order.GVisor.Flags = append(order.GVisor.Flags, "--allow-suid")
	}
	order.Policy, err = json.Marshal(policy(f, spec, set, upper, mapped, d.Layout(), d.Degraded()))
	if err != nil {
		return order, berm.Errorf(berm.Internal, "policy: %w", err)
	}
	return order, nil
}

// threads is how many of the host's processes and threads gVisor may need for so many
// inside: for each a process that holds its memory, with as many threads as there are
// processors and a few, and gVisor's own.
func threads(inside int64) int64 { return 512 + inside*int64(runtime.NumCPU()+4) }

// policy shows what a sandbox is held to.
func policy(f found, spec berm.Spec, set specs.Spec, upper launch.Upper, ids launch.IDs, layout string, degraded []string) berm.Policy {
	writes := "on the host's disk, not limited"
	switch {
	case upper.Image != "":
		writes = fmt.Sprintf("at most %d MiB on disk", spec.Limits.Disk>>20)
	case upper == launch.Upper{}:
		writes = fmt.Sprintf("at most %d MiB in memory", spec.Limits.Disk>>20)
	}
	p := berm.Policy{
		Level:        berm.GVisor,
		IDBase:       ids.Root(),
		IDMap:        ids.String(),
		Capabilities: capability.Inside.Names(),
		Seccomp: berm.Seccomp{
			Profile: "gVisor's", Default: "the kernel inside answers all system calls; gVisor " + Version + " on " + f.platform,
			Rules: []string{"the host's kernel takes those that runsc itself may make, and ends it for others"},
		},
		NoNewPrivs: !spec.Setuid,
		Landlock:   "none: no file of the host can be named inside",
		Mounts:     []string{fmt.Sprintf("/ overlay (%d read-only layers; writes: %s)", len(spec.Layers), writes)},
		Devices:    []string{"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/fuse", "/dev/net/tun"},
		Cgroup:     layout,
		Limits:     spec.Limits,
		Network:    "none but loopback",
		Degraded:   slices.Concat(degraded, spec.Degraded),
	}
	if spec.Link {
		p.Network = "what the policy of the network service lets through"
	}
	for _, n := range set.Linux.Namespaces {
		p.Namespaces = append(p.Namespaces, string(n.Type))
	}
	for _, m := range set.Mounts {
		if m.Destination != "/tmp" {
			p.Mounts = append(p.Mounts, fmt.Sprintf("%s %s (%s)", m.Destination, m.Type, joined(m.Options)))
		}
	}
	for _, r := range set.Process.Rlimits {
		p.Rlimits = append(p.Rlimits, fmt.Sprintf("%s: %d, at most %d", r.Type, r.Soft, r.Hard))
	}
	return p
}
