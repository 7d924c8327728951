package control

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

const (
	// keepLine is how long a connection to the guest agent is kept for the first request of a
	// sandbox's owner, as those of the router are.
	keepLine = 30 * time.Second
	// maxAgentAnswer bounds what an answer of the guest agent, which is not trusted, takes of the
	// server's memory, in bytes.
	maxAgentAnswer = 64 << 10
)

// agentAnswer is what the guest agent says to a request.
type agentAnswer struct {
	status int
	text   []byte
}

// askAgent makes one request over a connection to a guest agent. again says that the connection is as
// good as a new one afterwards.
func askAgent(ctx context.Context, conn net.Conn, r *http.Request) (a agentAnswer, again bool, err error) {
	failed := func(err error) (agentAnswer, bool, error) {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return agentAnswer{}, false, berm.Errorf(berm.Unavailable, "the guest agent does not answer: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	if err := r.Write(conn); err != nil {
		stop()
		return failed(err)
	}
	from := bufio.NewReader(io.LimitReader(conn, maxAgentAnswer))
	answer, err := http.ReadResponse(from, r)
	if err == nil {
		a.status = answer.StatusCode
		a.text, err = io.ReadAll(answer.Body)
		_ = answer.Body.Close()
	}
	if !stop() || err != nil {
		return failed(err)
	}
	return a, !answer.Close && from.Buffered() == 0, nil
}

// agentRequest is a request to the guest agent, which asks for token unless that is "".
func agentRequest(ctx context.Context, path, kind, token string, body any) (*http.Request, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "guest agent: %w", err)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://agent"+path, bytes.NewReader(text))
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "guest agent: %w", err)
	}
	request.Header.Set("Content-Type", kind)
	if token != "" {
		request.Header.Set("X-Access-Token", token)
	}
	return request, nil
}

// initAgent changes the configuration of the session's guest agent, which asks for token unless that
// is "". The connection is kept if it is one that was.
func (s *session) initAgent(ctx context.Context, token string, told berm.GuestConfig) error {
	ctx, cancel := context.WithTimeout(ctx, agentTime)
	defer cancel()
	request, err := agentRequest(ctx, "/init", "application/json", token, told)
	if err != nil {
		return err
	}
	conn := s.takeLine()
	kept := conn != nil
	if !kept {
		if conn, err = s.current().Dial(ctx, berm.AgentPort); err != nil {
			return err
		}
	}
	a, again, err := askAgent(ctx, conn, request)
	if kept && again {
		s.keepLine(conn)
	} else {
		_ = conn.Close()
	}
	switch {
	case err != nil:
		return err
	case a.status >= 300:
		return berm.Errorf(berm.Unsupported, "the guest agent does not take what programs inside are to have and to trust: %.1024s", a.text)
	}
	return nil
}

// warmUp is a command that does nothing, as a message of Connect's streams: no flags, four bytes of
// length, and JSON.
var warmUp = func() []byte {
	const command = `{"process":{"cmd":"/bin/sh","args":["-c",":"]},"stdin":false}`
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(command))), command...)
}()

// warmAgent has the agent of a sandbox that nobody has yet run a command: what that needs of the agent,
// of the kernel and of the template is there then, for the first one of the sandbox's owner. The
// connection is kept. Nothing depends on it: a template may have no shell.
func (s *session) warmAgent(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, agentTime)
	defer cancel()
	conn, err := s.current().Dial(ctx, berm.AgentPort)
	if err != nil {
		return
	}
	request, err := agentRequest(ctx, "/process.Process/Start", "application/connect+json", "", struct{}{})
	if err == nil {
		request.Body, request.ContentLength = io.NopCloser(bytes.NewReader(warmUp)), int64(len(warmUp))
		var again bool
		if _, again, err = askAgent(ctx, conn, request); err == nil && again {
			s.keepLine(conn)
			return
		}
	}
	_ = conn.Close()
}

// takeLine returns the connection to the agent that was kept, for whoever calls first, nil when there
// is none that lives.
func (s *session) takeLine() net.Conn {
	s.mu.Lock()
	conn := s.line
	s.line = nil
	s.mu.Unlock()
	if conn == nil || quiet(conn) {
		return conn
	}
	_ = conn.Close()
	return nil
}

// keepLine keeps a connection to the agent for takeLine.
func (s *session) keepLine(conn net.Conn) {
	s.mu.Lock()
	before := s.line
	s.line = conn
	s.mu.Unlock()
	if before != nil {
		_ = before.Close()
	}
}

// boundLine has the connection that is kept closed when it was for long, or streams into the sandbox are
// cut.
func (s *session) boundLine() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.line != nil {
		stop := context.AfterFunc(s.life, s.dropLine)
		time.AfterFunc(keepLine, func() { stop(); s.dropLine() })
	}
}

// dropLine closes the connection that is kept.
func (s *session) dropLine() {
	if conn := s.takeLine(); conn != nil {
		_ = conn.Close()
	}
}

// quiet says whether the other end of a connection has neither closed it nor said anything.
func quiet(conn net.Conn) bool {
	c, ok := conn.(syscall.Conn)
	if !ok {
		return true
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	waiting := false
	err = raw.Read(func(fd uintptr) bool {
		_, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		waiting = err == unix.EAGAIN
		return true
	})
	return err == nil && waiting
}
