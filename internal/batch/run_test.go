package batch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/client/clienttest"
)

// rig runs jobs against a server of the test.
type rig struct {
	t      *testing.T
	server *clienttest.Server
	runner *Runner
	mu     sync.Mutex
	got    map[string]Result
}

func newRig(t *testing.T) *rig {
	r := &rig{t: t, server: clienttest.Start(t), got: map[string]Result{}}
	r.runner = &Runner{Client: r.server.Client(t), Batch: "b", Concurrency: 4, OutputLimit: 1 << 10, GetDir: t.TempDir()}
	return r
}

func (r *rig) add(result Result) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, twice := r.got[result.Job]; twice {
		r.t.Errorf("a second result of %s", result.Job)
	}
	r.got[result.Job] = result
	return nil
}

func (r *rig) jobs(jobs string) []Job {
	r.t.Helper()
	all, err := Parse("f", []byte("version: 1\njobs:\n"+jobs))
	if err != nil {
		r.t.Fatal(err)
	}
	for i := range all {
		if err := all[i].Resolve(r.t.TempDir()); err != nil {
			r.t.Fatal(err)
		}
		all[i].Create = client.CreateOptions{Template: "base"}
	}
	return all
}

// run runs jobs to their end and finds no sandbox left.
func (r *rig) run(jobs string) map[string]Result {
	r.t.Helper()
	if err := r.runner.Run(r.t.Context(), nil, r.jobs(jobs), r.add); err != nil {
		r.t.Fatal(err)
	}
	r.none()
	return r.got
}

func (r *rig) none() {
	r.t.Helper()
	if n, err := r.runner.Sweep(r.t.Context()); n != 0 || err != nil {
		r.t.Errorf("%d sandboxes left, %v", n, err)
	}
}

func TestOutcomes(t *testing.T) {
	r := newRig(t)
	from := filepath.Join(t.TempDir(), "in.txt")
	if err := os.WriteFile(from, []byte("42\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	got := r.run(`
- {id: plain, command: "true"}
- {id: code, command: exit 7}
- {id: signal, command: 'kill -9 $$'}
- {id: missing, command: [no-such-command]}
- {id: any, command: exit 7, checks: [{exit: any}]}
- {id: seven, command: exit 7, checks: [{exit: 7}]}
- {id: put, command: cat in.txt, put: [{from: ` + from + `, to: in.txt}], checks: [{stdout: {equals: "42\n"}}]}
- {id: content, command: 'cat sub/c.txt; echo $A >&2', env: {A: b}, put: [{content: hello, to: sub/c.txt}], checks: [{stdout: {contains: ell, matches: ^h.*o$}}, {stderr: {equals: "b\n"}}]}
- {id: unlike, command: echo no, checks: [{stdout: {contains: yes}}, {stderr: {matches: x}}]}
- {id: file, command: echo 1 > made.txt, checks: [{file: {path: made.txt, equals: "1\n"}}, {file: {path: none.txt, exists: false}}, {file: {path: made.txt}}]}
- {id: nofile, command: "true", checks: [{file: {path: none.txt, contains: x}}, {file: {path: sub2/}}, {file: {path: ., contains: x}}]}
- {id: there, command: echo 1 > there.txt, checks: [{file: {path: there.txt, exists: false}}]}
- {id: judge, command: echo 5 > answer.txt, checks: [{command: sh judge.sh, put: [{content: 'test $(cat answer.txt) = 5', to: judge.sh}]}]}
- {id: judged, command: echo 6 > answer2.txt, checks: [{command: 'echo wrong answer; test $(cat answer2.txt) = 5'}]}
- {id: slow, command: sleep 60, timeout: 1}
- {id: slowjudge, command: "true", checks: [{command: sleep 60, timeout: 1}]}
- {id: get, command: 'mkdir -p deep; echo out > deep/o.txt', get: [deep/o.txt, deep]}
- {id: getnone, command: "true", get: [none.txt]}
- {id: flood, command: 'head -c 3000000 /dev/zero | tr "\0" x; echo end', checks: [{stdout: {matches: 'xend'}}]}
- {id: cwd, command: pwd, cwd: /, checks: [{stdout: {equals: "/\n"}}]}
`)
	for id, want := range map[string]string{
		"plain": "passed 0 ", "code": "failed 7 the exit code is 7, not 0", "signal": "failed 137 the exit code is 137, not 0",
		"missing": "failed 127 the exit code is 127, not 0", "any": "passed 7 ", "seven": "passed 7 ", "put": "passed 0 ", "content": "passed 0 ",
		"unlike": `failed 0 stdout does not contain "yes"; stderr does not match "x"`, "file": "passed 0 ",
		"nofile": "failed 0 none.txt is not there; sub2/ is not there; . is a directory", "there": "failed 0 there.txt is there",
		"judge": "passed 0 ", "judged": `failed 0 command echo wrong answer; test $(cat answer2.txt) = 5: the exit code is 1`,
		"slow": "failed - the command ran for longer than 1s", "slowjudge": "failed 0 command sleep 60: ran for longer than 1s",
		"get": "passed 0 ", "getnone": "failed 0 get none.txt: it is not there", "flood": "passed 0 ", "cwd": "passed 0 ",
	} {
		is, ok := got[id]
		code := "-"
		if is.ExitCode != nil {
			code = fmt.Sprint(*is.ExitCode)
		}
		if text := fmt.Sprintf("%s %s %s", is.Outcome, code, is.Reason); !ok || text != want {
			t.Errorf("%s: %q, want %q", id, text, want)
		}
		if is.Attempts != 1 || is.Sandbox == "" || is.Seconds.Total < is.Seconds.Command {
			t.Errorf("%s: %+v", id, is)
		}
	}
	if flood := got["flood"]; flood.StdoutBytes != 3000004 || len(flood.Stdout) > 1200 || !strings.HasSuffix(flood.Stdout, "xend\n") {
		t.Errorf("of much output %d bytes are kept, told are %d", len(flood.Stdout), flood.StdoutBytes)
	}
	if out := got["judged"].Checks[1]; out.Passed || out.Output != "wrong answer\n" {
		t.Errorf("what a judge said: %+v", out)
	}
	for _, path := range append(got["get"].Got, filepath.Join(r.runner.GetDir, "get/deep/o.txt")) {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(filepath.Join(r.runner.GetDir, "getnone")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a directory of what was not there: %v", err)
	}
	if c := r.runner.Counts(); c.Running != 0 || c.Passed != 10 || c.Failed != 10 || c.Errors != 0 {
		t.Errorf("counts: %+v", c)
	}
}

// refuseFirst refuses the first n requests of a kind.
func (r *rig) refuseFirst(n int64, status int, kind func(*http.Request) bool) {
	var seen atomic.Int64
	r.server.Set(func(s *clienttest.Server) {
		s.Refuse = func(req *http.Request) int {
			if kind(req) && seen.Add(1) <= n {
				return status
			}
			return 0
		}
	})
}

func creates(r *http.Request) bool {
	return r.Method == http.MethodPost && r.URL.Path == "/v2/sandboxes"
}

func starts(r *http.Request) bool { return strings.HasSuffix(r.URL.Path, "/Start") }

func TestRetries(t *testing.T) {
	for name, test := range map[string]struct {
		refuse  int64
		status  int
		kind    func(*http.Request) bool
		command string
		want    string
	}{
		"broken twice":        {2, 500, creates, "true", "passed 3"},
		"broken inside":       {2, 502, starts, "true", "passed 3"},
		"broken always":       {99, 500, creates, "true", "error 3"},
		"no room":             {5, 429, creates, "true", "passed 1"},
		"wrong":               {99, 400, creates, "true", "error 1"},
		"not there":           {99, 404, creates, "true", "error 1"},
		"failed":              {0, 0, creates, "false", "failed 1"},
		"put that is refused": {99, 500, func(r *http.Request) bool { return r.URL.Path == "/files" }, "true", "error 1"},
		"no room for a put":   {99, 507, func(r *http.Request) bool { return r.URL.Path == "/files" }, "true", "error 1"},
		"put that is broken":  {1, 502, func(r *http.Request) bool { return r.URL.Path == "/files" }, "true", "passed 2"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.runner.Retries = 2
			r.refuseFirst(test.refuse, test.status, test.kind)
			is := r.run(`- {id: a, command: "` + test.command + `", put: [{content: x, to: x}]}`)["a"]
			if got := fmt.Sprintf("%s %d", is.Outcome, is.Attempts); got != test.want || len(is.Retried) != is.Attempts-1 {
				t.Errorf("%s, want %s: %+v", got, test.want, is)
			}
		})
	}
	t.Run("failed, asked for", func(t *testing.T) {
		r := newRig(t)
		r.runner.RetryFailed = 3
		is := r.run(`- {id: a, command: 'echo x >> tries; test $(wc -l < tries) -eq 3'}`)["a"]
		if is.Outcome != Passed || is.Attempts != 3 || is.Retried[0] != "the exit code is 1, not 0" {
			t.Errorf("%+v", is)
		}
	})
}

// A sandbox that ran out of memory is the job's fault, another end is not.
func TestSandboxEnds(t *testing.T) {
	for reason, want := range map[berm.Reason]string{
		berm.ReasonOOM:   "failed 1 the sandbox has ended: oom",
		berm.ReasonCrash: "error 2 the sandbox has ended: crash",
	} {
		r := newRig(t)
		r.runner.Retries, r.runner.Concurrency = 1, 1
		// The command ends the sandbox: the server loses it once it has said so.
		go func() {
			for t.Context().Err() == nil {
				said, _ := filepath.Glob(filepath.Join(r.server.Home, "i*.dead"))
				for _, file := range said {
					id := berm.SandboxID(strings.TrimSuffix(filepath.Base(file), ".dead"))
					_ = os.Remove(file)
					r.server.Set(func(s *clienttest.Server) { s.Exits = map[berm.SandboxID]berm.Exit{id: {Reason: reason}} })
					r.server.Remove(id)
				}
				time.Sleep(5 * time.Millisecond)
			}
		}()
		jobs := r.jobs(`- {id: a, command: sleep 60}`)
		stop := make(chan struct{})
		go func() { // as soon as the command runs
			for seen := map[berm.SandboxID]bool{}; ; time.Sleep(5 * time.Millisecond) {
				select {
				case <-stop:
					return
				default:
				}
				if r.server.Started.Load() <= int64(len(seen)) {
					continue
				}
				_ = r.runner.Client.List(t.Context(), client.Filter{}, func(s client.Sandbox) bool {
					if !seen[s.ID] {
						seen[s.ID] = true
						_ = os.WriteFile(filepath.Join(r.server.Home, string(s.ID)+".dead"), nil, 0o600)
					}
					return true
				})
			}
		}()
		err := r.runner.Run(t.Context(), nil, jobs, r.add)
		close(stop)
		is := r.got["a"]
		if got := fmt.Sprintf("%s %d %s", is.Outcome, is.Attempts, is.Reason); got != want || err != nil {
			t.Errorf("%s: %s, want %s; %v", reason, got, want, err)
		}
	}
}

// How a sandbox has ended is known a little after its connections broke.
func TestSandboxEndsLate(t *testing.T) {
	r := newRig(t)
	ended := make(chan error, 1)
	go func() { ended <- r.runner.Run(t.Context(), nil, r.jobs(`- {id: a, command: sleep 60}`), r.add) }()
	for r.server.Started.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	var id berm.SandboxID
	if err := r.runner.Client.List(t.Context(), client.Filter{}, func(s client.Sandbox) bool {
		id = s.ID
		return true
	}); err != nil {
		t.Fatal(err)
	}
	asked := func(r string) bool { return strings.HasPrefix(r, "GET /berm/v1/sandboxes/") }
	r.server.CloseClientConnections()
	for !slices.ContainsFunc(r.server.Requests(), asked) {
		time.Sleep(time.Millisecond)
	}
	r.server.Set(func(s *clienttest.Server) { s.Exits = map[berm.SandboxID]berm.Exit{id: {Reason: berm.ReasonOOM}} })
	err := <-ended
	if is := r.got["a"]; err != nil || is.Outcome != Failed || is.Reason != "the sandbox has ended: oom" {
		t.Errorf("%+v, %v", is, err)
	}
	r.none()
}

// Drained, a batch ends with the jobs that run; ended, with none of them.
func TestEnds(t *testing.T) {
	for _, kill := range []bool{false, true} {
		r := newRig(t)
		r.runner.Concurrency = 2
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		drain, ended := make(chan struct{}), make(chan error, 1)
		go func() {
			ended <- r.runner.Run(ctx, drain, r.jobs("- {id: a, command: 'cat; until test -e go; do sleep 0.01; done'}\n- {id: b, command: 'until test -e go; do sleep 0.01; done'}\n- {id: c, command: 'true'}"), r.add)
		}()
		for r.server.Started.Load() < 2 {
			time.Sleep(time.Millisecond)
		}
		if n := r.runner.Counts().Running; n != 2 {
			t.Errorf("%d run", n)
		}
		close(drain)
		if kill {
			cancel()
		} else if err := os.WriteFile(filepath.Join(r.server.Home, "go"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		err := <-ended
		if want := map[bool]int{false: 2, true: 0}[kill]; len(r.got) != want || (err != nil) != kill {
			t.Errorf("killed %v: %d results, %v", kill, len(r.got), err)
		}
		r.none()
	}
}

// Nothing is lost of what was written, whatever was cut off behind it.
func TestResults(t *testing.T) {
	jobs := newRig(t).jobs("- {id: a, command: x}\n- {id: b, command: x}\n- {id: c, command: x}")
	path, from := filepath.Join(t.TempDir(), "r.jsonl"), filepath.Join(t.TempDir(), "f")
	r, err := Open(path, from, jobs, false)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path, from, jobs, true); berm.KindOf(err) != berm.Conflict {
		t.Errorf("a second writer: %v", err)
	}
	for i, outcome := range []Outcome{Passed, Error} {
		if err := r.Add(Result{Job: jobs[i].ID, Digest: jobs[i].digest, Outcome: outcome, Stdout: "<\xff>"}); err != nil {
			t.Fatal(err)
		}
	}
	id := r.Batch
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path, from, jobs, false); berm.KindOf(err) != berm.AlreadyExists || !strings.Contains(berm.HintOf(err), "--resume") {
		t.Errorf("a file that is there: %v", err)
	}
	for cut := 0; cut <= len(whole); cut += 1 + cut%7 {
		if err := os.WriteFile(path, whole[:cut], 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := Open(path, from, jobs, true)
		if err != nil {
			t.Fatalf("cut at %d: %v", cut, err)
		}
		lines := strings.Count(string(whole[:cut]), "\n")
		if _, done := r.Of(&jobs[0]); done != (lines >= 2) || lines > 0 && r.Batch != id || r.Copied {
			t.Fatalf("cut at %d: done %v, batch %s of %s, copied %v", cut, done, r.Batch, id, r.Copied)
		}
		if _, done := r.Of(&jobs[1]); done {
			t.Fatal("what could not be run is done")
		}
		if err := r.Add(Result{Job: "c"}); err != nil {
			t.Fatal(err)
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if !json.Valid([]byte(line)) {
				t.Fatalf("cut at %d: %q", cut, line)
			}
		}
	}
	changed := jobs[0]
	changed.digest = "other"
	if r, err = Open(path, from, jobs, true); err != nil {
		t.Fatal(err)
	}
	if _, done := r.Of(&changed); done {
		t.Error("a job that was changed is done")
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	// What is damaged, or something else, stays as it is, and it is said what to do.
	begin, _, _ := strings.Cut(string(whole), "\n")
	for _, text := range []string{"hello", "hello\n", "{}\n", `{"batch":"b","version":2}` + "\n", `{"batch":"b","version":1}` + "\n", begin + "\nhello\n", begin + "\n{}\n"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(path, from, jobs, true); berm.KindOf(err) != berm.Invalid || !strings.Contains(berm.HintOf(err), "--results") {
			t.Errorf("%q: %v, hint %q", text, err, berm.HintOf(err))
		}
		if is, err := os.ReadFile(path); err != nil || string(is) != text {
			t.Errorf("%q is now %q, %v", text, is, err)
		}
	}
}

// Results are gone on with by the jobs that they are of, and only the file that a batch began to write
// is that batch: where a copy goes on, the first one may run.
func TestResultsOfOthers(t *testing.T) {
	jobs := newRig(t).jobs("- {id: a, command: x}\n- {id: b, command: x}")
	dir := filepath.Join(t.TempDir(), "here")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	path, from := filepath.Join(dir, "r.jsonl"), filepath.Join(dir, "f.yaml")
	open := func(path, from string, jobs []Job) (batch string, copied bool, err error) {
		r, err := Open(path, from, jobs, true)
		if err != nil {
			return "", false, err
		}
		if _, done := r.Of(&jobs[0]); done != r.Resumed {
			t.Errorf("a is done: %v", done)
		} else if !done {
			if err := r.Add(Result{Job: "a", Digest: jobs[0].digest, Outcome: Passed}); err != nil {
				t.Error(err)
			}
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		return r.Batch, r.Copied, nil
	}
	id, _, err := open(path, from, jobs)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, refused := range map[string]struct {
		from string
		jobs []Job
		want string
	}{
		"another file":      {filepath.Join(dir, "g.yaml"), jobs, "r.jsonl has results of other jobs, those of f.yaml"},
		"stdin":             {"-", jobs, "r.jsonl has results of other jobs, those of f.yaml"},
		"another directory": {filepath.Join(filepath.Dir(dir), "f.yaml"), jobs, "r.jsonl has results of other jobs, those of f.yaml"},
		"unknown jobs":      {from, jobs[1:], "r.jsonl has results of 1 jobs that are not in f.yaml, such as a"},
	} {
		_, _, err := open(path, refused.from, refused.jobs)
		if berm.KindOf(err) != berm.Conflict || !strings.HasSuffix(err.Error(), refused.want) || !strings.Contains(berm.HintOf(err), "--results names another file") {
			t.Errorf("%s: %v, hint %q", name, err, berm.HintOf(err))
		}
		if is, err := os.ReadFile(path); err != nil || string(is) != string(text) {
			t.Errorf("%s: the file is now %q, %v", name, is, err)
		}
	}
	// A copy is a batch of its own, and stays the same one.
	other := filepath.Join(dir, "copy.jsonl")
	if err := os.WriteFile(other, text, 0o600); err != nil {
		t.Fatal(err)
	}
	first, copied, err := open(other, from, jobs)
	if err != nil || first == id || !copied {
		t.Errorf("a copy: %s of %s, %v, %v", first, id, copied, err)
	}
	if again, copied, err := open(other, from, jobs); err != nil || again != first || copied {
		t.Errorf("a copy again: %s, not %s, %v, %v", again, first, copied, err)
	}
	// What is moved is not copied, nor does it matter how it is named.
	moved := dir + "2"
	if err := errors.Join(os.Rename(dir, moved), os.Symlink(moved, dir)); err != nil {
		t.Fatal(err)
	}
	if again, copied, err := open(path, filepath.Join(moved, "f.yaml"), jobs); err != nil || again != id || copied {
		t.Errorf("moved: %s, not %s, %v, %v", again, id, copied, err)
	}
}
