package credential

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
)

// Endpoints serves the reverse endpoints of a sandbox, http://host/BINDING/…: clients that
// take a base URL reach a binding's first host through them without TLS inside. What they
// send is judged as any other request to that host is. The listener is on the sandbox's own
// link.
type Endpoints struct {
	Set *Set
	// Judge asks the policy about a request as it would be sent; nil lets it go on.
	Judge func(Flow, *http.Request) *Refusal
	// Transport sends a request to a vetted address of the flow's name by TLS, and verifies the
	// peer. It follows no redirects and has no other side than this one sandbox.
	Transport func(Flow) http.RoundTripper
}

// refusedBody is what a refused client is told.
type refusedBody struct {
	Error  string `json:"error"`
	Reason Reason `json:"reason"`
	Hint   string `json:"hint,omitempty"`
}

func (e *Endpoints) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	id, rest, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	b := e.Set.service(id)
	switch {
	case b == nil:
		answer(w, http.StatusNotFound, refusedBody{"there is no endpoint " + quote(id), Revoked, "the environment has the URLs of those there are"})
		return
	case r.Header.Get("Upgrade") != "" || r.Method == http.MethodConnect:
		answer(w, http.StatusForbidden, refusedBody{"an endpoint takes plain requests alone", Slot, "use the API's own URL for WebSocket"})
		return
	}
	f := Flow{Name: b.Hosts[0], Port: b.Ports[0], SNI: b.Hosts[0]}
	host := f.Name
	if f.Port != 443 {
		host = net.JoinHostPort(f.Name, strconv.Itoa(int(f.Port)))
	}
	target := *r.URL
	target.Scheme, target.Host, target.Path = "https", host, "/"+rest
	if _, raw, ok := strings.Cut(strings.TrimPrefix(r.URL.RawPath, "/"), "/"); ok {
		target.RawPath = "/" + raw
	} else {
		target.RawPath = ""
	}
	proxy := httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) {
			p.Out.URL, p.Out.Host = &target, host
			p.Out.Header.Del("Forwarded")
			for name := range p.Out.Header {
				if strings.HasPrefix(name, "X-Forwarded-") {
					p.Out.Header.Del(name)
				}
			}
		},
		Transport: exchange{e, f, "/" + id},
		// Whatever comes is sent on at once.
		FlushInterval: -1,
		ErrorLog:      log.New(io.Discard, "", 0),
		ErrorHandler:  fail,
	}
	proxy.ServeHTTP(w, r)
}

// service returns the binding of that id that has an endpoint, or nil.
func (s *Set) service(id string) *live {
	st := s.state.Load()
	if st == nil {
		return nil
	}
	for _, b := range st.bindings {
		if b.ID == id && b.Service != "" {
			return b
		}
	}
	return nil
}

// exchange sends a request of an endpoint, and looks through the reply.
type exchange struct {
	*Endpoints
	flow   Flow
	prefix string // of the endpoint's paths
}

// plain is a context without values: by one of them the proxy would pass informational
// replies on, which nobody has looked through.
type plain struct{ context.Context }

func (plain) Value(any) any { return nil }

func (e exchange) RoundTrip(out *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancel(plain{out.Context()})
	out = out.WithContext(ctx)
	response, err := e.exchange(out)
	if err != nil {
		cancel()
		return nil, err
	}
	response.Body = ending{response.Body, out.Context(), cancel}
	return response, nil
}

func (e exchange) exchange(out *http.Request) (*http.Response, error) {
	if refusal := e.Judge(e.flow, out); refusal != nil {
		return nil, refusal
	}
	filter, err := e.Set.Attach(e.flow, out)
	if err != nil {
		return nil, err
	}
	response, err := e.Transport(e.flow).RoundTrip(out)
	if err != nil {
		return nil, err
	}
	if filter == nil {
		return e.home(response), nil
	}
	if err := filter.Header(response.Header); err != nil {
		response.Body.Close()
		return nil, err
	}
	response.Body = &filtered{body: response.Body, filter: filter, response: response}
	return e.home(response), nil
}

// home lets a redirect to the same host lead to the endpoint, where the credential is.
func (e exchange) home(response *http.Response) *http.Response {
	at, err := url.Parse(response.Header.Get("Location"))
	if err == nil && at.Scheme == "https" && isAuthority(at.Host, e.flow) {
		at.Scheme, at.Host, at.User = "", "", nil
	}
	if err == nil && at.Host == "" && strings.HasPrefix(at.Path, "/") {
		response.Header.Set("Location", e.prefix+at.RequestURI())
	}
	return response
}

// ending is a body with which the request's context ends.
type ending struct {
	io.ReadCloser
	ctx context.Context
	end context.CancelFunc
}

// Read does the same for replies without a filter as Filter.Body does.
func (e ending) Read(p []byte) (int, error) {
	n, err := e.ReadCloser.Read(p)
	if cause := context.Cause(e.ctx); err == io.EOF && cause != nil { //nolint:errorlint // a body's end is io.EOF
		err = cause
	}
	return n, err
}

func (e ending) Close() error {
	err := e.ReadCloser.Close()
	e.end()
	return err
}

// filtered is the body of a reply that a filter looks through.
type filtered struct {
	body     io.ReadCloser
	filter   *Filter
	response *http.Response
	buf      []byte
	ready    []byte
	err      error
}

func (f *filtered) Read(p []byte) (int, error) {
	for len(f.ready) == 0 {
		if f.err != nil {
			return 0, f.err
		}
		if f.buf == nil {
			f.buf = make([]byte, 16<<10)
		}
		n, err := f.body.Read(f.buf)
		f.err = err
		ready, refused := f.filter.Body(f.ready[:0], f.buf[:n], err != nil)
		if refused == nil && err == io.EOF {
			refused = f.filter.Header(f.response.Trailer)
		}
		if f.ready = ready; refused != nil {
			f.ready, f.err = nil, refused
		}
	}
	n := copy(p, f.ready)
	f.ready = f.ready[n:]
	return n, nil
}

func (f *filtered) Close() error { return f.body.Close() }

// fail answers for a request that was refused or not answered.
func fail(w http.ResponseWriter, _ *http.Request, err error) {
	var refusal *Refusal
	if errors.As(err, &refusal) {
		answer(w, http.StatusForbidden, refusedBody{refusal.Message, refusal.Reason, refusal.Hint})
		return
	}
	// Only the operator learns how far the request came.
	answer(w, http.StatusBadGateway, refusedBody{"the request was refused or not answered", "upstream", ""})
}

func answer(w http.ResponseWriter, status int, body refusedBody) {
	w.Header().Set("Content-Type", "application/json")
	if status == http.StatusForbidden {
		w.Header().Set("X-Berm-Deny", string(body.Reason))
	}
	var text bytes.Buffer
	json.NewEncoder(&text).Encode(body) //nolint:errcheck // strings
	w.WriteHeader(status)
	w.Write(text.Bytes()) //nolint:errcheck // the client may be gone
}
