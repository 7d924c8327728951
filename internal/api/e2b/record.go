package e2b

import (
	"net/http"
	"sync/atomic"

	"golang.org/x/time/rate"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
)

// Whoever reaches the port can be refused as often as they like: this many refusals
// without a valid key are records of their own, the next one counts the others.
const (
	refusalsPerSecond = 10
	refusalsAtOnce    = 100
)

// calls keeps records of calls.
type calls struct {
	audit    audit.Emitter
	refusals *rate.Limiter
	untold   atomic.Int64 // refusals without a record of their own
}

func newCalls(emitter audit.Emitter) *calls {
	return &calls{audit: emitter, refusals: rate.NewLimiter(refusalsPerSecond, refusalsAtOnce)}
}

// record tells of a call that was to change something, and of any that was refused
// for who made it. Neither body nor query are told: they hold secrets. What the call
// does has a record of its own, without which it is not done.
func (c *calls) record(rt route, r *http.Request, sandbox func(*http.Request) berm.SandboxID, status int, trace string) error {
	refused := status == http.StatusUnauthorized || status == http.StatusForbidden
	if rt.method == http.MethodGet && !refused {
		return nil
	}
	data := map[string]any{"route": rt.path, "method": rt.method, "status": status}
	who := actor(r)
	if who.Type == "" {
		who.Type = "anonymous"
		if !c.refusals.Allow() {
			c.untold.Add(1)
			return nil
		}
		if n := c.untold.Swap(0); n > 0 {
			data["untold"] = n
		}
	}
	outcome := audit.OK
	switch {
	case refused:
		outcome = audit.Denied
	case status >= 400:
		outcome = audit.Failed
	}
	return c.audit.Emit(audit.Record{
		Team: keyOf(r).Team, Sandbox: sandbox(r), Actor: who, Type: audit.APICall, Src: "api", Trust: audit.TrustHost,
		Outcome: outcome, Data: data, TraceID: trace,
	})
}

// concerns is the sandbox that a call is about: not what a stranger wrote there, nor one of another team,
// in whose records the call has no place.
func (a *API) concerns(r *http.Request) berm.SandboxID {
	id, err := berm.ParseSandboxID(sandboxOf(r))
	if err != nil || a.reach(r, id) != nil {
		return ""
	}
	return id
}
