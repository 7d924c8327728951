package audit

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var cutSize = regexp.MustCompile(`"cut":\d+`)

// follower is a Keeper, with which a log salts its records.
type follower struct{}

func (follower) Last() ([]byte, error) { return nil, nil }

func (follower) Again() bool     { return false }
func (follower) Appended([]byte) {}

func whole() Record {
	return Record{
		Sandbox: "i0test", Actor: Actor{Type: "key", ID: "k"}, Type: ExecStart, Src: "router", Trust: TrustHost, Outcome: OK, Reason: "a, \"b\" } ]",
		PolicyID: "p", Data: map[string]any{"argv": []string{"sh", "-c", "a,b}"}}, Blobs: []Blob{{strings.Repeat("a", 64), 1, KindFrames}}, TraceID: "t",
	}
}

// A record that another process hands over becomes the line that it would be here.
func TestBodyIsTheSameLine(t *testing.T) {
	for name, r := range map[string]Record{
		"all": whole(), "least": {Actor: Actor{Type: "system"}, Type: ServerStart, Src: "server", Trust: TrustHost, Outcome: OK},
		"token": {Actor: Actor{Type: "system"}, Type: APICall, Reason: "Bearer 0123456789abcdef"}, "control": {Type: APICall, Data: "\u009b2J"},
		"long":  {Type: ProcExec, Sandbox: "i0test", Reason: strings.Repeat("r", 2000), Data: strings.Repeat("x", 2*MaxLine)},
		"grows": {Type: ProcExec, Reason: "r", Data: strings.Repeat("\u0085", MaxLine/3)},
	} {
		t.Run(name, func(t *testing.T) {
			body, err := AppendBody(nil, r)
			if err != nil {
				t.Fatal(err)
			}
			other, err := ParseBody(body)
			if err != nil {
				t.Fatal(err)
			}
			if other.Sandbox != r.Sandbox || other.Type != r.Type {
				t.Errorf("it is a %s of %q", other.Type, other.Sandbox)
			}
			here, err := encode(nil, &r)
			if err != nil {
				t.Fatal(err)
			}
			there, err := encode(nil, &other)
			if err != nil {
				t.Fatal(err)
			}
			if name == "long" { // it was cut there
				here, there = []byte(cutSize.ReplaceAllString(string(here), "")), []byte(cutSize.ReplaceAllString(string(there), ""))
			}
			if !bytes.Equal(here, there) {
				t.Errorf("here  %s\nthere %s", here, there)
			}
		})
	}
}

func TestParseBodyRefuses(t *testing.T) {
	good, err := AppendBody(nil, whole())
	if err != nil {
		t.Fatal(err)
	}
	replaced := func(old, with string) string { return strings.Replace(string(good), old, with, 1) }
	for name, body := range map[string]string{
		"nothing": "", "no object": "[]", "empty": "{}", "two": string(good) + string(good), "half": string(good[:len(good)-1]),
		"number of its own":    replaced(`"actor"`, `"seq":1,"actor"`),
		"another field":        replaced(`"src"`, `"x":1,"src"`),
		"another at the end":   replaced(`"traceID":"t"`, `"traceID":"t","prev":"x"`),
		"a field twice":        replaced(`"src":"router"`, `"src":"router","src":"a"`),
		"line":                 replaced(`"src"`, "\n\"src\""),
		"space":                replaced(`"src"`, ` "src"`),
		"removal":              replaced("exec.start", string(Removed)),
		"erasure":              replaced("exec.start", string(Erase)),
		"key":                  replaced("exec.start", string(KeyRotate)),
		"unknown type":         replaced("exec.start", "exec.stop"),
		"source":               replaced("router", OwnSource),
		"hidden sandbox":       replaced("i0test", `\u00690test`),
		"actor that is none":   replaced(`{"type":"key","id":"k"}`, `"key"`),
		"contents that are no": replaced(`"blobs":[`, `"blobs":["a",`),
		"too long":             replaced("router", strings.Repeat("r", MaxLine)),
	} {
		if _, err := ParseBody([]byte(body)); err == nil {
			t.Errorf("%s: taken: %s", name, body)
		}
	}
	if _, err := AppendBody(nil, Record{Type: APICall, TraceID: strings.Repeat("t", MaxLine)}); err == nil {
		t.Error("a record that is too long was taken")
	}
}

// What ends somewhere is JSON up to there, and JSON without space ends at its end.
func FuzzValueEnd(f *testing.F) {
	for _, text := range []string{`{"a":[1,-0.5e+7,"\u00e9\n\"",true,false,null,{}],"b":[]}`, `"x"`, `01`, `1.`, `-`, `[1,]`, `{"a"}`, `tru`, `"\u12"`} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		end := valueEnd(text, 0, 0)
		if end >= 0 && !json.Valid(text[:end]) {
			t.Errorf("%q is no JSON", text[:end])
		}
		if end != len(text) && json.Valid(text) && !bytes.ContainsAny(text, " \t\r\n") && bytes.Count(text, []byte("["))+bytes.Count(text, []byte("{")) < maxDepth {
			t.Errorf("%q is JSON and ends at %d", text, end)
		}
	})
}

// Whatever is taken becomes one line of the log, which tells what was judged.
func FuzzParseBody(f *testing.F) {
	body, err := AppendBody(nil, whole())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(body)
	f.Add([]byte(`{"actor":{"type":"system"},"type":"audit.gap","src":"server","trust":"host","outcome":"ok"}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		r, err := ParseBody(bytes.Clone(body))
		if err != nil {
			return
		}
		l, err := Open(filepath.Join(t.TempDir(), "log"), &follower{})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if err := l.Emit(r); err != nil {
			return // masked or escaped it is too long
		}
		line := make([]byte, l.Size())
		if _, err := l.file.ReadAt(line, 0); err != nil {
			t.Fatal(err)
		}
		var read Record
		if err := json.Unmarshal(line, &read); err != nil || bytes.IndexByte(line, '\n') != len(line)-1 || len(line) > MaxLine+1 {
			t.Fatalf("%v: %s", err, line)
		}
		if read.Seq != 1 || read.Sandbox != r.Sandbox || read.Type != r.Type || read.Prev != Chain(nil) || read.Src == OwnSource || (read.Salt == "") != (r.Sandbox == "") {
			t.Errorf("%+v became %+v", r, read)
		}
	})
}

// BenchmarkParseBody is what a record costs that another process hands over.
func BenchmarkParseBody(b *testing.B) {
	body, err := AppendBody(nil, Record{
		Type: ProcExec, Sandbox: "i0aaaaaaaaaaaaaaaaaaa", Actor: Actor{Type: "system"}, Src: "kernel", Trust: TrustHost, Outcome: OK,
		Data: Process{PID: 7, PPID: 6, Host: 4711, Exe: "/usr/bin/true", Argv: []string{"true"}, Cwd: "/workspace"},
	})
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := ParseBody(body); err != nil {
			b.Fatal(err)
		}
	}
}
