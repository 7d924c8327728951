package control

import (
	"context"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/network/policy"
)

const (
	// MaxForks is how many children one call may make.
	MaxForks = 100
	// forksAtOnce bounds those that are made at the same time.
	forksAtOnce = 8
)

// Fork is the outcome of one child: a sandbox, or why there is none.
type Fork struct {
	Sandbox Sandbox
	Err     error
}

// Fork makes count sandboxes that begin with the state of a running one, which goes on. They
// inherit what it may use and reach, and have their own id, tokens and authority. The error is
// that of the snapshot; each child has an outcome of its own. memory demands processes too.
func (m *Manager) Fork(ctx context.Context, id berm.SandboxID, count int, timeout time.Duration, memory bool, actor audit.Actor) ([]Fork, error) {
	if count < 1 || count > MaxForks {
		return nil, berm.Errorf(berm.Invalid, "count must be from 1 to %d", MaxForks)
	}
	if err := m.checkTimeout(timeout); err != nil {
		return nil, err
	}
	s, err := m.session(id)
	if err != nil {
		return nil, err
	}
	build, saved, err := s.saveNow(ctx, memory || s.keepsMemory(), "fork")
	if err != nil {
		m.tell(id, actor, audit.SandboxFork, audit.Failed, err.Error(), nil)
		return nil, err
	}
	defer m.drop(build)
	if err := m.emit(id, actor, audit.SandboxFork, audit.OK, "", map[string]any{"count": count}); err != nil {
		return nil, err
	}
	r, o, err := s.heritage(ctx, timeout, actor)
	if err != nil {
		return nil, err
	}
	o.saved, o.memory = build, saved.Memory
	forks := make([]Fork, count)
	var group errgroup.Group
	group.SetLimit(forksAtOnce)
	for i := range forks {
		group.Go(func() error {
			forks[i].Sandbox, forks[i].Err = m.make(ctx, r, o, func(string) {})
			return nil
		})
	}
	_ = group.Wait() // none fails
	return forks, nil
}

// heritage is what a child of the sandbox is made of.
func (s *session) heritage(ctx context.Context, timeout time.Duration, actor audit.Actor) (r CreateRequest, o origin, err error) {
	info := s.snapshot()
	r = CreateRequest{
		Timeout: timeout, Level: info.Level, Limits: info.Limits, Secure: info.Secure, OnDeadline: info.OnDeadline, FilesOnly: info.FilesOnly,
		AutoResume: info.AutoResume, Internet: info.Internet, Network: info.Network, Env: info.Env, Metadata: info.Metadata, MCP: info.MCP,
		Checkpoints: info.Checkpoints,
		Actor:       actor, Team: info.Team,
	}
	o = origin{template: *info.Base, parent: info.ID, from: info.From, granted: info.Grants}
	if info.Policy == nil {
		return r, o, nil
	}
	if o.allowed, err = policy.DecodeJSON("policy", info.Policy.Document); err != nil {
		return r, o, err
	}
	if len(info.Grants.Fields) > 0 {
		if o.fields, err = s.m.Egress.Broker.Fields(ctx, info.ID); err != nil {
			return r, o, err
		}
	}
	if p := info.Network.EgressProxy; p != nil {
		proxy := *p
		if proxy.Password, err = s.m.Egress.Broker.ProxyPassword(ctx, info.ID); err != nil {
			return r, o, err
		}
		r.Network.EgressProxy = &proxy
	}
	return r, o, nil
}
