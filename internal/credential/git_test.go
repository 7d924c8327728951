package credential

import (
	"net/http"
	"strings"
	"testing"
)

func TestMissing(t *testing.T) {
	r := newRig()
	s := r.open(t, Binding{ID: "git", Kind: Git, Secret: "secret:token", Hosts: []string{"git.test"}, Git: &Rules{Repositories: []string{"o/*"}}},
		Binding{ID: "two", Kind: Git, Secret: "secret:other", Hosts: []string{"git.test"}, Git: &Rules{Repositories: []string{"two/r"}}})
	ask := func(host, target string, status int, fields ...string) *Refusal {
		out, err := http.NewRequest("GET", "https://"+host+target, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range fields {
			out.Header.Set(name, "x")
		}
		return s.Missing(Flow{Name: host, Port: 443, SNI: host}, out, status)
	}
	refs := "/info/refs?service=git-upload-pack"
	for _, status := range []int{401, 403, 404} {
		refusal := ask("git.test", "/private/r.git"+refs, status)
		if refusal == nil || refusal.Reason != Repository || !strings.Contains(refusal.Message, `"private/r"`) || !strings.Contains(refusal.Hint, "o/*, two/r;") {
			t.Errorf("%d: %v", status, refusal)
		}
		if e := r.last(); e.Type != Deny || e.Reason != Repository || e.Binding != "git" {
			t.Errorf("%+v", e)
		}
	}
	for what, refusal := range map[string]*Refusal{
		"it is there":            ask("git.test", "/private/r.git"+refs, 200),
		"of the credential":      ask("git.test", "/o/r.git"+refs, 401),
		"of the other":           ask("git.test", "/two/r.git"+refs, 404),
		"another host":           ask("else.test", "/private/r.git"+refs, 401),
		"not git's protocol":     ask("git.test", "/private/r", 401),
		"something of their own": ask("git.test", "/private/r.git"+refs, 401, "Authorization"),
	} {
		if refusal != nil {
			t.Errorf("%s: %v", what, refusal)
		}
	}
}
