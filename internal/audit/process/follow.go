package process

import (
	"net"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
)

// followed are sandboxes whose monitors tell what runs inside.
type followed struct {
	mu  sync.Mutex
	all map[berm.SandboxID]*following
}

// following is a sandbox that is followed.
type following struct {
	conn *net.UnixConn
	done chan struct{} // closed when all is recorded
}

// begin follows a sandbox, in the place of who did before: read makes records until conn ends.
func (f *followed) begin(id berm.SandboxID, conn *net.UnixConn, read func()) {
	now := &following{conn: conn, done: make(chan struct{})}
	f.mu.Lock()
	before := f.all[id]
	if f.all == nil {
		f.all = map[berm.SandboxID]*following{}
	}
	f.all[id] = now
	f.mu.Unlock()
	if before != nil {
		before.conn.Close()
	}
	go func() {
		defer close(now.done)
		defer conn.Close()
		read()
	}()
}

// Forget ends it, when the sandbox has ended and what is known of its processes is recorded.
func (f *followed) Forget(id berm.SandboxID) {
	f.mu.Lock()
	one := f.all[id]
	delete(f.all, id)
	f.mu.Unlock()
	if one == nil {
		return
	}
	select {
	case <-one.done:
	case <-time.After(endTime):
	}
	one.conn.Close()
}

// Close ends it, and leaves the sandboxes to another one.
func (f *followed) Close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, one := range f.all {
		one.conn.Close()
		<-one.done
	}
}
