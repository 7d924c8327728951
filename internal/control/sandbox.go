package control

import (
	"encoding/json"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/network/policy"
)

// Sandbox is what is known of one sandbox at one moment. It is also the form in
// which it is stored.
type Sandbox struct {
	ID            berm.SandboxID    `json:"id"`
	TemplateID    berm.TemplateID   `json:"templateID"`
	Alias         string            `json:"alias,omitempty"` // main name of the template
	TemplateNames []string          `json:"templateNames,omitempty"`
	Level         berm.Level        `json:"level"`
	Limits        berm.Limits       `json:"limits"`
	Degraded      []string          `json:"degraded,omitempty"` // what the host could not give
	State         berm.State        `json:"state"`
	CreatedAt     time.Time         `json:"createdAt"`
	StartedAt     time.Time         `json:"startedAt"` // of the present run: moves at resume
	EndAt         time.Time         `json:"endAt"`
	Timeout       time.Duration     `json:"timeout"` // asked for at create
	OnDeadline    berm.OnDeadline   `json:"onDeadline"`
	AutoResume    bool              `json:"autoResume"`
	Secure        bool              `json:"secure"`
	Internet      *bool             `json:"internet,omitempty"` // as asked for
	Network       Network           `json:"network"`
	Policy        *Policy           `json:"policy,omitempty"` // of its network; nil when it has no link
	Grants        Grants            `json:"grants,omitzero"`
	Metadata      map[string]string `json:"metadata,omitempty"`
	MCP           json.RawMessage   `json:"mcp,omitempty"`
	Owner         audit.Actor       `json:"owner"`
	Team          berm.Team         `json:"team,omitempty"`
	Request       Request           `json:"request,omitzero"`
	Exit          *berm.Exit        `json:"exit,omitempty"`
	Env           map[string]string `json:"env,omitempty"` // that was asked for: a start from files gives it again
	// Base is what it was made of; nil where an earlier version made it.
	Base *berm.Template `json:"base,omitempty"`
	// From is the snapshot that it began with, and Parent the sandbox that it is a fork of.
	From   berm.BuildID   `json:"from,omitempty"`
	Parent berm.SandboxID `json:"parent,omitempty"`
	// FilesOnly has a pause at the deadline keep files, and no processes.
	FilesOnly bool `json:"filesOnly,omitempty"`
	// SavedAs is where the files of a sandbox without processes are; "" of one with.
	SavedAs berm.BuildID `json:"savedAs,omitempty"`
	// SavedMemory says that its processes are there too.
	SavedMemory bool `json:"savedMemory,omitempty"`
	// Checkpoints says when it is saved without anybody asking; Missed what came of that last when
	// it failed.
	Checkpoints Checkpoints       `json:"checkpoints,omitzero"`
	Missed      *MissedCheckpoint `json:"missed,omitempty"`
	// Boot is Config.Boot of when its processes began.
	Boot string `json:"boot,omitempty"`
	// Begun says that it began with what its template starts, under way.
	Begun bool `json:"begun,omitempty"`
	// Warm says that it was made in advance.
	Warm bool `json:"warm,omitempty"`
	// Own says that the server made it for work of its own, such as a step of a build, and that it
	// does not outlive the server.
	Own bool `json:"own,omitempty"`

	AccessToken  string `json:"-"` // of the guest agent; "" when it is open
	TrafficToken string `json:"-"` // needed by traffic to other ports; "" when they are public

	Steps    []Step   `json:"-"` // what making it took; of Create only
	Warnings []string `json:"-"` // what in its policy is probably not meant; of Create only
}

// Step is a part of Create and the time that it took.
type Step struct {
	Name string
	Took time.Duration
}

// Network is how traffic reaches a sandbox and leaves it, as E2B's fields have it.
type Network struct {
	Private    bool     `json:"private,omitempty"`    // requests need the traffic token
	MaskHost   string   `json:"maskHost,omitempty"`   // Host shown to the sandbox; ${PORT} is replaced
	HTTPSPorts []uint16 `json:"httpsPorts,omitempty"` // ports that speak TLS inside
	AllowOut   []string `json:"allowOut,omitempty"`
	DenyOut    []string `json:"denyOut,omitempty"`
	// EgressProxy is what leads out; nil is directly.
	EgressProxy *EgressProxy `json:"egressProxy,omitempty"`
	// Transforms are headers for requests to names. They may be secret: the Broker keeps them.
	Transforms map[string][]policy.E2BTransform `json:"-"`
}

// CreateRequest is what a client may choose about a new sandbox.
type CreateRequest struct {
	Template    string
	Of          *berm.Template // of one of the server's own: what it is made of; nil finds what Template names
	Timeout     time.Duration
	Level       berm.Level  // "" is the server's default
	Limits      berm.Limits // zero fields take the template's
	Secure      bool        // the guest agent asks for a token
	OnDeadline  berm.OnDeadline
	AutoResume  bool
	FilesOnly   bool // what a pause at the deadline keeps
	Checkpoints Checkpoints
	Internet    *bool
	Network     Network
	Policy      *policy.Policy // in the place of what Internet and Network allow and deny; nil is those
	Credentials []Credential
	Env         map[string]string
	Metadata    map[string]string
	MCP         json.RawMessage
	Actor       audit.Actor
	Team        berm.Team
	Request     Request // zero makes a sandbox for every call
}

// Bounds on what one request may carry.
const (
	maxPairs    = 256
	maxPairSize = 32 << 10 // bytes of all names and values together
)

var maskHostShape = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:(\d{1,5}|\$\{PORT\}))?$`)

// check refuses what is wrong whatever the server's state.
func (m *Manager) check(r *CreateRequest) error {
	if r.Template == "" {
		return berm.Errorf(berm.Invalid, "templateID is missing")
	}
	if err := m.checkTimeout(r.Timeout); err != nil {
		return err
	}
	if r.FilesOnly && (r.OnDeadline != berm.PauseAtDeadline || r.AutoResume) {
		return berm.Errorf(berm.Invalid, "a pause without memory needs autoPause, and excludes autoResume")
	}
	if err := r.Checkpoints.check(); err != nil {
		return err
	}
	if r.Network.Private && !r.Secure {
		return berm.Errorf(berm.Invalid, "You cannot create a sandbox without public access unless you enable secure envd access via 'secure' flag.")
	}
	if h := r.Network.MaskHost; h != "" && !maskHostShape.MatchString(strings.ReplaceAll(h, "${PORT}", "0")) {
		return berm.Errorf(berm.Invalid, "maskRequestHost is not a host name: %q", h)
	}
	for _, port := range r.Network.HTTPSPorts {
		if port == 0 || port == berm.AgentPort {
			return berm.Errorf(berm.Invalid, "httpsPorts cannot hold %d", port)
		}
	}
	if err := checkPairs("metadata", r.Metadata); err != nil {
		return err
	}
	if err := checkPairs("envVars", r.Env); err != nil {
		return err
	}
	// Both are stored with every change of the sandbox.
	if len(r.MCP) > maxPairSize {
		return berm.Errorf(berm.Invalid, "mcp is limited to %d bytes", maxPairSize)
	}
	if len(r.Network.DenyOut) > maxPairs || len(r.Network.AllowOut) > maxPairs || len(r.Network.HTTPSPorts) > maxPairs {
		return berm.Errorf(berm.Invalid, "lists of network are limited to %d entries", maxPairs)
	}
	for name := range r.Env {
		if name == "" || strings.ContainsRune(name, '=') || strings.ContainsFunc(name, unicode.IsControl) {
			return berm.Errorf(berm.Invalid, "envVars: %q is no name of a variable", name)
		}
	}
	return m.checkLimits(r.Limits)
}

func (m *Manager) checkTimeout(d time.Duration) error {
	if d < 0 {
		return berm.Errorf(berm.Invalid, "Timeout cannot be negative")
	}
	if d > m.MaxTimeout {
		return berm.Errorf(berm.Invalid, "Timeout cannot be greater than %g hours", m.MaxTimeout.Hours())
	}
	return nil
}

func checkPairs(what string, pairs map[string]string) error {
	size := 0
	for k, v := range pairs {
		size += len(k) + len(v)
		if strings.ContainsRune(k, 0) || strings.ContainsRune(v, 0) {
			return berm.Errorf(berm.Invalid, "%s cannot hold NUL bytes", what)
		}
	}
	if len(pairs) > maxPairs || size > maxPairSize {
		return berm.Errorf(berm.Invalid, "%s is limited to %d entries and %d bytes", what, maxPairs, maxPairSize)
	}
	return nil
}

// spec makes the engine's order from a request and its template.
func (m *Manager) spec(r *CreateRequest, t berm.Template, now time.Time) (berm.Spec, error) {
	level := r.Level
	if level == "" {
		level = m.Level
	}
	limits, without, err := m.limits(r.Limits, t.Limits, m.probe(level).Unlimited)
	if err != nil {
		return berm.Spec{}, err
	}
	id := berm.NewSandboxID()
	if why := m.probe(level).Unsaved; why != "" || m.SnapshotDir == "" {
		switch {
		case r.FilesOnly:
			return berm.Spec{}, berm.Errorf(berm.Unsupported, "no pause without memory here: %s", why)
		case r.Checkpoints.any():
			return berm.Spec{}, berm.Errorf(berm.Unsupported, "no checkpoints here: %s", why)
		}
	}
	return berm.Spec{
		ID: id, Level: level, Layers: t.Layers, Hostname: string(id),
		Limits: limits, Degraded: without, Setuid: t.Setuid, Link: m.Egress.Service != nil,
		Deadline: now.Add(r.Timeout), OnDeadline: r.OnDeadline,
		Guest: m.guest(id, &t, r.Env, r.Secure, now),
	}, nil
}

// guest is what the agent of a sandbox made of t is told; env comes over the template's.
func (m *Manager) guest(id berm.SandboxID, t *berm.Template, env map[string]string, secure bool, now time.Time) berm.GuestConfig {
	all := map[string]string{}
	maps.Copy(all, t.Env)
	maps.Copy(all, env)
	g := berm.GuestConfig{SandboxID: id, TemplateID: t.ID, Env: all, User: t.User, Workdir: t.Workdir, Timestamp: now}
	if secure {
		g.AccessToken = m.token("access", id)
	}
	return g
}

// withTokens fills in what is derived and never stored.
func (m *Manager) withTokens(s Sandbox) Sandbox {
	if s.Secure {
		s.AccessToken = m.token("access", s.ID)
	}
	if s.Network.Private {
		s.TrafficToken = m.token("traffic", s.ID)
	}
	return s
}

// Filter chooses sandboxes of a list. Zero fields choose all.
type Filter struct {
	Team         *berm.Team
	States       []berm.State
	Metadata     map[string]string // every pair must be there
	Template     string            // id, or a name as the team says it
	StartedAfter time.Time         // inclusive
	Ascending    bool
}

// List returns the sandboxes that the filter chooses by their start, newest first
// unless it says otherwise.
func (m *Manager) List(f Filter) []Sandbox {
	m.mu.Lock()
	sessions := m.all()
	m.mu.Unlock()
	chosen := []Sandbox{}
	for _, s := range sessions {
		info := s.snapshot()
		// To a client a transition is the state that it leads to.
		switch info.State {
		case berm.Pausing:
			info.State = berm.Paused
		case berm.Resuming:
			info.State = berm.Running
		}
		if f.chooses(&info) {
			chosen = append(chosen, m.withTokens(info))
		}
	}
	slices.SortFunc(chosen, func(a, b Sandbox) int {
		if f.Ascending {
			return compare(a, b)
		}
		return compare(b, a)
	})
	return chosen
}

// compare orders by start, then by id so that the order is total.
func compare(a, b Sandbox) int {
	if c := a.StartedAt.Compare(b.StartedAt); c != 0 {
		return c
	}
	return strings.Compare(string(a.ID), string(b.ID))
}

func (f *Filter) chooses(s *Sandbox) bool {
	if s.State == berm.Killed || f.Team != nil && *f.Team != s.Team || f.States != nil && !slices.Contains(f.States, s.State) {
		return false
	}
	for k, v := range f.Metadata {
		if got, ok := s.Metadata[k]; !ok || got != v {
			return false
		}
	}
	if f.Template != "" && f.Template != string(s.TemplateID) && !slices.ContainsFunc(s.TemplateNames, func(name string) bool { return s.Team.Trim(name) == f.Template }) {
		return false
	}
	return !s.StartedAt.Before(f.StartedAfter)
}
