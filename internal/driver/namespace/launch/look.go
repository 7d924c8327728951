package launch

import (
	"net"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/monitor"
)

// looks serves looks at the writable layer, one at a time.
type looks struct {
	listener *net.UnixListener
	open     func() ([]int, error)

	mu   sync.Mutex
	conn *net.UnixConn // nil while nobody looks
	over chan struct{} // closed when conn is
}

// serveLooks lets the server look at the writable layer, if this process can reach it: what
// init made of memory is seen inside only.
func (s *Sandbox) serveLooks() (err error) {
	var root func() (int, error)
	switch {
	case s.upper != nil:
		root = func() (int, error) { return beneath(int(s.upper.Fd()), upperName) }
	case s.order.Upper.Directory != "":
		root = func() (int, error) { return beneath(unix.AT_FDCWD, filepath.Join(s.order.Upper.Directory, upperName)) }
	default:
		return nil
	}
	l := &looks{open: func() ([]int, error) { return s.openLayers(root) }}
	if l.listener, err = listen(monitor.LayerFile, l.begin); err == nil {
		s.looks = l
	}
	return err
}

// upperName is the upper directory in the writable layer; see wall.Layers.
const upperName = "upper"

// beneath opens a directory that no symbolic link leads to.
func beneath(dir int, path string) (int, error) {
	return unix.Openat2(dir, path, &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS})
}

// openLayers opens the writable layer and those below it.
func (s *Sandbox) openLayers(root func() (int, error)) (fds []int, err error) {
	fd, err := root()
	if err != nil {
		return nil, err
	}
	fds = append(fds, fd)
	for _, t := range s.order.Trees {
		if t.Upper || t.Host {
			continue
		}
		if fd, err = unix.Open(t.Path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
			closeAll(fds)
			return nil, err
		}
		fds = append(fds, fd)
	}
	return fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// begin ends the look before and answers what a new one asks.
func (l *looks) begin(conn *net.UnixConn) {
	over := make(chan struct{})
	l.mu.Lock()
	if l.conn != nil {
		l.conn.Close()
	}
	l.conn, l.over = conn, over
	l.mu.Unlock()
	go func() {
		defer close(over)
		defer conn.Close()
		for op := make([]byte, 1); ; {
			if n, err := conn.Read(op); n == 0 || err != nil || op[0] != monitor.LayerNow || l.answer(conn, op[0]) != nil {
				return
			}
		}
	}()
}

// answer sends the layer, or nothing beside op when it cannot be opened.
func (l *looks) answer(conn *net.UnixConn, op byte) error {
	_ = conn.SetWriteDeadline(time.Now().Add(monitor.LayerPatience))
	var rights []byte
	if fds, err := l.open(); err == nil {
		rights = unix.UnixRights(fds...)
		defer closeAll(fds)
	}
	_, _, err := conn.WriteMsgUnix([]byte{op}, rights, nil)
	return err
}

// last shows the layer once more, when nobody writes to it any more, and waits until it was
// looked at. Whoever looks may hang.
func (l *looks) last() {
	l.mu.Lock()
	conn, over := l.conn, l.over
	l.mu.Unlock()
	if conn == nil || l.answer(conn, monitor.LayerLast) != nil {
		return
	}
	select {
	case <-over:
	case <-time.After(monitor.LayerPatience):
		conn.Close()
	}
}

func (l *looks) close() {
	l.listener.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn != nil {
		l.conn.Close()
	}
}
