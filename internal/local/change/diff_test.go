package change

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// show compares two trees and returns what Diff prints.
func show(t testing.TB, before, after string, o Options) string {
	t.Helper()
	b, a := root(t, before), root(t, after)
	changes, err := Compare(t.Context(), b, a, Limits{})
	must(t, err)
	var out bytes.Buffer
	must(t, Diff(&out, changes, a, b, o))
	return out.String()
}

// git runs git without any configuration.
func git(t testing.TB, dir string, stdin io.Reader, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "git", args...)
	cmd.Dir, cmd.Stdin = dir, stdin
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=/nonexistent", "GIT_CONFIG_NOSYSTEM=1", "GIT_CEILING_DIRECTORIES=" + filepath.Dir(dir)}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func TestDiffIsAsGits(t *testing.T) {
	dir := t.TempDir()
	before, after := filepath.Join(dir, "before"), filepath.Join(dir, "after")
	var long []string
	for i := range 40 {
		long = append(long, strings.Repeat("x", i))
	}
	was := strings.Join(long, "\n") + "\n"
	long[3], long[30] = "three", "thirty\r"
	tree(t, before, "changed="+was, "gone=1\n2\n", "mode=1\n", "link@old", "both=1\n", "tab\tquote\"=1\n", "sp ace=1\n", "end=1", "bin=\x00\x01", "empty=", "swap=1\n", "\u00e9=1\n", "deleted bin=\x00")
	tree(t, after, "changed="+strings.Join(long, "\n")+"\n", "new=1\n2", "newexec=1\n:755", "mode=1\n:755", "link@new", "both=2\n:755", "tab\tquote\"=2\n", "sp ace=2\n", "end=1\n", "bin=\x00\x02", "fresh=", "swap@x", "\u00e9=2\n", "new bin=\x00")
	got := show(t, before, after, Options{})
	want, _ := git(t, dir, nil, "diff", "--no-index", "--no-renames", "before", "after")
	want = strings.NewReplacer("a/before/", "a/", "b/after/", "b/", "b/before/", "b/", "a/after/", "a/").Replace(want)
	// The hunk's heading after "@@ … @@" and a count of one are left out by git.
	if diff := cmp.Diff(normal(want), normal(got)); diff != "" {
		t.Error(diff)
	}
	stat := show(t, before, after, Options{Format: Stat})
	wantStat, _ := git(t, dir, nil, "diff", "--no-index", "--no-renames", "--shortstat", "before", "after")
	if !strings.HasSuffix(stat, wantStat) {
		t.Errorf("got %q, want %q", stat, wantStat)
	}
}

// git apply refuses every patch with a path in a .git, so that a patch for it has none.
func TestAppliable(t *testing.T) {
	dir := t.TempDir()
	before, after := filepath.Join(dir, "before"), filepath.Join(dir, "after")
	tree(t, before, "a=1\n", ".git/HEAD=1\n")
	tree(t, after, "a=2\n", ".git/HEAD=2\n", ".git/x=1\n", "b/.GIT/config=1\n", "c/.github=1\n")
	patch := show(t, before, after, Options{Appliable: true})
	if out, err := git(t, before, strings.NewReader(patch), "apply", "-"); err != nil {
		t.Fatalf("%v: %s\n%s", err, out, patch)
	}
	for _, want := range []string{"# berm: .git: left out here, since git apply would refuse it: 2 of its paths changed", "# berm: b/.GIT: ", "+++ b/c/.github\n"} {
		if !strings.Contains(patch, want) {
			t.Errorf("%q is not in\n%s", want, patch)
		}
	}
	if whole := show(t, before, after, Options{}); !strings.Contains(whole, "b/.git/HEAD") {
		t.Error(whole)
	}
}

func normal(patch string) map[string]string {
	files := map[string]string{}
	for file := range strings.SplitSeq("\n"+patch, "\ndiff --git ") {
		lines := strings.Split(file, "\n")
		for i, line := range lines {
			if strings.HasPrefix(line, "@@ ") {
				f := strings.Fields(line)
				lines[i] = strings.TrimSuffix(f[1], ",1") + " " + strings.TrimSuffix(f[2], ",1")
			}
		}
		files[lines[0]] += strings.TrimRight(strings.Join(lines[1:], "\n"), "\n") + "\n"
	}
	return files
}

// git apply takes the patch and makes the new tree of it.
func TestGitAppliesRandomTrees(t *testing.T) {
	for seed := range uint64(12) {
		r := rand.New(rand.NewPCG(seed, 2))
		dir := t.TempDir()
		before, after := filepath.Join(dir, "before"), filepath.Join(dir, "after")
		must(t, os.Mkdir(before, 0o755))
		for range 60 {
			mutate(r, before)
		}
		must(t, os.WriteFile(filepath.Join(before, "bin"), []byte{0, 1, byte(seed)}, 0o644))
		// Git knows no empty directories, and does not take them away.
		if out, err := exec.Command("find", before, "-mindepth", "1", "-depth", "-type", "d", "-empty", "-delete").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if out, err := exec.Command("cp", "-a", before, after).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		for range 60 {
			mutate(r, after)
		}
		must(t, os.WriteFile(filepath.Join(after, "bin"), bytes.Repeat([]byte{0, byte(r.Uint32())}, r.IntN(500)), 0o644))
		patch := show(t, before, after, Options{Binary: true})
		for _, args := range [][]string{{"apply", "--check", "--whitespace=nowarn", "-"}, {"apply", "--whitespace=nowarn", "-"}} {
			if out, err := git(t, before, strings.NewReader(patch), args...); err != nil {
				t.Fatalf("seed %d: %v: %s\n%s", seed, err, out, patch)
			}
		}
		changes, err := Compare(t.Context(), root(t, before), root(t, after), Limits{})
		must(t, err)
		for _, c := range changes {
			// Git keeps neither directories nor the rest of the mode.
			if c.Old.Mode.IsDir() && c.Kind != Added || c.New.Mode.IsDir() && c.Kind != Deleted ||
				c.Kind == Modified && c.Old.Size == c.New.Size && c.Old.Target == c.New.Target && gitMode(c.Old.Mode) == gitMode(c.New.Mode) && sameContent(t, before, after, c.Path) {
				continue
			}
			t.Errorf("seed %d: after git apply: %+v", seed, c)
		}
	}
}

func sameContent(t *testing.T, before, after, path string) bool {
	a, err := os.ReadFile(filepath.Join(before, path))
	must(t, err)
	b, err := os.ReadFile(filepath.Join(after, path))
	must(t, err)
	return bytes.Equal(a, b)
}

// Nothing that a session wrote reaches a terminal as it is.
func TestTerminal(t *testing.T) {
	before, after := t.TempDir(), t.TempDir()
	tree(t, before, "a=\x1b[2Jold\n", "l@\x1bx")
	tree(t, after, "a=\x1b[2Jnew\r\n\u202e\ttab\n\xff\n", "l@\x9b\n/y", "n\x1b[m\n=1", "d\x07/e/", "f\x1b!", ".git/hooks/pre-commit=#!/bin/sh\n", ".envrc@\x1b")
	for _, format := range []Format{Patch, Stat, Names} {
		out := show(t, before, after, Options{Format: format, Terminal: true})
		for _, c := range out {
			if c != '\n' && c != '\t' && (c < ' ' || c >= 0x7f && c < 0xa0 || c == '\u202e' || c == '\ufffd') {
				t.Fatalf("format %d: %q in %q", format, c, out)
			}
		}
		if !strings.Contains(out, "# berm:") || !strings.Contains(out, "git runs this hook") {
			t.Errorf("format %d: no warning in %s", format, out)
		}
	}
	out := show(t, before, after, Options{Terminal: true, Style: true, Paths: []string{"a", ".git"}})
	for _, want := range []string{
		"\x1b[31m# berm: .git/hooks/pre-commit: git runs this hook\x1b[0m\n\x1b[1mdiff --git a/.git/hooks/pre-commit",
		"\x1b[31m-\\x1b[2Jold\x1b[0m\n", "\x1b[32m+\\x1b[2Jnew\\r\x1b[0m\n", "\x1b[32m+\\u202e\ttab\x1b[0m\n", "\x1b[32m+\\xff\x1b[0m\n",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%q", want, out)
		}
	}
	if exact := show(t, before, after, Options{Paths: []string{"a"}}); !strings.Contains(exact, "+\x1b[2Jnew\r\n+\u202e\ttab\n+\xff\n") {
		t.Errorf("not exact: %q", exact)
	}
	if exact := show(t, before, after, Options{}); strings.Contains(exact, "runs this hook") {
		t.Errorf("a warning in %q", exact)
	}
}

func TestFormats(t *testing.T) {
	before, after := t.TempDir(), t.TempDir()
	tree(t, before, "d/a=1\n2\n", "m/", "t=1", "k=1\n", "p=1", "gone/")
	tree(t, after, "d/a=1\n3\n4\n", "m/:700", "t@x", "e/f/", "n/new=1\n", "fifo!", "p=1:600", "set=1:4755", "bin=\x00")
	for _, test := range []struct {
		o    Options
		want string
	}{
		{Options{Format: Names}, "A\tbin\nM\td/a\nA\te/f/\nA\tfifo\nD\tgone/\nD\tk\nM\tm/\nA\tn/new\nM\tp\nA\tset\nT\tt\n"},
		{Options{Format: Names, Paths: []string{"./d/", "e", "n/ne", "k"}}, "M\td/a\nA\te/f/\nD\tk\n"},
		{Options{Format: Names, Paths: []string{"."}, Terminal: true}, "A\tbin\nM\td/a\nA\te/f/\nA\tfifo\nD\tgone/\nD\tk\nM\tm/\nA\tn/new\nM\tp\nA\tset\t# berm: " + whySetid + "\nT\tt\n"},
		{Options{Format: Stat}, " bin   | Bin 0 -> 1 bytes\n d/a   | 3 ++-\n e/f   | directory: added\n fifo  | fifo: added\n gone  | directory: deleted\n k     | 1 -\n" +
			" m     | directory: mode 0700, was 0755\n n/new | 1 +\n p     | 0\n set   | 1 +\n t     | 2 +-\n 11 files changed, 5 insertions(+), 3 deletions(-)\n"},
		{Options{Paths: []string{"e", "fifo", "m", "p", "gone"}}, "# berm: e/f: directory: added\n# berm: fifo: fifo: added\n# berm: gone: directory: deleted\n# berm: m: directory: mode 0700, was 0755\n" +
			"diff --git a/p b/p\nold mode 100644\nnew mode 100600\n"},
		{Options{Paths: []string{"set"}}, "diff --git a/set b/set\nnew file mode 104755\nindex 0000000..56a6051\n--- /dev/null\n+++ b/set\n@@ -0,0 +1,1 @@\n+1\n\\ No newline at end of file\n"},
		{Options{Paths: []string{"none"}, Format: Stat}, ""},
	} {
		if diff := cmp.Diff(test.want, show(t, before, after, test.o)); diff != "" {
			t.Errorf("%+v: %s", test.o, diff)
		}
	}
}

func TestHuge(t *testing.T) {
	before, after := t.TempDir(), t.TempDir()
	tree(t, after, "lines="+strings.Repeat("\n", maxLines+1), "bytes="+strings.Repeat("x", maxText+1), "fits="+strings.Repeat("x", maxText))
	must(t, os.WriteFile(filepath.Join(after, "sparse"), nil, 0o644))
	must(t, os.Truncate(filepath.Join(after, "sparse"), 1<<40))
	out := show(t, before, after, Options{Paths: []string{"lines", "bytes", "sparse"}})
	for _, name := range []string{"lines", "bytes", "sparse"} {
		if !strings.Contains(out, "Files /dev/null and b/"+name+" differ\n") {
			t.Errorf("no %s in %q", name, out[:min(len(out), 2000)])
		}
	}
	if out := show(t, before, after, Options{Paths: []string{"fits"}}); len(out) < maxText {
		t.Errorf("a file of the limit is not shown: %.200q", out)
	}
}

// What cannot be read is told, and the rest is shown.
func TestDiffOfWhatVanished(t *testing.T) {
	before, after := t.TempDir(), t.TempDir()
	tree(t, before, "z=1\n")
	tree(t, after, "a=1\n", "b=1\n", "z=2\n")
	b, a := root(t, before), root(t, after)
	changes, err := Compare(t.Context(), b, a, Limits{})
	must(t, err)
	must(t, os.Remove(filepath.Join(after, "a")))
	must(t, os.Remove(filepath.Join(after, "b")))
	tree(t, after, "b@/etc/passwd")
	for format, want := range map[Format][]string{
		Patch: {"# berm: a: not shown: ", "# berm: b: not shown: ", "+2\n"},
		Stat:  {" a | cannot be read\n", " b | cannot be read\n", " z | 2 +-\n"},
	} {
		var out bytes.Buffer
		if err := Diff(&out, changes, a, b, Options{Format: format}); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("got %v", err)
		}
		for _, w := range want {
			if !strings.Contains(out.String(), w) {
				t.Errorf("no %q in %s", w, out.String())
			}
		}
	}
	full := errors.New("full")
	if err := Diff(writerFunc(func([]byte) (int, error) { return 0, full }), changes, a, b, Options{}); !errors.Is(err, full) {
		t.Errorf("got %v", err)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestJSON(t *testing.T) {
	for _, test := range []struct {
		c    Change
		want string
	}{
		{Change{Path: "a\x1b", Kind: Added, New: Entry{Mode: 0o4755&0o777 | fs.ModeSetuid}, Danger: "why"},
			`{"path":"a\u001b","kind":"added","old":null,"new":{"type":"file","mode":"4755","size":0},"danger":"why"}`},
		{Change{Path: "\xff", Kind: Modified, Old: Entry{Mode: fs.ModeDir | fs.ModeSticky | 0o755}, New: Entry{Mode: fs.ModeSymlink | 0o777, Target: "\xfe"}},
			`{"path":"\ufffd","pathBytes":"/w==","kind":"modified","old":{"type":"directory","mode":"1755"},"new":{"type":"symlink","mode":"0777","target":"\ufffd","targetBytes":"/g=="}}`},
		{Change{Path: "f", Kind: Deleted, Old: Entry{Mode: fs.ModeNamedPipe | 0o644}},
			`{"path":"f","kind":"deleted","old":{"type":"fifo","mode":"0644"},"new":null}`},
	} {
		got, err := json.Marshal(test.c)
		must(t, err)
		if diff := cmp.Diff(test.want, string(got)); diff != "" {
			t.Error(diff)
		}
	}
}

// The hunks of any two texts make the one of the other.
func FuzzHunks(f *testing.F) {
	r := rand.New(rand.NewPCG(3, 3))
	for range 10 {
		f.Add(text(r), text(r))
	}
	f.Add([]byte("a"), []byte("a\n"))
	f.Add([]byte("\n\\ No newline at end of file\n"), []byte("\\ No newline at end of file"))
	f.Fuzz(func(t *testing.T, old, new []byte) {
		var got strings.Builder
		rest := slices.Collect(strings.Lines(string(old)))
		at := 0 // lines of old that are done
		var last byte
		for line := range strings.Lines(string(hunks(old, new))) {
			mark, content := line[0], line[1:]
			switch mark {
			case '@':
				var from, count int
				fmt.Sscanf(line, "@@ -%d,%d", &from, &count)
				if count > 0 {
					from--
				}
				for ; at < from; at++ {
					got.WriteString(rest[at])
				}
			case '\\':
				if last != '-' {
					s := strings.TrimSuffix(got.String(), "\n")
					got.Reset()
					got.WriteString(s)
				}
			case ' ', '-':
				if strings.TrimSuffix(rest[at], "\n") != strings.TrimSuffix(content, "\n") {
					t.Fatalf("line %d is %q, the hunk says %q", at, rest[at], content)
				}
				at++
				if mark == ' ' {
					got.WriteString(content)
				}
			case '+':
				got.WriteString(content)
			default:
				t.Fatalf("line %q", line)
			}
			last = mark
		}
		for ; at < len(rest); at++ {
			got.WriteString(rest[at])
		}
		if got.String() != string(new) {
			t.Errorf("%q and the hunks make %q, not %q", old, got.String(), new)
		}
	})
}

// Every name comes back from git as it was.
func FuzzQuote(f *testing.F) {
	for _, name := range append(names, "a\"\\b", "\a\b\t\n\v\f\r\x01\x7f\x80", "plain") {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		quoted := Quote(name)
		for _, c := range []byte(quoted) {
			if c < ' ' || c >= 0x7f {
				t.Fatalf("%q has %q", quoted, c)
			}
		}
		if got := unquote(t, quoted); got != name {
			t.Errorf("%q became %q", name, got)
		}
	})
}

// unquote reads a name as git does.
func unquote(t *testing.T, s string) string {
	if !strings.HasPrefix(s, `"`) {
		return s
	}
	s = s[1 : len(s)-1]
	var out []byte
	for i := 0; i < len(s); i++ {
		if s[i] != '\\' {
			out = append(out, s[i])
			continue
		}
		i++
		if at := strings.IndexByte(`abtnvfr`, s[i]); at >= 0 {
			out = append(out, byte('\a'+at))
		} else if s[i] >= '0' && s[i] <= '3' {
			out = append(out, (s[i]-'0')<<6|(s[i+1]-'0')<<3|(s[i+2]-'0'))
			i += 2
		} else {
			out = append(out, s[i])
		}
	}
	return string(out)
}

func BenchmarkDiff(b *testing.B) {
	before, after := b.TempDir(), b.TempDir()
	var lines strings.Builder
	for i := range 100_000 {
		lines.WriteString(strings.Repeat("ab", i%40) + "\n")
	}
	tree(b, before, "f="+lines.String())
	tree(b, after, "f="+strings.ReplaceAll(lines.String(), "\nababababab\n", "\nother\n"))
	x, y := root(b, before), root(b, after)
	changes, err := Compare(b.Context(), x, y, Limits{})
	must(b, err)
	for b.Loop() {
		must(b, Diff(io.Discard, changes, y, x, Options{Terminal: true, Style: true}))
	}
}
