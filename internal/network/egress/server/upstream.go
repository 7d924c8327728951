package server

import (
	"context"
	"errors"
	"net/netip"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/policy"
	"github.com/berm-sandbox/berm/internal/network/stack"
	"github.com/berm-sandbox/berm/internal/network/upstream"
)

// route is the way of the policy in force, and the verdict about a flow by that policy.
func (x *sandbox) route(f *flow) (*upstream.Route, policy.Verdict) {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.upstream, x.current(f)
}

// dialProxied is dial through proxies.
func (x *sandbox) dialProxied(ctx context.Context, f *flow, r *upstream.Route, v policy.Verdict, network string) (stack.Conn, error) {
	if v.Action != policy.Allow {
		f.deny(v)
		return nil, errDenied
	}
	name, port := f.question.Host.Name(), f.question.Port
	var conn stack.Conn
	var err error
	switch {
	case network != "tcp":
		err = berm.Errorf(berm.Unavailable, "only TCP goes through the upstream proxy, not %s", network)
	case r.ByName(v):
		conn, err = r.DialName(ctx, name, port)
	default:
		addrs := []netip.Addr{f.question.Host.Addr()}
		if name != "" {
			addrs, err = x.addresses(ctx, f)
		}
		if err == nil {
			conn, err = r.DialAddrs(ctx, addrs, port)
		}
	}
	if err != nil {
		if !errors.Is(err, errDenied) {
			f.unreach(err)
		}
		return nil, err
	}
	// What the flow was judged by may have changed meanwhile.
	x.mu.Lock()
	if f.judge != x.policy {
		x.rejudge(f)
	}
	x.mu.Unlock()
	if f.isDenied() {
		conn.Close()
		return nil, errDenied
	}
	return conn, nil
}
