package landlock

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Rules cannot be taken off, so the test binary starts itself again under them and runs
// a shell script.
const roleVariable = "BERM_LANDLOCK_TEST_SCRIPT"

// confineVariable names the only directory to be written; without it there is no
// confinement.
const confineVariable = "BERM_LANDLOCK_TEST_DIRECTORY"

// readOnlyVariable names the only directory that a service may read.
const readOnlyVariable = "BERM_LANDLOCK_TEST_SERVICE"

var devices = []string{"/dev/pts", "/dev/ptmx", "/dev/tty", "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"}

func TestMain(m *testing.M) {
	if dir := os.Getenv(readOnlyVariable); dir != "" {
		os.Exit(readOnly(dir))
	}
	script := os.Getenv(roleVariable)
	if script == "" {
		os.Exit(m.Run())
	}
	runtime.LockOSThread()
	begin := time.Now()
	var err error
	if dir := os.Getenv(confineVariable); dir != "" {
		err = confine(dir)
	} else {
		err = For(ABI()).Restrict(devices...)
	}
	if err == nil {
		fmt.Printf("took %v\n", time.Since(begin))
		err = unix.Exec("/bin/sh", []string{"sh", "-ec", script}, os.Environ())
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(99)
}

func TestRules(t *testing.T) {
	const nodes = unix.LANDLOCK_ACCESS_FS_MAKE_CHAR | unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK | unix.LANDLOCK_ACCESS_FS_REFER
	const scopes = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL
	for abi, want := range map[int]Rules{
		0: {0, 0, 0}, 1: {1, 0, 0}, 2: {2, nodes, 0}, 4: {4, nodes, 0}, 5: {5, nodes | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV, 0},
		7: {7, nodes | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV, 0}, 8: {8, nodes | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV, scopes},
	} {
		got := For(abi)
		if got != want {
			t.Errorf("ABI %d: %+v, want %+v", abi, got, want)
		}
		text := got.String()
		if off := strings.HasPrefix(text, "off"); off != (abi < 2) || strings.Contains(text, "ioctl") != (abi >= 5) || strings.Contains(text, "signals") != (abi >= 8) {
			t.Errorf("ABI %d: %s", abi, text)
		}
	}
}

// restricted runs a script under the rules, in a mount namespace of its own so that a
// mount that should have been stopped does no harm.
func restricted(script string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleVariable+"="+script)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Setsid: true}
	return cmd
}

func need(t *testing.T, abi int, kernel string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: an ordinary user can make no device nodes anyway")
	}
	if ABI() < abi {
		t.Skipf("Landlock ABI %d: what is tested came with %d (kernel %s)", ABI(), abi, kernel)
	}
}

func TestRestrict(t *testing.T) {
	need(t, abiRefer, "5.19")
	for name, script := range map[string]string{
		"no devices":       `d=$(mktemp -d); mkfifo $d/p; touch $d/f; if mknod $d/c c 1 3 || mknod $d/b b 7 0; then exit 1; fi; rm -r $d`,
		"files move":       `d=$(mktemp -d); mkdir $d/a $d/b; touch $d/a/f; mv $d/a/f $d/b/g; ln $d/b/g $d/a/h; mv $d/b $d/a/b; test -f $d/a/b/g; rm -r $d`,
		"no mounts":        `if mount -t tmpfs none /mnt || umount -l /dev/pts; then exit 1; fi`,
		"no outer tracing": `if cat /proc/1/environ >/dev/null; then exit 1; fi; cat /proc/self/environ >/dev/null`,
		"own tracing":      `sleep 9 & cat /proc/$!/environ >/dev/null; kill $!`,
		"terminals":        `script -qec 'stty -a && tty' /dev/null >/dev/null; python3 -c 'import pty; assert pty.spawn(["true"]) == 0'`,
	} {
		t.Run(name, func(t *testing.T) {
			out, err := restricted(script).CombinedOutput()
			if err != nil {
				t.Errorf("%v: %s", err, out)
			}
			t.Log(strings.SplitN(string(out), "\n", 2)[0])
		})
	}
}

// Control of a device that is not listed is refused from ABI 5 on.
func TestDeviceControl(t *testing.T) {
	need(t, abiIoctlDev, "6.10")
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		t.Skip("the host has no loop devices to ask for a free one")
	}
	script := fmt.Sprintf("python3 -c 'import fcntl,os; fcntl.ioctl(os.open(\"/dev/loop-control\", os.O_RDWR), %d)'", unix.LOOP_CTL_GET_FREE)
	if out, err := exec.Command("sh", "-c", script).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if out, err := restricted("if " + script + "; then exit 1; fi").CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func confine(dir string) error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	var grants []Grant
	for path, rights := range map[string]uint64{"/usr": Read, "/bin": Read, "/lib": Read, "/lib64": Read, "/dev/null": Device, dir: Write} {
		fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.ENOENT) {
			continue
		} else if err != nil {
			return err
		}
		grants = append(grants, Grant{fd, rights})
	}
	memory, err := unix.MemfdCreate("stream", 0) // has no path to hold
	if err != nil {
		return err
	}
	return Confine(ABI(), append(grants, Grant{memory, Read}))
}

func TestConfine(t *testing.T) {
	if err := Confine(1, nil); !errors.Is(err, unix.EOPNOTSUPP) {
		t.Errorf("ABI 1: %v", err)
	}
	if ABI() < abiRefer {
		t.Skipf("Landlock ABI %d: nothing can be confined before 2 (kernel 5.19)", ABI())
	}
	dir, outside := t.TempDir(), t.TempDir()
	if err := os.WriteFile(outside+"/f", []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, script := range map[string]string{
		"granted": `cd "$D"; mkdir a b; echo 1 >a/f; mv a/f b/g; ln b/g a/h; rm b/g; echo >/dev/null`,
		"read":    `if cat "$O/f" || ls "$O"; then exit 1; fi`,
		"write":   `if echo >"$O/new" || rm "$O/f" || mkdir "$O/d"; then exit 1; fi`,
		"link":    `if ln "$O/f" "$D/stolen" || mv "$O/f" "$D/stolen"; then exit 1; fi`,
		"signal":  `if kill -0 $PPID; then exit 1; fi`,
	} {
		if name == "signal" && !HoldsSignals(ABI()) {
			continue
		}
		cmd := restricted(script)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		cmd.Env = append(cmd.Env, confineVariable+"="+dir, "D="+dir, "O="+outside)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", name, err, out)
		}
	}
}

func TestRestrictNeedsRights(t *testing.T) {
	if ABI() < abiRefer {
		t.Skipf("Landlock ABI %d: nothing is restricted before 2 (kernel 5.19)", ABI())
	}
	if os.Geteuid() == 0 {
		t.Skip("root has CAP_SYS_ADMIN")
	}
	if err := For(ABI()).Restrict(); !errors.Is(err, unix.EPERM) {
		t.Errorf("%v, want EPERM", err)
	}
}
