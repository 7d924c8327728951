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

// Links is the variable by which boxes have pairs of devices for links, as where there are no TUN
// devices, if it is Pairs.
const (
	Links = "BERM_TEST_LINKS"
	Pairs = "pairs"
)

// Main is the TestMain of packages that need a network: it runs the tests in a user and a
// network namespace of their own, whose loopback is all the internet there is. With all tests it
// runs them again with Pairs.
func Main(m *testing.M) {
	// A fuzz worker talks to its coordinator by descriptors, and needs no network.
	arguments := strings.Join(os.Args, " ")
	fuzzing := strings.Contains(arguments, "-test.fuzzworker")
	if os.Getenv(inNamespace) == "" && !fuzzing {
		once := os.Getenv("BERM_TEST_ALL") == "" || os.Getenv(Links) != "" || strings.Contains(arguments, "-test.fuzz=") || strings.Contains(arguments, "-test.bench=")
		if status := run(); status != 0 || once {
			os.Exit(status)
		}
		_ = os.Setenv(Links, Pairs)
		os.Exit(run())
	}
	if !fuzzing {
		Loopback()
	}
	os.Exit(m.Run())
}

// run runs the tests in namespaces and returns their status.
func run() int {
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
		return exit.ExitCode()
	} else if err != nil {
		fmt.Fprintln(os.Stderr, "missing: user namespaces:", err)
		return 1
	}
	return 0
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
		if err == nil && os.Getenv(Links) == Pairs {
			err = hideTUN()
		}
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

// hideTUN covers /dev/net/tun for the calling thread.
func hideTUN() error {
	if _, err := os.Stat("/dev/net"); err != nil {
		return nil
	}
	err := unix.Unshare(unix.CLONE_NEWNS)
	if err == nil {
		err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	}
	if err == nil {
		err = unix.Mount("tmpfs", "/dev/net", "tmpfs", 0, "")
	}
	return err
}

// Link makes the sandbox's link and returns the descriptor of its outer end, which is the
// caller's, and carries frames where there are no TUN devices: see link.Frames.
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
