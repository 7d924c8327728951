package stack

import (
	"encoding/binary"
	"net/netip"
)

// Protocol numbers of IPv4.
const (
	protoICMP = 1
	protoTCP  = 6
	protoUDP  = 17
)

// gate says which packets of the sandbox the stack gets to see at all.
type gate struct {
	own     [4]byte // the only source address
	gateway [4]byte // the only address that answers ICMP
	network netip.Prefix
}

// admits judges a packet of n bytes by its first bytes: IPv4 without options, whole, from
// the sandbox's own address to one host, of a protocol that leads somewhere.
func (g *gate) admits(b []byte, n int) bool {
	if len(b) < 28 || b[0] != 0x45 {
		return false
	}
	if int(binary.BigEndian.Uint16(b[2:])) != n {
		return false
	}
	// More Fragments and the offset; the reserved bit must be zero too (RFC 791).
	if binary.BigEndian.Uint16(b[6:])&0xbfff != 0 {
		return false
	}
	if [4]byte(b[12:16]) != g.own {
		return false
	}
	to := [4]byte(b[16:20])
	// 0/8 this network, 127/8 loopback, 224/3 multicast, reserved and broadcast.
	if to[0] == 0 || to[0] == 127 || to[0] >= 224 || to == g.own {
		return false
	}
	addr := netip.AddrFrom4(to)
	if g.network.Contains(addr) && isLast(g.network, to) {
		return false
	}
	switch b[9] {
	case protoTCP:
		return len(b) >= 40
	case protoUDP:
		return int(binary.BigEndian.Uint16(b[24:])) == n-20
	case protoICMP: // an echo request
		return to == g.gateway && b[20] == 8 && b[21] == 0
	}
	return false
}

// isLast says whether an address is the first or the last of a network, which are no
// host's.
func isLast(network netip.Prefix, addr [4]byte) bool {
	host := binary.BigEndian.Uint32(addr[:]) & (1<<(32-network.Bits()) - 1)
	return host == 0 || host == 1<<(32-network.Bits())-1
}
