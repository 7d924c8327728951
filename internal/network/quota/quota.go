// Package quota keeps count of what a sandbox uses of the limits of its network policy.
package quota

import (
	"context"
	"math"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/berm-sandbox/berm/internal/network/policy"
)

// Exceeded says which limit is used up. It is an error so that it ends what needs the limit.
type Exceeded struct {
	Rule  string // whose limit it is; "" for the policy's own
	Limit string // for people, such as "1GiB sent"
}

func (e *Exceeded) Error() string { return "the limit of " + e.Limit + " is used up" }

// Quota is what one sandbox has used. What was used stays used when a policy is replaced,
// as long as the rule with the limit is there. Its methods are safe for concurrent use.
type Quota struct {
	limited atomic.Bool // false: there is no limit at all

	mu    sync.Mutex
	all   account
	rules map[string]*account // those with limits
	flows map[string]int64    // that live, by rule, limited or not
	total int64
}

// New returns a quota without limits.
func New() *Quota { return &Quota{rules: map[string]*account{}, flows: map[string]int64{}} }

// Set takes the limits of a policy.
func (q *Quota) Set(p *policy.Policy) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.all.set("", p.Limits)
	limited := p.Limits != policy.Limits{}
	rules := map[string]*account{}
	for i := range p.Rules {
		r := &p.Rules[i]
		if r.Limits == (policy.Limits{}) {
			continue
		}
		limited = true
		a := q.rules[r.ID]
		if a == nil {
			a = &account{}
		}
		a.set(r.ID, r.Limits)
		rules[r.ID] = a
	}
	q.rules = rules
	q.limited.Store(limited)
}

// accounts are those that count for a rule. The caller holds the lock.
func (q *Quota) accounts(rule string) []*account {
	if a := q.rules[rule]; a != nil {
		return []*account{&q.all, a}
	}
	return []*account{&q.all}
}

// Use is one flow's part in a quota.
type Use struct {
	quota *Quota
	rule  string // under the quota's lock
}

// Open counts a flow that a rule allows, "" for the default. It fails with Exceeded.
func (q *Quota) Open(rule string) (*Use, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	accounts, now := q.accounts(rule), time.Now()
	for i, a := range accounts {
		live := q.total
		if i > 0 {
			live = q.flows[rule]
		}
		if l := a.limits.Flows; l > 0 && live >= l {
			return nil, &Exceeded{a.rule, strconv.FormatInt(l, 10) + " flows at a time"}
		}
		for _, b := range a.budgets() {
			if !b.has(1, now) {
				return nil, b.exceeded(a.rule)
			}
		}
	}
	for _, a := range accounts {
		if a.opened != nil && !a.opened.AllowN(now, 1) {
			return nil, &Exceeded{a.rule, strconv.FormatInt(a.limits.NewFlows, 10) + " new flows a second"}
		}
	}
	q.total++
	q.flows[rule]++
	return &Use{quota: q, rule: rule}, nil
}

// Close gives the flow back.
func (u *Use) Close() {
	q := u.quota
	q.mu.Lock()
	defer q.mu.Unlock()
	q.total--
	q.leave(u.rule)
}

func (q *Quota) leave(rule string) {
	if q.flows[rule]--; q.flows[rule] == 0 {
		delete(q.flows, rule)
	}
}

// Move counts the flow for another rule from now on.
func (u *Use) Move(rule string) {
	q := u.quota
	q.mu.Lock()
	defer q.mu.Unlock()
	q.leave(u.rule)
	u.rule = rule
	q.flows[rule]++
}

// Duration is how long the flow may live, 0 for as long as it wants, and whose limit that is.
func (u *Use) Duration() (time.Duration, *Exceeded) {
	q := u.quota
	q.mu.Lock()
	defer q.mu.Unlock()
	var least time.Duration
	var by *Exceeded
	for _, a := range q.accounts(u.rule) {
		if d := a.limits.Duration; d > 0 && (least == 0 || d < least) {
			least, by = d, &Exceeded{a.rule, d.String() + " for one flow"}
		}
	}
	return least, by
}

// Pass counts bytes that are about to pass: up out of the sandbox, or down into it. It waits
// where a limit is one of a second. After an error, which is Exceeded or that of ctx, they may
// not pass.
func (u *Use) Pass(ctx context.Context, up bool, n int) error {
	q := u.quota
	if n == 0 || !q.limited.Load() {
		return nil
	}
	q.mu.Lock()
	accounts, now := q.accounts(u.rule), time.Now()
	var paces []*rate.Limiter
	for _, a := range accounts {
		for _, b := range a.of(up) {
			if !b.has(int64(n), now) {
				// What was about to pass is lost, and counts as far as there was room: the limit
				// is used up now, for everybody.
				b.used = b.rate.Bytes
				err := b.exceeded(a.rule)
				q.mu.Unlock()
				return err
			}
		}
	}
	for _, a := range accounts {
		for _, b := range a.of(up) {
			if b.pace != nil {
				paces = append(paces, b.pace)
			} else {
				b.used += int64(n)
			}
		}
	}
	q.mu.Unlock()
	for _, pace := range paces {
		for left := n; left > 0; {
			part := min(left, pace.Burst())
			if err := pace.WaitN(ctx, part); err != nil {
				return err
			}
			left -= part
		}
	}
	return nil
}

// Request counts a request in a flow that a rule allows. It fails with Exceeded.
func (q *Quota) Request(rule string) error {
	if !q.limited.Load() {
		return nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, a := range q.accounts(rule) {
		if a.requests != nil && !a.requests.Allow() {
			return &Exceeded{a.rule, strconv.FormatInt(a.limits.Requests, 10) + " requests a second"}
		}
	}
	return nil
}

// Query counts a query for a name. It fails with Exceeded.
func (q *Quota) Query() error {
	if !q.limited.Load() {
		return nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.all.queries != nil && !q.all.queries.Allow() {
		return &Exceeded{"", strconv.FormatInt(q.all.limits.Queries, 10) + " queries a second"}
	}
	return nil
}

// account is limits and what of them was used.
type account struct {
	rule              string
	limits            policy.Limits
	up, down, total   *budget // nil: no limit
	opened            *rate.Limiter
	requests, queries *rate.Limiter
}

// set takes limits, and keeps what was used of those of the same kind.
func (a *account) set(rule string, l policy.Limits) {
	a.rule, a.limits = rule, l
	a.up = a.up.with(l.Up, "sent")
	a.down = a.down.with(l.Down, "received")
	a.total = a.total.with(l.Total, "sent and received")
	for _, each := range []struct {
		limiter **rate.Limiter
		n       int64
	}{{&a.opened, l.NewFlows}, {&a.requests, l.Requests}, {&a.queries, l.Queries}} {
		switch {
		case each.n == 0:
			*each.limiter = nil
		case *each.limiter == nil || (*each.limiter).Burst() != int(each.n):
			*each.limiter = rate.NewLimiter(rate.Limit(each.n), int(each.n))
		}
	}
}

// of are the budgets for one direction.
func (a *account) of(up bool) []*budget {
	one := a.down
	if up {
		one = a.up
	}
	return present(one, a.total)
}

func (a *account) budgets() []*budget { return present(a.up, a.down, a.total) }

func present(list ...*budget) (found []*budget) {
	for _, b := range list {
		if b != nil {
			found = append(found, b)
		}
	}
	return found
}

// budget is an amount of bytes.
type budget struct {
	rate  policy.Rate
	what  string
	pace  *rate.Limiter // of a second: what is more waits
	used  int64
	since time.Time // when the period began
}

// with is the budget of another rate: what was used in a period of the same length stays used.
func (b *budget) with(r policy.Rate, what string) *budget {
	if r.Bytes == 0 {
		return nil
	}
	n := &budget{rate: r, what: what}
	if r.Per == time.Second {
		// A tenth of a second's at once.
		n.pace = rate.NewLimiter(rate.Limit(r.Bytes), int(min(max(r.Bytes/10, 1), math.MaxInt32)))
		if b != nil && b.rate == r {
			n.pace = b.pace
		}
		return n
	}
	if b != nil && b.rate.Per == r.Per {
		n.used, n.since = b.used, b.since
	}
	return n
}

// has says whether n more bytes may pass, and begins the next period when it is time.
func (b *budget) has(n int64, now time.Time) bool {
	if b.pace != nil {
		return true
	}
	if b.rate.Per > 0 && now.Sub(b.since) >= b.rate.Per {
		b.used, b.since = 0, now
	}
	return n <= b.rate.Bytes-b.used
}

func (b *budget) exceeded(rule string) *Exceeded {
	return &Exceeded{rule, b.rate.String() + " " + b.what}
}
