// Package router finds the sandbox that a request is for and proxies to it; what is
// for no sandbox goes to the control plane. All of it shares one port.
package router

import (
	"context"
	"crypto/subtle"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/capture"
	"github.com/berm-sandbox/berm/internal/control"
)

// Config is what a Router is made of.
type Config struct {
	Sessions *control.Manager
	Control  http.Handler // the control plane
	// Domain is the domain under which sandboxes have host names, without a port. ""
	// takes any domain.
	Domain string
	// Capture records what is asked of guest agents.
	Capture *capture.Recorder
	Log     *slog.Logger
}

// Router is the one handler of a server.
type Router struct {
	Config

	mu    sync.Mutex
	lines map[berm.SandboxID]*line
}

// New makes a Router.
func New(c Config) *Router { return &Router{Config: c, lines: map[berm.SandboxID]*line{}} }

// target is a port of a sandbox.
type target struct {
	id   berm.SandboxID
	port uint16
}

const (
	idHeader      = "E2b-Sandbox-Id"
	portHeader    = "E2b-Sandbox-Port"
	trafficHeader = "E2b-Traffic-Access-Token"
)

// ServeHTTP serves one request.
func (rt *Router) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	defer drain(w, r)
	to, found, err := rt.find(r)
	switch {
	case berm.KindOf(err) == berm.Denied && err != nil:
		answerJSON(w, http.StatusUnauthorized, problem{Message: err.Error(), Code: http.StatusUnauthorized})
	case err != nil:
		answerJSON(w, http.StatusBadRequest, problem{Message: err.Error(), Code: http.StatusBadRequest})
	case found:
		rt.proxy(w, r, to)
	default:
		rt.Control.ServeHTTP(w, r)
	}
}

// maxDrain bounds the rest of a body that is read for the client's sake, in bytes, as
// net/http does for HTTP/1.
const maxDrain = 256 << 10

// drain takes in what was not read of a small body. HTTP/2 resets the stream of a body
// that comes after the answer, and clients take that for a failure of the request.
func drain(w http.ResponseWriter, r *http.Request) {
	if r.ProtoMajor != 2 || r.ContentLength <= 0 || r.ContentLength > maxDrain {
		return
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(drainTime))
	_, _ = io.CopyN(io.Discard, r.Body, maxDrain)
}

// find says which sandbox a request is for, if any. A name of a sandbox cannot be
// overridden by a header, so that a page of one sandbox cannot make a browser talk
// to another under its own origin.
func (rt *Router) find(r *http.Request) (to target, found bool, err error) {
	host := hostOf(r.Host)
	if to, ok := parseHost(host, rt.Domain); ok {
		return to, true, nil
	}
	gateway := rt.Domain != "" && host == "sandbox."+rt.Domain
	if !gateway && !rt.shared(host) {
		return target{}, false, nil
	}
	if id := r.Header.Get(idHeader); id != "" {
		to, err := parseHeaders(id, r.Header.Get(portHeader))
		return to, true, err
	}
	if isPreflight(r) { // browsers ask without naming a sandbox
		return target{}, false, nil
	}
	if toAgent(r.URL.Path) {
		id, err := rt.byToken(r)
		return target{id, berm.AgentPort}, true, err
	}
	if gateway {
		return target{}, false, berm.Errorf(berm.Invalid, "the header %s is missing", idHeader)
	}
	return target{}, false, nil
}

// shared says whether host is a name of the server itself, on which a header
// chooses the sandbox. A server that has no domain goes by every name.
func (rt *Router) shared(host string) bool {
	if _, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil || host == "localhost" {
		return true
	}
	return rt.Domain == ""
}

// hostOf is the host name of a Host header in lower case, without port and trailing
// dot.
func hostOf(hostport string) string {
	host, _, err := net.SplitHostPort(hostport)
	if err != nil {
		host = hostport
	}
	return strings.TrimSuffix(strings.ToLower(host), ".")
}

// parseHost reads a host name of the form {port}-{id}.{domain}. Old clients have one
// more part behind the id.
func parseHost(host, domain string) (target, bool) {
	label, rest, ok := strings.Cut(host, ".")
	if !ok || domain != "" && rest != domain {
		return target{}, false
	}
	digits, id, ok := strings.Cut(label, "-")
	if !ok {
		return target{}, false
	}
	port, ok := parsePort(digits)
	if !ok {
		return target{}, false
	}
	parsed, err := berm.ParseSandboxID(id)
	return target{parsed, port}, err == nil
}

func parseHeaders(id, port string) (target, error) {
	to := target{port: berm.AgentPort}
	var err error
	if to.id, err = berm.ParseSandboxID(id); err != nil {
		return to, err
	}
	if port != "" { // clients before 2.0 do not send it
		var ok bool
		if to.port, ok = parsePort(port); !ok {
			return to, berm.Errorf(berm.Invalid, "Invalid sandbox port")
		}
	}
	return to, nil
}

func parsePort(s string) (uint16, bool) {
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return 0, false
		}
	}
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err == nil && n > 0
}

const files = "/files"

// toAgent says whether a path is one of the guest agent's that a client may ask for
// without naming a sandbox. The control plane has none of them.
func toAgent(path string) bool {
	return path == files || strings.HasPrefix(path, "/process.Process/") || strings.HasPrefix(path, "/filesystem.Filesystem/")
}

// maxSigned bounds the query of a signed URL in bytes: it is hashed once for every
// sandbox, for callers who have shown no key. A path has 4096 bytes at most, and each
// may be three characters.
const maxSigned = 16 << 10

// byToken finds the sandbox of a request to the guest agent that names none: a
// signed URL, or one of a client that sends no routing headers. It refuses in the
// words of the agent.
func (rt *Router) byToken(r *http.Request) (berm.SandboxID, error) {
	if token := r.Header.Get("X-Access-Token"); token != "" {
		id, ok := rt.Sessions.Match(func(of string) bool { return subtle.ConstantTimeCompare([]byte(of), []byte(token)) == 1 })
		if !ok {
			return "", berm.Errorf(berm.Denied, "access token present in header but does not match")
		}
		return id, nil
	}
	query := r.URL.Query()
	given := query.Get("signature")
	switch {
	case r.URL.Path != files:
		return "", berm.Errorf(berm.Denied, "unauthorized access, please provide a valid access token or method signing if supported")
	case given == "":
		return "", berm.Errorf(berm.Denied, "missing signature query parameter")
	case len(given) > 256 || len(r.URL.RawQuery) > maxSigned:
		return "", berm.Errorf(berm.Denied, "invalid signature")
	}
	operation := "read"
	if r.Method == http.MethodPost {
		operation = "write"
	}
	id, ok := rt.Sessions.Match(func(token string) bool {
		want := sign(query.Get("path"), operation, query.Get("username"), token, query.Get("signature_expiration"))
		return subtle.ConstantTimeCompare([]byte(want), []byte(given)) == 1
	})
	if !ok {
		return "", berm.Errorf(berm.Denied, "invalid signature")
	}
	return id, nil
}

// reserved are the routes of the guest agent that only the control plane may use.
var reserved = []string{"/init", "/freeze", "/unfreeze", "/fsfreeze", "/fsthaw", "/collapse", "/upgrade"}

// proxy carries one request into a sandbox.
func (rt *Router) proxy(w http.ResponseWriter, r *http.Request, to target) {
	if to.port == berm.AgentPort {
		if isPreflight(r) {
			preflight(w, r)
			return
		}
		if slices.Contains(reserved, strings.ToLower(path.Clean("/"+r.URL.Path))) {
			http.Error(w, "This path is reserved for the E2B control plane", http.StatusNotFound)
			return
		}
	}
	route, err := rt.Sessions.Route(to.id)
	if err != nil {
		gone(w, r, to.id)
		return
	}
	if route.TrafficToken != "" && to.port != berm.AgentPort {
		given := r.Header.Get(trafficHeader)
		if subtle.ConstantTimeCompare([]byte(given), []byte(route.TrafficToken)) != 1 {
			noTraffic(w, r, to.id, given == "")
			return
		}
	}
	life, err := route.Enter(r.Context())
	if err != nil {
		switch berm.KindOf(err) {
		case berm.NotFound:
			gone(w, r, to.id)
		default:
			rt.Log.Warn("sandbox cannot be entered", "sandbox", to.id, "error", err)
			refuse(w, r, http.StatusConflict, problem{SandboxID: to.id, Message: "The sandbox is in transition", Code: http.StatusConflict}, "Sandbox In Transition")
		}
		return
	}
	x := exchange{asked: r}
	if to.port == berm.AgentPort {
		who := caller(r, route)
		if r.Method == http.MethodPost && r.URL.Path == startPath && who.Known {
			route.Checkpoint(r.Context())
		}
		r, x.json = capture.Binary(r) //nolint:bodyclose // the proxy closes it
		if x.call, err = rt.Capture.Request(r, who); err != nil {
			capture.Refuse(w, x.asked, err)
			return
		}
	}
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(r.Context()))
	cut := context.AfterFunc(life, func() { cancel(errCut) })
	left := context.AfterFunc(r.Context(), func() { cancel(r.Context().Err()) })
	release := func() { cut(); cancel(nil) }
	if x.call != nil && x.call.Outlive(release) {
		left()
	} else {
		defer release()
	}
	// Streams go both ways at once, over HTTP/1.1 too. HTTP/2 always does.
	client := http.NewResponseController(w)
	_ = client.EnableFullDuplex()
	// The server reads what is left of a body before the next request; a client that
	// sends nothing more must not hold it.
	defer func() { _ = client.SetReadDeadline(time.Now().Add(drainTime)) }()
	rt.line(route, life).proxy(route, to.port, x).ServeHTTP(w, r.WithContext(ctx))
}

// startPath is where commands are started.
const startPath = "/process.Process/Start"

// caller says who asks a sandbox's guest agent for something. Whoever has its token was given
// it by the owner.
func caller(r *http.Request, route *control.Route) capture.Caller {
	who := capture.Caller{Sandbox: route.ID, Actor: audit.Actor{Type: "anonymous"}, Known: route.AccessToken == ""}
	if given := r.Header.Get("X-Access-Token"); route.AccessToken != "" && subtle.ConstantTimeCompare([]byte(given), []byte(route.AccessToken)) == 1 {
		who.Actor, who.Known = route.Owner, true
	}
	return who
}

const drainTime = 5 * time.Second

// errCut says that a stream was cut because its sandbox paused or died.
var errCut = errors.New("sandbox was paused or killed")

func isPreflight(r *http.Request) bool {
	return r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != ""
}

// preflight allows browsers everything: tokens are what protects a sandbox, and they
// are not sent by themselves as cookies are.
func preflight(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", "*")
	h.Set("Access-Control-Allow-Methods", "GET, POST, PUT, PATCH, DELETE, OPTIONS")
	h.Set("Access-Control-Allow-Headers", r.Header.Get("Access-Control-Request-Headers"))
	h.Set("Access-Control-Max-Age", "86400")
	w.WriteHeader(http.StatusNoContent)
}
