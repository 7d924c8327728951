package writer

import (
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cleanup"
	"github.com/berm-sandbox/berm/internal/service"
)

// link is a process that writes the log, and the connections to it.
type link struct {
	process *service.Process
	wire    *service.Wire
	records *net.UnixConn
	log     *slog.Logger
	holds   func() ([]berm.SandboxID, error)

	mu      sync.Mutex
	asked   uint64
	waiting map[uint64]chan answer
	gone    chan struct{} // closed when no answer comes any more
}

// answer is a message with the file that came with it.
type answer struct {
	message
	file *os.File
}

// newLink starts the writer, which goes on after a record that is known, and returns when the log is
// open.
func newLink(c Config, anchors []*os.File, after int64) (_ *link, _ ready, err error) {
	var no ready
	program, err := c.Program()
	if err != nil {
		return nil, no, berm.Errorf(berm.Internal, "open the program of the audit log's writer: %w", err)
	}
	defer program.Close()
	dir, err := handOver(c.Dir)
	if err != nil {
		return nil, no, err
	}
	defer dir.Close()
	records, theirs, err := service.Connect()
	if err != nil {
		return nil, no, err
	}
	defer theirs.Close()
	cu := cleanup.Make(func() { records.Close() })
	defer cu.Clean()
	files := []*os.File{theirs, dir}
	settings := Settings{After: after, Wait: c.Wait, Keep: c.Keep, Limit: c.Limit, Anchors: len(anchors), Witnesses: c.Witnesses}
	process, err := service.Start(service.Program{
		File: program, Command: service.Auditd, Args: settings.args(), Files: append(files, anchors...), Ended: func(error) {},
	})
	if err != nil {
		return nil, no, err
	}
	k := &link{
		process: process, wire: service.NewWire(process.Conn), records: records, log: c.Log, holds: c.Holds,
		waiting: map[uint64]chan answer{}, gone: make(chan struct{}),
	}
	cu.Add(k.end)
	for {
		var m message
		if k.wire.Receive(&m) != nil {
			k.end()
			return nil, no, k.process.Err
		}
		switch {
		case m.Error != nil:
			return nil, no, m.Error.Err()
		case m.Ready == nil:
			k.say(m.Log)
			continue
		case m.Ready.Protocol != protocol:
			return nil, no, berm.Errorf(berm.Internal, "the writer of the audit log speaks protocol %d, not %d", m.Ready.Protocol, protocol)
		}
		cu.Release()
		go k.listen()
		return k, *m.Ready, nil
	}
}

// endPatience is how long a writer may take to end when nobody is there any more: it signs what it
// has.
const endPatience = 10 * time.Second

// end ends the writer, unless it has ended.
func (k *link) end() {
	_ = k.wire.Close() // it may have ended
	_ = k.records.Close()
	k.process.End(endPatience)
}

// over reports whether the process has ended.
func (k *link) over() bool {
	select {
	case <-k.process.Exited:
		return true
	default:
		return false
	}
}

func (k *link) say(text string) {
	if text != "" {
		k.log.Error("the writer of the audit log", "said", text)
	}
}

// listen takes what the writer says, until it ends. One that makes no sense is ended.
func (k *link) listen() {
	defer k.end()
	defer close(k.gone)
	for {
		var a answer
		if k.wire.Receive(&a.message) != nil {
			return
		}
		switch {
		case a.Log != "":
			k.say(a.Log)
		case a.Holds:
			go k.tellHolds(a.ID)
		default:
			if a.Name != "" { // else it is of the answer after this one, whose beginning the same read has seen
				a.file = k.wire.File()
			}
			k.mu.Lock()
			waits := k.waiting[a.ID]
			delete(k.waiting, a.ID)
			k.mu.Unlock()
			if waits != nil {
				waits <- a
			} else if a.file != nil {
				a.file.Close()
			}
		}
	}
}

// tellHolds answers which sandboxes are held.
func (k *link) tellHolds(id uint64) {
	m := message{ID: id, Holding: &holding{}}
	if k.holds != nil {
		held, err := k.holds()
		if m.Holding.Sandboxes = held; err != nil {
			m.Holding, m.Error = nil, service.Failed(err)
		}
	}
	_ = k.wire.Send(m) // a writer that is gone needs none
}

// ask asks the writer. lost says that it ended before it answered.
func (k *link) ask(m message) (a answer, lost bool, err error) {
	came := make(chan answer, 1)
	k.mu.Lock()
	k.asked++
	m.ID = k.asked
	k.waiting[m.ID] = came
	k.mu.Unlock()
	if err := k.wire.Send(m); err == nil {
		select {
		case a = <-came:
		case <-k.gone:
			select {
			case a = <-came: // the last that it said
			default:
				lost = true
			}
		}
	} else {
		lost = true
	}
	if lost {
		return a, true, berm.Errorf(berm.Unavailable, "the writer of the audit log was lost").
			WithHint("ask again in a moment: another one is started, and finishes what is on record")
	}
	if a.Error != nil {
		err = a.Error.Err()
	}
	return a, false, err
}
