package mount

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// loopTries bounds how often others may take the free device that was found.
const loopTries = 200

// Loop attaches a file to a free loop device and returns the device, whose name is
// its path. The kernel detaches it by itself when the returned file is closed and no
// mount uses it any more. directIO passes the page cache by on the lower side, where
// the file's file system can; without it data is cached twice.
// Kinds: Unsupported (no loop driver), Denied, Exhausted (no device is free).
func Loop(backing *os.File, readOnly, directIO bool) (*os.File, error) {
	control, err := unix.Open("/dev/loop-control", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT || err == unix.ENODEV || err == unix.ENXIO {
		return nil, berm.Errorf(berm.Unsupported, "no loop devices: %w", err).
			WithHint("the kernel needs CONFIG_BLK_DEV_LOOP; try: modprobe loop")
	}
	if err != nil {
		return nil, failed(err, "open /dev/loop-control")
	}
	defer unix.Close(control)

	config := unix.LoopConfig{Fd: uint32(backing.Fd())}
	config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR
	mode := unix.O_RDWR
	if readOnly {
		config.Info.Flags |= unix.LO_FLAGS_READ_ONLY
		mode = unix.O_RDONLY
	}
	if directIO {
		config.Info.Flags |= unix.LO_FLAGS_DIRECT_IO
	}
	for range loopTries {
		number, err := unix.IoctlRetInt(control, unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, failed(err, "find a free loop device")
		}
		name := fmt.Sprintf("/dev/loop%d", number)
		device, err := os.OpenFile(name, mode|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, failed(err, "open %s", name)
		}
		// Between finding and configuring, somebody else may take the device: EBUSY.
		err = unix.IoctlLoopConfigure(int(device.Fd()), &config)
		if err == nil {
			return device, nil
		}
		device.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, failed(err, "attach %s to %s", backing.Name(), name)
		}
	}
	return nil, berm.Errorf(berm.Exhausted, "no loop device is free")
}

// Attached opens the loop device that a file is attached to, under the name that it has; nil is
// none. What is attached under another name is not found.
// Kinds: Denied, NotFound (the device is not in /dev), Internal.
func Attached(backing *os.File) (*os.File, error) {
	var want unix.Stat_t
	if err := unix.Fstat(int(backing.Fd()), &want); err != nil {
		return nil, failed(err, "look at %s", backing.Name())
	}
	names, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, failed(err, "look for loop devices")
	}
	for _, name := range names {
		// It shows as a path in whatever mount namespace it was attached; of another root the end is right.
		path, err := os.ReadFile(name)
		if err != nil || filepath.Base(strings.TrimSuffix(string(path), "\n")) != filepath.Base(backing.Name()) {
			continue
		}
		device := "/dev/" + strings.Split(name, "/")[3]
		f, err := os.OpenFile(device, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.ENXIO) {
			continue // it is let go this moment
		}
		if err != nil {
			return nil, failed(err, "open %s", device)
		}
		info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
		if err == nil && info.Device == want.Dev && info.Inode == want.Ino {
			return f, nil
		}
		_ = f.Close()
		if err != nil && !errors.Is(err, unix.ENXIO) {
			return nil, failed(err, "look at %s", device)
		}
	}
	return nil, nil
}
