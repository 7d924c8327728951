package audit

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestTokensAreMasked(t *testing.T) {
	long := strings.Repeat("a1B2", 16)
	for text, want := range map[string]string{
		"git clone https://user:hunter2@host/x":           "git clone https://user:[masked]@host/x",
		"ghp_" + long + " and sk-ant-" + long:             "ghp_[masked] and sk-ant-[masked]",
		"AKIAIOSFODNN7EXAMPLE":                            "AKIA[masked]",
		"Authorization: Bearer abc.DEF-123":               "Authorization: Bearer [masked]",
		"Authorization: Basic dXNlcjpwYXNz":               "Authorization: Basic [masked]",
		"e2b_0123456789abcdef0123456789abcdef01234567":    "e2b_[masked]",
		"x=1&API_KEY=hunter22&y":                          "x=1&API_KEY=[masked]&y",
		"-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END": "-----BEGIN RSA PRIVATE KEY-----[masked]-----END",
		"-----BEGIN PRIVATE KEY-----\nMIIE\"x":            "-----BEGIN PRIVATE KEY-----[masked]",
		"eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl":          "eyJ[masked]",
		// What is none.
		"http://host:80/a?b=c": "http://host:80/a?b=c", "task-queue-number-twenty-three-of-many": "task-queue-number-twenty-three-of-many",
		"ls -la https://example.com/a@b": "ls -la https://example.com/a@b", "token=": "token=",
	} {
		line, err := json.Marshal(Record{Type: ProcExec, Data: Process{Argv: []string{text}}})
		if err != nil {
			t.Fatal(err)
		}
		var r struct{ Data Process }
		if err := json.Unmarshal(MaskTokens(line), &r); err != nil {
			t.Fatalf("%q: %v in %s", text, err, MaskTokens(line))
		}
		if got := r.Data.Argv[0]; got != want {
			t.Errorf("%q became %q, want %q", text, got, want)
		}
	}
}

// A token that a sandbox chooses takes nothing of the record with it.
func TestMaskingKeepsTheRecord(t *testing.T) {
	for _, text := range []string{
		"-----BEGIN PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----\n\"}x\\", "password=aaaa", "://a:bbbb@", "Bearer aaaaaaaaaaaa", "eyJaaaaaaaaaa.bbbbbbbbbbbb.cccccccccccc", "\nsk-ant-aaaaaaaaaaaaaaaaaaaaaaaaaaaa",
	} {
		for _, r := range []Record{
			{Type: ProcExec, Data: Process{Argv: []string{text, "next"}}, Reason: text, Prev: Chain(nil)},
			{Type: NetFlow, Sandbox: "i1", Data: map[string]any{text: text}, Prev: Chain(nil)},
		} {
			line, err := encode(nil, &r)
			if err != nil {
				t.Fatal(err)
			}
			var back Record
			if err := json.Unmarshal(line, &back); err != nil || back.Prev != r.Prev || back.Type != r.Type || back.Sandbox != r.Sandbox {
				t.Errorf("%q: %v in %s", text, err, line)
			}
			if strings.Contains(text, "\nsk") && strings.Contains(string(line), "sk-ant-aaa") {
				t.Errorf("%q is not masked: %s", text, line)
			}
		}
	}
}

// Whatever a record holds, its line is one object of JSON afterwards too.
func FuzzMask(f *testing.F) {
	f.Add("Bearer abcdefghijk\"\\", "sk-aaaaaaaaaaaaaaaaaaaaaaaa\n")
	f.Add("-----BEGIN PRIVATE KEY-----\\\"", "x")
	f.Add("-----BEGIN PRIVATE KEY-----", "-----BEGIN A PRIVATE KEY-----\\u00")
	f.Add("://a:b\\\"@c", "password=\\u0022x")
	f.Fuzz(func(t *testing.T, a, b string) {
		line, err := json.Marshal(Record{Type: ProcExec, Reason: a, Data: Process{Argv: []string{b, a}}})
		if err != nil {
			t.Skip()
		}
		if out := MaskTokens(line); !json.Valid(out) {
			t.Fatalf("%s became %s", line, out)
		}
		if line, err = encode(nil, &Record{Type: ProcExec, Reason: a, Data: Process{Argv: []string{b, a}}, Prev: Chain(nil)}); err != nil || !json.Valid(line) || !strings.Contains(string(line), Chain(nil)) {
			t.Fatalf("%s, %v", line, err)
		}
	})
}
