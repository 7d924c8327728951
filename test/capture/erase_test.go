package capture

import (
	"bytes"
	"context"
	"io/fs"
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

// A sandbox that was erased has left nothing in the data directory that tells what it did; another
// one is there as it was, and the log verifies and says who erased what.
func TestErase(t *testing.T) {
	harness.Slow(t)
	t.Parallel() // it waits for two minutes
	s := harness.Serve(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	var ids []string
	for _, word := range []string{"canary-gone", "canary-stays"} {
		box, err := s.Create(ctx, time.Minute, map[string]any{"metadata": map[string]string{"of": word}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := box.Run(ctx, harness.Shell("root", "echo "+word+"-output; echo "+word+" >/srv/f; /bin/true "+word)); err != nil {
			t.Fatal(err)
		}
		if err := box.Kill(ctx); err != nil {
			t.Fatal(err)
		}
		records(t, s, box.ID, 1, audit.SandboxExit)
		ids = append(ids, box.ID)
	}
	key := s.Key
	berm := func(args ...string) (string, error) {
		binary, err := harness.Binary()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(ctx, binary, args...)
		cmd.Env = append(os.Environ(), "E2B_API_URL="+s.URL, "E2B_API_KEY="+key)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := berm("audit", "erase", ids[0], "--reason", "request 31"); err == nil || !strings.Contains(out, "berm key create --erase") {
		t.Fatalf("with an ordinary key: %v: %s", err, out)
	}
	secret, err := berm("key", "create", "--erase", "--data", s.Data)
	if err != nil {
		t.Fatal(secret)
	}
	key = strings.TrimSpace(secret)
	if out, err := berm("audit", "hold", "add", ids[0], "--reason", "case", "--data", s.Data); err != nil {
		t.Fatal(out)
	}
	if out, err := berm("audit", "erase", ids[0], "--reason", "request 31"); err == nil || !strings.Contains(out, "is held") {
		t.Fatalf("while it is held: %v: %s", err, out)
	}
	if out, err := berm("audit", "hold", "remove", ids[0], "--reason", "case", "--data", s.Data); err != nil {
		t.Fatal(out)
	}
	if holding(t, s.Data, "canary-gone") == "" {
		t.Fatal("the word is nowhere before either")
	}
	for {
		out, err := berm("audit", "erase", ids[0], "--reason", "request 31")
		if err == nil {
			break
		}
		if !strings.Contains(out, "try again in") {
			t.Fatal(out)
		}
		time.Sleep(5 * time.Second)
	}
	if where := holding(t, s.Data, "canary-gone"); where != "" {
		t.Errorf("%s still has it", where)
	}
	if holding(t, s.Data, "canary-stays") == "" {
		t.Error("the other one is gone too")
	}
	if out, err := berm("replay", ids[0]); err != nil || !strings.Contains(out, "erased") || strings.Contains(out, "canary") {
		t.Errorf("replay: %v: %s", err, out)
	}
	if out, err := berm("audit", "verify", "--data", s.Data); err != nil || !strings.Contains(out, "of sandbox "+ids[0]+" were erased by key") || !strings.Contains(out, "nothing else was changed") {
		t.Errorf("verify: %v: %s", err, out)
	}
	if out, err := berm("replay", ids[1]); err != nil || !strings.Contains(out, "canary-stays") {
		t.Errorf("replay of the other one: %v: %s", err, out)
	}
}

// holding is the first file of a data directory, or of the log in it, that has a text.
func holding(t *testing.T, data, text string) (where string) {
	t.Helper()
	for line, err := range trail.Dir(filepath.Join(data, "audit")).Records(0) {
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(line.Raw, []byte(text)) {
			return "the log"
		}
	}
	err := filepath.WalkDir(data, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() || where != "" {
			return nil // it may be gone meanwhile
		}
		if info, err := e.Info(); err != nil || info.Size() > 64<<20 {
			return nil
		}
		content, err := os.ReadFile(path)
		if err == nil && bytes.Contains(content, []byte(text)) {
			where = path
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return where
}
