package replay

import (
	"bytes"
	"encoding/json"
	"math"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/audittest"
)

// cell is an event of an asciicast, as its page says that it must be.
type cell struct {
	at         float64
	code, data string
}

// readCast fails the test unless a file is an asciicast v2 that a terminal shows as text.
func readCast(t *testing.T, content []byte) (header map[string]any, cells []cell) {
	t.Helper()
	if !utf8.Valid(content) || !bytes.HasSuffix(content, []byte("\n")) {
		t.Fatalf("it is no lines of UTF-8: %q", content)
	}
	for i, line := range strings.Split(strings.TrimSuffix(string(content), "\n"), "\n") {
		for _, c := range line {
			if c < 0x20 || c >= 0x7f && c < 0xa0 || c == '\u202e' {
				t.Fatalf("line %d has %U", i+1, c)
			}
		}
		if i == 0 {
			if err := json.Unmarshal([]byte(line), &header); err != nil {
				t.Fatal(err)
			}
			for name, least := range map[string]float64{"version": 2, "width": 1, "height": 1, "timestamp": 1, "duration": 0} {
				n, ok := header[name].(float64)
				if !ok || n < least || name != "duration" && n != math.Trunc(n) || name == "version" && n != 2 {
					t.Errorf("the header has %s %v", name, header[name])
				}
			}
			continue
		}
		var event []any
		if err := json.Unmarshal([]byte(line), &event); err != nil || len(event) != 3 {
			t.Fatalf("line %d: %s: %v", i+1, line, err)
		}
		at, ok := event[0].(float64)
		code, ok2 := event[1].(string)
		data, ok3 := event[2].(string)
		if !ok || !ok2 || !ok3 || at < 0 || len(cells) > 0 && at < cells[len(cells)-1].at || !slices.Contains([]string{"o", "i", "m", "r"}, code) {
			t.Fatalf("line %d: %s", i+1, line)
		}
		if code == "r" && !regexp.MustCompile(`^[1-9][0-9]*x[1-9][0-9]*$`).MatchString(data) {
			t.Errorf("line %d: a size of %q", i+1, data)
		}
		cells = append(cells, cell{at, code, data})
	}
	return header, cells
}

// castOf writes steps as the output of a command and returns the cast.
func castOf(t *testing.T, tty *audit.Size, steps []audittest.Step) (map[string]any, []cell) {
	t.Helper()
	l := audittest.New(t, t.TempDir())
	l.Run(id, audit.Actor{Type: "key", ID: "k1"}, audittest.Command{Argv: []string{"prog", "a b"}, TTY: tty, Steps: steps})
	tl := load(t, l, id)
	var out bytes.Buffer
	if err := Cast(&out, tl, tl.Commands[0]); err != nil {
		t.Fatal(err)
	}
	return readCast(t, out.Bytes())
}

func TestCast(t *testing.T) {
	header, cells := castOf(t, &audit.Size{Columns: 120, Rows: 40}, []audittest.Step{
		{After: time.Millisecond, Stream: audit.Stdout, Text: "a\r\n\x1b]52;c;eA==\x07\u202e\u009b31m\xc3"},
		{After: time.Millisecond, Stream: audit.Resize, Text: "80x24"},
		{Stream: audit.Resize, Text: "0x\x1b"},
		{After: time.Millisecond, Stream: audit.Stdout, Text: "\xbc\xff\n"},
		{After: time.Millisecond, Stream: audit.Cut, Text: "70000"},
		{After: 1496 * time.Millisecond, Stream: audit.Stdout, Text: "z\xe2\x82"},
	})
	if header["width"] != 120.0 || header["height"] != 40.0 || header["command"] != "prog 'a b'" {
		t.Errorf("%v", header)
	}
	want := []cell{
		{0.001, "o", "a\r\n\x1b]52;c;eA==\x07\u202e\u009b31m"}, {0.002, "r", "80x24"}, {0.003, "o", "ü\ufffd\n"},
		{0.004, "o", "\x1b[m\r\n\x1b[7m[ 70000 bytes were not kept ]\x1b[m\r\n"}, {1.5, "o", "z"}, {1.5, "o", "\ufffd\ufffd"},
	}
	if len(cells) != len(want) {
		t.Fatalf("%#v", cells)
	}
	for i := range want {
		if cells[i] != want[i] {
			t.Errorf("event %d is %#v, want %#v", i, cells[i], want[i])
		}
	}
}

// Without a terminal, a newline goes to the start of the next line, and characters that two
// streams write in pieces are not mixed up.
func TestCastWithoutTerminal(t *testing.T) {
	header, cells := castOf(t, nil, []audittest.Step{
		{Stream: audit.Stdout, Text: "a\nb\r"}, {Stream: audit.Stdout, Text: "\nc\xc3"},
		{Stream: audit.Stderr, Text: "\xe2\x82"}, {Stream: audit.Stdout, Text: "\xa4"}, {Stream: audit.Stderr, Text: "\xac\n"},
	})
	var text string
	for _, c := range cells {
		text += c.data
	}
	if header["width"] != float64(plainColumns) || text != "a\r\nb\r\ncä€\r\n" {
		t.Errorf("%v, %q", header, text)
	}
}

// Any bytes make a cast that is one.
func FuzzCast(f *testing.F) {
	f.Add([]byte("a\xff\n\xe2"), []byte("\x82\xac"), true)
	f.Fuzz(func(t *testing.T, a, b []byte, tty bool) {
		var text castText
		text.lines = !tty
		var out bytes.Buffer
		c := cast{w: &out}
		c.line(castHeader{Version: 2, Width: 1, Height: 1, Timestamp: 1, Command: string(a), Title: string(b)})
		for i, data := range [][]byte{a, b, a} {
			c.event(time.Duration(i)*time.Second, castOutput, text.take(data))
		}
		if c.err != nil {
			t.Fatal(c.err)
		}
		readCast(t, out.Bytes())
	})
}
