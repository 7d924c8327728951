package process

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/user"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/guest/config"
	"github.com/berm-sandbox/berm/internal/proto/codec"
	pb "github.com/berm-sandbox/berm/internal/proto/process"
	"github.com/berm-sandbox/berm/internal/proto/process/processconnect"
)

type bench struct {
	service *Service
	url     string
	http    *http.Client
	client  processconnect.ProcessClient
}

// serve runs a service whose default user is the one that runs the test.
func serve(t testing.TB, configJSON string, options ...connect.ClientOption) *bench {
	t.Helper()
	c, err := config.Open(nil, "")
	if err != nil {
		t.Fatal(err)
	}
	if configJSON == "" {
		me, err := user.Current()
		if err != nil {
			t.Fatal(err)
		}
		configJSON = `{"defaultUser":"` + me.Username + `","defaultWorkdir":"/","envVars":{"GLOBAL":"g"},"sandboxID":"itest","templateID":"tmpl"}`
	}
	if err := c.Init([]byte(configJSON)); err != nil {
		t.Fatal(err)
	}
	b := &bench{service: NewService(c)}
	mux := http.NewServeMux()
	mux.Handle(processconnect.NewProcessHandler(b.service, connect.WithCodec(codec.JSON{})))
	srv := httptest.NewUnstartedServer(mux)
	srv.Config.Protocols = new(http.Protocols)
	srv.Config.Protocols.SetHTTP1(true)
	srv.Config.Protocols.SetUnencryptedHTTP2(true)
	srv.Start()
	t.Cleanup(func() {
		for _, p := range b.all() {
			p.signal(syscall.SIGKILL)
		}
		srv.CloseClientConnections()
		srv.Close()
	})
	h2c := new(http.Protocols)
	h2c.SetUnencryptedHTTP2(true)
	b.url = srv.URL
	b.http = &http.Client{Transport: &http.Transport{Protocols: h2c}}
	options = append(options, connect.WithAcceptCompression("gzip", nil, nil))
	b.client = processconnect.NewProcessClient(b.http, srv.URL, options...)
	return b
}

func (b *bench) all() []*process {
	b.service.mu.Lock()
	defer b.service.mu.Unlock()
	var all []*process
	for _, p := range b.service.live {
		all = append(all, p)
	}
	return all
}

// result is what a process did until its end.
type result struct {
	pid                 uint32
	stdout, stderr, pty string
	end                 *pb.ProcessEvent_EndEvent
}

func (r *result) add(ev *pb.ProcessEvent) {
	switch ev := ev.GetEvent().(type) {
	case *pb.ProcessEvent_Start:
		r.pid = ev.Start.GetPid()
	case *pb.ProcessEvent_Data:
		r.stdout += string(ev.Data.GetStdout())
		r.stderr += string(ev.Data.GetStderr())
		r.pty += string(ev.Data.GetPty())
	case *pb.ProcessEvent_End:
		r.end = ev.End
	}
}

func (b *bench) run(t testing.TB, req *pb.StartRequest) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	stream, err := b.client.Start(ctx, connect.NewRequest(req))
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	var r result
	for stream.Receive() {
		r.add(stream.Msg().GetEvent())
	}
	if err := stream.Err(); err != nil {
		t.Fatalf("%v: %v (so far %+v)", req.GetProcess(), err, r)
	}
	return r
}

func sh(script string) *pb.StartRequest {
	no := false
	return &pb.StartRequest{Process: &pb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", script}}, Stdin: &no}
}

// start starts a process and returns once its pid is known.
func (b *bench) start(t testing.TB, ctx context.Context, req *pb.StartRequest) (*connect.ServerStreamForClient[pb.StartResponse], uint32) {
	t.Helper()
	stream, err := b.client.Start(ctx, connect.NewRequest(req))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stream.Close() })
	if !stream.Receive() {
		t.Fatal(stream.Err())
	}
	return stream, stream.Msg().GetEvent().GetStart().GetPid()
}

func byPID(pid uint32) *pb.ProcessSelector {
	return &pb.ProcessSelector{Selector: &pb.ProcessSelector_Pid{Pid: pid}}
}

func TestOutputAndExit(t *testing.T) {
	for name, options := range map[string][]connect.ClientOption{
		"proto": nil, "json": {connect.WithProtoJSON()}, "grpc": {connect.WithGRPC()}, "grpc-web": {connect.WithGRPCWeb()},
	} {
		t.Run(name, func(t *testing.T) {
			b := serve(t, "", options...)
			r := b.run(t, sh("echo out; echo err >&2; exit 3"))
			if r.pid == 0 || r.stdout != "out\n" || r.stderr != "err\n" {
				t.Errorf("got %+v", r)
			}
			if e := r.end; e.GetExitCode() != 3 || !e.GetExited() || e.GetStatus() != "exit status 3" || e.GetError() != "exit status 3" {
				t.Errorf("end %v", e)
			}
			r = b.run(t, sh("true"))
			if e := r.end; e.GetExitCode() != 0 || !e.GetExited() || e.GetStatus() != "exit status 0" || e.Error != nil {
				t.Errorf("end of true: %v", e)
			}
			r = b.run(t, sh("kill -9 $$"))
			if e := r.end; e.GetExitCode() != -1 || e.GetExited() || e.GetStatus() != "signal: killed" {
				t.Errorf("end after SIGKILL: %v", e)
			}
		})
	}
}

func TestMissingCommandIs127(t *testing.T) {
	b := serve(t, "")
	r := b.run(t, &pb.StartRequest{Process: &pb.ProcessConfig{Cmd: "no-such-command-here"}})
	if r.end.GetExitCode() != 127 || !strings.Contains(r.stderr, "not found") || r.pid == 0 {
		t.Errorf("missing: %+v", r)
	}
	dir := t.TempDir()
	plain := dir + "/plain"
	if err := os.WriteFile(plain, []byte("echo no interpreter line\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if r := b.run(t, &pb.StartRequest{Process: &pb.ProcessConfig{Cmd: plain}}); r.stdout != "no interpreter line\n" {
		t.Errorf("script without #!: %+v", r)
	}
	if err := os.Chmod(plain, 0o644); err != nil {
		t.Fatal(err)
	}
	if r := b.run(t, &pb.StartRequest{Process: &pb.ProcessConfig{Cmd: plain}}); r.end.GetExitCode() != 126 {
		t.Errorf("not executable: %+v", r)
	}
	var sent []*pb.ProcessEvent
	sendMissing(func(ev *pb.ProcessEvent) error { sent = append(sent, ev); return nil }, &missingError{"x", syscall.ENOENT})
	if len(sent) != 3 || sent[2].GetEnd().GetExitCode() != 127 {
		t.Errorf("without a shell: %v", sent)
	}
}

func TestEnvironment(t *testing.T) {
	b := serve(t, "")
	req := sh("env; echo; pwd; umask; ulimit -c; readlink /proc/self/fd/0")
	req.Process.Envs = map[string]string{"OWN": "o", "GLOBAL": "over"}
	r := b.run(t, req)
	me, _ := user.Current()
	for _, want := range []string{"OWN=o\n", "GLOBAL=over\n", "E2B_SANDBOX=true\n", "E2B_SANDBOX_ID=itest\n", "E2B_TEMPLATE_ID=tmpl\n",
		"USER=" + me.Username + "\n", "LOGNAME=" + me.Username + "\n", "HOME=" + me.HomeDir + "\n", "PATH=" + defaultPath + "\n", "/dev/null\n"} {
		if !strings.Contains(r.stdout, want) {
			t.Errorf("no %q in\n%s", want, r.stdout)
		}
	}
	if strings.Contains(b.run(t, sh("env")).stdout, "OWN=") {
		t.Error("the environment of one command is seen by the next")
	}
	// Only the three standard descriptors, and in blocking mode. Those that this test
	// inherited are not of our making.
	unix.CloseRange(3, 1<<31-1, unix.CLOSE_RANGE_CLOEXEC)
	r = b.run(t, sh("exec 2>&1; ls /proc/self/fd | tr '\\n' ' '; for i in 0 1 2; do grep flags /proc/$$/fdinfo/$i; done"))
	if !strings.HasPrefix(r.stdout, "0 1 2 3 flags") {
		t.Errorf("descriptors of a child (3 is ls's own): %s", r.stdout)
	}
	for line := range strings.Lines(r.stdout) {
		if _, flags, ok := strings.Cut(line, "flags:\t"); ok {
			n, err := strconv.ParseInt(strings.TrimSpace(flags), 8, 64)
			if err != nil || n&syscall.O_NONBLOCK != 0 {
				t.Errorf("a standard stream does not block: %s", line)
			}
		}
	}
	req = sh("true")
	req.Process.Envs = map[string]string{"A=B": "x"}
	if code := b.startCode(t, req); code != connect.CodeInvalidArgument {
		t.Errorf("a variable called A=B: %v", code)
	}
}

// startCode is the code with which a Start fails.
func (b *bench) startCode(t testing.TB, req *pb.StartRequest) connect.Code {
	t.Helper()
	stream, err := b.client.Start(t.Context(), connect.NewRequest(req))
	if err == nil {
		defer stream.Close()
		for stream.Receive() {
		}
		err = stream.Err()
	}
	if err == nil {
		return 0
	}
	return connect.CodeOf(err)
}

func TestWorkingDirectory(t *testing.T) {
	b := serve(t, "")
	dir := t.TempDir()
	req := sh("pwd")
	req.Process.Cwd = &dir
	if r := b.run(t, req); r.stdout != dir+"\n" {
		t.Errorf("pwd: %q, want %s", r.stdout, dir)
	}
	empty := ""
	req.Process.Cwd = &empty
	if r := b.run(t, req); r.stdout != "/\n" {
		t.Errorf("pwd with the default: %q", r.stdout)
	}
	if err := os.WriteFile(dir+"/tool", []byte("#!/bin/sh\necho here\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	rel := &pb.StartRequest{Process: &pb.ProcessConfig{Cmd: "./tool", Cwd: &dir}}
	if r := b.run(t, rel); r.stdout != "here\n" {
		t.Errorf("./tool in %s: %+v", dir, r)
	}
	missing := dir + "/missing"
	req.Process.Cwd = &missing
	if code := b.startCode(t, req); code != connect.CodeInvalidArgument {
		t.Errorf("missing cwd: %v", code)
	}
	if os.Geteuid() != 0 {
		t.Skip("as root only: becomes another user")
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	req.Process.Cwd = &dir
	asNobody := connect.NewRequest(req)
	asNobody.Header().Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte("nobody:")))
	stream, err := b.client.Start(t.Context(), asNobody)
	if err == nil {
		stream.Receive()
		err = stream.Err()
	}
	if connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("cwd that the user may not enter: %v", err)
	}
}

func TestUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("as root only: becomes another user")
	}
	b := serve(t, "")
	for _, pty := range []bool{false, true} {
		req := sh("id -u; id -g; id -G; grep Cap /proc/self/status; tty && stat -c %U $(tty)")
		if pty {
			req.Pty = &pb.PTY{Size: &pb.PTY_Size{Cols: 80, Rows: 24}}
		}
		call := connect.NewRequest(req)
		call.Header().Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte("nobody:")))
		stream, err := b.client.Start(t.Context(), call)
		if err != nil {
			t.Fatal(err)
		}
		var r result
		for stream.Receive() {
			r.add(stream.Msg().GetEvent())
		}
		out := strings.ReplaceAll(r.stdout+r.pty, "\r", "")
		if !strings.HasPrefix(out, "65534\n65534\n65534\n") || !strings.Contains(out, "CapEff:\t0000000000000000") {
			t.Errorf("as nobody (pty %v): %s", pty, out)
		}
		if pty && !strings.HasSuffix(out, "\nnobody\n") {
			t.Errorf("owner of the terminal: %s", out)
		}
	}
	call := connect.NewRequest(sh("true"))
	call.Header().Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte("no-such-user:")))
	stream, err := b.client.Start(t.Context(), call)
	if err == nil {
		stream.Receive()
		err = stream.Err()
	}
	var ce *connect.Error
	if !errors.As(err, &ce) || ce.Code() != connect.CodeUnauthenticated || ce.Message() != "invalid username: 'no-such-user'" {
		t.Errorf("unknown user: %v", err)
	}
}

func TestStdin(t *testing.T) {
	b := serve(t, "")
	yes, no := true, false
	for name, stdin := range map[string]*bool{"absent": nil, "true": &yes} {
		t.Run(name, func(t *testing.T) {
			stream, pid := b.start(t, t.Context(), &pb.StartRequest{Process: &pb.ProcessConfig{Cmd: "cat"}, Stdin: stdin})
			for _, text := range []string{"one\n", "", "two\n"} {
				_, err := b.client.SendInput(t.Context(), connect.NewRequest(&pb.SendInputRequest{Process: byPID(pid),
					Input: &pb.ProcessInput{Input: &pb.ProcessInput_Stdin{Stdin: []byte(text)}}}))
				if err != nil {
					t.Fatal(err)
				}
			}
			for range 2 { // closing twice is no error, unless the process has ended by then
				_, err := b.client.CloseStdin(t.Context(), connect.NewRequest(&pb.CloseStdinRequest{Process: byPID(pid)}))
				if err != nil && connect.CodeOf(err) != connect.CodeNotFound {
					t.Fatal(err)
				}
			}
			var r result
			for stream.Receive() {
				r.add(stream.Msg().GetEvent())
			}
			if r.stdout != "one\ntwo\n" || r.end.GetExitCode() != 0 {
				t.Errorf("got %+v", r)
			}
		})
	}
	_, pid := b.start(t, t.Context(), &pb.StartRequest{Process: &pb.ProcessConfig{Cmd: "sleep", Args: []string{"30"}}, Stdin: &no})
	_, err := b.client.SendInput(t.Context(), connect.NewRequest(&pb.SendInputRequest{Process: byPID(pid),
		Input: &pb.ProcessInput{Input: &pb.ProcessInput_Stdin{Stdin: []byte("x")}}}))
	if connect.CodeOf(err) != connect.CodeInternal {
		t.Errorf("input without stdin: %v", err)
	}
	_, err = b.client.SendInput(t.Context(), connect.NewRequest(&pb.SendInputRequest{Process: byPID(999999), Input: &pb.ProcessInput{}}))
	if connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("input to nobody: %v", err)
	}
}

// A process that does not read must not hold a caller that has left, nor spoil the
// input of the next.
func TestInputToOneThatDoesNotRead(t *testing.T) {
	b := serve(t, "")
	_, pid := b.start(t, t.Context(), &pb.StartRequest{Process: &pb.ProcessConfig{Cmd: "sleep", Args: []string{"30"}}})
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	big := &pb.ProcessInput{Input: &pb.ProcessInput_Stdin{Stdin: make([]byte, 1<<20)}}
	_, err := b.client.SendInput(ctx, connect.NewRequest(&pb.SendInputRequest{Process: byPID(pid), Input: big}))
	if connect.CodeOf(err) != connect.CodeDeadlineExceeded {
		t.Errorf("first: %v", err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := b.client.SendInput(t.Context(), connect.NewRequest(&pb.SendInputRequest{Process: byPID(pid), Input: big}))
		done <- err
	}()
	time.Sleep(50 * time.Millisecond)
	if _, err := b.client.CloseStdin(t.Context(), connect.NewRequest(&pb.CloseStdinRequest{Process: byPID(pid)})); err != nil {
		t.Errorf("close while a write waits: %v", err)
	}
	select {
	case err := <-done:
		if connect.CodeOf(err) != connect.CodeInternal {
			t.Errorf("the waiting write: %v", err)
		}
	case <-time.After(5 * time.Second):
		t.Error("a write still waits on closed stdin")
	}
}

func TestStreamInput(t *testing.T) {
	b := serve(t, "")
	yes := true
	stream, pid := b.start(t, t.Context(), &pb.StartRequest{Process: &pb.ProcessConfig{Cmd: "cat"}, Stdin: &yes})
	in := b.client.StreamInput(t.Context())
	must := func(req *pb.StreamInputRequest) {
		t.Helper()
		if err := in.Send(req); err != nil {
			t.Fatal(err)
		}
	}
	must(&pb.StreamInputRequest{Event: &pb.StreamInputRequest_Start{Start: &pb.StreamInputRequest_StartEvent{Process: byPID(pid)}}})
	for _, text := range []string{"a", "b"} {
		must(&pb.StreamInputRequest{Event: &pb.StreamInputRequest_Keepalive{Keepalive: &pb.StreamInputRequest_KeepAlive{}}})
		must(&pb.StreamInputRequest{Event: &pb.StreamInputRequest_Data{Data: &pb.StreamInputRequest_DataEvent{
			Input: &pb.ProcessInput{Input: &pb.ProcessInput_Stdin{Stdin: []byte(text)}}}}})
	}
	if _, err := in.CloseAndReceive(); err != nil {
		t.Fatal(err)
	}
	b.client.CloseStdin(t.Context(), connect.NewRequest(&pb.CloseStdinRequest{Process: byPID(pid)}))
	var r result
	for stream.Receive() {
		r.add(stream.Msg().GetEvent())
	}
	if r.stdout != "ab" {
		t.Errorf("got %q", r.stdout)
	}
	in = b.client.StreamInput(t.Context())
	in.Send(&pb.StreamInputRequest{Event: &pb.StreamInputRequest_Data{Data: &pb.StreamInputRequest_DataEvent{}}})
	if _, err := in.CloseAndReceive(); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("data before start: %v", err)
	}
}

func TestTerminal(t *testing.T) {
	b := serve(t, "")
	req := sh(`stty size; read line; echo "got $line"; stty size; trap 'echo resized' WINCH; exit 5`)
	req.Pty = &pb.PTY{Size: &pb.PTY_Size{Cols: 100, Rows: 40}}
	stream, pid := b.start(t, t.Context(), req)
	var r result
	for !strings.Contains(r.pty, "40 100") && stream.Receive() {
		r.add(stream.Msg().GetEvent())
	}
	_, err := b.client.Update(t.Context(), connect.NewRequest(&pb.UpdateRequest{Process: byPID(pid), Pty: &pb.PTY{Size: &pb.PTY_Size{Cols: 50, Rows: 20}}}))
	if err != nil {
		t.Fatal(err)
	}
	_, err = b.client.SendInput(t.Context(), connect.NewRequest(&pb.SendInputRequest{Process: byPID(pid),
		Input: &pb.ProcessInput{Input: &pb.ProcessInput_Stdin{Stdin: []byte("x")}}}))
	if connect.CodeOf(err) != connect.CodeInternal {
		t.Errorf("stdin of a terminal: %v", err)
	}
	if _, err = b.client.CloseStdin(t.Context(), connect.NewRequest(&pb.CloseStdinRequest{Process: byPID(pid)})); err == nil {
		t.Error("the input of a terminal was closed")
	}
	_, err = b.client.SendInput(t.Context(), connect.NewRequest(&pb.SendInputRequest{Process: byPID(pid),
		Input: &pb.ProcessInput{Input: &pb.ProcessInput_Pty{Pty: []byte("hello\n")}}}))
	if err != nil {
		t.Fatal(err)
	}
	for stream.Receive() {
		r.add(stream.Msg().GetEvent())
	}
	if !strings.Contains(r.pty, "got hello") || !strings.Contains(r.pty, "20 50") || r.end.GetExitCode() != 5 {
		t.Errorf("got %+v", r)
	}
}

func TestKill(t *testing.T) {
	b := serve(t, "")
	// The shell's child keeps the pipes open: the end must come at once all the same.
	stream, pid := b.start(t, t.Context(), sh("sleep 12 && echo late"))
	began := time.Now()
	_, err := b.client.SendSignal(t.Context(), connect.NewRequest(&pb.SendSignalRequest{Process: byPID(pid), Signal: pb.Signal_SIGNAL_SIGKILL}))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(int(pid), 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("after the answer the process is still there: %v", err)
	}
	var r result
	for stream.Receive() {
		r.add(stream.Msg().GetEvent())
	}
	if r.end.GetExitCode() != -1 || r.end.GetStatus() != "signal: killed" || r.end.GetError() == "" {
		t.Errorf("end %v", r.end)
	}
	if d := time.Since(began); d > 10*time.Second {
		t.Errorf("the end came after %v", d)
	}
	_, err = b.client.SendSignal(t.Context(), connect.NewRequest(&pb.SendSignalRequest{Process: byPID(pid), Signal: pb.Signal_SIGNAL_SIGKILL}))
	if connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("killed again: %v", err)
	}
	_, pid = b.start(t, t.Context(), sh("sleep 3"))
	_, err = b.client.SendSignal(t.Context(), connect.NewRequest(&pb.SendSignalRequest{Process: byPID(pid)}))
	if connect.CodeOf(err) != connect.CodeUnimplemented {
		t.Errorf("no signal: %v", err)
	}
	_, err = b.client.SendSignal(t.Context(), connect.NewRequest(&pb.SendSignalRequest{Process: byPID(pid), Signal: pb.Signal_SIGNAL_SIGTERM}))
	if err != nil {
		t.Error(err)
	}
}

// A process that is to be kept is started again when something kills it and its caller has left.
func TestKeep(t *testing.T) {
	b := serve(t, "")
	until := func(what string, holds func() bool) {
		t.Helper()
		for end := time.Now().Add(time.Minute); !holds(); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("not in time: " + what)
			}
		}
	}
	tag := "kept"
	start := func(ctx context.Context) (*connect.ServerStreamForClient[pb.StartResponse], *process) {
		t.Helper()
		r := connect.NewRequest(sh("exec sleep 300"))
		r.Msg.Tag = &tag
		r.Header().Set(KeepHeader, "1")
		stream, err := b.client.Start(ctx, r)
		if err != nil || !stream.Receive() {
			t.Fatalf("%v, %v", err, stream.Err())
		}
		return stream, b.all()[0]
	}
	told, p := start(t.Context())
	if err := syscall.Kill(int(p.pid), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	var r result
	for told.Receive() {
		r.add(told.Msg().GetEvent())
	}
	if r.end.GetStatus() != "signal: killed" || len(b.all()) != 0 {
		t.Errorf("%v, %d run", r.end, len(b.all()))
	}

	call, leave := context.WithCancel(t.Context())
	_, p = start(call)
	leave()
	until("the caller left", func() bool { return !p.out.followed() })
	for range 2 {
		before := p
		if err := syscall.Kill(int(p.pid), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		until("it is started again", func() bool {
			all := b.all()
			if len(all) == 1 && all[0] != before {
				p = all[0]
			}
			return p != before
		})
		if p.tag == nil || *p.tag != tag || p.config.GetCmd() != "/bin/sh" {
			t.Errorf("it is another: %v, %v", p.tag, p.config)
		}
	}
}

// Who ends by itself, or by a client, has ended.
func TestKeepNot(t *testing.T) {
	b := serve(t, "")
	me, err := b.service.config.Account("")
	if err != nil {
		t.Fatal(err)
	}
	for line, end := range map[string]func(*process) error{
		"exit 3":         func(*process) error { return nil },
		"exec sleep 300": func(p *process) error { return p.signal(syscall.SIGTERM) },
	} {
		c, err := b.service.newCommand(sh(line), me)
		if err != nil {
			t.Fatal(err)
		}
		p, err := c.start()
		if err != nil {
			t.Fatal(err)
		}
		b.service.run(t.Context(), p)
		if err := end(p); err != nil {
			t.Fatal(err)
		}
		b.service.keep(c, nil, p)
		if n := len(b.all()); n != 0 {
			t.Errorf("%s: %d run", line, n)
		}
	}
}

// A daemon that a command leaves behind with its output open neither delays the end
// nor dies of writing into nothing.
func TestGrandchildHoldsOutput(t *testing.T) {
	b := serve(t, "")
	dir := t.TempDir()
	r := b.run(t, sh(`(until [ -e `+dir+`/go ]; do sleep 0.05; done; i=0; while [ $i -lt 20000 ]; do echo 0123456789; i=$((i+1)); done; echo done >`+dir+`/done) & echo early`))
	if r.stdout != "early\n" || r.end.GetExitCode() != 0 {
		t.Errorf("got %+v", r)
	}
	if err := os.WriteFile(dir+"/go", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if _, err := os.Stat(dir + "/done"); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the daemon could not write on")
		}
	}
}

// What was written before the end is all told, also to a client that reads slowly.
func TestNothingIsLost(t *testing.T) {
	b := serve(t, "")
	const size = 3 << 20
	stream, _ := b.start(t, t.Context(), sh("sleep 9 & head -c "+strconv.Itoa(size)+" /dev/zero"))
	time.Sleep(500 * time.Millisecond) // everything is full: pipe, backlog, socket
	n, ended := 0, false
	for stream.Receive() {
		n += len(stream.Msg().GetEvent().GetData().GetStdout())
		ended = ended || stream.Msg().GetEvent().GetEnd() != nil
	}
	if n != size || !ended {
		t.Errorf("%d bytes of %d, end %v: %v", n, size, ended, stream.Err())
	}
}

func TestDeadline(t *testing.T) {
	b := serve(t, "")
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	stream, pid := b.start(t, ctx, sh("sleep 30"))
	for stream.Receive() {
	}
	if connect.CodeOf(stream.Err()) != connect.CodeDeadlineExceeded {
		t.Errorf("the stream ended with %v", stream.Err())
	}
	waitGone(t, pid)

	// The client's leaving does not end it; the deadline still does.
	ctx, cancel = context.WithTimeout(t.Context(), 1500*time.Millisecond)
	defer cancel()
	leaving, leave := context.WithCancel(ctx)
	_, pid = b.start(t, leaving, sh("sleep 30"))
	leave()
	time.Sleep(200 * time.Millisecond)
	if err := syscall.Kill(int(pid), 0); err != nil {
		t.Errorf("the process did not outlive its client: %v", err)
	}
	waitGone(t, pid)
}

// What the server itself says at the deadline, without the client's own clock.
func TestDeadlineOnTheWire(t *testing.T) {
	b := serve(t, "")
	body := `{"process":{"cmd":"sleep","args":["30"]},"stdin":false}`
	frame := append([]byte{0, 0, 0, 0, byte(len(body))}, body...)
	req, _ := http.NewRequestWithContext(t.Context(), "POST", b.url+"/process.Process/Start", bytes.NewReader(frame))
	req.Header.Set("Content-Type", "application/connect+json")
	req.Header.Set("Connect-Protocol-Version", "1")
	req.Header.Set("Connect-Timeout-Ms", "200")
	resp, err := http.DefaultClient.Do(req) // HTTP/1.1
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 || !bytes.Contains(data, []byte(`"code":"deadline_exceeded"`)) {
		t.Errorf("status %d, %v: %q", resp.StatusCode, err, data)
	}
	if bytes.Contains(data, []byte(`"end"`)) {
		t.Errorf("an end event before the deadline error: %q", data)
	}
}

func waitGone(t *testing.T, pid uint32) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); syscall.Kill(int(pid), 0) == nil; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("process %d is still there", pid)
		}
	}
}

func TestConnect(t *testing.T) {
	b := serve(t, "")
	tag := "mine"
	req := sh("echo before; sleep 0.4; echo after; exit 7")
	req.Tag = &tag
	ctx, leave := context.WithCancel(t.Context())
	stream, pid := b.start(t, ctx, req)
	stream.Receive() // "before"
	leave()
	sel := &pb.ProcessSelector{Selector: &pb.ProcessSelector_Tag{Tag: tag}}
	for _, when := range []string{"while it runs", "after its end"} {
		conn, err := b.client.Connect(t.Context(), connect.NewRequest(&pb.ConnectRequest{Process: sel}))
		if err != nil {
			t.Fatal(when, err)
		}
		var r result
		for conn.Receive() {
			r.add(conn.Msg().GetEvent())
		}
		if conn.Err() != nil || r.pid != pid || r.end.GetExitCode() != 7 {
			t.Errorf("%s: %+v, %v", when, r, conn.Err())
		}
		if when == "while it runs" && r.stdout != "after\n" {
			t.Errorf("output %q", r.stdout)
		}
		sel = byPID(pid)
	}
	for _, sel := range []*pb.ProcessSelector{byPID(999999), {Selector: &pb.ProcessSelector_Tag{Tag: "none"}}} {
		conn, err := b.client.Connect(t.Context(), connect.NewRequest(&pb.ConnectRequest{Process: sel}))
		if err == nil {
			conn.Receive()
			err = conn.Err()
		}
		if connect.CodeOf(err) != connect.CodeNotFound {
			t.Errorf("%v: %v", sel, err)
		}
	}
}

func TestList(t *testing.T) {
	b := serve(t, "")
	tag := "t"
	req := sh("sleep 30")
	req.Tag = &tag
	_, pid := b.start(t, t.Context(), req)
	b.run(t, sh("true"))
	resp, err := b.client.List(t.Context(), connect.NewRequest(&pb.ListRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	if ps := resp.Msg.GetProcesses(); len(ps) != 1 || ps[0].GetPid() != pid || ps[0].GetTag() != tag || ps[0].GetConfig().GetArgs()[1] != "sleep 30" {
		t.Errorf("got %v", ps)
	}
}

func TestKeepAlive(t *testing.T) {
	b := serve(t, "")
	req := connect.NewRequest(sh("sleep 1.5"))
	req.Header().Set("Keepalive-Ping-Interval", "1")
	stream, err := b.client.Start(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	alive := 0
	for stream.Receive() {
		if stream.Msg().GetEvent().GetKeepalive() != nil {
			alive++
		}
	}
	if alive < 1 || alive > 3 {
		t.Errorf("%d keepalive events in 1.5 s at one per second", alive)
	}
}

// A client that stays but does not read holds the process up, and no memory but a
// few chunks; when it leaves the process goes on.
func TestBackPressure(t *testing.T) {
	b := serve(t, "")
	dir := t.TempDir()
	ctx, leave := context.WithCancel(t.Context())
	_, pid := b.start(t, ctx, sh("head -c 200000000 /dev/zero; echo >"+dir+"/done"))
	time.Sleep(300 * time.Millisecond)
	if _, err := os.Stat(dir + "/done"); err == nil {
		t.Error("200 MB went somewhere")
	}
	b.service.mu.Lock()
	p := b.service.live[pid]
	b.service.mu.Unlock()
	for _, w := range p.out.snapshot() {
		if cap(w.events) > backlog {
			t.Errorf("backlog of %d", cap(w.events))
		}
	}
	leave()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if _, err := os.Stat(dir + "/done"); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the process still waits for a client that left")
		}
	}
}

func TestChildIsKilledBeforeTheAgent(t *testing.T) {
	b := serve(t, "")
	own, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		t.Fatal(err)
	}
	n, _ := strconv.Atoi(strings.TrimSpace(string(own)))
	r := b.run(t, sh("sleep 0.1; cat /proc/self/oom_score_adj"))
	if got, _ := strconv.Atoi(strings.TrimSpace(r.stdout)); got <= n {
		t.Errorf("oom_score_adj of a child is %d, of the agent %d", got, n)
	}
}

// Processes that wait must not cost a thread each: threads are counted against the
// sandbox's limit of processes, and are its memory.
func TestProcessesCostNoThreads(t *testing.T) {
	b := serve(t, "")
	const n = 40
	for range n {
		b.start(t, t.Context(), sh("exec sleep 30"))
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "Threads:")
	threads, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil || threads >= n {
		t.Errorf("%d threads for %d processes, %v", threads, n, err)
	}
}
