// Package depot keeps disks of sandboxes on a file system that can clone them, in a sparse file of a
// data directory whose own cannot.
package depot

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cleanup"
	"github.com/berm-sandbox/berm/internal/failpoint"
	"github.com/berm-sandbox/berm/internal/kernel/feature"
	"github.com/berm-sandbox/berm/internal/kernel/mount"
)

// MinSize is how small a depot can be, in bytes: XFS takes no less than 300 MiB, and its log is part
// of it.
const MinSize = 1 << 30

// Names below the data directory.
const (
	fileName   = "depot.img"
	unfinished = "depot.new"
	placeName  = "depot" // where it is mounted
	linksName  = "snapshots"
)

// A Depot is mounted. It stays so after this process where sandboxes have their disks in it.
type Depot struct{ place string }

// Images is the directory of empty disks.
func (d *Depot) Images() string { return filepath.Join(d.place, "images") }

// Snapshots is the directory of what is saved of sandboxes; links in the data directory lead there.
func (d *Depot) Snapshots() string { return filepath.Join(d.place, "snapshots") }

// Open mounts the depot of a data directory, which only this process uses. With a size, in bytes, it
// is made if there is none, or grows to that. Without one it is mounted for what is saved in it, and
// removed when that is nothing; nil is none.
//
// Whoever was interrupted anywhere in here is followed by the next call, which goes on.
//
// Kinds: Invalid (the size), Unsupported (this host cannot make or mount it), Denied (not root),
// Exhausted (no loop device), Internal.
func Open(ctx context.Context, data string, size int64) (*Depot, error) {
	d, file := &Depot{filepath.Join(data, placeName)}, filepath.Join(data, fileName)
	_, err := os.Stat(file)
	switch {
	case errors.Is(err, fs.ErrNotExist) && size == 0:
		return nil, d.remove(data) // what is left of one
	case os.Geteuid() != 0:
		return nil, berm.Errorf(berm.Denied, "only root mounts a depot").WithHint("run berm serve as root, or keep the data directory on XFS or btrfs")
	case errors.Is(err, fs.ErrNotExist):
		err = create(ctx, data, size)
	}
	if err != nil {
		return nil, failed(err, "make the depot")
	}
	if err := d.mount(ctx, file, size); err != nil {
		return nil, err
	}
	if err := d.sweep(filepath.Join(data, linksName)); err != nil {
		return nil, failed(err, "look into the depot")
	}
	if size == 0 {
		if saved, err := os.ReadDir(d.Snapshots()); err != nil {
			return nil, failed(err, "look into the depot")
		} else if len(saved) == 0 {
			return nil, d.remove(data)
		}
	}
	return d, nil
}

// create makes the file with an empty file system in it. It has its name when it is whole.
func create(ctx context.Context, data string, size int64) error {
	if size < MinSize {
		return berm.Errorf(berm.Invalid, "a depot has %d MiB at least", MinSize>>20)
	}
	if feature.Reflink(data).Check(ctx) == nil {
		return berm.Errorf(berm.Invalid, "the data directory can clone disks itself: it needs no depot").WithHint("leave --depot out")
	}
	kind, err := choose()
	if err != nil {
		return err
	}
	fresh := filepath.Join(data, unfinished)
	if err := os.Remove(fresh); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(fresh, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	cu := cleanup.Make(func() { _ = os.Remove(fresh) })
	defer cu.Clean()
	if err := f.Truncate(size); err != nil {
		if errors.Is(err, unix.EFBIG) || errors.Is(err, unix.EINVAL) {
			return berm.Errorf(berm.Invalid, "the data directory's file system takes no file of %d GiB: %w", size>>30, err)
		}
		return err
	}
	if err := failpoint.Hit("depot.file"); err != nil {
		return err
	}
	if err := kind.make(ctx, fresh); err != nil {
		return err
	}
	if err := failpoint.Hit("depot.format"); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(fresh, filepath.Join(data, fileName)); err != nil {
		return err
	}
	cu.Release()
	return errors.Join(syncDir(data), failpoint.Hit("depot.name"))
}

// mount attaches the file and mounts what is in it, or takes over what an earlier server left
// mounted, and grows it to size.
func (d *Depot) mount(ctx context.Context, file string, size int64) error {
	f, err := os.OpenFile(file, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return failed(err, "open the depot")
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return failed(err, "open the depot")
	}
	if size != 0 && size < info.Size() {
		return berm.Errorf(berm.Invalid, "the depot has %d MiB and cannot shrink to %d MiB", info.Size()>>20, size>>20).
			WithHint("leave --depot at its size, or start without it: the depot goes when nothing is saved in it any more")
	}
	kind, err := kindOf(f)
	if err != nil {
		return err
	}
	if size > info.Size() {
		if err := f.Truncate(size); err != nil {
			return failed(err, "let the depot grow")
		}
		if err := failpoint.Hit("depot.grow"); err != nil {
			return err
		}
	}
	if err := os.Mkdir(d.place, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return failed(err, "make the depot's place")
	}
	// Sandboxes of an earlier server may use it, wherever it was mounted. Of one file there must not
	// be two devices, of one device all mounts are the same file system.
	device, err := mount.Attached(f)
	if err == nil && device == nil {
		device, err = mount.Loop(f, false, true)
	}
	if err != nil {
		return err
	}
	defer func() { _ = device.Close() }()
	if err := failpoint.Hit("depot.attach"); err != nil {
		return err
	}
	if err := unix.IoctlSetInt(int(device.Fd()), unix.LOOP_SET_CAPACITY, 0); err != nil {
		return failed(err, "let the depot's device grow")
	}
	if mounted, err := d.mounted(device); err != nil {
		return err
	} else if !mounted {
		fd, err := mount.New(kind.name, device.Name(), mount.NoDev|mount.NoSuid|mount.NoExec|mount.NoAtime, kind.options...)
		if err != nil {
			return berm.Errorf(berm.KindOf(err), "mount the depot: %w", err).
				WithHint("the kernel's log (dmesg) says why; xfs_repair and btrfs check look for errors in %s", file)
		}
		err = mount.Attach(fd, unix.AT_FDCWD, d.place)
		_ = unix.Close(fd)
		if err != nil {
			return err
		}
	}
	if err := failpoint.Hit("depot.mount"); err != nil {
		return err
	}
	if size != 0 { // whoever was interrupted may have come as far as the device
		if err := kind.grow(ctx, d.place); err != nil {
			return err
		}
	}
	for _, dir := range []string{d.Images(), d.Snapshots()} {
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return failed(err, "make a directory in the depot")
		}
	}
	return nil
}

// mounted says whether a device is mounted in the depot's place, from which it takes what else is.
func (d *Depot) mounted(device *os.File) (bool, error) {
	var want unix.Stat_t
	if err := unix.Fstat(int(device.Fd()), &want); err != nil {
		return false, failed(err, "look at the depot's device")
	}
	for {
		source, err := mount.Source(d.place)
		if err != nil || source == "" {
			return false, err
		}
		var got unix.Stat_t
		if unix.Stat(source, &got) == nil && got.Mode&unix.S_IFMT == unix.S_IFBLK && got.Rdev == want.Rdev {
			return true, nil
		}
		if err := unix.Unmount(d.place, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return false, failed(err, "unmount what is in the depot's place")
		}
	}
}

// sweep removes what no link leads to: whoever saved it was interrupted before there was one.
func (d *Depot) sweep(links string) error {
	saved, err := os.ReadDir(d.Snapshots())
	if err != nil {
		return err
	}
	for _, s := range saved {
		_, err := os.Lstat(filepath.Join(links, s.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			err = os.RemoveAll(filepath.Join(d.Snapshots(), s.Name()))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// remove takes a depot away. What sandboxes still have in it goes with them.
func (d *Depot) remove(data string) error {
	for _, name := range []string{fileName, unfinished} {
		if err := os.Remove(filepath.Join(data, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return failed(err, "remove the depot")
		}
	}
	if err := failpoint.Hit("depot.remove"); err != nil {
		return err
	}
	for {
		source, err := mount.Source(d.place)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if source == "" {
			break
		}
		if err := unix.Unmount(d.place, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return failed(err, "unmount the depot")
		}
	}
	if err := os.Remove(d.place); err != nil {
		return failed(err, "remove the depot's place")
	}
	return nil
}

// Close unmounts it, unless sandboxes use it, which may need its paths, or somebody has.
func (d *Depot) Close() error {
	if err := unix.Unmount(d.place, unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EINVAL) {
		return failed(err, "unmount the depot")
	}
	return nil
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// failed says what failed, where nothing said it better.
func failed(err error, what string) error {
	if known, ok := errors.AsType[*berm.Error](err); ok && known != nil {
		return err
	}
	return berm.Errorf(berm.Internal, "%s: %w", what, err)
}
