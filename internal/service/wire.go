package service

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/kernel/rights"
)

// maxLine bounds a message in bytes: a policy has at most 256 KiB as it is written.
const maxLine = 4 << 20

// Wire is one end of a connection. Its methods are safe for concurrent use, but Receive is
// for one goroutine.
type Wire struct {
	conn  *net.UnixConn
	lines *bufio.Scanner
	files []*os.File

	mu sync.Mutex
}

// NewWire makes an end.
func NewWire(conn *net.UnixConn) *Wire {
	w := &Wire{conn: conn}
	w.lines = bufio.NewScanner(w)
	w.lines.Buffer(nil, maxLine)
	return w
}

// maxFiles bounds the descriptors that came and were not taken. Each message brings three at
// most, but one read may see the end of a message and the beginning of the next.
const maxFiles = 6

// File takes the next descriptor that came with the message received last; nil is none. It is
// the caller's to close.
func (w *Wire) File() *os.File {
	if len(w.files) == 0 {
		return nil
	}
	file := w.files[0]
	w.files = w.files[1:]
	return file
}

// Close ends the connection.
func (w *Wire) Close() error { return w.conn.Close() }

// CloseWrite tells the other end that nothing more is sent.
func (w *Wire) CloseWrite() error { return w.conn.CloseWrite() }

// Read takes bytes, and keeps the descriptors that come with some.
func (w *Wire) Read(p []byte) (int, error) {
	control := rights.Space(3)
	n, controlLen, _, _, err := w.conn.ReadMsgUnix(p, control)
	for _, file := range rights.Files(control[:controlLen], "link") {
		if len(w.files) < maxFiles {
			w.files = append(w.files, file)
		} else {
			file.Close()
		}
	}
	if n == 0 && err == nil {
		return 0, io.EOF
	}
	return n, err
}

// firstTime is how long an owner may take to say what it is about.
const firstTime = 10 * time.Second

// First reads the message with which an owner begins, for which it has seconds.
func (w *Wire) First(v any) error {
	_ = w.conn.SetReadDeadline(time.Now().Add(firstTime))
	defer func() { _ = w.conn.SetReadDeadline(time.Time{}) }()
	return w.Receive(v)
}

// Receive reads the next message.
func (w *Wire) Receive(v any) error {
	if !w.lines.Scan() {
		if err := w.lines.Err(); err != nil {
			return err
		}
		return io.EOF
	}
	return json.Unmarshal(w.lines.Bytes(), v)
}

// Send writes a message with the descriptors that are not nil, which stay the caller's. What
// it was written from is wiped: it may hold a secret.
func (w *Wire) Send(v any, files ...*os.File) error {
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	line = append(line, '\n')
	defer clear(line)
	w.mu.Lock()
	defer w.mu.Unlock()
	fds, err := duplicates(files)
	if err != nil {
		return err
	}
	defer closeAll(fds)
	rest := line
	if len(fds) > 0 {
		if _, _, err := w.conn.WriteMsgUnix(line[:1], unix.UnixRights(fds...), nil); err != nil {
			return err
		}
		rest = line[1:]
	}
	_, err = w.conn.Write(rest)
	return err
}

// duplicates are descriptors of the files that are not nil. File.Fd would have them block,
// for everybody who has the link.
func duplicates(files []*os.File) (fds []int, err error) {
	for _, file := range files {
		if file == nil {
			continue
		}
		raw, err := file.SyscallConn()
		if err == nil {
			var dup error
			err = raw.Control(func(fd uintptr) {
				var own int
				if own, dup = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0); dup == nil {
					fds = append(fds, own)
				}
			})
			err = errors.Join(err, dup)
		}
		if err != nil {
			closeAll(fds)
			return nil, err
		}
	}
	return fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// Failure is an error on the wire.
type Failure struct {
	Kind berm.Kind `json:"kind"`
	Msg  string    `json:"msg"`
	Hint string    `json:"hint,omitempty"`
}

// Failed puts an error on the wire.
func Failed(err error) *Failure {
	return &Failure{Kind: berm.KindOf(err), Msg: err.Error(), Hint: berm.HintOf(err)}
}

// Err is the error again.
func (f *Failure) Err() error { return &berm.Error{Kind: f.Kind, Msg: f.Msg, Hint: f.Hint} }

// Pair makes both ends of a connection between two services.
func Pair() (one, other *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, berm.Errorf(berm.Internal, "make a connection: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "service"), os.NewFile(uintptr(fds[1]), "service"), nil
}

// Connect makes both ends of a connection, one of which is for another process.
func Connect() (ours *net.UnixConn, theirs *os.File, err error) {
	own, theirs, err := Pair()
	if err != nil {
		return nil, nil, err
	}
	defer own.Close()
	conn, err := net.FileConn(own)
	if err != nil {
		theirs.Close()
		return nil, nil, err
	}
	return conn.(*net.UnixConn), theirs, nil
}

// Conn makes a connection of its descriptor, which it closes.
func Conn(file *os.File) (*net.UnixConn, error) {
	if file == nil {
		return nil, berm.Errorf(berm.Invalid, "no connection came with the message")
	}
	defer file.Close()
	conn, err := net.FileConn(file)
	if err != nil {
		return nil, berm.Errorf(berm.Invalid, "what came is no connection: %w", err)
	}
	if unix, ok := conn.(*net.UnixConn); ok {
		return unix, nil
	}
	conn.Close()
	return nil, berm.Errorf(berm.Invalid, "what came is no Unix socket")
}
