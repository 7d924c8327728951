package e2b

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/control"
	"github.com/berm-sandbox/berm/internal/network/policy"
)

// clientID is required by clients and means nothing.
const clientID = "berm"

type newSandbox struct {
	TemplateID      string                  `json:"templateID"`
	Timeout         *int64                  `json:"timeout"`
	Secure          *bool                   `json:"secure"`
	AutoPause       bool                    `json:"autoPause"`
	AutoPauseMemory *bool                   `json:"autoPauseMemory"`
	AutoResume      *struct{ Enabled bool } `json:"autoResume"`
	Internet        *bool                   `json:"allow_internet_access"`
	Network         *network                `json:"network"`
	Metadata        map[string]string       `json:"metadata"`
	EnvVars         map[string]string       `json:"envVars"`
	VolumeMounts    []json.RawMessage       `json:"volumeMounts"`
	MCP             json.RawMessage         `json:"mcp"`
	IAM             *identity               `json:"iam"`
	Berm            *wishes                 `json:"berm"`
}

// wishes is what a creator may say beyond E2B.
type wishes struct {
	Level       berm.Level           `json:"level"`
	Limits      berm.Limits          `json:"limits"`
	Credentials []control.Credential `json:"credentials"`
	// Policy is the network policy, in the place of what E2B's fields say.
	Policy      json.RawMessage `json:"policy"`
	Checkpoints *checkpoints    `json:"checkpoints"`
}

type sandbox struct {
	SandboxID    berm.SandboxID  `json:"sandboxID"`
	TemplateID   berm.TemplateID `json:"templateID"`
	Alias        string          `json:"alias,omitempty"`
	ClientID     string          `json:"clientID"`
	EnvdVersion  string          `json:"envdVersion"`
	AccessToken  string          `json:"envdAccessToken,omitempty"`
	TrafficToken string          `json:"trafficAccessToken,omitempty"`
	Domain       string          `json:"domain,omitempty"`
	Berm         additions       `json:"berm"`
}

// additions is what Berm tells beyond E2B.
type additions struct {
	Level   berm.Level `json:"level"`
	Network string     `json:"network"` // what the sandbox can reach, in a word
	// DefaultEgress is what this server lets a sandbox reach when its creator says nothing:
	// "public" or "deny".
	DefaultEgress string `json:"e2bDefaultEgress"`
	// Degraded is what the host could not give, with the reason.
	Degraded []string `json:"degraded,omitempty"`
	// Parent is the sandbox that this one is a fork of.
	Parent berm.SandboxID `json:"parent,omitempty"`
	// Warnings are what in its network policy is probably not meant; of a create only.
	Warnings    []string         `json:"warnings,omitempty"`
	Checkpoints *toldCheckpoints `json:"checkpoints,omitempty"`
	// Warm says that it was made in advance.
	Warm bool `json:"warm,omitempty"`
	// Begun says that what its template starts went on from where it was saved, and did not start
	// again.
	Begun bool `json:"begun,omitempty"`
}

func (a *API) additions(s control.Sandbox) additions {
	egress := "deny"
	if a.Sessions.Egress.Service != nil && a.Sessions.Egress.Public {
		egress = "public"
	}
	return additions{Level: s.Level, Network: s.Reach(), DefaultEgress: egress, Degraded: s.Degraded, Parent: s.Parent, Warnings: s.Warnings, Checkpoints: toCheckpoints(s), Warm: s.Warm, Begun: s.Begun}
}

func (a *API) sandbox(s control.Sandbox) sandbox {
	return sandbox{
		SandboxID: s.ID, TemplateID: s.TemplateID, Alias: s.Team.Trim(s.Alias), ClientID: clientID, EnvdVersion: berm.AgentVersion,
		AccessToken: s.AccessToken, TrafficToken: s.TrafficToken, Domain: a.Domain,
		Berm: a.additions(s),
	}
}

type listed struct {
	SandboxID   berm.SandboxID    `json:"sandboxID"`
	TemplateID  berm.TemplateID   `json:"templateID"`
	Alias       string            `json:"alias,omitempty"`
	ClientID    string            `json:"clientID"`
	StartedAt   time.Time         `json:"startedAt"`
	EndAt       time.Time         `json:"endAt"`
	State       berm.State        `json:"state"`
	CPUCount    int64             `json:"cpuCount"`
	MemoryMB    int64             `json:"memoryMB"`
	DiskSizeMB  int64             `json:"diskSizeMB"`
	EnvdVersion string            `json:"envdVersion"`
	Metadata    map[string]string `json:"metadata,omitempty"`
	Berm        additions         `json:"berm"`
}

// toListed tells of cores and memory what the sandbox may use: without a limit, all that
// the server would let it ask for. Clients expect numbers above zero.
func (a *API) toListed(s control.Sandbox) listed {
	if s.Limits.CPU == 0 {
		s.Limits.CPU = a.Sessions.MaxLimits.CPU
	}
	if s.Limits.Memory == 0 {
		s.Limits.Memory = a.Sessions.MaxLimits.Memory
	}
	return listed{
		SandboxID: s.ID, TemplateID: s.TemplateID, Alias: s.Team.Trim(s.Alias), ClientID: clientID,
		StartedAt: s.StartedAt, EndAt: s.EndAt, State: s.State,
		CPUCount: int64(math.Ceil(s.Limits.CPU)), MemoryMB: s.Limits.Memory >> 20, DiskSizeMB: s.Limits.Disk >> 20,
		EnvdVersion: berm.AgentVersion, Metadata: s.Metadata, Berm: a.additions(s),
	}
}

type detail struct {
	listed
	AccessToken string    `json:"envdAccessToken,omitempty"`
	Domain      string    `json:"domain,omitempty"`
	Internet    *bool     `json:"allowInternetAccess,omitempty"`
	Network     *network  `json:"network,omitempty"`
	Lifecycle   lifecycle `json:"lifecycle"`
	PauseMode   string    `json:"pauseMode,omitempty"` // what the pause saved
}

type lifecycle struct {
	OnTimeout  berm.OnDeadline `json:"onTimeout"`
	AutoResume bool            `json:"autoResume"`
}

func (a *API) createV1(w http.ResponseWriter, r *http.Request) error {
	return a.create(w, r, 15, false)
}

func (a *API) createV2(w http.ResponseWriter, r *http.Request) error {
	return a.create(w, r, 300, true)
}

// create serves both generations. The second secures every sandbox, and leaves out
// what its user did not set.
func (a *API) create(w http.ResponseWriter, r *http.Request, timeout int64, secured bool) error {
	body, err := readBody(w, r)
	if err != nil {
		return err
	}
	var in newSandbox
	if err := parse(body, &in); err != nil {
		return err
	}
	if err := checkCreate(body); err != nil {
		return err
	}
	if in.TemplateID == "" {
		return invalid("templateID is required")
	}
	request := control.CreateRequest{
		Template: in.TemplateID, Secure: secured || in.Secure != nil && *in.Secure, OnDeadline: berm.KillAtDeadline,
		AutoResume: in.AutoResume != nil && in.AutoResume.Enabled, Internet: in.Internet,
		Env: in.EnvVars, Metadata: in.Metadata, Actor: actor(r), Team: keyOf(r).Team,
	}
	if in.Timeout != nil {
		timeout = *in.Timeout
	}
	if request.Timeout, err = seconds(timeout); err != nil {
		return err
	}
	if request.Request, err = idempotency(r, body); err != nil {
		return err
	}
	if in.AutoPause {
		request.OnDeadline = berm.PauseAtDeadline
	}
	if m := in.AutoPauseMemory; m != nil && !*m {
		switch {
		case !in.AutoPause:
			return berm.Errorf(berm.Invalid, "autoPauseMemory needs autoPause")
		case request.AutoResume:
			return berm.Errorf(berm.Invalid, "autoPauseMemory cannot be false with autoResume")
		}
		request.FilesOnly = true
	}
	if in.Network != nil {
		if request.Network, err = in.Network.fields(); err != nil {
			return err
		}
	}
	if len(in.VolumeMounts) > 0 {
		return berm.Errorf(berm.Unsupported, "This version of Berm does not have volumes: volumeMounts cannot be honoured")
	}
	if err := in.IAM.check(); err != nil {
		return err
	}
	if string(in.MCP) != "null" {
		request.MCP = in.MCP
	}
	if in.Berm != nil {
		request.Level, request.Limits, request.Credentials = in.Berm.Level, in.Berm.Limits, in.Berm.Credentials
		if in.Berm.Checkpoints != nil {
			if request.Checkpoints, err = in.Berm.Checkpoints.wanted(); err != nil {
				return err
			}
		}
		if len(in.Berm.Policy) > 0 {
			if request.Policy, err = policy.DecodeJSON("berm.policy", in.Berm.Policy); err != nil {
				return err
			}
		}
	}
	s, err := a.Sessions.Create(r.Context(), request)
	if errors.Is(err, control.ErrRequestDiffers) {
		return &httpError{http.StatusUnprocessableEntity, "idempotency_request_mismatch", err.Error()}
	}
	if err != nil {
		return err
	}
	var timing []string
	for _, step := range s.Steps {
		timing = append(timing, fmt.Sprintf("%s;dur=%.3f", step.Name, float64(step.Took.Microseconds())/1000))
	}
	w.Header().Set("Server-Timing", strings.Join(timing, ", "))
	return answer(w, http.StatusCreated, a.sandbox(s))
}

func (a *API) listV1(w http.ResponseWriter, r *http.Request) error {
	all := a.Sessions.List(control.Filter{
		Team: teamOf(r), States: []berm.State{berm.Running}, Metadata: parseMetadata(r.URL.Query().Get("metadata")),
	})
	return answer(w, http.StatusOK, mapped(all, a.toListed))
}

func (a *API) listV2(w http.ResponseWriter, r *http.Request) error {
	filter, err := parseFilter(r)
	if err != nil {
		return err
	}
	all := a.Sessions.List(filter)
	some, next, err := page(r, all, filter.Ascending)
	if err != nil {
		return err
	}
	running := 0
	for _, s := range all {
		if s.State == berm.Running {
			running++
		}
	}
	if filter.States == nil || filter.States[0] == berm.Running || len(filter.States) > 1 {
		w.Header().Set("X-Total-Running", strconv.Itoa(running))
	}
	if next != "" {
		w.Header().Set("X-Next-Token", next)
	}
	return answer(w, http.StatusOK, mapped(some, a.toListed))
}

// mapped converts a list; an empty one is [] in JSON.
func mapped[A, B any](list []A, convert func(A) B) []B {
	out := make([]B, 0, len(list))
	for _, v := range list {
		out = append(out, convert(v))
	}
	return out
}

func (a *API) get(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	s, err := a.Sessions.Get(r.Context(), id)
	if err != nil {
		return err
	}
	d := detail{
		listed: a.toListed(s), AccessToken: s.AccessToken, Domain: a.Domain, Internet: s.Internet,
		Lifecycle: lifecycle{OnTimeout: s.OnDeadline, AutoResume: s.AutoResume},
	}
	if s.State == berm.Paused {
		d.PauseMode = "full"
		if s.SavedAs != "" && !s.SavedMemory {
			d.PauseMode = "filesystem"
		}
	}
	d.Network = toNetwork(s.Network)
	return answer(w, http.StatusOK, d)
}

func (a *API) kill(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	if err := a.Sessions.Kill(r.Context(), id, actor(r)); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *API) setTimeout(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	var in struct{ Timeout *int64 }
	if err := decode(w, r, &in); err != nil {
		return err
	}
	if in.Timeout == nil {
		return invalid("timeout is required")
	}
	timeout, err := seconds(*in.Timeout)
	if err != nil {
		return err
	}
	if err := a.Sessions.SetTimeout(r.Context(), id, timeout, actor(r)); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *API) refresh(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	in := struct{ Duration int64 }{15}
	if err := decode(w, r, &in); err != nil {
		return err
	}
	if in.Duration < 0 || in.Duration > 3600 {
		return invalid("duration must be from 0 to 3600")
	}
	if err := a.Sessions.Refresh(r.Context(), id, time.Duration(in.Duration)*time.Second, actor(r)); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// memoryOption is the choice between a pause with and without memory.
type memoryOption struct{ Memory *bool }

// drops says that memory is not wanted.
func (m memoryOption) drops() bool { return m.Memory != nil && !*m.Memory }

func (a *API) pause(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	var in struct {
		memoryOption
		RequireHealthyGuest bool
	}
	if err := decode(w, r, &in); err != nil {
		return err
	}
	if in.RequireHealthyGuest {
		if err := a.Sessions.RequireAgent(r.Context(), id); err != nil {
			return err
		}
	}
	pause := a.Sessions.Pause
	if in.drops() {
		pause = a.Sessions.PauseToFiles
	}
	if err := pause(r.Context(), id, actor(r)); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *API) resume(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	in := struct {
		memoryOption
		Timeout   int64
		AutoPause *bool
	}{Timeout: 15}
	if err := decode(w, r, &in); err != nil {
		return err
	}
	if in.AutoPause != nil {
		s, err := a.Sessions.Get(r.Context(), id)
		if err != nil {
			return err
		}
		if *in.AutoPause != (s.OnDeadline == berm.PauseAtDeadline) {
			return berm.Errorf(berm.Unsupported, "This version of Berm cannot change autoPause at resume")
		}
	}
	timeout, err := seconds(in.Timeout)
	if err != nil {
		return err
	}
	if in.drops() {
		if err := a.Sessions.DropMemory(r.Context(), id, actor(r)); err != nil {
			return err
		}
	}
	s, err := a.Sessions.Resume(r.Context(), id, timeout, actor(r))
	if err != nil {
		return err
	}
	return answer(w, http.StatusCreated, a.sandbox(s))
}

func (a *API) connect(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	in := struct {
		memoryOption
		Timeout int64
	}{Timeout: 300}
	if err := decode(w, r, &in); err != nil {
		return err
	}
	timeout, err := seconds(in.Timeout)
	if err != nil {
		return err
	}
	if in.drops() {
		if err := a.Sessions.DropMemory(r.Context(), id, actor(r)); err != nil {
			return err
		}
	}
	s, resumed, err := a.Sessions.Connect(r.Context(), id, timeout, actor(r))
	if err != nil {
		return err
	}
	code := http.StatusOK
	if resumed {
		code = http.StatusCreated
	}
	return answer(w, code, a.sandbox(s))
}
