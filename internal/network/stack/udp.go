package stack

import (
	"net"
	"net/netip"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"
)

// dnsPort is answered whatever address it is at.
const dnsPort = 53

// waiting are the datagrams that came while a judge thinks about their flow.
type waiting struct{ packets []*stack.PacketBuffer }

// mostWaiting is how many may wait.
const mostWaiting = 16

// datagram handles one that belongs to no flow yet. It says whether it took it; what it
// does not take is answered as "port unreachable".
func (s *Stack) datagram(id stack.TransportEndpointID, packet *stack.PacketBuffer) bool {
	if id.LocalPort == dnsPort {
		s.query(id, packet)
		return true
	}
	s.mu.Lock()
	if w := s.waiting[id]; w != nil {
		if len(w.packets) < mostWaiting {
			w.packets = append(w.packets, packet.IncRef())
		}
		s.mu.Unlock()
		return true
	}
	s.mu.Unlock()
	f, limit := s.open(UDP, id)
	if f == nil {
		return limit == LimitRate || limit == "" // dropped
	}
	s.mu.Lock()
	s.waiting[id] = &waiting{}
	s.mu.Unlock()
	go s.exchange(f, udp.NewForwarderRequest(s.net, id, packet.IncRef()), id, packet)
	return true
}

// exchange is the life of a UDP flow.
func (s *Stack) exchange(f *Flow, r *udp.ForwarderRequest, id stack.TransportEndpointID, first *stack.PacketBuffer) {
	defer s.end(f)
	defer first.DecRef()
	serve := s.judge.UDP(f.ctx, f)
	var queue waiter.Queue
	var ep tcpip.Endpoint
	if serve != nil && f.ctx.Err() == nil {
		ep, _ = r.CreateEndpoint(&queue)
	}
	s.mu.Lock()
	rest := s.waiting[id].packets
	delete(s.waiting, id)
	s.mu.Unlock()
	for _, p := range rest {
		if ep != nil {
			ep.(stack.TransportEndpoint).HandlePacket(id, p)
		}
		p.DecRef()
	}
	if ep == nil {
		s.unreachable(id, first)
		if serve != nil {
			serve(gone{f})
		}
		return
	}
	f.connected(ep.Abort)
	conn := &datagrams{UDPConn: gonet.NewUDPConn(&queue, ep), flow: f}
	serve(conn)
	ep.Close()
}

// query has one datagram to port 53 answered.
func (s *Stack) query(id stack.TransportEndpointID, packet *stack.PacketBuffer) {
	select {
	case s.queries <- struct{}{}:
	default:
		return // it is asked again
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		<-s.queries
		return
	}
	s.handlers.Add(1)
	s.mu.Unlock()
	message := packet.Data().AsRange().ToSlice()
	go func() {
		defer s.handlers.Done()
		defer func() { <-s.queries }()
		if answer := s.judge.Query(s.ctx, netip.AddrFrom4(id.LocalAddress.As4()), message); answer != nil {
			s.answer(id, answer)
		}
	}()
}

// answer sends a datagram in the name of an address outside.
func (s *Stack) answer(id stack.TransportEndpointID, payload []byte) {
	packet := stack.NewPacketBuffer(stack.PacketBufferOptions{
		ReserveHeaderBytes: header.IPv4MinimumSize + header.UDPMinimumSize,
		Payload:            buffer.MakeWithData(payload),
	})
	defer packet.DecRef()
	length := uint16(header.UDPMinimumSize + len(payload))
	h := header.UDP(packet.TransportHeader().Push(header.UDPMinimumSize))
	packet.TransportProtocolNumber = udp.ProtocolNumber
	h.Encode(&header.UDPFields{SrcPort: id.LocalPort, DstPort: id.RemotePort, Length: length})
	sum := header.PseudoHeaderChecksum(udp.ProtocolNumber, id.LocalAddress, id.RemoteAddress, length)
	h.SetChecksum(^h.CalculateChecksum(checksum.Checksum(payload, sum)))
	s.send(id, udp.ProtocolNumber, packet)
}

// unreachable tells the sandbox that nothing takes its datagrams there: with its header
// and eight bytes of it (RFC 792).
func (s *Stack) unreachable(id stack.TransportEndpointID, of *stack.PacketBuffer) {
	quoted := append(append([]byte{}, of.NetworkHeader().Slice()...), of.TransportHeader().Slice()...)
	packet := stack.NewPacketBuffer(stack.PacketBufferOptions{
		ReserveHeaderBytes: header.IPv4MinimumSize + header.ICMPv4MinimumSize,
		Payload:            buffer.MakeWithData(quoted),
	})
	defer packet.DecRef()
	h := header.ICMPv4(packet.TransportHeader().Push(header.ICMPv4MinimumSize))
	packet.TransportProtocolNumber = header.ICMPv4ProtocolNumber
	h.SetType(header.ICMPv4DstUnreachable)
	h.SetCode(header.ICMPv4PortUnreachable)
	h.SetChecksum(header.ICMPv4Checksum(h, packet.Data().Checksum()))
	s.send(id, header.ICMPv4ProtocolNumber, packet)
}

func (s *Stack) send(id stack.TransportEndpointID, protocol tcpip.TransportProtocolNumber, packet *stack.PacketBuffer) {
	route, err := s.net.FindRoute(nic, id.LocalAddress, id.RemoteAddress, ipv4.ProtocolNumber, false)
	if err != nil {
		return // the stack is closing
	}
	defer route.Release()
	_ = route.WritePacket(stack.NetworkHeaderParams{Protocol: protocol, TTL: 64}, packet)
}

// datagrams counts and meters a UDP flow.
type datagrams struct {
	*gonet.UDPConn
	flow *Flow
}

var _ net.Conn = (*datagrams)(nil)

// Read reads one datagram of the sandbox's.
func (c *datagrams) Read(b []byte) (int, error) {
	n, err := c.UDPConn.Read(b)
	if over := c.flow.meter(true, n); over != nil {
		return 0, over
	}
	c.flow.count(&c.flow.up, n)
	return n, err
}

// Write sends one datagram to the sandbox.
func (c *datagrams) Write(b []byte) (int, error) {
	if err := c.flow.meter(false, len(b)); err != nil {
		return 0, err
	}
	n, err := c.UDPConn.Write(b)
	c.flow.count(&c.flow.down, n)
	return n, err
}
