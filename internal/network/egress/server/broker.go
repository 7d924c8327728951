package server

import (
	"context"
	"net"
	"net/netip"
	"os"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/policy"
	"github.com/berm-sandbox/berm/internal/network/stack"
)

// useBroker has requests looked into by the process at the other end of a connection, which
// holds what this one must not: secrets, and the key of the sandbox's authority.
func (x *sandbox) useBroker(file *os.File, endpoints []egress.Endpoint) error {
	conn, err := connOf(file)
	if err != nil {
		return berm.Errorf(berm.Invalid, "the connection to the service of credentials: %w", err)
	}
	x.broker, x.endpoints = egress.NewWire(conn), map[string]egress.Endpoint{}
	for _, e := range endpoints {
		x.endpoints[e.Name] = e
	}
	go func() {
		// It never says anything: what comes is the end.
		_ = x.broker.Receive(&struct{}{})
		x.mu.Lock()
		defer x.mu.Unlock()
		for f := range x.live {
			if f.brokered {
				f.deny(brokerless(f.verdict))
				f.inside.Reset()
			}
		}
	}()
	return nil
}

// connOf makes a connection of its descriptor.
func connOf(file *os.File) (*net.UnixConn, error) {
	defer file.Close()
	conn, err := net.FileConn(file)
	if err != nil {
		return nil, err
	}
	if unix, ok := conn.(*net.UnixConn); ok {
		return unix, nil
	}
	conn.Close()
	return nil, berm.Errorf(berm.Invalid, "it is no Unix socket")
}

// brokerless is the verdict about a flow when the process that would look into it is gone.
func brokerless(v policy.Verdict) policy.Verdict {
	v.Action, v.Reason, v.Detail = policy.Deny, policy.ReasonCredential, ""
	return v
}

// handOver joins a connection with the service of credentials, which goes on with it.
func (x *sandbox) handOver(ctx context.Context, f *flow, conn stack.Conn) error {
	ctx, cancel := context.WithTimeout(ctx, dialPatience)
	defer cancel()
	addrs, err := x.addresses(ctx, f)
	if err != nil {
		return err
	}
	ours, theirs, err := egress.Pair()
	if err != nil {
		return err
	}
	broker, err := connOf(ours)
	if err != nil {
		theirs.Close()
		return err
	}
	defer broker.Close()
	x.mu.Lock()
	f.brokered = true
	x.mu.Unlock()
	err = x.broker.Send(egress.Flow{Name: f.question.Host.Name(), Port: f.question.Port, Endpoint: f.endpoint, Addresses: addrs}, theirs)
	theirs.Close()
	if err != nil {
		f.deny(brokerless(f.verdict))
		return errDenied
	}
	return stack.Splice(conn, broker)
}

// addresses are those of a flow's name that may be dialed.
func (x *sandbox) addresses(ctx context.Context, f *flow) ([]netip.Addr, error) {
	found, err := x.server.up.Lookup(ctx, f.question.Host.Name())
	if err != nil {
		return nil, err
	}
	vetted, v := x.vet(f, found)
	if v.Action != policy.Allow {
		f.deny(v)
		return nil, errDenied
	}
	return vetted, nil
}
