package local

import (
	"encoding/json"
	"errors"
	"os/user"
	"path/filepath"
	"slices"
	"sync"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/local/preset"
	"github.com/berm-sandbox/berm/internal/local/session"
)

// records tells the user's own audit log of one run. The log is as trustworthy as the
// user: whoever runs the command can write it. So a run goes on when it cannot be written,
// and the user is told.
type records struct {
	task    *Task
	request *Request
	actor   audit.Actor
	path    string
	begun   chan error

	mu   sync.Mutex
	more []audit.Record // for the end
	// looked says that they were looked through for secrets.
	looked bool
}

// maxRecords bounds what waits for the end of a run.
const maxRecords = 10_000

// add records something that happened during the run.
func (j *records) add(r audit.Record) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.more) < maxRecords {
		j.more = append(j.more, r)
	}
}

// withheld is in the place of what could not be looked through for secrets.
var withheld = map[string]string{"withheld": "the service of credentials was not there to look it through for secrets"}

// maskedAtOnce is about how many bytes of records are looked through at once.
const maskedAtOnce = 512 << 10

// mask has the secrets of the run's credentials masked in what was recorded so far. What comes
// later is the service's own, which masks it.
func (j *records) mask(mask func(text []byte) ([]byte, error)) {
	j.mu.Lock()
	records := j.more
	j.more, j.looked = nil, true
	j.mu.Unlock() // who masks may have something to tell
	defer func() {
		j.mu.Lock()
		defer j.mu.Unlock()
		j.more = append(records, j.more...)
	}()
	var batch []byte
	var ends []int // in batch, of the records before from
	from := 0
	flush := func() {
		masked, err := mask(batch)
		if err == nil && len(masked) != len(batch) {
			err = errLength
		}
		at := 0
		for i, end := range ends {
			records[from+i].Data = withheld
			if err == nil {
				records[from+i].Data = json.RawMessage(masked[at:end])
			}
			at = end
		}
		from, batch, ends = from+len(ends), nil, nil
	}
	for i := range records {
		text, err := json.Marshal(records[i].Data)
		if err != nil {
			text = []byte("null")
		}
		batch = append(batch, text...)
		if ends = append(ends, len(batch)); len(batch) >= maskedAtOnce {
			flush()
		}
	}
	flush()
}

var errLength = errors.New("what was masked has another length")

// hasSecrets says whether somebody knows secrets that must not be recorded.
func (j *records) hasSecrets() bool { return j.request.Network && len(j.request.Grant.Credentials) > 0 }

// begin records what is about to run, while the sandbox is made.
func begin(t *Task, r *Request) *records {
	j := &records{task: t, request: r, actor: audit.Actor{Type: "user", ID: name()}, begun: make(chan error, 1)}
	state, err := session.StateDir()
	if err != nil {
		j.begun <- err
		return j
	}
	j.path = filepath.Join(state, "audit", "log.jsonl")
	data := map[string]any{
		"argv": r.Argv, "workspace": r.Place.Workspace, "access": r.Grant.Workspace, "preset": r.Grant.Preset,
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
	first := j.record(audit.SandboxCreate, audit.OK, "", data)
	if j.hasSecrets() {
		// Arguments may hold one. Nobody can tell before the service of credentials is there.
		j.more = []audit.Record{first}
		j.begun <- nil
		return j
	}
	go func() { j.begun <- audit.Append(j.path, first) }()
	return j
}

// end records how it ended.
func (j *records) end(result Result, err error) {
	failed := <-j.begun
	if failed == nil {
		exit := j.record(audit.SandboxExit, audit.OK, string(result.Reason), map[string]any{
			"level": result.Level, "exitCode": result.ExitCode, "session": result.Session, "ms": result.Duration.Milliseconds(),
		})
		if err != nil {
			exit = j.record(audit.SandboxExit, audit.Failed, err.Error(), map[string]any{"kind": berm.KindOf(err).String()})
		}
		if w := result.wrote; w != nil {
			j.add(j.record(w.Type, w.Outcome, w.Reason, w.Data))
		}
		j.mu.Lock()
		for i := range j.more {
			if j.hasSecrets() && !j.looked {
				j.more[i].Data = withheld
			}
		}
		failed = audit.Append(j.path, append(j.more, exit)...)
		j.mu.Unlock()
	}
	if failed != nil {
		j.task.Notice("this run is not in the audit log: " + failed.Error())
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
