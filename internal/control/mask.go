package control

import (
	"context"
	"io"
	"net"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/service"
)

// HasSecrets says whether there are secrets that must not come out of the sandbox. Mask takes
// them out of what does.
func (r *Route) HasSecrets() bool {
	info := r.s.snapshot()
	return info.Policy != nil && !info.Grants.empty()
}

// maskPatience is how long a stream waits for a broker that is started again.
const maskPatience = 3 * time.Second

// Mask has the secrets of the sandbox's credentials masked in a stream, which keeps its length.
// The broker does it: the secrets are nowhere else. Without it there is no stream, and one under
// way ends with it. Kind: Unavailable.
func (r *Route) Mask(ctx context.Context, body io.ReadCloser) (io.ReadCloser, error) {
	for end := time.Now().Add(maskPatience); ; {
		m, err := r.mask(ctx, body)
		if err == nil {
			return m, nil
		}
		if berm.KindOf(err) != berm.Unavailable || ctx.Err() != nil || time.Now().After(end) || !r.s.pauseFor(50*time.Millisecond) {
			return nil, err
		}
	}
}

func (r *Route) mask(ctx context.Context, body io.ReadCloser) (*masked, error) {
	_, broker := r.s.online.links()
	if broker == nil {
		return nil, berm.Errorf(berm.Unavailable, "what comes out of the sandbox cannot be looked through for secrets: the service of credentials is not there")
	}
	ours, theirs, err := service.Pair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	conn, err := service.Conn(ours)
	if err != nil {
		return nil, err
	}
	// A client that leaves must not take the broker's answer away: the link would end with it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), attachTime)
	defer cancel()
	if err := broker.MaskStream(ctx, theirs); err != nil {
		conn.Close()
		return nil, err
	}
	m := &masked{conn: conn, body: body, sent: make(chan struct{})}
	go m.send()
	return m, nil
}

// masked is a stream on its way through the broker.
type masked struct {
	conn *net.UnixConn
	body io.ReadCloser
	sent chan struct{} // closed when all has been sent to the broker
	n    int64         // bytes sent
	err  error         // of the body

	got int64
}

func (m *masked) send() {
	m.n, m.err = io.Copy(m.conn, onlyReader{m.body})
	close(m.sent) // before the broker can see the end and answer with its own
	if m.err == nil {
		_ = m.conn.CloseWrite()
	} else {
		m.conn.Close()
	}
}

// onlyReader keeps io.Copy from handing the connection to the body.
type onlyReader struct{ io.Reader }

// Read ends as the body does, and with an error when the broker has not sent all back.
func (m *masked) Read(p []byte) (int, error) {
	n, err := m.conn.Read(p)
	m.got += int64(n)
	if err == nil {
		return n, nil
	}
	select {
	case <-m.sent:
	default:
		if err == io.EOF { //nolint:errorlint // a stream's end
			return n, io.ErrUnexpectedEOF
		}
		return n, err
	}
	switch {
	case m.err != nil:
		return n, m.err
	case m.got != m.n:
		return n, io.ErrUnexpectedEOF
	}
	return n, err
}

func (m *masked) Close() error {
	_ = m.conn.Close()
	return m.body.Close()
}
