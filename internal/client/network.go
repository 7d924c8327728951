package client

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/berm-sandbox/berm"
)

// NetworkPolicy is what a sandbox may reach.
type NetworkPolicy struct {
	Revision string
	Document json.RawMessage
}

// NetworkPolicy returns the network policy in force. NotFound when the sandbox has no
// network, or its server no such policies.
func (c *Client) NetworkPolicy(ctx context.Context, id berm.SandboxID) (NetworkPolicy, error) {
	return c.networkPolicy(ctx, id, "")
}

func (c *Client) networkPolicy(ctx context.Context, id berm.SandboxID, form string) (NetworkPolicy, error) {
	var p NetworkPolicy
	got, err := c.call(ctx, http.MethodGet, "/berm/v1"+sandboxPath(id)+"/network"+form, nil, nil, &p.Document)
	if err != nil {
		return NetworkPolicy{}, err
	}
	p.Revision, err = strconv.Unquote(got.header.Get("ETag"))
	if err != nil {
		return NetworkPolicy{}, berm.Errorf(berm.Internal, "%s tells no revision of the policy", c.base.Host)
	}
	return p, nil
}

// SetNetworkPolicy replaces the network policy of a sandbox by a document, if its revision is
// still the one given, "" for any; else it is Conflict. It returns the new revision, and
// warnings about the document.
func (c *Client) SetNetworkPolicy(ctx context.Context, id berm.SandboxID, document json.RawMessage, revision string) (string, []string, error) {
	header := http.Header{}
	if revision != "" {
		header.Set("If-Match", strconv.Quote(revision))
	}
	var told struct {
		Revision json.Number
		Warnings []string
	}
	_, err := c.callWith(ctx, header, http.MethodPut, "/berm/v1"+sandboxPath(id)+"/network", nil, document, &told)
	return told.Revision.String(), told.Warnings, err
}

// ExplainNetwork returns what the network policy in force says in plain words, as
// policy.Description in JSON, with its revision.
func (c *Client) ExplainNetwork(ctx context.Context, id berm.SandboxID) (NetworkPolicy, error) {
	return c.networkPolicy(ctx, id, "/explain")
}

// CheckNetwork returns what the network policy in force says of a URL or destination, as
// policy.Answer in JSON; method is a request's, "" for none.
func (c *Client) CheckNetwork(ctx context.Context, id berm.SandboxID, to, method string) (json.RawMessage, error) {
	var answer json.RawMessage
	query := url.Values{"to": {to}}
	if method != "" {
		query.Set("method", method)
	}
	_, err := c.call(ctx, http.MethodGet, "/berm/v1"+sandboxPath(id)+"/network/check", query, nil, &answer)
	return answer, err
}

// FlowEvent is a flow out of a sandbox that ended or was denied, or a name that was not
// resolved.
type FlowEvent struct {
	Seq      uint64    `json:"seq"`
	Time     time.Time `json:"time"`
	Kind     string    `json:"kind"` // flow, dns, or http for a request in a flow
	Name     string    `json:"name,omitempty"`
	Address  string    `json:"address,omitempty"`
	Port     uint16    `json:"port,omitempty"`
	Protocol string    `json:"protocol,omitempty"`
	Method   string    `json:"method,omitempty"`
	Path     string    `json:"path,omitempty"`
	Status   int       `json:"status,omitempty"`
	Action   string    `json:"action"` // allow or deny
	Rule     string    `json:"rule,omitempty"`
	Reason   string    `json:"reason,omitempty"`
	Detail   string    `json:"detail,omitempty"`
	Up       int64     `json:"up,omitempty"`
	Down     int64     `json:"down,omitempty"`
	Seconds  float64   `json:"seconds,omitempty"`
	Count    int       `json:"count,omitempty"`
	Revision string    `json:"revision,omitempty"`
	// Credential is the name of the one that it is about.
	Credential string `json:"credential,omitempty"`
}

// NetworkLog returns what a sandbox did on networks after the event of that number, oldest
// first.
func (c *Client) NetworkLog(ctx context.Context, id berm.SandboxID, after uint64) ([]FlowEvent, error) {
	var log struct{ Events []FlowEvent }
	query := url.Values{"after": {strconv.FormatUint(after, 10)}}
	_, err := c.call(ctx, http.MethodGet, "/berm/v1"+sandboxPath(id)+"/network/log", query, nil, &log)
	return log.Events, err
}
