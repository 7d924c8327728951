// Package launch is the monitor's part of a namespace sandbox: it makes what is
// outside of it (cgroup, mounts, sockets), starts init behind the wall, and takes
// everything away at the end.
package launch

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
)

// Descriptors that every monitor is started with, beside the connection to its
// creator on 0. The executables are sealed copies shared by all sandboxes of a
// server, so that their memory is paid once.
const (
	FDInit  = 3
	FDAgent = 4
)

// Order tells a monitor what to make. The driver has decided everything that can
// be decided without making it: the monitor adds descriptors.
type Order struct {
	ID         berm.SandboxID  `json:"id"`
	Directory  string          `json:"directory"` // of the sandbox, absolute; the monitor works in it
	Limits     berm.Limits     `json:"limits"`
	Deadline   time.Time       `json:"deadline,omitzero"`
	OnDeadline berm.OnDeadline `json:"onDeadline"`
	Config     json.RawMessage `json:"config"` // berm.GuestConfig, for the agent alone
	Plan       []byte          `json:"plan"`   // what init does; see package plan
	Policy     json.RawMessage `json:"policy"` // berm.Policy: what the plan amounts to
	IDs        IDs             `json:"ids"`
	// Trees are what the plan attaches, in order.
	Trees []Tree `json:"trees"`
	Upper Upper  `json:"upper"`
	// GVisor is how the sandbox gets a kernel of its own; nil leaves it on the host's. The
	// plan's steps are done inside then, when the root is there.
	GVisor *GVisor `json:"gvisor,omitempty"`
	// Link gives the sandbox a link, whose other end the monitor keeps and hands on.
	Link bool `json:"link,omitempty"`
	// Watch says that the plan has a listener for what is executed inside, to which the monitor
	// answers.
	Watch bool `json:"watch,omitempty"`
	// HostNetwork leaves the sandbox in the network namespace of its monitor.
	HostNetwork bool `json:"hostNetwork,omitempty"`
	// CgroupParent is where control groups are made; see cgroup.Config.
	CgroupParent string `json:"cgroupParent,omitempty"`
	// Claims is the file in which the leased IDs are claimed, beside the server, for as
	// long as the sandbox lives; "" is none.
	Claims string `json:"claims,omitempty"`
}

// IDs maps ids inside to ids of the host.
type IDs struct {
	UIDs []Range `json:"uids"`
	GIDs []Range `json:"gids"`
	Kind IDKind  `json:"kind"`
}

// IDKind is who makes the map and what it needs.
type IDKind string

// The kinds.
const (
	// Leased: root maps a range of its choice, and shows Trees and Upper through the
	// same map, so that ids on disk are those inside.
	Leased IDKind = "leased"
	// Subordinate: newuidmap and newgidmap map ids that the system gave an ordinary
	// user.
	Subordinate IDKind = "subordinate"
	// Single: an ordinary user maps the own id alone.
	Single IDKind = "single"
)

// Range maps Count ids from Inside to those from Outside.
type Range struct {
	Inside  int `json:"inside"`
	Outside int `json:"outside"`
	Count   int `json:"count"`
}

// mapsItself reports whether init keeps the id that it has outside, so that it can be mapped
// after init was executed: an execution as uid 0 needs the map before, or it takes all rights.
func (i IDs) mapsItself() bool { return i.Kind == Single && i.UIDs[0].Inside != 0 }

// String is a line of uid_map or gid_map.
func (r Range) String() string { return fmt.Sprintf("%d %d %d", r.Inside, r.Outside, r.Count) }

// Tree is a directory or file of the host that init gets as a detached mount.
type Tree struct {
	Path string `json:"path,omitempty"`
	// Write lets it be changed.
	Write bool `json:"write,omitempty"`
	// Host marks a part of the host that is shown as it is: with the mounts below it, and
	// with the ids that it has on disk, so that nobody inside owns any of it.
	Host bool `json:"host,omitempty"`
	// Own gives the files of a Host part the same owners inside as on disk, where the file
	// system can map ids.
	Own bool `json:"own,omitempty"`
	// NoSetuid has set-uid bits ignored, as Host has.
	NoSetuid bool `json:"noSetuid,omitempty"`
	// Exact refuses a path with a symbolic link on it: it was resolved before, and whoever
	// can write there must not lead it elsewhere meanwhile.
	Exact bool `json:"exact,omitempty"`
	// Upper stands for the writable layer; the other fields are unused then.
	Upper bool `json:"upper,omitempty"`
}

// Upper says what the writable layer is made of.
type Upper struct {
	// Image is a formatted file system of the right size, of which a copy is mounted.
	Image string `json:"image,omitempty"`
	// Used says that the image is that of a sandbox.
	Used bool `json:"used,omitempty"`
	// Directory, by its absolute path, is used as it is; its size is not limited.
	Directory string `json:"directory,omitempty"`
	// With neither, init makes it from memory.
}

// String shows the map of user ids to a person.
func (i IDs) String() string {
	var parts []string
	for _, r := range i.UIDs {
		if r.Count == 1 {
			parts = append(parts, fmt.Sprintf("%d inside is %d on the host", r.Inside, r.Outside))
			continue
		}
		parts = append(parts, fmt.Sprintf("%d-%d inside are %d-%d on the host", r.Inside, r.Inside+r.Count-1, r.Outside, r.Outside+r.Count-1))
	}
	return strings.Join(parts, ", ")
}

// Root is the user of the host that root inside is, or the one that there is inside; 0 when nothing
// is mapped.
func (i IDs) Root() int {
	for _, r := range i.UIDs {
		return r.Outside
	}
	return 0
}

// HasGroup says whether a group id exists inside.
func (i IDs) HasGroup(id int) bool {
	for _, r := range i.GIDs {
		if id >= r.Inside && id < r.Inside+r.Count {
			return true
		}
	}
	return false
}
