// Command berm-init is PID 1 of a sandbox. Its monitor starts it.
package main

import (
	"runtime"

	"github.com/berm-sandbox/berm/internal/driver/namespace/inside"
)

// The main goroutine stays on the main thread: credentials and the parent death
// signal belong to threads.
func init() { runtime.LockOSThread() }

func main() { inside.Main() }
