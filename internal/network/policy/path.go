package policy

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/berm-sandbox/berm"
)

// maxTarget is the most bytes of a request target.
const maxTarget = 16 << 10

// path is a path as it is judged and forwarded.
type path struct {
	// text is the canonical form, which is forwarded: percent-encoding only where it is
	// needed, no dot segments.
	text string
	// readings are the ways in which servers may read it, as decoded segments: as it is,
	// with encoded slashes as separators, and without parameters after semicolons. A rule
	// must allow all of them.
	readings [][]string
}

// CanonicalPath is the form of a path in which policies compare it. It fails with Invalid
// on what servers are known to read in different ways.
func CanonicalPath(raw string) (string, error) {
	p, err := parsePath(raw)
	return p.text, err
}

// parsePath reads the path of a request target. It fails with Invalid on what servers are
// known to read in different ways.
func parsePath(raw string) (path, error) {
	wrong := func(why string) error { return berm.Errorf(berm.Invalid, "the path %q %s", clip(raw), why) }
	if !strings.HasPrefix(raw, "/") {
		return path{}, wrong("does not begin with a slash")
	}
	if len(raw) > maxTarget {
		return path{}, wrong("is too long")
	}
	var text, segments []string
	var slashes, parameters bool
	pieces := strings.Split(raw[1:], "/")
	for i, piece := range pieces {
		last := i == len(pieces)-1
		canonical, segment, why := decodeSegment(piece)
		if why != "" {
			return path{}, wrong(why)
		}
		if strings.Contains(segment, "/") {
			slashes = true
			for part := range strings.SplitSeq(segment, "/") {
				if name, _, _ := strings.Cut(part, ";"); name == "" || name == "." || name == ".." {
					return path{}, wrong("has an encoded slash beside a dot segment or an empty one")
				}
			}
		}
		for part := range strings.SplitSeq(segment, "/") {
			if almostDots(part) {
				return path{}, wrong("has a segment of dots and spaces")
			}
		}
		name, _, hasParameters := strings.Cut(segment, ";")
		parameters = parameters || hasParameters
		switch {
		case name == "" && !hasParameters && !last:
			return path{}, wrong("has an empty segment")
		case hasParameters && (name == "" || name == "." || name == ".."):
			return path{}, wrong("has parameters at a dot segment or an empty one")
		case name == ".." && len(segments) > 0:
			text, segments = text[:len(text)-1], segments[:len(segments)-1]
		}
		if name == "." || name == ".." {
			if !last {
				continue
			}
			canonical, segment = "", ""
		}
		text, segments = append(text, canonical), append(segments, segment)
	}
	p := path{text: "/" + strings.Join(text, "/"), readings: [][]string{segments}}
	if slashes {
		p.readings = append(p.readings, strings.Split(strings.Join(segments, "/"), "/"))
	}
	if parameters {
		for _, reading := range slices.Clone(p.readings) {
			bare := make([]string, len(reading))
			for i, segment := range reading {
				bare[i], _, _ = strings.Cut(segment, ";")
			}
			p.readings = append(p.readings, bare)
		}
	}
	return p, nil
}

// almostDots says whether a decoded segment is nothing but dots and spaces, and no dot segment:
// some servers take it for one, since they strip spaces, or dots at an end.
func almostDots(segment string) bool {
	name, _, _ := strings.Cut(segment, ";")
	rest := strings.TrimFunc(name, func(r rune) bool { return r == '.' || unicode.IsSpace(r) })
	return rest == "" && name != "" && name != "." && name != ".."
}

// decodeSegment returns a segment in canonical encoding (RFC 3986 6.2.2) and decoded
// once, or says what is wrong with it.
func decodeSegment(raw string) (canonical, decoded, why string) {
	const upperHex = "0123456789ABCDEF"
	var c, d strings.Builder
	escape := func(b byte) {
		c.WriteByte('%')
		c.WriteByte(upperHex[b>>4])
		c.WriteByte(upperHex[b&15])
	}
	for i := 0; i < len(raw); i++ {
		b, encoded := raw[i], false
		if b == '%' {
			if b, encoded = unhex(raw[i+1:]); !encoded {
				return "", "", "has a percent sign that encodes nothing"
			}
			i += 2
			if _, twice := unhex(raw[i+1:]); twice && b == '%' {
				return "", "", "is encoded twice"
			}
		}
		d.WriteByte(b)
		switch {
		case b < 0x20 || b == 0x7f:
			return "", "", "has a control character"
		case b == '\\':
			return "", "", "has a backslash"
		case !encoded && (b == ' ' || b == '?' || b == '#'):
			return "", "", "has a character that must be encoded"
		case unreserved(b), !encoded && strings.IndexByte("!$&'()*+,;=:@", b) >= 0:
			c.WriteByte(b)
		default:
			escape(b)
		}
	}
	decoded = d.String()
	switch {
	case !utf8.ValidString(decoded):
		return "", "", "is not UTF-8" // also overlong forms of dots and slashes
	// What servers that convert to older character sets, or normalise (NFKC), make dots and
	// slashes of.
	case strings.ContainsAny(decoded, "\uff0f\uff3c\ufe68\u2044\u2215"):
		return "", "", "has a slash in another form"
	case strings.ContainsAny(decoded, "\uff0e\u2024\u2025\ufe52") && strings.Trim(decoded, ".\uff0e\u2024\u2025\ufe52") == "":
		return "", "", "has dots in another form"
	}
	return c.String(), decoded, ""
}

func unreserved(b byte) bool {
	return 'a' <= b && b <= 'z' || 'A' <= b && b <= 'Z' || '0' <= b && b <= '9' || strings.IndexByte("-._~", b) >= 0
}

func unhex(s string) (byte, bool) {
	if len(s) < 2 {
		return 0, false
	}
	high, low := strings.IndexByte("0123456789abcdef", s[0]|0x20), strings.IndexByte("0123456789abcdef", s[1]|0x20)
	// The bit that makes lower case makes other characters digits, too.
	if high < 0 || low < 0 || s[0] < '0' || s[1] < '0' {
		return 0, false
	}
	return byte(high<<4 | low), true
}

// queryKeys are the keys of a query, decoded.
func queryKeys(raw string) ([]string, error) {
	var keys []string
	for pair := range strings.SplitSeq(raw, "&") {
		if pair == "" {
			continue
		}
		if strings.Contains(pair, ";") {
			return nil, berm.Errorf(berm.Invalid, "the query has a semicolon, which some servers take for a separator")
		}
		key, _, _ := strings.Cut(pair, "=")
		_, decoded, why := decodeSegment(strings.ReplaceAll(key, "+", "%20"))
		if why != "" {
			return nil, berm.Errorf(berm.Invalid, "the key %q of the query %s", clip(key), why)
		}
		keys = append(keys, decoded)
	}
	return keys, nil
}

// Glob is a pattern of paths: a star is any run of characters of one segment, two stars
// as the last segment are whatever comes there.
type Glob struct{ text string }

// ParseGlob reads a pattern of paths, written decoded. It fails with Invalid when no
// canonical path could match it.
func ParseGlob(s string) (Glob, error) {
	wrong := func(why string) error {
		return berm.Errorf(berm.Invalid, "%q is not a pattern of paths: %s", clip(s), why)
	}
	if !strings.HasPrefix(s, "/") {
		return Glob{}, wrong("it must begin with a slash")
	}
	if strings.ContainsAny(s, "%?#\\") || !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return r < 0x20 || r == 0x7f }) {
		return Glob{}, wrong("write it decoded, without a query")
	}
	segments := strings.Split(s[1:], "/")
	for i, segment := range segments {
		last := i == len(segments)-1
		switch {
		case segment == "" && !last, segment == ".", segment == "..", almostDots(segment):
			return Glob{}, wrong("empty and dot segments never occur in what it is compared with")
		case strings.Contains(segment, "**") && (segment != "**" || !last):
			return Glob{}, wrong("two stars can only be the whole last segment")
		}
	}
	return Glob{s}, nil
}

func (g Glob) String() string { return g.text }

// match compares with decoded segments.
func (g Glob) match(segments []string) bool {
	rest := g.text[1:]
	for i, segment := range segments {
		pattern, more, found := strings.Cut(rest, "/")
		if pattern == "**" {
			return true
		}
		if !matchStars(pattern, segment) {
			return false
		}
		if i == len(segments)-1 {
			return !found
		}
		if !found {
			return false
		}
		rest = more
	}
	return false
}

// matchStars compares with a pattern in which stars stand for any run of characters. What
// is between stars is taken where it comes first, so that the time grows with the length
// of the two alone.
func matchStars(pattern, s string) bool {
	head, rest, star := strings.Cut(pattern, "*")
	if !star {
		return pattern == s
	}
	s, ok := strings.CutPrefix(s, head)
	for ok {
		var middle string
		middle, rest, star = strings.Cut(rest, "*")
		if !star {
			return strings.HasSuffix(s, middle)
		}
		_, s, ok = strings.Cut(s, middle)
	}
	return false
}
