// Package inside is what PID 1 of a sandbox does: it builds the root file
// system, gives its rights away, starts the guest agent and reaps.
//
// It is paid in time and memory for every sandbox, so it imports only raw
// system calls: no fmt, os, net or encoding/json.
package inside

import (
	"errors"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/driver/namespace/plan"
)

// firstTree is where the descriptors of trees are while init executes itself again.
const firstTree = 100

// control is the socket to the monitor.
var control = plan.Control

// treesVariable tells the second execution how many there are.
const treesVariable = "TREES"

// Main is the whole life of init. The caller has locked the goroutine to the main
// thread: rights are dropped on it, and the agent inherits what it has.
func Main() {
	setName()
	text, _ := syscall.Getenv(treesVariable)
	trees, _ := strconv.Atoi(text)
	agent, ownKernel := syscall.Getenv(plan.AgentVariable)
	var listen int
	if ownKernel {
		listen = takeStreams()
	}
	for {
		message, fds := receive()
		switch message[0] {
		case plan.Trees:
			trees = cloneTrees(message[1:])
		case plan.Mapped:
			becomeRoot(trees)
		case plan.Remove:
			for i := range trees {
				if err := empty(firstTree+i, time.Now().Add(othersEnd)); err != nil {
					fail("remove", "files", err)
				}
			}
			unix.Exit(0)
		case plan.Kernel:
			if len(fds) != 2 {
				fail("kernel", "", unix.EINVAL)
			}
			carry(message[1:], fds, attached(trees))
		case plan.SetUp:
			fds = append(fds, attached(trees)...)
			if ownKernel && len(fds) == 1 {
				fds = adopt(agent, listen, fds[0])
			}
			if len(fds) < plan.FDCount {
				fail("plan", "", unix.EINVAL)
			}
			setUp(message[1:], fds[plan.FDCount:])
			serve(fds[:plan.FDCount])
		default:
			fail("message", strconv.Itoa(int(message[0])), unix.EINVAL)
		}
	}
}

// attached are the descriptors of the trees that cloneTrees made.
func attached(trees int) (fds []int) {
	for i := range trees {
		unix.CloseOnExec(firstTree + i)
		fds = append(fds, firstTree+i)
	}
	return fds
}

// setName names this process: executed by descriptor, it would be listed under the
// descriptor's number.
func setName() {
	name := [...]byte{'i', 'n', 'i', 't', 0}
	_ = unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(&name)), 0, 0, 0)
}

// cloneTrees makes a detached mount of each path, with the mounts below it: those that
// came from the host cannot be left out here. It comes before becomeRoot: an ordinary
// user's directories are open to that user, who is nobody inside.
func cloneTrees(paths []byte) int {
	n := 0
	for tree := range strings.SplitSeq(string(paths), "\x00") {
		if tree == "" {
			continue // after the last
		}
		path, attr := tree[1:], unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NODEV}
		if tree[0] == plan.TreeRead || tree[0] == plan.Exact(plan.TreeRead) {
			attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
		}
		exact := tree[0] < 'a'
		at, err := place(path, exact)
		if err != nil {
			fail("open", path, err)
		}
		name := path
		if exact {
			name = ""
		}
		fd, err := unix.OpenTree(at, name, unix.OPEN_TREE_CLONE|unix.AT_RECURSIVE|unix.AT_EMPTY_PATH)
		if exact {
			_ = unix.Close(at)
		}
		if err == nil {
			err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr)
		}
		if err == nil {
			err = unix.Dup3(fd, firstTree+n, 0)
		}
		if err != nil {
			fail("clone", path, err)
		}
		_ = unix.Close(fd)
		n++
	}
	return n
}

// place opens what lies at an exact path; for others it is the root to start from.
func place(path string, exact bool) (int, error) {
	if !exact {
		return unix.AT_FDCWD, nil
	}
	return unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS})
}

// becomeRoot leaves the user's groups and takes uid 0, for which there are two ambient
// capabilities, and gets all others by executing init again as uid 0.
func becomeRoot(trees int) {
	for _, set := range []uintptr{unix.SYS_SETGROUPS, unix.SYS_SETRESGID, unix.SYS_SETRESUID} {
		if _, _, errno := syscall.AllThreadsSyscall(set, 0, 0, 0); errno != 0 {
			fail("become", "root", errno)
		}
	}
	fail("exec", "init", syscall.Exec("/proc/self/exe", []string{"init"}, append(syscall.Environ(), treesVariable+"="+strconv.Itoa(trees))))
}

// receive reads one message from the monitor with its descriptors. It leaves when
// the monitor is gone.
func receive() ([]byte, []int) {
	message := make([]byte, plan.MaxMessage)
	rights := make([]byte, unix.CmsgSpace(4*plan.MaxFDs))
	n, size, _, _, err := unix.Recvmsg(control, message, rights, unix.MSG_CMSG_CLOEXEC)
	for err == unix.EINTR {
		n, size, _, _, err = unix.Recvmsg(control, message, rights, unix.MSG_CMSG_CLOEXEC)
	}
	if err != nil || n == 0 {
		unix.Exit(1)
	}
	var fds []int
	if parts, err := unix.ParseSocketControlMessage(rights[:size]); err == nil && len(parts) == 1 {
		fds, _ = unix.ParseUnixRights(&parts[0])
	}
	return message[:n], fds
}

// tell sends one message to the monitor. Nobody is left to hear when it fails.
func tell(kind byte, text string) {
	_ = unix.Send(control, append([]byte{kind}, text...), unix.MSG_NOSIGNAL)
}

// takeStreams takes the sockets that init was started with as standard streams away from there,
// and returns the one for the agent.
func takeStreams() (listen int) {
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		fail("open", "/dev/null", err)
	}
	for stream, fd := range []*int{&control, &listen} {
		// Any free number: the runtime may have taken the next ones.
		if *fd, err = unix.FcntlInt(uintptr(stream), unix.F_DUPFD_CLOEXEC, 3); err != nil {
			fail("streams", "", err)
		}
	}
	for stream := range 3 {
		if err := unix.Dup2(null, stream); err != nil {
			fail("streams", "", err)
		}
	}
	_ = unix.Close(null)
	return listen
}

// adopt makes the descriptors of a plan such of the sandbox's own kernel. config is the host's.
func adopt(agent string, listen, config int) []int {
	fds := make([]int, plan.FDCount)
	var err error
	if fds[plan.FDConfig], err = unix.MemfdCreate("config", unix.MFD_CLOEXEC); err != nil {
		fail("agent", "configuration", err)
	}
	for b := make([]byte, 1<<16); ; {
		n, err := unix.Read(config, b)
		if err == nil && n > 0 {
			_, err = unix.Write(fds[plan.FDConfig], b[:n])
		}
		if err != nil {
			fail("agent", "configuration", err)
		}
		if n == 0 {
			break
		}
	}
	_ = unix.Close(config)
	if fds[plan.FDAgent], err = unix.Open(agent, unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		fail("open", agent, err)
	}
	var ready [2]int
	if err := unix.Pipe2(ready[:], unix.O_CLOEXEC); err != nil {
		fail("agent", "pipe", err)
	}
	go func() {
		for b := make([]byte, 1); ; {
			n, err := unix.Read(ready[0], b)
			if n == 1 {
				tell(plan.Ready, "")
			} else if err != unix.EINTR {
				return
			}
		}
	}()
	fds[plan.FDListen], fds[plan.FDReady] = listen, ready[1]
	return fds
}

// renew gives the sandbox the identity that steps make.
func renew(encoded []byte) {
	steps, err := plan.Decode(encoded)
	if err != nil {
		tell(plan.Failed, "another identity: "+err.Error())
		return
	}
	for _, s := range steps {
		if err := do(s, nil); err != nil {
			tell(plan.Failed, s.Op.String()+" "+s.Target+": "+err.Error())
			return
		}
	}
	tell(plan.Renewed, "")
}

// fail reports a step that could not be done and ends the sandbox.
func fail(step, target string, err error) {
	if target != "" {
		step += " " + target
	}
	tell(plan.Failed, step+": "+err.Error())
	unix.Exit(1)
}

// setUp carries out an encoded plan, with the descriptors of the trees.
func setUp(encoded []byte, trees []int) {
	unix.Umask(0) // modes in the plan are exact
	steps, err := plan.Decode(encoded)
	if err != nil {
		fail("plan", "", unix.EINVAL)
	}
	// A change of uid clears the signal that the clone set.
	_ = unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0)
	for _, s := range steps {
		if s.Op == plan.Move && s.FD >= len(trees) {
			fail(s.Op.String(), s.Target, unix.EBADF)
		}
		if err := do(s, trees); err != nil {
			fail(s.Op.String(), s.Target, err)
		}
	}
	unix.Umask(0o022)
	// Nothing inside may read or trace init, which holds the agent's executable
	// and configuration.
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
}

// forgetHandlers makes init deaf to signals from inside. The kernel keeps them from the first
// process of a pid namespace unless it has a handler, and the runtime's end the process.
// Without a handler, Linux 6.1 (6.18 does not) still ends the process when its main thread
// blocks the signal and another does not: the runtime blocks them while it handles one and
// while it starts a process. So they are ignored. A real fault ends init all the same.
//
// The agent gets the defaults: the runtime resets what it had a handler for. It has none
// for 32 and 34, which get one that the kernel resets.
func forgetHandlers() {
	type sigaction struct{ handler, flags, restorer, mask uint64 } // the kernel's
	set := func(sig int, act, old *sigaction) {
		_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(act)), uintptr(unsafe.Pointer(old)), 8, 0, 0)
	}
	var empty sigaction // the runtime's but for the handler
	set(int(unix.SIGURG), nil, &empty)
	f := nothing
	empty.handler = **(**uint64)(unsafe.Pointer(&f))
	for sig := 1; sig <= 64; sig++ {
		switch unix.Signal(sig) {
		case unix.SIGURG: // with which the runtime preempts its own
		case unix.SIGCONT, unix.SIGTSTP, unix.SIGTTIN, unix.SIGTTOU: // by default do no harm
		case unix.SIGCHLD: // ignored, it would leave nobody to wait for
			set(sig, &sigaction{}, nil)
		case 32, 34:
			set(sig, &empty, nil)
		default:
			set(sig, &sigaction{handler: 1}, nil) // SIG_IGN
		}
	}
}

// nothing handles a signal. The kernel calls it, without a goroutine.
//
//go:nosplit
//go:noinline
func nothing() {}

// serve starts the agent, starts it again whenever it ends, and reaps.
func serve(fds []int) {
	forgetHandlers()
	// The parent death signal ends init with its monitor; the end of the socket
	// does too, should the kernel have cleared the signal.
	go func() {
		for {
			if message, _ := receive(); message[0] == plan.Renew {
				renew(message[1:])
			}
		}
	}()
	// Well above the descriptors that the agent gets: ForkExec uses the numbers up to a
	// few above them before it executes.
	high, err := unix.FcntlInt(uintptr(fds[plan.FDAgent]), unix.F_DUPFD_CLOEXEC, 16+max(fds[plan.FDListen], fds[plan.FDConfig], fds[plan.FDReady]))
	if err != nil {
		fail("agent", "descriptor", err)
	}
	_ = unix.Close(fds[plan.FDAgent])
	fds[plan.FDAgent] = high
	agent, started := start(fds), time.Now()
	tell(plan.Started, "")
	for delay := time.Duration(0); ; {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		if err != nil || pid != agent {
			continue
		}
		tell(plan.AgentLost, describe(status))
		if time.Since(started) > 10*time.Second {
			delay = 0
		}
		for until := time.Now().Add(delay); time.Now().Before(until); {
			reap()
			time.Sleep(20 * time.Millisecond)
		}
		delay = min(2*delay+50*time.Millisecond, 5*time.Second)
		agent, started = start(fds), time.Now()
	}
}

// start executes the agent from the sealed copy that the monitor passed in: no
// file of the host is mounted for it, and nobody inside can overwrite it
// (CVE-2019-5736).
func start(fds []int) int {
	path := "/proc/self/fd/" + strconv.Itoa(fds[plan.FDAgent])
	attr := &syscall.ProcAttr{
		Dir:   "/",
		Env:   []string{},
		Files: []uintptr{0, 1, 2, uintptr(fds[plan.FDListen]), uintptr(fds[plan.FDConfig]), uintptr(fds[plan.FDReady])},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	}
	for {
		pid, err := syscall.ForkExec(path, []string{"berm-guest"}, attr)
		if err == nil {
			return pid
		}
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.ENOMEM) {
			fail("start", "agent", err)
		}
		// Out of processes or memory, which is the sandbox's own doing: its deadline
		// and its owner's kill go on working, so wait for better times.
		reap()
		time.Sleep(100 * time.Millisecond)
	}
}

// reap collects every process that has ended, without waiting for one.
func reap() {
	for pid := 1; pid > 0; {
		pid, _ = unix.Wait4(-1, nil, unix.WNOHANG, nil)
	}
}

// describe says how a process ended.
func describe(status unix.WaitStatus) string {
	if status.Signaled() {
		return unix.SignalName(status.Signal())
	}
	return "exit status " + strconv.Itoa(status.ExitStatus())
}
