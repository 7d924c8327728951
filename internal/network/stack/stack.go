// Package stack is the other end of a sandbox's only link: a TCP/IP stack in this
// process, which asks a judge about each flow before anything else happens for it.
//
// A sandbox sees one network, link.Default, and IPv4 only. Whatever address it connects to,
// this stack takes the connection in that address's name, if the judge accepts it, and
// hands it over as a stream; what becomes of it, whether and where something is dialed, is
// the judge's affair. No packet is ever forwarded.
package stack

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/qdisc/fifo"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/link"
)

// A Judge decides about the flows of one sandbox. Its methods are called concurrently.
type Judge interface {
	// TCP is asked about a connection before the sandbox gets any answer to it, and may
	// take its time: up to Limits.Pending are asked about at once. It returns nil to refuse
	// it, which the sandbox sees as a reset, or what is called with the connection once that
	// is made; if it ended before that, each use of it fails, so that what was dialed for it
	// can be closed. The connection is closed when the call returns. The context ends with
	// the flow.
	TCP(context.Context, *Flow) func(Conn)
	// UDP is asked in the same way about the first datagram between two addresses. A
	// refusal is an ICMP "port unreachable". Port 53 never comes here.
	UDP(context.Context, *Flow) func(net.Conn)
	// Query answers one datagram to port 53 of any server; nil is no answer.
	Query(ctx context.Context, server netip.Addr, message []byte) []byte
	// Limited is told about a flow that a limit refused, which no judge was asked about.
	Limited(*Flow, Limit)
}

// Conn is a connection of the sandbox's.
type Conn interface {
	net.Conn
	// CloseWrite ends the stream to the sandbox and leaves the other one open.
	CloseWrite() error
}

// Limits bounds what one sandbox's flows may cost. The zero value of a field takes the
// number of Defaults.
type Limits struct {
	Flows       int           // at one time, TCP and UDP
	Datagrams   int           // of these UDP
	Destination int           // of these to one address
	Pending     int           // TCP that a judge thinks about or that is not answered yet
	Rate        float64       // new flows per second
	Burst       int           // new flows at once
	Queries     int           // datagrams to port 53 that are answered at one time
	Buffers     int           // bytes waiting in all connections together; 32 KiB for each of Flows, the rest is shared
	IdleTCP     time.Duration // until a silent connection is reset
	IdleUDP     time.Duration // until silence ends a UDP flow
}

// Defaults are the limits of a sandbox for which nothing else was asked.
var Defaults = Limits{
	Flows: 4096, Datagrams: 256, Destination: 512, Pending: 1024, Rate: 200, Burst: 400, Queries: 64,
	Buffers: 160 << 20, IdleTCP: 15 * time.Minute, IdleUDP: 30 * time.Second,
}

// nic is the link as the stack knows it, and queued how many packets may wait to be written
// to it, as many as Linux gives a link.
const (
	nic    = 1
	queued = 1000
)

// Stack is the network of one sandbox.
type Stack struct {
	judge    Judge
	limits   Limits
	net      *stack.Stack
	link     *endpoint
	tcp      *tcp.Forwarder
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	handlers sync.WaitGroup
	queries  chan struct{}

	mu       sync.Mutex
	table    table
	waiting  map[stack.TransportEndpointID]*waiting // UDP that a judge thinks about
	sweeping bool
	closed   bool
}

// New makes the stack of a sandbox on the descriptor that link.Make returned for
// link.Default, and takes it over. The judge is asked from now on.
func New(fd int, j Judge, l Limits) (*Stack, error) { return newStack(fd, link.Default, j, l) }

// NewEthernet is New of a link that carries Ethernet frames: of link.Ethernet.
func NewEthernet(fd int, j Judge, l Limits) (*Stack, error) { return newStack(fd, link.Ethernet, j, l) }

func newStack(fd int, c link.Config, j Judge, l Limits) (*Stack, error) {
	l = l.filled()
	var frames *ether
	if c.Hardware != [6]byte{} {
		frames = &ether{gateway: link.GatewayHardware, sandbox: c.Hardware}
	}
	network := netip.PrefixFrom(netip.AddrFrom4(c.Address), int(c.Prefix)).Masked()
	e, err := newEndpoint(fd, gate{own: c.Address, gateway: c.Gateway, network: network}, frames)
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "use the link: %w", err)
	}
	s := &Stack{
		judge: j, limits: l, link: e,
		queries: make(chan struct{}, l.Queries),
		table:   newTable(l),
		waiting: map[stack.TransportEndpointID]*waiting{},
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.net = stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol},
	})
	for _, option := range []tcpip.SettableTransportProtocolOption{
		// Each connection gets a fixed share of Limits.Buffers once it is made.
		&tcpip.TCPSendBufferSizeRangeOption{Min: leastBuffer, Default: leastBuffer, Max: mostBuffer},
		&tcpip.TCPReceiveBufferSizeRangeOption{Min: leastBuffer, Default: firstBuffer, Max: mostBuffer},
		ptr(tcpip.TCPModerateReceiveBufferOption(false)),
		// Nothing of an old connection can be under way on a link without a wire.
		ptr(tcpip.TCPTimeWaitTimeoutOption(timeWait)),
		ptr(tcpip.TCPLingerTimeoutOption(linger)),
	} {
		if err := s.net.SetTransportProtocolOption(tcp.ProtocolNumber, option); err != nil {
			panic(err.String()) // an option of this version of the library
		}
	}
	e.opening = s.reuse
	s.tcp = tcp.NewForwarder(s.net, mostBuffer, l.Pending, s.connect)
	s.net.SetTransportProtocolHandler(tcp.ProtocolNumber, s.tcp.HandlePacket)
	s.net.SetTransportProtocolHandler(udp.ProtocolNumber, s.datagram)
	for _, step := range []func() tcpip.Error{
		func() tcpip.Error {
			// Written by a goroutine of its own: with the lock of a connection held meanwhile,
			// those that process the answer to the packet would spin.
			return s.net.CreateNICWithOptions(nic, e, stack.NICOptions{Disabled: true, QDisc: fifo.New(e, 1, queued)})
		},
		func() tcpip.Error {
			return s.net.AddProtocolAddress(nic, tcpip.ProtocolAddress{
				Protocol:          ipv4.ProtocolNumber,
				AddressWithPrefix: tcpip.AddressWithPrefix{Address: tcpip.AddrFrom4(c.Gateway), PrefixLen: int(c.Prefix)},
			}, stack.AddressProperties{})
		},
		// It takes packets to any address, and answers in that address's name.
		func() tcpip.Error { return s.net.SetPromiscuousMode(nic, true) },
		func() tcpip.Error { return s.net.SetSpoofing(nic, true) },
		func() tcpip.Error {
			s.net.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: nic}})
			return s.net.EnableNIC(nic)
		},
	} {
		if err := step(); err != nil {
			s.net.Destroy()
			e.file.Close()
			return nil, berm.Errorf(berm.Internal, "set up the sandbox's network: %s", err)
		}
	}
	return s, nil
}

func (l Limits) filled() Limits {
	d := Defaults
	for _, f := range []struct{ want, have *int }{
		{&l.Flows, &d.Flows}, {&l.Datagrams, &d.Datagrams}, {&l.Destination, &d.Destination}, {&l.Pending, &d.Pending},
		{&l.Burst, &d.Burst}, {&l.Queries, &d.Queries}, {&l.Buffers, &d.Buffers},
	} {
		if *f.want > 0 {
			*f.have = *f.want
		}
	}
	if l.Rate > 0 {
		d.Rate = l.Rate
	}
	if l.IdleTCP > 0 {
		d.IdleTCP = l.IdleTCP
	}
	if l.IdleUDP > 0 {
		d.IdleUDP = l.IdleUDP
	}
	return d
}

func ptr[T any](v T) *T { return &v }

// Dial connects to a port of the sandbox's own address, from the gateway's.
func (s *Stack) Dial(ctx context.Context, port uint16) (Conn, error) {
	conn, err := gonet.DialTCPWithBind(ctx, s.net,
		tcpip.FullAddress{NIC: nic, Addr: tcpip.AddrFrom4(link.Default.Gateway)},
		tcpip.FullAddress{NIC: nic, Addr: tcpip.AddrFrom4(link.Default.Address), Port: port}, ipv4.ProtocolNumber)
	if err != nil {
		return nil, berm.Errorf(berm.Unavailable, "connect to port %d of the sandbox: %w", port, err)
	}
	return conn, nil
}

// Done is closed when nothing comes from the link any more: after Close, or because the
// link is gone.
func (s *Stack) Done() <-chan struct{} { return s.link.done }

// Err says why nothing comes from the link any more; it is nil until Done is closed, and
// after Close.
func (s *Stack) Err() error {
	select {
	case <-s.link.done:
	default:
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.link.err == nil {
		return nil
	}
	return berm.Errorf(berm.Unavailable, "the sandbox's link is gone: %w", s.link.err)
}

// Dropped is how many packets of the sandbox were no IPv4 from its own address to a host,
// or were fragments, or had options, or were of a protocol that leads nowhere.
func (s *Stack) Dropped() uint64 { return s.link.dropped.Load() }

// Flows lists the flows that live, those included that a judge still thinks about.
func (s *Stack) Flows() []*Flow {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.table.list()
}

// Close resets every flow, gives the link back and returns when every judge has returned.
func (s *Stack) Close() {
	s.mu.Lock()
	s.closed = true
	flows := s.table.list()
	s.mu.Unlock()
	for _, f := range flows {
		f.Reset()
	}
	s.cancel()
	s.net.Close() // resets what Dial made
	s.handlers.Wait()
	s.net.RemoveNIC(nic)
	s.link.Close()
	s.net.Wait()
}
