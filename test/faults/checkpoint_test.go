package faults

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

// saved is a snapshot as a server lists it.
type saved struct {
	ID   string `json:"snapshotID"`
	Berm struct {
		Checkpoint string
		Size       int64
	}
}

func snapshots(ctx context.Context, t *testing.T, s *harness.Server, of string) (all []saved) {
	t.Helper()
	if err := s.Call(ctx, "GET", "/snapshots?sandboxID="+of, nil, &all); err != nil {
		t.Fatal(err)
	}
	return all
}

// Before each command a sandbox is saved, unless it did not change, and can be brought back there
// by a server that was killed since.
func TestCheckpoints(t *testing.T) {
	harness.Slow(t)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s := harness.Serve(t)
	sandbox, err := s.Create(ctx, time.Minute, map[string]any{"berm": map[string]any{"checkpoints": map[string]any{"exec": true, "keep": 3}}})
	if err != nil {
		t.Fatal(err)
	}
	sh := func(script string) string {
		t.Helper()
		out, err := sandbox.Run(ctx, harness.Shell("user", script))
		if err != nil {
			t.Fatal(err)
		}
		return out.Stdout
	}
	for i := range 5 {
		sh(fmt.Sprintf("echo %d >state", i))
	}
	sh("true") // saved before: what the last one wrote
	for range 3 {
		sh("cat state /etc/passwd; ls -lR /home /etc")
	}
	all := snapshots(ctx, t, s, sandbox.ID)
	if len(all) != 3 || all[0].Berm.Checkpoint != "exec" || all[0].Berm.Size == 0 {
		t.Fatalf("%+v", all)
	}
	s.Crash()
	if err := s.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	if got := snapshots(ctx, t, s, sandbox.ID); len(got) != 3 || got[0] != all[0] {
		t.Errorf("after a restart: %+v", got)
	}
	sh("true")
	if got := snapshots(ctx, t, s, sandbox.ID); len(got) != 3 || got[0] != all[0] {
		t.Errorf("nothing was written, and now there are %+v", got)
	}
	// The newest is of after the last write, the one before of before it.
	for i, want := range []string{"4\n", "3\n"} {
		if err := s.Call(ctx, "POST", "/berm/v1/sandboxes/"+sandbox.ID+"/rollback", map[string]any{"snapshot": all[i].ID}, nil); err != nil {
			t.Fatal(err)
		}
		if got := sh("cat state"); got != want {
			t.Errorf("checkpoint %d has %q", i, got)
		}
	}
}
