// Package rpc holds what the services of the guest agent share: whom a call is
// for, and when to send a sign of life.
package rpc

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	"connectrpc.com/connect"

	"github.com/berm-sandbox/berm/internal/guest/account"
	"github.com/berm-sandbox/berm/internal/guest/config"
)

// Account is the user of a call: the name in its Basic authorization (which is not
// checked: whoever may call may be any user), else the default user.
func Account(c *config.Config, h http.Header) (*account.Account, error) {
	name, _, _ := (&http.Request{Header: h}).BasicAuth()
	a, err := c.Account(name)
	if _, ok := errors.AsType[*config.UserError](err); ok {
		return nil, connect.NewError(connect.CodeUnauthenticated, err)
	}
	if err != nil {
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	return a, nil
}

const (
	defaultKeepAlive = 90 * time.Second
	maxKeepAlive     = 24 * time.Hour
)

// KeepAlive is how long a stream may stay silent before a keepalive event.
func KeepAlive(h http.Header) time.Duration {
	n, err := strconv.Atoi(h.Get("Keepalive-Ping-Interval"))
	if err != nil || n < 1 {
		return defaultKeepAlive
	}
	return min(time.Duration(min(n, int(maxKeepAlive/time.Second)))*time.Second, maxKeepAlive)
}

// Done is the error of a stream whose context has ended.
func Done(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return connect.NewError(connect.CodeDeadlineExceeded, ctx.Err())
	}
	return connect.NewError(connect.CodeCanceled, ctx.Err())
}
