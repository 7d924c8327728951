package broker

import (
	"errors"
	"io"
	"net"

	"github.com/berm-sandbox/berm/internal/network/inspect"
)

// maskStream sends back what comes over a connection, without secrets, to its end.
func (x *sandbox) maskStream(conn *net.UnixConn) {
	defer conn.Close()
	var in io.ReadCloser = conn
	if f := x.credentials.Filter(); f != nil {
		in = inspect.Filtered(conn, f)
		defer in.Close()
	}
	b := make([]byte, 64<<10)
	for {
		n, err := in.Read(b)
		if _, writeErr := conn.Write(b[:n]); writeErr != nil {
			return
		}
		if errors.Is(err, io.EOF) {
			_ = conn.CloseWrite() // its end, or that of whoever waits for it
		}
		if err != nil {
			return
		}
	}
}
