package replay

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"time"
	"unicode/utf8"

	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/terminal"
)

// castHeader is the first line of an asciicast v2
// (https://docs.asciinema.org/manual/asciicast/v2/).
type castHeader struct {
	Version   int     `json:"version"`
	Width     int     `json:"width"`
	Height    int     `json:"height"`
	Timestamp int64   `json:"timestamp"` // Unix seconds
	Duration  float64 `json:"duration"`
	Command   string  `json:"command"`
	Title     string  `json:"title"`
}

// The codes of events of an asciicast.
const (
	castOutput = "o"
	castInput  = "i"
	castResize = "r"
)

// Cast writes what a command printed as an asciicast v2, with the changes of its terminal's
// size. Bytes that are no UTF-8 are replaced; of a command without a terminal, lines end as one
// would show them. The file holds what the program sent, so that whoever plays it lets that act on
// a terminal; the text of the file does not.
func Cast(w io.Writer, t *Timeline, c *Command) error {
	frames, err := t.Frames(c)
	if err != nil {
		return err
	}
	header := castHeader{
		Version: 2, Width: plainColumns, Height: plainRows, Timestamp: c.Start.Unix(), Duration: c.End.Sub(c.Start).Seconds(),
		Command: Argv(c.Argv), Title: fmt.Sprintf("%s #%d", t.Sandbox, c.Number),
	}
	if c.TTY != nil && c.TTY.Columns > 0 && c.TTY.Rows > 0 {
		header.Width, header.Height = c.TTY.Columns, c.TTY.Rows
	}
	out := cast{w: w}
	out.line(header)
	texts := map[audit.Stream]*castText{}
	var last time.Duration
	for _, f := range frames {
		last = f.At
		switch f.Stream {
		case audit.Stdout, audit.Stderr, audit.Stdin:
			text := texts[f.Stream]
			if text == nil {
				text = &castText{lines: c.TTY == nil && f.Stream != audit.Stdin}
				texts[f.Stream] = text
			}
			code := castOutput
			if f.Stream == audit.Stdin {
				code = castInput
			}
			out.event(f.At, code, text.take(f.Data))
		case audit.Resize:
			if columns, rows, ok := size(f.Data); ok {
				out.event(f.At, castResize, fmt.Sprintf("%dx%d", columns, rows))
			}
		case audit.Cut:
			out.event(f.At, castOutput, missing(f.Data))
		}
	}
	for _, stream := range []audit.Stream{audit.Stdout, audit.Stderr} {
		if text := texts[stream]; text != nil {
			out.event(last, castOutput, string(text.held))
		}
	}
	return out.err
}

// cast writes the lines of an asciicast, up to the first error.
type cast struct {
	w   io.Writer
	err error
}

func (c *cast) line(v any) {
	if c.err != nil {
		return
	}
	line, err := json.Marshal(v)
	if err == nil {
		_, err = c.w.Write(append(terminal.EscapeJSON(line), '\n'))
	}
	c.err = err
}

func (c *cast) event(at time.Duration, code, data string) {
	if data != "" {
		c.line([]any{at.Seconds(), code, data})
	}
}

// castText makes text of the bytes of one stream.
type castText struct {
	lines bool   // a newline goes to the start of the next line too
	held  []byte // the start of a character
	last  byte
}

// take returns the text of a piece, but for a character that the next one completes.
func (t *castText) take(data []byte) string {
	data = append(t.held, data...)
	t.held = nil
	for n := 1; n < utf8.UTFMax && n <= len(data); n++ {
		if tail := data[len(data)-n:]; utf8.RuneStart(tail[0]) {
			if !utf8.FullRune(tail) {
				t.held, data = bytes.Clone(tail), data[:len(data)-n]
			}
			break
		}
	}
	if !t.lines {
		return string(data) // json.Marshal replaces what is no character
	}
	text := make([]byte, 0, len(data)+16)
	for _, b := range data {
		if b == '\n' && t.last != '\r' {
			text = append(text, '\r')
		}
		text = append(text, b)
		t.last = b
	}
	return string(text)
}
