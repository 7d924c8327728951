package document

import (
	"reflect"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/berm-sandbox/berm"
)

type inner struct {
	Name  string   `json:"name"`
	Parts []string `json:"parts"`
}

type outer struct {
	Count  int               `json:"count"`
	Share  float64           `json:"share"`
	On     *bool             `json:"on"`
	Inner  inner             `json:"inner"`
	List   []inner           `json:"list"`
	Texts  map[string]string `json:"texts"`
	Later  []yaml.Node       `json:"later"`
	Hidden string            `json:"-"`
}

// The same document in both forms is the same value.
func TestFill(t *testing.T) {
	source := Source{Name: "f", Max: 1 << 16}
	yes := true
	want := outer{
		Count: 3, Share: 0.5, On: &yes, Inner: inner{"n", []string{"before", "a", "1"}},
		List: []inner{{Name: "x"}, {Name: "y"}}, Texts: map[string]string{"before": "b", "PORT": "80", "OK": "true"},
	}
	for _, text := range []string{
		"count: 3\nshare: 0.5\non: true\ninner: {name: n, parts: [a, 1]}\nlist:\n- name: x\n- name: y\ntexts: {PORT: 80, OK: true}\n",
		`{"count":3,"share":0.5,"on":true,"inner":{"name":"n","parts":["a",1]},"list":[{"name":"x"},{"name":"y"}],"texts":{"PORT":80,"OK":true}}`,
	} {
		read := source.YAML
		if text[0] == '{' {
			read = source.JSON
		}
		node, err := read([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		// Lists and maps add, and leave alone what others hold.
		shared := append(make([]string, 0, 8), "before")
		got := outer{Count: 9, Inner: inner{Name: "old", Parts: shared}, Texts: map[string]string{"before": "b"}}
		if err := source.Fill(node, "the document", &got); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%+v, want %+v", got, want)
		}
		if shared[:2][1] != "" {
			t.Error("a shared list was written to")
		}
	}
}

func TestFillErrors(t *testing.T) {
	source := Source{Name: "f", Max: 1 << 10, Line: 10}
	for text, want := range map[string]string{
		"count: 1\nconut: 2":         `f:11: unknown key "conut" in the document`,
		"count: 1\ncount: 2":         `f:11: "count" stands here a second time`,
		"count: x":                   "f:10: count must be a whole number",
		"count: [1]":                 "f:10: count must be a single value",
		"count:":                     "f:10: the value of count is missing",
		"share: .nan":                "f:10: share must be a number",
		"on: yes":                    "f:10: on must be true or false",
		"list: x":                    "f:10: list must be a list",
		"list:\n- name: a\n- nam: b": `f:12: unknown key "nam" in an entry of list`,
		"inner: x":                   "f:10: inner must be a mapping",
		"texts: {a: [1]}":            "f:10: a must be a single value",
		"Hidden: x":                  "unknown key",
		"-: x":                       "f:10:",
		"? [a]\n: b":                 "f:10:",
		"inner: &a {}\nlist: [*a]":   "anchors and aliases",
		"inner: !!map {}":            "tags are not supported",
		"a: b: c":                    "f:10:",
		"":                           "empty",
		"count: 1\n---\ncount: 2":    "a second document",
		strings.Repeat("[", 40):      "f:10:",
		strings.Repeat("#", 2<<10):   "larger than 1 KiB",
		"\xef\xbb\xbfcount: 1":       "byte order mark",
		`{"count": 1} {"count": 2}`:  "f:10:",
	} {
		node, err := source.YAML([]byte(text))
		if err == nil {
			err = source.Fill(node, "the document", &outer{})
		}
		if berm.KindOf(err) != berm.Invalid || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
	node, err := source.YAML([]byte("x: 1"))
	if err == nil {
		err = source.Fill(node, "the document", &outer{})
	}
	if hint := berm.HintOf(err); hint != "known are count, inner, later, list, on, share, texts" {
		t.Errorf("hint %q", hint)
	}
	for text, want := range map[string]string{`{"a":1} x`: "something after", `{"a":`: "ends too early", strings.Repeat("[", 40): "more than 32 levels"} {
		if _, err := source.JSON([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}
