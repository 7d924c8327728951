package feature

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/kernel/capability"
	"github.com/berm-sandbox/berm/internal/kernel/landlock"
	"github.com/berm-sandbox/berm/internal/kernel/notify"
	"github.com/berm-sandbox/berm/internal/kernel/seccomp"
)

// Seccomp is system call filters that hold for every thread.
var Seccomp = &Test{
	Name: "seccomp filters", MinVersion: "3.17",
	Fix: "build the kernel with CONFIG_SECCOMP_FILTER",
	try: func(ctx context.Context) (string, error) { return child(ctx, nil, "seccomp") },
}

// Landlock is the second wall for files. Version 1 cannot be used: it forbids every
// move of a file between directories.
var Landlock = &Test{
	Name: "Landlock", MinVersion: "5.19",
	Fix: "build the kernel with CONFIG_SECURITY_LANDLOCK and boot with landlock in the list lsm=",
	try: func(context.Context) (string, error) {
		if abi := landlock.ABI(); abi >= 2 {
			return fmt.Sprintf("ABI %d", abi), nil
		} else if abi == 1 {
			return "", berm.Errorf(berm.Unsupported, "ABI 1 forbids moving files between directories")
		}
		return "", berm.Errorf(berm.Unsupported, "the kernel has no Landlock, or it is off")
	},
}

// Pidfd is holding processes by descriptor.
var Pidfd = &Test{
	Name: "process descriptors", MinVersion: "5.4",
	Fix: "use a newer kernel",
	try: func(context.Context) (string, error) {
		fd, err := unix.PidfdOpen(os.Getpid(), 0)
		if err != nil {
			return "", failed(err, "open the own process")
		}
		defer unix.Close(fd)
		if err := unix.PidfdSendSignal(fd, 0, nil, 0); err != nil {
			return "", failed(err, "signal by descriptor")
		}
		// Waiting for oneself fails with ECHILD once the kernel knows P_PIDFD.
		if err := unix.Waitid(unix.P_PIDFD, fd, nil, unix.WEXITED|unix.WNOHANG, nil); err != unix.ECHILD {
			return "", failed(err, "wait by descriptor")
		}
		return "", nil
	},
}

// MemfdExec is running a program from memory, as the guest agent is.
var MemfdExec = &Test{
	Name: "programs in memory files", MinVersion: "3.17",
	Fix: "set the sysctl vm.memfd_noexec to 0 or 1",
	try: func(ctx context.Context) (string, error) {
		fd, err := unix.MemfdCreate("berm-feature", unix.MFD_ALLOW_SEALING|unix.MFD_EXEC)
		if errors.Is(err, unix.EINVAL) { // before 6.3 every one was executable
			fd, err = unix.MemfdCreate("berm-feature", unix.MFD_ALLOW_SEALING)
		}
		if err != nil {
			return "", failed(err, "make an executable memory file")
		}
		file := os.NewFile(uintptr(fd), "memfd")
		defer file.Close()
		// A script whose interpreter is this program, as a child.
		if _, err := file.WriteString("#!/bin/true\n"); err != nil {
			return "", failed(err, "write a memory file")
		}
		seals := unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
			return "", failed(err, "seal a memory file")
		}
		cmd := exec.CommandContext(ctx, fmt.Sprintf("/proc/self/fd/%d", fd))
		cmd.ExtraFiles = []*os.File{file}
		if err := cmd.Run(); err != nil {
			return "", failed(err, "run a program from a memory file")
		}
		return "", nil
	},
}

// RaiseLimits is the right to raise rlimits and to pass by quotas of the system.
var RaiseLimits = &Test{
	Name: "CAP_SYS_RESOURCE",
	Fix:  "run with CAP_SYS_RESOURCE; without it limits of files and processes cannot be raised above this process's own",
	try: func(context.Context) (string, error) {
		have, err := capability.Permitted()
		if err != nil {
			return "", failed(err, "read capabilities")
		}
		var files unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
			return "", failed(err, "read limits")
		}
		if !have.Has(unix.CAP_SYS_RESOURCE) {
			return "", berm.Errorf(berm.Denied, "missing; the hard limit of open files is %d", files.Max)
		}
		return "", nil
	},
}

// ExecListener is hearing of what other processes execute without rights of root's.
var ExecListener = &Test{
	Name: "listeners for executions", MinVersion: notify.MinVersion,
	Fix: "use a newer kernel; without them, and without BPF, what runs inside is not recorded",
	try: func(context.Context) (string, error) {
		if err := notify.Check(); err != nil {
			return "", err
		}
		detail := "processes inside can be recorded without BPF"
		if !notify.TellsExits() {
			detail += ", without exit codes (Linux 6.15)"
		}
		return detail, nil
	},
}

// SecurityModules tells which are active.
var SecurityModules = &Test{
	Name: "security modules",
	Fix:  "mount securityfs on /sys/kernel/security",
	try: func(context.Context) (string, error) {
		list, err := os.ReadFile("/sys/kernel/security/lsm")
		if err != nil {
			return "", failed(err, "read the list")
		}
		return strings.ReplaceAll(strings.TrimSpace(string(list)), ",", " "), nil
	},
}

func trySeccomp([]string) (string, error) {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return "", failed(err, "set no_new_privs")
	}
	profile, err := seccomp.Lookup(seccomp.Default)
	if err != nil {
		return "", err
	}
	filter, err := profile.Assemble("")
	if err != nil {
		return "", err
	}
	if err := seccomp.Load(filter); err != nil {
		return "", err
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_IO_URING_SETUP, 0, 0, 0); errno != unix.ENOSYS {
		return "", berm.Errorf(berm.Internal, "the filter does not hold: io_uring answers %v", errno)
	}
	return "", nil
}
