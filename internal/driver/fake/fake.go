// Package fake is an in-memory driver: no isolation, no processes, the whole contract
// otherwise. It is for tests of what is above drivers.
package fake

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/monitor"
)

// Host is a machine: it holds sandboxes that outlive drivers.
type Host struct {
	// Agent serves AgentPort of every sandbox; nil answers /health alone.
	Agent func(spec berm.Spec) http.Handler
	// CreateDelay is how long a creation takes.
	CreateDelay time.Duration
	// Memory has snapshots keep memory, of which there is none.
	Memory bool

	mu        sync.Mutex
	sandboxes map[berm.SandboxID]*inmate
	exits     map[berm.SandboxID]berm.Exit // of the dead that nobody removed
}

// New returns a driver on a machine of its own.
func New() *Driver { return (&Host{}).Driver() }

// Driver returns a driver on this machine, as a server that is started has it.
func (h *Host) Driver() *Driver { return &Driver{h} }

// Driver is a berm.Driver.
type Driver struct{ host *Host }

var _ berm.Driver = (*Driver)(nil)

// Host is the machine of the driver.
func (d *Driver) Host() *Host { return d.host }

// Level is the one that the fake stands for.
func (d *Driver) Level() berm.Level { return berm.Namespace }

// Probe finds everything.
func (d *Driver) Probe(context.Context) berm.Probe {
	return berm.Probe{Level: d.Level(), Usable: true, Memory: d.host.Memory, Features: []berm.Feature{{Name: "memory", Found: true, Required: true}}}
}

// inmate is one sandbox. It is the wall of its own machine.
type inmate struct {
	host    *Host
	spec    berm.Spec
	machine *monitor.Machine
	agent   *http.Server
	conns   chan net.Conn
	started time.Time

	once   sync.Once
	closed chan struct{} // the agent's listener is
	dead   chan struct{}

	mu    sync.Mutex
	ports map[uint16]func(net.Conn)
}

var idShape = regexp.MustCompile(`^[a-z0-9]{1,64}$`)

func check(spec berm.Spec) error {
	l := spec.Limits
	switch {
	case spec.Level != berm.Namespace && spec.Level != berm.Auto:
		return berm.Errorf(berm.Unsupported, "this driver makes no sandboxes of level %q", spec.Level)
	case !idShape.MatchString(string(spec.ID)):
		return berm.Errorf(berm.Invalid, "sandbox id %q", spec.ID)
	case !regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?$`).MatchString(spec.Hostname):
		return berm.Errorf(berm.Invalid, "host name %q", spec.Hostname)
	case len(spec.Layers) == 0 || len(spec.Layers) > 200:
		return berm.Errorf(berm.Invalid, "%d layers", len(spec.Layers))
	case l.Memory < 0 || l.CPU < 0 || l.PIDs < 0 || l.Disk < 0 || l.Disk > 0 && l.Disk < 8<<20:
		return berm.Errorf(berm.Invalid, "limits %+v", l)
	case spec.Profile != "" && spec.Profile != "default" && spec.Profile != "strict":
		return berm.Errorf(berm.Invalid, "seccomp profile %q", spec.Profile)
	case !spec.Deadline.IsZero() && !spec.Deadline.After(time.Now()):
		return berm.Errorf(berm.Invalid, "the deadline has passed")
	case !slices.Contains([]berm.OnDeadline{"", berm.KillAtDeadline, berm.PauseAtDeadline}, spec.OnDeadline):
		return berm.Errorf(berm.Invalid, "action at the deadline %q", spec.OnDeadline)
	}
	if spec.From != "" {
		if _, err := os.Stat(filepath.Join(spec.From, "saved")); err != nil {
			return berm.Errorf(berm.NotFound, "the snapshot is not there: %w", err)
		}
	}
	if spec.Memory {
		if _, err := os.Stat(filepath.Join(spec.From, "memory")); err != nil {
			return berm.Errorf(berm.NotFound, "the memory is not there: %w", err)
		}
	}
	for _, layer := range spec.Layers {
		if !filepath.IsAbs(layer.Path) {
			return berm.Errorf(berm.Invalid, "layer path %q", layer.Path)
		}
		if _, err := os.Stat(layer.Path); err != nil {
			return berm.Errorf(berm.NotFound, "layer %s", layer.DiffID)
		}
	}
	return nil
}

// Create makes a sandbox in memory.
func (d *Driver) Create(ctx context.Context, spec berm.Spec) (berm.Sandbox, error) {
	if err := check(spec); err != nil {
		return nil, err
	}
	select {
	case <-time.After(d.host.CreateDelay):
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		return nil, berm.Errorf(berm.Unavailable, "create: %w", context.Cause(ctx))
	}
	i := &inmate{host: d.host, spec: spec, started: time.Now(), conns: make(chan net.Conn), closed: make(chan struct{}), dead: make(chan struct{}), ports: map[uint16]func(net.Conn){}}
	handler := http.Handler(http.HandlerFunc(healthOnly))
	if d.host.Agent != nil {
		handler = d.host.Agent(spec)
	}
	i.agent = &http.Server{Handler: handler}

	d.host.mu.Lock()
	defer d.host.mu.Unlock()
	if d.host.sandboxes == nil {
		d.host.sandboxes, d.host.exits = map[berm.SandboxID]*inmate{}, map[berm.SandboxID]berm.Exit{}
	}
	_, lives := d.host.sandboxes[spec.ID]
	if _, died := d.host.exits[spec.ID]; lives || died {
		return nil, berm.Errorf(berm.AlreadyExists, "sandbox %s exists", spec.ID)
	}
	i.machine = monitor.NewMachine(i, spec.OnDeadline)
	_ = i.machine.SetDeadline(spec.Deadline)
	d.host.sandboxes[spec.ID] = i
	go func() { _ = i.agent.Serve(listener{i}) }()
	return &sandbox{i}, nil
}

func healthOnly(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/health" {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusNotFound)
	_ = json.NewEncoder(w).Encode(map[string]string{"message": "the fake has no " + r.URL.Path})
}

// Open finds a living sandbox.
func (d *Driver) Open(_ context.Context, id berm.SandboxID) (berm.Sandbox, error) {
	d.host.mu.Lock()
	defer d.host.mu.Unlock()
	if i, ok := d.host.sandboxes[id]; ok {
		return &sandbox{i}, nil
	}
	return nil, berm.Errorf(berm.NotFound, "no living sandbox %s", id)
}

// List names the living and the dead that nobody removed.
func (d *Driver) List(context.Context) ([]berm.SandboxID, error) {
	d.host.mu.Lock()
	defer d.host.mu.Unlock()
	var ids []berm.SandboxID
	for id := range d.host.sandboxes {
		ids = append(ids, id)
	}
	for id := range d.host.exits {
		ids = append(ids, id)
	}
	return ids, nil
}

// Remove takes away what is left of a dead sandbox.
func (d *Driver) Remove(_ context.Context, id berm.SandboxID) (berm.Exit, error) {
	d.host.mu.Lock()
	defer d.host.mu.Unlock()
	if _, lives := d.host.sandboxes[id]; lives {
		return berm.Exit{}, berm.Errorf(berm.Conflict, "sandbox %s lives", id)
	}
	exit := d.host.exits[id]
	delete(d.host.exits, id)
	return exit, nil
}

// Serve lets serve take connections to a port of a sandbox, as a program inside that
// listens.
func (h *Host) Serve(id berm.SandboxID, port uint16, serve func(net.Conn)) {
	h.mu.Lock()
	i := h.sandboxes[id]
	h.mu.Unlock()
	if i != nil {
		i.mu.Lock()
		i.ports[port] = serve
		i.mu.Unlock()
	}
}

// Crash ends a sandbox as if it broke, with a reason such as berm.ReasonOOM.
func (h *Host) Crash(id berm.SandboxID, reason berm.Reason) {
	h.mu.Lock()
	i := h.sandboxes[id]
	h.mu.Unlock()
	if i != nil {
		i.machine.Kill(reason)
	}
}

// Snapshot saves nothing, for nothing is written anywhere.
func (i *inmate) Snapshot(dir string) (berm.Saved, error) {
	return berm.Saved{}, os.WriteFile(filepath.Join(dir, "saved"), nil, 0o600)
}

// Version is always the same, as nothing is written.
func (i *inmate) Version() (string, error) { return "1", nil }

// Settle has nothing to do.
func (i *inmate) Settle(string) error { return nil }

// Checkpoint leaves a mark that there is memory.
func (i *inmate) Checkpoint(dir string) (berm.Saved, error) {
	saved, err := i.Snapshot(dir)
	saved.Memory = true
	return saved, errors.Join(err, os.WriteFile(filepath.Join(dir, "memory"), nil, 0o600))
}

func (i *inmate) Freeze() error { return nil }
func (i *inmate) Thaw() error   { return nil }

// Usage makes numbers up that grow.
func (i *inmate) Usage() (berm.Usage, error) {
	l := i.spec.Limits
	return berm.Usage{
		At: time.Now(), CPUTime: time.Since(i.started) / 100, CPUs: max(l.CPU, 1),
		MemoryUsed: 16 << 20, MemoryTotal: max(l.Memory, 64<<20), MemoryCache: 1 << 20,
		DiskUsed: 1 << 20, DiskTotal: max(l.Disk, 64<<20), PIDs: 3,
	}, nil
}

// Policy is policy as a monitor.Wall tells it.
func (i *inmate) Policy() json.RawMessage {
	raw, err := json.Marshal(i.policy())
	if err != nil {
		panic(err) // there is nothing in it that JSON has not
	}
	return raw
}

// policy says what a fake is held to.
func (i *inmate) policy() berm.Policy {
	return berm.Policy{Level: berm.Namespace, Limits: i.spec.Limits, Network: "none: there is nothing inside", NoNewPrivs: !i.spec.Setuid,
		Seccomp: berm.Seccomp{Profile: i.spec.Profile}, Degraded: i.spec.Degraded}
}

// Kill ends it at once.
func (i *inmate) Kill() {
	i.once.Do(func() {
		go func() {
			close(i.closed)
			_ = i.agent.Close()
			reason := i.machine.Reason()
			exit := berm.Exit{Reason: reason, Code: -1, Signal: "SIGKILL", At: time.Now().UTC()}
			i.host.mu.Lock()
			delete(i.host.sandboxes, i.spec.ID)
			i.host.exits[i.spec.ID] = exit
			i.host.mu.Unlock()
			close(i.dead)
			i.machine.Died(exit)
		}()
	})
}

// listener hands dialled connections to the agent.
type listener struct{ i *inmate }

func (l listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.i.conns:
		return c, nil
	case <-l.i.closed:
		return nil, net.ErrClosed
	}
}
func (l listener) Close() error   { return nil }
func (l listener) Addr() net.Addr { return &net.UnixAddr{Name: "fake", Net: "unix"} }

// sandbox is a handle.
type sandbox struct{ i *inmate }

var _ berm.Sandbox = (*sandbox)(nil)

func (s *sandbox) ID() berm.SandboxID { return s.i.spec.ID }

func (s *sandbox) gone() error {
	select {
	case <-s.i.dead:
		return berm.Errorf(berm.NotFound, "sandbox %s is dead", s.i.spec.ID)
	default:
		return nil
	}
}

func (s *sandbox) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	if err := s.gone(); err != nil {
		return nil, err
	}
	if state := s.i.machine.Status().State; state != berm.Running {
		return nil, berm.Errorf(berm.Conflict, "sandbox %s is %s", s.i.spec.ID, state)
	}
	ours, theirs, err := pair()
	if err != nil {
		return nil, err
	}
	if port != berm.AgentPort {
		s.i.mu.Lock()
		serve := s.i.ports[port]
		s.i.mu.Unlock()
		if serve == nil {
			ours.Close()
			theirs.Close()
			return nil, berm.Errorf(berm.Unavailable, "nothing listens on port %d", port)
		}
		go serve(theirs)
		return ours, nil
	}
	select {
	case s.i.conns <- theirs:
		return ours, nil
	case <-s.i.closed:
		err = berm.Errorf(berm.NotFound, "sandbox %s is dead", s.i.spec.ID)
	case <-ctx.Done():
		err = berm.Errorf(berm.Unavailable, "dial: %w", context.Cause(ctx))
	}
	ours.Close()
	theirs.Close()
	return nil, err
}

// pair is a connection within this process that has buffers and half-close, which
// net.Pipe has not.
func pair() (_, _ net.Conn, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, berm.Errorf(berm.Internal, "connect: %w", err)
	}
	defer func() { _ = l.Close() }()
	ours, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return nil, nil, berm.Errorf(berm.Internal, "connect: %w", err)
	}
	theirs, err := l.Accept()
	if err != nil {
		ours.Close()
		return nil, nil, berm.Errorf(berm.Internal, "connect: %w", err)
	}
	return ours, theirs, nil
}

func (s *sandbox) Pause(context.Context) error { return s.i.machine.Pause() }

func (s *sandbox) Resume(_ context.Context, deadline time.Time) error {
	return s.i.machine.Resume(deadline)
}

func (s *sandbox) SetDeadline(_ context.Context, deadline time.Time) error {
	return s.i.machine.SetDeadline(deadline)
}

func (s *sandbox) Status(context.Context) (berm.Status, error) {
	return s.i.machine.Status(), s.gone()
}

func (s *sandbox) Usage(context.Context) (berm.Usage, error) {
	if err := s.gone(); err != nil {
		return berm.Usage{}, err
	}
	return s.i.Usage()
}

func (s *sandbox) Policy(context.Context) (berm.Policy, error) { return s.i.policy(), s.gone() }

// Link fails: a fake has no network.
func (s *sandbox) Link(context.Context) (*os.File, error) {
	if err := s.gone(); err != nil {
		return nil, err
	}
	return nil, berm.Errorf(berm.Unsupported, "a fake sandbox has no link")
}

// Keep fails: there is no link to keep something for.
func (s *sandbox) Keep(ctx context.Context, _ *os.File) error {
	_, err := s.Link(ctx)
	return err
}

// Writable fails: nothing is written anywhere.
func (s *sandbox) Writable(context.Context) (berm.Writable, error) {
	if err := s.gone(); err != nil {
		return nil, err
	}
	return nil, berm.Errorf(berm.Unsupported, "a fake sandbox writes nothing")
}

// Kept fails as Keep does.
func (s *sandbox) Kept(ctx context.Context) (*os.File, error) { return s.Link(ctx) }

func (s *sandbox) Snapshot(_ context.Context, dir string, memory bool) (berm.Saved, error) {
	if err := s.gone(); err != nil {
		return berm.Saved{}, err
	}
	if memory && !s.i.host.Memory {
		return berm.Saved{}, berm.Errorf(berm.Unsupported, "a fake sandbox has no memory to save")
	}
	return s.i.machine.Snapshot(dir, memory)
}

func (s *sandbox) Version(context.Context) (string, error) {
	if err := s.gone(); err != nil {
		return "", err
	}
	return s.i.Version()
}

func (s *sandbox) Events(ctx context.Context) (<-chan berm.Status, error) {
	if err := s.gone(); err != nil {
		return nil, err
	}
	changes, stop := s.i.machine.Watch()
	out := make(chan berm.Status)
	go func() {
		defer close(out)
		defer stop()
		for {
			select {
			case status, ok := <-changes:
				if !ok {
					return
				}
				select {
				case out <- status:
				case <-ctx.Done():
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	return out, nil
}

func (s *sandbox) Kill(_ context.Context, reason berm.Reason) (berm.Exit, error) {
	s.i.machine.Kill(reason)
	<-s.i.dead
	s.i.machine.Wait()
	s.i.host.mu.Lock()
	delete(s.i.host.exits, s.i.spec.ID)
	s.i.host.mu.Unlock()
	return *s.i.machine.Status().Exit, nil
}

func (s *sandbox) Close() error { return nil }
