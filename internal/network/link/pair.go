package link

import (
	"bytes"
	"encoding/binary"
	"unsafe"

	"golang.org/x/sys/unix"
)

// gateway is the name of the other device of a pair.
const gateway = "gateway"

// mostQueued is how many bytes of frames may wait for whoever reads a pair's socket, as the kernel
// counts them; an ordinary user gets what net.core.rmem_max allows.
const mostQueued = 8 << 20

// pair makes a link of two virtual devices, both in the sandbox's namespace: the sandbox's own,
// and the gateway, which has no address and to which a packet socket is bound. The socket is the
// descriptor, and carries what a TAP device's does. Nothing else is in the namespace, so nothing
// that is sent goes anywhere but there; who has no CAP_NET_RAW in it cannot read along.
//
// It is the second choice: the kernel takes 24 ms to take such devices away, and counts frames that
// wait by the memory that they take, so that some are lost where a TUN device keeps them.
func pair(c Config) (int, *Error) {
	var r requests
	peer := link(unix.IfInfomsg{})
	peer = attribute(peer, unix.IFLA_IFNAME, []byte(gateway+"\x00"))
	const infoPeer = 1 // VETH_INFO_PEER (linux/veth.h)
	info := attribute(nil, unix.IFLA_INFO_KIND, []byte("veth\x00"))
	info = attribute(info, unix.IFLA_INFO_DATA, attribute(nil, infoPeer, peer))
	body := attribute(link(unix.IfInfomsg{}), unix.IFLA_IFNAME, []byte(Name+"\x00"))
	r.add("make a pair of devices", unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, attribute(body, unix.IFLA_LINKINFO, info))
	if err := r.send(); err != nil {
		return -1, err
	}
	fd, err := between(c)
	if err != nil {
		r = requests{}
		r.add("take the pair away", unix.RTM_DELLINK, 0, attribute(link(unix.IfInfomsg{}), unix.IFLA_IFNAME, []byte(Name+"\x00")))
		_ = r.send()
	}
	return fd, err
}

// between brings both devices of a pair up and returns the socket.
func between(c Config) (int, *Error) {
	own, err := indexOf(Name)
	if err != nil {
		return -1, err
	}
	other, err := indexOf(gateway)
	if err != nil {
		return -1, err
	}
	if err := wholeDatagrams(); err != nil {
		return -1, err
	}
	var r requests
	r.up(other, Config{MTU: c.MTU, Hardware: GatewayHardware})
	if err := r.send(); err != nil {
		return -1, err
	}
	// Bound to no protocol, a socket gets nothing until it is ready.
	fd, refused := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if refused != nil {
		return -1, failed("open a packet socket", refused)
	}
	refused = unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1)
	if refused == nil { // what it sends itself
		refused = unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1)
	}
	if refused == nil { // the gateway has a queue only some time after it has a carrier
		refused = unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, 1)
	}
	if refused == nil && unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, mostQueued) != nil {
		refused = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, mostQueued)
	}
	if refused == nil {
		const all = unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8 // in network order
		refused = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: int(other)})
	}
	if refused != nil {
		_ = unix.Close(fd)
		return -1, failed("bind a packet socket", refused)
	}
	if err := configure(own, c); err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// Commands and sets of ethtool (linux/ethtool.h).
const (
	getStrings   = 0x1b // ETHTOOL_GSTRINGS: struct ethtool_gstrings
	countStrings = 0x37 // ETHTOOL_GSSET_INFO: struct ethtool_sset_info
	setFeatures  = 0x3b // ETHTOOL_SFEATURES: struct ethtool_sfeatures
	features     = 4    // ETH_SS_FEATURES
	stringLen    = 32   // ETH_GSTRING_LEN
)

// wholeDatagrams has the kernel cut datagrams before the link that a program sends many at once of
// (UDP_SEGMENT of udp(7)), as it does before a TUN device: a packet socket would get them in one
// packet, or, before Linux 6.2, lose them.
func wholeDatagrams() *Error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return failed("open a socket", err)
	}
	defer unix.Close(s)
	do := func(data []byte) *Error {
		var request struct {
			name [unix.IFNAMSIZ]byte
			data unsafe.Pointer
			_    [16]byte
		}
		copy(request.name[:], Name)
		request.data = unsafe.Pointer(&data[0])
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(s), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request))); errno != 0 {
			return failed("cut datagrams before the link", errno)
		}
		return nil
	}
	u32 := binary.NativeEndian.AppendUint32
	count := binary.NativeEndian.AppendUint64(u32(u32(nil, countStrings), 0), 1<<features)
	count = u32(count, 0)
	if err := do(count); err != nil {
		return err
	}
	n := int(binary.NativeEndian.Uint32(count[16:]))
	names := append(u32(u32(u32(nil, getStrings), features), uint32(n)), make([]byte, n*stringLen)...)
	if err := do(names); err != nil {
		return err
	}
	for i := range n {
		name, _, _ := bytes.Cut(names[12+i*stringLen:][:stringLen], []byte{0})
		if string(name) != "tx-udp-segmentation" {
			continue
		}
		blocks := (n + 31) / 32
		set := append(u32(u32(nil, setFeatures), uint32(blocks)), make([]byte, blocks*8)...)
		// What is to be set, and to what: nothing.
		binary.NativeEndian.PutUint32(set[8+i/32*8:], 1<<(i%32))
		return do(set)
	}
	return nil // a kernel without it cuts them itself
}
