package internet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Packet says for what some packets were: an address that was to get them, and which protocol
// and port of it.
type Packet struct {
	To    netip.Addr
	Proto string // tcp, udp, or the number
	Port  uint16 // of TCP and UDP
}

func (p Packet) String() string {
	return fmt.Sprintf("%s/%s", netip.AddrPortFrom(p.To, p.Port), p.Proto)
}

// Packets returns how many bytes came, in packets with their headers, since the last call.
// What a host sends by itself is left out: neighbour discovery, and errors of ICMP.
func (i *Internet) Packets() map[Packet]int {
	i.mu.Lock()
	defer i.mu.Unlock()
	seen := maps.Clone(i.packets)
	clear(i.packets)
	return seen
}

// watch counts all that comes over the link. Called in the namespace.
func (i *Internet) watch() error {
	all := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL))
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(all))
	if err != nil {
		return err
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20)
	// A short wait lets the reader see that it is over.
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 200_000}); err != nil {
		return err
	}
	go func() {
		defer unix.Close(fd)
		b := make([]byte, 128)
		for {
			n, from, err := unix.Recvfrom(fd, b, unix.MSG_TRUNC)
			if errors.Is(err, unix.ENETDOWN) || errors.Is(err, unix.EBADF) {
				return
			}
			link, ok := from.(*unix.SockaddrLinklayer)
			if err != nil || !ok || link.Pkttype == unix.PACKET_OUTGOING || link.Hatype == unix.ARPHRD_LOOPBACK {
				continue
			}
			if p, ok := parse(b[:min(n, len(b))]); ok {
				i.mu.Lock()
				i.packets[p] += n
				i.mu.Unlock()
			}
		}
	}()
	return nil
}

// parse reads the headers of an IP packet.
func parse(b []byte) (Packet, bool) {
	var p Packet
	var proto byte
	if len(b) < 20 {
		return p, false
	}
	switch b[0] >> 4 {
	case 4:
		p.To, proto = netip.AddrFrom4([4]byte(b[16:20])), b[9]
		b = b[min(len(b), int(b[0]&15)*4):]
		if proto == unix.IPPROTO_ICMP && len(b) > 0 && b[0] == 3 { // unreachable
			return p, false
		}
	case 6:
		if len(b) < 40 {
			return p, false
		}
		p.To, proto = netip.AddrFrom16([16]byte(b[24:40])), b[6]
		b = b[40:]
		// Errors; discovery of neighbours, routers and listeners, also behind a hop-by-hop header.
		if proto == unix.IPPROTO_HOPOPTS || proto == unix.IPPROTO_ICMPV6 && len(b) > 0 && (b[0] < 128 || b[0] > 129) {
			return p, false
		}
	default:
		return p, false
	}
	switch {
	case proto == unix.IPPROTO_TCP && len(b) >= 4:
		p.Proto, p.Port = "tcp", binary.BigEndian.Uint16(b[2:])
	case proto == unix.IPPROTO_UDP && len(b) >= 4:
		p.Proto, p.Port = "udp", binary.BigEndian.Uint16(b[2:])
	default:
		p.Proto = fmt.Sprint(proto)
	}
	return p, true
}
