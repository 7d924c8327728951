package main

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/kernel/landlock"
	"github.com/berm-sandbox/berm/internal/network/egress"
	service "github.com/berm-sandbox/berm/internal/network/egress/server"
)

// newEgressCommand is the network service, which berm starts for itself.
func newEgressCommand() *cobra.Command {
	var resolvers []string
	var shared bool
	cmd := &cobra.Command{
		Use:    egress.Command,
		Short:  "Be the network service of sandboxes",
		Hidden: true,
		Args:   cli.UsageArgs(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			// It was executed by a descriptor, and has its number for a name.
			_ = os.WriteFile("/proc/self/comm", []byte(egress.Command), 0)
			// Nobody of the same user looks into it, it never gains rights, and what it parses
			// does not end up in a core file.
			if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
				return berm.Errorf(berm.Internal, "give rights away: %w", err)
			}
			// Each thread has a no_new_privs of its own.
			if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
				return berm.Errorf(berm.Internal, "give rights away: %w", errno)
			}
			// What can be read is what the resolvers' file and the certificates of authorities
			// need; all else comes to it as descriptors. Without Landlock it has the rights of
			// the user.
			if err := landlock.ReadOnly(readable()...); err != nil && err != unix.EOPNOTSUPP && err != unix.ENOTSUP {
				return berm.Errorf(berm.Internal, "give rights on files away: %w", err)
			}
			_ = unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{})
			debug.SetGCPercent(400) // most of its memory is packets on their way
			var c service.Config
			for _, r := range resolvers {
				addr, err := netip.ParseAddrPort(r)
				if err != nil {
					return cli.UsageError{Err: err}
				}
				c.Resolvers = append(c.Resolvers, addr)
			}
			s, err := service.New(c)
			if err != nil {
				return err
			}
			file := os.NewFile(egress.ServiceFD, "owner")
			conn, err := net.FileConn(file)
			file.Close()
			owner, ok := conn.(*net.UnixConn)
			if err != nil || !ok {
				return berm.Errorf(berm.Invalid, "this command is started by berm")
			}
			if shared {
				return s.Serve(owner)
			}
			s.Attend(owner)
			return nil
		},
	}
	cmd.Flags().StringArrayVar(&resolvers, egress.Resolver, nil, "resolver to ask, with its port")
	cmd.Flags().BoolVar(&shared, egress.Shared, false, "serve many sandboxes, whose connections come over the first")
	return cmd
}

// readable are the files and directories that the network service opens by name: for the
// resolvers, the authorities that are trusted, and the time zone.
func readable() []string {
	paths := []string{"/etc", "/usr", "/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager", os.Getenv("SSL_CERT_FILE")}
	if target, err := filepath.EvalSymlinks("/etc/resolv.conf"); err == nil {
		paths = append(paths, filepath.Dir(target))
	}
	return append(paths, filepath.SplitList(os.Getenv("SSL_CERT_DIR"))...)
}
