//go:build !cgo

package arrival

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/kernel/landlock"
	"github.com/berm-sandbox/berm/internal/kernel/seccomp"
)

// confine gives away what a worker does not need, before it reads a byte of the network. A
// system call that its profile does not list ends it.
func confine() error {
	_ = os.WriteFile("/proc/self/comm", []byte("berm-fetch"), 0)
	failed := func(err error) error { return berm.Errorf(berm.Internal, "give rights away: %w", err) }
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return failed(err)
	}
	if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		return failed(errno)
	}
	if err := landlock.ReadOnly(readable()...); err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return failed(err)
	}
	_ = unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{})
	filter, err := seccomp.Fetch().Assemble("")
	if err != nil {
		return err
	}
	return seccomp.Load(filter)
}

// readable is what is opened by name: for the resolver, and the authorities that are trusted.
func readable() []string {
	paths := []string{
		"/etc", "/usr/share", "/usr/lib/ssl", "/usr/local/share", "/var/lib/ca-certificates",
		"/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager", os.Getenv("SSL_CERT_FILE"),
	}
	if target, err := filepath.EvalSymlinks("/etc/resolv.conf"); err == nil {
		paths = append(paths, filepath.Dir(target))
	}
	return append(paths, filepath.SplitList(os.Getenv("SSL_CERT_DIR"))...)
}
