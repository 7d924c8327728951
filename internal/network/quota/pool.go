package quota

import (
	"sync"

	"golang.org/x/sys/unix"
)

// otherFiles are the descriptors of a process that are for other things than what a pool counts.
const otherFiles = 256

// Memory is how many bytes of memory the network service may take: half of the machine's.
func Memory() int64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 1 << 30
	}
	return int64(info.Totalram) * int64(info.Unit) / 2
}

// Room is for how many of what takes so many bytes, and so many descriptors, a process has memory
// and descriptors. It is called before the process gives its rights away.
func Room(memory, each, files int64) int {
	most := memory / each
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err == nil {
		most = min(most, (int64(min(limit.Cur, 1<<30))-otherFiles)/files)
	}
	return int(max(most, 16))
}

// Pool is what all sandboxes of a process have together of something, such as flows. Half of it is
// for whoever comes first, and half is shared out, so that others, and those that come later, find
// some. S says which sandbox. Its methods are safe for concurrent use.
type Pool[S comparable] struct {
	most, own int

	mu   sync.Mutex
	used int
	each map[S]int // by those that are there, with some or without
}

// NewPool returns a pool of so many, of which one sandbox has no more than own; zero: no bound but
// its share.
func NewPool[S comparable](most, own int) *Pool[S] {
	return &Pool[S]{most: most, own: own, each: map[S]int{}}
}

// Join counts a sandbox among those that share.
func (p *Pool[S]) Join(s S) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.each[s] = 0
}

// Leave forgets one. What it still has it gives back later.
func (p *Pool[S]) Leave(s S) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.each, s)
}

// Take says whether a sandbox may have one more, and counts it. One that has left may not.
func (p *Pool[S]) Take(s S) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	has, joined := p.each[s]
	if !joined || p.used >= p.most || p.own > 0 && has >= p.own || p.used >= p.most/2 && has >= p.most/2/len(p.each) {
		return false
	}
	p.used++
	p.each[s]++
	return true
}

// Give takes one back.
func (p *Pool[S]) Give(s S) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used--
	if _, joined := p.each[s]; joined {
		p.each[s]--
	}
}

// Used is how many are taken.
func (p *Pool[S]) Used() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used
}
