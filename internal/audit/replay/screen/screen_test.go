package screen

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/internal/terminal"
)

func TestScreenShows(t *testing.T) {
	for _, c := range []struct {
		name, in string
		want     []string
	}{
		{"lines", "one\r\ntwo", []string{"one", "two"}},
		{"bare line feed", "one\ntwo", []string{"one", "   two"}},
		{"progress", "10%\r20%\r\n", []string{"20%"}},
		{"backspace", "ab\b\bc", []string{"cb"}},
		{"tab", "a\tb", []string{"a       b"}},
		{"wrap", "0123456789abc", []string{"0123456789", "abc"}},
		{"wrap waits", "0123456789\r\nabc", []string{"0123456789", "abc"}},
		{"no wrap", "\x1b[?7l0123456789abc", []string{"012345678c"}},
		{"scroll", "1\r\n2\r\n3\r\n4\r\n5", []string{"2", "3", "4", "5"}},
		{"region", "1\r\n2\r\n3\r\n4\x1b[2;3r\x1b[3;1H\nx", []string{"1", "3", "x", "4"}},
		{"home and erase", "abc\x1b[H\x1b[Jd", []string{"d"}},
		{"erase to end", "abcdef\x1b[3D\x1b[K", []string{"abc"}},
		{"erase to begin", "abcdef\x1b[3D\x1b[1K", []string{"    ef"}},
		{"insert and delete", "abcd\r\x1b[2@x\x1b[2C\x1b[Py", []string{"x ayd"}},
		{"insert line", "a\r\nb\x1b[1;1H\x1b[Lx", []string{"x", "a", "b"}},
		{"delete line", "a\r\nb\r\nc\x1b[1;1H\x1b[M", []string{"b", "c"}},
		{"wide", "世界x", []string{"世界x"}},
		{"half of a wide one", "世\rx", []string{"x"}},
		{"wide at the end", "012345678世", []string{"012345678", "世"}},
		{"marks", "e\u0301x", []string{"e\u0301x"}},
		{"drawing", "\x1b(0lqk\x1b(Bq", []string{"┌─┐q"}},
		{"alternate", "a\x1b[?1049hb\x1b[?1049lc", []string{"ac"}},
		{"repeat", "a\x1b[3b", []string{"aaaa"}},
		{"title", "\x1b]0;title\aa", []string{"a"}},
		{"link", "\x1b]8;;http://evil.test\x1b\\a\x1b]8;;\x1b\\", []string{"a"}},
		{"clipboard", "\x1b]52;c;cHduCg==\aa", []string{"a"}},
		{"device control", "\x1bP$q\"p\x1b\\a", []string{"a"}},
		{"queries", "\x1b[6n\x1b[c\x1b[>c\x1b[?1$pa", []string{"a"}},
		{"string that a sequence ends", "\x1b]0;t\x1b[1ma", []string{"a"}},
		{"8-bit controls", "\x9b31ma", []string{"\ufffd31ma"}},
		{"control in UTF-8", "\u009b31ma", []string{"31ma"}},
		{"reordering", "a\u202eb", []string{"a\ufffdb"}},
		{"cut character", "\xe4\xb8a", []string{"\ufffda"}},
		{"large number", "a\x1b[999999999999999999999Xb\x1b[99999999Zc", []string{"cb"}},
	} {
		whole, bytewise := New(10, 4, false), New(10, 4, false)
		_, _ = whole.Write([]byte(c.in))
		for i := range len(c.in) {
			_, _ = bytewise.Write([]byte{c.in[i]})
		}
		for _, s := range []*Screen{whole, bytewise} {
			var got []string
			for row := range s.Rest() {
				got = append(got, s.Text(row))
			}
			for len(got) > 0 && got[len(got)-1] == "" {
				got = got[:len(got)-1]
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("%s: %q shows %q, want %q", c.name, c.in, got, c.want)
			}
		}
	}
}

// A program cannot hide what it prints in a string that it never ends.
func TestStringsEnd(t *testing.T) {
	s := New(10, 4, false)
	_, _ = s.Write([]byte("\x1b]0;" + strings.Repeat("x", maxString) + "seen"))
	if got := s.Text(0); !strings.Contains(got, "een") {
		t.Errorf("shows %q", got)
	}
}

func TestStyles(t *testing.T) {
	s := New(40, 2, false)
	_, _ = s.Write([]byte("a\x1b[1;31mb\x1b[22;38;5;200mc\x1b[48;2;1;2;3md\x1b[me\x1b[4:3mf"))
	want := []Run{
		{"a", Style{}}, {"b", Style{Fg: 2, Attr: Bold}}, {"c", Style{Fg: 201}},
		{"d", Style{Fg: 201, Bg: direct | 0x010203}}, {"ef", Style{}},
	}
	if got := s.Row(0); !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestResize(t *testing.T) {
	s := New(10, 4, true)
	_, _ = s.Write([]byte("1\n2\n3\n4"))
	s.Resize(5, 2)
	if s.Text(0) != "3" || s.Text(1) != "4" {
		t.Errorf("shows %q, %q", s.Text(0), s.Text(1))
	}
	s.Resize(1<<30, 1<<30)
	if c, r := s.Size(); c != MaxColumns || r != MaxRows {
		t.Errorf("size %d by %d", c, r)
	}
}

// What leaves the screen is told once, in order.
func TestScrolled(t *testing.T) {
	s := New(10, 2, true)
	var got []string
	s.Scrolled = func(runs []Run) { got = append(got, Plain(runs)) }
	_, _ = s.Write([]byte("1\n2\n3\n\x1b[?1049hx\ny\nz\x1b[?1049l\x1b[2J"))
	if want := []string{"1", "2", "3"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func FuzzScreen(f *testing.F) {
	f.Add([]byte("a\x1b[1;31mb\x1b]52;c;x\a\x1b[?1049h\x1b[2;3r\nx世\x1b[L\x1b[P\x1b[@\x1b[9999X"), uint8(3))
	f.Fuzz(func(t *testing.T, in []byte, at uint8) {
		s := New(20, 5, false)
		s.Scrolled = func(runs []Run) { inert(t, runs) }
		_, _ = s.Write(in[:min(int(at), len(in))])
		s.Resize(int(at), int(at)/4)
		_, _ = s.Write(in[min(int(at), len(in)):])
		columns, rows := s.Size()
		if c, r, _ := s.Cursor(); c < 0 || r < 0 || c >= columns || r >= rows {
			t.Fatalf("the cursor is at %d, %d of %d by %d", c, r, columns, rows)
		}
		for i := range rows {
			inert(t, s.Row(i))
			if w := terminal.Width(Plain(s.Row(i))); w > columns {
				t.Fatalf("row of %d columns on a screen of %d", w, columns)
			}
		}
	})
}

// inert fails the test if a terminal would do anything but show the text.
func inert(t *testing.T, runs []Run) {
	for _, r := range Plain(runs) {
		if !strconv.IsPrint(r) {
			t.Fatalf("shows %q", r)
		}
	}
}

// No sequence costs more than its share: a recording of 64 MiB is played, whatever it holds.
func TestHostileOutputIsCheap(t *testing.T) {
	plain := cost(strings.Repeat("an ordinary line of output of a build\r\n", 1<<16/40))
	for _, unit := range []string{
		"\x1b[J", "\x1b[2J", "\x1b[L", "\x1b[M", "\x1b[S", "\x1b[T", "\x1b[9999X", "\x1b[9999P", "\x1b[9999@", "\x1b[9999bx",
		"\x1b[41m\x1b[2K", "x\x1b[9999b", "\x1b[?1049h\x1b[?1049l", "\x1bM", "\x1bc", "\x1b[500Gx\x1b[J", "\x1b[9999Z", "\x1b[9999I",
	} {
		c := cost(strings.Repeat(unit, 1<<16/len(unit)))
		for range 3 { // the machine does other things too
			if c > 300*plain {
				c = min(c, cost(strings.Repeat(unit, 1<<16/len(unit))))
			}
		}
		if c > 300*plain {
			t.Errorf("%q costs %s, an ordinary line %s", unit, c, plain)
		}
	}
}

func cost(in string) time.Duration {
	s := New(MaxColumns, MaxRows, false)
	begin := time.Now()
	_, _ = s.Write([]byte(in))
	return time.Since(begin)
}

func BenchmarkWrite(b *testing.B) {
	in := []byte("\x1b[32mok\x1b[0m   github.com/x/y/z  0.123s  and some more text here\r\n")
	s := New(80, 24, false)
	b.SetBytes(int64(len(in)))
	for b.Loop() {
		_, _ = s.Write(in)
	}
}
