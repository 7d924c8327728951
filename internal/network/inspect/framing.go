package inspect

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/net/http/httpguts"
)

const (
	headLimit  = 32 << 10 // bytes of a request's head, and of its trailer
	fieldLimit = 100
	chunkLine  = 18 // the length of a chunk in at most 16 hexadecimal digits, and CRLF
)

// framing hands out the bytes of a client that speaks HTTP/1 after it has checked where each
// request begins and ends, more strictly than net/http does: what some parser reads in
// another way never reaches one. net/http drops Content-Length beside chunked, takes a
// bare LF for the end of a line and joins folded lines, in silence.
//
// A request that is refused is replaced by a harmless one, after which the stream ends; the
// handler, which sees requests in their order, asks refused which one it was.
type framing struct {
	net.Conn
	client *client

	buf   []byte // read and not yet checked, or not yet handed out
	kept  []byte // empty, for buf when it is
	ready int    // so many bytes of buf are checked

	state  state
	left   uint64 // bytes of the body or of the chunk
	raw    bool   // the connection has left HTTP; set by Hijack, when no read is under way
	closed bool   // nothing follows

	mu      sync.Mutex
	heads   int // requests seen
	refusal *Denial
}

type state int

const (
	inHead state = iota
	inBody
	inChunkLine
	inChunk
	afterChunk
	inTrailer
)

const replacement = "GET / HTTP/1.1\r\nHost: refused\r\nConnection: close\r\n\r\n"

// refused returns why the nth request, counted from one, is refused.
func (f *framing) refused(n int) *Denial {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n == f.heads {
		return f.refusal
	}
	return nil
}

// broken returns what is wrong with the body of the last request.
func (f *framing) broken() *Denial {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.refusal
}

func (f *framing) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for f.ready == 0 {
		switch {
		case f.closed:
			return 0, io.EOF
		case f.raw:
			if len(f.buf) == 0 {
				return f.Conn.Read(p)
			}
			f.ready = len(f.buf)
		case f.state == inBody || f.state == inChunk:
			if len(f.buf) == 0 {
				// Bodies are not copied twice.
				if uint64(len(p)) > f.left {
					p = p[:f.left]
				}
				n, err := f.Conn.Read(p)
				f.passed(n)
				return n, err
			}
			f.ready = len(f.buf)
			if uint64(f.ready) > f.left {
				f.ready = int(f.left)
			}
			f.passed(f.ready)
		default:
			n, denial := f.check()
			if denial != nil {
				if err := f.refuse(denial); err != nil {
					return 0, err
				}
				continue
			}
			if f.ready = n; n > 0 {
				continue
			}
			if err := f.fill(); err != nil {
				return 0, err // what was read stays, for a reader after a deadline
			}
		}
	}
	n := copy(p, f.buf[:f.ready])
	f.ready -= n
	f.buf = f.buf[n:]
	return n, nil
}

// CloseWrite ends the stream towards the client.
func (f *framing) CloseWrite() error { return closeWrite(f.Conn) }

// fill reads until there may be something new to check.
func (f *framing) fill() error {
	for {
		if len(f.buf) == 0 {
			if f.kept == nil {
				f.kept = make([]byte, 0, 4<<10)
			}
			f.buf = f.kept
		} else if cap(f.buf)-len(f.buf) < 512 {
			f.buf = append(make([]byte, 0, 2*len(f.buf)+1024), f.buf...)
		}
		had := len(f.buf)
		n, err := f.Conn.Read(f.buf[had:cap(f.buf)])
		f.buf = f.buf[:had+n]
		switch {
		case n == 0 && err == nil:
			return io.ErrNoProgress
		case n == 0:
			return err
		case f.state != inHead && f.state != inTrailer,
			len(f.buf) >= headLimit, bytes.IndexByte(f.buf[had:], '\n') >= 0:
			return nil
		}
	}
}

// passed counts bytes of the body.
func (f *framing) passed(n int) {
	if f.left -= uint64(n); f.left > 0 {
		return
	}
	if f.state == inBody {
		f.state = inHead
	} else {
		f.state = afterChunk
	}
}

// check looks at what stands at the beginning of buf and returns its length, zero when it
// is not complete.
func (f *framing) check() (int, *Denial) {
	switch f.state {
	case inChunkLine:
		n, size, denial := chunkSize(f.buf)
		if n > 0 {
			f.left = size
			if f.state = inChunk; size == 0 {
				f.state = inTrailer
			}
		}
		return n, denial
	case afterChunk:
		if len(f.buf) < 2 {
			return 0, nil
		}
		if f.buf[0] != '\r' || f.buf[1] != '\n' {
			return 0, malformed("a chunk is longer than it says")
		}
		f.state = inChunkLine
		return 2, nil
	case inTrailer:
		n, denial := trailer(f.buf)
		if n > 0 {
			f.state = inHead
		}
		return n, denial
	}
	n, body, denial := head(f.buf)
	if n > 0 || denial != nil {
		f.mu.Lock()
		f.heads++
		f.mu.Unlock()
		f.left = body.length
		switch {
		case body.chunked:
			f.state = inChunkLine
		case body.length > 0:
			f.state = inBody
		}
	}
	return n, denial
}

// refuse ends the stream. For a head the handler is still to be called; in a body it is
// at work, and reads the error.
func (f *framing) refuse(d *Denial) error {
	f.mu.Lock()
	f.refusal = d
	f.mu.Unlock()
	f.closed = true
	f.buf = nil
	if f.state != inHead {
		return d
	}
	f.buf = []byte(replacement)
	f.ready = len(f.buf)
	return nil
}

func malformed(message string) *Denial {
	return &Denial{Status: http.StatusBadRequest, Reason: ReasonFraming, Message: message,
		Hint: "send HTTP/1.1 as RFC 9112 has it, or HTTP/2"}
}

// body is how the end of a request's body is told.
type body struct {
	length  uint64
	chunked bool
}

// head checks the first head in b and returns its length, zero when it is not complete.
func head(b []byte) (int, body, *Denial) {
	n, lines, denial := lines(b)
	if n == 0 || denial != nil {
		return 0, body{}, denial
	}
	if len(lines) == 0 {
		return 0, body{}, malformed("an empty line is in the place of a request")
	}
	if denial := requestLine(lines[0]); denial != nil {
		return 0, body{}, denial
	}
	old := bytes.HasSuffix(lines[0], []byte(" HTTP/1.0"))
	var length, encoding, host []string
	for _, line := range lines[1:] {
		name, value, denial := field(line)
		if denial != nil {
			return 0, body{}, denial
		}
		switch strings.ToLower(name) {
		case "content-length":
			length = append(length, value)
		case "transfer-encoding":
			encoding = append(encoding, value)
		case "host":
			host = append(host, value)
		}
	}
	switch {
	case len(host) != 1 || !httpguts.ValidHostHeader(host[0]):
		return 0, body{}, malformed("the request has not exactly one valid Host field")
	case len(length) > 1:
		return 0, body{}, malformed("the request has several Content-Length fields")
	case len(encoding) > 0 && len(length) > 0:
		return 0, body{}, malformed("the request has both Content-Length and Transfer-Encoding")
	case len(encoding) > 0:
		if len(encoding) > 1 || !strings.EqualFold(encoding[0], "chunked") || old {
			return 0, body{}, malformed("the only Transfer-Encoding taken is chunked, in HTTP/1.1")
		}
		return n, body{chunked: true}, nil
	case len(length) == 1:
		// ParseUint takes no sign and, with base 10, no underscore; 18 digits fit into the int64
		// that other parsers use.
		size, err := strconv.ParseUint(length[0], 10, 63)
		if err != nil || len(length[0]) > 18 {
			return 0, body{}, malformed("Content-Length is not a number")
		}
		return n, body{length: size}, nil
	}
	return n, body{}, nil
}

// lines splits a head or a trailer at the CRLF of its lines, up to the empty one.
func lines(b []byte) (int, [][]byte, *Denial) {
	var found [][]byte
	for at := 0; ; {
		end := bytes.IndexByte(b[at:], '\n')
		if at+max(end, 0) > headLimit || end < 0 && len(b) >= headLimit {
			return 0, nil, &Denial{Status: http.StatusRequestHeaderFieldsTooLarge, Reason: ReasonFraming,
				Message: "the request's head is longer than 64 KiB"}
		}
		if end < 0 {
			return 0, nil, nil
		}
		line := b[at : at+end]
		at += end + 1
		if len(line) == 0 || line[len(line)-1] != '\r' {
			return 0, nil, malformed("a line of the request does not end with CR and LF")
		}
		if line = line[:len(line)-1]; len(line) == 0 {
			return at, found, nil
		}
		if len(found) > fieldLimit {
			return 0, nil, &Denial{Status: http.StatusRequestHeaderFieldsTooLarge, Reason: ReasonFraming,
				Message: "the request has more than 100 fields"}
		}
		found = append(found, line)
	}
}

// requestLine checks the first line of a head (RFC 9112 section 3).
func requestLine(line []byte) *Denial {
	parts := strings.Split(string(line), " ")
	if len(parts) != 3 || !httpguts.ValidHeaderFieldName(parts[0]) || parts[1] == "" {
		return malformed("the request line is not method, target and version with one space between them")
	}
	if _, err := url.ParseRequestURI(parts[1]); err != nil && parts[0] != http.MethodConnect {
		return malformed("the request's target is not a path or a URL")
	}
	if v := parts[2]; v != "HTTP/1.1" && v != "HTTP/1.0" {
		return &Denial{Status: http.StatusHTTPVersionNotSupported, Reason: ReasonProtocol, Message: "the request's version of HTTP is not taken"}
	}
	return nil
}

// field splits and checks a field line (RFC 9112 section 5).
func field(line []byte) (name, value string, denial *Denial) {
	if line[0] == ' ' || line[0] == '\t' {
		return "", "", malformed("a field of the request is folded over several lines")
	}
	name, value, found := strings.Cut(string(line), ":")
	if !found || !httpguts.ValidHeaderFieldName(name) {
		return "", "", malformed("a field of the request has no valid name")
	}
	value = strings.Trim(value, " \t")
	if !httpguts.ValidHeaderFieldValue(value) {
		return "", "", malformed("a field of the request has a control character")
	}
	return name, value, nil
}

// trailer checks the fields after the last chunk.
func trailer(b []byte) (int, *Denial) {
	n, lines, denial := lines(b)
	if denial != nil {
		return 0, denial
	}
	for _, line := range lines {
		name, _, denial := field(line)
		if denial != nil {
			return 0, denial
		}
		if !httpguts.ValidTrailerHeader(http.CanonicalHeaderKey(name)) {
			return 0, malformed("the request's trailer has a field that belongs into the head")
		}
	}
	return n, nil
}

// chunkSize checks the line before a chunk (RFC 9112 section 7.1). Extensions have no use
// but to confuse.
func chunkSize(b []byte) (n int, size uint64, denial *Denial) {
	end := bytes.IndexByte(b, '\n')
	if end < 0 && len(b) < chunkLine {
		return 0, 0, nil
	}
	if end < 2 || end >= chunkLine || b[end-1] != '\r' {
		return 0, 0, malformed("the length of a chunk is not a hexadecimal number alone on its line")
	}
	for _, c := range b[:end-1] {
		switch {
		case c >= '0' && c <= '9':
			size = size<<4 | uint64(c-'0')
		case c >= 'a' && c <= 'f', c >= 'A' && c <= 'F':
			size = size<<4 | uint64(c&0xf+9)
		default:
			return 0, 0, malformed("the length of a chunk is not a hexadecimal number alone on its line")
		}
	}
	if size > 1<<62 {
		return 0, 0, malformed("a chunk is too long")
	}
	return end + 1, size, nil
}
