// Package capability cuts the rights of a process down to a set of capabilities.
package capability

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
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
var Inside = Of(unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_FOWNER, unix.CAP_FSETID, unix.CAP_KILL,
	unix.CAP_SETGID, unix.CAP_SETUID, unix.CAP_NET_BIND_SERVICE)

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
			list = append(list, fmt.Sprintf("CAP_%d", n))
		}
	}
	return list
}

func (s Set) String() string { return strings.Join(s.Names(), " ") }

// state is what capget and capset exchange: two halves of 32 bits.
type state [2]unix.CapUserData

func (d *state) set(effective, permitted, inheritable Set) {
	for i := range d {
		d[i] = unix.CapUserData{
			Effective:   uint32(effective >> (32 * i)),
			Permitted:   uint32(permitted >> (32 * i)),
			Inheritable: uint32(inheritable >> (32 * i)),
		}
	}
}

// Permitted returns what the calling thread may use.
func Permitted() (Set, error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data state
	if err := unix.Capget(&header, &data[0]); err != nil {
		return 0, berm.Errorf(berm.Internal, "read capabilities: %w", err)
	}
	return Set(data[0].Permitted) | Set(data[1].Permitted)<<32, nil
}

// Drop takes every capability that is not in keep away, for ever. All threads of the
// process lose it from their permitted and effective sets, and their inheritable and
// ambient sets are emptied. What the process does not have is not given.
//
// From the bounding set, which says what a program of root may get, it is dropped for
// the calling thread alone: for all threads Go would have to stop the world 33 times,
// which takes longer than everything else at the start of a sandbox. So the caller is
// locked to its thread (runtime.LockOSThread) and starts all programs from it. That
// needs CAP_SETPCAP, else Drop fails with Denied.
//
// It works in programs without cgo only: with cgo Go cannot change every thread, and
// Drop fails with Unsupported.
func Drop(keep Set) error {
	have, err := Permitted()
	if err != nil {
		return err
	}
	keep &= have
	for n := range 64 {
		if keep.Has(n) {
			continue
		}
		// The kernel answers EINVAL after its last capability.
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(n), 0, 0, 0); err == unix.EINVAL && n > 0 {
			break
		} else if err != nil {
			return failed(err, "drop %v from the bounding set", Of(n))
		}
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data state
	data.set(keep, keep, 0) // the kernel empties the ambient set along with the inheritable one
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data)), 0); errno != 0 {
		return failed(errno, "keep only %v", keep)
	}
	return nil
}

func failed(err error, what string, args ...any) error {
	kind := berm.Internal
	switch {
	case errors.Is(err, unix.EPERM):
		kind = berm.Denied
	case errors.Is(err, unix.ENOTSUP):
		kind = berm.Unsupported
	}
	return berm.Errorf(kind, "%s: %w", fmt.Sprintf(what, args...), err)
}
