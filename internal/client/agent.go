package client

import (
	"errors"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"connectrpc.com/connect"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/proto/filesystem/filesystemconnect"
	"github.com/berm-sandbox/berm/internal/proto/process/processconnect"
)

// maxMessage bounds one message of the guest agent, which is not trusted, in bytes.
const maxMessage = 16 << 20

// Agent is the guest agent of one sandbox, as one user inside.
type Agent struct {
	ID         berm.SandboxID
	client     *Client
	origin     string
	user       string
	http       *http.Client
	process    processconnect.ProcessClient
	filesystem filesystemconnect.FilesystemClient
}

// Agent reaches the agent of a sandbox that Get, Create or Resume returned. An
// empty user is the sandbox's default one.
func (c *Client) Agent(s *Sandbox, user string) *Agent {
	a := &Agent{ID: s.ID, client: c, origin: c.origin(s), user: user}
	headers := http.Header{
		"E2b-Sandbox-Id":   {string(s.ID)},
		"E2b-Sandbox-Port": {strconv.Itoa(berm.AgentPort)},
		"User-Agent":       {"berm"},
	}
	if s.AgentToken != "" {
		headers.Set("X-Access-Token", s.AgentToken)
	}
	if user != "" {
		r := http.Request{Header: headers}
		r.SetBasicAuth(user, "")
	}
	client := *c.http
	client.Transport = headerTransport{c.http.Transport, headers}
	a.http = &client
	options := []connect.ClientOption{
		connect.WithReadMaxBytes(maxMessage),
		connect.WithAcceptCompression("gzip", nil, nil), // costs more than loopback and LAN save
	}
	a.process = processconnect.NewProcessClient(a.http, a.origin, options...)
	a.filesystem = filesystemconnect.NewFilesystemClient(a.http, a.origin, options...)
	return a
}

// origin finds where a sandbox's agent is reached. A server finds the sandbox by
// header when it is addressed by number or as localhost, and by host name
// otherwise.
func (c *Client) origin(s *Sandbox) string {
	if c.sandbox != nil {
		return c.sandbox.String()
	}
	host := c.base.Hostname()
	domain := s.Domain
	if domain == "" {
		if api, ok := strings.CutPrefix(c.base.Host, "api."); ok {
			domain = api
		}
	}
	if domain == "" || host == "localhost" || net.ParseIP(host) != nil {
		return (&url.URL{Scheme: c.base.Scheme, Host: c.base.Host}).String()
	}
	return c.base.Scheme + "://" + strconv.Itoa(berm.AgentPort) + "-" + string(s.ID) + "." + domain
}

// headerTransport adds headers to each request.
type headerTransport struct {
	next    http.RoundTripper
	headers http.Header
}

func (t headerTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	for name, values := range t.headers {
		r.Header[name] = values
	}
	return t.next.RoundTrip(r)
}

// agentError gives an error of an RPC its kind. Transport says that it came from
// the way to the agent and not from the agent.
func (a *Agent) agentError(err error) (typed error, transport bool) {
	var e *connect.Error
	if !errors.As(err, &e) {
		return a.client.unreachable(err), true
	}
	kind := map[connect.Code]berm.Kind{
		connect.CodeNotFound:           berm.NotFound,
		connect.CodeAlreadyExists:      berm.AlreadyExists,
		connect.CodeInvalidArgument:    berm.Invalid,
		connect.CodeFailedPrecondition: berm.Conflict,
		connect.CodeUnauthenticated:    berm.Denied,
		connect.CodePermissionDenied:   berm.Denied,
		connect.CodeResourceExhausted:  berm.Exhausted,
		connect.CodeUnavailable:        berm.Unavailable,
		connect.CodeCanceled:           berm.Unavailable,
		connect.CodeDeadlineExceeded:   berm.Unavailable,
		connect.CodeUnimplemented:      berm.Unsupported,
	}[e.Code()]
	switch {
	case connect.IsWireError(err):
		// An agent that is being ended says these; it may be started again.
		transport = kind == berm.Unavailable && e.Code() != connect.CodeDeadlineExceeded
		return berm.Errorf(kind, "%s", e.Message()), transport
	case kind == berm.Denied:
		return berm.Errorf(kind, "the sandbox refuses the call: %s", e.Message()), false
	case kind == berm.Unsupported: // a 404 to a POST
		return berm.Errorf(berm.Internal, "no guest agent answers at %s: %s", a.origin, e.Message()).
			WithHint("Set BERM_SANDBOX_URL, or `berm context add --sandbox-url`, to the address of the sandboxes."), false
	}
	return berm.Errorf(berm.Unavailable, "no answer from sandbox %s: %w", a.ID, err), true
}
