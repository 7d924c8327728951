package notify

import (
	"bytes"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// process is one that asked for an execution and has not ended.
type process struct {
	fd     int // a pidfd; -1 where there is none
	host   int
	inside int
	uid    int           // inside
	asking bool          // it is being looked at, so that its end is not to be told yet
	asked  atomic.Uint32 // how many executions it asked for
	ended  atomic.Bool   // it runs no more
	at     time.Duration // since when
	over   bool          // nothing more is to be known of its end
	status unix.WaitStatus
	known  bool // status is
}

// Version is a version of a file: no program can set the time of the last change. The zero value is
// none.
type Version struct {
	Dev, Ino     uint64
	Size         int64
	Mtime, Ctime unix.Timespec
}

// versionOf is that of the file at a path; a link at its end is followed.
func versionOf(path string) (v Version) {
	var st unix.Stat_t
	if unix.Stat(path, &st) == nil {
		v = Version{st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim}
	}
	return v
}

// openProcess finds the process of a thread that waits.
func openProcess(thread int) (*process, bool) {
	p := &process{host: thread}
	var err error
	if p.fd, err = unix.PidfdOpen(thread, 0); err == nil {
		return p, true
	}
	// It is not the first of its process, or there are no descriptors left.
	if p.host = readStatus(thread).host; p.host == 0 {
		return nil, false
	}
	if p.fd, err = unix.PidfdOpen(p.host, 0); err != nil {
		p.fd = -1
	}
	return p, true
}

// namespace is a pid namespace: a descriptor, -1 before there is one.
type namespace int

// getTGID is NS_GET_TGID_IN_PIDNS of linux/nsfs.h, _IOR(0xb7, 9, int), which Linux 6.11 has.
const getTGID = 0x8004b709

// inside is the number that a process of this side has in the namespace, 0 when it is not there.
func (n namespace) inside(host int) int {
	if n >= 0 {
		pid, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(n), getTGID, uintptr(host))
		switch errno {
		case 0:
			return int(pid)
		case unix.ESRCH:
			return 0
		}
	}
	if s := readStatus(host); s.inside != s.host { // it is in one
		return s.inside
	}
	return 0
}

// parent is the parent of a process, on this side, and its real user id.
func (p *process) parent() (pid, uid int) {
	if info, ok := p.info(0); ok {
		return int(info.ids[2]), int(info.ids[3])
	}
	status := readStatus(p.host)
	return status.parent, status.uid
}

// lives says whether a process has not been waited for by its parent, so that its number is its own.
func (p *process) lives() bool {
	return p.fd >= 0 && unix.PidfdSendSignal(p.fd, 0, nil, 0) != unix.ESRCH
}

func (p *process) close() {
	if p.fd >= 0 {
		_ = unix.Close(p.fd)
		p.fd = -1
	}
}

// processInfo is struct pidfd_info of linux/pidfd.h in its first size.
type processInfo struct {
	mask, cgroup uint64
	ids          [11]uint32 // pid, tgid, ppid, ruid, …
	exit         int32
}

// From linux/pidfd.h: _IOWR(0xFF, 11, struct pidfd_info), of Linux 6.13, and PIDFD_INFO_EXIT.
const (
	getInfo  = 0xc040ff0b
	infoExit = 1 << 3
)

func (p *process) info(mask uint64) (info processInfo, ok bool) {
	info.mask = mask
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(p.fd), getInfo, uintptr(unsafe.Pointer(&info)))
	return info, errno == 0
}

// exit is how a process ended, once its parent has waited for it. The kernel tells it to others than
// the parent from Linux 6.15 on.
func (p *process) exit() (status unix.WaitStatus, known bool) {
	info, ok := p.info(infoExit)
	return unix.WaitStatus(info.exit), ok && info.mask&infoExit != 0
}

// TellsExits says whether the kernel does. That it can is told together with an exit alone, so the
// version counts.
var TellsExits = sync.OnceValue(func() bool {
	var name unix.Utsname
	if unix.Uname(&name) != nil {
		return false
	}
	major, rest, _ := strings.Cut(unix.ByteSliceToString(name.Release[:]), ".")
	minor, _, _ := strings.Cut(rest, ".")
	a, _ := strconv.Atoi(major)
	b, _ := strconv.Atoi(minor)
	return a > 6 || a == 6 && b >= 15
})

// status is what /proc tells of a process.
type status struct{ host, inside, parent, uid int }

func readStatus(pid int) (s status) {
	for line := range bytes.Lines(readSmall("/proc/" + strconv.Itoa(pid) + "/status")) {
		name, value, _ := strings.Cut(string(line), ":")
		switch fields := strings.Fields(value); {
		case len(fields) == 0:
		case name == "PPid":
			s.parent, _ = strconv.Atoi(fields[0])
		case name == "Uid":
			s.uid, _ = strconv.Atoi(fields[0])
		case name == "NStgid":
			s.host, _ = strconv.Atoi(fields[0])
			s.inside, _ = strconv.Atoi(fields[len(fields)-1])
		}
	}
	return s
}

// readSmall reads a file of /proc that has no more than a page.
func readSmall(path string) []byte {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer func() { _ = unix.Close(fd) }()
	b := make([]byte, 4096)
	n, _ := unix.Read(fd, b)
	return b[:max(n, 0)]
}

// open opens a regular file for reading; nil when it is none, or may not be read. Neither a lease
// that somebody has on it nor a FIFO holds this up.
func open(path string) *os.File {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		f.Close()
		return nil
	}
	return f
}
