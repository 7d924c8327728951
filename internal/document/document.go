// Package document reads YAML and JSON that people and programs wrote for Berm: strictly, under
// limits, and with the line in each error.
package document

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"sort"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/berm-sandbox/berm"
)

// maxDepth bounds how deep values may lie in others.
const maxDepth = 32

// maxShown bounds what an error repeats of a document, in bytes.
const maxShown = 200

// Source is one document, for errors.
type Source struct {
	Name string // such as the file's
	Max  int    // bytes that it may have
	Line int    // of its first line in the file; 0 is as 1
}

// Errorf is an Invalid error at a node. It keeps the hint of an error that it wraps.
func (s Source) Errorf(node *yaml.Node, format string, args ...any) *berm.Error {
	e := berm.Errorf(berm.Invalid, format, args...)
	e.Hint = berm.HintOf(e.Err)
	e.Msg = s.At(node) + ": " + e.Msg
	return e
}

// At is the place of a node: NAME:LINE.
func (s Source) At(node *yaml.Node) string {
	return s.Name + ":" + strconv.Itoa(node.Line+max(s.Line, 1)-1)
}

// YAML reads a single document, in which nothing is multiplied or hidden by anchors, aliases or
// tags. Kind: Invalid.
func (s Source) YAML(content []byte) (*yaml.Node, error) {
	if err := s.size(content); err != nil {
		return nil, err
	}
	if bytes.HasPrefix(content, []byte("\xef\xbb\xbf")) {
		return nil, s.Errorf(&yaml.Node{Line: 1}, "a byte order mark")
	}
	y := yaml.NewDecoder(bytes.NewReader(content))
	var document, more yaml.Node
	if err := y.Decode(&document); errors.Is(err, io.EOF) {
		return nil, s.Errorf(&yaml.Node{Line: 1}, "the document is empty, it must begin with version: 1")
	} else if err != nil {
		return nil, s.syntax(err)
	}
	if err := y.Decode(&more); err == nil {
		return nil, s.Errorf(&more, "a second document")
	} else if !errors.Is(err, io.EOF) {
		return nil, s.syntax(err)
	}
	if err := s.plain(&document, 0); err != nil {
		return nil, err
	}
	return document.Content[0], nil
}

// JSON reads one value. Kind: Invalid.
func (s Source) JSON(content []byte) (*yaml.Node, error) {
	if err := s.size(content); err != nil {
		return nil, err
	}
	// Offsets of line ends, to tell lines by.
	var ends []int
	for i, b := range content {
		if b == '\n' {
			ends = append(ends, i)
		}
	}
	j := json.NewDecoder(bytes.NewReader(content))
	j.UseNumber()
	line := func() int { return 1 + sort.SearchInts(ends, int(j.InputOffset())) }
	fail := func(err error) error {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = errors.New("the document ends too early")
		}
		return s.Errorf(&yaml.Node{Line: line()}, "%w", err)
	}
	var value func(depth int) (*yaml.Node, error)
	value = func(depth int) (*yaml.Node, error) {
		token, err := j.Token()
		if err != nil {
			return nil, fail(err)
		}
		node := &yaml.Node{Kind: yaml.ScalarNode, Line: line()}
		switch t := token.(type) {
		case string:
			node.Tag, node.Value = "!!str", t
		case json.Number:
			node.Tag, node.Value = "!!int", t.String()
		case bool:
			node.Tag, node.Value = "!!bool", strconv.FormatBool(t)
		case nil:
			node.Tag = "!!null"
		case json.Delim:
			if depth == maxDepth {
				return nil, s.Errorf(node, "more than %d levels", maxDepth)
			}
			node.Kind = yaml.SequenceNode
			if t == '{' {
				node.Kind = yaml.MappingNode
			}
			for j.More() {
				child, err := value(depth + 1) // an object's keys come as strings
				if err != nil {
					return nil, err
				}
				node.Content = append(node.Content, child)
			}
			if _, err := j.Token(); err != nil { // the bracket
				return nil, fail(err)
			}
		}
		return node, nil
	}
	root, err := value(0)
	if err != nil {
		return nil, err
	}
	if _, err := j.Token(); !errors.Is(err, io.EOF) {
		return nil, s.Errorf(&yaml.Node{Line: line()}, "something after the document")
	}
	return root, nil
}

func (s Source) size(content []byte) error {
	if len(content) > s.Max {
		return s.Errorf(&yaml.Node{Line: 1}, "larger than %d KiB", s.Max>>10)
	}
	return nil
}

// syntax gives the library's "yaml: line N: what" our form.
func (s Source) syntax(err error) error {
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	number, what, _ := strings.Cut(strings.TrimPrefix(text, "line "), ": ")
	line, e := strconv.Atoi(number)
	if e != nil {
		line, what = 1, text
	}
	return s.Errorf(&yaml.Node{Line: line}, "%s", what)
}

func (s Source) plain(node *yaml.Node, depth int) error {
	switch {
	case depth > maxDepth:
		return s.Errorf(node, "more than %d levels", maxDepth)
	case node.Kind == yaml.AliasNode || node.Anchor != "":
		return s.Errorf(node, "anchors and aliases are not supported")
	case node.Style&yaml.TaggedStyle != 0:
		return s.Errorf(node, "tags are not supported")
	}
	for _, child := range node.Content {
		if err := s.plain(child, depth+1); err != nil {
			return err
		}
	}
	return nil
}

// clip shortens what an error repeats of a document.
func clip(s string) string {
	if len(s) > maxShown {
		return s[:maxShown] + "…"
	}
	return s
}
