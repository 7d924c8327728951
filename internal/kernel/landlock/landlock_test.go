package landlock

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestPlans(t *testing.T) {
	for abi, want := range []struct {
		handled, scoped uint64
		tsync           bool
	}{
		0: {}, 1: {},
		2: {handled: unix.LANDLOCK_ACCESS_FS_MAKE_CHAR | unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK | unix.LANDLOCK_ACCESS_FS_REFER},
		5: {handled: unix.LANDLOCK_ACCESS_FS_MAKE_CHAR | unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK | unix.LANDLOCK_ACCESS_FS_REFER | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV},
		8: {unix.LANDLOCK_ACCESS_FS_MAKE_CHAR | unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK | unix.LANDLOCK_ACCESS_FS_REFER | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV,
			unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL, true},
	} {
		if abi > 0 && abi != 1 && want.handled == 0 {
			continue
		}
		p := planFor(abi)
		if p.handled != want.handled || p.scoped != want.scoped || p.tsync != want.tsync {
			t.Errorf("ABI %d: %+v", abi, p)
		}
		if p.describe == "" {
			t.Errorf("ABI %d has no description", abi)
		}
	}
}

// applier builds the helper without cgo: with it, and so with the race detector, Go
// refuses to change every thread.
func applier(t testing.TB) string {
	t.Helper()
	if ABI() < abiRefer {
		t.Skipf("Landlock ABI %d: the kernel has none that is used (5.19)", ABI())
	}
	program := filepath.Join(t.TempDir(), "apply")
	build := exec.Command("go", "build", "-o", program, "./testdata/apply")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return program
}

func TestApply(t *testing.T) {
	program := applier(t)
	if os.Geteuid() != 0 {
		t.Skip("needs root: an ordinary user can make no device nodes anyway")
	}
	for name, script := range map[string]string{
		"no devices":       `d=$(mktemp -d) && mkfifo $d/p && touch $d/f && ! mknod $d/c c 1 3 2>/dev/null && ! mknod $d/b b 7 0 2>/dev/null; s=$?; rm -r $d; exit $s`,
		"files move":       `d=$(mktemp -d) && mkdir $d/a $d/b && touch $d/a/f && mv $d/a/f $d/b/g && ln $d/b/g $d/a/h && mv $d/b $d/a/b && test -f $d/a/b/g && rm -r $d`,
		"no mounts":        `! mount -t tmpfs none /mnt 2>/dev/null && ! umount / 2>/dev/null`,
		"no outer tracing": `! cat /proc/1/environ >/dev/null 2>&1 && cat /proc/self/environ >/dev/null`,
		"terminals":        `script -qec 'stty -a && tty' /dev/null >/dev/null && python3 -c 'import pty; assert pty.spawn(["true"]) == 0'`,
		"own tracing":      `sleep 9 & cat /proc/$!/environ >/dev/null; s=$?; kill $!; exit $s`,
	} {
		t.Run(name, func(t *testing.T) {
			out, err := unshared(program, script).CombinedOutput()
			if err != nil {
				t.Errorf("%v: %s", err, out)
			}
			t.Log(strings.SplitN(string(out), "\n", 2)[0])
		})
	}
}

// unshared runs the helper in a mount namespace of its own, so that a mount that
// Landlock should have stopped does no harm.
func unshared(program, script string) *exec.Cmd {
	cmd := exec.Command(program, "/", script)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Setsid: true}
	return cmd
}

// Control of a device that is not among the harmless ones is refused from ABI 5 on.
func TestApplyDeviceControl(t *testing.T) {
	program := applier(t)
	if ABI() < abiIoctlDev {
		t.Skipf("Landlock ABI %d: control of devices came with 5 (kernel 6.10)", ABI())
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: opens a device")
	}
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		t.Skip("the host has no loop devices to ask for a free one")
	}
	script := fmt.Sprintf("python3 -c 'import fcntl,os; fcntl.ioctl(os.open(\"/dev/loop-control\", os.O_RDWR), %d)'", unix.LOOP_CTL_GET_FREE)
	if out, err := exec.Command("sh", "-c", script).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	out, err := unshared(program, "! "+script+" 2>/dev/null").CombinedOutput()
	if err != nil {
		t.Errorf("%v: %s", err, out)
	}
}
