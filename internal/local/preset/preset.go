// Package preset says what one run of `berm run` may see, write and use: the
// configuration file, presets, the narrowing by a project's own file, and the part of
// the host that every sandbox sees.
package preset

import (
	"time"

	"github.com/berm-sandbox/berm"
)

// Access is what a sandbox may do with a path. The longest listed path above a file
// decides about it.
type Access string

// The kinds of access, least first.
const (
	Hide      Access = "hide" // an empty directory lies there instead, or a file that nobody can open
	ReadOnly  Access = "ro"
	ReadWrite Access = "rw"
)

// Path is one place of the host and what the sandbox may do with it.
//
// Path is absolute and clean, and no symbolic link lay on it when it was resolved.
// Whoever mounts it opens it with RESOLVE_NO_SYMLINKS, so that nobody who can write
// there turns it into another place meanwhile.
type Path struct {
	Path   string
	Access Access
	// Target makes Path a symbolic link with this content instead of a mount. Access is
	// ReadOnly then.
	Target string
}

// Workspace is how the project is given to the sandbox.
type Workspace string

// The forms of the workspace, least right first.
const (
	WorkspaceReadOnly    Workspace = "ro"
	WorkspaceCopyOnWrite Workspace = "cow" // the sandbox writes to a layer of its own
	WorkspaceReadWrite   Workspace = "rw"  // the sandbox writes into the project
)

// Network is which network the sandbox has.
type Network string

// The networks, least right first.
const (
	NetworkNone Network = "none" // a loopback device of its own
	NetworkHost Network = "host" // all of the host's
)

// Rights is what one source says about a run: a preset, a project's file or the command
// line. What is zero is not said.
type Rights struct {
	Extends   string // name of the preset that this one adds to
	Workspace Workspace
	// ReadOnly, ReadWrite and Hide are paths as a person writes them: absolute, "~/…", or
	// relative to the workspace. "." among the first two is the workspace itself.
	ReadOnly, ReadWrite, Hide []string
	// Env holds entries as CleanEnv takes them.
	Env        []string
	Limits     berm.Limits // Memory, CPU and PIDs
	Timeout    time.Duration
	Profile    string // of seccomp
	Network    Network
	Allow      []string // what may be reached through the network service; see CheckAllow
	Checkpoint *bool
	// Credentials are what requests get and the sandbox does not; see CheckCredential.
	Credentials []string
	// Keyless is added when the sandbox is to hold no key of its program's service: credentials,
	// of which those are used whose secret there is, and what else that takes.
	Keyless *Rights
}

// Grant is what one run gets.
type Grant struct {
	Preset     string
	Workspace  Workspace
	Paths      []Path   // the toolchain and what was asked for; sorted, one entry per path
	Env        []string // entries as CleanEnv takes them
	Limits     berm.Limits
	Timeout    time.Duration // zero: none
	Profile    string
	Network    Network
	Allow      []string // unless Network is the host's
	Checkpoint bool     // keep the workspace as it was before each command
	// Credentials are unless Network is the host's.
	Credentials []Credential
	Notices     []string // what was asked for and not given, one sentence each
}

// Place is where a run takes place. Both paths are absolute and free of symbolic links.
type Place struct {
	Home      string // the user's home directory
	Workspace string // root of the project
}

// copyOnWrite is the access to a workspace of that form, between ReadOnly and ReadWrite.
const copyOnWrite Access = "cow"

// rank orders access: more right is more.
func (a Access) rank() int {
	switch a {
	case ReadOnly:
		return 1
	case copyOnWrite:
		return 2
	case ReadWrite:
		return 3
	}
	return 0
}

// access is what the grant gives at path.
func (g *Grant) access(place Place, path string) Access {
	access, length := Hide, 0
	for _, p := range g.Paths {
		if p.Target == "" && len(p.Path) > length && within(path, p.Path) {
			access, length = p.Access, len(p.Path)
		}
	}
	if len(place.Workspace) > length && within(path, place.Workspace) {
		return Access(g.Workspace)
	}
	return access
}

// within says whether path is dir or lies below it, by name alone.
func within(path, dir string) bool {
	if len(path) < len(dir) || path[:len(dir)] != dir {
		return false
	}
	return len(path) == len(dir) || dir == "/" || path[len(dir)] == '/'
}
