package probes

import (
	"context"
	"errors"
	"fmt"
	"maps"
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

// gvisorsOwn are probes that look at what the host's kernel answers. At level gvisor another one
// does, of whose own things it may do as it likes: there all that was not printed is judged.
var gvisorsOwn = map[string]string{
	"FS-05": "it makes handles, of files of the sandbox",
	"FS-08": "it has these calls, for mounts of its own",
	"FS-11": "it has /dev/fuse and /dev/net/tun, of its own",
	"FS-14": "root may set its own forwarding",
	"IL-08": "it shows the control group that it counts processes with",
	"KN-01": "it makes user namespaces, of its own",
	"KN-02": "it makes namespaces, of its own",
	"KN-05": "it has a keyring of the session, of its own",
	"KN-08": "it takes some privileged calls, for itself",
	"KN-12": "it has a kernel log of its own",
	"KN-16": "it has netlink, for its own network",
	"KN-19": "it has filters, for its own system calls",
	"PS-03": "it hangs up on a group of stopped processes",
	"RS-07": "its limit of descriptors is above what memory lasts for",
	"TT-01": "it knows no input of this kind, and says so",
	"TT-02": "it knows no input of this kind, and says so",
}

// notAtGVisor are probes that cannot be judged there, and why.
var notAtGVisor = map[string]string{
	"KN-11": "it takes longer than its time",
	"RS-06": "the disk, full of inodes, took 3.7 s to kill on a busy machine",
	"RS-12": "the sandbox ends as a whole before it is killed",
}

// TestProbesGVisor runs them at level gvisor, as root inside.
func TestProbesGVisor(t *testing.T) {
	harness.Slow(t)
	j := newJudge(t)
	s := newServer(t, j, "--level", "gvisor")
	j.each(t, gvisorServer{s}, gvisorProbes(t), "root")
}

// gvisorProbes are the probes without a network, as they are judged at that level.
func gvisorProbes(t *testing.T) []Probe {
	t.Helper()
	probes, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	probes = slices.DeleteFunc(probes, func(p Probe) bool {
		return !slices.Contains(p.Where, "server") || len(p.Needs) > 0 || notAtGVisor[p.ID] != ""
	})
	for i := range probes {
		if gvisorsOwn[probes[i].ID] != "" {
			probes[i].Escaped, probes[i].Safe = nil, nil
		}
	}
	return probes
}

// gvisorServer is a server whose sandboxes are gVisor's. Its kernel starts and ends processes of
// the host at any time, also in a sandbox that does nothing; one that is left keeps the control group
// that it is in, which is looked at.
type gvisorServer struct{ *server }

func (s gvisorServer) look() harness.Host {
	host := s.server.look()
	maps.DeleteFunc(host, func(name, value string) bool {
		return strings.HasPrefix(name, "process ") && value == "(exe)" || strings.HasPrefix(name, "namespace ")
	})
	return host
}

// server is a venue: the sandboxes of a real server.
type server struct {
	*harness.Server
	sibling *harness.Sandbox
}

func newServer(t *testing.T, j *judge, args ...string) *server {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	s := &server{Server: harness.Serve(t, args...)}
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
		case waited > 15*time.Second:
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
