package broker

import (
	"errors"
	"net"
	"os"
	"time"
)

// holdTime is how long the beginning of what could be a secret is kept back from a reader who
// waits: a person types, and sees each character.
const holdTime = 50 * time.Millisecond

// maskStream sends back what comes over a connection, without secrets, to its end.
func (x *sandbox) maskStream(conn *net.UnixConn) {
	defer conn.Close()
	f := x.credentials.Filter()
	in, out := make([]byte, 64<<10), []byte(nil)
	for {
		var until time.Time
		if f != nil && f.Holds() {
			until = time.Now().Add(holdTime)
		}
		if conn.SetReadDeadline(until) != nil {
			return
		}
		n, err := conn.Read(in)
		late := errors.Is(err, os.ErrDeadlineExceeded)
		piece := in[:n]
		if f != nil {
			var refused error
			if out, refused = f.Body(out[:0], piece, err != nil); refused != nil {
				return
			}
			piece = out
		}
		if _, writeErr := conn.Write(piece); writeErr != nil {
			return
		}
		if err != nil && !late {
			_ = conn.CloseWrite() // its end, or that of whoever waits for it
			return
		}
	}
}
