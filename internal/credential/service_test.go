package credential

import (
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
