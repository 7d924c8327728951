package capture

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"log/slog"
	"net/http"
	"testing"

	"github.com/berm-sandbox/berm/internal/audit"
)

// emitted is the records that were emitted.
type emitted []audit.Record

func (e *emitted) Emit(r audit.Record) error {
	*e = append(*e, r)
	return nil
}

// A file that the agent sends packed, as clients ask it to, is told as it is; what cannot be
// understood has neither size nor hash.
func TestPackedDownload(t *testing.T) {
	pack := func(content []byte, level int) []byte {
		var out bytes.Buffer
		z, _ := gzip.NewWriterLevel(&out, level)
		_, _ = z.Write(content)
		_ = z.Close()
		return out.Bytes()
	}
	text := bytes.Repeat([]byte("a line of text\n"), 1<<16) // several pieces, and not of their size
	sum := sha256.Sum256(text)
	known := audit.FileAccess{Path: "f", Op: "read", Size: int64(len(text)), SHA256: hex.EncodeToString(sum[:])}
	unknown := audit.FileAccess{Path: "f", Op: "read"}
	packed := pack(text, gzip.HuffmanOnly) // badly enough to be no bomb
	random := bytes.Repeat([]byte("0123456789abcdef"), 3)
	for name, c := range map[string]struct {
		encoding string
		body     []byte
		status   int
		want     audit.FileAccess
	}{
		"Plain":   {"", text, 200, known},
		"Part":    {"", text[:100], 206, audit.FileAccess{Path: "f", Op: "read", Size: 100}},
		"Other":   {"br", random, 200, unknown},
		"Empty":   {"gzip", nil, 200, unknown},
		"NotGzip": {"gzip", random, 200, unknown},
		"Cut":     {"gzip", packed[:len(packed)-9], 200, unknown},
		"Garbage": {"gzip", append(bytes.Clone(packed), random...), 200, unknown},
		"Bomb":    {"gzip", pack(make([]byte, 64<<20), gzip.BestSpeed), 200, unknown},
		"Packed":  {"gzip", packed, 200, known},
	} {
		t.Run(name, func(t *testing.T) {
			var log emitted
			recorder := New(&log, audit.Directory(t.TempDir()), true, slog.New(slog.DiscardHandler))
			request, _ := http.NewRequest(http.MethodGet, "http://x/files?path=f", nil)
			call, err := recorder.Request(request, Caller{Sandbox: "i", Known: true})
			if err != nil {
				t.Fatal(err)
			}
			answer := &http.Response{StatusCode: c.status, Header: http.Header{}, Body: io.NopCloser(bytes.NewReader(c.body))}
			if c.encoding != "" {
				answer.Header.Set("Content-Encoding", c.encoding)
			}
			if err := call.Answer(answer); err != nil {
				t.Fatal(err)
			}
			if got, err := io.ReadAll(answer.Body); err != nil || !bytes.Equal(got, c.body) {
				t.Errorf("the client gets %d bytes of %d: %v", len(got), len(c.body), err)
			}
			if answer.Body.Close(); len(log) != 1 || log[0].Data != any(c.want) || log[0].Outcome != audit.OK {
				t.Errorf("got %+v\nwant %+v", log, c.want)
			}
		})
	}
}
