// Package process records the processes inside sandboxes, whoever starts them: forks,
// executions with the hash of what is executed, and ends, as the host's kernel sees them.
package process

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/process/ledger"
	"github.com/berm-sandbox/berm/internal/cleanup"
	"github.com/berm-sandbox/berm/internal/kernel/seccomp"
	"github.com/berm-sandbox/berm/internal/kernel/trace"
)

const (
	// queued is how many events may wait for their hashes and records.
	queued = 8192
	// gathered is how long they wait for each other: to wake somebody for each of them would
	// cost more than all else.
	gathered = 25 * time.Millisecond
	// endTime is how long the end of a sandbox waits for the records of its processes'.
	endTime = 300 * time.Millisecond
)

// Collector makes records of the processes of all sandboxes of a server.
type Collector struct {
	audit  audit.Emitter
	log    *slog.Logger
	tracer *trace.Tracer
	calls  map[int]string // that are recorded
	hashes hashes
	work   sync.WaitGroup

	queueing sync.Mutex
	queue    []item
	ready    chan struct{} // has one when the queue is to be worked off
	over     chan struct{} // closed when nothing more comes

	telling sync.Mutex
	records []audit.Record // that are not emitted yet
	noted   []time.Time    // when each of them was

	mu      sync.Mutex
	boxes   map[uint32]*box // by pid namespace
	waiting []chan struct{} // for what is in the ring now to be recorded
}

// box is a sandbox that is followed.
type box struct {
	id    berm.SandboxID
	first berm.First
	ids   []idRange
	over  atomic.Bool   // its files are not to be opened or read any more: it is taken away
	full  atomic.Uint64 // events that found no room in the queue
	mu    sync.Mutex
	root  *os.File // its root directory, for files whose process is gone; nil when it is over
	// space is its pid namespace: while it is open no other has its number, which the kernel gives to
	// the next namespace as soon as one is gone, whose processes would be taken for this one's.
	space *os.File

	// Of the goroutine that reads events: the host's ids of processes, by those inside.
	hosts map[int]int

	// Of the goroutine that makes records.
	ledger *ledger.Ledger
}

// end lets go of the files of a sandbox.
func (b *box) end() {
	b.over.Store(true)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.root != nil {
		b.root.Close()
		b.root = nil
	}
}

type idRange struct{ inside, outside, count uint32 }

// item is an event on its way to a record.
type item struct {
	trace.Event
	box  *box
	exe  *executable // of an execution
	cwd  string
	done []chan struct{} // to be closed when all before is recorded; the rest is empty then
}

// New begins to collect, the system calls with these names too. Kind Unsupported names what the host
// lacks; Invalid a system call that is not there.
func New(emitter audit.Emitter, log *slog.Logger, calls ...string) (*Collector, error) {
	names := map[int]string{}
	for _, name := range calls {
		n, ok := seccomp.Number(name)
		if !ok {
			return nil, berm.Errorf(berm.Invalid, "there is no system call %q on this machine", name)
		}
		names[n] = name
	}
	tracer, err := trace.New(slices.Sorted(maps.Keys(names))...)
	if err != nil {
		return nil, err
	}
	c := &Collector{
		audit: emitter, log: log, tracer: tracer, calls: names, ready: make(chan struct{}, 1), over: make(chan struct{}),
		boxes: map[uint32]*box{},
	}
	c.work.Go(c.read)
	c.work.Go(c.record)
	return c, nil
}

// Close ends it.
func (c *Collector) Close() {
	c.mu.Lock()
	for _, b := range c.boxes {
		b.end()
		b.space.Close()
	}
	clear(c.boxes)
	err := c.tracer.Close()
	c.mu.Unlock()
	if err != nil {
		c.log.Error("closing failed", "what", "process records", "error", err)
	}
	c.work.Wait()
}

// Follow begins with a sandbox. late says that it has run unseen until now.
func (c *Collector) Follow(id berm.SandboxID, first *berm.First, late bool) error {
	if first == nil {
		return berm.Errorf(berm.Unsupported, "the processes of sandbox %s are not the host's", id)
	}
	b := &box{id: id, first: *first, hosts: map[int]int{}, ledger: ledger.New(c.later(id))}
	var err error
	if b.root, err = os.OpenFile(fmt.Sprintf("/proc/%d/root", first.PID), unix.O_PATH|unix.O_DIRECTORY, 0); err != nil {
		return berm.Errorf(berm.NotFound, "sandbox %s has no first process: %w", id, err)
	}
	cu := cleanup.Make(b.end)
	defer cu.Clean()
	if b.space, err = spaceOf(first); err != nil {
		return err
	}
	cu.Add(func() { b.space.Close() })
	if b.ids, err = readIDs(first.PID); err != nil {
		return err
	}
	c.mu.Lock()
	c.boxes[first.Namespace] = b
	c.mu.Unlock()
	if err = c.tracer.Follow(first.Namespace); err != nil {
		c.mu.Lock()
		delete(c.boxes, first.Namespace)
		c.mu.Unlock()
		return err
	}
	cu.Release()
	if late {
		b.ledger.Gap("no server ran", 0)
	}
	return nil
}

// spaceOf opens the pid namespace of a first process.
func spaceOf(first *berm.First) (*os.File, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/ns/pid", first.PID))
	if err != nil {
		return nil, berm.Errorf(berm.NotFound, "the pid namespace of process %d: %w", first.PID, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil || uint32(st.Ino) != first.Namespace {
		f.Close()
		return nil, berm.Errorf(berm.NotFound, "process %d is none of the sandbox", first.PID)
	}
	return f, nil
}

// readIDs reads which user ids of the host are which inside.
func readIDs(pid int) (ids []idRange, err error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/uid_map", pid))
	if err != nil {
		return nil, berm.Errorf(berm.NotFound, "the ids of process %d: %w", pid, err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var r idRange
		if _, err := fmt.Sscan(lines.Text(), &r.inside, &r.outside, &r.count); err == nil {
			ids = append(ids, r)
		}
	}
	return ids, nil
}

// inside turns a user id of the host into that inside, if it has one.
func (b *box) inside(uid uint32) int {
	for _, r := range b.ids {
		if uid >= r.outside && uid-r.outside < r.count {
			return int(r.inside + uid - r.outside)
		}
	}
	return int(uid)
}

// Forget ends it, when the sandbox has ended and what is known of its processes is recorded.
func (c *Collector) Forget(id berm.SandboxID) {
	done := make(chan struct{})
	c.mu.Lock()
	var b *box
	for _, of := range c.boxes {
		if of.id == id {
			b = of
		}
	}
	if b != nil {
		c.waiting = append(c.waiting, done)
	}
	c.mu.Unlock()
	if b == nil {
		return
	}
	defer b.end()
	if c.tracer.Flush() == nil {
		select {
		case <-done:
		case <-c.over:
		case <-time.After(endTime): // what is left of it must not be taken for another's
			c.work.Go(func() {
				select {
				case <-done:
				case <-c.over:
				}
				c.remove(b)
			})
			return
		}
	}
	c.remove(b)
}

// remove lets the number of a sandbox's pid namespace go, unless all is closed.
func (c *Collector) remove(b *box) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.boxes[b.first.Namespace] != b {
		return
	}
	c.tracer.Forget(b.first.Namespace)
	delete(c.boxes, b.first.Namespace)
	b.space.Close()
}

func (c *Collector) find(namespace uint32) *box {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.boxes[namespace]
}

// read takes events from the kernel and looks at their processes while these are still there.
func (c *Collector) read() {
	defer close(c.over)
	for {
		e, err := c.tracer.Read()
		if errors.Is(err, trace.ErrFlushed) {
			c.mu.Lock()
			done := c.waiting
			c.waiting = nil
			c.mu.Unlock()
			c.put(item{done: done})
			continue
		}
		if err != nil {
			return // closed
		}
		b := c.find(e.Namespace)
		if b == nil {
			continue
		}
		i := item{Event: e, box: b}
		b.note(e)
		switch {
		case e.Kind == trace.Exec:
			i.exe, i.cwd = c.hashes.look(b, e)
		case e.Kind == trace.Exit && e.PID == 1:
			b.end()
		}
		c.put(i)
		if b.over.Load() { // what is open of it is to be closed soon
			c.wake()
		}
	}
}

// maxHosts bounds the processes whose ids are noted: of some the end may have been lost.
const maxHosts = 10_000

// note keeps which process of the host is which inside, while it is there.
func (b *box) note(e trace.Event) {
	if e.Kind == trace.Exit {
		delete(b.hosts, e.PID)
		return
	}
	if len(b.hosts) >= maxHosts {
		clear(b.hosts)
	}
	b.hosts[e.PID] = e.Host
}

// put queues an item, or counts it when there is no room.
func (c *Collector) put(i item) {
	c.queueing.Lock()
	n := len(c.queue)
	if n < queued || i.done != nil {
		c.queue = append(c.queue, i)
	} else {
		i.box.full.Add(1)
		i.close()
	}
	c.queueing.Unlock()
	switch {
	case i.done != nil || n == queued/2:
		c.wake()
	case n == 0:
		time.AfterFunc(gathered, c.wake)
	}
}

// wake has the queue worked off.
func (c *Collector) wake() {
	select {
	case c.ready <- struct{}{}:
	default:
	}
}

func (i *item) close() {
	if i.exe != nil && i.exe.file != nil {
		i.exe.file.Close()
		i.exe.file = nil
	}
}

// record makes records of events, and once a second sums of what was too much.
func (c *Collector) record() {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-c.ready:
			c.workOff()
		case <-c.over:
			c.workOff()
			return
		case <-tick.C:
			c.sums()
		}
	}
}

// workOff makes records of what is queued.
func (c *Collector) workOff() {
	c.queueing.Lock()
	items := c.queue
	c.queue = nil
	c.queueing.Unlock()
	for _, i := range items {
		if i.box != nil {
			c.take(i)
		}
		if len(i.done) > 0 {
			c.sums()
		}
		for _, done := range i.done {
			close(done)
		}
	}
	c.emit()
}

// sums records what was counted of all sandboxes.
func (c *Collector) sums() {
	c.mu.Lock()
	boxes := slices.Collect(maps.Values(c.boxes))
	c.mu.Unlock()
	for _, b := range boxes {
		b.ledger.Sum(c.tracer.Lost(b.first.Namespace) + b.full.Load())
	}
	c.emit()
}

// mostRecords are emitted at once.
const mostRecords = 500

// later is a ledger's way to the log: its records wait for others, since the log's answer may take longer than
// all else.
func (c *Collector) later(id berm.SandboxID) func(audit.Type, audit.Outcome, string, any) {
	return func(what audit.Type, outcome audit.Outcome, reason string, data any) {
		c.telling.Lock()
		c.records = append(c.records, recordOf(id, "kernel", what, outcome, reason, data))
		c.noted = append(c.noted, time.Now())
		full := len(c.records) >= mostRecords
		c.telling.Unlock()
		if full {
			c.emit()
		}
	}
}

// emit gives the log what is noted.
func (c *Collector) emit() {
	c.telling.Lock()
	defer c.telling.Unlock() // those of one sandbox stay in order
	if len(c.records) == 0 {
		return
	}
	for i, r := range c.records {
		if p, ok := r.Data.(audit.Process); ok { // whose time is counted from the record's
			p.Ago += time.Since(c.noted[i]).Microseconds()
			c.records[i].Data = p
		}
	}
	if err := audit.EmitAll(c.audit, c.records); err != nil {
		c.log.Error("audit records lost", "what", "process records", "count", len(c.records), "error", err)
	}
	clear(c.records)
	c.records, c.noted = c.records[:0], c.noted[:0]
}

var types = map[trace.Kind]audit.Type{trace.Exec: audit.ProcExec, trace.Fork: audit.ProcFork, trace.Exit: audit.ProcExit, trace.Call: audit.ProcCall}

func (c *Collector) take(i item) {
	defer i.close()
	b := i.box
	p := audit.Process{PID: i.PID, PPID: i.Parent, Host: i.Host, UID: b.inside(i.UID), Ago: ledger.Ago(i.At)}
	switch i.Kind {
	case trace.Exec:
		p.Exe = i.Name
		if i.exe != nil {
			p.Exe = i.exe.path
			if p.Exe == "" {
				p.Exe = i.Name
			}
		} else if strings.HasPrefix(i.File, "/") && path.Base(i.File) == i.Name {
			p.Exe = i.File
		}
	case trace.Exit:
		ledger.Ended(&p, syscall.WaitStatus(i.Status))
	case trace.Call:
		p.Call = c.calls[i.Number]
		// The kernel's errors are the last 4095 numbers; some of them programs never see.
		if i.Result < 0 && i.Result >= -4095 {
			p.Error = cmp.Or(unix.ErrnoName(syscall.Errno(-i.Result)), strconv.FormatInt(-i.Result, 10))
		}
	}
	b.ledger.Take(types[i.Kind], p, func(p *audit.Process) {
		if i.Kind != trace.Exec {
			return
		}
		if i.exe != nil {
			p.SHA256 = c.hashes.sum(b, i.exe)
		}
		p.Cwd = audit.Shorten(i.cwd, 1024)
		ledger.Args(p, strings.Split(strings.TrimSuffix(string(i.Args), "\x00"), "\x00"), i.ArgLen > len(i.Args))
	})
}

// emitTo is a ledger's way to the log.
func emitTo(emitter audit.Emitter, log *slog.Logger, id berm.SandboxID, source string) func(audit.Type, audit.Outcome, string, any) {
	return func(what audit.Type, outcome audit.Outcome, reason string, data any) {
		if err := emitter.Emit(recordOf(id, source, what, outcome, reason, data)); err != nil {
			log.Error("audit record lost", "sandbox", id, "type", what, "error", err)
		}
	}
}

func recordOf(id berm.SandboxID, source string, what audit.Type, outcome audit.Outcome, reason string, data any) audit.Record {
	return audit.Record{
		Sandbox: id, Actor: audit.Actor{Type: "system"}, Type: what, Src: source, Trust: audit.TrustHost,
		Outcome: outcome, Reason: reason, Data: data,
	}
}
