package egress

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/kernel/rights"
	"github.com/berm-sandbox/berm/internal/service"
)

// Service is one process for all sandboxes of a server, started again when it died: the
// network service or that of credentials. Its methods are safe for concurrent use.
type Service struct {
	// Ended is told why a process ended, unless Close ended it; nil tells nobody.
	Ended func(error)

	command string
	program func() (*os.File, error)
	args    []string

	mu      sync.Mutex
	process *service.Process // nil before Start
	starts  int
	closed  bool
}

// NewService returns a service that is executed from program, which opens an executable that
// has the command, Command or BrokerCommand, with further arguments.
func NewService(command string, program func() (*os.File, error), args ...string) *Service {
	return &Service{command: command, program: program, args: append([]string{"--" + Shared}, args...)}
}

// Start starts the process, unless it runs.
func (s *Service) Start() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.running()
}

// Attach is Attach of a connection to the service.
func (s *Service) Attach(ctx context.Context, id berm.SandboxID, link, door *os.File, p Policy, open []string, events func(Event)) (*Link, []string, error) {
	conn, err := s.connect()
	if err != nil {
		return nil, nil, err
	}
	return Attach(ctx, conn, id, link, door, p, open, events)
}

// Broker is Broker of a connection to the service.
func (s *Service) Broker(ctx context.Context, id berm.SandboxID, b Bindings, events func(Event)) (*Link, Brokered, error) {
	conn, err := s.connect()
	if err != nil {
		return nil, Brokered{}, err
	}
	return Broker(ctx, conn, id, b, events)
}

// connect makes a connection for one sandbox and hands its other end to the service.
func (s *Service) connect() (*net.UnixConn, error) {
	ours, theirs, err := service.Connect()
	if err != nil {
		return nil, berm.Errorf(berm.Unavailable, "connect to berm %s: %w", s.command, err)
	}
	defer theirs.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err = s.running(); err == nil {
		_ = s.process.Conn.SetWriteDeadline(time.Now().Add(endPatience)) // a process that hangs holds up nobody for ever
		if _, _, err = s.process.Conn.WriteMsgUnix([]byte{1}, unix.UnixRights(int(theirs.Fd())), nil); err != nil {
			err = berm.Errorf(berm.Unavailable, "connect to berm %s: %w", s.command, err)
		}
	}
	if err != nil {
		_ = ours.Close()
		return nil, err
	}
	return ours, nil
}

// running makes sure that there is a process. The caller holds the lock.
func (s *Service) running() error {
	if s.closed {
		return berm.Errorf(berm.Unavailable, "berm %s has ended with its server", s.command)
	}
	if s.process != nil {
		select {
		case <-s.process.Exited:
			_ = s.process.Conn.Close()
			s.process = nil
		default:
			return nil
		}
	}
	program, err := s.program()
	if err != nil {
		return berm.Errorf(berm.Internal, "open the program of berm %s: %w", s.command, err)
	}
	defer program.Close()
	if s.process, err = service.Start(service.Program{File: program, Command: s.command, Args: s.args, Ended: s.ended}); err != nil {
		return err
	}
	s.starts++
	return nil
}

func (s *Service) ended(err error) {
	s.mu.Lock()
	tell := s.Ended
	if s.closed {
		tell = nil
	}
	s.mu.Unlock()
	if tell != nil {
		tell(err)
	}
}

// Starts is how many processes were started so far.
func (s *Service) Starts() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.starts
}

// PID is the process id, 0 when there is none.
func (s *Service) PID() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process == nil {
		return 0
	}
	return s.process.PID
}

// endPatience is how long the process has to end by itself.
const endPatience = 2 * time.Second

// Close ends the process, and with it every flow.
func (s *Service) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if s.process == nil {
		return
	}
	_ = s.process.Conn.Close()
	s.process.End(endPatience)
}

// Hub is the end of a service for many sandboxes: it has each connection that comes over hub,
// one descriptor with each byte, attended, until hub ends.
func Hub(hub *net.UnixConn, attend func(*net.UnixConn)) error {
	control := rights.Space(1)
	for {
		n, controlLen, _, _, err := hub.ReadMsgUnix(make([]byte, 1), control)
		if n == 0 && err == nil || errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return berm.Errorf(berm.Internal, "the connection to the server: %w", err)
		}
		// Out of descriptors, none came: the connection ended then, and its owner sees it.
		for _, file := range rights.Files(control[:controlLen], "sandbox") {
			if conn, err := service.Conn(file); err == nil {
				go attend(conn)
			}
		}
	}
}
