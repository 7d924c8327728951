package change

import (
	"bytes"
	"fmt"
	"strings"
)

// row is one line of the statistics.
type row struct {
	change         Change
	words          string // instead of numbers
	added, deleted int
}

const (
	maxName  = 60 // columns of a name
	maxGraph = 40 // columns of plus and minus signs
)

func (p *printer) count(c Change, old, new side) {
	r := row{change: c}
	switch {
	case old.huge || new.huge || old.binary() || new.binary():
		r.words = fmt.Sprintf("Bin %d -> %d bytes", old.size, new.size)
	case old.present && new.present && bytes.Equal(old.data, new.data):
	default:
		for line := range bytes.Lines(hunks(old.data, new.data)) {
			switch line[0] {
			case '+':
				r.added++
			case '-':
				r.deleted++
			}
		}
	}
	p.add(r)
}

// add takes a row. A change of type has two, which become one as with git.
func (p *printer) add(r row) {
	last := len(p.rows) - 1
	if last < 0 || p.rows[last].change.Path != r.change.Path {
		p.rows = append(p.rows, r)
		return
	}
	before := &p.rows[last]
	before.added += r.added
	before.deleted += r.deleted
	if before.words != "" && r.words != "" {
		before.words += ", "
	}
	before.words += r.words
}

// stat prints what was counted.
func (p *printer) stat() {
	if len(p.rows) == 0 {
		return
	}
	names := make([]string, len(p.rows))
	width, digits, most, added, deleted := 0, 1, 1, 0, 0
	for i, r := range p.rows {
		names[i] = Quote(r.change.Path)
		if n := len(names[i]); n > maxName {
			names[i] = "..." + names[i][n-maxName+3:]
		}
		width = max(width, len(names[i]))
		digits = max(digits, len(fmt.Sprint(r.added+r.deleted)))
		most = max(most, r.added+r.deleted)
		added += r.added
		deleted += r.deleted
	}
	for i, r := range p.rows {
		danger := ""
		if told := p.danger(r.change); told != "" {
			danger = " " + p.Style.Bad("# berm: "+told)
		}
		if r.words != "" {
			p.line(plain, " %-*s | %s%s", width, names[i], r.words, danger)
			continue
		}
		graph := func(n int, sign string) string {
			if most > maxGraph && n > 0 {
				n = max(1, n*maxGraph/most)
			}
			return strings.Repeat(sign, n)
		}
		signs := ""
		if r.added > 0 {
			signs += p.Style.Good(graph(r.added, "+"))
		}
		if r.deleted > 0 {
			signs += p.Style.Bad(graph(r.deleted, "-"))
		}
		p.line(plain, "%s%s", strings.TrimRight(fmt.Sprintf(" %-*s | %*d %s", width, names[i], digits, r.added+r.deleted, signs), " "), danger)
	}
	summary := " " + plural(len(p.rows), "file") + " changed"
	if added > 0 {
		summary += ", " + plural(added, "insertion") + "(+)"
	}
	if deleted > 0 {
		summary += ", " + plural(deleted, "deletion") + "(-)"
	}
	p.line(plain, "%s", summary)
}

// plural counts as git does: "1 insertion(+)" but "2 insertions(+)".
func plural(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}
