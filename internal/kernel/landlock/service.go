package landlock

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ReadOnly leaves every thread of the process to read what lies at or below the paths, and
// takes all other rights on files away, that to execute included, for ever: for a service that has what it needs as
// descriptors. Paths that do not exist are passed over. no_new_privs must be set.
//
// Threads that are restricted one by one come to be in separate domains, which is no matter
// for files. It works in programs without cgo only, where Go can reach every thread: the
// error is ENOTSUP otherwise, and EOPNOTSUPP without Landlock.
func ReadOnly(paths ...string) error {
	abi := ABI()
	if abi < abiRefer {
		return unix.EOPNOTSUPP
	}
	attr := unix.LandlockRulesetAttr{Handled_access_fs: Write | unix.LANDLOCK_ACCESS_FS_MAKE_CHAR | unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK}
	if abi < abiTruncate {
		attr.Handled_access_fs &^= unix.LANDLOCK_ACCESS_FS_TRUNCATE
	}
	if abi >= abiIoctlDev {
		attr.Handled_access_fs |= unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	}
	fd, _, errno := unix.RawSyscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), unsafe.Offsetof(attr.Handled_access_net), 0)
	if errno != 0 {
		return errno
	}
	defer unix.Close(int(fd))
	for _, path := range paths {
		at, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err == unix.ENOENT || err == unix.ENOTDIR || err == unix.EACCES {
			continue
		}
		if err != nil {
			return err
		}
		var stat unix.Stat_t
		rule := unix.LandlockPathBeneathAttr{Allowed_access: unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR, Parent_fd: int32(at)}
		if unix.Fstat(at, &stat) == nil && stat.Mode&unix.S_IFMT != unix.S_IFDIR {
			rule.Allowed_access &= onFiles
		}
		_, _, errno := unix.RawSyscall6(unix.SYS_LANDLOCK_ADD_RULE, fd, unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&rule)), 0, 0, 0)
		unix.Close(at)
		if errno != 0 {
			return errno
		}
	}
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0); errno != 0 {
		return errno
	}
	return nil
}
