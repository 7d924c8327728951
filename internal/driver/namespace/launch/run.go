package launch

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cleanup"
	"github.com/berm-sandbox/berm/internal/driver/namespace/plan"
	"github.com/berm-sandbox/berm/internal/driver/namespace/reexec"
	"github.com/berm-sandbox/berm/internal/kernel/cgroup"
	"github.com/berm-sandbox/berm/internal/monitor"
	"github.com/berm-sandbox/berm/internal/network/link"
)

// Command is what a sandbox without an agent is for.
type Command struct {
	Argv    []string // at least one
	Env     []string
	Streams [3]*os.File
	// Timeout ends the command; 0 is none.
	Timeout time.Duration
	// Signals are passed on to the command.
	Signals <-chan os.Signal
	// Link gets the other end of the sandbox's link, if the order has one. It is valid as
	// long as the sandbox lives.
	Link func(*os.File)
	// Watch gets the listener of the plan's Watch, if it has one, and has to answer on it; nil
	// with the reason when the kernel refused it.
	Watch func(listener *os.File, refused string)
	// Started is called once, when the command is executed; nil is nothing.
	Started func()
}

// Ended is how a command ended.
type Ended struct {
	Status unix.WaitStatus // of the command; init's own when Started is false
	Reason berm.Reason
	// Started is false when the command was never executed; Detail says why then, and the
	// exit status is 126 or 127.
	Started  bool
	Detail   string
	OOMKills int64 // processes that the kernel ended for memory
}

// Run makes the sandbox of order around one command, with this process as its monitor,
// and returns when every process of it has ended. The fields of order that are for the
// agent are not used. Plan, Trees and Upper are filled in by complete, which is called once
// init is on its way, so that neither waits for the other. Cancelling ctx ends the command.
// When it fails, nothing is left and the command did not run.
func Run(ctx context.Context, order Order, command Command, complete func(*Order) error) (_ Ended, err error) {
	// Init dies with the thread that started it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s := &Sandbox{order: order, init: -1, onAgent: func() {}, group: &cgroup.Group{}}
	cu := cleanup.Make(s.close)
	defer cu.Clean()
	if err := s.claimIDs(); err != nil {
		return Ended{}, err
	}
	var groups *cgroup.Manager
	if order.Limits != (berm.Limits{}) {
		if groups, err = s.makeGroup(runGroup(order.ID, time.Now())); err != nil {
			return Ended{}, &Unlimited{err}
		}
		cu.Add(s.removeGroup)
	}
	monitor.Trace("control group made")
	theirs, err := s.connect(false)
	if err != nil {
		return Ended{}, err
	}
	self, err := s.self()
	if err != nil {
		theirs.Close()
		return Ended{}, err
	}
	defer self.Close()
	err = s.enter("/proc/self/fd/"+strconv.Itoa(int(self.Fd())), append([]string{reexec.Name}, command.Argv...), &syscall.ProcAttr{
		Dir: "/",
		// The first two are for init's own runtime.
		Env:   append([]string{"GOGC=off", "GOMAXPROCS=1"}, command.Env...),
		Files: []uintptr{command.Streams[0].Fd(), command.Streams[1].Fd(), command.Streams[2].Fd(), theirs.Fd()},
		Sys:   &syscall.SysProcAttr{},
	})
	theirs.Close()
	if err != nil {
		return Ended{}, refused("start init in new namespaces", err)
	}
	runtime.KeepAlive(command.Streams)
	cu.Add(func() { s.Kill(); s.reap() })
	monitor.Trace("init started")
	if err := complete(&s.order); err != nil {
		return Ended{}, err
	}
	monitor.Trace("planned")
	if s.order.IDs.Kind == Leased && s.order.Upper.Directory != "" {
		d, err := s.order.Upper.open()
		if err != nil {
			return Ended{}, err
		}
		s.upper = d.root
	}
	trees, err := s.trees(nil)
	defer func() {
		for _, t := range trees {
			if t != s.upper {
				t.Close()
			}
		}
	}()
	if err != nil {
		return Ended{}, err
	}
	if order.IDs.Kind != Leased {
		if err := s.enterAsUser(); err != nil {
			return Ended{}, err
		}
	}
	if err := s.makeLink(link.Default); err != nil {
		return Ended{}, err
	}
	if s.link != nil {
		command.Link(s.link)
	}
	if err := s.send(plan.SetUp, s.order.Plan, trees); err != nil {
		return Ended{}, s.why(err)
	}
	monitor.Trace("plan sent")
	if groups != nil {
		go sweepGroups(groups)
	}

	stop := s.keep(ctx, command)
	ended := s.follow(command)
	status := s.reap()
	monitor.Trace("init reaped")
	ended.Reason = stop()
	if order.Limits.Memory > 0 {
		if u, err := s.group.Usage(); err == nil {
			ended.OOMKills = u.OOMKills
		}
	}
	cu.Release()
	s.removeGroup()
	s.close()
	if ended.Reason == "" && !ended.complete {
		if ended.OOMKills > 0 && status.Signaled() {
			ended.Reason, ended.Status, ended.Started = berm.ReasonOOM, status, true
			return ended.Ended, nil
		}
		if ended.Detail == "" {
			ended.Detail = "init ended: " + describe(status)
		}
		return Ended{}, reported(ended.Detail)
	}
	if ended.Reason == "" {
		ended.Reason = berm.ReasonExit
		if ended.OOMKills > 0 && ended.Status.Signaled() {
			ended.Reason = berm.ReasonOOM
		}
	} else if !ended.complete {
		ended.Status = status
	}
	return ended.Ended, nil
}

// Unlimited is the error of a limit that cannot be held here.
type Unlimited struct{ Err error }

func (u *Unlimited) Error() string { return u.Err.Error() }

// Unwrap returns why.
func (u *Unlimited) Unwrap() error { return u.Err }

// Refusal is the kernel's answer to who may not have namespaces, or has no rights in them.
type Refusal struct {
	Step  string // what was refused
	Errno unix.Errno
}

func (r *Refusal) Error() string { return r.Step + ": " + r.Errno.Error() }

// Unwrap returns the error number.
func (r *Refusal) Unwrap() error { return r.Errno }

// refused makes a Refusal of err if it is one.
func refused(step string, err error) error {
	for _, errno := range refusals {
		if errors.Is(err, errno) {
			return berm.Errorf(berm.Internal, "%w", &Refusal{step, errno})
		}
	}
	return err
}

// refusals are the error numbers of a Refusal.
var refusals = [...]unix.Errno{unix.EPERM, unix.EACCES, unix.ENOSYS, unix.ENOSPC, unix.EUSERS, unix.EINVAL}

// reported makes an error of the step that init could not do. Its text ends with that of
// the error number.
func reported(detail string) error {
	for _, errno := range refusals {
		if step, ok := strings.CutSuffix(detail, ": "+errno.Error()); ok {
			return berm.Errorf(berm.Internal, "set up the sandbox: %w", &Refusal{step, errno})
		}
	}
	return berm.Errorf(berm.Internal, "set up the sandbox: %s", detail)
}

// runPrefix begins the names of control groups of runs.
const runPrefix = "run-"

// runGroup is the name of a run's control group, which says when it was made.
func runGroup(id berm.SandboxID, made time.Time) string {
	return runPrefix + strconv.FormatInt(made.Unix(), 10) + "-" + string(id)
}

// sweepGroups removes the empty control groups of runs whose monitor was killed. One that
// is just being made is empty too, so that the youngest are left alone.
func sweepGroups(groups *cgroup.Manager) {
	names, _ := groups.List()
	for _, name := range names {
		rest, ok := strings.CutPrefix(name, runPrefix)
		made, _, _ := strings.Cut(rest, "-")
		seconds, err := strconv.ParseInt(made, 10, 64)
		if !ok || err != nil || time.Since(time.Unix(seconds, 0)) < time.Minute {
			continue
		}
		if g, err := groups.Open(name); err == nil {
			g.RemoveEmpty()
		}
	}
}

// self opens this program, for init to execute. An id that root leases may not execute a
// file that is for its owner alone, so it gets a copy in memory then.
func (s *Sandbox) self() (*os.File, error) {
	file, err := os.Open("/proc/self/exe")
	if err != nil {
		return nil, fault("open the own program", err)
	}
	info, err := file.Stat()
	if err == nil && (s.order.IDs.Kind != Leased || info.Mode()&1 != 0) {
		return aboveStreams(file)
	}
	defer file.Close()
	fd, err := unix.MemfdCreate("berm", unix.MFD_CLOEXEC|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3 they are executable
		fd, err = unix.MemfdCreate("berm", unix.MFD_CLOEXEC)
	}
	if err != nil {
		return nil, berm.Errorf(berm.Unsupported, "the sandbox's user may not execute this program, nor a copy in memory: %w", err).
			WithHint("chmod 755 the berm program")
	}
	memory := os.NewFile(uintptr(fd), "berm")
	if _, err = io.Copy(memory, file); err == nil {
		err = memory.Chmod(0o555)
	}
	if err != nil {
		memory.Close()
		return nil, fault("copy the own program", err)
	}
	return aboveStreams(memory)
}

// aboveStreams moves a file well above the descriptors that init gets: ForkExec uses the
// numbers up to a few above them before it executes.
func aboveStreams(file *os.File) (*os.File, error) {
	defer file.Close()
	fd, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 64)
	if err != nil {
		return nil, fault("open the own program", err)
	}
	return os.NewFile(uintptr(fd), file.Name()), nil
}

// keep ends the command at its deadline or when ctx ends, and passes signals on. The
// function that it returns stops that and tells whether it ended the command.
func (s *Sandbox) keep(ctx context.Context, command Command) (stop func() berm.Reason) {
	var mu sync.Mutex
	var reason berm.Reason
	done := make(chan struct{})
	end := func(r berm.Reason) {
		mu.Lock()
		defer mu.Unlock()
		select {
		case <-done: // the process is reaped: the number may be another's
		default:
			if reason == "" {
				reason = r
			}
			s.Kill()
		}
	}
	go func() {
		var deadline <-chan time.Time
		if command.Timeout > 0 {
			timer := time.NewTimer(command.Timeout)
			defer timer.Stop()
			deadline = timer.C
		}
		for {
			select {
			case <-done:
				return
			case <-deadline:
				end(berm.ReasonTimeout)
			case <-ctx.Done():
				end(berm.ReasonKilled)
				return
			case sig, ok := <-command.Signals:
				if n, isNumber := sig.(syscall.Signal); ok && isNumber {
					_ = s.send(plan.Signal, []byte{byte(n)}, nil)
				}
			}
		}
	}()
	return func() berm.Reason {
		mu.Lock()
		defer mu.Unlock()
		close(done)
		return reason
	}
}

// why explains an error of a message to init, which may have left and said why.
func (s *Sandbox) why(err error) error {
	if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		if t := s.follow(Command{}); t.Detail != "" {
			return reported(t.Detail)
		}
	}
	return s.explain(err)
}

// told is what init reported.
type told struct {
	Ended
	complete bool // the command's status is known
}

// follow takes what init reports until it ends. Limits that are lower than they could be
// because the caller's own are is nothing to report.
func (s *Sandbox) follow(command Command) (t told) {
	message := make([]byte, 4096)
	for {
		n, file, err := receive(s.control, message)
		if n <= 0 || err != nil {
			return t
		}
		body := message[1:n]
		switch message[0] {
		case plan.LinkMade:
			if s.link == nil && file != nil {
				s.link = file
				command.Link(file)
			}
		case plan.Watched:
			if command.Watch != nil {
				command.Watch(file, string(body))
			}
		case plan.Started:
			if !t.Started && command.Started != nil {
				command.Started()
			}
			t.Started = true
			monitor.Trace("command started")
		case plan.Ended:
			if len(body) == 4 {
				t.Status, t.complete = unix.WaitStatus(binary.BigEndian.Uint32(body)), true
			}
		case plan.Failed:
			t.Detail = string(body)
		}
	}
}

// describe says how a process ended.
func describe(status unix.WaitStatus) string {
	if status.Signaled() {
		return unix.SignalName(status.Signal())
	}
	return "exit status " + strconv.Itoa(status.ExitStatus())
}
