package launch

import (
	"errors"
	"io/fs"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/cleanup"
	"github.com/berm-sandbox/berm/internal/kernel/mount"
	"github.com/berm-sandbox/berm/internal/monitor"
)

// imageOptions make a file system that is never used again cheap: nothing waits for
// the disk, and inode tables are not zeroed in the background.
var imageOptions = []mount.Option{mount.Flag("noinit_itable"), mount.Flag("nobarrier"), mount.Flag("noauto_da_alloc")}

// disk is a writable layer: its mount, nil when init makes it, and the image that it is of,
// nil for none.
type disk struct{ root, image *os.File }

// close lets it go.
func (d disk) close() {
	for _, f := range []*os.File{d.root, d.image} {
		if f != nil {
			f.Close()
		}
	}
}

// open makes the detached mount of the writable layer.
func (u Upper) open() (d disk, err error) {
	cu := cleanup.Make(func() { d.close() })
	defer cu.Clean()
	switch {
	case u.Image != "":
		if d.image, err = copyImage(u.Image); err != nil {
			if errors.Is(err, unix.ENOSPC) {
				return disk{}, noRoom(err)
			}
			return disk{}, fault("copy the writable layer's image", err)
		}
		monitor.Trace("image copied")
		loop, err := mount.Loop(d.image, false, false)
		if err != nil {
			return disk{}, err
		}
		defer loop.Close()
		monitor.Trace("loop attached")
		if d.root, err = file(mount.New("ext4", loop.Name(), mount.NoDev|mount.NoAtime, imageOptions...)); err != nil {
			return disk{}, err
		}
		monitor.Trace("image mounted")
		if u.Used {
			if err := forgetOverlay(d.root); err != nil {
				return disk{}, fault("prepare the writable layer", err)
			}
		}
	case u.Directory != "":
		if d.root, err = file(mount.Clone(unix.AT_FDCWD, u.Directory, false)); err != nil {
			return disk{}, err
		}
	}
	cu.Release()
	return d, nil
}

// forgetOverlay removes what the overlay mount of another sandbox left beside the upper
// directory: a mark that it was volatile, which would have the next one refused, and what it
// was about to make. Of a disk that is nearly full the reserve goes too: the next mount takes of
// what it held.
func forgetOverlay(mounted *os.File) error {
	root, err := beside(mounted)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	if err := root.RemoveAll("work"); err != nil {
		return err
	}
	var disk unix.Statfs_t
	if err := unix.Fstatfs(int(mounted.Fd()), &disk); err != nil {
		return err
	}
	if disk.Ffree < plenty || disk.Bfree < plenty {
		if err := root.RemoveAll(Reserve); err != nil {
			return err
		}
	}
	return root.Mkdir("work", 0o700)
}

// plenty of free inodes, or blocks, is many times what a mount and an identity take.
const plenty = 1024

// Reserve is the directory beside the upper one whose files hold inodes: a sandbox may use up all
// others, and the next mount of its overlay, and its identity, need some.
const Reserve = "reserve"

// reserved is how many files a reserve has.
const reserved = 16

// FillReserve makes the files of a reserve, as many as there is room for, below the root of a disk.
func FillReserve(root *os.Root) error {
	if err := root.Mkdir(Reserve, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	for i := range reserved {
		f, err := root.OpenFile(Reserve+"/"+strconv.Itoa(i), os.O_WRONLY|os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		if err := f.Close(); err != nil {
			return err
		}
	}
	return nil
}

// fillReserve fills the reserve of a disk that was used before, as its owner: others have no ids on
// it. Where the sandbox has removed its identity there is less of it each time.
func (s *Sandbox) fillReserve() {
	root, err := beside(s.upper)
	if err != nil {
		return
	}
	defer func() { _ = root.Close() }()
	if _, err := root.Lstat(Reserve + "/" + strconv.Itoa(reserved-1)); err == nil {
		return
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	gid, err := unix.SetfsgidRetGid(s.order.IDs.GIDs[0].Outside)
	if err != nil {
		return
	}
	defer func() { _, _ = unix.SetfsgidRetGid(gid) }()
	_ = asOwner(s.order.IDs.UIDs[0].Outside, func() error { return FillReserve(root) })
}

// beside opens the directory that the upper one is in.
func beside(mounted *os.File) (*os.Root, error) {
	return os.OpenRoot("/proc/self/fd/" + strconv.Itoa(int(mounted.Fd())))
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
