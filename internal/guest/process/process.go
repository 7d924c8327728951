// Package process starts, watches and signals processes inside the sandbox.
//
// Output goes to whoever follows the process; nobody's is thrown away. A process
// waits for the slowest of its followers, as it would for a pipe's reader, and for
// none that has left. So memory stays bounded: a few chunks per follower.
//
// The end of a process is told when the process itself has ended, also when
// children that it leaves behind hold its output open. Their later output is read
// and dropped, so that they neither block nor get SIGPIPE.
package process

import (
	"errors"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	pb "github.com/berm-sandbox/berm/internal/proto/process"
)

const (
	pipeChunk = 32 << 10
	ttyChunk  = 16 << 10

	// lingering is how long output is awaited after the end of a process whose
	// output somebody else still holds: bash does not wait for `> >(tee log)`.
	lingering = 100 * time.Millisecond

	// maxLeft bounds what is read at the end from a pipe that never runs dry. No
	// pipe of an unprivileged user holds more.
	maxLeft = 1 << 20
)

// process is one process that was started here.
type process struct {
	pid    uint32
	tag    *string
	config *pb.ProcessConfig

	os    *os.Process
	pidfd *os.File // readable when it has ended; nil where the kernel gives none
	stdin *os.File // write end; nil without
	tty   *os.File // master; nil without
	input chan struct{}

	out     fan
	outputs []*os.File // to be read until they end
	reading sync.WaitGroup

	signalled atomic.Bool // by us
	timedOut  atomic.Bool

	exited chan struct{}             // closed when it is reaped
	ended  chan struct{}             // closed when its output has been handed out too
	end    *pb.ProcessEvent_EndEvent // set before ended is closed
}

// supervise hands out output and collects the exit status. It returns when the
// process has ended and its output was handed out; onExit is called before that,
// as soon as the process is reaped.
func (p *process) supervise(onExit func()) {
	for i, f := range p.outputs {
		p.reading.Add(1)
		go p.pump(f, p.wrap(i))
	}
	state, err := p.wait()
	onExit()
	close(p.exited)
	if p.stdin != nil {
		p.stdin.Close()
	}
	linger := lingering
	if p.signalled.Load() {
		linger = 0
	}
	for _, f := range p.outputs {
		_ = f.SetReadDeadline(time.Now().Add(linger))
	}
	p.reading.Wait()
	p.out.close()
	p.end = endEvent(state, err)
	close(p.ended)
}

// wait reaps the process. It waits in the poller first: os.Process.Wait would hold
// a thread for as long as the process lives, and threads count as the sandbox's.
func (p *process) wait() (*os.ProcessState, error) {
	if p.pidfd != nil {
		if raw, err := p.pidfd.SyscallConn(); err == nil {
			_ = raw.Read(func(fd uintptr) bool {
				n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
				return n != 0 && err != unix.EINTR
			})
		}
		p.pidfd.Close()
	}
	return p.os.Wait()
}

func endEvent(state *os.ProcessState, err error) *pb.ProcessEvent_EndEvent {
	if err != nil {
		msg := err.Error()
		return &pb.ProcessEvent_EndEvent{ExitCode: -1, Status: msg, Error: &msg}
	}
	end := &pb.ProcessEvent_EndEvent{
		ExitCode: int32(state.ExitCode()),
		Exited:   state.Exited(),
		Status:   state.String(),
	}
	if !state.Success() {
		end.Error = &end.Status
	}
	return end
}

// wrap makes the event of the i-th output.
func (p *process) wrap(i int) func(data []byte) *pb.ProcessEvent {
	return func(data []byte) *pb.ProcessEvent {
		d := new(pb.ProcessEvent_DataEvent)
		switch {
		case p.tty != nil:
			d.Output = &pb.ProcessEvent_DataEvent_Pty{Pty: data}
		case i == 0:
			d.Output = &pb.ProcessEvent_DataEvent_Stdout{Stdout: data}
		default:
			d.Output = &pb.ProcessEvent_DataEvent_Stderr{Stderr: data}
		}
		return &pb.ProcessEvent{Event: &pb.ProcessEvent_Data{Data: d}}
	}
}

var chunks = sync.Pool{New: func() any { return new([pipeChunk]byte) }}

// pump reads an output to its end.
func (p *process) pump(f *os.File, wrap func([]byte) *pb.ProcessEvent) {
	size := pipeChunk
	if p.tty != nil {
		size = ttyChunk
	}
	raw, err := f.SyscallConn()
	if err != nil {
		p.reading.Done()
		return
	}
	// read takes what is there and says whether that was anything. The buffer is
	// borrowed only then: an idle process must cost no memory.
	var data []byte
	var n int
	read := func(fd uintptr) bool {
		buf := chunks.Get().(*[pipeChunk]byte)
		defer chunks.Put(buf)
		for {
			n, err = syscall.Read(int(fd), buf[:size])
			if err != syscall.EINTR {
				break
			}
		}
		data = nil
		if n > 0 && p.out.followed() {
			data = append(make([]byte, 0, n), buf[:n]...)
		}
		return err != syscall.EAGAIN
	}
	more := true
	for more {
		if wait := raw.Read(read); wait != nil {
			break // the deadline set by supervise
		}
		if more = n > 0 && err == nil; more && data != nil {
			p.out.publish(wrap(data))
		}
	}
	for left := 0; more && left < maxLeft; left += n {
		ready := false
		if raw.Control(func(fd uintptr) { ready = read(fd) }) != nil || !ready {
			break
		}
		if more = n > 0 && err == nil; more && data != nil {
			p.out.publish(wrap(data))
		}
	}
	p.reading.Done()
	if more {
		<-p.ended
		_ = f.SetReadDeadline(time.Time{})
		for raw.Read(read) == nil && n > 0 && err == nil {
		}
	}
	f.Close()
}

// signal sends a signal to the process alone, not to its children.
func (p *process) signal(sig syscall.Signal) error {
	p.signalled.Store(true)
	return p.os.Signal(sig)
}

// expire ends the process at the deadline of the call that started it.
func (p *process) expire() {
	p.timedOut.Store(true)
	_ = p.signal(syscall.SIGKILL)
}

// raiseOOM makes the kernel choose the process before the agent when memory runs
// out. Raising needs no rights; if it fails the process is merely an equal choice.
func raiseOOM(pid int) {
	_ = os.WriteFile("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", []byte(childOOM()), 0)
}

var childOOM = sync.OnceValue(func() string {
	own, _ := os.ReadFile("/proc/self/oom_score_adj")
	n, _ := strconv.Atoi(string(trimNewline(own)))
	return strconv.Itoa(min(n+100, 1000))
})

func trimNewline(b []byte) []byte {
	if n := len(b); n > 0 && b[n-1] == '\n' {
		return b[:n-1]
	}
	return b
}

// errNoTTY and errTTY answer input meant for the other kind of process.
var (
	errNoTTY   = errors.New("process has no terminal: send input to its stdin")
	errTTY     = errors.New("process has a terminal: send input to the terminal")
	errNoStdin = errors.New("stdin is closed or was not asked for")
)
