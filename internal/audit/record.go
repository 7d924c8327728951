// Package audit records what happened to sandboxes, outside of them.
package audit

import (
	"cmp"
	"encoding/json"
	"time"

	"github.com/berm-sandbox/berm"
)

// Version is the version of the envelope. Fields are added, never changed.
const Version = 1

// Type names what a record tells. The list is closed.
type Type string

// The record types.
const (
	APICall       Type = "api.call"       // data: route, method, status
	SandboxCreate Type = "sandbox.create" // data: template, templateID, level (as it was asked for), limits
	SandboxStart  Type = "sandbox.start"  // the guest agent answered; data: ms, level
	SandboxPause  Type = "sandbox.pause"
	SandboxResume Type = "sandbox.resume"
	SandboxUpdate Type = "sandbox.update" // data: deadline
	// Snapshots of sandboxes.
	SnapshotTake    Type = "snapshot.take"    // data: snapshot, build, level, saved
	SnapshotRemove  Type = "snapshot.remove"  // data: snapshot, build
	SandboxFork     Type = "sandbox.fork"     // others began with the state of this one; data: count
	SandboxRollback Type = "sandbox.rollback" // it got the files of a snapshot; data: snapshot, build
	SandboxExit     Type = "sandbox.exit"     // data: Exit
	AgentLost       Type = "agent.lost"       // the guest agent ended and was started again
	LimitHit        Type = "limit.hit"        // data: limit
	// Commands that the API started.
	ExecStart Type = "exec.start" // data: Command
	ExecExit  Type = "exec.exit"  // data: Command; blob: its Frames
	// Processes inside, whoever started them.
	ProcFork Type = "proc.fork" // data: Process
	ProcExec Type = "proc.exec" // data: Process
	ProcExit Type = "proc.exit" // data: Process
	ProcCall Type = "proc.call" // it made one of the system calls that are recorded; data: Process
	ProcSum  Type = "proc.sum"  // data: ProcessSum, in the place of single records in a flood
	// Files inside.
	FileAPI        Type = "fs.api"     // the files API read or wrote one; data: FileAccess
	FileChange     Type = "fs.change"  // what the writable layer differs in; data: Changes
	PolicySet      Type = "policy.set" // data: the policy
	KeyCreate      Type = "key.create"
	KeyRevoke      Type = "key.revoke"
	TeamSet        Type = "team.set" // a team was made, or has other limits; data: store.Team
	TemplateBuild  Type = "template.build"
	TemplateRemove Type = "template.remove"
	ServerStart    Type = "server.start"
	ServerStop     Type = "server.stop"
	NetFlow        Type = "net.flow"       // a flow out of a sandbox ended or was denied; data: egress.Event
	NetDNS         Type = "net.dns"        // a name was not resolved; data: egress.Event
	NetAsk         Type = "net.ask"        // somebody answered whether a flow may pass; data: egress.Reply
	SecretSet      Type = "secret.set"     // a stored one, without its value
	SecretRemove   Type = "secret.remove"  //
	SecretRotate   Type = "secret.rotate"  // all are encrypted with another key
	CredentialSet  Type = "credential.set" // which credentials a sandbox has, without their secrets
	// Of credentials, without their secrets; data: egress.Event.
	CredentialUse    Type = "credential.use"    // a request went on with one
	CredentialDeny   Type = "credential.deny"   // it did not
	CredentialMisuse Type = "credential.misuse" // it did not: what stands for one was out of place
	CredentialLeak   Type = "credential.leak"   // it did not: the secret itself came from inside
	CredentialEcho   Type = "credential.echo"   // a reply held one, which was masked
	// Of the log itself.
	Gap       Type = "audit.gap"     // records were lost; data: source, count
	KeyRotate Type = "audit.key"     // another key signs from now on; data: KeyChange
	Removed   Type = "audit.removed" // old records were removed on purpose; data: Removal
	HoldSet   Type = "audit.hold"    // nothing of a sandbox is removed from now on
	HoldEnd   Type = "audit.release" // it may be again
	Erase     Type = "audit.erase"   // records of a sandbox and their content were erased; data: Erasure
)

// Types are all record types.
var Types = []Type{
	APICall, SandboxCreate, SandboxStart, SandboxPause, SandboxResume, SandboxUpdate, SnapshotTake, SnapshotRemove, SandboxFork, SandboxRollback, SandboxExit, AgentLost, LimitHit,
	ExecStart, ExecExit, ProcFork, ProcExec, ProcExit, ProcCall, ProcSum, FileAPI, FileChange, PolicySet, KeyCreate, KeyRevoke, TeamSet, TemplateBuild, TemplateRemove,
	ServerStart, ServerStop, NetFlow, NetDNS, NetAsk, SecretSet, SecretRemove, SecretRotate, CredentialSet,
	CredentialUse, CredentialDeny, CredentialMisuse, CredentialLeak, CredentialEcho, Gap, KeyRotate, Removed, HoldSet, HoldEnd, Erase,
}

// OwnSource is the Src of records that a log makes about itself.
const OwnSource = "audit"

// Trust says who observed what a record tells.
type Trust string

// The sources of records.
const (
	TrustHost  Trust = "host"  // a process of ours outside the sandbox
	TrustGuest Trust = "guest" // code inside the sandbox: may be forged by root in it
	TrustUser  Trust = "user"  // in process, as the same user as the workload
)

// Outcome says how the action ended.
type Outcome string

// The outcomes.
const (
	OK     Outcome = "ok"
	Failed Outcome = "failed"
	Denied Outcome = "denied"
)

// Actor is who caused a record.
type Actor struct {
	Type string `json:"type"`         // "key", "system", "user" or "anonymous"
	ID   string `json:"id,omitempty"` // id of the API key, or the user name
}

// Record is the envelope of one line of the log. Emit fills V, Seq, Time, Host, Salt
// and Prev; the caller fills the rest.
type Record struct {
	V        int            `json:"v"`
	Seq      uint64         `json:"seq"`  // of the log, without gaps
	Time     time.Time      `json:"time"` // UTC, nanoseconds
	Host     string         `json:"host"`
	Team     berm.Team      `json:"team,omitempty"` // whose it is, "" is the server's own
	Sandbox  berm.SandboxID `json:"sandbox,omitempty"`
	Actor    Actor          `json:"actor"`
	Type     Type           `json:"type"`
	Src      string         `json:"src"` // the component that saw it, such as "control"
	Trust    Trust          `json:"trust"`
	Outcome  Outcome        `json:"outcome"`
	Reason   string         `json:"reason,omitempty"`
	PolicyID string         `json:"policyRev,omitempty"`
	Data     any            `json:"data,omitempty"`
	Blobs    []Blob         `json:"blobs,omitempty"` // what is too large for the line
	TraceID  string         `json:"traceID,omitempty"`
	// Salt is 96 random bits of a record of a sandbox, in base64: what the record tells cannot be
	// found out by trying from a hash of its line, which stays when it is erased.
	Salt string `json:"salt,omitempty"`
	// Prev is the base64 SHA-256 of 0x01 and the bytes of the previous line, the
	// newline left out; of nothing for the first line.
	Prev string `json:"prev"`

	// body is what ParseBody took, without braces: it stands for the fields that the caller fills.
	body []byte
}

// Blob refers to content kept beside the log under its hash.
type Blob struct {
	SHA256 string `json:"sha256"`
	Size   int64  `json:"size"`
	Kind   string `json:"kind"`
}

// MaxLine bounds one line of the log in bytes. Larger data is cut to a note of
// its size.
const MaxLine = 32 << 10

// Emitter takes records. Emit returns an error when the record could not be kept;
// the caller of a control action must then refuse the action.
type Emitter interface {
	Emit(Record) error
}

// EmitAll gives an emitter several records, at once if it can take them so. Some of them may be kept when it
// fails.
func EmitAll(e Emitter, records []Record) (err error) {
	if several, ok := e.(interface{ EmitAll([]Record) error }); ok {
		return several.EmitAll(records)
	}
	for _, r := range records {
		err = cmp.Or(err, e.Emit(r))
	}
	return err
}

// Discard takes records and keeps none: for tests and for code that runs before a
// log is open.
var Discard Emitter = discard{}

type discard struct{}

func (discard) Emit(r Record) error { _, err := json.Marshal(r); return err }
