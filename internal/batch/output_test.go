package batch

import (
	"bytes"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
)

func TestKept(t *testing.T) {
	for limit := range 12 {
		for total := range 60 {
			whole := strings.Repeat("0123456789", 6)[:total]
			k := kept{limit: limit}
			for rest := whole; rest != ""; {
				n := 1 + rand.IntN(len(rest))
				_, _ = k.Write([]byte(rest[:n]))
				rest = rest[n:]
			}
			got := k.String()
			if total <= limit && got != whole {
				t.Fatalf("limit %d: %q became %q", limit, whole, got)
			}
			if total > limit && (!strings.HasPrefix(got, whole[:limit/2]+"\n…") || !strings.HasSuffix(got, "…\n"+whole[total-(limit-limit/2):])) {
				t.Fatalf("limit %d: %q became %q", limit, whole, got)
			}
		}
	}
	k := kept{limit: 1000}
	for range 1000 {
		_, _ = k.Write(make([]byte, 1<<16))
	}
	if cap(k.head)+cap(k.tail) > 10_000 {
		t.Errorf("%d bytes are held for 1000", cap(k.head)+cap(k.tail))
	}
}

// However a stream is cut, judges say what a look at the whole says.
func TestJudges(t *testing.T) {
	for range 3000 {
		random := func(most int) string {
			b := make([]byte, rand.IntN(most))
			for i := range b {
				b[i] = "ab\n"[rand.IntN(3)]
			}
			return string(b)
		}
		stream, text := random(20), random(5)
		if rand.IntN(3) == 0 {
			text = stream
		}
		expression := regexp.QuoteMeta(text) + []string{"", "$", `\z`}[rand.IntN(3)]
		all := Text{Contains: text, Matches: expression, Equals: &text}.judges()
		to := all.stream()
		for rest := []byte(stream); len(rest) > 0; {
			n := 1 + rand.IntN(len(rest))
			if _, err := to.Write(rest[:n]); err != nil {
				t.Fatal(err)
			}
			rest = rest[n:]
		}
		for _, j := range all {
			want := map[bool]bool{}
			switch j.judge.(type) {
			case *contains:
				want[strings.Contains(stream, text)] = true
			case *matches:
				want[regexp.MustCompile(expression).MatchString(stream)] = true
			case *equals:
				want[stream == text] = true
			}
			if got := j.holds(); !want[got] {
				t.Fatalf("%q %s: said %v of text %q, expression %q", stream, j.what, got, text, expression)
			}
		}
		all.close()
	}
}

func BenchmarkJudges(b *testing.B) {
	piece := bytes.Repeat([]byte("some output of a command\n"), 1000)
	never := "never"
	all := Text{Contains: "never there", Matches: "never [a-z]+", Equals: &never}.judges()
	defer all.close()
	to := all.stream()
	b.SetBytes(int64(len(piece)))
	for b.Loop() {
		_, _ = to.Write(piece)
	}
}
