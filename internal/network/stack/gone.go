package stack

import (
	"net"
	"time"
)

// gone stands for a connection that ended before it was made: every call fails.
type gone struct{ flow *Flow }

var _ Conn = gone{}

func (g gone) Read([]byte) (int, error)         { return 0, net.ErrClosed }
func (g gone) Write([]byte) (int, error)        { return 0, net.ErrClosed }
func (g gone) Close() error                     { return nil }
func (g gone) CloseWrite() error                { return net.ErrClosed }
func (g gone) LocalAddr() net.Addr              { return net.TCPAddrFromAddrPort(g.flow.Destination) }
func (g gone) RemoteAddr() net.Addr             { return net.TCPAddrFromAddrPort(g.flow.Source) }
func (g gone) SetDeadline(time.Time) error      { return net.ErrClosed }
func (g gone) SetReadDeadline(time.Time) error  { return net.ErrClosed }
func (g gone) SetWriteDeadline(time.Time) error { return net.ErrClosed }
