package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/batch"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/terminal"
)

// exitJobsFailed is the code of a batch in which a job failed: it is not that something could not be
// run.
const exitJobsFailed = 3

// killTime is how long a batch waits for its jobs once they are killed, and then for the end of
// sandboxes that are left.
const killTime = 20 * time.Second

func newBatchCommand() *cobra.Command {
	b := batchRun{output: 64 << 10}
	cmd := serverCommand(&cobra.Command{
		Use:   "batch FILE",
		Short: "Run many jobs, each in a sandbox of its own, and check how they end",
		Long: `Run the jobs of a file (YAML or JSON lines; "-" is stdin), each in a fresh sandbox: copy files
in, run a command, check its exit code, its output and the files that it left, run commands that
judge it, copy files out. What the file may hold: docs/batch.md and ` + "`berm batch schema`" + `.

Each job that ends is a line of the file of results, FILE.results.jsonl unless --results names another:
how it ended (passed, failed, or error when it could not be run) and why, what its command printed,
how long each part took. What jobs bring out lies beside it, in FILE.results/JOB.

A job whose sandbox or way to it broke is attempted again; one that failed is not, unless
--retry-failed says so. After an interruption of any kind --resume goes on with the jobs that have
no result, and with those that could not be run; sandboxes that were left are killed first. Ctrl-C
begins no further job and lets running ones end; a second one kills them.

The exit code is 0 when all jobs passed, 3 when one failed, 1 when one could not be run or the batch
could not, 130 when it was interrupted.`,
		Example: `  berm batch exercises.yaml
  berm batch --resume exercises.yaml
  berm batch -j 32 --retry-failed 1 --results run-2.jsonl tasks.jsonl
  jq -r 'select(.outcome == "failed") | .job + ": " + .reason' exercises.results.jsonl`,
		Args: cli.UsageArgs(cobra.ExactArgs(1)),
	})
	flags := cmd.Flags()
	flags.IntVarP(&b.concurrency, "concurrency", "j", 8, "jobs at a time")
	flags.IntVar(&b.retries, "retries", 2, "further attempts at a job whose sandbox broke or could not be made")
	flags.IntVar(&b.retryFailed, "retry-failed", 0, "further attempts at a job that failed")
	flags.StringVarP(&b.results, "results", "o", "", "`FILE` for the results")
	flags.BoolVar(&b.resume, "resume", false, "go on with the jobs that have no result yet")
	flags.Var(&b.output, "output-limit", "how much is kept of each output, its start and its end")
	b.json = cli.JSONFlag(cmd)
	cmd.RunE = b.run
	cmd.AddCommand(&cobra.Command{
		Use:   "schema",
		Short: "Print the JSON schema of a batch file, for editors",
		Example: `  berm batch schema > batch.schema.json
  # in a batch file: # yaml-language-server: $schema=batch.schema.json`,
		Args: cli.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := cmd.OutOrStdout().Write(batch.Schema())
			return err
		},
	})
	return cmd
}

// batchRun is one call of the command.
type batchRun struct {
	concurrency, retries, retryFailed int
	results                           string
	resume                            bool
	output                            cli.SizeFlag
	json                              *bool
}

// summary is what a batch says at its end. Earlier counts the jobs that had a result before.
type summary struct {
	Jobs      int     `json:"jobs"`
	Passed    int     `json:"passed"`
	Failed    int     `json:"failed"`
	Errors    int     `json:"errors"`
	Left      int     `json:"left"`
	Earlier   int     `json:"earlier"`
	Retried   int     `json:"retried"`
	Seconds   float64 `json:"seconds"`
	PerSecond float64 `json:"jobsPerSecond"`
	Results   string  `json:"results"`
}

func (b *batchRun) run(cmd *cobra.Command, args []string) (err error) {
	file := args[0]
	switch {
	case b.concurrency < 1 || b.concurrency > 1000:
		return cli.UsageError{Err: errors.New("--concurrency must be from 1 to 1000")}
	case b.retries < 0 || b.retryFailed < 0:
		return cli.UsageError{Err: errors.New("--retries and --retry-failed must be 0 or more")}
	case file == "-" && b.results == "":
		return cli.UsageError{Err: errors.New("jobs from stdin need --results")}
	}
	if b.results == "" {
		b.results = strings.TrimSuffix(file, filepath.Ext(file)) + ".results.jsonl"
	}
	jobs, err := readJobs(cmd.Context(), file)
	if errors.Is(err, context.Canceled) {
		return cli.ExitError(128 + int(syscall.SIGINT))
	} else if err != nil {
		return err
	}
	c, err := server(cmd)
	if err != nil {
		return err
	}
	results, err := batch.Open(b.results, file, jobs, b.resume)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, results.Close()) }()
	switch {
	case b.resume && !results.Resumed:
		cli.Notice(cmd, "%s has no results yet: all jobs are run", terminal.Escape(b.results))
	case results.Copied:
		cli.Notice(cmd, "%s is a copy, or was edited: the batch that it began with may still run, and keeps its sandboxes", terminal.Escape(b.results))
	}
	done := summary{Jobs: len(jobs), Results: b.results}
	left := jobs[:0:0]
	for i := range jobs {
		was, ok := results.Of(&jobs[i])
		switch {
		case !ok:
			left = append(left, jobs[i])
			continue
		case was.Outcome == batch.Passed:
			done.Passed++
		default:
			done.Failed++
		}
		done.Earlier++
	}
	r := &batch.Runner{
		Client: c, Batch: results.Batch, Concurrency: b.concurrency, Retries: b.retries, RetryFailed: b.retryFailed,
		OutputLimit: int(b.output), GetDir: strings.TrimSuffix(b.results, ".jsonl"),
	}
	if filepath.Ext(b.results) != ".jsonl" {
		r.GetDir += ".files"
	}
	began := time.Now()
	interrupted, err := b.runLeft(cmd, r, left, results, done.Earlier)
	counts := r.Counts()
	done.Errors, done.Retried = counts.Errors, counts.Retried
	done.Passed += counts.Passed
	done.Failed += counts.Failed
	done.Seconds = time.Since(began).Seconds()
	return b.end(cmd, done, interrupted, err)
}

// readJobs reads a file of jobs and all that it names, unless ctx ends before.
func readJobs(ctx context.Context, file string) ([]batch.Job, error) {
	if info, err := os.Stat(file); file != "-" && err == nil && !info.Mode().IsRegular() {
		return nil, berm.Errorf(berm.Invalid, "%s is no regular file", file).WithHint("\"-\" reads the jobs of a pipe from stdin.")
	}
	// A read of stdin ends when whoever writes says so.
	type parsed struct {
		jobs []batch.Job
		err  error
	}
	read := make(chan parsed, 1)
	go func() {
		jobs, err := parseJobs(file)
		read <- parsed{jobs, err}
	}()
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case p := <-read:
		return p.jobs, p.err
	}
}

func parseJobs(file string) ([]batch.Job, error) {
	content, err := readBounded(file, batch.MaxFile)
	if err != nil {
		return nil, err
	}
	name, dir := file, filepath.Dir(file)
	if file == "-" {
		name, dir = "stdin", "."
	}
	jobs, err := batch.Parse(name, content)
	if err != nil {
		return nil, err
	}
	for i := range jobs {
		j := &jobs[i]
		if err := j.Resolve(dir); err != nil {
			return nil, err
		}
		if j.Create, err = jobSandbox(j); err != nil {
			wrong := berm.Errorf(berm.Invalid, "%s: job %s: %w", j.At, j.ID, err)
			wrong.Hint = berm.HintOf(err)
			return nil, wrong
		}
	}
	return jobs, nil
}

// jobSandbox is what `berm create` would make of what a job says of its sandbox.
func jobSandbox(j *batch.Job) (o client.CreateOptions, err error) {
	o = client.CreateOptions{
		Template: j.Template, Level: j.Level,
		Limits: berm.Limits{Memory: int64(j.Limits.Memory), CPU: j.Limits.CPU, PIDs: j.Limits.PIDs, Disk: int64(j.Limits.Disk)},
	}
	if o.Template == "" {
		o.Template = "base"
	}
	if o.Credentials, err = storedCredentials(j.Credentials); err != nil {
		return o, err
	}
	if network := (policySource{file: j.Policy, allow: j.Allow}); network.given() {
		o.Policy, err = network.document()
	}
	return o, err
}

// runLeft runs the jobs that have no result. An interruption is no error.
func (b *batchRun) runLeft(cmd *cobra.Command, r *batch.Runner, left []batch.Job, results *batch.Results, earlier int) (interrupted bool, err error) {
	n, err := r.Sweep(cmd.Context())
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(signals)
	switch {
	case cmd.Context().Err() != nil:
		return true, nil
	case err != nil:
		return false, err
	case n > 0:
		cli.Notice(cmd, "killed %d sandboxes that were left", n)
	}
	// From here on jobs go on when the command's context ends, which is at the first signal.
	ctx, kill := context.WithCancel(context.WithoutCancel(cmd.Context()))
	defer kill()
	p := &batchProgress{w: cmd.ErrOrStderr(), r: r, all: len(left), earlier: earlier, began: time.Now()}
	drain, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- r.Run(ctx, drain, left, func(result batch.Result) error {
			if err := results.Add(result); err != nil {
				return fmt.Errorf("the results: %w", err)
			}
			if result.Outcome != batch.Passed {
				p.say("%s %s: %s", result.Outcome, result.Job, result.Reason)
			}
			return nil
		})
	}()
	tick := time.NewTicker(p.every())
	defer tick.Stop()
	var tooLong <-chan time.Time
	for running := true; running; {
		select {
		case err = <-ended:
			running = false
		case <-tooLong:
			err, running = errors.New("jobs did not end when they were killed"), false
		case <-tick.C:
			p.show()
		case <-signals:
			if interrupted {
				p.say("killing the jobs that run")
				kill()
				if tooLong == nil {
					tooLong = time.After(killTime)
				}
				continue
			}
			interrupted = true
			close(drain)
			p.say("no further job begins; %d run on, which a second signal kills", r.Counts().Running)
		}
	}
	p.clear()
	// Of a create whose answer was lost nobody knew the id.
	final, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime)
	defer cancel()
	if _, failed := r.Sweep(final); failed != nil && err == nil {
		err = fmt.Errorf("sandboxes may be left: %w", failed)
	}
	if interrupted && errors.Is(err, context.Canceled) {
		err = nil
	}
	return interrupted, err
}

// end prints the summary and finds the exit code.
func (b *batchRun) end(cmd *cobra.Command, done summary, interrupted bool, err error) error {
	done.Left = done.Jobs - done.Passed - done.Failed - done.Errors
	if here := done.Jobs - done.Left - done.Earlier; here > 0 {
		done.PerSecond = float64(here) / done.Seconds
	}
	if *b.json {
		if printed := cli.PrintJSON(cmd.OutOrStdout(), done); printed != nil {
			return printed
		}
	} else {
		text := fmt.Sprintf("%d jobs: %d passed, %d failed, %d could not be run, %d left", done.Jobs, done.Passed, done.Failed, done.Errors, done.Left)
		if done.Earlier > 0 {
			text += fmt.Sprintf("; %d of them earlier", done.Earlier)
		}
		text += fmt.Sprintf("; %.1f s, %.1f a second\nresults: %s\n", done.Seconds, done.PerSecond, terminal.Escape(done.Results))
		if _, printed := io.WriteString(cmd.OutOrStdout(), text); printed != nil {
			return printed
		}
	}
	if done.Left+done.Errors > 0 {
		cli.Notice(cmd, "--resume goes on with the jobs that are left or could not be run")
	}
	switch {
	case err != nil:
		return err
	case interrupted && done.Left > 0:
		return cli.ExitError(128 + int(syscall.SIGINT))
	case done.Errors > 0:
		return cli.ExitError(1)
	case done.Failed > 0:
		return cli.ExitError(exitJobsFailed)
	}
	return nil
}

// batchProgress tells how far a batch is: in a line that is written anew on a terminal, and in a line
// every so often elsewhere.
type batchProgress struct {
	w            io.Writer
	r            *batch.Runner
	all, earlier int // jobs of this run, and of those before
	began        time.Time
	mu           sync.Mutex // guards w
}

func (p *batchProgress) every() time.Duration {
	if terminal.Is(p.w) {
		return 200 * time.Millisecond
	}
	return 10 * time.Second
}

func (p *batchProgress) show() {
	c := p.r.Counts()
	done, took := c.Done(), time.Since(p.began)
	text := fmt.Sprintf("%d of %d: %d passed, %d failed, %d could not be run, %d running", done+p.earlier, p.all+p.earlier, c.Passed, c.Failed, c.Errors, c.Running)
	if done > 0 {
		text += fmt.Sprintf("; %.1f a second, %s left", float64(done)/took.Seconds(), cli.Span(took/time.Duration(done)*time.Duration(p.all-done)))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if f, ok := p.w.(*os.File); ok && terminal.Is(f) {
		_, _ = fmt.Fprint(f, "\r"+terminal.Clip(text, max(terminal.SizeOf(f).Cols-1, 20))+"\x1b[K")
		return
	}
	_, _ = fmt.Fprintln(p.w, "berm:", text)
}

func (p *batchProgress) say(format string, args ...any) {
	p.clear()
	p.mu.Lock()
	defer p.mu.Unlock()
	_, _ = fmt.Fprintln(p.w, "berm:", terminal.Clip(terminal.Escape(fmt.Sprintf(format, args...)), 500))
}

// clear takes the line off a terminal.
func (p *batchProgress) clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if terminal.Is(p.w) {
		_, _ = fmt.Fprint(p.w, "\r\x1b[K")
	}
}
