package control

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"time"

	"connectrpc.com/connect"

	"github.com/berm-sandbox/berm"
	pb "github.com/berm-sandbox/berm/internal/proto/process"
	"github.com/berm-sandbox/berm/internal/proto/process/processconnect"
)

const (
	// readyTime bounds how long a sandbox may take to be ready: E2B's clients give up a create
	// after a minute.
	readyTime = 50 * time.Second
	// readyEvery is how long a ready command that failed waits for its next try.
	readyEvery = 100 * time.Millisecond
	// maxEvent bounds one message of the guest agent, which is not trusted, in bytes.
	maxEvent = 1 << 20
)

// start begins what the template wants to run in each sandbox, which the agent lists under the
// tag "start", and returns when its ready command succeeds. Both run as the template's user, with
// the network of the sandbox and the variables of the template; their output is dropped. Unavailable:
// the start command failed before that, or the ready command did within readyTime.
func (s *session) start(ctx context.Context) error {
	t := s.snapshot().Base
	if !starts(t) {
		return nil
	}
	s.traceNow(ctx) // from its first process on
	return s.begins(ctx, t.Start, t.Ready)
}

// begins is start with the two commands, each "" for none.
func (s *session) begins(ctx context.Context, start, ready string) error {
	t := s.snapshot().Base
	ctx, cancel := context.WithTimeoutCause(ctx, readyTime, fmt.Errorf("not within %s", readyTime))
	defer cancel()
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return s.current().Dial(ctx, berm.AgentPort)
	}}
	agent := processconnect.NewProcessClient(&http.Client{Transport: transport}, "http://agent", connect.WithReadMaxBytes(maxEvent))
	failed := make(chan error, 1)
	if start != "" {
		began := make(chan struct{})
		// The agent ends a process at the deadline of its call: this one has none, and lives on
		// when the call is given up.
		call, leave := context.WithCancel(context.WithoutCancel(ctx))
		defer leave()
		go func() {
			err := s.shell(call, agent, start, "start", began)
			if err != nil {
				failed <- berm.Errorf(berm.Unavailable, "the start command of template '%s' failed: %w", t.Alias(), err)
			}
		}()
		select {
		case <-began:
		case err := <-failed:
			return err
		case <-ctx.Done():
			return berm.Errorf(berm.Unavailable, "the start command of template '%s' did not begin: %w", t.Alias(), context.Cause(ctx))
		}
	}
	for ready != "" {
		err := s.shell(ctx, agent, ready, "ready", nil)
		if err == nil {
			break
		}
		// The agent may come first with our deadline.
		if _, ended := errors.AsType[*endError](err); !ended && ctx.Err() == nil && connect.CodeOf(err) != connect.CodeDeadlineExceeded {
			return berm.Errorf(berm.Unavailable, "the ready command of template '%s' cannot be run: %w", t.Alias(), err)
		}
		select {
		case err := <-failed:
			return err
		case <-ctx.Done():
			return berm.Errorf(berm.Unavailable, "the sandbox is not ready: the ready command of template '%s' did not succeed: %w (%w)", t.Alias(), context.Cause(ctx), err).
				WithHint("see what it waits for in a sandbox of the same image that has no such command")
		case <-time.After(readyEvery):
		}
	}
	return nil
}

// templateEnv is what gives a command the variables that every sandbox of the template has, and no
// others: one that runs in the pool, or in a saved memory, for whoever comes cannot see theirs. env are
// those to set, and args the beginning of a command line that takes the others away.
func (s *session) templateEnv() (env map[string]string, args []string) {
	info := s.snapshot()
	own := map[string]string{}
	maps.Copy(own, info.Env)
	if s.online != nil {
		s.online.mu.Lock()
		maps.Copy(own, s.online.toldAgent.Placeholders)
		s.online.mu.Unlock()
	}
	for _, name := range slices.Sorted(maps.Keys(own)) {
		if value, ok := info.Base.Env[name]; ok {
			if env == nil {
				env = map[string]string{}
			}
			env[name] = value
		} else {
			args = append(args, "-u", name)
		}
	}
	if args != nil {
		args = append([]string{"/usr/bin/env"}, args...)
	}
	return env, args
}

// endError is a command's end that is no success, in the words of the guest agent.
type endError struct{ status string }

func (e *endError) Error() string { return fmt.Sprintf("%q", e.status) }

// shell runs a shell command to its end, whose error is how it failed. began, if there is one, is
// closed when it runs.
func (s *session) shell(ctx context.Context, agent processconnect.ProcessClient, command, tag string, began chan<- struct{}) error {
	noInput := false
	env, args := s.templateEnv()
	// As clients of E2B run commands, where there is a bash.
	script := `if [ -x /bin/bash ]; then exec "$@" /bin/bash -l -c "$0"; fi; exec "$@" /bin/sh -l -c "$0"`
	request := connect.NewRequest(&pb.StartRequest{
		Process: &pb.ProcessConfig{Cmd: "/bin/sh", Args: append([]string{"-c", script, command}, args...), Envs: env}, Tag: &tag, Stdin: &noInput,
	})
	if began != nil {
		request.Header().Set("Berm-Keep", "1") // the guest agent starts it again when something kills it
	}
	if info := s.snapshot(); info.Secure {
		request.Header().Set("X-Access-Token", s.m.token("access", info.ID))
	}
	events, err := agent.Start(ctx, request)
	if err != nil {
		return err
	}
	defer func() { _ = events.Close() }()
	for events.Receive() {
		event := events.Msg().GetEvent()
		if event.GetStart() != nil && began != nil {
			close(began)
			began = nil
		}
		if end := event.GetEnd(); end != nil {
			if end.GetExited() && end.GetExitCode() == 0 {
				return nil
			}
			return &endError{end.GetStatus()}
		}
	}
	if err := events.Err(); err != nil {
		return err
	}
	return errors.New("the guest agent does not tell how it ended")
}
