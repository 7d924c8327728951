// Package webhook asks an operator's own server over HTTP whether flows may pass.
package webhook

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"net/http"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/webhook"
)

const (
	atOnce = 64          // questions
	spare  = time.Second // of the flow's patience, for the way of the answer
)

// Hook is a server that is asked. Its methods are safe for concurrent use.
type Hook struct {
	*webhook.Hook
	slots chan struct{}
}

// New returns a hook as webhook.New does.
func New(address, secretFile string) (*Hook, error) {
	h, err := webhook.New(address, secretFile)
	if err != nil {
		return nil, err
	}
	return &Hook{Hook: h, slots: make(chan struct{}, atOnce)}, nil
}

// Question is the body of a question.
type Question struct {
	ID       string            `json:"id"` // another for each question
	Time     time.Time         `json:"time"`
	Deadline time.Time         `json:"deadline"` // what is not answered by then is denied
	Sandbox  berm.SandboxID    `json:"sandbox"`
	Metadata map[string]string `json:"metadata,omitempty"` // of the sandbox
	egress.Question
	Reason   string `json:"reason,omitempty"` // of the rule
	Revision string `json:"revision,omitempty"`
}

// Answer is the body of an answer; its status must be 200.
type Answer struct {
	Answer string       `json:"answer"` // allow or deny
	For    egress.Scope `json:"for"`    // empty: once
	Until  time.Time    `json:"until"`
}

// Ask asks about a flow. Whatever goes wrong is an error, and no answer. Kinds: Unavailable,
// Invalid (the answer).
func (h *Hook) Ask(ctx context.Context, id berm.SandboxID, metadata map[string]string, e egress.Event) (egress.Reply, error) {
	patience := time.Duration(e.Duration * float64(time.Second))
	ctx, cancel := context.WithTimeout(ctx, patience-min(spare, patience/2))
	defer cancel()
	now := time.Now().UTC()
	deadline, _ := ctx.Deadline()
	q := Question{
		ID: rand.Text(), Time: now, Deadline: deadline.UTC(), Sandbox: id, Metadata: metadata, Question: e.Question(), Reason: e.Detail, Revision: e.Revision,
	}
	body, err := json.Marshal(q)
	if err != nil {
		return egress.Reply{}, berm.Errorf(berm.Internal, "ask the webhook: %w", err)
	}
	select {
	case h.slots <- struct{}{}:
		defer func() { <-h.slots }()
	case <-ctx.Done():
		return egress.Reply{}, berm.Errorf(berm.Unavailable, "ask the webhook: too many questions at once")
	}
	status, text, err := h.Post(ctx, "application/json", body)
	if err != nil {
		return egress.Reply{}, err
	}
	if status != http.StatusOK {
		return egress.Reply{}, berm.Errorf(berm.Unavailable, "the webhook answers with status %d", status)
	}
	return parse(q.Question, text, time.Now())
}

// parse reads an answer.
func parse(q egress.Question, text []byte, now time.Time) (egress.Reply, error) {
	wrong := func(what string) (egress.Reply, error) {
		return egress.Reply{}, berm.Errorf(berm.Invalid, "what the webhook answers %s", what).
			WithHint(`it must be such as {"answer": "allow", "for": "sandbox"}`)
	}
	var a Answer
	if err := json.Unmarshal(text, &a); err != nil {
		return wrong("is no JSON object")
	}
	r := egress.Reply{Question: q, Allow: a.Answer == "allow", Scope: a.For}
	if !r.Allow && a.Answer != "deny" {
		return wrong("is neither allow nor deny")
	}
	switch r.Scope {
	case "":
		r.Scope = egress.ScopeOnce
	case egress.ScopeOnce, egress.ScopeSandbox:
	case egress.ScopeUntil:
		if r.Until = a.Until; !r.Until.After(now) {
			return wrong("holds until a time that is over")
		}
	default:
		return wrong("holds for neither once, sandbox nor until")
	}
	return r, nil
}
