package credential

import (
	"errors"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
)

func host(id string) string { return id + ".broker.test" }

func TestServices(t *testing.T) {
	for _, name := range Services() {
		s := newRig().open(t, Binding{ID: "b", Service: name, Secret: "secret:token", Endpoint: true, URL: "OWN_URL"})
		env := s.Env(host)
		for _, variable := range append(services[name].urls, "OWN_URL") {
			if want := "http://b.broker.test" + services[name].base; env[variable] != want {
				t.Errorf("%s: %s is %q", name, variable, env[variable])
			}
		}
		if name == "pypi" && env["PIP_TRUSTED_HOST"] != "b.broker.test" {
			t.Error(env)
		}
		plain := newRig().open(t, Binding{ID: "b", Service: name, Secret: "secret:token"}).Env(host)
		for _, value := range plain {
			if strings.Contains(value, "broker.test") {
				t.Errorf("%s without an endpoint: %v", name, plain)
			}
		}
	}
}

// git asks by HTTPS where a URL says SSH.
func TestGitRewrites(t *testing.T) {
	s := newRig().open(t, Binding{ID: "git", Kind: Git, Secret: "secret:token", Hosts: []string{"git.test"}, Git: &Rules{Repositories: []string{"acme/app"}}})
	for from, want := range map[string]string{
		"git@git.test:acme/app.git":       "https://git.test/acme/app.git",
		"ssh://git@git.test/acme/app.git": "https://git.test/acme/app.git",
		"ssh://git.test/acme/app":         "https://git.test/acme/app",
		"git@other.test:acme/app.git":     "git@other.test:acme/app.git",
	} {
		command := exec.CommandContext(t.Context(), "git", "ls-remote", "--get-url", from)
		command.Dir = t.TempDir()
		command.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + command.Dir, "GIT_CONFIG_NOSYSTEM=1"}
		for name, value := range s.Env(host) {
			command.Env = append(command.Env, name+"="+value)
		}
		out, err := command.CombinedOutput()
		if got := strings.TrimSpace(string(out)); err != nil || got != want {
			t.Errorf("%s is %s, %v", from, got, err)
		}
	}
}

// Rules for git hold GitHub's API too: the token writes by it what git pushes.
func TestGitHubAPI(t *testing.T) {
	rig := newRig()
	s := rig.open(t, Binding{ID: "gh", Service: "github", Secret: "secret:token", Git: &Rules{Repositories: []string{"acme/app", "acme/lib-*"}, Push: []string{"refs/heads/agent/*"}}})
	f := Flow{"api.github.com", 443, "api.github.com"}
	const sent = "sent"
	for call, want := range map[string]Reason{
		"GET /repos/acme/app":                      sent,
		"GET /repos/acme/lib-a/contents/x":         sent,
		"HEAD /repos/acme/app/git/refs/heads/main": sent,
		"GET /user":                                           sent,
		"GET /rate_limit":                                     sent,
		"POST /repos/acme/app/issues":                         sent,
		"PATCH /repos/acme/app/issues/1":                      sent,
		"POST /repos/acme/app/issues/1/comments":              sent,
		"POST /repos/acme/app/pulls":                          sent,
		"PATCH /repos/acme/app/pulls/1":                       sent,
		"POST /repos/acme/app/pulls/1/reviews":                sent,
		"POST /repos/acme/app/statuses/abc":                   sent,
		"PATCH /repos/victim/other/git/refs/heads/main":       Repository,
		"PUT /repos/victim/other/contents/x":                  Repository,
		"POST /repos/victim/other/issues":                     Repository,
		"POST /repos/acme/application/issues":                 Repository,
		"POST /repositories/1/issues":                         Repository,
		"POST /user/repos":                                    Repository,
		"DELETE /user":                                        Repository,
		"POST /graphql":                                       Repository,
		"PATCH /repos/acme/app":                               Ref,
		"DELETE /repos/acme/app":                              Ref,
		"PATCH /repos/acme/app/git/refs/heads/main":           Ref,
		"POST /repos/acme/app/git/refs":                       Ref,
		"PUT /repos/acme/app/contents/.github/workflows/x":    Ref,
		"DELETE /repos/acme/app/contents/x":                   Ref,
		"POST /repos/acme/app/merges":                         Ref,
		"PUT /repos/acme/app/pulls/1/merge":                   Ref,
		"PUT /repos/acme/app/pulls/1/update-branch":           Ref,
		"POST /repos/acme/app/keys":                           Ref,
		"POST /repos/acme/app/releases":                       Ref,
		"PUT /repos/acme/app/collaborators/me":                Ref,
		"POST /repos/acme/app/actions/workflows/x/dispatches": Ref,
		"POST /repos/acme/app/issuesx":                        Ref,
		"POST /repos/acme/app/issues/../git/refs":             Slot,
		"POST /repos/acme/app/issues/%2e%2e/git/refs":         Slot,
		"POST /repos/acme/app%2f..%2fother/issues":            Slot,
		"GET /repos/victim/other":                             "",
		"GET /orgs/acme":                                      "",
	} {
		method, target, _ := strings.Cut(call, " ")
		out := request(t, method, "https://api.github.com"+target, "")
		_, err := s.Attach(f, out)
		has := out.Header.Get("Authorization") == "Bearer "+tokenSecret
		var refusal *Refusal
		switch {
		case want == sent || want == "":
			if err != nil || has != (want == sent) {
				t.Errorf("%s: the secret is sent: %v, %v", call, has, err)
			}
		case !errors.As(err, &refusal) || refusal.Reason != want || has:
			t.Errorf("%s: %v, want %s", call, err, want)
		}
	}
	for name, change := range map[string]func(out *http.Request){
		"a read with a key":  func(out *http.Request) { out.Header.Set("Authorization", "Bearer x") },
		"an override":        func(out *http.Request) { out.URL.Path = "/user"; out.Header.Set("X-Http-Method-Override", "DELETE") },
		"another's override": func(out *http.Request) { out.URL.Path = "/user"; out.Header.Set("X_HTTP_Method", "DELETE") },
	} {
		out := request(t, "GET", "https://api.github.com/repos/victim/other", "")
		change(out)
		if _, err := s.Attach(f, out); err == nil || strings.Contains(out.Header.Get("Authorization"), tokenSecret) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if env := s.Env(host); env["GIT_CONFIG_COUNT"] != "" {
		t.Errorf("the API is taken for a place of repositories: %v", env)
	}
}
