package apply

import (
	"encoding/base64"
	"encoding/json"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// State says what is known of a path at the moment the session began.
type State int

// The states. Unknown is for what was not recorded: it is not a claim.
const (
	Unknown State = iota
	Absent
	Present
)

// Stamp is what tells one version of a file from the next without reading it.
type Stamp struct {
	Mode  uint32 // st_mode: type and bits
	Size  int64
	Mtime int64 // nanoseconds since the epoch
	Ctime int64 // nanoseconds since the epoch
	Inode uint64
}

// Base is the project as it was when the session began. A path is below the project,
// with slashes, as in change.Change. What the base cannot vouch for it must call Unknown:
// such a path counts as changed outside when its ctime is later than the session's start.
type Base interface {
	Stat(path string) (Stamp, State)
	// Content returns what the regular file at path held. It fails when this is not
	// known or longer than limit. It is asked for text that both sides changed, and for
	// .git/index, which is otherwise taken for changed once "git status" refreshed it.
	Content(path string, limit int64) ([]byte, error)
}

// StampOf is the stamp of a file that was just looked at.
func StampOf(st *unix.Stat_t) Stamp {
	return Stamp{Mode: st.Mode, Size: st.Size, Mtime: st.Mtim.Nano(), Ctime: st.Ctim.Nano(), Inode: st.Ino}
}

func (s Stamp) kind() uint32 { return s.Mode & unix.S_IFMT }

// raw is a path or target with any byte in it, which JSON strings cannot hold. As a key
// of a map it would be written as it is.
type raw string

func (r raw) MarshalText() ([]byte, error) {
	return base64.RawURLEncoding.AppendEncode(nil, []byte(r)), nil
}

func (r *raw) UnmarshalText(text []byte) error {
	b, err := base64.RawURLEncoding.AppendDecode(nil, text)
	*r = raw(b)
	return err
}

// known is a base with the paths that earlier applies of the session put into the
// project, whose stamps say that nobody else did. Their content stays that of the base:
// as the ancestor of a merge it is as good, since both sides have what was applied.
type known struct {
	Base
	started  time.Time
	recorded time.Time
	applied  map[string]record
}

// record is what an apply left at a path, and when.
type record struct {
	Path  raw
	Stamp *Stamp // nil: nothing
	At    time.Time
	Index []byte // of an index of git, its indexSum
}

// appliedFile is in the session's directory and holds known.applied.
const appliedFile = "applied.json"

func loadApplied(dir string) (map[string]record, error) {
	applied := map[string]record{}
	b, err := os.ReadFile(filepath.Join(dir, appliedFile))
	if os.IsNotExist(err) {
		return applied, nil
	}
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "read what was applied before: %w", err)
	}
	var records []record
	if err := json.Unmarshal(b, &records); err != nil {
		return nil, berm.Errorf(berm.Internal, "%s of the session is damaged: %w", appliedFile, err)
	}
	for _, r := range records {
		applied[string(r.Path)] = r
	}
	return applied, nil
}

func (k *known) stat(path string) (Stamp, State) {
	last := k.last(path)
	switch {
	case last == nil && k.Base == nil:
		return Stamp{}, Unknown
	case last == nil:
		return k.Stat(path)
	case last.Stamp == nil:
		return Stamp{}, Absent
	}
	return *last.Stamp, Present
}

// last is the record of a path, or nil when the base is the newer one. A later command
// makes a new base, but not of what the session had changed by then.
func (k *known) last(path string) *record {
	r, ok := k.applied[path]
	if !ok {
		return nil
	}
	stamp, state := Stamp{}, Unknown
	if k.Base != nil {
		stamp, state = k.Stat(path)
	}
	newer := r.At.After(k.recorded)
	if state == Present && r.Stamp != nil {
		newer = r.Stamp.Ctime > stamp.Ctime
	}
	if state == Unknown || newer {
		return &r
	}
	return nil
}

// coarse is how far the kernel's time stamps lag behind the clock: a tick of at most 10 ms.
const coarse = 10 * time.Millisecond

// since says whether a time stamp of a file may be later than the session's start.
func (k *known) since(ns int64) bool {
	return ns >= k.started.Add(-coarse).UnixNano()
}
