// Package internet makes an internet for tests: a network namespace behind a pair of links that
// owns every address, answers for the names and hosts that the test says, and counts every
// packet that comes to it.
package internet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// Host is the address of the host of the test, and Resolver the one that its
// /etc/resolv.conf names.
const (
	Host     = "10.77.0.1"
	Resolver = "9.9.9.9"
)

// The link also has a version 6, where the kernel has it.
const (
	gateway         = "10.77.0.2"
	host6, gateway6 = "fd77::1", "fd77::2"
)

// Internet is one. Its methods may be called at any time.
type Internet struct {
	Names     *Names
	Authority *Authority

	space chan func() // run in its network namespace

	mu      sync.Mutex
	packets map[Packet]int // and how many bytes
	streams []*Stream
}

// Start makes an internet for as long as the test runs: the caller's network namespace has a
// way to it, and its mount namespace the resolver, the authority among those of the machine, and
// a TUN device that everybody may open.
// Both must be the test's own, as harness.Isolate makes them.
func Start(t testing.TB) *Internet {
	t.Helper()
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("missing: ip(8), package iproute2, which makes links")
	}
	if links, err := net.Interfaces(); err != nil || len(links) != 1 {
		t.Fatalf("this network namespace is not the test's own: %v, %v", links, err)
	}
	authority, err := newAuthority()
	if err != nil {
		t.Fatal(err)
	}
	i := &Internet{Names: &Names{}, Authority: authority, space: make(chan func()), packets: map[Packet]int{}}
	made := make(chan error)
	go i.live(made)
	if err := <-made; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = exec.Command("ip", "link", "del", "home").Run() // the namespace would take it away later
		close(i.space)
	})
	i.must(t, i.watch)
	i.must(t, i.resolve)
	if err := i.furnish(t); err != nil {
		t.Fatal(err)
	}
	return i
}

// live is the thread in the namespace. What is made on it, sockets and processes, belongs
// there.
func (i *Internet) live(made chan<- error) {
	runtime.LockOSThread() // and never unlocked: the thread ends with the function
	task := fmt.Sprint(unix.Gettid())
	home := "ip link add home type veth peer name away netns " + task +
		" && ip addr add " + Host + "/30 dev home && ip link set home up && ip route add default via " + gateway +
		" && if test -e /proc/net/if_inet6; then ip addr add " + host6 + "/64 dev home nodad && ip -6 route add default via " + gateway6 + "; fi"
	// All addresses are local, but those of the link.
	away := "ip link set lo up && ip addr add " + gateway + "/30 dev away && ip link set away up && ip route add local 0.0.0.0/0 dev lo table main" +
		" && if test -e /proc/net/if_inet6; then ip addr add " + gateway6 + "/64 dev away nodad && ip -6 route add local ::/0 dev lo table main; fi"
	before, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		defer unix.Close(before)
		err = unix.Unshare(unix.CLONE_NEWNET)
	}
	if err == nil {
		err = errors.Join(outside(before, home), shell(away))
	}
	made <- err
	for do := range i.space {
		do()
	}
}

// outside runs a script in another network namespace.
func outside(space int, script string) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := unix.Setns(space, unix.CLONE_NEWNET)
		if err == nil {
			err = shell(script)
		}
		done <- err
	}()
	return <-done
}

func shell(script string) error {
	if out, err := exec.Command("/bin/sh", "-c", script).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", script, err, out)
	}
	return nil
}

// in runs something in the internet's namespace.
func (i *Internet) in(do func() error) error {
	done := make(chan error)
	i.space <- func() { done <- do() }
	return <-done
}

func (i *Internet) must(t testing.TB, do func() error) {
	t.Helper()
	if err := i.in(do); err != nil {
		t.Fatal(err)
	}
}

// Listen listens at an address of the internet; a zero address is every one.
func (i *Internet) Listen(t testing.TB, at netip.Addr, port uint16) net.Listener {
	t.Helper()
	var l net.Listener
	host := ""
	if at.IsValid() {
		host = at.String()
	}
	i.must(t, func() (err error) {
		l, err = net.Listen("tcp", net.JoinHostPort(host, fmt.Sprint(port)))
		return err
	})
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// Bundle is the file of the machine's authorities, of which the internet's is one.
const Bundle = "/etc/ssl/certs/ca-certificates.crt"

func (i *Internet) trust(t testing.TB, dir string) error {
	authorities, err := os.ReadFile(Bundle)
	if err != nil {
		return err
	}
	more := filepath.Join(dir, "authorities")
	if err := os.WriteFile(more, append(authorities, i.Authority.PEM...), 0o644); err != nil {
		return err
	}
	if err := unix.Mount(more, Bundle, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("%s: %w", Bundle, err)
	}
	t.Cleanup(func() { _ = unix.Unmount(Bundle, unix.MNT_DETACH) })
	return nil
}

// furnish gives the host what it needs to use an internet.
func (i *Internet) furnish(t testing.TB) error {
	dir := t.TempDir()
	resolv := filepath.Join(dir, "resolv.conf")
	if err := os.WriteFile(resolv, []byte("nameserver "+Resolver+"\n"), 0o644); err != nil {
		return err
	}
	real, err := filepath.EvalSymlinks("/etc/resolv.conf")
	if err != nil {
		return err
	}
	if err := unix.Mount(resolv, real, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("%s: %w", real, err)
	}
	t.Cleanup(func() { _ = unix.Unmount(real, unix.MNT_DETACH) })
	if err := i.trust(t, dir); err != nil {
		return err
	}
	// As distributions have it.
	if err := unix.Mount("none", "/dev/net", "tmpfs", 0, "mode=0755"); err != nil {
		return fmt.Errorf("/dev/net: %w", err)
	}
	t.Cleanup(func() { _ = unix.Unmount("/dev/net", unix.MNT_DETACH) })
	if err := unix.Mknod("/dev/net/tun", unix.S_IFCHR, int(unix.Mkdev(10, 200))); err != nil {
		return fmt.Errorf("/dev/net/tun: %w", err)
	}
	return os.Chmod("/dev/net/tun", 0o666)
}
