package landlock

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// The names by which a process knows that it is one of the two.
const (
	keeperName = "berm-landlock-keeper"
	enterName  = "berm-landlock-enter"
)

// The keeper's descriptors besides the standard streams.
const (
	ordersFD  = 3 // a byte is a signal for the command; the end is the caller's
	reportsFD = 4
)

func init() {
	switch os.Args[0] {
	case keeperName:
		keep()
	case enterName:
		enter()
	}
}

// keep is the whole life of the keeper.
func keep() {
	// The kernel sends the parent death signal when the thread that forked ends.
	runtime.LockOSThread()
	unix.CloseOnExec(ordersFD)
	unix.CloseOnExec(reportsFD)
	exit, err := keepCommand()
	r := report{Exit: exit}
	if err != nil {
		r.Error = &failure{Kind: berm.KindOf(err), Msg: err.Error(), Hint: berm.HintOf(err)}
	}
	if json.NewEncoder(os.NewFile(reportsFD, "reports")).Encode(r) != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

func keepCommand() (berm.Exit, error) {
	order, err := parse(os.Args)
	if err != nil {
		return berm.Exit{}, berm.Errorf(berm.Internal, "the keeper was started with %q", os.Args)
	}
	// Whatever loses its parent becomes a child of this process.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return berm.Exit{}, berm.Errorf(berm.Internal, "become the reaper: %w", err)
	}
	failures, failureEnd, err := os.Pipe()
	if err != nil {
		return berm.Exit{}, berm.Errorf(berm.Internal, "make a pipe: %w", err)
	}
	command, err := syscall.ForkExec("/proc/self/exe", append([]string{enterName}, os.Args[1:]...), &syscall.ProcAttr{
		Env: os.Environ(), Files: []uintptr{0, 1, 2, failureEnd.Fd()},
		Sys: &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL},
	})
	failureEnd.Close()
	if err != nil {
		return berm.Exit{}, berm.Errorf(berm.Internal, "start the command: %w", err)
	}
	// Keys of the terminal, and kill 0, reach every process of a group; they are meant for the
	// command. It has been started by now, so it does not inherit that they are ignored.
	signal.Ignore(unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGHUP, unix.SIGTSTP)
	// The command alone decides when its streams end.
	if err := releaseStreams(); err != nil {
		return berm.Exit{}, berm.Errorf(berm.Internal, "release the standard streams: %w", err)
	}
	text, _ := io.ReadAll(failures) // it ends when the command begins
	if len(text) > 0 {
		var f failure
		if err := json.Unmarshal(text, &f); err != nil {
			return berm.Exit{}, berm.Errorf(berm.Internal, "starting the command failed with %q", text)
		}
		return berm.Exit{}, &berm.Error{Kind: f.Kind, Msg: f.Msg, Hint: f.Hint}
	}
	return watch(command, order.Timeout), nil
}

// releaseStreams puts /dev/null in the place of the standard streams.
func releaseStreams() error {
	null, err := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(null)
	for fd := range 3 {
		if err := unix.Dup3(null, fd, 0); err != nil {
			return err
		}
	}
	return nil
}

// watch waits until the command ended, has to end or nobody waits for it any more, and
// ends all that descends from it.
func watch(command int, timeout time.Duration) berm.Exit {
	ended := make(chan unix.WaitStatus, 1)
	alone := make(chan struct{})
	go func() {
		defer close(alone)
		for {
			var status unix.WaitStatus
			// WALL: a child that was cloned without SIGCHLD counts too.
			switch pid, err := unix.Wait4(-1, &status, unix.WALL, nil); {
			case errors.Is(err, unix.ECHILD):
				return
			// One that asked to be traced by its parent also reports when it stops.
			case err == nil && pid == command && (status.Exited() || status.Signaled()):
				ended <- status
			}
		}
	}()
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		orders := os.NewFile(ordersFD, "orders")
		for b := make([]byte, 1); ; {
			if _, err := orders.Read(b); err != nil {
				return
			}
			pass(command, unix.Signal(b[0]))
		}
	}()
	var deadline <-chan time.Time
	if timeout > 0 {
		deadline = time.After(timeout)
	}
	var exit berm.Exit
	select {
	case status := <-ended:
		exit = exitOf(status)
	case <-gone:
		exit = berm.Exit{Reason: berm.ReasonKilled, Code: -1, Signal: "SIGKILL", Detail: "its caller ended it"}
	case <-deadline:
		exit = berm.Exit{Reason: berm.ReasonTimeout, Code: -1, Signal: "SIGKILL", Detail: "its time of " + timeout.String() + " was over"}
	}
	endTree(alone)
	exit.At = time.Now()
	return exit
}

func exitOf(status unix.WaitStatus) berm.Exit {
	if status.Signaled() {
		return berm.Exit{Reason: berm.ReasonExit, Code: -1, Signal: unix.SignalName(status.Signal())}
	}
	return berm.Exit{Reason: berm.ReasonExit, Code: status.ExitStatus()}
}
