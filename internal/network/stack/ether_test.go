package stack_test

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/network/link"
	"github.com/berm-sandbox/berm/internal/network/link/linktest"
	"github.com/berm-sandbox/berm/internal/network/stack"
)

// startEthernet is start of a sandbox whose link carries Ethernet frames.
func startEthernet(t testing.TB, j stack.Judge, l stack.Limits) *sandbox {
	t.Helper()
	b := linktest.New(t)
	s, err := stack.NewEthernet(b.Ethernet(t), j, l)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return &sandbox{s, b}
}

// The kernel finds the gateway by ARP, and everything is as on a link without frames.
func TestEthernet(t *testing.T) {
	j := &judge{tcp: echo, udp: echoDatagrams, query: func(_ netip.Addr, m []byte) []byte { return m }}
	b := startEthernet(t, j, stack.Limits{})
	for _, to := range [][2]string{{"tcp", "192.0.2.7:80"}, {"udp", "192.0.2.7:7"}, {"udp", "10.0.2.2:53"}, {"udp", "192.0.2.9:53"}} {
		c := b.MustConnect(t, to[0], to[1])
		_, _ = c.Write([]byte("hello"))
		answer := make([]byte, 5)
		if _, err := io.ReadFull(c, answer); err != nil || string(answer) != "hello" {
			t.Errorf("%s: %q, %v", to, answer, err)
		}
	}
	// Large packets, which are cut into segments on neither side.
	c := b.MustConnect(t, "tcp", "192.0.2.7:80")
	data := make([]byte, 20<<20+13)
	_, _ = rand.Read(data)
	go func() {
		_, _ = c.Write(data)
		_ = c.(*net.TCPConn).CloseWrite()
	}()
	if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes of %d come back, %v", len(got), len(data), err)
	}
	if n := b.Dropped(); n > 20 { // what the kernel says of itself to its neighbours
		t.Errorf("%d packets were dropped", n)
	}
}

// What is sent to another address on the link is judged too, as where there are no frames.
func TestEveryAddressOfTheNetworkIsJudged(t *testing.T) {
	j := &judge{tcp: echo}
	b := startEthernet(t, j, stack.Limits{})
	b.MustConnect(t, "tcp", "10.0.2.7:80")
	if got := j.record(); got != "[tcp 10.0.2.7:80]" {
		t.Errorf("a judge was asked about %s", got)
	}
}

// frame is one of the sandbox's.
func frame(to, from [6]byte, kind uint16, payload []byte) []byte {
	f := append(append(make([]byte, link.HeaderLen), to[:]...), from[:]...)
	return append(binary.BigEndian.AppendUint16(f, kind), payload...)
}

func arp(operation byte, hardware [6]byte, own, target [4]byte) []byte {
	b := append([]byte{0, 1, 8, 0, 6, 4, 0, operation}, hardware[:]...)
	b = append(append(b, own[:]...), make([]byte, 6)...)
	return append(b, target[:]...)
}

// wire is the end of a link that a test holds, and the stack at the other.
func wire(t testing.TB, j stack.Judge) (int, *stack.Stack) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	s, err := stack.NewEthernet(pair[0], j, stack.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Close()
		unix.Close(pair[1])
	})
	return pair[1], s
}

func TestOddFramesAreDropped(t *testing.T) {
	var all, nobody [6]byte
	for i := range all {
		all[i] = 0xff
	}
	us, gateway, own := link.Ethernet.Hardware, link.GatewayHardware, link.Default.Address
	datagram := packet(17, [4]byte{192, 0, 2, 1}, udpPayload(7, "x"))
	j := &judge{udp: echoDatagrams}
	fd, s := wire(t, j)
	for name, f := range map[string][]byte{
		"a source that is not its own":  frame(gateway, nobody, 0x800, datagram),
		"the gateway's source":          frame(gateway, gateway, 0x800, datagram),
		"another's destination":         frame(us, us, 0x800, datagram),
		"a packet to all":               frame(all, us, 0x800, datagram),
		"IPv6":                          frame(gateway, us, 0x86dd, make([]byte, 60)),
		"a VLAN":                        frame(gateway, us, 0x8100, datagram),
		"a length of old":               frame(gateway, us, 46, datagram),
		"ARP for another network":       frame(all, us, 0x806, arp(1, us, own, [4]byte{10, 0, 3, 2})),
		"ARP for the whole network":     frame(all, us, 0x806, arp(1, us, own, [4]byte{10, 0, 2, 255})),
		"ARP for its own address":       frame(all, us, 0x806, arp(1, us, own, own)),
		"ARP in another's name":         frame(all, us, 0x806, arp(1, us, [4]byte{10, 0, 2, 2}, link.Default.Gateway)),
		"ARP with another's hardware":   frame(all, us, 0x806, arp(1, gateway, own, link.Default.Gateway)),
		"an answer that nobody asked":   frame(gateway, us, 0x806, arp(2, us, own, link.Default.Gateway)),
		"ARP that is cut":               frame(all, us, 0x806, arp(1, us, own, link.Default.Gateway)[:27]),
		"a packet inside that is odd":   frame(gateway, us, 0x800, append([]byte{0x46}, datagram[1:]...)),
		"a packet shorter than it says": frame(gateway, us, 0x800, datagram[:28]),
	} {
		before := s.Dropped()
		if _, err := unix.Write(fd, f); err != nil {
			t.Fatal(err)
		}
		eventually(t, name+" is dropped", func() bool { return s.Dropped() > before })
	}
	answer := make([]byte, 200)
	if n, err := unix.Read(fd, answer); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("something is answered: % x, %v", answer[:max(n, 0)], err)
	}
	if got := j.record(); got != "[]" {
		t.Errorf("a judge was asked about %s", got)
	}
	// Padded as on a wire, the same without the oddity passes, and the gateway is found.
	padded := frame(gateway, us, 0x800, append(bytes.Clone(datagram), make([]byte, 46-len(datagram))...))
	for _, f := range [][]byte{padded, frame(all, us, 0x806, arp(1, us, own, link.Default.Gateway))} {
		if _, err := unix.Write(fd, f); err != nil {
			t.Fatal(err)
		}
	}
	want := frame(us, gateway, 0x806, append(append([]byte{0, 1, 8, 0, 6, 4, 0, 2}, append(gateway[:], link.Default.Gateway[:]...)...), append(us[:], own[:]...)...))
	var arped, echoed bool
	eventually(t, "both are answered", func() bool {
		n, err := unix.Read(fd, answer)
		if err != nil {
			return arped && echoed
		}
		arped = arped || bytes.Equal(answer[:n], want)
		echoed = echoed || bytes.HasPrefix(answer[link.HeaderLen:n], frame(us, gateway, 0x800, nil)[link.HeaderLen:])
		return arped && echoed
	})
}

// FuzzFrames is FuzzPackets of what is around packets.
func FuzzFrames(f *testing.F) {
	us, gateway := link.Ethernet.Hardware, link.GatewayHardware
	far := [4]byte{192, 0, 2, 1}
	f.Add(frame(gateway, us, 0x800, packet(6, far, tcpPayload(80, 2, 2, 4, 5, 180)))[link.HeaderLen:])
	f.Add(frame(gateway, us, 0x800, append(packet(17, far, udpPayload(7, "x")), make([]byte, 17)...))[link.HeaderLen:])
	f.Add(frame(gateway, us, 0x806, arp(1, us, link.Default.Address, link.Default.Gateway))[link.HeaderLen:])
	f.Add(frame(gateway, us, 0x86dd, make([]byte, 40))[link.HeaderLen:])
	f.Fuzz(func(t *testing.T, bytes []byte) {
		through := make(chan struct{}, 1)
		j := &judge{
			tcp: echo,
			udp: echoDatagrams,
			query: func(_ netip.Addr, m []byte) []byte {
				if string(m) == "the last one" {
					through <- struct{}{}
				}
				return m
			},
		}
		fd, _ := wire(t, j)
		last := frame(gateway, us, 0x800, packet(17, far, udpPayload(53, "the last one")))
		for _, p := range [][]byte{append(make([]byte, link.HeaderLen), bytes[:min(len(bytes), 65535)]...), last} {
			if _, err := unix.Write(fd, p); err != nil {
				t.Fatal(err)
			}
		}
		select {
		case <-through:
		case <-time.After(10 * time.Second):
			t.Error("the stack has stopped")
		}
	})
}
