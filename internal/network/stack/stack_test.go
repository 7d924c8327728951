package stack_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/stack"
)

func TestAConnectionIsJudgedAndHandedOver(t *testing.T) {
	j := &judge{tcp: echo}
	b := start(t, j, stack.Limits{})
	c := b.MustConnect(t, "tcp", "192.0.2.7:4711")
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	// The stream up ends, the one down does not: the echo comes all the same.
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(c); err != nil || string(got) != "hello" {
		t.Errorf("got %q, %v", got, err)
	}
	if got := j.record(); got != "[tcp 192.0.2.7:4711]" {
		t.Errorf("asked about %s", got)
	}
}

func TestARefusedConnectionIsReset(t *testing.T) {
	j := &judge{}
	b := start(t, j, stack.Limits{})
	begin := time.Now()
	if _, err := b.Connect("tcp", "192.0.2.7:80"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("got %v", err)
	}
	if took := time.Since(begin); took > 20*time.Second {
		t.Errorf("refused after %v", took)
	}
	if len(b.Flows()) != 0 {
		eventually(t, "the flow is forgotten", func() bool { return len(b.Flows()) == 0 })
	}
}

// A port is of use again at once, also where this side closed first and remembers that.
func TestAPortIsUsedAgain(t *testing.T) {
	closing := func(context.Context, *stack.Flow) func(stack.Conn) { return func(stack.Conn) {} }
	b := start(t, &judge{tcp: closing}, stack.Limits{})
	from := net.TCPAddr{Port: 40000}
	again := func() (repeated uint32) {
		c := func() *net.TCPConn {
			for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
				var c net.Conn
				var err error
				b.Inside(func() {
					d := net.Dialer{LocalAddr: &from, Timeout: 10 * time.Second}
					c, err = d.Dial("tcp", "192.0.2.7:80")
				})
				// As long as the kernel inside waits for the answer to its end of the one before.
				busy := errors.Is(err, unix.EADDRINUSE) || errors.Is(err, unix.EADDRNOTAVAIL)
				if err == nil {
					return c.(*net.TCPConn)
				}
				if !busy || time.Now().After(end) {
					t.Fatal(err)
				}
			}
		}()
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		if _, err := io.ReadAll(c); err != nil {
			t.Fatal(err)
		}
		raw, err := c.SyscallConn()
		if err == nil {
			err = raw.Control(func(fd uintptr) {
				if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
					repeated = info.Total_retrans
				}
			})
		}
		if err != nil {
			t.Fatal(err)
		}
		return repeated
	}
	again()
	// A busy machine may repeat one as well.
	for range 5 {
		if again() == 0 {
			return
		}
	}
	t.Error("each connection from a port that was used before was asked for twice")
}

func TestNothingIsAnsweredWhileAJudgeThinks(t *testing.T) {
	think := make(chan struct{})
	j := &judge{tcp: func(ctx context.Context, f *stack.Flow) func(stack.Conn) {
		select {
		case <-think:
			return echo(ctx, f)
		case <-ctx.Done():
			return nil
		}
	}}
	b := start(t, j, stack.Limits{})
	connected := make(chan error, 1)
	go func() {
		_, err := b.Connect("tcp", "192.0.2.7:80")
		connected <- err
	}()
	eventually(t, "the judge is asked", func() bool { return len(b.Flows()) == 1 })
	select {
	case err := <-connected:
		t.Fatalf("an answer before the verdict: %v", err)
	case <-time.After(1500 * time.Millisecond): // the SYN came again meanwhile
	}
	close(think)
	if err := <-connected; err != nil {
		t.Error(err)
	}
	if got := j.record(); got != "[tcp 192.0.2.7:80]" {
		t.Errorf("asked about %s", got)
	}
}

func TestResetEndsAFlow(t *testing.T) {
	served := make(chan error, 2)
	j := &judge{
		tcp: func(context.Context, *stack.Flow) func(stack.Conn) {
			return func(c stack.Conn) {
				_, err := io.Copy(io.Discard, c)
				served <- err
			}
		},
		udp: func(context.Context, *stack.Flow) func(net.Conn) {
			return func(c net.Conn) {
				for b := make([]byte, 10); ; {
					if _, err := c.Read(b); err != nil {
						served <- err
						return
					}
				}
			}
		},
	}
	b := start(t, j, stack.Limits{})
	c := b.MustConnect(t, "tcp", "192.0.2.7:80")
	u := b.MustConnect(t, "udp", "192.0.2.7:80")
	_, _ = c.Write([]byte("12345"))
	_, _ = u.Write([]byte("123"))
	eventually(t, "both flows have counted what came", func() bool {
		flows := b.Flows()
		return len(flows) == 2 && flows[0].Up()+flows[1].Up() == 8
	})
	for _, f := range b.Flows() {
		f.Reset()
	}
	for range 2 {
		select {
		case err := <-served:
			if err == nil {
				t.Error("a reset looks like the end of a stream")
			}
		case <-time.After(5 * time.Second):
			t.Fatal("a flow that was reset is still served")
		}
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("inside: %v", err)
	}
	eventually(t, "the flows are forgotten", func() bool { return len(b.Flows()) == 0 })
}

func TestResetWhileAJudgeThinks(t *testing.T) {
	j := &judge{tcp: func(ctx context.Context, f *stack.Flow) func(stack.Conn) {
		<-ctx.Done()
		return echo(ctx, f) // too late
	}}
	b := start(t, j, stack.Limits{})
	connected := make(chan error, 1)
	go func() {
		_, err := b.Connect("tcp", "192.0.2.7:80")
		connected <- err
	}()
	eventually(t, "the judge is asked", func() bool { return len(b.Flows()) == 1 })
	b.Flows()[0].Reset()
	if err := <-connected; !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("got %v", err)
	}
}

func TestDatagrams(t *testing.T) {
	think := make(chan struct{})
	j := &judge{udp: func(ctx context.Context, f *stack.Flow) func(net.Conn) {
		<-think
		return echoDatagrams(ctx, f)
	}}
	b := start(t, j, stack.Limits{})
	c := b.MustConnect(t, "udp", "192.0.2.7:4711")
	// What comes while the judge thinks is not lost.
	sent := [][]byte{[]byte("1"), []byte("22"), bytes.Repeat([]byte("3"), 60000)}
	for _, m := range sent {
		if _, err := c.Write(m); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the judge is asked", func() bool { return len(b.Flows()) == 1 })
	close(think)
	got := make([]byte, 1<<16)
	for _, want := range sent {
		n, err := c.Read(got)
		if err != nil || !bytes.Equal(got[:n], want) {
			t.Fatalf("%d bytes for %d, %v", n, len(want), err)
		}
	}
	if got := j.record(); got != "[udp 192.0.2.7:4711]" {
		t.Errorf("asked about %s", got)
	}
}

func TestRefusedDatagramsAreUnreachable(t *testing.T) {
	b := start(t, &judge{}, stack.Limits{})
	c := b.MustConnect(t, "udp", "192.0.2.7:443")
	if _, err := c.Write([]byte("quic")); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("got %v", err)
	}
}

// Datagrams that a program hands to the kernel at once come out one by one.
func TestDatagramsAtOnce(t *testing.T) {
	var got atomic.Int64
	j := &judge{udp: func(context.Context, *stack.Flow) func(net.Conn) {
		return func(c net.Conn) {
			for b := make([]byte, 1<<16); ; {
				n, err := c.Read(b)
				if err != nil {
					return
				}
				if n == 1000 {
					got.Add(1)
				}
			}
		}
	}}
	b := start(t, j, stack.Limits{})
	c := b.MustConnect(t, "udp", "192.0.2.7:4711").(*net.UDPConn)
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if controlErr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, 1000) }); controlErr != nil || err != nil {
		t.Fatal(controlErr, err)
	}
	if _, err := c.Write(make([]byte, 10*1000)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "ten datagrams come", func() bool { return got.Load() == 10 })
}

func TestQueriesAreAnsweredWhateverTheServer(t *testing.T) {
	j := &judge{query: func(server netip.Addr, m []byte) []byte {
		return append([]byte(server.String()+" "), m...)
	}}
	b := start(t, j, stack.Limits{})
	for _, server := range []string{"10.0.2.2", "10.0.2.3", "8.8.8.8", "192.0.2.1"} {
		c := b.MustConnect(t, "udp", server+":53")
		if _, err := c.Write([]byte("who")); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 100)
		n, err := c.Read(got)
		if err != nil || string(got[:n]) != server+" who" {
			t.Errorf("%q, %v", got[:n], err)
		}
	}
	if len(b.Flows()) != 0 {
		t.Error("a query is a flow")
	}
}

func TestLimits(t *testing.T) {
	hold := func(context.Context, *stack.Flow) func(stack.Conn) {
		return func(c stack.Conn) { _, _ = io.Copy(io.Discard, c) }
	}
	t.Run("flows", func(t *testing.T) {
		j := &judge{tcp: hold}
		b := start(t, j, stack.Limits{Flows: 2})
		first := b.MustConnect(t, "tcp", "192.0.2.1:80")
		b.MustConnect(t, "tcp", "192.0.2.2:80")
		if _, err := b.Connect("tcp", "192.0.2.3:80"); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("a third flow: %v", err)
		}
		if got := j.limits(); got != "[flows]" {
			t.Errorf("reported %s", got)
		}
		first.Close()
		eventually(t, "the flow is forgotten", func() bool { return len(b.Flows()) == 1 })
		b.MustConnect(t, "tcp", "192.0.2.3:80")
	})
	t.Run("destination", func(t *testing.T) {
		j := &judge{tcp: hold}
		b := start(t, j, stack.Limits{Destination: 1})
		b.MustConnect(t, "tcp", "192.0.2.1:80")
		if _, err := b.Connect("tcp", "192.0.2.1:81"); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("a second flow to one address: %v", err)
		}
		b.MustConnect(t, "tcp", "192.0.2.2:80")
		if got := j.limits(); got != "[flows to one address]" {
			t.Errorf("reported %s", got)
		}
	})
	t.Run("rate", func(t *testing.T) {
		j := &judge{tcp: hold}
		b := start(t, j, stack.Limits{Rate: 1, Burst: 2})
		begin := time.Now()
		for range 3 {
			b.MustConnect(t, "tcp", "192.0.2.1:80")
		}
		// The third SYN was not answered, and its repetition was.
		if took := time.Since(begin); took < 900*time.Millisecond {
			t.Errorf("3 flows after %v", took)
		}
		if got := j.limits(); got != "[new flows per second]" {
			t.Errorf("reported %s", got)
		}
	})
	t.Run("datagrams", func(t *testing.T) {
		j := &judge{udp: echoDatagrams}
		b := start(t, j, stack.Limits{Datagrams: 1, IdleUDP: 200 * time.Millisecond})
		c := b.MustConnect(t, "udp", "192.0.2.1:7")
		exchange(t, c, "one")
		d := b.MustConnect(t, "udp", "192.0.2.2:7")
		_, _ = d.Write([]byte("x"))
		if _, err := d.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("a second UDP flow: %v", err)
		}
		// Silence ends the first.
		eventually(t, "the silent flow is forgotten", func() bool { return len(b.Flows()) == 0 })
		exchange(t, d, "two")
	})
	t.Run("idle", func(t *testing.T) {
		b := start(t, &judge{tcp: hold}, stack.Limits{IdleTCP: 200 * time.Millisecond})
		c := b.MustConnect(t, "tcp", "192.0.2.1:80")
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("a silent connection: %v", err)
		}
	})
	t.Run("meter", func(t *testing.T) {
		// What the meter refuses does not pass, in either direction and by either way to read.
		for _, up := range []bool{true, false} {
			for _, spliced := range []string{"to a writer", "to a socket", ""} {
				const most = 2 << 20
				var got atomic.Int64
				var left atomic.Int64
				left.Store(most)
				serve := func(c stack.Conn, f *stack.Flow) {
					defer f.Reset()
					buffer := make([]byte, 16<<10)
					if !up { // the client is there
						_, _ = c.Read(buffer)
					}
					for err := error(nil); err == nil; {
						var n int
						switch {
						case up && spliced != "":
							to := io.Discard
							if spliced == "to a socket" {
								to = drain(t)
							}
							var all int64
							all, err = c.(io.WriterTo).WriteTo(to)
							n = int(all)
						case up:
							n, err = c.Read(buffer)
						default:
							n, err = c.Write(buffer)
						}
						got.Add(int64(n))
					}
				}
				j := &judge{tcp: func(_ context.Context, f *stack.Flow) func(stack.Conn) {
					f.Meter = func(_ context.Context, way bool, n int) error {
						if way == up && left.Add(-int64(n)) < 0 {
							return errors.New("used up")
						}
						return nil
					}
					return func(c stack.Conn) { serve(c, f) }
				}}
				b := start(t, j, stack.Limits{})
				c := b.MustConnect(t, "tcp", "192.0.2.1:7")
				if up {
					_, _ = c.Write(make([]byte, 8<<20))
				} else {
					_, _ = c.Write([]byte{1})
				}
				if n, _ := io.Copy(io.Discard, c); n > most {
					t.Errorf("up %v: %d bytes came back", up, n)
				}
				if total := got.Load(); total > most || total < most/4 {
					t.Errorf("up %v, %q: %d bytes passed", up, spliced, total)
				}
			}
		}
	})
}

func exchange(t *testing.T, c net.Conn, message string) {
	t.Helper()
	if _, err := c.Write([]byte(message)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 100)
	if n, err := c.Read(b); err != nil || string(b[:n]) != message {
		t.Fatalf("%q, %v", b[:n], err)
	}
}

func TestDialIntoTheSandbox(t *testing.T) {
	b := start(t, &judge{}, stack.Limits{})
	var l net.Listener
	var err error
	b.Inside(func() { l, err = net.Listen("tcp", "0.0.0.0:8080") })
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	peers := make(chan string, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		peers <- c.RemoteAddr().(*net.TCPAddr).IP.String()
		_, _ = c.Write([]byte("inside"))
		c.Close()
	}()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	c, err := b.Dial(ctx, 8080)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got, err := io.ReadAll(c); err != nil || string(got) != "inside" {
		t.Errorf("%q, %v", got, err)
	}
	if peer := <-peers; peer != "10.0.2.2" {
		t.Errorf("the sandbox sees %s", peer)
	}
	if _, err := b.Dial(ctx, 8081); berm.KindOf(err) != berm.Unavailable {
		t.Errorf("a port that nobody listens on: %v", err)
	}
}

func TestCloseResetsEverything(t *testing.T) {
	j := &judge{tcp: echo, udp: echoDatagrams}
	b := start(t, j, stack.Limits{})
	var l net.Listener
	b.Inside(func() { l, _ = net.Listen("tcp", "0.0.0.0:8080") })
	defer l.Close()
	inbound, err := b.Dial(context.Background(), 8080)
	if err != nil {
		t.Fatal(err)
	}
	c := b.MustConnect(t, "tcp", "192.0.2.1:7")
	exchange(t, c, "alive")
	exchange(t, b.MustConnect(t, "udp", "192.0.2.1:7"), "alive")
	select {
	case <-b.Done():
		t.Fatal("done while it works")
	default:
	}
	begin := time.Now()
	b.Close()
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("closed after %v", took)
	}
	<-b.Done()
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("inside: %v", err)
	}
	if _, err := inbound.Read(make([]byte, 1)); err == nil {
		t.Error("what was dialed still reads")
	}
	if len(b.Flows()) != 0 || b.Err() != nil {
		t.Errorf("%d flows live, %v", len(b.Flows()), b.Err())
	}
}

// A link that is taken away inside is seen.
func TestTheDeathOfALinkIsSeen(t *testing.T) {
	b := start(t, &judge{tcp: echo}, stack.Limits{})
	exchange(t, b.MustConnect(t, "tcp", "192.0.2.1:7"), "alive")
	b.Inside(func() {
		eth, err := net.InterfaceByName("eth0")
		if err != nil {
			t.Error(err)
			return
		}
		s, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE)
		if err != nil {
			t.Error(err)
			return
		}
		defer unix.Close(s)
		m := make([]byte, 32) // struct nlmsghdr, struct ifinfomsg
		binary.NativeEndian.PutUint32(m, 32)
		binary.NativeEndian.PutUint16(m[4:], unix.RTM_DELLINK)
		binary.NativeEndian.PutUint16(m[6:], unix.NLM_F_REQUEST)
		binary.NativeEndian.PutUint32(m[20:], uint32(eth.Index))
		if err := unix.Sendto(s, m, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
			t.Error(err)
		}
	})
	select {
	case <-b.Done():
	case <-time.After(5 * time.Second):
		t.Error("nobody noticed")
	}
	if err := b.Err(); berm.KindOf(err) != berm.Unavailable {
		t.Errorf("the reason is %v", err)
	}
}

// The outside of a connection is a server on the loopback of the test's namespace.
// drain is a connection whose other end takes everything.
func drain(t *testing.T) net.Conn {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Error(err)
		return nil
	}
	go func() {
		c, err := l.Accept()
		l.Close() // not before: that resets a connection that waits to be accepted
		if err == nil {
			_, _ = io.Copy(io.Discard, c)
			c.Close()
		}
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		l.Close()
		t.Error(err)
		return nil
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// wrapped is a connection with another around it, as one that was read ahead.
type wrapped struct{ stack.Conn }

func (w wrapped) NetConn() net.Conn { return w.Conn }

func TestSplice(t *testing.T) {
	for name, around := range map[string]func(stack.Conn) stack.Conn{
		"bare":    func(c stack.Conn) stack.Conn { return c },
		"wrapped": func(c stack.Conn) stack.Conn { return wrapped{c} },
	} {
		t.Run(name, func(t *testing.T) { testSplice(t, around) })
	}
}

func testSplice(t *testing.T, around func(stack.Conn) stack.Conn) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ended := make(chan error, 1)
	flows := make(chan *stack.Flow, 1)
	j := &judge{tcp: func(_ context.Context, f *stack.Flow) func(stack.Conn) {
		out, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Error(err)
			return nil
		}
		return func(c stack.Conn) {
			defer out.Close()
			select {
			case flows <- f:
			default:
			}
			ended <- stack.Splice(around(c), out.(*net.TCPConn))
		}
	}}
	b := start(t, j, stack.Limits{})
	open := func() (in, out *net.TCPConn) {
		c := b.MustConnect(t, "tcp", "192.0.2.1:80")
		s, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		_ = s.SetDeadline(time.Now().Add(20 * time.Second))
		return c.(*net.TCPConn), s.(*net.TCPConn)
	}
	t.Run("bytes and ends", func(t *testing.T) {
		in, out := open()
		for _, c := range []*net.TCPConn{in, out} { // on a busy machine it takes its time
			_ = c.SetDeadline(time.Now().Add(time.Minute))
		}
		for _, way := range [][2]*net.TCPConn{{in, out}, {out, in}} {
			data := make([]byte, 20<<20+13)
			_, _ = rand.Read(data)
			go func() {
				_, _ = way[0].Write(data)
				_ = way[0].CloseWrite()
			}()
			if got, err := io.ReadAll(way[1]); err != nil || !bytes.Equal(got, data) {
				t.Errorf("%d bytes of %d arrive, %v", len(got), len(data), err)
			}
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Run("a reset outside is one inside", func(t *testing.T) {
		in, out := open()
		_ = out.SetLinger(0)
		out.Close()
		if _, err := in.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("inside: %v", err)
		}
		if err := <-ended; err == nil {
			t.Error("no error")
		}
	})
	t.Run("a reset inside is one outside", func(t *testing.T) {
		in, out := open()
		_ = in.SetLinger(0)
		in.Close()
		if _, err := out.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("outside: %v", err)
		}
		if err := <-ended; err == nil {
			t.Error("no error")
		}
	})
	t.Run("a reset flow ends, though outside takes nothing", func(t *testing.T) {
		select {
		case <-flows: // of an earlier connection
		default:
		}
		in, _ := open()
		f := <-flows
		for last := int64(-1); f.Up() != last || last == 0; time.Sleep(100 * time.Millisecond) {
			last = f.Up()
			_ = in.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
			for err := error(nil); err == nil; {
				_, err = in.Write(make([]byte, 1<<20))
			}
		}
		f.Reset()
		select {
		case <-ended:
		case <-time.After(10 * time.Second):
			t.Error("it waits for a peer that does not read")
		}
	})
}

// What a judge dialed for a connection that the sandbox gave up meanwhile is not forgotten.
func TestAConnectionThatIsGivenUpIsServed(t *testing.T) {
	served := make(chan error, 1)
	j := &judge{tcp: func(_ context.Context, f *stack.Flow) func(stack.Conn) {
		f.Reset()
		return func(c stack.Conn) {
			_, err := c.Read(make([]byte, 1))
			served <- err
		}
	}}
	b := start(t, j, stack.Limits{})
	if _, err := b.Connect("tcp", "192.0.2.1:80"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("inside: %v", err)
	}
	select {
	case err := <-served:
		if err == nil {
			t.Error("a connection that is not there is read from")
		}
	case <-time.After(5 * time.Second):
		t.Error("nothing is called")
	}
}

// When the buffers are used up, connections are slower, and none stands still.
func TestConnectionsWithTheLeastBuffers(t *testing.T) {
	b := start(t, &judge{tcp: echo}, stack.Limits{Buffers: 1})
	const size = 1 << 20
	c := b.MustConnect(t, "tcp", "192.0.2.1:7")
	data := make([]byte, size)
	_, _ = rand.Read(data)
	go func() {
		_, _ = c.Write(data)
		_ = c.(*net.TCPConn).CloseWrite()
	}()
	begin := time.Now()
	if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes of %d come back, %v", len(got), size, err)
	}
	t.Logf("%d bytes there and back in %v", size, time.Since(begin))
}

// Many at a time, each with its own bytes, and nothing is left of them.
func TestManyConnections(t *testing.T) {
	b := start(t, &judge{tcp: echo}, stack.Limits{Rate: 1e6, Burst: 1e6})
	var group sync.WaitGroup
	for i := range 200 {
		group.Go(func() {
			c, err := b.Connect("tcp", netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), 7).String())
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(30 * time.Second))
			data := bytes.Repeat([]byte{byte(i)}, 50000+i)
			go func() {
				_, _ = c.Write(data)
				_ = c.(*net.TCPConn).CloseWrite()
			}()
			if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, data) {
				t.Errorf("connection %d: %d bytes of %d, %v", i, len(got), len(data), err)
			}
		})
	}
	group.Wait()
	eventually(t, "all flows are forgotten", func() bool { return len(b.Flows()) == 0 })
}

// Packets that only root of the namespace can make, which is more than a sandbox has.
func TestOddPacketsAreDropped(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("missing: CAP_NET_RAW in the namespace")
	}
	j := &judge{tcp: echo, udp: echoDatagrams}
	b := start(t, j, stack.Limits{})
	datagram := func(change func(p []byte) []byte) []byte {
		p := make([]byte, 29)
		p[0], p[3], p[8], p[9] = 0x45, 29, 64, 17
		copy(p[12:], []byte{10, 0, 2, 15, 192, 0, 2, 1})
		copy(p[20:], []byte{0x30, 0x39, 0, 7, 0, 9, 0, 0, 'x'})
		if change != nil {
			p = change(p)
		}
		return p
	}
	send := func(p []byte) {
		b.Inside(func() {
			s, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW)
			if err != nil {
				t.Error(err)
				return
			}
			defer unix.Close(s)
			_ = unix.SetsockoptInt(s, unix.SOL_SOCKET, unix.SO_BROADCAST, 1)
			_ = unix.SetsockoptString(s, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, "eth0")
			if err := unix.Sendto(s, p, 0, &unix.SockaddrInet4{Addr: [4]byte(p[16:20])}); err != nil {
				t.Errorf("send % x: %v", p, err)
			}
		})
	}
	odd := map[string][]byte{
		"a source that is not its own": datagram(func(p []byte) []byte { p[15] = 16; return p }),
		"the gateway's source":         datagram(func(p []byte) []byte { p[15] = 2; return p }),
		"a first fragment":             datagram(func(p []byte) []byte { p[6] = 0x20; return p }),
		"a later fragment":             datagram(func(p []byte) []byte { p[7] = 1; return p }),
		"multicast":                    datagram(func(p []byte) []byte { copy(p[16:], []byte{224, 0, 0, 251}); return p }),
		"broadcast":                    datagram(func(p []byte) []byte { copy(p[16:], []byte{255, 255, 255, 255}); return p }),
		"the network's broadcast":      datagram(func(p []byte) []byte { copy(p[16:], []byte{10, 0, 2, 255}); return p }),
		"a length that lies":           datagram(func(p []byte) []byte { p[25] = 20; return p }),
		"GRE":                          datagram(func(p []byte) []byte { p[9] = 47; return p }),
		"IPv6 in IPv4":                 datagram(func(p []byte) []byte { p[9] = 41; return p }),
		"SCTP":                         datagram(func(p []byte) []byte { p[9] = 132; return p }),
		"an ICMP error":                datagram(func(p []byte) []byte { p[9], p[20], p[21] = 1, 3, 3; return p }),
		"a ping of somebody":           datagram(func(p []byte) []byte { p[9], p[20], p[21] = 1, 8, 0; return p }),
		"options": datagram(func(p []byte) []byte {
			p[0], p[3] = 0x46, 33
			return slices.Insert(p, 20, 1, 1, 1, 0)
		}),
	}
	for name, p := range odd {
		before := b.Dropped()
		send(p)
		eventually(t, name+" is dropped", func() bool { return b.Dropped() > before })
	}
	if got := j.record(); got != "[]" {
		t.Errorf("a judge was asked about %s", got)
	}
	// The same without the oddity passes.
	send(datagram(nil))
	eventually(t, "a good packet passes", func() bool { return j.record() == "[udp 192.0.2.1:7]" })
}

func TestTheGatewayAnswersPings(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("missing: CAP_NET_RAW in the namespace")
	}
	b := start(t, &judge{}, stack.Limits{})
	b.Inside(func() {
		s, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP)
		if err != nil {
			t.Error(err)
			return
		}
		defer unix.Close(s)
		_ = unix.SetsockoptTimeval(s, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5})
		request := []byte{8, 0, 0xf7, 0xfd, 0, 1, 0, 1}
		if err := unix.Sendto(s, request, 0, &unix.SockaddrInet4{Addr: [4]byte{10, 0, 2, 2}}); err != nil {
			t.Error(err)
			return
		}
		reply := make([]byte, 100)
		n, _, err := unix.Recvfrom(s, reply, 0)
		if err != nil || n != 28 || reply[20] != 0 {
			t.Errorf("% x, %v", reply[:max(n, 0)], err)
		}
	})
}
