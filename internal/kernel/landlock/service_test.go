package landlock

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// withCgo is the exit code that tells that the test binary was linked with cgo.
const withCgo = 77

// readOnly is a service with threads from before it gave its rights away. It returns its
// exit code.
func readOnly(dir string) int {
	const threads = 4
	start, done := make(chan bool), make(chan error, threads)
	for range threads {
		go func() {
			runtime.LockOSThread()
			<-start
			done <- readsOnly(dir)
		}()
	}
	// Each thread has a no_new_privs of its own.
	_, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0)
	if errno == unix.ENOTSUP {
		return withCgo
	}
	if errno != 0 {
		fmt.Fprintln(os.Stderr, errno)
		return 1
	}
	if err := ReadOnly(dir, filepath.Join(dir, "missing")); err != nil {
		fmt.Fprintln(os.Stderr, "ReadOnly:", err)
		return 1
	}
	close(start)
	for range threads {
		if err := <-done; err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return 0
}

// readsOnly tries what a thread may and may not do.
func readsOnly(dir string) error {
	file := filepath.Join(dir, "file")
	if data, err := os.ReadFile(file); err != nil || string(data) != "content" {
		return fmt.Errorf("read: %q, %v", data, err)
	}
	for name, try := range map[string]func() error{
		"read outside":  func() error { _, err := os.ReadFile("/etc/passwd"); return err },
		"list outside":  func() error { _, err := os.ReadDir("/"); return err },
		"write":         func() error { return os.WriteFile(file, nil, 0o600) },
		"write outside": func() error { return os.WriteFile(dir+"-other", nil, 0o600) },
		"remove":        func() error { return os.Remove(file) },
		"rename":        func() error { return os.Rename(file, file+"2") },
		"execute":       func() error { return exec.Command("/bin/true").Run() },
	} {
		if err := try(); !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EXDEV) {
			return fmt.Errorf("%s: %v", name, err)
		}
	}
	return nil
}

func TestReadOnly(t *testing.T) {
	if ABI() < abiRefer {
		t.Skipf("Landlock ABI %d: what is tested came with 2 (kernel 5.19)", ABI())
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte("content"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), readOnlyVariable+"="+dir)
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState.ExitCode() == withCgo {
		t.Skip("Go reaches all threads in programs without cgo only, and the race detector links it")
	}
	if err != nil {
		t.Errorf("%v: %s", err, out)
	}
}
