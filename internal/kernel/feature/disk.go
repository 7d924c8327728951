package feature

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/kernel/mount"
)

// LoopDevices are files as block devices, for writable layers of a limited size.
var LoopDevices = &Test{
	Name: "loop devices", Fix: "load the kernel's loop module: modprobe loop",
	try: func(context.Context) (string, error) {
		f, err := os.CreateTemp("", "berm-feature-")
		if err != nil {
			return "", failed(err, "make a file")
		}
		defer f.Close()
		defer os.Remove(f.Name())
		if err := f.Truncate(1 << 20); err != nil {
			return "", failed(err, "make a file")
		}
		device, err := mount.Loop(f, true, false)
		if err != nil {
			if berm.KindOf(err) == berm.Denied {
				return "", berm.Errorf(berm.Denied, "%w", err).WithHint("run as root")
			}
			return "", err
		}
		device.Close()
		return "", nil
	},
}

// Reflink is copying files of a directory's file system without copying their data.
func Reflink(dir string) *Test {
	return &Test{
		Name: "copies without copying (reflink)", MinVersion: "4.5",
		Fix: "berm serve --depot SIZE, or keep the data on btrfs, or on xfs made with reflink",
		try: func(context.Context) (string, error) {
			var files [2]*os.File
			for i := range files {
				f, err := os.CreateTemp(dir, "berm-feature-")
				if err != nil {
					return "", failed(err, "make a file")
				}
				defer f.Close()
				defer os.Remove(f.Name())
				files[i] = f
			}
			if _, err := files[0].Write(make([]byte, 64<<10)); err != nil {
				return "", failed(err, "write a file")
			}
			if err := unix.IoctlFileClone(int(files[1].Fd()), int(files[0].Fd())); err != nil {
				return "", berm.Errorf(berm.Unsupported, "%s cannot: %w", fileSystem(dir), err)
			}
			return fileSystem(dir), nil
		},
	}
}

// Subvolumes is making btrfs subvolumes, with snapshots and quotas, in a directory.
func Subvolumes(dir string) *Test {
	return &Test{
		Name: "snapshots (btrfs)", Fix: "keep the data on btrfs",
		try: func(context.Context) (string, error) {
			if name := fileSystem(dir); name != "btrfs" {
				return "", berm.Errorf(berm.Unsupported, "%s has none", name)
			}
			return "", nil
		},
	}
}

// DiskLimit is a limit on the size of a writable layer, by the ways that Berm has: an
// image on a loop device as root, tmpfs for others.
var DiskLimit = &Test{
	Name: "limit of disk space", Fix: "run as root with loop devices, or use a kernel since 6.6",
	try: func(ctx context.Context) (string, error) {
		loop := LoopDevices.Check(ctx)
		if loop == nil {
			return "images on loop devices", nil
		}
		if err := TmpfsAttributes.Check(ctx); err != nil {
			return "", berm.Errorf(berm.Unsupported, "no loop devices (%v) and no tmpfs (%v)", loop, err)
		}
		return "tmpfs, in memory", nil
	},
}

// fileSystems names what statfs says; others show as numbers.
var fileSystems = map[int64]string{
	unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs", unix.BTRFS_SUPER_MAGIC: "btrfs", unix.TMPFS_MAGIC: "tmpfs",
	unix.OVERLAYFS_SUPER_MAGIC: "overlay", unix.NFS_SUPER_MAGIC: "nfs", 0x2fc12fc1: "zfs", unix.F2FS_SUPER_MAGIC: "f2fs", unix.FUSE_SUPER_MAGIC: "fuse",
}

// fileSystem names the file system that holds dir.
func fileSystem(dir string) string {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return "unknown file system"
	}
	if name, ok := fileSystems[st.Type]; ok {
		return name
	}
	return fmt.Sprintf("file system %#x", st.Type)
}
