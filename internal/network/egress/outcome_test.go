package egress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"

	"github.com/berm-sandbox/berm"
)

func TestOutcome(t *testing.T) {
	op := func(err error) error {
		return &net.OpError{Op: "read", Net: "tcp", Err: os.NewSyscallError("read", err)}
	}
	for _, test := range []struct {
		err  error
		want string
	}{
		{nil, ""},
		{&net.OpError{Op: "read", Net: "tcp", Err: net.ErrClosed}, ""},
		{context.Canceled, ""},
		{io.EOF, ""},
		{op(syscall.EPIPE), ""},
		{op(syscall.ECONNRESET), "the connection was reset"},
		{io.ErrUnexpectedEOF, "the connection was reset"},
		{context.DeadlineExceeded, "no answer in time"},
		{berm.Errorf(berm.Unavailable, "connect to a.test: %w", errors.Join(op(syscall.ETIMEDOUT), op(syscall.ECONNREFUSED))), "connect to a.test: connection refused"},
		{berm.Errorf(berm.Unavailable, "resolve a.test: %w", context.DeadlineExceeded), "resolve a.test: no answer in time"},
		{berm.Errorf(berm.Unavailable, "connect to a.test: %w", context.Canceled), "connect to a.test: the client left before"},
		{berm.Errorf(berm.NotFound, "there is no name a.test"), "there is no name a.test"},
		{berm.Errorf(berm.Invalid, "TLS with the client of a.test: %w", io.EOF), "TLS with the client of a.test: EOF"},
		{fmt.Errorf("something else"), "something else"},
	} {
		if got := Outcome(test.err); got != test.want {
			t.Errorf("%v: %q, want %q", test.err, got, test.want)
		}
	}
}
