// Command ways runs itself in every way that a program can be run, with a name for each as its
// argument: a static program, which no library looks over.
package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

const self = "/tmp/ways"

func main() {
	switch os.Args[1] {
	case "ran":
		return
	case "stay":
		time.Sleep(time.Second)
		return
	case "from-thread":
		thread(func() error { return syscall.Exec(self, []string{"ways", "ran", "exec-in-a-thread"}, nil) })
	case "memfd":
		check(memory(os.Args[2:]))
	case "twice":
		check(start("ran", "double-fork").Start())
		os.Exit(0) // nobody waits
	}
	check(start("ran", "child").Run())
	check(start("stay", "stays").Run())
	check(start("twice").Run())
	check(start("from-thread").Run())
	check(start("memfd", "ran", "memfd-short").Run())
	check(start("memfd", "stay", "memfd").Run())
	var all sync.WaitGroup
	for i := range 16 {
		all.Go(func() { thread(func() error { return start("ran", fmt.Sprintf("thread-%d", i)).Run() }) })
	}
	all.Wait()
}

func start(args ...string) *exec.Cmd {
	return &exec.Cmd{Path: self, Args: append([]string{"ways"}, args...), SysProcAttr: &syscall.SysProcAttr{Setsid: true}}
}

// thread runs f in a thread that ends with it.
func thread(f func() error) {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		done <- f()
	}()
	check(<-done)
}

// memory executes a copy of this program that no file system has.
func memory(args []string) error {
	name, _ := syscall.BytePtrFromString("ways")
	fd, _, failed := syscall.Syscall(memfdCreate, uintptr(unsafe.Pointer(name)), 0, 0)
	if failed != 0 {
		return failed
	}
	program, err := os.ReadFile(self)
	if err == nil {
		_, err = os.NewFile(fd, "memory").Write(program)
	}
	if err != nil {
		return err
	}
	empty, _ := syscall.BytePtrFromString("")
	argv, err := syscall.SlicePtrFromStrings(append([]string{"ways"}, args...))
	if err != nil {
		return err
	}
	const emptyPath = 0x1000 // AT_EMPTY_PATH
	_, _, failed = syscall.RawSyscall6(execveat, fd, uintptr(unsafe.Pointer(empty)), uintptr(unsafe.Pointer(&argv[0])), 0, emptyPath, 0)
	return fmt.Errorf("execveat: %w", failed)
}

func check(err error) {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = fmt.Errorf("%w: %s", err, exit.Stderr)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, os.Args, err)
		os.Exit(1)
	}
}
