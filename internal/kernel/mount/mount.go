// Package mount makes mounts by descriptor, through the mount API of Linux 5.12 and
// newer: a mount exists detached, seen in no mount table, until it is attached, and
// goes away with its last descriptor if it never is.
//
// Descriptors that the functions return are close-on-exec and the caller's to close.
// Errors have the kinds Unsupported (the kernel lacks the call, the file system or
// the option), Denied (missing rights), NotFound (a path) and Internal.
package mount

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// Attributes for New and SetAttr.
const (
	ReadOnly = unix.MOUNT_ATTR_RDONLY
	NoSuid   = unix.MOUNT_ATTR_NOSUID
	NoDev    = unix.MOUNT_ATTR_NODEV
	NoExec   = unix.MOUNT_ATTR_NOEXEC
	NoAtime  = unix.MOUNT_ATTR_NOATIME
)

// An Option is one parameter of a file system.
type Option struct {
	key, value string
	fd         int // when value is ""; -1 for a flag
}

// Flag is an option without a value.
func Flag(key string) Option { return Option{key, "", -1} }

// Value is an option with a value that is not empty.
func Value(key, value string) Option { return Option{key, value, -1} }

// FD is an option whose value is a file, such as upperdir (overlayfs since 6.13).
func FD(key string, fd int) Option { return Option{key, "", fd} }

// New makes a new instance of a file system and returns its detached mount. source is
// what mount tables show; a block device for disk file systems.
func New(fstype, source string, attr uint64, options ...Option) (int, error) {
	context, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err == unix.ENODEV {
		return -1, berm.Errorf(berm.Unsupported, "the kernel has no file system %s", fstype)
	}
	if err != nil {
		return -1, failed(err, "open file system %s", fstype)
	}
	defer unix.Close(context)
	for _, o := range append([]Option{Value("source", source)}, options...) {
		switch {
		case o.value != "":
			err = unix.FsconfigSetString(context, o.key, o.value)
		case o.fd >= 0:
			err = unix.FsconfigSetFd(context, o.key, o.fd)
		default:
			err = unix.FsconfigSetFlag(context, o.key)
		}
		if err == unix.EINVAL {
			return -1, berm.Errorf(berm.Unsupported, "%s does not take the option %s=%s%s: %w", fstype, o.key, o.value, messages(context), err)
		}
		if err != nil {
			return -1, failed(err, "set %s=%s of %s%s", o.key, o.value, fstype, messages(context))
		}
	}
	if err := unix.FsconfigCreate(context); err != nil {
		return -1, failed(err, "make file system %s%s", fstype, messages(context))
	}
	fd, err := unix.Fsmount(context, unix.FSMOUNT_CLOEXEC, int(attr))
	if err != nil {
		return -1, failed(err, "mount file system %s%s", fstype, messages(context))
	}
	return fd, nil
}

// Known says whether the kernel has a file system, or a module with it.
func Known(fstype string) bool {
	context, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err == nil {
		_ = unix.Close(context)
	}
	return err == nil
}

// Source is what the mount table says was mounted on path, "" when nothing was: it is no mount point.
func Source(path string) (string, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_MNT_ID, &st); err != nil {
		return "", failed(err, "look at %s", path)
	}
	if st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return "", nil
	}
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", failed(err, "read the mount table")
	}
	// proc(5): ID PARENT DEVICE ROOT POINT OPTIONS [FIELDS...] - TYPE SOURCE SUPEROPTIONS
	for line := range strings.SplitSeq(string(table), "\n") {
		id, _, _ := strings.Cut(line, " ")
		_, end, _ := strings.Cut(line, " - ")
		if fields := strings.Fields(end); id == strconv.FormatUint(st.Mnt_id, 10) && len(fields) > 1 {
			return fields[1], nil
		}
	}
	return "", berm.Errorf(berm.Internal, "the mount on %s is not in the mount table", path)
}

// messages reads what the file system has to say about a failure.
func messages(context int) string {
	var all strings.Builder
	buf := make([]byte, 1024)
	for range 8 { // the kernel keeps that many
		n, err := unix.Read(context, buf)
		if err != nil || n < 2 {
			break
		}
		fmt.Fprintf(&all, " (%s)", strings.TrimSpace(string(buf[2:n]))) // after "e ", "w " or "i "
	}
	return all.String()
}

// Clone returns a detached mount of what dirfd and path name: a bind mount that is not
// attached yet. recursive takes the mounts below along.
func Clone(dirfd int, path string, recursive bool) (int, error) {
	flags := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC | unix.AT_EMPTY_PATH)
	if recursive {
		flags |= unix.AT_RECURSIVE
	}
	fd, err := unix.OpenTree(dirfd, path, flags)
	if err != nil {
		return -1, failed(err, "clone mount of %s", path)
	}
	return fd, nil
}

// SetAttr sets and clears attributes of a mount, attached or not.
func SetAttr(fd int, set, clear uint64, recursive bool) error {
	return setAttr(fd, &unix.MountAttr{Attr_set: set, Attr_clr: clear}, recursive, "set attributes of a mount")
}

// IDMap maps the owners of files on a detached mount by a user namespace: what belongs
// to id n on disk belongs to whom the namespace maps n. File systems that cannot
// fail with Unsupported: overlayfs is one, so map its layers instead.
func IDMap(fd, userns int) error {
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(userns)}
	err := setAttr(fd, &attr, false, "map ids of a mount")
	if errors.Is(err, unix.EINVAL) {
		return berm.Errorf(berm.Unsupported, "the file system cannot map ids: %w", err)
	}
	return err
}

// Private stops mounts and unmounts from spreading out of and into all mounts at and
// below path. It is the first step in a new mount namespace.
func Private(path string) error {
	err := unix.MountSetattr(unix.AT_FDCWD, path, unix.AT_RECURSIVE, &unix.MountAttr{Propagation: unix.MS_PRIVATE})
	if err != nil {
		return failed(err, "make %s private", path)
	}
	return nil
}

func setAttr(fd int, attr *unix.MountAttr, recursive bool, what string) error {
	flags := uint(unix.AT_EMPTY_PATH)
	if recursive {
		flags |= unix.AT_RECURSIVE
	}
	if err := unix.MountSetattr(fd, "", flags, attr); err != nil {
		return failed(err, "%s", what)
	}
	return nil
}

// Attach puts a detached mount, or moves an attached one, onto what dirfd and path
// name. It does not follow a symbolic link at the end of path.
func Attach(fd, dirfd int, path string) error {
	flags := unix.MOVE_MOUNT_F_EMPTY_PATH
	if path == "" {
		flags |= unix.MOVE_MOUNT_T_EMPTY_PATH
	}
	if err := unix.MoveMount(fd, "", dirfd, path, flags); err != nil {
		return failed(err, "attach mount to %s", path)
	}
	return nil
}

func failed(err error, what string, args ...any) error {
	kind := berm.Internal
	switch {
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EOPNOTSUPP):
		kind = berm.Unsupported
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		kind = berm.Denied
	case errors.Is(err, unix.ENOENT):
		kind = berm.NotFound
	}
	return berm.Errorf(kind, "%s: %w", fmt.Sprintf(what, args...), err)
}
