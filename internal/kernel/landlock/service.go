package landlock

import (
	"os"
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
func ReadOnly(paths ...string) error { return keep(nil, paths) }

// keepFiles are the rights of a service on the files of its directory: to make and remove regular ones
// and directories, and to move them.
const keepFiles = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR | Append |
	unix.LANDLOCK_ACCESS_FS_REMOVE_FILE | unix.LANDLOCK_ACCESS_FS_REMOVE_DIR |
	unix.LANDLOCK_ACCESS_FS_MAKE_REG | unix.LANDLOCK_ACCESS_FS_MAKE_DIR | unix.LANDLOCK_ACCESS_FS_REFER

// Within is ReadOnly for a service that keeps files in a directory, which is open: it may write
// below it.
func Within(dir *os.File, paths ...string) error {
	return keep([]Grant{{int(dir.Fd()), keepFiles}}, paths)
}

func keep(grants []Grant, paths []string) error {
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
	for _, g := range grants {
		if err := g.add(int(fd), attr.Handled_access_fs); err != nil {
			return err
		}
	}
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
