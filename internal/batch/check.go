package batch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/client"
)

// streams are where the output of a job's command goes, and what checks ask of it.
type streams struct {
	keptOut, keptErr kept
	judges           []judges // for each check
	stdout, stderr   io.Writer
}

func (a *attempt) streams() *streams {
	s := &streams{keptOut: kept{limit: a.r.OutputLimit}, keptErr: kept{limit: a.r.OutputLimit}, judges: make([]judges, len(a.job.Checks))}
	var out, err judges
	for i, c := range a.job.Checks {
		switch {
		case c.Stdout != nil:
			s.judges[i] = c.Stdout.judges()
			out = append(out, s.judges[i]...)
		case c.Stderr != nil:
			s.judges[i] = c.Stderr.judges()
			err = append(err, s.judges[i]...)
		}
	}
	s.stdout, s.stderr = out.stream(&s.keptOut), err.stream(&s.keptErr)
	return s
}

func (s *streams) keep(r *Result) {
	r.Stdout, r.StdoutBytes = s.keptOut.String(), s.keptOut.total
	r.Stderr, r.StderrBytes = s.keptErr.String(), s.keptErr.total
}

func (s *streams) close() {
	for _, j := range s.judges {
		j.close()
	}
}

// isTimeout says whether a command ran out of time.
func isTimeout(err error) bool {
	return errors.Is(err, client.ErrTimeout) || errors.Is(err, client.ErrDeadline)
}

// timedCommand is a command with the time that it has.
type timedCommand struct {
	client.Command
	timeout Duration
}

func (j *Job) timed() timedCommand {
	return timedCommand{client.Command{Path: j.Command[0], Args: j.Command[1:], Env: j.Env, Dir: j.Dir}, j.Timeout}
}

// command runs a command to its end. A lost connection is an error: output would be missing.
func (a *attempt) command(ctx context.Context, user string, c timedCommand, stdout, stderr io.Writer) (client.End, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout.limit())
	defer cancel()
	process, err := a.agent(user).Start(ctx, c.Command)
	if err != nil {
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			err = client.ErrTimeout
		}
		return client.End{}, err
	}
	return process.Wait(ctx, client.Output{Stdout: stdout, Stderr: stderr})
}

// checks makes all checks and says whether the job passes. An error is one of the way.
func (a *attempt) checks(ctx context.Context, code int, out *streams) error {
	var reasons []string
	for i, c := range a.job.Checks {
		done := Checked{Check: c.name()}
		var failed []string
		var err error
		switch {
		case c.Exit != nil:
			if !c.Exit.Any && code != c.Exit.Code {
				failed = []string{fmt.Sprintf("the exit code is %d, not %d", code, c.Exit.Code)}
			}
		case c.File != nil:
			failed, err = a.file(ctx, c.File)
		case len(c.Command) > 0:
			failed, err = a.judge(ctx, c, &done)
		default:
			failed = out.judges[i].unmet(c.name())
		}
		if err != nil {
			return fmt.Errorf("check %s: %w", c.name(), err)
		}
		done.Passed, done.Reason = len(failed) == 0, strings.Join(failed, "; ")
		a.result.Checks = append(a.result.Checks, done)
		reasons = append(reasons, failed...)
	}
	if a.result.Outcome = Passed; len(reasons) > 0 {
		a.fail(Failed, strings.Join(reasons, "; "))
	}
	return nil
}

// file checks a path in the sandbox.
func (a *attempt) file(ctx context.Context, f *File) (failed []string, err error) {
	agent := a.agent("")
	info, err := agent.Stat(ctx, f.Path)
	is := err == nil
	if err != nil && berm.KindOf(err) != berm.NotFound {
		return nil, err
	}
	text := f.text()
	switch {
	case f.Exists != nil && !*f.Exists && is:
		return []string{f.Path + " is there"}, nil
	case f.Exists != nil && !*f.Exists:
		return nil, nil
	case !is:
		return []string{f.Path + " is not there"}, nil
	case text == (Text{}):
		return nil, nil
	case info.Dir:
		return []string{f.Path + " is a directory"}, nil
	}
	body, err := agent.Download(ctx, info.Path)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	judges := text.judges()
	defer judges.close()
	if _, err := io.Copy(judges.stream(), body); err != nil {
		return nil, berm.Errorf(berm.Unavailable, "reading %s: %w", f.Path, err)
	}
	return judges.unmet(f.Path), nil
}

// judge runs a command of a check.
func (a *attempt) judge(ctx context.Context, c Check, done *Checked) (failed []string, err error) {
	if err := a.put(ctx, c.User, c.Put); err != nil {
		return nil, err
	}
	command := timedCommand{client.Command{Path: c.Command[0], Args: c.Command[1:], Env: c.Env, Dir: c.Dir}, c.Timeout}
	if c.Dir == "" {
		command.Dir = a.job.Dir
	}
	var output kept
	output.limit = a.r.OutputLimit
	end, err := a.command(ctx, c.User, command, &output, &output)
	done.Output = output.String()
	switch {
	case isTimeout(err):
		return []string{fmt.Sprintf("%s: ran for longer than %v", c.name(), c.Timeout.limit())}, nil
	case err != nil:
		return nil, err
	case end.ExitCode() != 0:
		return []string{fmt.Sprintf("%s: the exit code is %d", c.name(), end.ExitCode())}, nil
	}
	return nil, nil
}
