package landlock

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// The ABI versions that a confinement differs in, besides those above.
const (
	abiTruncate = 3 // kernel 6.2
	abiNet      = 4 // kernel 6.7
	abiScope    = 6 // kernel 6.12
)

// What a Grant can give.
const (
	// Read is to list directories, to read and to execute files.
	Read uint64 = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR
	// Write is everything but device nodes and the control of devices.
	Write uint64 = Read | Append | unix.LANDLOCK_ACCESS_FS_REMOVE_DIR |
		unix.LANDLOCK_ACCESS_FS_REMOVE_FILE | unix.LANDLOCK_ACCESS_FS_MAKE_DIR | unix.LANDLOCK_ACCESS_FS_MAKE_REG |
		unix.LANDLOCK_ACCESS_FS_MAKE_FIFO | unix.LANDLOCK_ACCESS_FS_MAKE_SOCK | unix.LANDLOCK_ACCESS_FS_MAKE_SYM |
		unix.LANDLOCK_ACCESS_FS_REFER
	// Append is to change the content of files that are there.
	Append uint64 = unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_TRUNCATE
	// Device is to use a device, its controls included.
	Device uint64 = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
)

// onFiles are the rights that a rule about something else than a directory may name.
const onFiles = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_READ_FILE | Append | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV

// A Grant is a file, or a directory with all below it, and the rights on it. Rights that
// the kernel's version does not know, or that the file cannot have, are left out.
type Grant struct {
	FD     int // open in any way, O_PATH included
	Rights uint64
}

// Confine takes away all rights on files but those granted, TCP, and signals and abstract
// sockets to processes outside, as far as an ABI version (at least 2, at most the
// kernel's) goes, for the calling thread and all that it starts, for ever. The caller
// executes a program next, on the same thread, with no_new_privs set.
func Confine(abi int, grants []Grant) error {
	if abi < abiRefer {
		return unix.EOPNOTSUPP
	}
	attr := unix.LandlockRulesetAttr{Handled_access_fs: all(abi)}
	size := unsafe.Offsetof(attr.Handled_access_net)
	if abi >= abiNet {
		attr.Handled_access_net = unix.LANDLOCK_ACCESS_NET_BIND_TCP | unix.LANDLOCK_ACCESS_NET_CONNECT_TCP
		size = unsafe.Offsetof(attr.Scoped)
	}
	if abi >= abiScope {
		attr.Scoped = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL
		size = unsafe.Offsetof(attr.Scoped) + unsafe.Sizeof(attr.Scoped)
	}
	fd, _, errno := unix.RawSyscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), size, 0)
	if errno != 0 {
		return errno
	}
	ruleset := int(fd)
	defer unix.Close(ruleset)
	for _, g := range grants {
		// EBADFD: a file without a path, such as a memfd, which is never held.
		if err := g.add(ruleset, attr.Handled_access_fs); err != nil && err != unix.EBADFD {
			return err
		}
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// all are the rights on files that an ABI version knows.
func all(abi int) uint64 {
	rights := Write | unix.LANDLOCK_ACCESS_FS_MAKE_CHAR | unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK
	if abi < abiTruncate {
		rights &^= unix.LANDLOCK_ACCESS_FS_TRUNCATE
	}
	if abi >= abiIoctlDev {
		rights |= unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	}
	return rights
}

// add makes a rule of a grant, with the rights that the ruleset handles.
func (g Grant) add(ruleset int, handled uint64) error {
	var stat unix.Stat_t
	if err := unix.Fstat(g.FD, &stat); err != nil {
		return err
	}
	rights := g.Rights & handled
	if stat.Mode&unix.S_IFMT != unix.S_IFDIR {
		rights &= onFiles
	}
	return allow(ruleset, g.FD, rights)
}

// HoldsSignals says whether an ABI version keeps a confined process from signalling others.
func HoldsSignals(abi int) bool { return abi >= abiScope }

// HoldsTruncate says whether an ABI version keeps a confined process from emptying files.
func HoldsTruncate(abi int) bool { return abi >= abiTruncate }
