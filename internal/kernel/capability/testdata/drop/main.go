// Drop drops capabilities with several threads running and shows what each thread,
// the locked one first, and a program started afterwards, has left.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/berm-sandbox/berm/internal/kernel/capability"
)

func main() {
	var ready, done sync.WaitGroup
	done.Add(1)
	for range 4 { // threads that run, rather than goroutines
		ready.Add(1)
		go func() {
			runtime.LockOSThread()
			ready.Done()
			done.Wait()
		}()
	}
	ready.Wait()
	runtime.LockOSThread()
	begin := time.Now()
	if err := capability.Drop(capability.Inside); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Printf("took %d\n", time.Since(begin).Microseconds())
	threads, _ := filepath.Glob("/proc/self/task/*/status")
	for _, thread := range append([]string{"/proc/thread-self/status"}, threads...) {
		status, _ := os.ReadFile(thread)
		who := "thread"
		if thread == "/proc/thread-self/status" {
			who = "caller"
		}
		show(who, string(status))
	}
	status, err := exec.Command("cat", "/proc/self/status").Output()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	show("program", string(status))
	done.Done()
}

func show(who, status string) {
	for line := range strings.Lines(status) {
		if strings.HasPrefix(line, "Cap") {
			fmt.Print(who, " ", line)
		}
	}
}
