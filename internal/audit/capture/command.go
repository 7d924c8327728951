package capture

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/proto/codec"
	pb "github.com/berm-sandbox/berm/internal/proto/process"
)

// command is one call of process.Process/Start.
type command struct {
	recorder *Recorder
	who      Caller
	trace    string
	data     audit.Command
	began    time.Time
	format   format
	release  func()
	queue    *queue

	// Of the queue's work, and of finish after that.
	now    time.Duration // when what is looked at came
	out    output
	stream reader
	bytes  int64 // of output
	begun  bool  // the agent told that the command began
	ended  bool  // the agent told how the command ended
	failed failure
	odd    string
}

// failure is why the agent ended a stream: a code of the Connect protocol and a text, "" for none.
type failure struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// start records a command before it is started.
func (c *Recorder) start(r *http.Request, who Caller) (Call, error) {
	f, err := formatOf(r.Header)
	if err == nil && !f.envelope {
		err = invalid("content type %.64q is none of a stream", r.Header.Get("Content-Type"))
	}
	if err != nil {
		return nil, err
	}
	content, err := peek(r, f.envelope, maxRequest)
	if err != nil {
		return nil, err
	}
	var request pb.StartRequest
	if err := f.decode(content, &request); err != nil {
		return nil, err
	}
	user, _, _ := r.BasicAuth()
	m := &command{recorder: c, who: who, trace: newTrace(), began: time.Now(), format: f, data: describe(&request, user)}
	m.out = output{blobs: c.blobs}
	m.stream = reader{message: m.message, skipped: m.skipped, end: m.over}
	m.queue = newQueue(m.take)
	if !who.Known {
		return m, nil
	}
	return m, m.begin()
}

// begin records that the command is started.
func (m *command) begin() error {
	return m.recorder.emit(m.who, audit.Record{Type: audit.ExecStart, Outcome: audit.OK, Data: m.data, TraceID: m.trace})
}

// describe makes what is told of a request, which fits into a line of the log.
func describe(r *pb.StartRequest, user string) audit.Command {
	p := r.GetProcess()
	d := audit.Command{User: audit.Shorten(user, 256), Cwd: audit.Shorten(p.GetCwd(), 4096)}
	const argvSize, envSize = 12 << 10, 4 << 10
	var cut bool
	d.Argv, cut = audit.Fit(append([]string{p.GetCmd()}, p.GetArgs()...), argvSize)
	d.Env, d.Cut = audit.Fit(slices.Sorted(maps.Keys(p.GetEnvs())), envSize)
	d.Cut = d.Cut || cut
	if r.Pty != nil {
		size := r.GetPty().GetSize()
		d.TTY = &audit.Size{Columns: int(size.GetCols()), Rows: int(size.GetRows())}
	}
	return d
}

// Answer follows the command's stream. It goes on when the client leaves: the command does.
func (m *command) Answer(r *http.Response) error {
	f := &follower{command: m, body: r.Body}
	refused := r.StatusCode == http.StatusUnauthorized
	switch {
	case !m.who.Known && refused:
		f.over = true
		m.queue.close()
	case !m.who.Known: // the agent did what it was not expected to do
		m.who.Known = true
		if err := m.begin(); err != nil {
			m.release()
			return err
		}
	}
	if r.StatusCode != http.StatusOK && !f.over {
		f.over = true
		m.finish(audit.Failed, "the guest agent answers "+r.Status)
	}
	r.Body = f
	return nil
}

// Outlive implements Call.
func (m *command) Outlive(release func()) bool {
	m.release = release
	return true
}

// Failed says that the command was perhaps never started.
func (m *command) Failed(err error) {
	m.release()
	if m.who.Known {
		m.finish(audit.Failed, err.Error())
	}
}

// follower is the body of an answer, read by whoever passes it on.
type follower struct {
	*command
	body io.ReadCloser
	over bool // there is nothing more to read
}

func (f *follower) Read(p []byte) (int, error) {
	n, err := f.body.Read(p)
	if f.over {
		return n, err
	}
	f.queue.put(piece{at: time.Since(f.began), data: p[:n]})
	if err != nil {
		f.over = true
		f.finish(audit.OK, "")
	}
	return n, err
}

// Close reads on if the client left before the command's end, for what the command still does.
func (f *follower) Close() error {
	if f.over {
		defer f.release()
		return f.body.Close()
	}
	f.recorder.streams.Go(func() {
		defer f.release()
		_, _ = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{f}, make([]byte, 16<<10))
		_ = f.body.Close()
	})
	return nil
}

// take looks at a piece of the answer.
func (m *command) take(p piece) {
	m.now = p.at
	switch {
	case p.resize && m.recorder.output:
		m.out.add(m.now, audit.Resize, p.data)
	case !p.resize && !m.ended:
		m.stream.feed(p.data)
	}
}

// over takes the end of a stream (https://connectrpc.com/docs/protocol#error-end-stream).
func (m *command) over(raw []byte) {
	var end struct{ Error failure }
	if json.Unmarshal(raw, &end) == nil {
		m.failed = end.Error
		m.failed.Message = audit.Shorten(m.failed.Message, 1024)
	}
}

// skipped takes note of what cannot be read.
func (m *command) skipped(n int64) {
	m.odd = "a part of the answer could not be read"
	if m.recorder.output {
		m.out.miss(m.now, n)
	}
}

// message takes one message of the stream.
func (m *command) message(raw []byte) {
	if !m.format.json {
		if stream, data := codec.Output(raw); stream != "" {
			m.output(streams[stream], data)
			return
		}
	}
	var response pb.StartResponse
	if err := m.format.unmarshal(raw, &response); err != nil {
		m.skipped(int64(len(raw)))
		return
	}
	switch event := response.GetEvent().GetEvent().(type) {
	case *pb.ProcessEvent_Start:
		m.begun = true
		m.data.PID = int(event.Start.GetPid())
		m.recorder.started(m, event.Start.GetPid())
	case *pb.ProcessEvent_Data:
		switch o := event.Data.GetOutput().(type) {
		case *pb.ProcessEvent_DataEvent_Stdout:
			m.output(audit.Stdout, o.Stdout)
		case *pb.ProcessEvent_DataEvent_Stderr:
			m.output(audit.Stderr, o.Stderr)
		case *pb.ProcessEvent_DataEvent_Pty:
			m.output(audit.Stdout, o.Pty)
		}
	case *pb.ProcessEvent_End:
		m.end(event.End)
	}
}

// streams are those of output in the log.
var streams = map[string]audit.Stream{codec.Stdout: audit.Stdout, codec.Stderr: audit.Stderr, codec.PTY: audit.Stdout}

func (m *command) output(stream audit.Stream, data []byte) {
	m.bytes += int64(len(data))
	if !m.recorder.output {
		return
	}
	m.out.add(m.now, stream, data)
}

// end takes how the command ended.
func (m *command) end(e *pb.ProcessEvent_EndEvent) {
	m.ended = true
	code := int(e.GetExitCode())
	if name, signalled := strings.CutPrefix(e.GetStatus(), "signal: "); signalled {
		m.data.Signal = signalName(name)
	} else {
		m.data.Code = &code
	}
}

// signalName turns Go's text of a signal into its name.
func signalName(text string) string {
	text = strings.TrimSuffix(text, " (core dumped)")
	for s := syscall.Signal(1); s < 65; s++ {
		if name := unix.SignalName(s); name != "" && s.String() == text {
			return name
		}
	}
	return text
}

// finish records the end of the command, after all that came until then. The first call does.
func (m *command) finish(outcome audit.Outcome, reason string) {
	if !m.queue.close() {
		return
	}
	blobs, err := m.out.end()
	m.data.Millis, m.data.Output = time.Since(m.began).Milliseconds(), m.bytes
	switch {
	case reason != "":
	case !m.ended && m.failed.Code == connect.CodeDeadlineExceeded.String() && m.begun:
		// The agent kills what has no time left, and tells of no other end.
		outcome, reason, m.data.Signal = audit.Failed, "its time was over", "SIGKILL"
	case !m.ended && m.failed.Code != "" && !m.begun:
		outcome, reason = audit.Failed, audit.NotStarted+": "+m.failed.Message
	case !m.ended:
		outcome, reason = audit.Failed, "how it ended was not told: its stream was cut"
	case m.data.Code == nil || *m.data.Code != 0:
		outcome = audit.Failed
	}
	if reason == "" {
		reason = m.odd
	}
	if err != nil {
		reason = strings.TrimPrefix(reason+"; its output is not kept: "+err.Error(), "; ")
	}
	m.recorder.forget(m, uint32(m.data.PID))
	m.recorder.tell(m.who, audit.Record{Type: audit.ExecExit, Outcome: outcome, Reason: reason, Data: m.data, Blobs: blobs, TraceID: m.trace})
}

// started lets a command be found by its process.
func (c *Recorder) started(m *command, pid uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running[process{m.who.Sandbox, pid}] = m
}

func (c *Recorder) forget(m *command, pid uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if key := (process{m.who.Sandbox, pid}); c.running[key] == m {
		delete(c.running, key)
	}
}

// resize is a call of process.Process/Update.
type resize struct {
	brief
	recorder *Recorder
	key      process
	size     string
}

const maxUpdate = 4 << 10 // bytes of a call that changes the size of a terminal

// resize follows the size of a terminal. A request that the agent would refuse goes on to it.
func (c *Recorder) resize(r *http.Request, who Caller) (Call, error) {
	f, err := formatOf(r.Header)
	if err != nil {
		return nil, nil //nolint:nilerr // the agent refuses it
	}
	content, err := peek(r, f.envelope, maxUpdate)
	if err != nil {
		return nil, err
	}
	var update pb.UpdateRequest
	if err := f.decode(content, &update); err != nil || update.Pty == nil {
		return nil, nil //nolint:nilerr // as above
	}
	size := update.GetPty().GetSize()
	return &resize{brief{}, c, process{who.Sandbox, update.GetProcess().GetPid()}, fmt.Sprintf("%dx%d", size.GetCols(), size.GetRows())}, nil
}

func (u *resize) Answer(r *http.Response) error {
	u.recorder.mu.Lock()
	m := u.recorder.running[u.key]
	u.recorder.mu.Unlock()
	if m == nil || r.StatusCode != http.StatusOK {
		return nil
	}
	m.queue.put(piece{at: time.Since(m.began), resize: true, data: []byte(u.size)})
	return nil
}

func (u *resize) Failed(error) {}
