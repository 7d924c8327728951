package serve

import (
	"context"
	"encoding/json"
	"slices"
	"strings"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/control"
	"github.com/berm-sandbox/berm/internal/credential"
	"github.com/berm-sandbox/berm/internal/credential/vault"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

// broker is the service of credentials as control knows it. Secrets are read from the vault
// when a sandbox is made known to it, and wiped when it has them.
type broker struct {
	service *egress.Service
	secrets *vault.Vault
}

func (b broker) Open(ctx context.Context, id berm.SandboxID, o control.Brokering, events func(egress.Event)) (control.Link, egress.Brokered, error) {
	credentials, err := b.credentials(ctx, id, o.Team, &o.Grants)
	defer wipe(credentials)
	if err != nil {
		return nil, egress.Brokered{}, err
	}
	l, got, err := b.service.Broker(ctx, id, egress.Bindings{Policy: o.Policy, Open: o.Open, Credentials: credentials, Door: o.Door, Kept: o.Kept}, events)
	if err != nil {
		return nil, egress.Brokered{}, err
	}
	return l, got, nil
}

func (b broker) Bind(ctx context.Context, id berm.SandboxID, team berm.Team, link control.Link, p egress.Policy, g control.Grants) (egress.Brokered, error) {
	credentials, err := b.credentials(ctx, id, team, &g)
	defer wipe(credentials)
	if err != nil {
		return egress.Brokered{}, err
	}
	return link.(*egress.Link).Bind(ctx, p, credentials)
}

// credentials are what a sandbox of a team is granted, with the secrets.
func (b broker) credentials(ctx context.Context, id berm.SandboxID, team berm.Team, g *control.Grants) (all []egress.Credential, err error) {
	for i := range g.Credentials {
		c := &g.Credentials[i]
		full := egress.Credential{
			Name: c.Name, Service: c.Service, Hosts: c.Hosts, Header: c.Header, Prefix: c.Prefix, User: c.User, Cookie: c.Cookie, Query: c.Query,
			Methods: c.Methods, Paths: c.Paths, Env: c.Env, Swap: c.Swap, Endpoint: c.Endpoint, URL: c.URL, Repositories: c.Repositories, Push: c.Push,
		}
		full.Value, full.Missing, err = b.value(ctx, team, c.SecretName())
		if all = append(all, full); err != nil {
			return all, err
		}
	}
	if len(g.Fields) == 0 {
		return all, nil
	}
	fields, err := b.Fields(ctx, id)
	if err != nil {
		return all, err
	}
	bindings, err := credential.E2B(fields)
	if err != nil {
		return all, err
	}
	for _, bound := range bindings {
		full := egress.Credential{Name: bound.ID, Hosts: bound.Hosts, Header: bound.Name, Field: []byte(bound.Value), Values: map[string][]byte{}}
		for _, name := range credential.References(bound.Value) {
			value, missing, err := b.value(ctx, team, name)
			if full.Values[name] = value; err != nil {
				return append(all, full), err
			}
			full.Missing = full.Missing || missing
		}
		all = append(all, full)
	}
	return all, nil
}

// value reads a secret of a team, or says that there is none any more.
func (b broker) value(ctx context.Context, team berm.Team, name string) (value []byte, missing bool, err error) {
	value, err = b.secrets.Value(ctx, team, name)
	if berm.KindOf(err) == berm.NotFound && err != nil {
		return nil, true, nil
	}
	return value, false, err
}

func wipe(credentials []egress.Credential) {
	for i := range credentials {
		credentials[i].Wipe()
	}
}

func (b broker) CheckSecret(ctx context.Context, team berm.Team, name string) error {
	_, err := b.secrets.Get(ctx, team, name)
	return err
}

func (b broker) CheckFields(fields control.Fields) (secrets []string, err error) {
	bindings, err := credential.E2B(fields)
	if err != nil {
		return nil, err
	}
	for _, bound := range bindings {
		secrets = append(secrets, credential.References(bound.Value)...)
	}
	slices.Sort(secrets)
	return slices.Compact(secrets), nil
}

func (b broker) SetFields(ctx context.Context, id berm.SandboxID, fields control.Fields) error {
	if len(fields) == 0 {
		return b.secrets.SetNote(ctx, string(id), nil)
	}
	text, err := json.Marshal(fields)
	if err != nil {
		return berm.Errorf(berm.Internal, "fields of requests: %w", err)
	}
	defer clear(text)
	return b.secrets.SetNote(ctx, string(id), text)
}

func (b broker) Fields(ctx context.Context, id berm.SandboxID) (fields control.Fields, err error) {
	text, err := b.secrets.Note(ctx, string(id))
	if err != nil || text == nil {
		return nil, err
	}
	defer clear(text)
	if err := json.Unmarshal(text, &fields); err != nil {
		return nil, berm.Errorf(berm.Internal, "fields of requests: %w", err)
	}
	return fields, nil
}

// proxyNote begins the ids of notes with passwords of proxies.
const proxyNote = "proxy-"

func (b broker) SetProxyPassword(ctx context.Context, id berm.SandboxID, password string) error {
	return b.secrets.SetNote(ctx, proxyNote+string(id), []byte(password))
}

func (b broker) ProxyPassword(ctx context.Context, id berm.SandboxID) (string, error) {
	text, err := b.secrets.Note(ctx, proxyNote+string(id))
	defer clear(text)
	return string(text), err
}

func (b broker) Keeps(ctx context.Context) (ids []berm.SandboxID, err error) {
	notes, err := b.secrets.Notes(ctx)
	for _, id := range notes {
		ids = append(ids, berm.SandboxID(strings.TrimPrefix(id, proxyNote)))
	}
	return ids, err
}
