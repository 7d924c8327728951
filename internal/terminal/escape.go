package terminal

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/width"
)

// safe says whether a terminal shows r as a glyph and does nothing else. Not so
// control characters of C0 and C1 (a terminal may take U+009B for "ESC ["), nor
// the invisible format characters, which reorder or hide text (U+202E), nor
// spaces other than the plain one.
func safe(r rune) bool { return r < 0x7f && r >= 0x20 || r > 0x9f && strconv.IsPrint(r) }

func appendEscaped(out []byte, r rune, raw []byte) []byte {
	switch {
	case r == utf8.RuneError && len(raw) == 1:
		return fmt.Appendf(out, `\x%02x`, raw[0])
	case safe(r):
		return append(out, raw...)
	case r == '\n':
		return append(out, `\n`...)
	case r == '\r':
		return append(out, `\r`...)
	case r == '\t':
		return append(out, `\t`...)
	case r < 0x80:
		return fmt.Appendf(out, `\x%02x`, r)
	case r <= 0xffff:
		return fmt.Appendf(out, `\u%04x`, r)
	default:
		return fmt.Appendf(out, `\U%08x`, r)
	}
}

// Escape returns s with everything that a terminal would act on, newlines
// included, written as a Go escape. Use it for each string that a sandbox or
// another user chose.
func Escape(s string) string {
	var out []byte // stays nil until something has to be escaped
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		if out == nil && (!safe(r) || r == utf8.RuneError && n == 1) {
			out = append(make([]byte, 0, len(s)+16), s[:i]...)
		}
		if out != nil {
			out = appendEscaped(out, r, []byte(s[i:i+n]))
		}
		i += n
	}
	if out == nil {
		return s
	}
	return string(out)
}

// Clip shortens an escaped string to at most max columns, the last of them an
// ellipsis if something was cut.
func Clip(s string, max int) string {
	if len(s) <= max {
		return s
	}
	columns, cut := 0, 0
	for i, r := range s {
		w := runeWidth(r)
		if columns+w > max {
			return s[:cut] + "…"
		}
		columns += w
		if columns <= max-1 {
			cut = i + utf8.RuneLen(r)
		}
	}
	return s
}

// Width is the number of columns that an escaped string takes.
func Width(s string) int {
	n := 0
	for _, r := range s {
		n += runeWidth(r)
	}
	return n
}

func runeWidth(r rune) int {
	if r < 0x300 {
		return 1
	}
	if unicode.In(r, unicode.Mn, unicode.Me) {
		return 0
	}
	switch width.LookupRune(r).Kind() {
	case width.EastAsianWide, width.EastAsianFullwidth:
		return 2
	}
	return 1
}

// Writer writes a stream of output to a terminal in a form that cannot act on it:
// newlines and tabs pass, "\r\n" becomes a newline, all else is escaped as by
// Escape. A character that is split over two writes is put together.
type Writer struct {
	w    io.Writer
	held []byte // the start of a character, or a '\r' that may be part of "\r\n"
}

// NewWriter returns a Writer onto w. Close it at the end of the stream.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w} }

// Write takes all of p unless the underlying writer fails.
func (w *Writer) Write(p []byte) (int, error) {
	in := p
	if len(w.held) > 0 {
		in = slices.Concat(w.held, p)
		w.held = nil
	}
	out := make([]byte, 0, len(in)+16)
	for len(in) > 0 {
		if in[0] == '\r' && len(in) == 1 || !utf8.FullRune(in) {
			w.held = append([]byte(nil), in...)
			break
		}
		r, n := utf8.DecodeRune(in)
		switch {
		case r == '\n' || r == '\t':
			out = append(out, in[0])
		case r == '\r' && in[1] == '\n':
		default:
			out = appendEscaped(out, r, in[:n])
		}
		in = in[n:]
	}
	if _, err := w.w.Write(out); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Close writes what is left of an unfinished character. It does not close the
// underlying writer.
func (w *Writer) Close() error {
	var out []byte
	for _, b := range w.held {
		if b == '\r' {
			out = append(out, `\r`...)
		} else {
			out = fmt.Appendf(out, `\x%02x`, b)
		}
	}
	w.held = nil
	_, err := w.w.Write(out)
	return err
}

// EscapeJSON writes each character of a JSON text that Escape would escape as a
// \u escape, so that a terminal can show the text. It is the same JSON value
// after it: outside of strings JSON has no such characters but newlines, which
// stay.
func EscapeJSON(text []byte) []byte {
	s := string(text)
	var out strings.Builder
	out.Grow(len(s))
	for _, r := range s {
		switch {
		case r == '\n' || safe(r):
			out.WriteRune(r)
		case r <= 0xffff:
			fmt.Fprintf(&out, `\u%04x`, r)
		default:
			r -= 0x10000
			fmt.Fprintf(&out, `\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
		}
	}
	return []byte(out.String())
}
