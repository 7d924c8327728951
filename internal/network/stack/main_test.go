package stack_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/network/link"
	"github.com/berm-sandbox/berm/internal/network/stack"
)

// inNamespace marks the process that runs the tests: in a user and a network namespace
// of its own, whose loopback is all the internet there is.
const inNamespace = "BERM_TEST_NAMESPACE"

func TestMain(m *testing.M) {
	if name := os.Getenv(roleVariable); name != "" {
		role(name)
		return
	}
	// A fuzz worker talks to its coordinator by descriptors, and needs no network.
	fuzzing := strings.Contains(strings.Join(os.Args, " "), "-test.fuzzworker")
	if os.Getenv(inNamespace) == "" && !fuzzing {
		cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
		cmd.Env = append(os.Environ(), inNamespace+"=1")
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET,
			UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
			Pdeathsig:   unix.SIGKILL,
		}
		runtime.LockOSThread() // the parent whose death ends the child
		var exit *exec.ExitError
		if err := cmd.Run(); errors.As(err, &exit) {
			os.Exit(exit.ExitCode())
		} else if err != nil {
			fmt.Fprintln(os.Stderr, "missing: user namespaces:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if !fuzzing {
		loopback()
	}
	os.Exit(m.Run())
}

// loopback brings lo of the calling thread's network namespace up.
func loopback() {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		panic(err)
	}
	defer unix.Close(s)
	ifreq, _ := unix.NewIfreq("lo")
	ifreq.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, ifreq); err != nil {
		panic(err)
	}
}

// sandbox is a network namespace with a link, and the stack at its end.
type sandbox struct {
	*stack.Stack
	run chan func()
}

// start makes one. It skips the test where there is no TUN device to be had.
func start(t testing.TB, j stack.Judge, l stack.Limits) *sandbox {
	t.Helper()
	b := &sandbox{run: make(chan func())}
	type made struct {
		fd  int
		err error
	}
	ready := make(chan made)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with its namespace
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			ready <- made{err: err}
			return
		}
		loopback()
		fd, err := link.Make(link.Default)
		ready <- made{fd, err}
		for f := range b.run {
			f()
		}
	}()
	m := <-ready
	if errors.Is(m.err, unix.EACCES) || errors.Is(m.err, unix.ENOENT) {
		t.Skip("missing: /dev/net/tun that this user may open:", m.err)
	}
	if m.err != nil {
		t.Fatal(m.err)
	}
	s, err := stack.New(m.fd, j, l)
	if err != nil {
		t.Fatal(err)
	}
	b.Stack = s
	t.Cleanup(func() {
		s.Close()
		close(b.run)
	})
	return b
}

// inside runs f on a thread in the sandbox's network namespace.
func (b *sandbox) inside(f func()) {
	done := make(chan struct{})
	b.run <- func() {
		defer close(done)
		f()
	}
	<-done
}

// dial connects from inside.
func (b *sandbox) dial(network, address string) (net.Conn, error) {
	var c net.Conn
	var err error
	b.inside(func() {
		d := net.Dialer{Timeout: 10 * time.Second, KeepAlive: -1}
		c, err = d.Dial(network, address)
	})
	return c, err
}

func (b *sandbox) mustDial(t testing.TB, network, address string) net.Conn {
	t.Helper()
	c, err := b.dial(network, address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	return c
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
