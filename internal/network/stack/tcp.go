package stack

import (
	"context"
	"errors"
	"io"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

// Sizes of one connection's buffer in each direction. With less than the least, segments of
// the first burst would be lost.
const (
	leastBuffer = 16 << 10
	firstBuffer = 64 << 10 // the window before a connection has its share
	mostBuffer  = 1 << 20
)

const (
	timeWait = 100 * time.Millisecond
	// linger is how long a connection that the judge is done with may take to deliver what
	// it was given.
	linger = 30 * time.Second
)

// connect handles one SYN, on a goroutine of its own.
func (s *Stack) connect(r *tcp.ForwarderRequest) {
	grow()
	f, limit := s.open(TCP, r.ID())
	if f == nil {
		// A SYN above the rate is not answered: it comes again by itself after a second.
		r.Complete(limit != LimitRate)
		return
	}
	defer s.end(f)
	serve := s.judge.TCP(f.ctx, f)
	if serve == nil {
		r.Complete(true)
		return
	}
	var queue waiter.Queue
	ep, err := s.handshake(f, r, &queue)
	r.Complete(err != nil)
	if err != nil {
		serve(gone{f})
		return
	}
	f.connected(ep.Abort)
	share := s.take()
	defer s.giveBack(share)
	ep.SocketOptions().SetReceiveBufferSize(int64(leastBuffer+share), true)
	ep.SocketOptions().SetSendBufferSize(int64(leastBuffer+share), true)

	gone, closed := waiter.NewChannelEntry(waiter.EventHUp)
	queue.EventRegister(&gone)
	defer queue.EventUnregister(&gone)
	serve(&conn{TCPConn: gonet.NewTCPConn(&queue, ep), ep: ep, queue: &queue, flow: f})
	ep.Close()
	// It counts until the sandbox has taken what is left, or its time is up.
	timer := time.NewTimer(linger)
	defer timer.Stop()
	for tcp.EndpointState(ep.State()) != tcp.StateClose && tcp.EndpointState(ep.State()) != tcp.StateError {
		select {
		case <-closed:
		case <-timer.C:
			ep.Abort()
			return
		case <-f.ctx.Done():
			return
		}
	}
}

// handshake accepts the connection, unless the flow ends first: CreateEndpoint by itself
// waits for the sandbox for a minute.
func (s *Stack) handshake(f *Flow, r *tcp.ForwarderRequest, queue *waiter.Queue) (tcpip.Endpoint, tcpip.Error) {
	if f.ctx.Err() != nil {
		return nil, &tcpip.ErrConnectionAborted{}
	}
	id, made := r.ID(), make(chan struct{})
	defer close(made)
	defer context.AfterFunc(f.ctx, func() {
		for {
			// It may not be there yet.
			if ep := s.net.FindTransportEndpoint(ipv4.ProtocolNumber, tcp.ProtocolNumber, id, nic); ep != nil {
				ep.Abort()
			}
			select {
			case <-made:
				return
			case <-time.After(time.Millisecond):
			}
		}
	})()
	return r.CreateEndpoint(queue)
}

// reuse makes room for a connection between the same ports as one that ended less than timeWait
// ago. Who closed second may begin one at once, as Linux does when connections are made in
// parallel. gVisor would give its SYN to an endpoint that listens, which a stack that takes all connections
// does not have: it would be lost, and come again a second later, or be refused.
func (s *Stack) reuse(id stack.TransportEndpointID) {
	ep, _ := s.net.FindTransportEndpoint(ipv4.ProtocolNumber, tcp.ProtocolNumber, id, nic).(*tcp.Endpoint)
	if ep != nil && ep.EndpointState() == tcp.StateTimeWait {
		ep.Abort() // the reset that this sends is for the old one: its numbers do not fit the new
	}
}

// take gives a connection its share of the buffers, for each direction, above leastBuffer:
// the more there are the less, so that there is always something left.
func (s *Stack) take() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	share := min(mostBuffer-leastBuffer, s.table.buffers/64)
	s.table.buffers -= 2 * share
	return share
}

func (s *Stack) giveBack(share int) {
	s.mu.Lock()
	s.table.buffers += 2 * share
	s.mu.Unlock()
}

// conn counts and meters a connection.
type conn struct {
	*gonet.TCPConn
	ep    tcpip.Endpoint
	queue *waiter.Queue
	flow  *Flow
}

// Read reads what the sandbox sent.
func (c *conn) Read(b []byte) (int, error) {
	n, err := c.TCPConn.Read(b)
	if over := c.flow.meter(true, n); over != nil {
		return 0, over
	}
	c.flow.count(&c.flow.up, n)
	return n, err
}

// Write sends to the sandbox.
func (c *conn) Write(b []byte) (int, error) {
	if err := c.flow.meter(false, len(b)); err != nil {
		return 0, err
	}
	n, err := c.TCPConn.Write(b)
	c.flow.count(&c.flow.down, n)
	return n, err
}

// WriteTo copies what the sandbox sends, holding a buffer only while there is something, and
// none at all for a socket.
func (c *conn) WriteTo(w io.Writer) (int64, error) {
	once := func() (int, error) { return c.writeOnce(w) }
	if socket, ok := w.(syscall.Conn); ok {
		raw, err := socket.SyscallConn()
		if err != nil {
			return 0, err
		}
		paid := 0
		once = func() (int, error) { return c.sendOnce(raw, &paid) }
	}
	readable, ready := waiter.NewChannelEntry(waiter.ReadableEvents | waiter.EventHUp | waiter.EventErr)
	c.queue.EventRegister(&readable)
	defer c.queue.EventUnregister(&readable)
	var total int64
	for {
		n, err := once()
		total += int64(n)
		switch {
		case errors.Is(err, errNothing):
			select {
			case <-ready:
			case <-c.flow.ctx.Done():
				return total, c.flow.ctx.Err()
			}
		case errors.Is(err, io.EOF):
			return total, nil
		case err != nil:
			return total, err
		}
	}
}

func (c *conn) writeOnce(w io.Writer) (int, error) {
	b := buffers.Get().(*chunk)
	defer buffers.Put(b)
	into := tcpip.SliceWriter(b[:])
	result, failed := c.ep.Read(&into, tcpip.ReadOptions{})
	if failed != nil {
		return 0, readFailed(failed)
	}
	if err := c.flow.meter(true, result.Count); err != nil {
		return 0, err
	}
	c.flow.count(&c.flow.up, result.Count)
	return w.Write(b[:result.Count])
}

func readFailed(err tcpip.Error) error {
	switch err.(type) {
	case *tcpip.ErrWouldBlock:
		return errNothing
	case *tcpip.ErrClosedForReceive:
		return io.EOF
	}
	return io.ErrUnexpectedEOF
}

// sendOnce sends what there is over a socket, from where it lies. The meter was told of that
// many bytes that were not sent.
func (c *conn) sendOnce(socket syscall.RawConn, paid *int) (total int, err error) {
	waiting, _ := c.ep.GetSockOptInt(tcpip.ReceiveQueueSizeOption)
	waiting = min(waiting, 2*len(chunk{})) // a meter refuses as a whole what it is told of at once
	if more := waiting - *paid; more > 0 {
		if err := c.flow.meter(true, more); err != nil {
			return 0, err
		}
		*paid = waiting
	}
	failed := socket.Write(func(fd uintptr) bool {
		s := sending{fd: int(fd), left: *paid}
		_, refused := c.ep.Read(&s, tcpip.ReadOptions{Peek: true})
		switch {
		case s.sent > 0:
			*paid -= s.sent
			dropped := dropping(s.sent)
			_, _ = c.ep.Read(&dropped, tcpip.ReadOptions{})
			c.flow.count(&c.flow.up, s.sent)
			total = s.sent
		case errors.Is(s.err, unix.EAGAIN):
			return false // until the socket takes more
		case s.err != nil:
			err = s.err
		case refused != nil && !s.refused: // else something came meanwhile
			err = readFailed(refused)
		}
		return true
	})
	if err == nil {
		err = failed
	}
	return total, err
}

// sending takes the pieces of what waits to be read, and sends them together: while the
// endpoint gives them, they are there.
type sending struct {
	fd     int
	left   int // bytes that are still to come
	pieces [][]byte
	sent   int
	err    error
	// refused says that there was a piece that is not to be sent now.
	refused bool
}

// mostPieces bounds what is sent at once; it is some packets.
const mostPieces = 32

var errSent = errors.New("no more is taken")

// Write implements io.Writer.
func (s *sending) Write(b []byte) (int, error) {
	if s.left <= 0 || s.err != nil {
		s.refused = true
		return 0, errSent
	}
	s.pieces = append(s.pieces, b[:min(len(b), s.left)])
	if s.left -= len(b); s.left <= 0 || len(s.pieces) == mostPieces {
		s.left = 0
		for again := true; again; again = errors.Is(s.err, unix.EINTR) {
			s.sent, s.err = unix.Writev(s.fd, s.pieces)
		}
		s.sent = max(s.sent, 0)
	}
	return len(b), nil
}

// dropping takes that many bytes.
type dropping int

// Write implements io.Writer.
func (d *dropping) Write(b []byte) (int, error) {
	n := min(len(b), int(*d))
	*d -= dropping(n)
	if n < len(b) {
		return n, errSent
	}
	return n, nil
}
