// Package monitor keeps one sandbox: its state, its deadline and the reason of
// its death. It serves them over a socket, and has the client of that socket.
//
// The level of the sandbox is behind the interface Wall.
package monitor

import (
	"encoding/json"
	"time"

	"github.com/berm-sandbox/berm"
)

// Protocol is the newest protocol that this build speaks; it also speaks Oldest,
// so that monitors of the previous version keep running under a new server.
const (
	Protocol = 1
	Oldest   = 1
)

// MaxLine bounds one line of the protocol in bytes.
const MaxLine = 1 << 20

// Hello is the first line of both sides. The connection goes on with the lower of
// the two protocols, and ends when one side does not speak it.
type Hello struct {
	Protocol int            `json:"protocol"`
	Oldest   int            `json:"oldest"`
	ID       berm.SandboxID `json:"id,omitempty"` // sent by the monitor
}

// agrees says whether two sides have a protocol in common.
func (h Hello) agrees(other Hello) bool {
	common := min(h.Protocol, other.Protocol)
	return common >= h.Oldest && common >= other.Oldest
}

// Op names what a request asks for.
type Op string

// The operations.
const (
	OpPrepare  Op = "prepare" // before create, at most once: what can be made without knowing the sandbox
	OpCreate   Op = "create"  // once, on the connection that the monitor was started with
	OpCommit   Op = "commit"  // there too: the sandbox lives on without the connection
	OpPause    Op = "pause"
	OpResume   Op = "resume"
	OpDeadline Op = "deadline"
	OpStatus   Op = "status"
	OpUsage    Op = "usage"
	OpPolicy   Op = "policy"
	OpEvents   Op = "events" // answered with a reply per change until the sandbox dies
	OpKill     Op = "kill"
	OpSnapshot Op = "snapshot" // into a directory
	OpVersion  Op = "version"  // of the files
)

// request is one line to the monitor.
type request struct {
	N        uint64          `json:"n"` // the reply carries the same number
	Op       Op              `json:"op"`
	Deadline time.Time       `json:"deadline,omitzero"`
	Reason   berm.Reason     `json:"reason,omitempty"`
	Create   json.RawMessage `json:"create,omitempty"` // of prepare and create: what the level needs
	// Directory is where a snapshot goes, absolute.
	Directory string `json:"directory,omitempty"`
	// Memory has it keep processes too.
	Memory bool `json:"memory,omitempty"`
}

// reply is one line from the monitor.
type reply struct {
	N      uint64          `json:"n"`
	Error  *failure        `json:"error,omitempty"`
	Status *berm.Status    `json:"status,omitempty"`
	Usage  *berm.Usage     `json:"usage,omitempty"`
	Policy json.RawMessage `json:"policy,omitempty"`
	Exit   *berm.Exit      `json:"exit,omitempty"`
	Saved  *berm.Saved     `json:"saved,omitempty"`
	// Version is that of the files.
	Version string `json:"version,omitempty"`
}

// failure is an error on the wire.
type failure struct {
	Kind berm.Kind `json:"kind"`
	Msg  string    `json:"msg"`
	Hint string    `json:"hint,omitempty"`
}

func failed(err error) *failure {
	return &failure{Kind: berm.KindOf(err), Msg: err.Error(), Hint: berm.HintOf(err)}
}

func (f *failure) err() error {
	return &berm.Error{Kind: f.Kind, Msg: f.Msg, Hint: f.Hint}
}
