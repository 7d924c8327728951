package replay

import (
	"cmp"
	"encoding/json"
	"errors"
	"strings"
	"time"

	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/network/address"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/egress/compile"
)

// reach is what a sandbox was allowed to reach from an event on.
type reach struct {
	at    time.Time
	lines []string // in plain words
}

// reaches are the network policies of a sandbox, in order. There may be none: it had no network, or
// the log does not tell.
func (t *Timeline) reaches() (all []reach) {
	for _, e := range t.Events {
		if lines, ok := e.reach(); ok {
			all = append(all, reach{e.Time, lines})
		}
	}
	return all
}

// reach tells in plain words what an event allows to be reached, if it sets a network policy.
func (e *Event) reach() (lines []string, ok bool) {
	var data struct {
		Network json.RawMessage
		Policy  egress.Policy
		Open    []string
	}
	var set struct{ Document json.RawMessage }
	if json.Unmarshal(e.Raw, &data) != nil {
		return nil, false
	}
	switch {
	case e.Type == audit.SandboxCreate && string(data.Network) == `"policy"`: // of berm run
	case e.Type == audit.PolicySet && json.Unmarshal(data.Network, &set) == nil:
		if data.Policy = (egress.Policy{JSON: set.Document}); len(set.Document) == 0 {
			return []string{"The log does not tell what."}, true
		}
	default:
		return nil, false
	}
	p, err := compile.Policy(data.Policy)
	table, failure := address.NewTable(address.Config{})
	if err = errors.Join(err, failure); err != nil {
		return []string{"The log does not tell what: " + err.Error()}, true
	}
	d := p.Describe(table, e.Time)
	for _, rule := range d.Rules {
		lines = append(lines, rule.Text)
		for _, request := range rule.Requests {
			lines = append(lines, "  "+request)
		}
	}
	lines = append(append(lines, d.Default), d.Also...)
	if len(data.Open) > 0 {
		lines = append(lines, "Opened, for rules to allow: "+strings.Join(data.Open, ", ")+".")
	}
	return lines, true
}

// Unwatched says why nothing of a sandbox's network is on record, "" where something would be.
func (t *Timeline) Unwatched() string {
	for _, e := range t.Events {
		data, _ := e.Data.(map[string]any)
		network, _ := data["network"].(string)
		switch {
		case e.Type == audit.SandboxCreate && network == "host":
			return "not on record: it had the network of this machine"
		case e.Type == audit.SandboxCreate && network == "none", e.Type == audit.PolicySet && strings.HasPrefix(network, "none"):
			return "nothing: it had no network; what it tried is not on record"
		}
	}
	return ""
}

// why tells in words why something was denied: the reason, the rule, and what else is known.
func why(e *egress.Event) string {
	text := e.Reason
	if e.Rule != "" {
		text += ", rule " + e.Rule
	}
	// The detail may have lines, and says the reason again.
	detail := strings.Join(strings.Fields(strings.TrimPrefix(e.Detail, "Denied ("+e.Reason+"): ")), " ")
	if e.Reason == "not_listed" {
		detail = cmp.Or(detail, "no rule of the policy names it")
	}
	if detail != "" {
		text += ": " + detail
	}
	return text
}
