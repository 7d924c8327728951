package inside

import (
	"encoding/binary"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/driver/namespace/plan"
)

// Exit statuses of a command that could not be started, as shells have them.
const (
	notExecutable = 126
	notFound      = 127
)

// Command is the whole life of init when the sandbox is for one command: it ends with
// it. The environment and the standard streams are those that init has. The caller has
// locked the goroutine to the main thread.
func Command(argv, env []string) {
	setName()
	// With the socket the command could tell the monitor how it ended, and anything else.
	unix.CloseOnExec(plan.Control)
	trees := 0
	for {
		message, fds := receive()
		switch message[0] {
		case plan.Trees:
			trees = cloneTrees(message[1:])
		case plan.SetUp:
			setUp(message[1:], append(fds, attached(trees)...))
			run(argv, env)
		default:
			fail("message", strconv.Itoa(int(message[0])), unix.EINVAL)
		}
	}
}

// run starts the command, passes signals on to it, reaps, and leaves when it ends: the
// kernel then ends whatever it left behind.
func run(argv, env []string) {
	forgetHandlers()
	path, code := find(argv[0], env)
	if code != 0 {
		finish(code << 8)
	}
	// A shell that has jobs of its own changes the terminal's foreground group: the
	// command stays in the group of the caller's, whose terminal it is.
	command, err := syscall.ForkExec(path, argv, &syscall.ProcAttr{Env: env, Files: []uintptr{0, 1, 2}})
	switch err {
	case unix.ENOEXEC: // a script without an interpreter line, as shells take it
		command, err = syscall.ForkExec("/bin/sh", append([]string{"sh", path}, argv[1:]...), &syscall.ProcAttr{Env: env, Files: []uintptr{0, 1, 2}})
	case unix.ENOENT: // found, so its interpreter is not there
		tell(plan.Failed, "start "+argv[0]+": the interpreter of "+path+" is not there")
		finish(notFound << 8)
	}
	if err != nil {
		tell(plan.Failed, "start "+argv[0]+": "+err.Error())
		finish(notExecutable << 8)
	}
	tell(plan.Started, "")
	go passSignals(command)
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		if err == nil && pid == command {
			finish(int(status))
		}
	}
}

// finish reports how the command ended and ends the sandbox.
func finish(status int) {
	tell(plan.Ended, string(binary.BigEndian.AppendUint32(nil, uint32(status))))
	unix.Exit(0)
}

// passSignals sends the command what the monitor asks for, and ends the sandbox when the
// monitor is gone.
func passSignals(command int) {
	var b [2]byte
	for {
		n, err := unix.Read(plan.Control, b[:])
		if n == 0 || (err != nil && err != unix.EINTR) {
			unix.Exit(1)
		}
		if n == 2 && b[0] == plan.Signal {
			_ = unix.Kill(command, syscall.Signal(b[1]))
		}
	}
}

// find looks for a program in the PATH of env, and reports why there is none.
func find(name string, env []string) (path string, code int) {
	if strings.Contains(name, "/") {
		return name, executable(name, name)
	}
	dirs := "/usr/local/bin:/usr/bin:/bin"
	for _, e := range env {
		if value, ok := strings.CutPrefix(e, "PATH="); ok {
			dirs = value
		}
	}
	for dir := range strings.SplitSeq(dirs, ":") {
		if dir == "" {
			dir = "."
		}
		if path := dir + "/" + name; unix.Access(path, unix.X_OK) == nil && !isDir(path) {
			return path, 0
		}
	}
	tell(plan.Failed, name+": command not found in the sandbox's PATH")
	return "", notFound
}

func executable(name, path string) int {
	err := unix.Access(path, unix.X_OK)
	switch {
	case err == unix.ENOENT || err == unix.ENOTDIR:
		tell(plan.Failed, name+": no such file in the sandbox")
		return notFound
	case err != nil:
		tell(plan.Failed, name+": "+err.Error())
		return notExecutable
	case isDir(path):
		tell(plan.Failed, name+": is a directory")
		return notExecutable
	}
	return 0
}

func isDir(path string) bool {
	var stat unix.Stat_t
	return unix.Stat(path, &stat) == nil && stat.Mode&unix.S_IFMT == unix.S_IFDIR
}
