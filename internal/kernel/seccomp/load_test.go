package seccomp

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// A filter cannot be taken off, so the test binary starts itself again and loads it
// there. roleVariable says what the new process is to do, and under which profile:
// "calls PROFILE", "exec PROFILE ARG…", "service PROFILE CALL ADDRESS" or "load".
const roleVariable = "BERM_SECCOMP_TEST_ROLE"

func TestMain(m *testing.M) {
	role := strings.Fields(os.Getenv(roleVariable))
	if len(role) == 0 {
		os.Exit(m.Run())
	}
	os.Unsetenv(roleVariable)
	if err := play(role); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(99)
	}
	os.Exit(0)
}

func play(role []string) error {
	if role[0] == "load" { // without the right to
		p, _ := Lookup("")
		filter, _ := p.Assemble("")
		if err := Load(filter); berm.KindOf(err) != berm.Denied {
			return fmt.Errorf("Load: %w", err)
		}
		return nil
	}
	if role[0] == "service" {
		return playService(role[1], os.Args[1], os.Args[2], os.Args[3])
	}
	p, err := Lookup(role[1])
	if err != nil {
		return err
	}
	filter, err := p.Assemble("")
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return err
		}
	}
	// As every sandbox begins, unless whoever runs the tests has less.
	_ = unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 1, Max: 1})
	begin := time.Now()
	if err := Load(filter); err != nil {
		return err
	}
	took := time.Since(begin)
	if role[0] == "exec" {
		path, err := exec.LookPath(os.Args[1])
		if err != nil {
			return err
		}
		return unix.Exec(path, os.Args[1:], os.Environ())
	}
	results := map[string]int{"": int(took.Microseconds())}
	for _, c := range cases(p) {
		results[c.name] = int(c.try())
	}
	return json.NewEncoder(os.Stdout).Encode(results)
}

func again(role string, args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // vhangup would hit a terminal
	return cmd
}

// A try is one call and the error that the filter gives it, 0 for none.
type try struct {
	name string
	want syscall.Errno
	try  func() syscall.Errno
}

func raw(number uintptr, args ...uintptr) func() syscall.Errno {
	return func() syscall.Errno {
		var a [6]uintptr
		copy(a[:], args)
		r, _, errno := unix.RawSyscall6(number, a[0], a[1], a[2], a[3], a[4], a[5])
		if errno == 0 && number == unix.SYS_CLONE && r == 0 {
			unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0)
		}
		return errno
	}
}

// socket tries a socket and closes it again.
func socket(family, kind, protocol int) func() syscall.Errno {
	return func() syscall.Errno {
		fd, err := unix.Socket(family, kind, protocol)
		if err == nil {
			unix.Close(fd)
		}
		return errnoOf(err)
	}
}

func errnoOf(err error) syscall.Errno {
	var errno syscall.Errno
	errors.As(err, &errno)
	return errno
}

// cases are the rules of a profile as calls. As root they would do something, or
// fail in another way, if it were not for the filter; but nothing that hurts.
func cases(p Profile) []try {
	list := []try{
		{"clone", 0, raw(unix.SYS_CLONE, unix.CLONE_VFORK|unix.CLONE_VM|uintptr(unix.SIGCHLD))},
		{"socket unix", 0, socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)},
		{"socket inet", 0, socket(unix.AF_INET, unix.SOCK_STREAM, 0)},
		{"socket tcp flags", 0, socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_TCP)},
		{"socket inet6 udp", 0, socket(unix.AF_INET6, unix.SOCK_DGRAM, unix.IPPROTO_UDP)},
		{"socket netlink route", 0, socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)},
		{"socket raw", unix.EPERM, socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP)},
		{"socket raw6", unix.EPERM, socket(unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_ICMPV6)},
		{"socket packet by its old name", unix.EPERM, socket(unix.AF_INET, unix.SOCK_PACKET, 3)},
		{"socket mptcp", unix.EPROTONOSUPPORT, socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP)},
		{"socket sctp", unix.EPROTONOSUPPORT, socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP)},
		{"socket seqpacket", unix.ESOCKTNOSUPPORT, socket(unix.AF_INET, unix.SOCK_SEQPACKET, 0)},
		{"socket family with high bits", unix.EAFNOSUPPORT, raw(unix.SYS_SOCKET, 1<<31|unix.AF_UNIX, unix.SOCK_STREAM)},
		{"socketpair unix", 0, func() syscall.Errno {
			fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
			if err == nil {
				unix.Close(fds[0])
				unix.Close(fds[1])
			}
			return errnoOf(err)
		}},
		{"socketpair tipc", unix.EAFNOSUPPORT, raw(unix.SYS_SOCKETPAIR, unix.AF_TIPC, unix.SOCK_STREAM, 0, 0)},
		{"ioctl", unix.ENOTTY, raw(unix.SYS_IOCTL, devNull(), unix.TCGETS)},
		{"ioctl TIOCSTI", unix.EPERM, raw(unix.SYS_IOCTL, devNull(), unix.TIOCSTI)},
		{"ioctl TIOCSTI with a high bit", unix.EPERM, raw(unix.SYS_IOCTL, devNull(), 1<<32|unix.TIOCSTI)},
		{"ioctl TIOCLINUX", unix.EPERM, raw(unix.SYS_IOCTL, devNull(), tioclinux)},
		{"ioctl TIOCLINUX with high bits", unix.EPERM, raw(unix.SYS_IOCTL, devNull(), 0xf0f0<<32|tioclinux)},
		{"ioctl TIOCSETD", unix.EPERM, raw(unix.SYS_IOCTL, devNull(), unix.TIOCSETD)},
		{"mknodat fifo", unix.EFAULT, raw(unix.SYS_MKNODAT, 0, 0, unix.S_IFIFO|0o600, 0)},
		{"mknodat regular", unix.EFAULT, raw(unix.SYS_MKNODAT, 0, 0, 0o600, 0)},
		{"mknodat character device", unix.EPERM, raw(unix.SYS_MKNODAT, 0, 0, unix.S_IFCHR|0o600, 0x101)},
		{"mknodat block device", unix.EPERM, raw(unix.SYS_MKNODAT, 0, 0, unix.S_IFBLK|0o600, 0x800)},
		{"mknodat device with high bits", unix.EPERM, raw(unix.SYS_MKNODAT, 0, 0, 1<<32|1<<16|unix.S_IFBLK, 0x800)},
		{"prlimit of the core size, asked", 0, raw(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_CORE, 0, uintptr(unsafe.Pointer(someLimit)))},
		{"setrlimit of the core size", 0, keepsCoreLimit(raw(unix.SYS_SETRLIMIT, unix.RLIMIT_CORE, uintptr(unsafe.Pointer(noCore))))},
		{"prlimit of the core size", 0, keepsCoreLimit(raw(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_CORE, uintptr(unsafe.Pointer(noCore)), 0))},
		{"prlimit of the core size with high bits", 0, keepsCoreLimit(raw(unix.SYS_PRLIMIT64, 0, 1<<32|unix.RLIMIT_CORE, uintptr(unsafe.Pointer(noCore)), 0))},
		{"prlimit of the core size from an address with a low half of zero", 0, keepsCoreLimit(raw(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_CORE, atZero(), 0))},
		{"prlimit of another limit", unix.EFAULT, raw(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_NOFILE, 1, 0)},
		{"sync", 0, raw(unix.SYS_SYNC)},
		{"landlock version", 0, raw(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)},
		{"memfd", unix.EFAULT, raw(unix.SYS_MEMFD_CREATE, 0, 0)},
		{"open", 0, raw(unix.SYS_CLOSE, devNull())},
		{"high number", unix.ENOSYS, raw(1 << 20)},
		{"number -1", unix.ENOSYS, raw(^uintptr(0))},
		{"x32 getpid", unix.ENOSYS, raw(0x40000000 + 39)},
	}
	for name, flag := range map[string]uintptr{
		"newns": unix.CLONE_NEWNS, "newcgroup": unix.CLONE_NEWCGROUP, "newuts": unix.CLONE_NEWUTS, "newipc": unix.CLONE_NEWIPC,
		"newuser": unix.CLONE_NEWUSER, "newpid": unix.CLONE_NEWPID, "newnet": unix.CLONE_NEWNET,
	} {
		list = append(list, try{"clone " + name, unix.EPERM, raw(unix.SYS_CLONE, flag|unix.CLONE_VFORK|unix.CLONE_VM|uintptr(unix.SIGCHLD))})
	}
	for family := range 48 {
		switch family {
		case unix.AF_UNIX, unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK:
		default:
			for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_DGRAM, unix.SOCK_RAW, unix.SOCK_SEQPACKET} {
				list = append(list, try{fmt.Sprintf("socket %d %d", family, kind), unix.EAFNOSUPPORT, socket(family, kind, 0)})
			}
		}
	}
	for protocol := unix.NETLINK_ROUTE + 1; protocol < 32; protocol++ {
		list = append(list, try{fmt.Sprintf("netlink %d", protocol), unix.EPROTONOSUPPORT, socket(unix.AF_NETLINK, unix.SOCK_RAW, protocol)})
	}
	nested := raw(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(openFilter)))
	listener := raw(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER, uintptr(unsafe.Pointer(openFilter)))
	list = append(list,
		try{"seccomp listener", unix.EPERM, listener},
		try{"seccomp notification sizes", unix.EPERM, raw(unix.SYS_SECCOMP, unix.SECCOMP_GET_NOTIF_SIZES)})
	if p.name == Default {
		list = append(list,
			try{"seccomp further filter", 0, nested},
			try{"personality asked", 0, raw(unix.SYS_PERSONALITY, 0xffffffff)},
			try{"personality linux", 0, raw(unix.SYS_PERSONALITY, 0)},
			try{"personality READ_IMPLIES_EXEC", unix.EPERM, raw(unix.SYS_PERSONALITY, 0x0400000)},
			try{"personality SVR4", unix.EPERM, raw(unix.SYS_PERSONALITY, 0x1)},
			try{"ptrace", unix.ESRCH, raw(unix.SYS_PTRACE, unix.PTRACE_ATTACH, 1<<30)})
	}
	for _, c := range calls {
		switch c.name {
		case "uretprobe", "uprobe": // the kernel (6.14) keeps them from filters, and a stray one kills
			continue
		}
		number := uintptr(c.number(arch))
		policy, listed := p.policies[c.name]
		if c.number(arch) < 0 || listed && policy != fail(unix.EPERM) && policy != fail(unix.ENOSYS) {
			continue
		}
		args := []uintptr{0, ^uintptr(0)} // a length that nothing takes, should the call get through
		if listed && policy == fail(unix.EPERM) {
			list = append(list, try{"refused " + c.name, unix.EPERM, raw(number, args...)})
		} else {
			list = append(list, try{"unlisted " + c.name, unix.ENOSYS, raw(number, args...)})
		}
	}
	return list
}

// noCore is the limit that hands a core to the host's core_pattern.
var noCore, someLimit = &unix.Rlimit{}, &unix.Rlimit{}

// atZero is the address of another one, of which the low half is zero.
func atZero() uintptr {
	const page = 1 << 32
	_, _, _ = unix.RawSyscall6(unix.SYS_MMAP, page, 4096, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED_NOREPLACE, ^uintptr(0), 0)
	return page
}

// keepsCoreLimit makes a call that must leave the limit of the core size as it is.
func keepsCoreLimit(call func() syscall.Errno) func() syscall.Errno {
	return func() syscall.Errno {
		var before, after unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_CORE, &before); err != nil {
			return errnoOf(err)
		}
		if errno := call(); errno != 0 {
			return errno
		}
		if err := unix.Getrlimit(unix.RLIMIT_CORE, &after); err != nil {
			return errnoOf(err)
		}
		if before != after {
			return unix.EDOM
		}
		return 0
	}
}

// openFilter allows everything. It is a variable of the package so that it stays where it
// is while only its address is known.
var openFilter = &unix.SockFprog{Len: 1, Filter: &unix.SockFilter{Code: unix.BPF_RET, K: uint32(allow)}}

var null = func() *os.File { f, _ := os.Open(os.DevNull); return f }()

func devNull() uintptr { return null.Fd() }

func TestCalls(t *testing.T) {
	for _, profile := range Profiles() {
		for place, flags := range map[string]uintptr{
			"host":           0,
			"user namespace": unix.CLONE_NEWUSER, // with CAP_SYS_ADMIN there, and without no_new_privs
		} {
			t.Run(profile+"/"+place, func(t *testing.T) {
				cmd := again("calls " + profile)
				cmd.Stderr = os.Stderr
				if cmd.SysProcAttr.Cloneflags = flags; flags != 0 {
					cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
					cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
				}
				out, err := cmd.Output()
				if err != nil {
					t.Fatal(err)
				}
				var results map[string]int
				if err := json.Unmarshal(out, &results); err != nil {
					t.Fatal(err)
				}
				p, _ := Lookup(profile)
				for _, c := range cases(p) {
					got, ran := results[c.name]
					if !ran || syscall.Errno(got) != c.want {
						t.Errorf("%s: %v, want %v", c.name, syscall.Errno(got), c.want)
					}
				}
				t.Logf("%d calls; loading took %d µs", len(results)-1, results[""])
			})
		}
	}
}

// Programs that a sandbox is for run under the default profile.
func TestPrograms(t *testing.T) {
	dir := t.TempDir()
	hello := filepath.Join(dir, "hello.go")
	if err := os.WriteFile(hello, []byte("package main\nfunc main() { println(\"hello\") }\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	programs := map[string][]string{
		"shell":  {"sh", "-c", "echo a | tr a b | grep -q b && mkfifo " + dir + "/p && cat /proc/self/status >/dev/null"},
		"python": {"python3", "-c", "import subprocess,threading,socket,ssl,asyncio,tempfile\nt=threading.Thread(target=lambda:None);t.start();t.join()\nsubprocess.run(['true'],check=True)\ns=socket.create_server(('127.0.0.1',0));socket.create_connection(s.getsockname())\nasyncio.run(asyncio.create_subprocess_exec('true'))"},
		"git":    {"sh", "-c", "cd " + dir + " && git init -q r && cd r && echo 1 >f && git add f && git -c user.name=a -c user.email=a@b commit -qm m && git status"},
		"dpkg":   {"dpkg", "-l", "dpkg"},
		"tar":    {"sh", "-c", "tar -cf - -C / etc/passwd | tar -tf -"},
	}
	if os.Getenv("BERM_TEST_ALL") != "" {
		programs["processes"] = []string{"python3", "-c", "import multiprocessing as m\nwith m.Pool(2) as p: assert p.map(abs,[-1,-2])==[1,2]"}
		programs["node"] = []string{"node", "-e", "const h=require('http'),c=require('child_process');c.execSync('true');new (require('worker_threads').Worker)('1',{eval:true}).on('exit',()=>{const s=h.createServer((q,r)=>r.end('x')).listen(0,'127.0.0.1',()=>h.get({port:s.address().port,host:'127.0.0.1'},()=>process.exit(0)))})"}
		programs["go"] = []string{"go", "version"}
		programs["apt"] = []string{"apt-cache", "policy", "bash"}
		programs["interfaces"] = []string{"python3", "-c", "import socket;print(socket.if_nameindex())"}
		programs["go build"] = []string{"go", "build", "-o", filepath.Join(dir, "hello"), hello}
		programs["cc"] = []string{"sh", "-c", "echo 'int main(){return 0;}' | cc -x c -o " + dir + "/c - && " + dir + "/c"}
		programs["rust"] = []string{"rustc", "--version"}
		programs["npm"] = []string{"npm", "--version"}
		programs["venv"] = []string{"python3", "-m", "venv", "--without-pip", filepath.Join(dir, "venv")}
		programs["sudo"] = []string{"sudo", "-n", "true"}
		programs["gdb"] = []string{"gdb", "-batch", "-ex", "run", "--args", "true"}
		programs["strace"] = []string{"strace", "-f", "-o", "/dev/null", "sh", "-c", "true | true"}
	}
	for name, args := range programs {
		t.Run(name, func(t *testing.T) {
			if _, err := exec.LookPath(args[0]); err != nil {
				t.Skipf("the host has no %s", args[0])
			}
			if name == "sudo" && os.Geteuid() != 0 {
				t.Skip("needs CAP_SYS_ADMIN: without it a filter is loaded under no_new_privs only, which stops set-uid programs")
			}
			if out, err := again("exec default", args...).CombinedOutput(); err != nil {
				t.Errorf("%v: %v\n%s", args, err, out)
			}
		})
	}
}

func TestLoadNeedsRights(t *testing.T) {
	cmd := again("load")
	if os.Geteuid() == 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: 65534, Gid: 65534}
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}
