package capture

import (
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/berm-sandbox/berm/internal/audit"
	pb "github.com/berm-sandbox/berm/internal/proto/process"
)

// BenchmarkOutput is what looking at a command's output costs: what is recorded of it, and JSON for the
// client.
func BenchmarkOutput(b *testing.B) {
	message, err := proto.Marshal(&pb.StartResponse{Event: &pb.ProcessEvent{Event: &pb.ProcessEvent_Data{Data: &pb.ProcessEvent_DataEvent{
		Output: &pb.ProcessEvent_DataEvent_Stdout{Stdout: make([]byte, 30<<10)}}}}})
	if err != nil {
		b.Fatal(err)
	}
	frame := appendEnvelope(nil, 0, message)
	for name, output := range map[string]bool{"kept": true, "counted": false} {
		b.Run(name, func(b *testing.B) {
			recorder := New(audit.Discard, audit.Directory(b.TempDir()), output, slog.New(slog.DiscardHandler))
			start := func() *command {
				request, _ := http.NewRequest(http.MethodPost, "http://x/process.Process/Start", strings.NewReader("\x00\x00\x00\x00\x00"))
				request.Header.Set("Content-Type", binaryStream)
				call, err := recorder.Request(request, Caller{Sandbox: "i", Known: true})
				if err != nil {
					b.Fatal(err)
				}
				call.Outlive(func() {})
				_ = call.Answer(&http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader(""))})
				return call.(*command)
			}
			b.SetBytes(30 << 10)
			m := start()
			for n := 0; b.Loop(); n++ {
				if n%1024 == 0 { // 30 MiB, all of which is kept
					m.finish(audit.OK, "")
					m = start()
				}
				for at := 0; at < len(frame); at += 32 << 10 {
					m.queue.put(piece{data: frame[at:min(at+32<<10, len(frame))]})
				}
			}
			m.finish(audit.OK, "")
		})
	}
	b.Run("json", func(b *testing.B) {
		b.SetBytes(30 << 10)
		r := transcoder{body: io.NopCloser(endless(frame))}
		p := make([]byte, 64<<10)
		for n := 0; b.Loop(); n += 40 << 10 {
			for read := 0; read < 40<<10; { // as base64
				k, err := r.Read(p)
				if err != nil {
					b.Fatal(err)
				}
				read += k
			}
		}
	})
}

// endless reads the same over and over.
type endless []byte

func (e endless) Read(p []byte) (int, error) { return copy(p, e), nil }
