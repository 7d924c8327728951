package process

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
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

	followed
}

// NewListeners begins to collect. Kind Unsupported says what the host lacks.
func NewListeners(emitter audit.Emitter, log *slog.Logger) (*Listeners, error) {
	if err := notify.Check(); err != nil {
		return nil, err
	}
	return &Listeners{audit: emitter, log: log}, nil
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
	book := ledger.New(emitTo(l.audit, l.log, id, "seccomp"))
	if late {
		book.Gap("no server ran", 0)
	}
	l.begin(id, conn, func() { l.read(conn, book) })
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
func (l *Listeners) read(conn *net.UnixConn, book *ledger.Ledger) {
	var lost uint64
	defer func() { book.Sum(lost) }()
	buffer := notify.NewBuffer()
	for next := time.Now().Add(time.Second); ; {
		_ = conn.SetReadDeadline(next)
		told, err := notify.Receive(conn, buffer)
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
