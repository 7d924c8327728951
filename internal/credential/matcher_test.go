package credential

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"html"
	"math/rand/v2"
	"net/url"
	"slices"
	"strings"
	"testing"
)

const canary = `sk-live/CANARY+"secret"&7f3a9c`

// encodings are forms in which a server or a client may write a text.
func encodings(text string) map[string]string {
	all := map[string]string{
		"raw": text, "query": url.QueryEscape(text), "path": url.PathEscape(text), "json": jsonEscape(text), "html": html.EscapeString(text),
		"hex": hex.EncodeToString([]byte(text)), "HEX": strings.ToUpper(hex.EncodeToString([]byte(text))),
	}
	var percent, mixed, unicode, decimal, hexEntity, x strings.Builder
	for i := range len(text) {
		c := text[i]
		fmt.Fprintf(&percent, "%%%02x", c)
		fmt.Fprintf(&unicode, `\u%04X`, c)
		fmt.Fprintf(&x, `\x%02x`, c)
		fmt.Fprintf(&decimal, "&#%d;", c)
		fmt.Fprintf(&hexEntity, "&#x%x;", c)
		if i%3 == 1 {
			fmt.Fprintf(&mixed, "%%%02X", c)
		} else {
			mixed.WriteByte(c)
		}
	}
	all["percent"], all["some percent"], all[`\u`], all[`\x`] = percent.String(), mixed.String(), unicode.String(), x.String()
	all["&#"], all["&#x"] = decimal.String(), hexEntity.String()
	for i := range 4 {
		around := strings.Repeat("u", i) + ":" + text + ":tail"
		all[fmt.Sprint("base64 ", i)] = base64.StdEncoding.EncodeToString([]byte(around))
		all[fmt.Sprint("base64url ", i)] = base64.URLEncoding.EncodeToString([]byte(around))
	}
	return all
}

func TestFindsEveryEncoding(t *testing.T) {
	m := newMatcher([]needle{{"other-needle", placeholder, "a"}, {canary, secret, "b"}})
	for name, text := range encodings(canary) {
		for _, around := range [][2]string{{"", ""}, {"x=", "&y=1"}, {"%", "%"}, {"&amp", ";"}, {`\`, `"`}, {"%25%2", "z"}, {"sk-", "sk-"}, {"other-sk-live", "x"}} {
			if around[0] == `\` && name != "raw" || around[0] == "%25%2" {
				continue // an odd escape before swallows the first character: another text
			}
			n := m.first(around[0] + text + around[1])
			if n == nil || n.binding != "b" {
				t.Errorf("%s between %q and %q is not found", name, around[0], around[1])
			}
		}
	}
	for _, text := range []string{"", canary[1:], canary[:len(canary)-1], "sk-live/CANARY", "other-needl", "%6f", "&#111", strings.Repeat("sk-", 100)} {
		if n := m.first(text); n != nil {
			t.Errorf("%q holds %+v", text, n)
		}
	}
}

// Whatever the pieces, no byte of a needle gets through, everything else does, and at most
// what could begin one is kept back.
func TestMaskInPieces(t *testing.T) {
	m := newMatcher([]needle{{canary, secret, "b"}, {"sk-live-another-one", secret, "c"}})
	random := rand.New(rand.NewPCG(1, 2))
	for name, text := range encodings(canary) {
		for range 40 {
			noise := func() string {
				b := make([]byte, random.IntN(30))
				for i := range b {
					b[i] = ` sk-live/%\&;#3x`[random.IntN(16)]
				}
				return string(b) + "  "
			}
			before, after := noise(), noise()
			in := before + text + after
			s := stream{matcher: m}
			var out []byte
			var hit *needle
			for left := []byte(in); ; {
				n := min(random.IntN(9), len(left))
				piece := bytes.Clone(left[:n])
				left = left[n:]
				var found *needle
				out, found = s.feed(out, piece, true, len(left) == 0)
				if found != nil {
					hit = found
				}
				if len(left) == 0 {
					break
				}
			}
			if hit == nil || len(out) != len(in) {
				t.Fatalf("%s in %q: found %v, %q", name, in, hit, out)
			}
			if n := m.first(string(out)); n != nil {
				t.Fatalf("%s in %q is still in %q", name, in, out)
			}
			if !strings.HasPrefix(string(out), before) || !strings.HasSuffix(string(out), after) {
				t.Fatalf("%s in %q: the rest was changed: %q", name, in, out)
			}
		}
	}
}

// What comes is kept back from one call of late to the next but one at most. What begins like a
// secret is masked up to the length of one, whatever follows.
func TestKeepsBackNoMoreThanNeeded(t *testing.T) {
	m := newMatcher([]needle{{tokenSecret, secret, "b"}})
	start, rest := tokenSecret[:enough(tokenSecret)], tokenSecret[enough(tokenSecret):]
	s := stream{matcher: m}
	if s.waits() {
		t.Error("it waits for nothing")
	}
	late := "late"
	for _, step := range []struct{ in, out string }{
		{"data: hello\n\n", ""}, {late, "data: hello\n\n"}, {late, ""},
		{"CANARY-", ""}, {late, "CANARY-"}, {"one", ""}, {"two", ""}, {late, "one"}, {late, "two"},
		{"a" + start, ""}, {late, "a" + strings.Repeat("*", len(start))}, {late, ""}, {rest + "x", ""}, {late, strings.Repeat("*", len(rest)) + "x"},
		{start, ""}, {strings.Repeat("y", len(rest)+2), ""}, {late, strings.Repeat("*", len(start))}, {late, strings.Repeat("*", len(rest)) + "yy"},
		{strings.Repeat("z", int(m.window)+5), "zzzzz"}, {"yy", "zz"}, {late, strings.Repeat("z", int(m.window)-2)}, {late, "yy"},
	} {
		var out []byte
		if step.in == late {
			out = s.late(nil)
		} else {
			out, _ = s.feed(nil, []byte(step.in), true, false)
		}
		if string(out) != step.out {
			t.Errorf("after %q came %q, want %q", step.in, out, step.out)
		}
	}
	if s.waits() {
		t.Error("it waits for nothing")
	}
}

// guesses are texts that begin like a secret in some encoding, up to the length from which on
// their start is kept back, and others like them that do not: the same bytes, but for the last.
func guesses(text string) (pairs [][2]string) {
	for i := 1; i < enough(text) && i <= len(text)-1; i++ {
		right := encodings(text[:i])
		for name, wrong := range encodings(text[:i-1] + string(text[i-1]^1)) {
			if !strings.HasPrefix(name, "base64") && len(right[name]) == len(wrong) {
				pairs = append(pairs, [2]string{right[name], wrong})
			}
		}
	}
	for skip := range 3 { // base64 as it would be in what holds all of the text
		for i := 1; i < min(enough(text), len(text)); i++ {
			cut := func(text string) string {
				encoded := base64.StdEncoding.EncodeToString([]byte("uuu"[:skip] + text))
				return encoded[:8*(skip+i)/6]
			}
			pairs = append(pairs, [2]string{cut(text), cut(text[:i-1] + string(text[i-1]^1) + text[i:])})
		}
	}
	return pairs
}

// Whoever sends the start of a secret and sees it come back does not learn that it is right: the
// same number of bytes is given on at each stage as with one that is wrong.
func TestStartsAreNotConfirmed(t *testing.T) {
	long := "sk-ant-" + strings.Repeat("Qx7", 30)
	for _, text := range []string{canary, "8-bytes!", "0123456789abc", tokenSecret, long} {
		m := newMatcher([]needle{{text, secret, "b"}, {"sk-live-another-one", secret, "c"}})
		stages := func(guess string, mask bool, size int) (seen []int) {
			s := stream{matcher: m}
			give := func(in []byte) {
				out, found := s.feed(nil, in, mask, false)
				if found != nil {
					t.Fatalf("%q is found in %q", text, guess)
				}
				seen = append(seen, len(out))
			}
			late := func() {
				waits := 0
				if s.waits() {
					waits = 1
				}
				seen = append(seen, waits, len(s.late(nil)))
			}
			give([]byte(strings.Repeat("-", 2*int(m.window))))
			for len(guess) > 0 {
				n := min(size, len(guess))
				give([]byte(guess[:n]))
				guess = guess[n:]
				if size%2 == 0 {
					late()
				}
			}
			late()
			late()
			give([]byte("z"))
			late()
			late()
			return seen
		}
		pairs := guesses(text)
		if len(pairs) < 20 {
			t.Fatalf("only %d guesses of %q", len(pairs), text)
		}
		for _, pair := range pairs {
			for _, size := range []int{1, 2, 7, 4096} {
				for _, mask := range []bool{true, false} {
					right, wrong := stages(pair[0], mask, size), stages(pair[1], mask, size)
					if !slices.Equal(right, wrong) {
						t.Fatalf("%q in pieces of %d gives %v, %q %v", pair[0], size, right, pair[1], wrong)
					}
				}
			}
		}
	}
}

// Whoever knows half of a secret, or more but not all, and sees it come back does not learn what
// follows: a guess that is right and one that is wrong in the last character come back as the same
// bytes, at the same stages, whatever is sent after them.
func TestGuessesComeBackAlike(t *testing.T) {
	long := "sk-ant-" + strings.Repeat("Qx7", 30)
	for _, text := range []string{canary, "0123456789abcdefg", tokenSecret, long} {
		m := newMatcher([]needle{{text, secret, "b"}, {"sk-live-another-one", secret, "c"}})
		stages := func(guess string, n, size int) (seen []string) {
			s := stream{matcher: m}
			give := func(in string) {
				out, found := s.feed(nil, []byte(in), true, false)
				if found != nil {
					t.Fatalf("%q is found in %q", text, guess)
				}
				seen = append(seen, string(out), string(s.late(nil)), string(s.late(nil)))
			}
			for len(guess) > 0 {
				n := min(size, len(guess))
				give(guess[:n])
				guess = guess[n:]
			}
			give("-")
			give(strings.Repeat("%2d-", n))
			return seen
		}
		for i := enough(text) + 1; i < len(text); i++ {
			wrong := encodings(text[:i-1] + string(text[i-1]^1))
			for name, right := range encodings(text[:i]) {
				if strings.HasPrefix(name, "base64") || len(right) != len(wrong[name]) {
					continue
				}
				for _, size := range []int{len(right), len(right) - 1, len(right) - 3, 40} {
					// Smaller pieces show the start; what is after it must not differ either.
					a, b := stages(right, len(text), size), stages(wrong[name], len(text), size)
					if !slices.Equal(a, b) {
						t.Fatalf("%s: %q in pieces of %d comes back as %q, %q as %q", name, right, size, a, wrong[name], b)
					}
				}
			}
		}
	}
}

// What is exact masks of a text that begins like a secret what does, in whatever pieces, and
// nothing after it; a whole secret goes as ever.
func TestExactMasksNothingElse(t *testing.T) {
	m := newMatcher([]needle{{canary, secret, "b"}, {"sk-live-another-one", secret, "c"}})
	for i := enough(canary); i <= len(canary); i++ {
		for name, text := range encodings(canary[:i]) {
			for size := 1; size < 2*len(text)+12; size += 5 {
				const before, after = "{\"a\":\"", "\x00}\x00\x00\x00\x00\x20 the next message, as long as another secret would be, and longer"
				s := stream{matcher: m, exact: true}
				var out []byte
				for left := []byte(before + text + after); len(left) > 0; {
					n := min(size, len(left))
					out, _ = s.feed(out, left[:n], true, n == len(left))
					left = left[n:]
				}
				if !bytes.HasPrefix(out, []byte(before)) || !bytes.HasSuffix(out, []byte(after)) || len(out) != len(before)+len(text)+len(after) {
					t.Fatalf("%s of %d bytes in pieces of %d: %q", name, i, size, out)
				}
				if !strings.HasPrefix(name, "base64") && bytes.Contains(out, []byte(text)) {
					t.Fatalf("%s of %d bytes in pieces of %d is not masked: %q", name, i, size, out)
				}
			}
		}
	}
}

// Who refuses replies with secrets refuses what begins like one, whether or not the rest comes.
func TestBlockedByItsStart(t *testing.T) {
	m := newMatcher([]needle{{canary, secret, "b"}})
	for length, want := range map[int]bool{enough(canary) - 1: false, enough(canary): true, len(canary): true} {
		s := stream{matcher: m}
		if _, found := s.feed(nil, []byte(canary[:length]+"x"), false, false); (found != nil) != want {
			t.Errorf("of %d bytes: found %v", length, found)
		}
	}
}

// A needle that comes slower than what is kept back shows less of it than would be confirmed.
func TestSlowSecret(t *testing.T) {
	m := newMatcher([]needle{{canary, secret, "b"}})
	for _, size := range []int{1, 3, enough(canary) - 1, enough(canary), len(canary) - 1} {
		s := stream{matcher: m}
		var out []byte
		for left := canary; left != ""; {
			n := min(size, len(left))
			out, _ = s.feed(out, []byte(left[:n]), true, false)
			out = s.late(s.late(out))
			left = left[n:]
		}
		out, _ = s.feed(out, nil, true, true)
		shown := len(out) - strings.Count(string(out), "*")
		if len(out) != len(canary) || shown >= enough(canary) || !strings.HasPrefix(canary, string(out[:shown])) || size >= enough(canary) && shown > 0 {
			t.Errorf("in pieces of %d bytes: %q", size, out)
		}
	}
}

// The first character's escape ends with that character.
func TestEscapeLikeItsCharacter(t *testing.T) {
	s := stream{matcher: newMatcher([]needle{{"1xABCDEFG", secret, "b"}})}
	if out, _ := s.feed(nil, []byte("%31xABCDEFG"), true, true); string(out) != strings.Repeat("*", 11) {
		t.Errorf("%q", out)
	}
}

func FuzzStream(f *testing.F) {
	m := newMatcher([]needle{{canary, secret, "b"}, {"abcabcab", placeholder, "p"}, {"bcabcabcd", placeholder, "q"}})
	for _, text := range encodings(canary) {
		f.Add("x"+text+"y", uint8(3))
	}
	f.Add("abcabcabcd%61bcabcab", uint8(1))
	f.Fuzz(func(t *testing.T, in string, size uint8) {
		s := stream{matcher: m}
		var out []byte
		b := []byte(in)
		for len(b) > 0 {
			n := min(int(size)+1, len(b))
			out, _ = s.feed(out, bytes.Clone(b[:n]), true, len(b) == n)
			b = b[n:]
		}
		if len(out) != len(in) {
			t.Fatalf("%d bytes became %d", len(in), len(out))
		}
		whole := stream{matcher: m}
		once, _ := whole.feed(nil, []byte(in), true, true)
		if !bytes.Equal(once, out) {
			t.Fatalf("in pieces %q, at once %q", out, once)
		}
		for _, n := range m.needles {
			if bytes.Contains(out, []byte(n.text)) {
				t.Fatalf("%q is in %q", n.text, out)
			}
		}
	})
}

func BenchmarkStream(b *testing.B) {
	m := newMatcher([]needle{{"ghp_" + strings.Repeat("aZ9", 12), secret, "b"}, {"sk-ant-" + strings.Repeat("Qx7", 33), secret, "c"}})
	text := []byte(strings.Repeat(`{"id": 123, "name": "some text", "url": "https://api.example.com/v1/things?x=1&y=2", "ok": true}`+"\n", 400))
	random := make([]byte, len(text))
	for i := range random {
		random[i] = byte(rand.Int())
	}
	for name, in := range map[string][]byte{"json": text, "random": random} {
		b.Run(name, func(b *testing.B) {
			s := stream{matcher: m}
			var out []byte
			b.SetBytes(int64(len(in)))
			for b.Loop() {
				out, _ = s.feed(out[:0], in, true, false)
			}
		})
	}
}
