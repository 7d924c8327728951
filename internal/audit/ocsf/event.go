// Package ocsf tells records in the words of the Open Cybersecurity Schema Framework.
package ocsf

import (
	"cmp"
	"encoding/json"
	"strconv"
	"time"

	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/replay"
	"github.com/berm-sandbox/berm/internal/audit/trail"
)

// Version is that of the schema (https://schema.ocsf.io).
const Version = "1.5.0"

// class is a class of events.
type class struct {
	uid      int
	name     string
	category string
}

// The classes that are used; their first digit is that of their category.
var (
	base           = class{0, "Base Event", "Uncategorized"}
	fileActivity   = class{1001, "File System Activity", "System Activity"}
	process        = class{1007, "Process Activity", "System Activity"}
	eventLog       = class{1008, "Event Log Activity", "System Activity"}
	finding        = class{2004, "Detection Finding", "Findings"}
	entity         = class{3004, "Entity Management", "Identity & Access Management"}
	network        = class{4001, "Network Activity", "Network Activity"}
	httpActivity   = class{4002, "HTTP Activity", "Network Activity"}
	dnsActivity    = class{4003, "DNS Activity", "Network Activity"}
	lifecycle      = class{6002, "Application Lifecycle", "Application Activity"}
	api            = class{6003, "API Activity", "Application Activity"}
	other, unknown = activity{99, "Other"}, activity{0, "Unknown"}
)

var severities = map[int]string{informational: "Informational", low: "Low", high: "High"}

// The severities that are used.
const (
	informational = 1
	low           = 2
	high          = 4
)

// activity is what was done, of those that a class knows.
type activity struct {
	id   int
	name string
}

// Event is one event. Attributes that it does not have are left out.
type Event struct {
	CategoryUID  int      `json:"category_uid"`
	CategoryName string   `json:"category_name"`
	ClassUID     int      `json:"class_uid"`
	ClassName    string   `json:"class_name"`
	ActivityID   int      `json:"activity_id"`
	ActivityName string   `json:"activity_name"`
	TypeUID      int      `json:"type_uid"`
	Time         int64    `json:"time"` // Unix milliseconds
	SeverityID   int      `json:"severity_id"`
	Severity     string   `json:"severity"`
	StatusID     int      `json:"status_id"`
	Status       string   `json:"status"`
	StatusDetail string   `json:"status_detail,omitempty"`
	Message      string   `json:"message,omitempty"`
	Count        int      `json:"count,omitempty"`
	Duration     int64    `json:"duration,omitempty"` // milliseconds
	Metadata     metadata `json:"metadata"`
	Device       *device  `json:"device,omitempty"`
	Actor        *actor   `json:"actor,omitempty"`

	ActionID int    `json:"action_id,omitempty"` // of the profile security_control
	Action   string `json:"action,omitempty"`

	Process        *processObject `json:"process,omitempty"`
	ExitCode       *int           `json:"exit_code,omitempty"`
	File           *file          `json:"file,omitempty"`
	FileResult     *file          `json:"file_result,omitempty"`
	LogName        string         `json:"log_name,omitempty"`
	FindingInfo    *findingInfo   `json:"finding_info,omitempty"`
	Entity         *entityObject  `json:"entity,omitempty"`
	App            *product       `json:"app,omitempty"`
	API            *apiObject     `json:"api,omitempty"`
	SrcEndpoint    *endpoint      `json:"src_endpoint,omitempty"`
	DstEndpoint    *endpoint      `json:"dst_endpoint,omitempty"`
	ConnectionInfo *connection    `json:"connection_info,omitempty"`
	Traffic        *traffic       `json:"traffic,omitempty"`
	Query          *query         `json:"query,omitempty"`
	HTTPRequest    *request       `json:"http_request,omitempty"`
	HTTPResponse   *response      `json:"http_response,omitempty"`

	Unmapped map[string]any `json:"unmapped,omitempty"`
}

type metadata struct {
	Version        string   `json:"version"`
	Product        product  `json:"product"`
	Profiles       []string `json:"profiles,omitempty"`
	UID            string   `json:"uid"`
	EventCode      string   `json:"event_code"` // the type of the record
	CorrelationUID string   `json:"correlation_uid,omitempty"`
	LogName        string   `json:"log_name"`
	TenantUID      string   `json:"tenant_uid,omitempty"` // the team
	Sequence       uint64   `json:"sequence"`
	OriginalTime   string   `json:"original_time"`
}

type product struct {
	Name   string `json:"name"`
	Vendor string `json:"vendor_name"`
	UID    string `json:"uid,omitempty"`
}

type device struct {
	TypeID   int    `json:"type_id"`
	Type     string `json:"type"`
	UID      string `json:"uid,omitempty"` // the sandbox
	Hostname string `json:"hostname"`      // of the machine
}

type actor struct {
	User user `json:"user"`
}

type user struct {
	Name string `json:"name,omitempty"`
	UID  string `json:"uid,omitempty"`
}

type processObject struct {
	PID     int            `json:"pid,omitempty"`
	UID     string         `json:"uid,omitempty"`
	Name    string         `json:"name,omitempty"`
	CmdLine string         `json:"cmd_line,omitempty"`
	File    *file          `json:"file,omitempty"`
	User    *user          `json:"user,omitempty"`
	Parent  *processObject `json:"parent_process,omitempty"`
}

type file struct {
	Name   string        `json:"name"`
	Path   string        `json:"path,omitempty"`
	TypeID int           `json:"type_id"`
	Size   int64         `json:"size,omitempty"`
	Hashes []fingerprint `json:"hashes,omitempty"`
}

type fingerprint struct {
	AlgorithmID int    `json:"algorithm_id"`
	Algorithm   string `json:"algorithm"`
	Value       string `json:"value"`
}

type findingInfo struct {
	UID   string `json:"uid"`
	Title string `json:"title"`
}

type entityObject struct {
	Name string `json:"name,omitempty"`
	UID  string `json:"uid,omitempty"`
	Type string `json:"type"`
}

type apiObject struct {
	Operation string `json:"operation"`
}

type endpoint struct {
	Name     string `json:"name,omitempty"`
	UID      string `json:"uid,omitempty"`
	Hostname string `json:"hostname,omitempty"`
	IP       string `json:"ip,omitempty"`
	Port     uint16 `json:"port,omitempty"`
}

type connection struct {
	DirectionID int    `json:"direction_id"`
	Direction   string `json:"direction"`
	Protocol    string `json:"protocol_name,omitempty"`
}

type traffic struct {
	In  int64 `json:"bytes_in"`
	Out int64 `json:"bytes_out"`
}

type query struct {
	Hostname string `json:"hostname"`
}

type request struct {
	Method string `json:"http_method"`
	URL    *link  `json:"url,omitempty"`
}

type link struct {
	Hostname string `json:"hostname,omitempty"`
	Path     string `json:"path"`
	Port     uint16 `json:"port,omitempty"`
}

type response struct {
	Code int `json:"code"`
}

// Events tells a record. There is one event but of changes of files, of which each is one. content
// opens what the record names; nil leaves that out.
func Events(line trail.Line, content func(sha256 string) ([]byte, error)) []Event {
	record, err := replay.NewEvent(line)
	tell := mapping[line.Type]
	if err != nil || tell == nil {
		return []Event{whole(line)}
	}
	m := &mapper{line: line, record: record, content: content}
	if tell(m); len(m.events) == 0 {
		return []Event{whole(line)}
	}
	for i := range m.events {
		if e := &m.events[i]; len(m.events) > 1 {
			e.Metadata.UID += "." + strconv.Itoa(i+1)
		}
	}
	return m.events
}

// whole is a record for which there is no class.
func whole(line trail.Line) Event {
	e := begin(line, base, other)
	e.Unmapped = map[string]any{"record": json.RawMessage(line.Raw)}
	return e
}

// begin makes what every event has.
func begin(line trail.Line, c class, a activity) Event {
	e := Event{
		CategoryUID: c.uid / 1000, CategoryName: c.category, ClassUID: c.uid, ClassName: c.name,
		ActivityID: a.id, ActivityName: a.name, TypeUID: c.uid*100 + a.id, Time: line.Time.UnixMilli(),
		SeverityID: informational, StatusID: 1, Status: "Success", StatusDetail: line.Reason,
		Metadata: metadata{
			Version: Version, Product: product{Name: "Berm", Vendor: "Berm"}, Profiles: []string{"host"}, UID: line.Host + "/" + strconv.FormatUint(line.Seq, 10),
			EventCode: string(line.Type), CorrelationUID: cmp.Or(line.TraceID, string(line.Sandbox)), LogName: logName, TenantUID: string(line.Team), Sequence: line.Seq,
			OriginalTime: line.Time.UTC().Format(time.RFC3339Nano),
		},
		Device: &device{TypeID: 1, Type: "Server", Hostname: line.Host},
		Actor:  &actor{User: user{Name: cmp.Or(line.Actor.Type, "system"), UID: line.Actor.ID}},
	}
	if line.Sandbox != "" {
		e.Device = &device{TypeID: 6, Type: "Virtual", UID: string(line.Sandbox), Hostname: line.Host}
	}
	if line.Outcome != audit.OK && line.Outcome != "" {
		e.SeverityID, e.StatusID, e.Status = low, 2, "Failure"
	}
	e.Severity = severities[e.SeverityID]
	return e
}

// logName is what events call the log that they are from.
const logName = "berm audit"
