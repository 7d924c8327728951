package egress

import (
	"net"
	"os"
	"os/exec"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cleanup"
)

// Command is the hidden command of berm that is the service, and BrokerCommand the one that is
// that of credentials.
const (
	Command       = "egressd"
	BrokerCommand = "brokerd"
)

// ServiceFD is the descriptor on which the service has its first connection.
const ServiceFD = 3

// The ids that the services are when root starts them: nobody else has them, below those that
// sandboxes are given and beside the one that builds templates.
var serviceIDs = map[string]uint32{
	Command:       0x70000000 - 2*berm.IDsPerSandbox,
	BrokerCommand: 0x70000000 - 3*berm.IDsPerSandbox,
}

// Shared is the flag with which the service has many sandboxes: its first connection brings
// theirs.
const Shared = "shared"

// Resolver is the flag that names a resolver, with its port.
const Resolver = "resolver"

// Start starts a service for one sandbox and returns the connection to it. The service ends
// with the connection. program is opened executable that has the command. When the process
// has ended, for whatever reason, ended is told why.
func Start(program *os.File, ended func(error)) (*net.UnixConn, error) {
	p, err := start(program, ended, Command)
	if err != nil {
		return nil, err
	}
	return p.conn, nil
}

// StartBroker is Start for the service of credentials.
func StartBroker(program *os.File, ended func(error)) (*net.UnixConn, error) {
	p, err := start(program, ended, BrokerCommand)
	if err != nil {
		return nil, err
	}
	return p.conn, nil
}

func start(program *os.File, ended func(error), command string, args ...string) (*process, error) {
	failed := func(err error) error { return berm.Errorf(berm.Internal, "start berm %s: %w", command, err) }
	conn, theirs, err := pair()
	if err != nil {
		return nil, failed(err)
	}
	defer theirs.Close()
	cu := cleanup.Make(func() { conn.Close() })
	defer cu.Clean()
	heart, theirHeart, err := pair()
	if err != nil {
		return nil, failed(err)
	}
	defer theirHeart.Close()
	cu.Add(func() { heart.Close() })
	// Above the descriptors that the service gets, as ForkExec uses numbers up to there.
	fd, err := unix.FcntlInt(program.Fd(), unix.F_DUPFD_CLOEXEC, 64)
	if err != nil {
		return nil, failed(err)
	}
	defer unix.Close(fd)
	cmd := exec.Cmd{
		Path: "/proc/self/fd/" + strconv.Itoa(fd), Args: append([]string{"berm", command}, args...), Dir: "/", Env: environment(),
		ExtraFiles:  []*os.File{theirs, theirHeart},
		SysProcAttr: &syscall.SysProcAttr{Setsid: true}, // the terminal's keys are not for it
	}
	if os.Geteuid() == 0 {
		id := serviceIDs[command]
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: id, Gid: id}
	}
	if err := cmd.Start(); err != nil {
		return nil, failed(err)
	}
	cu.Release()
	p := &process{conn: conn, pid: cmd.Process.Pid, exited: make(chan struct{}), kill: func() { _ = cmd.Process.Kill() }}
	go p.watch(&cmd, heart, ended)
	return p, nil
}

// Pair makes both ends of a connection between two services.
func Pair() (one, other *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, berm.Errorf(berm.Internal, "make a connection: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "service"), os.NewFile(uintptr(fds[1]), "service"), nil
}

// pair makes both ends of a connection.
func pair() (ours *net.UnixConn, theirs *os.File, err error) {
	own, theirs, err := Pair()
	if err != nil {
		return nil, nil, err
	}
	defer own.Close()
	conn, err := net.FileConn(own)
	if err != nil {
		theirs.Close()
		return nil, nil, err
	}
	return conn.(*net.UnixConn), theirs, nil
}

// environment is what the service gets of its owner's: where a company keeps the authorities
// by which upstreams are verified.
func environment() []string {
	env := []string{"PATH=/usr/bin:/bin"}
	for _, name := range []string{"SSL_CERT_FILE", "SSL_CERT_DIR"} {
		if value, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+value)
		}
	}
	return env
}
