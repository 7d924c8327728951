// Apply restricts itself by Landlock, with several threads running, and then runs the
// shell script given.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"time"

	"github.com/berm-sandbox/berm/internal/kernel/landlock"
)

func main() {
	begin := time.Now()
	what, err := landlock.Apply(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Printf("%s (%d µs)\n", what, time.Since(begin).Microseconds())
	// A new goroutine may run on any thread: all must be restricted.
	failed := make(chan error)
	for range 8 {
		go func() {
			cmd := exec.Command("sh", "-ec", os.Args[2])
			cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
			failed <- cmd.Run()
		}()
	}
	for range 8 {
		if err := <-failed; err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}
