package capture

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/berm-sandbox/berm/internal/audit"
	pb "github.com/berm-sandbox/berm/internal/proto/process"
)

// FuzzStream feeds what a guest agent may answer, cut into two reads anywhere.
func FuzzStream(f *testing.F) {
	f.Add("application/connect+json", []byte("\x00\x00\x00\x00\x26"+`{"event":{"data":{"stdout":"aGFsbG8="}}}`), 3)
	f.Add("application/connect+json", []byte("\x00\x00\x00\x00\x1e"+`{"event":{"start":{"pid":1}}}`+"\x02\x00\x00\x00\x02{}"), 9)
	f.Add("application/grpc", []byte("\x00\x00\x00\x00\x06\x0a\x04\x0a\x02\x08\x01\x01\xff\xff\xff\xff"), 12)
	recorder := New(audit.Discard, audit.Directory(f.TempDir()), true, slog.New(slog.DiscardHandler))
	f.Fuzz(func(t *testing.T, kind string, answer []byte, at int) {
		request, _ := http.NewRequest(http.MethodPost, "http://x/process.Process/Start",
			strings.NewReader("\x00\x00\x00\x00\x00"))
		request.Header.Set("Content-Type", kind)
		call, err := recorder.Request(request, Caller{Sandbox: "i", Known: true})
		if err != nil || call == nil {
			return
		}
		released := false
		call.Outlive(func() { released = true })
		at = max(0, min(at, len(answer)))
		r := &http.Response{StatusCode: 200, Body: io.NopCloser(io.MultiReader(strings.NewReader(string(answer[:at])), strings.NewReader(string(answer[at:]))))}
		if err := call.Answer(r); err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(r.Body); err != nil || string(got) != string(answer) {
			t.Fatalf("the answer was changed: %q, %v", got, err)
		}
		r.Body.Close()
		if m := call.(*command); m.queue.close() || !released {
			t.Fatal("the command is not finished")
		}
	})
}

// FuzzRequest feeds what a client may send.
func FuzzRequest(f *testing.F) {
	f.Add("/process.Process/Start", "application/connect+json", "\x00\x00\x00\x00\x1b"+`{"process":{"cmd":"/bin/sh"}}`)
	f.Add("/process.Process/Update", "application/json", `{"process":{"pid":1},"pty":{"size":{"cols":1,"rows":2}}}`)
	f.Add("/filesystem.Filesystem/Move", "application/grpc", "\x00\x00\x00\x00\x03\x0a\x01a")
	f.Add("/files", "multipart/form-data; boundary=b", "--b\r\nContent-Disposition: form-data; name=file; filename=x\r\n\r\ny\r\n--b--")
	f.Add("/files/compose", "", `{"source_paths":["a"],"destination":"b"}`)
	recorder := New(audit.Discard, audit.Directory(f.TempDir()), true, slog.New(slog.DiscardHandler))
	f.Fuzz(func(t *testing.T, path, kind, content string) {
		request, err := http.NewRequest(http.MethodPost, "http://x/", strings.NewReader(content))
		if err != nil {
			return
		}
		request.URL.Path = path
		request.Header.Set("Content-Type", kind)
		request, answer := Binary(request)
		call, err := recorder.Request(request, Caller{Sandbox: "i", Known: true})
		if err != nil {
			return
		}
		got, err := io.ReadAll(request.Body)
		switch {
		case err != nil || int64(len(got)) != request.ContentLength:
			t.Fatalf("%d bytes, announced as %d: %v", len(got), request.ContentLength, err)
		case answer == nil && string(got) != content:
			t.Fatalf("the request was changed: %q", got)
		case answer != nil && !sameRequest(t, path, []byte(content), got):
			t.Fatalf("%q became %q", content, got)
		}
		if call != nil {
			call.Outlive(func() {})
			_ = call.Answer(&http.Response{StatusCode: 404, Status: "404 Not Found", Body: http.NoBody})
		}
	})
}

// sameRequest says whether a message in JSON and one in the binary codec, each in an envelope, are the same,
// and what follows them.
func sameRequest(t *testing.T, path string, text, encoded []byte) bool {
	var want, got proto.Message = new(pb.StartRequest), new(pb.StartRequest)
	if path != "/process.Process/Start" {
		want, got = new(pb.ConnectRequest), new(pb.ConnectRequest)
	}
	if err := (format{json: true, envelope: true}).decode(text, want); err != nil {
		t.Fatal(err)
	}
	if err := (format{envelope: true}).decode(encoded, got); err != nil {
		t.Fatal(err)
	}
	rest := func(b []byte) string { return string(b[envelopeSize+binary.BigEndian.Uint32(b[1:]):]) }
	return proto.Equal(want, got) && rest(text) == rest(encoded)
}

// FuzzBinary feeds what a guest agent may answer in the binary codec, cut into two reads anywhere, to a
// client that speaks JSON. The client gets the messages that can be read up to the first that cannot, and then
// an end.
func FuzzBinary(f *testing.F) {
	f.Add([]byte("\x00\x00\x00\x00\x08\x0a\x06\x12\x04\x0a\x02hi\x02\x00\x00\x00\x02{}"), 3)
	f.Add([]byte("\x00\x00\x00\x00\x06\x0a\x04\x0a\x02\x08\x01\x01\xff\xff\xff\xff"), 12)
	f.Add([]byte("\x00\x00\x00\x00\x00\x00\x00\x10\x00\x01\x00"), 6)
	f.Add([]byte("\x02\x00\x00\x00\x02{}\x00\x00\x00\x00\x00"), 7)
	f.Fuzz(func(t *testing.T, answer []byte, at int) {
		request, _ := http.NewRequest(http.MethodPost, "http://x/process.Process/Start", strings.NewReader("\x00\x00\x00\x00\x02{}"))
		request.Header.Set("Content-Type", jsonStream)
		_, answered := Binary(request)
		at = max(0, min(at, len(answer)))
		r := &http.Response{StatusCode: 200, Header: http.Header{"Content-Type": {binaryStream}},
			Body: io.NopCloser(io.MultiReader(bytes.NewReader(answer[:at]), bytes.NewReader(answer[at:])))}
		answered(r)
		got, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		envelope := func(b []byte) (flags byte, content, rest []byte, ok bool) {
			if len(b) < envelopeSize || uint64(len(b)-envelopeSize) < uint64(binary.BigEndian.Uint32(b[1:])) {
				return 0, nil, nil, false
			}
			size := binary.BigEndian.Uint32(b[1:])
			return b[0], b[envelopeSize:][:size], b[envelopeSize+size:], true
		}
		for {
			flags, content, rest, ok := envelope(answer)
			var want pb.StartResponse
			readable := ok && flags == 0 && len(content) <= maxMessage && proto.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(content, &want) == nil
			if len(answer) == 0 {
				break
			}
			gotFlags, message, more, whole := envelope(got)
			if !whole {
				t.Fatalf("%q after all that was to be read, for %q", got, answer)
			}
			answer, got = rest, more
			if !readable {
				if gotFlags != flagEnd || ok && flags == flagEnd && string(message) != string(content) || !json.Valid(message) && flags != flagEnd {
					t.Fatalf("flags %d, %q for flags %d, %q", gotFlags, message, flags, content)
				}
				break
			}
			var response pb.StartResponse
			if err := protojson.Unmarshal(message, &response); gotFlags != 0 || err != nil || !proto.Equal(&want, &response) {
				t.Fatalf("flags %d, %q, want %v: %v", gotFlags, message, &want, err)
			}
		}
		if len(got) > 0 {
			t.Fatalf("%q after the end", got)
		}
	})
}
