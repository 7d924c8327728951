// Package landlock adds a second wall behind the capabilities and the mount flags of a
// sandbox, by raw system calls: libraries for it set no_new_privs, which would break
// sudo inside.
//
// What it adds once the sandbox is in its own root: no device node can be made and no
// device but the harmless ones in /dev be controlled, even by a process that regained
// capabilities; no mount can be changed; processes outside cannot be traced.
package landlock

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// The ABI versions that added what is used here.
const (
	abiRefer    = 2 // kernel 5.19
	abiIoctlDev = 5 // kernel 6.10
	abiScope    = 6 // kernel 6.12
	abiTsync    = 8 // kernel 7.0
)

// ABI returns the version of Landlock that the kernel offers; 0 is none.
func ABI() int {
	v, _, errno := unix.RawSyscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		return 0
	}
	return int(v)
}

// devices are where ioctl on devices is left free: all that a sandbox's /dev holds.
var devices = []string{"dev/pts", "dev/ptmx", "dev/tty", "dev/console", "dev/null", "dev/zero", "dev/full", "dev/random", "dev/urandom"}

// plan is what can be asked of an ABI.
type plan struct {
	handled  uint64 // rights on files that are taken away but where a rule grants them
	scoped   uint64
	tsync    bool
	describe string
}

func planFor(abi int) plan {
	if abi < abiRefer {
		// Version 1 forbids every rename between directories.
		return plan{describe: fmt.Sprintf("off: ABI %d, the kernel has none that lets files move between directories (5.19)", abi)}
	}
	p := plan{handled: unix.LANDLOCK_ACCESS_FS_MAKE_CHAR | unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK | unix.LANDLOCK_ACCESS_FS_REFER}
	forbids := []string{"making device nodes", "changing mounts", "tracing processes outside"}
	if abi >= abiIoctlDev {
		p.handled |= unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
		forbids = append(forbids, "ioctl on devices but terminals, null, zero, full, random")
	}
	// Threads restricted one by one come to be in sibling domains, between which scopes
	// forbid signals too: init could not signal what another of its threads started. So
	// scopes wait for TSYNC; the pid and network namespaces bound both until then.
	if abi >= abiTsync {
		p.tsync = true
		p.scoped = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL
		forbids = append(forbids, "signals and abstract Unix sockets to the outside")
	}
	p.describe = fmt.Sprintf("ABI %d forbids %s", abi, strings.Join(forbids, ", "))
	return p
}

// Apply restricts every thread of the process and all that they start, for ever. root is
// the sandbox's root directory as the caller sees it: "/" after pivot_root. It returns
// what is forbidden, or why nothing is, for people. The caller needs no_new_privs or
// CAP_SYS_ADMIN in its user namespace, else Apply fails with Denied.
//
// Before ABI 8 it works in programs without cgo only, and each thread gets a domain of
// its own: a process must be traced from the thread, or a child of the thread, that
// started it.
func Apply(root string) (string, error) {
	p := planFor(ABI())
	if p.handled == 0 {
		return p.describe, nil
	}
	ruleset, err := p.ruleset(root)
	if err != nil {
		return "", err
	}
	defer unix.Close(ruleset)
	var errno syscall.Errno
	if p.tsync {
		_, _, errno = unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, uintptr(ruleset), unix.LANDLOCK_RESTRICT_SELF_TSYNC, 0)
	} else {
		_, _, errno = syscall.AllThreadsSyscall(unix.SYS_LANDLOCK_RESTRICT_SELF, uintptr(ruleset), 0, 0)
	}
	switch errno {
	case 0:
		return p.describe, nil
	case unix.EPERM:
		return "", berm.Errorf(berm.Denied, "restrict by Landlock: %w", errno).
			WithHint("set no_new_privs first, or call with CAP_SYS_ADMIN in the user namespace")
	case unix.ENOTSUP:
		return "", berm.Errorf(berm.Unsupported, "restrict by Landlock: every thread at once: %w", errno).WithHint("build with CGO_ENABLED=0")
	default:
		return "", berm.Errorf(berm.Internal, "restrict by Landlock: %w", errno)
	}
}

// ruleset makes a ruleset: everything but device nodes and device control is granted
// below root.
func (p plan) ruleset(root string) (int, error) {
	attr := unix.LandlockRulesetAttr{Handled_access_fs: p.handled, Scoped: p.scoped}
	size := unsafe.Sizeof(attr)
	if p.scoped == 0 {
		size = unsafe.Sizeof(attr.Handled_access_fs) // all that ABI 2 knows
	}
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), size, 0)
	if errno != 0 {
		return -1, berm.Errorf(berm.Internal, "make Landlock ruleset: %w", errno)
	}
	ruleset := int(fd)
	err := allow(ruleset, root, unix.LANDLOCK_ACCESS_FS_REFER)
	for _, device := range devices {
		if err != nil || p.handled&unix.LANDLOCK_ACCESS_FS_IOCTL_DEV == 0 {
			break
		}
		if err = allow(ruleset, filepath.Join(root, device), unix.LANDLOCK_ACCESS_FS_IOCTL_DEV); errors.Is(err, unix.ENOENT) {
			err = nil
		}
	}
	if err != nil {
		unix.Close(ruleset)
		return -1, err
	}
	return ruleset, nil
}

// allow grants rights on a file, or on all below a directory.
func allow(ruleset int, path string, rights uint64) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return berm.Errorf(berm.Internal, "Landlock rule for %s: %w", path, err)
	}
	defer unix.Close(fd)
	// The kernel's struct is packed: the descriptor follows the rights without a gap.
	rule := unix.LandlockPathBeneathAttr{Allowed_access: rights, Parent_fd: int32(fd)}
	if _, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(ruleset), unix.LANDLOCK_RULE_PATH_BENEATH,
		uintptr(unsafe.Pointer(&rule)), 0, 0, 0); errno != 0 {
		return berm.Errorf(berm.Internal, "Landlock rule for %s: %w", path, errno)
	}
	return nil
}
