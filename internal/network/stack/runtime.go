package stack

import (
	"runtime"
	"runtime/debug"
)

// Tune sets the Go runtime of a process that serves stacks and does little else.
//
// It takes half of the processors: what it passes on comes from sandboxes, which need the others
// meanwhile. A packet passes several goroutines, and each would wake a thread for the next one where a
// processor seems free.
func Tune() {
	debug.SetGCPercent(400) // most of its memory is packets on their way
	runtime.GOMAXPROCS(max(1, runtime.GOMAXPROCS(0)/2))
}

// grow makes the calling goroutine's stack as large at once as one needs that serves a connection.
// It would be doubled step by step, and copied each time, with more on it.
//
//go:noinline
func grow() {
	var room [6 << 10]byte
	touch(&room)
}

//go:noinline
func touch(room *[6 << 10]byte) { room[0] = 1 }
