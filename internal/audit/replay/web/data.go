package web

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/replay"
	"github.com/berm-sandbox/berm/internal/audit/replay/screen"
	"github.com/berm-sandbox/berm/internal/terminal"
)

// Bounds of a page.
const (
	maxScreens = 32 << 20 // bytes of what was on screens
	maxEvents  = 32 << 20 // bytes of events; those of processes have half of it at most
	maxRunning = 50_000   // processes
	maxDiffs   = 8 << 20  // bytes of differences
	maxFiles   = 100_000  // files in all lists
	maxText    = 2000     // columns of one event
	// screenTime is how far apart the screens of a command are, unless it ran for so long that
	// this would make more than perCommand.
	screenTime = 40 * time.Millisecond
	perCommand = 5000
)

// session is the data of the page. Times are milliseconds since the start; all text is safe to
// be shown.
type session struct {
	Sandbox   string    `json:"sandbox"`
	About     []string  `json:"about"`
	Start     int64     `json:"start"` // milliseconds since 1970
	Length    int64     `json:"length"`
	From      int64     `json:"from"`
	Warnings  []string  `json:"warnings"`
	Panes     []string  `json:"panes"`
	Events    []event   `json:"events"`
	Commands  []command `json:"commands"`
	Processes []process `json:"processes"`
	Files     []files   `json:"files"`
	NoFiles   string    `json:"noFiles"` // what is said where there are none
	Diffs     []string  `json:"diffs"`
}

type event struct {
	At   int64  `json:"t"`
	Lane string `json:"l"`
	Text string `json:"x"`
	Bad  bool   `json:"b,omitempty"`
	Good bool   `json:"g,omitempty"` // it was let through
}

type command struct {
	Number  int     `json:"n"`
	Name    string  `json:"name"`
	Start   int64   `json:"start"`
	End     int64   `json:"end"`
	Result  string  `json:"result"`
	Failed  bool    `json:"failed,omitempty"`
	Columns int     `json:"columns"`
	Lines   [][]any `json:"lines"`   // each a list of texts, or of [text, fg, bg, attributes]
	Screens [][]int `json:"screens"` // [time, line...]
	Note    string  `json:"note,omitempty"`
}

type process struct {
	PID    int     `json:"pid"`
	Parent int     `json:"parent"` // its place in the list, or -1
	Start  int64   `json:"start"`
	End    int64   `json:"end"` // -1: not seen
	Result string  `json:"result,omitempty"`
	Failed bool    `json:"failed,omitempty"`
	Guest  bool    `json:"guest,omitempty"`
	Images [][]any `json:"images"` // [time, name]
}

type files struct {
	At   int64  `json:"t"`
	From string `json:"from"` // who saw it
	List []file `json:"list"`
}

type file struct {
	Op   string `json:"op"`
	Name string `json:"name"`
	Diff int    `json:"diff"`
}

// text makes text that is shown.
func text(s string) string { return terminal.Clip(terminal.Escape(s), maxText) }

type collector struct {
	*replay.Timeline
	page  session
	diffs map[string]int
	left  int // bytes of screens
}

func collect(t *replay.Timeline, p replay.Part) *session {
	c := &collector{Timeline: t, diffs: map[string]int{}, left: maxScreens}
	s := &c.page
	s.Sandbox, s.Start, s.Length = string(t.Sandbox), t.Start.UnixMilli(), c.at(t.End)
	s.From = s.Length // where all is to be seen
	if p.From.After(t.Start) {
		s.From = c.at(p.From)
	}
	has := func(lane string) bool { return len(p.Lanes) == 0 || slices.Contains(p.Lanes, lane) }
	if t.Template != "" {
		s.About = append(s.About, text("template "+t.Template))
	}
	if t.Level != "" {
		s.About = append(s.About, text("level "+t.Level))
	}
	s.About = append(s.About, t.Start.UTC().Format("2006-01-02 15:04:05 MST"))
	if t.Ended {
		s.About = append(s.About, text("ended: "+t.Reason))
	}
	for _, w := range t.Warnings {
		s.Warnings = append(s.Warnings, text(w))
	}
	s.Events, s.Commands, s.Processes, s.Files, s.Diffs = []event{}, []command{}, []process{}, []files{}, []string{}
	size, left := 0, 0
	for _, e := range t.Events {
		lane := replay.Lane(e.Type)
		if !has(lane) {
			continue
		}
		if size > maxEvents || size > maxEvents/2 && lane == replay.Proc {
			left++
			continue
		}
		what := e.Text()
		if e.Trust == audit.TrustGuest {
			what = "(guest) " + what
		}
		what = text(what)
		size += len(what) + 40
		bad := e.Bad()
		s.Events = append(s.Events, event{c.at(e.Time), text(lane), what, bad, !bad && (lane == replay.Network || lane == replay.Credentials)})
	}
	if left > 0 {
		s.Warnings = append(s.Warnings, fmt.Sprintf("%d events are not in this page: there are too many", left))
	}
	if has(replay.Exec) || has(replay.Output) {
		s.Panes = append(s.Panes, "terminal")
		for _, cmd := range t.Commands {
			s.Commands = append(s.Commands, c.command(cmd, has(replay.Output)))
		}
	}
	if has(replay.Proc) {
		s.Panes = append(s.Panes, "processes")
		c.processes()
	}
	if has(replay.Files) {
		s.Panes = append(s.Panes, "files")
		c.files()
	}
	for pane, lane := range map[string]string{"network": replay.Network, "credentials": replay.Credentials} {
		if has(lane) {
			s.Panes = append(s.Panes, pane)
		}
	}
	s.Panes = append(s.Panes, "events")
	return s
}

// at is a time on the page's clock.
func (c *collector) at(t time.Time) int64 { return t.Sub(c.Start).Milliseconds() }

// command plays a command and keeps what its screen showed.
func (c *collector) command(cmd *replay.Command, output bool) command {
	out := command{
		Number: cmd.Number, Name: text(replay.Argv(cmd.Argv)), Start: c.at(cmd.Start), End: c.at(cmd.End),
		Result: text(cmd.Result()), Failed: cmd.Failed(), Lines: [][]any{}, Screens: [][]int{},
	}
	s := cmd.NewScreen()
	out.Columns, _ = s.Size()
	if !output {
		return out
	}
	frames, err := c.Frames(cmd)
	if err != nil {
		out.Note = text(err.Error())
	} else {
		out.Note = c.Unheard(cmd)
	}
	apart := max(screenTime, cmd.End.Sub(cmd.Start)/perCommand)
	known := map[string]int{}
	for i, f := range frames {
		replay.Show(s, f)
		// The last one of those that come close together is kept.
		if i+1 < len(frames) && frames[i+1].At/apart == f.At/apart {
			continue
		}
		if c.left <= 0 && i+1 < len(frames) {
			out.Note = "only its last screen is in this page: there is too much output"
			continue
		}
		columns, rows := s.Size()
		out.Columns = max(out.Columns, columns)
		shot := make([]int, 1, rows+1)
		shot[0] = int(out.Start + f.At.Milliseconds())
		for row := range s.Rest() {
			runs := s.Row(row)
			key := fmt.Sprint(runs)
			at, ok := known[key]
			if !ok {
				at = len(out.Lines)
				known[key] = at
				out.Lines = append(out.Lines, toLine(runs))
				c.left -= len(key)
			}
			shot = append(shot, at)
		}
		c.left -= 4 * len(shot)
		if n := len(out.Screens); n > 0 && slices.Equal(out.Screens[n-1][1:], shot[1:]) {
			continue
		}
		out.Screens = append(out.Screens, shot)
	}
	return out
}

// toLine makes a line of runs, which hold nothing but what is shown.
func toLine(runs []screen.Run) []any {
	line := []any{}
	for _, r := range runs {
		if r.Style == (screen.Style{}) {
			line = append(line, r.Text)
			continue
		}
		line = append(line, []any{r.Text, r.Style.Fg, r.Style.Bg, r.Style.Attr})
	}
	return line
}

func (c *collector) processes() {
	places := map[*replay.Process]int{}
	alive := map[int]*replay.Process{}
	if left := len(c.Processes) - maxRunning; left > 0 {
		c.page.Warnings = append(c.page.Warnings, fmt.Sprintf("the last %d processes are not in this page: there are too many", left))
	}
	for i, p := range c.Processes[:min(maxRunning, len(c.Processes))] {
		places[p] = i
		out := process{PID: p.PID, Parent: -1, Start: c.at(p.Start), End: -1, Guest: p.Trust == audit.TrustGuest, Images: [][]any{}}
		if parent := alive[p.PPID]; parent != nil && p.PPID != 0 && parent != p && !parent.Ended(p.Start) {
			out.Parent = places[parent]
		}
		if p.PID != 0 {
			alive[p.PID] = p
		}
		if !p.End.IsZero() {
			out.End = c.at(p.End)
		}
		switch {
		case p.Signal != "":
			out.Result, out.Failed = text(p.Signal), true
		case p.Code != nil:
			out.Result, out.Failed = fmt.Sprintf("exit %d", *p.Code), *p.Code != 0
		}
		for _, image := range p.Images {
			name := replay.Argv(image.Argv)
			if name == "" {
				name = image.Exe
			}
			out.Images = append(out.Images, []any{c.at(image.Time), terminal.Clip(terminal.Escape(name), 300)})
		}
		c.page.Processes = append(c.page.Processes, out)
	}
}

func (c *collector) files() {
	c.page.NoFiles = text(c.Unlooked())
	total := 0
	for _, e := range c.Of(replay.Files, c.End) {
		list := c.FilesAt(e.Time)
		if total += len(list); total > maxFiles {
			if e.Type != audit.FileChange { // the looks that follow tell all
				total -= len(list)
				continue
			}
			list = list[:min(len(list), maxFiles/10)]
		}
		out := files{At: c.at(e.Time), From: "by the files API", List: []file{}}
		if _, why, ok := c.Looked(e.Time); ok {
			out.From = text(why)
		}
		for _, f := range list {
			out.List = append(out.List, c.file(f))
		}
		c.page.Files = append(c.page.Files, out)
	}
}

func (c *collector) file(f replay.File) file {
	name := f.Path
	switch f.Kind {
	case "link":
		name += " -> " + f.Target
	case "dir":
		name += "/"
	}
	key, _ := json.Marshal([]any{f.Path, f.Kind, f.Op, f.Before, f.After, f.Time})
	at, ok := c.diffs[string(key)]
	if !ok {
		var lines []string
		for line := range strings.Lines(c.Diff(f)) {
			lines = append(lines, terminal.Clip(terminal.Escape(strings.ReplaceAll(strings.TrimSuffix(line, "\n"), "\t", "    ")), maxText))
		}
		all := strings.Join(lines, "\n")
		if size := len(all); size > maxDiffs/8 {
			all = all[:strings.LastIndexByte(all[:maxDiffs/8], '\n')+1] + "…"
		}
		at = len(c.page.Diffs)
		c.diffs[string(key)] = at
		c.page.Diffs = append(c.page.Diffs, all)
	}
	return file{text(f.Op), text(name), at}
}
