package server

import (
	"sync"

	"golang.org/x/sys/unix"
)

// What a flow costs this process at most, in bytes of memory, and the descriptors that are for
// other things than flows.
const (
	flowMemory = 128 << 10
	otherFiles = 256
)

// Memory is how many bytes of memory the service may take: half of the machine's.
func Memory() int64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 1 << 30
	}
	return int64(info.Totalram) * int64(info.Unit) / 2
}

// Flows is for how many flows at a time a process has descriptors and that memory. It is called
// before the process gives its rights away.
func Flows(memory int64) int {
	most := memory / flowMemory
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err == nil {
		most = min(most, int64(min(files.Cur, 1<<30))-otherFiles)
	}
	return int(max(most, 16))
}

// budget is how many flows all sandboxes have together. Half of them are for whoever comes first,
// and half are shared out, so that others, and those that come later, find some.
type budget struct {
	most int

	mu   sync.Mutex
	used int
	each map[*sandbox]int // by those that are there, with flows or without
}

// join counts a sandbox among those that share.
func (b *budget) join(x *sandbox) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.each[x] = 0
}

// leave forgets one, which has no flows any more.
func (b *budget) leave(x *sandbox) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.each, x)
}

// take says whether a sandbox may have one more flow, and counts it.
func (b *budget) take(x *sandbox) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.used >= b.most || b.used >= b.most/2 && b.each[x] >= b.most/2/len(b.each) {
		return false
	}
	b.used++
	b.each[x]++
	return true
}

// give takes a flow back.
func (b *budget) give(x *sandbox) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used--
	b.each[x]--
}
