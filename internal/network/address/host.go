package address

import (
	"errors"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// Hosts knows the addresses of all interfaces of the network namespace in which it was
// made, and follows their changes. While it cannot know them, every address is one.
type Hosts struct {
	addrs   atomic.Pointer[map[netip.Addr]bool]
	events  *os.File
	changed func()
	done    sync.WaitGroup
}

// WatchHosts begins to follow the host's addresses; the list is whole when it returns.
// It calls changed, if there is one, after every change, from one goroutine.
func WatchHosts(changed func()) (*Hosts, error) {
	// The kernel's messages only say when to look again: one of them may be lost, a look
	// cannot. So nothing of them is parsed.
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "watch the host's addresses: %w", err)
	}
	events := os.NewFile(uintptr(fd), "netlink")
	groups := unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR}
	if err := unix.Bind(fd, &groups); err != nil {
		events.Close()
		return nil, berm.Errorf(berm.Internal, "watch the host's addresses: %w", err)
	}
	h := &Hosts{events: events, changed: changed}
	if err := h.read(); err != nil {
		events.Close()
		return nil, berm.Errorf(berm.Internal, "read the host's addresses: %w", err)
	}
	h.done.Go(h.follow)
	return h, nil
}

// NewTableHere makes a table for this host as it is now, with ranges that are opened as for
// Config. Kinds: Invalid (a range), Internal.
func NewTableHere(open []string) (*Table, error) {
	var ranges []netip.Prefix
	for _, text := range open {
		p, err := ParseRange(text)
		if err != nil {
			return nil, err
		}
		ranges = append(ranges, p)
	}
	hosts, err := WatchHosts(nil)
	if err != nil {
		return nil, err
	}
	if err := hosts.Close(); err != nil {
		return nil, berm.Errorf(berm.Internal, "read the host's addresses: %w", err)
	}
	return NewTable(Config{Open: ranges, Own: hosts.Own})
}

// ParseRange reads a range of addresses, or one address as the range of it alone. Kind Invalid.
func ParseRange(text string) (netip.Prefix, error) {
	if addr, err := netip.ParseAddr(text); err == nil && addr.Zone() == "" && !addr.Is4In6() {
		return netip.PrefixFrom(addr, addr.BitLen()), nil
	}
	p, err := netip.ParsePrefix(text)
	if err != nil || p != p.Masked() {
		return netip.Prefix{}, berm.Errorf(berm.Invalid, "%q is not an address range", text).
			WithHint("write the first address of the range and its length, such as 10.1.0.0/16, or one address")
	}
	return p, nil
}

// Own says whether addr is an address of the host.
func (h *Hosts) Own(addr netip.Addr) bool {
	addrs := h.addrs.Load()
	return addrs == nil || (*addrs)[addr.Unmap()]
}

// Addrs are the host's addresses, sorted; none while they are not known.
func (h *Hosts) Addrs() []netip.Addr {
	addrs := h.addrs.Load()
	if addrs == nil {
		return nil
	}
	return slices.SortedFunc(maps.Keys(*addrs), netip.Addr.Compare)
}

// Close ends following. The addresses stay as they were.
func (h *Hosts) Close() error {
	err := h.events.Close()
	h.done.Wait()
	return err
}

func (h *Hosts) read() error {
	list, err := net.InterfaceAddrs()
	if err != nil {
		return err
	}
	addrs := make(map[netip.Addr]bool, len(list))
	for _, a := range list {
		if n, ok := a.(*net.IPNet); ok {
			addr, _ := netip.AddrFromSlice(n.IP)
			addrs[addr.Unmap()] = true
		}
	}
	h.addrs.Store(&addrs)
	return nil
}

// follow looks again after each message, after a loss of messages (ENOBUFS), and one
// second after a look that failed.
func (h *Hosts) follow() {
	buf := make([]byte, 16<<10)
	for {
		if _, err := h.events.Read(buf); errors.Is(err, os.ErrClosed) {
			return
		}
		var again time.Time
		if h.read() != nil {
			h.addrs.Store(nil)
			again = time.Now().Add(time.Second)
		}
		_ = h.events.SetReadDeadline(again) // it fails when closed, as Read then does
		if h.changed != nil {
			h.changed()
		}
	}
}
