package router

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"mime/multipart"
	"net/http"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/capture"
	"github.com/berm-sandbox/berm/internal/control"
	"github.com/berm-sandbox/berm/internal/guest/config"
	guestfiles "github.com/berm-sandbox/berm/internal/guest/files"
	"github.com/berm-sandbox/berm/internal/guest/filesystem"
	"github.com/berm-sandbox/berm/internal/guest/process"
	"github.com/berm-sandbox/berm/internal/proto/codec"
	fspb "github.com/berm-sandbox/berm/internal/proto/filesystem"
	"github.com/berm-sandbox/berm/internal/proto/filesystem/filesystemconnect"
	pb "github.com/berm-sandbox/berm/internal/proto/process"
	"github.com/berm-sandbox/berm/internal/proto/process/processconnect"
)

// kept keeps records, or fails to.
type kept struct {
	mu   sync.Mutex
	all  []audit.Record
	fail error
}

func (l *kept) Emit(r audit.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fail == nil {
		l.all = append(l.all, r)
	}
	return l.fail
}

func (l *kept) setFail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fail = err
}

// of waits for n records of a type.
func (l *kept) of(t *testing.T, n int, types ...audit.Type) []audit.Record {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		l.mu.Lock()
		var found []audit.Record
		for _, r := range l.all {
			if slices.Contains(types, r.Type) {
				found = append(found, r)
			}
		}
		l.mu.Unlock()
		if len(found) >= n {
			return found
		}
		if time.Now().After(end) {
			t.Fatalf("%d records of %v, want %d: %+v", len(found), types, n, found)
		}
	}
}

// captured is a world whose sandboxes have a guest agent that runs commands here.
type captured struct {
	*world
	log *kept
	dir string
	box control.Sandbox
}

func newCaptured(t *testing.T) *captured {
	w := newWorld(t, "")
	c := &captured{world: w, log: &kept{}, dir: t.TempDir()}
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	cfg, _ := config.Open(nil, "")
	if err := cfg.Init(fmt.Appendf(nil, `{"defaultUser":%q,"defaultWorkdir":%q}`, me.Username, t.TempDir())); err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle(processconnect.NewProcessHandler(process.NewService(cfg), connect.WithCodec(codec.JSON{}), connect.WithCompressMinBytes(math.MaxInt)))
	mux.Handle(filesystemconnect.NewFilesystemHandler(filesystem.NewService(cfg)))
	f := guestfiles.NewHandler(cfg)
	mux.HandleFunc("GET /files", f.Get)
	mux.HandleFunc("POST /files", f.Post)
	w.engine.Ports[berm.AgentPort] = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Access-Token") != c.box.AccessToken {
			http.Error(rw, "no", http.StatusUnauthorized)
			return
		}
		mux.ServeHTTP(rw, r)
	})
	w.router.Capture = capture.New(c.log, audit.Directory(c.dir), true, w.router.Log)
	t.Cleanup(w.router.Capture.Close)
	t.Cleanup(w.sessions.Close)
	c.box = w.create(func(r *control.CreateRequest) { r.Actor = audit.Actor{Type: "key", ID: "k"} })
	return c
}

// RoundTrip adds what leads to the sandbox.
func (c *captured) RoundTrip(r *http.Request) (*http.Response, error) {
	r.Header.Set(idHeader, string(c.box.ID))
	if r.Header.Get("X-Access-Token") == "" {
		r.Header.Set("X-Access-Token", c.box.AccessToken)
	}
	var transport http.Transport
	if strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
		transport.Protocols = new(http.Protocols)
		transport.Protocols.SetUnencryptedHTTP2(true)
	}
	return transport.RoundTrip(r)
}

func (c *captured) processes(options ...connect.ClientOption) processconnect.ProcessClient {
	return processconnect.NewProcessClient(&http.Client{Transport: c}, c.URL, options...)
}

func sh(script string) *connect.Request[pb.StartRequest] {
	return connect.NewRequest(&pb.StartRequest{Process: &pb.ProcessConfig{
		Cmd: "/bin/sh", Args: []string{"-c", script}, Envs: map[string]string{"SECRET": "s3cret", "A": "b"},
	}})
}

// run returns what a command wrote to stdout.
func (c *captured) run(script string, options ...connect.ClientOption) ([]byte, error) {
	c.t.Helper()
	stream, err := c.processes(options...).Start(c.t.Context(), sh(script))
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	var out []byte
	for stream.Receive() {
		out = append(out, stream.Msg().GetEvent().GetData().GetStdout()...)
	}
	return out, stream.Err()
}

// inBothCodecs runs a test with clients that speak Connect as the guest agent does, and with those for whom
// JSON is made of it.
func inBothCodecs(t *testing.T, test func(*testing.T, ...connect.ClientOption)) {
	t.Run("proto", func(t *testing.T) { test(t) })
	t.Run("json", func(t *testing.T) { test(t, connect.WithProtoJSON()) })
}

// frames reads the output that a record names.
func (c *captured) frames(r audit.Record) (all []audit.Frame) {
	c.t.Helper()
	if len(r.Blobs) != 1 || r.Blobs[0].Kind != audit.KindFrames {
		c.t.Fatalf("blobs of %+v", r)
	}
	sum := r.Blobs[0].SHA256
	content, err := os.ReadFile(filepath.Join(c.dir, audit.BlobDir, sum[:2], sum))
	if err != nil {
		c.t.Fatal(err)
	}
	if got := sha256.Sum256(content); hex.EncodeToString(got[:]) != sum {
		c.t.Error("the blob is not what it is called")
	}
	for f := audit.NewFrameReader(bytes.NewReader(content)); ; {
		frame, err := f.Read()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			c.t.Fatal(err)
		}
		all = append(all, frame)
	}
}

func joined(frames []audit.Frame, of audit.Stream) (all []byte) {
	for _, f := range frames {
		if f.Stream == of {
			all = append(all, f.Data...)
		}
	}
	return all
}

func TestCommandsAreRecorded(t *testing.T) {
	for name, options := range map[string][]connect.ClientOption{
		"connect": nil, "json": {connect.WithProtoJSON()}, "grpc": {connect.WithGRPC()}, "grpc-web": {connect.WithGRPCWeb()},
		"gzip": {connect.WithSendGzip()}, "grpc gzip json": {connect.WithGRPC(), connect.WithSendGzip(), connect.WithProtoJSON()},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCaptured(t)
			if out, err := c.run("echo out; echo err >&2; exit 3", options...); err != nil || string(out) != "out\n" {
				t.Fatalf("%q, %v", out, err)
			}
			all := c.log.of(t, 2, audit.ExecStart, audit.ExecExit)
			start, exit := all[0], all[1]
			if start.Type != audit.ExecStart || start.Sandbox != c.box.ID || start.Actor.ID != "k" || start.Trust != audit.TrustHost || start.TraceID == "" || start.TraceID != exit.TraceID {
				t.Errorf("start: %+v", start)
			}
			begun, ended := start.Data.(audit.Command), exit.Data.(audit.Command)
			if strings.Join(begun.Argv, "|") != "/bin/sh|-c|echo out; echo err >&2; exit 3" || strings.Join(begun.Env, " ") != "A SECRET" {
				t.Errorf("start: %+v", begun)
			}
			if ended.Code == nil || *ended.Code != 3 || ended.PID == 0 || ended.Output != 8 || exit.Outcome != audit.Failed {
				t.Errorf("exit: %+v", exit)
			}
			if f := c.frames(exit); string(joined(f, audit.Stdout)) != "out\n" || string(joined(f, audit.Stderr)) != "err\n" {
				t.Errorf("frames: %q", f)
			}
		})
	}
}

func TestCommandThatCannotBeRecordedIsNotStarted(t *testing.T) {
	inBothCodecs(t, func(t *testing.T, options ...connect.ClientOption) {
		c := newCaptured(t)
		mark := filepath.Join(t.TempDir(), "mark")
		c.log.setFail(berm.Errorf(berm.Unavailable, "the disk is full"))
		_, err := c.run("touch "+mark, options...)
		if connect.CodeOf(err) != connect.CodeUnavailable || !strings.Contains(err.Error(), "the disk is full") {
			t.Error(err)
		}
		if _, err := os.Stat(mark); err == nil {
			t.Error("it ran")
		}
	})
}

func TestCommandOfAStranger(t *testing.T) {
	inBothCodecs(t, func(t *testing.T, options ...connect.ClientOption) {
		c := newCaptured(t)
		request := sh("true")
		request.Header().Set("X-Access-Token", "wrong")
		stream, err := c.processes(options...).Start(t.Context(), request)
		if err == nil {
			stream.Receive()
			err = stream.Err()
		}
		if connect.CodeOf(err) != connect.CodeUnauthenticated {
			t.Error(err)
		}
		if _, err := c.run("true", options...); err != nil {
			t.Fatal(err)
		}
		if all := c.log.of(t, 2, audit.ExecStart, audit.ExecExit); len(all) != 2 {
			t.Errorf("%+v", all)
		}
	})
}

func TestRequestsThatCannotBeUnderstood(t *testing.T) {
	c := newCaptured(t)
	for what, r := range map[string]struct{ kind, body string }{
		"no message":    {"application/connect+json", ""},
		"cut off":       {"application/connect+json", "\x00\x00\x00\x00\x09{}"},
		"no JSON":       {"application/connect+json", "\x00\x00\x00\x00\x02[}"},
		"unary":         {"application/json", "{}"},
		"unknown":       {"application/connect+cbor", "\x00\x00\x00\x00\x02{}"},
		"none":          {"", "{}"},
		"too large":     {"application/connect+json", "\x00\x7f\xff\xff\xff" + strings.Repeat(" ", 9<<20)},
		"unknown flags": {"application/connect+json", "\x04\x00\x00\x00\x02{}"},
	} {
		request, err := http.NewRequest(http.MethodPost, c.URL+"/process.Process/Start", strings.NewReader(r.body))
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("Content-Type", r.kind)
		answer, err := c.RoundTrip(request)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(answer.Body)
		answer.Body.Close()
		if answer.StatusCode == 200 && !strings.Contains(string(text), `"error"`) {
			t.Errorf("%s: %d %q", what, answer.StatusCode, text)
		}
	}
	if len(c.log.all) != 0 {
		t.Errorf("records: %+v", c.log.all)
	}
}

// What a command does after its client has left is recorded to its end.
func TestClientLeaves(t *testing.T) {
	inBothCodecs(t, func(t *testing.T, options ...connect.ClientOption) {
		c := newCaptured(t)
		ctx, cancel := context.WithCancel(t.Context())
		go_ := filepath.Join(t.TempDir(), "go")
		stream, err := c.processes(options...).Start(ctx, sh("echo one; while [ ! -e "+go_+" ]; do sleep 0.02; done; echo two; echo three; kill -9 $$"))
		if err != nil {
			t.Fatal(err)
		}
		for stream.Receive() && stream.Msg().GetEvent().GetData() == nil {
		}
		cancel()
		stream.Close()
		time.Sleep(50 * time.Millisecond)
		if err := os.WriteFile(go_, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		exit := c.log.of(t, 1, audit.ExecExit)[0]
		if d := exit.Data.(audit.Command); d.Signal != "SIGKILL" || d.Code != nil || exit.Outcome != audit.Failed {
			t.Errorf("%+v", exit)
		}
		if out := joined(c.frames(exit), audit.Stdout); string(out) != "one\ntwo\nthree\n" {
			t.Errorf("%q", out)
		}
	})
}

// The end of a sandbox is an end of its commands too.
func TestStreamIsCut(t *testing.T) {
	inBothCodecs(t, func(t *testing.T, options ...connect.ClientOption) {
		c := newCaptured(t)
		stream, err := c.processes(options...).Start(t.Context(), sh("echo one; exec sleep 60"))
		if err != nil {
			t.Fatal(err)
		}
		var pid uint32
		for stream.Receive() {
			if s := stream.Msg().GetEvent().GetStart(); s != nil {
				pid = s.GetPid()
			}
			if stream.Msg().GetEvent().GetData() != nil {
				break
			}
		}
		defer c.processes().SendSignal(context.Background(), connect.NewRequest(&pb.SendSignalRequest{
			Process: &pb.ProcessSelector{Selector: &pb.ProcessSelector_Pid{Pid: pid}}, Signal: pb.Signal_SIGNAL_SIGKILL}))
		if err := c.sessions.Pause(t.Context(), c.box.ID, audit.Actor{}); err != nil {
			t.Fatal(err)
		}
		exit := c.log.of(t, 1, audit.ExecExit)[0]
		if d := exit.Data.(audit.Command); d.Code != nil || d.Signal != "" || exit.Outcome != audit.Failed || !strings.Contains(exit.Reason, "cut") {
			t.Errorf("%+v", exit)
		}
		if out := joined(c.frames(exit), audit.Stdout); string(out) != "one\n" {
			t.Errorf("%q", out)
		}
		if _, err := c.sessions.Resume(t.Context(), c.box.ID, time.Minute, audit.Actor{}); err != nil {
			t.Fatal(err)
		}
	})
}

// Of too much output the first and the last part are kept, and told how much is missing.
func TestMuchOutput(t *testing.T) {
	inBothCodecs(t, func(t *testing.T, options ...connect.ClientOption) {
		c := newCaptured(t)
		const size = 80 << 20
		stream, err := c.processes(options...).Start(t.Context(), sh(fmt.Sprintf("head -c %d /dev/zero | tr '\\0' x; printf END", size)))
		if err != nil {
			t.Fatal(err)
		}
		for stream.Receive() {
		}
		if err := stream.Err(); err != nil {
			t.Fatal(err)
		}
		exit := c.log.of(t, 1, audit.ExecExit)[0]
		frames := c.frames(exit)
		kept := joined(frames, audit.Stdout)
		var missing int
		if _, err := fmt.Sscan(string(joined(frames, audit.Cut)), &missing); err != nil {
			t.Fatal(err)
		}
		if got := exit.Data.(audit.Command).Output; got != size+3 || len(kept)+missing != size+3 {
			t.Errorf("%d of %d bytes kept, %d missing", len(kept), got, missing)
		}
		if len(kept) < 60<<20 || exit.Blobs[0].Size > audit.MaxBlob || !bytes.HasSuffix(kept, []byte("xxxEND")) {
			t.Errorf("%d bytes kept in a blob of %d", len(kept), exit.Blobs[0].Size)
		}
		last := time.Duration(0)
		for _, f := range frames {
			if f.At < last {
				t.Fatalf("a frame at %v after one at %v", f.At, last)
			}
			last = f.At
		}
	})
}

func TestTerminalIsResized(t *testing.T) {
	c := newCaptured(t)
	request := sh("stty size; read x; stty size")
	request.Msg.Pty = &pb.PTY{Size: &pb.PTY_Size{Cols: 80, Rows: 24}}
	stream, err := c.processes().Start(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	for stream.Receive() {
		if s := stream.Msg().GetEvent().GetStart(); s != nil {
			process := &pb.ProcessSelector{Selector: &pb.ProcessSelector_Pid{Pid: s.GetPid()}}
			if _, err := c.processes().Update(t.Context(), connect.NewRequest(&pb.UpdateRequest{
				Process: process, Pty: &pb.PTY{Size: &pb.PTY_Size{Cols: 100, Rows: 30}}})); err != nil {
				t.Fatal(err)
			}
			if _, err := c.processes().SendInput(t.Context(), connect.NewRequest(&pb.SendInputRequest{
				Process: process, Input: &pb.ProcessInput{Input: &pb.ProcessInput_Pty{Pty: []byte("secret\n")}}})); err != nil {
				t.Fatal(err)
			}
		}
	}
	exit := c.log.of(t, 1, audit.ExecExit)[0]
	frames := c.frames(exit)
	if d := exit.Data.(audit.Command); d.TTY == nil || *d.TTY != (audit.Size{Columns: 80, Rows: 24}) {
		t.Errorf("%+v", d)
	}
	if string(joined(frames, audit.Resize)) != "100x30" || len(joined(frames, audit.Stdin)) > 0 || !strings.Contains(string(joined(frames, audit.Stdout)), "30 100") {
		t.Errorf("%q", frames)
	}
}

func TestFilesAreRecorded(t *testing.T) {
	c := newCaptured(t)
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	sum := func(s string) string {
		h := sha256.Sum256([]byte(s))
		return hex.EncodeToString(h[:])
	}
	send := func(method, query, kind string, body io.Reader) int {
		r, err := http.NewRequest(method, c.URL+"/files?"+query, body)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", kind)
		r.Header.Set("Accept-Encoding", "identity")
		answer, err := c.RoundTrip(r)
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		if _, err := io.Copy(io.Discard, answer.Body); err != nil {
			t.Fatal(err)
		}
		return answer.StatusCode
	}
	if s := send("POST", "path="+at("raw"), "application/octet-stream", strings.NewReader("raw content")); s != 200 {
		t.Fatal(s)
	}
	var form bytes.Buffer
	m := multipart.NewWriter(&form)
	for _, name := range []string{"one", "two"} {
		p, _ := m.CreateFormFile("file", at(name))
		io.WriteString(p, "content of "+name)
	}
	m.Close()
	if s := send("POST", "", m.FormDataContentType(), &form); s != 200 {
		t.Fatal(s)
	}
	if s := send("GET", "path="+at("two"), "", nil); s != 200 {
		t.Fatal(s)
	}
	if s := send("GET", "path="+at("none"), "", nil); s != 404 {
		t.Fatal(s)
	}
	files := filesystemconnect.NewFilesystemClient(&http.Client{Transport: c}, c.URL)
	if _, err := files.MakeDir(t.Context(), connect.NewRequest(&fspb.MakeDirRequest{Path: at("d")})); err != nil {
		t.Fatal(err)
	}
	if _, err := files.Move(t.Context(), connect.NewRequest(&fspb.MoveRequest{Source: at("one"), Destination: at("d/one")})); err != nil {
		t.Fatal(err)
	}
	if _, err := files.Remove(t.Context(), connect.NewRequest(&fspb.RemoveRequest{Path: at("raw")})); err != nil {
		t.Fatal(err)
	}
	if _, err := files.ListDir(t.Context(), connect.NewRequest(&fspb.ListDirRequest{Path: at("none")})); err == nil {
		t.Error("listed what is not there")
	}
	want := []struct {
		audit.FileAccess
		outcome audit.Outcome
	}{
		{audit.FileAccess{Path: at("raw"), Op: "write", Size: 11, SHA256: sum("raw content")}, audit.OK},
		{audit.FileAccess{Path: at("one"), Op: "write", Size: 14, SHA256: sum("content of one")}, audit.OK},
		{audit.FileAccess{Path: at("two"), Op: "write", Size: 14, SHA256: sum("content of two")}, audit.OK},
		{audit.FileAccess{Path: at("two"), Op: "read", Size: 14, SHA256: sum("content of two")}, audit.OK},
		{audit.FileAccess{Path: at("none"), Op: "read"}, audit.Failed},
		{audit.FileAccess{Path: at("d"), Op: "mkdir"}, audit.OK},
		{audit.FileAccess{Path: at("one"), Op: "move", To: at("d/one")}, audit.OK},
		{audit.FileAccess{Path: at("raw"), Op: "remove"}, audit.OK},
		{audit.FileAccess{Path: at("none"), Op: "list"}, audit.Failed},
	}
	got := c.log.of(t, len(want), audit.FileAPI)
	for i, w := range want {
		if i < len(got) && (got[i].Data != any(w.FileAccess) || got[i].Outcome != w.outcome || got[i].Actor.ID != "k") {
			t.Errorf("record %d: %+v, want %+v", i, got[i], w)
		}
	}
	c.log.setFail(errors.New("full"))
	if s := send("POST", "path="+at("more"), "application/octet-stream", strings.NewReader("x")); s != http.StatusServiceUnavailable {
		t.Errorf("a write that is not recorded is answered with %d", s)
	}
}

// What the agent refuses never began, and the record says so and why.
func TestCommandThatDoesNotBegin(t *testing.T) {
	c := newCaptured(t)
	request := sh("true")
	request.Msg.Process.Cwd = proto.String("/no/such/directory")
	stream, err := c.processes().Start(t.Context(), request)
	if err == nil {
		for stream.Receive() {
		}
		err = stream.Err()
	}
	if err == nil {
		t.Fatal("it ran")
	}
	exit := c.log.of(t, 1, audit.ExecExit)[0]
	if exit.Outcome != audit.Failed || !strings.HasPrefix(exit.Reason, "not started: ") || !strings.Contains(exit.Reason, "/no/such/directory") {
		t.Errorf("%+v", exit)
	}
}

// A command that is killed at its deadline is recorded so.
func TestCommandRunsOutOfTime(t *testing.T) {
	c := newCaptured(t)
	request := sh("echo one; exec sleep 60")
	request.Header().Set("Connect-Timeout-Ms", "300")
	stream, err := c.processes().Start(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	for stream.Receive() {
	}
	if connect.CodeOf(stream.Err()) != connect.CodeDeadlineExceeded {
		t.Fatal(stream.Err())
	}
	exit := c.log.of(t, 1, audit.ExecExit)[0]
	if d := exit.Data.(audit.Command); d.Signal != "SIGKILL" || d.Code != nil || exit.Outcome != audit.Failed || exit.Reason != "its time was over" {
		t.Errorf("%+v", exit)
	}
}
