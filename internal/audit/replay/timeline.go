// Package replay makes what a log tells of one sandbox into a timeline: commands and what
// they printed, processes, files, network, credentials and life cycle on one clock.
package replay

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

// maxEvents bounds a timeline. Processes beyond half of it are left out first.
const maxEvents = 1_000_000

// Event is a record on the timeline.
type Event struct {
	Time    time.Time // of what it tells, which may be some time before its record: a flow's is its beginning
	Seq     uint64
	Type    audit.Type
	Src     string
	Trust   audit.Trust
	Actor   audit.Actor
	Outcome audit.Outcome
	Reason  string
	// Data is *audit.Command, *audit.Process, *audit.ProcessSum, *audit.FileAccess,
	// *audit.Changes, *egress.Event, *egress.Reply, or a map for the other types.
	Data  any
	Raw   json.RawMessage // Data as it was recorded
	Blobs []audit.Blob
	Trace string // what records of one action have in common
	// Command is that which the event is of.
	Command *Command
}

// Command is a command that the API started, or that of `berm run`.
type Command struct {
	audit.Command
	Number  int // from 1 on, in order of start
	Start   time.Time
	End     time.Time // that of the timeline while Ended is unset
	Ended   bool
	Trust   audit.Trust
	Actor   audit.Actor
	frames  *audit.Blob
	outcome audit.Outcome
	reason  string
	trace   string
}

// Timeline is what a log tells of one sandbox.
type Timeline struct {
	Sandbox  berm.SandboxID
	Template string
	Level    string
	// Local says that it was made by berm run, around the directory Workspace.
	Local     bool
	Workspace string
	Start     time.Time
	End       time.Time
	// Ended says that the sandbox has, and Reason why.
	Ended  bool
	Reason string
	// Events are in order of time.
	Events    []*Event
	Commands  []*Command
	Processes []*Process
	// Warnings tell what is not on the timeline or may be wrong, for a person.
	Warnings []string

	source trail.Source
	lanes  map[string][]*Event
	looks  []*look
	direct bool     // berm run let it write into the project
	unseen *Event   // the last look that could not be taken
	recent struct { // frames that were read last: who plays a command asks again and again
		command *Command
		frames  []audit.Frame
	}
}

// Load reads all records of a sandbox. Kind NotFound if there are none. Records that cannot
// be read are warned of.
func Load(source trail.Source, id berm.SandboxID) (*Timeline, error) {
	t := &Timeline{Sandbox: id, source: source}
	unread, left := 0, 0
	var lastErr error
	for line, err := range source.Records(0) {
		switch {
		case err != nil:
			unread, lastErr = unread+1, err
			continue
		case line.Sandbox != id && (line.Sandbox != "" || line.Type != audit.Gap || len(t.Events) == 0 || t.Ended):
			continue // but gaps of the whole log while the sandbox lived are its, too
		case line.Type == audit.HoldSet, line.Type == audit.HoldEnd:
			continue // of the log, and perhaps long after the sandbox
		case len(t.Events) >= maxEvents, len(t.Events) >= maxEvents/2 && Lane(line.Type) == Proc:
			left++
			continue
		}
		e, err := NewEvent(line)
		if err != nil {
			t.warn("record %d: %v", line.Seq, err)
		}
		t.Events = append(t.Events, e)
		t.Ended = t.Ended || e.Type == audit.SandboxExit
	}
	if len(t.Events) == 0 {
		if lastErr != nil {
			return nil, lastErr
		}
		return nil, berm.Errorf(berm.NotFound, "the log has no record of sandbox %s", id)
	}
	if unread > 0 {
		t.warn("%d lines of the log could not be read, the last one: %v", unread, lastErr)
	}
	if left > 0 {
		t.warn("%d records are left out: there are too many", left)
	}
	t.arrange()
	return t, nil
}

func (t *Timeline) warn(format string, args ...any) {
	if len(t.Warnings) < 100 {
		t.Warnings = append(t.Warnings, fmt.Sprintf(format, args...))
	}
}

// NewEvent makes an event of a record. With an error its data is not what its type says, and
// stays a map.
func NewEvent(line trail.Line) (*Event, error) {
	r := &line.Record
	e := &Event{
		Time: r.Time, Seq: r.Seq, Type: r.Type, Src: r.Src, Trust: r.Trust, Actor: r.Actor,
		Outcome: r.Outcome, Reason: r.Reason, Data: r.Data, Blobs: r.Blobs, Trace: r.TraceID,
	}
	var data struct{ Data json.RawMessage }
	if err := json.Unmarshal(line.Raw, &data); err != nil {
		return e, err
	}
	e.Raw = data.Data
	var typed any
	switch Lane(r.Type) {
	case Exec:
		typed = &audit.Command{}
	case Proc:
		typed = &audit.Process{}
		if r.Type == audit.ProcSum {
			typed = &audit.ProcessSum{}
		}
	case Files:
		typed = &audit.FileAccess{}
		if r.Type == audit.FileChange {
			typed = &audit.Changes{}
		}
	case Network, Credentials:
		switch r.Type {
		case audit.NetAsk:
			typed = &egress.Reply{}
		case audit.CredentialSet:
			return e, nil
		default:
			typed = &egress.Event{}
		}
	default:
		return e, nil
	}
	if err := json.Unmarshal(e.Raw, typed); err != nil {
		return e, fmt.Errorf("its data is not that of %s: %w", r.Type, err)
	}
	e.Data = typed
	return e, nil
}

// arrange puts the events in order and follows commands, processes and files.
func (t *Timeline) arrange() {
	first := slices.MinFunc(t.Events, func(a, b *Event) int { return a.Time.Compare(b.Time) }).Time
	for _, e := range t.Events {
		// Who saw it told when it was: that cannot have been before the sandbox or after the record.
		at := e.Time
		switch data := e.Data.(type) {
		case *egress.Event:
			at = data.Time
		case *audit.Process:
			at = at.Add(-time.Duration(data.Ago) * time.Microsecond)
		}
		if at.After(first) && at.Before(e.Time) {
			e.Time = at
		}
	}
	slices.SortStableFunc(t.Events, func(a, b *Event) int {
		return cmp.Or(a.Time.Compare(b.Time), cmp.Compare(a.Seq, b.Seq))
	})
	t.join()
	t.Start, t.End = t.Events[0].Time, t.Events[len(t.Events)-1].Time
	t.lanes = map[string][]*Event{}
	for _, e := range t.Events {
		lane := Lane(e.Type)
		t.lanes[lane] = append(t.lanes[lane], e)
	}
	t.numbers()
	gaps, unrecorded, erased := 0, 0, 0
	processes := processes{}
	for _, e := range t.Events {
		switch e.Type {
		case audit.SandboxCreate:
			t.created(e)
		case audit.SandboxStart:
			if data, ok := e.Data.(map[string]any); ok {
				if level, ok := data["level"].(string); ok {
					t.Level = level // sandbox.create has the one that was asked for
				}
			}
		case audit.SandboxExit:
			t.exited(e)
			processes.end(e.Time)
		case audit.ExecStart, audit.ExecExit:
			if c, ok := e.Data.(*audit.Command); ok {
				e.Command = t.command(e, c)
				processes.command(e.Command, e.Type == audit.ExecExit)
			}
		case audit.ProcFork, audit.ProcExec, audit.ProcExit:
			if p, ok := e.Data.(*audit.Process); ok {
				processes.see(e, p)
			}
		case audit.FileChange, audit.FileAPI:
			t.see(e)
		case audit.Gap:
			if data, ok := e.Data.(map[string]any); ok && data["count"] == nil {
				unrecorded++
				break
			}
			gaps++
		case audit.Erase:
			var data audit.Erasure
			if json.Unmarshal(e.Raw, &data) == nil {
				erased += data.Records
			}
		}
	}
	t.Processes = processes.all
	for _, c := range t.Commands {
		if !c.Ended {
			c.End = t.End
		}
	}
	if erased > 0 {
		t.warn("what happened in this sandbox was erased from the log on request (%s): a record tells by whom and why", count(erased, "record"))
	}
	if unrecorded > 0 {
		t.warn("not everything was recorded: --only audit tells what was not")
	}
	if gaps > 0 {
		t.warn("records were lost (%s): what follows is not all that happened", count(gaps, "gap"))
	}
}

// join makes one event of a look at the writable layer that took several records. What continues a
// look that is not there any more tells of nothing.
func (t *Timeline) join() {
	var look *Event
	joined := t.Events[:0]
	for _, e := range t.Events {
		switch {
		case e.Type != audit.FileChange:
		case !e.continues():
			look = e
		case look != nil:
			look.Blobs = append(slices.Clip(look.Blobs), e.Blobs...)
			continue
		}
		joined = append(joined, e)
	}
	t.Events = joined
}

// Of is the events of a lane until a time.
func (t *Timeline) Of(lane string, at time.Time) []*Event { return until(t.lanes[lane], at) }

// Until is the events until a time.
func (t *Timeline) Until(at time.Time) []*Event { return until(t.Events, at) }

func until(events []*Event, at time.Time) []*Event {
	n, _ := slices.BinarySearchFunc(events, at, func(e *Event, at time.Time) int {
		if e.Time.After(at) {
			return 1
		}
		return -1
	})
	return events[:n]
}

// numbers tells the start of each command its process, which is known at its end alone.
func (t *Timeline) numbers() {
	pids := map[string]int{}
	for _, e := range t.Events {
		if c, ok := e.Data.(*audit.Command); ok && e.Type == audit.ExecExit && e.Trace != "" {
			pids[e.Trace] = c.PID
		}
	}
	for _, e := range t.Events {
		if c, ok := e.Data.(*audit.Command); ok && e.Type == audit.ExecStart && c.PID == 0 {
			c.PID = pids[e.Trace]
		}
	}
}

func (t *Timeline) created(e *Event) {
	data, _ := e.Data.(map[string]any)
	if s, ok := data["template"].(string); ok {
		t.Template = s
	}
	if s, ok := data["level"].(string); ok {
		t.Level = s
	}
	// berm run tells its command with the sandbox.
	if t.Local = e.Src == local; t.Local {
		t.Workspace, _ = data["workspace"].(string)
		t.direct = data["access"] == "rw"
	}
	if argv := texts(data["argv"]); argv != nil {
		c := &Command{Number: len(t.Commands) + 1, Start: e.Time, Trust: e.Trust, Actor: e.Actor}
		c.Argv = argv
		c.Cwd = t.Workspace
		e.Command = c
		t.Commands = append(t.Commands, c)
	}
}

func (t *Timeline) exited(e *Event) {
	t.Ended, t.Reason = true, e.Reason
	data, _ := e.Data.(map[string]any)
	if level, ok := data["level"].(string); ok && t.Level == "" {
		t.Level = level
	}
	for _, c := range t.Commands {
		if c.Ended {
			continue
		}
		if code, ok := data["exitCode"].(float64); ok && e.Src == local {
			n := int(code)
			c.Code = &n
		} else {
			c.reason = gone
		}
		c.Ended, c.End, c.outcome = true, e.Time, e.Outcome
	}
}

// command finds the command that a record is of, and takes in what it tells.
func (t *Timeline) command(e *Event, data *audit.Command) *Command {
	if e.Type == audit.ExecExit {
		for _, c := range slices.Backward(t.Commands) {
			if !c.Ended && c.trace == e.Trace && (e.Trace != "" || c.PID == data.PID) {
				c.end(e, data)
				return c
			}
		}
	}
	c := &Command{Command: *data, Number: len(t.Commands) + 1, Start: e.Time, Trust: e.Trust, Actor: e.Actor, outcome: e.Outcome, reason: e.Reason, trace: e.Trace}
	if e.Type == audit.ExecExit { // its start is not there
		c.Start = e.Time.Add(-time.Duration(data.Millis) * time.Millisecond)
		c.end(e, data)
	} else if e.Outcome != audit.OK && e.Outcome != "" { // it never ran
		c.Ended, c.End = true, e.Time
	}
	t.Commands = append(t.Commands, c)
	return c
}

func (c *Command) end(e *Event, data *audit.Command) {
	c.Ended, c.End, c.outcome = true, e.Time, e.Outcome
	c.Code, c.Signal, c.Millis, c.Output = data.Code, data.Signal, data.Millis, data.Output
	if e.Reason != "" {
		c.reason = e.Reason
	}
	if len(c.Argv) == 0 {
		c.Argv = data.Argv
	}
	for _, b := range e.Blobs {
		if b.Kind == audit.KindFrames {
			c.frames = &b
		}
	}
}

// local is the source of the records of berm run.
const local = "local"

// gone is why a command has no end of its own.
const gone = "the sandbox ended"

// Result says how a command ended, in a few words.
func (c *Command) Result() string {
	switch {
	case !c.Ended:
		return "running"
	case c.Signal != "":
		return "killed by " + c.Signal
	case c.Code != nil && c.Ended:
		return fmt.Sprintf("exit %d", *c.Code)
	case c.reason == gone:
		return gone
	case strings.HasPrefix(c.reason, audit.NotStarted):
		return audit.NotStarted
	case c.outcome == audit.Failed || c.outcome == audit.Denied:
		return "end not told"
	}
	return "ended"
}

// Failed says that a command did not end well.
func (c *Command) Failed() bool {
	return c.Ended && (c.Signal != "" || c.Code == nil || *c.Code != 0)
}
