package credential

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"html"
	"net/url"
	"strings"
)

// class says what a found text is.
type class uint8

const (
	placeholder class = iota
	secret
)

// needle is one text that is looked for.
type needle struct {
	text    string
	class   class
	binding string // the id of the one that it belongs to
}

// shortest is the length from which a text can be told from chance.
const shortest = 8

// matcher finds needles in bytes, as they are and in the encodings in which programs write
// them: an automaton of Aho and Corasick, with few edges, since a secret may be long.
type matcher struct {
	needles []needle
	root    [256]int32 // the state after one byte
	// pairs has a bit for each two bytes that begin a needle or an escape.
	pairs   [1 << 16 / 64]uint64
	nodes   []node // nodes[0] is the root
	longest int
	// window is how many bytes hold, in any encoding, as much of a needle as is masked without the
	// rest.
	window int64
	folded bool // needles are found in upper and lower case
}

type node struct {
	next  []edge
	fail  int32
	depth int32
	// begun is how many of the last bytes begin a needle so far that they are masked, with as many
	// as are missing of whole, whatever those are; begins is that needle, counted from one, and
	// beginsGroup as group is.
	begun, whole, begins int32
	beginsGroup          int8
	// found is the needle that ends here, counted from one; length is that of its text in this
	// encoding. A longer text wins over those that are its ends.
	found  int32
	length int32
	// group is, for base64, which character of a group of four the text begins with, counted
	// from one.
	group int8
}

type edge struct {
	b  byte
	to int32
}

func newMatcher(needles []needle) *matcher { return newMatcherOf(needles, false) }

func newMatcherOf(needles []needle, folded bool) *matcher {
	m := &matcher{needles: needles, nodes: make([]node, 1), folded: folded}
	for i, n := range needles {
		guess := enough(n.text)
		var begun []variant
		if guess < len(n.text) {
			begun = variants(n.text[:guess])
		}
		m.window = max(m.window, int64(min(guess, len(n.text))+1)*longestEscape)
		for j, v := range variants(n.text) {
			from := len(v.text) + 1
			if begun != nil {
				from = len(begun[j].text)
				if v.group > 0 {
					from++ // the last character has bits of what comes next
				}
			}
			if folded {
				v.text, v.group = strings.ToLower(v.text), 0
			}
			m.add(v.text, int32(i+1), v.group, from)
		}
	}
	m.link()
	for _, first := range introducers {
		for second := range 256 {
			m.pair(first, byte(second))
		}
	}
	for _, e := range m.nodes[0].next {
		for _, second := range introducers {
			m.pair(e.b, second)
		}
		for _, second := range m.nodes[e.to].next {
			m.pair(e.b, second.b)
		}
	}
	return m
}

// enough is how many bytes of a text must have come, in whatever encoding, before they are masked
// because they are its start. To mask fewer would tell whoever sends and sees them that they are
// right, and so the text character by character. What comes after them is masked up to the length
// of the text whatever it is, which tells nothing about it.
func enough(text string) int { return max(12, (len(text)+1)/2) }

// add takes a text in. From says from which length on its start is masked.
func (m *matcher) add(text string, found int32, group int8, from int) {
	at := int32(0)
	for i := range len(text) {
		to := m.edge(at, text[i])
		if to == 0 {
			to = int32(len(m.nodes))
			m.nodes = append(m.nodes, node{depth: int32(i + 1)})
			m.nodes[at].next = append(m.nodes[at].next, edge{text[i], to})
		}
		at = to
		if n := &m.nodes[at]; i+1 >= from && int32(len(text)) > n.whole {
			n.begun, n.whole, n.begins, n.beginsGroup = int32(i+1), int32(len(text)), found, group
		}
	}
	if m.nodes[at].found == 0 {
		m.nodes[at].found = found
		m.nodes[at].length = int32(len(text))
		m.nodes[at].group = group
	}
	m.longest = max(m.longest, len(text))
}

func (m *matcher) pair(first, second byte) {
	n := uint(first)<<8 | uint(second)
	m.pairs[n/64] |= 1 << (n % 64)
}

func (m *matcher) edge(at int32, b byte) int32 {
	for _, e := range m.nodes[at].next {
		if e.b == b {
			return e.to
		}
	}
	return 0
}

// link sets, breadth first, for each node the longest proper end of its text that is a
// node too.
func (m *matcher) link() {
	var queue []int32
	for _, e := range m.nodes[0].next {
		m.root[e.b] = e.to
		queue = append(queue, e.to)
	}
	for len(queue) > 0 {
		at := queue[0]
		queue = queue[1:]
		if n := &m.nodes[at]; n.begun == 0 || len(n.next) == 0 { // nothing longer begins with it
			f := &m.nodes[n.fail]
			n.begun, n.whole, n.begins, n.beginsGroup = f.begun, f.whole, f.begins, f.beginsGroup
		}
		for _, e := range m.nodes[at].next {
			fail := m.step(m.nodes[at].fail, e.b)
			m.nodes[e.to].fail = fail
			if n := &m.nodes[e.to]; n.found == 0 {
				n.found, n.length, n.group = m.nodes[fail].found, m.nodes[fail].length, m.nodes[fail].group
			}
			queue = append(queue, e.to)
		}
	}
}

// step returns the state after one more byte.
func (m *matcher) step(at int32, b byte) int32 {
	for at != 0 {
		if to := m.edge(at, b); to != 0 {
			return to
		}
		at = m.nodes[at].fail
	}
	return m.root[b]
}

// variants are the forms of a text that one search finds: itself, percent, JSON and HTML
// in their usual forms (decoder finds the unusual ones), hexadecimal digits, and base64
// wherever it may begin in what is encoded.
func variants(text string) (all []variant) {
	for _, form := range []string{
		text, url.QueryEscape(text), url.PathEscape(text), jsonEscape(text), html.EscapeString(text),
		hex.EncodeToString([]byte(text)), strings.ToUpper(hex.EncodeToString([]byte(text))),
	} {
		all = append(all, variant{text: form})
	}
	for before := range 3 {
		// Characters that hold bits of a neighbour are left out: 6 bits each, 8 of a byte.
		padded := append(make([]byte, before), text...)
		from := (8*before + 5) / 6
		to := 8 * len(padded) / 6
		for _, encoding := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
			all = append(all, variant{encoding.EncodeToString(padded)[from:to], int8(from%4 + 1)})
		}
	}
	return all
}

// variant is one form of a text.
type variant struct {
	text  string
	group int8 // as in node
}

func jsonEscape(text string) string {
	b, _ := json.Marshal(text) // a string
	return string(b[1 : len(b)-1])
}

// first returns the first needle in text, or nil.
func (m *matcher) first(text string) *needle {
	if m.folded {
		text = strings.ToLower(text)
	}
	if !m.begins(text) {
		return nil
	}
	s := stream{matcher: m}
	var hit *needle
	s.hit = func(n *node, _, _ int64) bool { hit = &m.needles[n.found-1]; return false }
	s.run([]byte(text))
	return hit
}

// begins says whether a needle or an escape may begin in text.
func (m *matcher) begins(text string) bool {
	if len(m.needles) == 0 {
		return false
	}
	for i := 1; i < len(text); i++ {
		pair := uint(text[i-1])<<8 | uint(text[i])
		if m.pairs[pair/64]&(1<<(pair%64)) != 0 {
			return true
		}
	}
	return false
}
