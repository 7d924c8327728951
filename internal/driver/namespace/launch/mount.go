package launch

import (
	"os"

	"github.com/berm-sandbox/berm/internal/kernel/mount"
	"golang.org/x/sys/unix"
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
		loop, err := mount.Loop(image, false, false)
		if err != nil {
			return nil, err
		}
		defer loop.Close()
		return file(mount.New("ext4", loop.Name(), mount.NoDev|mount.NoAtime, imageOptions...))
	case u.Directory != "":
		return file(mount.Clone(unix.AT_FDCWD, u.Directory, false))
	}
	return nil, nil
}

// openTree makes a detached, read-only mount of a directory.
func openTree(path string) (*os.File, error) {
	tree, err := file(mount.Clone(unix.AT_FDCWD, path, false))
	if err != nil {
		return nil, err
	}
	if err := mount.SetAttr(int(tree.Fd()), mount.ReadOnly|mount.NoDev, 0, false); err != nil {
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
