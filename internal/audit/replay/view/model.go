// Package view shows a timeline in a terminal: one clock, and a pane for each thing that
// happens on it.
package view

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/berm-sandbox/berm/internal/audit/replay"
)

// pane is a part of the view.
type pane int

const (
	terminalPane pane = iota
	processPane
	filePane
	networkPane
	credentialPane
	eventPane
	panes
)

var titles = [panes]string{"Terminal", "Processes", "Files", "Network", "Credentials", "Events"}

// lanes are what the panes show of; all events are in the last one.
var lanes = [panes]string{replay.Output, replay.Proc, replay.Files, replay.Network, replay.Credentials, ""}

// Options are what a replay begins with.
type Options struct {
	From  time.Time // the zero time is the start
	Speed float64
	Lanes []string // none: all
}

// linger is how long a process that ended is still shown, in seconds of the viewer.
const linger = 2 * time.Second

// idle is how long nothing may happen before the clock jumps to what happens next.
const idle = 2 * time.Second

// model is the state of the view. It knows no terminal.
type model struct {
	t       *replay.Timeline
	only    []string
	shown   []pane
	now     time.Time
	playing bool
	skip    bool // over what is idle
	speed   float64
	focus   int // in shown
	zoom    bool
	diff    *replay.File
	help    bool
	chosen  *replay.Command // nil: the one that Showing says
	scroll  [panes]int      // lines from the end, or from the selected one
	pick    int             // of the files

	moments []time.Time // at which something happens, output included
	player  *replay.Player
	played  *replay.Command
	tree    []replay.Node
	treeAt  time.Time
	files   []replay.File
	filesAt int
	w, h    int
}

func newModel(t *replay.Timeline, o Options) *model {
	m := &model{t: t, only: o.Lanes, now: t.Start, speed: cmp.Or(o.Speed, 1), playing: true, skip: true, filesAt: -1}
	if o.From.After(t.Start) {
		m.now = o.From
	}
	for p := range panes {
		if len(o.Lanes) == 0 || p == eventPane || slices.Contains(o.Lanes, lanes[p]) || p == terminalPane && slices.Contains(o.Lanes, replay.Exec) {
			m.shown = append(m.shown, p)
		}
	}
	for _, e := range t.Events {
		if m.has(e) {
			m.moments = append(m.moments, e.Time)
		}
	}
	for _, c := range t.Commands {
		if c.Kept() > maxMoments {
			continue
		}
		frames, _ := t.Frames(c) // shown when its turn comes
		for _, f := range frames {
			m.moments = append(m.moments, c.Start.Add(f.At))
		}
	}
	slices.SortFunc(m.moments, time.Time.Compare)
	return m
}

// has says whether an event is among those that are shown.
func (m *model) has(e *replay.Event) bool {
	return len(m.only) == 0 || slices.Contains(m.only, replay.Lane(e.Type))
}

// tick moves the clock by a time of the viewer.
func (m *model) tick(d time.Duration) {
	if !m.playing {
		return
	}
	next := m.now.Add(time.Duration(float64(d) * m.speed))
	if m.skip {
		if coming, ok := m.after(m.now); ok && !m.chatty() && coming.Sub(m.now) > time.Duration(float64(idle)*m.speed) {
			next = coming.Add(-time.Duration(float64(idle) / 4 * m.speed))
		}
	}
	m.seek(next)
	if !m.now.Before(m.t.End) {
		m.playing = false
	}
}

// maxMoments bounds the output whose frames are looked at before they are shown, in bytes.
const maxMoments = 4 << 20

// chatty says that a command runs of whose output it is not known when it came.
func (m *model) chatty() bool {
	c := m.command()
	return c != nil && c.Kept() > maxMoments && c.End.After(m.now)
}

// after is the next moment after a time.
func (m *model) after(t time.Time) (time.Time, bool) {
	i, _ := slices.BinarySearchFunc(m.moments, t, func(a, b time.Time) int {
		if a.After(b) {
			return 1
		}
		return -1
	})
	if i == len(m.moments) {
		return time.Time{}, false
	}
	return m.moments[i], true
}

func (m *model) seek(t time.Time) {
	if t.Before(m.t.Start) {
		t = m.t.Start
	}
	if t.After(m.t.End) {
		t = m.t.End
	}
	m.now = t
}

// pane is the one with the focus.
func (m *model) pane() pane { return m.shown[m.focus] }

// eventsOf are all events of a pane.
func (m *model) eventsOf(p pane, until time.Time) []*replay.Event {
	if p == eventPane {
		return m.t.Until(until)
	}
	lane := lanes[p]
	if p == terminalPane {
		lane = replay.Exec
	}
	return m.t.Of(lane, until)
}

// step goes to the next or the last of some events that is shown and counts, and returns it; nil
// if there is none.
func (m *model) step(all []*replay.Event, forward bool, counts func(*replay.Event) bool) *replay.Event {
	there := func(e *replay.Event) bool {
		return m.has(e) && counts(e) && (forward && e.Time.After(m.now) || !forward && e.Time.Before(m.now))
	}
	var found *replay.Event
	if i := slices.IndexFunc(all, there); forward && i >= 0 {
		found = all[i]
	}
	if !forward {
		for _, e := range slices.Backward(all) {
			if there(e) {
				found = e
				break
			}
		}
	}
	if found != nil {
		m.seek(found.Time)
	}
	return found
}

// show gives the focus to the pane that tells an event, unless the one that has it does.
func (m *model) show(e *replay.Event) {
	if m.pane() == eventPane {
		return
	}
	at := eventPane
	for p := range eventPane {
		if lanes[p] == replay.Lane(e.Type) || p == terminalPane && replay.Lane(e.Type) == replay.Exec {
			at = p
		}
	}
	i := slices.Index(m.shown, at)
	if i < 0 {
		i = slices.Index(m.shown, eventPane)
	}
	m.focus, m.diff = i, nil
}

// speeds that the keys go through.
var speeds = []float64{0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256}

func (m *model) faster(by int) {
	i, _ := slices.BinarySearch(speeds, m.speed)
	m.speed = speeds[min(max(i+by, 0), len(speeds)-1)]
}

// key carries out a key, by its name, and says whether to go on.
func (m *model) key(name string) bool {
	m.refresh()
	if m.help {
		m.help = false
		return name != "q"
	}
	seconds := func(n int) { m.seek(m.now.Add(time.Duration(n) * time.Second)) }
	switch name {
	case "q", "Ctrl-C":
		return false
	case "Esc":
		switch {
		case m.diff != nil:
			m.diff = nil
			m.scroll[filePane] = 0
		case m.zoom:
			m.zoom = false
		default:
			return false
		}
	case " ":
		if !m.playing && !m.now.Before(m.t.End) {
			m.seek(m.t.Start)
		}
		m.playing = !m.playing
	case "Right":
		seconds(5)
	case "Left":
		seconds(-5)
	case ">":
		seconds(60)
	case "<":
		seconds(-60)
	case "Home":
		m.seek(m.t.Start)
	case "End":
		m.seek(m.t.End)
	case "n", "N":
		m.step(m.eventsOf(m.pane(), m.t.End), name == "n", func(*replay.Event) bool { return true })
	case "d", "D":
		if m.step(m.eventsOf(m.pane(), m.t.End), name == "d", (*replay.Event).Bad) == nil {
			if e := m.step(m.t.Events, name == "d", (*replay.Event).Bad); e != nil {
				m.show(e)
			}
		}
	case "+", "=":
		m.faster(1)
	case "-":
		m.faster(-1)
	case "i":
		m.skip = !m.skip
	case "c", "C":
		m.choose(name == "c")
	case "Tab", "Backtab":
		by := 1
		if name == "Backtab" {
			by = len(m.shown) - 1
		}
		m.focus = (m.focus + by) % len(m.shown)
		m.diff = nil
	case "1", "2", "3", "4", "5", "6":
		if i := slices.Index(m.shown, pane(name[0]-'1')); i >= 0 {
			m.focus, m.diff = i, nil
		}
	case "Enter":
		switch {
		case m.diff != nil:
			m.diff, m.scroll[filePane] = nil, 0
		case m.pane() == filePane && len(m.files) > 0:
			file := m.files[min(m.pick, len(m.files)-1)]
			m.diff, m.scroll[filePane], m.playing = &file, 0, false
		default:
			m.zoom = !m.zoom
		}
	case "Up", "Down", "PgUp", "PgDn":
		m.move(map[string]int{"Up": -1, "Down": 1, "PgUp": -10, "PgDn": 10}[name])
	case "?", "h":
		m.help = true
	}
	return true
}

// move scrolls the focused pane, or picks a file.
func (m *model) move(lines int) {
	p := m.pane()
	if p == filePane && m.diff == nil {
		m.pick = max(0, min(m.pick+lines, len(m.files)-1))
		return
	}
	if p == filePane || p == processPane {
		lines = -lines // from the start
	}
	m.scroll[p] = max(0, m.scroll[p]-lines)
}

// choose goes through the commands that have begun; beyond the last one the clock chooses.
func (m *model) choose(forward bool) {
	var begun []*replay.Command
	for _, c := range m.t.Commands {
		if !c.Start.After(m.now) {
			begun = append(begun, c)
		}
	}
	i := slices.Index(begun, m.chosen) // -1: the clock chooses
	if forward {
		i++
	} else if i--; i < -1 {
		i = len(begun) - 1
	}
	m.chosen = nil
	if i >= 0 && i < len(begun) {
		m.chosen = begun[i]
	}
	m.scroll[terminalPane] = 0
}

// command is the one whose screen is shown.
func (m *model) command() *replay.Command {
	if m.chosen != nil {
		return m.chosen
	}
	return m.t.Showing(m.now)
}

// status is the state of the clock.
func (m *model) status() string {
	state := "paused"
	if m.playing {
		state = "playing"
	}
	text := fmt.Sprintf("%s  %s / %s  %gx", state, m.t.Clock(m.now), m.t.Clock(m.t.End), m.speed)
	if m.skip {
		text += ", idle skipped"
	}
	return text
}
