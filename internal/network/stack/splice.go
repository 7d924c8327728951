package stack

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// chunk is what is copied at once.
type chunk [128 << 10]byte

var buffers = sync.Pool{New: func() any { return new(chunk) }}

var errNothing = errors.New("nothing to read now")

// Splice joins a connection of the sandbox's with one outside until both directions have
// ended. The end of a stream in one direction is passed on and leaves the other open; a
// failure in one direction ends both, and is the error. Neither connection is closed, but
// none is of use after a failure. A silent pair holds no buffers. A flow that is reset ends
// both, whatever outside waits for.
func Splice(inside, outside Conn) error {
	if c, ok := within(inside).(*conn); ok {
		defer context.AfterFunc(c.flow.ctx, func() { abort(outside) })()
	}
	pass := func(to, from Conn) error {
		err := copyReady(to, from)
		if err == nil {
			err = to.CloseWrite()
		}
		if err != nil {
			// The other direction must not wait for a peer that is gone.
			abort(inside)
			abort(outside)
		}
		return err
	}
	up := make(chan error, 1)
	go func() {
		grow()
		up <- pass(outside, inside)
	}()
	down := pass(inside, outside)
	if err := <-up; err != nil && down == nil {
		return err
	}
	return down
}

// abort makes calls on a connection fail and its peer see a reset.
func abort(c Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	if inside, ok := within(c).(*conn); ok {
		inside.flow.Reset()
		return
	}
	_ = c.Close()
}

// within is the connection that others are wrapped around.
func within(c net.Conn) net.Conn {
	for {
		around, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return c
		}
		c = around.NetConn()
	}
}

// copyReady copies like io.Copy, but takes a buffer only when there is something to read.
func copyReady(to io.Writer, from Conn) error {
	if c, ok := from.(*conn); ok {
		_, err := c.WriteTo(to)
		return err
	}
	source, ok := from.(syscall.Conn)
	if !ok {
		_, err := io.Copy(to, from)
		return err
	}
	raw, err := source.SyscallConn()
	if err != nil {
		return err
	}
	for {
		var b *chunk
		var n int
		var failed error
		err := raw.Read(func(fd uintptr) bool {
			b = buffers.Get().(*chunk)
			for {
				n, failed = unix.Read(int(fd), b[:])
				if failed != unix.EINTR {
					break
				}
			}
			if failed == unix.EAGAIN {
				buffers.Put(b)
				b = nil
				return false
			}
			return true
		})
		if err == nil {
			err = failed
		}
		if err == nil && n > 0 {
			_, err = to.Write(b[:n])
		}
		if b != nil {
			buffers.Put(b)
		}
		if err != nil || n == 0 {
			return err
		}
	}
}
