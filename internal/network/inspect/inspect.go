// Package inspect looks into the flows of a sandbox where a rule or a secret needs it:
// it reads the TLS ClientHello of flows that stay encrypted end to end, and stands in the
// middle of those whose requests are judged one by one.
//
// It is a library without processes and without sockets of its own: connections come in,
// and a dialer that the policy has vetted leads out.
package inspect

import (
	"context"
	"net"
	"net/http"
	"strconv"
	"time"
)

// Flow is one connection out of a sandbox, as the policy allowed it.
type Flow struct {
	// Name is what the flow goes to: a host name in canonical form (lower case A-labels
	// without the last dot) or an address without brackets. All that a client says about
	// its destination must agree with it.
	Name string
	Port uint16
	// H2C lets a client speak HTTP/2 without TLS.
	H2C bool
	// Endpoint is the name by which a client that has it for a base URL reaches the flow, by
	// HTTP/1 without TLS, which never leaves the host: outside it is TLS all the same.
	Endpoint string
}

// within is the flow as its client sees it, and the scheme of its URLs.
func (f Flow) within(scheme string) (Flow, string) {
	if f.Endpoint == "" {
		return f, scheme
	}
	return Flow{Name: f.Endpoint, Port: 80}, "http"
}

// Address is the flow's name and port in the form of net.JoinHostPort.
func (f Flow) Address() string { return net.JoinHostPort(f.Name, strconv.Itoa(int(f.Port))) }

// Request is what a judge sees of an HTTP request.
type Request struct {
	Flow      Flow
	Scheme    string // "http" or "https"
	Method    string
	Authority string // the Host field or :authority, which names the flow
	// Target is the path and the query as the client wrote them: only a judge that brings
	// them into a canonical form knows what the upstream will take them for.
	Target string
	Header http.Header // not to be changed
	// Size is the length of the body in bytes, -1 when it is not known before.
	Size int64
}

// Verdict is what a judge says about one request. The zero value denies.
type Verdict struct {
	Allow bool
	// Target is the path and the query in the form that was judged, which is what will be
	// sent: a path that begins with one slash, with percent-encoding as RFC 3986 has it.
	Target string
	// MaxBody bounds the request's body in bytes; zero is no bound.
	MaxBody int64

	Rule   string // the rule that decided; may be empty
	Reason Reason // why it is denied
	Detail string // what is wrong in particular; may be empty
	Hint   string // what would allow it
}

// Judge decides on each HTTP request. It is called by many goroutines at once, and may
// take the time that a person needs to answer; the context ends when the client leaves.
//
// An upgrade to WebSocket is a request whose header has Upgrade; other upgrades are not
// judged, because they are always refused.
type Judge interface {
	HTTP(context.Context, Request) Verdict
}

// Credentials gives requests what the sandbox does not hold.
type Credentials interface {
	// Attach is called for a request that the judge allowed, with what will be sent, of which
	// it may change everything but the destination. An error refuses. A filter that is not
	// nil looks through the reply. The upstream's certificate is verified in every case, but
	// a plain http flow has none: Attach must look at the scheme.
	Attach(r Request, v Verdict, out *http.Request) (Filter, error)
	// Denial is what the client is told about an error of Attach, of a body that it put into
	// the request, or of a filter. It is nil for the errors of others.
	Denial(error) *Denial
	// Missing is what the client is told in place of the reply, by which the upstream wants what
	// the request did not get. It is nil for all other replies.
	Missing(r Request, res *http.Response) *Denial
}

// Filter looks through one reply for what must not come inside. Its methods are called
// by one goroutine.
type Filter interface {
	// Header may change the fields of the head, and of the trailer at the end.
	Header(http.Header) error
	// Body appends to dst what of the next piece may go on. With last set it keeps nothing
	// back. An error cuts the reply. After an upgrade to WebSocket it must not change lengths.
	Body(dst, piece []byte, last bool) ([]byte, error)
	// Late appends to dst what was kept back when it was called last, or since nothing was. It
	// is called at equal intervals while Waits is true, since a stream waits for it.
	Late(dst []byte) []byte
	Waits() bool
}

// Record is one request that was answered.
type Record struct {
	Flow     Flow
	Start    time.Time
	Duration time.Duration
	Method   string
	Path     string // as the client wrote it, without the query, which may hold secrets
	Status   int
	Sent     int64 // bytes of the request's body
	Received int64 // bytes of the reply's body that went inside
	Rule     string
	Reason   Reason // why it was denied or failed; empty when it was not
	Err      string // more about a failure, for the operator
}
