package stack

import (
	"encoding/binary"
	"net/netip"

	"github.com/berm-sandbox/berm/internal/network/link"
)

// ether is what a link that carries Ethernet frames has around its packets. There is one
// sandbox on it and one gateway, whose addresses are known: the gateway answers ARP for
// all others of the network, so that packets to them are judged as on a link without frames, and
// asks for nobody.
type ether struct{ gateway, sandbox [6]byte }

const (
	etherLen  = 14     // addresses of destination and source, and the type
	etherPad  = 46     // what a frame carries at least (IEEE 802.3): less is filled up
	etherIPv4 = 0x0800 // types
	etherARP  = 0x0806
)

// kind is the type of a frame from the sandbox to the gateway, or of one to all that asks for
// an address; 0 of any other.
func (e *ether) kind(header []byte) uint16 {
	to, from, kind := [6]byte(header), [6]byte(header[6:]), binary.BigEndian.Uint16(header[12:])
	all := [6]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	if from != e.sandbox || to != e.gateway && (to != all || kind != etherARP) {
		return 0
	}
	return kind
}

// header appends that of a frame to the sandbox.
func (e *ether) header(b []byte, kind uint16) []byte {
	b = append(append(b, e.sandbox[:]...), e.gateway[:]...)
	return binary.BigEndian.AppendUint16(b, kind)
}

// arpLen is the length of an ARP message about IPv4 on Ethernet (RFC 826).
const arpLen = 28

// answer is the answer to the sandbox's ARP request for another host's address; nil for anything else.
func (e *ether) answer(request []byte, g *gate) []byte {
	// Ethernet, IPv4, lengths of their addresses, request.
	if len(request) < arpLen || [8]byte(request) != [8]byte{0, 1, 8, 0, 6, 4, 0, 1} {
		return nil
	}
	if [6]byte(request[8:]) != e.sandbox || [4]byte(request[14:]) != g.own {
		return nil
	}
	to := [4]byte(request[24:])
	if to == g.own || !g.network.Contains(netip.AddrFrom4(to)) || isLast(g.network, to) {
		return nil
	}
	b := append(make([]byte, 0, arpLen), 0, 1, 8, 0, 6, 4, 0, 2)
	b = append(append(b, e.gateway[:]...), to[:]...)
	return append(append(b, e.sandbox[:]...), g.own[:]...)
}

// unpadded is the length of an IPv4 packet that a frame carried, of n bytes.
func unpadded(packet []byte, n int) int {
	if n > etherPad || len(packet) < 4 {
		return n
	}
	return min(n, int(binary.BigEndian.Uint16(packet[2:])))
}

// around is the length of what is before each packet on the descriptor.
func (e *endpoint) around() int {
	if e.ether != nil {
		return link.HeaderLen + etherLen
	}
	return link.HeaderLen
}
