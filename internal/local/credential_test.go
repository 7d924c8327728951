package local

import (
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm/internal/local/preset"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

func TestParseCredential(t *testing.T) {
	for text, want := range map[string]Credential{
		"github=env:GITHUB_TOKEN":             {egress.Credential{Name: "github", Service: "github"}, "env:GITHUB_TOKEN"},
		"work=file:/a,service=openai,env=KEY": {egress.Credential{Name: "work", Service: "openai", Env: "KEY"}, "file:/a"},
		"api=env:A,host=a.example,host=b.example:8443,header=Authorization,prefix=Token,method=GET,path=/v1/**": {egress.Credential{
			Name: "api", Hosts: []string{"a.example", "b.example:8443"}, Header: "Authorization", Prefix: "Token ", Methods: []string{"GET"}, Paths: []string{"/v1/**"}}, "env:A"},
		"git=env:A,host=git.example,user=me,repo=a/b,push=refs/heads/x": {egress.Credential{
			Name: "git", Hosts: []string{"git.example"}, User: "me", Repositories: []string{"a/b"}, Push: []string{"refs/heads/x"}}, "env:A"},
	} {
		if c, err := ParseCredential(text); err != nil || !reflect.DeepEqual(c, want) {
			t.Errorf("%s: %+v, %v", text, c, err)
		}
	}
	for _, text := range []string{
		"", "a", "=env:A", "A=env:A", "a=A", "a=env:", "a=secret:A", "a=env:A,", "a=env:A,host", "a=env:A,host=", "a=env:A,what=x", "a=env:A,env=B,env=C",
		"a=env:A,host=h,cookie=c,query=q", "a=env:A,host=h,prefix=p", "a=env:A,host=h,repo=a/b,header=X",
	} {
		if c, err := ParseCredential(text); err == nil {
			t.Errorf("%q: %+v", text, c)
		}
	}
}

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
		c, err := Credential{Source: source}.read([]string{"A=value", "B="})
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
