package server

import (
	"encoding/binary"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/quota"
)

// A sandbox that opens all flows that it can leaves others theirs, and is told.
func TestHog(t *testing.T) {
	s := internet(t)
	s.flows = quota.NewPool[*sandbox](100, 0)
	hog, other := attach(t, s, echoRule), attach(t, s, echoRule)
	open := func(o *owner, most int) (n int) {
		for range most {
			c, err := o.Connect("tcp", one+":7")
			if err != nil {
				break
			}
			t.Cleanup(func() { c.Close() })
			n++
		}
		return n
	}
	if n := open(hog, 100); n != 50 {
		t.Errorf("the first gets %d flows, want half of 100", n)
	}
	hog.told("the limit", func(e egress.Event) bool { return e.Reason == "limit" && e.Action == "deny" && e.Detail != "" })
	if n := open(other, 25); n != 25 {
		t.Errorf("the other gets %d flows, want a quarter of 100", n)
	}
	hog.conn.Close()
	<-hog.left
	if n := open(other, 75); n != 25 {
		t.Errorf("alone it gets %d more flows, want up to half: others may come", n)
	}
}

// flood is a sandbox that does all at once what costs the service something, and takes nothing
// back, until done is closed; wait returns when it has stopped.
func flood(t *testing.T, o *owner, done chan struct{}) (wait func()) {
	var all sync.WaitGroup
	ended := func() bool {
		select {
		case <-done:
			return true
		default:
			return false
		}
	}
	// Connections whose buffers are full: it sends, and never reads what comes back.
	for i := range 8 {
		to := []string{one, other}[i%2] + ":7"
		all.Go(func() {
			for !ended() {
				c, err := o.Connect("tcp", to)
				if err != nil {
					time.Sleep(10 * time.Millisecond)
					continue
				}
				all.Go(func() {
					defer c.Close()
					for !ended() {
						_ = c.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
						_, _ = c.Write(make([]byte, 1<<20))
					}
				})
			}
		})
	}
	// Packets of which each begins something: half a handshake, a flow of datagrams, a query.
	var raw int
	o.Inside(func() {
		var err error
		if raw, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW); err != nil {
			t.Fatal(err)
		}
	})
	all.Go(func() {
		defer unix.Close(raw)
		question, _ := (&dnsmessage.Message{Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName("two.example."), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}}}).Pack()
		for i := 0; !ended(); i++ {
			port := uint16(1024 + rand.IntN(60000))
			var p []byte
			switch i % 3 {
			case 0:
				h := make([]byte, 20)
				binary.BigEndian.PutUint16(h, port)
				binary.BigEndian.PutUint16(h[2:], 7)
				h[12], h[13], h[14] = 5<<4, 2, 255
				p = ip(unix.IPPROTO_TCP, h)
			case 1:
				p = ip(unix.IPPROTO_UDP, udp(port, 7, make([]byte, 1000)))
			case 2:
				p = ip(unix.IPPROTO_UDP, udp(port, 53, question))
			}
			_ = unix.Sendto(raw, p, 0, &unix.SockaddrInet4{Addr: [4]byte(p[16:])})
			if i%1000 == 0 {
				time.Sleep(time.Millisecond)
			}
		}
	})
	return all.Wait
}

func ip(protocol byte, payload []byte) []byte {
	h := make([]byte, 20)
	h[0], h[8], h[9] = 0x45, 64, protocol
	binary.BigEndian.PutUint16(h[2:], uint16(20+len(payload)))
	copy(h[12:], []byte{10, 0, 2, 15, 198, 51, 100, 7})
	return append(h, payload...)
}

func udp(from, to uint16, payload []byte) []byte {
	h := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, from), to)
	h = binary.BigEndian.AppendUint16(h, uint16(8+len(payload)))
	return append(append(h, 0, 0), payload...)
}

// A sandbox that tries to use the service up costs it no more than is set, and others have their
// network meanwhile.
func TestFlood(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("missing: CAP_NET_RAW in the namespace")
	}
	if os.Getenv("BERM_TEST_ALL") == "" {
		t.Skip("slow: BERM_TEST_ALL=1 runs it")
	}
	s := internet(t)
	s.flows = quota.NewPool[*sandbox](Flows(quota.Memory()), 0)
	good := attach(t, s, echoRule)
	heap := func() uint64 {
		debug.FreeOSMemory()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapInuse + m.StackInuse
	}
	before := heap()
	done := make(chan struct{})
	bad := attach(t, s, `{"version":1,"rules":[{"to":["`+one+`","`+other+`"],"ports":[7]},{"to":["`+one+`"],"ports":[7],"proto":"udp"}]}`)
	wait := flood(t, bad, done)
	end := sync.OnceFunc(func() {
		close(done)
		wait()
	})
	t.Cleanup(end)
	var worst time.Duration
	begin, tries, most := time.Now(), 0, uint64(0)
	for ; time.Since(begin) < 15*time.Second; tries++ {
		at := time.Now()
		c, err := good.Connect("tcp", one+":7")
		if err != nil {
			t.Fatalf("try %d: %v", tries, err)
		}
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		if err := good.echo(c); err != nil {
			t.Fatalf("try %d: %v", tries, err)
		}
		c.Close()
		worst = max(worst, time.Since(at))
		most = max(most, heap())
		time.Sleep(20 * time.Millisecond)
	}
	flows := s.flows.Used()
	s.Pass()
	end()
	bad.conn.Close()
	<-bad.left
	after := heap()
	t.Logf("%d connections beside it, the slowest %v; it had %d flows, and cost %d MiB, of which %d are left",
		tries, worst.Round(time.Millisecond), flows, (most-before)>>20, (int64(after)-int64(before))>>20)
	// The buffers of package stack and what its flows cost besides; the test's own side too.
	if limit := uint64(160<<20 + 4096*flowMemory); most-before > limit {
		t.Errorf("it cost %d MiB, more than %d", (most-before)>>20, limit>>20)
	}
	if tries < 10 || flows < 100 {
		t.Errorf("%d tries beside %d flows tell nothing", tries, flows)
	}
}
