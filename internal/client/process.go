package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/proto/process"
)

// patience is how long a process that runs waits for a lost connection.
const patience = time.Minute

// InputChunk is the most input that one call carries, in bytes.
const InputChunk = 256 << 10

// Size is a terminal's size in characters.
type Size struct{ Cols, Rows int }

// Command is what to run in a sandbox. A command that does not exist ends with
// code 127.
type Command struct {
	Path  string
	Args  []string // without the command itself
	Env   map[string]string
	Dir   string // "" is the default one
	PTY   *Size  // nil: pipes
	Stdin bool   // with pipes: false reads end-of-file at once
}

// Process is a running command.
type Process struct {
	PID    uint32 // inside the sandbox
	agent  *Agent
	stream stream
}

// stream is what Start and Connect have in common.
type stream struct {
	receive func() (*process.ProcessEvent, error)
	close   func()
}

func newStream[T any](cancel context.CancelFunc, s *connect.ServerStreamForClient[T], event func(*T) *process.ProcessEvent) stream {
	return stream{
		receive: func() (*process.ProcessEvent, error) {
			if s.Receive() {
				return event(s.Msg()), nil
			}
			if err := s.Err(); err != nil {
				return nil, err
			}
			return nil, io.ErrUnexpectedEOF // the end event was to come first
		},
		close: func() {
			cancel()
			_ = s.Close() // canceled
		},
	}
}

// deadlineGrace is how long the agent has to tell that it killed a command whose time was over.
const deadlineGrace = 5 * time.Second

// outlive makes a context that ends with ctx, but after a deadline only when who has the same one
// had the time to tell so.
func outlive(ctx context.Context) (context.Context, context.CancelFunc) {
	longer, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			select {
			case <-longer.Done():
			case <-time.After(deadlineGrace):
			}
		}
		cancel()
	})
	return longer, func() { stop(); cancel() }
}

// Start starts a command. A deadline of ctx is one for the command too: the agent
// kills it then.
func (a *Agent) Start(ctx context.Context, c Command) (*Process, error) {
	config := &process.ProcessConfig{Cmd: c.Path, Args: c.Args, Envs: c.Env}
	if c.Dir != "" {
		config.Cwd = &c.Dir
	}
	req := &process.StartRequest{Process: config, Stdin: &c.Stdin}
	if c.PTY != nil {
		req.Stdin = nil
		req.Pty = ptySize(*c.PTY)
	}
	request := streamRequest(req)
	if deadline, ok := ctx.Deadline(); ok {
		request.Header().Set("Connect-Timeout-Ms", strconv.FormatInt(max(time.Until(deadline).Milliseconds(), 1), 10))
	}
	ctx, cancel := outlive(ctx)
	s, err := a.process.Start(ctx, request)
	if err != nil {
		cancel()
		err, _ = a.agentError(err)
		return nil, err
	}
	p := &Process{agent: a, stream: newStream(cancel, s, (*process.StartResponse).GetEvent)}
	return p, p.started()
}

func ptySize(s Size) *process.PTY {
	return &process.PTY{Size: &process.PTY_Size{Cols: uint32(s.Cols), Rows: uint32(s.Rows)}}
}

// streamRequest asks for a sign of life often enough for proxies that drop idle
// connections after a minute.
func streamRequest[T any](msg *T) *connect.Request[T] {
	req := connect.NewRequest(msg)
	req.Header().Set("Keepalive-Ping-Interval", "50")
	return req
}

// started reads up to the start event.
func (p *Process) started() error {
	for {
		event, err := p.stream.receive()
		if err != nil {
			p.stream.close()
			err, _ = p.agent.agentError(err)
			return err
		}
		if start := event.GetStart(); start != nil {
			p.PID = start.GetPid()
			return nil
		}
	}
}

func (p *Process) selector() *process.ProcessSelector {
	return &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: p.PID}}
}

// End is how a command ended.
type End struct {
	Code   int            // if no signal ended it
	Signal syscall.Signal // 0 if none
}

// ExitCode is the code that a shell would report: 128 and the number for a signal.
func (e End) ExitCode() int {
	if e.Signal != 0 {
		return 128 + int(e.Signal)
	}
	return e.Code
}

func endOf(e *process.ProcessEvent_EndEvent) End {
	name, ok := strings.CutPrefix(e.GetStatus(), "signal: ")
	if !ok {
		return End{Code: int(e.GetExitCode())}
	}
	name = strings.TrimSuffix(name, " (core dumped)")
	for s := syscall.Signal(1); s < 65; s++ {
		if s.String() == name {
			return End{Signal: s}
		}
	}
	return End{Code: 255} // a signal that only the sandbox knows
}

// Output says where a command's output goes. The output of a terminal is Stdout.
type Output struct {
	Stdout, Stderr io.Writer
	// Notify is told when the connection is lost, while Wait tries to get it back, and
	// when it is there again. Nil makes a lost connection an error.
	Notify func(lost bool, message string)
}

// ErrTimeout says that a command's deadline has passed; the agent killed it.
var ErrTimeout = berm.Errorf(berm.Unavailable, "the command ran out of time and was killed")

// ErrDeadline says that a command's deadline has passed, and that the agent has not told that it
// killed it.
var ErrDeadline = berm.Errorf(berm.Unavailable, "the command ran out of time, and may still run")

// WriteError is a failure to write a command's output.
type WriteError struct{ Err error }

func (e *WriteError) Error() string { return "output: " + e.Err.Error() }

func (e *WriteError) Unwrap() error { return e.Err }

// Wait hands on the output of a command until it ends. When the connection is lost
// it attaches again; output of the meantime is then missing, the end is not. When
// ctx ends the command goes on, but see Start for deadlines.
func (p *Process) Wait(ctx context.Context, o Output) (End, error) {
	defer func() { p.stream.close() }()
	for {
		event, err := p.stream.receive()
		if err != nil {
			switch {
			case connect.CodeOf(err) == connect.CodeDeadlineExceeded:
				return End{}, ErrTimeout
			case errors.Is(ctx.Err(), context.DeadlineExceeded):
				return End{}, ErrDeadline
			case ctx.Err() != nil:
				return End{}, ctx.Err()
			}
			err, transport := p.agent.agentError(err)
			if !transport {
				return End{}, err
			}
			if err := p.attach(ctx, o.Notify, err); errors.Is(err, context.DeadlineExceeded) {
				return End{}, ErrDeadline
			} else if err != nil {
				return End{}, err
			}
			continue
		}
		if end := event.GetEnd(); end != nil {
			return endOf(end), nil
		}
		data := event.GetData()
		if out := append(data.GetStdout(), data.GetPty()...); len(out) > 0 && o.Stdout != nil {
			if _, err := o.Stdout.Write(out); err != nil {
				return End{}, &WriteError{err}
			}
		}
		if out := data.GetStderr(); len(out) > 0 && o.Stderr != nil {
			if _, err := o.Stderr.Write(out); err != nil {
				return End{}, &WriteError{err}
			}
		}
	}
}

// attach connects to the process again after its stream failed with lost.
func (p *Process) attach(ctx context.Context, notify func(bool, string), lost error) error {
	p.stream.close()
	began, wait, said := time.Now(), 50*time.Millisecond, ""
	waiting := began // for somebody who does not answer, not for a resume
	for {
		// The server is asked first: a call to the agent of a paused sandbox might
		// wake it.
		s, err := p.agent.client.Get(ctx, p.agent.ID)
		state := ""
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case berm.KindOf(err) == berm.NotFound:
			return p.agent.gone(ctx)
		case berm.KindOf(err) == berm.Denied:
			return err
		case notify == nil:
			return lost
		case err != nil:
			state = "the connection is lost; trying to get it back"
		case s.State == berm.Paused || s.State == berm.Pausing:
			state = "the sandbox is paused; waiting for its resume"
			waiting = time.Now() // somebody wanted it: wait for as long as it takes
		default:
			if err = p.connect(ctx); err == nil {
				notify(false, fmt.Sprintf("connected again after %v; output of the time between is missing", time.Since(began).Round(100*time.Millisecond)))
				return nil
			}
			if berm.KindOf(err) == berm.NotFound {
				return berm.Errorf(berm.Internal, "the command is gone since the connection was lost: its exit code is not known")
			}
		}
		if time.Since(waiting) > patience {
			return lost
		}
		if state != "" && state != said {
			notify(true, state)
			said = state
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
			wait = min(2*wait, 2*time.Second)
		}
	}
}

// gone says why the sandbox is.
func (a *Agent) gone(ctx context.Context) error {
	why := "was killed or reached the end of its time"
	if s, err := a.client.Inspect(ctx, a.ID); err == nil && s.Exit != nil {
		why = "has ended: " + string(s.Exit.Reason)
		if s.Exit.Detail != "" {
			why += ", " + s.Exit.Detail
		}
	}
	return berm.Errorf(berm.NotFound, "sandbox %s %s", a.ID, why)
}

func (p *Process) connect(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	s, err := p.agent.process.Connect(ctx, streamRequest(&process.ConnectRequest{Process: p.selector()}))
	if err != nil {
		cancel()
		err, _ = p.agent.agentError(err)
		return err
	}
	p.stream = newStream(cancel, s, (*process.ConnectResponse).GetEvent)
	return p.started()
}

// Send gives a command input: of its terminal if it has one, else its stdin.
func (p *Process) Send(ctx context.Context, data []byte, pty bool) error {
	input := &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: data}}
	if pty {
		input.Input = &process.ProcessInput_Pty{Pty: data}
	}
	_, err := p.agent.process.SendInput(ctx, connect.NewRequest(&process.SendInputRequest{Process: p.selector(), Input: input}))
	return err
}

// Pipe gives a command all that r has, then end-of-file. A command that ended or
// that closed its stdin is no error.
func (p *Process) Pipe(ctx context.Context, r io.Reader) error {
	buf := make([]byte, InputChunk)
	for {
		n, readErr := r.Read(buf)
		if n > 0 {
			if err := p.Send(ctx, buf[:n], false); err != nil {
				return p.inputError(err)
			}
		}
		if readErr == io.EOF {
			_, err := p.agent.process.CloseStdin(ctx, connect.NewRequest(&process.CloseStdinRequest{Process: p.selector()}))
			return p.inputError(err)
		}
		if readErr != nil {
			return readErr
		}
	}
}

func (p *Process) inputError(err error) error {
	if err == nil || connect.IsWireError(err) {
		return nil
	}
	err, _ = p.agent.agentError(err)
	return berm.Errorf(berm.KindOf(err), "the command may have got a part of its input only: %w", err)
}

// Resize tells a command's terminal its size.
func (p *Process) Resize(ctx context.Context, s Size) error {
	_, err := p.agent.process.Update(ctx, connect.NewRequest(&process.UpdateRequest{Process: p.selector(), Pty: ptySize(s)}))
	return err
}

// Signal sends a signal to a command and to what it started. The protocol knows
// TERM and KILL to a single process only; but every command leads a process group,
// which a shell inside can signal. Without a shell in the sandbox the command gets
// KILL for KILL and TERM for all else.
func (p *Process) Signal(ctx context.Context, sig syscall.Signal) error {
	kill := Command{Path: "/bin/sh", Args: []string{"-c", fmt.Sprintf("kill -s %s -- -%d", strings.TrimPrefix(unix.SignalName(sig), "SIG"), p.PID)}}
	if helper, err := p.agent.Start(ctx, kill); err == nil {
		if end, err := helper.Wait(ctx, Output{}); err == nil && end.ExitCode() == 0 && sig != syscall.SIGKILL {
			return nil
		}
	}
	number := process.Signal_SIGNAL_SIGTERM
	if sig == syscall.SIGKILL {
		number = process.Signal_SIGNAL_SIGKILL
	}
	_, err := p.agent.process.SendSignal(ctx, connect.NewRequest(&process.SendSignalRequest{Process: p.selector(), Signal: number}))
	if err == nil || connect.CodeOf(err) == connect.CodeNotFound {
		return nil
	}
	err, _ = p.agent.agentError(err)
	return err
}
