package egress

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/berm-sandbox/berm"
)

// HeartFD is the descriptor on which a service is asked whether it still works.
const HeartFD = 4

// A service that does not answer for mostMissed intervals hangs. They are counted, so that
// an owner who was stopped, or slept with its machine, does not take that for the service's
// silence.
const mostMissed = 5

// interval between two questions; shorter in tests.
var interval = 3 * time.Second

// names are those of services, for people.
var names = map[string]string{Command: "the network service", BrokerCommand: "the service of credentials"}

// process is a service that was started.
type process struct {
	conn   *net.UnixConn
	pid    int
	exited chan struct{}
	err    error  // why it ended; set before exited is closed
	kill   func() // by its pidfd, so never another process
}

// watch waits for the end of the process, and ends it when it hangs: every flow of its
// sandboxes would wait for ever. It tells ended why the process ended.
func (p *process) watch(cmd *exec.Cmd, heart *net.UnixConn, ended func(error)) {
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
		p.err = berm.Errorf(berm.Unavailable, "%s did not answer for %s and was killed", name, mostMissed*interval)
	case status.Signaled() && status.Signal() == syscall.SIGSYS:
		p.err = berm.Errorf(berm.Unavailable, "%s was killed by the kernel at a system call that it never makes", name).
			WithHint("somebody may have taken it over; the kernel's log (type=1326) has the number of the call")
	default:
		if err == nil {
			err = errors.New("it left")
		}
		p.err = berm.Errorf(berm.Unavailable, "%s ended: %w", name, err)
	}
	close(p.exited)
	ended(p.err)
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
	tick := time.NewTicker(interval)
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
			if missed++; missed == mostMissed {
				return false
			}
		}
	}
}

// Beat answers the owner of a service, after work has returned each time: it is a sign that
// nothing of the service is stuck.
func Beat(work func()) error {
	file := os.NewFile(HeartFD, "heart")
	conn, err := net.FileConn(file)
	file.Close()
	if err != nil {
		return berm.Errorf(berm.Invalid, "this command is started by berm")
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
