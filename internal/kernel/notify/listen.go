package notify

import (
	"os"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Event is one thing that a process did.
type Event struct {
	Exit   bool          // it ended; else it asked for an execution
	At     time.Duration // of the monotonic clock
	Host   int           // the process id on this side of pid namespaces
	PID    int           // that inside
	Parent int           // the parent's inside; 0 when it is outside or not known
	UID    int           // inside, where it has one there; else on this side
	// Of an execution.
	Exe  string   // the file, by its path inside
	Argv []string // 4 KiB of it
	Cut  bool     `json:",omitempty"` // Argv has more
	Cwd  string   `json:",omitempty"`
	// Asked: Exe is what the process asked for. Else it is what the kernel runs.
	Asked   bool    `json:",omitempty"`
	Version Version // of Exe
	// File is Exe, to be read and closed by who gets the event; nil when it cannot be opened, or
	// was handed over in this Version before.
	File *os.File `json:"-"`
	// Of an end.
	Known  bool            `json:",omitempty"` // Status is: Linux tells it from 6.15 on
	Status unix.WaitStatus `json:",omitempty"`
}

// Bounds of what waits in a Listener.
const (
	// maxPending bounds the executions that are not told yet. More are told as they were asked for.
	maxPending = 2048
	// maxLiving bounds the processes whose ends are awaited, each with a descriptor.
	maxLiving = 4096
)

// Listener answers for the processes that a Filter holds.
type Listener struct {
	file  *os.File
	done  chan struct{}
	watch watch
}

// Listen answers on the descriptor of a Filter until all processes that it holds have ended, and
// closes it. Every process goes on, whatever is told: told, which is called by one goroutine at a
// time, may take its time; what finds no room meanwhile is not told but counted.
func Listen(file *os.File, told func(Event)) *Listener {
	l := &Listener{file: file, done: make(chan struct{})}
	l.watch.start(told)
	go l.listen()
	return l
}

// Done is closed when all is told.
func (l *Listener) Done() <-chan struct{} { return l.done }

// Again has files handed over once more: who is told is another.
func (l *Listener) Again() {
	l.watch.mu.Lock()
	defer l.watch.mu.Unlock()
	clear(l.watch.files)
}

// Lost is how many executions and ends were not told.
func (l *Listener) Lost() uint64 { return l.watch.lost.Load() }

func (l *Listener) listen() {
	defer close(l.done)
	defer l.watch.stop()
	defer l.file.Close()
	// It blocks for most of its life, and what it answers should not wait for another thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	fd := l.file.Fd()
	// Who asks and who answers run in turn: to wake up another processor costs many times what
	// all else here does. Before Linux 6.6 it is EINVAL.
	_, _, _ = unix.Syscall(unix.SYS_IOCTL, fd, unix.SECCOMP_IOCTL_NOTIF_SET_FLAGS, unix.SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP)
	poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, words, answer := messages()
	for {
		// Before Linux 6.11 receiving does not end with the last process.
		if _, err := unix.Poll(poll, -1); err != nil {
			continue // EINTR
		}
		if poll[0].Revents&unix.POLLIN == 0 {
			if poll[0].Revents != 0 {
				return // nobody is left
			}
			continue
		}
		clear(words) // the kernel insists
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, unix.SECCOMP_IOCTL_NOTIF_RECV, uintptr(unsafe.Pointer(n))); errno != 0 {
			if errno != unix.ENOENT && errno != unix.EINTR { // else it was killed meanwhile
				time.Sleep(time.Millisecond) // out of memory: to give up would end all executions
			}
			continue
		}
		a := l.watch.look(n)
		answer.id, answer.flags = n.id, unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE
		// ENOENT: it was killed, and what was read may be another's who got its number.
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, unix.SECCOMP_IOCTL_NOTIF_SEND, uintptr(unsafe.Pointer(answer)))
		l.watch.answered(a, errno == 0)
	}
}
