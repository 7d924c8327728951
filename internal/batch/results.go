package batch

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/berm-sandbox/berm"
)

// Outcome is how a job ended.
type Outcome string

// The outcomes.
const (
	Passed Outcome = "passed"
	Failed Outcome = "failed" // a check does not hold, or its time or memory was over
	Error  Outcome = "error"  // it could not be run
)

// Result is what became of a job: one line of a file of results.
type Result struct {
	Job     string  `json:"job"`
	Digest  string  `json:"digest"` // of the job as it was written
	Outcome Outcome `json:"outcome"`
	Reason  string  `json:"reason,omitempty"` // what did not hold, or went wrong
	// Attempts counts the last one too; Retried are the reasons why it was not the first.
	Attempts int            `json:"attempts"`
	Retried  []string       `json:"retried,omitempty"`
	Sandbox  berm.SandboxID `json:"sandboxID,omitempty"`
	Warm     bool           `json:"warm,omitempty"` // the sandbox came from a pool
	Start    time.Time      `json:"start"`          // of the last attempt
	Seconds  Seconds        `json:"seconds"`
	// ExitCode is that of the command, 128 and the number for a signal; nil when it did not end.
	ExitCode *int `json:"exitCode,omitempty"`
	// Of output the start and the end are kept, up to a limit; Bytes tell how much there was.
	Stdout      string    `json:"stdout,omitempty"`
	StdoutBytes int64     `json:"stdoutBytes,omitempty"`
	Stderr      string    `json:"stderr,omitempty"`
	StderrBytes int64     `json:"stderrBytes,omitempty"`
	Checks      []Checked `json:"checks,omitempty"`
	Got         []string  `json:"got,omitempty"` // paths on this machine
	Notes       []string  `json:"notes,omitempty"`
}

// Seconds are how long the parts of the last attempt took.
type Seconds struct {
	Create  float64 `json:"create"`
	Put     float64 `json:"put,omitempty"`
	Command float64 `json:"command,omitempty"`
	Checks  float64 `json:"checks,omitempty"`
	Get     float64 `json:"get,omitempty"`
	Kill    float64 `json:"kill,omitempty"`
	Total   float64 `json:"total"`
}

// Checked is how one check ended. Output is that of its command.
type Checked struct {
	Check  string `json:"check"`
	Passed bool   `json:"passed"`
	Reason string `json:"reason,omitempty"`
	Output string `json:"output,omitempty"`
}

// Results is a file of results, which one batch at a time has open.
type Results struct {
	// Batch is what the sandboxes of the batch have in their metadata.
	Batch string
	// Resumed says that the file was there before.
	Resumed bool

	done map[string]Result // without output

	mu     sync.Mutex
	file   *os.File
	failed error // nothing may follow a line that is not whole
}

// first is the first line of a file of results.
type first struct {
	Batch   string `json:"batch"`
	Version int    `json:"version"`
}

// Open opens a file of results, or makes it. A file that is there must be meant to be gone on with;
// a line that was being written when its batch died is taken away. Kinds: AlreadyExists, Conflict,
// Invalid.
func Open(path string, resume bool) (*Results, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, berm.Errorf(berm.Invalid, "the results: %w", err)
	}
	r := &Results{file: file, done: map[string]Result{}}
	if err := r.open(path, resume); err != nil {
		_ = file.Close()
		return nil, err
	}
	return r, nil
}

func (r *Results) open(path string, resume bool) error {
	err := syscall.Flock(int(r.file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return berm.Errorf(berm.Conflict, "another batch writes %s", path)
	} else if err != nil {
		return berm.Errorf(berm.Invalid, "%s: %w", path, err)
	}
	whole, err := r.read(path)
	if err != nil {
		return err
	}
	if r.Resumed = r.Batch != ""; len(r.done) > 0 && !resume {
		return berm.Errorf(berm.AlreadyExists, "%s has results of %d jobs already", path, len(r.done)).
			WithHint("--resume goes on with the jobs that are left; --results names another file, for a run of all.")
	}
	if err := r.file.Truncate(whole); err != nil {
		return err
	}
	if _, err := r.file.Seek(whole, io.SeekStart); err != nil || r.Resumed {
		return err
	}
	r.Batch = strings.ToLower(rand.Text())
	if err := r.line(first{r.Batch, 1}); err != nil {
		return err
	}
	// Sandboxes are found by what stands here.
	return r.file.Sync()
}

// read returns where the last whole line ends.
func (r *Results) read(path string) (whole int64, err error) {
	in := bufio.NewReader(r.file)
	for n := 1; ; n++ {
		line, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return whole, nil
		} else if err != nil {
			return 0, berm.Errorf(berm.Invalid, "%s: %w", path, err)
		}
		whole += int64(len(line))
		if n == 1 {
			var f first
			if json.Unmarshal(line, &f) != nil || f.Batch == "" || f.Version != 1 {
				return 0, berm.Errorf(berm.Invalid, "%s:1: this is no file of results", path)
			}
			r.Batch = f.Batch
			continue
		}
		var result Result
		if json.Unmarshal(line, &result) != nil || result.Job == "" {
			return 0, berm.Errorf(berm.Invalid, "%s:%d: this is no result", path, n)
		}
		result.Stdout, result.Stderr, result.Checks = "", "", nil
		r.done[result.Job] = result
	}
}

// Of returns the result of a job, if it needs no other one: it is of the same job, which could be run.
func (r *Results) Of(job *Job) (Result, bool) {
	result, ok := r.done[job.ID]
	return result, ok && result.Digest == job.digest && result.Outcome != Error
}

// Add writes the result of a job. What it returns without an error is in the file also when this
// process is killed.
func (r *Results) Add(result Result) error { return r.line(result) }

func (r *Results) line(v any) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.failed == nil {
		_, r.failed = r.file.Write(b.Bytes()) // in one piece
	}
	return r.failed
}

// Close brings the file to the disk.
func (r *Results) Close() error { return errors.Join(r.file.Sync(), r.file.Close()) }
