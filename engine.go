package berm

import (
	"context"
	"net"
	"os"
	"time"
)

// Engine is a place that runs sandboxes: this machine, or a cluster. It chooses
// the driver for a spec's level and leases what the driver needs. The methods
// are safe for concurrent use.
type Engine interface {
	// Create makes the sandbox of spec and returns when its guest agent answers.
	// When it fails nothing of the sandbox is left. Kinds: Invalid, AlreadyExists,
	// Unsupported (the level or a limit cannot be had here), Exhausted, Internal.
	Create(ctx context.Context, spec Spec) (Sandbox, error)

	// Open finds a living sandbox again, after a restart. NotFound when it is gone.
	Open(ctx context.Context, id SandboxID) (Sandbox, error)

	// List names every sandbox that the engine holds, also those whose creator died.
	List(ctx context.Context) ([]SandboxID, error)

	// Remove takes away all that is left of a sandbox that cannot be opened, and
	// returns how it ended if that was recorded. Removing nothing is no error.
	Remove(ctx context.Context, id SandboxID) (Exit, error)

	// Probe says what this place can isolate.
	Probe(ctx context.Context) []Probe
}

// Driver makes sandboxes of one isolation level on one machine. It has the
// contract of Engine for specs of its level; ids in specs are leased by the
// caller.
type Driver interface {
	Level() Level
	Probe(ctx context.Context) Probe
	Create(ctx context.Context, spec Spec) (Sandbox, error)
	Open(ctx context.Context, id SandboxID) (Sandbox, error)
	List(ctx context.Context) ([]SandboxID, error)
	Remove(ctx context.Context, id SandboxID) (Exit, error)
}

// Sandbox is a handle on one living sandbox. The sandbox does not depend on the
// handle: it lives on when the handle is closed or its process dies. The methods
// are safe for concurrent use; after death they fail with NotFound.
type Sandbox interface {
	ID() SandboxID

	// Dial opens a byte stream to a TCP port inside, one connection per call; ports
	// bound to 127.0.0.1 inside are reachable. AgentPort is the guest agent. Kinds:
	// Unavailable (nothing listens there), NotFound (the sandbox is dead), Conflict
	// (it is paused).
	Dial(ctx context.Context, port uint16) (net.Conn, error)

	// Pause stops every process where it is and keeps all state in memory.
	// Conflict when it is paused already.
	Pause(ctx context.Context) error

	// Resume lets a paused sandbox go on, with the deadline given. Conflict when it
	// runs already.
	Resume(ctx context.Context, deadline time.Time) error

	// SetDeadline moves the deadline; zero removes it. The sandbox's own monitor
	// keeps it, also when nobody else is alive.
	SetDeadline(ctx context.Context, deadline time.Time) error

	// Status reports state and deadline as they are now.
	Status(ctx context.Context) (Status, error)

	// Usage measures what the sandbox uses now.
	Usage(ctx context.Context) (Usage, error)

	// Policy is the whole effective policy, as `berm inspect` prints it.
	Policy(ctx context.Context) (Policy, error)

	// Link returns the other end of the sandbox's link: a descriptor to read the sandbox's
	// IP packets from and to write packets for it to, for the caller to close. One at a time
	// may read it. Unsupported when the spec asked for none. See package link.
	Link(ctx context.Context) (*os.File, error)

	// Keep has the sandbox's monitor keep a descriptor as long as the sandbox lives, in the
	// place of the one before, and Kept returns it, nil for none: what whoever has the link
	// needs again after it has died, and nobody is to write to a disk. The caller closes its
	// own. Unsupported when the spec asked for no link.
	Keep(ctx context.Context, file *os.File) error
	Kept(ctx context.Context) (*os.File, error)

	// Writable gives a look at what the sandbox wrote. Unsupported when its level, or its
	// monitor, has none to give. One look at a time: a later one ends an earlier one.
	Writable(ctx context.Context) (Writable, error)

	// Snapshot saves the sandbox into dir, an existing empty directory that Spec.From takes, and
	// returns when it is on disk. A running sandbox stands still meanwhile for as short as its
	// level can, and goes on; a paused one stays paused. memory demands its processes too, beside
	// its files. When it fails, what lies in dir is of no use. Conflict during another snapshot or
	// a transition; Unsupported (memory at a level whose probe has none, or a disk that cannot be
	// saved here); Unavailable (no room).
	Snapshot(ctx context.Context, dir string, memory bool) (Saved, error)

	// Version names what is on the sandbox's disk: two equal ones say that nothing was written in
	// between. Unsupported where that cannot be told.
	Version(ctx context.Context) (string, error)

	// Events streams every later change of status, the last one with Exit set when
	// the sandbox dies; then the channel is closed. It is also closed when ctx ends
	// or the monitor is lost (the last status then has no Exit).
	Events(ctx context.Context) (<-chan Status, error)

	// Kill ends every process of the sandbox and returns when all processes,
	// mounts, namespaces, cgroups, devices and files of it are gone, within 2 s.
	// Killing a dead sandbox is no error. The Exit tells why it ended: an earlier
	// death keeps its reason.
	Kill(ctx context.Context, reason Reason) (Exit, error)

	// Close lets the handle go and leaves the sandbox alive.
	Close() error
}

// Writable is a look at the writable layer of one sandbox. It holds nothing of the sandbox but
// what Now and Last return, for the caller to close.
type Writable interface {
	// Now opens the layer as it is. Whatever runs inside may write to it meanwhile.
	Now(ctx context.Context) (*Written, error)

	// Last waits until no process of the sandbox is left and opens the layer then. The
	// sandbox is taken away when the look is closed, or a second later. NotFound when it was
	// taken away before.
	Last(ctx context.Context) (*Written, error)

	// Close ends the look.
	Close() error
}

// Written are open directories: the upper one of an overlay mount (a character device 0:0
// stands for a deleted name, user.overlay.opaque hides what is below), and the layers below
// it, the lowest first. Hostile code made what is in them.
type Written struct {
	Upper  *os.File
	Layers []*os.File
}

// Close closes the directories.
func (w *Written) Close() {
	for _, f := range append(w.Layers, w.Upper) {
		_ = f.Close()
	}
}

// Status is what a sandbox's monitor knows of it.
type Status struct {
	State      State      `json:"state"`
	Deadline   time.Time  `json:"deadline,omitzero"`
	OnDeadline OnDeadline `json:"onDeadline,omitempty"`
	Exit       *Exit      `json:"exit,omitempty"` // set once State is Killed
	// Agent counts how often the guest agent was started; more than 1 means that it
	// was lost and started again.
	Agent int `json:"agent"`
	// First is the first process of a sandbox whose processes are the host's; nil for others.
	First *First `json:"first,omitempty"`
}

// First is the process that all others of a sandbox descend from.
type First struct {
	PID       int    `json:"pid"`       // as its monitor sees it
	Namespace uint32 `json:"namespace"` // inode of its pid namespace
	// Watch is the socket on which the monitor tells what is executed inside; "" is none.
	Watch string `json:"watch,omitempty"`
	// Stream says that Watch hands over the events of the kernel that is inside. Its processes are
	// none of this host's, and the rest is not set then.
	Stream bool `json:"stream,omitempty"`
}

// Policy is what one sandbox is held to, in full: the answer to "what exactly may
// it do?".
type Policy struct {
	Level        Level    `json:"level"`
	Namespaces   []string `json:"namespaces"`
	IDMap        string   `json:"idMap"`  // such as "0-65535 inside are 1879048192-1879113727 on the host"
	IDBase       int      `json:"idBase"` // the user of the host that root inside is
	Capabilities []string `json:"capabilities"`
	Seccomp      Seccomp  `json:"seccomp"`
	NoNewPrivs   bool     `json:"noNewPrivileges"`
	Landlock     string   `json:"landlock"` // what it forbids, or why it is absent
	Mounts       []string `json:"mounts"`   // target, type and flags, in order
	Masked       []string `json:"masked"`   // paths under /proc and /sys that show nothing
	ReadOnly     []string `json:"readOnly"`
	Devices      []string `json:"devices"`
	Rlimits      []string `json:"rlimits"`
	Cgroup       string   `json:"cgroup"` // layout: v1, v2 or hybrid, and the controllers used
	Limits       Limits   `json:"limits"`
	Network      string   `json:"network"`
	Degraded     []string `json:"degraded,omitempty"` // what the host could not give, with the reason
}

// Seccomp is the system call policy of a sandbox.
type Seccomp struct {
	Profile string   `json:"profile"`
	Default string   `json:"default"` // what an unlisted call gets, such as "ENOSYS"
	Allowed []string `json:"allowed"`
	Rules   []string `json:"rules"` // calls that are allowed in part, with the condition
}
