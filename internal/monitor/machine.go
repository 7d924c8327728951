package monitor

import (
	"encoding/json"
	"errors"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
)

// Wall is what a level does for one living sandbox.
type Wall interface {
	// Freeze stops every process where it is; Thaw lets them go on.
	Freeze() error
	Thaw() error
	// Settle does, while processes run, what a snapshot into a directory would else do while they
	// stand still, and refuses what cannot be saved.
	Settle(dir string) error
	// Snapshot saves the files of frozen processes into a directory.
	Snapshot(dir string) (berm.Saved, error)
	// Version is that of berm.Sandbox.
	Version() (string, error)
	// Checkpoint saves files and memory of processes that are not frozen: the level stops them
	// itself, and lets them go on.
	Checkpoint(dir string) (berm.Saved, error)
	Usage() (berm.Usage, error)
	// Policy is a berm.Policy as JSON: the monitor passes on what it was given.
	Policy() json.RawMessage
	// Kill begins the end of every process. It does not wait, and works on frozen
	// processes too.
	Kill()
}

// Machine is the state machine of one sandbox. It keeps the deadline by itself.
type Machine struct {
	wall Wall
	// still is held while the processes are being frozen or thawed, or have to stay as they are.
	still sync.Mutex

	mu       sync.Mutex
	status   berm.Status
	reason   berm.Reason // why it is being killed; "" while nobody asked
	timer    *time.Timer
	watchers map[chan berm.Status]bool
	dead     chan struct{} // closed when status.Exit is set
}

// NewMachine starts the life of a sandbox that runs behind wall, without a deadline.
func NewMachine(wall Wall, onDeadline berm.OnDeadline) *Machine {
	return &Machine{
		wall:     wall,
		status:   berm.Status{State: berm.Running, OnDeadline: onDeadline, Agent: 1},
		watchers: map[chan berm.Status]bool{},
		dead:     make(chan struct{}),
	}
}

// Status is the state now.
func (m *Machine) Status() berm.Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.status
}

// Pause freezes the sandbox and takes its deadline away.
func (m *Machine) Pause() error {
	if err := m.enter(berm.Pausing); err != nil {
		return err
	}
	m.still.Lock()
	defer m.still.Unlock()
	err := m.wall.Freeze()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.status.State != berm.Pausing || m.reason != "" { // killed meanwhile
		return gone()
	}
	if err != nil {
		_ = m.wall.Thaw()
		m.become(berm.Running)
		m.setDeadline(m.status.Deadline)
		return err
	}
	m.setDeadline(time.Time{})
	m.become(berm.Paused)
	return nil
}

// Resume thaws the sandbox, which gets a new deadline.
func (m *Machine) Resume(deadline time.Time) error {
	if err := m.enter(berm.Resuming); err != nil {
		return err
	}
	m.still.Lock()
	defer m.still.Unlock()
	err := m.wall.Thaw()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.status.State != berm.Resuming || m.reason != "" {
		return gone()
	}
	if err != nil {
		m.become(berm.Paused)
		return err
	}
	m.setDeadline(deadline)
	m.become(berm.Running)
	return nil
}

// Snapshot saves the files into a directory, and with memory the processes too. A sandbox that
// runs stands still for it; pauses and deadlines that come meanwhile wait. Conflict during another
// one, or a transition.
func (m *Machine) Snapshot(dir string, memory bool) (saved berm.Saved, err error) {
	if !m.still.TryLock() {
		return saved, berm.Errorf(berm.Conflict, "another snapshot or a pause is under way")
	}
	defer m.still.Unlock()
	switch status := m.Status(); {
	case status.State == berm.Killed || m.Reason() != "":
		return saved, gone()
	case status.State == berm.Paused && !memory:
		return m.wall.Snapshot(dir)
	case status.State == berm.Paused:
		if err := m.wall.Thaw(); err != nil {
			return saved, err
		}
		saved, err = m.wall.Checkpoint(dir)
		saved.Stopped = 0
		return saved, m.orKill(err, m.wall.Freeze())
	case status.State != berm.Running:
		return saved, berm.Errorf(berm.Conflict, "the sandbox is %s", status.State)
	}
	if err := m.wall.Settle(dir); err != nil {
		return saved, m.orKill(err, nil)
	}
	if memory {
		saved, err = m.wall.Checkpoint(dir)
		return saved, m.orKill(err, nil)
	}
	begin := time.Now()
	if err = m.wall.Freeze(); err == nil {
		saved, err = m.wall.Snapshot(dir)
	} else if berm.KindOf(err) == berm.Unsupported { // nothing stands still, and what cannot freeze cannot thaw
		return saved, m.orKill(err, nil)
	}
	err = m.orKill(err, m.wall.Thaw())
	saved.Stopped = time.Since(begin)
	return saved, err
}

// orKill adds an error of going back to the state from before, with which a sandbox is of no use to
// anybody, and must not look as if it were well, to that of a snapshot.
func (m *Machine) orKill(err, back error) error {
	if back != nil && m.Reason() == "" {
		m.Kill(berm.ReasonCrash)
		err = errors.Join(err, back)
	}
	switch {
	case m.Reason() == "":
		return err
	case err == nil || berm.KindOf(err) == berm.NotFound:
		return gone()
	}
	return berm.Errorf(berm.NotFound, "the sandbox is dead: %w", err)
}

// SetDeadline moves the deadline; zero removes it. A paused sandbox has none.
func (m *Machine) SetDeadline(deadline time.Time) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.status.State == berm.Killed || m.reason != "":
		return gone()
	case m.status.State == berm.Running:
		m.setDeadline(deadline)
		m.publish()
		return nil
	}
	return berm.Errorf(berm.Conflict, "the sandbox is %s", m.status.State)
}

// Kill begins the end; a reason that was given before stays.
func (m *Machine) Kill(reason berm.Reason) {
	m.mu.Lock()
	if m.reason == "" {
		m.reason = reason
	}
	m.mu.Unlock()
	m.wall.Kill()
}

// Reason says why the sandbox is being killed, or "" when nobody asked for it.
func (m *Machine) Reason() berm.Reason {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.reason
}

// Died ends the machine. Everything of the sandbox is gone by now.
func (m *Machine) Died(exit berm.Exit) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.setDeadline(time.Time{})
	m.status.Exit = &exit
	m.become(berm.Killed)
	for w := range m.watchers {
		close(w)
	}
	m.watchers = nil
	close(m.dead)
}

// AgentStarted counts another start of the guest agent.
func (m *Machine) AgentStarted() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.status.Agent++
	m.publish()
}

// Wait returns when the sandbox is dead.
func (m *Machine) Wait() { <-m.dead }

// Watch returns a channel of every later status and a function that ends it. A
// watcher that does not read gets the newest status only; the last one is never
// lost.
func (m *Machine) Watch() (<-chan berm.Status, func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := make(chan berm.Status, 1)
	if m.watchers == nil { // dead
		w <- m.status
		close(w)
		return w, func() {}
	}
	m.watchers[w] = true
	return w, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.watchers, w)
	}
}

// enter begins a transition, or tells why it cannot be.
func (m *Machine) enter(next berm.State) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.status.State == berm.Killed || m.reason != "" {
		return gone()
	}
	if !m.status.State.CanBecome(next) {
		return berm.Errorf(berm.Conflict, "the sandbox is %s", m.status.State)
	}
	m.become(next)
	return nil
}

func (m *Machine) become(next berm.State) {
	m.status.State = next
	m.publish()
}

func (m *Machine) publish() {
	for w := range m.watchers {
		select {
		case <-w: // drop what was not read
		default:
		}
		w <- m.status
	}
}

// setDeadline arms the timer. The caller holds the lock.
func (m *Machine) setDeadline(deadline time.Time) {
	if m.timer != nil {
		m.timer.Stop()
		m.timer = nil
	}
	m.status.Deadline = deadline
	if !deadline.IsZero() {
		m.timer = time.AfterFunc(time.Until(deadline), func() { m.expire(deadline) })
	}
}

// expire acts on a deadline that passed, unless it was moved meanwhile. While a
// pause is under way it leaves the deadline to that pause: it removes it, or arms
// it again when it fails.
func (m *Machine) expire(deadline time.Time) {
	m.mu.Lock()
	current := m.status.Deadline.Equal(deadline) && m.status.State == berm.Running
	pause := m.status.OnDeadline == berm.PauseAtDeadline
	if current && !pause && m.reason == "" {
		m.reason = berm.ReasonTimeout // from now on nobody moves it
	}
	m.mu.Unlock()
	if !current {
		return
	}
	if pause {
		err := m.Pause()
		if err == nil || berm.KindOf(err) == berm.Conflict || berm.KindOf(err) == berm.NotFound {
			return
		}
		// What cannot be frozen must not run on past its deadline.
	}
	m.Kill(berm.ReasonTimeout)
}

func gone() error { return berm.Errorf(berm.NotFound, "the sandbox is dead") }
