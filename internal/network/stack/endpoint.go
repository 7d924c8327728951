package stack

import (
	"encoding/binary"
	"io"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/berm-sandbox/berm/internal/network/link"
)

// Fields of struct virtio_net_hdr (linux/virtio_net.h), little-endian or not as the host.
const (
	needsChecksum = 1 // flags: VIRTIO_NET_HDR_F_NEEDS_CSUM
	gsoTCPv4      = 1 // gso_type: VIRTIO_NET_HDR_GSO_TCPV4
)

// endpoint is the outer end of a link as the stack sees it. It reads by the runtime's
// poller and holds no buffer while nothing comes: an idle sandbox costs no thread.
//
// gVisor's own endpoint knows segmentation offload for sockets only, and blocks a thread.
type endpoint struct {
	file  *os.File
	raw   rawConn
	gate  gate
	ether *ether // nil: the link carries packets alone
	// opening is told of each packet with which the sandbox begins a connection, before the stack.
	opening func(stack.TransportEndpointID)

	dispatcher atomic.Pointer[stack.NetworkDispatcher]
	onClose    func()
	done       chan struct{} // closed when nothing is read any more
	err        error         // why; set before done is closed
	dropped    atomic.Uint64 // packets that the gate refused
}

type rawConn interface {
	Read(func(uintptr) bool) error
	Write(func(uintptr) bool) error
}

// newEndpoint takes over the descriptor that link.Make returned.
func newEndpoint(fd int, g gate, frames *ether) (*endpoint, error) {
	file := os.NewFile(uintptr(fd), link.Name)
	raw, err := file.SyscallConn()
	if err != nil {
		file.Close()
		return nil, err
	}
	return &endpoint{file: file, raw: raw, gate: g, ether: frames, done: make(chan struct{})}, nil
}

// sizes of the pieces that a packet is read into, which are what the buffers' pool has;
// together they hold the longest packet of IPv4. There are few, since each is taken from the pool,
// cleared and counted on its own.
var sizes = [...]int{2 << 10, 64 << 10}

// pieces is room for one packet. What a packet did not use stays for the next.
type pieces struct {
	head  [link.HeaderLen + etherLen]byte
	views [len(sizes)]*buffer.View
	vec   [1 + len(sizes)][]byte
}

func (p *pieces) fill(around int) {
	p.vec[0] = p.head[:around]
	for i, v := range p.views {
		if v == nil {
			p.views[i] = buffer.NewViewSize(sizes[i])
			p.vec[1+i] = p.views[i].AsSlice()
		}
	}
}

func (p *pieces) release() {
	for i, v := range p.views {
		if v != nil {
			v.Release()
			p.views[i] = nil
		}
	}
}

// take makes a packet of the first n bytes. What fills less than half of the last piece is copied into
// one of its size: a packet waits in memory, of which its sandbox has a share by its length.
func (p *pieces) take(n int) buffer.Buffer {
	var packet buffer.Buffer
	for i := 0; n > 0; i++ {
		v := p.views[i]
		if i == 0 || n > v.Size()/2 {
			p.views[i] = nil
		} else {
			v = buffer.NewViewWithData(v.AsSlice()[:n])
		}
		if n < v.Size() {
			v.CapLength(n)
		}
		n -= v.Size()
		_ = packet.Append(v)
	}
	return packet
}

// read delivers packets until the file is closed or the link is gone.
func (e *endpoint) read() {
	defer close(e.done)
	var p pieces
	var failed error
	around := e.around()
	err := e.raw.Read(func(fd uintptr) bool {
		for {
			p.fill(around)
			n, err := unix.Readv(int(fd), p.vec[:])
			switch {
			case err == unix.EINTR:
			case err == unix.EAGAIN:
				p.release()
				return false
			case err == unix.EINVAL && e.ether != nil:
				// A packet socket has no header for what it took: segments of a kind that was not
				// asked for.
				e.dropped.Add(1)
			case err != nil:
				failed = err
				return true
			case n == 0: // a socket whose other end is closed
				failed = io.EOF
				return true
			case n > around:
				e.deliver(&p, n-around)
			}
		}
	})
	p.release()
	e.err = failed
	if failed == nil {
		e.err = err
	}
}

func (e *endpoint) deliver(p *pieces, n int) {
	if e.ether != nil {
		switch e.ether.kind(p.head[link.HeaderLen:]) {
		case etherIPv4:
			n = unpadded(p.vec[1], n)
		case etherARP:
			if answer := e.ether.answer(p.vec[1][:min(n, len(p.vec[1]))], &e.gate); answer != nil {
				frame := append(e.ether.header(make([]byte, link.HeaderLen, link.HeaderLen+etherLen+arpLen), etherARP), answer...)
				_ = e.send([][]byte{frame})
				return
			}
			fallthrough
		default:
			e.dropped.Add(1)
			return
		}
	}
	// The headers that the gate reads are in the first piece.
	if !e.gate.admits(p.vec[1][:min(n, len(p.vec[1]))], n) {
		e.dropped.Add(1)
		return
	}
	d := e.dispatcher.Load()
	if d == nil {
		return
	}
	if id, ok := opens(p.vec[1]); ok {
		e.opening(id)
	}
	packet := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: p.take(n)})
	(*d).DeliverNetworkPacket(header.IPv4ProtocolNumber, packet)
	packet.DecRef()
}

// opens says whether a packet that the gate admits begins a TCP connection, and which.
func opens(b []byte) (stack.TransportEndpointID, bool) {
	ip := header.IPv4(b)
	if ip.Protocol() != protoTCP {
		return stack.TransportEndpointID{}, false
	}
	tcp := header.TCP(b[header.IPv4MinimumSize:])
	return stack.TransportEndpointID{
		LocalAddress: ip.DestinationAddress(), LocalPort: tcp.DestinationPort(),
		RemoteAddress: ip.SourceAddress(), RemotePort: tcp.SourcePort(),
	}, tcp.Flags()&(header.TCPFlagSyn|header.TCPFlagAck) == header.TCPFlagSyn
}

// vectors are what packets are written from.
var vectors = sync.Pool{New: func() any { return new([][]byte) }}

// WritePackets implements stack.LinkWriter. A packet that the kernel refuses is lost, as
// on any link.
func (e *endpoint) WritePackets(list stack.PacketBufferList) (int, tcpip.Error) {
	n := 0
	for _, packet := range list.AsSlice() {
		if err := e.write(packet); err != nil {
			return n, &tcpip.ErrClosedForSend{}
		}
		n++
	}
	return n, nil
}

func (e *endpoint) write(packet *stack.PacketBuffer) error {
	var head [link.HeaderLen + etherLen]byte
	frame := e.around() - link.HeaderLen
	if e.ether != nil {
		e.ether.header(head[:link.HeaderLen], etherIPv4)
	}
	if gso := packet.GSOOptions; gso.Type == stack.GSOTCPv4 {
		if gso.NeedsCsum {
			head[0] = needsChecksum
			binary.NativeEndian.PutUint16(head[6:], uint16(frame)+gso.L3HdrLen)
			binary.NativeEndian.PutUint16(head[8:], gso.CsumOffset)
		}
		if packet.Data().Size() > int(gso.MSS) {
			head[1] = gsoTCPv4
			binary.NativeEndian.PutUint16(head[2:], uint16(frame+packet.HeaderSize()))
			binary.NativeEndian.PutUint16(head[4:], gso.MSS)
		}
	}
	vec := vectors.Get().(*[][]byte)
	*vec = append(append((*vec)[:0], head[:e.around()]), packet.AsSlices()...)
	err := e.send(*vec)
	clear(*vec)
	vectors.Put(vec)
	return err
}

// send writes a packet with what is around it.
func (e *endpoint) send(pieces [][]byte) error {
	return e.raw.Write(func(fd uintptr) bool {
		_, _ = unix.Writev(int(fd), pieces)
		return true
	})
}

// Attach implements stack.NetworkLinkEndpoint: packets are read from now on.
func (e *endpoint) Attach(d stack.NetworkDispatcher) {
	if d == nil {
		e.dispatcher.Store(nil)
		return
	}
	if e.dispatcher.Swap(&d) == nil {
		go e.read()
	}
}

// IsAttached implements stack.NetworkLinkEndpoint.
func (e *endpoint) IsAttached() bool { return e.dispatcher.Load() != nil }

// MTU implements stack.NetworkLinkEndpoint. It is smaller than the link's, which lets
// datagrams of every size through: segments of this size, many of them in one packet, flow
// also when a connection's buffer is small.
func (e *endpoint) MTU() uint32 { return 1500 }

// SetMTU implements stack.NetworkLinkEndpoint.
func (e *endpoint) SetMTU(uint32) {}

// MaxHeaderLength implements stack.NetworkLinkEndpoint.
func (e *endpoint) MaxHeaderLength() uint16 { return 0 }

// LinkAddress implements stack.NetworkLinkEndpoint: a TUN device has none.
func (e *endpoint) LinkAddress() tcpip.LinkAddress { return "" }

// SetLinkAddress implements stack.NetworkLinkEndpoint.
func (e *endpoint) SetLinkAddress(tcpip.LinkAddress) {}

// Capabilities implements stack.NetworkLinkEndpoint. The kernel inside leaves checksums
// to us, and they would prove nothing: the packets never were on a wire.
func (e *endpoint) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityRXChecksumOffload
}

// GSOMaxSize implements stack.GSOEndpoint: what fits into one packet with its headers.
func (e *endpoint) GSOMaxSize() uint32 {
	return 65535 - header.IPv4MaximumHeaderSize - header.TCPHeaderMaximumSize
}

// SupportedGSO implements stack.GSOEndpoint.
func (e *endpoint) SupportedGSO() stack.SupportedGSO { return stack.HostGSOSupported }

// ARPHardwareType implements stack.NetworkLinkEndpoint.
func (e *endpoint) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareNone }

// AddHeader implements stack.NetworkLinkEndpoint.
func (e *endpoint) AddHeader(*stack.PacketBuffer) {}

// ParseHeader implements stack.NetworkLinkEndpoint.
func (e *endpoint) ParseHeader(*stack.PacketBuffer) bool { return true }

// SetOnCloseAction implements stack.NetworkLinkEndpoint.
func (e *endpoint) SetOnCloseAction(f func()) { e.onClose = f }

// Close implements stack.NetworkLinkEndpoint.
func (e *endpoint) Close() {
	e.file.Close()
	if e.onClose != nil {
		e.onClose()
	}
}

// Wait implements stack.NetworkLinkEndpoint.
func (e *endpoint) Wait() {
	if e.IsAttached() {
		<-e.done
	}
}
