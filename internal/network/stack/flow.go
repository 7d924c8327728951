package stack

import (
	"context"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// Protocol of a flow.
type Protocol string

// The protocols.
const (
	TCP Protocol = "tcp"
	UDP Protocol = "udp"
)

// Limit names what refused a flow.
type Limit string

// The limits.
const (
	LimitFlows       Limit = "flows"
	LimitDatagrams   Limit = "datagram flows"
	LimitDestination Limit = "flows to one address"
	LimitRate        Limit = "new flows per second"
)

// Flow is one connection or one exchange of datagrams of a sandbox.
type Flow struct {
	Protocol    Protocol
	Source      netip.AddrPort // in the sandbox
	Destination netip.AddrPort // as the sandbox names it
	Start       time.Time
	// Meter is called before bytes pass, up from the sandbox or down to it, and may take its
	// time: the sandbox waits. After an error they do not pass, and whoever uses the
	// connection gets it. A judge sets it before it returns; nil lets everything pass.
	Meter func(ctx context.Context, up bool, n int) error

	up, down atomic.Int64
	active   atomic.Int64 // when the last byte passed, in nanoseconds since Start
	ctx      context.Context
	cancel   context.CancelFunc

	mu    sync.Mutex
	abort func() // set once there is an endpoint
	ended bool
}

// Up is how many bytes came from the sandbox.
func (f *Flow) Up() int64 { return f.up.Load() }

// Down is how many bytes went to the sandbox.
func (f *Flow) Down() int64 { return f.down.Load() }

// Reset ends the flow at once: the sandbox sees a reset, and the judge's calls fail.
func (f *Flow) Reset() {
	f.mu.Lock()
	f.ended = true
	abort := f.abort
	f.mu.Unlock()
	// Before the judge's call returns, which would end the connection in good order.
	if abort != nil {
		abort()
	}
	f.cancel()
}

// connected gives the flow its endpoint, which is aborted if the flow was reset before.
func (f *Flow) connected(abort func()) {
	f.mu.Lock()
	f.abort = abort
	ended := f.ended
	f.mu.Unlock()
	if ended {
		abort()
	}
}

func (f *Flow) count(n *atomic.Int64, bytes int) {
	n.Add(int64(bytes))
	f.active.Store(int64(time.Since(f.Start)))
}

// meter asks the judge's.
func (f *Flow) meter(up bool, n int) error {
	if f.Meter == nil || n <= 0 {
		return nil
	}
	return f.Meter(f.ctx, up, n)
}

func (f *Flow) idle() time.Duration { return time.Since(f.Start) - time.Duration(f.active.Load()) }

// table counts the flows of a stack against its limits.
type table struct {
	limits       Limits
	rate         *rate.Limiter
	flows        map[*Flow]struct{}
	datagrams    int
	destinations map[netip.Addr]int
	buffers      int // bytes that connections may still get
}

func newTable(l Limits) table {
	return table{
		limits: l, rate: rate.NewLimiter(rate.Limit(l.Rate), l.Burst),
		flows: map[*Flow]struct{}{}, destinations: map[netip.Addr]int{},
		// What every connection gets is taken off at once.
		buffers: max(0, l.Buffers-2*leastBuffer*l.Flows),
	}
}

// add takes a flow, or names the limit that it would exceed.
func (t *table) add(f *Flow) Limit {
	to := f.Destination.Addr()
	switch {
	case len(t.flows) >= t.limits.Flows:
		return LimitFlows
	case f.Protocol == UDP && t.datagrams >= t.limits.Datagrams:
		return LimitDatagrams
	case t.destinations[to] >= t.limits.Destination:
		return LimitDestination
	case !t.rate.Allow():
		return LimitRate
	}
	t.flows[f] = struct{}{}
	t.destinations[to]++
	if f.Protocol == UDP {
		t.datagrams++
	}
	return ""
}

func (t *table) remove(f *Flow) {
	delete(t.flows, f)
	to := f.Destination.Addr()
	if t.destinations[to]--; t.destinations[to] == 0 {
		delete(t.destinations, to)
	}
	if f.Protocol == UDP {
		t.datagrams--
	}
}

func (t *table) list() []*Flow {
	flows := make([]*Flow, 0, len(t.flows))
	for f := range t.flows {
		flows = append(flows, f)
	}
	return flows
}

// open starts a flow. It returns nil if the stack is closed or a limit refuses the flow,
// and names that limit.
func (s *Stack) open(p Protocol, id stack.TransportEndpointID) (*Flow, Limit) {
	f := &Flow{
		Protocol:    p,
		Source:      netip.AddrPortFrom(netip.AddrFrom4(id.RemoteAddress.As4()), id.RemotePort),
		Destination: netip.AddrPortFrom(netip.AddrFrom4(id.LocalAddress.As4()), id.LocalPort),
		Start:       time.Now(),
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil, ""
	}
	if limit := s.table.add(f); limit != "" {
		s.mu.Unlock()
		s.judge.Limited(f, limit)
		return nil, limit
	}
	defer s.mu.Unlock()
	f.ctx, f.cancel = context.WithCancel(s.ctx)
	s.handlers.Add(1)
	if !s.sweeping {
		s.sweeping = true
		s.sweepLater()
	}
	return f, ""
}

// end forgets a flow.
func (s *Stack) end(f *Flow) {
	f.cancel()
	s.mu.Lock()
	s.table.remove(f)
	s.mu.Unlock()
	s.handlers.Done()
}

// sweepLater looks for silent flows again after a while.
func (s *Stack) sweepLater() {
	time.AfterFunc(min(s.limits.IdleUDP, s.limits.IdleTCP)/4, func() {
		s.mu.Lock()
		flows := s.table.list()
		s.sweeping = len(flows) > 0 && !s.closed
		if s.sweeping {
			s.sweepLater()
		}
		s.mu.Unlock()
		for _, f := range flows {
			limit := s.limits.IdleTCP
			if f.Protocol == UDP {
				limit = s.limits.IdleUDP
			}
			if f.idle() > limit {
				f.Reset()
			}
		}
	})
}
