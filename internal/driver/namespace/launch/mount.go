package launch

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/kernel/mount"
	"github.com/berm-sandbox/berm/internal/monitor"
)

// imageOptions make a file system that is never used again cheap: nothing waits for
// the disk, and inode tables are not zeroed in the background.
var imageOptions = []mount.Option{mount.Flag("noinit_itable"), mount.Flag("nobarrier"), mount.Flag("noauto_da_alloc")}

// open makes the detached mount of the writable layer, or returns nil when init
// makes it.
func (u Upper) open() (*os.File, error) {
	switch {
	case u.Image != "":
		image, err := copyImage(u.Image)
		if err != nil {
			return nil, fault("copy the writable layer's image", err)
		}
		defer image.Close()
		monitor.Trace("image copied")
		loop, err := mount.Loop(image, false, false)
		if err != nil {
			return nil, err
		}
		defer loop.Close()
		monitor.Trace("loop attached")
		disk, err := file(mount.New("ext4", loop.Name(), mount.NoDev|mount.NoAtime, imageOptions...))
		monitor.Trace("image mounted")
		return disk, err
	case u.Directory != "":
		return file(mount.Clone(unix.AT_FDCWD, u.Directory, false))
	}
	return nil, nil
}

// open makes the detached mount of a tree.
func (t Tree) open() (*os.File, error) {
	dir, path := unix.AT_FDCWD, t.Path
	if t.Exact {
		fd, err := unix.Openat2(dir, path, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS})
		if err != nil {
			return nil, fault("open "+path, err)
		}
		defer unix.Close(fd)
		dir, path = fd, ""
	}
	tree, err := file(mount.Clone(dir, path, t.Host))
	if err != nil {
		return nil, err
	}
	attr := uint64(mount.NoDev)
	if !t.Write {
		attr |= mount.ReadOnly
	}
	if t.Host || t.NoSetuid {
		attr |= mount.NoSuid
	}
	if err := mount.SetAttr(int(tree.Fd()), attr, 0, t.Host); err != nil {
		tree.Close()
		return nil, err
	}
	return tree, nil
}

func file(fd int, err error) (*os.File, error) {
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "mount"), nil
}

// dear is from how much data on the unmount of an image is worth to be spared the
// writing of what is not written yet.
const dear = 8 << 20

// discard tells the kernel that an image's file system is not needed any more, so that
// its unmount writes nothing: gigabytes would take longer than a kill may. For little
// data it is left alone, because the kernel logs it as an alert.
func discard(root *os.File) {
	var fs unix.Statfs_t
	if unix.Fstatfs(int(root.Fd()), &fs) != nil || int64(fs.Blocks-fs.Bfree)*fs.Bsize < dear {
		return
	}
	fd, err := unix.Openat(int(root.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer func() { _ = unix.Close(fd) }()
	const (
		shutdown = 0x8004587d // EXT4_IOC_SHUTDOWN
		noFlush  = 2          // EXT4_GOING_FLAGS_NOLOGFLUSH
	)
	_ = unix.IoctlSetPointerInt(fd, shutdown, noFlush)
}
