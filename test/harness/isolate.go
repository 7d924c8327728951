package harness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// stage tells a process started by Isolate how far it is.
const stage = "BERM_TEST_STAGE"

// Isolate runs the rest of the calling program (a TestMain's, or a main's) in an
// outer wall of its own: fresh pid, mount, network, ipc and uts namespaces with
// only a loopback device, /proc/sys read-only, and a cgroup of its own in every
// hierarchy. What a snapshot sees there belongs to the test, nothing has a way to
// a network, and a probe that breaks out of Berm meets one more wall.
//
// It needs root. The calls that come back as "inside" return true; the outermost
// call does not return when it could isolate.
func Isolate() (inside bool, err error) {
	switch os.Getenv(stage) {
	case "":
		if os.Geteuid() != 0 {
			return false, errors.New("needs root: namespaces and cgroups around the test")
		}
		os.Exit(outer())
	case "init":
		os.Exit(initInside())
	}
	return true, nil
}

// again starts this program once more with the stage given.
func again(next string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), stage+"="+next)
	return cmd
}

func outer() int {
	groups, err := enterCgroups()
	if err != nil {
		fmt.Fprintln(os.Stderr, "isolate:", err)
		return 1
	}
	defer leaveCgroups(groups)
	cmd := again("init")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		Pdeathsig:  syscall.SIGKILL,
	}
	signal.Ignore(os.Interrupt)
	return exitCode(cmd.Run())
}

// initInside is process 1 of the pid namespace: it sets up and then reaps.
func initInside() int {
	if err := setUp(); err != nil {
		fmt.Fprintln(os.Stderr, "isolate:", err)
		return 1
	}
	cmd := again("test")
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(os.Stderr, "isolate:", err)
		return 1
	}
	// Orphans (monitors whose server died) come to us and must not stay zombies.
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil:
			return 1
		case pid == cmd.Process.Pid:
			if status.Exited() {
				return status.ExitStatus()
			}
			return 1
		}
	}
}

func setUp() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("private mounts: %w", err)
	}
	// A user namespace may mount a new /proc only when one is fully visible: the
	// first has a read-only /proc/sys over it, so a second one lies aside.
	if err := unix.Mount("proc", "/mnt", "proc", 0, ""); err != nil {
		return fmt.Errorf("proc aside: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("proc: %w", err)
	}
	if err := unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("/proc/sys: %w", err)
	}
	if err := unix.Mount("", "/proc/sys", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("/proc/sys read-only: %w", err)
	}
	// Memory files of other users of the machine come and go.
	if err := unix.Mount("tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, ""); err != nil {
		return fmt.Errorf("/dev/shm: %w", err)
	}
	return loopbackUp()
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	request, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	request.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request)
}

// enterCgroups makes a group below the caller's in each hierarchy that lets it
// and moves the caller there.
func enterCgroups() ([]string, error) {
	var made []string
	pid := strconv.Itoa(os.Getpid())
	for _, own := range Cgroups() {
		// A cpuset without CPUs takes no process, and named hierarchies are systemd's.
		if _, err := os.Stat(filepath.Join(own, "cpuset.mems")); err == nil && !unified(own) || strings.Contains(own, "systemd") {
			continue
		}
		group := filepath.Join(own, "berm-test-"+pid)
		if err := os.Mkdir(group, 0o755); err != nil {
			return made, err
		}
		made = append(made, group)
		if err := os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte(pid), 0); err != nil {
			return made, fmt.Errorf("enter %s: %w", group, err)
		}
	}
	return made, nil
}

func unified(group string) bool {
	_, err := os.Stat(filepath.Join(group, "cgroup.controllers"))
	return err == nil
}

// leaveCgroups moves the caller back and removes the groups, with all that a
// failed test left below them.
func leaveCgroups(groups []string) {
	pid := []byte(strconv.Itoa(os.Getpid()))
	for _, group := range groups {
		_ = os.WriteFile(filepath.Join(filepath.Dir(group), "cgroup.procs"), pid, 0)
		var below []string
		_ = filepath.WalkDir(group, func(path string, entry os.DirEntry, err error) error {
			if err == nil && entry.IsDir() {
				below = append(below, path)
			}
			return nil
		})
		for i := len(below) - 1; i >= 0; i-- {
			os.Remove(below[i])
		}
	}
}

func exitCode(err error) int {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitCode()
	default:
		fmt.Fprintln(os.Stderr, "isolate:", err)
		return 1
	}
}
