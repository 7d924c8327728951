package replay

import (
	"slices"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/audittest"
)

func TestCompare(t *testing.T) {
	l := audittest.New(t, t.TempDir())
	record := func(id berm.SandboxID, code int, output string, changes ...audit.Change) *Timeline {
		l.Run(id, audit.Actor{Type: "key"}, audittest.Command{PID: 5, Argv: []string{"make"}, Code: code, Steps: []audittest.Step{{Text: output}}})
		l.Change(id, "end", append(changes, audit.Change{Path: "/etc/machine-id", Op: "modify", Kind: "file", After: l.Blob(audit.KindContent, string(id)).SHA256}))
		return load(t, l, id)
	}
	file := func(path, content string) audit.Change {
		return audit.Change{Path: path, Op: "add", Kind: "file", Mode: "644", After: l.Blob(audit.KindContent, content).SHA256}
	}
	was := record("i0aaaaaaaaaaaaaaaaaaa", 0, "ok\n", file("/a", "1"), file("/b", "1"), file("/c", "1"))
	same := record("i0bbbbbbbbbbbbbbbbbbb", 0, "ok\n", file("/c", "1"), file("/b", "1"), file("/a", "1"))
	other := record("i0ccccccccccccccccccc", 2, "no\n", file("/a", "1"), file("/b", "2"), file("/d", "1"))
	compare := func(is *Timeline) Comparison {
		return Compare(was, is, [][2]*Command{{was.Commands[0], is.Commands[0]}})
	}
	if c := compare(same); !c.Equal() || c.Same != 3 || c.Commands[0].Output != "same" {
		t.Errorf("%+v", c)
	}
	c := compare(other)
	if c.Equal() || c.Same != 1 || !slices.Equal(c.Differ, []string{"/b"}) || !slices.Equal(c.Only, []string{"/c"}) || !slices.Equal(c.OnlyAgain, []string{"/d"}) {
		t.Errorf("%+v", c)
	}
	if p := c.Commands[0]; p.Was != "exit 0" || p.Is != "exit 2" || p.Output != "other" {
		t.Errorf("%+v", p)
	}
	if c := Compare(was, same, [][2]*Command{{was.Commands[0], nil}}); c.Equal() || c.Commands[0].Is != "not run" {
		t.Errorf("%+v", c)
	}
}
