package credential

import (
	"context"
	"errors"
	"net/http"
	"strings"

	"github.com/berm-sandbox/berm"
)

// Filter looks through one reply, or any other stream that goes inside, for secrets. Its
// methods are called by one goroutine.
type Filter struct {
	set    *Set
	what   EventType // that is told of what is found
	flow   Flow
	method string
	ctx    context.Context // of the request; nil when it is no reply
	block  bool
	told   bool
	stream stream
	names  *matcher // of fields, whose case is not kept
}

// Filter returns a filter that masks every secret of the sandbox's bindings, for streams
// that are no reply: output of commands, files, records. What only begins like one is masked as
// far as it does: these streams have frames and archives in them, which must stay readable. It is
// nil when there is none, and knows the secrets of the present revision.
func (s *Set) Filter() *Filter {
	st := s.state.Load()
	if st == nil || len(st.replies.needles) == 0 {
		return nil
	}
	return &Filter{set: s, what: Leaked, stream: stream{matcher: st.replies, exact: true}, names: st.replyNames}
}

// Mask masks every secret of the sandbox's bindings in a text, such as a record, which keeps
// its length and, as with Filter, its structure. It tells nobody of what it finds.
func (s *Set) Mask(text []byte) []byte {
	m := s.masks.Load()
	if m == nil || !m.begins(string(text)) {
		return text
	}
	look := stream{matcher: m, exact: true}
	masked, _ := look.feed(nil, text, true, true)
	return masked
}

// Header masks secrets in the fields of a head or a trailer. An error cuts the reply.
func (f *Filter) Header(h http.Header) error {
	for _, value := range h["Content-Encoding"] {
		if value != "" && !strings.EqualFold(value, "identity") {
			return berm.Errorf(berm.Unsupported, "the reply is encoded as %s although it was not to be, so that secrets in it could not be found", quote(value)).
				WithHint("bind the credential to other paths, or set response: off for it")
		}
	}
	for name, values := range h {
		if n := f.names.first(name); n != nil {
			if err := f.echo(n); err != nil {
				return err
			}
			delete(h, name)
			continue
		}
		for i, value := range values {
			if n := f.stream.first(value); n != nil {
				if err := f.echo(n); err != nil {
					return err
				}
				s := stream{matcher: f.stream.matcher}
				masked, _ := s.feed(nil, []byte(value), true, true)
				values[i] = string(masked)
			}
		}
	}
	return nil
}

// Body appends to dst what may go on of the next piece, with as many bytes as came in. It keeps
// back the last ones, whatever they are, and what is the start of a secret for certain; with last
// set it keeps nothing. An error cuts the reply.
func (f *Filter) Body(dst, piece []byte, last bool) ([]byte, error) {
	if last && f.ctx != nil && errors.Is(context.Cause(f.ctx), errRevoked) {
		// TLS tells the upstream that it is cut before the connection is closed, and what it
		// writes then is no end.
		return dst, berm.Errorf(berm.Denied, "the credential was revoked")
	}
	before := len(dst)
	dst, found := f.stream.feed(dst, piece, !f.block, last)
	if found != nil {
		if err := f.echo(found); err != nil {
			return dst[:before], err
		}
	}
	return dst, nil
}

// Late appends to dst what was kept back at its last call, or since nothing was.
func (f *Filter) Late(dst []byte) []byte { return f.stream.late(dst) }

// Waits says whether something is kept back that Late gives on.
func (f *Filter) Waits() bool { return f.stream.waits() }

// echo tells once that a reply held a secret. The error is nil when it is masked.
func (f *Filter) echo(n *needle) error {
	if !f.told {
		f.told = true
		// The reply goes on without the secret whether or not that can be recorded.
		f.set.report(Event{Type: f.what, Binding: n.binding, Name: f.flow.Name, Port: f.flow.Port, Method: f.method}) //nolint:errcheck // see above
	}
	if f.block {
		return berm.Errorf(berm.Denied, "the reply holds the secret of the credential %s", n.binding)
	}
	return nil
}
