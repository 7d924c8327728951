package local

import (
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/process/ledger"
	"github.com/berm-sandbox/berm/internal/kernel/notify"
)

// processes records what runs inside one run, as its processes ask for it.
type processes struct {
	ledger *ledger.Ledger
	hashes ledger.Hashes
	summed time.Time
	ending atomic.Bool

	mu       sync.Mutex
	listener *notify.Listener // nil when there is none
}

// endTime is how long the end of a run waits for the records of its processes.
const endTime = 500 * time.Millisecond

// watch returns what records the processes of a run, or nil when they cannot be.
func (j *records) watch() *processes {
	p := &processes{ledger: ledger.New(func(what audit.Type, outcome audit.Outcome, reason string, data any) {
		r := j.record(what, outcome, reason, data)
		r.Actor, r.Src = audit.Actor{Type: "system"}, "seccomp"
		j.add(r, false)
	})}
	if err := notify.Check(); err != nil {
		p.ledger.Gap(err.Error(), 0)
		return nil
	}
	return p
}

// listen answers on a listener, or records why there is none.
func (p *processes) listen(listener *os.File, refused string) {
	if listener == nil {
		p.ledger.Gap("the kernel refused a listener: "+refused, 0)
		return
	}
	p.summed = time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.listener = notify.Listen(listener, func(e notify.Event) {
		p.ledger.Heard(e, &p.hashes, p.ending.Load)
		if time.Since(p.summed) > time.Second {
			p.summed = time.Now()
			p.ledger.Sum(0)
		}
	})
}

// finish records what is left when the last process has ended.
func (p *processes) finish() {
	p.mu.Lock()
	l := p.listener
	p.mu.Unlock()
	if l == nil {
		return
	}
	p.ending.Store(true)
	select {
	case <-l.Done():
		p.ledger.Sum(l.Lost())
	case <-time.After(endTime): // it writes to the ledger
	}
}
