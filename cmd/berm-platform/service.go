package main

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/kernel/landlock"
	"github.com/berm-sandbox/berm/internal/kernel/seccomp"
)

// confine gives away what a service does not need: files gives away those on files. Afterwards a
// system call that its profile does not list ends the process.
func confine(command string, profile seccomp.Profile, files func() error) error {
	// It was executed by a descriptor, and has its number for a name.
	_ = os.WriteFile("/proc/self/comm", []byte(command), 0)
	// Nobody of the same user looks into it, it never gains rights, and what it holds does not
	// end up in a core file.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return berm.Errorf(berm.Internal, "give rights away: %w", err)
	}
	// Each thread has a no_new_privs of its own.
	if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		return berm.Errorf(berm.Internal, "give rights away: %w", errno)
	}
	// Without Landlock it has the rights of the user.
	if err := files(); err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return berm.Errorf(berm.Internal, "give rights on files away: %w", err)
	}
	_ = unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{})
	filter, err := profile.Assemble("")
	if err != nil {
		return err
	}
	return seccomp.Load(filter)
}

// confinedError is what a command that is confined returns for its error. To print that as others do
// would take a system call that it never makes: whether there is a terminal is asked by an ioctl.
func confinedError(err error) error {
	if err == nil {
		return nil
	}
	_, _ = os.Stderr.WriteString("berm: " + err.Error() + "\n")
	return cli.ExitError(1)
}

// onlyRead leaves a service to read what the resolvers' file and the certificates of authorities
// need; all else comes to it as descriptors.
func onlyRead() error { return landlock.ReadOnly(readable()...) }

// readable are the files and directories that services open by name: for the resolvers, the
// authorities that are trusted, by this machine's programs too, and the time zone.
func readable() []string {
	paths := []string{
		"/etc", "/usr", "/opt", "/var/lib/ca-certificates", "/home/linuxbrew/.linuxbrew/etc",
		"/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager", os.Getenv("SSL_CERT_FILE"),
	}
	if target, err := filepath.EvalSymlinks("/etc/resolv.conf"); err == nil {
		paths = append(paths, filepath.Dir(target))
	}
	return append(paths, filepath.SplitList(os.Getenv("SSL_CERT_DIR"))...)
}

// ownProgram opens this program, to start services of.
func ownProgram() (*os.File, error) { return os.Open("/proc/self/exe") }
