// Package outside makes a sandbox's link from outside of the sandbox, where its first
// process may not open /dev/net/tun.
package outside

import (
	"errors"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/link"
)

// Make does what link.Make does in the network namespace that the descriptor names, with
// the rights of the caller, who needs CAP_SYS_ADMIN and CAP_NET_ADMIN over it. Where the
// host cannot have such a link it fails with Unsupported.
func Make(namespace int, c link.Config) (int, error) {
	runtime.LockOSThread()
	own, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		runtime.UnlockOSThread()
		return -1, berm.Errorf(berm.Internal, "open the own network namespace: %w", err)
	}
	defer unix.Close(own)
	if err := unix.Setns(namespace, unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return -1, berm.Errorf(berm.Internal, "enter the sandbox's network namespace: %w", err)
	}
	fd, err := link.Make(c)
	// The thread goes back and is not left to end: a process that it started may have asked
	// for a signal at its parent's death, which is the thread's.
	if err := unix.Setns(own, unix.CLONE_NEWNET); err != nil {
		panic("a thread cannot leave a sandbox's network namespace: " + err.Error())
	}
	runtime.UnlockOSThread()
	return fd, Explain(err)
}

// Explain makes a berm.Error of what link.Make returns.
func Explain(err error) error {
	var failed *link.Error
	if !errors.As(err, &failed) {
		return err
	}
	switch failed.Err {
	case unix.ENOENT, unix.ENODEV, unix.ENXIO, unix.EOPNOTSUPP, unix.EAFNOSUPPORT:
		return berm.Errorf(berm.Unsupported, "no network link: %w", err).WithHint("load the kernel's tun module: modprobe tun")
	case unix.EACCES, unix.EPERM:
		return berm.Errorf(berm.Unsupported, "no network link: %w", err).WithHint("let this user open /dev/net/tun (mode 0666, as udev sets it) and make user namespaces")
	}
	return berm.Errorf(berm.Internal, "no network link: %w", err)
}
