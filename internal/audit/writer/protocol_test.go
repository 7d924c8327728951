package writer

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/service"
)

var record = audit.Record{Actor: audit.Actor{Type: "system"}, Type: audit.APICall, Src: "test", Trust: audit.TrustHost, Outcome: audit.OK}

func batchOf(t testing.TB, records ...audit.Record) []byte {
	b := make([]byte, lengthSize)
	for _, r := range records {
		body, err := audit.AppendBody(nil, r)
		if err != nil {
			t.Fatal(err)
		}
		b = appendEntry(b, body)
	}
	setLength(b)
	return b
}

// Whatever a server sends, no more is read than it may send, and what is taken are its records.
func FuzzBatch(f *testing.F) {
	f.Add(batchOf(f, record, record))
	f.Add([]byte{2, 0, 0, 0, '{', '}'})
	f.Add([]byte{255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, text []byte) {
		in := bytes.NewReader(text)
		var buffer []byte
		for {
			var err error
			if buffer, err = readBatch(in, buffer); err != nil {
				if cap(buffer) > maxBatch {
					t.Errorf("%d bytes of room", cap(buffer))
				}
				return
			}
			var e entries
			if e.parse(buffer) != nil {
				return
			}
			if len(e.records) != len(e.at) || len(e.records)+len(e.refused) == 0 {
				t.Errorf("%d records at %d places, %d refused", len(e.records), len(e.at), len(e.refused))
			}
		}
	})
}

// Whatever a writer answers, no more is read than it may answer.
func FuzzAnswer(f *testing.F) {
	refused := []refusal{{3, service.Failed(errors.New("why"))}, {all, service.Failed(io.EOF)}}
	answer, err := appendAnswer(nil, 7, refused)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(answer)
	f.Add(append(make([]byte, 8), 255, 255, 255, 255))
	f.Fuzz(func(t *testing.T, text []byte) {
		_, refused, err := readAnswer(bytes.NewReader(text))
		for _, r := range refused {
			if err == nil && r.Error.Err() == nil {
				t.Error("a refusal is no error")
			}
		}
	})
}

// Whatever a server says beside records, the writer goes on until the connection ends, or stops
// listening.
func FuzzMessages(f *testing.F) {
	for _, text := range []string{
		`{"id":1,"begin":true}`, `{"id":1,"begin":true}{"id":2,"name":"new-1","sha256":"00"}`, `{"close":true}` + "\n" + `{"close":true}`, `{"erase":{"sandbox":""}}`,
		`{"erase":{"sandbox":"i0test","reason":"r"},"dry":true}`, `{"rotate":true}`, `{"id":1,"holding":{"sandboxes":["x"]}}`, `{"error":{}}`, `{"name":"../key","sha256":""}`, `[`, "\n\n",
	} {
		f.Add([]byte(text + "\n"))
	}
	f.Chdir(f.TempDir())
	var log *trail.Log
	f.Fuzz(func(t *testing.T, text []byte) {
		if log == nil {
			var err error
			if log, err = trail.Open(here, trail.Options{Log: slog.New(slog.DiscardHandler)}); err != nil {
				t.Fatal(err)
			}
		}
		ours, theirs, err := service.Connect()
		if err != nil {
			t.Fatal(err)
		}
		defer ours.Close()
		conn, err := service.Conn(theirs)
		if err != nil {
			t.Fatal(err)
		}
		s := &server{wire: service.NewWire(conn), log: log, gone: make(chan struct{})}
		go s.attend()
		go func() { _, _ = io.Copy(io.Discard, ours) }()
		_, _ = ours.Write(text)
		_ = ours.CloseWrite()
		<-s.gone
		if s.said.Load() {
			log = nil
		} else if err := log.Emit(record); err != nil {
			t.Error(err)
		}
	})
}

func TestAnswer(t *testing.T) {
	for _, want := range [][]refusal{nil, {{0, service.Failed(berm.Errorf(berm.Unavailable, "full").WithHint("make space"))}, {all, service.Failed(io.EOF)}}} {
		answer, err := appendAnswer(nil, 1<<40, want)
		if err != nil {
			t.Fatal(err)
		}
		seq, got, err := readAnswer(bytes.NewReader(answer))
		if err != nil || seq != 1<<40 || len(got) != len(want) {
			t.Fatalf("%d, %v, %v", seq, got, err)
		}
		for i := range want {
			if got[i].At != want[i].At || *got[i].Error != *want[i].Error {
				t.Errorf("%+v became %+v", want[i], got[i])
			}
		}
	}
	many := make([]refusal, 10_000)
	for i := range many {
		many[i] = refusal{i, service.Failed(berm.Errorf(berm.Invalid, "this is one of very many records that are none, which no server sends: there are so many of them that the answer gets too long"))}
	}
	answer, err := appendAnswer(nil, 1, many)
	if err != nil {
		t.Fatal(err)
	}
	if _, got, err := readAnswer(bytes.NewReader(answer)); err != nil || len(got) != 1 || got[0].At != all {
		t.Errorf("%v, %v", got, err)
	}
}
