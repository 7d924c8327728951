// Package asking lets a person answer in one terminal what a run in another asks. The run has
// its terminal in common with the command inside, which could imitate the question or read the
// answer: nothing is ever asked there.
package asking

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/local/session"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/service"
)

// Run is who asks.
type Run struct {
	Sandbox berm.SandboxID `json:"sandbox"`
	Command []string       `json:"command"`
	Project string         `json:"project"`
}

// Message is what a run tells whoever answers: a question, or that one is closed.
type Message struct {
	Run      Run             `json:"run"`
	Question egress.Question `json:"question"`
	Reason   string          `json:"reason,omitempty"` // of the rule
	Deadline time.Time       `json:"deadline,omitzero"`
	// Closed says how the question ended: answered, or late.
	Closed string `json:"closed,omitempty"`
}

// How a question ends.
const (
	ClosedAnswered = "answered"
	ClosedLate     = "late"
)

// dir is where the doors of a user's runs are; nobody else comes in, and no sandbox sees it.
func dir() (string, error) {
	state, err := session.StateDir()
	return filepath.Join(state, "ask"), err
}

// Door is where a run is asked for its questions. Its methods are safe for concurrent use.
type Door struct {
	run    Run
	listen *net.UnixListener
	path   string
	answer func(egress.Reply) error

	mu     sync.Mutex
	open   map[egress.Question]*opened
	guests map[*service.Wire]*net.UnixConn
	closed bool
	done   sync.WaitGroup
}

type opened struct {
	message Message
	timer   *time.Timer
}

// Open opens the door of a run. answer is called with each answer to an open question, one at
// a time for a question.
func Open(run Run, answer func(egress.Reply) error) (*Door, error) {
	dir, err := dir()
	if err != nil {
		return nil, err
	}
	failed := func(err error) error {
		return berm.Errorf(berm.Internal, "take answers to the policy's questions: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, failed(err)
	}
	d := &Door{
		run: run, path: filepath.Join(dir, string(run.Sandbox)), answer: answer,
		open: map[egress.Question]*opened{}, guests: map[*service.Wire]*net.UnixConn{},
	}
	err = short(d.path, func(path string) error {
		d.listen, err = net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		return err
	})
	if err != nil {
		return nil, failed(err)
	}
	d.listen.SetUnlinkOnClose(false) // by its other name
	d.done.Go(d.welcome)
	return d, nil
}

// short calls do with a path to the same file that fits into the address of a socket.
func short(path string, do func(string) error) error {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer dir.Close()
	return do("/proc/self/fd/" + strconv.Itoa(int(dir.Fd())) + "/" + filepath.Base(path))
}

// Ask asks whoever is there and whoever comes before the event's time is over.
func (d *Door) Ask(e egress.Event) {
	q, patience := e.Question(), time.Duration(e.Duration*float64(time.Second))
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || d.open[q] != nil {
		return
	}
	o := &opened{message: Message{Run: d.run, Question: q, Reason: e.Detail, Deadline: time.Now().Add(patience).UTC()}}
	o.timer = time.AfterFunc(patience, func() { d.close(q, o, ClosedLate) })
	d.open[q] = o
	d.tell(o.message)
}

// tell tells every guest. The caller holds the lock.
func (d *Door) tell(m Message) {
	for guest, conn := range d.guests {
		_ = conn.SetWriteDeadline(time.Now().Add(time.Second)) // nobody who does not read holds up the others
		if guest.Send(m) != nil {
			conn.Close()
		}
	}
}

// close ends a question, and says whether it was open.
func (d *Door) close(q egress.Question, o *opened, how string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.open[q] != o || o == nil {
		return false
	}
	delete(d.open, q)
	o.timer.Stop()
	m := o.message
	m.Closed = how
	d.tell(m)
	return true
}

// welcome serves those who come to answer.
func (d *Door) welcome() {
	for {
		conn, err := d.listen.AcceptUnix()
		if err != nil {
			return
		}
		d.done.Go(func() { d.serve(conn) })
	}
}

func (d *Door) serve(conn *net.UnixConn) {
	guest := service.NewWire(conn)
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		conn.Close()
		return
	}
	d.guests[guest] = conn
	_ = conn.SetWriteDeadline(time.Now().Add(time.Second))
	for _, o := range d.open {
		_ = guest.Send(o.message)
	}
	d.mu.Unlock()
	defer func() {
		d.mu.Lock()
		delete(d.guests, guest)
		d.mu.Unlock()
		conn.Close()
	}()
	for {
		var r egress.Reply
		if guest.Receive(&r) != nil {
			return
		}
		d.mu.Lock()
		o := d.open[r.Question]
		d.mu.Unlock()
		if d.close(r.Question, o, ClosedAnswered) && d.answer(r) != nil {
			return
		}
	}
}

// Close closes the door. Questions that are open have no answer.
func (d *Door) Close() {
	d.mu.Lock()
	d.closed = true
	for _, o := range d.open {
		o.timer.Stop()
	}
	for guest := range d.guests {
		_ = guest.Close()
	}
	d.mu.Unlock()
	d.listen.Close()
	os.Remove(d.path)
	d.done.Wait()
}

// Visit connects to the doors of all runs of this user that are open now and that known does
// not know. A door whose run is gone is taken away.
func Visit(known func(name string) bool) (map[string]*service.Wire, error) {
	dir, err := dir()
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) {
		return nil, berm.Errorf(berm.Internal, "look for runs that ask: %w", err)
	}
	found := map[string]*service.Wire{}
	for _, e := range entries {
		name := e.Name()
		if _, err := berm.ParseSandboxID(name); err != nil || known(name) {
			continue
		}
		path := filepath.Join(dir, name)
		_ = short(path, func(address string) error {
			conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: address, Net: "unix"})
			if err == nil {
				found[name] = service.NewWire(conn)
			} else if errors.Is(err, unix.ECONNREFUSED) {
				os.Remove(path)
			}
			return nil
		})
	}
	return found, nil
}
