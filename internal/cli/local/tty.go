package local

import (
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// tty is the terminal on which berm runs, as it was before the command.
type tty struct {
	file    *os.File // nil: there is none
	termios *unix.Termios
}

// openTTY remembers the state of the controlling terminal if berm is in its foreground.
func openTTY() tty {
	f, err := os.OpenFile("/dev/tty", os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return tty{}
	}
	t := tty{file: f}
	if !t.foreground() {
		f.Close()
		return tty{}
	}
	t.termios, _ = unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return t
}

func (t tty) foreground() bool {
	group, err := unix.IoctlGetInt(int(t.file.Fd()), unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}

// filter passes on the signals that are for the command alone: what a key makes, the
// terminal sends to the whole foreground group, of which the command is a member.
func (t tty) filter(signals <-chan os.Signal) <-chan os.Signal {
	if t.file == nil {
		return signals
	}
	out := make(chan os.Signal, 16)
	go func() {
		for s := range signals {
			if (s == syscall.SIGINT || s == syscall.SIGQUIT) && t.foreground() {
				continue
			}
			out <- s
		}
	}()
	return out
}

// restore takes the terminal back from a command that left it in another state, such as a
// shell that put a process group of the sandbox into the foreground.
func (t tty) restore() {
	if t.file == nil {
		return
	}
	defer t.file.Close()
	signal.Ignore(syscall.SIGTTOU) // which would stop berm, in the background now
	if !t.foreground() {
		_ = unix.IoctlSetPointerInt(int(t.file.Fd()), unix.TIOCSPGRP, unix.Getpgrp())
	}
	if t.termios != nil {
		_ = unix.IoctlSetTermios(int(t.file.Fd()), unix.TCSETSW, t.termios)
	}
}

// die ends berm as a signal ended the command, so that a shell sees the same. The kernel's
// own action is put back behind the Go runtime, which prints its stacks at some signals and
// ignores others.
func die(s syscall.Signal) {
	_ = unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{})
	runtime.LockOSThread()
	var byDefault [4]uint64 // the kernel's struct sigaction, with SIG_DFL
	_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(s), uintptr(unsafe.Pointer(&byDefault)), 0, 8, 0, 0)
	var this unix.Sigset_t
	this.Val[(s-1)/64] = 1 << ((s - 1) % 64)
	_ = unix.PthreadSigmask(unix.SIG_UNBLOCK, &this, nil)
	_ = unix.Tgkill(os.Getpid(), unix.Gettid(), s)
	os.Exit(128 + int(s))
}
