package local

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm/internal/local/preset"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

func TestReadCredential(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good, empty, long := write("good", "value\r\n"), write("empty", "\n"), write("long", strings.Repeat("x", maxSecret+1))
	for source, want := range map[string]string{
		"env:A": "value", "file:" + good: "value",
		"env:B": "", "env:C": "", "file:" + empty: "", "file:" + long: "", "file:" + dir: "", "file:" + dir + "/none": "", "file:/dev/zero": "",
	} {
		c, err := read(preset.Credential{Source: source}, []string{"A=value", "B="})
		if string(c.Value) != want || (err == nil) != (want != "") {
			t.Errorf("%s: %q, %v", source, c.Value, err)
		}
	}
}

func TestWithhold(t *testing.T) {
	var notices []string
	task := &Task{Rights: preset.Rights{Env: []string{"KEPT", "TOKEN_TWO=x"}}, Notice: func(text string) { notices = append(notices, text) }}
	r := &Request{Env: []string{"PATH=/bin", "TOKEN=secret", "URL=https://secret@host", "KEPT=secret", "TOKEN_TWO=x"}}
	task.withhold(r, map[string]string{"TOKEN": "stands-for-it", "TOKEN_TWO": "no"}, []egress.Credential{{Name: "c", Value: []byte("secret")}})
	slices.Sort(r.Env)
	if want := []string{"KEPT=secret", "PATH=/bin", "TOKEN=stands-for-it", "TOKEN_TWO=x"}; !slices.Equal(r.Env, want) || len(notices) != 1 {
		t.Errorf("%q, %q", r.Env, notices)
	}
}
