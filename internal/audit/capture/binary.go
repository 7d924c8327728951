package capture

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/berm-sandbox/berm/internal/proto/codec"
	pb "github.com/berm-sandbox/berm/internal/proto/process"
)

// Content types of a stream of the Connect protocol, by codec.
const (
	binaryStream = "application/connect+proto"
	jsonStream   = "application/connect+json"
)

// Binary has the guest agent send the output of a command in the binary codec to a client that
// speaks JSON, where it would be in base64: so it is recorded, and looked through for secrets, as it
// is. It returns the request to pass on, and what makes JSON of its answer; nil says that the answer
// is as the client wants it.
func Binary(r *http.Request) (*http.Request, func(*http.Response)) {
	var message proto.Message
	switch r.URL.Path {
	case "/process.Process/Start":
		message = new(pb.StartRequest)
	case "/process.Process/Connect":
		message = new(pb.ConnectRequest)
	}
	if message == nil || r.Method != http.MethodPost || !strings.EqualFold(r.Header.Get("Content-Type"), jsonStream) {
		return r, nil
	}
	f, err := formatOf(r.Header)
	if err != nil {
		return r, nil //nolint:nilerr // the agent refuses it
	}
	rest := r.Body
	content, err := peek(r, f.envelope, maxRequest)
	if err != nil || f.decode(content, message) != nil {
		return r, nil //nolint:nilerr // as above
	}
	encoded, err := proto.Marshal(message)
	if err != nil {
		return r, nil //nolint:nilerr // as above
	}
	head := appendEnvelope(nil, 0, encoded)
	out := r.WithContext(r.Context())
	out.Header = r.Header.Clone()
	out.Header.Set("Content-Type", binaryStream)
	for _, name := range []string{"Content-Length", "Connect-Content-Encoding", "Connect-Accept-Encoding"} {
		out.Header.Del(name)
	}
	if r.ContentLength >= 0 {
		out.ContentLength += int64(len(head) - len(content))
	}
	out.Body = body{io.MultiReader(bytes.NewReader(head), rest), rest}
	return out, answerJSON
}

// answerJSON makes JSON of an answer in the binary codec. Whatever else an agent answers goes on as
// it is.
func answerJSON(r *http.Response) {
	if r.StatusCode != http.StatusOK || r.Header.Get("Content-Type") != binaryStream {
		return
	}
	r.Header.Set("Content-Type", jsonStream)
	r.Header.Del("Content-Length")
	r.ContentLength = -1
	r.Body = &transcoder{body: r.Body}
}

func appendEnvelope(dst []byte, flags byte, content []byte) []byte {
	dst = binary.BigEndian.AppendUint32(append(dst, flags), uint32(len(content)))
	return append(dst, content...)
}

// transcoder reads a stream in the binary codec as one in JSON. What it is fed comes from the
// guest agent and is not trusted to be well formed: what cannot be read ends the stream with an
// error.
type transcoder struct {
	body  io.ReadCloser
	ended bool  // the agent ended the stream
	err   error // comes after all that was read
	*pending
}

// pending is what a stream has not given on. There is none while nothing comes.
type pending struct {
	in   []byte // the begin of an envelope
	out  []byte
	read int // of out
}

var pendings = sync.Pool{New: func() any { return new(pending) }}

func (t *transcoder) Read(p []byte) (int, error) {
	for len(p) > 0 {
		if t.pending != nil && t.read < len(t.out) {
			n := copy(p, t.out[t.read:])
			t.read += n
			return n, nil
		}
		t.release()
		if t.err != nil {
			return 0, t.err
		}
		n, err := t.body.Read(p[:len(p)-len(p)/4]) // JSON of it fits into p
		switch {
		case n > 0 && t.ended:
			err = io.EOF // nobody waits for it
		case n > 0:
			if t.pending == nil {
				t.pending = pendings.Get().(*pending)
			}
			t.in = append(t.in, p[:n]...)
			if broken := t.take(); broken != nil {
				t.refuse(broken)
				err = io.EOF
			}
		}
		if errors.Is(err, io.EOF) && t.pending != nil && len(t.in) > 0 {
			t.refuse(errors.New("it is cut off"))
		}
		t.err = err
	}
	return 0, nil
}

// release gives back what is empty.
func (t *transcoder) release() {
	if t.pending == nil {
		return
	}
	if t.out, t.read = t.out[:0], 0; len(t.in) == 0 {
		if cap(t.in)+cap(t.out) <= maxQueued {
			pendings.Put(t.pending)
		}
		t.pending = nil
	}
}

// take makes JSON of the messages that are there as a whole.
func (t *transcoder) take() error {
	rest := t.in
	for len(rest) >= envelopeSize && !t.ended {
		flags, size := rest[0], binary.BigEndian.Uint32(rest[1:])
		if size > maxMessage {
			return fmt.Errorf("a message has %d bytes", size)
		}
		if len(rest)-envelopeSize < int(size) {
			break
		}
		content := rest[envelopeSize:][:size]
		rest = rest[envelopeSize+size:]
		switch flags {
		case 0:
			if err := t.message(content); err != nil {
				return err
			}
		case flagEnd: // in JSON whatever the codec
			t.out = appendEnvelope(t.out, flagEnd, content)
			t.ended, rest = true, nil
		default:
			return fmt.Errorf("a message has flags %d", flags)
		}
	}
	t.in = t.in[:copy(t.in, rest)]
	return nil
}

// message makes JSON of one message. A ConnectResponse is a StartResponse by another name.
func (t *transcoder) message(content []byte) error {
	start := len(t.out)
	t.out = append(t.out, make([]byte, envelopeSize)...)
	if stream, data := codec.Output(content); stream != "" {
		t.out = codec.AppendOutput(t.out, stream, data)
	} else {
		var response pb.StartResponse
		err := proto.Unmarshal(content, &response)
		if err == nil {
			t.out, err = codec.JSON{}.MarshalAppend(t.out, &response)
		}
		if err != nil {
			t.out = t.out[:start]
			return err
		}
	}
	binary.BigEndian.PutUint32(t.out[start+1:], uint32(len(t.out)-start-envelopeSize))
	return nil
}

// refuse ends the stream with an error (https://connectrpc.com/docs/protocol#error-end-stream).
func (t *transcoder) refuse(err error) {
	t.in = t.in[:0]
	t.ended = true
	end, _ := json.Marshal(map[string]failure{"error": {"internal", "the guest agent's answer cannot be read: " + err.Error()}})
	t.out = appendEnvelope(t.out, flagEnd, end)
}

// Close implements io.Closer.
func (t *transcoder) Close() error { return t.body.Close() }
