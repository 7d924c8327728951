package session

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// The parts of a session's directory.
const (
	description = "session.json"
	upperDir    = "upper"
	workDir     = "work"
	baseFile    = "base"
	checkpoints = "checkpoints"
)

// format is the number of the description's format. A newer one is refused.
const format = 1

// What a description may hold, so that it is read in one small piece.
const (
	maxDescription = 1 << 20
	maxRuns        = 100
	maxArgv        = 4 << 10
)

// Session is one copy-on-write view of a project.
type Session struct {
	Name    string
	Project string // absolute, without symbolic links
	Created time.Time
	Preset  string
	Runs    []Run // the last 100

	Broken error // of a listed session: why it cannot be used; it can be removed

	store *Store
	lock  *os.File
	fresh bool // made by this process: its layer is no older than its first run
}

// Run is one command that ran in a session.
type Run struct {
	Argv     []string  `json:"argv"` // of a long command line, the first 4 KiB
	Started  time.Time `json:"started"`
	Ended    time.Time `json:"ended,omitzero"`
	ExitCode int       `json:"exitCode"`
	Reason   string    `json:"reason,omitempty"`
}

// disk is the description of a session as it lies on disk.
type disk struct {
	Version int    `json:"version"`
	Name    string `json:"name"`
	Project string `json:"project"`
	// ProjectBytes is the project where it is no UTF-8, which JSON cannot hold.
	ProjectBytes []byte    `json:"projectBytes,omitempty"`
	Created      time.Time `json:"created"`
	Preset       string    `json:"preset,omitempty"`
	Runs         []Run     `json:"runs,omitempty"`
}

// Dir returns the absolute path of the session's directory.
func (s *Session) Dir() string { return filepath.Join(s.store.path, s.Name) }

// Upper returns the path of the overlay's upper directory. It has the project's mode and, as
// far as the user may set it, owner: the workspace shows them as its own.
func (s *Session) Upper() string { return filepath.Join(s.Dir(), upperDir) }

// Work returns the path of the overlay's work directory.
func (s *Session) Work() string { return filepath.Join(s.Dir(), workDir) }

// OpenUpper opens the upper directory for reading what the session changed. Where a command
// took the rights to the workspace itself away, the user gets them back.
func (s *Session) OpenUpper() (*os.Root, error) {
	name := filepath.Join(s.Name, upperDir)
	info, err := s.store.root.Lstat(name)
	if err == nil && info.Mode()&0o500 != 0o500 {
		err = s.store.root.Chmod(name, info.Mode().Perm()|0o500)
	}
	var root *os.Root
	if err == nil {
		root, err = s.store.root.OpenRoot(name)
	}
	if err != nil {
		return nil, s.missing(err)
	}
	return root, nil
}

// OpenProject opens the project. There was no symbolic link on its path when the session was
// made: one that is there now may be the work of a command that wrote a directory around the
// project, so none is followed.
func (s *Session) OpenProject() (*os.Root, error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, s.Project, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS,
	})
	if err == nil {
		defer unix.Close(fd)
		var root *os.Root
		if root, err = os.OpenRoot("/proc/self/fd/" + strconv.Itoa(fd)); err == nil {
			return root, nil
		}
	}
	if errors.Is(err, unix.ELOOP) {
		return nil, berm.Errorf(berm.Denied, "the project of session %s is %q, on whose path there is a symbolic link now", s.Name, s.Project).
			WithHint("find out who put it there; move the project back, or give the session up with `berm discard %s`", s.Name)
	}
	return nil, berm.Errorf(berm.NotFound, "the project of session %s: open %q: %w", s.Name, s.Project, err).
		WithHint("`berm discard %s` gives the session up", s.Name)
}

// Used returns when the session's last command began, or when the session was made.
func (s *Session) Used() time.Time {
	if len(s.Runs) > 0 {
		return s.Runs[len(s.Runs)-1].Started
	}
	return s.Created
}

// Changed says whether the upper directory holds anything at all. What it holds need not
// differ from the project: that takes a comparison.
func (s *Session) Changed() (bool, error) {
	dir, err := s.store.root.Open(filepath.Join(s.Name, upperDir))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if errors.Is(err, fs.ErrPermission) {
		return true, nil // its mode was changed by the sandbox
	}
	if err != nil {
		return false, stateError(err, "look at the session "+s.Name)
	}
	defer dir.Close()
	_, err = dir.Readdirnames(1)
	if errors.Is(err, io.EOF) {
		return false, nil
	}
	if err != nil {
		return false, stateError(err, "look at the session "+s.Name)
	}
	return true, nil
}

// makeLayer makes the two directories that the overlay of a project needs. The error is
// Unsupported when the file system cannot keep what overlayfs writes.
func makeLayer(dir *os.File, project *unix.Stat_t) error {
	fd := int(dir.Fd())
	const hint = "set XDG_STATE_HOME to a directory on ext4, xfs, btrfs or tmpfs, or use --rw . or --ro ."
	var fs unix.Statfs_t
	if unix.Fstatfs(fd, &fs) == nil && fs.Type == unix.OVERLAYFS_SUPER_MAGIC {
		return berm.Errorf(berm.Unsupported, "sessions cannot be kept on overlayfs, such as the root file system of a container").WithHint(hint)
	}
	// Without extended attributes overlayfs would work but for deleted directories that come
	// again, which would fail in the middle of the command.
	if err := unix.Fsetxattr(fd, "user.berm", nil, 0); errors.Is(err, unix.EOPNOTSUPP) {
		return berm.Errorf(berm.Unsupported, "sessions cannot be kept on a file system without extended attributes").WithHint(hint)
	} else if err != nil {
		return err
	}
	if err := unix.Mkdirat(fd, workDir, 0o700); err != nil {
		return err
	}
	if err := unix.Mkdirat(fd, upperDir, 0o700); err != nil {
		return err
	}
	if int(project.Uid) != os.Geteuid() || int(project.Gid) != os.Getegid() {
		err := unix.Fchownat(fd, upperDir, int(project.Uid), int(project.Gid), 0)
		if err != nil && os.Geteuid() == 0 {
			return err
		}
	}
	return unix.Fchmodat(fd, upperDir, project.Mode&0o777, 0)
}

// Save writes the session's description, for good (fsync). The session must be locked.
func (s *Session) Save() error { return s.save(true) }

// Note writes the session's description without waiting for the disk: it outlives this
// process, though perhaps not the machine. The session must be locked.
func (s *Session) Note() error { return s.save(false) }

func (s *Session) save(sync bool) error {
	d := disk{Version: format, Name: s.Name, Project: s.Project, Created: s.Created, Preset: s.Preset}
	if !utf8.ValidString(d.Project) {
		d.ProjectBytes = []byte(d.Project)
	}
	for _, run := range s.Runs[max(0, len(s.Runs)-maxRuns):] {
		run.Argv = clip(run.Argv)
		d.Runs = append(d.Runs, run)
	}
	data, err := json.Marshal(d)
	if err == nil {
		err = s.write(description, data, sync)
	}
	if err != nil {
		return stateError(err, "save the session "+s.Name)
	}
	return nil
}

// clip leaves out what of a command line goes beyond maxArgv.
func clip(argv []string) []string {
	left := maxArgv
	for i, arg := range argv {
		if left -= len(arg) + 1; left < 0 {
			kept := append([]string(nil), argv[:i]...)
			return append(kept, arg[:max(0, left+len(arg)+1)]+"…")
		}
	}
	return argv
}

// write replaces a file of the session's directory, so that a crash leaves the old one or
// the new one.
func (s *Session) write(name string, data []byte, sync bool) error {
	temporary := filepath.Join(s.Name, name+".new")
	f, err := s.store.root.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err = f.Write(data); err == nil && sync {
		err = f.Sync()
	}
	if err != nil {
		return err
	}
	return s.store.root.Rename(temporary, filepath.Join(s.Name, name))
}

// read returns a file of the session's directory that Berm wrote, or as much of it as such
// a file may have.
func (s *Session) read(name string) ([]byte, error) {
	f, err := s.store.root.Open(filepath.Join(s.Name, name))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxDescription))
}

// load reads the session's description.
func (s *Session) load() error {
	data, err := s.read(description)
	if err != nil {
		return s.missing(err)
	}
	var d disk
	var typed *json.UnmarshalTypeError // a newer format may have other types
	if err := json.Unmarshal(data, &d); err != nil && (d.Version <= format || !errors.As(err, &typed)) {
		return s.damaged(err)
	}
	if d.Version > format {
		return berm.Errorf(berm.Unsupported, "session %s was written by a newer berm (format %d; this one knows %d)", s.Name, d.Version, format).
			WithHint("use that version, or `berm discard --session %s`", s.Name)
	}
	if d.ProjectBytes != nil {
		d.Project = string(d.ProjectBytes)
	}
	if d.Version < 1 || d.Name != s.Name || !filepath.IsAbs(d.Project) || d.Created.IsZero() {
		return s.damaged(errors.New("its description lacks what it must have"))
	}
	s.Project, s.Created, s.Preset, s.Runs = d.Project, d.Created, d.Preset, d.Runs
	return nil
}

func (s *Session) damaged(err error) error {
	return berm.Errorf(berm.Internal, "session %s cannot be read: %w", s.Name, err).
		WithHint("its changes are in %s; `berm discard --session %s` deletes it", s.Upper(), s.Name)
}

// missing gives an error of a look-up its kind.
func (s *Session) missing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return berm.Errorf(berm.NotFound, "there is no session %q", s.Name).
			WithHint("`berm sessions` lists them")
	}
	return stateError(err, "open the session "+s.Name)
}
