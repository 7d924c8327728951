package main

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// "all:" takes the placeholder too, so that the package compiles on a clean checkout.
//
//go:embed all:platform
var carried embed.FS

const platformName = "berm-platform"

// executePlatform replaces this process by the platform. It returns only when it cannot.
func executePlatform() error {
	failed := func(err error) error { return berm.Errorf(berm.Internal, "start %s: %w", platformName, err) }
	path, err := unpackedPlatform()
	if err != nil {
		return failed(err)
	}
	if path != "" {
		_ = syscall.Exec(path, os.Args, os.Environ())
	}
	// No place to keep it, or one on which nothing may be executed.
	content, err := carried.ReadFile("platform/" + runtime.GOARCH + "/" + platformName)
	if errors.Is(err, fs.ErrNotExist) {
		return berm.Errorf(berm.Unsupported, "this build of berm runs only local mode").WithHint("build it with `make build`")
	}
	if err != nil {
		return failed(err)
	}
	fd, err := unix.MemfdCreate(platformName, unix.MFD_CLOEXEC|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3 they are executable
		fd, err = unix.MemfdCreate(platformName, unix.MFD_CLOEXEC)
	}
	if err != nil {
		return failed(err)
	}
	f := os.NewFile(uintptr(fd), platformName)
	if _, err := f.Write(content); err != nil {
		return failed(err)
	}
	return failed(syscall.Exec(fmt.Sprintf("/proc/self/fd/%d", fd), os.Args, os.Environ()))
}

// openPlatform opens the platform, for a process of its own.
func openPlatform() (*os.File, error) {
	path, err := unpackedPlatform()
	if err == nil && path == "" {
		err = errors.New("there is no place to keep it in the user's cache")
	}
	var file *os.File
	if err == nil {
		file, err = os.Open(path)
	}
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "start %s: %w", platformName, err)
	}
	return file, nil
}

// unpackedPlatform returns the path of the platform in the user's cache, where it is
// written the first time. It returns "" when there is no such place.
func unpackedPlatform() (string, error) {
	var self unix.Stat_t
	if err := unix.Stat("/proc/self/exe", &self); err != nil {
		return "", err
	}
	cache, err := os.UserCacheDir()
	if os.Geteuid() == 0 {
		cache, err = "/var/cache", nil
	}
	if err != nil {
		return "", nil
	}
	dir := filepath.Join(cache, "berm", "bin")
	// The file that carries it stands for its content, which takes too long to hash.
	name := fmt.Sprintf("%s-%x-%x-%x-%x", platformName, self.Dev, self.Ino, self.Size, self.Ctim.Nano())
	path := filepath.Join(dir, name)
	var there unix.Stat_t
	if unix.Stat(path, &there) == nil && there.Uid == uint32(os.Geteuid()) && there.Mode&0o022 == 0 {
		return path, nil
	}
	content, err := carried.ReadFile("platform/" + runtime.GOARCH + "/" + platformName)
	if err != nil {
		return "", nil // told by the caller
	}
	if os.MkdirAll(dir, 0o700) != nil {
		return "", nil
	}
	f, err := os.CreateTemp(dir, ".new-")
	if err != nil {
		return "", nil
	}
	defer os.Remove(f.Name())
	_, err = f.Write(content)
	if err = errors.Join(err, f.Chmod(0o555), f.Close()); err != nil {
		return "", nil
	}
	earlier, _ := filepath.Glob(filepath.Join(dir, platformName+"-*"))
	if err := os.Rename(f.Name(), path); err != nil {
		return "", nil
	}
	for _, old := range earlier { // those that run keep their file
		if info, err := os.Stat(old); err == nil && old != path && time.Since(info.ModTime()) > 24*time.Hour {
			os.Remove(old)
		}
	}
	return path, nil
}
