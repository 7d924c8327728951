// Package screen is a model of a terminal that shows recorded output and cannot act on
// anything: no replies, titles, clipboards, links or bells.
package screen

import (
	"strings"

	"github.com/berm-sandbox/berm/internal/terminal"
)

// The upper bounds of a size; there are two columns and one row at least.
const (
	MaxColumns = 500
	MaxRows    = 200
)

// maxMarks bounds the combining marks on a character, in bytes.
const maxMarks = 16

// Attr are attributes of a character.
type Attr uint8

// The attributes.
const (
	Bold Attr = 1 << iota
	Dim
	Italic
	Underline
	Reverse
	Strike
)

// Color is a color of a character: 0 is the default, 1 to 256 are the palette's, others are
// RGB.
type Color uint32

const direct Color = 1 << 24

// Palette returns the number in the palette of 256.
func (c Color) Palette() (int, bool) { return int(c) - 1, c > 0 && c <= 256 }

// RGB returns a direct color.
func (c Color) RGB() (uint32, bool) { return uint32(c &^ direct), c&direct != 0 }

// Style is how a character looks.
type Style struct {
	Fg, Bg Color
	Attr   Attr
}

// Run is text of one style.
type Run struct {
	Text  string
	Style Style
}

// cell is a character. Rune 0 is the right half of a wide one.
type cell struct {
	r     rune
	marks string
	style Style
}

var blank = cell{r: ' '}

// line is a row up to its last cell that was written.
type line []cell

type cursor struct {
	row, col int
	wrap     bool // the next character goes to the next line
	style    Style
	drawing  bool // letters are those of line drawing
	origin   bool
}

// Screen is a terminal's state. Write takes time in proportion to what it is given: each byte
// costs at most a row.
type Screen struct {
	// Scrolled is told each line that leaves the screen, if it is set.
	Scrolled func([]Run)

	columns, rows int
	lines         []line
	cur           cursor
	saved         cursor
	top, bottom   int // of the scrolling region
	hiddenCursor  bool
	noWrap        bool
	insert        bool
	newline       bool // a line feed returns to the first column, too
	other         []line
	otherCursor   cursor
	alternate     bool
	last          rune

	parser
}

// New makes an empty screen. Output that was not made for a terminal has bare line feeds:
// for it newline is set.
func New(columns, rows int, newline bool) *Screen {
	s := &Screen{newline: newline}
	s.columns, s.rows = bounded(columns, rows)
	s.lines, s.other = make([]line, s.rows), make([]line, s.rows)
	s.reset()
	return s
}

func bounded(columns, rows int) (int, int) {
	return min(max(columns, 2), MaxColumns), min(max(rows, 1), MaxRows)
}

func (s *Screen) reset() {
	clear(s.lines)
	clear(s.other)
	s.cur, s.saved, s.otherCursor = cursor{}, cursor{}, cursor{}
	s.top, s.bottom = 0, s.rows-1
	s.hiddenCursor, s.noWrap, s.insert, s.alternate = false, false, false, false
}

// Size is how many columns and rows there are.
func (s *Screen) Size() (columns, rows int) { return s.columns, s.rows }

// Cursor is where the cursor is, and whether it is seen.
func (s *Screen) Cursor() (column, row int, seen bool) {
	return min(s.cur.col, s.columns-1), s.cur.row, !s.hiddenCursor
}

// Resize changes the size, within its bounds. Lines above a cursor that would be below the
// screen leave it.
func (s *Screen) Resize(columns, rows int) {
	columns, rows = bounded(columns, rows)
	for s.cur.row >= rows {
		s.leave(s.lines[0])
		s.lines = s.lines[1:]
		s.cur.row--
	}
	fit := func(lines []line) []line {
		fitted := make([]line, rows)
		copy(fitted, lines)
		for i := range fitted {
			fitted[i] = fitted[i][:min(len(fitted[i]), columns)]
		}
		return fitted
	}
	s.lines, s.other = fit(s.lines), fit(s.other)
	s.columns, s.rows, s.top, s.bottom = columns, rows, 0, rows-1
	for _, c := range []*cursor{&s.cur, &s.saved, &s.otherCursor} {
		c.row, c.col, c.wrap = min(c.row, rows-1), min(c.col, columns-1), false
	}
}

// Row returns what a row shows, without blanks at its end that have no color.
func (s *Screen) Row(row int) []Run {
	if row < 0 || row >= len(s.lines) {
		return nil
	}
	return s.lines[row].runs()
}

func (l line) runs() (runs []Run) {
	end := len(l)
	for end > 0 && (l[end-1].r == ' ' || l[end-1].r == 0) && l[end-1].style.Bg == 0 && l[end-1].style.Attr&(Reverse|Underline) == 0 {
		end--
	}
	if end < len(l) && end > 0 && terminal.Width(string(l[end-1].r)) == 2 {
		end++
	}
	var text strings.Builder
	for i, c := range l[:end] {
		if c.r != 0 {
			text.WriteRune(c.r)
			text.WriteString(c.marks)
		}
		if i+1 == end || l[i+1].style != c.style {
			if text.Len() > 0 {
				runs = append(runs, Run{text.String(), c.style})
			}
			text.Reset()
		}
	}
	return runs
}

// Text is what a row shows, without styles.
func (s *Screen) Text(row int) string { return Plain(s.Row(row)) }

// Plain joins the text of runs.
func Plain(runs []Run) string {
	var text strings.Builder
	for _, r := range runs {
		text.WriteString(r.Text)
	}
	return strings.TrimRight(text.String(), " ")
}

func (s *Screen) leave(l line) {
	if s.Scrolled != nil && !s.alternate {
		s.Scrolled(l.runs())
	}
}

// put writes a character at the cursor.
func (s *Screen) put(r rune) {
	if s.cur.drawing {
		if d, ok := drawing[r]; ok {
			r = d
		}
	}
	wide := 1
	if r >= 0x300 { // the first that may have another width
		if wide = terminal.Width(string(r)); wide == 0 {
			s.mark(r)
			return
		}
	}
	s.last = r
	if s.cur.wrap || s.cur.col+wide > s.columns {
		if s.noWrap {
			s.cur.col = s.columns - wide
		} else {
			s.cur.col = 0
			s.feed()
		}
	}
	s.cur.wrap = false
	l := s.pad(s.cur.row, s.cur.col)
	if s.insert {
		l = append(l, make(line, wide)...)
		copy(l[s.cur.col+wide:], l[s.cur.col:])
		l = l[:min(len(l), s.columns)]
	}
	for len(l) < s.cur.col+wide {
		l = append(l, cell{r: ' '})
	}
	if l[s.cur.col].r == 0 && s.cur.col > 0 { // half of a wide one is overwritten
		l[s.cur.col-1].r = ' '
	}
	if end := s.cur.col + wide; end < len(l) && l[end].r == 0 {
		l[end].r = ' '
	}
	l[s.cur.col] = cell{r: r, style: s.cur.style}
	if wide == 2 {
		l[s.cur.col+1] = cell{style: s.cur.style}
	}
	s.lines[s.cur.row] = l
	if s.cur.col += wide; s.cur.col >= s.columns {
		s.cur.col, s.cur.wrap = s.columns-1, true
	}
}

// mark puts a combining mark on the character before the cursor.
func (s *Screen) mark(r rune) {
	l, at := s.lines[s.cur.row], s.cur.col-1
	if s.cur.wrap {
		at = s.cur.col
	}
	if at >= 0 && at < len(l) && l[at].r == 0 {
		at--
	}
	if at >= 0 && at < len(l) && len(l[at].marks) < maxMarks {
		l[at].marks += string(r)
	}
}

// pad fills a row with blanks up to a column.
func (s *Screen) pad(row, col int) line {
	l := s.lines[row]
	for len(l) < col {
		l = append(l, blank)
	}
	s.lines[row] = l
	return l
}

// feed moves the cursor down, or what is above it up.
func (s *Screen) feed() {
	switch {
	case s.cur.row == s.bottom:
		s.scrollUp(s.top, 1)
	case s.cur.row < s.rows-1:
		s.cur.row++
	}
}

// scrollUp moves the lines from a row of the region on up by n, in time of rows alone.
func (s *Screen) scrollUp(from, n int) {
	n = min(n, s.bottom-from+1)
	if from == 0 {
		for _, l := range s.lines[:n] {
			s.leave(l)
		}
	}
	if n == 1 { // its memory serves again
		first := s.lines[from]
		copy(s.lines[from:s.bottom], s.lines[from+1:s.bottom+1])
		s.lines[s.bottom] = first[:0]
		return
	}
	copy(s.lines[from:s.bottom+1], s.lines[from+n:s.bottom+1])
	clear(s.lines[s.bottom+1-n : s.bottom+1])
}

func (s *Screen) scrollDown(from, n int) {
	n = min(n, s.bottom-from+1)
	copy(s.lines[from+n:s.bottom+1], s.lines[from:s.bottom+1-n])
	clear(s.lines[from : from+n])
}

// erase blanks the columns of a row from one to before another.
func (s *Screen) erase(row, from, to int) {
	l := s.lines[row]
	if to >= s.columns {
		if s.cur.style.Bg == 0 {
			s.lines[row] = l[:min(len(l), from)]
			return
		}
		to = s.columns
	}
	if s.cur.style.Bg == 0 {
		to = min(to, len(l))
	} else {
		l = s.pad(row, to)
	}
	for i := from; i < to; i++ {
		l[i] = cell{r: ' ', style: Style{Bg: s.cur.style.Bg}}
	}
}

// eraseDisplay blanks what ED says: 0 from the cursor on, 1 up to it, 2 and 3 all.
func (s *Screen) eraseDisplay(mode int) {
	from, to := 0, s.rows
	switch mode {
	case 0:
		s.erase(s.cur.row, s.cur.col, s.columns)
		from = s.cur.row + 1
	case 1:
		s.erase(s.cur.row, 0, s.cur.col+1)
		to = s.cur.row
	case 2:
		for _, l := range s.lines[:s.used()] {
			s.leave(l)
		}
	}
	if from < to {
		clear(s.lines[from:to]) // a colored background is not kept: it would cost rows times columns
	}
}

// used is how many rows there are up to the last that is not empty.
func (s *Screen) used() int {
	n := len(s.lines)
	for n > 0 && len(s.lines[n-1]) == 0 {
		n--
	}
	return n
}

// Rest is what the screen shows, up to the last row that is not empty.
func (s *Screen) Rest() (rows [][]Run) {
	for i := range s.used() {
		rows = append(rows, s.Row(i))
	}
	return rows
}

// move puts the cursor at a place within the screen.
func (s *Screen) move(row, col int) {
	s.cur.row, s.cur.col, s.cur.wrap = min(max(row, 0), s.rows-1), min(max(col, 0), s.columns-1), false
}

// swap changes between the two screens of a terminal.
func (s *Screen) swap(alternate bool) {
	if s.alternate == alternate {
		return
	}
	s.alternate = alternate
	s.lines, s.other = s.other, s.lines
	if alternate {
		s.otherCursor = s.cur
		clear(s.lines)
	} else {
		s.cur = s.otherCursor
		s.move(s.cur.row, s.cur.col)
	}
	s.top, s.bottom = 0, s.rows-1
}

// drawing is the set of line drawing of the VT100.
var drawing = map[rune]rune{
	'`': '◆', 'a': '▒', 'f': '°', 'g': '±', 'j': '┘', 'k': '┐', 'l': '┌', 'm': '└', 'n': '┼', 'o': '⎺', 'p': '⎻',
	'q': '─', 'r': '⎼', 's': '⎽', 't': '├', 'u': '┤', 'v': '┴', 'w': '┬', 'x': '│', 'y': '≤', 'z': '≥', '{': 'π',
	'|': '≠', '}': '£', '~': '·',
}
