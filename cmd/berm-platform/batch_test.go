package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/internal/batch"
	"github.com/berm-sandbox/berm/internal/client"
)

func writeJobs(t *testing.T, jobs string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "jobs.yaml")
	if err := os.WriteFile(path, []byte("version: 1\njobs:\n"+jobs), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func readResults(t *testing.T, path string) (all []batch.Result) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var r batch.Result
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatal(err)
		}
		if r.Job != "" {
			all = append(all, r)
		}
	}
	return all
}

func TestBatch(t *testing.T) {
	s := newSetup(t)
	policy := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(policy, []byte("version: 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	good := writeJobs(t, "- {id: a, command: echo hi, policy: "+policy+", get: [x], put: [{content: y, to: x}]}\n- {id: b, command: 'true'}\n")
	r := s.run("batch", good)
	if r.code != 0 || !strings.Contains(r.stdout, "2 jobs: 2 passed, 0 failed, 0 could not be run, 0 left;") {
		t.Errorf("all pass: %+v", r)
	}
	results := strings.TrimSuffix(good, ".yaml") + ".results.jsonl"
	if got := readResults(t, results); len(got) != 2 || got[0].Outcome != batch.Passed {
		t.Errorf("results: %+v", got)
	}
	if text, err := os.ReadFile(strings.TrimSuffix(good, ".yaml") + ".results/a/x"); err != nil || string(text) != "y" {
		t.Errorf("what was brought out: %q, %v", text, err)
	}
	if r := s.run("batch", good); r.code != 1 || !strings.Contains(r.stderr, "hint: --resume") {
		t.Errorf("a second time: %+v", r)
	}
	if r := s.run("batch", "--resume", "--json", good); r.code != 0 || !strings.Contains(r.stdout, `"earlier": 2`) {
		t.Errorf("resumed with nothing left: %+v", r)
	}
	bad := writeJobs(t, "- {id: a, command: 'false'}\n- {id: b, command: 'true'}\n")
	if r := s.run("batch", bad); r.code != exitJobsFailed || !strings.Contains(r.stderr, "berm: failed a: the exit code is 1, not 0") {
		t.Errorf("one fails: %+v", r)
	}
	none := writeJobs(t, "- {id: a, command: 'false'}\n- {id: b, command: 'true', template: none}\n")
	if r := s.run("batch", none); r.code != 1 || !strings.Contains(r.stderr, "error b: the sandbox cannot be made: template 'none' not found") {
		t.Errorf("one cannot be run: %+v", r)
	}
	if r := s.run("batch", writeJobs(t, "- {id: a, comand: x}\n")); r.code != 1 || !strings.Contains(r.stderr, `jobs.yaml:3: unknown key "comand" in a job`) || !strings.Contains(r.stderr, "hint: known are allow") {
		t.Errorf("a wrong file: %+v", r)
	}
	if r := s.run("batch", writeJobs(t, "- {id: a, command: x, put: [{from: none.txt}]}\n")); r.code != 1 || !strings.Contains(r.stderr, "jobs.yaml:3: job a: stat ") {
		t.Errorf("a file that is missing: %+v", r)
	}
	if r := s.run("batch", writeJobs(t, "- {id: a, command: x, allow: ['a b']}\n")); r.code != 1 || !strings.Contains(r.stderr, "jobs.yaml:3: job a: ") {
		t.Errorf("a wrong host: %+v", r)
	}
	for _, args := range [][]string{{"-j", "0", good}, {"-"}, {"--retries", "-1", good}} {
		if r := s.run(append([]string{"batch"}, args...)...); r.code != 2 {
			t.Errorf("%q: %+v", args, r)
		}
	}
	if r := s.runWith(`{"id":"a","command":"true"}`, "batch", "-", "-o", filepath.Join(t.TempDir(), "r.jsonl")); r.code != 0 {
		t.Errorf("from stdin: %+v", r)
	}
	if r := s.run("batch", "schema"); r.code != 0 || !json.Valid([]byte(r.stdout)) {
		t.Errorf("schema: %+v", r)
	}
	s.env = append(s.env, "BERM_URL=http://127.0.0.1:1")
	down := writeJobs(t, "- {id: a, command: 'true'}\n")
	if r := s.run("batch", down); r.code != 1 || !strings.Contains(r.stderr, "No server listens there") {
		t.Errorf("without a server: %+v", r)
	}
}

// batchJobs are jobs that wait for the file "go" in the home of the sandboxes, and say that they run.
func batchJobs(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "- {id: 'j%d', command: 'echo x >> runs%d; until test -e go; do sleep 0.01; done'}\n", i, i)
	}
	return b.String()
}

// waitFor waits until something holds.
func waitFor(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited a minute for %s", what)
		}
	}
}

func (s *setup) sandboxes() (all []client.Sandbox) {
	s.t.Helper()
	if err := s.server.Client(s.t).List(s.t.Context(), client.Filter{}, func(b client.Sandbox) bool {
		all = append(all, b)
		return true
	}); err != nil {
		s.t.Fatal(err)
	}
	return all
}

// Killed at any time a batch goes on where it was: each job has one result, and no sandbox is left.
func TestBatchKilled(t *testing.T) {
	s := newSetup(t)
	file := writeJobs(t, "- {id: before, command: echo x >> runsbefore}\n"+batchJobs(6))
	other := s.server.Add(client.Sandbox{Metadata: map[string]string{"berm.batch": "another"}})
	results := strings.TrimSuffix(file, ".yaml") + ".results.jsonl"
	first := s.command("batch", "-j", "3", file)
	if err := first.Start(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the first result and three running jobs", func() bool {
		text, _ := os.ReadFile(results)
		return s.server.Started.Load() >= 4 && strings.Count(string(text), "\n") == 2
	})
	if r := s.run("batch", "--resume", file); r.code != 1 || !strings.Contains(r.stderr, "another batch writes") {
		t.Errorf("a second one beside it: %+v", r)
	}
	if err := first.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = first.Wait()
	orphans := len(s.sandboxes()) - 1
	if orphans != 3 {
		t.Errorf("%d sandboxes were left", orphans)
	}
	if err := os.WriteFile(filepath.Join(s.server.Home, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r := s.run("batch", "--resume", file)
	if r.code != 0 || !strings.Contains(r.stderr, "killed 3 sandboxes that were left") || !strings.Contains(r.stdout, "7 jobs: 7 passed") || !strings.Contains(r.stdout, "1 of them earlier") {
		t.Errorf("resumed: %+v", r)
	}
	seen := map[string]int{}
	for _, result := range readResults(t, results) {
		seen[result.Job]++
	}
	for job, n := range seen {
		if n != 1 {
			t.Errorf("%d results of %s", n, job)
		}
	}
	if len(seen) != 7 {
		t.Errorf("results of %d jobs", len(seen))
	}
	if text, err := os.ReadFile(filepath.Join(s.server.Home, "runsbefore")); err != nil || string(text) != "x\n" {
		t.Errorf("what was done was done again: %q, %v", text, err)
	}
	if left := s.sandboxes(); len(left) != 1 || left[0].ID != other.ID {
		t.Errorf("left are %+v", left)
	}
}

// lockedBuffer is read while a command writes to it.
type lockedBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer // not embedded: it has a ReadFrom, without the lock
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

func TestBatchInterrupted(t *testing.T) {
	for _, twice := range []bool{false, true} {
		s := newSetup(t)
		file := writeJobs(t, batchJobs(4))
		cmd := s.command("batch", "-j", "2", file)
		var stdout, stderr lockedBuffer
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		waitFor(t, "two running jobs", func() bool { return s.server.Started.Load() == 2 })
		interrupt := func(said string) {
			t.Helper()
			if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
				t.Fatal(err)
			}
			waitFor(t, said, func() bool { return strings.Contains(stderr.String(), said) })
		}
		interrupt("no further job begins; 2 run on")
		want := "2 passed, 0 failed, 0 could not be run, 2 left"
		if twice {
			interrupt("killing the jobs that run")
			want = "0 passed, 0 failed, 0 could not be run, 4 left"
		} else if err := os.WriteFile(filepath.Join(s.server.Home, "go"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != 130 || !strings.Contains(stdout.String(), want) {
			t.Errorf("twice %v: code %d, %s%s", twice, code, stdout.String(), stderr.String())
		}
		if left := s.sandboxes(); len(left) != 0 {
			t.Errorf("left are %+v", left)
		}
	}
}

// A copy of the results of a batch that runs takes nothing away from it.
func TestBatchCopied(t *testing.T) {
	s := newSetup(t)
	file := writeJobs(t, batchJobs(2))
	results := strings.TrimSuffix(file, ".yaml") + ".results.jsonl"
	first := s.command("batch", file)
	if err := first.Start(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "two running jobs", func() bool { return s.server.Started.Load() == 2 })
	living := s.sandboxes()
	text, err := os.ReadFile(results)
	if err != nil {
		t.Fatal(err)
	}
	copied := filepath.Join(filepath.Dir(file), "copy.jsonl")
	if err := os.WriteFile(copied, text, 0o600); err != nil {
		t.Fatal(err)
	}
	// Of jobs that are not these, and of these.
	none := writeJobs(t, "- {id: other, command: 'true'}\n")
	if r := s.run("batch", "--resume", "-o", copied, none); r.code != 1 || !strings.Contains(r.stderr, "has results of other jobs") || !strings.Contains(r.stderr, "hint: --results") {
		t.Errorf("another file: %+v", r)
	}
	second := s.command("batch", "--resume", "-o", copied, file)
	var stderr lockedBuffer
	second.Stderr = &stderr
	if err := second.Start(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "four running jobs", func() bool { return s.server.Started.Load() == 4 })
	now := s.sandboxes()
	for _, b := range living {
		if !slices.ContainsFunc(now, func(is client.Sandbox) bool { return is.ID == b.ID }) {
			t.Errorf("%s was killed", b.ID)
		}
	}
	if err := os.WriteFile(filepath.Join(s.server.Home, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(first.Wait(), second.Wait()); err != nil || !strings.Contains(stderr.String(), "copy.jsonl is a copy") {
		t.Errorf("both: %v, %s", err, stderr.String())
	}
	for _, path := range []string{results, copied} {
		for _, r := range readResults(t, path) {
			if r.Attempts != 1 || r.Outcome != batch.Passed {
				t.Errorf("%s: %+v", path, r)
			}
		}
	}
	if left := s.sandboxes(); len(left) != 0 {
		t.Errorf("left are %+v", left)
	}
}

// Nobody waits for the other end of a pipe.
func TestBatchPipes(t *testing.T) {
	s := newSetup(t)
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	good := writeJobs(t, "- {id: a, command: 'true'}\n")
	for name, args := range map[string][]string{
		"FILE": {fifo}, "the results": {"-o", fifo, good}, "results that are a device": {"-o", "/dev/null", good},
		"what is put": {writeJobs(t, "- {id: a, command: 'true', put: [{from: "+fifo+", to: x}]}\n")},
	} {
		if r := s.run(append([]string{"batch"}, args...)...); r.code != 1 || !strings.Contains(r.stderr, "is no regular file") {
			t.Errorf("%s: %+v", name, r)
		}
	}
	if r := s.run("batch", "--resume", good); r.code != 0 || !strings.Contains(r.stderr, "jobs.results.jsonl has no results yet: all jobs are run") {
		t.Errorf("resumed without results: %+v", r)
	}
	// Jobs of stdin are waited for, until a signal.
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	defer r.Close()
	cmd := s.command("batch", "-", "-o", filepath.Join(t.TempDir(), "r.jsonl"))
	cmd.Stdin = r
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(make([]byte, 1<<20)); err != nil { // is read, so that it waits for more
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 130 {
		t.Errorf("a signal: code %d", code)
	}
}

// A second signal ends a batch also when a job cannot be ended, for which a file is one that was
// exchanged after it was looked at.
func TestBatchStuck(t *testing.T) {
	if os.Getenv("BERM_TEST_ALL") == "" {
		t.Skip("slow: set BERM_TEST_ALL=1")
	}
	s := newSetup(t)
	put := filepath.Join(t.TempDir(), "put")
	if err := os.WriteFile(put, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := s.command("batch", "-j", "1", writeJobs(t, batchJobs(1)+"- {id: stuck, command: 'true', put: [{from: "+put+", to: x}]}\n"))
	var stderr lockedBuffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the first job", func() bool { return s.server.Started.Load() == 1 })
	if err := errors.Join(os.Remove(put), syscall.Mkfifo(put, 0o600), os.WriteFile(filepath.Join(s.server.Home, "go"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the second job", func() bool {
		all := s.sandboxes()
		return len(all) == 1 && all[0].Metadata["berm.job"] == "stuck"
	})
	for _, said := range []string{"no further job begins", "killing the jobs that run"} {
		if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		waitFor(t, said, func() bool { return strings.Contains(stderr.String(), said) })
	}
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 1 || !strings.Contains(stderr.String(), "jobs did not end when they were killed") {
		t.Errorf("code %d: %s", code, stderr.String())
	}
	if left := s.sandboxes(); len(left) != 0 {
		t.Errorf("left are %+v", left)
	}
}

// What a batch shows on a terminal is no more than that.
func TestBatchProgress(t *testing.T) {
	var b bytes.Buffer
	p := &batchProgress{w: &b, r: &batch.Runner{}, all: 10, earlier: 2, began: time.Now()}
	p.show()
	p.say("failed a: %s", hostile)
	inert(t, b.String())
	if !strings.HasPrefix(b.String(), "berm: 2 of 12: 0 passed, 0 failed, 0 could not be run, 0 running\n") {
		t.Errorf("%q", b.String())
	}
}
