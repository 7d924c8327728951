// Package landlock runs one command held by Landlock and a seccomp filter alone, where the
// host gives no namespaces. It is the weaker path of local mode; Weaker says in what.
//
// Two processes stand between the caller and the command, both the running program
// executed again, so any program that links the package can be one (see the init
// function). The keeper is the ancestor of all that the command starts and ends it, also
// when the caller dies; the other takes its own rights away and becomes the command.
package landlock

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	kernel "github.com/berm-sandbox/berm/internal/kernel/landlock"
	"github.com/berm-sandbox/berm/internal/kernel/seccomp"
)

// Order says what to run and what it may reach.
type Order struct {
	Argv []string
	Dir  string   // absolute
	Env  []string // all of it; TMPDIR is set to TempDir
	// Files are the standard streams; nil is /dev/null. A directory, and a socket other
	// than a connected Unix stream, is refused with Invalid.
	Files [3]*os.File
	// Read are the files and directories, with all below, that can be read and executed.
	// Their last symbolic link is followed.
	Read []string
	// Write are those that can be changed as well.
	Write []string
	// TempDir is one more; hard-coded /tmp is not reachable unless it is listed.
	TempDir string
	Limits  berm.Limits   // none can be enforced: Unsupported
	Timeout time.Duration // 0 is none
	Profile string        // name of a seccomp profile; see the function Profile
	// Signals are sent on to the command. May be nil.
	Signals <-chan os.Signal

	abi int // at most this version of Landlock, for tests; 0 is the kernel's
}

// minABI is the first version that lets files move between directories.
const minABI = 2

// Available says with Unsupported why nothing can be run here.
func Available() error {
	switch abi := kernel.ABI(); {
	case abi == 1:
		return berm.Errorf(berm.Unsupported, "Landlock ABI 1 forbids moving files between directories").
			WithHint("use Linux 5.19 or newer (ABI %d); from 6.12 on (ABI 6) signals are held as well", minABI)
	case abi < minABI:
		return berm.Errorf(berm.Unsupported, "the kernel has no Landlock, or it is off, or this container's seccomp profile refuses it").
			WithHint("use Linux 5.19 or newer with CONFIG_SECURITY_LANDLOCK and landlock in the list lsm= of its command line; in a container use a seccomp profile that allows landlock_create_ruleset")
	}
	action := uint32(unix.SECCOMP_RET_ERRNO)
	if err := tryAction(&action); err != nil {
		return berm.Errorf(berm.Unsupported, "seccomp filters: %w", err).WithHint("the kernel needs CONFIG_SECCOMP_FILTER")
	}
	if _, err := children(os.Getpid()); err != nil {
		return berm.Errorf(berm.Unsupported, "list child processes: %w", err).
			WithHint("mount /proc; the kernel needs CONFIG_PROC_CHILDREN")
	}
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return berm.Errorf(berm.Unsupported, "process descriptors: %w", err).
			WithHint("use a container whose seccomp profile allows pidfd_open")
	}
	unix.Close(fd)
	return nil
}

// Weaker says, in a sentence each, what holds less than the namespace level under a version
// of Landlock; 0 is the kernel's.
func Weaker(abi int) []string {
	list := []string{
		"Writes go straight into the directories that are opened for them; there is no copy-on-write, and no path below them can be hidden.",
		"It sees the number, name and arguments of your other processes, but not their memory, environment, files or working directory.",
		"It can ask for the size, owner, mode and times of any path that it guesses, and read where symbolic links point; contents and listings stay closed.",
		"It can change the mode (not set-user-ID or set-group-ID), the group and the times of your files outside the workspace.",
		"/proc shows the host's mounts, host name and network tables.",
		"Memory, processors, processes and disk are not limited.",
		"When Berm and its keeper process are killed in the same moment, programs that detached themselves run on, still held.",
	}
	if abi == 0 {
		abi = kernel.ABI()
	}
	if !kernel.HoldsSignals(abi) {
		list = append(list, "It can send signals to your other processes and so end them, Berm's own among them; Linux 6.12 (Landlock ABI 6) stops that.")
	}
	return list
}

// Profile is the seccomp profile that a command gets under a version of Landlock: the named
// one without what Landlock does not hold. It fails with Invalid for an unknown name.
func Profile(name string, abi int) (seccomp.Profile, error) {
	profile, err := seccomp.Lookup(name)
	if err != nil {
		return seccomp.Profile{}, err
	}
	if !kernel.HoldsTruncate(abi) {
		return profile.Shared("truncate"), nil // by path; an open file is held by its descriptor
	}
	return profile.Shared(), nil
}

// What the keeper reports.
type report struct {
	Exit  berm.Exit
	Error *failure `json:",omitempty"`
}

// A failure is a berm.Error on its way between processes.
type failure struct {
	Kind      berm.Kind
	Msg, Hint string
}

// Run runs a command to its end, and ends all that it started. It fails when the command
// could not be started: with NotFound or Denied when that is the program's fault, Invalid
// for a wrong order, Unsupported for what this path cannot enforce. When ctx ends first,
// the command is killed and the exit says so.
func Run(ctx context.Context, o Order) (berm.Exit, error) {
	if err := Available(); err != nil {
		return berm.Exit{}, err
	}
	if err := o.check(); err != nil {
		return berm.Exit{}, err
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return berm.Exit{}, berm.Errorf(berm.Internal, "%w", err)
	}
	defer null.Close()
	orderEnd, orders, err := os.Pipe()
	if err != nil {
		return berm.Exit{}, berm.Errorf(berm.Internal, "make a pipe: %w", err)
	}
	defer orderEnd.Close()
	defer orders.Close()
	reports, reportEnd, err := os.Pipe()
	if err != nil {
		return berm.Exit{}, berm.Errorf(berm.Internal, "make a pipe: %w", err)
	}
	defer reports.Close()
	defer reportEnd.Close()

	files := o.Files
	for i, f := range files {
		if f == nil {
			files[i] = null
		}
	}
	keeper := exec.Cmd{
		Path: "/proc/self/exe", Args: o.args(), Dir: o.Dir, Env: o.environment(),
		Stdin: files[0], Stdout: files[1], Stderr: files[2], ExtraFiles: []*os.File{orderEnd, reportEnd},
	}
	if err := keeper.Start(); errors.Is(err, unix.E2BIG) || errors.Is(err, unix.EINVAL) {
		return berm.Exit{}, berm.Errorf(berm.Invalid, "the command's arguments or environment: %w", err)
	} else if err != nil {
		return berm.Exit{}, berm.Errorf(berm.Internal, "start the keeper: %w", err)
	}
	orderEnd.Close()
	reportEnd.Close()

	done := make(chan struct{})
	defer close(done)
	go func() {
		signals := o.Signals
		for {
			select {
			case s, open := <-signals:
				if !open {
					signals = nil
					continue
				}
				if n, ok := s.(syscall.Signal); ok {
					_, _ = orders.Write([]byte{byte(n)}) // fails when the command has ended
				}
			case <-ctx.Done():
				orders.Close()
				return
			case <-done:
				return
			}
		}
	}()
	answer, _ := io.ReadAll(reports)
	waitErr := keeper.Wait()
	var r report
	if err := json.Unmarshal(answer, &r); err != nil {
		return berm.Exit{Reason: berm.ReasonCrash, Code: -1, At: time.Now(), Detail: "its keeper broke: " + errorText(waitErr)}, nil
	}
	if f := r.Error; f != nil {
		return berm.Exit{}, &berm.Error{Kind: f.Kind, Msg: f.Msg, Hint: f.Hint}
	}
	return r.Exit, nil
}

func errorText(err error) string {
	if err == nil {
		return "it left without a report"
	}
	return err.Error()
}

// check refuses what is wrong with an order before anything is started.
func (o *Order) check() error {
	if len(o.Argv) == 0 || o.Argv[0] == "" {
		return berm.Errorf(berm.Invalid, "there is no command to run")
	}
	for _, l := range []struct {
		name string
		set  bool
	}{
		{"memory", o.Limits.Memory != 0}, {"processor", o.Limits.CPU != 0}, {"process", o.Limits.PIDs != 0}, {"disk", o.Limits.Disk != 0},
		{"disk rate", o.Limits.ReadBytes != 0 || o.Limits.WriteBytes != 0},
	} {
		if l.set {
			return berm.Errorf(berm.Unsupported, "a %s limit cannot be enforced by Landlock and seccomp alone", l.name).
				WithHint("leave it out, or start berm under one: systemd-run --user --scope -p MemoryMax=2G -p TasksMax=512 berm run …")
		}
	}
	if _, err := seccomp.Lookup(o.Profile); err != nil {
		return err
	}
	for _, path := range slices.Concat([]string{o.Dir}, o.Read, o.writable()) {
		if !strings.HasPrefix(path, "/") {
			return berm.Errorf(berm.Invalid, "path %q is not absolute", path)
		}
	}
	if info, err := os.Stat(o.Dir); err != nil {
		return berm.Errorf(berm.NotFound, "working directory: %w", err)
	} else if !info.IsDir() {
		return berm.Errorf(berm.Invalid, "working directory %s is not a directory", o.Dir)
	}
	for i, f := range o.Files {
		if f == nil {
			continue
		}
		if err := checkStream(f); err != nil {
			return berm.Errorf(berm.Invalid, "standard stream %d: %w", i, err).
				WithHint("use a file, a pipe, a terminal or a connected Unix stream")
		}
	}
	return nil
}

// checkStream refuses a descriptor that would be a way out: below a directory files can be
// reached, and a socket that is not connected for good can be sent elsewhere.
func checkStream(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var problem error
	err = raw.Control(func(fd uintptr) {
		var stat unix.Stat_t
		if problem = unix.Fstat(int(fd), &stat); problem != nil {
			return
		}
		switch stat.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			problem = errors.New("is a directory")
		case unix.S_IFSOCK:
			domain, _ := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DOMAIN)
			kind, _ := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_TYPE)
			_, unconnected := unix.Getpeername(int(fd))
			if domain != unix.AF_UNIX || kind == unix.SOCK_DGRAM || unconnected != nil {
				problem = errors.New("is a socket, and not a connected Unix stream")
			}
		}
	})
	return errors.Join(err, problem)
}

func (o *Order) writable() []string {
	if o.TempDir == "" {
		return o.Write
	}
	return append(slices.Clone(o.Write), o.TempDir)
}

func (o *Order) environment() []string {
	// An empty list is not nil, which would be the caller's own environment.
	env := append([]string{}, o.Env...)
	if o.TempDir != "" {
		env = append(env, "TMPDIR="+o.TempDir) // of two with one name exec.Cmd keeps the last
	}
	return env
}

// args is the order as arguments: unlike JSON they carry any byte that a path can have.
func (o *Order) args() []string {
	abi := kernel.ABI()
	if o.abi != 0 {
		abi = min(abi, o.abi)
	}
	args := []string{keeperName, strconv.Itoa(abi), o.Profile, o.Timeout.String(), strconv.Itoa(len(o.Read)), strconv.Itoa(len(o.writable()))}
	return slices.Concat(args, o.Read, o.writable(), o.Argv)
}

// parse is the reverse of args. It fails for nothing that args made.
func parse(args []string) (Order, error) {
	if len(args) < 6 {
		return Order{}, strconv.ErrSyntax
	}
	abi, err1 := strconv.Atoi(args[1])
	timeout, err2 := time.ParseDuration(args[3])
	reads, err3 := strconv.Atoi(args[4])
	writes, err4 := strconv.Atoi(args[5])
	rest := args[6:]
	if err := errors.Join(err1, err2, err3, err4); err != nil || reads < 0 || writes < 0 || reads+writes >= len(rest) {
		return Order{}, strconv.ErrSyntax
	}
	return Order{abi: abi, Profile: args[2], Timeout: timeout, Read: rest[:reads], Write: rest[reads:][:writes], Argv: rest[reads+writes:]}, nil
}
