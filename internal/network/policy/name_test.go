package policy

import (
	"regexp"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
)

func TestParseHost(t *testing.T) {
	for in, want := range map[string]string{
		"example.com": "example.com", "EXAMPLE.com.": "example.com", "a-b.c1": "a-b.c1", "r3---sn-x.example.com": "r3---sn-x.example.com",
		"bücher.example": "xn--bcher-kva.example", "xn--bcher-kva.example": "xn--bcher-kva.example", "allowed。test": "allowed.test",
		"1.2.3.4": "1.2.3.4", "::1": "::1", "[2001:db8::1]": "2001:db8::1", "metadata": "metadata", "1e100.net": "1e100.net",
	} {
		h, err := ParseHost(in)
		if err != nil || h.String() != want {
			t.Errorf("%q: %v %v, want %q", in, h, err, want)
		}
	}
	for _, in := range []string{
		"", ".", "..", "a..b", ".a.b", "a.b..", "a b.c", "a_b.c", "-a.b", "a-.b", "a.b\x00", "a.b\x00.c.d", "a.b\n", "allowed.test%00.evil.test",
		"allowed.test@evil.test", "evil.test#allowed.test", "evil.test/allowed.test", "a.b:80", "[::1", "[::1]x", "[1.2.3.4]", "::1%lo", "fe80::1%25eth0",
		"2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.254.43518", "127.1", "0", "①⑥⑨.254.169.254", "①②⑦。1", "169.254.169.254.", "1.2.3.4.5",
		"a.0x1", "xn--allowed-9za", "xn--.com", "xn--a.com", strings.Repeat("a", 64) + ".b", strings.Repeat("a.", 127) + "b", "\xff\xff", "аllowed.test\x00", "*.a.b", "a\\b.c",
	} {
		if h, err := ParseHost(in); err == nil && in != "xn--allowed-9za" {
			t.Errorf("%q is taken for %v", in, h)
		} else if err != nil && berm.KindOf(err) != berm.Invalid {
			t.Errorf("%q: %v", in, err)
		}
	}
}

// FuzzParseHost: what is taken is in its only form, and nothing else is in a name than
// what DNS has.
func FuzzParseHost(f *testing.F) {
	for _, s := range []string{"example.com", "BÜCHER.example.", "①⑥⑨.254.169.254", "xn--bcher-kva", "[::1]", "a。b", "a\x00.b", "127.1", "Faß.de", "\u200d.com"} {
		f.Add(s)
	}
	valid := regexp.MustCompile(`^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	number := regexp.MustCompile(`(^|\.)([0-9]+|0x[0-9a-f]*)$`)
	f.Fuzz(func(t *testing.T, s string) {
		h, err := ParseHost(s)
		if err != nil {
			return
		}
		if again, err := ParseHost(h.String()); err != nil || again != h {
			t.Fatalf("%q is %v, which is %v %v", s, h, again, err)
		}
		if h.name == "" {
			if !h.addr.IsValid() || h.addr.Zone() != "" {
				t.Fatalf("%q is %v", s, h)
			}
		} else if !valid.MatchString(h.name) || len(h.name) > 253 || number.MatchString(h.name) || h.addr.IsValid() {
			t.Fatalf("%q is %q", s, h.name)
		}
	})
}
