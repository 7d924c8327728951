// Package sandbox runs commands in sandboxes from a Go program, without a server: what
// `berm run` does, with the shape of os/exec.
//
// A program that imports it is executed again to be the first process of each sandbox, and
// gets no further than the initialisation of this package then.
package sandbox

import (
	"context"
	"errors"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/local"
	"github.com/berm-sandbox/berm/internal/local/apply"
	"github.com/berm-sandbox/berm/internal/local/change"
	"github.com/berm-sandbox/berm/internal/local/preset"
	"github.com/berm-sandbox/berm/internal/local/session"
)

// Workspace is how a command may write to its directory.
type Workspace string

// The forms of the workspace.
const (
	// CopyOnWrite keeps what the command writes beside the directory, in a Session.
	CopyOnWrite Workspace = "cow"
	// InPlace lets the command write into the directory itself.
	InPlace Workspace = "rw"
	// ReadOnly lets it write nothing there.
	ReadOnly Workspace = "ro"
)

// Cmd is a command to be run in a sandbox of its own. The zero value of each field but Args
// is the strictest: no network, no variables but those that programs need, and of the host
// nothing but its programs.
type Cmd struct {
	Args []string
	// Dir is the workspace and the working directory; "" is that of the calling process.
	Dir       string
	Workspace Workspace // "" is CopyOnWrite
	// Session is an earlier one of the same directory to go on with; "" makes one.
	Session string
	Env     []string // NAME=VALUE, or NAME for the calling process' own value
	Show    []string // paths of the host to be seen, read-only
	Write   []string // paths of the host to be written
	Hide    []string // paths not to be seen
	Limits  berm.Limits
	Timeout time.Duration
	Profile string // of system calls: "" is "default"; "strict" allows fewer

	// The standard streams; nil is the null device. A *os.File is handed to the command as
	// it is, anything else is copied.
	Stdin          io.Reader
	Stdout, Stderr io.Writer
}

// Command returns a command of a program, which is looked for in PATH inside the sandbox.
func Command(name string, args ...string) *Cmd { return &Cmd{Args: append([]string{name}, args...)} }

// Result is how a command ended.
type Result struct {
	ExitCode int            // as a shell has it: 128 and the number after a signal, 124 after the timeout
	Signal   syscall.Signal // that ended it; 0 is none
	Reason   berm.Reason    // exit, oom, timeout, killed
	Duration time.Duration
	// Session holds what the command changed in its workspace; nil when that is nothing.
	Session *Session
}

// Run runs the command to its end, with all that it started, and returns how it ended: a
// command that fails is no error. Cancelling ctx ends it. An error means that it did not
// run; kinds: Invalid, NotFound, Denied, Unsupported (the host cannot make such a sandbox:
// nothing is weakened), Conflict (its session is in use), Internal.
func (c *Cmd) Run(ctx context.Context) (*Result, error) {
	streams, err := c.open()
	if err != nil {
		return nil, err
	}
	defer streams.close()
	t := &local.Task{
		Argv: c.Args, Dir: c.Dir, Preset: preset.Default, Environ: os.Environ(), Streams: streams.files, Session: c.Session,
		Rights: preset.Rights{
			Workspace: preset.Workspace(c.Workspace), Env: c.Env, ReadOnly: c.Show, ReadWrite: c.Write, Hide: c.Hide,
			Limits: c.Limits, Timeout: c.Timeout, Profile: c.Profile,
		},
		Notice: func(string) {},
	}
	for _, e := range c.Env {
		if err := preset.CheckEnv(e); err != nil {
			return nil, berm.Errorf(berm.Invalid, "variable %q: %w", e, err)
		}
	}
	r, err := local.Do(ctx, t)
	copyErr := streams.finish()
	if err != nil {
		return nil, err
	}
	result := &Result{ExitCode: r.ExitCode, Signal: r.Signal, Reason: r.Reason, Duration: r.Duration}
	if r.Session != "" {
		result.Session = &Session{Name: r.Session}
	}
	return result, copyErr
}

// streams are the standard streams of a command, and what copies them.
type streams struct {
	files  [3]*os.File
	ours   []*os.File // to be closed when the command has them
	copies chan error
	n      int
}

func (c *Cmd) open() (*streams, error) {
	s := &streams{copies: make(chan error, 3)}
	for i, end := range []any{c.Stdin, c.Stdout, c.Stderr} {
		if err := s.add(i, end); err != nil {
			s.close()
			return nil, berm.Errorf(berm.Internal, "standard streams: %w", err)
		}
	}
	return s, nil
}

func (s *streams) add(i int, end any) error {
	switch end := end.(type) {
	case nil:
		null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		s.files[i], s.ours = null, append(s.ours, null)
	case *os.File:
		s.files[i] = end
	default:
		r, w, err := os.Pipe()
		if err != nil {
			return err
		}
		if i == 0 {
			s.files[i], s.ours = r, append(s.ours, r)
			// As in os/exec, a reader that blocks for ever is the caller's to end: it is not
			// waited for.
			go func() {
				_, _ = io.Copy(w, end.(io.Reader))
				w.Close()
			}()
			return nil
		}
		s.files[i], s.ours = w, append(s.ours, w)
		s.n++
		go func() {
			_, err := io.Copy(end.(io.Writer), r)
			if err != nil { // the command must not block on what nobody takes
				_, _ = io.Copy(io.Discard, r)
			}
			r.Close()
			s.copies <- err
		}()
	}
	return nil
}

// finish waits until all output is copied.
func (s *streams) finish() error {
	s.close()
	var errs []error
	for range s.n {
		errs = append(errs, <-s.copies)
	}
	s.n = 0
	return errors.Join(errs...)
}

func (s *streams) close() {
	for _, f := range s.ours {
		f.Close()
	}
	s.ours = nil
}

// Session is what commands changed in a copy-on-write workspace, beside the directory.
type Session struct {
	Name string
}

// Change is one difference between the directory and a session's view of it.
type Change = change.Change

// Changes lists what the session changed.
func (s *Session) Changes(ctx context.Context) (list []Change, err error) {
	err = s.with(false, func(_ *session.Session, upper, project *os.Root) error {
		list, err = change.List(ctx, upper, project, change.Limits{})
		return err
	})
	return list, err
}

// Diff writes what the session changed in the form of git diff.
func (s *Session) Diff(ctx context.Context, w io.Writer) error {
	return s.with(false, func(_ *session.Session, upper, project *os.Root) error {
		list, err := change.List(ctx, upper, project, change.Limits{})
		if err != nil {
			return err
		}
		return change.Diff(w, list, upper, project, change.Options{Binary: true})
	})
}

// Outcome is what became of one path.
type Outcome = apply.Result

// Apply brings changes into the directory: all, or those at and below paths. What was
// changed there meanwhile is left alone unless it can be merged, and so is what the host
// would execute or obey by itself: the outcomes say why. Each file is as before or as after.
// Deletions of most of the project or of its repository are left alone in the same way.
func (s *Session) Apply(ctx context.Context, paths ...string) (outcomes []Outcome, err error) {
	err = s.with(true, func(session *session.Session, upper, project *os.Root) error {
		if _, err := apply.Recover(ctx, session.Dir(), upper, project); err != nil {
			return err
		}
		list, err := change.List(ctx, upper, project, change.Limits{})
		if err != nil {
			return err
		}
		request := apply.Request{Dir: session.Dir(), Upper: upper, Project: project, Started: session.Created, Recorded: session.Used(), Changes: list, Paths: paths}
		if base, err := session.Base(); err == nil {
			defer base.Close()
			request.Base = base
		}
		p, err := apply.New(ctx, request)
		if err != nil {
			return err
		}
		defer p.Close()
		outcomes, err = p.Run(ctx)
		return err
	})
	return outcomes, err
}

// Discard gives the session's changes up.
func (s *Session) Discard(ctx context.Context) error {
	store, err := openStore()
	if err != nil {
		return err
	}
	defer store.Close()
	return store.Remove(ctx, s.Name)
}

// with opens the session and calls f.
func (s *Session) with(lock bool, f func(session *session.Session, upper, project *os.Root) error) error {
	store, err := openStore()
	if err != nil {
		return err
	}
	defer store.Close()
	session, err := store.Get(s.Name)
	if err != nil {
		return err
	}
	if lock {
		if err := session.Lock(); err != nil {
			return err
		}
		defer session.Unlock()
	}
	upper, err := session.OpenUpper()
	if err != nil {
		return err
	}
	defer upper.Close()
	project, err := os.OpenRoot(session.Project)
	if err != nil {
		return berm.Errorf(berm.NotFound, "the directory of session %s: %w", s.Name, err)
	}
	defer project.Close()
	return f(session, upper, project)
}

func openStore() (*session.Store, error) {
	state, err := session.StateDir()
	if err != nil {
		return nil, err
	}
	return session.Open(state)
}
