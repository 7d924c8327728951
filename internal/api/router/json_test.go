package router

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berm-sandbox/berm"
	pb "github.com/berm-sandbox/berm/internal/proto/process"
)

func envelope(flags byte, content string) string {
	return string(binary.BigEndian.AppendUint32([]byte{flags}, uint32(len(content)))) + content
}

// ask makes a request in JSON and returns the answer, whose body is open.
func (c *captured) ask(ctx context.Context, origin, method, body string, header ...string) *http.Response {
	c.t.Helper()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, origin+"/process.Process/"+method, strings.NewReader(body))
	if err != nil {
		c.t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/connect+json")
	r.Header.Set("Connect-Protocol-Version", "1")
	r.Header.Set("Accept-Encoding", "identity")
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	answer, err := c.RoundTrip(r)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { answer.Body.Close() })
	return answer
}

// next reads a message in an envelope, or io.EOF.
func next(t *testing.T, r io.Reader) (flags byte, message string, err error) {
	t.Helper()
	head := make([]byte, 5)
	if _, err := io.ReadFull(r, head); err != nil {
		return 0, "", err
	}
	content := make([]byte, binary.BigEndian.Uint32(head[1:]))
	_, err = io.ReadFull(r, content)
	return head[0], string(content), err
}

// stream reads all messages of an answer, as what they mean, without the numbers of processes. Output is
// joined: it is chance where one read of the agent's ends.
func stream(t *testing.T, r *http.Response) (all []any) {
	t.Helper()
	for {
		flags, message, err := next(t, r.Body)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		var value map[string]any
		if err := json.Unmarshal([]byte(message), &value); err != nil {
			t.Fatalf("%q: %v", message, err)
		}
		event, _ := value["event"].(map[string]any)
		if start, ok := event["start"].(map[string]any); ok && start["pid"] != nil {
			start["pid"] = "a number"
		}
		data, _ := event["data"].(map[string]any)
		for name, encoded := range data {
			text, err := base64.StdEncoding.DecodeString(encoded.(string))
			if err != nil || len(data) != 1 || len(value) != 1 || len(event) != 1 {
				t.Fatalf("%q: %v", message, err)
			}
			output := [2]string{name, string(text)}
			if last := len(all) - 1; last >= 0 {
				if before, ok := all[last].([2]string); ok && before[0] == name {
					output[1], all = before[1]+output[1], all[:last-1]
				}
			}
			all = append(all, flags, output)
		}
		if data == nil {
			all = append(all, flags, value)
		}
	}
}

// Who speaks JSON gets what the agent answers in JSON, though the agent is asked for the binary codec.
func TestJSONIsAsTheAgents(t *testing.T) {
	c := newCaptured(t)
	agent := httptest.NewServer(c.engine.Ports[berm.AgentPort])
	defer agent.Close()
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	io.WriteString(z, `{"process":{"cmd":"/bin/echo","args":["zipped"]}}`)
	z.Close()
	shell := func(script, more string) string {
		return envelope(0, fmt.Sprintf(`{"process":{"cmd":"/bin/sh","args":["-c",%q],"envs":{"A":"b\u00e4"},"later":[1]},"more":{"x":null}%s}`, script, more))
	}
	for _, test := range []struct {
		name, method, body string
		header             []string
	}{
		{"output and code", "Start", shell(`echo "out $A"; sleep .1; echo err >&2; sleep .1; exit 3`, `,"stdin":false`), nil},
		{"nothing", "Start", shell("", ""), nil},
		{"bytes", "Start", shell(`printf '\000\377\n"\\\342\200\250'`, ""), nil},
		{"signal", "Start", shell("kill -9 $$", ""), nil},
		{"terminal", "Start", shell("stty size", `,"pty":{"size":{"cols":80,"rows":24}}`), nil},
		{"keepalive", "Start", shell("sleep 1.5", ""), []string{"Keepalive-Ping-Interval", "1"}},
		{"deadline", "Start", shell("exec sleep 60", ""), []string{"Connect-Timeout-Ms", "200"}},
		{"no command", "Start", envelope(0, `{"process":{"cmd":"no-such-command-here"}}`), nil},
		{"no directory", "Start", envelope(0, `{"process":{"cmd":"/bin/true","cwd":"/no/such/<directory>"}}`), nil},
		{"nothing to start", "Start", envelope(0, "{}"), nil},
		{"gzip", "Start", envelope(1, zipped.String()), []string{"Connect-Content-Encoding", "gzip", "Connect-Accept-Encoding", "gzip"}},
		{"with a tag", "Start", shell("echo tagged", `,"tag":"tag"`), nil},
		{"an end of before", "Connect", envelope(0, `{"process":{"tag":"tag"},"more":1}`), nil},
		{"unknown", "Connect", envelope(0, `{"process":{"tag":"none"}}`), nil},
		{"none", "Connect", envelope(0, "{}"), nil},
		{"no JSON", "Connect", envelope(0, "[}"), nil},
		{"wrong type", "Connect", envelope(0, `{"process":{"pid":"x"}}`), nil},
		{"no message", "Connect", "", nil},
		{"cut off", "Connect", "\x00\x00\x00\x00\x09{}", nil},
		{"unknown compression", "Connect", envelope(1, "{}"), []string{"Connect-Content-Encoding", "br"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			want, got := c.ask(t.Context(), agent.URL, test.method, test.body, test.header...), c.ask(t.Context(), c.URL, test.method, test.body, test.header...)
			if want.StatusCode != got.StatusCode {
				t.Errorf("status %d, the agent's %d", got.StatusCode, want.StatusCode)
			}
			for _, r := range []*http.Response{want, got} {
				r.Header.Del("Date")
				// The agent names a compression that the client takes, and compresses nothing.
				r.Header.Del("Connect-Content-Encoding")
			}
			if !reflect.DeepEqual(want.Header, got.Header) {
				t.Errorf("header %v, the agent's %v", got.Header, want.Header)
			}
			if want, got := stream(t, want), stream(t, got); !reflect.DeepEqual(want, got) {
				t.Errorf("got\n%v, the agent's\n%v", got, want)
			}
		})
	}
}

// answering has the guest agent answer each call with what the function says that is set last.
func (c *captured) answering(answer func(http.ResponseWriter)) (set func(func(http.ResponseWriter))) {
	var now atomic.Value
	now.Store(answer)
	c.engine.Ports[berm.AgentPort] = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", r.Header.Get("Content-Type"))
		now.Load().(func(http.ResponseWriter))(w)
	})
	return func(answer func(http.ResponseWriter)) { now.Store(answer) }
}

// An agent that answers what cannot be read ends its own stream, with an error that says so, and nothing else.
func TestBinaryAnswerThatCannotBeRead(t *testing.T) {
	message, err := proto.Marshal(&pb.StartResponse{Event: &pb.ProcessEvent{Event: &pb.ProcessEvent_Data{Data: &pb.ProcessEvent_DataEvent{
		Output: &pb.ProcessEvent_DataEvent_Stdout{Stdout: []byte("hello")}}}}})
	if err != nil {
		t.Fatal(err)
	}
	first := envelope(0, string(message))
	for name, test := range map[string]struct{ answer, end string }{
		"too large":      {"\x00\x40\x00\x00\x00" + strings.Repeat("x", 100<<10), "a message has 1073741824 bytes"},
		"compressed":     {envelope(1, string(message)), "flags 1"},
		"unknown flags":  {envelope(4, string(message)), "flags 4"},
		"no message":     {envelope(0, "\xff\xff"), "cannot be read"},
		"no text":        {envelope(0, "\x0a\x05\x1a\x03\x1a\x01\xff"), "cannot be read"},
		"JSON":           {envelope(0, `{"event":{}}`), "cannot be read"},
		"cut off":        {first[:len(first)-1], "it is cut off"},
		"half a head":    {"\x00\x00", "it is cut off"},
		"after the end":  {envelope(2, `{"error":{"code":"aborted"}}`) + first, `{"error":{"code":"aborted"}}`},
		"end in another": {envelope(2|1, "{}"), "flags 3"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCaptured(t)
			set := c.answering(func(w http.ResponseWriter) { io.WriteString(w, first+test.answer) })
			for _, method := range []string{"Start", "Connect"} {
				answer := c.ask(t.Context(), c.URL, method, envelope(0, `{"process":{}}`))
				if flags, message, err := next(t, answer.Body); err != nil || flags != 0 || message != `{"event":{"data":{"stdout":"aGVsbG8="}}}` {
					t.Fatalf("%d %q %v", flags, message, err)
				}
				flags, message, err := next(t, answer.Body)
				if err != nil || flags != 2 || !strings.Contains(message, test.end) || !strings.Contains(message, `"code":`) {
					t.Errorf("%s: %d %q %v", method, flags, message, err)
				}
				if n, err := io.Copy(io.Discard, answer.Body); n > 0 || err != nil {
					t.Errorf("%d bytes after the end, %v", n, err)
				}
			}
			set(func(w http.ResponseWriter) { io.WriteString(w, envelope(2, "{}")) })
			if end := stream(t, c.ask(t.Context(), c.URL, "Start", envelope(0, `{"process":{}}`))); len(end) != 2 {
				t.Errorf("the next one: %v", end)
			}
		})
	}
}

// What the agent answers otherwise than asked goes on as it is.
func TestAnswerThatIsNotBinary(t *testing.T) {
	c := newCaptured(t)
	set := c.answering(func(http.ResponseWriter) {})
	for _, status := range []int{200, 401, 500} {
		set(func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(status)
			io.WriteString(w, `{"message":"no"}`)
		})
		answer := c.ask(t.Context(), c.URL, "Start", envelope(0, `{"process":{}}`))
		body, _ := io.ReadAll(answer.Body)
		if answer.StatusCode != status || answer.Header.Get("Content-Type") != "application/json" || string(body) != `{"message":"no"}` {
			t.Errorf("%d %v %q", answer.StatusCode, answer.Header, body)
		}
	}
}

// A message is there as soon as the agent has sent all of it, and a stream that breaks is broken for the
// client too.
func TestJSONComesAtOnce(t *testing.T) {
	c := newCaptured(t)
	goOn := make(chan struct{})
	c.answering(func(w http.ResponseWriter) {
		for _, part := range []string{"\x00\x00\x00\x00\x08\x0a\x06\x12\x04\x0a\x02hi", "\x00\x00\x00\x00\x08\x0a\x06\x12\x04\x12\x02", "ho\x00"} {
			io.WriteString(w, part)
			w.(http.Flusher).Flush()
			<-goOn
		}
		panic(http.ErrAbortHandler)
	})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	answer := c.ask(ctx, c.URL, "Start", envelope(0, `{"process":{}}`))
	if _, message, err := next(t, answer.Body); err != nil || message != `{"event":{"data":{"stdout":"aGk="}}}` {
		t.Fatalf("%q, %v", message, err)
	}
	goOn <- struct{}{}
	goOn <- struct{}{}
	if _, message, err := next(t, answer.Body); err != nil || message != `{"event":{"data":{"stderr":"aG8="}}}` {
		t.Fatalf("%q, %v", message, err)
	}
	goOn <- struct{}{}
	if _, message, err := next(t, answer.Body); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("%q, %v after a stream that broke", message, err)
	}
}
