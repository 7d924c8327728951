// Package plan is the set-up of one sandbox as a list of steps: the monitor
// writes it, init carries it out, and the effective policy is read off it.
//
// It has its own small encoding because init links neither encoding/json nor
// the vocabulary: both are paid in start-up time and memory for every sandbox.
package plan

import (
	"encoding/binary"
	"errors"
)

// Op is what a step does.
type Op byte

// The operations. They are carried out in order by a process that is root in
// fresh namespaces and still sees the host's files until Pivot.
const (
	// Stage mounts an empty tmpfs and makes it the working directory. Data are its
	// mount options.
	Stage Op = iota + 1
	// Mkdir makes the directory Target with mode Flags. One that exists is left as it
	// is; a symbolic link is refused.
	Mkdir
	// File makes the file Target with mode Flags and content Data. An existing
	// file keeps its mode; a symbolic link is replaced, not followed.
	File
	// Identity is File in a directory that the sandbox may have changed. Where the directory is
	// none, or Target is one, or there is no room, what is there stays: it is the sandbox's own.
	Identity
	// Symlink makes Target point to Source.
	Symlink
	// Mount mounts a new instance of the type Source on Target with the mount flags
	// Flags and the options Data.
	Mount
	// Bind mounts Source, a path, on Target, and then adds the mount flags Flags.
	Bind
	// Pin makes a mount of the directory Target, with the mounts below it, so that it cannot be
	// renamed. One that does not exist is skipped.
	Pin
	// Remount replaces the mount flags of the mount Target by Flags.
	Remount
	// Move puts the detached mount number FD of those that came with the plan on Target.
	Move
	// Mask hides Target, a file, behind something that nobody can open. A Target
	// that does not exist is skipped.
	Mask
	// Cover puts the file Source over the file Target, read-only, or over the symbolic link,
	// which is not followed: what it points to may be anywhere. A Target that is absent is
	// skipped.
	Cover
	// ReadOnly makes the tree below Target unwritable. A Target that does not exist
	// is skipped.
	ReadOnly
	// Enter makes Target the root and lets the old one go. Flags other than 0 keep the
	// standard streams; else they become the new root's /dev/null.
	Enter
	// Workdir makes Target the working directory.
	Workdir
	// Hostname sets the host name to Data.
	Hostname
	// Loopback brings the interface lo up.
	Loopback
	// Link makes the sandbox's link and passes its other end to the monitor (LinkMade). Only
	// the plan of an ordinary user has it: root's monitor makes the link itself. With Flags it
	// carries Ethernet frames.
	Link
	// Rlimit sets resource FD to the soft limit Flags and the hard limit Target in
	// decimal. A limit that must not be raised is lowered to the hard limit in force.
	Rlimit
	// Landlock takes the rights Flags on files away, but REFER, if it is one, below / and IOCTL_DEV on
	// the paths in Source, separated by spaces, and the ways out that FD has the bits of
	// (LANDLOCK_SCOPE_…).
	Landlock
	// Bounding cuts the capabilities that a program may ever regain to the set Flags.
	Bounding
	// NoNewPrivs sets no_new_privs.
	NoNewPrivs
	// Seccomp loads the filter program in Data. It needs NoNewPrivs or the
	// capabilities that Capabilities takes away.
	Seccomp
	// Capabilities drops every capability that is not in the set Flags.
	Capabilities
	// Watch loads the filter program in Data with the flags Flags and passes its listener to the
	// monitor (Watched). Where the kernel refuses it, the sandbox goes without. It comes before
	// Seccomp, and needs the same.
	Watch
)

var names = [...]string{"", "stage", "mkdir", "file", "identity", "symlink", "mount", "bind", "pin", "remount", "move", "mask", "cover", "read-only", "enter", "working directory", "hostname", "loopback", "link", "rlimit", "landlock", "bounding", "no_new_privs", "seccomp", "capabilities", "watch"}

func (op Op) String() string {
	if int(op) < len(names) {
		return names[op]
	}
	return "unknown"
}

// Step is one operation; Op says which fields it uses.
type Step struct {
	Op     Op
	Target string
	Source string
	Data   string
	Flags  uint64
	FD     int
}

// Encode returns the wire form of steps.
func Encode(steps []Step) []byte {
	var b []byte
	text := func(s string) {
		b = binary.AppendUvarint(b, uint64(len(s)))
		b = append(b, s...)
	}
	for _, s := range steps {
		b = append(b, byte(s.Op))
		b = binary.AppendUvarint(b, s.Flags)
		b = binary.AppendUvarint(b, uint64(s.FD))
		text(s.Target)
		text(s.Source)
		text(s.Data)
	}
	return b
}

var errMalformed = errors.New("malformed plan")

// Decode reads what Encode wrote.
func Decode(b []byte) ([]Step, error) {
	var steps []Step
	number := func() (n uint64) {
		n, size := binary.Uvarint(b)
		if size <= 0 {
			b = nil
			return 1 << 62 // longer than any text: the next read fails
		}
		b = b[size:]
		return n
	}
	bad := false
	text := func() string {
		n := number()
		if n > uint64(len(b)) {
			bad = true
			return ""
		}
		s := string(b[:n])
		b = b[n:]
		return s
	}
	for len(b) > 0 {
		s := Step{Op: Op(b[0])}
		b = b[1:]
		s.Flags = number()
		s.FD = int(number())
		s.Target, s.Source, s.Data = text(), text(), text()
		if bad || s.Op == 0 || int(s.Op) >= len(names) {
			return nil, errMalformed
		}
		steps = append(steps, s)
	}
	return steps, nil
}
