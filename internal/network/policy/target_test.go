package policy

import (
	"math/rand/v2"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/berm-sandbox/berm"
)

func TestParseTarget(t *testing.T) {
	for in, want := range map[string]string{
		"Example.COM.": "example.com", "*.example.com": "*.example.com", ".example.com": ".example.com", "API-*.example.com": "api-*.example.com",
		"*x.example.com": "*x.example.com", "*.github.io": "*.github.io", "10.0.0.0/8": "10.0.0.0/8", "1.2.3.4": "1.2.3.4", "2001:db8::/32": "2001:db8::/32",
		"1.2.3.4/32": "1.2.3.4", "[::1]": "::1", "public": "public", "names": "names", "pypi": "pypi", "*.bücher.example": "*.xn--bcher-kva.example",
		"*.sub.co.uk": "*.sub.co.uk", "*.allowed.test": "*.allowed.test",
	} {
		target, err := ParseTarget(in)
		if err != nil || target.String() != want {
			t.Errorf("%q: %v %v, want %q", in, target, err, want)
			continue
		}
		if again, err := ParseTarget(target.String()); err != nil || again != target {
			t.Errorf("%q: %v again is %v, %v", in, target, again, err)
		}
	}
	for _, in := range []string{
		"", "*", "**", "*.", ".", "*.com", "*.co.uk", ".com", "api-*.com", "*.internal", "*.local", "*.*.a.b", "a.*.b", "a*b*.c.d", "*..a.b", "**.a.b", "-*.a.b",
		"10.0.0.1/8", "10.0.0.0/33", "127.1", "0x7f000001", "1.2.3.4:80", "a.", "pypi.", "PyPI", "a.b:80", "https://a.b", "a.b/c", "a b.c", "_x.a.b", "nope", "::ffff:1.2.3.4", "fe80::1%eth0", "::ffff:0:0/96",
	} {
		if target, err := ParseTarget(in); berm.KindOf(err) != berm.Invalid || err == nil {
			t.Errorf("%q is %v, %v", in, target, err)
		}
	}
}

var privateName = regexp.MustCompile(`\.(internal|local|onion|home\.arpa)$`)

// slowMatch is another matcher of names: by regular expression.
func slowMatch(pattern, name string) bool {
	if pattern == "public" || pattern == "names" {
		return strings.Contains(name, ".") && !privateName.MatchString(name)
	}
	if members, ok := slowGroups()[pattern]; ok {
		for _, m := range members {
			if slowMatch(m, name) {
				return true
			}
		}
		return false
	}
	if re := compiledPatterns[pattern]; re != nil {
		return re.MatchString(name)
	}
	var re string
	switch {
	case strings.HasPrefix(pattern, "*."):
		re = `[^.]+(\.[^.]+)*\.` + regexp.QuoteMeta(pattern[2:])
	case strings.HasPrefix(pattern, "."):
		re = `([^.]+\.)*` + regexp.QuoteMeta(pattern[1:])
	default:
		re = strings.ReplaceAll(regexp.QuoteMeta(pattern), `\*`, `[^.]*`)
	}
	compiledPatterns[pattern] = regexp.MustCompile(`^` + re + `$`)
	return compiledPatterns[pattern].MatchString(name)
}

var compiledPatterns = map[string]*regexp.Regexp{}

var slowGroups = sync.OnceValue(func() map[string][]string {
	all := map[string][]string{}
	for _, m := range regexp.MustCompile(`(?m)^([a-z]+):(.*)$`).FindAllStringSubmatch(groupsText, -1) {
		all[m[1]] = strings.Fields(m[2])
	}
	return all
})

func pick[T any](r *rand.Rand, list ...T) T { return list[r.IntN(len(list))] }

// randomName makes names that are close to each other.
func randomName(r *rand.Rand) string {
	labels := []string{pick(r, "a", "b", "api-a", "api-", "xapi-b"), "example", pick(r, "com", "test", "internal")}
	labels[0] = strings.TrimSuffix(labels[0], "-")
	for range r.IntN(3) {
		labels = append([]string{pick(r, "a", "b", "c")}, labels...)
	}
	return strings.Join(labels[r.IntN(2):], ".")
}

func randomTarget(r *rand.Rand) string {
	name := randomName(r)
	_, parent, _ := strings.Cut(name, ".")
	if !strings.Contains(parent, ".") {
		parent = name
	}
	switch r.IntN(10) {
	case 0:
		return "*." + name
	case 1:
		return "." + name
	case 2:
		return pick(r, "api-*", "*a", "a*", "x*b") + "." + parent
	case 3:
		return pick(r, "public", "names", "pypi", "github")
	case 4:
		return pick(r, "9.0.0.0/8", "9.9.0.0/16", "9.9.9.9", "10.0.0.0/8", "10.1.2.3", "169.254.169.254", "2600::/16", "2600::1", "127.0.0.1")
	}
	return name
}

func TestMatchName(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	hits := 0
	for range 10_000 {
		s, name := randomTarget(r), pick(r, randomName(r), "pypi.org", "raw.githubusercontent.com", "githubusercontent.com")
		if strings.Contains(s, "/") || s[0] >= '1' && s[0] <= '9' {
			continue
		}
		target, err := ParseTarget(s)
		if err != nil {
			t.Fatal(err)
		}
		c := compile(&Rule{To: []Target{target}, Ports: anyPorts})
		fit, _ := c.fits(Flow{Host: Host{name: name}, Port: 443, Proto: TCP}, Host{}.addr, 0)
		if want := slowMatch(s, name); (fit == fitAll) != want {
			t.Fatalf("%s matches %s: %v, want %v", s, name, !want, want)
		} else if want {
			hits++
		}
		// What covers a target has all of its names.
		wide, err := ParseTarget(randomTarget(r))
		if err != nil {
			t.Fatal(err)
		}
		if wide.covers(target) && slowMatch(s, name) && !slowMatch(wide.String(), name) {
			t.Fatalf("%s covers %s, but has no %s", wide, s, name)
		}
	}
	if hits < 500 {
		t.Errorf("only %d names matched", hits)
	}
	for _, c := range []struct {
		target, name string
		want         bool
	}{
		{"allowed.test", "evilallowed.test", false}, {"*.allowed.test", "evilallowed.test", false}, {".allowed.test", "evilallowed.test", false},
		{"*.allowed.test", "allowed.test", false}, {".allowed.test", "allowed.test", true}, {"*.allowed.test", "a.b.allowed.test", true},
		{"allowed.test", "allowed.test.evil.test", false}, {"api-*.a.test", "api-x.y.a.test", false}, {"api-*.a.test", "api-x.a.test", true},
	} {
		target, err := ParseTarget(c.target)
		if err != nil || target.matchName(c.name) != c.want {
			t.Errorf("%s and %s: want %v (%v)", c.target, c.name, c.want, err)
		}
	}
}

func TestGroups(t *testing.T) {
	if len(Groups()) < 15 {
		t.Errorf("groups: %v", Groups())
	}
	for name, members := range groups() {
		if len(members) == 0 {
			t.Errorf("%s is empty", name)
		}
		for _, m := range members {
			if m.kind != exactName && m.kind != namesBelow {
				t.Errorf("%s has %s", name, m)
			}
		}
	}
}
