package capture

import (
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm/internal/audit"
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
		call, err := recorder.Request(request, Caller{Sandbox: "i", Known: true})
		if err != nil {
			return
		}
		if got, err := io.ReadAll(request.Body); err != nil || string(got) != content {
			t.Fatalf("the request was changed: %q, %v", got, err)
		}
		if call != nil {
			call.Outlive(func() {})
			_ = call.Answer(&http.Response{StatusCode: 404, Status: "404 Not Found", Body: http.NoBody})
		}
	})
}
