package server

import (
	"context"
	"errors"
	"time"

	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/policy"
	"github.com/berm-sandbox/berm/internal/network/quota"
)

// beyond is the verdict about what a limit of the policy does not let through.
func beyond(v policy.Verdict, limit *quota.Exceeded) policy.Verdict {
	v.Action, v.Reason, v.Rule, v.Detail = policy.Deny, policy.ReasonLimit, limit.Rule, limit.Limit
	return v
}

// meter has the bytes of a flow counted, and ends the flow that a limit does not let pass.
func (f *flow) meter(ctx context.Context, up bool, n int) error {
	err := f.use.Pass(ctx, up, n)
	f.exceed(err)
	return err
}

// exceed ends the flow if an error is about a limit.
func (f *flow) exceed(err error) {
	if limit := (*quota.Exceeded)(nil); errors.As(err, &limit) {
		f.mu.Lock()
		v := f.verdict // which may be that of another name now
		f.mu.Unlock()
		v = beyond(v, limit)
		f.deny(v)
		f.cut(v)
		f.inside.Reset()
	}
}

// cut tells the service of credentials why a flow that it has is about to end.
func (f *flow) cut(v policy.Verdict) {
	f.sandbox.mu.Lock()
	door := f.brokered
	f.sandbox.mu.Unlock()
	if door != nil {
		// Else it has ended.
		_ = door.Send(egress.Flow{ID: f.id, Cut: &egress.Cut{Reason: string(v.Reason), Rule: v.Rule, Detail: v.Explain()}})
	}
}

// time ends the flow when it has lived for as long as it may. The caller holds the sandbox's
// lock.
func (f *flow) time() {
	if f.timer != nil {
		f.timer.Stop()
		f.timer = nil
	}
	if most, limit := f.use.Duration(); most > 0 {
		f.timer = time.AfterFunc(most-time.Since(f.inside.Start), func() { f.exceed(limit) })
	}
}

// release gives back what the flow has of limits. The caller holds the sandbox's lock.
func (f *flow) release() {
	if f.timer != nil {
		f.timer.Stop()
	}
	f.use.Close()
}

// admits says whether the sandbox may ask for a name now.
func (x *sandbox) admits() bool {
	err := x.quota.Query()
	if err != nil {
		x.events.add(egress.Event{Time: time.Now(), Kind: "dns", Action: string(policy.Deny), Reason: string(policy.ReasonLimit), Detail: err.Error()})
	}
	return err == nil
}
