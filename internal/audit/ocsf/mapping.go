package ocsf

import (
	"cmp"
	"encoding/json"
	"path"
	"strconv"
	"strings"

	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/replay"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

// mapper makes the events of one record.
type mapper struct {
	line    trail.Line
	record  *replay.Event
	content func(sha256 string) ([]byte, error)
	events  []Event
}

// mapping has each type of record. One that has no class is told whole, in a Base Event.
var mapping = map[audit.Type]func(*mapper){
	audit.APICall:          (*mapper).call,
	audit.SandboxCreate:    life(activity{1, "Install"}),
	audit.SandboxStart:     life(activity{3, "Start"}),
	audit.SandboxPause:     life(other),
	audit.SandboxResume:    life(other),
	audit.SandboxUpdate:    life(other),
	audit.SandboxFork:      life(other),
	audit.SandboxRollback:  life(other),
	audit.SandboxExit:      life(activity{4, "Stop"}),
	audit.AgentLost:        life(activity{5, "Restart"}),
	audit.LimitHit:         (*mapper).none,
	audit.ExecStart:        (*mapper).command,
	audit.ExecExit:         (*mapper).command,
	audit.ProcFork:         (*mapper).process,
	audit.ProcExec:         (*mapper).process,
	audit.ProcExit:         (*mapper).process,
	audit.ProcCall:         (*mapper).none,
	audit.ProcSum:          (*mapper).processes,
	audit.FileAPI:          (*mapper).access,
	audit.FileChange:       (*mapper).changes,
	audit.PolicySet:        managed("policy", activity{3, "Update"}),
	audit.SnapshotTake:     managed("snapshot", activity{1, "Create"}),
	audit.SnapshotRemove:   managed("snapshot", activity{4, "Delete"}),
	audit.KeyCreate:        managed("API key", activity{1, "Create"}),
	audit.KeyRevoke:        managed("API key", activity{4, "Delete"}),
	audit.TeamSet:          managed("team", activity{3, "Update"}),
	audit.TemplateBuild:    managed("template", activity{1, "Create"}),
	audit.TemplateRemove:   managed("template", activity{4, "Delete"}),
	audit.ServerStart:      life(activity{3, "Start"}),
	audit.ServerStop:       life(activity{4, "Stop"}),
	audit.NetFlow:          (*mapper).flow,
	audit.NetDNS:           (*mapper).dns,
	audit.NetAsk:           (*mapper).answer,
	audit.SecretSet:        managed("secret", activity{3, "Update"}),
	audit.SecretRemove:     managed("secret", activity{4, "Delete"}),
	audit.SecretRotate:     managed("secret", activity{3, "Update"}),
	audit.CredentialSet:    managed("credentials", activity{3, "Update"}),
	audit.CredentialUse:    (*mapper).flow,
	audit.CredentialDeny:   (*mapper).flow,
	audit.CredentialMisuse: (*mapper).finding,
	audit.CredentialLeak:   (*mapper).finding,
	audit.CredentialEcho:   (*mapper).finding,
	audit.Gap:              log(other),
	audit.KeyRotate:        log(other),
	audit.Removed:          log(activity{2, "Delete"}),
	audit.HoldSet:          log(other),
	audit.HoldEnd:          log(other),
	audit.Erase:            log(activity{2, "Delete"}),
}

// none leaves a record to be told whole.
func (m *mapper) none() {}

// add adds an event, with what its class has no place for.
func (m *mapper) add(c class, a activity, fill func(*Event)) {
	e := begin(m.line, c, a)
	e.Message = m.record.Text()
	e.Unmapped = map[string]any{"src": m.line.Src, "trust": m.line.Trust}
	if m.line.PolicyID != "" {
		e.Unmapped["policyRev"] = m.line.PolicyID
	}
	if len(m.record.Raw) > 0 && c != fileActivity {
		e.Unmapped["data"] = m.record.Raw
	}
	if len(m.line.Blobs) > 0 && c != fileActivity {
		e.Unmapped["blobs"] = m.line.Blobs
	}
	if fill != nil {
		fill(&e)
	}
	e.Severity = severities[e.SeverityID]
	m.events = append(m.events, e)
}

// text is a field of the data of a record that has no type of its own.
func (m *mapper) text(name string) string {
	data, _ := m.record.Data.(map[string]any)
	s, _ := data[name].(string)
	return s
}

func (m *mapper) call() {
	activities := map[string]activity{"POST": {1, "Create"}, "GET": {2, "Read"}, "PUT": {3, "Update"}, "PATCH": {3, "Update"}, "DELETE": {4, "Delete"}}
	method := m.text("method")
	a, ok := activities[method]
	if !ok {
		a = other
	}
	m.add(api, a, func(e *Event) {
		e.API = &apiObject{strings.TrimSpace(method + " " + m.text("route"))}
		e.SrcEndpoint = &endpoint{Name: "unknown"} // the address of a client is not recorded
		data, _ := m.record.Data.(map[string]any)
		if status, ok := data["status"].(float64); ok {
			e.HTTPResponse = &response{int(status)}
		}
		e.action(m.line.Outcome != audit.Denied)
	})
}

// life tells of a sandbox, or of the server.
func life(a activity) func(*mapper) {
	return func(m *mapper) {
		m.add(lifecycle, a, func(e *Event) {
			e.App = &product{Name: "sandbox", Vendor: "Berm", UID: string(m.line.Sandbox)}
			if m.line.Sandbox == "" {
				e.App.Name = "server"
			}
		})
	}
}

// managed tells of what an operator or a client sets.
func managed(what string, a activity) func(*mapper) {
	return func(m *mapper) {
		m.add(entity, a, func(e *Event) {
			uid := cmp.Or(m.text("key"), m.text("secret"), m.text("snapshot"), string(m.line.Sandbox))
			e.Entity = &entityObject{Name: cmp.Or(m.text("name"), what), UID: uid, Type: what}
		})
	}
}

// log tells of the log itself.
func log(a activity) func(*mapper) {
	return func(m *mapper) {
		m.add(eventLog, a, func(e *Event) {
			if e.LogName = logName; m.line.Type == audit.Gap {
				e.SeverityID = low
			}
		})
	}
}

// action says whether something was let through.
func (e *Event) action(allowed bool) {
	e.Metadata.Profiles = append(e.Metadata.Profiles, "security_control")
	if e.ActionID, e.Action = 1, "Allowed"; !allowed {
		e.ActionID, e.Action = 2, "Denied"
	}
}

var launch, terminate = activity{1, "Launch"}, activity{2, "Terminate"}

func (m *mapper) command() {
	c := m.record.Data.(*audit.Command)
	a := launch
	if m.line.Type == audit.ExecExit {
		a = terminate
	}
	m.add(process, a, func(e *Event) {
		e.Process = &processObject{PID: c.PID, UID: cmp.Or(m.line.TraceID, e.Metadata.UID), CmdLine: replay.Argv(c.Argv)}
		if len(c.Argv) > 0 {
			e.Process.Name = path.Base(c.Argv[0])
		}
		if c.User != "" {
			e.Process.User = &user{Name: c.User}
		}
		if a == terminate {
			e.ExitCode, e.Duration = c.Code, c.Millis
		}
	})
}

func (m *mapper) process() {
	p := m.record.Data.(*audit.Process)
	a := launch
	if m.line.Type == audit.ProcExit {
		a = terminate
	}
	m.add(process, a, func(e *Event) {
		e.Time -= p.Ago / 1000
		uid := cmp.Or(p.Host, p.PID)
		e.Process = &processObject{PID: cmp.Or(p.PID, p.Host), UID: strconv.Itoa(uid), CmdLine: replay.Argv(p.Argv), User: &user{UID: strconv.Itoa(p.UID)}}
		if p.Exe != "" {
			e.Process.Name, e.Process.File = path.Base(p.Exe), fileAt(p.Exe, regular, p.SHA256)
		}
		if p.PPID != 0 {
			e.Process.Parent = &processObject{PID: p.PPID}
		}
		if a == terminate {
			e.ExitCode = p.Code
		}
	})
}

func (m *mapper) processes() {
	s := m.record.Data.(*audit.ProcessSum)
	if s.Call != "" {
		return
	}
	a := launch
	if s.Type == audit.ProcExit {
		a = terminate
	}
	m.add(process, a, func(e *Event) {
		e.Count = s.Count
		e.Process = &processObject{UID: e.Metadata.UID, Name: path.Base(s.Exe)}
		if s.Exe != "" {
			e.Process.File = fileAt(s.Exe, regular, "")
		}
	})
}

// The types of files.
const regular, folder, linked = 1, 2, 7

var fileTypes = map[string]int{"file": regular, "dir": folder, "link": linked, "fifo": 6, "socket": 5}

// fileAt is the file at a path.
func fileAt(at string, kind int, sha256 string) *file {
	f := &file{Name: path.Base(at), Path: at, TypeID: kind}
	if sha256 != "" {
		f.Hashes = []fingerprint{{3, "SHA-256", sha256}}
	}
	return f
}

func (m *mapper) access() {
	f := m.record.Data.(*audit.FileAccess)
	kind := regular
	a, ok := map[string]activity{
		"read": {2, "Read"}, "write": {3, "Update"}, "remove": {4, "Delete"}, "move": {5, "Rename"}, "mkdir": {1, "Create"}, "list": {2, "Read"},
	}[f.Op]
	switch {
	case !ok:
		a = unknown
	case f.Op == "mkdir", f.Op == "list":
		kind = folder
	case f.Op == "remove", f.Op == "move":
		kind = 0 // not told
	}
	m.add(fileActivity, a, func(e *Event) {
		e.File = fileAt(f.Path, kind, f.SHA256)
		e.File.Size = f.Size
		if f.To != "" {
			e.FileResult = fileAt(f.To, kind, "")
		}
	})
}

func (m *mapper) changes() {
	data := m.record.Data.(*audit.Changes)
	changes := data.Changes
	for _, b := range m.line.Blobs {
		if b.Kind != audit.KindChanges || data.More == 0 || m.content == nil {
			continue
		}
		content, err := m.content(b.SHA256)
		var all []audit.Change
		if err == nil && json.Unmarshal(content, &all) == nil {
			changes, data.More = all, 0
		}
	}
	for i, c := range changes {
		a, ok := map[string]activity{"add": {1, "Create"}, "modify": {3, "Update"}, "delete": {4, "Delete"}, "mode": {6, "Set Attributes"}}[c.Op]
		if !ok {
			a = unknown
		}
		m.add(fileActivity, a, func(e *Event) {
			kind := fileTypes[c.Kind]
			e.File = fileAt(path.Join("/", c.Path), kind, cmp.Or(c.Before, c.After))
			if e.File.Size = c.Size; c.Before != "" && c.After != "" {
				e.FileResult = fileAt(path.Join("/", c.Path), kind, c.After)
			}
			e.Message = strings.TrimSpace(c.Op + " " + e.File.Path)
			e.Unmapped["at"], e.Unmapped["change"] = data.At, c
			if i == len(changes)-1 && data.More+data.Unhashed > 0 {
				e.Unmapped["more"], e.Unmapped["unhashed"] = data.More, data.Unhashed
			}
		})
	}
}

// to fills in the two ends of a flow.
func (e *Event) to(m *mapper, f *egress.Event) {
	e.SrcEndpoint = &endpoint{UID: string(m.line.Sandbox), Name: "sandbox"}
	e.DstEndpoint = &endpoint{Hostname: f.Name, IP: f.Address, Port: f.Port, Name: cmp.Or(f.Name, f.Address, "unknown")}
	e.ConnectionInfo = &connection{DirectionID: 2, Direction: "Outbound", Protocol: f.Protocol}
	e.Duration, e.Count = int64(f.Duration*1000), f.Count
	if f.Up > 0 || f.Down > 0 {
		e.Traffic = &traffic{In: f.Down, Out: f.Up}
	}
	if !f.Time.IsZero() {
		e.Time = f.Time.UnixMilli()
	}
	if f.Detail != "" {
		e.StatusDetail = strings.TrimPrefix(e.StatusDetail+": "+f.Detail, ": ")
	}
	e.action(f.Action != "deny")
}

var methods = map[string]activity{
	"CONNECT": {1, "Connect"}, "DELETE": {2, "Delete"}, "GET": {3, "Get"}, "HEAD": {4, "Head"}, "OPTIONS": {5, "Options"}, "POST": {6, "Post"}, "PUT": {7, "Put"}, "TRACE": {8, "Trace"},
}

// flow tells of a flow, or of a request if there was one.
func (m *mapper) flow() {
	f := m.record.Data.(*egress.Event)
	if f.Method != "" {
		a, ok := methods[f.Method]
		if !ok {
			a = other
		}
		m.add(httpActivity, a, func(e *Event) {
			e.to(m, f)
			e.HTTPRequest = &request{f.Method, &link{Hostname: f.Name, Path: cmp.Or(f.Path, "/"), Port: f.Port}}
			e.HTTPResponse = &response{f.Status} // 0: there was none
		})
		return
	}
	a := activity{2, "Close"}
	switch {
	case f.Action == "deny":
		a = activity{5, "Refuse"}
	case f.Unreached:
		a = activity{4, "Fail"}
	}
	m.add(network, a, func(e *Event) { e.to(m, f) })
}

func (m *mapper) dns() {
	f := m.record.Data.(*egress.Event)
	m.add(dnsActivity, activity{1, "Query"}, func(e *Event) {
		e.to(m, f)
		e.DstEndpoint = &endpoint{Name: "resolver"}
		e.Query = &query{Hostname: cmp.Or(f.Name, f.Address, "unknown")}
	})
}

func (m *mapper) answer() {
	r := m.record.Data.(*egress.Reply)
	m.add(network, other, func(e *Event) {
		action := "deny"
		if r.Allow {
			action = "allow"
		}
		e.to(m, &egress.Event{Name: r.Question.Host, Port: r.Question.Port, Protocol: r.Question.Protocol, Action: action})
	})
}

// finding tells of a secret out of place.
func (m *mapper) finding() {
	f := m.record.Data.(*egress.Event)
	m.add(finding, activity{1, "Create"}, func(e *Event) {
		titles := map[audit.Type]string{
			audit.CredentialMisuse: "What stands for a secret was out of place",
			audit.CredentialLeak:   "A secret came from inside a sandbox",
			audit.CredentialEcho:   "A reply held a secret",
		}
		e.FindingInfo = &findingInfo{UID: e.Metadata.UID, Title: titles[m.line.Type]}
		e.SeverityID = high
		if m.line.Type == audit.CredentialEcho {
			e.SeverityID = low
		}
		e.action(f.Action != "deny")
	})
}
