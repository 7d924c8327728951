package namespace

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/namespace/plan"
	"github.com/berm-sandbox/berm/internal/kernel/rights"
	"github.com/berm-sandbox/berm/internal/monitor"
)

// look is a connection to the monitor's LayerFile. Who waits for the last answer reads; who
// asks in between is handed what the reader read.
type look struct {
	id   berm.SandboxID
	conn *net.UnixConn
	now  chan *berm.Written // answers to LayerNow
	last chan *berm.Written // one, or closed when the connection ended
	mu   sync.Mutex         // one question at a time
}

// Writable opens a look at the writable layer.
func (s *sandbox) Writable(ctx context.Context) (berm.Writable, error) {
	conn, err := s.driver.dial(ctx, s.id, monitor.LayerFile)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := s.client.Status(ctx); err != nil {
			return nil, err
		}
		return nil, berm.Errorf(berm.Unsupported, "what sandbox %s writes is in memory that only it sees, or an older version made it", s.id)
	} else if err != nil {
		return nil, berm.Errorf(berm.NotFound, "the writable layer of sandbox %s: %w", s.id, err)
	}
	l := &look{id: s.id, conn: conn, now: make(chan *berm.Written), last: make(chan *berm.Written, 1)}
	go l.receive()
	return l, nil
}

// receive reads answers until the connection ends.
func (l *look) receive() {
	defer close(l.last)
	defer close(l.now)
	op, control := make([]byte, 1), rights.Space(plan.MaxFDs)
	for {
		n, size, _, _, err := l.conn.ReadMsgUnix(op, control)
		if n == 0 || err != nil {
			return
		}
		var w *berm.Written
		if files := rights.Files(control[:size], "layer"); len(files) > 0 {
			w = &berm.Written{Upper: files[0], Layers: files[1:]}
		}
		switch op[0] {
		case monitor.LayerLast:
			l.last <- w
			return
		default:
			l.now <- w
		}
	}
}

// Now asks for the layer as it is.
func (l *look) Now(ctx context.Context) (*berm.Written, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	_ = l.conn.SetWriteDeadline(time.Now().Add(10 * time.Second))
	if _, err := l.conn.Write([]byte{monitor.LayerNow}); err != nil {
		return nil, l.gone()
	}
	select {
	case w, ok := <-l.now:
		if !ok {
			return nil, l.gone()
		}
		return w, l.check(w)
	case <-ctx.Done():
		_ = l.conn.Close() // its answer would be taken for another's
		return nil, berm.Errorf(berm.Unavailable, "the writable layer of sandbox %s: %w", l.id, context.Cause(ctx))
	}
}

// Last waits for the end of the sandbox.
func (l *look) Last(ctx context.Context) (*berm.Written, error) {
	select {
	case w, ok := <-l.last:
		if !ok {
			return nil, l.gone()
		}
		return w, l.check(w)
	case <-ctx.Done():
		return nil, berm.Errorf(berm.Unavailable, "the writable layer of sandbox %s: %w", l.id, context.Cause(ctx))
	}
}

func (l *look) check(w *berm.Written) error {
	if w == nil {
		return berm.Errorf(berm.Internal, "the monitor of sandbox %s cannot open its writable layer", l.id)
	}
	return nil
}

func (l *look) gone() error {
	return berm.Errorf(berm.NotFound, "the monitor of sandbox %s shows its writable layer no more", l.id)
}

// Close ends the look.
func (l *look) Close() error {
	go func() { // what nobody took
		for w := range l.now {
			closeWritten(w)
		}
	}()
	go func() {
		for w := range l.last {
			closeWritten(w)
		}
	}()
	return l.conn.Close()
}

func closeWritten(w *berm.Written) {
	if w != nil {
		w.Close()
	}
}
