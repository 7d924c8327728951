package router

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit/capture"
	"github.com/berm-sandbox/berm/internal/control"
)

// line holds the connections into one sandbox during one of its lives, from start
// or resume to pause or death. Idle ones are bounded so that a sandbox costs few
// descriptors; those in use are as many as its clients.
type line struct {
	life  context.Context
	http1 *http.Transport
	http2 *http.Transport // with prior knowledge, for gRPC
}

const (
	maxIdle  = 2
	idleTime = 30 * time.Second
	// maxAnswerHeader bounds what one answer from inside takes of the server's memory
	// before the client gets any of it. The default is 10 MiB for each request.
	maxAnswerHeader = 256 << 10
)

// line returns the connections into a sandbox.
func (rt *Router) line(route *control.Route, life context.Context) *line {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	if l := rt.lines[route.ID]; l != nil && l.life == life {
		return l
	}
	dial := func(ctx context.Context, _, addr string) (net.Conn, error) {
		_, port, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil {
			return nil, err
		}
		return dialStarting(ctx, route, uint16(n))
	}
	var h2c http.Protocols
	h2c.SetUnencryptedHTTP2(true)
	l := &line{
		life: life,
		http1: &http.Transport{
			DialContext: dial, MaxIdleConns: maxIdle, MaxIdleConnsPerHost: maxIdle, IdleConnTimeout: idleTime,
			MaxResponseHeaderBytes: maxAnswerHeader,
			DisableCompression:     true, // the client's own choice goes through
			// A server inside has whatever certificate it made for itself.
			TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
			WriteBufferSize: 32 << 10, ReadBufferSize: 32 << 10,
		},
		http2: &http.Transport{
			DialContext: dial, MaxIdleConns: 1, MaxIdleConnsPerHost: 1, IdleConnTimeout: idleTime,
			MaxResponseHeaderBytes: maxAnswerHeader, DisableCompression: true, Protocols: &h2c,
		},
	}
	rt.lines[route.ID] = l
	context.AfterFunc(life, func() {
		rt.mu.Lock()
		if rt.lines[route.ID] == l {
			delete(rt.lines, route.ID)
		}
		rt.mu.Unlock()
		l.http1.CloseIdleConnections()
		l.http2.CloseIdleConnections()
	})
	return l
}

// dialStarting dials a port, and again for a while when nothing listens on it: a
// server that was started a moment ago is found.
func dialStarting(ctx context.Context, route *control.Route, port uint16) (net.Conn, error) {
	for wait := 25 * time.Millisecond; ; wait *= 2 {
		conn, err := route.Dial(ctx, port)
		if err == nil || berm.KindOf(err) != berm.Unavailable || wait > 400*time.Millisecond {
			return conn, err
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// RoundTrip sends a request over the protocol that it needs: gRPC knows only HTTP/2.
func (l *line) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme == "http" && r.ProtoMajor == 2 && strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
		return l.http2.RoundTrip(r)
	}
	return l.http1.RoundTrip(r)
}

// holdsKey says whether a header's value looks like an API key: e2b_ and 40
// hexadecimal digits.
func holdsKey(value string) bool {
	_, rest, ok := strings.Cut(value, "e2b_")
	return ok && len(rest) >= 40 && strings.Trim(rest[:40], "0123456789abcdef") == ""
}

// exchange is a request to a sandbox and what becomes of it.
type exchange struct {
	asked *http.Request        // as the client sent it
	call  capture.Call         // nil: it is not recorded
	json  func(*http.Response) // makes JSON of the answer, as it was asked for; nil: it is
}

// proxy makes the reverse proxy of one request.
func (l *line) proxy(route *control.Route, port uint16, x exchange) *httputil.ReverseProxy {
	masks := port == berm.AgentPort && route.HasSecrets()
	p := &httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) {
			scheme := "http"
			if slices.Contains(route.HTTPSPorts, port) {
				scheme = "https"
			}
			// The host only names the connection pool: Dial goes by the port.
			p.Out.URL = &url.URL{
				Scheme: scheme, Host: net.JoinHostPort("sandbox", strconv.Itoa(int(port))),
				Path: p.In.URL.Path, RawPath: p.In.URL.RawPath, RawQuery: p.In.URL.RawQuery, ForceQuery: p.In.URL.ForceQuery,
			}
			p.SetXForwarded()
			p.Out.Host = p.In.Host
			if route.MaskHost != "" && port != berm.AgentPort {
				p.Out.Host = strings.ReplaceAll(route.MaskHost, "${PORT}", strconv.Itoa(int(port)))
			}
			if masks {
				plain(p.Out.Header)
			}
			// A sandbox is not trusted with what opens others.
			p.Out.Header.Del(trafficHeader)
			for _, name := range []string{"X-Api-Key", "Authorization"} {
				if slices.ContainsFunc(p.Out.Header[name], holdsKey) {
					p.Out.Header.Del(name)
				}
			}
		},
		Transport:     l,
		FlushInterval: -1, // whatever comes goes on at once
		BufferPool:    buffers{},
		ErrorHandler:  func(w http.ResponseWriter, r *http.Request, err error) { failed(w, r, route.ID, port, err) },
		ErrorLog:      silent,
	}
	p.ModifyResponse = func(r *http.Response) error {
		if masks {
			if err := mask(route, r); err != nil {
				return err
			}
		}
		if x.call != nil {
			if err := x.call.Answer(r); err != nil {
				return &unrecorded{err}
			}
		}
		if x.json != nil {
			x.json(r)
		}
		return nil
	}
	if x.call != nil {
		p.ErrorHandler = func(w http.ResponseWriter, r *http.Request, err error) {
			var lost *unrecorded
			if errors.As(err, &lost) {
				capture.Refuse(w, x.asked, lost.error)
				return
			}
			x.call.Failed(err)
			failed(w, r, route.ID, port, err)
		}
	}
	return p
}

// unrecorded says that what was done is not in the audit log, so that the client must not
// take it for done.
type unrecorded struct{ error }

// failed answers a request that got no answer from inside.
func failed(w http.ResponseWriter, r *http.Request, id berm.SandboxID, port uint16, err error) {
	var berr *berm.Error
	switch {
	case errors.Is(context.Cause(r.Context()), errCut):
		gone(w, r, id)
	case r.Context().Err() != nil:
		panic(http.ErrAbortHandler) // the client is gone
	case errors.As(err, new(*unmasked)):
		refuse(w, r, http.StatusServiceUnavailable, problem{SandboxID: id, Message: err.Error(), Port: port, Code: http.StatusServiceUnavailable}, "Answer Withheld")
	case errors.As(err, &berr) && berr.Kind == berm.Unavailable:
		closed(w, r, id, port)
	case errors.As(err, &berr):
		gone(w, r, id)
	default:
		// The server inside broke the connection, or speaks no HTTP.
		refuse(w, r, http.StatusBadGateway, problem{SandboxID: id, Message: "The sandbox is running but the service on the port gave no valid answer", Port: port, Code: http.StatusBadGateway}, "No Valid Answer")
	}
}

// silent is for what ReverseProxy reports of clients that went away.
var silent = log.New(io.Discard, "", 0)

// buffers are shared by all proxied streams.
type buffers struct{}

var pool = sync.Pool{New: func() any { b := make([]byte, 64<<10); return &b }}

func (buffers) Get() []byte  { return *pool.Get().(*[]byte) }
func (buffers) Put(b []byte) { pool.Put(&b) }
