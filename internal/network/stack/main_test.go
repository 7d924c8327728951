package stack_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/internal/network/link"
	"github.com/berm-sandbox/berm/internal/network/link/linktest"
	"github.com/berm-sandbox/berm/internal/network/stack"
)

func TestMain(m *testing.M) {
	if name := os.Getenv(roleVariable); name != "" {
		role(name)
		return
	}
	linktest.Main(m)
}

// sandbox is one with a link, and the stack at its end.
type sandbox struct {
	*stack.Stack
	*linktest.Box
}

// start makes one.
func start(t testing.TB, j stack.Judge, l stack.Limits) *sandbox {
	t.Helper()
	b := linktest.New(t)
	make, fd := stack.New, b.Link(t)
	if link.Frames(fd) {
		make = stack.NewEthernet
	}
	s, err := make(fd, j, l)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return &sandbox{s, b}
}

// judge is one that tests fill in. What is nil refuses.
type judge struct {
	tcp   func(context.Context, *stack.Flow) func(stack.Conn)
	udp   func(context.Context, *stack.Flow) func(net.Conn)
	query func(netip.Addr, []byte) []byte

	mu      sync.Mutex
	asked   []string
	limited []stack.Limit
}

func (j *judge) note(f *stack.Flow) {
	j.mu.Lock()
	j.asked = append(j.asked, fmt.Sprintf("%s %s", f.Protocol, f.Destination))
	j.mu.Unlock()
}

func (j *judge) record() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return fmt.Sprint(j.asked)
}

func (j *judge) limits() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return fmt.Sprint(j.limited)
}

func (j *judge) TCP(ctx context.Context, f *stack.Flow) func(stack.Conn) {
	j.note(f)
	if j.tcp == nil {
		return nil
	}
	return j.tcp(ctx, f)
}

func (j *judge) UDP(ctx context.Context, f *stack.Flow) func(net.Conn) {
	j.note(f)
	if j.udp == nil {
		return nil
	}
	return j.udp(ctx, f)
}

func (j *judge) Query(_ context.Context, server netip.Addr, message []byte) []byte {
	if j.query == nil {
		return nil
	}
	return j.query(server, message)
}

func (j *judge) Limited(_ *stack.Flow, l stack.Limit) {
	j.mu.Lock()
	j.limited = append(j.limited, l)
	j.mu.Unlock()
}

// echo sends back what comes, then ends its stream.
func echo(context.Context, *stack.Flow) func(stack.Conn) {
	return func(c stack.Conn) {
		_, _ = io.Copy(c, c)
		_ = c.CloseWrite()
	}
}

// echoDatagrams sends each datagram back.
func echoDatagrams(context.Context, *stack.Flow) func(net.Conn) {
	return func(c net.Conn) {
		b := make([]byte, 1<<16)
		for {
			n, err := c.Read(b)
			if err != nil {
				return
			}
			_, _ = c.Write(b[:n])
		}
	}
}

// eventually waits until a condition holds.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !condition(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not within 10 s: ", what)
		}
	}
}
