package inside

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func open(t *testing.T, dir string) int {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

func TestEmpty(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	if err := os.WriteFile(outside+"/kept", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(dir+"/a/b", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, dir+"/a/link"); err != nil {
		t.Fatal(err)
	}
	for i := range 2000 { // more than one read of the directory
		if err := os.WriteFile(filepath.Join(dir, "a", "b", time.Duration(i).String()), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := empty(open(t, dir), time.Now()); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if _, err := os.Stat(outside + "/kept"); err != nil {
		t.Errorf("a link was followed: %v", err)
	}
}

// Processes of a sandbox may go on for a moment.
func TestEmptyWhileOthersWrite(t *testing.T) {
	dir := t.TempDir()
	work := func(until time.Time) {
		for time.Now().Before(until) {
			_ = os.MkdirAll(dir+"/a/b/c/d", 0o755)
			_ = os.WriteFile(dir+"/a/b/file", nil, 0o600)
			_ = os.Rename(dir+"/a/b/file", dir+"/a/b/c/d/file")
			_ = os.Remove(dir + "/a/b/c/d/file")
		}
	}
	done := make(chan struct{})
	end := time.Now().Add(300 * time.Millisecond)
	work(time.Now().Add(time.Millisecond))
	go func() { defer close(done); work(end) }()
	for fd := open(t, dir); ; {
		if err := empty(fd, time.Now().Add(othersEnd)); err != nil {
			t.Fatal(err)
		}
		select {
		case <-done:
			if err := empty(fd, time.Now()); err != nil {
				t.Fatal(err)
			}
			return
		default:
		}
	}
}

// One who never ends does not keep it for ever.
func TestEmptyGivesUp(t *testing.T) {
	dir := t.TempDir()
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
				_ = os.MkdirAll(dir+"/a/b", 0o755)
			}
		}
	}()
	defer func() { close(stop); <-done }()
	fd := open(t, dir)
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); {
		if err := empty(fd, time.Now()); err == unix.ENOTEMPTY {
			return
		} else if err != nil {
			t.Fatal(err)
		}
	}
	t.Error("it always came to an end")
}
