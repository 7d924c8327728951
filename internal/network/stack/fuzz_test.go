package stack_test

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/network/link"
	"github.com/berm-sandbox/berm/internal/network/stack"
)

// packet is an IPv4 packet of the sandbox's with a right header checksum.
func packet(protocol byte, to [4]byte, payload []byte) []byte {
	p := make([]byte, 20, 20+len(payload))
	p[0], p[8], p[9] = 0x45, 64, protocol
	binary.BigEndian.PutUint16(p[2:], uint16(20+len(payload)))
	copy(p[12:], []byte{10, 0, 2, 15})
	copy(p[16:], to[:])
	sum := uint32(0)
	for i := 0; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(p[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(p[10:], ^uint16(sum))
	return append(p, payload...)
}

func udpPayload(port uint16, data string) []byte {
	u := binary.BigEndian.AppendUint16(nil, 40000)
	u = binary.BigEndian.AppendUint16(u, port)
	u = binary.BigEndian.AppendUint16(u, uint16(8+len(data)))
	return append(append(u, 0, 0), data...)
}

func tcpPayload(port uint16, flags byte, options ...byte) []byte {
	h := make([]byte, 20, 40)
	binary.BigEndian.PutUint16(h, 40000)
	binary.BigEndian.PutUint16(h[2:], port)
	h[12], h[13] = byte((20+len(options))/4)<<4, flags
	binary.BigEndian.PutUint16(h[14:], 65535)
	return append(h, options...)
}

// FuzzPackets lets a hostile sandbox send two packets of any bytes. They cannot crash the
// stack or stop it, and no judge is asked about a flow that the gate should have refused.
func FuzzPackets(f *testing.F) {
	far := [4]byte{192, 0, 2, 1}
	syn := packet(6, far, tcpPayload(80, 2, 2, 4, 5, 180, 1, 3, 3, 7))
	f.Add(syn, packet(6, far, tcpPayload(80, 0x10)))
	f.Add(syn, packet(6, far, tcpPayload(80, 4)))
	f.Add(packet(17, far, udpPayload(7, "x")), packet(17, far, udpPayload(7, "y")))
	f.Add(packet(17, far, udpPayload(53, "query")), packet(1, [4]byte{10, 0, 2, 2}, []byte{8, 0, 0xf7, 0xff, 0, 0, 0, 0}))
	f.Add([]byte{0x60, 0, 0, 0}, []byte{})
	f.Fuzz(func(t *testing.T, one, two []byte) {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(pair[1])
		check := func(f *stack.Flow) {
			to := f.Destination.Addr()
			if f.Source.Addr() != netip.AddrFrom4(link.Default.Address) || to.IsMulticast() || to.IsLoopback() || to.IsUnspecified() || to == f.Source.Addr() {
				t.Errorf("asked about %v to %v", f.Source, f.Destination)
			}
		}
		through := make(chan struct{}, 1)
		j := &judge{
			tcp: func(ctx context.Context, f *stack.Flow) func(stack.Conn) { check(f); return echo(ctx, f) },
			udp: func(ctx context.Context, f *stack.Flow) func(net.Conn) { check(f); return echoDatagrams(ctx, f) },
			query: func(_ netip.Addr, m []byte) []byte {
				if string(m) == "the last one" {
					through <- struct{}{}
				}
				return m
			},
		}
		s, err := stack.New(pair[0], j, stack.Limits{})
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range [][]byte{one, two, packet(17, far, udpPayload(53, "the last one"))} {
			p = p[:min(len(p), 65535)]
			if _, err := unix.Write(pair[1], append(make([]byte, link.HeaderLen), p...)); err != nil {
				t.Fatal(err)
			}
		}
		select {
		case <-through:
		case <-time.After(10 * time.Second):
			t.Error("the stack has stopped")
		}
		s.Close()
	})
}

// A sandbox that does not answer the answer to its SYN holds nothing up.
func TestAHandshakeThatIsNotFinished(t *testing.T) {
	far := [4]byte{192, 0, 2, 1}
	for _, end := range []string{"reset", "close"} {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(pair[1])
		s, err := stack.New(pair[0], &judge{tcp: echo}, stack.Limits{})
		if err != nil {
			t.Fatal(err)
		}
		syn := append(make([]byte, link.HeaderLen), packet(6, far, tcpPayload(80, 2, 2, 4, 5, 180))...)
		if _, err := unix.Write(pair[1], syn); err != nil {
			t.Fatal(err)
		}
		answer := make([]byte, 100)
		eventually(t, "the SYN is answered", func() bool {
			n, err := unix.Read(pair[1], answer)
			return err == nil && n > link.HeaderLen+33 && answer[link.HeaderLen+33] == 0x12
		})
		begin := time.Now()
		if end == "reset" {
			for _, f := range s.Flows() {
				f.Reset()
			}
			eventually(t, "the flow is forgotten", func() bool { return len(s.Flows()) == 0 })
		}
		s.Close()
		if took := time.Since(begin); took > 10*time.Second {
			t.Errorf("%s took %v", end, took)
		}
	}
}
