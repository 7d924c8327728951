package preset

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

func TestParseCredential(t *testing.T) {
	for text, want := range map[string]Credential{
		"github=env:GITHUB_TOKEN":             {egress.Credential{Name: "github", Service: "github"}, "env:GITHUB_TOKEN", false},
		"work=file:/a,service=openai,env=KEY": {egress.Credential{Name: "work", Service: "openai", Env: "KEY"}, "file:/a", false},
		"api=env:A,host=a.example,host=b.example:8443,header=Authorization,prefix=Token,method=GET,path=/v1/**": {egress.Credential{
			Name: "api", Hosts: []string{"a.example", "b.example:8443"}, Header: "Authorization", Prefix: "Token ", Methods: []string{"GET"}, Paths: []string{"/v1/**"}}, "env:A", false},
		"git=env:A,host=git.example,user=me,repo=a/b,push=refs/heads/x": {egress.Credential{
			Name: "git", Hosts: []string{"git.example"}, User: "me", Repositories: []string{"a/b"}, Push: []string{"refs/heads/x"}}, "env:A", false},
		"a=env:A,host=h.example,env=E,swap,endpoint=E_URL": {egress.Credential{
			Name: "a", Hosts: []string{"h.example"}, Env: "E", Swap: true, Endpoint: true, URL: "E_URL"}, "env:A", false},
		"openai=env:A,endpoint": {egress.Credential{Name: "openai", Service: "openai", Endpoint: true}, "env:A", false},
	} {
		if c, err := ParseCredential(text); err != nil || !reflect.DeepEqual(c, want) {
			t.Errorf("%s: %+v, %v", text, c, err)
		}
	}
	for _, text := range []string{
		"", "a", "=env:A", "A=env:A", "a=A", "a=env:", "a=secret:A", "a=env:A,", "a=env:A,host", "a=env:A,host=", "a=env:A,what=x", "a=env:A,env=B,env=C",
		"a=env:A,host=h,cookie=c,query=q", "a=env:A,host=h,prefix=p", "a=env:A,host=h,repo=a/b,header=X",
		"-a=env:A", "a-=env:A", "a=env:A,host=h,swap", "a=env:A,host=h,endpoint", "a=env:A,host=h,repo=a/b,swap", "a=env:A,swap=x", "a=env:A,endpoint=",
	} {
		if c, err := ParseCredential(text); err == nil {
			t.Errorf("%q: %+v", text, c)
		}
	}
}

// A preset's credentials are joined by those of flags, by name; what is for --keyless comes
// with it alone.
func TestCredentials(t *testing.T) {
	place := newPlace(t)
	c := config(t, `
presets:
  a:
    cred: ["one=env:A,host=a.example", "two=file:/b,host=b.example"]
    keyless: {allow: [a.example], env: [-X], cred: ["key=env:K,host=a.example,env=K,swap"]}
  b:
    extends: a
    cred: [-two]
    keyless: {cred: ["other=env:O,host=a.example,env=O,swap"]}
`)
	names := func(g Grant) (list []string) {
		for _, c := range g.Credentials {
			text := c.Name + " " + c.Source
			if c.Optional {
				text += " optional"
			}
			list = append(list, text)
		}
		return list
	}
	flags := Rights{Credentials: []string{"one=env:C,host=c.example"}}
	if got := names(mustResolve(t, Request{Place: place, Config: c, Preset: "b", Flags: flags})); !slices.Equal(got, []string{"one env:C"}) {
		t.Errorf("%q", got)
	}
	g := mustResolve(t, Request{Place: place, Config: c, Preset: "b", Flags: flags, Keyless: true})
	if got := names(g); !slices.Equal(got, []string{"key env:K optional", "other env:O optional", "one env:C"}) || !slices.Equal(g.Allow, []string{"a.example"}) || !slices.Contains(g.Env, "-X") {
		t.Errorf("%q, %+v", got, g)
	}
	if _, err := Resolve(Request{Place: place, Preset: "build", Keyless: true, NoToolchain: true}); berm.KindOf(err) != berm.Invalid {
		t.Error(err)
	}
	for _, name := range []string{"codex", "claude-code"} {
		if g := mustResolve(t, Request{Place: place, Preset: name, Keyless: true}); len(g.Credentials) == 0 || len(g.Allow) != 1 {
			t.Errorf("%s: %+v", name, g)
		}
	}
}

// A project takes credentials away and asks for them; it names no secret.
func TestProjectCredentials(t *testing.T) {
	place := newPlace(t)
	grant := mustResolve(t, Request{Place: place, Flags: Rights{Allow: []string{"a.example"}, Credentials: []string{"one=env:A,host=a.example", "two=env:B,host=a.example"}}})
	g := Narrow(grant, project(t, "cred: [-one, two, three]\n"), place)
	if len(g.Credentials) != 1 || g.Credentials[0].Name != "two" || len(grant.Credentials) != 2 {
		t.Errorf("%+v of %+v", g.Credentials, grant.Credentials)
	}
	if len(g.Notices) != 1 || !strings.Contains(g.Notices[0], "--cred three=SOURCE") {
		t.Errorf("%q", g.Notices)
	}
	if g := Narrow(grant, project(t, "network: none\n"), place); len(g.Credentials) != 0 {
		t.Errorf("%+v", g.Credentials)
	}
	for _, text := range []string{"cred: [one=env:HOME]", "cred: [one=file:/etc/passwd]", "keyless: {}", "cred: [-one=env:A]"} {
		if _, err := parseProject(ProjectFile, []byte("version: 1\n"+text+"\n")); berm.KindOf(err) != berm.Invalid {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestCredentialString(t *testing.T) {
	c, err := ParseCredential("a=env:A,host=h.example,header=X-Key,env=E,swap,endpoint=E_URL")
	if err != nil {
		t.Fatal(err)
	}
	if got, want := c.String(), "a (env:A, for h.example, in the header X-Key, placeholder in E, base URL in E_URL, where its placeholder is sent)"; got != want {
		t.Error(got)
	}
	for text, want := range map[string]string{
		"github=env:A": "by the API it does whatever the token may)",
		"github=env:A,repo=acme/app,push=refs/heads/agent/*": "repositories acme/app, which may write refs/heads/agent/*; by the API it reads these repositories, and writes their issues, pull requests without merging them, comments and status alone; no GraphQL)",
	} {
		c, err := ParseCredential(text)
		if err != nil || !strings.HasSuffix(c.String(), want) {
			t.Errorf("%s: %s, %v", text, c, err)
		}
	}
}
