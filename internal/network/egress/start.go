package egress

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// Command is the hidden command of berm that is the service.
const Command = "egressd"

// ServiceFD is the descriptor on which the service has its first connection.
const ServiceFD = 3

// serviceID is whom the service is when root starts it: an id that nobody else has, below
// those that sandboxes are given and beside the one that builds templates.
const serviceID = 0x70000000 - 2*berm.IDsPerSandbox

// Start starts a service for one sandbox and returns the connection to it. The service ends
// with the connection. program is opened executable that has the command.
func Start(program *os.File) (*net.UnixConn, error) {
	failed := func(err error) error { return berm.Errorf(berm.Internal, "start the network service: %w", err) }
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, failed(err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "service"), os.NewFile(uintptr(pair[1]), "owner")
	defer ours.Close()
	defer theirs.Close()
	// Above the descriptors that the service gets, as ForkExec uses numbers up to there.
	fd, err := unix.FcntlInt(program.Fd(), unix.F_DUPFD_CLOEXEC, 64)
	if err != nil {
		return nil, failed(err)
	}
	defer unix.Close(fd)
	cmd := exec.Cmd{
		Path: "/proc/self/fd/" + strconv.Itoa(fd), Args: []string{"berm", Command}, Dir: "/", Env: []string{"PATH=/usr/bin:/bin"},
		ExtraFiles:  []*os.File{theirs},
		SysProcAttr: &syscall.SysProcAttr{Setsid: true}, // the terminal's keys are not for it
	}
	if os.Geteuid() == 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: serviceID, Gid: serviceID}
	}
	if err := cmd.Start(); err != nil {
		return nil, failed(err)
	}
	go func() { _ = cmd.Wait() }()
	conn, err := net.FileConn(ours)
	if err != nil {
		return nil, failed(err)
	}
	unixConn, ok := conn.(*net.UnixConn)
	if !ok {
		conn.Close()
		return nil, failed(errors.New("no Unix socket"))
	}
	return unixConn, nil
}
