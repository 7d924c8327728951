package view

import (
	"cmp"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/replay"
	"github.com/berm-sandbox/berm/internal/audit/replay/screen"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/terminal"
)

// canvas is what is drawn on. It gets characters that a terminal prints and nothing else.
type canvas interface {
	// put writes a character, with its marks, into a cell, or two if it is wide.
	put(x, y int, text string, style screen.Style)
}

const (
	red    screen.Color = 1 + 1
	green  screen.Color = 2 + 1
	yellow screen.Color = 3 + 1
	cyan   screen.Color = 6 + 1
	grey   screen.Color = 8 + 1
)

var (
	plain  = screen.Style{}
	dim    = screen.Style{Fg: grey}
	strong = screen.Style{Attr: screen.Bold}
	badly  = screen.Style{Fg: red, Attr: screen.Bold}
	well   = screen.Style{Fg: green}
)

// rect is a part of the canvas.
type rect struct{ x, y, w, h int }

// text writes a part of a line and returns what is left of it.
func (r rect) text(c canvas, x, y int, s string, style screen.Style) int {
	return r.raw(c, x, y, terminal.Escape(s), style)
}

// raw is text of what is safe.
func (r rect) raw(c canvas, x, y int, s string, style screen.Style) int {
	if y < 0 || y >= r.h {
		return x
	}
	cell := ""
	flush := func() {
		if cell != "" {
			w := terminal.Width(cell)
			if x+w <= r.w {
				c.put(r.x+x, r.y+y, cell, style)
			}
			x += w
		}
		cell = ""
	}
	for _, ch := range s {
		if terminal.Width(string(ch)) == 0 {
			if cell != "" && len(cell) < 32 {
				cell += string(ch)
			}
			continue
		}
		flush()
		if x >= r.w {
			return x
		}
		cell = string(ch)
	}
	flush()
	return x
}

// hints are the keys of the last line, the most wanted first; ? and q are always there.
func (m *model) hints(w int) string {
	all := []string{"space play", "tab pane", "←→ 5 s", "d denial or failure", "n event", "+- speed", "enter zoom", "c command"}
	switch {
	case m.diff != nil:
		all = []string{"esc back", "↑↓ scroll", "space play"}
	case m.pane() == filePane:
		all = append([]string{"↑↓ enter what changed"}, slices.DeleteFunc(all, func(h string) bool { return h == "enter zoom" })...)
	case m.zoom:
		all = append([]string{"esc back"}, slices.DeleteFunc(all, func(h string) bool { return h == "enter zoom" })...)
	case m.single():
		all = slices.DeleteFunc(all, func(h string) bool { return h == "enter zoom" })
	}
	const last = "? keys  q quit"
	text := ""
	for _, h := range all {
		if terminal.Width(text+h+"  "+last) > w {
			break
		}
		text += h + "  "
	}
	return text + last
}

// single says that there is place for one pane alone.
func (m *model) single() bool { return m.w < 90 || m.h < 20 }

var helpText = []string{
	"space      play, pause",
	"← →        5 seconds back, on         < >   a minute",
	"home end   to the start, to the end",
	"n N        next event, the one before, of the pane with the focus",
	"d D        next one that was denied or failed, the one before: of the pane",
	"           with the focus, or else of any, which gets the focus",
	"+ -        faster, slower             i     skip what is idle, or not",
	"tab 1-6    another pane",
	"enter      one pane alone, or not; in Files: what changed in the chosen file",
	"esc        back",
	"↑ ↓ pgup pgdn   scroll, or choose a file",
	"c C        another command's terminal; past the last one the clock chooses",
	"q          quit",
}

// draw shows the state on a canvas of a size.
func (m *model) draw(c canvas, w, h int) {
	m.w, m.h = w, h
	all := rect{0, 0, w, h}
	if w < 20 || h < 8 {
		all.text(c, 0, 0, "too small", plain)
		return
	}
	m.refresh()
	m.head(c, all)
	body := rect{0, 3, w, h - 4}
	all.text(c, 0, h-1, m.hints(w), dim)
	switch {
	case m.help:
		m.frame(c, body, "Keys", true)
		for i, line := range helpText {
			inner(body).text(c, 1, i+1, line, plain)
		}
	case m.zoom || m.diff != nil || m.single():
		m.one(c, body, m.pane())
	default:
		for p, r := range m.layout(body) {
			m.one(c, r, p)
		}
	}
}

// layout gives the shown panes their places: the terminal and the processes at the left, the
// others at the right.
func (m *model) layout(body rect) map[pane]rect {
	var left, right []pane
	for _, p := range m.shown {
		if p == terminalPane || p == processPane {
			left = append(left, p)
		} else {
			right = append(right, p)
		}
	}
	places := map[pane]rect{}
	columns := [][]pane{left, right}
	widths := []int{body.w * 11 / 20, body.w - body.w*11/20}
	if len(left) == 0 {
		columns, widths = [][]pane{right}, []int{body.w}
	}
	x := body.x
	for i, column := range columns {
		weight := func(p pane) int {
			switch p {
			case terminalPane:
				return 6
			case processPane, filePane, eventPane:
				return 4
			case networkPane:
				return 3
			}
			return 2
		}
		total := 0
		for _, p := range column {
			total += weight(p)
		}
		y := body.y
		for j, p := range column {
			height := body.h * weight(p) / total
			if j == len(column)-1 {
				height = body.y + body.h - y
			}
			places[p] = rect{x, y, widths[i], height}
			y += height
		}
		x += widths[i]
	}
	return places
}

// refresh brings up to date what is dear to compute.
func (m *model) refresh() {
	if n := len(m.t.Of(replay.Files, m.now)); n != m.filesAt {
		m.filesAt, m.files = n, m.t.FilesAt(m.now)
	}
	if d := m.now.Sub(m.treeAt); m.tree == nil || d < 0 || d > time.Duration(float64(linger)/8*m.speed) {
		m.treeAt, m.tree = m.now, m.t.Tree(m.now, time.Duration(float64(linger)*m.speed))
	}
	if c := m.command(); c != m.played {
		m.played, m.player = c, nil
		if c != nil {
			m.player = m.t.Player(c)
		}
	}
}

// head draws the title, the clock and the bar with what happened on it.
func (m *model) head(c canvas, all rect) {
	status := terminal.Clip(m.status(), all.w)
	from := all.w - terminal.Width(status)
	all.text(c, from, 0, status, screen.Style{Fg: cyan, Attr: screen.Bold})
	rest := rect{0, 0, max(0, from-1), 1}
	x := rest.text(c, 0, 0, string(m.t.Sandbox), strong)
	about := m.t.Template
	if m.t.Ended {
		about = strings.TrimPrefix(about+", ended: "+m.t.Reason, ", ")
	}
	rest.raw(c, x+2, 0, terminal.Clip(terminal.Escape(about), max(0, rest.w-x-2)), dim)
	total := m.t.End.Sub(m.t.Start)
	column := func(at time.Time) int {
		if total <= 0 {
			return 0
		}
		return int(int64(at.Sub(m.t.Start)) * int64(all.w-1) / int64(total))
	}
	marks := make([]byte, all.w)
	for _, e := range m.t.Events {
		if !m.has(e) {
			continue
		}
		i := column(e.Time)
		if e.Bad() {
			marks[i] = 2
		} else {
			marks[i] = max(marks[i], 1)
		}
	}
	here := column(m.now)
	for i, mark := range marks {
		glyph, style := "─", dim
		switch mark {
		case 1:
			glyph = "┴"
		case 2:
			glyph, style = "┻", badly
		}
		if i <= here && mark < 2 {
			style = screen.Style{Fg: cyan}
		}
		if i == here {
			glyph = "●"
		}
		c.put(i, 1, glyph, style)
	}
	if len(m.t.Warnings) > 0 {
		all.text(c, 0, 2, "! "+strings.Join(m.t.Warnings, "; "), screen.Style{Fg: yellow})
	}
}

// frame draws the border of a pane.
func (m *model) frame(c canvas, r rect, title string, focus bool) {
	style := dim
	if focus {
		style = screen.Style{Fg: cyan}
	}
	line := strings.Repeat("─", max(0, r.w-2))
	r.raw(c, 0, 0, "┌"+line+"┐", style)
	for y := 1; y < r.h-1; y++ {
		r.raw(c, 0, y, "│", style)
		r.raw(c, r.w-1, y, "│", style)
	}
	r.raw(c, 0, r.h-1, "└"+line+"┘", style)
	title = terminal.Clip(terminal.Escape(title), max(0, r.w-6))
	r.raw(c, 2, 0, " "+title+" ", screen.Style{Fg: style.Fg, Attr: screen.Bold})
}

func inner(r rect) rect { return rect{r.x + 1, r.y + 1, max(0, r.w-2), max(0, r.h-2)} }

func (m *model) one(c canvas, r rect, p pane) {
	title := fmt.Sprintf("%d %s", p+1, titles[p])
	in := inner(r)
	focus := m.pane() == p
	switch p {
	case terminalPane:
		if command := m.command(); command != nil {
			title += fmt.Sprintf("  #%d %s", command.Number, replay.Argv(command.Argv))
		}
		m.frame(c, r, title, focus)
		m.terminal(c, in)
	case processPane:
		m.frame(c, r, title, focus)
		m.processes(c, in)
	case filePane:
		if m.diff != nil {
			m.frame(c, r, title+"  "+m.diff.Path, focus)
			m.difference(c, in)
			return
		}
		added, changed, deleted := replay.Counts(m.files)
		title += fmt.Sprintf("  %d added, %d changed, %d deleted", added, changed, deleted)
		if _, _, looked := m.t.Looked(m.now); !looked && len(m.files) > 0 {
			title += " by the API"
		}
		m.frame(c, r, title, focus)
		m.fileList(c, in, focus)
	default:
		events := m.eventsOf(p, m.now)
		m.frame(c, r, fmt.Sprintf("%s  %d", title, len(events)), focus)
		m.events(c, in, events, p)
	}
}

func (m *model) terminal(c canvas, r rect) {
	command := m.command()
	if command == nil {
		r.text(c, 1, 0, "no command yet", dim)
		return
	}
	s, err := m.player.Screen(m.now)
	foot := command.Result()
	style := dim
	switch {
	case !command.Ended || command.End.After(m.now):
		foot = "running for " + replay.Clock(m.now.Sub(command.Start))
	case command.Failed():
		style = badly
	}
	if unheard := m.t.Unheard(command); unheard != "" {
		foot += ", " + unheard
	}
	if err != nil {
		foot, style = err.Error(), badly
	}
	_, rows := s.Size()
	_, row, _ := s.Cursor()
	// The part around the cursor, or where it was scrolled to.
	view := r.h - 1
	first := max(0, min(row-view+1, rows-view))
	if used := len(s.Rest()); used > view && row < used {
		first = max(0, min(first, used-view))
	}
	first = max(0, first-m.scroll[terminalPane])
	for y := 0; y < view && first+y < rows; y++ {
		x := 0
		for _, run := range s.Row(first + y) {
			x = rect{r.x, r.y, r.w, view}.raw(c, x, y, run.Text, run.Style)
		}
	}
	r.text(c, 0, r.h-1, foot, style)
}

func (m *model) processes(c canvas, r rect) {
	first := min(m.scroll[processPane], max(0, len(m.tree)-r.h))
	for y, n := range m.tree[first:] {
		if y >= r.h {
			break
		}
		style := plain
		text := fmt.Sprintf("%5d %s", n.PID, strings.Repeat("  ", min(n.Depth, 20)))
		name := "?"
		if image := n.At(m.now); image != nil {
			if name = replay.Argv(image.Argv); name == "" {
				name = filepath.Base(image.Exe)
			}
		}
		if n.Trust == audit.TrustGuest {
			name = "(guest) " + name
		}
		end := ""
		if n.Ended(m.now) {
			style = dim
			switch {
			case n.Signal != "":
				end = "  " + n.Signal
			case n.Code != nil:
				end = fmt.Sprintf("  exit %d", *n.Code)
			}
		}
		x := r.text(c, 0, y, text, dim)
		x = r.text(c, x, y, terminal.Clip(terminal.Escape(name), max(1, r.w-x-len(end))), style)
		if n.Code != nil && *n.Code != 0 || n.Signal != "" {
			style = badly
		}
		r.text(c, x, y, end, style)
	}
	if len(m.tree) == 0 {
		r.text(c, 1, 0, "none", dim)
	}
}

func (m *model) fileList(c canvas, r rect, focus bool) {
	pick := min(m.pick, len(m.files)-1)
	first := max(0, pick-r.h+1)
	for y := 0; y < r.h && first+y < len(m.files); y++ {
		f := m.files[first+y]
		style := plain
		switch f.Op {
		case "add":
			style = well
		case "delete":
			style = screen.Style{Fg: red}
		case "modify":
			style = screen.Style{Fg: yellow}
		}
		if focus && first+y == pick {
			style.Attr |= screen.Reverse
		}
		text := fmt.Sprintf("%-6s %s", f.Op, f.Path)
		if f.Kind == "link" {
			text += " -> " + f.Target
		}
		if f.Kind == "dir" {
			text += "/"
		}
		r.text(c, 0, y, text, style)
	}
	if len(m.files) == 0 {
		r.text(c, 1, 0, cmp.Or(m.t.Unlooked(), "nothing differs, as far as is known at this time"), dim)
	}
}

func (m *model) difference(c canvas, r rect) {
	lines := strings.Split(strings.TrimSuffix(m.t.Diff(*m.diff), "\n"), "\n")
	m.scroll[filePane] = min(m.scroll[filePane], max(0, len(lines)-r.h))
	for y, line := range lines[m.scroll[filePane]:] {
		if y >= r.h {
			break
		}
		style := plain
		switch {
		case strings.HasPrefix(line, "+++"), strings.HasPrefix(line, "---"):
			style = strong
		case strings.HasPrefix(line, "+"):
			style = well
		case strings.HasPrefix(line, "-"):
			style = screen.Style{Fg: red}
		case strings.HasPrefix(line, "@@"):
			style = screen.Style{Fg: cyan}
		}
		r.text(c, 0, y, strings.ReplaceAll(line, "\t", "    "), style)
	}
}

// wrap breaks text into lines of at most so many columns.
func wrap(s string, width int) (lines []string) {
	line, w := "", 0
	for _, r := range s {
		n := terminal.Width(string(r))
		if w+n > width && len(lines) < 20 {
			lines, line, w = append(lines, line), "", 0
		}
		line, w = line+string(r), w+n
	}
	return append(lines, terminal.Clip(line, width))
}

// events lists events with the newest at the end.
func (m *model) events(c canvas, r rect, events []*replay.Event, p pane) {
	if len(m.only) > 0 {
		var shown []*replay.Event
		for _, e := range events {
			if m.has(e) {
				shown = append(shown, e)
			}
		}
		events = shown
	}
	m.scroll[p] = min(m.scroll[p], max(0, len(events)-1))
	last := len(events) - m.scroll[p]
	// From the newest up, as many as there is place for; in a pane of its own each in full.
	y := r.h
	for _, e := range slices.Backward(events[max(0, last-r.h):last]) {
		if y <= 0 {
			break
		}
		text := e.Text()
		if e.Trust == audit.TrustGuest {
			text = "(guest) " + text
		}
		indent := len(m.t.Clock(e.Time)) + 1
		if p == eventPane {
			indent += 11
		}
		width := max(1, r.w-indent)
		lines := []string{terminal.Clip(terminal.Escape(text), width)}
		if m.zoom {
			lines = wrap(terminal.Escape(text), width)
		}
		style := plain
		if _, flow := e.Data.(*egress.Event); flow && p != eventPane {
			style = well
		}
		if e.Bad() {
			style = screen.Style{Fg: red}
		}
		for i, line := range slices.Backward(lines) {
			if y--; y < 0 {
				break
			}
			r.raw(c, indent, y, line, style)
			if i > 0 {
				continue
			}
			x := r.text(c, 0, y, m.t.Clock(e.Time)+" ", dim)
			if p == eventPane {
				r.text(c, x, y, fmt.Sprintf("%-10s ", replay.Lane(e.Type)), dim)
			}
		}
	}
	if len(events) == 0 {
		nothing := "nothing yet"
		if p == networkPane {
			nothing = cmp.Or(m.t.Unwatched(), nothing)
		}
		r.text(c, 1, 0, nothing, dim)
	}
}
