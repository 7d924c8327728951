package inspect

import (
	"bufio"
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"time"
)

// exchange is one request and its reply.
type exchange struct {
	http.ResponseWriter
	proxy   *Proxy
	client  *client
	in      *http.Request
	request Request
	host    string   // that is sent
	url     *url.URL // that is sent
	verdict Verdict
	changes int // of the policy, before it was judged
	body    *countedBody
	filter  Filter
	record  Record
}

// handle answers one request.
func (p *Proxy) handle(w http.ResponseWriter, r *http.Request) {
	c := r.Context().Value(clientKey{}).(*client)
	x := &exchange{ResponseWriter: w, proxy: p, client: c, in: r}
	x.record = Record{Flow: c.site.flow, Start: time.Now(), Method: r.Method, Path: r.URL.Path}
	defer x.end() // also when the handler is aborted
	if p.Begin != nil {
		end, ok := p.Begin()
		if !ok {
			x.crowd()
			return
		}
		defer end()
	}
	if denial := x.judge(); denial != nil {
		x.deny(denial)
		return
	}
	x.pass()
}

// crowd refuses a request that is one too many. A client that does not take the answer keeps
// neither the connection nor the head.
func (x *exchange) crowd() {
	control := http.NewResponseController(x.ResponseWriter)
	control.SetWriteDeadline(time.Now().Add(refusalTimeout)) //nolint:errcheck // the server's connections can
	clear(x.in.Header)
	x.deny(&Denial{Reason: ReasonLimit, Message: "too many requests at a time that are looked into", Hint: "wait for others to end"})
}

func (x *exchange) end() {
	if x.proxy.Log == nil {
		return
	}
	x.record.Duration = time.Since(x.record.Start)
	if x.body != nil {
		x.record.Sent = x.body.n.Load()
	}
	x.proxy.Log(x.record)
}

func (x *exchange) deny(d *Denial) {
	if x.record.Reason = d.Reason; x.record.Err == "" {
		x.record.Err = d.Message
	}
	if d.Rule != "" {
		x.record.Rule = d.Rule
	}
	clear(x.Header())
	if x.client.framing == nil {
		d.write(x, x.in)
		return
	}
	// What follows is not looked at any more.
	x.Header().Set("Connection", "close")
	rest := x.in.ContentLength != 0 && x.in.Header.Get("Expect") == ""
	control := http.NewResponseController(x.ResponseWriter)
	if rest {
		control.EnableFullDuplex() //nolint:errcheck // HTTP/1 can
	}
	d.write(x, x.in)
	if rest {
		// Many clients read no reply before they have sent everything, and would see nothing
		// but a broken connection.
		control.Flush()                                           //nolint:errcheck // the read tells
		control.SetReadDeadline(time.Now().Add(restTimeout))      //nolint:errcheck // the read tells
		io.Copy(io.Discard, io.LimitReader(x.in.Body, restLimit)) //nolint:errcheck // nothing is lost
	}
}

// How much and how long a client that was refused may go on to send.
const (
	restLimit   = 256 << 20
	restTimeout = 10 * time.Second
)

// judge checks the request's form and asks the judge.
func (x *exchange) judge() *Denial {
	c, r := x.client, x.in
	f := c.site.flow
	if c.framing != nil {
		c.seen++
		if denial := c.framing.refused(c.seen); denial != nil {
			x.record.Method, x.record.Path = "", "" // they are those of the replacement
			return denial
		}
	}
	if c.refusal != nil {
		return c.refusal
	}
	if len(r.Header) > fieldLimit {
		return &Denial{Status: http.StatusRequestHeaderFieldsTooLarge, Reason: ReasonFraming, Message: "the request has more than 100 fields"}
	}
	if r.Method == http.MethodConnect || r.Method == http.MethodTrace {
		return &Denial{Reason: ReasonMethod, Message: r.Method + " is never allowed",
			Hint: "connect to the host directly: Berm needs no proxy settings inside"}
	}
	seen, scheme := f.within(c.site.scheme)
	target, port, denial := originForm(r, seen, scheme)
	if denial != nil {
		return denial
	}
	authority := r.Host
	if f.Endpoint != "" {
		port = f.Port != 443
		authority = hostField(f, port)
	}
	x.record.Path, _, _ = strings.Cut(target, "?")
	if denial := upgrade(r); denial != nil {
		return denial
	}
	x.request = Request{
		Flow: f, Scheme: c.site.scheme, Method: r.Method, Authority: authority, Target: target,
		Header: r.Header, Size: r.ContentLength,
	}
	x.proxy.mu.Lock()
	x.changes = x.proxy.changes
	x.proxy.mu.Unlock()
	v := x.proxy.Judge.HTTP(r.Context(), x.request)
	x.verdict, x.record.Rule = v, v.Rule
	if v.Allow {
		x.host = hostField(f, port)
		var exact bool
		if x.url, exact = targetURL(c.site.scheme, f, v.Target); !exact {
			v = Verdict{Rule: v.Rule, Detail: "its target could not be sent as it was judged"}
		}
	}
	if !v.Allow {
		return x.denied(v)
	}
	if v.MaxBody > 0 && r.ContentLength > v.MaxBody {
		return x.tooLong()
	}
	return nil
}

// denied says what a verdict means to the client.
func (x *exchange) denied(v Verdict) *Denial {
	path, _, _ := strings.Cut(x.request.Target, "?")
	d := &Denial{Reason: v.Reason, Rule: v.Rule, Hint: v.Hint,
		Message: x.request.Method + " " + printable(path) + " at " + x.request.Flow.Address() + " is not allowed"}
	if v.Detail != "" {
		d.Message += ": " + v.Detail
	}
	if d.Reason == "" {
		d.Reason = ReasonPolicy
	}
	return d
}

func (x *exchange) tooLong() *Denial {
	return &Denial{Status: http.StatusRequestEntityTooLarge, Reason: ReasonBody, Rule: x.verdict.Rule,
		Message: "the request's body is longer than the rule allows"}
}

// upgrade refuses all upgrades but that to WebSocket (RFC 6455), which is judged. An offer
// of HTTP/2 is declined by silence (RFC 9110 section 7.8), since Java's client makes it in
// each plain request.
func upgrade(r *http.Request) *Denial {
	offers := r.Header.Values("Upgrade")
	if len(offers) == 0 {
		return nil
	}
	if len(offers) == 1 && r.ProtoMajor == 1 {
		switch strings.ToLower(offers[0]) {
		case "websocket":
			if r.Method == http.MethodGet && r.ContentLength == 0 {
				return nil
			}
		case "h2c":
			r.Header.Del("Upgrade")
			r.Header.Del("Http2-Settings")
			return nil
		}
	}
	return &Denial{Reason: ReasonUpgrade, Message: "an upgrade to " + printable(strings.Join(offers, ", ")) + " is never allowed"}
}

// pass sends the request on and the reply back.
func (x *exchange) pass() {
	ctx, cut := context.WithCancelCause(x.in.Context())
	defer cut(nil)
	p := x.proxy
	p.mu.Lock()
	p.active[x] = cut
	changed := x.changes != p.changes
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.active, x)
		p.mu.Unlock()
		if denial := (*Denial)(nil); errors.As(context.Cause(ctx), &denial) {
			x.record.Reason, x.record.Err = denial.Reason, denial.Message
		}
	}()
	if changed { // since the judge was asked, and before Rejudge could see the request
		if v := p.Judge.HTTP(ctx, x.request); !v.Allow {
			x.deny(x.denied(v))
			return
		}
	}
	in := x.in.WithContext(ctx) // a copy: the server looks at the type of its body
	if in.Body != nil && in.ContentLength != 0 {
		if x.verdict.MaxBody > 0 {
			in.Body = http.MaxBytesReader(x.ResponseWriter, in.Body, x.verdict.MaxBody)
		}
		x.body = &countedBody{ReadCloser: in.Body}
		in.Body = x.body
	}
	if x.in.ProtoMajor == 1 {
		// Otherwise the server reads the whole body before it sends a reply.
		http.NewResponseController(x.ResponseWriter).EnableFullDuplex() //nolint:errcheck // HTTP/1 can
	}
	proxy := httputil.ReverseProxy{
		Rewrite:        x.rewrite,
		Transport:      x,
		FlushInterval:  -1,
		BufferPool:     replyBuffers{},
		ModifyResponse: x.reply,
		ErrorHandler:   x.failed,
		ErrorLog:       discard,
	}
	proxy.ServeHTTP(x, in)
}

var discard = log.New(io.Discard, "", 0)

// rewrite makes the request that is sent. What concerns one connection alone is already
// gone. What tells of the client's side goes: servers believe it of a proxy.
func (x *exchange) rewrite(r *httputil.ProxyRequest) {
	r.Out.Host, r.Out.URL = x.host, x.url
	r.Out.Trailer = r.In.Trailer // filled while the body is read
	r.Out.Header.Del("X-Real-Ip")
	for name := range r.Out.Header {
		if strings.HasPrefix(name, "X-Forwarded-") {
			delete(r.Out.Header, name)
		}
	}
}

// RoundTrip adds credentials and sends the request.
func (x *exchange) RoundTrip(out *http.Request) (*http.Response, error) {
	if broker := x.proxy.Credentials; broker != nil {
		filter, err := broker.Attach(x.request, x.verdict, out)
		if err != nil {
			return nil, &refusal{err}
		}
		if x.filter = filter; filter != nil {
			// A reply that is encoded or in parts cannot be searched.
			out.Header.Set("Accept-Encoding", "identity")
			out.Header.Del("Range")
			out.Header.Del("If-Range")
			out.Header.Del("Sec-Websocket-Extensions")
		}
	}
	return x.client.site.transport.RoundTrip(out)
}

// refusal marks the errors of a broker and its filters. Their text, which may tell of
// secrets, stays outside.
type refusal struct{ error }

func (r *refusal) Unwrap() error { return r.error }

// reply is called with the head of the reply.
func (x *exchange) reply(res *http.Response) error {
	res.Header.Del("Alt-Svc") // there is no other way than this one
	home(res, x.request.Flow)
	if x.filter == nil {
		if broker := x.proxy.Credentials; broker != nil {
			if d := broker.Missing(x.request, res); d != nil {
				return d
			}
		}
		return nil
	}
	return filterReply(res, x.filter, func(err error) {
		x.record.Reason, x.record.Err = ReasonSecret, err.Error()
	})
}

// home lets a redirect within a flow that has an endpoint lead to the endpoint again.
func home(res *http.Response, f Flow) {
	if f.Endpoint == "" {
		return
	}
	at, err := url.Parse(res.Header.Get("Location"))
	if err != nil || at.Scheme != "https" || at.User != nil {
		return
	}
	if _, same := sameAuthority(at.Host, f); same && (f.Port == 443 || at.Port() != "") {
		at.Scheme, at.Host = "http", f.Endpoint
		res.Header.Set("Location", at.String())
	}
}

// failed answers a request that has no reply.
func (x *exchange) failed(_ http.ResponseWriter, out *http.Request, err error) {
	if denial := (*Denial)(nil); errors.As(context.Cause(out.Context()), &denial) {
		err = denial // the policy has changed
	}
	denial := x.explain(err)
	if !denial.Reason.Failed() || denial.Reason == ReasonUpstream && !said(err) {
		x.record.Err = err.Error()
	}
	if denial.Reason == ReasonUpstream && x.in.Context().Err() != nil {
		x.record.Err = "the client left before it was answered"
		panic(http.ErrAbortHandler) // the client has left; a return would be status 200
	}
	x.deny(denial)
}

// explain says what the client is told about an error.
func (x *exchange) explain(err error) *Denial {
	if x.proxy.Credentials != nil {
		if d := x.proxy.Credentials.Denial(err); d != nil {
			return d
		}
	}
	var tooLong *http.MaxBytesError
	var refused *refusal
	var denial *Denial
	switch {
	case errors.As(err, &denial):
		return denial
	case errors.As(err, &refused):
		return &Denial{Reason: ReasonSecret, Rule: x.verdict.Rule, Message: "the credential for " + x.request.Flow.Name + " could not be used"}
	case errors.As(err, &tooLong):
		return x.tooLong()
	case x.client.framing != nil && x.client.framing.broken() != nil:
		return x.client.framing.broken()
	}
	return upstreamFailed(x.request.Flow, err)
}

// WriteHeader notes the status. Heads before the last, such as 103, come from the upstream
// without having passed the filter. The server itself sends 100 when the body is read.
func (x *exchange) WriteHeader(status int) {
	if status < 200 && status != http.StatusSwitchingProtocols {
		if x.filter == nil && status != http.StatusContinue {
			x.ResponseWriter.WriteHeader(status)
		}
		return
	}
	if status >= 400 && x.client.framing != nil && x.body != nil && !x.body.ended.Load() {
		// The client will hardly send the rest, so the connection cannot be used again.
		x.Header().Set("Connection", "close")
	}
	x.record.Status = status
	x.ResponseWriter.WriteHeader(status)
}

func (x *exchange) Write(p []byte) (int, error) {
	n, err := x.ResponseWriter.Write(p)
	x.record.Received += int64(n)
	return n, err
}

// Unwrap lets http.ResponseController find Flush.
func (x *exchange) Unwrap() http.ResponseWriter { return x.ResponseWriter }

// Hijack is called when the upstream has agreed to WebSocket, before the client is told.
func (x *exchange) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(x.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	if denial := x.client.framing.broken(); denial != nil {
		// What it sent before the agreement was taken for a request.
		conn.Close()
		return nil, nil, denial
	}
	x.record.Status = http.StatusSwitchingProtocols
	x.client.framing.raw = true
	return conn, rw, nil
}
