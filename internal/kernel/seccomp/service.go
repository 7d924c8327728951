package seccomp

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// A permit is what a service may ask of the kernel, and why it has to.
type permit struct {
	calls  string
	policy policy
	why    string
}

// kill ends the process, with SIGSYS.
const kill action = unix.SECCOMP_RET_KILL_PROCESS

// Egress is the profile of the network service, for the process that calls. A service does
// what it does and nothing else: whoever makes it do something else has taken it over, so a
// call that is not listed ends it. Load it when all threads have no_new_privs.
func Egress() Profile {
	return service("egressd", runtimePermits(os.Getpid()), readPermits, socketPermits, networkPermits, linkPermits)
}

// Broker is the profile of the service of credentials.
func Broker() Profile {
	return service("brokerd", runtimePermits(os.Getpid()), readPermits, socketPermits, networkPermits, doorPermits)
}

// Fetch is the profile of the process that serves the layers of an image on its way.
func Fetch() Profile {
	return service("fetch", runtimePermits(os.Getpid()), readPermits, socketPermits, networkPermits, linkPermits, blobPermits)
}

// Log is the profile of the writer of the audit log, which has a network when it sends checkpoints
// to witnesses.
func Log(network bool) Profile {
	lists := [][]permit{runtimePermits(os.Getpid()), socketPermits, logPermits}
	if network {
		lists = append(lists, networkPermits, linkPermits)
	}
	return service("auditd", lists...)
}

func service(name string, lists ...[]permit) Profile {
	p := Profile{name, map[string]policy{}, kill}
	for _, list := range lists {
		for _, permit := range list {
			for _, c := range strings.Fields(permit.calls) {
				p.policies[c] = permit.policy
			}
		}
	}
	return p
}

// is allows a call when the bits of mask in an argument are one of the values.
func is(arg int, mask uint32, values ...uint32) policy {
	return byArg{arg: arg, mask: mask, cases: []oneOf{{values, allow}}, rest: kill}
}

// threadFlags are those of clone with which the runtime makes a thread (cloneFlags in
// runtime/os_linux.go; on amd64 sys_linux_amd64.s adds CLONE_SETTLS). A process has others.
const threadFlags = unix.CLONE_VM | unix.CLONE_FS | unix.CLONE_FILES | unix.CLONE_SIGHAND | unix.CLONE_SYSVSEM | unix.CLONE_THREAD

// runtimePermits are for the Go runtime of the process pid.
func runtimePermits(pid int) []permit {
	return []permit{
		{"futex nanosleep clock_nanosleep restart_syscall sched_yield", allow, "threads wait for each other and for time; a wait that a signal interrupted is taken up again"},
		{"clone", is(0, 0, threadFlags, threadFlags|unix.CLONE_SETTLS), "threads are made as they are needed; processes are not"},
		{"gettid getpid sigaltstack set_robust_list exit exit_group", allow, "the beginning and the end of a thread, and of the process"},
		{"rt_sigaction rt_sigprocmask rt_sigreturn", allow, "the runtime's handlers of signals"},
		{"tgkill", is(0, 0, uint32(pid)), "a thread that computes for long is interrupted by a signal; other processes get none"},
		{"mmap mprotect", is(2, unix.PROT_EXEC, 0), "memory, none of which is code"},
		{"munmap madvise", allow, "memory goes back"},
		{"clock_gettime getrandom", allow, "asked in memory; the call is for where the kernel cannot answer there"},
		{"sched_getaffinity pread64", allow, "the runtime follows the number of processors it may use; the files of its control group are open"},
		{"prctl", is(0, 0, unix.PR_SET_VMA), "the runtime names its memory"},
		{"epoll_create1 epoll_ctl epoll_pwait eventfd2", allow, "all descriptors are waited for at once"},
		{"read write close lseek", allow, "what is open; a directory is read from its start"},
		{"fcntl", is(1, 0, unix.F_GETFL, unix.F_SETFL, unix.F_GETFD, unix.F_SETFD, unix.F_DUPFD_CLOEXEC, unix.F_ADD_SEALS), "descriptors that came are made non-blocking, and closed on execution; a file in memory is sealed"},
		{"fstat newfstatat readlinkat getdents64", allow, "the same files are looked at and found"},
		// Go tries these first, and does without when they fail.
		{"splice sendfile copy_file_range pipe2", fail(unix.ENOSYS), "copies between descriptors: the kernel's shortcuts had holes, and Go has another way"},
	}
}

// readPermits are for files that are only read.
var readPermits = []permit{
	// What can be opened is Landlock's affair; by this it cannot be written.
	{"openat", is(2, unix.O_ACCMODE|unix.O_CREAT|unix.O_TRUNC|unix.O_TMPFILE&^unix.O_DIRECTORY, unix.O_RDONLY), "the resolvers, the authorities and the time zone are read"},
}

// socketPermits are for connections that are open.
var socketPermits = []permit{
	{"getsockname getpeername shutdown", allow, "connections that came are looked at and ended"},
	{"sendmsg recvmsg", allow, "descriptors over Unix sockets"},
	{"writev", allow, "several pieces are written at once"},
	{"getsockopt", is(1, 0, unix.SOL_SOCKET), "what kind of socket a descriptor is, and whether it got connected"},
}

var networkPermits = []permit{
	{"bind", allow, "Go finds out whether there is IPv6; the netlink socket joins the groups of addresses. What is bound cannot listen"},
	{"connect", allow, "connections are made"},
	{"sendto recvfrom", allow, "datagrams"},
	{"setsockopt", byArg{arg: 1, cases: []oneOf{
		{[]uint32{unix.SOL_SOCKET}, is(2, 0, unix.SO_KEEPALIVE, unix.SO_BROADCAST, unix.SO_LINGER, unix.SO_REUSEADDR)},
		{[]uint32{unix.IPPROTO_TCP}, is(2, 0, unix.TCP_NODELAY, unix.TCP_KEEPIDLE, unix.TCP_KEEPINTVL, unix.TCP_KEEPCNT)},
		{[]uint32{unix.IPPROTO_IPV6}, is(2, 0, unix.IPV6_V6ONLY)},
	}, rest: kill}, "what Go sets on a socket that it made, and the end of one by a reset"},
}

// The sockets of both.
var (
	streams = oneOf{[]uint32{unix.SOCK_STREAM}, is(2, 0, 0, unix.IPPROTO_TCP)}
	routes  = oneOf{[]uint32{unix.AF_NETLINK}, is(2, 0, unix.NETLINK_ROUTE)}
)

// linkPermits are for a sandbox's packets and for asking for names.
var linkPermits = []permit{
	{"readv", allow, "packets are read from the link in pieces"},
	{"socket", byArg{arg: 0, cases: []oneOf{
		{[]uint32{unix.AF_INET, unix.AF_INET6}, byArg{arg: 1, mask: 0xf, cases: []oneOf{
			streams, {[]uint32{unix.SOCK_DGRAM}, is(2, 0, 0, unix.IPPROTO_UDP)},
		}, rest: kill}},
		routes,
	}, rest: kill}, "TCP and UDP outside, and the host's own addresses"},
	{"socketpair", is(0, 0, unix.AF_UNIX), "a flow is handed to the service of credentials by one end of a pair"},
}

// doorPermits are for flows that were handed over, and for what is kept for a later process.
var doorPermits = []permit{
	{"memfd_create", is(1, 0, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING), "a sandbox's authority is kept by its monitor, in a file in memory"},
	{"socket", byArg{arg: 0, cases: []oneOf{
		{[]uint32{unix.AF_INET, unix.AF_INET6}, byArg{arg: 1, mask: 0xf, cases: []oneOf{streams}, rest: kill}},
		routes,
	}, rest: kill}, "TCP outside, to addresses that were found by the network service, and the host's own addresses"},
}

// blobPermits are for what arrives.
var blobPermits = []permit{
	{"pwrite64", allow, "what came is written at its place, into files that are open"},
}

// logPermits are for the files of a log. What cannot be made are links, named pipes and sockets:
// others read the directory with more rights.
var logPermits = []permit{
	{"openat", allow, "what can be opened to be written is Landlock's affair: the directory of the log"},
	{"pwrite64 ftruncate", allow, "a file is written at its place; half a line is taken away"},
	{"fsync fdatasync", allow, "what was written outlives the machine"},
	{"flock", allow, "a log has one writer"},
	{"mkdirat renameat renameat2 unlinkat utimensat", allow, "files get their names when they are whole, and old ones go"},
	{"uname", allow, "the name of the host stands in records"},
}
