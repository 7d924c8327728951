// Package change lists what a session did to its copy-on-write workspace, and shows it.
//
// What it reads was written by the sandbox and is hostile: names may hold any byte,
// directories may be deep and files huge, and nothing that is listed is ever followed
// or opened unless it is a regular file.
package change

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"unicode/utf8"
)

// Kind says what happened to a path.
type Kind string

// The kinds.
const (
	Added    Kind = "added"
	Modified Kind = "modified" // content, mode, target or type
	Deleted  Kind = "deleted"
)

// Entry is what lies at a path.
type Entry struct {
	Mode   fs.FileMode // type and permission bits, set-uid, set-gid and sticky
	Size   int64       // of a regular file, in bytes
	Target string      // of a symbolic link
}

// Change is one difference between the project and the session's view of it. Old is zero
// for what was added, New for what was deleted.
type Change struct {
	Path string // below the workspace, with slashes, as the file system has its bytes
	Kind Kind
	Old  Entry
	New  Entry
	// Danger says why the host, or a tool that a person uses on it, would execute what
	// lies at Path without being asked to; "" when nothing would.
	Danger string
	// Repository is the directory that git takes for a repository and Path is in, "." for the
	// workspace itself, "" outside of any. A directory that is named .git need not be one.
	Repository string
}

// MarshalJSON gives the path and a link's target as text and, when that is not valid
// UTF-8 and the text therefore not exact, as bytes too. What is absent on a side is null.
func (c Change) MarshalJSON() ([]byte, error) {
	type entry struct {
		Type        string  `json:"type"`
		Mode        string  `json:"mode"`
		Size        *int64  `json:"size,omitempty"`
		Target      *string `json:"target,omitempty"`
		TargetBytes []byte  `json:"targetBytes,omitempty"`
	}
	side := func(present bool, e Entry) *entry {
		if !present {
			return nil
		}
		out := &entry{Type: typeName(e.Mode), Mode: fmt.Sprintf("%04o", UnixPerm(e.Mode))}
		switch e.Mode.Type() {
		case 0:
			out.Size = &e.Size
		case fs.ModeSymlink:
			out.Target, out.TargetBytes = &e.Target, inexact(e.Target)
		}
		return out
	}
	return json.Marshal(struct {
		Path      string `json:"path"`
		PathBytes []byte `json:"pathBytes,omitempty"`
		Kind      Kind   `json:"kind"`
		Old       *entry `json:"old"`
		New       *entry `json:"new"`
		Danger    string `json:"danger,omitempty"`
	}{c.Path, inexact(c.Path), c.Kind, side(c.Kind != Added, c.Old), side(c.Kind != Deleted, c.New), c.Danger})
}

// inexact returns the bytes of a text that JSON cannot hold.
func inexact(s string) []byte {
	if utf8.ValidString(s) {
		return nil
	}
	return []byte(s)
}

func typeName(m fs.FileMode) string {
	switch m.Type() {
	case 0:
		return "file"
	case fs.ModeDir:
		return "directory"
	case fs.ModeSymlink:
		return "symlink"
	case fs.ModeNamedPipe:
		return "fifo"
	case fs.ModeSocket:
		return "socket"
	default:
		return "device"
	}
}

// UnixPerm is the mode without the type, as chmod takes it.
func UnixPerm(m fs.FileMode) uint32 {
	perm := uint32(m.Perm())
	if m&fs.ModeSetuid != 0 {
		perm |= 0o4000
	}
	if m&fs.ModeSetgid != 0 {
		perm |= 0o2000
	}
	if m&fs.ModeSticky != 0 {
		perm |= 0o1000
	}
	return perm
}
