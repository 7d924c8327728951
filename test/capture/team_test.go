package capture

import (
	"context"
	"errors"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/test/harness"
)

// Records of a team's sandbox say so whoever makes them, also after a restart of the server, and are hidden from
// others; what is more than the team's limit goes by itself after the sandbox has ended.
func TestTeam(t *testing.T) {
	harness.Slow(t)
	s := harness.Serve(t)
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	berm := func(args ...string) string {
		t.Helper()
		binary, err := harness.Binary()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(ctx, binary, args...)
		cmd.Env = append(os.Environ(), "E2B_API_URL="+s.URL, "E2B_API_KEY="+s.Key)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
		return string(out)
	}
	berm("team", "create", "blue", "--audit-limit", "1KiB", "--data", s.Data)
	own := s.Key
	blue := strings.TrimSpace(berm("key", "create", "--team", "blue", "--data", s.Data))
	s.Key = blue
	box, err := s.Create(ctx, 5*time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	run := func() {
		t.Helper()
		if _, err := box.Run(ctx, harness.Shell("root", "echo canary-output; echo canary >>/srv/f; /bin/true canary; (exec 3<>/dev/tcp/169.254.169.254/80) 2>/dev/null || true")); err != nil {
			t.Fatal(err)
		}
	}
	run()
	s.Key = own // which a server is started with
	if err := errors.Join(s.Stop(ctx), s.Restart(ctx)); err != nil {
		t.Fatal(err)
	}
	s.Key = blue
	run()
	if err := box.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	records(t, s, box.ID, 1, audit.SandboxExit)
	sources := map[string]int{}
	for line, err := range trail.Dir(filepath.Join(s.Data, "audit")).Records(0) {
		if err != nil {
			t.Fatal(err)
		}
		if string(line.Sandbox) != box.ID {
			continue
		}
		if sources[line.Src]++; line.Team != "blue" {
			t.Errorf("no record of the team: %s", line.Raw)
		}
	}
	t.Logf("records by source: %v", sources)
	for _, want := range []string{"control", "router", "layer"} {
		if sources[want] == 0 {
			t.Errorf("no record of %s: %v", want, sources)
		}
	}
	s.Key = own
	var status *harness.StatusError
	if err := s.Call(ctx, "GET", "/berm/v1/sandboxes/"+box.ID+"/audit", nil, nil); !errors.As(err, &status) || status.Status != http.StatusNotFound {
		t.Errorf("the server's own key: %v", err)
	}
	if text := berm("audit", "--json"); strings.Contains(text, box.ID) || !strings.Contains(text, "server.start") {
		t.Errorf("the server's own key sees %s", text)
	}
	s.Key = blue
	if text := berm("audit", "--json", "--type", "exec.start,server"); strings.Count(text, box.ID) < 2 || strings.Contains(text, "server.start") {
		t.Errorf("the team's key sees %s", text)
	}
	for holding(t, s.Data, "canary") != "" {
		if ctx.Err() != nil {
			t.Fatalf("%s still has it", holding(t, s.Data, "canary"))
		}
		time.Sleep(2 * time.Second)
	}
	if text := berm("audit", "verify", "--data", s.Data); !strings.Contains(text, "of sandbox "+box.ID+" were erased by system: team blue keeps 1024 bytes of records") || !strings.Contains(text, "nothing else was changed") {
		t.Errorf("verify: %s", text)
	}
	if text := berm("audit", "--type", "sandbox,audit.erase"); !strings.Contains(text, "team blue keeps 1024 bytes of records") || strings.Contains(text, "sandbox.create") {
		t.Errorf("the team's key sees %s", text)
	}
}
