package egress

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"

	"github.com/berm-sandbox/berm"
)

// Outcome says in words for a record how a connection failed, and is empty for an end that is no
// failure: a side that has closed it or left, or a connection that was ended on purpose. What of
// Berm's own errors says where it failed stays.
func Outcome(err error) string {
	if err == nil {
		return ""
	}
	where, cause := "", err
	if own := (*berm.Error)(nil); errors.As(err, &own) {
		if own.Kind != berm.Unavailable || own.Err == nil {
			return err.Error()
		}
		where, cause = strings.TrimSuffix(own.Msg, own.Err.Error()), own.Err
	}
	var timeout net.Error
	is := func(targets ...error) bool {
		for _, target := range targets {
			if errors.Is(cause, target) {
				return true
			}
		}
		return false
	}
	switch {
	case is(syscall.ECONNREFUSED):
		return where + "connection refused"
	case is(syscall.EHOSTUNREACH, syscall.ENETUNREACH):
		return where + "there is no way to it"
	case is(syscall.ECONNRESET, syscall.ECONNABORTED, io.ErrUnexpectedEOF):
		return where + "the connection was reset"
	case errors.As(cause, &timeout) && timeout.Timeout():
		return where + "no answer in time"
	case where != "" && is(context.Canceled):
		return where + "the client left before"
	case is(net.ErrClosed, io.EOF, io.ErrClosedPipe, syscall.EPIPE, context.Canceled):
		return ""
	}
	return err.Error()
}
