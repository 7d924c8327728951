package server

import (
	"fmt"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/service"
)

// BenchmarkIdle reports the memory of a sandbox for which nothing happens: stack, names, policy of
// ten rules, and the connection to its owner, whose own memory is not counted.
func BenchmarkIdle(b *testing.B) {
	s, err := New(Config{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { s.hosts.Close() })
	var rules []string
	for i := range 10 {
		rules = append(rules, fmt.Sprintf(`{"to":["host%d.example.com","*.group%d.example.com"],"ports":[443]}`, i, i))
	}
	policy := fmt.Sprintf(`{"version":1,"rules":[%s]}`, strings.Join(rules, ","))
	const n = 200
	begin := func(i int) {
		ours, theirs, err := service.Pair()
		if err != nil {
			b.Fatal(err)
		}
		conn, err := net.FileConn(theirs)
		if err != nil {
			b.Fatal(err)
		}
		theirs.Close()
		b.Cleanup(func() { ours.Close() })
		go s.Attend(conn.(*net.UnixConn))
		link, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { unix.Close(link[1]) })
		end := os.NewFile(uintptr(link[0]), "link")
		defer end.Close()
		c, err := net.FileConn(ours)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { c.Close() })
		wire := service.NewWire(c.(*net.UnixConn))
		var a egress.Answer
		if err := wire.Send(egress.Order{Protocol: egress.Protocol, Sandbox: berm.SandboxID("i" + strconv.Itoa(i)), Policy: document(policy)}, end); err != nil {
			b.Fatal(err)
		}
		if err := wire.Receive(&a); err != nil || !a.Done {
			b.Fatalf("%v, %+v", err, a.Error)
		}
	}
	begin(0) // what all share
	before, goroutines := resident(), runtime.NumGoroutine()
	for i := range n {
		begin(1 + i)
	}
	b.ReportMetric(float64(resident()-before)/n/1024, "KiB/sandbox")
	b.ReportMetric(float64(runtime.NumGoroutine()-goroutines)/n, "goroutines/sandbox")
	b.ReportMetric(0, "ns/op")
}

// resident is what the process has in memory, after everything that can go is gone.
func resident() int64 {
	debug.FreeOSMemory()
	status, _ := os.ReadFile("/proc/self/statm")
	pages, _ := strconv.ParseInt(strings.Fields(string(status))[1], 10, 64)
	return pages * int64(os.Getpagesize())
}
