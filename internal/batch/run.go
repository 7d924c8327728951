package batch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/client"
)

// What sandboxes of a batch have in their metadata.
const (
	metadataBatch = "berm.batch"
	metadataJob   = "berm.job"
)

// patience is how long a server that does not answer, or has no room, is waited for.
const patience = 2 * time.Minute

// killTime bounds the end of a sandbox.
const killTime = time.Minute

// Runner runs the jobs of one batch.
type Runner struct {
	Client      *client.Client
	Batch       string // its id
	Concurrency int    // jobs at a time
	Retries     int    // for a job whose sandbox or way to it broke
	RetryFailed int    // for a job that failed
	OutputLimit int    // bytes that are kept of each output
	GetDir      string // gets a directory for each job that brings something out

	mu     sync.Mutex
	counts Counts
}

// Counts is how far a batch is.
type Counts struct {
	Running, Passed, Failed, Errors, Retried int
}

// Done counts the jobs that have a result.
func (c Counts) Done() int { return c.Passed + c.Failed + c.Errors }

// Counts may be asked for while the batch runs.
func (r *Runner) Counts() Counts {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.counts
}

func (r *Runner) count(change func(*Counts)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change(&r.counts)
}

// Sweep kills the sandboxes of the batch that are there, and returns how many.
func (r *Runner) Sweep(ctx context.Context) (int, error) {
	var left []berm.SandboxID
	if err := r.Client.List(ctx, client.Filter{Metadata: map[string]string{metadataBatch: r.Batch}}, func(s client.Sandbox) bool {
		left = append(left, s.ID)
		return true
	}); err != nil {
		return 0, err
	}
	for _, id := range left {
		if err := r.Client.Kill(ctx, id); err != nil && berm.KindOf(err) != berm.NotFound {
			return 0, err
		}
	}
	return len(left), nil
}

// Run runs jobs and hands each result on as the job ends, from several goroutines. When drain is
// closed no further job begins; when ctx ends, those that run are killed and have no result. An error
// is one of the batch as a whole: the server does not answer any more, or add failed.
func (r *Runner) Run(ctx context.Context, drain <-chan struct{}, jobs []Job, add func(Result) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	next := make(chan *Job)
	var workers sync.WaitGroup
	for range min(r.Concurrency, len(jobs)) {
		workers.Go(func() {
			for job := range next {
				r.count(func(c *Counts) { c.Running++ })
				result, err := r.job(ctx, job)
				if err == nil && ctx.Err() == nil {
					err = add(result)
				}
				r.count(func(c *Counts) {
					c.Running--
					switch {
					case err != nil || ctx.Err() != nil:
					case result.Outcome == Passed:
						c.Passed++
					case result.Outcome == Failed:
						c.Failed++
					default:
						c.Errors++
					}
				})
				if err != nil {
					cancel(err)
				}
			}
		})
	}
	for i := range jobs {
		select {
		case <-drain:
		case <-ctx.Done():
		default:
			select {
			case next <- &jobs[i]:
				continue
			case <-drain:
			case <-ctx.Done():
			}
		}
		break
	}
	close(next)
	workers.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

// job attempts a job until its result counts. An error is one of the batch as a whole.
func (r *Runner) job(ctx context.Context, job *Job) (Result, error) {
	var retried []string
	broken, failed := 0, 0
	for wait := 200 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		a := attempt{r: r, job: job, result: Result{Job: job.ID, Digest: job.digest, Start: time.Now(), Attempts: len(retried) + 1, Retried: retried}}
		a.run(ctx)
		again := false
		switch {
		case a.broken && broken < r.Retries:
			again = true
			broken++
		case a.result.Outcome == Failed && failed < r.RetryFailed:
			again = true
			failed++
		}
		if a.broken { // perhaps because no server is there, of which no job is to blame
			if err := r.await(ctx, wait); err != nil {
				return a.result, err
			}
		}
		if !again || ctx.Err() != nil {
			return a.result, nil
		}
		retried = append(retried, a.result.Reason)
		r.count(func(c *Counts) { c.Retried++ })
	}
}

// await waits for a time and then until the server answers.
func (r *Runner) await(ctx context.Context, wait time.Duration) error {
	for began := time.Now(); ; {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
		err := r.Client.List(ctx, client.Filter{Metadata: map[string]string{metadataBatch: r.Batch}}, func(client.Sandbox) bool { return false })
		if berm.KindOf(err) != berm.Unavailable {
			return nil // another attempt tells what is wrong, if something is
		}
		if time.Since(began) > patience {
			return err
		}
	}
}

// attempt is one attempt at a job.
type attempt struct {
	r      *Runner
	job    *Job
	result Result
	// broken says that the sandbox, or the way to it, was at fault.
	broken bool
	agents map[string]*client.Agent // by user
	box    *client.Sandbox
}

// run fills in the result.
func (a *attempt) run(ctx context.Context) {
	began := time.Now()
	defer func() { a.result.Seconds.Total = time.Since(began).Seconds() }()
	if err := timed(&a.result.Seconds.Create, func() error { return a.create(ctx) }); err != nil {
		a.broken = breaks(err)
		a.fail(Error, "the sandbox cannot be made: "+text(err))
		return
	}
	a.inside(ctx)
	// The end does not wait for whoever ended the batch.
	final, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime)
	defer cancel()
	if err := timed(&a.result.Seconds.Kill, func() error { return a.r.Client.Kill(final, a.box.ID) }); err != nil && berm.KindOf(err) != berm.NotFound {
		a.note("the sandbox could not be killed: " + text(err))
	}
}

func timed(seconds *float64, do func() error) error {
	began := time.Now()
	err := do()
	*seconds = time.Since(began).Seconds()
	return err
}

func (a *attempt) fail(outcome Outcome, reason string) {
	a.result.Outcome, a.result.Reason = outcome, reason
}

func (a *attempt) note(text string) { a.result.Notes = append(a.result.Notes, text) }

// text is an error with its hint.
func text(err error) string {
	if hint := berm.HintOf(err); hint != "" {
		return err.Error() + " (" + hint + ")"
	}
	return err.Error()
}

// breaks says whether an error may be gone at the next attempt: it is not about what was asked for.
func breaks(err error) bool {
	var local *fs.PathError
	if errors.As(err, &local) {
		return false
	}
	switch berm.KindOf(err) {
	case berm.Invalid, berm.Denied, berm.Unsupported, berm.NotFound, berm.AlreadyExists:
		return false
	}
	return true
}

// create makes the sandbox. A server that has no room gets some once other jobs have ended.
func (a *attempt) create(ctx context.Context) (err error) {
	o := a.job.Create
	o.Timeout = a.job.life()
	o.Metadata = maps.Clone(a.job.Metadata)
	if o.Metadata == nil {
		o.Metadata = map[string]string{}
	}
	o.Metadata[metadataBatch], o.Metadata[metadataJob] = a.r.Batch, a.job.ID
	began := time.Now()
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
		a.box, err = a.r.Client.Create(ctx, o)
		if berm.KindOf(err) != berm.Exhausted || time.Since(began) > patience {
			break
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
	if err != nil {
		return err
	}
	a.result.Sandbox, a.result.Warm = a.box.ID, a.box.Berm != nil && a.box.Berm.Warm
	a.agents = map[string]*client.Agent{}
	return nil
}

func (a *attempt) agent(user string) *client.Agent {
	if user == "" {
		user = a.job.User
	}
	if a.agents[user] == nil {
		a.agents[user] = a.r.Client.Agent(a.box, user)
	}
	return a.agents[user]
}

// inside does all that is done in the sandbox.
func (a *attempt) inside(ctx context.Context) {
	if err := timed(&a.result.Seconds.Put, func() error { return a.put(ctx, a.job.User, a.job.Put) }); err != nil {
		a.broke(ctx, err)
		return
	}
	out := a.streams()
	defer out.close()
	var end client.End
	err := timed(&a.result.Seconds.Command, func() (err error) {
		end, err = a.command(ctx, a.job.User, a.job.timed(), out.stdout, out.stderr)
		return err
	})
	out.keep(&a.result)
	switch {
	case isTimeout(err):
		a.fail(Failed, fmt.Sprintf("the command ran for longer than %v", a.job.Timeout.limit()))
	case err != nil:
		a.broke(ctx, err)
		return
	default:
		code := end.ExitCode()
		a.result.ExitCode = &code
		if err := timed(&a.result.Seconds.Checks, func() error { return a.checks(ctx, code, out) }); err != nil {
			a.broke(ctx, err)
			return
		}
	}
	if err := timed(&a.result.Seconds.Get, func() error { return a.get(ctx) }); err != nil {
		a.broke(ctx, err)
	}
}

// broke tells of an error on the way, or of the sandbox's end.
func (a *attempt) broke(ctx context.Context, err error) {
	if s, gone := a.inspect(ctx, err); gone == nil && s.Exit != nil {
		reason := "the sandbox has ended: " + string(s.Exit.Reason)
		if s.Exit.Detail != "" {
			reason += ", " + s.Exit.Detail
		}
		if s.Exit.Reason == berm.ReasonOOM {
			a.fail(Failed, reason)
			return
		}
		a.broken = true
		a.fail(Error, reason)
		return
	} else if berm.KindOf(gone) == berm.NotFound {
		a.broken = true
	}
	a.broken = a.broken || breaks(err) && !said(err)
	a.fail(Error, text(err))
}

// inspect looks for the sandbox's end after an error. Connections into it may break before the server
// knows of it.
func (a *attempt) inspect(ctx context.Context, err error) (*client.Sandbox, error) {
	for tries := 0; ; tries++ {
		s, gone := a.r.Client.Inspect(ctx, a.box.ID)
		if gone != nil || s.Exit != nil || berm.KindOf(err) != berm.Unavailable || tries == 20 {
			return s, gone
		}
		select {
		case <-ctx.Done():
			return s, gone
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// said says whether an error is an answer from inside, such as that a path cannot be written or that
// the disk is full: another sandbox says the same.
func said(err error) bool {
	var e *berm.Error
	return errors.As(err, &e) && (e.Kind == berm.Internal || e.Kind == berm.Exhausted)
}

func (a *attempt) put(ctx context.Context, user string, puts []Put) error {
	c := client.Copier{Agent: a.agent(user), Note: a.note}
	for _, p := range puts {
		var err error
		if p.Content != nil {
			err = c.PutText(ctx, *p.Content, p.target())
		} else {
			err = c.Put(ctx, p.From, p.target())
		}
		if err != nil {
			return fmt.Errorf("put %s: %w", p.target(), err)
		}
	}
	return nil
}

// get brings out what the job names. What is not there makes it fail.
func (a *attempt) get(ctx context.Context) error {
	if len(a.job.Get) == 0 {
		return nil
	}
	dir := filepath.Join(a.r.GetDir, url.PathEscape(a.job.ID))
	if err := os.RemoveAll(dir); err != nil { // of an attempt before
		return err
	}
	defer os.Remove(dir) // if nothing came into it
	c := client.Copier{Agent: a.agent(""), Note: a.note}
	for _, from := range a.job.Get {
		source, err := c.Agent.Stat(ctx, from)
		if berm.KindOf(err) == berm.NotFound {
			if a.result.Outcome == Passed {
				a.fail(Failed, "get "+from+": it is not there")
			}
			continue
		}
		to := filepath.Join(dir, filepath.Base(from))
		if err == nil {
			err = os.MkdirAll(dir, 0o755)
		}
		if err == nil {
			err = c.Get(ctx, source, to)
		}
		if err != nil {
			return fmt.Errorf("get %s: %w", from, err)
		}
		a.result.Got = append(a.result.Got, to)
	}
	return nil
}
