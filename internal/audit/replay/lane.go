package replay

import (
	"strings"

	"github.com/berm-sandbox/berm/internal/audit"
)

// The lanes of a timeline: the first part of a record's type.
const (
	Life        = "sandbox"
	Exec        = "exec"
	Output      = "output" // what commands printed, which has no records of its own
	Proc        = "proc"
	Files       = "fs"
	Network     = "net"
	Credentials = "credential"
	Limits      = "limit"
	Policies    = "policy"
	API         = "api"
	Log         = "audit"
)

// Lanes are all lanes, in the order of interest.
var Lanes = []string{Life, Exec, Output, Proc, Files, Network, Credentials, Limits, Policies, API, Log}

// Lane is the lane of a type of record.
func Lane(t audit.Type) string {
	family, _, _ := strings.Cut(string(t), ".")
	switch family {
	case "agent", "snapshot":
		return Life
	}
	return family
}
