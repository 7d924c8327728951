package probes

import (
	"context"
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

// fewLater are the probes of TestProbesLater that run each time: of files, kernel, identity and processes.
var fewLater = []string{"FS-01", "KN-06", "IL-01", "IL-03"}

// wholeLater says whether all probes run of what takes long: `make test-probes` asks for it.
var wholeLater = os.Getenv("BERM_TEST_PROBES") == "all"

// TestProbesLater runs probes at level gvisor in sandboxes that went on from memory: after a pause that
// gave it back, and as forks.
func TestProbesLater(t *testing.T) {
	harness.Slow(t)
	probes := gvisorProbes(t)
	if !wholeLater {
		probes = slices.DeleteFunc(probes, func(p Probe) bool { return !slices.Contains(fewLater, p.ID) })
		if len(probes) != len(fewLater) {
			t.Fatalf("%d probes, want %d", len(probes), len(fewLater))
		}
	}
	j := newJudge(t)
	s := newServer(t, j, "--level", "gvisor")
	for name, way := range map[string]func(context.Context, *harness.Sandbox) (*harness.Sandbox, error){"resumed": s.resumed, "forked": s.forked} {
		t.Run(name, func(t *testing.T) { j.each(t, laterServer{gvisorServer{s}, way}, probes, "root") })
	}
}

// laterServer is a server whose sandboxes have a past.
type laterServer struct {
	gvisorServer
	way func(context.Context, *harness.Sandbox) (*harness.Sandbox, error)
}

func (s laterServer) open(ctx context.Context, user string, lifetime time.Duration) (box, error) {
	sandbox, err := s.Create(ctx, lifetime, nil)
	if err == nil {
		sandbox, err = s.way(ctx, sandbox)
	}
	if err != nil {
		return nil, err
	}
	return serverBox{sandbox, user, lifetime}, nil
}

// resumed pauses a sandbox, whose memory is on the disk then, and has it go on.
func (s *server) resumed(ctx context.Context, sandbox *harness.Sandbox) (*harness.Sandbox, error) {
	path := "/sandboxes/" + sandbox.ID
	err := s.Call(ctx, "POST", path+"/pause", nil, nil)
	if err == nil {
		err = s.Call(ctx, "POST", path+"/connect", map[string]any{"timeout": 600}, nil)
	}
	return sandbox, err
}

// forked makes a fork of a sandbox and kills the sandbox.
func (s *server) forked(ctx context.Context, sandbox *harness.Sandbox) (*harness.Sandbox, error) {
	child, err := s.Fork(ctx, sandbox, 10*time.Minute)
	return child, errors.Join(err, sandbox.Kill(ctx))
}
