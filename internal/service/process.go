// Package service starts the processes that berm has beside a server or a run, notices when they
// hang, and is how they talk.
package service

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cleanup"
	"github.com/berm-sandbox/berm/internal/failpoint"
)

// The hidden commands of berm that are services: the network service, the service of credentials,
// and the writer of the audit log.
const (
	Egressd = "egressd"
	Brokerd = "brokerd"
	Auditd  = "auditd"
)

// names are those of services, for people.
var names = map[string]string{
	Egressd: "the network service", Brokerd: "the service of credentials", Auditd: "the writer of the audit log",
}

// ids are what services are when root starts them: nobody else has them, below those that
// sandboxes are given and beside those that build and fetch templates.
var ids = map[string]uint32{
	Egressd: 0x70000000 - 2*berm.IDsPerSandbox,
	Brokerd: 0x70000000 - 3*berm.IDsPerSandbox,
	Auditd:  0x70000000 - 5*berm.IDsPerSandbox,
}

// ID is the user and the group that a service is: one of its own when root starts it.
func ID(command string) (uid, gid uint32) {
	if os.Geteuid() != 0 {
		return uint32(os.Geteuid()), uint32(os.Getegid())
	}
	return ids[command], ids[command]
}

// The descriptors that a service has from its start: its first connection, the one on which it is
// asked whether it still works, and from the last on those of Program.Files.
const (
	connFD = 3 + iota
	heartFD
	filesFD
)

// MostMissed is for how many times Interval a service that hangs is waited for. They are counted, so
// that an owner who was stopped, or slept with its machine, does not take that for the service's
// silence.
const MostMissed = 5

// Interval is between two questions; shorter in tests.
var Interval = 3 * time.Second

// Program is what a service is started from.
type Program struct {
	File    *os.File // opened executable that has the command
	Command string
	Args    []string
	Files   []*os.File  // that it gets; they stay the caller's
	Ended   func(error) // is told why the process has ended, for whatever reason
}

// Process is a service that was started.
type Process struct {
	Conn   *net.UnixConn // the first connection to it, with which it ends
	PID    int
	Exited chan struct{} // closed when it has ended

	Err error // why it ended, once Exited is closed

	kill func() // by its pidfd, so never another process
}

// Start starts a service.
func Start(program Program) (*Process, error) {
	failed := func(err error) error { return berm.Errorf(berm.Internal, "start berm %s: %w", program.Command, err) }
	conn, theirs, err := Connect()
	if err != nil {
		return nil, failed(err)
	}
	defer theirs.Close()
	cu := cleanup.Make(func() { conn.Close() })
	defer cu.Clean()
	heart, theirHeart, err := Connect()
	if err != nil {
		return nil, failed(err)
	}
	defer theirHeart.Close()
	cu.Add(func() { heart.Close() })
	// Above the descriptors that the service gets, as ForkExec uses numbers up to there.
	fd, err := unix.FcntlInt(program.File.Fd(), unix.F_DUPFD_CLOEXEC, 64)
	if err != nil {
		return nil, failed(err)
	}
	defer unix.Close(fd)
	cmd := exec.Cmd{
		Path: "/proc/self/fd/" + strconv.Itoa(fd), Args: append([]string{"berm", program.Command}, program.Args...), Dir: "/", Env: environment(),
		ExtraFiles:  append([]*os.File{theirs, theirHeart}, program.Files...),
		SysProcAttr: &syscall.SysProcAttr{Setsid: true}, // the terminal's keys are not for it
	}
	if os.Geteuid() == 0 {
		uid, gid := ID(program.Command)
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: gid}
	}
	if err := cmd.Start(); err != nil {
		return nil, failed(err)
	}
	cu.Release()
	p := &Process{Conn: conn, PID: cmd.Process.Pid, Exited: make(chan struct{}), kill: func() { _ = cmd.Process.Kill() }}
	go p.watch(&cmd, heart, program.Ended)
	return p, nil
}

// environment is what the service gets of its owner's: where a company keeps the authorities
// by which upstreams are verified.
func environment() []string {
	env := append([]string{"PATH=/usr/bin:/bin"}, failpoint.Environment()...)
	for _, name := range []string{"SSL_CERT_FILE", "SSL_CERT_DIR"} {
		if value, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+value)
		}
	}
	return env
}

// End waits for the process to end by itself after its connection was closed, and ends it when it
// takes longer than patience.
func (p *Process) End(patience time.Duration) {
	select {
	case <-p.Exited:
	case <-time.After(patience):
		p.kill()
		<-p.Exited
	}
}

// watch waits for the end of the process, and ends it when it hangs: every flow of its
// sandboxes would wait for ever. It tells ended why the process ended.
func (p *Process) watch(cmd *exec.Cmd, heart *net.UnixConn, ended func(error)) {
	ctx, stop := context.WithCancel(context.Background())
	hung := make(chan bool, 1)
	go func() {
		silent := !beats(ctx, heart)
		if silent {
			p.kill()
		}
		hung <- silent
	}()
	err := cmd.Wait()
	stop()
	heart.Close()
	name := names[cmd.Args[1]]
	status, _ := cmd.ProcessState.Sys().(syscall.WaitStatus)
	switch {
	case <-hung:
		p.Err = berm.Errorf(berm.Unavailable, "%s did not answer for %s and was killed", name, MostMissed*Interval)
	case status.Signaled() && status.Signal() == syscall.SIGSYS:
		p.Err = berm.Errorf(berm.Unavailable, "%s was killed by the kernel at a system call that it never makes", name).
			WithHint("somebody may have taken it over; the kernel's log (type=1326) has the number of the call")
	default:
		if err == nil {
			err = errors.New("it left")
		}
		p.Err = berm.Errorf(berm.Unavailable, "%s ended: %w", name, err)
	}
	close(p.Exited)
	ended(p.Err)
}

// beats asks again and again. It returns false when no answer came for too long, and true
// when the connection or ctx ends.
func beats(ctx context.Context, heart *net.UnixConn) bool {
	answers := make(chan struct{}, 1)
	go func() {
		defer close(answers)
		for b := make([]byte, 1); ; {
			if n, err := heart.Read(b); n == 0 || err != nil {
				return
			}
			answers <- struct{}{}
		}
	}()
	tick := time.NewTicker(Interval)
	defer tick.Stop()
	for missed := 0; ; {
		if missed == 0 {
			if _, err := heart.Write([]byte{1}); err != nil {
				return true
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return true
		}
		select {
		case _, ok := <-answers:
			if !ok {
				return true
			}
			missed = 0
		default:
			if missed++; missed == MostMissed {
				return false
			}
		}
	}
}

// Beat answers the owner of a service, after work has returned each time: it is a sign that
// nothing of the service is stuck.
func Beat(work func()) error {
	conn, err := inherited(heartFD)
	if err != nil {
		return err
	}
	go func() {
		defer conn.Close()
		for b := make([]byte, 1); ; {
			if n, err := conn.Read(b); n == 0 || err != nil {
				return
			}
			work()
			if _, err := conn.Write(b); err != nil {
				return
			}
		}
	}()
	return nil
}

// Owner is the connection to whoever has started the service, which calls it once.
func Owner() (*net.UnixConn, error) { return inherited(connFD) }

// File is a descriptor of Program.Files, which the service got when it was started.
func File(i int) *os.File { return os.NewFile(uintptr(filesFD+i), "owner") }

// inherited is a connection that the service has from its start.
func inherited(fd uintptr) (*net.UnixConn, error) {
	conn, err := Conn(os.NewFile(fd, "owner"))
	if err != nil {
		return nil, berm.Errorf(berm.Invalid, "this command is started by berm")
	}
	return conn, nil
}
