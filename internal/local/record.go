package local

import (
	"encoding/json"
	"errors"
	"os/user"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/local/preset"
	"github.com/berm-sandbox/berm/internal/local/session"
)

// records tells the user's own audit log of one run, as it happens. The log is as trustworthy
// as the user: whoever runs the command can write it. So a run goes on when it cannot be
// written, and the user is told.
type records struct {
	task    *Task
	request *Request
	actor   audit.Actor
	path    string

	mu      sync.Mutex
	waiting []waiting
	lost    int // for which there was no place in waiting

	writing sync.Mutex                        // held while records are written
	mask    func(text []byte) ([]byte, error) // of who knows the secrets of the run; nil: nobody
	failed  error                             // nothing is written any more

	full    chan struct{} // waiting is
	ending  chan struct{}
	written chan struct{} // closed when nothing is written but by end; nil: nothing was
}

// waiting is a record that is not written yet.
type waiting struct {
	audit.Record
	told bool // by who masks secrets in what it tells
	at   time.Time
}

const (
	// writeEvery is how long records wait for others: each time, the log is opened anew.
	writeEvery = 200 * time.Millisecond
	// maxWaiting bounds how many wait. From half of it on they are written at once.
	maxWaiting = 2000
	// maskPatience bounds how long masking may take.
	maskPatience = 10 * time.Second
)

// add records something that happened during the run.
func (j *records) add(r audit.Record, told bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.waiting) == maxWaiting {
		j.lost++
		return
	}
	if j.waiting = append(j.waiting, waiting{r, told, time.Now()}); len(j.waiting) >= maxWaiting/2 {
		select {
		case j.full <- struct{}{}:
		default:
		}
	}
}

// withheld is in the place of what could not be looked through for secrets.
var withheld = map[string]string{"withheld": "the service of credentials was not there to look it through for secrets"}

// maskedAtOnce is about how many bytes of records are looked through at once.
const maskedAtOnce = 512 << 10

// write writes what waits.
func (j *records) write() {
	j.writing.Lock()
	defer j.writing.Unlock()
	j.mu.Lock()
	batch, lost := j.waiting, j.lost
	j.waiting, j.lost = nil, 0
	j.mu.Unlock()
	if len(batch) == 0 || j.failed != nil {
		return
	}
	for i := range batch {
		if p, ok := batch[i].Data.(audit.Process); ok { // whose time is counted from the record's
			p.Ago += time.Since(batch[i].at).Microseconds()
			batch[i].Data = p
		}
	}
	if j.hasSecrets() {
		j.maskAll(batch)
	}
	records := make([]audit.Record, len(batch))
	for i := range batch {
		records[i] = batch[i].Record
	}
	if lost > 0 {
		gap := j.record(audit.Gap, audit.OK, "there were more than could be written", map[string]any{"source": "local", "count": lost})
		records = append(records, gap)
	}
	j.failed = audit.Append(j.path, records...)
}

// maskAll has the secrets of the run's credentials masked in records of those who do not know
// them.
func (j *records) maskAll(records []waiting) {
	mask := j.mask
	if mask == nil {
		mask = func([]byte) ([]byte, error) { return nil, errNobody }
	}
	var batch []byte
	var of []*waiting // which records the parts of batch are of
	var ends []int
	flush := func() {
		masked, err := mask(batch)
		if err == nil && len(masked) != len(batch) {
			err = errLength
		}
		at := 0
		for i, end := range ends {
			of[i].Data = withheld
			if err == nil {
				of[i].Data = json.RawMessage(masked[at:end])
			}
			at = end
		}
		batch, of, ends = nil, nil, nil
	}
	for i := range records {
		r := &records[i]
		if r.told {
			continue
		}
		text, err := json.Marshal(r.Data)
		if err != nil {
			text = []byte("null")
		}
		batch, of = append(batch, text...), append(of, r)
		if ends = append(ends, len(batch)); len(batch) >= maskedAtOnce {
			flush()
		}
	}
	if len(ends) > 0 {
		flush()
	}
}

var (
	errLength = errors.New("what was masked has another length")
	errNobody = errors.New("nobody knows the secrets")
)

// hasSecrets says whether somebody knows secrets that must not be recorded.
func (j *records) hasSecrets() bool { return j.request.Network && len(j.request.Grant.Credentials) > 0 }

// begin records what is about to run, while the sandbox is made. When the run has secrets, that
// waits for open.
func begin(t *Task, r *Request) *records {
	r.Told = masked(r.Argv)
	j := &records{
		task: t, request: r, actor: audit.Actor{Type: "user", ID: name()},
		full: make(chan struct{}, 1), ending: make(chan struct{}),
	}
	state, err := session.StateDir()
	if err != nil {
		j.failed = err
		return j
	}
	j.path = filepath.Join(state, "audit", "log.jsonl")
	data := map[string]any{
		"argv": r.Told, "workspace": r.Place.Workspace, "access": r.Grant.Workspace, "preset": r.Grant.Preset,
		"session": t.Session, "limits": r.Grant.Limits, "network": r.Grant.Network,
	}
	var writable []string
	for _, p := range r.Grant.Paths {
		if p.Access == preset.ReadWrite {
			writable = append(writable, p.Path)
		}
	}
	if len(writable) > 0 {
		data["writable"] = writable
	}
	if r.Network {
		policy := t.Network.Policy
		policy.Entries = slices.Concat(policy.Entries, r.Grant.Allow)
		data["network"], data["policy"], data["open"] = "policy", policy, t.Network.Open
		var credentials []string
		for _, c := range r.Grant.Credentials {
			credentials = append(credentials, c.String())
		}
		if len(credentials) > 0 {
			data["credentials"] = credentials
		}
	}
	j.add(j.record(audit.SandboxCreate, audit.OK, "", data), false)
	if !j.hasSecrets() {
		j.start()
	}
	return j
}

// open begins to write when there is somebody who masks the run's secrets. What is about to
// run has been written when it returns.
func (j *records) open(mask func(text []byte) ([]byte, error)) {
	text, err := json.Marshal(j.request.Told)
	if err == nil {
		text, err = mask(text)
	}
	var told []string
	if err == nil {
		err = json.Unmarshal(text, &told)
	}
	if err != nil {
		told = []string{"[withheld]"}
	}
	j.request.Told, j.mask = told, mask
	j.write()
	j.start()
}

// masked is arguments without what looks like a secret.
func masked(argv []string) []string {
	told := make([]string, len(argv))
	for i, arg := range argv {
		told[i] = string(audit.MaskTokens([]byte(arg)))
	}
	return told
}

// start has records written from now on.
func (j *records) start() {
	j.written = make(chan struct{})
	go func() {
		defer close(j.written)
		tick := time.NewTicker(writeEvery)
		defer tick.Stop()
		for {
			j.write()
			select {
			case <-tick.C:
			case <-j.full:
			case <-j.ending:
				return
			}
		}
	}()
}

// end records how it ended.
func (j *records) end(result Result, err error) {
	if close(j.ending); j.written != nil {
		<-j.written
	}
	exit := j.record(audit.SandboxExit, audit.OK, string(result.Reason), map[string]any{
		"level": result.Level, "exitCode": result.ExitCode, "session": result.Session, "ms": result.Duration.Milliseconds(),
	})
	if err != nil {
		exit = j.record(audit.SandboxExit, audit.Failed, err.Error(), map[string]any{"kind": berm.KindOf(err).String()})
	}
	j.wrote(&result)
	j.write()
	j.add(exit, true)
	j.write()
	if j.failed != nil {
		j.task.Notice("this run is not in the audit log, or not wholly: " + j.failed.Error())
	}
}

// wrote records what the session has changed, once.
func (j *records) wrote(result *Result) {
	if w := result.wrote; w != nil {
		j.add(j.record(w.Type, w.Outcome, w.Reason, w.Data), false)
		result.wrote = nil
	}
}

func (j *records) record(t audit.Type, outcome audit.Outcome, reason string, data any) audit.Record {
	return audit.Record{Sandbox: j.request.ID, Actor: j.actor, Type: t, Src: "local", Trust: audit.TrustUser, Outcome: outcome, Reason: reason, Data: data}
}

// name is the user's.
func name() string {
	if me, err := user.Current(); err == nil {
		return me.Username
	}
	return ""
}
