package launch

import "golang.org/x/sys/unix"

// asOwner calls f with the effective user id of the sandbox's root, on this thread alone.
//
// The user namespace that f makes belongs to that id. The kernel charges what it limits
// by user (inotify instances and watches, message queues, pending signals, namespaces)
// to the owners of all namespaces above: were it root, one sandbox could use up what
// root, and so all other sandboxes, may have. An id that nothing else runs as has limits
// of its own. The capabilities stay, for f needs them outside.
//
// The caller is locked to the thread, so that Go starts no other threads from it.
func asOwner(uid int, f func() error) error {
	bits, err := unix.PrctlRetInt(unix.PR_GET_SECUREBITS, 0, 0, 0, 0)
	if err != nil {
		return err
	}
	const noSetuidFixup = 1 << 2 // SECBIT_NO_SETUID_FIXUP: a change of uid leaves capabilities alone
	if err := unix.Prctl(unix.PR_SET_SECUREBITS, uintptr(bits|noSetuidFixup), 0, 0, 0); err != nil {
		return err
	}
	if err := setEffective(uid); err != nil {
		return err
	}
	err = f()
	if back := setEffective(unix.Getuid()); back != nil {
		return back
	}
	// The kernel took the change of uid for a program with secrets of its own.
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0)
	if back := unix.Prctl(unix.PR_SET_SECUREBITS, uintptr(bits), 0, 0, 0); back != nil {
		return back
	}
	return err
}

// setEffective sets the effective user id of this thread; that of package syscall
// would do so for all.
func setEffective(uid int) error {
	const same = ^uintptr(0)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, same, uintptr(uid), same); errno != 0 {
		return errno
	}
	return nil
}
