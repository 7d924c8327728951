package container

import (
	"bytes"
	"encoding/json"
	"testing"
	"unicode/utf8"
)

// FuzzAnswer: whatever an interpreter answers, what is passed on is single lines of JSON, of types
// that are known, and there are no more of them than there were lines.
func FuzzAnswer(f *testing.F) {
	for _, s := range []string{
		`{"type":"stdout","text":"a"}` + "\n" + `{"type":"end_of_execution"}`,
		`{"type":"result","text":"1","chart":{"type":"bar","elements":[]},"extra":{"a/b":1},"is_main_result":true}`,
		`{"type":"error","name":"E","value":"v","traceback":"t"}`, `{"type":"number_of_executions","execution_count":3}`,
		`{"type":"result","json":` + "\"\xff\\ud800\"}", "\n\n{}", `{"type":7}`, `[[[[`, `{"type":"keepalive"}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		n := 0
		err := read(bytes.NewReader(body), func(e Event) error {
			n++
			if result, ok := e.(*Result); ok {
				result.plain()
			}
			line, err := json.Marshal(e)
			if err != nil {
				t.Fatalf("%+v cannot be passed on: %v", e, err)
			}
			if bytes.ContainsAny(line, "\r\n") || !utf8.Valid(line) || !json.Valid(line) {
				t.Errorf("%q", line)
			}
			switch e.Kind() {
			case "stdout", "stderr", "result", "error", "number_of_executions", "keepalive":
			default:
				t.Errorf("type %q", e.Kind())
			}
			return nil
		})
		if lines := bytes.Count(body, []byte("\n")) + 1; n > lines {
			t.Errorf("%d events in %d lines", n, lines)
		}
		if err == nil && !bytes.Contains(body, []byte("_")) {
			t.Error("an end that was not told")
		}
	})
}

// FuzzFileID: an id that is taken stands for one absolute path, and for no other.
func FuzzFileID(f *testing.F) {
	for _, s := range []string{FileID("/home/user/a.csv"), FileID(""), "cfile_", "cfile_L2", FileID("/\xff"), FileID("a")} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, id string) {
		p, err := filePath(id)
		if err != nil {
			return
		}
		if p[0] != '/' || !utf8.ValidString(p) {
			t.Errorf("%q", p)
		}
		if again, err := filePath(FileID(p)); err != nil || again != p {
			t.Errorf("%q: %q, %v", p, again, err)
		}
	})
}
