// Package local runs one command in a sandbox of its own, without a server: the caller is
// the sandbox's monitor, and the sandbox ends with the command.
package local

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/namespace/launch"
	"github.com/berm-sandbox/berm/internal/driver/namespace/plan"
	"github.com/berm-sandbox/berm/internal/driver/namespace/wall"
	"github.com/berm-sandbox/berm/internal/kernel/capability"
	"github.com/berm-sandbox/berm/internal/local/preset"
	"github.com/berm-sandbox/berm/internal/local/session"
	"github.com/berm-sandbox/berm/internal/monitor"
)

// hostname is the name of the machine inside.
const hostname = "berm"

// defaultPIDs bounds processes where nothing else does: a loop of forks must not take the
// user's own ones away.
const defaultPIDs = 8192

// LeastMemory is the least limit of memory in bytes: below, a command is ended as it starts.
const LeastMemory = 8 << 20

// LeastPIDs is the least limit of processes: init has five threads, and a command that
// cannot start says less than an error.
const LeastPIDs = 8

// Request is one command and what it may do.
type Request struct {
	ID      berm.SandboxID
	Argv    []string // at least one
	Told    []string // Argv as it is kept and shown: without secrets, as far as they are known
	Env     []string // the whole environment inside
	Grant   preset.Grant
	Place   preset.Place
	Streams [3]*os.File
	// Template is what the root file system is made of; nil shows the host's programs.
	Template *berm.Template
	// Session returns what a copy-on-write workspace writes to, locked by the caller; nil
	// for the other workspaces. It is called while the sandbox is made.
	Session func() (*session.Session, error)
	// Network gives the sandbox a link, whose other end Link gets.
	Network bool
	Link    func(*os.File)
	// Covered are files that lie inside in the place of the host's own, or where there is
	// none.
	Covered []Covered
	// Signals are passed on to the command.
	Signals <-chan os.Signal
	// Started is called when the command is about to run; nil is nothing.
	Started func()
	// Narrowed says that a limit is that of the project's own file.
	Narrowed bool

	processes *processes // what runs inside is recorded by; nil: it is not
}

// Covered is a file at a path inside, and where it lies outside.
type Covered struct{ Path, Source string }

// Outcome is how a command ended.
type Outcome struct {
	ExitCode int            // as a shell has it: 128 and the number after a signal, 124 after the timeout
	Signal   syscall.Signal // 0: it exited
	Reason   berm.Reason
	Detail   string        // what a person should know, or ""
	Duration time.Duration // from the request to the end of the last process
	Started  bool          // false: there was nothing to execute
}

// timedOut is the exit code after the timeout, that of timeout(1).
const timedOut = 124

// Policy is what Run holds the command of a request to.
func Policy(r *Request) (berm.Policy, error) {
	ids := own()
	if mayLease() {
		leased, claims, err := lease() // a run may get another range
		if err != nil {
			return berm.Policy{}, err
		}
		defer claims.Close()
		ids = leased
	}
	var upper launch.Upper
	if r.Grant.Workspace == preset.WorkspaceCopyOnWrite {
		upper.Directory = "a session"
	}
	w, err := r.plan(ids, upper)
	if err != nil {
		return berm.Policy{}, err
	}
	return w.Policy(), nil
}

// Run runs a command at the namespace level and returns when every process of it has
// ended. Cancelling ctx ends them. Kinds: Invalid, Denied (the workspace or a stream),
// Unsupported (the host cannot make the sandbox, or cannot hold it to a limit; nothing is
// weakened), Internal. After an error the command did not run.
func Run(ctx context.Context, r *Request) (Outcome, error) {
	began := time.Now()
	monitor.Trace("run")
	if len(r.Argv) == 0 || r.Argv[0] == "" {
		return Outcome{}, berm.Errorf(berm.Invalid, "there is no command to run")
	}
	if err := errors.Join(checkPlace(r.Place), checkStreams(r.Streams)); err != nil {
		return Outcome{}, err
	}
	if err := keepDescriptors(); err != nil {
		return Outcome{}, err
	}
	ids := own()
	if mayLease() {
		leased, claims, err := lease()
		if err != nil {
			return Outcome{}, err
		}
		defer claims.Close()
		ids = leased
	}
	var unready error // what the host had nothing to do with
	order := launch.Order{ID: r.ID, IDs: ids, Limits: limits(r.Grant.Limits, ids), HostNetwork: r.Grant.Network == preset.NetworkHost, Link: r.Network}
	command := launch.Command{
		Argv: r.Argv, Env: r.Env, Streams: r.Streams, Timeout: r.Grant.Timeout, Signals: r.Signals, Started: r.Started, Link: r.Link,
	}
	if r.processes != nil {
		command.Watch = r.processes.listen
		defer r.processes.finish()
	}
	ended, err := launch.Run(ctx, order, command, func(o *launch.Order) error {
		unready = r.complete(o)
		return unready
	})
	switch {
	case unready != nil:
		return Outcome{}, unready
	case err != nil && r.Narrowed && errors.As(err, new(*launch.Unlimited)):
		return Outcome{}, berm.Errorf(berm.KindOf(err), "the limits of %s cannot be held: %w", filepath.Join(r.Place.Workspace, preset.ProjectFile), err)
	case err != nil:
		return Outcome{}, blocked(err, r.Place.Workspace)
	}
	o := outcome(ended, r.Grant)
	o.Duration = time.Since(began)
	return o, nil
}

// keepDescriptors keeps what the caller inherited by accident out of the sandbox and of the
// network service.
func keepDescriptors() error {
	if err := unix.CloseRange(3, 1<<31-1, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return berm.Errorf(berm.Internal, "keep descriptors out of the sandbox: %w", err)
	}
	return nil
}

// complete adds to an order what init is to do.
func (r *Request) complete(o *launch.Order) error {
	if r.Session != nil {
		s, err := r.Session()
		if err != nil {
			return err
		}
		o.Upper.Directory = s.Dir()
	}
	w, err := r.plan(o.IDs, o.Upper)
	if err != nil {
		return err
	}
	o.Plan, o.Trees = plan.Encode(w.Steps), w.Trees
	return nil
}

// limits are those that a control group has to keep. An ordinary user's processes are
// counted by the kernel in each user namespace apart (RLIMIT_NPROC, since Linux 5.14), so
// that they need none.
func limits(l berm.Limits, ids launch.IDs) berm.Limits {
	l = berm.Limits{Memory: l.Memory, CPU: l.CPU, PIDs: l.PIDs}
	if ids.Kind == launch.Single {
		l.PIDs = 0
	} else if l.PIDs == 0 {
		l.PIDs = defaultPIDs
	}
	return l
}

// plan makes the plan of the wall around the command.
func (r *Request) plan(ids launch.IDs, upper launch.Upper) (*wall.SetUp, error) {
	root, err := view(r, upper)
	if err != nil {
		return nil, err
	}
	l := r.Grant.Limits
	if l.PIDs == 0 {
		l.PIDs = defaultPIDs
	}
	c := wall.Config{IDs: ids, Limits: l, Profile: r.Grant.Profile, Hostname: hostname, Root: root, Cgroup: "none", HostNetwork: r.Grant.Network == preset.NetworkHost, NoSetID: true, CallersGroup: true, Link: r.Network, Watch: r.processes != nil}
	if ids.Kind == launch.Leased {
		c.Capabilities = capability.Inside
		c.Cgroup = "one for the command"
	} else {
		c.Processes = uint64(l.PIDs)
		if c.Limits.Memory > 0 || c.Limits.CPU > 0 {
			c.Cgroup = "one for the command"
		}
	}
	return wall.Plan(c)
}

// outcome judges how the command ended.
func outcome(e launch.Ended, g preset.Grant) Outcome {
	o := Outcome{Reason: e.Reason, Detail: e.Detail, Started: e.Started}
	switch {
	case e.Reason == berm.ReasonTimeout:
		o.ExitCode, o.Detail = timedOut, "the command was ended after "+g.Timeout.String()
	case e.Status.Signaled():
		o.Signal, o.ExitCode = e.Status.Signal(), 128+int(e.Status.Signal())
	default:
		o.ExitCode = e.Status.ExitStatus()
	}
	if e.OOMKills > 0 && g.Limits.Memory > 0 && o.Detail == "" {
		o.Detail = "processes were ended because they used more memory than allowed"
	}
	return o
}

// Shell is the program for an interactive run: the user's own if the sandbox has it.
func Shell(environ []string) string {
	for _, e := range environ {
		if shell, ok := strings.CutPrefix(e, "SHELL="); ok && strings.HasPrefix(shell, "/") {
			return shell
		}
	}
	return "/bin/sh"
}
