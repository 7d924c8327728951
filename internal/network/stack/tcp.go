package stack

import (
	"context"
	"errors"
	"io"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
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

// WriteTo copies what the sandbox sends, holding a buffer only while there is something.
func (c *conn) WriteTo(w io.Writer) (int64, error) {
	readable, ready := waiter.NewChannelEntry(waiter.ReadableEvents | waiter.EventHUp | waiter.EventErr)
	c.queue.EventRegister(&readable)
	defer c.queue.EventUnregister(&readable)
	var total int64
	for {
		n, err := c.writeOnce(w)
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
	switch failed.(type) {
	case nil:
	case *tcpip.ErrWouldBlock:
		return 0, errNothing
	case *tcpip.ErrClosedForReceive:
		return 0, io.EOF
	default:
		return 0, io.ErrUnexpectedEOF
	}
	if err := c.flow.meter(true, result.Count); err != nil {
		return 0, err
	}
	c.flow.count(&c.flow.up, result.Count)
	return w.Write(b[:result.Count])
}
