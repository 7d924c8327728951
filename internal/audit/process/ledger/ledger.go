// Package ledger makes records of what the processes of one sandbox do, and no more of them than
// can be kept: of a flood, sums.
package ledger

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/berm-sandbox/berm/internal/audit"
)

// Of more than this many events of a sandbox some are counted only.
const (
	eventsPerSecond = 500
	eventsAtOnce    = 5000
	// maxSums bounds the programs that are counted apart in a second.
	maxSums = 100
)

// Ledger is the records of one sandbox. Its methods are for one caller at a time.
type Ledger struct {
	emit  func(audit.Type, audit.Outcome, string, any)
	limit *rate.Limiter
	sums  map[audit.ProcessSum]int // with a Count of 0
	told  uint64                   // lost events that are recorded
}

// New returns a ledger whose records are given to emit.
func New(emit func(what audit.Type, outcome audit.Outcome, reason string, data any)) *Ledger {
	return &Ledger{emit: emit, limit: rate.NewLimiter(eventsPerSecond, eventsAtOnce), sums: map[audit.ProcessSum]int{}}
}

// Take records what a process did, or counts it. detail adds to p what is worth the effort only when
// there is a record of its own; nil is nothing.
func (l *Ledger) Take(what audit.Type, p audit.Process, detail func(*audit.Process)) {
	p.Exe = audit.Shorten(p.Exe, 1024)
	if !l.limit.Allow() {
		if len(l.sums) >= maxSums {
			p.Exe = ""
		}
		l.sums[audit.ProcessSum{Type: what, Exe: p.Exe, Call: p.Call}]++
		return
	}
	if detail != nil {
		begin := time.Now()
		detail(&p) // which may read a whole program
		p.Ago += time.Since(begin).Microseconds()
	}
	outcome := audit.OK
	if p.Code != nil && *p.Code != 0 || p.Error != "" {
		outcome = audit.Failed
	}
	l.emit(what, outcome, "", p)
}

// Sum records what was counted, and that of all events until now so many were lost.
func (l *Ledger) Sum(lost uint64) {
	for s, n := range l.sums {
		s.Count = n
		l.emit(audit.ProcSum, audit.OK, "", s)
	}
	clear(l.sums)
	if lost > l.told {
		l.Gap("there were too many at once", lost-l.told)
		l.told = lost
	}
}

// Gap records that something was not seen, and how many events it was unless that is 0.
func (l *Ledger) Gap(reason string, count uint64) {
	data := map[string]any{"source": "processes"}
	if count > 0 {
		data["count"] = count
	}
	l.emit(audit.Gap, audit.OK, reason, data)
}

// Ended adds how a process ended.
func Ended(p *audit.Process, status syscall.WaitStatus) {
	if status.Signaled() {
		p.Signal = unix.SignalName(status.Signal())
		return
	}
	code := status.ExitStatus()
	p.Code = &code
}

// Args adds arguments; cut says that there were more.
func Args(p *audit.Process, argv []string, cut bool) {
	p.Argv, p.Cut = audit.Fit(argv, 12<<10)
	p.Cut = p.Cut || cut
}

// Ago is how many microseconds ago a time of the monotonic clock was.
func Ago(at time.Duration) int64 {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0
	}
	return max((time.Duration(now.Nano()) - at).Microseconds(), 0)
}
