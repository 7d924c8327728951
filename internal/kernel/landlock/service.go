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
	attr := unix.LandlockRulesetAttr{Handled_access_fs: all(abi)}
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
		err = Grant{at, unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR}.add(int(fd), attr.Handled_access_fs)
		unix.Close(at)
		if err != nil {
			return err
		}
	}
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0); errno != 0 {
		return errno
	}
	return nil
}
