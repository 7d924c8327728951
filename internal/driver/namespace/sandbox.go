package namespace

import (
	"bufio"
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/namespace/launch"
	"github.com/berm-sandbox/berm/internal/failpoint"
	"github.com/berm-sandbox/berm/internal/kernel/rights"
	"github.com/berm-sandbox/berm/internal/monitor"
)

// killLimit is how long the end of a sandbox may take before its monitor is given up.
const killLimit = 2 * time.Second

// sandbox is a handle on one sandbox.
type sandbox struct {
	driver *Driver
	id     berm.SandboxID
	*keeper

	mu   sync.Mutex // held while it is being killed
	exit *berm.Exit // set once killed
}

var _ berm.Sandbox = (*sandbox)(nil)

func (s *sandbox) ID() berm.SandboxID { return s.id }

// abandon ends a sandbox that was not committed, and returns when nothing but its
// directory is left.
func (s *sandbox) abandon() {
	s.dismiss()
	ctx, cancel := context.WithTimeout(context.Background(), 2*killLimit)
	defer cancel()
	_, _ = s.driver.remove(ctx, s.id)
}

// health asks the guest agent once whether it serves: it said so already.
func (s *sandbox) health(ctx context.Context) error {
	conn, err := s.connect(ctx, berm.AgentPort)
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := io.WriteString(conn, "GET /health HTTP/1.1\r\nHost: sandbox\r\nConnection: close\r\n\r\n"); err != nil {
		return berm.Errorf(berm.Unavailable, "ask the guest agent: %w", err)
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return berm.Errorf(berm.Unavailable, "ask the guest agent: %w", err)
	}
	if fields := strings.Fields(line); len(fields) < 2 || fields[1] != "204" {
		return berm.Errorf(berm.Unavailable, "the guest agent answers %q", strings.TrimSpace(line))
	}
	return nil
}

// Dial opens a byte stream to a port inside.
func (s *sandbox) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	// A frozen agent would never answer.
	status, err := s.client.Status(ctx)
	if err != nil {
		return nil, err
	}
	switch status.State {
	case berm.Running:
	case berm.Killed:
		return nil, berm.Errorf(berm.NotFound, "sandbox %s is dead", s.id)
	default:
		return nil, berm.Errorf(berm.Conflict, "sandbox %s is %s", s.id, status.State)
	}
	return s.connect(ctx, port)
}

// Link fetches the other end of the link from the monitor.
func (s *sandbox) Link(ctx context.Context) (*os.File, error) {
	file, err := s.exchange(ctx, monitor.LinkFile, 0, nil)
	if err == nil && file == nil {
		err = berm.Errorf(berm.Internal, "the monitor of sandbox %s sent no link", s.id)
	}
	return file, err
}

// Keep gives a descriptor to the monitor.
func (s *sandbox) Keep(ctx context.Context, file *os.File) error {
	_, err := s.exchange(ctx, monitor.KeepFile, monitor.KeepPut, file)
	return err
}

// Kept fetches that descriptor.
func (s *sandbox) Kept(ctx context.Context) (*os.File, error) {
	return s.exchange(ctx, monitor.KeepFile, monitor.KeepGet, nil)
}

// exchange sends a request to a socket of the monitor's, unless it is 0, with a descriptor if
// one is given, and returns the one that comes back, nil for none.
func (s *sandbox) exchange(ctx context.Context, name string, request byte, file *os.File) (*os.File, error) {
	conn, err := s.driver.dial(ctx, s.id, name)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := s.client.Status(ctx); err != nil {
			return nil, err
		}
		return nil, berm.Errorf(berm.Unsupported, "sandbox %s was made without a link, or by a version that could do less", s.id)
	} else if err != nil {
		return nil, berm.Errorf(berm.NotFound, "the link of sandbox %s: %w", s.id, err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	failed := func(err error) (*os.File, error) {
		return nil, berm.Errorf(berm.Unavailable, "ask the monitor of sandbox %s for its link: %w", s.id, err)
	}
	if request != 0 {
		if file != nil {
			raw, err := file.SyscallConn()
			if err != nil {
				return failed(err)
			}
			err = errors.Join(raw.Control(func(fd uintptr) {
				_, _, err = conn.WriteMsgUnix([]byte{request}, unix.UnixRights(int(fd)), nil)
			}), err)
			if err != nil {
				return failed(err)
			}
		} else if _, _, err := conn.WriteMsgUnix([]byte{request}, nil, nil); err != nil {
			return failed(err)
		}
	}
	control := rights.Space(1)
	read, n, _, _, err := conn.ReadMsgUnix(make([]byte, 1), control)
	if err != nil || read == 0 {
		return failed(errors.Join(err, io.ErrUnexpectedEOF))
	}
	return rights.File(control[:n], "link"), nil // nil: there is none
}

// connect opens a byte stream through the guest agent.
func (s *sandbox) connect(ctx context.Context, port uint16) (net.Conn, error) {
	conn, err := s.driver.dial(ctx, s.id, monitor.AgentFile)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
		return nil, berm.Errorf(berm.NotFound, "sandbox %s is dead", s.id)
	} else if err != nil {
		return nil, berm.Errorf(berm.Unavailable, "reach the guest agent: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	status := []byte{0}
	_, err = conn.Write([]byte{agentProtocol, byte(port >> 8), byte(port)})
	if err == nil {
		_, err = io.ReadFull(conn, status)
	}
	if !stop() {
		err = context.Cause(ctx)
	}
	switch {
	case err != nil:
		err = berm.Errorf(berm.Unavailable, "reach the guest agent: %w", err)
	case status[0] == portClosed:
		err = berm.Errorf(berm.Unavailable, "nothing listens on port %d", port)
	case status[0] != portOpen:
		err = berm.Errorf(berm.Unavailable, "the guest agent could not connect to port %d", port)
	default:
		return conn, nil
	}
	_ = conn.Close()
	return nil, err
}

// The first bytes of a connection to the guest agent: version and port from us, one
// byte of status from the agent.
const (
	agentProtocol = 1
	portOpen      = 0
	portClosed    = 1
)

func (s *sandbox) Pause(ctx context.Context) error { return s.client.Pause(ctx) }

func (s *sandbox) Resume(ctx context.Context, deadline time.Time) error {
	return s.client.Resume(ctx, deadline)
}

func (s *sandbox) SetDeadline(ctx context.Context, deadline time.Time) error {
	return s.client.SetDeadline(ctx, deadline)
}

func (s *sandbox) Status(ctx context.Context) (berm.Status, error) { return s.client.Status(ctx) }
func (s *sandbox) Usage(ctx context.Context) (berm.Usage, error)   { return s.client.Usage(ctx) }
func (s *sandbox) Policy(ctx context.Context) (berm.Policy, error) { return s.client.Policy(ctx) }

// Snapshot has the monitor save the disk, and waits until it is on the host's.
func (s *sandbox) Snapshot(ctx context.Context, dir string, memory bool) (berm.Saved, error) {
	if err := s.driver.room(); err != nil {
		return berm.Saved{}, err
	}
	saved, err := s.client.Snapshot(ctx, dir, memory)
	if err != nil {
		return berm.Saved{}, err
	}
	if memory && !saved.Memory {
		return berm.Saved{}, berm.Errorf(berm.Unsupported, "an earlier version made this sandbox: its memory cannot be saved")
	}
	for _, name := range launch.Files(memory) {
		f, err := os.Open(filepath.Join(dir, name))
		if err == nil {
			err = errors.Join(f.Sync(), f.Close())
		}
		if err != nil {
			return berm.Saved{}, berm.Errorf(berm.Internal, "write the snapshot to disk: %w", err)
		}
	}
	return saved, failpoint.Hit("driver.saved")
}

// Version is what the monitor finds. One of an earlier version finds nothing.
func (s *sandbox) Version(ctx context.Context) (string, error) { return s.client.Version(ctx) }

func (s *sandbox) Events(ctx context.Context) (<-chan berm.Status, error) {
	return s.client.Events(ctx)
}

// Kill ends the sandbox and takes everything of it away.
func (s *sandbox) Kill(ctx context.Context, reason berm.Reason) (berm.Exit, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.exit != nil {
		return *s.exit, nil
	}
	limited, cancel := context.WithTimeout(ctx, killLimit)
	monitor.Trace("kill")
	exit, err := s.client.Kill(limited, reason)
	cancel()
	monitor.Trace("killed")
	if err == nil && s.ended != nil {
		select {
		case <-s.ended:
		case <-time.After(killLimit):
		}
	}
	// What follows finishes also when the caller loses patience: nothing may be left.
	ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), 2*killLimit)
	defer cancel()
	s.end()
	monitor.Trace("monitor reaped")
	recorded, err2 := s.driver.remove(ctx, s.id)
	monitor.Trace("removed")
	if err2 != nil {
		return exit, err2
	}
	if err != nil {
		exit = recorded
	}
	if exit.Reason == "" { // another handle was faster
		exit = berm.Exit{Reason: reason, Code: -1, At: time.Now().UTC()}
	}
	s.exit = &exit
	_ = s.client.Close()
	return exit, nil
}

// Close lets the handle go.
func (s *sandbox) Close() error { return s.client.Close() }
