package address

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestHosts runs itself in a network namespace of its own.
func TestHosts(t *testing.T) {
	if os.Getenv("BERM_TEST_NETNS") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestHosts$", "-test.v")
		cmd.Env = append(os.Environ(), "BERM_TEST_NETNS=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET}
		if os.Geteuid() != 0 {
			cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
			cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}}
		}
		out, err := cmd.CombinedOutput()
		if errors.Is(err, unix.EPERM) {
			t.Skip("user namespaces are not permitted")
		}
		if err != nil || !strings.Contains(string(out), "--- PASS: TestHosts") {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	ip := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	ip("addr", "add", "203.0.114.1/24", "dev", "lo")
	changes := make(chan struct{}, 100)
	silent, err := WatchHosts(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	h, err := WatchHosts(func() { changes <- struct{}{} })
	if err != nil {
		t.Fatal(err)
	}
	has := func(s string) bool { return h.Own(netip.MustParseAddr(s)) }
	if !has("203.0.114.1") || !has("::ffff:203.0.114.1") || has("203.0.114.2") {
		t.Errorf("at first: %v", h.Addrs())
	}
	wait := func(what string, done func() bool) {
		t.Helper()
		for deadline := time.After(5 * time.Second); !done(); {
			select {
			case <-changes:
			case <-deadline:
				t.Fatalf("%s was not seen: %v", what, h.Addrs())
			}
		}
	}
	ip("addr", "add", "2001:db8::7/64", "dev", "lo")
	wait("a new address", func() bool { return has("2001:db8::7") })
	ip("addr", "del", "203.0.114.1/24", "dev", "lo")
	wait("the end of an address", func() bool { return !has("203.0.114.1") })
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	if !has("2001:db8::7") {
		t.Error("closing lost the list")
	}
}

func TestHostsUnknown(t *testing.T) {
	if h := new(Hosts); !h.Own(netip.MustParseAddr("8.8.8.8")) || h.Addrs() != nil {
		t.Error("while nothing is known everything must be the host's")
	}
}

func TestHostsHere(t *testing.T) {
	h, err := WatchHosts(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	list, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range list {
		addr, _ := netip.AddrFromSlice(a.(*net.IPNet).IP)
		if !slices.Contains(h.Addrs(), addr.Unmap()) {
			t.Errorf("%s is missing in %v", addr, h.Addrs())
		}
	}
}
