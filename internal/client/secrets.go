package client

import (
	"context"
	"net/http"
	"net/url"
	"time"

	"github.com/berm-sandbox/berm"
)

// Secret is what a server tells of a stored secret.
type Secret struct {
	ID       string            `json:"secretID"`
	Name     string            `json:"name"`
	Version  int64             `json:"currentVersion"`
	Metadata map[string]string `json:"metadata"`
	Created  time.Time         `json:"createdAt"`
	Updated  time.Time         `json:"updatedAt"`
}

// SetSecret stores a secret under a name, or gives the one of that name another value.
func (c *Client) SetSecret(ctx context.Context, name, value string) (s Secret, err error) {
	body := struct {
		Name  string `json:"name,omitempty"`
		Value string `json:"value"`
	}{name, value}
	_, err = c.call(ctx, http.MethodPost, "/secrets", nil, body, &s)
	if berm.KindOf(err) == berm.AlreadyExists || berm.KindOf(err) == berm.Conflict {
		body.Name = ""
		_, err = c.call(ctx, http.MethodPost, "/secrets/"+url.PathEscape(name), nil, body, &s)
	}
	return s, err
}

// Secrets lists the stored secrets by name.
func (c *Client) Secrets(ctx context.Context) ([]Secret, error) {
	all := []Secret{}
	for query := (url.Values{}); ; {
		var some []Secret
		got, err := c.call(ctx, http.MethodGet, "/secrets", query, nil, &some)
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
		next := got.header.Get("X-Next-Token")
		if next == "" {
			return all, nil
		}
		query.Set("nextToken", next)
	}
}

// RemoveSecret forgets a secret. NotFound when there is none.
func (c *Client) RemoveSecret(ctx context.Context, name string) error {
	_, err := c.call(ctx, http.MethodDelete, "/secrets/"+url.PathEscape(name), nil, nil, nil)
	return err
}

// RotateSecrets has the server encrypt the secrets of all teams with a new key. Denied when the API
// key is not of its own team, Unsupported when the key is its service manager's.
func (c *Client) RotateSecrets(ctx context.Context) error {
	_, err := c.call(ctx, http.MethodPost, "/berm/v1/secrets/rotate", nil, nil, nil)
	return err
}

// Credentials returns those of a sandbox, without secrets. NotFound when its server has none.
func (c *Client) Credentials(ctx context.Context, id berm.SandboxID) (Credentials, error) {
	var told Credentials
	_, err := c.call(ctx, http.MethodGet, "/berm/v1"+sandboxPath(id)+"/credentials", nil, nil, &told)
	return told, err
}

// Credentials are what requests of a sandbox get.
type Credentials struct {
	Credentials []Credential `json:"credentials"`
	// Fields are the names of fields that E2B's network.rules set, by the host.
	Fields map[string][]string `json:"fields,omitempty"`
}

// Credential has requests to some hosts get a stored secret that the sandbox never holds.
type Credential struct {
	Name         string   `json:"name"`
	Secret       string   `json:"secret"` // secret:NAME
	Service      string   `json:"service,omitempty"`
	Hosts        []string `json:"hosts,omitempty"`
	Header       string   `json:"header,omitempty"`
	Prefix       string   `json:"prefix,omitempty"`
	User         string   `json:"user,omitempty"`
	Cookie       string   `json:"cookie,omitempty"`
	Query        string   `json:"query,omitempty"`
	Methods      []string `json:"methods,omitempty"`
	Paths        []string `json:"paths,omitempty"`
	Env          string   `json:"env,omitempty"`
	Swap         bool     `json:"swap,omitempty"`
	Endpoint     bool     `json:"endpoint,omitempty"`
	URL          string   `json:"url,omitempty"`
	Repositories []string `json:"repositories,omitempty"`
	Push         []string `json:"push,omitempty"`
}
