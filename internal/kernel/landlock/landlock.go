// Package landlock adds a second wall behind the capabilities and the mount flags of a
// sandbox, by raw system calls: libraries for it set no_new_privs, which would break
// sudo inside.
//
// What it adds once the sandbox is in its own root: no device node can be made and no
// device but the harmless ones be controlled, even by a process that regained
// capabilities; no mount can be changed; processes outside cannot be traced.
//
// It is linked into the first process of every sandbox, so it imports raw system calls
// only; its errors are those of the kernel.
package landlock

import (
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The ABI versions that added what is used here.
const (
	abiRefer    = 2 // kernel 5.19
	abiIoctlDev = 5 // kernel 6.10
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

// Rules are what is taken away.
type Rules struct {
	ABI    int
	Files  uint64 // rights on files (LANDLOCK_ACCESS_FS_…); 0 when nothing is taken away
	Scopes uint64 // ways to the outside (LANDLOCK_SCOPE_…)
}

// For returns the rules that an ABI version can enforce.
func For(abi int) Rules {
	r := Rules{ABI: abi}
	if abi < abiRefer {
		return r // version 1 forbids every move of a file between directories
	}
	r.Files = unix.LANDLOCK_ACCESS_FS_MAKE_CHAR | unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK | unix.LANDLOCK_ACCESS_FS_REFER
	if abi >= abiIoctlDev {
		r.Files |= unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	}
	// Scopes (ABI 6) on some threads of a Go program would keep them from signalling the
	// others, so they wait for TSYNC. The pid and the network namespace bound signals and
	// abstract sockets anyway.
	if abi >= abiTsync {
		r.Scopes = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL
	}
	return r
}

// String says what the rules forbid, or why there are none, for people.
func (r Rules) String() string {
	version := "ABI " + strconv.Itoa(r.ABI)
	if r.Files == 0 {
		return "off: " + version + "; the first that lets files move between directories is 2 (Linux 5.19)"
	}
	forbidden := []string{"no making of device nodes", "no change of mounts", "no tracing of processes outside"}
	if r.Files&unix.LANDLOCK_ACCESS_FS_IOCTL_DEV != 0 {
		forbidden = append(forbidden, "no ioctl on other devices than those listed")
	}
	if r.Scopes != 0 {
		forbidden = append(forbidden, "no signals and abstract sockets to the outside")
	}
	return version + ": " + strings.Join(forbidden, ", ")
}

// Restrict puts the rules in force for the calling thread and all that it starts, for
// ever, and for all threads of the process when there are scopes. The caller is in the
// sandbox's root; devices are the files and directories where ioctl on devices stays
// free. Without no_new_privs or CAP_SYS_ADMIN in the user namespace the error is EPERM.
//
// Threads that are restricted one by one come to be in separate domains, and what one
// starts cannot trace what the other started; so programs are started from one thread.
func (r Rules) Restrict(devices ...string) error {
	if r.Files == 0 {
		return nil
	}
	attr := unix.LandlockRulesetAttr{Handled_access_fs: r.Files, Scoped: r.Scopes}
	size := unsafe.Offsetof(attr.Handled_access_net) // what ABI 2 knows
	var flags uintptr
	if r.Scopes != 0 {
		size = unsafe.Offsetof(attr.Scoped) + unsafe.Sizeof(attr.Scoped)
		flags = unix.LANDLOCK_RESTRICT_SELF_TSYNC
	}
	fd, _, errno := unix.RawSyscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), size, 0)
	if errno != 0 {
		return errno
	}
	ruleset := int(fd)
	defer unix.Close(ruleset)
	if err := grant(ruleset, "/", unix.LANDLOCK_ACCESS_FS_REFER); err != nil {
		return err
	}
	if r.Files&unix.LANDLOCK_ACCESS_FS_IOCTL_DEV != 0 {
		for _, path := range devices {
			if err := grant(ruleset, path, unix.LANDLOCK_ACCESS_FS_IOCTL_DEV); err != nil {
				return err
			}
		}
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, flags, 0); errno != 0 {
		return errno
	}
	return nil
}

// grant allows rights on a file, or on all below a directory.
func grant(ruleset int, path string, rights uint64) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return allow(ruleset, fd, rights)
}

// allow is grant for what is open already.
func allow(ruleset, fd int, rights uint64) error {
	rule := unix.LandlockPathBeneathAttr{Allowed_access: rights, Parent_fd: int32(fd)}
	_, _, errno := unix.RawSyscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(ruleset), unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&rule)), 0, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}
