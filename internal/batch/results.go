package batch

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

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
	// Copied says that the batch which began the file may still write another one, of which this is
	// a copy: it goes on as a batch of its own.
	Copied bool

	done map[string]Result // without output

	mu     sync.Mutex
	file   *os.File
	failed error // nothing may follow a line that is not whole
}

// head is the first line of a file of results. A copy of one that is gone on with has a further one.
type head struct {
	Batch   string `json:"batch"`
	Version int    `json:"version"`
	Jobs    string `json:"jobs"`  // the file of the jobs, as seen from here; "-" is stdin
	Inode   string `json:"inode"` // tells the file from its copies, which the lock is not held on
}

// Open opens the file of results of the jobs that come from a file ("-" is stdin), or makes it. One
// that is there must be meant to be gone on with, and of these jobs; a line that was being written
// when its batch died is taken away. Kinds: AlreadyExists, Conflict, Invalid.
func Open(path, from string, jobs []Job, resume bool) (*Results, error) {
	// Without waiting, as for the other end of a pipe.
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NONBLOCK, 0o644)
	if err != nil {
		return nil, berm.Errorf(berm.Invalid, "the results: %w", err)
	}
	r := &Results{file: file, done: map[string]Result{}}
	if err := r.open(path, from, jobs, resume); err != nil {
		_ = file.Close()
		return nil, err
	}
	return r, nil
}

func (r *Results) open(path, from string, jobs []Job, resume bool) error {
	if info, err := r.file.Stat(); err != nil || !info.Mode().IsRegular() {
		return berm.Errorf(berm.Invalid, "the results: %s is no regular file", path).
			WithHint("Lines are read again by --resume. To see them come: tail -f.")
	}
	err := syscall.Flock(int(r.file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return berm.Errorf(berm.Conflict, "another batch writes %s", path)
	} else if err != nil {
		return berm.Errorf(berm.Invalid, "%s: %w", path, err)
	}
	is := head{Version: 1}
	if is.Jobs, err = seenFrom(path, from); err != nil {
		return berm.Errorf(berm.Invalid, "the results: %w", err)
	}
	if is.Inode, err = inode(r.file); err != nil {
		return berm.Errorf(berm.Invalid, "%s: %w", path, err)
	}
	was, whole, err := r.read(path)
	if err != nil {
		return err
	}
	if r.Resumed = was.Batch != ""; r.Resumed {
		if err := r.fits(path, was, is, jobs, resume); err != nil {
			return err
		}
	}
	if err := r.file.Truncate(whole); err != nil {
		return err
	}
	if _, err := r.file.Seek(whole, io.SeekStart); err != nil {
		return err
	}
	if r.Batch = was.Batch; r.Resumed && was.Inode == is.Inode {
		return nil
	}
	r.Copied = r.Resumed
	r.Batch = strings.ToLower(rand.Text())
	is.Batch = r.Batch
	if err := r.line(is); err != nil {
		return err
	}
	// Sandboxes are found by what stands here.
	return r.file.Sync()
}

// fits says whether what was read may be gone on with.
func (r *Results) fits(path string, was, is head, jobs []Job, resume bool) error {
	const another = "--results names another file, for a run of all."
	if was.Jobs != is.Jobs {
		return berm.Errorf(berm.Conflict, "%s has results of other jobs, those of %s", path, was.Jobs).
			WithHint("%s If it is the same file: its place, seen from the results, must be what it was.", another)
	}
	if len(r.done) > 0 && !resume {
		return berm.Errorf(berm.AlreadyExists, "%s has results of %d jobs already", path, len(r.done)).
			WithHint("--resume goes on with the jobs that are left; %s", another)
	}
	unknown := make(map[string]bool, len(r.done))
	for id := range r.done {
		unknown[id] = true
	}
	for i := range jobs {
		delete(unknown, jobs[i].ID)
	}
	if len(unknown) == 0 {
		return nil
	}
	return berm.Errorf(berm.Conflict, "%s has results of %d jobs that are not in %s, such as %s", path, len(unknown), is.Jobs, slices.Min(slices.Collect(maps.Keys(unknown)))).
		WithHint("%s To go on with the others, put those jobs back or take their lines out of the results.", another)
}

// seenFrom is the place of a file of jobs as seen from the results: both may be moved together.
func seenFrom(results, from string) (string, error) {
	if from == "-" {
		return from, nil
	}
	var dirs [2]string
	for i, path := range []string{results, from} {
		dir, err := filepath.Abs(filepath.Dir(path))
		if err == nil {
			dir, err = filepath.EvalSymlinks(dir)
		}
		if err != nil {
			return "", err
		}
		dirs[i] = dir
	}
	return filepath.Rel(dirs[0], filepath.Join(dirs[1], filepath.Base(from)))
}

// inode is the number of a file and the time when it was made, if its file system tells (statx(2)):
// numbers are used again, and are few in a file system of its own.
func inode(f *os.File) (string, error) {
	var s unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_INO|unix.STATX_BTIME, &s); err != nil {
		return "", err
	}
	if s.Mask&unix.STATX_BTIME == 0 {
		return fmt.Sprint(s.Ino), nil
	}
	return fmt.Sprintf("%d %d.%09d", s.Ino, s.Btime.Sec, s.Btime.Nsec), nil
}

// read returns the last head and where the last whole line ends.
func (r *Results) read(path string) (last head, whole int64, err error) {
	in := bufio.NewReader(r.file)
	for n := 1; ; n++ {
		line, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			const start = `{"batch":"`
			if text := string(line); n == 1 && !strings.HasPrefix(text, start) && !strings.HasPrefix(start, text) {
				return head{}, 0, notResults(path)
			}
			return last, whole, nil
		} else if err != nil {
			return head{}, 0, berm.Errorf(berm.Invalid, "%s: %w", path, err)
		}
		whole += int64(len(line))
		var is struct {
			head
			Result
		}
		err = json.Unmarshal(line, &is)
		switch {
		case err == nil && is.Batch != "" && is.Jobs != "" && is.Version == 1:
			last = is.head
		case n == 1:
			return head{}, 0, notResults(path)
		case err != nil || is.Job == "":
			return head{}, 0, berm.Errorf(berm.Invalid, "%s:%d: this is no result", path, n).
				WithHint("Take the line out, and the job is run again; or --results names another file, for a run of all.")
		default:
			is.Stdout, is.Stderr, is.Checks = "", "", nil
			r.done[is.Job] = is.Result
		}
	}
}

func notResults(path string) error {
	return berm.Errorf(berm.Invalid, "%s:1: this is no file of results", path).WithHint("--results names another file, which is made.")
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
