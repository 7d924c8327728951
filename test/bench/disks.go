package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/kernel/mount"
	"github.com/berm-sandbox/berm/test/harness"
)

// disks measures snapshots without a record of changes, and writing inside, where disks lie in different ways: on ext4, which
// copies, in a depot on that, and on XFS and btrfs in files on it.
func (b *bench) disks(ctx context.Context) error {
	rows := map[string]any{}
	for _, store := range []struct{ name, kind string }{{"ext4", "ext4"}, {"depot", "ext4"}, {"xfs", "xfs"}, {"btrfs", "btrfs"}} {
		flags := []string{"--record", "output,processes"} // changes are found by reading all that was written
		if store.name == "depot" {
			flags = append(flags, "--depot", "16GiB")
		}
		fmt.Printf("  -- %s\n", store.name)
		b.results = map[string]any{}
		err := on(store.kind, func() error {
			return servedWith(func(b *bench, ctx context.Context) error {
				return errors.Join(b.writes(ctx), b.snapshot(ctx))
			}, flags...)(b, ctx)
		})
		if err != nil {
			return fmt.Errorf("%s: %w", store.name, err)
		}
		rows[store.name] = b.results
	}
	b.results = rows
	return nil
}

// on runs a measurement with data directories on a new file system in a file.
func on(kind string, run func() error) error {
	dir, err := harness.DataDir()
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	disk, place := filepath.Join(dir, "disk"), filepath.Join(dir, "place")
	f, err := os.Create(disk)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := errors.Join(f.Truncate(20<<30), os.Mkdir(place, 0o700)); err != nil {
		return err
	}
	if out, err := exec.Command("mkfs."+kind, "-q", disk).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	device, err := mount.Loop(f, false, true)
	if err != nil {
		return err
	}
	fd, err := mount.New(kind, device.Name(), 0, mount.Flag("discard")) // else it grows with all that was ever written
	_ = device.Close()
	if err != nil {
		return err
	}
	if err := errors.Join(mount.Attach(fd, unix.AT_FDCWD, place), unix.Close(fd)); err != nil {
		return err
	}
	defer func() { _ = unix.Unmount(place, unix.MNT_DETACH) }()
	before := os.Getenv("TMPDIR")
	defer func() { _ = os.Setenv("TMPDIR", before) }()
	if err := os.Setenv("TMPDIR", place); err != nil {
		return err
	}
	return run()
}

// writes measures loads that write inside: much at once, and little with fsync after each.
func (b *bench) writes(ctx context.Context) error {
	sandbox, err := b.server.Create(ctx, 30*time.Minute, nil)
	if err != nil {
		return err
	}
	defer func() { _ = sandbox.Kill(context.WithoutCancel(ctx)) }()
	for name, text := range map[string]string{
		"256 MB, fsync":         "dd if=/dev/zero of=/big bs=1M count=256 conv=fsync 2>/dev/null; rm /big",
		"500 small, fsync each": "cd /root; for i in $(seq 500); do dd if=/dev/zero of=small$i bs=4k count=1 conv=fsync 2>/dev/null; done; rm small*",
	} {
		var row times
		for range b.samples(5) {
			begin := time.Now()
			if r, err := sandbox.Run(ctx, harness.Shell("root", text)); err != nil || r.Code != 0 {
				return fmt.Errorf("%s: exit %d, %w", name, r.Code, err)
			}
			row = append(row, time.Since(begin))
		}
		fmt.Printf("  %-28s %s\n", name, row)
		b.results[name] = row.summary()
	}
	return nil
}
