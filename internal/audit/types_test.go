package audit

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// Types has each constant of type Type once.
func TestTypesAreAll(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "record.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var declared []Type
	ast.Inspect(file, func(n ast.Node) bool {
		if spec, ok := n.(*ast.ValueSpec); ok {
			if kind, ok := spec.Type.(*ast.Ident); ok && kind.Name == "Type" {
				for _, v := range spec.Values {
					text, err := strconv.Unquote(v.(*ast.BasicLit).Value)
					if err != nil {
						t.Fatal(err)
					}
					declared = append(declared, Type(text))
				}
			}
		}
		return true
	})
	if !slices.Equal(slices.Sorted(slices.Values(declared)), slices.Sorted(slices.Values(Types))) {
		t.Errorf("declared are %v, in Types %v", declared, Types)
	}
}

// The documentation has a line for each type, and for nothing else.
func TestTypesAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/audit.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "| type | what happened |\n|---|---|\n")
	table, _, _ = strings.Cut(table, "\n\n")
	var documented []Type
	for line := range strings.Lines(table) {
		name, _, _ := strings.Cut(strings.TrimPrefix(line, "| `"), "`")
		documented = append(documented, Type(name))
	}
	if !slices.Equal(slices.Sorted(slices.Values(documented)), slices.Sorted(slices.Values(Types))) {
		t.Errorf("docs/audit.md has %v, and there are %v", documented, Types)
	}
}
