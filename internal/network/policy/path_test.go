package policy

import (
	"math/rand/v2"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
)

func TestParsePath(t *testing.T) {
	for in, want := range map[string]string{
		"/": "/", "/a": "/a", "/a/": "/a/", "/a/b.c~_-": "/a/b.c~_-", "/...a/b..%20": "/...a/b..%20",
		"/v1/../admin": "/admin", "/v1/%2e%2e/admin": "/admin", "/v1/./x": "/v1/x", "/..": "/", "/../../a": "/a", "/a/.": "/a/", "/a/..": "/", "/a/b/..": "/a/",
		"/%41%62": "/Ab", "/a%2fb": "/a%2Fb", "/a%3fb": "/a%3Fb", "/a%20b": "/a%20b", "/100%25": "/100%25", "/ü": "/%C3%BC", "/a;v=1/b": "/a;v=1/b", "/a,b=c&d": "/a,b=c&d",
		"/a%3B": "/a%3B", "/\"<>": "/%22%3C%3E", "/@types%2fnode": "/@types%2Fnode",
	} {
		p, err := parsePath(in)
		if err != nil || p.text != want {
			t.Errorf("%q: %q %v, want %q", in, p.text, err, want)
		}
	}
	for _, in := range []string{
		"", "a", "*", "http://a/b", "//admin", "/a//b", "/a//", "/v1//../admin", "/v1/;/../admin", "/v1/..;/admin", "/v1/.;x/a", "/v1/%2e%2e;/a",
		`/v1\..\admin`, "/v1/%5c..", "/v1/..%2fadmin", "/v1%2f..%2fadmin", "/a%2f", "/%2fa", "/a%2f%2fb", "/a%2f.;x", "/v1/%252e%252e/admin", "/v1/.%00/admin",
		"/a\x00", "/a\n", "/a b", "/a?b", "/a#b", "/%", "/%4", "/%zz", "/%0a", "/%c0%ae%c0%ae/", "/a/．．/b", "/a/.%E2%80%A4/b", "/‥/b", "/a/..%ef%bc%8fb", "/a⁄b", "/..＼b",
		"/ok/..%20/admin", "/ok/%20../admin", "/ok/.../", "/ok/...", "/ok/%20/a", "/ok/.%20;x/a", "/ok/a%2f..%20", "/ok/..%C2%A0/a", "/\xff", "/%ff", "/" + strings.Repeat("a", maxTarget),
	} {
		if p, err := parsePath(in); berm.KindOf(err) != berm.Invalid || err == nil {
			t.Errorf("%q is %q, %v", in, p.text, err)
		}
	}
}

func TestGlob(t *testing.T) {
	for _, c := range []struct {
		glob, path string
		want       bool
	}{
		{"/**", "/", true}, {"/**", "/a/b", true}, {"/", "/", true}, {"/", "/a", false}, {"/a", "/a", true}, {"/a", "/a/", false}, {"/a/", "/a/", true},
		{"/repos/acme/**", "/repos/acme/x", true}, {"/repos/acme/**", "/repos/acme/", true}, {"/repos/acme/**", "/repos/acme", false}, {"/repos/acme/**", "/repos/acmex/y", false},
		{"/repos/acme/*/issues", "/repos/acme/x/issues", true}, {"/repos/acme/*/issues", "/repos/acme/x/y/issues", false}, {"/repos/acme/*/issues", "/repos/acme//issues", false},
		{"/*", "/a", true}, {"/*", "/a/b", false}, {"/a*c", "/abc", true}, {"/a*c", "/ac", true}, {"/a*b*c", "/axbxbxc", true}, {"/a*b*c", "/axcxb", false}, {"/*.tgz", "/x.tgz", true}, {"/a*a", "/a", false}, {"/a*a", "/aa", true}, {"/*ab*ab", "/ab", false}, {"/*ab*ab", "/xabab", true}, {"/a*b*", "/ab", true}, {"/*a*", "/bbb", false},
		{"/a b", "/a%20b", true}, {"/ü", "/%c3%bc", true}, {"/admin", "/v1/../admin", true}, {"/v1/**", "/v1/../admin", false},
		{"/a;v", "/a;v", false}, // some servers read it as /a
		{"/@types/*", "/@types%2fnode", false}, {"/**", "/@types%2fnode", true}, {"/*/node", "/@types%2fnode", false},
	} {
		g, err := ParseGlob(c.glob)
		if err != nil {
			t.Fatal(err)
		}
		p, err := parsePath(c.path)
		got := err == nil && !slices.ContainsFunc(p.readings, func(r []string) bool { return !g.match(r) })
		if got != c.want {
			t.Errorf("%s and %s: %v (%v)", c.glob, c.path, got, err)
		}
	}
	for _, in := range []string{"", "a", "/a//b", "/../a", "/./a", "/.../a", "/.. /a", "/**/a", "/a**", "/%41", "/a?b", "/a#", `/a\b`, "/a\x00", "/\xff"} {
		if _, err := ParseGlob(in); err == nil {
			t.Errorf("%q is a pattern", in)
		}
	}
}

// TestMatchStars compares with regular expressions.
func TestMatchStars(t *testing.T) {
	r := rand.New(rand.NewPCG(21, 22))
	text := func(letters string) string {
		b := make([]byte, r.IntN(7))
		for i := range b {
			b[i] = letters[r.IntN(len(letters))]
		}
		return string(b)
	}
	for range 5000 {
		pattern, s := text("ab*"), text("ab")
		want := regexp.MustCompile("^" + strings.ReplaceAll(pattern, "*", ".*") + "$").MatchString(s)
		if matchStars(pattern, s) != want {
			t.Fatalf("%q and %q: want %v", pattern, s, want)
		}
	}
}

// FuzzParsePath: the canonical form is one, means the same to net/url, and climbs
// nowhere.
func FuzzParsePath(f *testing.F) {
	for _, s := range []string{"/", "/a/../b", "/%2e%2e/", "/a%2Fb;c", "/v1/..%2fadmin", "/%252e", "/%c0%ae", "/ü/", "/;/", "/a;b/.;/c", "//", "/%e2%80%a8", "/．．/", "/a／b", "/a%3b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := parsePath(s)
		if err != nil {
			return
		}
		again, err := parsePath(p.text)
		if err != nil || again.text != p.text || !slices.EqualFunc(again.readings, p.readings, slices.Equal[[]string]) {
			t.Fatalf("%q is %q %q, and that is %q %q %v", s, p.text, p.readings, again.text, again.readings, err)
		}
		u, err := url.ParseRequestURI(p.text)
		if err != nil || u.Path != "/"+strings.Join(p.readings[0], "/") || u.RawQuery != "" || u.Host != "" {
			t.Fatalf("%q is %q, for net/url %+v %v, for us %q", s, p.text, u, err, p.readings[0])
		}
		for _, reading := range p.readings {
			for i, segment := range reading {
				name, _, _ := strings.Cut(segment, ";")
				if name == "." || name == ".." || name == "" && i < len(reading)-1 || strings.ContainsAny(segment, "\\\x00") {
					t.Fatalf("%q is read as %q", s, reading)
				}
			}
		}
		whole, err := ParseGlob("/**")
		if err != nil || !whole.match(p.readings[0]) {
			t.Fatalf("%q is not in /**", s)
		}
		// A pattern that is the path itself matches it.
		if exact, err := ParseGlob("/" + strings.Join(p.readings[0], "/")); err == nil && len(p.readings) == 1 && !exact.match(p.readings[0]) {
			t.Fatalf("%s does not match itself", exact)
		}
	})
}
