package feature

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/kernel/mount"
)

// nobody is the user that root becomes to try what an ordinary user may do.
const nobody = 65534

// UserNamespaces are namespaces in which this user has root's rights.
var UserNamespaces = &Test{
	Name: "user namespaces", MinVersion: "3.8",
	Fix: "build the kernel with CONFIG_USER_NS",
	try: func(ctx context.Context) (string, error) { return inNamespaces(ctx, "rights") },
}

// UnprivilegedUserNamespaces are the same for ordinary users, which the rootless
// driver needs. Root tries as nobody.
var UnprivilegedUserNamespaces = &Test{
	Name: "unprivileged user namespaces", MinVersion: "3.8",
	Fix: "allow ordinary users to make user namespaces",
	try: func(ctx context.Context) (string, error) {
		if os.Geteuid() != 0 {
			return inNamespaces(ctx, "rights")
		}
		attr := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		return child(ctx, attr, "again", "rights")
	},
}

// AllNamespaces are the seven kinds that one sandbox gets.
var AllNamespaces = &Test{
	Name: "all kinds of namespaces", MinVersion: "4.6",
	Fix: "build the kernel with CONFIG_NAMESPACES and all kinds below it",
	try: func(ctx context.Context) (string, error) {
		attr := namespaces()
		attr.Cloneflags |= unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP
		_, err := child(ctx, attr, "proc")
		return "pid, mount, net, ipc, uts, cgroup", refused(err)
	},
}

// MountAPI is making mounts by descriptor.
var MountAPI = &Test{
	Name: "mounts by descriptor", MinVersion: "5.12",
	Fix: "use a newer kernel",
	try: func(ctx context.Context) (string, error) { return inNamespaces(ctx, "mounts") },
}

// Overlay is overlayfs in a user namespace, with the attributes of unprivileged
// overlays.
var Overlay = &Test{
	Name: "overlayfs in a user namespace", MinVersion: "5.11",
	Fix: "load or build in the kernel's overlay module: modprobe overlay",
	try: func(ctx context.Context) (string, error) { return inNamespaces(ctx, "overlay", os.TempDir()) },
}

// TmpfsAttributes are user attributes on tmpfs, without which it cannot be the upper
// layer of an unprivileged overlay.
var TmpfsAttributes = &Test{
	Name: "user attributes on tmpfs", MinVersion: "6.6",
	Fix: "use a newer kernel, with CONFIG_TMPFS_XATTR",
	try: func(ctx context.Context) (string, error) { return inNamespaces(ctx, "attributes") },
}

// IDMappedMounts tells whether mounts of a directory's file system can map owners. It
// needs root.
func IDMappedMounts(dir string) *Test {
	return &Test{
		Name: "id-mapped mounts", MinVersion: "5.12",
		Fix: "keep the data on ext4, xfs, btrfs or tmpfs",
		try: func(ctx context.Context) (string, error) {
			if os.Geteuid() != 0 {
				return "", berm.Errorf(berm.Denied, "only root can map the owners of a host's files").
					WithHint("run as root; without root the owners are shifted on disk instead")
			}
			cmd := exec.CommandContext(ctx, "/proc/self/exe")
			cmd.Args = []string{childName, "wait"}
			gate, err := cmd.StdinPipe()
			if err != nil {
				return "", failed(err, "make a pipe")
			}
			cmd.SysProcAttr = namespaces()
			if err := cmd.Start(); err != nil {
				return "", refused(failed(err, "make a user namespace"))
			}
			defer func() {
				gate.Close()
				_ = cmd.Wait() // it only waited for the gate
			}()
			userns, err := unix.Open(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return "", failed(err, "open a user namespace")
			}
			defer unix.Close(userns)
			fd, err := mount.Clone(unix.AT_FDCWD, dir, false)
			if err != nil {
				return "", err
			}
			defer unix.Close(fd)
			if err := mount.IDMap(fd, userns); err != nil {
				return "", err
			}
			return fileSystem(dir), nil
		},
	}
}

// namespaces are those that mounts are tried in, with this user as root.
func namespaces() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
	}
}

func inNamespaces(ctx context.Context, role string, args ...string) (string, error) {
	detail, err := child(ctx, namespaces(), role, args...)
	return detail, refused(err)
}

// refused explains why a user namespace cannot be had, where the host says so.
func refused(err error) error {
	if err == nil {
		return nil
	}
	setting := func(path string) string {
		b, _ := os.ReadFile(path)
		return strings.TrimSpace(string(b))
	}
	hint := ""
	switch {
	case setting("/proc/sys/user/max_user_namespaces") == "0":
		hint = "set the sysctl user.max_user_namespaces to 10000 or more"
	case setting("/proc/sys/kernel/unprivileged_userns_clone") == "0" && os.Geteuid() != 0: // Debian's and Ubuntu's
		hint = "set the sysctl kernel.unprivileged_userns_clone to 1"
	case setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1" && os.Geteuid() != 0: // Ubuntu's since 23.10
		// The namespace can be made, but a process without a profile has no rights in it.
		hint = "install the AppArmor profile packaging/apparmor/berm, or set the sysctl kernel.apparmor_restrict_unprivileged_userns to 0"
	default:
		return err
	}
	return berm.Errorf(berm.Denied, "%w", err).WithHint("%s", hint)
}

// tryAgain makes namespaces as the ordinary user that the child has become.
func tryAgain(args []string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), tryLimit)
	defer cancel()
	return inNamespaces(ctx, args[0])
}

// tryRights needs CAP_SYS_ADMIN in the namespace.
func tryRights([]string) (string, error) {
	fd, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return "", failed(err, "use root's rights in a user namespace")
	}
	unix.Close(fd)
	return "", nil
}

// tryProc needs a pid namespace and, for a new proc, one that is not masked.
func tryProc([]string) (string, error) {
	if os.Getpid() != 1 {
		return "", berm.Errorf(berm.Internal, "process %d is the first of a pid namespace", os.Getpid())
	}
	fd, err := mount.New("proc", "proc", mount.NoSuid|mount.NoDev|mount.NoExec)
	if err != nil {
		var e *berm.Error
		if errors.As(err, &e) && e.Kind == berm.Denied {
			e.Hint = "the proc file system of this host or container is covered in parts; a container needs an unmasked /proc"
		}
		return "", err
	}
	unix.Close(fd)
	return "", nil
}

func tryWait([]string) (string, error) {
	_, _ = os.Stdin.Read(make([]byte, 1))
	return "", nil
}

func tryMounts([]string) (string, error) {
	fd, err := mount.New("tmpfs", "tmpfs", mount.NoDev)
	if err != nil {
		return "", err
	}
	if err := mount.SetAttr(fd, mount.ReadOnly, 0, true); err != nil {
		return "", err
	}
	if err := mount.Private("/"); err != nil {
		return "", err
	}
	if err := mount.Attach(fd, unix.AT_FDCWD, os.TempDir()); err != nil {
		return "", err
	}
	_, err = mount.Clone(fd, "", true)
	return "", err
}

func tryOverlay(args []string) (string, error) {
	// The layers lie on a tmpfs that covers a directory, seen by this process alone.
	dir := args[0]
	fd, err := mount.New("tmpfs", "tmpfs", 0)
	if err != nil {
		return "", err
	}
	if err := mount.Private("/"); err != nil {
		return "", err
	}
	if err := mount.Attach(fd, unix.AT_FDCWD, dir); err != nil {
		return "", err
	}
	if err := os.Chdir(dir); err != nil {
		return "", failed(err, "enter a layer's directory")
	}
	for _, layer := range []string{"lower1", "lower2"} {
		if err := os.Mkdir(layer, 0o755); err != nil {
			return "", failed(err, "make a layer")
		}
	}
	if _, err := mount.New("overlay", "overlay", 0, mount.Value("lowerdir", "lower1:lower2"), mount.Flag("userxattr")); err != nil {
		return "", err
	}
	return "", nil
}

func tryAttributes([]string) (string, error) {
	fd, err := mount.New("tmpfs", "tmpfs", 0)
	if err != nil {
		return "", err
	}
	if err := unix.Setxattr(fmt.Sprintf("/proc/self/fd/%d/.", fd), "user.overlay.opaque", []byte("y"), 0); err != nil {
		return "", failed(err, "set a user attribute on tmpfs")
	}
	return "", nil
}
