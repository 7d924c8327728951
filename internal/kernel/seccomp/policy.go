package seccomp

import "golang.org/x/sys/unix"

// A policy decides about one system call: an action at once, or by an argument.
type policy interface{ compile(*program) target }

// An action is what the kernel does with a call: the return value of the filter.
type action uint32

const allow action = unix.SECCOMP_RET_ALLOW

func fail(errno unix.Errno) action { return action(unix.SECCOMP_RET_ERRNO | uint32(errno)) }

// pretend makes a call succeed that is not made: an error without a number.
const pretend action = unix.SECCOMP_RET_ERRNO

// byArg looks at the low 32 bits of one argument. That is exact for every argument
// looked at here: the kernel takes it as an int, an unsigned int or a umode_t and
// drops the rest. (A filter that compares 64 bits lets TIOCSTI through with a high
// bit set: CVE-2019-10063.)
type byArg struct {
	arg   int
	mask  uint32 // 0 means all 32 bits
	cases []oneOf
	rest  policy // when no case matches
}

// oneOf is a case of byArg.
type oneOf struct {
	values []uint32
	then   policy
}

// nullArg looks at a pointer, all 64 bits of it.
type nullArg struct {
	arg        int
	null, rest policy
}

// Clone flags that make a namespace. CLONE_NEWTIME is absent: clone reads these
// bits as the exit signal.
const newNamespace = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
	unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET

// Personalities that change nothing but what uname says and, for debuggers and
// sanitizers, the randomization of addresses, which set-uid programs reset.
var harmlessPersonalities = []uint32{
	0, 0x0008, 0x0020000, 0x0020008, // PER_LINUX and PER_LINUX32, each with and without UNAME26
	0x0040000,  // ADDR_NO_RANDOMIZE
	0xffffffff, // only asks
}

// A partial is a call that is allowed in part.
type partial struct {
	policy
	text string // the condition, for people
}

var partials = map[string]partial{
	"clone": {
		byArg{arg: 0, mask: newNamespace, cases: []oneOf{{[]uint32{0}, allow}}, rest: fail(unix.EPERM)},
		"without a new namespace, else EPERM",
	},
	// The argument of clone3 is in memory, out of a filter's sight; on ENOSYS every
	// libc falls back to clone.
	"clone3": {fail(unix.ENOSYS), "never: ENOSYS, so that the caller falls back to clone"},

	// Line disciplines other than the terminal's own are old kernel code.
	"ioctl": {
		byArg{arg: 1, cases: []oneOf{{[]uint32{unix.TIOCSTI, tioclinux, unix.TIOCSETD}, fail(unix.EPERM)}}, rest: allow},
		"except TIOCSTI, TIOCLINUX and TIOCSETD: EPERM",
	},
	"mknod":   {deviceNode(1), "files, pipes and sockets; devices EPERM"},
	"mknodat": {deviceNode(2), "files, pipes and sockets; devices EPERM"},
	"personality": {
		byArg{arg: 0, cases: []oneOf{{harmlessPersonalities, allow}}, rest: fail(unix.EPERM)},
		"Linux, 32-bit names, UNAME26 and ADDR_NO_RANDOMIZE, else EPERM",
	},
	// A filter of the sandbox's own may only take more away. A listener could answer
	// for calls of set-uid programs, so there is none.
	"seccomp": {
		byArg{arg: 0, cases: []oneOf{
			{[]uint32{unix.SECCOMP_SET_MODE_STRICT, unix.SECCOMP_GET_ACTION_AVAIL}, allow},
			{[]uint32{unix.SECCOMP_SET_MODE_FILTER}, byArg{
				arg: 1, mask: unix.SECCOMP_FILTER_FLAG_NEW_LISTENER, cases: []oneOf{{[]uint32{0}, allow}}, rest: fail(unix.EPERM),
			}},
		}, rest: fail(unix.EPERM)},
		"further filters, without a listener, else EPERM",
	},
	"socket": {
		byArg{arg: 0, cases: []oneOf{
			{[]uint32{unix.AF_UNIX}, allow},
			{[]uint32{unix.AF_INET, unix.AF_INET6}, byArg{arg: 1, mask: 0xf, cases: []oneOf{
				{[]uint32{unix.SOCK_STREAM}, protocols(2, 0, unix.IPPROTO_TCP)},
				{[]uint32{unix.SOCK_DGRAM}, protocols(2, 0, unix.IPPROTO_UDP, unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6)},
				// SOCK_PACKET on AF_INET is a packet socket by its old name.
				{[]uint32{unix.SOCK_RAW, unix.SOCK_PACKET}, fail(unix.EPERM)},
			}, rest: fail(unix.ESOCKTNOSUPPORT)}},
			{[]uint32{unix.AF_NETLINK}, protocols(2, unix.NETLINK_ROUTE)},
		}, rest: fail(unix.EAFNOSUPPORT)},
		"AF_UNIX; AF_INET and AF_INET6 with TCP, UDP and ping, raw EPERM, others EPROTONOSUPPORT; " +
			"AF_NETLINK with NETLINK_ROUTE, others EPROTONOSUPPORT; other families EAFNOSUPPORT",
	},
	// A crash is handed to the program that the host's core_pattern names, as root of the
	// host and whatever the limit is, but at 1, which every sandbox starts with. Programs
	// that set 0 for their secrets' sake (sudo, gpg) must not fail: it holds nothing anyway.
	"prlimit64": {
		byArg{arg: 1, cases: []oneOf{{[]uint32{unix.RLIMIT_CORE}, nullArg{arg: 2, null: allow, rest: pretend}}}, rest: allow},
		"the core file size can be asked for; setting it does nothing and succeeds",
	},
	"setrlimit": {
		byArg{arg: 0, cases: []oneOf{{[]uint32{unix.RLIMIT_CORE}, pretend}}, rest: allow},
		"setting the core file size does nothing and succeeds",
	},
	// It writes every file system of the host, so that all wait for the disk. What a
	// sandbox writes does not outlive it.
	"sync": {pretend, "does nothing and succeeds"},

	"socketpair": {
		byArg{arg: 0, cases: []oneOf{{[]uint32{unix.AF_UNIX}, allow}}, rest: fail(unix.EAFNOSUPPORT)},
		"AF_UNIX, else EAFNOSUPPORT",
	},
}

const tioclinux = 0x541c

// deviceNode refuses character and block devices by the mode in argument arg. A
// mode without a type is a regular file.
func deviceNode(arg int) policy {
	return byArg{arg: arg, mask: unix.S_IFMT, cases: []oneOf{
		{[]uint32{0, unix.S_IFREG, unix.S_IFIFO, unix.S_IFSOCK}, allow},
	}, rest: fail(unix.EPERM)}
}

// protocols allows the protocols given in argument arg. The others get the error of
// a kernel that was built without them, which callers know how to live without:
// Go's listeners try MPTCP first, sudo tries the audit netlink.
func protocols(arg int, list ...uint32) policy {
	return byArg{arg: arg, cases: []oneOf{{list, allow}}, rest: fail(unix.EPROTONOSUPPORT)}
}
