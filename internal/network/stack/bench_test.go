package stack_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/network/stack"
)

// unlimited lets a benchmark run into nothing but the machine.
var unlimited = stack.Limits{Destination: 4096, Rate: 1e6, Burst: 1e6}

// server answers on the loopback of the test's namespace: 's' sends what is asked for,
// anything else takes what comes and then says how much that was.
func server(b *testing.B) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				var order [9]byte
				if _, err := io.ReadFull(c, order[:]); err != nil {
					return
				}
				n, _ := strconv.ParseInt(strings.TrimSpace(string(order[1:])), 16, 64)
				switch order[0] {
				case 's':
					for chunk := make([]byte, 128<<10); n > 0; n -= int64(len(chunk)) {
						if _, err := c.Write(chunk); err != nil {
							return
						}
					}
				case 'r':
					for chunk := make([]byte, 128<<10); n > 0; {
						got, err := c.Read(chunk)
						if err != nil {
							return
						}
						n -= int64(got)
					}
					_, _ = c.Write([]byte("k"))
				}
			}()
		}
	}()
	return l.Addr().String()
}

// spliced dials the server for each connection, as the egress process does.
func spliced(to string) *judge {
	return &judge{tcp: func(context.Context, *stack.Flow) func(stack.Conn) {
		return func(c stack.Conn) {
			out, err := net.Dial("tcp", to)
			if err != nil {
				return
			}
			defer out.Close()
			_ = stack.Splice(c, out.(*net.TCPConn))
		}
	}}
}

// veth is the other way to do it: a pair of kernel links, and a proxy that takes
// connections at the outer end. It returns how to dial from inside.
func veth(b *testing.B, to string) func() (net.Conn, error) {
	run := make(chan func())
	ready := make(chan int)
	go func() {
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			panic(err)
		}
		loopback()
		ready <- unix.Gettid()
		for f := range run {
			f()
		}
	}()
	tid := <-ready
	b.Cleanup(func() { close(run) })
	script := fmt.Sprintf(`set -e
ip link del vo 2>/dev/null || true
ip link add vo type veth peer name vi netns /proc/%d/task/%d/ns/net
ip addr replace 10.9.0.1/24 dev vo
ip link set vo up`, os.Getpid(), tid)
	if out, err := shell(script); err != nil {
		b.Skipf("missing: ip(8) that makes a veth pair: %v: %s", err, out)
	}
	inside := make(chan error)
	run <- func() {
		out, err := shell("ip addr add 10.9.0.2/24 dev vi && ip link set vi up && ip route add default via 10.9.0.1")
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		inside <- err
	}
	if err := <-inside; err != nil {
		b.Fatal(err)
	}
	l, err := net.Listen("tcp", "10.9.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { l.Close() })
	// Whatever address is dialed is redirected to the proxy, as a firewall would do it.
	port := l.Addr().(*net.TCPAddr).Port
	rules := fmt.Sprintf("nft 'flush ruleset; table ip t { chain c { type nat hook prerouting priority -100; policy accept; iif vo ip protocol tcp redirect to :%d; }; }'", port)
	if out, err := shell(rules); err != nil {
		b.Skipf("missing: nft(8) that redirects: %v: %s", err, out)
	}
	b.Cleanup(func() { _, _ = shell("nft flush ruleset") })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				out, err := net.Dial("tcp", to)
				if err != nil {
					return
				}
				defer out.Close()
				_ = stack.Splice(c.(*net.TCPConn), out.(*net.TCPConn))
			}()
		}
	}()
	return func() (net.Conn, error) {
		var c net.Conn
		var err error
		done := make(chan struct{})
		run <- func() {
			defer close(done)
			c, err = net.Dial("tcp", "192.0.2.1:80")
		}
		<-done
		return c, err
	}
}

// shell runs commands in the calling thread's network namespace.
func shell(script string) (string, error) {
	out, err := exec.Command("/bin/sh", "-c", script).CombinedOutput()
	return string(out), err
}

// BenchmarkBesideVeth measures the stack and a veth pair with a redirect by turns, with the
// same proxy behind both, and reports the ratio.
func BenchmarkBesideVeth(b *testing.B) {
	to := server(b)
	box := start(b, spliced(to), unlimited)
	viaStack := func() (net.Conn, error) { return box.dial("tcp", "192.0.2.1:80") }
	viaVeth := veth(b, to)
	compare := func(b *testing.B, unit string, measure func(dial func() (net.Conn, error)) float64) {
		const rounds = 5
		var ours, theirs []float64
		for range rounds {
			ours = append(ours, measure(viaStack))
			theirs = append(theirs, measure(viaVeth))
		}
		slices.Sort(ours)
		slices.Sort(theirs)
		b.ReportMetric(ours[rounds/2], unit)
		b.ReportMetric(theirs[rounds/2], "veth-"+unit)
		b.ReportMetric(ours[rounds/2]/theirs[rounds/2], "ratio")
		b.ReportMetric(0, "ns/op")
	}
	const size = 256 << 20
	for name, kind := range map[string]string{"up": "r", "down": "s"} {
		b.Run(name, func(b *testing.B) {
			compare(b, "Gbit/s", func(dial func() (net.Conn, error)) float64 {
				c, err := dial()
				if err != nil {
					b.Fatal(err)
				}
				defer c.Close()
				begin := time.Now()
				_, _ = fmt.Fprintf(c, "%s%8x", kind, size)
				chunk := make([]byte, 128<<10)
				if kind == "s" {
					_, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{c}, chunk)
				} else {
					for n := 0; n < size && err == nil; n += len(chunk) {
						_, err = c.Write(chunk)
					}
					_, _ = io.ReadFull(c, chunk[:1])
				}
				if err != nil {
					b.Fatal(err)
				}
				return size * 8 / time.Since(begin).Seconds() / 1e9
			})
		})
	}
	b.Run("connections", func(b *testing.B) {
		compare(b, "conn/s", func(dial func() (net.Conn, error)) float64 {
			const n = 1000
			begin := time.Now()
			for range n {
				c, err := dial()
				if err != nil {
					b.Fatal(err)
				}
				var one [1]byte
				_, _ = c.Write([]byte("r       1x"))
				if _, err := io.ReadFull(c, one[:]); err != nil {
					b.Fatal(err)
				}
				c.Close()
			}
			return n / time.Since(begin).Seconds()
		})
	})
}

// BenchmarkIdle reports the memory of a stack for which nothing happens.
func BenchmarkIdle(b *testing.B) {
	const n = 100
	before := resident()
	begin := time.Now()
	for range n {
		var pair [2]int
		pair, _ = unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		s, err := stack.New(pair[0], &judge{}, stack.Limits{})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() {
			s.Close()
			unix.Close(pair[1])
		})
	}
	took := time.Since(begin)
	b.ReportMetric(float64(resident()-before)/n/1024, "KiB/stack")
	b.ReportMetric(float64(runtime.NumGoroutine())/n, "goroutines/stack")
	b.ReportMetric(took.Seconds()*1000/n, "ms/stack")
	b.ReportMetric(0, "ns/op")
}

// resident is what the process has in memory, after everything that can go is gone.
func resident() int64 {
	debug.FreeOSMemory()
	status, _ := os.ReadFile("/proc/self/statm")
	pages, _ := strconv.ParseInt(strings.Fields(string(status))[1], 10, 64)
	return pages * int64(os.Getpagesize())
}
