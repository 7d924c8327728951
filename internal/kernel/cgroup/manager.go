// Package cgroup makes one control group per sandbox on cgroup v1, v2 and hybrid
// hosts: limits, accounting, freezing, killing.
package cgroup

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// Layout is how a host mounts its control groups.
type Layout string

// The layouts. Hybrid has v1 hierarchies with controllers and a v2 tree beside.
const (
	None   Layout = "none"
	V1     Layout = "v1"
	V2     Layout = "v2"
	Hybrid Layout = "hybrid"
)

// hostLeaf is the v2 group that takes the calling process out of the way: a group
// with processes of its own cannot give controllers to its children.
const hostLeaf = "berm-host"

// Config says where groups are made.
type Config struct {
	// Parent is an absolute path in every hierarchy, such as "/berm", below which the
	// groups of sandboxes are made. "" is the group "berm" below the caller's own; for
	// root on v2, below the top unless systemd delegated the caller's own.
	Parent string
	// Proc is the proc file system to read; "" is /proc.
	Proc string
}

// A Manager makes and finds the groups of sandboxes. It is safe for concurrent use.
type Manager struct {
	layout      Layout
	hierarchies []*hierarchy
	proc        string
	mkdir       func(path string) error

	mu       sync.Mutex
	prepared bool
	missing  map[string]string // controller → why it cannot be had
}

// New inspects the host and makes no group. On a host without usable groups the
// Manager works too: its groups are empty, and every limit is Unsupported.
func New(c Config) (*Manager, error) {
	if c.Parent != "" && (!path.IsAbs(c.Parent) || path.Clean(c.Parent) != c.Parent || c.Parent == "/") {
		return nil, berm.Errorf(berm.Invalid, "cgroup parent %q is not a clean absolute path", c.Parent)
	}
	if c.Proc == "" {
		c.Proc = "/proc"
	}
	all, err := discover(c)
	if err != nil {
		return nil, err
	}
	m := &Manager{layout: layoutOf(all), proc: c.Proc, missing: map[string]string{}, mkdir: func(p string) error { return os.Mkdir(p, 0o755) }}
	for _, controller := range []string{"memory", "cpu", "pids", "io", "freezer"} {
		m.missing[controller] = "the kernel has it disabled or not mounted"
	}
	for _, h := range all {
		reason := h.unusable()
		for _, controller := range h.controllers {
			if reason == "" {
				delete(m.missing, controller)
			} else if m.missing[controller] != "" {
				m.missing[controller] = reason
			}
		}
		if reason == "" {
			m.hierarchies = append(m.hierarchies, h)
		}
	}
	if m.unified() != nil {
		delete(m.missing, "freezer") // part of the v2 core
	}
	return m, nil
}

// Layout is the layout found.
func (m *Manager) Layout() Layout { return m.layout }

// Controllers lists, sorted, what can be limited or done here: "cpu", "freezer", "io",
// "memory", "pids".
func (m *Manager) Controllers() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var have []string
	for _, c := range []string{"cpu", "freezer", "io", "memory", "pids"} {
		if _, gone := m.missing[c]; !gone {
			have = append(have, c)
		}
	}
	return have
}

// Missing tells, for each controller that cannot be had, why.
func (m *Manager) Missing() map[string]string {
	m.mu.Lock()
	defer m.mu.Unlock()
	missing := make(map[string]string, len(m.missing))
	for c, why := range m.missing {
		missing[c] = why
	}
	return missing
}

// String describes the layout and the controllers in use, for people.
func (m *Manager) String() string {
	return string(m.layout) + ": " + strings.Join(m.Controllers(), " ")
}

// unified returns the v2 hierarchy, or nil.
func (m *Manager) unified() *hierarchy {
	for _, h := range m.hierarchies {
		if h.v2 {
			return h
		}
	}
	return nil
}

// with returns the hierarchy that has a controller, or nil.
func (m *Manager) with(controller string) *hierarchy {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, gone := m.missing[controller]; gone {
		return nil
	}
	for _, h := range m.hierarchies {
		if slices.Contains(h.controllers, controller) {
			return h
		}
	}
	return nil
}

// prepare makes the parent group in every hierarchy and gives it the controllers
// (v2). Controllers that the kernel refuses move to m.missing.
func (m *Manager) prepare() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.prepared {
		return nil
	}
	for _, h := range m.hierarchies {
		if err := m.mkdirAll(h.parent); err != nil {
			return berm.Errorf(berm.Internal, "make cgroup %s: %w", h.parent, err)
		}
		for controller, why := range h.delegate(m.mkdir) {
			m.missing[controller] = why
		}
	}
	m.prepared = true
	return nil
}

func (m *Manager) mkdirAll(dir string) error {
	err := m.mkdir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		if err = m.mkdirAll(filepath.Dir(dir)); err == nil {
			err = m.mkdir(dir)
		}
	}
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}

// isName says whether id is 1 to 64 of a-z, 0-9 and "-", which it does not begin with. A
// regular expression would be compiled at each start of a monitor.
func isName(id string) bool {
	for i := range len(id) {
		c := id[i]
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && (c != '-' || i == 0) {
			return false
		}
	}
	return len(id) > 0 && len(id) <= 64
}

// Create makes the group of a sandbox with its limits in force. Limits.Disk is not
// looked at. Bytes per second need the disks that they count on. Kinds:
// AlreadyExists, Unsupported (a limit whose controller is missing), Invalid.
func (m *Manager) Create(id string, limits berm.Limits, disks ...Disk) (*Group, error) {
	if !isName(id) {
		return nil, berm.Errorf(berm.Invalid, "cgroup name %q", id)
	}
	if err := m.prepare(); err != nil {
		return nil, err
	}
	if err := m.Check(limits, disks...); err != nil {
		return nil, err
	}
	g := &Group{id: id, manager: m}
	done := false
	defer func() {
		if !done {
			_ = g.remove()
		}
	}()
	for _, h := range m.needed(limits) {
		err := m.mkdir(h.path(id))
		if errors.Is(err, fs.ErrNotExist) { // somebody removed the empty parent
			m.mu.Lock()
			m.prepared = false
			m.mu.Unlock()
			if err = m.prepare(); err == nil {
				err = m.mkdir(h.path(id))
			}
		}
		switch {
		case errors.Is(err, fs.ErrExist):
			return nil, berm.Errorf(berm.AlreadyExists, "cgroup %s exists", h.path(id))
		case err != nil:
			return nil, berm.Errorf(berm.Internal, "make cgroup: %w", err)
		}
		g.hierarchies = append(g.hierarchies, h)
	}
	if err := g.limit(limits); err != nil {
		return nil, err
	}
	for _, d := range disks {
		if err := g.LimitDisk(d, limits); err != nil {
			return nil, err
		}
	}
	done = true
	return g, nil
}

// needed are the hierarchies in which a sandbox gets a group. Each costs time, so
// cpu and io of v1 are used only when there is such a limit: v2 counts cpu time
// without any controller.
func (m *Manager) needed(limits berm.Limits) []*hierarchy {
	unified := m.unified() != nil
	want := []string{"memory", "pids"}
	if limits.CPU > 0 {
		want = append(want, "cpu")
	}
	if limits.ReadBytes > 0 || limits.WriteBytes > 0 {
		want = append(want, "io")
	}
	if !unified {
		want = append(want, "freezer", "cpuacct")
	}
	var list []*hierarchy
	for _, h := range m.hierarchies {
		if h.v2 || slices.ContainsFunc(h.controllers, func(c string) bool { return slices.Contains(want, c) }) {
			list = append(list, h)
		}
	}
	return list
}

// Try makes a group without limits and takes it away again: after it, Check and Missing
// know also what only the kernel's answer tells.
func (m *Manager) Try(ctx context.Context) error {
	g, err := m.Create("probe-"+string(berm.NewSandboxID()), berm.Limits{})
	if err != nil {
		return err
	}
	return g.Remove(ctx)
}

// Open finds the group of a sandbox again. NotFound when nothing of it is left.
func (m *Manager) Open(id string) (*Group, error) {
	if !isName(id) {
		return nil, berm.Errorf(berm.NotFound, "no cgroup %q", id)
	}
	g := &Group{id: id, manager: m}
	for _, h := range m.hierarchies {
		if unix.Access(h.path(id), unix.F_OK) == nil {
			g.hierarchies = append(g.hierarchies, h)
		}
	}
	if len(g.hierarchies) == 0 {
		return nil, berm.Errorf(berm.NotFound, "no cgroup %q", id)
	}
	return g, nil
}

// List names every sandbox that has a group, sorted.
func (m *Manager) List() ([]string, error) {
	var ids []string
	for _, h := range m.hierarchies {
		entries, err := os.ReadDir(h.parent)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, berm.Errorf(berm.Internal, "list cgroups: %w", err)
		}
		for _, e := range entries {
			if e.IsDir() {
				ids = append(ids, e.Name())
			}
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids), nil
}

// Close removes the parent group where it is empty, and brings the own group back to
// what it was. The Manager can be used again.
func (m *Manager) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.prepared = false
	for _, h := range m.hierarchies {
		err := unix.Rmdir(h.parent)
		if err != nil && err != unix.ENOENT && err != unix.EBUSY && err != unix.ENOTEMPTY {
			return berm.Errorf(berm.Internal, "remove cgroup %s: %w", h.parent, err)
		}
		if h.v2 && (err == nil || err == unix.ENOENT) {
			h.takeBack()
		}
	}
	return nil
}
