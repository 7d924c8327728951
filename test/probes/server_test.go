package probes

import (
	"context"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

// TestProbes runs every probe in a sandbox of its own of a server, as user and as root
// inside, in random order.
func TestProbes(t *testing.T) {
	harness.Slow(t)
	probes, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	probes = slices.DeleteFunc(probes, func(p Probe) bool { return !slices.Contains(p.Where, "server") || len(p.Needs) > 0 })
	seed := mathrand.Uint64()
	t.Logf("order: seed %d", seed)
	mathrand.New(mathrand.NewPCG(seed, 0)).Shuffle(len(probes), func(i, j int) { probes[i], probes[j] = probes[j], probes[i] })

	j := newJudge(t)
	s := newServer(t, j)
	j.test(t, s)
	j.each(t, s, probes, "user", "root")
}

// server is a venue: the sandboxes of a real server.
type server struct {
	*harness.Server
	sibling *harness.Sandbox
}

func newServer(t *testing.T, j *judge) *server {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	s := &server{Server: harness.Serve(t)}
	var err error
	if s.sibling, err = s.Create(ctx, time.Hour, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.sibling.Write(ctx, "user", "sibling", strings.NewReader(j.token("file of another sandbox"))); err != nil {
		t.Fatal(err)
	}
	// The first sandbox of a server may load what later ones share.
	warm, err := s.Create(ctx, time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := warm.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *server) look() harness.Host { return harness.Look(s.Server) }

func (s *server) open(ctx context.Context, user string, lifetime time.Duration) (box, error) {
	sandbox, err := s.Create(ctx, lifetime, nil)
	if err != nil {
		return nil, err
	}
	return serverBox{sandbox, user, lifetime}, nil
}

// watch lets a neighbour answer again and again while a probe does harm, and looks at how
// the server grows.
func (s *server) watch(ctx context.Context, abuse bool) (harm func() string) {
	pid, rss := s.PID(), harness.RSS(s.PID())
	slowest := func() (time.Duration, error) { return 0, nil }
	if abuse {
		slowest = answer(ctx, s.sibling)
	}
	return func() string {
		waited, err := slowest()
		grown := harness.RSS(pid) - rss
		switch {
		case !s.Alive():
			return "the server died:\n" + s.Log()
		case err != nil:
			return "the neighbour: " + err.Error()
		case waited > 5*time.Second:
			return fmt.Sprintf("the neighbour waited %v", waited)
		case grown > 128<<20:
			return fmt.Sprintf("the server grew by %d MiB", grown>>20)
		}
		return ""
	}
}

// serverBox is a box: a sandbox of the server.
type serverBox struct {
	*harness.Sandbox
	user     string
	lifetime time.Duration
}

func (b serverBox) run(ctx context.Context, kind, script string, env map[string]string) (output, status string, err error) {
	path, interpreter := "/tmp/probe.sh", "/bin/bash"
	if kind == "py" {
		path, interpreter = "/tmp/probe.py", "/usr/bin/python3"
	}
	if err := b.Write(ctx, b.user, path, strings.NewReader(script)); err != nil {
		return "", "", err
	}
	result, err := b.Run(ctx, harness.Command{
		User: b.user, Path: interpreter, Args: []string{path}, Env: env, Timeout: b.lifetime - time.Minute,
	})
	return result.Stdout + result.Stderr, result.Status, err
}

func (b serverBox) kill(ctx context.Context) error { return b.Kill(ctx) }

// answer lets a sandbox answer again and again, until the function it returns is
// called, which reports the slowest answer.
func answer(ctx context.Context, sandbox *harness.Sandbox) func() (time.Duration, error) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	var slowest time.Duration
	var failed error
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			start := time.Now()
			result, err := sandbox.Run(ctx, harness.Shell("user", "echo ok"))
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				failed = errors.Join(failed, err)
				return
			case result.Stdout != "ok\n":
				failed = errors.Join(failed, fmt.Errorf("answered %+v", result))
				return
			}
			slowest = max(slowest, time.Since(start))
			time.Sleep(200 * time.Millisecond)
		}
	}()
	return func() (time.Duration, error) {
		cancel()
		<-done
		return slowest, failed
	}
}
