// Package berm is the vocabulary that every part of Berm shares: identifiers,
// specs, states, the two contracts (Engine and Driver) and the closed list of
// error kinds.
//
// It imports nothing but the standard library, so that code on either side of
// the sandbox wall, and programs that embed Berm, can use it.
package berm

import (
	"crypto/rand"
	"fmt"
	"strings"
	"time"
)

// SandboxID names one sandbox: "i" and 20 characters of [a-z0-9], so that it is
// a DNS label and a Kubernetes name. The character at index ShardIndex is
// reserved for the shard that holds the sandbox; "0" until there are shards.
type SandboxID string

// ShardIndex is the position of the shard character in a SandboxID.
const ShardIndex = 1

// TemplateID names one template: 20 characters of [a-z0-9].
type TemplateID string

// BuildID names one build of a template: a UUID.
type BuildID string

const idAlphabet = "abcdefghijklmnopqrstuvwxyz0123456789"

// NewSandboxID returns a fresh random id on shard "0".
func NewSandboxID() SandboxID { return SandboxID("i0" + randomID(19)) }

// NewTemplateID returns a fresh random id.
func NewTemplateID() TemplateID { return TemplateID(randomID(20)) }

// NewUUID returns a fresh random UUID (version 4), as a BuildID is one.
func NewUUID() string {
	var b [16]byte
	rand.Read(b[:])
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// randomID draws n characters of idAlphabet without bias: bytes from 252 up
// (7 × 36) are drawn again.
func randomID(n int) string {
	id := make([]byte, 0, n)
	for buf := make([]byte, 2*n); len(id) < n; {
		rand.Read(buf) // never fails: crypto/rand aborts the program instead
		for _, b := range buf {
			if b < 252 && len(id) < n {
				id = append(id, idAlphabet[b%36])
			}
		}
	}
	return string(id)
}

// ParseSandboxID accepts what a client may send as a sandbox id. A legacy
// "<id>-<client>" form is cut at the first dash. It fails with Invalid when a
// character is outside [a-z0-9]; length is not judged, so that an unknown id of
// another length is "not found" and not "malformed".
func ParseSandboxID(s string) (SandboxID, error) {
	s, _, _ = strings.Cut(s, "-")
	// No regular expression: compiling one costs every process inside 0.3 ms.
	if len(s) < 1 || len(s) > 64 || strings.Trim(s, idAlphabet) != "" {
		return "", Errorf(Invalid, "Invalid sandbox ID")
	}
	return SandboxID(s), nil
}

// Level is an isolation level: the kind of wall around a sandbox.
type Level string

// The isolation levels, weakest first. Auto lets the engine choose the strongest
// that the host supports and that need not be asked for by name (Probe.ByName).
const (
	Auto      Level = "auto"
	Namespace Level = "namespace"
	GVisor    Level = "gvisor"
	MicroVM   Level = "microvm"
)

// State is where a sandbox stands in its life. Pausing and Resuming are
// transitions: whoever asks for another one meanwhile waits or gets Conflict.
type State string

// The states of a sandbox.
const (
	Creating State = "creating"
	Running  State = "running"
	Pausing  State = "pausing"
	Paused   State = "paused"
	Resuming State = "resuming"
	Killed   State = "killed"
)

// transitions lists where each state may go. Kill wins over everything.
var transitions = map[State][]State{
	Creating: {Running, Killed},
	Running:  {Pausing, Killed},
	Pausing:  {Paused, Running, Killed},
	Paused:   {Resuming, Killed},
	Resuming: {Running, Paused, Killed},
	Killed:   {},
}

// CanBecome says whether a sandbox in state s may move to next. Pausing may fall
// back to Running and Resuming to Paused when the driver fails.
func (s State) CanBecome(next State) bool {
	for _, t := range transitions[s] {
		if t == next {
			return true
		}
	}
	return false
}

// Reason says why a sandbox died.
type Reason string

// The reasons of death.
const (
	ReasonExit    Reason = "exit"    // its init ended by itself
	ReasonOOM     Reason = "oom"     // the kernel ended it for memory
	ReasonTimeout Reason = "timeout" // its deadline passed
	ReasonKilled  Reason = "killed"  // somebody asked for it
	ReasonCrash   Reason = "crash"   // it, or the process that watches it, broke
)

// Exit is how a sandbox ended.
type Exit struct {
	Reason Reason    `json:"reason"`
	Code   int       `json:"code"`             // exit code of init; -1 when a signal ended it
	Signal string    `json:"signal,omitempty"` // name of that signal, such as "SIGKILL"
	Detail string    `json:"detail,omitempty"` // one sentence for a person
	At     time.Time `json:"at"`
}

// OnDeadline says what happens when a sandbox's deadline passes.
type OnDeadline string

// What happens at a deadline.
const (
	KillAtDeadline  OnDeadline = "kill"
	PauseAtDeadline OnDeadline = "pause"
)

// Limits bounds what one sandbox may use. Zero means no limit of that kind. A
// driver that cannot enforce a limit that is set refuses the spec with
// Unsupported.
type Limits struct {
	Memory     int64   `json:"memory,omitempty"`     // bytes, swap included
	CPU        float64 `json:"cpu,omitempty"`        // cores
	PIDs       int64   `json:"pids,omitempty"`       // processes and threads
	Disk       int64   `json:"disk,omitempty"`       // bytes of the writable layer
	ReadBytes  int64   `json:"readBytes,omitempty"`  // block device bytes per second
	WriteBytes int64   `json:"writeBytes,omitempty"` // block device bytes per second
}

// IDRange is a run of host user and group ids: Count ids from Base. Inside the
// sandbox they are 0 … Count-1.
type IDRange struct {
	Base  uint32 `json:"base"`
	Count uint32 `json:"count"`
}

// IDsPerSandbox is how many host ids one sandbox leases: all that a 16-bit uid
// inside can name.
const IDsPerSandbox = 65536

// Layer is one read-only directory tree of a root file system.
type Layer struct {
	DiffID string `json:"diffID"` // OCI diff-id, "sha256:…": the address
	Path   string `json:"path"`   // absolute path of the unpacked tree on this host
}

// Spec is everything that a driver needs to make one sandbox. A driver enforces
// all of it or refuses it with Unsupported and the reason.
type Spec struct {
	ID       SandboxID `json:"id"`
	Level    Level     `json:"level"`
	Layers   []Layer   `json:"layers"`   // lowest first, at least one
	IDs      IDRange   `json:"ids"`      // leased host ids; zero for a rootless driver, which maps its own
	Hostname string    `json:"hostname"` // name seen inside
	Limits   Limits    `json:"limits"`
	Profile  string    `json:"profile"` // seccomp profile; "" is "default"
	// Setuid lets set-uid programs (sudo) gain rights inside. uid 0 inside is an
	// unprivileged host id all the same. False sets no_new_privs.
	Setuid bool `json:"setuid"`
	// Link gives the sandbox a link, whose other end is Sandbox.Link: nothing gets through
	// it but by whoever has that.
	Link       bool        `json:"link,omitempty"`
	Deadline   time.Time   `json:"deadline"` // zero: none
	OnDeadline OnDeadline  `json:"onDeadline"`
	Guest      GuestConfig `json:"guest"`
	// From is a directory that Sandbox.Snapshot filled, of a sandbox with the same layers and
	// the same Limits.Disk: the new one begins with its files, and its own identity. It is only
	// read, and needed until Create returns. "" begins with the layers alone.
	From string `json:"from,omitempty"`
	// Memory has it go on with the processes that were saved in From, which must have them. They
	// run for some milliseconds before the new identity and Guest are theirs.
	Memory bool `json:"memory,omitempty"`
	// Degraded is what the caller wanted and left out, because this host cannot give it.
	// The policy shows it.
	Degraded []string `json:"degraded,omitempty"`
}

// Saved is what a snapshot holds.
type Saved struct {
	Memory bool  `json:"memory"` // processes and what they had in memory, beside files
	Size   int64 `json:"size"`   // bytes that it takes on disk
	// Shared says that they are the sandbox's own until either is written to: the file system
	// clones. Otherwise they were copied.
	Shared bool `json:"shared"`
	// Stopped is how long the sandbox stood still for it; 0 when it was paused.
	Stopped time.Duration `json:"stopped"`
}

// GuestConfig is what the guest agent is told: at start through an inherited
// descriptor, later by POST /init (whose body has this form). It never holds a
// secret of the host.
type GuestConfig struct {
	SandboxID   SandboxID         `json:"sandboxID,omitempty"`
	TemplateID  TemplateID        `json:"templateID,omitempty"`
	AccessToken string            `json:"accessToken,omitempty"` // "" leaves the agent open to whoever can dial it
	Env         map[string]string `json:"envVars,omitempty"`
	User        string            `json:"defaultUser,omitempty"`
	Workdir     string            `json:"defaultWorkdir,omitempty"`
	// Authority is a certificate, in PEM, that the programs inside are made to trust.
	Authority string `json:"authority,omitempty"`
	// Placeholders are variables that hold what stands for credentials.
	Placeholders map[string]string `json:"placeholders,omitzero"`
	Timestamp    time.Time         `json:"timestamp,omitzero"`
}

// AgentPort is the port of the guest agent. The number is part of the E2B protocol.
const AgentPort = 49983

// AgentVersion is the envd version that the guest agent reports: the newest whose
// features it has, which E2B SDKs gate theirs on.
const AgentVersion = "0.6.13"

// Usage is what a sandbox uses at one moment.
type Usage struct {
	At          time.Time     `json:"at"`
	CPUTime     time.Duration `json:"cpuTime"` // since creation, all cores together
	CPUs        float64       `json:"cpus"`    // cores it may use
	MemoryUsed  int64         `json:"memoryUsed"`
	MemoryTotal int64         `json:"memoryTotal"` // its limit, or the host's memory
	MemoryCache int64         `json:"memoryCache"`
	DiskUsed    int64         `json:"diskUsed"`
	DiskTotal   int64         `json:"diskTotal"`
	PIDs        int64         `json:"pids"`
	OOMKills    int64         `json:"oomKills"` // processes that the kernel ended for memory
}

// Template is an image plus defaults from which sandboxes are made.
type Template struct {
	ID      TemplateID        `json:"id"`
	BuildID BuildID           `json:"buildID"`
	Team    Team              `json:"team,omitempty"`
	Names   []string          `json:"names"` // aliases, [TEAM/]NAME[:TAG]; the first is the main one
	Layers  []Layer           `json:"layers"`
	Limits  Limits            `json:"limits"` // defaults
	User    string            `json:"user"`
	Workdir string            `json:"workdir"`
	Env     map[string]string `json:"env,omitempty"`
	Setuid  bool              `json:"setuid"` // holds sudo: needs set-uid programs
	// Public lets every team make sandboxes of it. What was made on the server's host always is.
	Public bool `json:"public,omitempty"`
	// Start is a shell command that begins to run when a sandbox is made, as User in Workdir, and
	// Ready one that succeeds when the sandbox can be used (E2B's start_cmd and ready_cmd).
	Start     string    `json:"start,omitempty"`
	Ready     string    `json:"ready,omitempty"`
	CreatedAt time.Time `json:"createdAt"`
	Size      int64     `json:"size"` // bytes on disk of all layers
	// Arriving is set while the image has not arrived in full. Sandboxes fetch what they read.
	Arriving *Arriving `json:"arriving,omitempty"`
}

// Arriving tells how far an image is that sandboxes are made of before it has arrived.
type Arriving struct {
	ID     string `json:"id"`
	Bytes  int64  `json:"bytes"`            // that have come
	Total  int64  `json:"total"`            // compressed
	Failed string `json:"failed,omitempty"` // why it will never be whole
	Waits  string `json:"waits,omitempty"`  // why it does not get on at present; it is tried again and again
}

// Alias is the template's main name, or "" when it has none.
func (t *Template) Alias() string {
	if len(t.Names) == 0 {
		return ""
	}
	return t.Names[0]
}

// For says whether a team may know of a template and make sandboxes of it.
func (t *Template) For(team Team) bool { return t.Public || t.Team == team }

// Feature is one thing that a host can or cannot do, as `berm doctor` shows it.
type Feature struct {
	Name       string `json:"name"`                 // such as "user namespaces"
	Found      bool   `json:"found"`                //
	Required   bool   `json:"required"`             // the level cannot work without it
	Detail     string `json:"detail,omitempty"`     // what was seen
	MinVersion string `json:"minVersion,omitempty"` // first kernel that has it
	Fix        string `json:"fix,omitempty"`        // what to do when it is missing
}

// Probe is what a driver finds on this host.
type Probe struct {
	Level  Level `json:"level"`
	Usable bool  `json:"usable"` // every required feature was found
	// ByName keeps Auto from choosing the level, which has to be asked for.
	ByName   bool      `json:"byName,omitempty"`
	Features []Feature `json:"features"`
	// Unlimited tells, for each limit that cannot be enforced here, why. The keys are the
	// names of the fields of Limits in JSON.
	Unlimited map[string]string `json:"unlimited,omitempty"`
	// Degraded is what every sandbox lacks here, as Policy.Degraded has it.
	Degraded []string `json:"degraded,omitempty"`
	// Memory says that snapshots can keep processes and their memory.
	Memory bool `json:"memory,omitempty"`
	// Unsaved says why there are no snapshots here; "" where there are.
	Unsaved string `json:"unsaved,omitempty"`
}
