package inspect

import (
	"errors"
	"io"
	"net"
	"sync"
)

// closeWrite ends the stream towards the peer; a connection that cannot do so is closed.
func closeWrite(c net.Conn) error {
	if half, ok := c.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Close()
}

// Splice copies between the two connections until both directions have ended, then closes
// them. The end of one direction is passed on and leaves the other open; an error ends
// both. It returns the bytes from inside to outside and back.
func Splice(inside, outside net.Conn) (up, down int64) {
	defer inside.Close()
	defer outside.Close()
	var wg sync.WaitGroup
	wg.Go(func() { up = pass(outside, inside) })
	down = pass(inside, outside)
	wg.Wait()
	return up, down
}

// pass copies one direction.
func pass(dst, src net.Conn) (n int64) {
	var err error
	if c, ok := src.(*Conn); ok {
		// What was read ahead goes first; then the kernel may copy by itself.
		var ahead int
		if ahead, err = dst.Write(c.ahead); err == nil {
			c.ahead = nil
			src = c.Conn
		}
		n = int64(ahead)
	}
	if c, ok := dst.(*Conn); ok {
		dst = c.Conn
	}
	if err == nil {
		var copied int64
		copied, err = copyStream(dst, src)
		n += copied
	}
	if err == nil {
		err = closeWrite(dst)
	}
	if err != nil && !errors.Is(err, net.ErrClosed) {
		src.Close()
		dst.Close()
	}
	return n
}

var buffers = sync.Pool{New: func() any { return new([64 << 10]byte) }}

func copyStream(dst, src net.Conn) (int64, error) {
	_, toTCP := dst.(*net.TCPConn)
	if _, fromTCP := src.(*net.TCPConn); toTCP && fromTCP {
		return io.Copy(dst, src) // splice(2)
	}
	buf := buffers.Get().(*[64 << 10]byte)
	defer buffers.Put(buf)
	// Without hiding ReadFrom and WriteTo, io would take a buffer of its own per flow.
	return io.CopyBuffer(struct{ io.Writer }{dst}, struct{ io.Reader }{src}, buf[:])
}
