package egress

import (
	"context"
	"time"
)

// Asks is the kind of an event that asks whether a flow may pass: whoever is asked answers by
// Link.Reply before its Duration is over, or the flow is denied.
const Asks = "ask"

// Question names flows that a rule leaves to somebody. Equal ones are asked once.
type Question struct {
	Rule     string `json:"rule"`
	Host     string `json:"host"` // a name or an address
	Port     uint16 `json:"port"`
	Protocol string `json:"protocol"` // tcp or udp
}

// Question is the one that an event of the kind Asks is about.
func (e *Event) Question() Question {
	q := Question{Rule: e.Rule, Host: e.Name, Port: e.Port, Protocol: e.Protocol}
	if q.Host == "" {
		q.Host = e.Address
	}
	return q
}

// Scope is for how long an answer holds.
type Scope string

// The scopes.
const (
	ScopeNone    Scope = ""        // for nothing: nobody answered, and those that wait are denied
	ScopeOnce    Scope = "once"    // for those that wait for it
	ScopeSandbox Scope = "sandbox" // as long as the sandbox lives
	ScopeUntil   Scope = "until"   // until a time; flows that it let pass end then
)

// Reply is the answer to a question.
type Reply struct {
	Question Question  `json:"question"`
	Allow    bool      `json:"allow"`
	Scope    Scope     `json:"for"`
	Until    time.Time `json:"until,omitzero"`
}

// Reply answers a question. Kinds: Invalid, Unavailable.
func (l *Link) Reply(ctx context.Context, r Reply) error {
	_, err := l.order(ctx, Order{Reply: &r})
	return err
}
