// Package link makes the only link of a sandbox: a TUN or TAP device, or where there are none
// one of a pair of virtual devices, whose other end is a descriptor, which a userspace TCP/IP
// stack outside reads and writes.
//
// It is linked into the first process of every sandbox, so it imports raw system calls
// only; its errors are those of the kernel.
package link

import (
	"encoding/binary"
	"errors"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Name is the link's name inside.
const Name = "eth0"

// HeaderLen is the length of the struct virtio_net_hdr (linux/virtio_net.h) before each
// packet on the descriptor.
const HeaderLen = 10

// Config is how a link looks from inside.
type Config struct {
	Address [4]byte // the sandbox's own
	Prefix  uint8   // length of the link's network
	Gateway [4]byte // next hop of everything else, in that network
	MTU     uint32
	// Hardware is the sandbox's own address on a link that carries Ethernet frames; without
	// one it carries packets alone.
	Hardware [6]byte
}

// GatewayHardware is the address of the gateway on links that carry Ethernet frames, as it is
// in QEMU's user network.
var GatewayHardware = [6]byte{0x52, 0x55, 10, 0, 2, 2}

// Default is the network of every sandbox: the numbers that QEMU's user network made
// known. Each sandbox has a stack of its own, so all can have the same.
//
// A packet may be as long as IPv4 allows: no datagram is ever fragmented then.
var Default = Config{Address: [4]byte{10, 0, 2, 15}, Prefix: 24, Gateway: [4]byte{10, 0, 2, 2}, MTU: 65520}

// Ethernet is Default with frames around its packets, for levels whose kernel wants such a
// link. The sandbox's address is the first one of QEMU's, too.
var Ethernet = func() Config {
	c := Default
	c.Hardware = [6]byte{0x52, 0x54, 0, 0x12, 0x34, 0x56}
	return c
}()

// Frames says whether what the descriptor of a link carries are frames: whether it is a TAP
// device, or the socket of a pair.
func Frames(fd int) bool {
	if domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN); err == nil {
		return domain == unix.AF_PACKET
	}
	var request [40]byte // struct ifreq
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TUNGETIFF, uintptr(unsafe.Pointer(&request)))
	return errno == 0 && binary.NativeEndian.Uint16(request[unix.IFNAMSIZ:])&unix.IFF_TAP != 0
}

// An Error is a step of making a link that the kernel refused.
type Error struct {
	Step string
	Err  syscall.Errno
}

func (e *Error) Error() string { return e.Step + ": " + e.Err.Error() }

func (e *Error) Unwrap() error { return e.Err }

// Make makes the link in the network namespace of the calling thread, up and with a
// default route, and returns the descriptor of its other end: non-blocking, closed on
// exec, one packet with its virtio_net_hdr per read and write. The caller needs
// CAP_NET_ADMIN and CAP_NET_RAW in the namespace. Errors are of type *Error.
//
// Without /dev/net/tun, or where the kernel makes no such device, the link is one of a pair
// (see pair), and carries frames: Frames tells.
//
// The device is persistent and goes with its namespace, because taking a TUN device away
// takes the kernel 15 ms, for which the last close of the descriptor would wait. The
// descriptor keeps the namespace: who holds it closes it when the sandbox has ended.
// While nobody has it open, the device has no carrier and drops what is sent.
func Make(c Config) (int, error) {
	fd, refused := device(c)
	if refused == nil {
		return fd, nil
	}
	c.Hardware = Ethernet.Hardware
	fd, err := pair(c)
	if err != nil {
		// What a host lacks is the device; the pair is for where it cannot be had.
		return -1, &Error{Step: refused.Error() + "; without it " + err.Step, Err: err.Err}
	}
	return fd, nil
}

// device makes a link of a TUN or TAP device.
func device(c Config) (int, *Error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, failed("open /dev/net/tun", err)
	}
	index, refused := attach(fd, c)
	if refused == nil {
		refused = configure(index, c)
	}
	if refused != nil {
		// What could not be set up goes with its descriptor.
		_ = unix.IoctlSetInt(fd, unix.TUNSETPERSIST, 0)
		_ = unix.Close(fd)
		return -1, refused
	}
	return fd, nil
}

// Loopback brings lo of the calling thread's network namespace up; the kernel gives it 127.0.0.1
// and ::1. The caller needs CAP_NET_ADMIN in the namespace.
func Loopback() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(s) }()
	request, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	request.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, request)
}

// attach makes the device on fd and returns its index.
func attach(fd int, c Config) (uint32, *Error) {
	ifreq, err := unix.NewIfreq(Name)
	if err != nil {
		return 0, failed("name the link", err)
	}
	kind := uint16(unix.IFF_TUN)
	if c.Hardware != [6]byte{} {
		kind = unix.IFF_TAP
	}
	ifreq.SetUint16(kind | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifreq); err != nil {
		return 0, failed("make the link", err)
	}
	// Checksums and the cutting of TCP into segments are left to the reader, who needs
	// neither: the packets never were on a wire.
	if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, unix.TUN_F_CSUM|unix.TUN_F_TSO4); err != nil {
		return 0, failed("offload segmentation", err)
	}
	if err := unix.IoctlSetInt(fd, unix.TUNSETPERSIST, 1); err != nil {
		return 0, failed("keep the link", err)
	}
	return indexOf(Name)
}

// indexOf is the number of a device.
func indexOf(name string) (uint32, *Error) {
	ifreq, err := unix.NewIfreq(name)
	if err != nil {
		return 0, failed("name the link", err)
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, failed("open a socket", err)
	}
	defer unix.Close(s)
	if err := unix.IoctlIfreq(s, unix.SIOCGIFINDEX, ifreq); err != nil {
		return 0, failed("find the link", err)
	}
	return ifreq.Uint32(), nil
}

// configure brings the device up with its address, route and, where there are frames, the
// gateway's hardware address.
func configure(index uint32, c Config) *Error {
	var r requests
	r.up(index, c)

	body := address(unix.IfAddrmsg{Family: unix.AF_INET, Prefixlen: c.Prefix, Index: index})
	body = attribute(body, unix.IFA_LOCAL, c.Address[:])
	body = attribute(body, unix.IFA_ADDRESS, c.Address[:])
	r.add("give the link its address", unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL, body)

	body = route(unix.RtMsg{Family: unix.AF_INET, Table: unix.RT_TABLE_MAIN, Protocol: unix.RTPROT_BOOT, Type: unix.RTN_UNICAST})
	body = attribute(body, unix.RTA_GATEWAY, c.Gateway[:])
	body = attribute(body, unix.RTA_OIF, binary.NativeEndian.AppendUint32(nil, index))
	r.add("set the default route", unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, body)

	if c.Hardware != [6]byte{} {
		body = neighbour(unix.NdMsg{Family: unix.AF_INET, Ifindex: int32(index), State: unix.NUD_PERMANENT})
		body = attribute(body, unix.NDA_DST, c.Gateway[:])
		body = attribute(body, unix.NDA_LLADDR, GatewayHardware[:])
		r.add("tell the link the gateway's address", unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, body)
		// Whoever reads frames has a stack of its own, which takes its interfaces from those that
		// are up here: lo, the first of each namespace, too.
		r.add("bring lo up", unix.RTM_NEWLINK, 0, link(unix.IfInfomsg{Index: 1, Flags: unix.IFF_UP, Change: unix.IFF_UP}))
	}
	return r.send()
}

// requests are those of rtnetlink(7) in one message, which the kernel answers before send returns.
type requests struct {
	message []byte
	steps   []string
	without []bool // it does not matter that the kernel does not know what a step is about
}

func (r *requests) add(step string, kind, flags uint16, body []byte) {
	r.message = append(r.message, request(uint32(len(r.steps)), kind, flags, body)...)
	r.steps, r.without = append(r.steps, step), append(r.without, false)
}

// up brings a device up.
func (r *requests) up(index uint32, c Config) {
	// No link-local IPv6 address (IN6_ADDR_GEN_MODE_NONE): IPv4 is all that goes out. A kernel
	// without IPv6 has nothing to turn off.
	ipv6 := attribute(nil, unix.IFLA_INET6_ADDR_GEN_MODE, []byte{1})
	r.add("turn IPv6 off on the link", unix.RTM_NEWLINK, 0, attribute(link(unix.IfInfomsg{Index: int32(index)}), unix.IFLA_AF_SPEC, attribute(nil, unix.AF_INET6, ipv6)))
	r.without[len(r.without)-1] = true

	body := link(unix.IfInfomsg{Index: int32(index), Flags: unix.IFF_UP, Change: unix.IFF_UP})
	body = attribute(body, unix.IFLA_MTU, binary.NativeEndian.AppendUint32(nil, c.MTU))
	if c.Hardware != [6]byte{} {
		body = attribute(body, unix.IFLA_ADDRESS, c.Hardware[:])
	}
	r.add("bring the link up", unix.RTM_NEWLINK, 0, body)
}

func (r *requests) send() *Error {
	s, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return failed("open a netlink socket", err)
	}
	defer unix.Close(s)
	if err := unix.Sendto(s, r.message, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return failed("ask the kernel for the link", err)
	}
	// Each request is answered by a struct nlmsgerr after a struct nlmsghdr.
	var answer [1024]byte
	for i, step := range r.steps {
		n, err := unix.Read(s, answer[:])
		if err != nil {
			return failed(step, err)
		}
		if n < unix.NLMSG_HDRLEN+4 || binary.NativeEndian.Uint16(answer[4:]) != unix.NLMSG_ERROR {
			return failed(step, unix.EBADMSG)
		}
		errno := syscall.Errno(-int32(binary.NativeEndian.Uint32(answer[unix.NLMSG_HDRLEN:])))
		if errno != 0 && (!r.without[i] || errno != unix.EAFNOSUPPORT) {
			return failed(step, errno)
		}
	}
	return nil
}

// request puts a struct nlmsghdr before a body.
func request(sequence uint32, kind, flags uint16, body []byte) []byte {
	b := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(body)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST|unix.NLM_F_ACK|flags)
	b = binary.NativeEndian.AppendUint32(b, sequence)
	b = binary.NativeEndian.AppendUint32(b, 0)
	return append(b, body...)
}

// attribute appends a struct rtattr, padded to four bytes.
func attribute(b []byte, kind uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofRtAttr+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

func link(m unix.IfInfomsg) []byte    { return (*[unix.SizeofIfInfomsg]byte)(unsafe.Pointer(&m))[:] }
func address(m unix.IfAddrmsg) []byte { return (*[unix.SizeofIfAddrmsg]byte)(unsafe.Pointer(&m))[:] }
func neighbour(m unix.NdMsg) []byte   { return (*[unix.SizeofNdMsg]byte)(unsafe.Pointer(&m))[:] }
func route(m unix.RtMsg) []byte       { return (*[unix.SizeofRtMsg]byte)(unsafe.Pointer(&m))[:] }

func failed(step string, err error) *Error {
	var errno syscall.Errno
	errors.As(err, &errno)
	return &Error{Step: step, Err: errno}
}
