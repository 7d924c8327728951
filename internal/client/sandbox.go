package client

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
)

// Sandbox is what a server tells of a sandbox. Which fields are set depends on
// the call.
type Sandbox struct {
	ID           berm.SandboxID    `json:"sandboxID"`
	TemplateID   berm.TemplateID   `json:"templateID"`
	Alias        string            `json:"alias,omitempty"` // of the template
	State        berm.State        `json:"state,omitempty"`
	StartedAt    time.Time         `json:"startedAt,omitzero"`
	EndAt        time.Time         `json:"endAt,omitzero"`
	CPUCount     int               `json:"cpuCount,omitempty"`
	MemoryMB     int64             `json:"memoryMB,omitempty"`
	DiskSizeMB   int64             `json:"diskSizeMB,omitempty"`
	Metadata     map[string]string `json:"metadata,omitempty"`
	Lifecycle    *Lifecycle        `json:"lifecycle,omitempty"`
	AgentVersion string            `json:"envdVersion,omitempty"`
	AgentToken   string            `json:"envdAccessToken,omitempty"` // a secret
	TrafficToken string            `json:"trafficAccessToken,omitempty"`
	Domain       string            `json:"domain,omitempty"`

	// What Berm tells beyond E2B.
	Berm   *Additions   `json:"berm,omitempty"`
	Limits *berm.Limits `json:"limits,omitempty"`
	Exit   *berm.Exit   `json:"exit,omitempty"`
}

// Additions is what Berm tells of every sandbox; another server tells none.
type Additions struct {
	Level   berm.Level `json:"level"`
	Network string     `json:"network"` // what it can reach, such as "none"
	// Degraded is what the host could not give, with the reason.
	Degraded []string `json:"degraded,omitempty"`
	// Warnings are what in its network policy is probably not meant; in the answer of a create.
	Warnings []string `json:"warnings,omitempty"`
	// Warm says that it was made in advance; in the answer of a create.
	Warm bool `json:"warm,omitempty"`
	// Parent is the sandbox that this one is a fork of.
	Parent      berm.SandboxID `json:"parent,omitempty"`
	Checkpoints *Checkpoints   `json:"checkpoints,omitempty"`
}

// Checkpoints says when a sandbox's files are saved without anybody asking.
type Checkpoints struct {
	Every int64 `json:"every,omitempty"` // seconds; 0 is not by the clock
	Exec  bool  `json:"exec,omitempty"`  // before each command that is started
	Keep  int   `json:"keep,omitempty"`  // how many stay: the oldest goes
	// Missed is the last one that could not be taken; of an answer only.
	Missed *struct {
		At         time.Time `json:"at"`
		Checkpoint string    `json:"checkpoint"` // "clock" or "exec"
		Reason     string    `json:"reason"`
		Count      int       `json:"count"` // of all that were missed
	} `json:"missed,omitempty"`
}

// Level is the sandbox's isolation level, "" if the server does not tell.
func (s *Sandbox) Level() berm.Level {
	if s.Berm == nil {
		return ""
	}
	return s.Berm.Level
}

// Template is the template's name, or its id when it has none.
func (s *Sandbox) Template() string {
	if s.Alias != "" {
		return s.Alias
	}
	return string(s.TemplateID)
}

// Lifecycle says what happens when a sandbox's time is over.
type Lifecycle struct {
	OnTimeout  berm.OnDeadline `json:"onTimeout"`
	AutoResume bool            `json:"autoResume"`
}

// CreateOptions describe a new sandbox.
type CreateOptions struct {
	Template   string
	Timeout    time.Duration // 0 leaves it to the server
	Env        map[string]string
	Metadata   map[string]string
	AutoPause  bool        // pause instead of kill when the time is over
	FilesOnly  bool        // and keep files alone then
	AutoResume bool        // wake up on traffic
	Level      berm.Level  // "" leaves it to the server
	Limits     berm.Limits // zero fields leave it to the template
	// Credentials are what requests get that the sandbox must not have.
	Credentials []Credential
	// Policy is the document of what it may reach from the first moment; nil leaves it to the
	// server.
	Policy json.RawMessage
	// Checkpoints says when its files are saved; nil is never.
	Checkpoints *Checkpoints
}

// Create makes a sandbox and returns when it is usable. A server that knows neither levels,
// limits, credentials, policies nor checkpoints, as one of E2B, is Unsupported if there are some to keep.
func (c *Client) Create(ctx context.Context, o CreateOptions) (*Sandbox, error) {
	type autoResume struct {
		Enabled bool `json:"enabled"`
	}
	type additions struct {
		Level  berm.Level  `json:"level,omitempty"`
		Limits berm.Limits `json:"limits,omitzero"`

		Credentials []Credential    `json:"credentials,omitempty"`
		Policy      json.RawMessage `json:"policy,omitempty"`
		Checkpoints *Checkpoints    `json:"checkpoints,omitempty"`
	}
	body := struct {
		TemplateID string            `json:"templateID"`
		Timeout    int64             `json:"timeout,omitempty"`
		Env        map[string]string `json:"envVars,omitempty"`
		Metadata   map[string]string `json:"metadata,omitempty"`
		AutoPause  bool              `json:"autoPause,omitempty"`
		Memory     *bool             `json:"autoPauseMemory,omitempty"`
		AutoResume *autoResume       `json:"autoResume,omitempty"`
		Berm       *additions        `json:"berm,omitempty"`
	}{TemplateID: o.Template, Timeout: seconds(o.Timeout), Env: o.Env, Metadata: o.Metadata, AutoPause: o.AutoPause}
	if o.FilesOnly {
		body.Memory = new(bool)
	}
	if o.AutoResume {
		body.AutoResume = &autoResume{true}
	}
	if o.Level != "" || o.Limits != (berm.Limits{}) || len(o.Credentials) > 0 || o.Policy != nil || o.Checkpoints != nil {
		body.Berm = &additions{o.Level, o.Limits, o.Credentials, o.Policy, o.Checkpoints}
	}
	var s Sandbox
	if _, err := c.call(ctx, http.MethodPost, "/v2/sandboxes", nil, body, &s); err != nil {
		return nil, err
	}
	if body.Berm != nil && s.Berm == nil { // it was ignored
		err := berm.Errorf(berm.Unsupported, "%s is no Berm server: it cannot keep a level, limits, credentials, a network policy or checkpoints", c.base)
		if killErr := c.Kill(ctx, s.ID); killErr != nil {
			return nil, fmt.Errorf("%w; and the sandbox %s is left over: %w", err, s.ID, killErr)
		}
		return nil, err
	}
	return &s, nil
}

// seconds rounds up: a shorter time than asked for would be a surprise.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }

func sandboxPath(id berm.SandboxID) string { return "/sandboxes/" + url.PathEscape(string(id)) }

// Get returns a sandbox in full. NotFound when it is gone.
func (c *Client) Get(ctx context.Context, id berm.SandboxID) (*Sandbox, error) {
	var s Sandbox
	_, err := c.call(ctx, http.MethodGet, sandboxPath(id), nil, nil, &s)
	return &s, err
}

// Inspect returns what Berm tells of a sandbox beyond E2B, for some time after its
// death too.
func (c *Client) Inspect(ctx context.Context, id berm.SandboxID) (*Sandbox, error) {
	var s Sandbox
	_, err := c.call(ctx, http.MethodGet, "/berm/v1"+sandboxPath(id), nil, nil, &s)
	return &s, err
}

// Filter chooses sandboxes. All conditions must hold.
type Filter struct {
	States   []berm.State // none: every state
	Metadata map[string]string
	Template string
}

// List calls each for every sandbox that the filter chooses, newest first, page by
// page, until each returns false.
func (c *Client) List(ctx context.Context, f Filter, each func(Sandbox) bool) error {
	query := url.Values{}
	if len(f.States) > 0 {
		states := make([]string, len(f.States))
		for i, s := range f.States {
			states[i] = string(s)
		}
		query.Set("state", strings.Join(states, ","))
	}
	if f.Template != "" {
		query.Set("template", f.Template)
	}
	if len(f.Metadata) > 0 {
		// Encoded three times, as the E2B SDKs do it: each part, the whole, and the
		// query that carries it. A blank is %20, since "+" is one in queries only.
		escape := func(s string) string { return strings.ReplaceAll(url.QueryEscape(s), "+", "%20") }
		pairs := make([]string, 0, len(f.Metadata))
		for k, v := range f.Metadata {
			pairs = append(pairs, escape(k)+"="+escape(v))
		}
		slices.Sort(pairs)
		query.Set("metadata", url.QueryEscape(strings.Join(pairs, "&")))
	}
	for {
		var page []Sandbox
		got, err := c.call(ctx, http.MethodGet, "/v2/sandboxes", query, nil, &page)
		if err != nil {
			return err
		}
		for _, s := range page {
			if !each(s) {
				return nil
			}
		}
		next := got.header.Get("X-Next-Token")
		if next == "" {
			return nil
		}
		if next == query.Get("nextToken") {
			return berm.Errorf(berm.Internal, "%s gives the same page again and again", c.base.Host)
		}
		query.Set("nextToken", next)
	}
}

// Kill ends a sandbox. NotFound when it is gone.
func (c *Client) Kill(ctx context.Context, id berm.SandboxID) error {
	_, err := c.call(ctx, http.MethodDelete, sandboxPath(id), nil, nil, nil)
	return err
}

// Pause freezes a sandbox. Conflict when it is paused already.
func (c *Client) Pause(ctx context.Context, id berm.SandboxID) error {
	_, err := c.call(ctx, http.MethodPost, sandboxPath(id)+"/pause", nil, nil, nil)
	return err
}

// PauseToFiles ends the processes of a sandbox and keeps its files. Conflict when it is paused
// already.
func (c *Client) PauseToFiles(ctx context.Context, id berm.SandboxID) error {
	_, err := c.call(ctx, http.MethodPost, sandboxPath(id)+"/pause", nil, map[string]any{"memory": false}, nil)
	return err
}

// Resume wakes a paused sandbox with a new timeout, 0 for the server's choice. A
// running one only gets its timeout extended; resumed is then false.
func (c *Client) Resume(ctx context.Context, id berm.SandboxID, timeout time.Duration) (s *Sandbox, resumed bool, err error) {
	body := struct {
		Timeout int64 `json:"timeout,omitempty"`
	}{seconds(timeout)}
	s = new(Sandbox)
	got, err := c.call(ctx, http.MethodPost, "/v2"+sandboxPath(id)+"/connect", nil, body, s)
	return s, got.status == http.StatusCreated, err
}

// Metric is one measurement of a sandbox; sizes in bytes.
type Metric struct {
	Timestamp  time.Time `json:"timestamp"`
	CPUCount   int       `json:"cpuCount"`
	CPUUsedPct float64   `json:"cpuUsedPct"`
	MemUsed    int64     `json:"memUsed"`
	MemTotal   int64     `json:"memTotal"`
	MemCache   int64     `json:"memCache"`
	DiskUsed   int64     `json:"diskUsed"`
	DiskTotal  int64     `json:"diskTotal"`
}

// Metrics returns the measurements of a sandbox since a time (zero: all that the
// server has), oldest first. The server's resolution is one second.
func (c *Client) Metrics(ctx context.Context, id berm.SandboxID, since time.Time) ([]Metric, error) {
	query := url.Values{}
	if !since.IsZero() {
		query.Set("start", strconv.FormatInt(since.Unix(), 10))
	}
	var metrics []Metric
	_, err := c.call(ctx, http.MethodGet, sandboxPath(id)+"/metrics", query, nil, &metrics)
	return metrics, err
}

// LogEntry is one line of a sandbox's log.
type LogEntry struct {
	Timestamp time.Time         `json:"timestamp"`
	Level     string            `json:"level"`
	Message   string            `json:"message"`
	Fields    map[string]string `json:"fields,omitempty"`
}

// MaxLogs is the most log lines that one call returns.
const MaxLogs = 1000

// Logs returns a sandbox's log lines from a time on (zero: all that the server
// has), oldest first, at most MaxLogs.
func (c *Client) Logs(ctx context.Context, id berm.SandboxID, since time.Time) ([]LogEntry, error) {
	query := url.Values{"limit": {strconv.Itoa(MaxLogs)}, "direction": {"forward"}}
	if !since.IsZero() {
		query.Set("cursor", strconv.FormatInt(since.UnixMilli(), 10))
	}
	var logs struct{ Logs []LogEntry }
	_, err := c.call(ctx, http.MethodGet, "/v2"+sandboxPath(id)+"/logs", query, nil, &logs)
	return logs.Logs, err
}

// Policy returns the whole effective policy of a sandbox. Berm has it, E2B does
// not.
func (c *Client) Policy(ctx context.Context, id berm.SandboxID) (berm.Policy, error) {
	var p berm.Policy
	_, err := c.call(ctx, http.MethodGet, "/berm/v1"+sandboxPath(id)+"/policy", nil, nil, &p)
	return p, err
}
