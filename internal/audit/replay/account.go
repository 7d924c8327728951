package replay

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/terminal"
)

// Part is what of a timeline is told.
type Part struct {
	Lanes []string // none: all
	From  time.Time
}

func (p Part) has(lane string) bool { return len(p.Lanes) == 0 || slices.Contains(p.Lanes, lane) }

// Account writes for a person what happened: what was run, what changed, what was contacted,
// what was denied and why, and then all of it in order. What the sandbox chose is escaped.
func Account(w io.Writer, t *Timeline, p Part, style terminal.Style) error {
	a := &account{Timeline: t, part: p, style: style}
	a.head()
	if len(p.Lanes) == 0 {
		a.commands()
		a.files()
		a.reach()
		a.network()
		a.credentials()
		a.limits()
		a.title("In order")
	}
	a.order()
	_, err := w.Write(a.out.Bytes())
	return err
}

type account struct {
	*Timeline
	part  Part
	style terminal.Style
	out   bytes.Buffer
}

// maxLine bounds a line of an account in columns.
const maxLine = 400

func (a *account) line(indent, text string) {
	a.out.WriteString(indent + terminal.Clip(terminal.Escape(text), maxLine) + "\n")
}

func (a *account) title(text string) { a.out.WriteString("\n" + a.style.Bold(text) + "\n") }

// Clock is the time on the timeline's clock.
func (t *Timeline) Clock(at time.Time) string { return Clock(at.Sub(t.Start)) }

// Clock writes a time since the start.
func Clock(d time.Duration) string {
	d = max(d, 0)
	text := fmt.Sprintf("%02d:%02d.%03d", int(d.Minutes())%60, int(d.Seconds())%60, d.Milliseconds()%1000)
	if d >= time.Hour {
		text = fmt.Sprintf("%d:", int(d.Hours())) + text
	}
	return text
}

func (a *account) head() {
	a.out.WriteString(a.style.Bold("Sandbox "+string(a.Sandbox)) + "\n")
	what := "of template " + cmp.Or(a.Template, "that is not on record")
	if a.Local {
		what = "of berm run in " + a.Workspace
	}
	if a.Level != "" {
		what += " at level " + a.Level
	}
	a.line("", what)
	a.line("", fmt.Sprintf("%s to %s (%s)", a.Start.Local().Format(time.DateTime), a.End.Local().Format("2006-01-02 15:04:05 MST"), Clock(a.End.Sub(a.Start))))
	switch {
	case a.Ended && a.Reason != "":
		a.line("", "ended: "+a.Reason)
	case a.Ended:
		a.line("", "ended")
	default:
		a.line("", "no record of its end")
	}
	if slices.ContainsFunc(a.Events, func(e *Event) bool { return e.Trust == audit.TrustGuest }) {
		a.line("", `"guest": told by the inside, where root can forge it`)
	}
	if slices.ContainsFunc(a.Events, func(e *Event) bool { return e.Trust == audit.TrustUser }) {
		a.line("", "recorded by the same user who ran it, who could change the log")
	}
	for _, text := range a.Warnings {
		a.out.WriteString(a.style.Bad("!") + " ")
		a.line("", text)
	}
}

func (a *account) commands() {
	a.title("What was run")
	if len(a.Commands) == 0 {
		a.line("  ", "no command")
	}
	for _, c := range a.Commands {
		took := Clock(c.End.Sub(c.Start))
		result := terminal.Clip(terminal.Escape(c.Result()), 20)
		pad := strings.Repeat(" ", max(0, 16-terminal.Width(result)))
		if c.Failed() {
			result = a.style.Bad(result)
		}
		fmt.Fprintf(&a.out, "  %s  %s%s %s  ", a.Clock(c.Start), result, pad, a.style.Dim(took))
		a.line("", Argv(c.Argv))
	}
	programs, executed := map[string]int{}, 0
	for _, e := range a.Events {
		switch data := e.Data.(type) {
		case *audit.Process:
			if e.Type == audit.ProcExec {
				programs[program(data.Exe)]++
				executed++
			}
		case *audit.ProcessSum:
			if data.Call == "" {
				programs[data.Exe] += data.Count
				executed += data.Count
			}
		}
	}
	if executed > 0 {
		a.line("  ", fmt.Sprintf("inside, %s of %s: %s", count(executed, "execution"), count(len(programs), "program"), most(programs, 12)))
	}
	if a.Local {
		a.line("  ", unkept)
	}
}

// most names the most frequent.
func most(counts map[string]int, n int) string {
	names := slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		return cmp.Or(cmp.Compare(counts[b], counts[a]), strings.Compare(a, b))
	})
	var parts []string
	for _, name := range names[:min(n, len(names))] {
		parts = append(parts, fmt.Sprintf("%s %d", name, counts[name]))
	}
	if len(names) > n {
		parts = append(parts, "…")
	}
	return strings.Join(parts, ", ")
}

// maxList bounds a list of an account; what is left out is counted.
const maxList = 60

func (a *account) files() {
	a.title("What changed")
	when, why, looked := a.Looked(a.End)
	if !looked {
		a.line("  ", a.Unlooked())
		if a.Local {
			return
		}
		a.line("  ", "what the files API wrote:")
	}
	files := a.FilesAt(a.End)
	added, changed, deleted := Counts(files)
	text := fmt.Sprintf("%d added, %d changed, %d deleted", added, changed, deleted)
	if looked {
		text += fmt.Sprintf(", seen at %s (%s)", a.Clock(when), why)
	}
	a.line("  ", text)
	if unseen := a.Unseen(); looked && unseen != "" {
		a.line("  ", unseen)
	}
	lines := fileLines(files, a.Workspace)
	for _, line := range lines[:min(maxList, len(lines))] {
		a.line("  ", line)
	}
	if left := len(lines) - maxList; left > 0 {
		a.line("  ", fmt.Sprintf("and %d more", left))
	}
}

// machines are directories that programs fill, and people do not read.
var machines = []string{"node_modules", "__pycache__", "site-packages", "target", "venv"}

// fileLines tells files in a line each, and what lies in such a directory below the project, if
// there is one, in one.
func fileLines(files []File, project string) (lines []string) {
	collapsed, at := map[string]int{}, map[string]int{}
	for _, f := range files {
		dir := ""
		for i, r := range f.Path {
			if r != '/' || i == 0 || strings.HasPrefix(project, f.Path[:i]) {
				continue
			}
			name := path.Base(f.Path[:i])
			if strings.HasPrefix(name, ".") || slices.Contains(machines, name) {
				dir = f.Path[:i]
				break
			}
		}
		if dir == "" {
			lines = append(lines, fileLine(f))
			continue
		}
		if collapsed[dir]++; collapsed[dir] == 1 {
			at[dir] = len(lines)
			lines = append(lines, fileLine(f)) // unless there are more
		}
	}
	for dir, n := range collapsed {
		if n == 1 {
			continue
		}
		lines[at[dir]] = fmt.Sprintf("%-7s %s/… (%s)", "in", dir, count(n, "path"))
	}
	return lines
}

func fileLine(f File) string {
	text := fmt.Sprintf("%-7s %s", f.Op, f.Path)
	switch {
	case f.Kind == "link":
		text += " -> " + f.Target
	case f.Kind == "dir":
		text += "/"
	case f.Kind == "file" && f.Op != "delete":
		text += fmt.Sprintf(" (%d bytes)", f.Size)
	case f.Kind != "file":
		text += " (" + f.Kind + ")"
	}
	if f.Seen == "api" {
		text += ", by the files API"
	}
	return text
}

func (a *account) reach() {
	all := a.reaches()
	if len(all) == 0 {
		return
	}
	a.title("What it was allowed to reach")
	for _, r := range all {
		indent := "  "
		if len(all) > 1 {
			a.line(indent, "from "+a.Clock(r.at)+" on")
			indent += "  "
		}
		for _, line := range r.lines[:min(maxList, len(r.lines))] {
			a.line(indent, line)
		}
		if left := len(r.lines) - maxList; left > 0 {
			a.line(indent, fmt.Sprintf("and %d more", left))
		}
	}
}

func (a *account) network() {
	a.title("What was contacted")
	type contact struct {
		flows, requests int // that were allowed; requests are in flows, with their bytes
		denied          int
		up, down        int64
		first           time.Time
		why             map[string]int
	}
	contacts, order := map[string]*contact{}, []string(nil)
	for _, e := range a.Events {
		f, ok := e.Data.(*egress.Event)
		if !ok || Lane(e.Type) != Network {
			continue
		}
		to := Destination(f)
		c := contacts[to]
		if c == nil {
			c = &contact{first: e.Time, why: map[string]int{}}
			contacts[to], order = c, append(order, to)
		}
		times := max(f.Count, 1)
		if f.Action == "deny" {
			c.denied += times
			c.why[why(f)] += times
			continue
		}
		if f.Unreached {
			c.why["not reached: "+f.Detail]++
		}
		if f.Kind == "http" {
			c.requests += times
			continue
		}
		c.flows += times
		c.up, c.down = c.up+f.Up, c.down+f.Down
	}
	if len(order) == 0 {
		a.line("  ", cmp.Or(a.Unwatched(), "nothing, and nothing was tried"))
	}
	tell := func(denied bool) {
		n := 0
		for _, to := range order {
			c := contacts[to]
			if denied && c.denied == 0 || !denied && c.flows+c.requests == 0 {
				continue
			}
			if n++; n > maxList {
				continue
			}
			if denied {
				a.out.WriteString("  " + a.style.Bad("deny  ") + " ")
				a.line("", fmt.Sprintf("%s, %s", to, count(c.denied, "time")))
			} else {
				a.out.WriteString("  " + a.style.Good("allow ") + " ")
				text := to
				if c.flows > 0 {
					text += ", " + count(c.flows, "time")
				}
				if c.requests > 0 {
					text += ", " + count(c.requests, "request")
				}
				a.line("", fmt.Sprintf("%s, %d bytes out, %d in", text, c.up, c.down))
			}
			for _, why := range slices.Sorted(maps.Keys(c.why)) {
				if strings.HasPrefix(why, "not reached: ") != denied {
					a.line("         ", why)
				}
			}
		}
		if n > maxList {
			a.line("  ", fmt.Sprintf("and %d more", n-maxList))
		}
	}
	if len(order) > 0 && !slices.ContainsFunc(order, func(to string) bool { return contacts[to].flows+contacts[to].requests > 0 }) {
		a.line("  ", "nothing")
	}
	tell(false)
	if slices.ContainsFunc(order, func(to string) bool { return contacts[to].denied > 0 }) {
		a.title("What was denied, and why")
		tell(true)
	}
}

func (a *account) credentials() {
	uses := map[string]int{}
	for _, e := range a.Events {
		if f, ok := e.Data.(*egress.Event); ok && Lane(e.Type) == Credentials {
			what := strings.TrimPrefix(string(e.Type), "credential.")
			use := fmt.Sprintf("%-7s %s", what, cmp.Or(f.Credential, "(none)"))
			if to := Destination(f); to != "" {
				use += " for " + to
			}
			uses[use] += max(f.Count, 1)
		}
	}
	if len(uses) == 0 {
		return
	}
	a.title("Credentials")
	for i, use := range slices.Sorted(maps.Keys(uses)) {
		if i == maxList {
			a.line("  ", fmt.Sprintf("and %d more", len(uses)-i))
			break
		}
		a.line("  ", use+", "+count(uses[use], "time"))
	}
}

func (a *account) limits() {
	titled := false
	for _, e := range a.Events {
		if Lane(e.Type) != Limits {
			continue
		}
		if !titled {
			a.title("Limits")
			titled = true
		}
		a.line("  ", a.Clock(e.Time)+"  "+e.Text())
	}
}

// maxOutput is how many lines of a command's output an account has.
const maxOutput = 20

// order tells all events one after the other, with what commands printed at their end.
func (a *account) order() {
	for _, e := range a.Events {
		if e.Time.Before(a.part.From) {
			continue
		}
		lane := Lane(e.Type)
		if a.part.has(lane) {
			mark := fmt.Sprintf("%-10s", terminal.Clip(terminal.Escape(lane), 10))
			if e.Bad() {
				mark = a.style.Bad(mark)
			}
			fmt.Fprintf(&a.out, "  %s  %s  ", a.style.Dim(a.Clock(e.Time)), mark)
			text := e.Text()
			if e.Trust == audit.TrustGuest {
				text = "(guest) " + text
			}
			a.line("", text)
		}
		if e.Type == audit.ExecExit && e.Command != nil && a.part.has(Output) {
			a.output(e.Command)
		}
	}
	for _, c := range a.Commands {
		if c.HasOutput() && !c.Ended && a.part.has(Output) {
			a.output(c)
		}
	}
}

func (a *account) output(c *Command) {
	most := maxOutput
	if slices.Contains(a.part.Lanes, Output) {
		most = 1 << 20
	}
	lines, before, err := a.Transcript(c, most)
	if before > 0 {
		a.line("               ", fmt.Sprintf("… %s before; --only output shows all", count(before, "line")))
	}
	for _, line := range lines {
		a.line("              "+a.style.Dim("|")+" ", line)
	}
	if err != nil {
		a.line("              ! ", err.Error())
	}
}

// Bad says that an event is one to look at: it failed, was denied, or tells of a limit or a loss.
func (e *Event) Bad() bool {
	if e.Command != nil && e.Type == audit.ExecExit {
		return e.Command.Failed()
	}
	if e.Type == audit.ProcExit { // many programs answer by their exit code
		return false
	}
	return e.Outcome == audit.Denied || e.Outcome == audit.Failed || e.Type == audit.LimitHit || e.Type == audit.Gap
}

// Entry is an event as --json prints it.
type Entry struct {
	Time    time.Time       `json:"time"`
	At      float64         `json:"at"` // seconds since the start
	Lane    string          `json:"lane"`
	Type    audit.Type      `json:"type,omitempty"`
	Seq     uint64          `json:"seq,omitempty"`
	Trust   audit.Trust     `json:"trust,omitempty"`
	Actor   *audit.Actor    `json:"actor,omitempty"`
	Outcome audit.Outcome   `json:"outcome,omitempty"`
	Reason  string          `json:"reason,omitempty"`
	Text    string          `json:"text,omitempty"`
	Command int             `json:"command,omitempty"` // its number
	Data    json.RawMessage `json:"data,omitempty"`
	// Of output.
	Stream string `json:"stream,omitempty"` // "stdout", "stderr", "stdin", "resize" or "cut"
	Output string `json:"output,omitempty"` // bytes that are no UTF-8 are replaced
}

var streams = map[audit.Stream]string{audit.Stdout: "stdout", audit.Stderr: "stderr", audit.Stdin: "stdin", audit.Resize: "resize", audit.Cut: "cut"}

// Entries yields the events, and what commands printed, in order of time, until yield returns
// an error.
func Entries(t *Timeline, p Part, yield func(Entry) error) error {
	entries := make([]Entry, 0, len(t.Events))
	add := func(e Entry) {
		if !e.Time.Before(p.From) && p.has(e.Lane) {
			e.At = e.Time.Sub(t.Start).Seconds()
			entries = append(entries, e)
		}
	}
	for _, e := range t.Events {
		entry := Entry{
			Time: e.Time, Lane: Lane(e.Type), Type: e.Type, Seq: e.Seq, Trust: e.Trust, Actor: &e.Actor,
			Outcome: e.Outcome, Reason: e.Reason, Text: e.Text(), Data: e.Raw,
		}
		if e.Command != nil {
			entry.Command = e.Command.Number
		}
		add(entry)
	}
	if p.has(Output) {
		for _, c := range t.Commands {
			frames, err := t.Frames(c)
			if err != nil {
				t.warn("%v", err)
			}
			for _, f := range frames {
				add(Entry{Time: c.Start.Add(f.At), Lane: Output, Command: c.Number, Stream: streams[f.Stream], Output: string(f.Data)})
			}
		}
	}
	slices.SortStableFunc(entries, func(a, b Entry) int { return a.Time.Compare(b.Time) })
	for _, e := range entries {
		if err := yield(e); err != nil {
			return err
		}
	}
	return nil
}
