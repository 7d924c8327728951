// Package capture records the commands that clients start in sandboxes and the files that they
// read and write, from the requests and answers that pass through the server.
package capture

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"

	"connectrpc.com/connect"
	"golang.org/x/time/rate"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
)

// Recorder looks at the traffic to guest agents. Its methods are safe for concurrent use.
type Recorder struct {
	audit    audit.Emitter
	blobs    audit.Blobs
	output   bool
	log      *slog.Logger
	refusals *rate.Limiter

	mu      sync.Mutex
	running map[process]*command
	streams sync.WaitGroup // commands that are read although their client left
}

// Whoever reaches the port can be refused as often as they like: this many refusals a second
// are recorded.
const refusalsPerSecond = 10

// New makes a Recorder that emits to a log and keeps the output of commands in blobs, or
// only counts it.
func New(emitter audit.Emitter, blobs audit.Blobs, output bool, log *slog.Logger) *Recorder {
	return &Recorder{
		audit: emitter, blobs: blobs, output: output, log: log, refusals: rate.NewLimiter(refusalsPerSecond, 10*refusalsPerSecond),
		running: map[process]*command{},
	}
}

// process names a command in a sandbox.
type process struct {
	sandbox berm.SandboxID
	pid     uint32
}

// Caller is who makes a request, and to which sandbox.
type Caller struct {
	Sandbox berm.SandboxID
	Actor   audit.Actor
	// Known says that the guest agent will take the caller's token. What others ask for is
	// recorded only if the agent does it.
	Known bool
}

// Call is one request that is recorded. A nil Call is one that is not.
type Call interface {
	// Outlive says whether the answer is to be read to its end although the client leaves;
	// then release is called when that is done.
	Outlive(release func()) bool
	// Answer looks at the answer, whose body it may replace. With an error the answer must
	// not be passed on.
	Answer(*http.Response) error
	// Failed says that there was no answer.
	Failed(error)
}

// brief is a Call that ends with its client.
type brief struct{}

func (brief) Outlive(func()) bool { return false }

// maxRequest bounds a request that must be read before it is passed on, in bytes. The kernel
// takes 6 MiB of arguments and environment.
const maxRequest = 8 << 20

// Request records what a request to a guest agent asks for, and replaces its body. With an
// error, which Refuse answers with, the request must not be passed on.
func (c *Recorder) Request(r *http.Request, who Caller) (Call, error) {
	switch path := r.URL.Path; {
	case path == "/process.Process/Start" && r.Method == http.MethodPost:
		return c.start(r, who)
	case path == "/process.Process/Update" && r.Method == http.MethodPost:
		return c.resize(r, who)
	case path == "/files", path == "/files/compose":
		return c.content(r, who)
	case strings.HasPrefix(path, "/filesystem.Filesystem/"):
		return c.filesystem(r, who)
	}
	return nil, nil
}

// Refuse answers a request with an error of Request or Answer, in the protocol of the request.
func Refuse(w http.ResponseWriter, r *http.Request, err error) {
	var known *connect.Error
	if !errors.As(err, &known) {
		known = connect.NewError(connect.CodeUnavailable, err)
	}
	if writer := connect.NewErrorWriter(); writer.IsSupported(r) {
		_ = writer.Write(w, r, known)
		return
	}
	status := http.StatusServiceUnavailable
	if known.Code() == connect.CodeInvalidArgument {
		status = http.StatusBadRequest
	}
	http.Error(w, known.Message(), status)
}

// Close waits until what is known of the commands whose clients left is recorded. The streams
// must have been cut.
func (c *Recorder) Close() { c.streams.Wait() }

// emit makes a record of one caller's.
func (c *Recorder) emit(who Caller, r audit.Record) error {
	r.Sandbox, r.Actor, r.Src, r.Trust = who.Sandbox, who.Actor, "router", audit.TrustHost
	return c.audit.Emit(r)
}

// tell is emit for what has happened and cannot be refused any more.
func (c *Recorder) tell(who Caller, r audit.Record) {
	if err := c.emit(who, r); err != nil {
		c.log.Error("audit record lost", "sandbox", who.Sandbox, "type", r.Type, "error", err)
	}
}

// newTrace is what the records of one action have in common.
func newTrace() string { return strings.ToLower(rand.Text()) }

// body is what was read of a request's body and the rest of it.
type body struct {
	io.Reader
	io.Closer
}

// peek reads the message of a request, or a body without one around it, and puts it back.
func peek(r *http.Request, envelope bool, limit int) ([]byte, error) {
	head, err := readMessage(r.Body, envelope, limit)
	r.Body = body{io.MultiReader(bytes.NewReader(head), r.Body), r.Body}
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	if len(head) > limit {
		return nil, connect.NewError(connect.CodeResourceExhausted, errors.New("the request is too large to be recorded"))
	}
	return head, nil
}

func readMessage(r io.Reader, envelope bool, limit int) ([]byte, error) {
	if !envelope {
		return io.ReadAll(io.LimitReader(r, int64(limit)+1))
	}
	header := make([]byte, envelopeSize)
	if n, err := io.ReadFull(r, header); err != nil {
		return header[:n], nil //nolint:nilerr // decode says what is missing
	}
	size := int64(binary.BigEndian.Uint32(header[1:]))
	content, err := io.ReadAll(io.LimitReader(r, min(size, int64(limit)+1)))
	return append(header, content...), err
}
