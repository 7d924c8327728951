package berm_test

import (
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
)

func TestTeam(t *testing.T) {
	for in, want := range map[string]berm.Team{"default": "", "a": "a", "blue-2": "blue-2", strings.Repeat("x", 40): berm.Team(strings.Repeat("x", 40))} {
		got, err := berm.ParseTeam(in)
		if err != nil || got != want || got.String() != in {
			t.Errorf("ParseTeam(%q) = %q (%s), %v", in, string(got), got, err)
		}
	}
	for _, in := range []string{"", "Blue", "2blue", "-blue", "blue/x", "blue_x", "blé", strings.Repeat("x", 41), "a b", "a\x00"} {
		if got, err := berm.ParseTeam(in); berm.KindOf(err) != berm.Invalid {
			t.Errorf("ParseTeam(%q) = %q, %v", in, got, err)
		}
	}
}
