package stack_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/network/link/linktest"
	"github.com/berm-sandbox/berm/internal/network/stack"
)

// unlimited lets a benchmark run into nothing but the machine.
var unlimited = stack.Limits{Destination: 4096, Rate: 1e6, Burst: 1e6}

// roleVariable makes the test binary one side of a benchmark: each side is a process of
// its own, as it is in life.
const roleVariable = "BERM_TEST_ROLE"

// role is the life of such a process.
func role(name string) {
	switch name {
	case "server":
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			panic(err)
		}
		fmt.Println(l.Addr())
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go answer(c)
		}
	default:
		fmt.Println(client(name))
	}
}

// answer takes an order: 's' and a number of bytes to send, 'r' and how many to take.
func answer(c net.Conn) {
	defer c.Close()
	var order [9]byte
	if _, err := io.ReadFull(c, order[:]); err != nil {
		return
	}
	n, _ := strconv.ParseInt(strings.TrimSpace(string(order[1:])), 16, 64)
	chunk := make([]byte, min(n, 128<<10))
	for n > 0 {
		var done int
		var err error
		if order[0] == 's' {
			done, err = c.Write(chunk)
		} else {
			done, err = c.Read(chunk)
		}
		if err != nil {
			return
		}
		n -= int64(done)
	}
	if order[0] == 'r' {
		_, _ = c.Write([]byte("k"))
	}
}

// Work of one measurement.
const (
	transfer    = 64 << 20
	connections = 800
)

// client measures one thing from inside and returns it.
func client(what string) float64 {
	begin := time.Now()
	n, size, kind := 1, transfer, "r"
	switch what {
	case "down":
		kind = "s"
	case "connections":
		n, size = connections, 1
	}
	if n > 1 { // as a package manager does it
		const parallel = 4
		var group sync.WaitGroup
		for range parallel {
			group.Go(func() { once(kind, size, n/parallel) })
		}
		group.Wait()
		return float64(n) / time.Since(begin).Seconds()
	}
	once(kind, size, n)
	return float64(size) * 8 / time.Since(begin).Seconds() / 1e9
}

// once makes n connections one after another, and moves bytes over each.
func once(kind string, size, n int) {
	chunk := make([]byte, min(size, 128<<10))
	for range n {
		c, err := net.Dial("tcp", "192.0.2.1:80")
		if err != nil {
			panic(err)
		}
		_, _ = fmt.Fprintf(c, "%s%8x", kind, size)
		for left := size; left > 0 && err == nil; {
			var done int
			if kind == "s" {
				done, err = c.Read(chunk)
			} else {
				done, err = c.Write(chunk)
			}
			left -= done
		}
		if kind == "r" {
			_, err = io.ReadFull(c, chunk[:1])
		}
		if err != nil {
			panic(err)
		}
		c.Close()
	}
}

// process starts the test binary in a role, in the calling thread's network namespace.
func process(name string) (*exec.Cmd, *bufio.Reader, error) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleVariable+"="+name)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	return cmd, bufio.NewReader(out), err
}

// server starts one on the loopback of the test's namespace and returns its address, and what
// processor time all processes have taken so far, those that have ended included.
func server(b *testing.B) (address string, cpu func() time.Duration) {
	cmd, out, err := process("server")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	address, err = out.ReadString('\n')
	if err != nil {
		b.Fatal(err)
	}
	return strings.TrimSpace(address), func() (sum time.Duration) {
		for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
			var used unix.Rusage
			_ = unix.Getrusage(who, &used)
			sum += time.Duration(used.Utime.Nano() + used.Stime.Nano())
		}
		// proc_pid_schedstat(5): nanoseconds on a processor, of each thread.
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", cmd.Process.Pid))
		for _, path := range threads {
			text, _ := os.ReadFile(path)
			var ns int64
			_, _ = fmt.Sscan(string(text), &ns)
			sum += time.Duration(ns)
		}
		return sum
	}
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
// connections at the outer end. It returns how to run something inside.
func veth(b *testing.B, to string) func(func()) {
	run := make(chan func())
	ready := make(chan int)
	go func() {
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			panic(err)
		}
		linktest.Loopback()
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
	return func(f func()) {
		done := make(chan struct{})
		run <- func() {
			defer close(done)
			f()
		}
		<-done
	}
}

// shell runs commands in the calling thread's network namespace.
func shell(script string) (string, error) {
	out, err := exec.Command("/bin/sh", "-c", script).CombinedOutput()
	return string(out), err
}

// BenchmarkBesideVeth measures the stack and a veth pair with a redirect by turns, with the
// same proxy behind both, which has all processors for the pair. It reports the ratio of the
// rates, and that of the processor time that the work costs in all processes, which other load of
// the machine disturbs less.
func BenchmarkBesideVeth(b *testing.B) {
	all := runtime.GOMAXPROCS(0)
	defer runtime.GOMAXPROCS(all)
	defer debug.SetGCPercent(debug.SetGCPercent(400)) // for both
	to, cpu := server(b)
	box := start(b, spliced(to), unlimited)
	other := veth(b, to)
	for what, unit := range map[string]string{"up": "Gbit/s", "down": "Gbit/s", "connections": "conn/s"} {
		b.Run(what, func(b *testing.B) {
			measure := func(inside func(func())) (result, cost float64) {
				before := cpu()
				var cmd *exec.Cmd
				var out *bufio.Reader
				var err error
				inside(func() { cmd, out, err = process(what) })
				if err != nil {
					b.Fatal(err)
				}
				_, _ = fmt.Fscan(out, &result)
				if err := cmd.Wait(); err != nil {
					b.Fatal(err)
				}
				return result, (cpu() - before).Seconds()
			}
			const rounds = 15
			var ours, theirs, cost, theirCost []float64
			for range rounds {
				stack.Tune() // as the network service does
				rate, used := measure(box.Inside)
				runtime.GOMAXPROCS(all)
				ours, cost = append(ours, rate), append(cost, used)
				rate, used = measure(other)
				theirs, theirCost = append(theirs, rate), append(theirCost, used)
			}
			for _, list := range [][]float64{ours, theirs, cost, theirCost} {
				slices.Sort(list)
			}
			b.ReportMetric(ours[rounds/2], unit)
			b.ReportMetric(theirs[rounds/2], "veth-"+unit)
			b.ReportMetric(ours[rounds/2]/theirs[rounds/2], "ratio")
			b.ReportMetric(theirCost[rounds/2]/cost[rounds/2], "cpu-ratio")
			b.ReportMetric(0, "ns/op")
		})
	}
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
