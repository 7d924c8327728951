package process

import (
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	points "gvisor.dev/gvisor/pkg/sentry/seccheck/points/points_go_proto"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/process/ledger"
	"github.com/berm-sandbox/berm/internal/kernel/rights"
)

// Streams makes records of what runs inside sandboxes whose kernel, gVisor's, tells it.
type Streams struct {
	audit audit.Emitter
	log   *slog.Logger
	followed
}

// NewStreams begins to collect.
func NewStreams(emitter audit.Emitter, log *slog.Logger) *Streams {
	return &Streams{audit: emitter, log: log}
}

// handOver bounds how long a monitor takes to hand over the stream.
const handOver = 5 * time.Second

// Follow begins with a sandbox. late says that there was a time in which nobody did, of which the
// socket kept what it had room for.
func (s *Streams) Follow(id berm.SandboxID, first *berm.First, late bool) error {
	if first == nil || !first.Stream {
		return berm.Errorf(berm.Unsupported, "nothing tells what runs in sandbox %s", id)
	}
	stream, err := handedOver(first.Watch)
	if err != nil {
		return berm.Errorf(berm.NotFound, "the monitor of sandbox %s does not tell what runs inside: %w", id, err)
	}
	book := ledger.New(emitTo(s.audit, s.log, id, "gvisor"))
	if late {
		book.Gap("no server ran", 0)
	}
	s.begin(id, stream, func() { read(stream, book) })
	return nil
}

// handedOver asks a monitor for the stream of its sandbox.
func handedOver(path string) (*net.UnixConn, error) {
	conn, err := dial(path)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	_ = conn.SetReadDeadline(time.Now().Add(handOver))
	control := rights.Space(1)
	_, n, _, _, err := conn.ReadMsgUnix(make([]byte, 1), control)
	if err != nil {
		return nil, err
	}
	file := rights.File(control[:n], "stream")
	if file == nil {
		return nil, errors.New("no stream came")
	}
	defer file.Close()
	stream, err := net.FileConn(file)
	if err != nil {
		return nil, err
	}
	if unix, ok := stream.(*net.UnixConn); ok {
		return unix, nil
	}
	stream.Close()
	return nil, errors.New("what came is no stream")
}

// maxEvent is more than what a socket takes of one message.
const maxEvent = 1 << 20

// read makes records until the sandbox ends.
func read(stream *net.UnixConn, book *ledger.Ledger) {
	var lost, broken uint64
	defer func() { book.Sum(lost + broken) }()
	buffer := make([]byte, maxEvent)
	for next := time.Now().Add(time.Second); ; {
		_ = stream.SetReadDeadline(next)
		n, _, flags, _, err := stream.ReadMsgUnix(buffer, nil)
		if now := time.Now(); now.After(next) {
			book.Sum(lost + broken)
			next = now.Add(time.Second)
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			continue
		}
		if err != nil {
			return
		}
		e, err := decode(buffer[:n])
		if err != nil || flags&unix.MSG_TRUNC != 0 {
			broken++
			continue
		}
		lost = e.dropped
		e.record(book)
	}
}

// event is what gVisor tells.
type event struct {
	dropped uint64 // events that were, until now
	what    audit.Type
	process audit.Process
	argv    []string
	at      time.Time
}

var errBroken = errors.New("no event of gVisor's")

// decode reads one message: a header of three numbers, the size of which is the first
// (pkg/sentry/seccheck/sinks/remote/wire), and a protobuf message. What it is not to tell has no
// type.
func decode(raw []byte) (e event, err error) {
	if len(raw) < 8 {
		return e, io.ErrUnexpectedEOF
	}
	size, kind := int(binary.NativeEndian.Uint16(raw)), points.MessageType(binary.NativeEndian.Uint16(raw[2:]))
	e.dropped = uint64(binary.NativeEndian.Uint32(raw[4:]))
	if size < 8 || size > len(raw) {
		return e, errBroken
	}
	var context *points.ContextData
	switch kind {
	case points.MessageType_MESSAGE_SENTRY_CLONE:
		var m points.CloneInfo
		if err := proto.Unmarshal(raw[size:], &m); err != nil {
			return e, err
		}
		context = m.GetContextData()
		if m.GetCreatedThreadId() == m.GetCreatedThreadGroupId() { // else it is a thread
			e.what = audit.ProcFork
		}
		e.process.PID, e.process.PPID = int(m.GetCreatedThreadGroupId()), int(context.GetThreadGroupId())
	case points.MessageType_MESSAGE_SENTRY_EXEC:
		var m points.ExecveInfo
		if err := proto.Unmarshal(raw[size:], &m); err != nil {
			return e, err
		}
		context, e.what, e.argv = m.GetContextData(), audit.ProcExec, m.GetArgv()
		e.process.Exe, e.process.Cwd = m.GetBinaryPath(), audit.Shorten(context.GetCwd(), 1024)
	case points.MessageType_MESSAGE_SENTRY_EXIT_NOTIFY_PARENT:
		var m points.ExitNotifyParentInfo
		if err := proto.Unmarshal(raw[size:], &m); err != nil {
			return e, err
		}
		context, e.what = m.GetContextData(), audit.ProcExit
		ledger.Ended(&e.process, syscall.WaitStatus(m.GetExitStatus()))
	default:
		return e, nil
	}
	if e.what != audit.ProcFork {
		e.process.PID, e.process.PPID = int(context.GetThreadGroupId()), int(context.GetParentThreadGroupId())
	}
	e.process.UID = int(context.GetCredentials().GetRealUid())
	e.at = time.Unix(0, context.GetTimeNs())
	return e, nil
}

func (e event) record(book *ledger.Ledger) {
	if e.what == "" {
		return
	}
	e.process.Ago = max(time.Since(e.at).Microseconds(), 0)
	book.Take(e.what, e.process, func(p *audit.Process) {
		if e.what == audit.ProcExec {
			ledger.Args(p, e.argv, false)
		}
	})
}
