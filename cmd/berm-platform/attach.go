package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/terminal"
)

// exitTimeout is the code of a command that ran out of time, as of timeout(1).
const exitTimeout = 124

// attachment runs one command in a sandbox with this process as its other end.
type attachment struct {
	cmd     *cobra.Command
	agent   *client.Agent
	command client.Command
	timeout time.Duration // 0: none

	process *client.Process
	lost    atomic.Bool // the connection is down
	// ctx ends when this process leaves without having seen the command's end; cause
	// says why.
	ctx   context.Context
	leave context.CancelCauseFunc
}

// run returns an cli.ExitError for each code but 0.
func (a *attachment) run() error {
	// A broken pipe is to be seen as an error, not to end this process and leave the
	// command alive.
	signal.Ignore(syscall.SIGPIPE)
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	defer signal.Stop(signals)

	// The root context ends at the first SIGINT, which is the command's here.
	base := context.WithoutCancel(a.cmd.Context())
	if a.timeout > 0 {
		var cancel context.CancelFunc
		base, cancel = context.WithTimeout(base, a.timeout)
		defer cancel()
	}
	a.ctx, a.leave = context.WithCancelCause(base)
	defer a.leave(nil)

	stdin, stdout, stderr := a.cmd.InOrStdin(), a.cmd.OutOrStdout(), a.cmd.ErrOrStderr()
	restore := func() {}
	if a.command.PTY != nil {
		if f, ok := stdin.(*os.File); ok && terminal.Is(f) {
			*a.command.PTY = client.Size(terminal.SizeOf(f))
			raw, err := terminal.Raw(f)
			if err != nil {
				return err
			}
			restore = raw
		}
	}
	defer restore()
	out := client.Output{Stdout: stdout, Stderr: stderr, Notify: a.notify}
	if a.command.PTY == nil {
		// Without a terminal of its own a command has no business with ours.
		out.Stdout, out.Stderr = safeOutput(stdout), safeOutput(stderr)
	}

	var err error
	if a.process, err = a.agent.Start(a.ctx, a.command); err != nil {
		if errors.Is(a.ctx.Err(), context.DeadlineExceeded) {
			err = client.ErrTimeout
		}
		return a.failed(err, restore)
	}
	go a.forward(signals)
	switch {
	case a.command.PTY != nil:
		go a.terminalInput(stdin)
		if f, ok := stdin.(*os.File); ok && terminal.Is(f) {
			go a.resize(f)
		}
	case a.command.Stdin:
		go func() {
			if err := a.process.Pipe(a.ctx, stdin); err != nil && a.ctx.Err() == nil {
				a.kill()
				a.leave(err)
			}
		}()
	}
	end, err := a.process.Wait(a.ctx, out)
	for _, w := range []io.Writer{out.Stdout, out.Stderr} {
		if safe, ok := w.(*terminal.Writer); ok {
			if closing := safe.Close(); err == nil {
				err = closing
			}
		}
	}
	if err != nil {
		return a.failed(err, restore)
	}
	if code := end.ExitCode(); code != 0 {
		return cli.ExitError(code)
	}
	return nil
}

func safeOutput(w io.Writer) io.Writer {
	if terminal.Is(w) {
		return terminal.NewWriter(w)
	}
	return w
}

// failed explains why the end of the command was not seen.
func (a *attachment) failed(err error, restore func()) error {
	restore()
	var write *client.WriteError
	var code cli.ExitError
	switch cause := context.Cause(a.ctx); {
	case errors.Is(err, client.ErrTimeout), errors.Is(err, client.ErrDeadline):
		if errors.Is(err, client.ErrDeadline) && a.process != nil {
			a.kill() // the agent lost sight of the deadline with the connection
			err = client.ErrTimeout
		}
		cli.PrintError(a.cmd.ErrOrStderr(), err)
		return cli.ExitError(exitTimeout)
	case errors.As(err, &write):
		a.kill()
		if errors.Is(err, syscall.EPIPE) {
			return cli.ExitError(128 + int(syscall.SIGPIPE))
		}
		return err
	case errors.As(cause, &code):
		_, _ = fmt.Fprintln(a.cmd.ErrOrStderr()) // the prompt of the shell is on this line
		cli.Notice(a.cmd, "left; the command may still run in %s", a.agent.ID)
		return code
	case a.ctx.Err() != nil && cause != nil:
		return cause
	}
	return err
}

// brief bounds a call beside the command.
func brief() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), 5*time.Second)
}

func (a *attachment) kill() {
	ctx, cancel := brief()
	defer cancel()
	if err := a.process.Signal(ctx, syscall.SIGKILL); err != nil {
		cli.Notice(a.cmd, "the command may still run: %v", err)
	}
}

// notify prints what happens to the connection.
func (a *attachment) notify(lost bool, message string) {
	a.lost.Store(lost)
	if a.command.PTY == nil {
		cli.Notice(a.cmd, "%s", message)
		return
	}
	// On a line of its own; the terminal is raw.
	_, _ = fmt.Fprintf(a.cmd.ErrOrStderr(), "\r\nberm: %s\r\n", terminal.Escape(message))
	if !lost {
		a.redraw()
	}
}

// redraw makes a full-screen program draw again what was missed: it does so when
// its terminal changes size, and the kernel tells it only of real changes.
func (a *attachment) redraw() {
	ctx, cancel := brief()
	defer cancel()
	s := *a.command.PTY
	if f, ok := a.cmd.InOrStdin().(*os.File); ok && terminal.Is(f) {
		s = client.Size(terminal.SizeOf(f))
	}
	if a.process.Resize(ctx, client.Size{Cols: s.Cols, Rows: s.Rows + 1}) == nil {
		_ = a.process.Resize(ctx, s) // the next one corrects a lost one
	}
}

// forward hands signals to the command. When it does not end, the second one kills
// it and the third leaves.
func (a *attachment) forward(signals <-chan os.Signal) {
	for count := 1; ; count++ {
		var sig syscall.Signal
		select {
		case <-a.ctx.Done():
			return
		case s := <-signals:
			sig = s.(syscall.Signal)
		}
		send := sig
		if count == 2 {
			send = syscall.SIGKILL
		}
		if count > 2 || a.lost.Load() {
			a.leave(cli.ExitError(128 + int(sig)))
			return
		}
		go func() {
			ctx, cancel := brief()
			defer cancel()
			if err := a.process.Signal(ctx, send); err != nil && a.ctx.Err() == nil {
				cli.Notice(a.cmd, "the signal did not reach the command: %v", err)
			}
		}()
	}
}

func (a *attachment) resize(f *os.File) {
	sizes := terminal.Resizes(a.ctx, f)
	for {
		select {
		case <-a.ctx.Done():
			return
		case s := <-sizes:
			ctx, cancel := brief()
			_ = a.process.Resize(ctx, client.Size(s)) // the next one corrects a lost one
			cancel()
		}
	}
}

// terminalInput sends what is typed. It is read even when the connection hangs, so
// that one can always leave: by Enter, tilde, dot, or while the connection is down
// by Ctrl-C.
func (a *attachment) terminalInput(r io.Reader) {
	typed := make(chan []byte, 64)
	go func() {
		for {
			select {
			case <-a.ctx.Done():
				return
			case data := <-typed:
				ctx, cancel := brief()
				_ = a.process.Send(ctx, data, true) // what is typed into a dead line is lost
				cancel()
			}
		}
	}()
	var escape escape
	buf := make([]byte, 4096)
	for {
		n, err := r.Read(buf)
		for i, b := range buf[:n] {
			if escape.leaves(b) || b == 3 && a.lost.Load() {
				n = i
				a.leave(cli.ExitError(128 + int(syscall.SIGHUP)))
				break
			}
		}
		data := append([]byte(nil), buf[:n]...)
		if err == io.EOF {
			data = append(data, 4) // a script's input ended: Ctrl-D, as nothing else says so
		}
		if len(data) > 0 {
			select {
			case <-a.ctx.Done():
				return
			case typed <- data:
			}
		}
		if err != nil || a.ctx.Err() != nil {
			return
		}
	}
}

// escape finds the sequence Enter, tilde, dot.
type escape struct{ seen int }

func (e *escape) leaves(b byte) bool {
	switch {
	case b == '\r' || b == '\n':
		e.seen = 1
	case e.seen == 1 && b == '~':
		e.seen = 2
	case e.seen == 2 && b == '.':
		return true
	default:
		e.seen = 0
	}
	return false
}
