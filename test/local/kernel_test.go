package local

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// within starts berm from a shell script that first makes another environment: "$@" is
// berm then. As root it has mounts of its own.
func (p *person) within(script string) *person {
	other := *p
	outer := []string{"sh", "-ec", script, "sh"}
	if os.Geteuid() == 0 {
		outer = append([]string{"unshare", "--mount", "--propagation", "private"}, outer...)
	}
	other.outer = append(slices.Clone(p.outer), outer...)
	return &other
}

// asUser is a command that becomes the person, for scripts that begin as root.
func (p *person) asUser() string {
	return fmt.Sprintf("setpriv --reuid=%d --regid=%[1]d --clear-groups ", p.uid)
}

// byRoot is the person as whom a script of root's begins that ends with asUser.
func (p *person) byRoot() *person {
	other := *p
	other.uid = 0
	return &other
}

// works fails the test unless the sandbox is a whole one.
func (p *person) works() {
	p.Helper()
	p.sh("cat file; echo two > file; cat file").prints("one\ntwo")
	if got := p.read("project/file"); got != "one\n" {
		p.Errorf("the project changed: %q", got)
	}
	r := p.berm("run", "-q", "--json", "--", "true").exits(0)
	r.says(`"level":"namespace"`)
	p.berm("discard", "--all").exits(0)
}

// weaker fails the test unless berm refuses, for a reason, what can be had only in part,
// and does the part when asked to.
func (p *person) weaker(reasons ...string) {
	p.Helper()
	p.sh("echo ran > ran").refuses(append(reasons, "--allow-weaker")...)
	p.sh("echo ran > ran", "--rw", ".").refuses(append(reasons, "--allow-weaker")...)
	p.sh("echo ran > ran", "--allow-weaker").refuses(append(reasons, "--rw .")...)
	if _, err := os.Stat(p.path("project/ran")); err == nil {
		p.Error("the command ran")
	}
	r := p.sh("cat file; echo ran > ran; exit 5", "--allow-weaker", "--rw", ".").exits(5)
	r.says(append(reasons, "weaker")...)
	if r.stdout != "one\n" || p.read("project/ran") != "ran\n" {
		p.Errorf("%v", r)
	}
	// Home and the network are closed at this level too.
	p.write("secret", "secret")
	if r := p.sh("cat "+p.path("secret"), "--allow-weaker", "--ro", "."); r.code == 0 || r.stdout != "" {
		p.Errorf("%v", r)
	}
	r = p.sh("exit 7", "--allow-weaker", "--ro", ".", "--json").exits(7)
	r.says(`"level":"landlock"`, `"weaker":[`, `"exitCode":7`)
	p.must(os.Remove(p.path("project/ran")))
	p.mkdir("project/part")
	p.sh("true", "--allow-weaker", "--rw", ".", "--ro", "part").refuses("part", "read-only")
	p.must(os.Remove(p.path("project/part")))
}

func TestUserNamespace(t *testing.T) {
	each(t, func(p *person) {
		p.outer = []string{"unshare", "--user", "--map-root-user"}
		p.works()
		p.outer = append(p.outer, "--mount", "--pid", "--fork", "--mount-proc")
		p.works()
	})
}

// A container engine's filter forbids user namespaces.
func TestNamespacesForbidden(t *testing.T) {
	p := user(t)
	p.outer = forbidding(namespaces)
	p.weaker("may not make user namespaces")
	p.outer = forbidding(strconv.Itoa(unix.SYS_CLONE), strconv.Itoa(unix.SYS_CLONE3))
	if r := p.sh("true"); r.code == 0 { // not even processes
		t.Errorf("%v", r)
	}
}

// AppArmor lets a user namespace be made and gives no rights in it.
func TestNamespaceWithoutRights(t *testing.T) {
	p := user(t)
	for _, calls := range [][]int{
		{unix.SYS_MOUNT, unix.SYS_FSOPEN, unix.SYS_OPEN_TREE, unix.SYS_MOUNT_SETATTR, unix.SYS_MOVE_MOUNT},
		{unix.SYS_MOUNT}, {unix.SYS_OPEN_TREE}, {unix.SYS_MOUNT_SETATTR}, {unix.SYS_PIVOT_ROOT}, {unix.SYS_SETHOSTNAME},
	} {
		var numbers []string
		for _, c := range calls {
			numbers = append(numbers, strconv.Itoa(c))
		}
		p.outer = forbidding(numbers...)
		if len(calls) > 1 {
			p.weaker("give no rights", "AppArmor")
		} else {
			p.sh("true").refuses("--allow-weaker")
		}
	}
}

// The administrator forbids namespaces, here in a user namespace of the test's own.
func TestNamespacesLimited(t *testing.T) {
	p := user(t)
	for _, kind := range []string{"user", "net", "mnt", "pid"} {
		p.outer = []string{"unshare", "--user", "--map-root-user", "sh", "-ec", "echo 0 >/proc/sys/user/max_" + kind + "_namespaces; exec \"$@\"", "sh"}
		if all { // where /proc/sys is read-only
			p.outer = []string{"unshare", "--user", "--map-root-user", "--pid", "--mount", "--fork", "sh", "-ec", "mount -t proc proc /proc; echo 0 >/proc/sys/user/max_" + kind + "_namespaces; exec \"$@\"", "sh"}
		}
		if kind == "user" {
			p.weaker("no more namespaces", "max_")
		} else {
			p.sh("true").refuses("no more namespaces", "max_")
		}
	}
}

// Root in a container has lost its rights.
func TestRootWithoutCapabilities(t *testing.T) {
	p := root(t)
	p.outer = []string{"setpriv", "--bounding-set", "-all", "--inh-caps", "-all", "--no-new-privs"}
	p.weaker("CAP_SETFCAP")
	// With that one alone it is as good as an ordinary user.
	p.outer = []string{"setpriv", "--bounding-set", "-all,+setfcap", "--inh-caps", "-all", "--no-new-privs"}
	p.works()
}

// Container engines cover parts of /proc.
func TestCoveredProc(t *testing.T) {
	root(t)
	each(t, func(p *person) {
		script := "mount -t proc proc /proc; mount --bind /dev/null /proc/keys; umount /mnt 2>/dev/null || true; exec " + p.asUser() + `"$@"`
		other := p.byRoot()
		other.outer = []string{"unshare", "--mount", "--pid", "--fork", "--propagation", "private", "sh", "-ec", script, "sh"}
		other.weaker("/proc", "covered")
	})
}

// No user namespaces and no Landlock: nothing is left to hold a command.
func TestNothingToHold(t *testing.T) {
	p := user(t)
	p.outer = forbidding(namespaces, strconv.Itoa(unix.SYS_LANDLOCK_CREATE_RULESET))
	r := p.sh("echo ran > ran", "--allow-weaker", "--rw", ".").exits(125).says("Landlock")
	if _, err := os.Stat(p.path("project/ran")); err == nil {
		t.Errorf("ran: %v", r)
	}
	p.outer = forbidding(namespaces, strconv.Itoa(unix.SYS_SECCOMP))
	p.sh("echo ran > ran", "--allow-weaker", "--rw", ".").exits(125)
	p.outer = forbidding(strconv.Itoa(unix.SYS_SECCOMP))
	p.sh("echo ran > ran", "--rw", ".").exits(125).says("berm: ")
	if _, err := os.Stat(p.path("project/ran")); err == nil {
		t.Error("ran")
	}
}

// A missing system call of any kind leads to a whole sandbox or to none.
func TestEachCallForbidden(t *testing.T) {
	slow(t)
	p := user(t)
	for name, number := range map[string]int{
		"prctl": unix.SYS_PRCTL, "capset": unix.SYS_CAPSET, "memfd_create": unix.SYS_MEMFD_CREATE, "close_range": unix.SYS_CLOSE_RANGE,
		"setrlimit": unix.SYS_PRLIMIT64, "landlock_restrict_self": unix.SYS_LANDLOCK_RESTRICT_SELF, "landlock_create_ruleset": unix.SYS_LANDLOCK_CREATE_RULESET,
		"landlock_add_rule": unix.SYS_LANDLOCK_ADD_RULE, "openat2": unix.SYS_OPENAT2, "umount2": unix.SYS_UMOUNT2, "socketpair": unix.SYS_SOCKETPAIR,
		"sethostname": unix.SYS_SETHOSTNAME, "pidfd_send_signal": unix.SYS_PIDFD_SEND_SIGNAL, "socket": unix.SYS_SOCKET, "ioctl": unix.SYS_IOCTL,
		"flock": unix.SYS_FLOCK, "fsetxattr": unix.SYS_FSETXATTR, "mkdirat": unix.SYS_MKDIRAT, "renameat": unix.SYS_RENAMEAT, "symlinkat": unix.SYS_SYMLINKAT, "symlink": unix.SYS_SYMLINK,
		"fchmodat": unix.SYS_FCHMODAT, "fstatfs": unix.SYS_FSTATFS, "statfs": unix.SYS_STATFS, "setsid": unix.SYS_SETSID,
	} {
		p.outer = forbidding(strconv.Itoa(number))
		r := p.sh("grep -c . /proc/self/uid_map; grep -E 'CapBnd|Seccomp:|NoNewPrivs' /proc/self/status; cat "+p.path("secret")+" 2>&1; ls /root 2>&1; exit 0", "--rw", ".")
		whole := r.code == 0 && strings.Contains(r.stdout, "CapBnd:\t0000000000000000") && strings.Contains(r.stdout, "NoNewPrivs:\t1") && strings.Contains(r.stdout, "Seccomp:\t2")
		if !whole && (r.code != 125 || r.stdout != "") {
			t.Errorf("without %s: %v", name, r)
		}
		t.Logf("%-24s %d %s", name, r.code, strings.TrimSpace(r.stderr))
	}
}

// Ordinary users map their own id, root an id that is nobody's.
func TestIdentity(t *testing.T) {
	each(t, func(p *person) {
		r := p.sh("id -u; stat -c %u file; touch new; stat -c %u new; cat /proc/self/uid_map").exits(0)
		fields := strings.Fields(r.stdout)
		if id := strconv.Itoa(p.uid); len(fields) < 6 || fields[0] != id || fields[1] != id || fields[2] != id || p.uid == 0 && fields[4] == "0" {
			p.Errorf("%v", r)
		}
	})
}

// A program of the distribution is there for all of these tests.
func TestTools(t *testing.T) {
	for _, name := range []string{"unshare", "setpriv", "perl", "python3", "bash"} {
		if _, err := exec.LookPath(name); err != nil {
			t.Error(err)
		}
	}
}
