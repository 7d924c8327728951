package credential

import (
	"context"
	"crypto/subtle"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Flow is the connection of a sandbox that a request came by.
type Flow struct {
	// Name is what the flow goes to, in canonical form, as the policy allowed it.
	Name string
	Port uint16
	// SNI is the name in the ClientHello, or the one that an endpoint without TLS stands for.
	SNI string
}

// Attach gives a request that the policy allowed, in the form in which it will be sent, the
// secrets that are bound to it. The caller sends it by TLS alone, to a peer that has proved
// to be Flow.Name. The error is a *Refusal; so may be that of reading the request's body. A
// filter that is not nil has to see the reply. The request gets a context that ends when a
// secret in it is revoked; the one that it has must end with the request.
func (s *Set) Attach(f Flow, out *http.Request) (*Filter, error) {
	filter, refusal := s.attach(f, out)
	if refusal != nil {
		s.tell(f, out, refusal)
		return nil, refusal
	}
	return filter, nil
}

// tell reports a refusal. There is nothing to do when that fails: nothing was sent.
func (s *Set) tell(f Flow, out *http.Request, r *Refusal) {
	if r.told {
		return
	}
	r.told = true
	what := Deny
	switch r.Reason {
	case Misuse:
		what = Misused
	case Leak:
		what = Leaked
	}
	e := Event{Type: what, Binding: r.Binding, Reason: r.Reason, Name: f.Name, Port: f.Port, Owner: r.owner}
	// A method is what the sandbox writes: it may be what is refused.
	if st := s.state.Load(); st != nil && len(st.bindings) > 0 && st.requests.first(out.Method) == nil {
		e.Method = out.Method
	}
	s.report(e) //nolint:errcheck // see above
}

func (s *Set) report(e Event) error {
	if s.broker.Report == nil {
		return nil
	}
	e.Time, e.Sandbox = time.Now(), s.sandbox
	if e.Revision == 0 {
		e.Revision = s.Revision()
	}
	return s.broker.Report(e)
}

// use is a binding that a request is to be sent with.
type use struct {
	*live
	sent []string // in its slot
}

func (s *Set) attach(f Flow, out *http.Request) (*Filter, *Refusal) {
	st := s.state.Load()
	if st == nil {
		return nil, refuse(Revoked, nil, "the sandbox has no rights any more", "")
	}
	if len(st.bindings) == 0 {
		return nil, s.strangers(out)
	}
	var uses []use
	for _, b := range st.bindings {
		u, refusal := b.wanted(f, out)
		if refusal != nil {
			return nil, refusal
		}
		if u == nil {
			continue
		}
		for _, other := range uses {
			if other.method.Slot() == b.method.Slot() {
				return nil, refuse(Ambiguous, b, "the credentials "+other.ID+" and "+b.ID+" are both for this request",
					"bind them to different hosts, methods or paths")
			}
		}
		uses = append(uses, *u)
	}
	for _, u := range uses {
		if refusal := u.gate(f, out); refusal != nil {
			return nil, refusal
		}
		if refusal := st.slot(u); refusal != nil {
			return nil, refusal
		}
	}
	if refusal := s.strangers(out); refusal != nil {
		return nil, refusal
	}
	for _, u := range uses {
		u.method.Clear(out)
	}
	if refusal := st.scan(f, out); refusal != nil {
		return nil, refusal
	}
	s.guard(f, out, st)
	looks := false
	for _, u := range uses {
		if refusal := s.put(f, out, st, u); refusal != nil {
			return nil, refusal
		}
		looks = looks || u.Response != Off && len(u.needles) > 0
	}
	if !looks {
		return nil, nil
	}
	// What is compressed or comes in parts cannot be looked through.
	out.Header.Set("Accept-Encoding", "identity")
	for _, name := range []string{"Range", "If-Range", "Sec-Websocket-Extensions"} {
		out.Header.Del(name)
	}
	filter := &Filter{set: s, what: Echo, flow: f, method: out.Method, ctx: out.Context(), stream: stream{matcher: st.replies}, names: st.replyNames}
	for _, u := range uses {
		filter.block = filter.block || u.Response == Block
	}
	return filter, nil
}

// wanted says whether a request is one of the binding, and what it has in the slot.
func (l *live) wanted(f Flow, out *http.Request) (*use, *Refusal) {
	if !matchHost(l.Hosts, f.Name) || !slices.Contains(l.Ports, f.Port) ||
		len(l.Methods) > 0 && !slices.Contains(l.Methods, out.Method) {
		return nil, nil
	}
	if len(l.Paths) > 0 || l.Git != nil {
		if !isCanonical(out) {
			return nil, refuse(Slot, l, "the path could be read in two ways", "write it without dot segments, double or encoded slashes and semicolons")
		}
		if !matchPath(l.Paths, out.URL.Path) {
			return nil, nil
		}
	}
	if l.Kind == Git {
		if use, refusal := l.Git.wanted(l, out); refusal != nil || !use {
			return nil, refusal
		}
	}
	sent, err := l.method.Sent(out)
	if l.Mode == Swap {
		// Where the slot cannot be read, a placeholder in it is found as one out of place.
		if err != nil || !slices.ContainsFunc(sent, func(v string) bool { return strings.Contains(v, l.placeholder) }) {
			return nil, nil
		}
	} else if err != nil {
		return nil, refused(l, err)
	}
	if l.Git != nil && l.Kind != Git {
		if use, refusal := l.Git.wantedByAPI(l, out); refusal != nil || !use {
			return nil, refusal
		}
	}
	return &use{l, sent}, nil
}

// refused is the refusal in an error, or one that says it.
func refused(l *live, err error) *Refusal {
	var refusal *Refusal
	if errors.As(err, &refusal) {
		return refusal
	}
	return refuse(Slot, l, "the credential "+l.ID+" cannot be set: "+err.Error(), "")
}

// isCanonical says whether there is one way to read a path.
func isCanonical(out *http.Request) bool {
	p, escaped := out.URL.Path, strings.ToLower(out.URL.EscapedPath())
	if !strings.HasPrefix(p, "/") || strings.ContainsAny(p, "\\;\x00") || strings.Contains(escaped, "%2f") || strings.Contains(escaped, "%25") {
		return false
	}
	segments := strings.Split(p, "/")[1:]
	for i, segment := range segments {
		// Some servers strip spaces, or dots at an end, before they look for dot segments.
		if strings.Trim(segment, ". ") == "" && (segment != "" || i < len(segments)-1) {
			return false
		}
	}
	return true
}

// gate holds the conditions under which a secret may go with a request.
func (u use) gate(f Flow, out *http.Request) *Refusal {
	if !u.Expires.IsZero() && !time.Now().Before(u.Expires) {
		return refuse(Expired, u.live, "the credential "+u.ID+" has expired", "ask for a new one")
	}
	if out.Method == http.MethodTrace {
		return refuse(Slot, u.live, "TRACE would send the credential back", "")
	}
	if u.constant() {
		return nil
	}
	switch {
	case out.URL.Scheme != "https":
		return refuse(Insecure, u.live, "the credential "+u.ID+" is not sent without TLS", "use https")
	case f.SNI != f.Name || !isAuthority(out.URL.Host, f) || out.Host != "" && !isAuthority(out.Host, f):
		return refuse(Insecure, u.live, "the request names another host than its connection", "")
	case out.URL.Opaque != "" || out.URL.User != nil:
		return refuse(Insecure, u.live, "the request's URL is not plain", "")
	}
	return nil
}

// isAuthority says whether a host with or without its port is that of the flow.
func isAuthority(host string, f Flow) bool {
	name := f.Name
	if strings.Contains(name, ":") {
		name = "[" + name + "]"
	}
	// EqualFold takes the Kelvin sign for a k.
	if strings.ContainsFunc(host, func(r rune) bool { return r >= 0x80 }) {
		return false
	}
	return strings.EqualFold(host, name) && f.Port == 443 || strings.EqualFold(host, net.JoinHostPort(f.Name, strconv.Itoa(int(f.Port))))
}

// slot checks what the sandbox has put where the secret goes.
func (st *state) slot(u use) *Refusal {
	own := 0
	for i, value := range u.sent {
		if u.Mode == Swap {
			if subtle.ConstantTimeCompare([]byte(value), []byte(u.placeholder)) == 1 {
				own++
				continue
			}
			if strings.Contains(value, u.placeholder) {
				return refuse(Misuse, u.live, "the placeholder of "+u.ID+" is not alone in its place", "send it as the key, with nothing around it")
			}
		} else if u.placeholder != "" {
			value = strings.ReplaceAll(u.sent[i], u.placeholder, "")
		}
		if n := st.requests.first(value); n != nil {
			return st.refuse(n, place(u.method))
		}
	}
	if u.Mode == Swap && own != 1 {
		return refuse(Misuse, u.live, "the placeholder of "+u.ID+" is there more than once", "send it once")
	}
	return nil
}

// refuse says what was found where it does not belong, and where a placeholder does.
func (st *state) refuse(n *needle, where string) *Refusal {
	b := &live{Binding: Binding{ID: n.binding}}
	if n.class == secret {
		return refuse(Leak, b, "the request holds, in "+where+", a secret that should not be in the sandbox", "")
	}
	hint := "it stands for a key towards certain hosts alone, in the place for that key"
	if i := slices.IndexFunc(st.bindings, func(l *live) bool { return l.ID == n.binding }); i >= 0 {
		l := st.bindings[i]
		hint = "send it in " + place(l.method) + " to " + strings.Join(l.Hosts[:min(len(l.Hosts), 3)], ", ") + " alone"
	}
	return refuse(Misuse, b, "the placeholder of "+n.binding+" is in "+where+", where it does not belong", hint)
}

// place is what a method fills, for people.
func place(m Method) string {
	what, name, _ := strings.Cut(m.Slot(), " ")
	switch what {
	case "field":
		what = "header"
	case "query":
		what = "query parameter"
	case "body":
		what = "the body"
	}
	return strings.TrimSpace(what + " " + name)
}

// scan looks for placeholders and secrets in all of a request but its body.
func (st *state) scan(f Flow, out *http.Request) *Refusal {
	for _, part := range []struct{ text, where string }{
		{f.Name, "the host"}, {out.Method, "the method"}, {out.Host, "the host"}, {out.URL.Host, "the host"}, {out.URL.Opaque, "the URL"},
		{out.URL.EscapedPath(), "the path"}, {out.URL.RawQuery, "the query"},
	} {
		if n := st.requests.first(part.text); n != nil {
			return st.refuse(n, part.where)
		}
	}
	return st.scanFields(out.Header)
}

func (st *state) scanFields(h http.Header) *Refusal {
	for name, values := range h {
		if n := st.requestNames.first(name); n != nil {
			return st.refuse(n, "the name of a header")
		}
		for _, value := range values {
			if n := st.requests.first(value); n != nil {
				return st.refuse(n, "header "+name[:min(len(name), 100)])
			}
		}
	}
	return nil
}

// strangers looks in fields and query for placeholders of other sandboxes, and for those
// that were revoked, of which no more than their hashes is known.
func (s *Set) strangers(out *http.Request) *Refusal {
	look := func(text string) *Refusal {
		if !strings.Contains(text, infix) && !strings.Contains(text, shapes["aws"].prefix) {
			return nil
		}
		for token := range strings.FieldsFuncSeq(text, func(r rune) bool { return !strings.ContainsRune(base62+"_-", r) }) {
			if !isPlaceholder(token) {
				continue
			}
			s.broker.mu.Lock()
			i, known := s.broker.issued[digestOf(token)]
			s.broker.mu.Unlock()
			switch {
			case !known || i.sandbox == s.sandbox && i.revoked.IsZero():
			case i.sandbox != s.sandbox:
				r := refuse(Misuse, nil, "the request holds the placeholder of another sandbox", "")
				r.owner = i.sandbox
				return r
			default:
				return refuse(Misuse, nil, "the request holds the placeholder of a credential that was revoked", "")
			}
		}
		return nil
	}
	if refusal := look(out.URL.RawQuery); refusal != nil {
		return refusal
	}
	for _, values := range out.Header {
		for _, value := range values {
			if refusal := look(value); refusal != nil {
				return refusal
			}
		}
	}
	if user, password, ok := out.BasicAuth(); ok {
		return look(user + " " + password)
	}
	return nil
}

// isPlaceholder says whether a text could be one of ours.
func isPlaceholder(text string) bool {
	return len(text) == 20 && strings.HasPrefix(text, shapes["aws"].prefix) || len(text) > 24 && strings.Contains(text, infix)
}

// put sets one secret.
func (s *Set) put(f Flow, out *http.Request, st *state, u use) *Refusal {
	if n := u.uses.Add(1); u.MaxUses > 0 && n > u.MaxUses {
		return refuse(Used, u.live, "the credential "+u.ID+" was used as often as it may be", "ask for a new one")
	}
	text, ok := u.use()
	if !ok {
		return refuse(Revoked, u.live, "the credential "+u.ID+" was revoked", "")
	}
	var sent []string
	if u.Mode == Swap {
		for _, value := range u.sent {
			if value == u.placeholder {
				value = text
			}
			sent = append(sent, value)
		}
	}
	if out.Header == nil {
		out.Header = http.Header{}
	}
	ctx, cancel := context.WithCancelCause(out.Context())
	stop := context.AfterFunc(u.ctx, func() { cancel(errRevoked) })
	context.AfterFunc(ctx, func() { stop() })
	*out = *out.WithContext(ctx)
	if err := u.method.Put(ctx, out, text, sent); err != nil {
		cancel(err)
		return refused(u.live, err)
	}
	if err := s.report(Event{Type: Use, Binding: u.ID, Revision: st.revision, Name: f.Name, Port: f.Port, Method: out.Method}); err != nil {
		cancel(err)
		return refuse(Unrecorded, u.live, "the use of the credential "+u.ID+" could not be recorded", "")
	}
	return nil
}

// guard has the request's body and trailer looked through while they are sent.
func (s *Set) guard(f Flow, out *http.Request, st *state) {
	if out.Body == nil || out.Body == http.NoBody || len(st.requests.needles) == 0 {
		return
	}
	look := st.requests
	if st.confides(f) {
		look = st.leaks
	}
	out.GetBody = nil // what was not looked through is not sent again
	out.Body = &guarded{body: out.Body, set: s, flow: f, out: out, state: st, stream: stream{matcher: look}}
}

// confides says whether a body may hold placeholders, which stay what they are there: towards
// the hosts of credentials, unless one is for a place in bodies. An agent tells its model what
// it has seen, its environment too, and again with each request that follows.
func (st *state) confides(f Flow) (confided bool) {
	for _, b := range st.bindings {
		if matchHost(b.Hosts, f.Name) && slices.Contains(b.Ports, f.Port) {
			if b.Kind == JSON {
				return false
			}
			confided = true
		}
	}
	return confided
}

// guarded is a body that ends with an error before the bytes that complete a placeholder or a
// secret. Nothing is kept back until then: whoever sends and sees the bytes could tell from that
// whether they are the start of one.
type guarded struct {
	body   io.ReadCloser
	set    *Set
	flow   Flow
	out    *http.Request
	state  *state
	stream stream
	err    error
}

func (g *guarded) Read(p []byte) (int, error) {
	if g.err != nil {
		return 0, g.err
	}
	n, err := g.body.Read(p)
	g.err = err
	var refusal *Refusal
	if found := g.stream.whole(p[:n]); found != nil {
		refusal = g.state.refuse(found, "the body")
	} else if err == io.EOF {
		refusal = g.state.scanFields(g.out.Trailer)
	}
	if refusal != nil {
		g.err = refusal
		g.set.tell(g.flow, g.out, refusal)
		return 0, refusal
	}
	return n, err
}

// whole says what the next bytes complete.
func (s *stream) whole(b []byte) (found *needle) {
	s.hit = func(n *node, _, _ int64) bool { found = &s.needles[n.found-1]; return false }
	s.run(b)
	return found
}

func (g *guarded) Close() error { return g.body.Close() }

// Env returns the variables for inside: placeholders, base URLs, git's configuration. The
// endpoint of a binding is host(its id).
func (s *Set) Env(host func(id string) string) map[string]string {
	env := map[string]string{}
	var git []string
	st := s.state.Load()
	if st == nil {
		return env
	}
	for _, b := range st.bindings {
		if b.Env != "" {
			env[b.Env] = b.placeholder
		}
		if b.Kind == Git {
			for _, host := range b.Hosts {
				if !strings.ContainsAny(host, "*!") {
					git = append(git, host)
				}
			}
		}
		if b.Endpoint {
			maps.Copy(env, b.variables(host(b.ID)))
		}
	}
	maps.Copy(env, gitEnv(git))
	return env
}
