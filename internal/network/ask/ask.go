// Package ask keeps what somebody says about flows that rules leave to them.
package ask

import (
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/policy"
)

// What one sandbox may ask. It chooses where it connects to, and with it how often.
const (
	// Patience is how long a question waits for its answer.
	Patience = 60 * time.Second
	// maxOpen is how many questions may wait at a time, and maxWaiting how many flows for them.
	maxOpen    = 16
	maxWaiting = 256
	maxKept    = 4096
	// rest is how long a question that nobody answered is not asked again.
	rest = 5 * time.Second
	// lentTime is how long an answer for once holds where nobody waits for it.
	lentTime = 30 * time.Second
)

// Answers are those of one sandbox. The methods are safe for concurrent use.
type Answers struct {
	over func()

	mu      sync.Mutex
	kept    map[egress.Question]kept
	open    map[egress.Question]*Open
	waiting int
	closed  bool
}

type kept struct {
	allow bool
	scope egress.Scope
	until time.Time // zero: as long as the sandbox lives
	timer *time.Timer
}

// New returns none. over is called whenever the time of an answer that allowed is over, from
// a goroutine of its own: flows that it let pass are to be judged again.
func New(over func()) *Answers {
	return &Answers{over: over, kept: map[egress.Question]kept{}, open: map[egress.Question]*Open{}}
}

// Of is the question that a verdict leaves open.
func Of(v policy.Verdict) egress.Question {
	return egress.Question{Rule: v.Rule, Host: v.Flow.Host.String(), Port: v.Flow.Port, Protocol: string(v.Flow.Proto)}
}

// Apply makes a verdict that asks what was answered, and says whether that holds for this
// flow alone. Without an answer it stays as it is.
func (a *Answers) Apply(v policy.Verdict) (_ policy.Verdict, once bool) {
	if v.Action != policy.Ask {
		return v, false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	k, ok := a.kept[Of(v)]
	switch {
	case !ok || !k.until.IsZero() && !time.Now().Before(k.until):
		return v, false
	case !k.allow && k.scope == "":
		return Refused(v, "nobody answered a moment ago"), false
	case !k.allow:
		return Refused(v, "the answer was no"), false
	}
	v.Action = policy.Allow
	return v, k.scope == egress.ScopeOnce
}

// Refused is the verdict that asks when there was no yes.
func Refused(v policy.Verdict, why string) policy.Verdict {
	v.Action, v.Reason, v.Detail = policy.Deny, policy.ReasonAsk, why
	return v
}

// Open is a question that waits for its answer.
type Open struct {
	Done chan struct{} // closed when there is one, or when it is too late

	timer           *time.Timer
	answered, allow bool
}

// Ask begins to wait for the answer to what a verdict asks, and says whether it is the first
// that does. It returns nil when too many wait already. The caller waits for Done, or as long
// as it wants, and calls Leave.
func (a *Answers) Ask(v policy.Verdict) (o *Open, first bool) {
	q := Of(v)
	a.mu.Lock()
	defer a.mu.Unlock()
	o = a.open[q]
	if a.closed || a.waiting >= maxWaiting || o == nil && len(a.open) >= maxOpen {
		return nil, false
	}
	if first = o == nil; first {
		o = &Open{Done: make(chan struct{})}
		o.timer = time.AfterFunc(Patience, func() { a.late(q, o) })
		a.open[q] = o
	}
	a.waiting++
	return o, first
}

// Leave ends waiting, and makes the verdict that asked what was answered.
func (a *Answers) Leave(o *Open, v policy.Verdict) policy.Verdict {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.waiting--
	switch {
	case !o.answered:
		return Refused(v, "nobody answered")
	case !o.allow:
		return Refused(v, "the answer was no")
	}
	v.Action = policy.Allow
	return v
}

// late gives up a question.
func (a *Answers) late(q egress.Question, o *Open) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.open[q] != o {
		return
	}
	delete(a.open, q)
	close(o.Done)
	a.keep(q, kept{until: time.Now().Add(rest)})
}

// Give takes an answer. For once it holds for those that wait; lend has it hold for whoever
// comes in the next moment, where that is not known. Kind: Invalid.
func (a *Answers) Give(r egress.Reply, lend bool) error {
	k := kept{allow: r.Allow, scope: r.Scope}
	now := time.Now()
	switch r.Scope {
	case egress.ScopeNone:
		if r.Allow {
			return berm.Errorf(berm.Invalid, "a yes must say for how long it holds")
		}
		a.mu.Lock()
		o := a.open[r.Question]
		a.mu.Unlock()
		if o != nil {
			o.timer.Stop()
			a.late(r.Question, o)
		}
		return nil
	case egress.ScopeOnce:
		k.until = now.Add(lentTime)
	case egress.ScopeSandbox:
	case egress.ScopeUntil:
		if k.until = r.Until; !r.Until.After(now) {
			return berm.Errorf(berm.Invalid, "the answer was to hold until %s, which is over", r.Until.Format(time.RFC3339))
		}
	default:
		return berm.Errorf(berm.Invalid, "an answer holds for %s, %s or %s, not %q", egress.ScopeOnce, egress.ScopeSandbox, egress.ScopeUntil, r.Scope)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil
	}
	if r.Scope != egress.ScopeOnce || lend {
		a.keep(r.Question, k)
	}
	if o := a.open[r.Question]; o != nil {
		delete(a.open, r.Question)
		o.timer.Stop()
		o.answered, o.allow = true, r.Allow
		close(o.Done)
	}
	return nil
}

// keep keeps an answer until its time. The caller holds the lock.
func (a *Answers) keep(q egress.Question, k kept) {
	if old, ok := a.kept[q]; ok && old.timer != nil {
		old.timer.Stop()
	} else if !ok && len(a.kept) >= maxKept {
		return // it is asked again
	}
	if !k.until.IsZero() {
		k.timer = time.AfterFunc(time.Until(k.until), func() {
			a.mu.Lock()
			ended := !a.closed && a.kept[q].timer == k.timer
			if ended {
				delete(a.kept, q)
			}
			a.mu.Unlock()
			if ended && k.allow && k.scope == egress.ScopeUntil {
				a.over()
			}
		})
	}
	a.kept[q] = k
}

// Close gives up all questions and answers.
func (a *Answers) Close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
	for _, k := range a.kept {
		if k.timer != nil {
			k.timer.Stop()
		}
	}
	for q, o := range a.open {
		o.timer.Stop()
		close(o.Done)
		delete(a.open, q)
	}
}
