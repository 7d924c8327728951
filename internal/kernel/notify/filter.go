// Package notify tells which programs processes ask the kernel to execute, and when these
// processes end: a seccomp filter has each execution wait until somebody outside says that it may
// go on (seccomp_unotify(2)). It needs no rights of root's.
//
// Nothing may be decided by what it tells: another thread of the process, or another process that
// shares its memory, can put other names in the place of those that were read.
package notify

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// Flags are those with which a thread loads the Filter: the call returns the listener, and a process
// that the listener has heard of goes on waiting when a signal comes that does not end it, so that
// it asks once. All threads and processes that begin later have the filter too.
const Flags = unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV

// MinVersion is the first kernel that knows the Flags. Telling a call to go on is of 5.5, to wake
// each other on one processor, which is used where it is there, of 6.6.
const MinVersion = "5.19"

// Filter is a program of struct sock_filter that has execve and execveat wait for a listener. It
// allows all other calls, and those of other architectures, which another filter judges. Where
// another filter denies one of the two, the kernel takes that for the answer (seccomp(2)); where one
// hands it to a tracer (SECCOMP_RET_TRACE), the listener comes first and the tracer is not asked.
func Filter() string {
	code := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 4}, // seccomp_data.arch
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: arch, Jf: 4},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}, // seccomp_data.nr
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_EXECVE, Jt: 1},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_EXECVEAT, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_USER_NOTIF},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	return string(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(code))), len(code)*int(unsafe.Sizeof(code[0]))))
}

// Check says why there can be no listener here: kind Unsupported. That one is refused because a
// program around this one has a listener already (EBUSY), as some containers do, shows only when a
// filter is loaded.
func Check() error {
	// The kernel judges the flags before it reads the program, which is nowhere
	// (seccomp_set_mode_filter in kernel/seccomp.c).
	_, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, Flags, 0)
	if errno != unix.EFAULT {
		return berm.Errorf(berm.Unsupported, "the kernel has no listeners that wait for killable calls: %w", errno)
	}
	if _, err := sizes(); err != nil {
		return berm.Errorf(berm.Unsupported, "the kernel does not tell the sizes of a listener's messages: %w", err)
	}
	return nil
}

// messageSizes is struct seccomp_notif_sizes.
type messageSizes struct{ notification, response, data uint16 }

func sizes() (s messageSizes, err error) {
	if _, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_GET_NOTIF_SIZES, 0, uintptr(unsafe.Pointer(&s))); errno != 0 {
		return s, errno
	}
	return s, nil
}

// notification is struct seccomp_notif, and response its answer, as far as this package knows them.
type notification struct {
	id    uint64
	pid   uint32 // of the thread, on this side of pid namespaces
	flags uint32
	nr    int32
	arch  uint32
	ip    uint64
	args  [6]uint64
}

type response struct {
	id    uint64
	val   int64
	error int32
	flags uint32
}

// messages are a notification and a response with as much room as the kernel writes and reads.
func messages() (*notification, []uint64, *response) {
	n, r := uint16(unsafe.Sizeof(notification{})), uint16(unsafe.Sizeof(response{}))
	if s, err := sizes(); err == nil {
		n, r = max(n, s.notification), max(r, s.response)
	}
	words := make([]uint64, (n+7)/8)
	answer := make([]uint64, (r+7)/8)
	return (*notification)(unsafe.Pointer(&words[0])), words, (*response)(unsafe.Pointer(&answer[0]))
}
