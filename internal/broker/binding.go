package broker

import (
	"bytes"
	"context"
	"maps"
	"net/netip"
	"strconv"
	"strings"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/credential"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

// given is the scheme of references to secrets that came with an order.
const given = "given"

// secrets are those of one order, by the name of their credential, or, of those that values of
// fields refer to, by their own.
type secrets struct{ given, named map[string][]byte }

func (s *secrets) add(c *egress.Credential) {
	if s.given == nil {
		s.given, s.named = map[string][]byte{}, map[string][]byte{}
	}
	s.given[c.Name] = c.Value
	maps.Copy(s.named, c.Values)
}

// wipe forgets them.
func (s *secrets) wipe() {
	for _, m := range []map[string][]byte{s.given, s.named} {
		for _, value := range m {
			clear(value)
		}
	}
}

// secretsKey is the key of the order's secrets in a context.
type secretsKey struct{}

// came is the source of secrets that came with the order in whose context they are wanted.
type came struct{ named bool }

func (c came) Value(ctx context.Context, name string) ([]byte, error) {
	s, _ := ctx.Value(secretsKey{}).(*secrets)
	if s == nil {
		return nil, berm.Errorf(berm.NotFound, "no secret came with it")
	}
	from := s.given
	if c.named {
		from = s.named
	}
	value, ok := from[name]
	if !ok {
		return nil, berm.Errorf(berm.NotFound, "no secret came with it")
	}
	return bytes.Clone(value), nil
}

// gitHosts are, by the service, where its repositories are.
var gitHosts = map[string]string{"github": "github.com"}

// bindings are what a credential means.
func bindings(c *egress.Credential) ([]credential.Binding, error) {
	b := credential.Binding{
		ID: c.Name, Service: c.Service, Secret: given + ":" + c.Name, Methods: c.Methods, Paths: c.Paths, Env: c.Env, Prefix: c.Prefix, User: c.User,
		Revoked: c.Missing,
	}
	if len(c.Field) > 0 {
		b.Kind, b.Name, b.Secret, b.Value, b.Hosts = credential.Header, c.Header, "", string(c.Field), c.Hosts
		return []credential.Binding{b}, nil
	}
	b.Endpoint, b.URL = c.Endpoint, c.URL
	if c.Swap {
		b.Mode = credential.Swap
	}
	var err error
	if b.Hosts, b.Ports, err = places(c); err != nil {
		return nil, err
	}
	switch {
	case c.Header != "":
		b.Kind, b.Name = credential.Header, c.Header
	case c.Cookie != "":
		b.Kind, b.Name = credential.Cookie, c.Cookie
	case c.Query != "":
		b.Kind, b.Name = credential.Query, c.Query
	case c.User != "":
		b.Kind = credential.Basic
	case c.Service == "":
		b.Kind = credential.Bearer
	}
	if c.Service == "pypi" && c.User == "" {
		b.User = "__token__" // whom PyPI takes with any token
	}
	git := b
	git.Kind, git.Mode, git.Service, git.Env, git.Paths, git.Methods, git.Endpoint, git.URL = credential.Git, "", "", "", nil, nil, false, ""
	git.Git = &credential.Rules{Repositories: c.Repositories, Push: c.Push}
	if host := gitHosts[c.Service]; host != "" {
		git.ID, git.Hosts, git.Name, git.Prefix = c.Name+"-git", []string{host}, "", ""
		if len(c.Repositories) == 0 {
			git.Git.Repositories = []string{"*/*"}
		}
		if c.Service == "github" && len(c.Repositories)+len(c.Push) > 0 {
			b.Git = git.Git // the token writes by the API what git pushes
		}
		return []credential.Binding{b, git}, nil
	}
	if len(c.Repositories) > 0 || len(c.Push) > 0 {
		return []credential.Binding{git}, nil
	}
	return []credential.Binding{b}, nil
}

// places reads the hosts of a credential, all with the same port.
func places(c *egress.Credential) (hosts []string, ports []uint16, err error) {
	for i, host := range c.Hosts {
		name, text, has := strings.Cut(host, ":")
		port := uint64(443)
		if has {
			if port, err = strconv.ParseUint(text, 10, 16); err != nil || port == 0 {
				return nil, nil, berm.Errorf(berm.Invalid, "credential %q: %q is no host with a port", c.Name, host).WithHint("write host=api.example.com or host=api.example.com:8443")
			}
		}
		if _, err := netip.ParseAddr(name); err == nil {
			return nil, nil, berm.Errorf(berm.Invalid, "credential %q: %q is no name but an address, which proves to nobody whose it is", c.Name, name)
		}
		if i > 0 && ports[0] != uint16(port) {
			return nil, nil, berm.Errorf(berm.Invalid, "credential %q: its hosts have different ports", c.Name).WithHint("give it twice, under two names")
		}
		hosts, ports = append(hosts, name), []uint16{uint16(port)}
	}
	return hosts, ports, nil
}
