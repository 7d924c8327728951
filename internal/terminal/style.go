package terminal

import (
	"io"
	"os"

	"golang.org/x/term"
)

// Style colours text, or leaves it alone.
type Style bool

// StyleFor colours what goes to a terminal, unless NO_COLOR is set or the
// terminal is a dumb one.
func StyleFor(w io.Writer) Style {
	return Style(Is(w) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb")
}

// Is says whether w (or a reader) is a terminal.
func Is(w any) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

func (s Style) paint(code, text string) string {
	if !s {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

// Bold marks a heading.
func (s Style) Bold(text string) string { return s.paint("1", text) }

// Good marks what is as it should be.
func (s Style) Good(text string) string { return s.paint("32", text) }

// Bad marks what is not.
func (s Style) Bad(text string) string { return s.paint("31", text) }

// Dim marks what matters less.
func (s Style) Dim(text string) string { return s.paint("2", text) }
