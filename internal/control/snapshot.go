package control

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/cleanup"
	"github.com/berm-sandbox/berm/internal/failpoint"
	"github.com/berm-sandbox/berm/internal/store"
)

// snapshotTime bounds a snapshot in the engine: a disk may have to be copied.
const snapshotTime = 5 * time.Minute

// Snapshot is a saved state of a sandbox, from which others are made.
type Snapshot struct {
	// Build names what is kept, in a directory of its own.
	Build berm.BuildID `json:"build"`
	// TemplateID is what sandboxes are made from: all tags of a name share it.
	TemplateID berm.TemplateID `json:"templateID"`
	Name       string          `json:"name,omitempty"`
	Tag        string          `json:"tag"`
	Sandbox    berm.SandboxID  `json:"sandbox"` // that it is of
	Team       berm.Team       `json:"team,omitempty"`
	CreatedAt  time.Time       `json:"createdAt"`
	Level      berm.Level      `json:"level"`
	Saved      berm.Saved      `json:"saved"`
	// Version is that of the disk when it was saved, "" where that cannot be told.
	Version string `json:"version,omitempty"`
	// Checkpoint says why it was taken though nobody asked: ByClock or BeforeExec.
	Checkpoint string `json:"checkpoint,omitempty"`
	// Template is what that sandbox was made of, with its limits.
	Template berm.Template `json:"template"`
}

// ID is what clients call it: its name, or that of its template, and its tag.
func (s *Snapshot) ID() string {
	if s.Name != "" {
		return s.Name + ":" + s.Tag
	}
	return string(s.TemplateID) + ":" + s.Tag
}

// SnapshotRequest is what a client may choose about a snapshot.
type SnapshotRequest struct {
	// Name, with a tag behind a colon or without, is given to the snapshot, and taken from one
	// that had it; "" is none.
	Name string
	// Memory demands processes and their memory. Otherwise the level keeps what it can.
	Memory bool
	Actor  audit.Actor
}

const defaultTag = "default"

// snapshotName is NAME[:TAG].
var snapshotName = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,127}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$`)

// splitRef takes a reference apart: "NAME[:TAG]". tagged says that it has a tag.
func splitRef(ref string) (name, tag string, tagged bool) {
	name, tag, tagged = strings.Cut(ref, ":")
	if !tagged || tag == "latest" {
		tag = defaultTag
	}
	return name, tag, tagged
}

// shelf has the directories of snapshots and of sandboxes that are paused to disk.
type shelf struct {
	mu        sync.Mutex
	snapshots map[berm.BuildID]Snapshot
	users     map[berm.BuildID]int
	dropped   map[berm.BuildID]bool // which go with their last user
}

func newShelf() *shelf {
	return &shelf{snapshots: map[berm.BuildID]Snapshot{}, users: map[berm.BuildID]int{}, dropped: map[berm.BuildID]bool{}}
}

func (m *Manager) savedDir(b berm.BuildID) string { return filepath.Join(m.SnapshotDir, string(b)) }

// makeSaved makes the directory of what is saved.
func (m *Manager) makeSaved(b berm.BuildID) error {
	dir := m.savedDir(b)
	failed := func(err error) error {
		if errors.Is(err, syscall.ENOSPC) {
			return berm.Errorf(berm.Unavailable, "no room for a snapshot: %w", err).
				WithHint("delete snapshots, kill sandboxes or make room where the server's data directory is")
		}
		return berm.Errorf(berm.Internal, "make the directory of a snapshot: %w", err)
	}
	if m.Depot == "" {
		if err := os.Mkdir(dir, 0o700); err != nil {
			return failed(err)
		}
		return nil
	}
	target := filepath.Join(m.Depot, string(b))
	relative, err := filepath.Rel(m.SnapshotDir, target) // so that the data directory may be moved
	if err != nil {
		return failed(err)
	}
	if err := os.Mkdir(target, 0o700); err != nil {
		return failed(err)
	}
	if err := failpoint.Hit("control.depot"); err != nil {
		return errors.Join(err, os.Remove(target))
	}
	// The link is on disk before anything that it leads to is: without it that is removed.
	if err = os.Symlink(relative, dir); err == nil {
		if err = failpoint.Hit("control.linked"); err == nil {
			err = syncDir(m.SnapshotDir)
		}
	}
	if err != nil {
		return errors.Join(failed(err), removeSaved(dir))
	}
	return nil
}

// removeSaved removes a directory of what is saved, and first what is behind a link.
func removeSaved(dir string) error {
	target, err := os.Readlink(dir)
	if err != nil { // it is no link
		return os.RemoveAll(dir)
	}
	if err := os.RemoveAll(filepath.Join(filepath.Dir(dir), target)); err != nil {
		return err
	}
	if err := failpoint.Hit("control.emptied"); err != nil {
		return err
	}
	return os.Remove(dir)
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// newSaved makes a directory for what is saved of a sandbox that was made of t, whose layers
// are kept for as long as it is there.
func (m *Manager) newSaved(ctx context.Context, t *berm.Template) (berm.BuildID, error) {
	switch {
	case m.SnapshotDir == "":
		return "", berm.Errorf(berm.Unsupported, "this server keeps no snapshots")
	case t == nil:
		return "", berm.Errorf(berm.Unsupported, "an earlier version made this sandbox: it cannot be saved")
	}
	build := berm.BuildID(berm.NewUUID())
	if err := m.makeSaved(build); err != nil {
		return "", err
	}
	if m.HoldLayers != nil {
		if err := m.HoldLayers(ctx, string(build), m.savedDir(build), *t); err != nil {
			m.drop(build)
			return "", err
		}
	}
	return build, failpoint.Hit("control.directory")
}

// use keeps what is saved from being removed until release is called.
func (m *Manager) use(b berm.BuildID) (release func()) {
	m.shelf.mu.Lock()
	defer m.shelf.mu.Unlock()
	m.shelf.users[b]++
	return func() {
		m.shelf.mu.Lock()
		defer m.shelf.mu.Unlock()
		if m.shelf.users[b]--; m.shelf.users[b] == 0 {
			delete(m.shelf.users, b)
			if m.shelf.dropped[b] {
				m.removeSaved(b)
			}
		}
	}
}

// drop removes what is saved, once nobody uses it. A snapshot stays.
func (m *Manager) drop(b berm.BuildID) {
	m.shelf.mu.Lock()
	defer m.shelf.mu.Unlock()
	if _, kept := m.shelf.snapshots[b]; !kept && b != "" {
		m.removeUnused(b)
	}
}

// removeUnused removes a directory now or with its last user. The caller holds the lock of the
// shelf.
func (m *Manager) removeUnused(b berm.BuildID) {
	m.shelf.dropped[b] = true
	if m.shelf.users[b] == 0 {
		m.removeSaved(b)
	}
}

// removeSaved removes a directory. The caller holds the lock of the shelf.
func (m *Manager) removeSaved(b berm.BuildID) {
	delete(m.shelf.dropped, b)
	if err := removeSaved(m.savedDir(b)); err != nil {
		m.Log.Error("files of a snapshot are left until the next start", "build", b, "error", err)
	}
}

// findSnapshots reads the stored snapshots, and removes what belongs to none of them and to no
// sandbox.
func (m *Manager) findSnapshots(ctx context.Context, sandboxes []store.Sandbox) error {
	if m.SnapshotDir == "" {
		return nil
	}
	if err := os.MkdirAll(m.SnapshotDir, 0o700); err != nil {
		return berm.Errorf(berm.Internal, "make the directory of snapshots: %w", err)
	}
	rows, err := m.Store.Snapshots(ctx)
	if err != nil {
		return err
	}
	m.shelf.mu.Lock()
	defer m.shelf.mu.Unlock()
	known := map[string]bool{}
	for _, row := range rows {
		var s Snapshot
		if err := json.Unmarshal(row.Record, &s); err != nil {
			return berm.Errorf(berm.Internal, "stored snapshot %s: %w", row.Build, err)
		}
		m.shelf.snapshots[s.Build] = s
		known[string(s.Build)] = true
	}
	for _, row := range sandboxes {
		var info struct{ SavedAs string }
		if err := json.Unmarshal(row.Record, &info); err != nil {
			return berm.Errorf(berm.Internal, "stored sandbox %s: %w", row.ID, err)
		}
		known[info.SavedAs] = true
	}
	entries, err := os.ReadDir(m.SnapshotDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return berm.Errorf(berm.Internal, "list snapshots: %w", err)
	}
	for _, e := range entries {
		if !known[e.Name()] {
			m.removeSaved(berm.BuildID(e.Name()))
		}
	}
	return nil
}

// snapshot finds a snapshot by what a client of a team calls it. An id wins over a name, which an earlier
// version may have given though it was the id of another.
func (m *Manager) snapshot(team berm.Team, ref string) (found Snapshot, ok bool) {
	name, tag, _ := splitRef(team.Trim(ref))
	m.shelf.mu.Lock()
	defer m.shelf.mu.Unlock()
	for _, s := range m.shelf.snapshots {
		switch {
		case s.Tag != tag || s.Team != team:
		case string(s.TemplateID) == name:
			return s, true
		case s.Name == name && name != "":
			found, ok = s, true
		}
	}
	return found, ok
}

// isID says whether a name is the id of what snapshots of the team with other names are of.
func (m *Manager) isID(team berm.Team, name string) bool {
	m.shelf.mu.Lock()
	defer m.shelf.mu.Unlock()
	for _, s := range m.shelf.snapshots {
		if s.Team == team && string(s.TemplateID) == name && s.Name != name {
			return true
		}
	}
	return false
}

// SnapshotFilter chooses snapshots of a list. Zero fields choose all.
type SnapshotFilter struct {
	Team    *berm.Team
	Sandbox berm.SandboxID
	Ref     string // a name or an id, with a tag or without
}

// Snapshots returns those that the filter chooses, newest first.
func (m *Manager) Snapshots(f SnapshotFilter) []Snapshot {
	name, tag, tagged := splitRef(f.Ref)
	m.shelf.mu.Lock()
	defer m.shelf.mu.Unlock()
	chosen := []Snapshot{}
	for _, s := range m.shelf.snapshots {
		if f.Team != nil && *f.Team != s.Team || f.Sandbox != "" && s.Sandbox != f.Sandbox ||
			f.Ref != "" && (s.Name != name && string(s.TemplateID) != name || tagged && s.Tag != tag) {
			continue
		}
		chosen = append(chosen, s)
	}
	slices.SortFunc(chosen, func(a, b Snapshot) int {
		if c := b.CreatedAt.Compare(a.CreatedAt); c != 0 {
			return c
		}
		return strings.Compare(string(b.Build), string(a.Build))
	})
	return chosen
}

// Snapshot saves a running sandbox, which goes on. Kinds: Invalid, NotFound, Conflict (it is
// paused, or another snapshot is being taken), Unsupported (memory, at a level that cannot keep
// it, or a disk that cannot be saved), Unavailable (no room).
func (m *Manager) Snapshot(ctx context.Context, id berm.SandboxID, r SnapshotRequest) (Snapshot, error) {
	s, err := m.session(id)
	if err != nil {
		return Snapshot{}, err
	}
	snap := Snapshot{TemplateID: berm.NewTemplateID(), Tag: defaultTag, Sandbox: id, Team: s.info.Team} // which never changes
	if r.Name != "" {
		snap.Name, snap.Tag, _ = splitRef(r.Name)
		if !snapshotName.MatchString(r.Name) {
			return Snapshot{}, berm.Errorf(berm.Invalid, "%q is no name of a snapshot", r.Name).WithHint("NAME or NAME:TAG, of a-z, 0-9, - and _")
		}
		if m.isID(snap.Team, snap.Name) {
			return Snapshot{}, berm.Errorf(berm.AlreadyExists, "%q is the id of another snapshot", snap.Name)
		}
		if _, err := m.Templates.Resolve(ctx, s.info.Team, snap.Name); err == nil {
			return Snapshot{}, berm.Errorf(berm.AlreadyExists, "%q is the name of a template", snap.Name)
		}
	}
	snap.Version = s.version(ctx)
	err = s.take(ctx, &snap, r.Memory || s.keepsMemory(), r.Actor)
	if err != nil {
		return Snapshot{}, err
	}
	s.log("info", "Snapshot taken", map[string]string{"snapshot": snap.ID()})
	return snap, nil
}

// version is that of the sandbox's disk, "" where that cannot be told. It is asked for before
// the snapshot that it is noted with: what is written in between then counts as written later.
func (s *session) version(ctx context.Context) string {
	version, err := s.current().Version(ctx)
	if err != nil {
		return ""
	}
	return version
}

// take saves a sandbox and stores what was saved as a snapshot.
func (s *session) take(ctx context.Context, snap *Snapshot, memory bool, actor audit.Actor) error {
	why, data := "snapshot", any(nil)
	if snap.Checkpoint != "" {
		why, data = "checkpoint", map[string]any{"checkpoint": snap.Checkpoint}
	}
	build, saved, err := s.saveNow(ctx, memory, why)
	if err != nil {
		if snap.Checkpoint == "" || s.state() == berm.Running { // else it is of no use any more
			s.m.tell(snap.Sandbox, actor, audit.SnapshotTake, audit.Failed, err.Error(), data)
		}
		return err
	}
	cu := cleanup.Make(func() { s.m.drop(build) })
	defer cu.Clean()
	info := s.snapshot()
	snap.Build, snap.Saved, snap.CreatedAt, snap.Level = build, saved, time.Now().UTC(), info.Level
	snap.Template = *info.Base
	snap.Template.Limits = info.Limits
	if err := s.m.keep(ctx, snap, actor); err != nil {
		return err
	}
	cu.Release()
	return nil
}

// keep stores a snapshot, in the place of one with the same name and tag.
func (m *Manager) keep(ctx context.Context, snap *Snapshot, actor audit.Actor) error {
	m.shelf.mu.Lock()
	defer m.shelf.mu.Unlock()
	var before berm.BuildID
	for _, other := range m.shelf.snapshots {
		if snap.Name == "" || other.Name != snap.Name || other.Team != snap.Team {
			continue
		}
		snap.TemplateID = other.TemplateID
		if other.Tag == snap.Tag {
			before = other.Build
		}
	}
	record, err := json.Marshal(snap)
	if err != nil {
		return berm.Errorf(berm.Internal, "snapshot: %w", err)
	}
	data := map[string]any{"snapshot": snap.ID(), "build": snap.Build, "level": snap.Level, "saved": snap.Saved}
	if snap.Checkpoint != "" {
		data["checkpoint"] = snap.Checkpoint
	}
	if err := m.emit(snap.Sandbox, actor, audit.SnapshotTake, audit.OK, "", data); err != nil {
		return err
	}
	if err := failpoint.Hit("control.saved"); err != nil {
		return err
	}
	if err := m.Store.SaveSnapshot(ctx, store.Snapshot{Build: snap.Build, Record: record}, before); err != nil {
		return err
	}
	m.shelf.snapshots[snap.Build] = *snap
	if before != "" {
		delete(m.shelf.snapshots, before)
		m.removeUnused(before)
	}
	return nil
}

// saveNow saves a running sandbox into a new directory and records what it had written.
func (s *session) saveNow(ctx context.Context, memory bool, why string) (berm.BuildID, berm.Saved, error) {
	if _, err := s.settled(ctx); err != nil {
		return "", berm.Saved{}, err
	}
	if why == "checkpoint" {
		s.snapping.Lock()
	} else {
		for !s.snapping.TryLock() {
			if !s.awaitCheckpoint(ctx) {
				return "", berm.Saved{}, berm.Errorf(berm.Conflict, "another snapshot of sandbox %s is being taken", s.info.ID)
			}
		}
	}
	defer s.snapping.Unlock()
	info := s.snapshot()
	switch info.State {
	case berm.Running:
	case berm.Killed:
		return "", berm.Saved{}, NotFound(info.ID)
	default:
		return "", berm.Saved{}, berm.Errorf(berm.Conflict, "sandbox %s is %s", info.ID, info.State)
	}
	build, err := s.m.newSaved(ctx, info.Base)
	if err != nil {
		return "", berm.Saved{}, err
	}
	cu := cleanup.Make(func() { s.m.drop(build) })
	defer cu.Clean()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), snapshotTime)
	defer cancel()
	saved, err := s.current().Snapshot(ctx, s.m.savedDir(build), memory)
	if berm.KindOf(err) == berm.NotFound && err != nil {
		err = NotFound(info.ID)
	}
	if err != nil {
		return "", berm.Saved{}, err
	}
	_, _ = s.look(ctx, system, why)
	cu.Release()
	return build, saved, nil
}

// DeleteSnapshot removes a snapshot of a team, or with a reference without a tag all of its name.
// NotFound when there is none, Conflict while a paused sandbox needs it.
func (m *Manager) DeleteSnapshot(ctx context.Context, team berm.Team, ref string, actor audit.Actor) error {
	all := m.Snapshots(SnapshotFilter{Team: &team, Ref: ref})
	if len(all) == 0 || ref == "" {
		return berm.Errorf(berm.NotFound, "snapshot '%s' not found", ref)
	}
	m.mu.Lock()
	sessions := m.all()
	m.mu.Unlock()
	for _, s := range sessions {
		info := s.snapshot()
		if slices.ContainsFunc(all, func(snap Snapshot) bool {
			return info.SavedAs == snap.Build || info.From == snap.Build && info.State == berm.Paused
		}) {
			return berm.Errorf(berm.Conflict, "the paused sandbox %s was made from snapshot '%s'", info.ID, ref).WithHint("resume or kill it first")
		}
	}
	for _, snap := range all {
		if err := m.forgetSnapshot(ctx, snap, actor); err != nil {
			return err
		}
	}
	return nil
}

func (m *Manager) forgetSnapshot(ctx context.Context, snap Snapshot, actor audit.Actor) error {
	removed := record(snap.Sandbox, actor, audit.SnapshotRemove, audit.OK, "", map[string]any{"snapshot": snap.ID(), "build": snap.Build})
	removed.Team = snap.Team // whose its sandbox was may be known to nobody else by now
	if err := m.Audit.Emit(removed); err != nil {
		return err
	}
	if err := m.Store.DeleteSnapshot(ctx, snap.Build); err != nil {
		return err
	}
	if err := failpoint.Hit("control.forgotten"); err != nil {
		return err
	}
	m.shelf.mu.Lock()
	delete(m.shelf.snapshots, snap.Build)
	m.shelf.mu.Unlock()
	m.drop(snap.Build)
	return nil
}
