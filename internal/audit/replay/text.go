package replay

import (
	"cmp"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

// Text tells an event in a line. Parts of it are the sandbox's choice: it is to be escaped.
func (e *Event) Text() string {
	var text string
	switch data := e.Data.(type) {
	case *audit.Command:
		text = e.command(data)
	case *audit.Process:
		text = process(e.Type, data)
	case *audit.ProcessSum:
		if data.Call != "" {
			text = fmt.Sprintf("system call %s was made %d times in a second", data.Call, data.Count)
			break
		}
		text = fmt.Sprintf("%s was executed %d times in a second", data.Exe, data.Count)
	case *audit.FileAccess:
		text = access(data)
	case *audit.Changes:
		if e.continues() {
			text = fmt.Sprintf("looked at the writable layer (%s), continued: the content of %s", data.At, count(len(e.Blobs), "file"))
			break
		}
		if text = "looked at the writable layer (" + data.At + ")"; !e.unseen() {
			text += fmt.Sprintf(": %s of another content than %s", count(len(data.Changes)+data.More, "path"), origin(e.Src))
		}
	case *egress.Event:
		text = Reached(data)
	case *egress.Reply:
		answer := "deny"
		if data.Allow {
			answer = "allow"
		}
		q := data.Question
		text = fmt.Sprintf("%s answered %s %s %s (rule %s; for %s)", who(e.Actor), answer, q.Protocol, net.JoinHostPort(q.Host, strconv.Itoa(int(q.Port))), q.Rule, cmp.Or(data.Scope, "nothing"))
	case map[string]any:
		text = e.plain(data)
	default:
		text = e.plain(nil)
	}
	switch e.Outcome {
	case audit.Failed:
		if e.Type != audit.ExecExit && e.Type != audit.ProcExit { // which say how
			text += ": failed"
		}
	case audit.Denied:
		if _, flow := e.Data.(*egress.Event); !flow {
			text += ": denied"
		}
	}
	if _, flow := e.Data.(*egress.Event); !flow && e.Reason != "" {
		text += ": " + strings.TrimPrefix(e.Reason, audit.NotStarted+": ")
	}
	return text
}

// origin is what the files of a sandbox are compared with.
func origin(src string) string {
	if src == local {
		return "the project's"
	}
	return "the template's"
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// who names an actor.
func who(a audit.Actor) string {
	if a.ID == "" {
		return a.Type
	}
	return a.Type + " " + a.ID
}

func (e *Event) command(c *audit.Command) string {
	if e.Type == audit.ExecStart {
		text := Argv(c.Argv)
		if c.Cwd != "" {
			text += " in " + c.Cwd
		}
		if c.User != "" {
			text += " as " + c.User
		}
		if c.TTY != nil {
			text += fmt.Sprintf(", on a terminal of %d by %d", c.TTY.Columns, c.TTY.Rows)
		}
		if c.Cut {
			text += " …"
		}
		if c.PID != 0 {
			text += fmt.Sprintf(" (pid %d)", c.PID)
		}
		return text
	}
	of := e.Command
	if of == nil { // the record alone
		of = &Command{Command: *c, Ended: true, outcome: e.Outcome, reason: e.Reason}
	}
	if of.Result() == audit.NotStarted {
		return audit.NotStarted + ": " + Argv(of.Argv)
	}
	text := fmt.Sprintf("%s after %s: %s", of.Result(), time.Duration(c.Millis)*time.Millisecond, Argv(of.Argv))
	if c.Output > 0 {
		text += fmt.Sprintf(", %d bytes of output", c.Output)
	}
	return text
}

func process(t audit.Type, p *audit.Process) string {
	pid := p.PID
	if pid == 0 {
		pid = p.Host
	}
	switch t {
	case audit.ProcFork:
		return fmt.Sprintf("pid %d began (from %d)", pid, p.PPID)
	case audit.ProcExec:
		text := fmt.Sprintf("pid %d: %s", pid, program(p.Exe))
		if len(p.Argv) > 0 {
			text += ": " + Argv(p.Argv)
		}
		if p.Cut {
			text += " …"
		}
		if p.Asked {
			text += " (as it asked)"
		}
		return text
	case audit.ProcCall:
		return fmt.Sprintf("pid %d: system call %s: %s", pid, p.Call, cmp.Or(p.Error, "ok"))
	}
	switch {
	case p.Signal != "":
		return fmt.Sprintf("pid %d was killed by %s", pid, p.Signal)
	case p.Code != nil:
		return fmt.Sprintf("pid %d ended with %d", pid, *p.Code)
	}
	return fmt.Sprintf("pid %d ended", pid)
}

// program names an executable. Of what the guest agent executes, an ordinary user's monitor knows it
// only when it runs for some milliseconds: it may not read the agent's memory.
func program(exe string) string { return cmp.Or(exe, "(a program that is not known)") }

func access(a *audit.FileAccess) string {
	text := a.Op + " " + a.Path
	if a.To != "" {
		text += " to " + a.To
	}
	if a.Size > 0 {
		text += fmt.Sprintf(" (%d bytes)", a.Size)
	}
	return text
}

// Destination is where a flow, a query or a request goes, as it was asked for.
func Destination(e *egress.Event) string {
	to := e.Name
	if to == "" {
		to = e.Address
	}
	if e.Port != 0 {
		to = net.JoinHostPort(to, strconv.Itoa(int(e.Port)))
	}
	return to
}

// Verdict is "allow", "deny" or "unreached": allowed, and not connected.
func Verdict(e *egress.Event) string {
	if e.Unreached {
		return "unreached"
	}
	return e.Action
}

// Reached tells of a flow, a query or a request in a line: the verdict first, then why.
func Reached(e *egress.Event) string {
	what := e.Kind
	switch {
	case e.Kind == "flow":
		what = e.Protocol
	case strings.HasPrefix(e.Kind, "credential."):
		what = strings.TrimPrefix(e.Kind, "credential.")
	}
	to := Destination(e)
	if e.Method != "" {
		to = e.Method + " " + to + e.Path
	}
	text := Verdict(e)
	if what == text || text == "allow" && strings.HasPrefix(e.Kind, "credential.") {
		text = "" // of credentials what happened says it
	}
	text = strings.Join(slices.DeleteFunc([]string{text, what, to}, func(s string) bool { return s == "" }), " ")
	if e.Credential != "" {
		text += " with credential " + e.Credential
	}
	var parts []string
	add := func(format string, args ...any) { parts = append(parts, fmt.Sprintf(format, args...)) }
	if e.Status != 0 {
		add("status %d", e.Status)
	}
	if e.Action != "allow" && e.Reason != "" {
		add("reason %s", e.Reason)
	}
	if e.Rule != "" {
		add("rule %s", e.Rule)
	}
	if e.Up > 0 || e.Down > 0 {
		add("%d bytes out, %d in", e.Up, e.Down)
	}
	if e.Count > 1 {
		add("%d times", e.Count)
	}
	if e.Detail != "" {
		add("%s", strings.Join(strings.Fields(e.Detail), " ")) // it may have lines
	}
	if len(parts) > 0 {
		text += " (" + strings.Join(parts, "; ") + ")"
	}
	return text
}

// texts is a list of texts in decoded JSON.
func texts(v any) (list []string) {
	values, _ := v.([]any)
	for _, v := range values {
		if s, ok := v.(string); ok {
			list = append(list, s)
		}
	}
	return list
}

// plain tells of the types whose data is a map.
func (e *Event) plain(data map[string]any) string {
	str := func(name string) string {
		if data[name] == nil {
			return ""
		}
		if n, ok := data[name].(float64); ok {
			return strconv.FormatFloat(n, 'f', -1, 64)
		}
		return fmt.Sprint(data[name])
	}
	switch e.Type {
	case audit.SandboxCreate:
		if argv := texts(data["argv"]); argv != nil { // of berm run
			return fmt.Sprintf("%s in %s, by %s", Argv(argv), str("workspace"), who(e.Actor))
		}
		text := "created"
		if template := str("template"); template != "" {
			text += " from " + template
		}
		if level := str("level"); level != "" && level != string(berm.Auto) {
			text += " at level " + level
		}
		return text + " by " + who(e.Actor)
	case audit.SandboxStart:
		text := "started after " + str("ms") + " ms"
		if level := str("level"); level != "" {
			text += " at level " + level
		}
		return text
	case audit.SandboxPause:
		return "paused by " + who(e.Actor)
	case audit.SandboxResume:
		return "resumed by " + who(e.Actor)
	case audit.SnapshotTake:
		return "snapshot " + str("snapshot") + " taken by " + who(e.Actor)
	case audit.SnapshotRemove:
		return "snapshot " + str("snapshot") + " deleted by " + who(e.Actor)
	case audit.SandboxFork:
		return "forked into " + str("count") + " by " + who(e.Actor)
	case audit.SandboxRollback:
		return "rolled back to snapshot " + str("snapshot") + " by " + who(e.Actor)
	case audit.SandboxUpdate:
		return "deadline " + str("deadline") + " set by " + who(e.Actor)
	case audit.SandboxExit:
		return "ended, by " + who(e.Actor)
	case audit.ServerStart:
		return "the server was started"
	case audit.ServerStop:
		return "the server was stopped"
	case audit.AgentLost:
		return "the guest agent ended and was started again"
	case audit.LimitHit:
		return "limit of " + str("limit") + " was reached"
	case audit.PolicySet:
		if lines, ok := e.reach(); ok {
			return "the network policy was set by " + who(e.Actor) + ": " + strings.Join(lines, " ")
		}
		return "the wall was set by " + who(e.Actor)
	case audit.CredentialSet:
		return "the credentials were set by " + who(e.Actor)
	case audit.APICall:
		return fmt.Sprintf("%s %s by %s: %s", str("method"), str("route"), who(e.Actor), str("status"))
	case audit.HoldSet:
		return "held by " + who(e.Actor) + ": its records are not removed"
	case audit.HoldEnd:
		return "no longer held, by " + who(e.Actor)
	case audit.Removed:
		return fmt.Sprintf("records %s to %s were removed", str("from"), str("to"))
	case audit.Erase:
		return str("records") + " records were erased from the log by " + who(e.Actor)
	case audit.Gap:
		if str("count") == "" {
			return str("source") + " were not recorded"
		}
		return fmt.Sprintf("%s records of %s were lost", str("count"), str("source"))
	}
	return string(e.Type)
}

// Argv writes arguments as a shell would take them.
func Argv(argv []string) string {
	var words []string
	for _, a := range argv {
		if a == "" || strings.Trim(a, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789@%+=:,./_-") != "" {
			a = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
		}
		words = append(words, a)
	}
	return strings.Join(words, " ")
}
