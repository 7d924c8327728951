package process

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/process/ledger"
	"github.com/berm-sandbox/berm/internal/kernel/notify"
)

// Listeners makes records of what runs inside sandboxes whose monitors listen: where BPF cannot be
// had.
type Listeners struct {
	audit  audit.Emitter
	log    *slog.Logger
	hashes ledger.Hashes

	mu        sync.Mutex
	following map[berm.SandboxID]*following
}

// following is a sandbox that is followed.
type following struct {
	conn *net.UnixConn
	done chan struct{} // closed when all is recorded
}

// NewListeners begins to collect. Kind Unsupported says what the host lacks.
func NewListeners(emitter audit.Emitter, log *slog.Logger) (*Listeners, error) {
	if err := notify.Check(); err != nil {
		return nil, err
	}
	return &Listeners{audit: emitter, log: log, following: map[berm.SandboxID]*following{}}, nil
}

// Follow begins with a sandbox. late says that there was a time in which nobody did, of which the
// monitor kept what it had room for.
func (l *Listeners) Follow(id berm.SandboxID, first *berm.First, late bool) error {
	if first == nil || first.Watch == "" {
		return berm.Errorf(berm.Unsupported, "nobody hears what runs in sandbox %s", id)
	}
	conn, err := dial(first.Watch)
	if err != nil {
		return berm.Errorf(berm.NotFound, "the monitor of sandbox %s does not tell what runs inside: %w", id, err)
	}
	f := &following{conn: conn, done: make(chan struct{})}
	l.mu.Lock()
	before := l.following[id]
	l.following[id] = f
	l.mu.Unlock()
	if before != nil {
		before.conn.Close()
	}
	book := ledger.New(emitTo(l.audit, l.log, id, "seccomp"))
	if late {
		book.Gap("no server ran", 0)
	}
	go l.read(f, book)
	return nil
}

// dial connects to a socket whose path may be too long for its address.
func dial(path string) (*net.UnixConn, error) {
	dir, err := os.OpenFile(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	short := fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path))
	return net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: short, Net: "unixpacket"})
}

// read makes records until the sandbox ends.
func (l *Listeners) read(f *following, book *ledger.Ledger) {
	defer close(f.done)
	defer f.conn.Close()
	var lost uint64
	defer func() { book.Sum(lost) }()
	buffer := notify.NewBuffer()
	for next := time.Now().Add(time.Second); ; {
		_ = f.conn.SetReadDeadline(next)
		told, err := notify.Receive(f.conn, buffer)
		if now := time.Now(); now.After(next) {
			book.Sum(lost)
			next = now.Add(time.Second)
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			continue
		}
		if err != nil {
			return
		}
		if told.Refused != "" {
			book.Gap("the kernel refused a listener: "+told.Refused, 0)
			return
		}
		lost = told.Lost
		book.Heard(told.Event, &l.hashes, nil)
	}
}

// Forget ends it, when the sandbox has ended and what is known of its processes is recorded.
func (l *Listeners) Forget(id berm.SandboxID) {
	l.mu.Lock()
	f := l.following[id]
	delete(l.following, id)
	l.mu.Unlock()
	if f == nil {
		return
	}
	select {
	case <-f.done:
	case <-time.After(endTime):
	}
	f.conn.Close()
}

// Close ends it, and leaves the sandboxes to another one.
func (l *Listeners) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, f := range l.following {
		f.conn.Close()
		<-f.done
	}
}
