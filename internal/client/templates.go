package client

import (
	"context"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
)

// Template is one template of a server, with all its builds.
type Template struct {
	ID        berm.TemplateID `json:"id"`
	BuildID   berm.BuildID    `json:"buildID"` // the newest
	Names     []string        `json:"names"`   // without tags
	CPUCount  int64           `json:"cpuCount"`
	MemoryMB  int64           `json:"memoryMB"`
	DiskMB    int64           `json:"diskMB"`
	Builds    int64           `json:"builds"`
	UpdatedAt time.Time       `json:"updatedAt"`
	Arriving  *berm.Arriving  `json:"arriving,omitempty"` // of the newest build
}

// Templates returns the templates that sandboxes can be made from, newest first.
func (c *Client) Templates(ctx context.Context) ([]Template, error) {
	var list []struct { // in E2B's words
		TemplateID berm.TemplateID
		BuildID    berm.BuildID
		Aliases    []string
		CPUCount   int64
		MemoryMB   int64
		DiskSizeMB int64
		BuildCount int64
		UpdatedAt  time.Time
		Berm       struct{ Arriving *berm.Arriving }
	}
	if _, err := c.call(ctx, http.MethodGet, "/templates", nil, nil, &list); err != nil {
		return nil, err
	}
	all := make([]Template, len(list))
	for i, t := range list {
		all[i] = Template{t.TemplateID, t.BuildID, t.Aliases, t.CPUCount, t.MemoryMB, t.DiskSizeMB, t.BuildCount, t.UpdatedAt, t.Berm.Arriving}
	}
	return all, nil
}

// DeleteTemplate deletes a template, by name or id, with all its builds, or one tag of it, by
// NAME:TAG. Kinds: NotFound, Invalid (sandboxes use it).
func (c *Client) DeleteTemplate(ctx context.Context, ref string) error {
	var found struct{ TemplateID berm.TemplateID }
	if _, err := c.call(ctx, http.MethodGet, "/templates/"+url.PathEscape(ref), nil, nil, &found); err != nil {
		return err
	}
	// A name alone could mean a snapshot too, which has the same route.
	at := string(found.TemplateID)
	if _, tag, tagged := strings.Cut(ref, ":"); tagged {
		at += ":" + tag
	}
	_, err := c.call(ctx, http.MethodDelete, "/templates/"+url.PathEscape(at), nil, nil, nil)
	return err
}
