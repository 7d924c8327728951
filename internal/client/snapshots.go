package client

import (
	"context"
	"net/http"
	"net/url"
	"time"

	"github.com/berm-sandbox/berm"
)

// Snapshot is a saved state of a sandbox.
type Snapshot struct {
	ID    string   `json:"snapshotID"` // what sandboxes are created from
	Names []string `json:"names"`
	Berm  struct {
		SandboxID berm.SandboxID `json:"sandboxID"`
		CreatedAt time.Time      `json:"createdAt"`
		Level     berm.Level     `json:"level"`
		Keeps     []string       `json:"keeps"` // "files", and "memory" where the level can
		Size      int64          `json:"size"`  // bytes on disk
		Shared    bool           `json:"shared"`
		StoppedMS float64        `json:"stoppedMS"` // how long the sandbox stood still
		// Checkpoint says why it was taken though nobody asked: "clock" or "exec".
		Checkpoint string `json:"checkpoint,omitempty"`
	} `json:"berm"` // zero of another server
}

// Snapshot saves a running sandbox. The name may have a tag, or be "".
func (c *Client) Snapshot(ctx context.Context, id berm.SandboxID, name string) (s Snapshot, err error) {
	body := struct {
		Name string `json:"name,omitempty"`
	}{name}
	_, err = c.call(ctx, http.MethodPost, sandboxPath(id)+"/snapshots", nil, body, &s)
	return s, err
}

// Snapshots returns all snapshots of a sandbox, or of all with "", newest first.
func (c *Client) Snapshots(ctx context.Context, id berm.SandboxID) ([]Snapshot, error) {
	query := url.Values{}
	if id != "" {
		query.Set("sandboxID", string(id))
	}
	all := []Snapshot{}
	for {
		var page []Snapshot
		got, err := c.call(ctx, http.MethodGet, "/snapshots", query, nil, &page)
		if err != nil {
			return nil, err
		}
		all = append(all, page...)
		next := got.header.Get("X-Next-Token")
		if next == "" {
			return all, nil
		}
		if next == query.Get("nextToken") {
			return nil, berm.Errorf(berm.Internal, "%s gives the same page again and again", c.base.Host)
		}
		query.Set("nextToken", next)
	}
}

// DeleteSnapshot deletes a snapshot. NotFound when there is none.
func (c *Client) DeleteSnapshot(ctx context.Context, id string) error {
	_, err := c.call(ctx, http.MethodDelete, "/templates/"+url.PathEscape(id), nil, nil, nil)
	return err
}

// Fork is the outcome of one child: a sandbox, or why there is none.
type Fork struct {
	Sandbox *Sandbox `json:"sandbox,omitempty"`
	Error   *struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	} `json:"error,omitempty"`
}

// Fork makes count sandboxes that begin with the state of a running one.
func (c *Client) Fork(ctx context.Context, id berm.SandboxID, count int, timeout time.Duration) (forks []Fork, err error) {
	body := struct {
		Count   int   `json:"count"`
		Timeout int64 `json:"timeout,omitempty"`
	}{count, seconds(timeout)}
	_, err = c.call(ctx, http.MethodPost, sandboxPath(id)+"/fork", nil, body, &forks)
	return forks, err
}

// Rollback gives a sandbox the files of a snapshot; it starts anew.
func (c *Client) Rollback(ctx context.Context, id berm.SandboxID, snapshot string) error {
	body := struct {
		Snapshot string `json:"snapshot"`
	}{snapshot}
	_, err := c.call(ctx, http.MethodPost, "/berm/v1"+sandboxPath(id)+"/rollback", nil, body, nil)
	return err
}
