package credential

import "bytes"

// stream looks for needles in bytes that come in pieces. Beside the bytes themselves it
// follows them with their escapes undone (percent, JSON, HTML), in which any character may
// be written in many ways.
type stream struct {
	*matcher
	// hit is called for each needle, by the node that it was found with, and its place in the
	// stream; false ends the search.
	hit func(n *node, from, to int64) bool
	// start is called for each node with which a needle has begun, as hit is; nil for nobody who
	// wants to know.
	start func(n *node, from, to int64)
	// exact has what begins like a needle masked as far as it does, and nothing after it: what
	// comes next may be the structure of what is looked through.
	exact bool

	pos   int64 // bytes seen
	raw   int32 // state
	dec   int32 // state of the bytes with escapes undone
	ended bool

	// escaped is what was read of an escape that is not complete.
	escaped []byte
	// apart says that dec is not raw; starts are then the places of the last characters that
	// dec has seen, as many as its depth at least.
	apart  bool
	starts []int64

	held []byte // of feed: seen, and not yet given on
	base int64  // the place of the first byte of held, while feed runs
	due  int64  // the place up to which late gives on

	// Of a needle that has begun at since, what comes is masked before the place until, and, of
	// the bytes with escapes undone, that many chars.
	since, until int64
	group        int8 // of what is masked until
	chars        int64
}

// longestEscape is that of HTML: &#x010ffff; and the like.
const longestEscape = 11

// run looks through the next bytes.
func (s *stream) run(b []byte) {
	for i := 0; i < len(b) && !s.ended; {
		if s.raw == 0 && !s.apart && s.pos >= s.until {
			// Most bytes begin nothing.
			n := i
			for n+1 < len(b) {
				pair := uint(b[n])<<8 | uint(b[n+1])
				if s.pairs[pair/64]&(1<<(pair%64)) != 0 {
					break
				}
				n++
			}
			s.pos += int64(n - i)
			i = n
		}
		c, before := b[i], s.raw
		i++
		s.raw = s.step(s.raw, c)
		s.pos++
		if s.pos <= s.until {
			s.blank(s.pos-1, s.group)
		}
		n := &s.nodes[s.raw]
		if n.found != 0 {
			s.found(n, s.pos-int64(n.length), s.pos)
		}
		if n.begun != 0 && s.start != nil {
			from := s.pos - int64(n.begun)
			if !s.exact {
				s.since, s.until, s.group = from, max(s.until, from+int64(n.whole)), n.beginsGroup
			}
			s.start(n, from, s.pos)
		}
		switch {
		case s.apart:
			s.decode(c, s.pos-1)
			s.join()
		case introduces(c):
			s.part(before)
			s.decode(c, s.pos-1)
		}
	}
}

func (s *stream) found(n *node, from, to int64) {
	s.until, s.chars = min(s.until, to), 0 // it is whole
	if !s.ended && !s.hit(n, from, to) {
		s.ended = true
	}
}

// blank masks a byte of a needle that has begun, if it is still there.
func (s *stream) blank(at int64, group int8) {
	if at >= s.base {
		blot(s.held[at-s.base:at-s.base+1], group, int(at-s.since), true)
	}
}

// introducers begin escapes.
var introducers = [...]byte{'%', '\\', '&'}

func introduces(c byte) bool { return c == '%' || c == '\\' || c == '&' }

// decode takes the byte at a place.
func (s *stream) decode(c byte, at int64) {
	if s.chars > 0 {
		s.blank(at, 0)
	}
	if len(s.escaped) == 0 && !introduces(c) {
		s.plain(c, at, at+1)
		return
	}
	s.escaped = append(s.escaped, c)
	text, complete := unescape(s.escaped)
	if !complete {
		return
	}
	from := at + 1 - int64(len(s.escaped))
	if text == "" {
		// No escape: its first byte stands for itself, and those after it may begin another.
		var b [longestEscape]byte
		n := copy(b[:], s.escaped)
		s.escaped = s.escaped[:0]
		s.plain(b[0], from, from+1)
		for i := 1; i < n; i++ {
			s.decode(b[i], from+int64(i))
		}
		return
	}
	s.escaped = s.escaped[:0]
	for i := range len(text) {
		s.plain(text[i], from, at+1)
	}
}

// part lets dec go its own way from the state before the last byte.
func (s *stream) part(before int32) {
	s.apart = true
	s.dec = before
	s.chars = max(s.until-(s.pos-1), 0)
	s.starts = s.starts[:0]
	for at := s.pos - 1 - int64(s.nodes[before].depth); at < s.pos-1; at++ {
		s.starts = append(s.starts, at)
	}
}

// plain takes one character and the place of what it was written as.
func (s *stream) plain(c byte, from, to int64) {
	if s.folded && c >= 'A' && c <= 'Z' {
		c += 'a' - 'A'
	}
	s.dec = s.step(s.dec, c)
	s.starts = append(s.starts, from)
	s.chars = max(s.chars-1, 0)
	n := &s.nodes[s.dec]
	if n.found != 0 {
		s.found(n, s.starts[len(s.starts)-int(n.length)], to)
	}
	if n.begun != 0 && s.start != nil {
		if !s.exact {
			s.chars = max(s.chars, int64(n.whole-n.begun))
		}
		s.start(n, s.starts[len(s.starts)-int(n.begun)], to)
	}
	if depth := int(s.nodes[s.dec].depth); len(s.starts) > 2*s.longest+64 {
		s.starts = append(s.starts[:0], s.starts[len(s.starts)-depth:]...)
	}
}

// join ends the going apart when both states are the same, of the same bytes.
func (s *stream) join() {
	if s.dec != s.raw || len(s.escaped) > 0 {
		return
	}
	depth := int64(s.nodes[s.dec].depth)
	if depth == 0 || s.starts[int64(len(s.starts))-depth] == s.pos-depth {
		s.apart = false
		s.until, s.chars = max(s.until, s.pos+s.chars), 0
	}
}

// unescape reads one escape. It is complete when no more bytes are needed to tell; text is
// empty when it is none.
func unescape(b []byte) (text string, complete bool) {
	if len(b) < 2 {
		return "", false
	}
	switch b[0] {
	case '%':
		if unhex(b[1]) < 0 {
			return "", true
		}
		if len(b) < 3 {
			return "", false
		}
		return octet(b[1:3])
	case '\\':
		switch b[1] {
		case '"', '\\', '/', '\'':
			return string(b[1]), true
		case 'n':
			return "\n", true
		case 't':
			return "\t", true
		case 'r':
			return "\r", true
		case 'b':
			return "\b", true
		case 'f':
			return "\f", true
		case 'x':
			if len(b) < 4 {
				return "", len(b) == 3 && unhex(b[2]) < 0
			}
			return octet(b[2:4])
		case 'u':
			for _, c := range b[2:] {
				if unhex(c) < 0 {
					return "", true
				}
			}
			if len(b) < 6 {
				return "", false
			}
			return number(b[2:], 16), true
		}
		return "", true
	}
	end := bytes.IndexByte(b, ';')
	if end < 0 {
		if len(b) >= longestEscape || !isEntity(b[len(b)-1]) {
			return "", true
		}
		return "", false
	}
	name := b[1:end]
	switch string(name) {
	case "amp":
		return "&", true
	case "lt":
		return "<", true
	case "gt":
		return ">", true
	case "quot":
		return `"`, true
	case "apos":
		return "'", true
	}
	if len(name) < 2 || name[0] != '#' {
		return "", true
	}
	if name[1] == 'x' || name[1] == 'X' {
		return number(name[2:], 16), true
	}
	return number(name[1:], 10), true
}

// octet reads two hexadecimal digits.
func octet(b []byte) (string, bool) {
	high, low := unhex(b[0]), unhex(b[1])
	if high < 0 || low < 0 {
		return "", true
	}
	return string([]byte{byte(high<<4 | low)}), true
}

// number returns the character of a number.
func number(digits []byte, base int) string {
	n := 0
	for _, c := range digits {
		d := unhex(c)
		if d < 0 || d >= base || n > 0x10ffff {
			return ""
		}
		n = n*base + d
	}
	if len(digits) == 0 {
		return ""
	}
	return string(rune(n))
}

func unhex(c byte) int {
	switch {
	case c >= '0' && c <= '9':
		return int(c - '0')
	case c >= 'a' && c <= 'f':
		return int(c-'a') + 10
	case c >= 'A' && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}

func isEntity(c byte) bool {
	return c == '#' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
}

// feed looks through piece, and appends to dst what is given on. The last bytes are kept back
// whatever they are, so that the start of a needle in several pieces is there to be masked; late
// gives them on when no more comes. With last set nothing is kept. In mask, needles become
// asterisks, so that lengths stay as they are; so do texts as long that only begin like one, far
// enough, or with exact what of them does. found is the first needle of this piece, or without mask what begins like one.
func (s *stream) feed(dst, piece []byte, mask, last bool) (out []byte, found *needle) {
	s.base = s.pos - int64(len(s.held))
	fresh := len(s.held) == 0
	s.held = append(s.held, piece...)
	cover := func(n int32, group int8, from, to int64, plain bool) {
		if found == nil {
			found = &s.needles[n-1]
		}
		if mask && to > s.base { // an escape that is none may end a needle that is gone
			skipped := max(s.base-from, 0) // it was given on
			blot(s.held[from+skipped-s.base:to-s.base], group, int(skipped), plain)
		}
	}
	s.hit = func(n *node, from, to int64) bool {
		cover(n.found, n.group, from, to, to-from == int64(n.length))
		return mask
	}
	s.start = func(n *node, from, to int64) {
		before := found
		cover(n.begins, n.beginsGroup, from, to, to-from == int64(n.begun))
		if mask {
			found = before // whether it was one is not known
		} else {
			s.ended = true
		}
	}
	s.run(piece)
	if fresh {
		s.due = s.pos
	}
	keep := s.pos
	if !last {
		keep -= s.window
	}
	return s.release(dst, keep), found
}

// late appends to dst what was kept back when late was called last, or since nothing was. It is
// to be called each time that bytes may be kept back, while waits is true.
func (s *stream) late(dst []byte) []byte {
	dst = s.release(dst, s.due)
	s.due = s.pos
	return dst
}

// waits says whether late gives something on, at the first call or the second.
func (s *stream) waits() bool { return len(s.held) > 0 }

// release appends to dst what is kept back of the bytes before a place.
func (s *stream) release(dst []byte, to int64) []byte {
	n := max(to-(s.pos-int64(len(s.held))), 0)
	dst = append(dst, s.held[:n]...)
	s.held = append(s.held[:0], s.held[n:]...)
	return dst
}

// blots are asterisks in base64.
const blots = "Kioq"

// blot writes asterisks, in the encoding of what is written over, so that it stays readable:
// base64 of a text that begins with the character of that group, of which some were skipped,
// unless there are escapes in it.
func blot(b []byte, group int8, skipped int, plain bool) {
	for i := range b {
		if b[i] = '*'; group > 0 && plain {
			b[i] = blots[(int(group)-1+skipped+i)%len(blots)]
		}
	}
}
