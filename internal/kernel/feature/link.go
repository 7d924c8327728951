package feature

import (
	"context"
	"encoding/binary"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// Link is network links whose other end is a descriptor: TUN devices, or pairs of virtual devices
// with a packet socket.
var Link = &Test{
	Name: "network links", Fix: "load the kernel's tun module (modprobe tun), and let this user open /dev/net/tun (mode 0666, as udev sets it)",
	try: func(ctx context.Context) (string, error) {
		attr := namespaces()
		attr.Cloneflags |= unix.CLONE_NEWNET
		detail, err := child(ctx, attr, "link")
		return detail, refused(err)
	},
}

func tryLink([]string) (string, error) {
	tun := tryTUN()
	if tun == nil {
		return "", nil
	}
	if err := tryPair(); err != nil {
		return "", berm.Errorf(berm.KindOf(tun), "%w, and %w", tun, err)
	}
	return "pairs of virtual devices: " + tun.Error(), nil
}

func tryTUN() error {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return failed(err, "open /dev/net/tun")
	}
	defer unix.Close(fd)
	request, err := unix.NewIfreq("berm0")
	if err != nil {
		return failed(err, "name a link")
	}
	request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
		return failed(err, "make a TUN device")
	}
	return nil
}

// tryPair makes what package link makes where there are no TUN devices.
func tryPair() error {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return failed(err, "open a packet socket")
	}
	_ = unix.Close(fd)
	s, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return failed(err, "open a netlink socket")
	}
	defer unix.Close(s)
	// struct nlmsghdr, struct ifinfomsg, IFLA_LINKINFO with the kind: the kernel names both.
	u16, u32 := binary.NativeEndian.AppendUint16, binary.NativeEndian.AppendUint32
	const kind = "veth\x00\x00\x00\x00" // padded
	const length = unix.SizeofNlMsghdr + unix.SizeofIfInfomsg + 2*unix.SizeofRtAttr + len(kind)
	b := u16(u32(nil, uint32(length)), unix.RTM_NEWLINK)
	b = u16(b, unix.NLM_F_REQUEST|unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_EXCL)
	b = append(b, make([]byte, 8+unix.SizeofIfInfomsg)...)
	b = u16(u16(b, uint16(2*unix.SizeofRtAttr+len(kind))), unix.IFLA_LINKINFO)
	b = u16(u16(b, uint16(unix.SizeofRtAttr+len("veth\x00"))), unix.IFLA_INFO_KIND)
	b = append(b, kind...)
	if err := unix.Sendto(s, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return failed(err, "ask for a pair of virtual devices")
	}
	answer := make([]byte, 1024) // struct nlmsghdr, and struct nlmsgerr
	n, err := unix.Read(s, answer)
	if err == nil && n < unix.NLMSG_HDRLEN+4 {
		err = unix.EBADMSG
	}
	if err != nil {
		return failed(err, "make a pair of virtual devices")
	}
	if errno := syscall.Errno(-int32(binary.NativeEndian.Uint32(answer[unix.NLMSG_HDRLEN:]))); errno != 0 {
		return failed(errno, "make a pair of virtual devices")
	}
	return nil
}
