package control

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/network/policy"
)

// Credential has requests to some hosts get a secret that the sandbox never holds.
type Credential struct {
	Name string `json:"name"` // of a-z, 0-9 and -
	// Secret is "secret:" and the name of a stored one.
	Secret       string   `json:"secret"`
	Service      string   `json:"service,omitempty"` // one that is known by its name; the rest follows from it
	Hosts        []string `json:"hosts,omitempty"`   // NAME[:PORT]
	Header       string   `json:"header,omitempty"`
	Prefix       string   `json:"prefix,omitempty"` // in the header
	User         string   `json:"user,omitempty"`   // the secret is this user's password
	Cookie       string   `json:"cookie,omitempty"`
	Query        string   `json:"query,omitempty"`
	Methods      []string `json:"methods,omitempty"`
	Paths        []string `json:"paths,omitempty"`
	Env          string   `json:"env,omitempty"`          // the variable inside of what stands for it
	Swap         bool     `json:"swap,omitempty"`         // it goes where that was sent, and nowhere else
	Endpoint     bool     `json:"endpoint,omitempty"`     // the first host has a base URL inside, without TLS
	URL          string   `json:"url,omitempty"`          // the variable inside of that base URL
	Repositories []string `json:"repositories,omitempty"` // git over HTTPS
	Push         []string `json:"push,omitempty"`         // refs that git may write
}

// secretScheme begins references to stored secrets, the only ones that a server takes.
const secretScheme = "secret:"

// SecretName is the name of the stored secret; "" when Secret refers to none.
func (c *Credential) SecretName() string {
	name, ok := strings.CutPrefix(c.Secret, secretScheme)
	if !ok {
		return ""
	}
	return strings.ToLower(name)
}

// Grants is what requests of a sandbox get. No secret is among it.
type Grants struct {
	Credentials []Credential `json:"credentials,omitempty"`
	// Fields are the names of the fields that requests get by E2B's network.rules, by the host
	// that they are for. Their values may be secrets themselves: the Broker keeps them.
	Fields map[string][]string `json:"fields,omitempty"`
	// FieldSecrets are the secrets that those values refer to.
	FieldSecrets []string `json:"fieldSecrets,omitempty"`
}

// maxCredentials bounds those of one sandbox.
const maxCredentials = 64

func (g *Grants) empty() bool { return len(g.Credentials) == 0 && len(g.Fields) == 0 }

// uses says whether a secret, by its name, is among what is granted.
func (g *Grants) uses(secret string) bool {
	return slices.Contains(g.FieldSecrets, secret) || slices.ContainsFunc(g.Credentials, func(c Credential) bool { return c.SecretName() == secret })
}

// Fields are fields and their values, by the host that they are for.
type Fields map[string]map[string]string

// fieldsOf makes them of what a policy's compiler made of E2B's rules.
func fieldsOf(transforms []policy.Transform) Fields {
	if len(transforms) == 0 {
		return nil
	}
	fields := Fields{}
	for _, t := range transforms {
		fields[t.To.String()] = t.Headers
	}
	return fields
}

// granting says what fields grant, without their values.
func (m *Manager) granting(fields Fields) (g Grants, err error) {
	if len(fields) == 0 {
		return g, nil
	}
	if m.Egress.Broker == nil {
		return g, m.noNetwork("network.rules")
	}
	if g.FieldSecrets, err = m.Egress.Broker.CheckFields(fields); err != nil {
		return g, err
	}
	g.Fields = map[string][]string{}
	for host, values := range fields {
		g.Fields[host] = slices.Sorted(maps.Keys(values))
	}
	return g, nil
}

// checkCredentials refuses credentials that can work for no sandbox of the team. The broker checks the rest.
func (m *Manager) checkCredentials(ctx context.Context, team berm.Team, credentials []Credential) error {
	if len(credentials) == 0 {
		return nil
	}
	if m.Egress.Broker == nil {
		return m.noNetwork("credentials")
	}
	if len(credentials) > maxCredentials {
		return berm.Errorf(berm.Invalid, "a sandbox has at most %d credentials", maxCredentials)
	}
	for i := range credentials {
		c := &credentials[i]
		if c.Name == "" || len(c.Name) > 64 || strings.Trim(c.Name, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
			return berm.Errorf(berm.Invalid, "a credential has a name, of a-z, 0-9 and -")
		}
		if strings.HasPrefix(c.Name, "e2b-") {
			return berm.Errorf(berm.Invalid, "credential %q: names that begin with e2b- are those of network.rules", c.Name)
		}
		// The reference may be a secret that somebody wrote in the wrong place: it is not told.
		if c.SecretName() == "" {
			return berm.Errorf(berm.Invalid, "credential %q: it does not say which secret it has", c.Name).WithHint("write secret:NAME, and store that one with berm secret set NAME")
		}
		if err := m.Egress.Broker.CheckSecret(ctx, team, c.SecretName()); err != nil {
			return berm.Errorf(berm.Invalid, "credential %q: %w", c.Name, err).WithHint("berm secret set NAME stores one")
		}
	}
	return nil
}

// Credentials returns what requests of a sandbox get: its credentials, never nil, and the names
// of the fields that E2B's network.rules set, by the host. Kind NotFound.
func (m *Manager) Credentials(id berm.SandboxID) ([]Credential, map[string][]string, error) {
	s, err := m.session(id)
	if err != nil {
		return nil, nil, err
	}
	grants := s.snapshot().Grants
	if grants.Credentials == nil {
		grants.Credentials = []Credential{}
	}
	return grants.Credentials, grants.Fields, nil
}

// SetCredentials replaces the credentials of a sandbox. Requests under way with one that is
// gone are cut before it returns. Kinds: Invalid, NotFound, Unsupported.
func (m *Manager) SetCredentials(ctx context.Context, id berm.SandboxID, credentials []Credential, actor audit.Actor) error {
	s, err := m.session(id)
	if err != nil {
		return err
	}
	if err := m.checkCredentials(ctx, s.snapshot().Team, credentials); err != nil {
		return err
	}
	if s.snapshot().Policy == nil {
		if len(credentials) == 0 {
			return nil
		}
		return m.noNetwork("credentials")
	}
	return s.change(ctx, actor, audit.CredentialSet, map[string]any{"credentials": credentials}, func(info *Sandbox) { info.Grants.Credentials = credentials })
}

// SecretChanged gives the sandboxes of a team that use a secret its present value, or takes it from
// them when there is none any more.
func (m *Manager) SecretChanged(ctx context.Context, team berm.Team, name string) {
	m.mu.Lock()
	m.secrets++
	sessions := m.all()
	m.mu.Unlock()
	name = strings.ToLower(name)
	for _, s := range sessions {
		if info := s.snapshot(); s.online != nil && info.Team == team && info.Grants.uses(name) {
			m.work.Go(func() { s.renew(context.WithoutCancel(ctx)) })
		}
	}
}

// renew has the broker read the secrets of a sandbox anew. One that does not is not kept: the
// next one reads them when it meets the sandbox.
func (s *session) renew(ctx context.Context) {
	ctx, cancel := detached(ctx)
	defer cancel()
	s.online.setting.Lock()
	defer s.online.setting.Unlock()
	if _, err := s.enforce(ctx, false); err != nil && berm.KindOf(err) != berm.Unavailable {
		s.m.Log.Error("a sandbox does not get a changed secret", "sandbox", s.info.ID, "error", err)
		if _, broker := s.online.links(); broker != nil {
			finish(broker)
		}
	}
}

// forgetKept has the broker forget what it keeps of a sandbox that is gone.
func (m *Manager) forgetKept(info *Sandbox) {
	if len(info.Grants.Fields) == 0 && info.Network.EgressProxy == nil || m.Egress.Broker == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), transitionTime)
	defer cancel()
	if err := m.forget(ctx, info.ID); err != nil {
		m.Log.Error("secrets of a sandbox are kept until the next start", "sandbox", info.ID, "error", err)
	}
}

func (m *Manager) forget(ctx context.Context, id berm.SandboxID) error {
	return errors.Join(m.Egress.Broker.SetFields(ctx, id, nil), m.Egress.Broker.SetProxyPassword(ctx, id, ""))
}

// forgetStrangers has the broker forget what it keeps of sandboxes that are not there.
func (m *Manager) forgetStrangers(ctx context.Context, known map[berm.SandboxID]bool) error {
	if m.Egress.Broker == nil {
		return nil
	}
	ids, err := m.Egress.Broker.Keeps(ctx)
	if err != nil {
		return err
	}
	for _, id := range ids {
		if !known[id] {
			if err := m.forget(ctx, id); err != nil {
				return err
			}
		}
	}
	return nil
}
