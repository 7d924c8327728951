package process

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"connectrpc.com/connect"
	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/guest/account"
	pb "github.com/berm-sandbox/berm/internal/proto/process"
)

// defaultPath is for sandboxes whose configuration sets no PATH.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// shell runs what execve refuses, as a person's shell would: scripts without "#!"
// run, and what is missing ends with 127 and a message on stderr.
const shell = "/bin/sh"

// command is a process before it is started.
type command struct {
	user *account.Account
	dir  string
	path string
	argv []string
	env  []string
	tty  *pty.Winsize // nil: pipes
	null bool         // stdin is /dev/null
}

// newCommand checks a request. Its errors are connect errors.
func (s *Service) newCommand(req *pb.StartRequest, user *account.Account) (*command, error) {
	cfg := req.GetProcess()
	c := &command{user: user, null: req.Stdin != nil && !*req.Stdin}
	if cfg.GetCmd() == "" {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("no command"))
	}
	c.argv = append([]string{cfg.GetCmd()}, cfg.GetArgs()...)

	var err error
	if c.dir, err = user.Resolve(cfg.GetCwd(), s.config.Workdir()); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	if fi, err := os.Stat(c.dir); err != nil || !fi.IsDir() {
		if cfg.GetCwd() != "" {
			return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("cwd '%s' does not exist", c.dir))
		}
		c.dir = "/" // an account without a home
	}

	env := map[string]string{
		"PATH":    defaultPath,
		"HOME":    user.Home,
		"USER":    user.Name,
		"LOGNAME": user.Name,
	}
	for _, more := range []map[string]string{s.config.Env(), cfg.GetEnvs()} {
		for k, v := range more {
			env[k] = v
		}
	}
	for k, v := range env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.IndexByte(v, 0) >= 0 {
			return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("bad environment variable %q", k))
		}
		c.env = append(c.env, k+"="+v)
	}
	slices.Sort(c.env)
	if slices.ContainsFunc(c.argv, func(a string) bool { return strings.IndexByte(a, 0) >= 0 }) {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("an argument holds a NUL byte"))
	}
	c.path = search(cfg.GetCmd(), env["PATH"], c.dir)

	if req.Pty != nil {
		size := req.GetPty().GetSize()
		c.tty = winsize(size)
	}
	return c, nil
}

func winsize(s *pb.PTY_Size) *pty.Winsize {
	return &pty.Winsize{
		Cols: uint16(min(s.GetCols(), math.MaxUint16)),
		Rows: uint16(min(s.GetRows(), math.MaxUint16)),
	}
}

// search finds a program as execvp does, in the process's PATH and not the agent's.
// What it does not find it returns as it is: the shell will say so.
func search(name, path, dir string) string {
	if strings.Contains(name, "/") {
		return name
	}
	for _, d := range filepath.SplitList(path) {
		if d == "" {
			d = "."
		}
		if !filepath.IsAbs(d) {
			d = filepath.Join(dir, d)
		}
		file := filepath.Join(d, name)
		if fi, err := os.Stat(file); err == nil && fi.Mode().IsRegular() && fi.Mode()&0o111 != 0 {
			return file
		}
	}
	return "" // ENOENT
}

// start starts the command. A command that is missing or not executable is no
// error when there is a shell to say so.
func (c *command) start() (*process, error) {
	p, err := c.spawn()
	if !errors.Is(err, syscall.ENOENT) && !errors.Is(err, syscall.EACCES) && !errors.Is(err, syscall.ENOEXEC) &&
		!errors.Is(err, syscall.ENOTDIR) && !errors.Is(err, syscall.ELOOP) {
		return p, err
	}
	viaShell := *c
	viaShell.path = shell
	viaShell.argv = append([]string{"sh", "-c", `exec "$@"`, "sh"}, c.argv...)
	if p, shellErr := viaShell.spawn(); shellErr == nil {
		return p, nil
	}
	if _, statErr := os.Stat(shell); statErr == nil {
		// The shell is there: what could not be entered is the directory.
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("cannot start in '%s': %w", c.dir, err))
	}
	return nil, &missingError{c.argv[0], err}
}

// missingError says that there is neither the command nor a shell.
type missingError struct {
	name string
	err  error
}

func (e *missingError) Error() string { return fmt.Sprintf("%s: %v", e.name, e.err) }

// code is what a shell would exit with.
func (e *missingError) code() int32 {
	if errors.Is(e.err, syscall.ENOENT) || errors.Is(e.err, syscall.ENOTDIR) {
		return 127
	}
	return 126
}

// spawn starts the command, or fails with the error of execve or of what comes
// before it.
func (c *command) spawn() (_ *process, err error) {
	p := &process{
		input:  make(chan struct{}, 1),
		exited: make(chan struct{}),
		ended:  make(chan struct{}),
	}
	var child [3]*os.File
	var ours []*os.File
	defer func() {
		for i, f := range child {
			if f != nil && (i == 0 || f != child[0]) {
				f.Close()
			}
		}
		if err != nil {
			for _, f := range ours {
				f.Close()
			}
		}
	}()

	pidfd := -1
	attr := &os.ProcAttr{
		Dir: c.dir,
		Env: c.env,
		Sys: &syscall.SysProcAttr{Setsid: true, Credential: credential(c.user), PidFD: &pidfd},
	}
	if c.tty != nil {
		master, slave, err := pty.Open()
		if err != nil {
			return nil, fmt.Errorf("open a terminal: %w", err)
		}
		child = [3]*os.File{slave, slave, slave}
		ours = append(ours, master)
		// The user must be able to open it again by name.
		if err := slave.Chown(int(c.user.UID), -1); err != nil {
			return nil, fmt.Errorf("give the terminal to %s: %w", c.user.Name, err)
		}
		if err := pty.Setsize(master, c.tty); err != nil {
			return nil, fmt.Errorf("set the terminal's size: %w", err)
		}
		attr.Sys.Setctty = true
		p.tty = master
		p.outputs = []*os.File{master}
	} else {
		if c.null {
			child[0], err = os.Open(os.DevNull)
		} else {
			child[0], p.stdin, err = os.Pipe()
			ours = append(ours, p.stdin)
		}
		if err != nil {
			return nil, err
		}
		for i := 1; i <= 2; i++ {
			r, w, err := os.Pipe()
			if err != nil {
				return nil, err
			}
			child[i] = w
			ours = append(ours, r)
			p.outputs = append(p.outputs, r)
		}
	}
	attr.Files = child[:]
	p.os, err = os.StartProcess(c.path, c.argv, attr)
	if err != nil {
		return nil, err
	}
	p.pid = uint32(p.os.Pid)
	if pidfd >= 0 && unix.SetNonblock(pidfd, true) == nil {
		p.pidfd = os.NewFile(uintptr(pidfd), "pidfd") // which tells the poller
	}
	raiseOOM(p.os.Pid)
	return p, nil
}

// credential is nil when the agent is that user already and cannot set groups, as
// in a user namespace that maps a single id.
func credential(a *account.Account) *syscall.Credential {
	c := &syscall.Credential{Uid: a.UID, Gid: a.GID, Groups: a.Groups}
	if !setgroups() {
		if os.Getuid() == int(a.UID) && os.Getgid() == int(a.GID) {
			return nil
		}
		c.NoSetGroups, c.Groups = true, nil
	}
	return c
}

var setgroups = sync.OnceValue(func() bool {
	verdict, _ := os.ReadFile("/proc/self/setgroups")
	return os.Geteuid() == 0 && string(trimNewline(verdict)) != "deny"
})
