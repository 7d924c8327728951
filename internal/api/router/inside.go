package router

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"syscall"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/capture"
	"github.com/berm-sandbox/berm/internal/control"
)

// Inside sends requests of the server's own into sandboxes. They are recorded, looked through for
// secrets and cut like those of clients.
type Inside struct {
	Sessions *control.Manager
	Capture  *capture.Recorder
}

// Do sends a request to a port of a sandbox, which it wakes as a client would, with the access
// token. The caller closes the answer's body, which ends with an error when the sandbox pauses or
// dies. Kinds: NotFound (the sandbox is dead or stays paused), Unavailable (nothing listens, or what
// listens speaks no HTTP).
func (i Inside) Do(r *http.Request, id berm.SandboxID, port uint16, actor audit.Actor) (*http.Response, error) {
	route, err := i.Sessions.Route(id)
	if err != nil {
		return nil, err
	}
	life, err := route.Enter(r.Context())
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(r.Context())
	cut := context.AfterFunc(life, func() { cancel(errCut) })
	r = r.WithContext(ctx)
	r.URL.Scheme, r.URL.Host = "http", net.JoinHostPort("sandbox", strconv.Itoa(int(port)))
	if route.AccessToken != "" {
		r.Header.Set("X-Access-Token", route.AccessToken)
	}
	masks := route.HasSecrets()
	if masks {
		plain(r.Header)
	}
	// One connection for each: it ends with the request, which tells the server inside.
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			conn, err := dialStarting(ctx, route, port)
			if err != nil {
				return nil, err
			}
			return answered{conn}, nil
		},
		DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: maxAnswerHeader,
		WriteBufferSize: 32 << 10, ReadBufferSize: 32 << 10,
	}
	answer := &entered{ctx: ctx, leave: func() { cut(); cancel(nil) }}
	response, err := i.send(r, route, port, actor, transport, masks)
	if err != nil {
		err = answer.explain(err)
		answer.leave()
		return nil, err
	}
	answer.ReadCloser, response.Body = response.Body, answer
	return response, nil
}

// answered is a connection to a server that may answer and close before it has read the whole request.
// What it does not read is dropped: the transport then reads the answer, where the error of a write
// would have it give up.
type answered struct{ net.Conn }

func (a answered) Write(p []byte) (int, error) {
	n, err := a.Conn.Write(p)
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
		return len(p), nil
	}
	return n, err
}

func (i Inside) send(r *http.Request, route *control.Route, port uint16, actor audit.Actor, transport *http.Transport, masks bool) (*http.Response, error) {
	var call capture.Call
	if port == berm.AgentPort {
		var err error
		if call, err = i.Capture.Request(r, capture.Caller{Sandbox: route.ID, Actor: actor, Known: true}); err != nil {
			return nil, err
		}
	}
	response, err := transport.RoundTrip(r)
	if err != nil {
		if call != nil {
			call.Failed(err)
		}
		return nil, err
	}
	if masks {
		if err := mask(route, response); err != nil {
			response.Body.Close()
			return nil, err
		}
	}
	if call != nil {
		if err := call.Answer(response); err != nil {
			response.Body.Close()
			return nil, err
		}
	}
	return response, nil
}

// entered is the body of an answer from inside.
type entered struct {
	io.ReadCloser
	ctx   context.Context
	leave func()
}

func (e *entered) Read(p []byte) (int, error) {
	n, err := e.ReadCloser.Read(p)
	if err != nil && err != io.EOF { //nolint:errorlint // a stream's end
		err = e.explain(err)
	}
	return n, err
}

func (e *entered) Close() error {
	defer e.leave()
	return e.ReadCloser.Close()
}

// explain gives an error of the way inside its kind.
func (e *entered) explain(err error) error {
	if errors.Is(context.Cause(e.ctx), errCut) {
		return berm.Errorf(berm.NotFound, "%w", errCut)
	}
	if _, known := errors.AsType[*berm.Error](err); known {
		return err
	}
	return berm.Errorf(berm.Unavailable, "%w", err)
}
