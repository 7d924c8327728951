package egress

import (
	"net"
	"os"

	"github.com/berm-sandbox/berm/internal/service"
)

// Command is the hidden command of berm that is the service, and BrokerCommand the one that is
// that of credentials.
const (
	Command       = service.Egressd
	BrokerCommand = service.Brokerd
)

// Shared is the flag with which the service has many sandboxes: its first connection brings
// theirs.
const Shared = "shared"

// Resolver is the flag that names a resolver, with its port.
const Resolver = "resolver"

// Start starts a service for one sandbox and returns the connection to it. The service ends
// with the connection. program is opened executable that has the command. When the process
// has ended, for whatever reason, ended is told why.
func Start(program *os.File, ended func(error)) (*net.UnixConn, error) {
	return start(service.Program{File: program, Command: Command, Ended: ended})
}

// StartBroker is Start for the service of credentials.
func StartBroker(program *os.File, ended func(error)) (*net.UnixConn, error) {
	return start(service.Program{File: program, Command: BrokerCommand, Ended: ended})
}

func start(program service.Program) (*net.UnixConn, error) {
	p, err := service.Start(program)
	if err != nil {
		return nil, err
	}
	return p.Conn, nil
}
