package inside

import (
	"errors"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/driver/namespace/plan"
	"github.com/berm-sandbox/berm/internal/kernel/capability"
	"github.com/berm-sandbox/berm/internal/network/link"
)

// The stage holds two things that masks are made of.
const (
	maskFile = ".file" // /dev/null on a mount without devices: opening it fails for everybody
	maskDir  = ".dir"  // an empty directory that is read-only
)

// do carries out one step.
func do(s plan.Step, trees []int) error {
	switch s.Op {
	case plan.Stage:
		return stage(s.Data)
	case plan.Mkdir:
		return mkdir(s.Target, uint32(s.Flags))
	case plan.File:
		return file(s.Target, s.Data, uint32(s.Flags))
	case plan.Identity:
		return identity(s.Target, s.Data, uint32(s.Flags))
	case plan.Symlink:
		return unix.Symlink(s.Source, s.Target)
	case plan.Mount:
		return unix.Mount("none", s.Target, s.Source, uintptr(s.Flags), s.Data)
	case plan.Bind:
		return bind(s.Source, s.Target, uintptr(s.Flags))
	case plan.Pin:
		return ignoreAbsent(unix.Mount(s.Target, s.Target, "", unix.MS_BIND|unix.MS_REC, ""))
	case plan.Remount:
		return unix.Mount("none", s.Target, "", unix.MS_REMOUNT|unix.MS_BIND|uintptr(s.Flags), "")
	case plan.Move:
		err := unix.MoveMount(trees[s.FD], "", unix.AT_FDCWD, s.Target, unix.MOVE_MOUNT_F_EMPTY_PATH)
		_ = unix.Close(trees[s.FD])
		return err
	case plan.Mask:
		return mask(s.Target)
	case plan.Cover:
		return cover(s.Source, s.Target)
	case plan.ReadOnly:
		return ignoreAbsent(bind(s.Target, s.Target, unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC))
	case plan.Enter:
		return enter(s.Target, s.Flags != 0)
	case plan.Workdir:
		return unix.Chdir(s.Target)
	case plan.Hostname:
		return unix.Sethostname([]byte(s.Data))
	case plan.Loopback:
		return link.Loopback()
	case plan.Link:
		if s.Flags != 0 {
			return makeLink(link.Ethernet)
		}
		return makeLink(link.Default)
	case plan.Rlimit:
		return rlimit(s)
	case plan.Landlock:
		return landlock(s.Flags, uint64(s.FD), s.Source)
	case plan.Bounding:
		// On this thread only, which starts the agent: the others execute nothing.
		return capability.CutBounding(capability.Set(s.Flags))
	case plan.Capabilities:
		err := capability.Drop(capability.Set(s.Flags))
		if err == unix.ENOTSUP {
			// A program that links cgo is its own init (package reexec). What its main thread
			// starts has no more rights then; its other threads run nothing from inside.
			err = capability.DropThread(capability.Set(s.Flags))
		}
		return err
	case plan.NoNewPrivs:
		return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	case plan.Seccomp:
		return seccomp(s.Data)
	case plan.Watch:
		return watch(s.Data, s.Flags)
	}
	return unix.ENOSYS
}

// stage makes an empty working directory in which the root is put together. It
// covers /tmp of this mount namespace only.
func stage(options string) error {
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("none", "/tmp", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return err
	}
	if err := unix.Chdir("/tmp"); err != nil {
		return err
	}
	if err := mkdir(maskDir, 0o555); err != nil {
		return err
	}
	if err := bind(maskDir, maskDir, unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC); err != nil {
		return err
	}
	if err := file(maskFile, "", 0o600); err != nil {
		return err
	}
	return bind("/dev/null", maskFile, unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC)
}

// mkdir makes a directory. One that exists already is left as it is; a symbolic link
// of a hostile template in its place would lead mounts out of the new root.
func mkdir(path string, mode uint32) error {
	if err := unix.Mkdir(path, mode); err != unix.EEXIST {
		return err
	}
	var stat unix.Stat_t
	if err := unix.Lstat(path, &stat); err != nil {
		return err
	}
	if stat.Mode&unix.S_IFMT != unix.S_IFDIR {
		return unix.ENOTDIR
	}
	return nil
}

// file writes a file. A symbolic link at path is replaced: templates have some
// that point to files which are not there. So is a FIFO, which a sandbox may have left in its
// snapshot and which would be waited for.
func file(path, content string, mode uint32) error {
	const flags = unix.O_WRONLY | unix.O_CREAT | unix.O_TRUNC | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC
	fd, err := unix.Open(path, flags, mode)
	if err == unix.ELOOP || err == unix.ENXIO {
		if err = unix.Unlink(path); err == nil {
			fd, err = unix.Open(path, flags, mode)
		}
	}
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	for len(content) > 0 {
		n, err := unix.Write(fd, []byte(content))
		if err != nil {
			return err
		}
		content = content[n:]
	}
	return nil
}

// identity writes a file that tells one sandbox from others, if its place is what it should be.
// No link leads it elsewhere.
func identity(path, content string, mode uint32) error {
	dir := path[:strings.LastIndexByte(path, '/')]
	if err := mkdir(dir, 0o755); err != nil {
		return ignoreOwn(err)
	}
	return ignoreOwn(file(path, content, mode))
}

// ignoreOwn ignores errors that what a sandbox made of its disk has.
func ignoreOwn(err error) error {
	switch err {
	case unix.ENOTDIR, unix.EISDIR, unix.ENOSPC:
		return nil
	}
	return err
}

// bind mounts source on target with the flags that source's mount has and those
// given. The kernel takes flags of a bind only in a second call.
func bind(source, target string, flags uintptr) error {
	if err := unix.Mount(source, target, "", unix.MS_BIND, ""); err != nil || flags == 0 {
		return err
	}
	var stat unix.Statfs_t
	if err := unix.Statfs(target, &stat); err != nil {
		return err
	}
	// Flags of a mount that came from the host are locked: a remount that would
	// clear one is refused, so they are given again.
	for st, ms := range lockedFlags {
		if stat.Flags&st != 0 {
			flags |= ms
		}
	}
	return unix.Mount("none", target, "", unix.MS_REMOUNT|unix.MS_BIND|flags, "")
}

var lockedFlags = map[int64]uintptr{
	unix.ST_RDONLY:     unix.MS_RDONLY,
	unix.ST_NOSUID:     unix.MS_NOSUID,
	unix.ST_NODEV:      unix.MS_NODEV,
	unix.ST_NOEXEC:     unix.MS_NOEXEC,
	unix.ST_NOATIME:    unix.MS_NOATIME,
	unix.ST_NODIRATIME: unix.MS_NODIRATIME,
	unix.ST_RELATIME:   unix.MS_RELATIME,
}

// mask hides a file or a directory.
func mask(path string) error {
	var stat unix.Stat_t
	if err := unix.Lstat(path, &stat); err != nil {
		return ignoreAbsent(err)
	}
	source := maskFile
	switch stat.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		source = maskDir
	case unix.S_IFLNK: // of an earlier run in its session; what was to be hidden is gone there
		return nil
	}
	return unix.Mount(source, path, "", unix.MS_BIND, "")
}

// cover hides a file, or a symbolic link, behind another file: systemd-resolved and NixOS
// have links in /etc, which often lead to what is not there inside.
func cover(source, target string) error {
	var stat unix.Stat_t
	if err := unix.Lstat(target, &stat); err != nil {
		return ignoreAbsent(err)
	}
	if kind := stat.Mode & unix.S_IFMT; kind != unix.S_IFREG && kind != unix.S_IFLNK {
		return nil
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return err
	}
	// Unlike mount(2) it does not follow a link at the end of target.
	return unix.MoveMount(fd, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH)
}

func ignoreAbsent(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// enter makes path the root of the mount namespace and detaches the old one: the
// root is put on top of itself, so that no directory for the old one is needed.
func enter(path string, streams bool) error {
	if err := unix.Chdir(path); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return err
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return err
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	if streams {
		return nil
	}
	// The standard streams still are the host's /dev/null.
	null, err := unix.Open("/dev/null", unix.O_RDWR, 0)
	if err != nil {
		return err
	}
	for fd := range 3 {
		if err := unix.Dup3(null, fd, 0); err != nil {
			return err
		}
	}
	return unix.Close(null)
}

// makeLink makes the only way out and gives its other end away.
func makeLink(c link.Config) error {
	fd, err := link.Make(c)
	if err != nil {
		return err
	}
	return give(plan.LinkMade, fd)
}

// give sends the monitor a descriptor, which is closed here.
func give(kind byte, fd int) error {
	defer func() { _ = unix.Close(fd) }()
	return unix.Sendmsg(control, []byte{kind}, unix.UnixRights(fd), nil, unix.MSG_NOSIGNAL)
}

// rlimit sets a limit. Where the hard limit in force is lower and may not be
// raised (no CAP_SYS_RESOURCE in the first user namespace), it stays, and the
// monitor is told.
func rlimit(s plan.Step) error {
	hard, err := strconv.ParseUint(s.Target, 10, 64)
	if err != nil {
		return unix.EINVAL
	}
	want := unix.Rlimit{Cur: s.Flags, Max: hard}
	err = unix.Setrlimit(s.FD, &want)
	if !errors.Is(err, unix.EPERM) {
		return err
	}
	var have unix.Rlimit
	if err := unix.Getrlimit(s.FD, &have); err != nil {
		return err
	}
	tell(plan.Lowered, s.Data+", at most "+strconv.FormatUint(have.Max, 10))
	want.Max = min(want.Max, have.Max)
	want.Cur = min(want.Cur, want.Max)
	return unix.Setrlimit(s.FD, &want)
}

// seccomp loads a program of struct sock_filter for every thread, and with it
// no_new_privs if this thread has it.
func seccomp(program string) error {
	filter := []byte(program)
	fprog := unix.SockFprog{Len: uint16(len(filter) / 8), Filter: (*unix.SockFilter)(unsafe.Pointer(unsafe.SliceData(filter)))}
	odd, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&fprog)))
	if errno != 0 {
		return errno
	}
	if odd != 0 { // the id of a thread that cannot be brought in line
		return unix.ESRCH
	}
	return nil
}

// watch loads a program of struct sock_filter on this thread, from which all that it starts have it,
// and passes its listener on: from now on each execution waits for the monitor. A filter around this
// sandbox that has a listener leaves no place for another (EBUSY).
func watch(program string, flags uint64) error {
	filter := []byte(program)
	fprog := unix.SockFprog{Len: uint16(len(filter) / 8), Filter: (*unix.SockFilter)(unsafe.Pointer(unsafe.SliceData(filter)))}
	fd, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, uintptr(flags), uintptr(unsafe.Pointer(&fprog)))
	if errno != 0 {
		tell(plan.Watched, errno.Error())
		return nil
	}
	return give(plan.Watched, int(fd)) // with one that stays, somebody inside could answer
}

// landlock restricts this thread, and with it the agent. It is the same rule set that
// package landlock of the kernel folder makes, which links too much for init.
func landlock(handled, scoped uint64, devices string) error {
	attr := unix.LandlockRulesetAttr{Handled_access_fs: handled, Scoped: scoped}
	size := unsafe.Sizeof(attr.Handled_access_fs) // what every version knows
	if scoped != 0 {
		size = unsafe.Sizeof(attr)
	}
	fd, _, errno := unix.RawSyscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), size, 0)
	if errno != 0 {
		return errno
	}
	ruleset := int(fd)
	defer func() { _ = unix.Close(ruleset) }()
	if handled&unix.LANDLOCK_ACCESS_FS_REFER != 0 {
		if err := grant(ruleset, "/", unix.LANDLOCK_ACCESS_FS_REFER); err != nil {
			return err
		}
	}
	for _, path := range strings.Fields(devices) {
		if err := grant(ruleset, path, unix.LANDLOCK_ACCESS_FS_IOCTL_DEV); err != nil {
			return err
		}
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// grant allows rights on a file, or on all below a directory.
func grant(ruleset int, path string, rights uint64) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	rule := unix.LandlockPathBeneathAttr{Allowed_access: rights, Parent_fd: int32(fd)}
	_, _, errno := unix.RawSyscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(ruleset), unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&rule)), 0, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}
