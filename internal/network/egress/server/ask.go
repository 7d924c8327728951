package server

import (
	"context"
	"time"

	"github.com/berm-sandbox/berm/internal/network/ask"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/policy"
)

// decide is the verdict about a flow by the policy in force and what was answered. yes is the
// rule of which the flow has an answer for itself alone. The caller holds the lock.
func (x *sandbox) decide(question policy.Flow, yes string) policy.Verdict {
	v := x.policy.Decide(question)
	if v.Action == policy.Ask && yes != "" && v.Rule == yes {
		v.Action = policy.Allow
		return v
	}
	v, _ = x.answers.Apply(v)
	return v
}

// await asks the owner about a flow, and returns the verdict of the policy that is in force
// then, and the rule if it allows this flow alone.
func (x *sandbox) await(ctx context.Context, question policy.Flow, v policy.Verdict) (_ policy.Verdict, yes string) {
	open, first := x.answers.Ask(v)
	if open == nil {
		return ask.Refused(v, "too many questions wait already"), ""
	}
	if first {
		e := egress.Event{
			Time: time.Now(), Kind: egress.Asks, Name: v.Flow.Host.Name(), Port: v.Flow.Port, Protocol: string(v.Flow.Proto),
			Action: string(policy.Ask), Rule: v.Rule, Detail: v.Detail, Revision: v.Revision, Duration: ask.Patience.Seconds(),
		}
		if e.Name == "" {
			e.Address = v.Flow.Host.String()
		}
		x.events.add(e)
	}
	select {
	case <-open.Done:
	case <-ctx.Done():
	}
	answered := x.answers.Leave(open, v)
	if answered.Action != policy.Allow {
		return answered, ""
	}
	// A policy that came meanwhile may not ask any more.
	x.mu.Lock()
	defer x.mu.Unlock()
	question.Time = time.Now()
	now := x.decide(question, "")
	if now.Action == policy.Ask && now.Rule == v.Rule { // it was answered for once
		now.Action = policy.Allow
		return now, v.Rule
	}
	return now, ""
}

// rejudgeAll judges all flows again.
func (x *sandbox) rejudgeAll() {
	x.mu.Lock()
	defer x.mu.Unlock()
	for f := range x.live {
		x.rejudge(f)
	}
}
