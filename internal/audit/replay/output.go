package replay

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/replay/screen"
	"github.com/berm-sandbox/berm/internal/audit/trail"
)

// The size of the screen for commands without a terminal.
const (
	plainColumns = 100
	plainRows    = 30
)

// empty is the hash of no content.
const empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

// Content reads a blob whole and holds it against its hash. Kind NotFound.
func (t *Timeline) Content(hash string) ([]byte, error) { return Content(t.source, hash) }

// Content reads a blob of a log whole and holds it against its hash. Kind NotFound.
func Content(source trail.Source, hash string) ([]byte, error) {
	if hash == empty {
		return nil, nil
	}
	r, err := source.Blob(hash)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, audit.MaxBlob+1))
	if err != nil {
		return nil, berm.Errorf(berm.KindOf(err), "content %s: %w", hash, err)
	}
	if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != hash {
		return nil, berm.Errorf(berm.Internal, "the content kept as %s is another", hash)
	}
	return b, nil
}

// HasOutput says whether output of the command was kept.
func (c *Command) HasOutput() bool { return c.frames != nil }

// unkept is what is known of what a command of berm run printed.
const unkept = "what it printed is not on record"

// Unheard says why nothing is known of what a command printed, "" where something is or it printed
// nothing.
func (t *Timeline) Unheard(c *Command) string {
	switch {
	case c.HasOutput():
		return ""
	case t.Local:
		return unkept
	case c.Output > 0:
		return "no output was kept"
	}
	return ""
}

// Kept is how many bytes its kept output takes, in frames.
func (c *Command) Kept() int64 {
	if c.frames == nil {
		return 0
	}
	return c.frames.Size
}

// Frames returns what a command printed. What could be read of it comes with an error.
func (t *Timeline) Frames(c *Command) (frames []audit.Frame, err error) {
	if c.frames == nil {
		return nil, nil
	}
	if t.recent.command == c {
		return t.recent.frames, nil
	}
	b, err := t.Content(c.frames.SHA256)
	if err != nil {
		return nil, err
	}
	for r := audit.NewFrameReader(strings.NewReader(string(b))); ; {
		f, err := r.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return frames, berm.Errorf(berm.Internal, "output of command %d: %w", c.Number, err)
		}
		frames = append(frames, f)
	}
	t.recent.command, t.recent.frames = c, frames
	return frames, nil
}

// NewScreen makes the screen that a command begins with.
func (c *Command) NewScreen() *screen.Screen {
	if c.TTY != nil {
		return screen.New(c.TTY.Columns, c.TTY.Rows, false)
	}
	return screen.New(plainColumns, plainRows, true)
}

// Show puts a frame on the screen of its command.
func Show(s *screen.Screen, f audit.Frame) {
	switch f.Stream {
	case audit.Stdout, audit.Stderr:
		_, _ = s.Write(f.Data)
	case audit.Resize:
		if columns, rows, ok := size(f.Data); ok {
			s.Resize(columns, rows)
		}
	case audit.Cut:
		_, _ = s.Write([]byte(missing(f.Data)))
	}
}

// size reads the data of a frame that tells the size of a terminal.
func size(data []byte) (columns, rows int, ok bool) {
	before, after, ok := strings.Cut(string(data), "x")
	columns, err := strconv.Atoi(before)
	rows, err2 := strconv.Atoi(after)
	return columns, rows, ok && errors.Join(err, err2) == nil && columns > 0 && rows > 0
}

// missing is what a terminal shows in the place of output that was not kept.
func missing(data []byte) string {
	n, _ := strconv.ParseUint(string(data), 10, 64)
	return "\x1b[m\r\n\x1b[7m[ " + strconv.FormatUint(n, 10) + " bytes were not kept ]\x1b[m\r\n"
}

// Transcript is what a command printed, as lines of text: of a terminal what left the screen
// and what was on it last. It has the last lines up to max, and how many there are before.
func (t *Timeline) Transcript(c *Command, max int) (lines []string, before int, err error) {
	frames, err := t.Frames(c)
	s := c.NewScreen()
	add := func(line string) {
		if len(lines) >= 2*max {
			before += len(lines) - max
			lines = append(lines[:0], lines[len(lines)-max:]...)
		}
		lines = append(lines, line)
	}
	s.Scrolled = func(runs []screen.Run) { add(screen.Plain(runs)) }
	for _, f := range frames {
		Show(s, f)
	}
	for _, runs := range s.Rest() {
		add(screen.Plain(runs))
	}
	if over := len(lines) - max; over > 0 {
		before, lines = before+over, lines[over:]
	}
	return lines, before, err
}

// Player shows the screen of one command at any time.
type Player struct {
	timeline *Timeline
	command  *Command
	frames   []audit.Frame
	screen   *screen.Screen
	next     int // frame
	err      error
}

// Player makes a player of a command.
func (t *Timeline) Player(c *Command) *Player {
	p := &Player{timeline: t, command: c}
	p.frames, p.err = t.Frames(c)
	p.screen = c.NewScreen()
	return p
}

// Screen is what was seen at a time. Going back costs as much as playing from the start.
func (p *Player) Screen(at time.Time) (*screen.Screen, error) {
	since := at.Sub(p.command.Start)
	if p.next > 0 && p.frames[p.next-1].At > since {
		p.screen, p.next = p.command.NewScreen(), 0
	}
	for p.next < len(p.frames) && p.frames[p.next].At <= since {
		Show(p.screen, p.frames[p.next])
		p.next++
	}
	return p.screen, p.err
}

// Showing is the command whose screen a replay shows at a time: of those that ran then the
// one that started last; if none ran, the one before.
func (t *Timeline) Showing(at time.Time) *Command {
	var best *Command
	for _, c := range t.Commands {
		if c.Start.After(at) {
			continue
		}
		switch {
		case best == nil, !c.Ended || c.End.After(at), !best.End.After(at) && best.Ended:
			best = c
		}
	}
	return best
}
