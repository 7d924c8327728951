package stack

import (
	"net/netip"
	"testing"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// FuzzGate holds the gate against a plainer reading of the same rules.
func FuzzGate(f *testing.F) {
	g := gate{own: [4]byte{10, 0, 2, 15}, gateway: [4]byte{10, 0, 2, 2}, network: netip.MustParsePrefix("10.0.2.0/24")}
	plain := func(b []byte) bool {
		if len(b) < header.IPv4MinimumSize || header.IPVersion(b) != 4 {
			return false
		}
		h := header.IPv4(b)
		if h.HeaderLength() != 20 || int(h.TotalLength()) != len(b) || h.More() || h.FragmentOffset() != 0 || b[6]&0x80 != 0 {
			return false
		}
		if h.SourceAddress() != tcpip.AddrFrom4(g.own) {
			return false
		}
		to := netip.AddrFrom4(h.DestinationAddress().As4())
		for _, refused := range []string{"0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/3", "10.0.2.0/32", "10.0.2.15/32", "10.0.2.255/32"} {
			if netip.MustParsePrefix(refused).Contains(to) {
				return false
			}
		}
		payload := b[20:]
		switch h.TransportProtocol() {
		case header.TCPProtocolNumber:
			return len(payload) >= header.TCPMinimumSize
		case header.UDPProtocolNumber:
			return len(payload) >= header.UDPMinimumSize && int(header.UDP(payload).Length()) == len(payload)
		case header.ICMPv4ProtocolNumber:
			return len(payload) >= header.ICMPv4MinimumSize && header.ICMPv4(payload).Type() == header.ICMPv4Echo &&
				header.ICMPv4(payload).Code() == 0 && h.DestinationAddress() == tcpip.AddrFrom4(g.gateway)
		}
		return false
	}
	good := []byte{0x45, 0, 0, 29, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 2, 15, 192, 0, 2, 1, 0x30, 0x39, 0, 7, 0, 9, 0, 0, 'x'}
	f.Add(good)
	ping := append([]byte{}, good[:28]...)
	ping[3], ping[9] = 28, 1
	copy(ping[16:], []byte{10, 0, 2, 2, 8, 0})
	f.Add(ping)
	f.Add(append([]byte{0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 2, 15, 10, 0, 2, 255}, make([]byte, 20)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if got, want := g.admits(b, len(b)), plain(b); got != want {
			t.Errorf("% x: %v, want %v", b, got, want)
		}
	})
}
