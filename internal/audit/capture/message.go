package capture

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// format is how the messages of a request are encoded: Connect, gRPC and gRPC-Web differ in
// what is around them.
type format struct {
	json     bool
	envelope bool // flags, length, message; else the body is the message
	gzip     bool // of a message whose flags say so, or of the whole body
}

// Flags of an envelope (Connect protocol and gRPC).
const (
	flagCompressed = 1
	flagEnd        = 2    // Connect: the end of the stream, no message
	flagTrailer    = 0x80 // gRPC-Web: trailers, no message
	envelopeSize   = 5
)

// formatOf reads the format off a header. The agent speaks no other ones.
func formatOf(h http.Header) (f format, err error) {
	kind, _, _ := strings.Cut(strings.ToLower(h.Get("Content-Type")), ";")
	kind = strings.TrimSpace(kind)
	var codec, encoding string
	switch {
	case strings.HasPrefix(kind, "application/connect+"):
		f.envelope, codec, encoding = true, kind[len("application/connect+"):], h.Get("Connect-Content-Encoding")
	case strings.HasPrefix(kind, "application/grpc-web"):
		f.envelope, codec, encoding = true, strings.TrimPrefix(kind[len("application/grpc-web"):], "+"), h.Get("Grpc-Encoding")
	case strings.HasPrefix(kind, "application/grpc"):
		f.envelope, codec, encoding = true, strings.TrimPrefix(kind[len("application/grpc"):], "+"), h.Get("Grpc-Encoding")
	default:
		codec, encoding = strings.TrimPrefix(kind, "application/"), h.Get("Content-Encoding")
	}
	switch codec {
	case "json":
		f.json = true
	case "proto":
	case "":
		if !f.envelope {
			return f, invalid("the request has no content type")
		}
	default:
		return f, invalid("content type %.64q is not known", kind)
	}
	switch encoding {
	case "", "identity":
	case "gzip":
		f.gzip = true
	default:
		return f, connect.NewError(connect.CodeUnimplemented, fmt.Errorf("unknown compression %.64q: supported encodings are gzip", encoding))
	}
	return f, nil
}

func invalid(format string, args ...any) error {
	return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf(format, args...))
}

// decode reads the first message of a body.
func (f format) decode(content []byte, m proto.Message) error {
	compressed := f.gzip
	if f.envelope {
		if len(content) < envelopeSize {
			return invalid("the request has no message")
		}
		flags, size := content[0], binary.BigEndian.Uint32(content[1:])
		if flags&^flagCompressed != 0 || flags&flagCompressed != 0 && !f.gzip {
			return invalid("the request has flags %d", flags)
		}
		compressed = flags&flagCompressed != 0
		content = content[envelopeSize:]
		if uint64(size) > uint64(len(content)) {
			return invalid("the request's message is cut off")
		}
		content = content[:size]
	}
	if compressed && len(content) > 0 {
		z, err := gzip.NewReader(bytes.NewReader(content))
		if err != nil {
			return invalid("gzip: %w", err)
		}
		if content, err = io.ReadAll(io.LimitReader(z, maxRequest+1)); err != nil {
			return invalid("gzip: %w", err)
		}
		if len(content) > maxRequest {
			return connect.NewError(connect.CodeResourceExhausted, errors.New("the request is too large to be recorded"))
		}
	}
	if err := f.unmarshal(content, m); err != nil {
		return invalid("unmarshal message: %w", err)
	}
	return nil
}

// unmarshal reads a message as the guest agent does.
func (f format) unmarshal(content []byte, m proto.Message) error {
	if f.json {
		return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(content, m)
	}
	return proto.Unmarshal(content, m)
}

// reader cuts a stream of envelopes into messages. What it is fed comes from the guest agent
// and is not trusted to be well formed.
type reader struct {
	message func([]byte)
	skipped func(n int64) // an envelope that holds no message, or too large a one
	end     func([]byte)  // the last envelope of the Connect protocol

	header []byte
	rest   int64 // of the present envelope
	skip   bool
	last   bool
	buffer []byte
}

// maxMessage bounds a message of a stream that is looked at; the agent's are a tenth of it.
const maxMessage = 1 << 20

// feed takes the next bytes.
func (r *reader) feed(p []byte) {
	for len(p) > 0 {
		if r.rest == 0 {
			n := min(envelopeSize-len(r.header), len(p))
			r.header = append(r.header, p[:n]...)
			p = p[n:]
			if len(r.header) < envelopeSize {
				return
			}
			r.rest = int64(binary.BigEndian.Uint32(r.header[1:]))
			r.last = r.header[0] == flagEnd
			r.skip = r.header[0] != 0 && !r.last || r.rest > maxMessage
			if r.skip && r.header[0]&(flagEnd|flagTrailer) == 0 {
				r.skipped(r.rest)
			}
			r.header = r.header[:0]
			if r.rest == 0 && !r.skip {
				r.whole(nil)
			}
			continue
		}
		n := int(min(r.rest, int64(len(p))))
		r.rest -= int64(n)
		switch {
		case r.skip:
		case r.rest == 0 && len(r.buffer) == 0: // whole messages are not copied
			r.whole(p[:n])
		default:
			r.buffer = append(r.buffer, p[:n]...)
			if r.rest == 0 {
				r.whole(r.buffer)
				r.buffer = r.buffer[:0]
			}
		}
		p = p[n:]
	}
}

// whole takes the content of an envelope.
func (r *reader) whole(content []byte) {
	if r.last {
		r.end(content)
		return
	}
	r.message(content)
}
