package landlock

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	kernel "github.com/berm-sandbox/berm/internal/kernel/landlock"
)

// probes are ways out, as Python. Each raises OSError when it is closed; what it reaches
// otherwise is printed by the loop that runs it. The names in capitals are of the world.
const probes = `
import ctypes, fcntl, os, resource, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(*args):
    if libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in args]) < 0:
        e = ctypes.get_errno(); raise OSError(e, os.strerror(e))
def read(path): return open(path, 'rb').read()
def victim(name): return lambda: read(f'/proc/{VICTIM}/{name}') or True
def connect(family, kind, address):
    def f(): s = socket.socket(family, kind); s.connect(address); return True
    return f
def datagram():
    # A pair of datagram sockets can send to any address.
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.sendto(b'x', HOME + '/docker.sock')
def streampair():
    a, b = socket.socketpair(); a.connect(HOME + '/docker.sock')
def hardlink(): os.link(HOME + '/other/code', 'stolen'); return read('stolen')
def rename(): os.rename(HOME + '/other/code', 'stolen'); return read('stolen')
def opath():
    fd = os.open(HOME + '/.ssh/id', os.O_PATH); return read(f'/proc/self/fd/{fd}')
def chdir(): os.chdir(HOME + '/.ssh'); return read('id')
def truncate(): os.truncate(HOME + '/other/code', 0)
def prlimit(): resource.prlimit(VICTIM, resource.RLIMIT_CPU, (1, 1))
def tiocsti(): fcntl.ioctl(0, 0x5412, b'x')
def otherterminal(): return open(PTS, 'rb+', buffering=0)
class iovec(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('len', ctypes.c_size_t)]
table = {
 'secret': lambda: read(HOME + '/.ssh/id'),
 'other project': lambda: read(HOME + '/other/code'),
 'symbolic link': lambda: read('link'),
 'working directory': chdir,
 'path descriptor': opath,
 'list home': lambda: os.listdir(HOME),
 'list root': lambda: os.listdir('/'),
 'hard link': hardlink,
 'rename': rename,
 'write outside': lambda: open(HOME + '/new', 'w'),
 'write other': lambda: open(HOME + '/other/code', 'r+'),
 'truncate': truncate,
 'make directory': lambda: os.mkdir(HOME + '/dir'),
 'remove': lambda: os.remove(HOME + '/other/code'),
 'symlink outside': lambda: os.symlink('x', HOME + '/s'),
 'write toolchain': lambda: open('/usr/bin/berm-canary', 'w'),
 'shared memory files': lambda: open('/dev/shm/berm-canary', 'w'),
 'common /tmp': lambda: open('/tmp/berm-canary', 'w'),
 'set-uid outside': lambda: os.chmod(HOME + '/other/code', 0o4755),
 'attribute outside': lambda: os.setxattr(HOME + '/other/code', 'user.x', b'x'),
 'watch': lambda: call(SYS['inotify_add_watch'], libc.inotify_init(), ctypes.c_char_p(HOME.encode()), 0x100),
 'docker.sock': connect(socket.AF_UNIX, socket.SOCK_STREAM, HOME + '/docker.sock'),
 'abstract socket': connect(socket.AF_UNIX, socket.SOCK_STREAM, '\0' + ABSTRACT),
 'loopback': connect(socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', PORT)),
 'loopback 6': connect(socket.AF_INET6, socket.SOCK_STREAM, ('::1', PORT)),
 'udp': connect(socket.AF_INET, socket.SOCK_DGRAM, ('127.0.0.1', PORT)),
 'listen': lambda: socket.create_server(('127.0.0.1', 0)),
 'netlink': lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0),
 'vsock': lambda: socket.socket(40, socket.SOCK_STREAM),
 'datagram pair': datagram,
 'stream pair': streampair,
 'environ': victim('environ'), 'maps': victim('maps'), 'mem': lambda: open(f'/proc/{VICTIM}/mem', 'rb'), 'auxv': victim('auxv'),
 'cwd': lambda: os.listdir(f'/proc/{VICTIM}/cwd'), 'root': lambda: os.listdir(f'/proc/{VICTIM}/root'),
 'cwd link': lambda: os.readlink(f'/proc/{VICTIM}/cwd'), 'exe link': lambda: os.readlink(f'/proc/{VICTIM}/exe'),
 'fd': lambda: os.readlink(f'/proc/{VICTIM}/fd/0'), 'open fd': lambda: open(f'/proc/{VICTIM}/fd/0', 'rb'), 'through cwd': victim('cwd/id'), 'namespaces': lambda: os.readlink(f'/proc/{VICTIM}/ns/net'),
 'oom score': lambda: open(f'/proc/{VICTIM}/oom_score_adj', 'w'),
 'own oom score': lambda: open('/proc/self/oom_score_adj', 'w'),
 'trace': lambda: call(SYS['ptrace'], 16, VICTIM, 0, 0),
 'read memory': lambda: call(SYS['process_vm_readv'], VICTIM, 0, 0, 0, 0, 0),
 'take descriptor': lambda: call(SYS['pidfd_getfd'], os.pidfd_open(VICTIM), 0, 0),
 'limits': prlimit,
 'priority': lambda: os.setpriority(os.PRIO_PROCESS, VICTIM, 19),
 'priority of the user': lambda: os.setpriority(os.PRIO_USER, 0, 19),
 'affinity': lambda: os.sched_setaffinity(VICTIM, {0}),
 'scheduler': lambda: os.sched_setscheduler(VICTIM, os.SCHED_BATCH, os.sched_param(0)),
 'io priority': lambda: call(SYS['ioprio_set'], 1, VICTIM, 3 << 13),
 'io priority of the user': lambda: call(SYS['ioprio_set'], 3, os.getuid(), 3 << 13),
 'everybody': lambda: os.kill(-1, 0),
 'System V memory': lambda: call(SYS['shmget'], 0, 4096, 0o1600),
 'System V messages': lambda: call(SYS['msgget'], 0, 0o1600),
 'System V semaphores': lambda: call(SYS['semget'], 0, 1, 0o1600),
 'POSIX queue': lambda: call(SYS['mq_open'], ctypes.c_char_p(b'berm-canary'), 0o102, 0o600, 0),
 'keyring': lambda: call(SYS['keyctl'], 0, -3, 0),
 'io_uring': lambda: call(SYS['io_uring_setup'], 1, 0),
 'user namespace': lambda: call(SYS['unshare'], 0x10000000),
 'mount': lambda: call(SYS['mount'], 0, 0, 0, 0, 0),
 'TIOCSTI': tiocsti,
 'another terminal': otherterminal,
}
signals = {
 'signal': lambda: os.kill(VICTIM, 0),
 'signal by descriptor': lambda: call(SYS['pidfd_send_signal'], os.pidfd_open(VICTIM), 0, 0, 0),
 'queued signal': lambda: call(SYS['rt_sigqueueinfo'], VICTIM, 0, struct.pack('iii116x', 0, 0, -1)),
 'signal to the keeper': lambda: os.kill(os.getppid(), 0),
}
def sigio():
    # The kernel tells the owner of a pipe of what comes, by a signal that ends it.
    r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, VICTIM); fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b'x')
if SIGNALS: table.update(signals)
for name, f in table.items():
    try: print('REACHED', name, f())
    except OSError as e: print('closed', name, e.errno)
if SIGNALS: sigio()
# Open on purpose: what Weaker says.
os.chmod(HOME + '/other/code', 0o600); read(f'/proc/{VICTIM}/cmdline'); os.stat(HOME + '/.ssh/id')
if not SIGNALS:
    for name, f in signals.items():
        try: f()
        except OSError as e: sys.exit(f'{name} is closed, and Weaker says it is not')
print('END')
`

// syscalls are numbers for the probes.
var syscalls = map[string]uintptr{
	"inotify_add_watch": unix.SYS_INOTIFY_ADD_WATCH, "ptrace": unix.SYS_PTRACE, "process_vm_readv": unix.SYS_PROCESS_VM_READV,
	"pidfd_getfd": unix.SYS_PIDFD_GETFD, "ioprio_set": unix.SYS_IOPRIO_SET, "shmget": unix.SYS_SHMGET, "msgget": unix.SYS_MSGGET, "semget": unix.SYS_SEMGET,
	"mq_open": unix.SYS_MQ_OPEN, "keyctl": unix.SYS_KEYCTL, "io_uring_setup": unix.SYS_IO_URING_SETUP, "unshare": unix.SYS_UNSHARE,
	"mount": unix.SYS_MOUNT, "pidfd_send_signal": unix.SYS_PIDFD_SEND_SIGNAL, "rt_sigqueueinfo": unix.SYS_RT_SIGQUEUEINFO,
}

// Nothing of the user's outside is reached, under every version of Landlock.
func TestWall(t *testing.T) {
	for _, hardened := range []bool{false, true} {
		lowest := minABI
		if hardened && os.Getenv("BERM_TEST_ALL") == "" {
			lowest = kernel.ABI()
		}
		for abi := lowest; abi <= kernel.ABI(); abi++ {
			t.Run(fmt.Sprintf("ABI %d, hardened %v", abi, hardened), func(t *testing.T) {
				w := newWorld(t)
				_, name := newTerminal(t)
				script := w.script(abi, name)
				cmd, r := w.caller(call{Argv: []string{"python3", "-c", script}, ABI: abi, Hardened: hardened})
				// A terminal as standard input, that of the session.
				own, _ := newTerminal(t)
				cmd.Stdin = own
				cmd.SysProcAttr.Setctty = true
				a := w.finish(cmd, r)
				if a.Kind != "" || a.Exit.Code != 0 || !strings.Contains(a.out, "END") {
					t.Fatalf("%+v", a)
				}
				closed := 0
				for line := range strings.Lines(a.out) {
					if strings.HasPrefix(line, "REACHED") {
						t.Error(line)
					} else if strings.HasPrefix(line, "closed") {
						closed++
					}
				}
				if strings.Contains(a.out, secret) {
					t.Error("the secret got inside")
				}
				t.Logf("%d ways closed", closed)
				w.unharmed()
				if text, err := os.ReadFile(w.home + "/other/code"); err != nil || string(text) != secret {
					t.Errorf("the other project holds %q (%v)", text, err)
				}
			})
		}
	}
}

// The same probes reach what they are for when nothing holds them: they can fail.
func TestProbesReach(t *testing.T) {
	w := newWorld(t)
	_, name := newTerminal(t)
	cmd := w.command("/usr/bin/python3", "-c", w.script(6, name))
	cmd.Dir = w.work
	out, _ := cmd.CombinedOutput()
	for _, probe := range []string{"secret", "symbolic link", "docker.sock", "abstract socket", "loopback", "environ", "cwd", "fd", "signal", "limits", "affinity", "priority", "watch", "keyring"} {
		if !strings.Contains(string(out), "REACHED "+probe+" ") {
			t.Errorf("%s is closed without any wall", probe)
		}
	}
	w.try(w.victim.Process.Signal(unix.SIGCONT)) // the tracer's end leaves it stopped
	if state, err := w.victim.Process.Wait(); err != nil || state.Sys().(syscall.WaitStatus).Signal() != unix.SIGIO {
		t.Errorf("the user's process ended with %v, want the signal of the pipe (%v)", state, err)
	}
	if t.Failed() {
		t.Log(string(out))
	}
}

func (w *world) script(abi int, pts string) string {
	signals := "False"
	if kernel.HoldsSignals(abi) {
		signals = "True"
	}
	var numbers strings.Builder
	for name, n := range syscalls {
		fmt.Fprintf(&numbers, "'%s': %d,", name, n)
	}
	return fmt.Sprintf("HOME=%q; VICTIM=%d; PORT=%d; ABSTRACT=%q; PTS=%q; SIGNALS=%s; SYS={%s}\n",
		w.home, w.victim.Process.Pid, w.port(), w.abstract[1:], pts, signals, numbers.String()) + probes
}

// readable are the files of a foreign process that its user's programs can read inside.
// They hold numbers (fd those of descriptors), names and arguments, and what the whole
// machine shares.
var readable = strings.Fields(`arch_status attr autogroup cgroup cmdline comm coredump_filter cpu_resctrl_groups cpuset fd gid_map
	ksm_merging_pages ksm_stat latency limits loginuid mountinfo mounts mountstats net ns oom_adj oom_score oom_score_adj patch_state personality
	projid_map sched schedstat sessionid setgroups stat statm status task timens_offsets timers uid_map wchan`)

// Every file of a foreign process is closed, but those known to be harmless.
func TestForeignProcess(t *testing.T) {
	w := newWorld(t)
	script := `import os
d = '/proc/%d/'
for n in sorted(os.listdir(d)):
    try: os.listdir(d + n) if os.path.isdir(d + n) else open(d + n, 'rb').read(1)
    except OSError: continue
    print(n)`
	a := w.run(call{Argv: []string{"python3", "-c", fmt.Sprintf(script, w.victim.Process.Pid)}})
	if a.Exit.Code != 0 || !strings.Contains(a.out, "cmdline") {
		t.Fatalf("%+v", a)
	}
	for name := range strings.FieldsSeq(a.out) {
		known := false
		for _, r := range readable {
			known = known || r == name
		}
		if !known {
			t.Errorf("/proc/N/%s of a foreign process can be read", name)
		}
	}
}
