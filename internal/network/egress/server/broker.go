package server

import (
	"context"
	"net/netip"
	"os"

	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/policy"
	"github.com/berm-sandbox/berm/internal/network/stack"
	"github.com/berm-sandbox/berm/internal/service"
)

// useBroker has requests looked into by the process at the other end of a connection, which
// holds what this one must not: secrets, and the key of the sandbox's authority. What went
// through another one ends.
func (x *sandbox) useBroker(file *os.File) error {
	conn, err := service.Conn(file)
	if err != nil {
		return err
	}
	broker := service.NewWire(conn)
	x.mu.Lock()
	old := x.broker
	x.broker = broker
	x.mu.Unlock()
	if old != nil {
		_ = old.Close()
	}
	go func() {
		// It never says anything: what comes is the end.
		_ = broker.Receive(&struct{}{})
		x.mu.Lock()
		defer x.mu.Unlock()
		for f := range x.live {
			if f.brokered == broker {
				f.deny(brokerless(f.verdict))
				f.inside.Reset()
			}
		}
	}()
	return nil
}

// endpoint is what a name inside stands for.
func (x *sandbox) endpoint(name string) (egress.Endpoint, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	e, ok := x.endpoints[name]
	return e, ok
}

// door is the connection to the service of credentials; nil for none.
func (x *sandbox) door() *service.Wire {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.broker
}

// brokerless is the verdict about a flow when the process that would look into it is gone.
func brokerless(v policy.Verdict) policy.Verdict {
	v.Action, v.Reason, v.Detail = policy.Deny, policy.ReasonCredential, ""
	return v
}

// handOver joins a connection with the service of credentials, which goes on with it.
func (x *sandbox) handOver(ctx context.Context, f *flow, door *service.Wire, conn stack.Conn) error {
	ctx, cancel := context.WithTimeout(ctx, dialPatience)
	defer cancel()
	addrs, err := x.addresses(ctx, f)
	if err != nil {
		return err
	}
	r, _ := x.route(f)
	proxies, err := r.Resolve(ctx)
	if err != nil {
		f.unreach(err)
		return err
	}
	ours, theirs, err := service.Pair()
	if err != nil {
		return err
	}
	broker, err := service.Conn(ours)
	if err != nil {
		theirs.Close()
		return err
	}
	defer broker.Close()
	x.mu.Lock()
	x.handed++
	f.brokered, f.id = door, x.handed
	x.mu.Unlock()
	err = door.Send(egress.Flow{ID: f.id, Name: f.question.Host.Name(), Port: f.question.Port, Endpoint: f.endpoint, Addresses: addrs, Proxies: proxies}, theirs)
	theirs.Close()
	if err != nil {
		f.deny(brokerless(f.verdict))
		return errDenied
	}
	return stack.Splice(conn, broker)
}

// addresses are those of a flow's name that may be dialed.
func (x *sandbox) addresses(ctx context.Context, f *flow) ([]netip.Addr, error) {
	if r, v := x.route(f); r.ByName(v) {
		return nil, nil
	}
	found, err := x.server.up.Lookup(ctx, f.question.Host.Name())
	if err != nil {
		f.unreach(err)
		return nil, err
	}
	vetted, v := x.vet(f, found)
	if v.Action != policy.Allow {
		f.deny(v)
		return nil, errDenied
	}
	return vetted, nil
}
