package process

import (
	"runtime"
	"sync"
)

// spareThreads is how many threads the agent keeps: more than it has calls into the
// kernel at once.
const spareThreads = 16

// reserveThreads makes the Go runtime create threads now and keep them. Once
// processes inside have used up the sandbox's limit of tasks there are no more to be
// had, and the runtime ends a program that needs one: the agent would die of
// somebody else's fork bomb. An agent that has started nothing has none to fear.
var reserveThreads = sync.OnceFunc(func() {
	var all sync.WaitGroup
	all.Add(spareThreads)
	for range spareThreads {
		go func() {
			runtime.LockOSThread()
			all.Done()
			all.Wait() // each of them holds a thread until all have one
			runtime.UnlockOSThread()
		}()
	}
	all.Wait()
})
