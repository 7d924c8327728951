package landlock

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	kernel "github.com/berm-sandbox/berm/internal/kernel/landlock"
	"github.com/berm-sandbox/berm/internal/kernel/seccomp"
)

// failureFD is where the process that becomes the command writes why it cannot. The kernel
// closes it when it does.
const failureFD = 3

// devices are those that every program may use. The user's other terminals are below
// /dev/pts, so new pseudo terminals cannot be had; those of the standard streams can.
var devices = []string{"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"}

// enter takes away the rights of this process and becomes the command. It does not return.
func enter() {
	// Landlock restricts a thread; the one that executes is all that is left of a process.
	runtime.LockOSThread()
	err := enterCommand()
	_ = json.NewEncoder(os.NewFile(failureFD, "failure")).Encode(failure{Kind: berm.KindOf(err), Msg: err.Error(), Hint: berm.HintOf(err)})
	os.Exit(1)
}

func enterCommand() error {
	o, err := parse(os.Args)
	if err != nil {
		return berm.Errorf(berm.Internal, "the command's process was started with %q", os.Args)
	}
	// Descriptors that the caller got itself and does not know of.
	if err := unix.CloseRange(failureFD, ^uint(0)>>32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return berm.Errorf(berm.Unsupported, "close other descriptors: %w", err).WithHint("use Linux 5.11 or newer")
	}
	profile, err := Profile(o.Profile, o.abi)
	if err != nil {
		return err
	}
	filter, err := profile.Assemble("")
	if err != nil {
		return err
	}
	program, err := exec.LookPath(o.Argv[0])
	if err != nil {
		return programError(o.Argv[0], err)
	}
	grants, err := o.grants()
	if err != nil {
		return err
	}
	// With the limit 1 the kernel hands no core to the host's core_pattern. Where the limit
	// is 0 already it cannot be raised.
	var core unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_CORE, &core); err == nil && core.Max > 0 {
		if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 1, Max: 1}); err != nil {
			return berm.Errorf(berm.Internal, "limit cores: %w", err)
		}
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	if err := unix.Capset(&header, &none[0]); err != nil {
		return berm.Errorf(berm.Internal, "drop capabilities: %w", err)
	}
	// With it root's programs gain no capabilities either.
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return berm.Errorf(berm.Internal, "set no_new_privs: %w", err)
	}
	if err := kernel.Confine(o.abi, grants); err != nil {
		return berm.Errorf(berm.Internal, "put Landlock in force: %w", err)
	}
	if err := seccomp.Load(filter); err != nil {
		return err
	}
	return programError(o.Argv[0], unix.Exec(program, o.Argv, os.Environ()))
}

// programError says why a program cannot be executed.
func programError(name string, err error) error {
	switch {
	case errors.Is(err, exec.ErrNotFound), errors.Is(err, unix.ENOENT):
		return berm.Errorf(berm.NotFound, "%s: no such program: %w", name, err)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return berm.Errorf(berm.Denied, "%s cannot be executed: %w", name, err).
			WithHint("open the directory of the program and of its libraries for reading")
	}
	return berm.Errorf(berm.Invalid, "%s cannot be executed: %w", name, err)
}

// grants opens what the order and every program needs.
func (o *Order) grants() ([]kernel.Grant, error) {
	var list []kernel.Grant
	add := func(path string, rights uint64) error {
		fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err == nil {
			list = append(list, kernel.Grant{FD: fd, Rights: rights})
		}
		return err
	}
	// Foreign processes are shown in /proc, but what is theirs there needs the right to
	// trace, which Landlock denies. Nothing in it is written: a number below another
	// process's would be.
	if err := add("/proc", kernel.Read); err != nil {
		return nil, berm.Errorf(berm.Internal, "open /proc: %w", err)
	}
	for _, path := range devices {
		if err := add(path, kernel.Device); err != nil && !errors.Is(err, unix.ENOENT) {
			return nil, berm.Errorf(berm.Internal, "open %s: %w", path, err)
		}
	}
	for i, path := range append(append([]string{}, o.Read...), o.Write...) {
		rights := kernel.Read
		if i >= len(o.Read) {
			rights = kernel.Write
		}
		if err := add(path, rights); errors.Is(err, unix.ENOENT) {
			return nil, berm.Errorf(berm.NotFound, "%s: %w", path, err)
		} else if err != nil {
			return nil, berm.Errorf(berm.Denied, "open %s: %w", path, err)
		}
	}
	for fd := range failureFD {
		rights, err := streamRights(fd)
		if err != nil {
			return nil, berm.Errorf(berm.Internal, "look at standard stream %s: %w", strconv.Itoa(fd), err)
		}
		if rights != 0 {
			list = append(list, kernel.Grant{FD: fd, Rights: rights})
		}
	}
	return list, nil
}

// streamRights is what a standard stream may be opened for again (/dev/stdout): what it is
// open for. Pipes and sockets need no rights.
func streamRights(fd int) (uint64, error) {
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return 0, err
	}
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return 0, err
	}
	var rights uint64
	switch stat.Mode & unix.S_IFMT {
	case unix.S_IFCHR:
		rights = unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	case unix.S_IFREG:
	default:
		return 0, nil
	}
	if mode := flags & unix.O_ACCMODE; mode != unix.O_WRONLY {
		rights |= unix.LANDLOCK_ACCESS_FS_READ_FILE
	}
	if mode := flags & unix.O_ACCMODE; mode != unix.O_RDONLY {
		rights |= kernel.Append
	}
	return rights, nil
}

// tryAction asks whether filters can answer with an action.
func tryAction(action *uint32) error {
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_GET_ACTION_AVAIL, 0, uintptr(unsafe.Pointer(action))); errno != 0 {
		return errno
	}
	return nil
}
