package client

import (
	"context"
	"encoding/json"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/trail"
)

// Records asks for records of the server's audit log, by the parameters of its route, and
// returns a page of them and the number to ask on after. Records of one sandbox come with
// what the log lost meanwhile.
func (c *Client) Records(ctx context.Context, query url.Values) (lines []json.RawMessage, next uint64, err error) {
	var page struct {
		Records []json.RawMessage
		Next    uint64
	}
	_, err = c.call(ctx, http.MethodGet, "/berm/v1/audit", query, nil, &page)
	return page.Records, page.Next, err
}

// Looked is what a look at the files of a sandbox found. Reason says what is missing where not
// everything is told.
type Looked struct {
	TraceID string        `json:"traceID"`
	Outcome audit.Outcome `json:"outcome"`
	Reason  string        `json:"reason,omitempty"`
	Data    audit.Changes `json:"data"`
}

// Changes has the server record what a sandbox has written until now.
func (c *Client) Changes(ctx context.Context, id berm.SandboxID) (Looked, error) {
	var l Looked
	_, err := c.call(ctx, http.MethodPost, "/berm/v1"+sandboxPath(id)+"/changes", nil, nil, &l)
	return l, err
}

// Erase has the server erase what its audit log has of a sandbox that has ended, or with dry say
// what that would be. The key must be one that may.
func (c *Client) Erase(ctx context.Context, id berm.SandboxID, reason string, dry bool) (done trail.Erasure, err error) {
	body := struct {
		Reason string `json:"reason"`
		DryRun bool   `json:"dryRun"`
	}{reason, dry}
	_, err = c.call(ctx, http.MethodPost, "/berm/v1"+sandboxPath(id)+"/erase", nil, body, &done)
	return done, err
}

// Trail is what the server's audit log has of a sandbox. Its calls end with ctx.
func (c *Client) Trail(ctx context.Context, id berm.SandboxID) trail.Source {
	return &sandboxTrail{ctx, c, id}
}

type sandboxTrail struct {
	ctx context.Context
	c   *Client
	id  berm.SandboxID
}

// Records implements trail.Source.
func (t *sandboxTrail) Records(from uint64) iter.Seq2[trail.Line, error] {
	return func(yield func(trail.Line, error) bool) {
		after := max(from, 1) - 1
		for {
			var page struct {
				Records []json.RawMessage
				Next    uint64
			}
			query := url.Values{"after": {strconv.FormatUint(after, 10)}}
			if _, err := t.c.call(t.ctx, http.MethodGet, "/berm/v1"+sandboxPath(t.id)+"/audit", query, nil, &page); err != nil {
				yield(trail.Line{}, err)
				return
			}
			for _, raw := range page.Records {
				line := trail.Line{Raw: raw}
				err := json.Unmarshal(raw, &line.Record)
				if !yield(line, err) {
					return
				}
			}
			if len(page.Records) == 0 || page.Next <= after {
				return
			}
			after = page.Next
		}
	}
}

// Blob implements trail.Source.
func (t *sandboxTrail) Blob(sha256 string) (io.ReadCloser, error) {
	return t.c.download(t.ctx, "/berm/v1"+sandboxPath(t.id)+"/audit/blobs/"+url.PathEscape(sha256))
}

// download makes a GET request whose answer is read as it comes.
func (c *Client) download(ctx context.Context, path string) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.base.String()+path, nil)
	if err != nil {
		return nil, err
	}
	if c.key != "" {
		req.Header.Set("X-API-Key", c.key)
	}
	req.Header.Set("User-Agent", "berm")
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.unreachable(err)
	}
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
		_ = resp.Body.Close()
		return nil, c.refused(resp.StatusCode, text)
	}
	return limited{io.LimitReader(resp.Body, audit.MaxBlob+1), resp.Body}, nil
}

type limited struct {
	io.Reader
	io.Closer
}
