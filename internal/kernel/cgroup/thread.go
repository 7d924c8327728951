package cgroup

import "github.com/berm-sandbox/berm"

// Inside runs start while the calling thread is in the group's v1 directories: a process
// that it starts is in them from its first moment. For v2 there is File. The caller has
// locked its goroutine to the thread.
//
// A thread that moves itself takes no lock that waits for all processors, as Add does
// for another process: that wait is several milliseconds on a busy host.
func (g *Group) Inside(start func() error) (err error) {
	for _, h := range g.hierarchies {
		if h.v2 {
			continue
		}
		if err := write(h.path(g.id), "tasks", "0"); err != nil {
			return berm.Errorf(berm.Internal, "enter cgroup: %w", err)
		}
		defer func() {
			if back := write(h.own, "tasks", "0"); back != nil && err == nil {
				err = berm.Errorf(berm.Internal, "leave cgroup: %w", back)
			}
		}()
	}
	return start()
}
