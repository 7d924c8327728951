package inside

import (
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/driver/namespace/plan"
)

// carry is the rest of the life of init where it only carries a kernel of the sandbox's own, of
// which it is the parent: it puts together what that sees of the host, starts it, and ends with it.
func carry(message []byte, streams, trees []int) {
	args, steps, found := strings.Cut(string(message), "\x00\x00")
	if !found {
		fail("kernel", "", unix.EINVAL)
	}
	setUp([]byte(steps), trees)
	forgetHandlers()
	unix.CloseOnExec(control)
	argv := strings.Split(args, "\x00")
	kernel, err := syscall.ForkExec("/bin/"+argv[0], argv, &syscall.ProcAttr{
		Dir: "/", Env: []string{}, Files: []uintptr{uintptr(streams[0]), uintptr(streams[1]), 2}, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		fail("start", argv[0], err)
	}
	for _, fd := range streams {
		_ = unix.Close(fd) // the kernel alone has them
	}
	tell(plan.Started, "")
	go func() {
		for {
			if message, _ := receive(); message[0] == plan.Connect {
				connect(string(message[1:]))
			}
		}
	}()
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case err != nil || pid != kernel:
		case status.Signaled():
			tell(plan.Failed, argv[0]+" ended: "+describe(status))
			unix.Exit(1)
		default:
			if status.ExitStatus() != 0 { // the monitor may not read what is in here
				tell(plan.Failed, argv[0]+" ended: "+describe(status)+lastWords(args))
			}
			unix.Exit(status.ExitStatus())
		}
	}
}

// connect connects to a socket and hands the connection over.
func connect(path string) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		if err = unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err == nil {
			err = give(plan.Connected, fd)
		} else {
			_ = unix.Close(fd)
		}
	}
	if err != nil {
		tell(plan.Connected, err.Error())
	}
}

// lastWords are the end of what the kernel logged.
func lastWords(args string) string {
	_, rest, _ := strings.Cut(args, "--log=")
	path, _, _ := strings.Cut(rest, "\x00")
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return ""
	}
	text := make([]byte, 2048)
	if size, err := unix.Seek(fd, 0, unix.SEEK_END); err == nil {
		_, _ = unix.Seek(fd, max(0, size-int64(len(text))), unix.SEEK_SET)
	}
	n, _ := unix.Read(fd, text)
	return ": " + strings.TrimSpace(string(text[:max(n, 0)]))
}
