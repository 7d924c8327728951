package terminal

import (
	"io"
	"strings"
)

// maxCell bounds a cell in columns: one hostile name must not push all others
// off the screen.
const maxCell = 60

// maxCellBytes bounds what is looked at of a cell: a name may have a megabyte, or
// thousands of marks on one letter.
const maxCellBytes = 16 * maxCell

// Table aligns cells in columns. Cells are escaped as by Escape.
type Table struct {
	style  Style
	widths []int
	rows   [][]string
}

// NewTable returns a table with a header.
func NewTable(style Style, header ...string) *Table {
	t := &Table{style: style}
	t.Row(header...)
	return t
}

// Row adds a row; every row has as many cells as the header.
func (t *Table) Row(cells ...string) {
	row := make([]string, len(cells))
	for i, cell := range cells {
		row[i] = Clip(Escape(cell[:min(len(cell), maxCellBytes)]), maxCell)
		if i == len(t.widths) {
			t.widths = append(t.widths, 0)
		}
		t.widths[i] = max(t.widths[i], Width(row[i]))
	}
	t.rows = append(t.rows, row)
}

// Write prints the table. It has no trailing blanks, so that `cut` and a diff
// find what they expect.
func (t *Table) Write(w io.Writer) error {
	var out strings.Builder
	for i, row := range t.rows {
		var line strings.Builder
		for j, cell := range row {
			line.WriteString(cell)
			if j < len(row)-1 {
				line.WriteString(strings.Repeat(" ", t.widths[j]-Width(cell)+2))
			}
		}
		text := strings.TrimRight(line.String(), " ")
		if i == 0 {
			text = t.style.Bold(text)
		}
		out.WriteString(text + "\n")
	}
	_, err := io.WriteString(w, out.String())
	return err
}
