package audit

import (
	"bytes"
	"regexp"
	"sync"
)

// shape is what tokens of a kind look like. Whoever issues them gave them a prefix, so that
// they can be found where they should not be.
type shape struct {
	marks   []string // every match contains one of them, of two bytes at least
	pattern func() *regexp.Regexp
}

// like is a shape whose pattern is compiled when it is first needed. The first group of a
// match is left.
func like(pattern string, marks ...string) shape {
	return shape{marks, sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(pattern) })}
}

// shapes are those of widely used services, from their documentation, and the places where
// programs are given secrets whatever they look like.
var shapes = []shape{
	like(`(gh[pousr]_)[A-Za-z0-9]{36,}`, "ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
	like(`(github_pat_)[A-Za-z0-9_]{22,}`, "github_pat_"),
	like(`(glpat-)[A-Za-z0-9_-]{20,}`, "glpat-"),
	like(`((?:\\[nrt]|\b)sk-(?:ant-|proj-)?)[A-Za-z0-9_-]{20,}`, "sk-"),
	like(`((?:\\[nrt]|\b)[sr]k_live_)[A-Za-z0-9]{16,}`, "k_live_"),
	like(`(AKIA|ASIA)[0-9A-Z]{16}`, "AKIA", "ASIA"),
	like(`(AIza)[0-9A-Za-z_-]{35}`, "AIza"),
	like(`(xox[abeprs]-)[A-Za-z0-9-]{10,}`, "xox"),
	like(`(npm_)[A-Za-z0-9]{36}`, "npm_"),
	like(`(pypi-)[A-Za-z0-9_-]{50,}`, "pypi-"),
	like(`((?:\\[nrt]|\b)hf_)[A-Za-z0-9]{30,}`, "hf_"),
	like(`(e2b_)[0-9a-f]{40}`, "e2b_"),
	like(`(eyJ)[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}`, "eyJ"), // a JSON Web Token
	like(`(-----BEGIN [A-Z ]*PRIVATE KEY-----)(?:[^-"\\]|\\[^-])*`, "PRIVATE KEY-----"),
	like(`(://[^/\s"@:\\]*:)[^/\s"@\\]+@`, "://"),
	like(`([Bb]earer )[A-Za-z0-9._~+/=-]{8,}`, "earer "),
	like(`([Bb]asic )[A-Za-z0-9+/=]{8,}`, "asic "),
	like(`(?i:((?:password|passwd|secret|token|api[_-]?key)=))[^\s"&\\,;]{4,}`,
		"word=", "WORD=", "wd=", "WD=", "cret=", "CRET=", "oken=", "OKEN=", "key=", "KEY=", "Key="),
}

// masked stands where a token was.
const masked = "[masked]"

// heads has, for the first two bytes of each mark, the number of that mark's list in marked:
// one pass over a line finds all marks, of which there are few in most.
var (
	heads  [1 << 16]uint8
	marked = [][]mark{nil}
)

type mark struct {
	text  []byte
	shape int
}

func init() {
	for i, s := range shapes {
		for _, text := range s.marks {
			head := &heads[uint(text[0])<<8|uint(text[1])]
			if *head == 0 {
				*head = uint8(len(marked))
				marked = append(marked, nil)
			}
			marked[*head] = append(marked[*head], mark{[]byte(text), i})
		}
	}
}

// MaskTokens takes what looks like a token out of a text, or a line of JSON, as it is done in
// each record.
func MaskTokens(line []byte) []byte {
	var found uint64 // shapes with a mark in the line
	var pair uint16
	for i, c := range line {
		pair = pair<<8 | uint16(c)
		head := heads[pair]
		if head == 0 {
			continue
		}
		for _, m := range marked[head] {
			if i > 0 && bytes.HasPrefix(line[i-1:], m.text) {
				found |= 1 << m.shape
			}
		}
	}
	for i := 0; found != 0; i, found = i+1, found>>1 {
		if found&1 != 0 {
			line = shapes[i].mask(line)
		}
	}
	return line
}

func (s shape) mask(line []byte) []byte {
	var out []byte
	end := 0
	for _, match := range s.pattern().FindAllSubmatchIndex(line, -1) {
		out = append(append(out, line[end:match[3]]...), masked...)
		if end = match[1]; line[end-1] == '@' { // of a URL
			out = append(out, '@')
		}
	}
	if out == nil {
		return line
	}
	return append(out, line[end:]...)
}
