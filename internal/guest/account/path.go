package account

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// Resolve makes path absolute and clean: "~" is the home directory, relative paths
// start there too, and "" is workdir, or the home directory without one. Symbolic
// links are left alone.
func (a *Account) Resolve(path, workdir string) (string, error) {
	if path == "" {
		path = workdir
	}
	if strings.IndexByte(path, 0) >= 0 {
		return "", errors.New("path holds a NUL byte")
	}
	if path != "" && path[0] == '~' {
		if len(path) > 1 && path[1] != '/' {
			return "", errors.New("cannot expand user-specific home dir")
		}
		path = a.Home + path[1:]
	}
	if !strings.HasPrefix(path, "/") {
		path = a.Home + "/" + path
	}
	return filepath.Clean(path), nil
}

// MakeDirs makes the directory and every missing parent with mode 0755 and gives
// those it made to the user. It fails with syscall.ENOTDIR when something else is
// in the way.
func (a *Account) MakeDirs(dir string) error {
	switch fi, err := os.Stat(dir); {
	case err == nil && fi.IsDir():
		return nil
	case err == nil:
		return &os.PathError{Op: "mkdir", Path: dir, Err: syscall.ENOTDIR}
	case !errors.Is(err, os.ErrNotExist):
		return err
	}
	if parent := filepath.Dir(dir); parent != dir {
		if err := a.MakeDirs(parent); err != nil {
			return err
		}
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		if !errors.Is(err, os.ErrExist) {
			return err
		}
		if fi, err := os.Stat(dir); err != nil || !fi.IsDir() {
			// a dangling symbolic link, or a file made meanwhile
			return &os.PathError{Op: "mkdir", Path: dir, Err: syscall.ENOTDIR}
		}
		return nil
	}
	return os.Lchown(dir, int(a.UID), int(a.GID))
}
