package faults

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

// waiting waits until n sandboxes of a pool are there.
func waiting(t *testing.T, s *harness.Server, n int) {
	t.Helper()
	last := ""
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		request, err := http.NewRequest(http.MethodGet, s.URL+"/metrics", nil)
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("X-API-Key", s.Key)
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if strings.HasPrefix(line, "berm_pool_waiting{") {
				last = strings.TrimSpace(line)
			}
		}
		if strings.HasSuffix(last, fmt.Sprintf(" %d", n)) {
			return
		}
	}
	t.Fatalf("%q, want %d\n%s", last, n, s.Log())
}

// held names the sandboxes that a server's data directory has.
func held(t *testing.T, s *harness.Server) (ids []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(s.Data, "sandboxes"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		ids = append(ids, e.Name())
	}
	return ids
}

// What was made in advance is as if it had been made for whoever gets it, and nobody's before; of
// a server that died nothing waits any more.
func TestPool(t *testing.T) {
	harness.Slow(t)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	s := harness.Serve(t, "--pool", "base=3")
	waiting(t, s, 3)
	const identity = `hostname; cat /etc/hostname /etc/machine-id /proc/sys/kernel/random/boot_id; grep -v localhost /etc/hosts`
	seen := map[string]int{}
	var left string
	for i := range 3 {
		made := held(t, s)
		sandbox, err := s.Create(ctx, time.Minute, map[string]any{
			"envVars": map[string]string{"WHO": fmt.Sprint(i)}, "metadata": map[string]string{"who": fmt.Sprint(i)},
		})
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(strings.Join(made, " "), sandbox.ID) {
			t.Errorf("%s was not made in advance", sandbox.ID)
		}
		out := run(t, ctx, sandbox, "user", identity+`; echo "WHO=$WHO $E2B_SANDBOX_ID"; ls -A /tmp; ps -e --no-headers | wc -l`)
		lines := strings.Split(strings.TrimSpace(out.Stdout), "\n")
		if lines[0] != sandbox.ID || lines[1] != sandbox.ID || !strings.Contains(out.Stdout, fmt.Sprintf("WHO=%d %s\n", i, sandbox.ID)) {
			t.Errorf("%s", out.Stdout)
		}
		for _, line := range lines[:4] {
			seen[line]++
		}
		run(t, ctx, sandbox, "root", "echo mine >/tmp/mine; hostname changed")
		if err := sandbox.Kill(ctx); err != nil {
			t.Fatal(err)
		}
		left = sandbox.ID
		waiting(t, s, 3)
	}
	// Name, twice in each, machine id and boot id, of three.
	if len(seen) != 9 {
		t.Errorf("identities are shared: %v", seen)
	}
	if strings.Contains(strings.Join(held(t, s), " "), left) {
		t.Errorf("%s is used again", left)
	}
	// One with another policy than the server's own, from the pool, reaches nothing before it has it.
	deny, err := s.Create(ctx, time.Minute, map[string]any{"allow_internet_access": false})
	if err != nil {
		t.Fatal(err)
	}
	if out := run(t, ctx, deny, "user", "getent hosts example.com >/dev/null && echo reached; true"); out.Stdout != "" {
		t.Errorf("%q", out.Stdout)
	}
	waiting(t, s, 3)
	before := held(t, s)
	s.Crash()
	if err := s.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	waiting(t, s, 3)
	after := held(t, s)
	if len(after) != 4 {
		t.Errorf("%v", after)
	}
	for _, id := range before {
		if survives := strings.Contains(strings.Join(after, " "), id); survives != (id == deny.ID) {
			t.Errorf("%s survives: %v", id, survives)
		}
	}
	if out := run(t, ctx, deny, "user", "echo lives"); out.Stdout != "lives\n" {
		t.Errorf("%q", out.Stdout)
	}
	if err := deny.Kill(ctx); err != nil {
		t.Error(err)
	}
}
