package seccomp

import (
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func services() map[string]func() Profile {
	return map[string]func() Profile{"egressd": Egress, "brokerd": Broker, "auditd": func() Profile { return Log(false) }, "auditd-witness": func() Profile { return Log(true) }}
}

// Every call of a service's has a reason, is known, and is listed once.
func TestPermits(t *testing.T) {
	known := map[string]bool{}
	for _, c := range calls {
		known[c.name] = true
	}
	for name, lists := range map[string][][]permit{
		"egressd":        {runtimePermits(1), readPermits, socketPermits, networkPermits, linkPermits},
		"brokerd":        {runtimePermits(1), readPermits, socketPermits, networkPermits, doorPermits},
		"auditd-witness": {runtimePermits(1), socketPermits, logPermits, networkPermits, linkPermits},
	} {
		seen := map[string]bool{}
		for _, list := range lists {
			for _, permit := range list {
				if permit.why == "" || permit.policy == nil {
					t.Errorf("%s: %s: no reason or no policy", name, permit.calls)
				}
				for _, c := range strings.Fields(permit.calls) {
					if !known[c] || seen[c] {
						t.Errorf("%s: %s is unknown or listed twice", name, c)
					}
					seen[c] = true
				}
			}
		}
	}
}

// playService is a process under a service's profile: it does what services do, or makes one
// call, on a thread that was there before.
func playService(name, what, address, dir string) error {
	before := make(chan func())
	go func() {
		runtime.LockOSThread()
		for f := range before {
			f()
		}
	}()
	before <- func() {}
	if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		return errno
	}
	p := services()[name]()
	filter, err := p.Assemble("")
	if err == nil {
		err = Load(filter)
	}
	if err != nil {
		return err
	}
	if what == "life" {
		return live(name, address, dir)
	}
	done := make(chan syscall.Errno)
	before <- func() { done <- forbidden(name)[what]() }
	return fmt.Errorf("%s: %w", what, <-done)
}

// live does what services do.
func live(name, address, dir string) error {
	var group sync.WaitGroup
	for i := range 40 { // threads, computation that has to be interrupted, memory
		group.Go(func() {
			if i%4 == 0 {
				runtime.LockOSThread()
				_ = unix.Nanosleep(&unix.Timespec{Nsec: 50e6}, nil)
			}
			for end := time.Now().Add(30 * time.Millisecond); time.Now().Before(end); {
				_ = make([]byte, 1<<20)
			}
		})
	}
	group.Wait()
	runtime.GC()
	if _, err := crand.Read(make([]byte, 32)); err != nil {
		return err
	}
	if _, err := os.ReadFile("/etc/passwd"); err != nil {
		return err
	}
	if _, err := os.ReadDir("/etc"); err != nil {
		return err
	}
	if _, err := os.Stat("/etc/localtime"); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	networks := []string{"tcp", "udp"}
	switch {
	case name == "brokerd":
		networks = networks[:1]
	case strings.HasPrefix(name, "auditd"):
		if err := keepFiles(dir); err != nil {
			return err
		}
		if name == "auditd" {
			networks = nil
		}
	}
	if len(networks) > 0 {
		if _, err := net.InterfaceAddrs(); err != nil {
			return err
		}
	}
	for _, network := range networks {
		c, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(context.Background(), network, address)
		if err != nil {
			return err
		}
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		_, _ = c.Write([]byte("hello"))
		if _, err := io.ReadFull(c, make([]byte, 5)); err != nil {
			return err
		}
		if tcp, ok := c.(*net.TCPConn); ok {
			// One connection to another has Go try the kernel's shortcuts.
			other, err := net.Dial("tcp", address)
			if err != nil {
				return err
			}
			_, _ = other.Write([]byte("world"))
			if n, err := io.CopyN(tcp, other, 5); n != 5 || err != nil {
				return fmt.Errorf("copied %d: %w", n, err)
			}
			pieces := net.Buffers{[]byte("a"), []byte("b")}
			if _, err := pieces.WriteTo(tcp); err != nil {
				return err
			}
			_ = tcp.CloseWrite()
			_ = tcp.SetLinger(0)
			other.Close()
		}
		c.Close()
	}
	return nil
}

// keepFiles does what the writer of a log does in its directory.
func keepFiles(dir string) error {
	f, err := os.CreateTemp(dir, "")
	if err != nil {
		return err
	}
	defer f.Close()
	below := filepath.Join(dir, "below")
	_, write := f.WriteAt([]byte("text"), 1)
	_, hostname := os.Hostname()
	return errors.Join(write, hostname, f.Truncate(2), f.Sync(), unix.Fdatasync(int(f.Fd())), unix.Flock(int(f.Fd()), unix.LOCK_EX),
		os.Chtimes(f.Name(), time.Time{}, time.Now()), os.MkdirAll(below, 0o700), os.Rename(f.Name(), filepath.Join(below, "file")),
		os.Remove(filepath.Join(below, "file")), os.Remove(below))
}

// forbidden are calls that end a service.
func forbidden(name string) map[string]func() syscall.Errno {
	const execute = unix.PROT_READ | unix.PROT_EXEC
	calls := map[string]func() syscall.Errno{
		"execve":            raw(unix.SYS_EXECVE, 0, 0, 0),
		"execveat":          raw(unix.SYS_EXECVEAT, 0, 0, 0, 0, 0),
		"fork":              raw(unix.SYS_CLONE, uintptr(unix.SIGCHLD)),
		"clone3":            raw(unix.SYS_CLONE3, 0, 0),
		"user namespace":    raw(unix.SYS_CLONE, threadFlags|unix.CLONE_NEWUSER),
		"unshare":           raw(unix.SYS_UNSHARE, unix.CLONE_NEWUSER),
		"setns":             raw(unix.SYS_SETNS, 0, 0),
		"code":              raw(unix.SYS_MMAP, 0, 4096, execute, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, ^uintptr(0), 0),
		"data made code":    raw(unix.SYS_MPROTECT, 0, 0, execute),
		"open to write":     raw(unix.SYS_OPENAT, 0, 0, unix.O_WRONLY),
		"create":            raw(unix.SYS_OPENAT, 0, 0, unix.O_CREAT),
		"truncate":          raw(unix.SYS_OPENAT, 0, 0, unix.O_TRUNC),
		"nameless file":     raw(unix.SYS_OPENAT, 0, 0, unix.O_TMPFILE),
		"unlink":            raw(unix.SYS_UNLINKAT, 0, 0, 0),
		"ptrace":            raw(unix.SYS_PTRACE, 0, 0, 0, 0),
		"another's memory":  raw(unix.SYS_PROCESS_VM_READV, 1, 0, 0, 0, 0, 0),
		"kill":              raw(unix.SYS_KILL, 1<<30, 0),
		"another's thread":  raw(unix.SYS_TGKILL, 1<<30, 1, 0),
		"pidfd":             raw(unix.SYS_PIDFD_OPEN, 1, 0),
		"ioctl":             raw(unix.SYS_IOCTL, 0, unix.TIOCSTI, 0),
		"listen":            raw(unix.SYS_LISTEN, 0, 0),
		"accept":            raw(unix.SYS_ACCEPT4, 0, 0, 0, 0),
		"unix socket":       socket(unix.AF_UNIX, unix.SOCK_STREAM, 0),
		"raw socket":        socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP),
		"packet socket":     socket(unix.AF_PACKET, unix.SOCK_RAW, 0),
		"sctp":              socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP),
		"mptcp":             socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP),
		"other netlink":     socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER),
		"vsock":             socket(unix.AF_VSOCK, unix.SOCK_STREAM, 0),
		"filter on socket":  raw(unix.SYS_SETSOCKOPT, 0, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, 0, 0),
		"option of TCP":     raw(unix.SYS_SETSOCKOPT, 0, unix.IPPROTO_TCP, unix.TCP_REPAIR, 0, 0),
		"option of IP":      raw(unix.SYS_SETSOCKOPT, 0, unix.IPPROTO_IP, 64, 0, 0),
		"lock of file":      raw(unix.SYS_FCNTL, 0, unix.F_SETLK, 0),
		"owner of file":     raw(unix.SYS_FCNTL, 0, unix.F_SETOWN, 1),
		"dumpable":          raw(unix.SYS_PRCTL, unix.PR_SET_DUMPABLE, 1, 0, 0, 0),
		"io_uring":          raw(unix.SYS_IO_URING_SETUP, 1, 0),
		"bpf":               raw(unix.SYS_BPF, 0, 0, 0),
		"keyring":           raw(unix.SYS_KEYCTL, 0, 0, 0, 0, 0),
		"userfaultfd":       raw(unix.SYS_USERFAULTFD, 0),
		"another filter":    raw(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, 0),
		"setuid":            raw(unix.SYS_SETUID, 0),
		"a limit":           raw(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_CORE, 0, 0),
		"memory file":       raw(unix.SYS_MEMFD_CREATE, 0, 0),
		"number that is no": raw(1 << 20),
	}
	if name == "brokerd" {
		calls["datagrams"] = socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		calls["pair"] = raw(unix.SYS_SOCKETPAIR, unix.AF_UNIX, unix.SOCK_STREAM, 0, 0)
	}
	if strings.HasPrefix(name, "auditd") {
		for _, its := range []string{"open to write", "create", "truncate", "nameless file", "unlink"} {
			delete(calls, its)
		}
		calls["symbolic link"] = raw(unix.SYS_SYMLINKAT, 0, 0, 0)
		calls["link"] = raw(unix.SYS_LINKAT, 0, 0, 0, 0, 0)
		calls["pipe with a name"] = raw(unix.SYS_MKNODAT, 0, 0, unix.S_IFIFO, 0)
		calls["owner"] = raw(unix.SYS_FCHOWNAT, 0, 0, 0, 0, 0)
		calls["mode"] = raw(unix.SYS_FCHMODAT, 0, 0, 0)
		calls["another directory"] = raw(unix.SYS_CHDIR, 0)
	}
	if name == "auditd" {
		calls["tcp"] = socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		calls["udp"] = socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		calls["connect"] = raw(unix.SYS_CONNECT, 0, 0, 0)
	}
	return calls
}

// A service does all that it has to, and dies of what it must not do, whichever thread does it.
func TestServices(t *testing.T) {
	address, program := echoes(t), withoutCgo(t)
	dir, err := os.MkdirTemp("", "berm-seccomp-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	for name := range services() {
		for place, credential := range users() {
			run := func(what string) (*os.ProcessState, string) {
				cmd := again("service "+name, what, address, dir)
				cmd.Path = program
				cmd.SysProcAttr.Credential = credential
				out, _ := cmd.CombinedOutput()
				return cmd.ProcessState, string(out)
			}
			t.Run(name+"/"+place, func(t *testing.T) {
				if state, out := run("life"); !state.Success() {
					t.Fatalf("its own calls: %v: %s", state, out)
				}
				for what := range forbidden(name) {
					status := func() syscall.WaitStatus { s, _ := run(what); return s.Sys().(syscall.WaitStatus) }()
					if !status.Signaled() || status.Signal() != unix.SIGSYS {
						t.Errorf("%s: %v, want SIGSYS", what, status)
					}
				}
			})
		}
	}
}

// withoutCgo is this program as services are built: the C library makes other calls.
func withoutCgo(t *testing.T) string {
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_GETPID, 0, 0, 0); errno != unix.ENOTSUP {
		return "/proc/self/exe"
	}
	dir, err := os.MkdirTemp("", "berm-seccomp-") // which other users may enter
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "test")
	build := exec.Command("go", "test", "-c", "-o", program)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); errors.Is(err, exec.ErrNotFound) {
		t.Skip("missing: go, to build a program without cgo, as this one is not")
	} else if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return program
}

// users are those as whom services run.
func users() map[string]*syscall.Credential {
	if os.Geteuid() != 0 {
		return map[string]*syscall.Credential{"user": nil}
	}
	return map[string]*syscall.Credential{"root": nil, "user": {Uid: 65534, Gid: 65534}}
}

// echoes answers TCP and UDP at one address.
func echoes(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	u, err := net.ListenPacket("udp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { u.Close() })
	go func() {
		b := make([]byte, 64)
		for {
			n, from, err := u.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = u.WriteTo(b[:n], from)
		}
	}()
	return l.Addr().String()
}
