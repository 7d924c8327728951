package screen

import (
	"strconv"
	"unicode/utf8"
)

// The bounds of a sequence.
const (
	maxParams = 16
	maxParam  = 9999
	// maxString is how many bytes of a title, a link or the like are skipped. What goes on for
	// longer is shown: a program must not be able to hide its output.
	maxString = 4096
)

type state byte

const (
	ground state = iota
	escape
	designate // the byte after "ESC ("
	skipOne   // the byte after "ESC #" and the like
	control   // CSI
	text      // of OSC, DCS, APC, PM or SOS
)

type parser struct {
	state    state
	params   [maxParams]int
	count    int  // of params that have begun
	sub      bool // a colon was there: what it says of a style is not known
	private  byte
	between  bool // an intermediate byte was there: no sequence of ours
	skipped  int
	escaped  bool // the last byte of a string was ESC
	held     [utf8.UTFMax]byte
	heldSize int
}

// Write shows output. It never fails.
func (s *Screen) Write(p []byte) (int, error) {
	for _, b := range p {
		s.byte(b)
	}
	return len(p), nil
}

func (s *Screen) byte(b byte) {
	if s.heldSize > 0 {
		if b&0xc0 == 0x80 {
			s.held[s.heldSize] = b
			s.heldSize++
			if held := s.held[:s.heldSize]; utf8.FullRune(held) {
				r, n := utf8.DecodeRune(held)
				size := s.heldSize
				if s.heldSize = 0; n < size {
					r = utf8.RuneError
				}
				s.rune(r)
			}
			return
		}
		s.heldSize = 0
		s.rune(utf8.RuneError)
	}
	switch s.state {
	case ground:
		s.ground(b)
	case escape:
		s.escape(b)
	case designate:
		s.cur.drawing = b == '0'
		s.state = ground
	case skipOne:
		s.state = ground
	case control:
		s.control(b)
	case text:
		s.text(b)
	}
}

func (s *Screen) ground(b byte) {
	switch {
	case b < ' ':
		s.c0(b)
	case b < 0x7f:
		s.put(rune(b))
	case b == 0x7f:
	case b >= 0xc2 && b <= 0xf4:
		s.held[0], s.heldSize = b, 1
	default:
		s.put(utf8.RuneError)
	}
}

// rune takes a character outside of ASCII, wherever it stands.
func (s *Screen) rune(r rune) {
	if s.state != ground {
		s.state = ground // no sequence has such
	}
	switch {
	case strconv.IsPrint(r):
		s.put(r)
	case r >= 0xa0: // one that would order or hide others
		s.put(utf8.RuneError)
	}
}

func (s *Screen) c0(b byte) {
	switch b {
	case '\b':
		s.move(s.cur.row, s.cur.col-1)
	case '\t':
		s.move(s.cur.row, s.cur.col/8*8+8)
	case '\n', '\v', '\f':
		if s.newline {
			s.cur.col = 0
		}
		s.cur.wrap = false
		s.feed()
	case '\r':
		s.move(s.cur.row, 0)
	case 0x0e:
		s.cur.drawing = true
	case 0x0f:
		s.cur.drawing = false
	case 0x1b:
		s.state = escape
	}
}

func (s *Screen) escape(b byte) {
	s.state = ground
	switch b {
	case '[':
		s.state = control
		s.params, s.count, s.sub, s.private, s.between = [maxParams]int{}, 0, false, 0, false
	case ']', 'P', '_', '^', 'X':
		s.state, s.skipped, s.escaped = text, 0, false
	case '(':
		s.state = designate
	case ')', '*', '+', '-', '.', '/', '#', '%', ' ':
		s.state = skipOne
	case '7':
		s.saved = s.cur
	case '8':
		s.restore()
	case 'D':
		s.feed()
	case 'E':
		s.cur.col, s.cur.wrap = 0, false
		s.feed()
	case 'M':
		if s.cur.row == s.top {
			s.scrollDown(s.top, 1)
		} else {
			s.move(s.cur.row-1, s.cur.col)
		}
	case 'c':
		for _, l := range s.lines[:s.used()] {
			s.leave(l)
		}
		s.reset()
	default:
		if b < ' ' {
			s.c0(b)
		}
	}
}

func (s *Screen) restore() {
	s.cur = s.saved
	s.move(s.cur.row, s.cur.col)
}

// text skips a string up to its end.
func (s *Screen) text(b byte) {
	s.skipped++
	switch {
	case b == 0x07, b == 0x18, b == 0x1a, s.escaped && b == '\\', s.skipped > maxString:
		s.state = ground
	case s.escaped && b != 0x1b: // another sequence
		s.state = escape
		s.byte(b)
	}
	s.escaped = b == 0x1b
}

func (s *Screen) control(b byte) {
	switch {
	case b < ' ' || b == 0x7f:
		if b == 0x18 || b == 0x1a {
			s.state = ground
		} else {
			s.c0(b)
		}
	case b >= '0' && b <= '9':
		if s.count == 0 {
			s.count = 1
		}
		if p := &s.params[s.count-1]; *p <= maxParam {
			*p = min(*p*10+int(b-'0'), maxParam)
		}
	case b == ';' || b == ':':
		s.sub = s.sub || b == ':'
		s.count = min(max(s.count, 1)+1, maxParams)
		s.params[s.count-1] = 0
	case b >= '<' && b <= '?':
		s.private = b
	case b < '0':
		s.between = true
	case b >= '@' && b <= '~':
		s.state = ground
		if !s.between {
			s.run(b)
		}
	default: // no byte of a sequence: it is shown
		s.state = ground
		s.ground(b)
	}
}

// param is a parameter; what is missing or 0 is the fallback.
func (s *Screen) param(i, fallback int) int {
	if i < s.count && s.params[i] > 0 {
		return s.params[i]
	}
	return fallback
}

// run carries out a control sequence. Those that are not named here do nothing: queries,
// reports and what changes a window are among them.
func (s *Screen) run(final byte) {
	if s.private != 0 {
		if s.private == '?' && (final == 'h' || final == 'l') {
			s.modes(final == 'h')
		}
		return
	}
	n := s.param(0, 1)
	c := &s.cur
	switch final {
	case 'A':
		s.move(max(c.row-n, s.limit(c.row >= s.top, s.top, 0)), c.col)
	case 'B', 'e':
		s.move(min(c.row+n, s.limit(c.row <= s.bottom, s.bottom, s.rows-1)), c.col)
	case 'C', 'a':
		s.move(c.row, c.col+n)
	case 'D':
		s.move(c.row, c.col-n)
	case 'E':
		s.move(c.row+n, 0)
	case 'F':
		s.move(c.row-n, 0)
	case 'G', '`':
		s.move(c.row, n-1)
	case 'H', 'f':
		s.place(n-1, s.param(1, 1)-1)
	case 'd':
		s.place(n-1, c.col)
	case 'I':
		s.move(c.row, (c.col/8+min(n, s.columns))*8)
	case 'Z':
		s.move(c.row, (c.col+7)/8*8-8*min(n, s.columns))
	case 'J':
		s.eraseDisplay(s.param(0, 0))
	case 'K':
		switch s.param(0, 0) {
		case 0:
			s.erase(c.row, c.col, s.columns)
		case 1:
			s.erase(c.row, 0, c.col+1)
		case 2:
			s.erase(c.row, 0, s.columns)
		}
	case 'X':
		s.erase(c.row, c.col, min(c.col+n, s.columns))
	case 'L':
		if c.row >= s.top && c.row <= s.bottom {
			s.scrollDown(c.row, n)
		}
	case 'M':
		if c.row >= s.top && c.row <= s.bottom {
			n = min(n, s.bottom-c.row+1)
			copy(s.lines[c.row:s.bottom+1], s.lines[c.row+n:s.bottom+1])
			clear(s.lines[s.bottom+1-n : s.bottom+1])
		}
	case 'S':
		s.scrollUp(s.top, n)
	case 'T':
		s.scrollDown(s.top, n)
	case 'P':
		if l := s.lines[c.row]; c.col < len(l) {
			n = min(n, len(l)-c.col)
			s.lines[c.row] = append(l[:c.col], l[c.col+n:]...)
		}
	case '@':
		if l := s.lines[c.row]; c.col < len(l) {
			n = min(n, s.columns-c.col)
			l = append(l, make(line, n)...)
			copy(l[c.col+n:], l[c.col:])
			for i := range n {
				l[c.col+i] = cell{r: ' '}
			}
			s.lines[c.row] = l[:min(len(l), s.columns)]
		}
	case 'b':
		if s.last != 0 {
			for range min(n, s.columns) {
				s.put(s.last)
			}
		}
	case 'm':
		s.style()
	case 'r':
		top, bottom := n-1, min(s.param(1, s.rows), s.rows)-1
		if top < bottom {
			s.top, s.bottom = top, bottom
			s.place(0, 0)
		}
	case 'h', 'l':
		for _, p := range s.params[:s.count] {
			if p == 4 {
				s.insert = final == 'h'
			}
		}
	case 's':
		s.saved = s.cur
	case 'u':
		s.restore()
	}
}

// limit is how far a cursor moves: not out of the region that it is in.
func (s *Screen) limit(inside bool, edge, end int) int {
	if inside {
		return edge
	}
	return end
}

// place moves the cursor to where a program says, which may count from the region's top.
func (s *Screen) place(row, col int) {
	if s.cur.origin {
		row = min(row+s.top, s.bottom)
	}
	s.move(row, col)
}

func (s *Screen) modes(on bool) {
	for _, p := range s.params[:s.count] {
		switch p {
		case 6:
			s.cur.origin = on
			s.place(0, 0)
		case 7:
			s.noWrap = !on
		case 25:
			s.hiddenCursor = !on
		case 47, 1047, 1049:
			s.swap(on)
		}
	}
}

// style carries out SGR.
func (s *Screen) style() {
	style := &s.cur.style
	if s.sub { // "4:3" and "38:2::R:G:B" in the form that few programs use
		return
	}
	params := s.params[:max(s.count, 1)]
	for len(params) > 0 {
		p := params[0]
		params = params[1:]
		switch {
		case p == 0:
			*style = Style{}
		case p == 38 || p == 48:
			var c Color
			if c, params = color(params); p == 38 {
				style.Fg = c
			} else {
				style.Bg = c
			}
		case p >= 30 && p <= 37:
			style.Fg = Color(p - 30 + 1)
		case p == 39:
			style.Fg = 0
		case p >= 40 && p <= 47:
			style.Bg = Color(p - 40 + 1)
		case p == 49:
			style.Bg = 0
		case p >= 90 && p <= 97:
			style.Fg = Color(p - 90 + 8 + 1)
		case p >= 100 && p <= 107:
			style.Bg = Color(p - 100 + 8 + 1)
		case p == 22:
			style.Attr &^= Bold | Dim
		case p == 21:
			style.Attr |= Underline
		default:
			for _, attr := range []struct {
				on, off int
				attr    Attr
			}{{1, 22, Bold}, {2, 22, Dim}, {3, 23, Italic}, {4, 24, Underline}, {7, 27, Reverse}, {9, 29, Strike}} {
				switch p {
				case attr.on:
					style.Attr |= attr.attr
				case attr.off:
					style.Attr &^= attr.attr
				}
			}
		}
	}
}

// color reads "5;N" or "2;R;G;B".
func color(params []int) (Color, []int) {
	switch {
	case len(params) >= 2 && params[0] == 5:
		return Color(min(params[1], 255) + 1), params[2:]
	case len(params) >= 4 && params[0] == 2:
		c := direct
		for _, p := range params[1:4] {
			c = c&direct | (c&^direct)<<8 | Color(min(p, 255))
		}
		return c, params[4:]
	}
	return 0, nil
}
