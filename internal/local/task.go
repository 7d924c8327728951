package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/layer"
	"github.com/berm-sandbox/berm/internal/cleanup"
	"github.com/berm-sandbox/berm/internal/driver/landlock"
	"github.com/berm-sandbox/berm/internal/local/change"
	"github.com/berm-sandbox/berm/internal/local/preset"
	"github.com/berm-sandbox/berm/internal/local/session"
	"github.com/berm-sandbox/berm/internal/monitor"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

// KeepCheckpoints is how many checkpoints of a session are kept.
const KeepCheckpoints = 20

// Task is what a person asks for: a command, where, and with which rights beyond those of
// the preset.
type Task struct {
	Argv    []string
	Dir     string // the project; "" is the working directory
	Preset  string // "" is the one that the configuration names
	Rights  preset.Rights
	Keyless bool     // the preset's program gets no key: its requests do
	Environ []string // of the host, from which the sandbox gets what its rights name
	Streams [3]*os.File
	Signals <-chan os.Signal
	// Session is the one to go on with; "" makes one when the workspace is copy-on-write.
	Session string
	// Template is what the root file system is made of; nil shows the host's programs.
	Template *berm.Template
	// AllowWeaker runs the command under Landlock and seccomp alone where the namespace
	// level cannot be had.
	AllowWeaker bool
	// Unwatched leaves out of the audit log what the command executes.
	Unwatched bool
	Notice    func(string) // is told what a person should know
	// Network is how the command reaches what Rights allow it and Network.Policy does.
	Network Network
	// Config is the user's configuration; nil is none.
	Config *preset.Config
}

// The levels at which a command can run.
const (
	LevelNamespace = "namespace"
	LevelWeaker    = "landlock"
)

// Result is how a task ended.
type Result struct {
	Outcome
	Level     string
	Weaker    []string // what LevelWeaker does not hold
	Preset    string
	Workspace string
	Session   string         // "" when none is left: nothing was changed, or the changes are in place
	Sandbox   berm.SandboxID // by which the audit log has it
	Denied    []egress.Event // what the network's policy did not let through, each once with its Count
	Unreached []egress.Event // what it let through and nobody answered

	wrote *audit.Record // what the session has changed; nil when there is none
}

// Prepare finds out what the command of a task may do, without a session. Kinds: Invalid
// and NotFound (configuration, flags), Denied.
func Prepare(t *Task) (*Request, error) {
	place, err := placeOf(t.Dir, t.Environ)
	if err != nil {
		return nil, err
	}
	if err := checkPlace(place); err != nil {
		return nil, err
	}
	grant, err := preset.Resolve(preset.Request{Place: place, Config: t.Config, Preset: t.Preset, Flags: t.Rights, Keyless: t.Keyless, Environ: t.Environ, NoToolchain: t.Template != nil})
	if err != nil {
		return nil, err
	}
	project, err := preset.LoadProject(place.Workspace)
	if err != nil {
		return nil, err
	}
	asked := grant.Limits
	grant = preset.Narrow(grant, project, place)
	if n := grant.Limits.Memory; n > 0 && n < LeastMemory {
		return nil, berm.Errorf(berm.Invalid, "a limit of memory of %d bytes is too low for any command", n).WithHint("at least 8MiB; a number without a unit is bytes")
	}
	if n := grant.Limits.PIDs; n > 0 && n < LeastPIDs {
		return nil, berm.Errorf(berm.Invalid, "a limit of %d processes is too low: the sandbox has some threads of its own", n).WithHint("at least %d", LeastPIDs)
	}
	if grant.Paths, err = withoutOwn(grant, place); err != nil {
		return nil, err
	}
	if grant.Network == preset.NetworkHost {
		grant.Notices = append(grant.Notices, "the sandbox has the host's network: it reaches whatever this machine reaches, its services on 127.0.0.1 too")
	}
	env := preset.CleanEnv(t.Environ, grant.Env)
	if variable(env, "HOME") != "" {
		env = append(unset(env, "HOME"), "HOME="+place.Home)
	}
	env = append(env, "BERM_SANDBOX=1")
	if t.Template != nil {
		// Where the host's programs lie says nothing about those of the template.
		env = unset(env, "PATH")
		for name, value := range t.Template.Env {
			env = append(unset(env, name), name+"="+value)
		}
	}
	for _, entry := range grant.Allow {
		if itself(entry) {
			grant.Notices = append(grant.Notices, "--allow "+entry+": inside, that is the sandbox itself; allow a service of this machine by another address, with --open too")
		}
	}
	// Who names a directory knows which.
	if dir := repositoryAround(place); dir != "" && t.Dir == "" {
		grant.Notices = append(grant.Notices, fmt.Sprintf("the project is %s alone, not the git repository around it: -C %s is all of it", place.Workspace, dir))
	}
	online := (len(grant.Allow) > 0 || t.Network.Policy.YAML != "") && grant.Network != preset.NetworkHost
	if !online && grant.Network != preset.NetworkHost {
		env = impatient(env)
	}
	if !online && len(t.Network.Open) > 0 {
		return nil, berm.Errorf(berm.Invalid, "--open %s opens nothing: it lets rules name an address, and there is none", strings.Join(t.Network.Open, " --open ")).
			WithHint("add --allow HOST[:PORT] or --policy FILE")
	}
	return &Request{Network: online, Narrowed: grant.Limits != asked, Template: t.Template, ID: berm.NewSandboxID(), Argv: t.Argv, Env: env, Grant: grant, Place: place, Streams: t.Streams, Signals: t.Signals}, nil
}

// Do runs a task to its end. After an error the command did not run, and nothing is left
// of a session that the task made.
func Do(ctx context.Context, t *Task) (Result, error) {
	r, err := Prepare(t)
	if err != nil {
		return Result{}, err
	}
	for _, n := range r.Grant.Notices {
		t.Notice(n)
	}
	if n := foreign(r.Place.Workspace, r.Grant.Workspace); n != "" {
		t.Notice(n)
	}
	monitor.Trace("prepared")
	journal := begin(t, r)
	if !t.Unwatched {
		r.processes = journal.watch()
	}
	result, err := doOnline(ctx, t, r, journal)
	result.Sandbox = r.ID
	monitor.Trace("done")
	journal.end(result, err)
	monitor.Trace("recorded")
	return result, err
}

func do(ctx context.Context, t *Task, r *Request) (result Result, err error) {
	result = Result{Level: LevelNamespace, Preset: r.Grant.Preset, Workspace: r.Place.Workspace}
	if r.Grant.Workspace != preset.WorkspaceCopyOnWrite {
		if t.Session != "" {
			return Result{}, berm.Errorf(berm.Invalid, "a session needs a copy-on-write workspace").WithHint("leave --rw . and --ro . out")
		}
		if r.Grant.Checkpoint {
			return Result{}, berm.Errorf(berm.Unsupported, "checkpoints need a copy-on-write workspace").WithHint("leave --rw . out, and bring the changes back with `berm apply`")
		}
		result.Outcome, err = Run(ctx, r)
		if weaker(t, err) {
			return runWeaker(ctx, t, r, err)
		}
		return result, err
	}

	run := session.Run{Argv: r.Told, Started: time.Now(), ExitCode: -1, Reason: "it did not end"}
	var store *session.Store
	var s *session.Session
	var noting sync.WaitGroup
	var unnoted error
	made, unchanged := t.Session == "", true
	var cu cleanup.Cleanup
	defer cu.Clean()
	r.Session = func() (_ *session.Session, err error) {
		if store, s, err = openSession(t, r); err != nil {
			return nil, err
		}
		cu.Add(func() { store.Close() })
		cu.Add(s.Unlock)
		if made {
			cu.Add(func() {
				if unchanged {
					_ = s.Remove(context.WithoutCancel(ctx))
				}
			})
		} else if _, err := Settle(ctx, s); err != nil {
			return nil, err
		} else if err := s.Reuse(ctx); err != nil {
			return nil, err
		}
		if r.Grant.Checkpoint && !made {
			if _, err := s.Checkpoint(ctx, strings.Join(r.Told, " "), KeepCheckpoints); err != nil {
				return nil, err
			}
		}
		s.Runs = append(s.Runs, run)
		// Should this process be killed, the session is whole all the same.
		noting.Go(func() { unnoted = s.Note() })
		return s, nil
	}
	// What the project is now tells later what changed in it beside the session.
	recording, stop := context.WithCancel(ctx)
	defer stop()
	recorded, ended := make(chan error, 1), make(chan struct{})
	r.Started = func() {
		go func() {
			err := s.Record(recording, ended)
			noting.Wait()
			err = errors.Join(unnoted, err)
			if recording.Err() == nil {
				err = errors.Join(err, s.Save(), store.Sweep(recording))
			}
			recorded <- err
		}()
	}
	result.Outcome, err = Run(ctx, r)
	noting.Wait()
	if err != nil {
		if weaker(t, err) {
			return Result{}, berm.Errorf(berm.Unsupported, "%w", err).
				WithHint("--allow-weaker has no copy-on-write workspace: add --rw . to let the command write into the project, or --ro .")
		}
		return Result{}, err
	}
	changed, err := s.Changed()
	if made && changed {
		changed = differs(ctx, s)
	}
	if unchanged = err == nil && !changed; err != nil {
		return result, err
	}
	if made && unchanged {
		stop()
		if result.Started {
			<-recorded //nolint:errcheck // the session goes, and what it recorded with it
		}
		nothing := layer.Summary(nil, nil, "end")
		result.wrote = &nothing
		return result, nil // and Clean removes the session
	}
	close(ended)
	if result.Started {
		// A long recording is not waited for: of what it lacks, changes are judged by time.
		patience := time.AfterFunc(2*time.Second, stop)
		if err := <-recorded; err != nil && recording.Err() == nil {
			t.Notice(err.Error())
		}
		patience.Stop()
	}
	result.wrote = wrote(ctx, s)
	run.Ended, run.ExitCode, run.Reason = time.Now(), result.ExitCode, string(result.Reason)
	s.Runs[len(s.Runs)-1] = run
	if err := s.Save(); err != nil {
		return result, err
	}
	result.Session = s.Name
	return result, nil
}

// differs says whether there is something to apply in a session. Files that came and went,
// as git's locks do, leave their directories behind, and those alone are nothing. A session
// of more than a few entries is not looked through: it counts as one with changes.
func differs(ctx context.Context, s *session.Session) bool {
	upper, err := s.OpenUpper()
	if err != nil {
		return true
	}
	defer upper.Close()
	project, err := s.OpenProject()
	if err != nil {
		return true
	}
	defer project.Close()
	changes, err := change.List(ctx, upper, project, change.Limits{Entries: 64})
	return err != nil || len(changes) > 0
}

// lookTime bounds how long the end of a run looks at what its session has changed for the
// audit log.
const lookTime = 100 * time.Millisecond

// wrote is the record of what a session has changed until now, without hashes: nobody is to
// wait for them. `berm diff` has all of it.
func wrote(ctx context.Context, s *session.Session) *audit.Record {
	ctx, cancel := context.WithTimeout(ctx, lookTime)
	defer cancel()
	upper, err := s.OpenUpper()
	if err != nil {
		return nil // saving the session tells
	}
	defer upper.Close()
	project, err := s.OpenProject()
	if err != nil {
		return nil
	}
	defer project.Close()
	changes, err := change.List(ctx, upper, project, change.Limits{Entries: 10_000})
	for i := range changes { // the log has paths as they are inside, where the project lies at its own
		changes[i].Path = strings.TrimPrefix(path.Join(s.Project, changes[i].Path), "/")
	}
	record := layer.Summary(changes, err, "end")
	return &record
}

// openSession makes the session of a task, or locks the one that it goes on with.
func openSession(t *Task, r *Request) (*session.Store, *session.Session, error) {
	state, err := session.StateDir()
	if err != nil {
		return nil, nil, err
	}
	store, err := session.Open(state)
	if err != nil {
		return nil, nil, err
	}
	cu := cleanup.Make(func() { store.Close() })
	defer cu.Clean()
	var s *session.Session
	if t.Session == "" {
		s, err = store.Create(r.Place.Workspace, r.Grant.Preset)
	} else if s, err = store.Get(t.Session); err == nil {
		if s.Project != r.Place.Workspace {
			return nil, nil, berm.Errorf(berm.Invalid, "session %s is of %s", s.Name, s.Project).WithHint("run it there")
		}
		err = s.Lock()
	}
	if err != nil {
		return nil, nil, err
	}
	cu.Release()
	return store, s, nil
}

// weaker says whether a task is to run under Landlock alone.
func weaker(t *Task, err error) bool { return t.AllowWeaker && berm.KindOf(err) == berm.Unsupported }

// runWeaker runs the command under Landlock and seccomp.
func runWeaker(ctx context.Context, t *Task, r *Request, because error) (Result, error) {
	if t.Template != nil {
		return Result{}, berm.Errorf(berm.Unsupported, "there are no templates under Landlock alone")
	}
	if r.Grant.Network == preset.NetworkHost || r.Network {
		return Result{}, berm.Errorf(berm.Unsupported, "there is no network under Landlock alone")
	}
	began := time.Now()
	temp, err := os.MkdirTemp("", "berm-")
	if err != nil {
		return Result{}, berm.Errorf(berm.Internal, "make a directory for temporary files: %w", err)
	}
	defer os.RemoveAll(temp)
	// Home is not a directory of the sandbox's own here: programs get one to write to.
	env := append(unset(r.Env, "HOME"), "HOME="+temp)
	o := landlock.Order{
		Argv: r.Argv, Dir: r.Place.Workspace, Env: env, Files: r.Streams, TempDir: temp,
		Limits: r.Grant.Limits, Timeout: r.Grant.Timeout, Profile: r.Grant.Profile, Signals: r.Signals,
	}
	var hidden []string
	for _, p := range r.Grant.Paths {
		if p.Access == preset.Hide {
			hidden = append(hidden, p.Path)
		}
	}
	open := func(path string, access preset.Access) error {
		paths, err := around(path, hidden)
		switch {
		case err != nil:
			return err
		case access == preset.ReadOnly:
			o.Read = append(o.Read, paths...)
		case len(paths) == 1 && paths[0] == path:
			o.Write = append(o.Write, path)
		default:
			return berm.Errorf(berm.Unsupported, "under Landlock alone nothing can be hidden in %s, which the command may write", path)
		}
		return nil
	}
	for _, p := range r.Grant.Paths {
		if p.Target != "" || p.Access == preset.Hide {
			continue
		}
		if err := open(p.Path, p.Access); err != nil {
			return Result{}, err
		}
	}
	access := preset.ReadOnly
	if r.Grant.Workspace == preset.WorkspaceReadWrite {
		access = preset.ReadWrite
	}
	if err := open(r.Place.Workspace, access); err != nil {
		return Result{}, err
	}
	for _, path := range o.Read {
		for _, around := range o.Write {
			if path != around && below(path, around) {
				return Result{}, berm.Errorf(berm.Unsupported, "under Landlock alone %s cannot be read-only in %s, which the command may write", path, around).
					WithHint("let it write to fewer places with --rw, or run it where user namespaces can be had")
			}
		}
	}
	result := Result{Level: LevelWeaker, Weaker: landlock.Weaker(0), Preset: r.Grant.Preset, Workspace: r.Place.Workspace}
	t.Notice("the sandbox is weaker than asked for, Landlock and seccomp alone: " + because.Error())
	exit, err := landlock.Run(ctx, o)
	if kind := berm.KindOf(err); err != nil && (kind == berm.NotFound || kind == berm.Denied) { // the program's fault
		result.Outcome = Outcome{ExitCode: 126, Detail: err.Error(), Duration: time.Since(began)}
		if kind == berm.NotFound {
			result.ExitCode = 127
		}
		return result, nil
	}
	if err != nil {
		return Result{}, err
	}
	result.Outcome = Outcome{ExitCode: exit.Code, Reason: exit.Reason, Detail: exit.Detail, Duration: time.Since(began), Started: true}
	if exit.Signal != "" {
		result.Signal = unix.SignalNum(exit.Signal)
		result.ExitCode = 128 + int(result.Signal)
	}
	if exit.Reason == berm.ReasonTimeout {
		result.Signal, result.ExitCode = 0, timedOut
	}
	return result, nil
}

// around lists what to open of a directory so that nothing hidden is opened: Landlock only
// adds rights on the way down.
func around(path string, hidden []string) ([]string, error) {
	inside := false
	for _, h := range hidden {
		if h == path {
			return nil, nil
		}
		inside = inside || strings.HasPrefix(h, strings.TrimSuffix(path, "/")+"/")
	}
	if !inside {
		return []string{path}, nil
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, berm.Errorf(berm.Unsupported, "nothing can be hidden in %s under Landlock alone: %w", path, err)
	}
	var paths []string
	for _, e := range entries {
		below, err := around(filepath.Join(path, e.Name()), hidden)
		if err != nil {
			return nil, err
		}
		paths = append(paths, below...)
	}
	return paths, nil
}

// placeOf finds the project and the user's home.
func placeOf(dir string, environ []string) (preset.Place, error) {
	if dir == "" {
		dir = "."
	}
	workspace, err := filepath.Abs(dir)
	if err == nil {
		workspace, err = filepath.EvalSymlinks(workspace)
	}
	if err == nil {
		var info fs.FileInfo
		if info, err = os.Stat(workspace); err == nil && !info.IsDir() {
			err = unix.ENOTDIR
		}
	}
	if err != nil {
		return preset.Place{}, berm.Errorf(berm.Invalid, "the workspace %q: %w", dir, err)
	}
	home := variable(environ, "HOME")
	if home == "" {
		return preset.Place{}, berm.Errorf(berm.Invalid, "HOME is not set").WithHint("export HOME=…")
	}
	// A home that is not there is empty inside, like every other.
	if real, err := filepath.EvalSymlinks(home); err == nil {
		home = real
	}
	if !filepath.IsAbs(home) || home == "/" {
		home = "/nonexistent"
	}
	return preset.Place{Home: filepath.Clean(home), Workspace: workspace}, nil
}

// repositoryAround is the git repository in whose subdirectory a project lies, or "". Its
// history is not shown then.
func repositoryAround(place preset.Place) string {
	isRepository := func(dir string) bool {
		_, err := os.Lstat(dir + "/.git")
		return err == nil
	}
	if isRepository(place.Workspace) {
		return ""
	}
	for dir := filepath.Dir(place.Workspace); dir != "/" && dir != place.Home; dir = filepath.Dir(dir) {
		if isRepository(dir) {
			return dir
		}
	}
	return ""
}

// itself says whether an entry of what may be reached names the loopback device, which
// every sandbox has of its own.
func itself(entry string) bool {
	if addr, err := netip.ParseAddrPort(entry); err == nil {
		return addr.Addr().IsLoopback()
	}
	if prefix, err := netip.ParsePrefix(entry); err == nil {
		return prefix.Addr().IsLoopback()
	}
	if addr, err := netip.ParseAddr(entry); err == nil {
		return addr.IsLoopback()
	}
	name, _, _ := strings.Cut(entry, ":")
	return name == "localhost"
}

// impatient keeps package managers from trying again what no network reaches: npm does for
// more than a minute.
func impatient(env []string) []string {
	for _, name := range []string{"npm_config_fetch_retries", "PIP_RETRIES", "CARGO_NET_RETRY"} {
		if variable(env, name) == "" {
			env = append(unset(env, name), name+"=0")
		}
	}
	return env
}

// LoadConfig reads the configuration file of whoever has this environment.
func LoadConfig(environ []string) (*preset.Config, error) {
	dir, err := configDir(environ)
	if err != nil {
		return nil, err
	}
	if dir == "" {
		return &preset.Config{}, nil
	}
	return preset.LoadConfig(filepath.Join(dir, "config.yaml"))
}

// configDir is where Berm is configured; "" when there is no home.
func configDir(environ []string) (string, error) {
	dir := variable(environ, "XDG_CONFIG_HOME")
	if dir == "" {
		home := variable(environ, "HOME")
		if home == "" {
			return "", nil
		}
		dir = filepath.Join(home, ".config")
	}
	if !filepath.IsAbs(dir) {
		return "", berm.Errorf(berm.Invalid, "XDG_CONFIG_HOME is no absolute path: %q", dir)
	}
	return filepath.Join(dir, "berm"), nil
}

// unset returns an environment without a variable.
func unset(env []string, name string) []string {
	return slices.DeleteFunc(slices.Clone(env), func(e string) bool { return strings.HasPrefix(e, name+"=") })
}

func variable(environ []string, name string) string {
	for _, e := range environ {
		if value, ok := strings.CutPrefix(e, name+"="); ok {
			return value
		}
	}
	return ""
}
