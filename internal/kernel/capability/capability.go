// Package capability cuts the rights of a process down to a set of capabilities.
//
// It is linked into the first process of every sandbox, so it imports raw system calls
// only; its errors are those of the kernel.
package capability

import (
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A Set is a set of capabilities, one bit each.
type Set uint64

// Of makes a set of capability numbers (unix.CAP_…).
func Of(numbers ...int) Set {
	var s Set
	for _, n := range numbers {
		s |= 1 << n
	}
	return s
}

// Inside is what root of a sandbox keeps: what a package manager needs to install
// files of several owners, run its scripts as other users and start services on
// low ports. It counts against the sandbox's own user namespace only.
//
// Absent on purpose: SYS_ADMIN (mounts), SYS_CHROOT, SYS_PTRACE, MKNOD, SETFCAP,
// NET_RAW, NET_ADMIN, AUDIT_*, DAC_READ_SEARCH (open_by_handle_at), SETPCAP.
const Inside Set = 1<<unix.CAP_CHOWN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_FOWNER | 1<<unix.CAP_FSETID |
	1<<unix.CAP_KILL | 1<<unix.CAP_SETGID | 1<<unix.CAP_SETUID | 1<<unix.CAP_NET_BIND_SERVICE

// names are the capabilities by number, without "CAP_".
var names = [...]string{
	"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
	"LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
	"SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
	"SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
	"MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
	"CHECKPOINT_RESTORE",
}

// Has says whether capability n is in the set.
func (s Set) Has(n int) bool { return s&(1<<n) != 0 }

// Names lists the set as "CAP_CHOWN", …; a number unknown to this package is "CAP_63".
func (s Set) Names() []string {
	var list []string
	for n := range 64 {
		switch {
		case !s.Has(n):
		case n < len(names):
			list = append(list, "CAP_"+names[n])
		default:
			list = append(list, "CAP_"+strconv.Itoa(n))
		}
	}
	return list
}

func (s Set) String() string { return strings.Join(s.Names(), " ") }

// state is what capget and capset exchange: two halves of 32 bits.
type state [2]unix.CapUserData

// Permitted returns what the calling thread may use.
func Permitted() (Set, error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data state
	if err := unix.Capget(&header, &data[0]); err != nil {
		return 0, err
	}
	return Set(data[0].Permitted) | Set(data[1].Permitted)<<32, nil
}

// CutBounding takes every capability that is not in keep from what programs started by
// the calling thread may get, root's included, for ever. It needs CAP_SETPCAP (EPERM).
//
// It does so for this thread alone: for all threads Go would have to stop the world 33
// times, which takes longer than everything else at the start of a sandbox. So the
// caller is locked to its thread and starts all programs from it.
func CutBounding(keep Set) error {
	for n := range 64 {
		if keep.Has(n) {
			continue
		}
		err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(n), 0, 0, 0)
		if err == unix.EINVAL && n > 0 {
			break // the kernel has no such capability, nor a higher one
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Drop leaves every thread of the process the capabilities of keep that it has, for ever,
// and empties the inheritable and ambient sets. Programs started later get what the
// bounding set lets them; see CutBounding.
//
// It works in programs without cgo only: with cgo Go cannot change every thread, and the
// error is ENOTSUP.
func Drop(keep Set) error { return dropBy(syscall.AllThreadsSyscall, keep) }

// DropThread is Drop for the calling thread alone, and for what it starts.
func DropThread(keep Set) error { return dropBy(unix.RawSyscall, keep) }

func dropBy(call func(trap, a1, a2, a3 uintptr) (r1, r2 uintptr, errno syscall.Errno), keep Set) error {
	have, err := Permitted()
	if err != nil {
		return err
	}
	keep &= have
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data state // inheritable stays 0, and the kernel empties the ambient set along with it
	for i := range data {
		half := uint32(keep >> (32 * i))
		data[i].Effective, data[i].Permitted = half, half
	}
	_, _, errno := call(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
