package capture

import (
	"encoding/base64"
	"encoding/binary"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm/internal/audit"
)

// BenchmarkOutput is what looking at a command's output costs.
func BenchmarkOutput(b *testing.B) {
	message := []byte(`{"event":{"data":{"stdout":"` + base64.StdEncoding.EncodeToString(make([]byte, 30<<10)) + `"}}}`)
	frame := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message))), message...)
	for name, output := range map[string]bool{"kept": true, "counted": false} {
		b.Run(name, func(b *testing.B) {
			recorder := New(audit.Discard, audit.Directory(b.TempDir()), output, slog.New(slog.DiscardHandler))
			start := func() *command {
				request, _ := http.NewRequest(http.MethodPost, "http://x/process.Process/Start", strings.NewReader("\x00\x00\x00\x00\x02{}"))
				request.Header.Set("Content-Type", "application/connect+json")
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
}
