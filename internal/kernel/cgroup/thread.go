package cgroup

import (
	"os"
	"path/filepath"

	"github.com/berm-sandbox/berm"
)

// Inside runs start while the calling thread is in the group's v1 directories: a process
// that it starts is in them from its first moment. For v2 there is File. The caller has
// locked its goroutine to the thread.
//
// A thread that moves itself takes no lock that waits for all processors, as Add does
// for another process: that wait is several milliseconds on a busy host. start may take the
// thread to where control groups cannot be named.
func (g *Group) Inside(start func() error) (failed error) {
	for _, h := range g.hierarchies {
		if h.v2 {
			continue
		}
		own, err := os.OpenFile(filepath.Join(h.own, "tasks"), os.O_WRONLY, 0)
		if err != nil {
			return berm.Errorf(berm.Internal, "enter cgroup: %w", err)
		}
		defer own.Close()
		if err := write(h.path(g.id), "tasks", "0"); err != nil {
			return berm.Errorf(berm.Internal, "enter cgroup: %w", err)
		}
		defer func() {
			if _, err := own.WriteString("0"); err != nil && failed == nil {
				failed = berm.Errorf(berm.Internal, "leave cgroup: %w", err)
			}
		}()
	}
	return start()
}
