package ocsf

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/audittest"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

// required are the attributes that a class must have, by the schema; "a|b" is one of them.
var required = map[int][]string{
	0:    {"unmapped.record"},
	1001: {"actor.user.name", "device.type_id", "file.name", "file.type_id"},
	1007: {"actor.user.name", "device.type_id", "process.pid|process.uid"},
	1008: {"log_name"},
	2004: {"finding_info.uid", "finding_info.title"},
	3004: {"entity.name|entity.uid"},
	4001: {"dst_endpoint.name|dst_endpoint.ip", "connection_info.direction_id"},
	4002: {"http_request.http_method", "http_request.url.path", "http_response.code", "dst_endpoint.name", "src_endpoint.name"},
	4003: {"query.hostname", "src_endpoint.name", "dst_endpoint.name"},
	6002: {"app.name", "app.vendor_name"},
	6003: {"actor.user.name", "api.operation", "src_endpoint.name"},
}

// ofAll are required of each class.
var ofAll = []string{
	"category_uid", "class_uid", "activity_id", "type_uid", "time", "severity_id", "status_id", "metadata.version", "metadata.product.name",
	"metadata.uid", "metadata.event_code", "metadata.sequence", "device.hostname",
}

// has looks up an attribute by its path.
func has(e map[string]any, name string) bool {
	for one := range strings.SplitSeq(name, "|") {
		var at any = e
		for part := range strings.SplitSeq(one, ".") {
			object, _ := at.(map[string]any)
			at = object[part]
		}
		if at != nil && at != "" {
			return true
		}
	}
	return false
}

// check fails the test unless an event is one of its class.
func check(t *testing.T, e Event) map[string]any {
	t.Helper()
	text, err := json.Marshal(e)
	if err != nil {
		t.Fatal(err)
	}
	var m map[string]any
	if err := json.Unmarshal(text, &m); err != nil {
		t.Fatal(err)
	}
	wants, ok := required[e.ClassUID]
	if !ok {
		t.Errorf("class %d is not known", e.ClassUID)
	}
	for _, name := range slices.Concat(ofAll, wants) {
		if !has(m, name) {
			t.Errorf("an event of class %d lacks %s: %s", e.ClassUID, name, text)
		}
	}
	if e.CategoryUID != e.ClassUID/1000 || e.TypeUID != e.ClassUID*100+e.ActivityID || e.Severity == "" || e.ClassName == "" || e.ActivityName == "" {
		t.Errorf("%s", text)
	}
	if (e.ActionID != 0) != slices.Contains(e.Metadata.Profiles, "security_control") {
		t.Errorf("action and profile: %s", text)
	}
	return m
}

// sample is the data of a record of a type, as whoever emits it fills it in.
func sample(kind audit.Type) any {
	code := 3
	flow := egress.Event{Kind: "flow", Name: "example.com", Port: 443, Protocol: "tcp", Action: "allow", Up: 1, Down: 2, Duration: 0.5}
	switch kind {
	case audit.APICall:
		return map[string]any{"route": "/sandboxes", "method": "POST", "status": 201}
	case audit.ExecStart:
		return audit.Command{Argv: []string{"sh", "-c", "true"}, User: "user"}
	case audit.ExecExit:
		return audit.Command{PID: 5, Argv: []string{"sh"}, Code: &code, Millis: 20}
	case audit.ProcFork, audit.ProcExit:
		return audit.Process{PID: 5, PPID: 4, Code: &code}
	case audit.ProcExec:
		return audit.Process{Host: 4711, Exe: "/bin/sh", Argv: []string{"sh"}}
	case audit.ProcSum:
		return audit.ProcessSum{Type: audit.ProcExec, Exe: "/bin/true", Count: 500}
	case audit.FileAPI:
		return audit.FileAccess{Path: "/a", Op: "write", Size: 3}
	case audit.FileChange:
		return audit.Changes{At: "end", Changes: []audit.Change{{Path: "a", Op: "add", Kind: "file"}, {Path: "b", Op: "modify", Kind: "link", Before: "x", After: "y"}}}
	case audit.NetDNS:
		return egress.Event{Kind: "dns", Name: "example.org", Action: "deny", Reason: "no-rule"}
	case audit.NetAsk:
		return egress.Reply{Question: egress.Question{Host: "example.com", Port: 443}, Allow: true}
	case audit.CredentialUse:
		flow.Kind, flow.Method, flow.Path, flow.Status = string(kind), "GET", "/x", 200
		return flow
	case audit.NetFlow, audit.CredentialDeny, audit.CredentialMisuse, audit.CredentialLeak, audit.CredentialEcho:
		return flow
	case audit.KeyCreate, audit.KeyRevoke:
		return map[string]any{"key": "k1", "name": "laptop"}
	case audit.SecretSet:
		return map[string]any{"secret": "s1", "name": "git"}
	}
	return nil
}

// lineOf is a record as it is read.
func lineOf(t *testing.T, r audit.Record) trail.Line {
	t.Helper()
	r.V, r.Seq, r.Time, r.Host = 1, 7, time.Date(2026, 3, 4, 5, 6, 7, 8e6, time.UTC), "machine"
	raw, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	line := trail.Line{Raw: raw}
	if err := json.Unmarshal(raw, &line.Record); err != nil {
		t.Fatal(err)
	}
	return line
}

// classes is what each type of record becomes: a new one has to be given its place here and in
// mapping.
var classes = map[audit.Type]int{
	audit.APICall: 6003, audit.SandboxCreate: 6002, audit.SandboxStart: 6002, audit.SandboxPause: 6002, audit.SandboxResume: 6002, audit.SandboxUpdate: 6002,
	audit.SandboxFork: 6002, audit.SandboxRollback: 6002, audit.SnapshotTake: 3004, audit.SnapshotRemove: 3004,
	audit.SandboxExit: 6002, audit.AgentLost: 6002, audit.LimitHit: 0, audit.ExecStart: 1007, audit.ExecExit: 1007, audit.ProcFork: 1007, audit.ProcExec: 1007,
	audit.ProcExit: 1007, audit.ProcCall: 0, audit.ProcSum: 1007, audit.FileAPI: 1001, audit.FileChange: 1001, audit.PolicySet: 3004, audit.KeyCreate: 3004, audit.KeyRevoke: 3004, audit.TeamSet: 3004,
	audit.TemplateBuild: 3004, audit.TemplateRemove: 3004, audit.ServerStart: 6002, audit.ServerStop: 6002, audit.NetFlow: 4001, audit.NetDNS: 4003, audit.NetAsk: 4001,
	audit.SecretSet: 3004, audit.SecretRemove: 3004, audit.SecretRotate: 3004, audit.CredentialSet: 3004, audit.CredentialUse: 4002, audit.CredentialDeny: 4001,
	audit.CredentialMisuse: 2004, audit.CredentialLeak: 2004, audit.CredentialEcho: 2004, audit.Gap: 1008, audit.KeyRotate: 1008, audit.Removed: 1008,
	audit.HoldSet: 1008, audit.HoldEnd: 1008, audit.Erase: 1008,
}

func TestEachTypeHasAClass(t *testing.T) {
	for _, kind := range audit.Types {
		want, listed := classes[kind]
		if _, mapped := mapping[kind]; !listed || !mapped {
			t.Errorf("%s has no class", kind)
			continue
		}
		for _, outcome := range []audit.Outcome{audit.OK, audit.Denied, audit.Failed} {
			for _, sandbox := range []string{"", "i0aaaaaaaaaaaaaaaaaaa"} {
				r := audit.Record{Type: kind, Outcome: outcome, Data: sample(kind), Reason: "why", Src: "src", Trust: audit.TrustHost}
				if sandbox != "" {
					r.Sandbox, r.TraceID, r.Actor = "i0aaaaaaaaaaaaaaaaaaa", "t1", audit.Actor{Type: "key", ID: "k1"}
				}
				events := Events(lineOf(t, r), nil)
				if len(events) == 0 {
					t.Errorf("%s is lost", kind)
				}
				for _, e := range events {
					if check(t, e); e.ClassUID != want {
						t.Errorf("%s is told as %d, want %d", kind, e.ClassUID, want)
					}
					if (e.StatusID == 1) != (outcome == audit.OK) || e.Time == 0 || !strings.Contains(e.StatusDetail, "why") {
						t.Errorf("%s, %s: %+v", kind, outcome, e)
					}
				}
			}
		}
	}
	if len(mapping) != len(audit.Types) {
		t.Errorf("%d types are mapped of %d", len(mapping), len(audit.Types))
	}
}

// What is not what its type says, or of a type that is not known, is told whole.
func TestUnknownRecords(t *testing.T) {
	for _, r := range []audit.Record{
		{Type: "new.type", Data: "x"}, {Type: audit.ExecStart}, {Type: audit.NetFlow, Data: []int{1}}, {Type: audit.FileChange, Data: audit.Changes{}},
	} {
		line := lineOf(t, r)
		events := Events(line, nil)
		if len(events) != 1 || events[0].ClassUID != 0 {
			t.Fatalf("%s: %+v", r.Type, events)
		}
		if m := check(t, events[0]); m["unmapped"].(map[string]any)["record"].(map[string]any)["type"] != string(r.Type) {
			t.Errorf("%v", m)
		}
	}
}

// Whose a record is, but for the server's own, is told where OCSF looks for tenants.
func TestTenant(t *testing.T) {
	for team, want := range map[berm.Team]any{"blue": "blue", "": nil} {
		m := check(t, Events(lineOf(t, audit.Record{Team: team, Type: audit.SandboxStart}), nil)[0])
		if got := m["metadata"].(map[string]any)["tenant_uid"]; got != want {
			t.Errorf("team %s: %v", team, got)
		}
	}
}

// Each change is an event, also of a list that is kept beside.
func TestChanges(t *testing.T) {
	all, err := json.Marshal([]audit.Change{{Path: "a", Op: "add", Kind: "file", After: "h"}, {Path: "b", Op: "mode", Kind: "dir"}, {Path: "c", Op: "delete", Kind: "link", Before: "g"}})
	if err != nil {
		t.Fatal(err)
	}
	line := lineOf(t, audit.Record{
		Type: audit.FileChange, Data: audit.Changes{At: "end", Changes: []audit.Change{{Path: "a", Op: "add", Kind: "file"}}, More: 2},
		Blobs: []audit.Blob{{SHA256: "x", Kind: audit.KindChanges}},
	})
	var got []string
	for _, e := range Events(line, func(string) ([]byte, error) { return all, nil }) {
		check(t, e)
		got = append(got, fmt.Sprintf("%s %s %d %s", e.ActivityName, e.File.Path, e.File.TypeID, e.Metadata.UID))
	}
	if want := []string{"Create /a 1 machine/7.1", "Set Attributes /b 2 machine/7.2", "Delete /c 7 machine/7.3"}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	events := Events(line, func(string) ([]byte, error) { return nil, errors.New("gone") })
	if len(events) != 1 || events[0].Unmapped["more"] != 2 {
		t.Errorf("%+v", events)
	}
}

// A whole session, and a hostile one.
func TestSessions(t *testing.T) {
	l := audittest.New(t, t.TempDir())
	l.Session("i0aaaaaaaaaaaaaaaaaaa")
	l.Hostile("i0ccccccccccccccccccc")
	seen := map[int]int{}
	for line, err := range trail.Dir(l.Dir).Records(0) {
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range Events(line, nil) {
			check(t, e)
			seen[e.ClassUID]++
		}
	}
	for _, class := range []int{0, 1001, 1007, 1008, 2004, 4001, 4002, 4003, 6002} {
		if seen[class] == 0 {
			t.Errorf("no event of class %d: %v", class, seen)
		}
	}
}
