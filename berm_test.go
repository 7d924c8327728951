package berm

import (
	"errors"
	"io/fs"
	"regexp"
	"testing"
)

func TestSandboxIDShape(t *testing.T) {
	shape := regexp.MustCompile(`^i0[a-z0-9]{19}$`)
	seen := map[SandboxID]bool{}
	for range 1000 {
		id := NewSandboxID()
		if !shape.MatchString(string(id)) || id[ShardIndex] != '0' {
			t.Fatalf("NewSandboxID() = %q", id)
		}
		if seen[id] {
			t.Fatalf("%q was drawn twice", id)
		}
		seen[id] = true
	}
}

func TestRandomIDUsesTheWholeAlphabetEvenly(t *testing.T) {
	count := map[byte]int{}
	for range 2000 {
		for _, c := range []byte(NewTemplateID()) {
			count[c]++
		}
	}
	// 40,000 draws over 36 letters: 1,111 each; 5 standard deviations are 167.
	for i := range len(idAlphabet) {
		if n := count[idAlphabet[i]]; n < 944 || n > 1278 {
			t.Errorf("%q was drawn %d times of 40000", idAlphabet[i], n)
		}
	}
}

func TestParseSandboxID(t *testing.T) {
	for in, want := range map[string]SandboxID{
		"iabc0123456789abcdefg":         "iabc0123456789abcdefg",
		"nonexistingsandbox":            "nonexistingsandbox",
		"iabc0123456789abcdefg-6532622": "iabc0123456789abcdefg",
		"i-x-y":                         "i",
	} {
		if got, err := ParseSandboxID(in); err != nil || got != want {
			t.Errorf("ParseSandboxID(%q) = %q, %v; want %q", in, got, err, want)
		}
	}
	for _, in := range []string{"", "-", "-abc", "I0", "i/..", "i%2f", "i\x00", "i.b", "ï", "i b"} {
		if got, err := ParseSandboxID(in); KindOf(err) != Invalid || err == nil {
			t.Errorf("ParseSandboxID(%q) = %q, %v; want an Invalid error", in, got, err)
		}
	}
}

func FuzzParseSandboxID(f *testing.F) {
	f.Add("iabc-1")
	shape := regexp.MustCompile(`^[a-z0-9]{1,64}$`)
	f.Fuzz(func(t *testing.T, in string) {
		id, err := ParseSandboxID(in)
		if err == nil && !shape.MatchString(string(id)) {
			t.Errorf("ParseSandboxID(%q) let %q through", in, id)
		}
	})
}

func TestTransitions(t *testing.T) {
	states := []State{Creating, Running, Pausing, Paused, Resuming, Killed}
	legal := map[[2]State]bool{
		{Creating, Running}: true, {Creating, Killed}: true,
		{Running, Pausing}: true, {Running, Killed}: true,
		{Pausing, Paused}: true, {Pausing, Running}: true, {Pausing, Killed}: true,
		{Paused, Resuming}: true, {Paused, Killed}: true,
		{Resuming, Running}: true, {Resuming, Paused}: true, {Resuming, Killed}: true,
	}
	for _, from := range states {
		for _, to := range states {
			if got := from.CanBecome(to); got != legal[[2]State{from, to}] {
				t.Errorf("%s.CanBecome(%s) = %v", from, to, got)
			}
		}
	}
}

func TestErrors(t *testing.T) {
	err := error(Errorf(NotFound, "sandbox %s: %w", "iabc", fs.ErrNotExist).WithHint("list them with berm ls"))
	if err.Error() != "sandbox iabc: file does not exist" {
		t.Errorf("text is %q", err)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		t.Error("the cause is lost")
	}
	wrapped := errors.Join(errors.New("other"), Errorf(Internal, "outer: %w", err))
	if KindOf(wrapped) != Internal || KindOf(err) != NotFound || KindOf(errors.New("x")) != Internal {
		t.Error("KindOf does not take the outermost kind")
	}
	if HintOf(wrapped) != "list them with berm ls" || HintOf(errors.New("x")) != "" {
		t.Errorf("HintOf = %q", HintOf(wrapped))
	}
	if !errors.Is(err, &Error{Kind: NotFound}) || errors.Is(err, &Error{Kind: Conflict}) {
		t.Error("errors.Is by kind")
	}
	if Kind(99).String() != "kind 99" || Exhausted.String() != "exhausted" {
		t.Error("Kind.String")
	}
}
