// Package linktest gives tests a network of their own, and sandboxes with links in it.
package linktest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/network/link"
)

// inNamespace marks the process that runs the tests.
const inNamespace = "BERM_TEST_NAMESPACE"

// Main is the TestMain of packages that need a network: it runs the tests in a user and a
// network namespace of their own, whose loopback is all the internet there is.
func Main(m *testing.M) {
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
		Loopback()
	}
	os.Exit(m.Run())
}

// Loopback brings lo of the calling thread's network namespace up.
func Loopback() {
	if err := link.Loopback(); err != nil {
		panic(err)
	}
}

// Box is the network namespace of a sandbox. It ends with the test.
type Box struct{ run chan func() }

// New makes one.
func New(t testing.TB) *Box {
	t.Helper()
	b, made := &Box{run: make(chan func())}, make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with its namespace
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			Loopback()
		}
		made <- err
		for f := range b.run {
			f()
		}
	}()
	t.Cleanup(func() { close(b.run) })
	if err := <-made; err != nil {
		t.Fatal(err)
	}
	return b
}

// Link makes the sandbox's link and returns the descriptor of its outer end, which is the
// caller's. It skips the test where there is no TUN device to be had.
func (b *Box) Link(t testing.TB) int { return b.make(t, link.Default) }

// Ethernet is Link of one that carries Ethernet frames.
func (b *Box) Ethernet(t testing.TB) int {
	return b.make(t, link.Ethernet)
}

func (b *Box) make(t testing.TB, c link.Config) int {
	t.Helper()
	var fd int
	var err error
	b.Inside(func() { fd, err = link.Make(c) })
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.ENOENT) {
		t.Skip("missing: /dev/net/tun that this user may open:", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// Inside runs f on a thread in the sandbox's network namespace.
func (b *Box) Inside(f func()) {
	done := make(chan struct{})
	b.run <- func() {
		defer close(done)
		f()
	}
	<-done
}

// Connect connects from inside.
func (b *Box) Connect(network, address string) (net.Conn, error) {
	var c net.Conn
	var err error
	b.Inside(func() {
		d := net.Dialer{Timeout: 10 * time.Second, KeepAlive: -1}
		c, err = d.Dial(network, address)
	})
	return c, err
}

// MustConnect is Connect of a connection that has to be made; it ends with the test, and has 20 s.
func (b *Box) MustConnect(t testing.TB, network, address string) net.Conn {
	t.Helper()
	c, err := b.Connect(network, address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	return c
}
