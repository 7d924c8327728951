package monitor

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
)

// Server answers requests about one sandbox.
type Server struct {
	id      berm.SandboxID
	machine *Machine
	open    sync.WaitGroup // requests being answered
}

// NewServer serves machine as the sandbox id.
func NewServer(id berm.SandboxID, machine *Machine) *Server {
	return &Server{id: id, machine: machine}
}

// Listen serves every connection of l until l is closed.
func (s *Server) Listen(l net.Listener) {
	for {
		conn, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors: for now
			time.Sleep(50 * time.Millisecond)
			continue
		}
		go func() {
			defer conn.Close()
			if c, err := Accept(conn, s.id); err == nil {
				s.Serve(c)
			}
		}()
	}
}

// Drain waits until every request is answered, at most for d.
func (s *Server) Drain(d time.Duration) {
	answered := make(chan struct{})
	go func() { s.open.Wait(); close(answered) }()
	select {
	case <-answered:
	case <-time.After(d):
	}
}

// Conn is the monitor's side of one connection.
type Conn struct {
	lines *bufio.Scanner
	mu    sync.Mutex
	conn  net.Conn
	made  uint64 // number of the create request
}

// Accept shakes hands on a new connection.
func Accept(conn net.Conn, id berm.SandboxID) (*Conn, error) {
	c := newConn(conn)
	var theirs Hello
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	ours := Hello{Protocol, Oldest, id}
	if err := c.read(&theirs); err != nil {
		return nil, err
	}
	if err := c.write(ours); err != nil {
		return nil, err
	}
	if !ours.agrees(theirs) {
		return nil, berm.Errorf(berm.Unsupported, "no monitor protocol in common: %d here, %d there", ours.Protocol, theirs.Protocol)
	}
	_ = conn.SetDeadline(time.Time{})
	return c, nil
}

func newConn(conn net.Conn) *Conn {
	c := &Conn{conn: conn, lines: bufio.NewScanner(conn)}
	c.lines.Buffer(nil, MaxLine)
	return c
}

func (c *Conn) read(v any) error {
	if !c.lines.Scan() {
		if err := c.lines.Err(); err != nil {
			return err
		}
		return io.EOF
	}
	return json.Unmarshal(c.lines.Bytes(), v)
}

func (c *Conn) write(v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err = c.conn.Write(append(line, '\n'))
	return err
}

// Create reads the first request of the connection that the monitor was started
// with: what to create. Answer it with Created. A request to prepare, which may come
// before, is carried out by prepare.
func (c *Conn) Create(prepare func(order json.RawMessage) error, v any) error {
	var r request
	if err := c.read(&r); err != nil {
		return err
	}
	if r.Op == OpPrepare {
		answer := reply{N: r.N}
		if err := prepare(r.Create); err != nil {
			answer.Error = failed(err)
		}
		if err := c.write(answer); err != nil {
			return err
		}
		r = request{}
		if err := c.read(&r); err != nil {
			return err
		}
	}
	if r.Op != OpCreate {
		return berm.Errorf(berm.Invalid, "%q before create", r.Op)
	}
	c.made = r.N
	return json.Unmarshal(r.Create, v)
}

// Created answers the create request; a nil error means that the sandbox runs.
func (c *Conn) Created(err error) error {
	if err != nil {
		return c.write(reply{N: c.made, Error: failed(err)})
	}
	return c.write(reply{N: c.made})
}

// Committed reads the request that lets the sandbox live on without its creator.
func (c *Conn) Committed() error {
	var r request
	if err := c.read(&r); err != nil {
		return err
	}
	if r.Op != OpCommit {
		return berm.Errorf(berm.Invalid, "%q before commit", r.Op)
	}
	return c.write(reply{N: r.N})
}

// Serve answers requests on c until it ends. Requests on one connection are
// answered as they are done, not in order.
func (s *Server) Serve(c *Conn) {
	ended := make(chan struct{})
	defer close(ended)
	for {
		var r request
		if err := c.read(&r); err != nil {
			return
		}
		s.open.Add(1)
		if r.Op == OpEvents {
			// Before the next request is read: changes that it makes must be seen.
			changes, stop := s.machine.Watch()
			go func() {
				defer s.open.Done()
				defer stop()
				c.stream(r.N, changes, ended)
			}()
			continue
		}
		go func() {
			defer s.open.Done()
			answer := s.answer(r)
			answer.N = r.N
			_ = c.write(answer)
		}()
	}
}

// answer carries out one request.
func (s *Server) answer(r request) reply {
	m := s.machine
	var err error
	switch r.Op {
	case OpPause:
		err = m.Pause()
	case OpResume:
		err = m.Resume(r.Deadline)
	case OpDeadline:
		err = m.SetDeadline(r.Deadline)
	case OpStatus:
		status := m.Status()
		return reply{Status: &status}
	case OpUsage:
		usage, err := m.wall.Usage()
		if err != nil {
			return reply{Error: failed(err)}
		}
		return reply{Usage: &usage}
	case OpPolicy:
		return reply{Policy: m.wall.Policy()}
	case OpSnapshot:
		saved, err := m.Snapshot(r.Directory, r.Memory)
		if err != nil {
			return reply{Error: failed(err)}
		}
		return reply{Saved: &saved}
	case OpVersion:
		version, err := m.wall.Version()
		if err != nil {
			return reply{Error: failed(err)}
		}
		return reply{Version: version}
	case OpKill:
		m.Kill(r.Reason)
		m.Wait()
		return reply{Exit: m.Status().Exit}
	default:
		err = berm.Errorf(berm.Unsupported, "this monitor does not know %q", r.Op)
	}
	if err != nil {
		return reply{Error: failed(err)}
	}
	return reply{}
}

// stream sends every change until the sandbox dies or the connection ends.
func (c *Conn) stream(n uint64, changes <-chan berm.Status, ended <-chan struct{}) {
	for {
		select {
		case status, ok := <-changes:
			if !ok {
				_ = c.write(reply{N: n}) // the end
				return
			}
			if c.write(reply{N: n, Status: &status}) != nil {
				return
			}
		case <-ended:
			return
		}
	}
}
