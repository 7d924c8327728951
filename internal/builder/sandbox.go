package builder

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/control"
	"github.com/berm-sandbox/berm/internal/proto/process"
	"github.com/berm-sandbox/berm/internal/proto/process/processconnect"
	"github.com/berm-sandbox/berm/internal/template"
)

// maxMessage bounds one message of the guest agent, which is not trusted, in bytes.
const maxMessage = 16 << 20

// sandbox is one in which a step runs.
type sandbox struct {
	sessions *control.Manager
	id       berm.SandboxID
	http     *http.Client
	process  processconnect.ProcessClient
}

// newSandbox makes a sandbox of what a build came to until now.
func (b *Builder) newSandbox(ctx context.Context, build *build, from *template.Stage, actor audit.Actor) (*sandbox, error) {
	of := berm.Template{
		ID: build.TemplateID, BuildID: build.ID, Team: build.Team, Layers: from.Layers, Limits: build.Limits,
		User: from.User, Workdir: from.Workdir, Env: from.Env, Setuid: from.Setuid,
	}
	limits := berm.Limits{Disk: max(build.Limits.Disk, buildDisk)}
	if b.Store.Shifted() { // a limited disk is in memory, where only what is inside sees it
		of.Limits.Disk, limits.Disk = 0, 0
	}
	info, err := b.Sessions.Create(ctx, control.CreateRequest{
		Template: string(build.TemplateID), Of: &of, Level: berm.Namespace, Timeout: stepTime + time.Minute, Secure: true,
		Limits:   limits,
		Metadata: map[string]string{"berm.build": string(build.ID)}, Actor: actor, Team: build.Team,
	})
	if err != nil {
		return nil, err
	}
	route, err := b.Sessions.Route(info.ID)
	if err != nil {
		return nil, err
	}
	s := &sandbox{sessions: b.Sessions, id: info.ID}
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) { return route.Dial(ctx, berm.AgentPort) }
	s.http = &http.Client{Transport: withToken{&http.Transport{DialContext: dial, MaxIdleConnsPerHost: 2}, info.AccessToken}}
	s.process = processconnect.NewProcessClient(s.http, "http://agent", connect.WithReadMaxBytes(maxMessage))
	return s, nil
}

// withToken shows the guest agent the token of its sandbox.
type withToken struct {
	next  *http.Transport
	token string
}

func (t withToken) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("X-Access-Token", t.token)
	return t.next.RoundTrip(r)
}

func (t withToken) CloseIdleConnections() { t.next.CloseIdleConnections() }

// kill ends the sandbox, whatever became of the build.
func (s *sandbox) kill() error {
	s.http.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	err := s.sessions.Kill(ctx, s.id, system)
	if berm.KindOf(err) == berm.NotFound {
		return nil
	}
	return err
}

// still keeps what a step left running from writing while its files are read: it is frozen, or where
// nothing can be frozen ended.
func (s *sandbox) still(ctx context.Context) error {
	err := s.sessions.Pause(ctx, s.id, system)
	if err == nil || berm.KindOf(err) != berm.Unsupported {
		return err
	}
	// All but who says so and the first process, which begins the guest agent anew (kill(2)). As the
	// agent goes too, what tells that it happened is that another one follows.
	agent := func() (pid string, err error) {
		err = s.run(ctx, command{user: "root", workdir: "/", argv: []string{"/bin/sh", "-c", "echo $PPID"}, line: func(_ bool, text string) { pid = text }})
		return pid, err
	}
	before, err := agent()
	if err != nil {
		return &insideError{err}
	}
	_ = s.run(ctx, command{user: "root", workdir: "/", argv: []string{"/bin/sh", "-c", "kill -9 -1"}, line: func(bool, string) {}})
	if after, err := agent(); err != nil || after == before {
		return &insideError{fmt.Errorf("what the step left running could not be ended: %w", cmp.Or(err, errors.New("the guest agent goes on")))}
	}
	return nil
}

// command is a program to run inside.
type command struct {
	user, workdir string
	env           map[string]string
	argv          []string
	// line is told what it writes, by lines.
	line func(stderr bool, text string)
}

// run waits for a command. The error of one that ends badly says how.
func (s *sandbox) run(ctx context.Context, c command) error {
	closed := false
	req := connect.NewRequest(&process.StartRequest{
		Process: &process.ProcessConfig{Cmd: c.argv[0], Args: c.argv[1:], Envs: c.env, Cwd: &c.workdir}, Stdin: &closed,
	})
	asUser(req.Header(), c.user)
	stream, err := s.process.Start(ctx, req)
	if err != nil {
		return fmt.Errorf("command failed: %w", err)
	}
	defer func() { _ = stream.Close() }()
	out := [2]lines{{say: func(l string) { c.line(false, l) }}, {say: func(l string) { c.line(true, l) }}}
	defer out[0].end()
	defer out[1].end()
	for stream.Receive() {
		event := stream.Msg().GetEvent()
		out[0].write(event.GetData().GetStdout())
		out[1].write(event.GetData().GetStderr())
		switch end := event.GetEnd(); {
		case end == nil:
		case end.GetError() != "":
			return errors.New(end.GetError())
		case end.GetStatus() != "exit status 0":
			return errors.New(end.GetStatus())
		default:
			return nil
		}
	}
	if err := stream.Err(); err != nil {
		return fmt.Errorf("command failed: %w", err)
	}
	return errors.New("command failed: its sandbox ended")
}

func asUser(h http.Header, user string) {
	r := http.Request{Header: h}
	r.SetBasicAuth(user, "")
}

// upload writes a file inside, as root.
func (s *sandbox) upload(ctx context.Context, name string, content io.Reader) error {
	to := "http://agent/files?" + url.Values{"path": {name}, "username": {"root"}}.Encode()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, to, io.NopCloser(content))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/octet-stream")
	answer, err := s.http.Do(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode/100 != 2 {
		text, _ := io.ReadAll(io.LimitReader(answer.Body, 1<<10))
		return berm.Errorf(berm.Invalid, "the files could not be written: %s", bytes.TrimSpace(text))
	}
	return nil
}

// download opens a file inside, as root.
func (s *sandbox) download(ctx context.Context, name string) (io.ReadCloser, error) {
	from := "http://agent/files?" + url.Values{"path": {name}, "username": {"root"}}.Encode()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, from, nil)
	if err != nil {
		return nil, err
	}
	answer, err := s.http.Do(r)
	if err != nil {
		return nil, err
	}
	if answer.StatusCode/100 != 2 {
		defer answer.Body.Close()
		text, _ := io.ReadAll(io.LimitReader(answer.Body, 1<<10))
		return nil, berm.Errorf(berm.Invalid, "the files could not be read: %s", bytes.TrimSpace(text))
	}
	return answer.Body, nil
}

// lines takes output apart into lines.
type lines struct {
	say     func(string)
	partial []byte
}

// maxLogLine bounds one line of a build's log in bytes.
const maxLogLine = 8 << 10

func (l *lines) write(p []byte) {
	l.partial = append(l.partial, p...)
	for {
		line, rest, ok := bytes.Cut(l.partial, []byte("\n"))
		if !ok {
			break
		}
		l.tell(line)
		l.partial = rest
	}
	if len(l.partial) > maxLogLine {
		l.end()
	}
}

// tell passes a line on. Of one that was overwritten, as by a progress bar, the last text counts.
func (l *lines) tell(line []byte) {
	line = bytes.TrimRight(line, "\r")
	if i := bytes.LastIndexByte(line, '\r'); i >= 0 {
		line = line[i+1:]
	}
	l.say(strings.ToValidUTF8(string(line[:min(len(line), maxLogLine)]), "�"))
}

func (l *lines) end() {
	if len(l.partial) > 0 {
		l.tell(l.partial)
		l.partial = nil
	}
}
