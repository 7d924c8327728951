package load

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

// batchRun is a berm batch with files of its own.
type batchRun struct {
	t       *testing.T
	server  *harness.Server
	ctx     context.Context
	dir     string
	results string
}

// newBatch writes n jobs, of which every tenth fails, every tenth brings something out, and all but
// those have little to do.
func newBatch(t *testing.T, n int) *batchRun {
	b := &batchRun{t: t, server: harness.Serve(t), dir: t.TempDir()}
	var cancel context.CancelFunc
	b.ctx, cancel = context.WithTimeout(t.Context(), 8*time.Minute)
	t.Cleanup(cancel)
	// The first sandbox fills what is kept for later ones.
	if err := cycle(b.ctx, b.server); err != nil {
		t.Fatal(err)
	}
	var jobs bytes.Buffer
	for i := range n {
		fmt.Fprintf(&jobs, `{"id":"job-%d","put":[{"content":"%d","to":"in"}],"command":"cat in > out; cat out","checks":[{"stdout":{"equals":"%d"}}`, i, i, i)
		switch i % 10 {
		case 3:
			jobs.WriteString(`,{"file":{"path":"none"}}]`)
		case 7:
			jobs.WriteString(`,{"command":"test $(cat out) = $(cat in)"}],"get":["out"]`)
		default:
			jobs.WriteString(`]`)
		}
		jobs.WriteString("}\n")
	}
	if err := os.WriteFile(filepath.Join(b.dir, "jobs.jsonl"), jobs.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	b.results = filepath.Join(b.dir, "jobs.results.jsonl")
	return b
}

func (b *batchRun) command(args ...string) *exec.Cmd {
	b.t.Helper()
	berm, err := harness.Binary()
	if err != nil {
		b.t.Fatal(err)
	}
	cmd := exec.CommandContext(b.ctx, berm, append(append([]string{"batch", "--json"}, args...), filepath.Join(b.dir, "jobs.jsonl"))...)
	cmd.Env = append(os.Environ(), "BERM_URL="+b.server.URL, "BERM_API_KEY="+b.server.Key, "HOME="+b.dir, "XDG_CONFIG_HOME="+b.dir)
	return cmd
}

// finish runs a batch to its end, and checks that each job has one result, the right one.
func (b *batchRun) finish(n int, args ...string) {
	b.t.Helper()
	cmd := b.command(args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		b.t.Fatal(err)
	}
	if code := cmd.ProcessState.ExitCode(); code != 3 { // some failed
		b.t.Fatalf("code %d, %s%s", code, &stdout, &stderr)
	}
	var told struct {
		Jobs, Passed, Failed, Errors, Left, Earlier int
		JobsPerSecond                               float64
	}
	if err := json.Unmarshal(stdout.Bytes(), &told); err != nil {
		b.t.Fatal(err)
	}
	b.t.Logf("%+v", told)
	if told.Jobs != n || told.Failed != n/10 || told.Passed != n-n/10 || told.Errors != 0 || told.Left != 0 {
		b.t.Errorf("%+v\n%s", told, &stderr)
	}
	seen := map[string]int{}
	for _, line := range b.lines() {
		var result struct{ Job, Outcome, Reason string }
		if err := json.Unmarshal([]byte(line), &result); err != nil {
			b.t.Fatal(err)
		}
		var i int
		if _, err := fmt.Sscanf(result.Job, "job-%d", &i); err != nil {
			b.t.Fatal(err)
		}
		seen[result.Job]++
		if want := map[bool]string{true: "failed none is not there", false: "passed "}[i%10 == 3]; result.Outcome+" "+result.Reason != want {
			b.t.Errorf("%s: %s %s", result.Job, result.Outcome, result.Reason)
		}
		text, err := os.ReadFile(filepath.Join(b.dir, "jobs.results", result.Job, "out"))
		if i%10 == 7 && (err != nil || string(text) != fmt.Sprint(i)) || i%10 != 7 && err == nil {
			b.t.Errorf("%s brought out %q, %v", result.Job, text, err)
		}
	}
	if len(seen) != n {
		b.t.Errorf("results of %d jobs", len(seen))
	}
	for job, times := range seen {
		if times != 1 {
			b.t.Errorf("%d results of %s", times, job)
		}
	}
}

// lines are the results that are there, in whole lines.
func (b *batchRun) lines() []string {
	text, _ := os.ReadFile(b.results)
	lines := strings.SplitAfter(string(text), "\n")
	return lines[min(1, len(lines)-1) : len(lines)-1]
}

func (b *batchRun) nothingLeft(before harness.Host) {
	b.t.Helper()
	if left := before.Settle(b.server, 30*time.Second); len(left) > 0 {
		b.t.Errorf("left behind:\n%s", strings.Join(left, "\n"))
	}
}

func TestBatch(t *testing.T) {
	harness.Slow(t)
	b := newBatch(t, 300)
	before := harness.Look(b.server)
	b.finish(300)
	b.nothingLeft(before)
}

// TestBatchKilled ends a batch with SIGKILL, several times, and has it go on.
func TestBatchKilled(t *testing.T) {
	harness.Slow(t)
	const jobs, kills = 60, 4
	b := newBatch(t, jobs)
	before := harness.Look(b.server)
	for kill := 1; kill <= kills; kill++ {
		cmd := b.command("--resume")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for want := kill * jobs / (kills + 2); len(b.lines()) < want; time.Sleep(time.Millisecond) {
			if b.ctx.Err() != nil {
				t.Fatalf("%d results, waited for %d", len(b.lines()), want)
			}
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	if n := len(b.lines()); n >= jobs {
		t.Fatalf("%d results before the last run", n)
	}
	b.finish(jobs, "--resume")
	b.nothingLeft(before)
}
