package client

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/berm-sandbox/berm"
)

// MaxUpload is how much a server takes for one step, in bytes, as it comes and unpacked.
const MaxUpload = 4 << 30

// Build is one build of a template.
type Build struct {
	TemplateID berm.TemplateID `json:"templateID"`
	ID         berm.BuildID    `json:"buildID"`
	Names      []string        `json:"names"`
	Tags       []string        `json:"tags"`
}

// BuildOptions describe the template that a build makes. Zero fields leave it to the server.
type BuildOptions struct {
	Name     string // NAME or NAME:TAG
	CPUCount int64
	MemoryMB int64
	DiskMB   int64
}

// BuildOrder is what a template is made of.
type BuildOrder struct {
	FromImage string          `json:"fromImage,omitempty"`
	Steps     []BuildStep     `json:"steps"`
	StartCmd  string          `json:"startCmd,omitempty"`
	ReadyCmd  string          `json:"readyCmd,omitempty"`
	Force     bool            `json:"force,omitempty"` // nothing is taken from earlier builds
	Berm      *OrderAdditions `json:"berm,omitempty"`
}

// OrderAdditions is what Berm knows of orders beyond E2B.
type OrderAdditions struct {
	Stages []BuildStage `json:"stages,omitempty"` // in the order in which they are made
	// FromStage is one of them, in the place of an image.
	FromStage string `json:"fromStage,omitempty"`
}

// BuildStage is made before the template, which may begin with it or copy from it.
type BuildStage struct {
	Name      string      `json:"name"`
	FromImage string      `json:"fromImage,omitempty"`
	FromStage string      `json:"fromStage,omitempty"` // one before it, in the place of an image
	Steps     []BuildStep `json:"steps"`
}

// BuildStep is one instruction.
type BuildStep struct {
	Type      string         `json:"type"`
	Args      []string       `json:"args"`
	FilesHash string         `json:"filesHash,omitempty"`
	Berm      *StepAdditions `json:"berm,omitempty"`
}

// StepAdditions is what Berm knows of steps beyond E2B.
type StepAdditions struct {
	Shell []string          `json:"shell,omitempty"` // of RUN: its command is the last argument; none is a login bash
	Env   map[string]string `json:"env,omitempty"`   // of RUN: for it alone, below what ENV says
	From  string            `json:"from,omitempty"`  // of COPY: the stage that has its source
}

// BuildStatus is how far a build is.
type BuildStatus struct {
	Status string     `json:"status"` // waiting, building, ready or error
	Log    []BuildLog `json:"logEntries"`
	Reason *struct {
		Message string `json:"message"`
		Step    string `json:"step"`  // base, finalize or the number of a step, from 1
		Stage   string `json:"stage"` // of the step; "" is the template's own
	} `json:"reason"`
}

// BuildLog is one line of a build's log.
type BuildLog struct {
	Timestamp time.Time `json:"timestamp"`
	Level     string    `json:"level"`
	Message   string    `json:"message"`
	Step      string    `json:"step"`
}

// NewBuild begins a build, which waits for its order.
func (c *Client) NewBuild(ctx context.Context, o BuildOptions) (b Build, err error) {
	body := struct {
		Name     string `json:"name"`
		CPUCount int64  `json:"cpuCount,omitempty"`
		MemoryMB int64  `json:"memoryMB,omitempty"`
		DiskMB   int64  `json:"minFreeDiskMb,omitempty"`
	}{o.Name, o.CPUCount, o.MemoryMB, o.DiskMB}
	_, err = c.call(ctx, http.MethodPost, "/v3/templates", nil, body, &b)
	return b, err
}

// StartBuild gives a build its order.
func (c *Client) StartBuild(ctx context.Context, b Build, o BuildOrder) error {
	_, err := c.call(ctx, http.MethodPost, "/v2"+b.path(), nil, o, nil)
	return err
}

func (b Build) path() string {
	return "/templates/" + url.PathEscape(string(b.TemplateID)) + "/builds/" + url.PathEscape(string(b.ID))
}

// BuildStatus tells how far a build is, with lines of its log from an offset on.
func (c *Client) BuildStatus(ctx context.Context, b Build, offset int) (s BuildStatus, err error) {
	_, err = c.call(ctx, http.MethodGet, b.path()+"/status", url.Values{"logsOffset": {strconv.Itoa(offset)}}, nil, &s)
	return s, err
}

// CancelBuild ends a build.
func (c *Client) CancelBuild(ctx context.Context, b Build) error {
	_, err := c.call(ctx, http.MethodDelete, "/berm/v1"+b.path(), nil, nil, nil)
	return err
}

// UploadFiles has a server know the files of a step, an archive whose content has this hash, unless
// it does already. write is called to write the archive.
func (c *Client) UploadFiles(ctx context.Context, b Build, hash string, write func(io.Writer) error) error {
	var link struct {
		Present bool
		URL     string
		Headers map[string]string
	}
	if _, err := c.call(ctx, http.MethodGet, "/templates/"+url.PathEscape(string(b.TemplateID))+"/files/"+hash, nil, nil, &link); err != nil {
		return err
	}
	if link.Present {
		return nil
	}
	from, to := io.Pipe()
	defer func() { _ = from.Close() }()
	go func() { _ = to.CloseWithError(write(to)) }()
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, link.URL, from)
	if err != nil {
		return err
	}
	for name, value := range link.Headers {
		req.Header.Set(name, value)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return c.unreachable(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, maxBody))
		return statusError(resp.StatusCode, text)
	}
	return nil
}
