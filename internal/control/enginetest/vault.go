package enginetest

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/berm-sandbox/berm"
)

// Vault is what a service of credentials keeps, in memory. The secrets of a team are those whose
// names begin with "s" and the team's.
type Vault struct{ *fields }

type fields struct {
	mu  sync.Mutex
	all map[berm.SandboxID]map[string]map[string]string

	passwords map[berm.SandboxID]string
}

// NewVault makes an empty one.
func NewVault() Vault {
	return Vault{&fields{all: map[berm.SandboxID]map[string]map[string]string{}, passwords: map[berm.SandboxID]string{}}}
}

// Keep keeps fields of a sandbox, or forgets them.
func (v Vault) Keep(id berm.SandboxID, of map[string]map[string]string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(of) == 0 {
		delete(v.all, id)
	} else {
		v.all[id] = of
	}
}

// Kept returns them.
func (v Vault) Kept(id berm.SandboxID) map[string]map[string]string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.all[id]
}

// Keeps are the sandboxes of which there are some.
func (v Vault) Keeps(context.Context) ([]berm.SandboxID, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return append(slices.Collect(maps.Keys(v.all)), slices.Collect(maps.Keys(v.passwords))...), nil
}

// SetProxyPassword keeps a password, or forgets it.
func (v Vault) SetProxyPassword(_ context.Context, id berm.SandboxID, password string) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.passwords[id] = password; password == "" {
		delete(v.passwords, id)
	}
	return nil
}

// ProxyPassword returns it.
func (v Vault) ProxyPassword(_ context.Context, id berm.SandboxID) (string, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.passwords[id], nil
}

// CheckSecret says whether a team has a secret.
func (v Vault) CheckSecret(_ context.Context, team berm.Team, name string) error {
	if !strings.HasPrefix(name, "s"+string(team)) {
		return berm.Errorf(berm.NotFound, "there is no secret %q", name)
	}
	return nil
}

// Secrets are the references in fields, each of which is a whole value.
func (v Vault) Secrets(of map[string]map[string]string) (names []string) {
	for _, values := range of {
		for _, value := range values {
			if name, ok := strings.CutPrefix(value, "${e2b.secrets."); ok {
				names = append(names, strings.TrimSuffix(name, "}"))
			}
		}
	}
	return names
}
