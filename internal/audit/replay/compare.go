package replay

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"github.com/berm-sandbox/berm/internal/audit"
)

// Comparison is how two timelines of the same commands differ.
type Comparison struct {
	Commands []CommandPair `json:"commands"`
	// FilesKnown says that the writable layers of both were looked at, at the end.
	FilesKnown bool     `json:"filesKnown"`
	Only       []string `json:"only"`      // files that only the first changed
	OnlyAgain  []string `json:"onlyAgain"` // files that only the second changed
	Differ     []string `json:"differ"`    // files that both changed to something else
	Same       int      `json:"same"`      // files that both changed to the same
}

// CommandPair is a command in both.
type CommandPair struct {
	Argv   []string `json:"argv"`
	Was    string   `json:"was"`    // its result
	Is     string   `json:"is"`     // the second time
	Output string   `json:"output"` // "same", "other" or "unknown"
}

// Equal says that nothing was found to differ but output, which has times in it.
func (c *Comparison) Equal() bool {
	for _, p := range c.Commands {
		if p.Was != p.Is {
			return false
		}
	}
	return len(c.Only)+len(c.OnlyAgain)+len(c.Differ) == 0
}

// Compare holds a timeline against one of a rerun; pairs names the commands of both in order,
// and has nil for those that were not run again.
func Compare(was, is *Timeline, pairs [][2]*Command) Comparison {
	c := Comparison{Commands: []CommandPair{}, Only: []string{}, OnlyAgain: []string{}, Differ: []string{}}
	for _, p := range pairs {
		pair := CommandPair{Argv: p[0].Argv, Was: p[0].Result(), Is: "not run", Output: "unknown"}
		if p[1] != nil {
			pair.Is, pair.Output = p[1].Result(), sameOutput(was, is, p)
		}
		c.Commands = append(c.Commands, pair)
	}
	atEnd := func(t *Timeline) bool {
		_, why, ok := t.Looked(t.End)
		return ok && why == "end"
	}
	if c.FilesKnown = atEnd(was) && atEnd(is); !c.FilesKnown {
		return c
	}
	before, after := state(was), state(is)
	for path, f := range before {
		again, ok := after[path]
		switch {
		case !ok:
			c.Only = append(c.Only, path)
		case f != again:
			c.Differ = append(c.Differ, path)
		default:
			c.Same++
		}
	}
	for path := range after {
		if _, ok := before[path]; !ok {
			c.OnlyAgain = append(c.OnlyAgain, path)
		}
	}
	slices.Sort(c.Only)
	slices.Sort(c.OnlyAgain)
	slices.Sort(c.Differ)
	return c
}

func sameOutput(was, is *Timeline, p [2]*Command) string {
	text := func(t *Timeline, c *Command) ([]byte, bool) {
		if !c.HasOutput() {
			return nil, c.Output == 0
		}
		frames, err := t.Frames(c)
		var all []byte
		for _, f := range frames {
			switch f.Stream {
			case audit.Stdout, audit.Stderr:
				all = append(all, f.Data...)
			case audit.Cut:
				return nil, false
			}
		}
		return all, err == nil
	}
	before, ok := text(was, p[0])
	after, ok2 := text(is, p[1])
	switch {
	case !ok || !ok2:
		return "unknown"
	case bytes.Equal(before, after):
		return "same"
	}
	return "other"
}

// own are files that tell a sandbox who it is.
var own = []string{"/etc/hostname", "/etc/hosts", "/etc/machine-id", "/run/e2b/.E2B_SANDBOX_ID"}

// state is what a sandbox changed in the end: what matters of each path.
func state(t *Timeline) map[string]string {
	m := map[string]string{}
	for _, f := range t.FilesAt(t.End) {
		if f.Seen == "layer" && !slices.Contains(own, f.Path) {
			m[f.Path] = fmt.Sprint(f.Op, f.Kind, strings.TrimLeft(f.Mode, "0"), f.After, f.Target)
		}
	}
	return m
}
