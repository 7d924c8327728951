package faults

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/test/harness"
)

// waiting waits until n sandboxes of a pool are there.
func waiting(t *testing.T, s *harness.Server, n int) {
	t.Helper()
	last := ""
	for end := time.Now().Add(2 * time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
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

// starting is a copy of the templates with one more, named "starts", whose server draws a number when
// it begins and tells it with a variable of its own.
func starting(t *testing.T) string {
	t.Helper()
	const of = "/var/cache/berm/templates"
	dir := filepath.Join(t.TempDir(), "templates")
	copied := exec.Command("/bin/sh", "-ec", `mkdir -m 700 "$1" && cd "$2" && cp -a *.json "$1"
		cp -al layers "$1" 2>/dev/null || cp -a layers "$1"`, "copy", dir, of)
	if out, err := copied.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var template map[string]any
		if err := json.Unmarshal(text, &template); err != nil {
			t.Fatal(err)
		}
		if names, _ := template["names"].([]any); len(names) == 0 || names[0] != "base" {
			continue
		}
		build := berm.NewUUID()
		template["id"], template["buildID"], template["names"] = berm.NewTemplateID(), build, []string{"starts"}
		template["start"] = `exec python3 -c '
import http.server, os, secrets
drawn = secrets.token_hex(8)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write((drawn + " " + os.environ.get("MINE", "none")).encode())
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
'`
		template["ready"] = "curl -sf http://127.0.0.1:8000/"
		if text, err = json.Marshal(template); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, build+".json"), text, 0o600); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	t.Fatal("there is no template base")
	return ""
}

// What a template starts is ready while its sandboxes wait, in each of them anew or from one memory;
// whoever takes one gets it as theirs alone, and nothing is left of those of a server that died.
func TestPoolStarts(t *testing.T) {
	harness.Slow(t)
	templates := starting(t)
	for _, level := range []string{"namespace", "gvisor"} {
		t.Run(level, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
			defer cancel()
			s := harness.Serve(t, "--templates", templates, "--level", level, "--pool", "starts=2")
			waiting(t, s, 2)
			seen := map[string]bool{}
			for i := range 2 {
				made := held(t, s)
				sandbox, err := s.Create(ctx, time.Minute, map[string]any{
					"templateID": "starts", "envVars": map[string]string{"MINE": "mine"}, "allow_internet_access": i == 0,
				})
				if err != nil {
					t.Fatal(err)
				}
				if !strings.Contains(strings.Join(made, " "), sandbox.ID) {
					t.Errorf("%s was not made in advance", sandbox.ID)
				}
				out := run(t, ctx, sandbox, "user", `curl -s http://127.0.0.1:8000/ && echo " $MINE"
					cat /etc/hostname /etc/machine-id /proc/sys/kernel/random/boot_id; head -c 16 /dev/urandom | od -An -tx1; echo "$E2B_SANDBOX_ID"`)
				lines := strings.Split(strings.TrimSpace(out.Stdout), "\n")
				if len(lines) != 6 || lines[1] != sandbox.ID || lines[5] != sandbox.ID {
					t.Fatalf("%q", out.Stdout)
				}
				drawn, ok := strings.CutSuffix(lines[0], " none mine")
				if !ok {
					t.Errorf("what was started, and what is run, see as MINE: %q", lines[0])
				}
				if level == "gvisor" {
					drawn = fmt.Sprint(drawn, i) // of one memory
				}
				for _, word := range append(lines[1:5], drawn) {
					if seen[word] {
						t.Errorf("another one has %q", word)
					}
					seen[word] = true
				}
				if err := sandbox.Kill(ctx); err != nil {
					t.Fatal(err)
				}
				waiting(t, s, 2)
			}
			before := held(t, s)
			s.Crash()
			if err := s.Restart(ctx); err != nil {
				t.Fatal(err)
			}
			waiting(t, s, 2)
			after := strings.Join(held(t, s), " ")
			for _, id := range before {
				if strings.Contains(after, id) {
					t.Errorf("%s is kept", id)
				}
			}
			if made, err := os.ReadDir(filepath.Join(s.Data, "snapshots")); level == "gvisor" && (err != nil || len(made) != 1) {
				t.Errorf("%v, %v", made, err)
			}
		})
	}
}

// A server that is killed while it fills a pool leaves nothing of what nobody was told of.
func TestPoolCrash(t *testing.T) {
	harness.Slow(t)
	templates := starting(t)
	failing(t)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	s := harness.Serve(t, "--templates", templates, "--level", "namespace", "--pool", "starts=1")
	waiting(t, s, 1)
	for _, point := range []string{"control.pooled", "control.advanced"} {
		s.Crash()
		t.Setenv("BERM_FAILPOINTS", point+"=crash")
		_ = s.Restart(ctx) // it may have died before it answered
		for s.Alive() && ctx.Err() == nil {
			time.Sleep(5 * time.Millisecond)
		}
		s.Crash()
		before := held(t, s)
		if len(before) != 1 {
			t.Errorf("%s: %v while it died", point, before)
		}
		t.Setenv("BERM_FAILPOINTS", "")
		if err := s.Restart(ctx); err != nil {
			t.Fatal(err)
		}
		waiting(t, s, 1)
		if now := held(t, s); len(now) != 1 || now[0] == before[0] {
			t.Errorf("%s: %v, before %v", point, now, before)
		}
	}
}
