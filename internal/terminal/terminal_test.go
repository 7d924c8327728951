package terminal

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/creack/pty"
)

// hostile is output that tries to set the clipboard and the title, switch
// screens, query the terminal, link text and reset, and ends with a C1 CSI, a
// reordering and a Unicode line break.
const hostile = "\x1b]52;c;cHduCg==\a\x1b]0;t\a\x1b[?1049h\x1bP$q\"p\x1b\\\x1b]8;;http://evil.test\aX\x1b[6n\x1bc" +
	"a\rb\n\u009b31m\x9b31m\u202Eabc\u2028\x00\x7f\U000e0041"

// inert fails the test when a terminal would do something with s other than
// print it.
func inert(t *testing.T, s string) {
	t.Helper()
	if !utf8.ValidString(s) {
		t.Errorf("not UTF-8: %q", s)
	}
	for _, r := range s {
		if r < 0x20 || r >= 0x7f && r <= 0x9f || r == 0x202e || r == 0x2028 || r >= 0xe0000 && r <= 0xe007f {
			t.Errorf("%U left in %q", r, s)
		}
	}
}

func TestEscape(t *testing.T) {
	inert(t, Escape(hostile))
	for in, want := range map[string]string{
		"plain, ümläut, 日本 👍": "plain, ümläut, 日本 👍",
		"a\nb\r\t\x1b[31m":    `a\nb\r\t\x1b[31m`,
		"\u009b\u202e":        `\u009b\u202e`,
		"\xff\xc3":            `\xff\xc3`,
		"a\u00a0b":            `a\u00a0b`,
		"\U000e0041":          `\U000e0041`,
		"\ufffd":              "\ufffd", // a real replacement character
		`C:\new`:              `C:\new`,
	} {
		if got := Escape(in); got != want {
			t.Errorf("Escape(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestWriterAnySplit(t *testing.T) {
	in := hostile + "\r\nfünf\ttab 日本\r\n\xe6\x97"
	whole := written(t, in, len(in))
	for _, line := range strings.Split(whole, "\n") {
		inert(t, strings.ReplaceAll(line, "\t", ""))
	}
	if !strings.Contains(whole, "\nfünf\ttab 日本\n") || !strings.HasSuffix(whole, `\xe6\x97`) {
		t.Errorf("text is lost: %q", whole)
	}
	for size := 1; size < 8; size++ {
		if got := written(t, in, size); got != whole {
			t.Errorf("in pieces of %d: %q, want %q", size, got, whole)
		}
	}
}

func written(t *testing.T, in string, size int) string {
	t.Helper()
	var out bytes.Buffer
	w := NewWriter(&out)
	for len(in) > 0 {
		n := min(size, len(in))
		if got, err := w.Write([]byte(in[:n])); got != n || err != nil {
			t.Fatalf("Write = %d, %v", got, err)
		}
		in = in[n:]
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func FuzzWriter(f *testing.F) {
	f.Add([]byte(hostile), 3)
	f.Fuzz(func(t *testing.T, in []byte, size int) {
		got := written(t, string(in), 1+size&0xff)
		for _, line := range strings.Split(got, "\n") {
			inert(t, strings.ReplaceAll(line, "\t", ""))
		}
		inert(t, Escape(string(in)))
	})
}

func TestEscapeJSON(t *testing.T) {
	text, err := json.MarshalIndent(map[string]string{hostile: hostile}, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	escaped := EscapeJSON(text)
	for _, line := range strings.Split(string(escaped), "\n") {
		inert(t, line)
	}
	var before, after map[string]string
	if err := json.Unmarshal(text, &before); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(escaped, &after); err != nil {
		t.Fatal(err)
	}
	for k, v := range before {
		if after[k] != v {
			t.Errorf("value changed: %q, want %q", after[k], v)
		}
	}
}

func TestTable(t *testing.T) {
	table := NewTable(false, "ID", "NAME", "STATE")
	table.Row("i1", "日本", "running")
	table.Row("i234", "e\u0301\x1b[2J", "paused")
	table.Row("i5", "", "")
	table.Row("i6", strings.Repeat("x", 1<<20), "running")
	var out strings.Builder
	if err := table.Write(&out); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	column := Width(strings.SplitN(lines[0], "STATE", 2)[0])
	for i, word := range []string{"STATE", "running", "paused", "", "running"} {
		inert(t, lines[i])
		if before, ok := strings.CutSuffix(lines[i], word); word != "" && (!ok || Width(before) != column) {
			t.Errorf("line %d: %q does not begin at column %d: %q", i, word, column, lines[i])
		}
		if strings.HasSuffix(lines[i], " ") {
			t.Errorf("line %d ends with a blank", i)
		}
	}
	if len(lines[4]) > 200 {
		t.Errorf("a long cell is not clipped: %d bytes", len(lines[4]))
	}
}

func TestClip(t *testing.T) {
	for _, c := range []struct {
		in   string
		max  int
		want string
	}{{"abc", 3, "abc"}, {"abcd", 3, "ab…"}, {"日本語", 6, "日本語"}, {"日本語", 5, "日本…"}, {"日本語", 4, "日…"}} {
		if got := Clip(c.in, c.max); got != c.want || Width(got) > c.max {
			t.Errorf("Clip(%q, %d) = %q, want %q", c.in, c.max, got, c.want)
		}
	}
}

func TestStyleOfPipe(t *testing.T) {
	var out bytes.Buffer
	if got := StyleFor(&out).Bad("x"); got != "x" {
		t.Errorf("colour in a pipe: %q", got)
	}
}

func TestStyleNoColor(t *testing.T) {
	_, tty := openPTY(t)
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "")
	if got := StyleFor(tty).Bad("x"); got != "\x1b[31mx\x1b[0m" {
		t.Errorf("no colour on a terminal: %q", got)
	}
	t.Setenv("NO_COLOR", "1")
	if got := StyleFor(tty).Bad("x"); got != "x" {
		t.Errorf("colour despite NO_COLOR: %q", got)
	}
}

func TestRawAndRestore(t *testing.T) {
	ptmx, tty := openPTY(t)
	restore, err := Raw(tty)
	if err != nil {
		t.Fatal(err)
	}
	// Raw: the byte of Ctrl-C comes through, without a newline and without an echo.
	if _, err := ptmx.Write([]byte{3}); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 1)
	if n, err := tty.Read(b); n != 1 || b[0] != 3 || err != nil {
		t.Fatalf("read %v, %v", b, err)
	}
	restore()
	restore()
	if _, err := ptmx.Write([]byte("x\n")); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 16)
	if n, err := ptmx.Read(line); err != nil || string(line[:n]) != "x\r\n" { // echoed again
		t.Errorf("echo after restore: %q, %v", line[:n], err)
	}
}

func TestResizes(t *testing.T) {
	ptmx, tty := openPTY(t)
	if got := SizeOf(tty); got != (Size{80, 24}) {
		t.Errorf("size of a terminal without one: %v", got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	sizes := Resizes(ctx, tty)
	if err := pty.Setsize(ptmx, &pty.Winsize{Cols: 101, Rows: 33}); err != nil {
		t.Fatal(err)
	}
	// The kernel sends SIGWINCH to the terminal's foreground group only, which this
	// process is not.
	if err := syscall.Kill(os.Getpid(), syscall.SIGWINCH); err != nil {
		t.Fatal(err)
	}
	select {
	case got := <-sizes:
		if got != (Size{101, 33}) {
			t.Errorf("size %v", got)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("no size")
	}
}

func openPTY(t *testing.T) (ptmx, tty *os.File) {
	t.Helper()
	ptmx, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ptmx.Close(); tty.Close() })
	return ptmx, tty
}
